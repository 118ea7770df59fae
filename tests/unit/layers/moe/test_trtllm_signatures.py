"""The TRT-LLM call sites and the stand-in beside the functions of the real FlashInfer 0.6.18, all of them read without running."""

import ast
import inspect
import zipfile

import pytest
import trtllm_stand_in

from overlay_apply.bases import Release
from overlay_apply.fetch import fetch_wheel
from overlay_apply.project import here

FLASHINFER = Release(
    version="0.6.18",
    file="flashinfer_python-0.6.18-py3-none-any.whl",
    sha256="d5d26edb48f8def0bf28b2c94415aef7f0754e2cd9e3cb3d6e7081262d068aad",
    python="3.11",
    platform="manylinux_2_34_x86_64",
    project="flashinfer-python",
)
FP8_WRAPPERS = {
    "trtllm_fp8_block_scale_moe_out_wrapper": "trtllm_fp8_block_scale_moe",
    "trtllm_fp8_block_scale_routed_moe_out_wrapper": "trtllm_fp8_block_scale_routed_moe",
}
NAMES = [function.__name__ for function in trtllm_stand_in.FUNCTIONS]

# file below the sglang package -> the function it is called in -> what it calls
CALL_SITES = {
    ("srt/layers/moe/moe_runner/flashinfer_trtllm.py", "fused_experts_none_to_flashinfer_trtllm_fp4"): [
        "trtllm_fp4_block_scale_moe", "trtllm_fp4_block_scale_routed_moe",
    ],
    ("srt/layers/moe/moe_runner/flashinfer_trtllm.py", "fused_experts_none_to_flashinfer_trtllm_fp8"): [
        "trtllm_fp8_block_scale_moe", *FP8_WRAPPERS,
    ],
    ("srt/layers/moe/flashinfer_trtllm_moe.py", "trtllm_fp8_block_scale_moe_out_wrapper"): ["trtllm_fp8_block_scale_moe"],
    ("srt/layers/moe/flashinfer_trtllm_moe.py", "trtllm_fp8_block_scale_routed_moe_out_wrapper"): [
        "trtllm_fp8_block_scale_routed_moe",
    ],
    ("srt/layers/quantization/mxfp4_flashinfer_trtllm_moe.py", "apply"): ["trtllm_fp4_block_scale_routed_moe"],
}
CALLS = [(*site, callee) for site, callees in CALL_SITES.items() for callee in callees]


@pytest.fixture(scope="module")
def real():
    """``name -> {parameter: whether it has a default}`` of the real functions, in their order."""
    with zipfile.ZipFile(fetch_wheel(here(), FLASHINFER)) as wheel:
        tree = ast.parse(wheel.read("flashinfer/fused_moe/core.py"))
    return {node.name: parameters(node) for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in NAMES}


def parameters(function):
    arguments = function.args
    assert not (arguments.posonlyargs or arguments.kwonlyargs or arguments.vararg or arguments.kwarg)
    first_default = len(arguments.args) - len(arguments.defaults)
    return {argument.arg: place >= first_default for place, argument in enumerate(arguments.args)}


def keywords(call, function):
    """The keyword names of a call, those of a ``**name`` from how the function around it builds ``name``."""
    names = set()
    for keyword in call.keywords:
        names |= {keyword.arg} if keyword.arg else keys_of(keyword.value.id, function)
    return names


def keys_of(name, function):
    """The string keys that a function puts into its dict ``name``."""
    keys = set()
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign):
            continue
        (target,), value = node.targets, node.value
        if isinstance(target, ast.Subscript) and ast.unparse(target.value) == name:
            keys.add(target.slice.value)
        elif isinstance(target, ast.Name) and target.id == name and isinstance(value, ast.Dict):
            keys |= {key.value for key in value.keys}
        elif isinstance(target, ast.Name) and target.id == name and ast.unparse(value.func) == "dict":
            keys |= keywords(value, function)
    return keys


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
    signature = inspect.signature(getattr(trtllm_stand_in, name))
    ours = {parameter.name: parameter.default is not parameter.empty for parameter in signature.parameters.values()}
    assert list(ours.items()) == list(real[name].items())


@pytest.mark.parametrize("file, function, callee", CALLS)
def test_each_call_site_names_real_parameters(real, overlay_tree, file, function, callee):
    has_default = real[FP8_WRAPPERS.get(callee, callee)]
    # The wrappers take ids and weights apart, and pass them on as one argument.
    apart = {"topk_weights"} if callee in FP8_WRAPPERS else set()
    calls = calls_in(overlay_tree, file, function, callee)
    assert calls
    for names, _ in calls:
        assert names - apart <= set(has_default)
        assert {name for name, optional in has_default.items() if not optional} <= names


def test_the_overlay_reaches_every_call_that_only_finalizes(overlay_tree):
    through_seam = {callee for site in CALLS for _, seam in calls_in(overlay_tree, *site) if seam for callee in [site[2]]}
    assert through_seam == {"trtllm_fp4_block_scale_routed_moe", "trtllm_fp8_block_scale_routed_moe_out_wrapper"}


def test_the_fp8_seam_hands_on_what_the_wrapper_would(real, overlay_tree):
    """Its own keywords and those it leaves alone, together, are the real function's."""
    file = "sglang_overlay/srt/layers/moe/moe_runner/flashinfer_trtllm.py"
    ((own, _),) = calls_in(overlay_tree, file, "deferring_fp8_routed", "trtllm_fp8_block_scale_routed_moe")
    site = CALLS[[callee for *_, callee in CALLS].index("trtllm_fp8_block_scale_routed_moe_out_wrapper")]
    ((given, _),) = calls_in(overlay_tree, *site)
    changed = {"topk_ids", "topk_weights", "output", "fp8_quantization_type", "activation_type"}
    assert (given - changed) | own <= set(real["trtllm_fp8_block_scale_routed_moe"])
    assert "output" not in own and "do_finalize" in own


def test_a_misspelt_keyword_would_be_seen(real):
    call = ast.parse("f(topk_id=1)").body[0].value
    assert not keywords(call, None) <= set(real["trtllm_fp8_block_scale_routed_moe"])
