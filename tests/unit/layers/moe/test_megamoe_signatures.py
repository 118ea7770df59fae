"""The stand-in, and what the adapter calls, beside the real FlashInfer 0.7.4, read without running it."""

import ast
import inspect

import megamoe_stand_in
import pytest
from flashinfer_wheels import syntax_trees

from sglang_overlay.srt.layers.moe import flashinfer_megamoe

KERNEL = flashinfer_megamoe.KERNEL_FILE.removesuffix("config.py")
# file below the flashinfer package -> what is there, by the name flashinfer.moe_ep gives it
CLASSES = {
    "moe_ep/config.py": ["BootstrapConfig", "FleetParams"],
    "moe_ep/modes/config.py": ["MegaConfig"],
    "moe_ep/tensors.py": ["MoEEpTensors"],
    "moe_ep/weights.py": ["PrequantizedMoEWeights"],
    flashinfer_megamoe.KERNEL_FILE: [flashinfer_megamoe.CONFIG],
}
METHODS = ["__init__", "create_workspace", "warmup", "forward"]


@pytest.fixture(scope="module")
def source():
    """``file -> its syntax tree`` of the real package."""
    files = [*CLASSES, f"{KERNEL}weights.py", "moe_ep/modes/mega_layer.py", "moe_ep/__init__.py"]
    return syntax_trees(flashinfer_megamoe.KERNEL_SINCE, files)


def named(tree, name):
    (found,) = [node for node in ast.walk(tree) if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name]
    return found


def fields(cls):
    """``{field: whether it has a default}`` of a dataclass, those given by keyword only at the end, as its constructor has them."""
    positional, keyword_only = {}, {}
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation):
            by_keyword = node.value is not None and "kw_only=True" in ast.unparse(node.value)
            (keyword_only if by_keyword else positional)[node.target.id] = node.value is not None
    return {**positional, **keyword_only}


def parameters(function):
    arguments = function.args
    assert not (arguments.posonlyargs or arguments.vararg or arguments.kwarg)
    first_default = len(arguments.args) - len(arguments.defaults)
    plain = {argument.arg: place >= first_default for place, argument in enumerate(arguments.args)}
    return {**plain, **{argument.arg: default is not None for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults)}}


def ours(function):
    return {name: parameter.default is not parameter.empty for name, parameter in inspect.signature(function).parameters.items()}


@pytest.mark.parametrize("file, name", [(file, name) for file, names in CLASSES.items() for name in names])
def test_the_stand_ins_dataclasses_have_the_real_fields(source, file, name):
    assert list(ours(getattr(megamoe_stand_in, name)).items()) == list(fields(named(source[file], name)).items())


@pytest.mark.parametrize("name", METHODS)
def test_the_stand_ins_layer_has_the_real_methods(source, name):
    layer = named(source["moe_ep/modes/mega_layer.py"], "MoEEpMegaLayer")
    assert list(ours(getattr(megamoe_stand_in.MoEEpMegaLayer, name)).items()) == list(parameters(named(layer, name)).items())


def test_the_stand_in_prepares_weights_with_the_real_parameters(source):
    real = parameters(named(source[f"{KERNEL}weights.py"], "preprocess_mega_weights"))
    assert list(ours(getattr(megamoe_stand_in, flashinfer_megamoe.PREPROCESS)).items()) == list(real.items())


def test_moe_ep_exports_what_the_adapter_takes_from_it(source):
    exported = {alias.asname or alias.name for node in ast.walk(source["moe_ep/__init__.py"]) if isinstance(node, ast.ImportFrom) for alias in node.names}
    adapter = ast.parse(inspect.getsource(flashinfer_megamoe))
    taken = {node.attr for node in ast.walk(adapter) if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("moe_ep")}
    assert taken >= {"BootstrapConfig", "MoEEpMegaLayer"}
    assert taken | {flashinfer_megamoe.CONFIG, flashinfer_megamoe.PREPROCESS} <= exported


def test_every_call_of_the_adapter_names_real_parameters(source):
    real = {name: set(fields(named(source[file], name))) for file, names in CLASSES.items() for name in names}
    layer = named(source["moe_ep/modes/mega_layer.py"], "MoEEpMegaLayer")
    real |= {"MoEEpMegaLayer": set(parameters(named(layer, "__init__"))), "forward": set(parameters(named(layer, "forward"))),
             "warmup": set(parameters(named(layer, "warmup")))}
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(flashinfer_megamoe))) if isinstance(node, ast.Call)]
    seen = set()
    for call in calls:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else flashinfer_megamoe.CONFIG if "CONFIG" in ast.unparse(call.func) else None
        if name in real:
            seen.add(name)
            assert {keyword.arg for keyword in call.keywords if keyword.arg} <= real[name], name
    assert seen == set(real)


def test_the_limit_the_adapter_always_gives_would_be_ten_if_left_out(source):
    (clamp,) = [node for node in named(source[flashinfer_megamoe.KERNEL_FILE], flashinfer_megamoe.CONFIG).body
                if isinstance(node, ast.AnnAssign) and node.target.id == "gate_up_clamp"]
    assert ast.unparse(clamp.value) == "10.0"


def test_a_misspelt_field_would_be_seen(source):
    assert "num_tokens_per_rank" not in fields(named(source["moe_ep/config.py"], "FleetParams"))
