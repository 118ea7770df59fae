"""The TRT-LLM call sites and the stand-in beside the functions of the real FlashInfer, all of them read without running."""

import ast
import inspect

import pytest
import trtllm_stand_in
from flashinfer_wheels import OF_BASE, syntax_trees

FP8_WRAPPERS = {
    "trtllm_fp8_block_scale_moe_out_wrapper": "trtllm_fp8_block_scale_moe",
    "trtllm_fp8_block_scale_routed_moe_out_wrapper": "trtllm_fp8_block_scale_routed_moe",
}
NAMES = [function.__name__ for function in trtllm_stand_in.FUNCTIONS]

RUNNER, WRAPPERS = "srt/layers/moe/moe_runner/flashinfer_trtllm.py", "srt/layers/moe/flashinfer_trtllm_moe.py"
# file below the sglang package -> the function it is called in -> what it calls
CALL_SITES = {
    (RUNNER, "fused_experts_none_to_flashinfer_trtllm_fp4"): ["trtllm_fp4_block_scale_moe", "trtllm_fp4_block_scale_routed_moe"],
    (RUNNER, "fused_experts_none_to_flashinfer_trtllm_fp8"): ["trtllm_fp8_block_scale_moe", *FP8_WRAPPERS],
    (WRAPPERS, "trtllm_fp8_block_scale_moe_out_wrapper"): ["trtllm_fp8_block_scale_moe"],
    (WRAPPERS, "trtllm_fp8_block_scale_routed_moe_out_wrapper"): ["trtllm_fp8_block_scale_routed_moe"],
}
CALLS = [("0.5.20", *site, callee) for site, callees in CALL_SITES.items() for callee in callees]
# 0.5.23's MXFP4 method calls what it has in a variable: its keywords meet the stand-in's where it runs (test_trtllm_call_sites.py).
CALLS += [("0.5.23", *call) for _, *call in CALLS]
CALLS += [
    ("0.5.20", "srt/layers/quantization/mxfp4_flashinfer_trtllm_moe.py", "apply", "trtllm_fp4_block_scale_routed_moe"),
    ("0.5.23", RUNNER, "fused_experts_none_to_flashinfer_trtllm_fp8", "trtllm_fp8_block_scale_routed_moe"),
]
OF_0_5_20 = [call[1:] for call in CALLS if call[0] == "0.5.20"]


@pytest.fixture(scope="module")
def real():
    """``FlashInfer's version -> name -> {parameter: whether it has a default}`` of the real functions, in their order."""
    return {version: functions_of(version) for version in OF_BASE.values()}


def functions_of(version):
    tree = syntax_trees(version, ["fused_moe/core.py"])["fused_moe/core.py"]
    return {node.name: parameters(node) for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in NAMES}


def parameters(function):
    arguments = function.args
    assert not (arguments.posonlyargs or arguments.vararg or arguments.kwarg)
    first_default = len(arguments.args) - len(arguments.defaults)
    plain = {argument.arg: place >= first_default for place, argument in enumerate(arguments.args)}
    by_name_only = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {**plain, **{argument.arg: default is not None for argument, default in by_name_only}}


def keywords(call, function):
    """The keyword names of a call, those of a ``**name`` from how the function around it builds ``name`` before it."""
    names = set()
    for keyword in call.keywords:
        names |= {keyword.arg} if keyword.arg else keys_of(keyword.value.id, function, call.lineno)
    return names


def keys_of(name, function, line):
    """The string keys of a function's dict ``name`` at a line: those it was last made with, and what was put in since."""
    made, put = [(0, ast.Dict([], []))], []  # a ``**name`` of the function's own starts empty
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign) or node.lineno >= line:
            continue
        (target,), value = node.targets, node.value
        if isinstance(target, ast.Subscript) and ast.unparse(target.value) == name:
            put.append((node.lineno, target.slice.value))
        elif isinstance(target, ast.Name) and target.id == name:
            made.append((node.lineno, value))
    made_at, value = max(made, key=lambda entry: entry[0])
    keys = {key.value for key in value.keys} if isinstance(value, ast.Dict) else keywords(value, function)
    return keys | {key for put_at, key in put if put_at > made_at}


def callee_of(call):
    """The name a call reaches, through a seam of the overlay where there is one."""
    target = call.func
    if isinstance(target, ast.Call) and ast.unparse(target.func).startswith(("deferring", "adapting")):
        (target,) = target.args
    return target.id if isinstance(target, ast.Name) else None


def calls_in(tree, file, function_name, callee):
    """``(keyword names, whether it goes through a seam)`` of each call of ``callee`` in a function of a file."""
    module = ast.parse((tree / "sglang" / file).read_text())
    (function,) = [n for n in ast.walk(module) if isinstance(n, ast.FunctionDef) and n.name == function_name]
    calls = [n for n in ast.walk(function) if isinstance(n, ast.Call) and callee_of(n) == callee]
    assert all(not call.args for call in calls)
    return [(keywords(call, function), isinstance(call.func, ast.Call)) for call in calls]


@pytest.mark.parametrize("name", NAMES)
def test_the_stand_in_has_the_real_parameters(real, name):
    """All of 0.6.18's; of 0.7.2's all but some that have defaults, which no call names (below)."""
    signature = inspect.signature(getattr(trtllm_stand_in, name))
    ours = {parameter.name: parameter.default is not parameter.empty for parameter in signature.parameters.values()}
    assert list(ours.items()) == list(real["0.6.18"][name].items())
    newer = real["0.7.2"][name]
    assert list(ours.items()) == [(parameter, optional) for parameter, optional in newer.items() if parameter in ours]
    assert all(newer[parameter] for parameter in newer.keys() - ours.keys())


@pytest.mark.parametrize("base, file, function, callee", CALLS)
def test_each_call_site_names_real_parameters(real, overlay_tree_of, base, file, function, callee):
    has_default = real[OF_BASE[base]][FP8_WRAPPERS.get(callee, callee)]
    ours = inspect.signature(getattr(trtllm_stand_in, FP8_WRAPPERS.get(callee, callee))).parameters
    # The wrappers take ids and weights apart, and pass them on as one argument.
    apart = {"topk_weights"} if callee in FP8_WRAPPERS else set()
    calls = calls_in(overlay_tree_of(base), file, function, callee)
    assert calls
    for names, _ in calls:
        assert names - apart <= set(has_default) & set(ours)
        assert {name for name, optional in has_default.items() if not optional} <= names


def test_the_overlay_reaches_every_call_that_only_finalizes(overlay_tree):
    through_seam = {site[2] for site in OF_0_5_20 for _, seam in calls_in(overlay_tree, *site) if seam}
    assert through_seam == {"trtllm_fp4_block_scale_routed_moe", "trtllm_fp8_block_scale_routed_moe_out_wrapper"}


def test_where_each_kernel_is_called_without_finalize_there_is_no_seam(overlay_tree_of):
    sites = [site for base, *site in CALLS if base == "0.5.23"]
    calls = [(site[2], *call) for site in sites for call in calls_in(overlay_tree_of("0.5.23"), *site)]
    assert not any(seam for _, _, seam in calls)
    assert {callee for callee, names, _ in calls if "do_finalize" in names} == set(NAMES)


def test_the_fp8_seam_hands_on_what_the_wrapper_would(real, overlay_tree):
    """Its own keywords and those it leaves alone, together, are the real function's."""
    file = "sglang_overlay/srt/layers/moe/moe_runner/flashinfer_trtllm.py"
    ((own, _),) = calls_in(overlay_tree, file, "deferring_fp8_routed", "trtllm_fp8_block_scale_routed_moe")
    site = OF_0_5_20[[callee for *_, callee in OF_0_5_20].index("trtllm_fp8_block_scale_routed_moe_out_wrapper")]
    ((given, _),) = calls_in(overlay_tree, *site)
    changed = {"topk_ids", "topk_weights", "output", "fp8_quantization_type", "activation_type"}
    assert (given - changed) | own <= set(real["0.6.18"]["trtllm_fp8_block_scale_routed_moe"])
    assert "output" not in own and "do_finalize" in own


def test_a_misspelt_keyword_would_be_seen(real):
    call = ast.parse("f(topk_id=1)").body[0].value
    assert not keywords(call, None) <= set(real["0.6.18"]["trtllm_fp8_block_scale_routed_moe"])
