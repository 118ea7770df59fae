"""Power-of-two activation scales in SGLang's own MoE code, patched and stock, on a CPU: who gets them, and who does not."""

from pathlib import Path

import fp8_moe
import pytest
import torch

from cpu_serving import trees, workers

HERE = Path(__file__).parent
PATHS = ["fused", "inplace", "core", "lora", "uncombined"]
STOCK_PATHS = ["fused", "inplace", "core", "lora"]
GATE_UP_DELTA, DOWN_DELTA = 0.25, 0.125

# name of a run -> what its worker is told
FORWARDS = {
    f"{configuration} {flag} {path}": {"scenario": "forward", "configuration": configuration, "flag": flag, "path": path}
    for configuration, flag in [("declared", None), ("declared", "off"), ("undeclared", None), ("undeclared", "on")]
    for path in PATHS
}
OTHERS = {
    f"{configuration} {flag} {path}": {"scenario": "forward", "configuration": configuration, "flag": flag, "path": path}
    for configuration, flag in [("int8", None), ("unquantised", None)]
    for path in ("fused", "core")
}
CHOICES = {
    f"choice {configuration} {flag} {runner}": {
        "scenario": "choice", "configuration": configuration, "flag": flag, "path": "fused", "runner": runner,
    }
    for configuration, flag, runner in [
        ("declared", None, "triton"), ("declared", "auto", "triton"), ("declared", "on", "triton"), ("declared", "off", "triton"),
        ("undeclared", "auto", "triton"), ("undeclared", "on", "triton"), ("declared", "on", "deep_gemm"), ("declared", None, "deep_gemm"),
        ("per tensor", None, "triton"), ("per tensor", "on", "triton"), ("unquantised", "on", "triton"), ("int8", "on", "triton"),
        ("unquantised", None, "triton"), ("declared", "maybe", "triton"), ("mxfp8", None, "triton"), ("mxfp8", "on", "triton"),
    ]
}
REST = {
    "fp4": {"scenario": "fp4", "configuration": "fp4", "flag": None, "path": "fused", "runner": "auto"},
    "once declared": {"scenario": "quant_once", "configuration": "declared", "flag": None, "path": "fused"},
    "once off": {"scenario": "quant_once", "configuration": "declared", "flag": "off", "path": "fused"},
    "once undeclared": {"scenario": "quant_once", "configuration": "undeclared", "flag": None, "path": "fused"},
    **{f"compiled {configuration} {path}": {"scenario": "compiled", "configuration": configuration, "flag": None, "path": path}
       for configuration in ("declared", "undeclared") for path in ("fused", "inplace")},
    "schemas": {"scenario": "schemas", "configuration": "declared", "flag": None, "path": "fused"},
}
# What a release newer than 0.5.20 does: quantise the second GEMM's input ahead of its call where that loads by TMA.
AHEAD = {
    f"ahead {configuration}": {"scenario": "ahead", "configuration": configuration, "flag": None, "path": "uncombined"}
    for configuration in ("declared", "undeclared")
}
STOCK = {
    f"{configuration} {path}": {"scenario": "forward", "configuration": configuration, "flag": None, "path": path}
    for configuration in ("declared", "undeclared")
    for path in STOCK_PATHS
} | {f"{configuration} {path}": {"scenario": "forward", "configuration": configuration, "flag": None, "path": path}
     for configuration in ("int8", "unquantised") for path in ("fused", "core")}


def run_worker(tree, runs, folder):
    """Run the worker on a tree; return ``name -> what the run saw``."""
    return workers.run_each(HERE / "ue8m0_worker.py", tree, runs, folder, (trees.ROOT / "tests" / "oracles", HERE))


@pytest.fixture(scope="module", params=trees.BASES)
def base(request):
    return request.param


@pytest.fixture(scope="module")
def seen(base, overlay_tree_of, tmp_path_factory):
    newer = AHEAD if base != trees.BASE else {}
    return run_worker(overlay_tree_of(base), {**FORWARDS, **OTHERS, **CHOICES, **REST, **newer}, tmp_path_factory.mktemp("patched"))


@pytest.fixture(scope="module")
def alone(base, tmp_path_factory):
    """The same on a tree that has this feature and no other."""
    tree = trees.overlay_tree(tmp_path_factory.mktemp("alone") / "tree", base, "ue8m0-triton-moe")
    runs = {f"declared None {path}": FORWARDS[f"declared None {path}"] for path in STOCK_PATHS}
    return run_worker(tree, runs, tmp_path_factory.mktemp("alone_runs"))


@pytest.fixture(scope="module")
def stock(base, tmp_path_factory):
    return run_worker(trees.stock_tree(base), STOCK, tmp_path_factory.mktemp("stock"))


def oracle(run, path, scale_of):
    """What SGLang computes on a CPU, where the model code, not the runner, multiplies the routed scaling factor."""
    lora = path == "lora"
    return fp8_moe.moe(
        run["x"], run["w13_weight"], run["w2_weight"], run["ids"], run["weights"], scale_of, dtype=torch.bfloat16, gate_rounded=True,
        gate_up_delta=GATE_UP_DELTA * lora, down_delta=DOWN_DELTA * lora, combine=path != "uncombined",
    )


def all_powers_of_two(scale):
    return bool((torch.frexp(scale).mantissa == 0.5).all())


def same(run, other):
    """The same bits out, and the same bits and launch parameters in each GEMM."""
    return (
        torch.equal(run["out"], other["out"])
        and run["stock_quantised"] == other["stock_quantised"]
        and len(run["gemms"]) == len(other["gemms"])
        and all(
            gemm["meta"] == other_gemm["meta"]
            and torch.equal(bits(gemm["codes"]), bits(other_gemm["codes"]))
            and (gemm["scale"] is None) == (other_gemm["scale"] is None)
            and (gemm["scale"] is None or torch.equal(gemm["scale"], other_gemm["scale"]))
            for gemm, other_gemm in zip(run["gemms"], other["gemms"])
        )
    )


def bits(tensor):
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("who", ["declared None", "undeclared on"])
def test_both_gemms_get_power_of_two_scales_on_every_path(seen, who, path):
    run = seen[f"{who} {path}"]
    first, second = run["gemms"]
    codes, scale = fp8_moe.quantise(run["x"], 128, fp8_moe.power_of_two_scale)
    assert torch.equal(first["scale"].double(), scale) and torch.equal(first["codes"].double(), codes)
    assert second["scale"].shape == (15, 3) and all_powers_of_two(second["scale"])
    assert run["stock_quantised"] == []


@pytest.mark.parametrize("path", PATHS)
def test_the_whole_moe_is_the_oracles(seen, path):
    run = seen[f"declared None {path}"]
    reference = oracle(run, path, fp8_moe.power_of_two_scale)
    # bf16 is rounded to in the same places; what is left is the sum over k, rounded once.
    assert fp8_moe.relative_error(run["out"], reference) < 3e-3
    assert fp8_moe.relative_error(run["out"], oracle(run, path, fp8_moe.continuous_scale)) > 1e-2


@pytest.mark.parametrize("path", PATHS)
def test_power_of_two_scales_cost_no_accuracy_beyond_their_step(seen, path):
    exact = oracle(seen[f"declared None {path}"], path, None)
    powers, continuous = (fp8_moe.relative_error(seen[f"declared {flag} {path}"]["out"], exact) for flag in (None, "off"))
    expected = [fp8_moe.relative_error(oracle(seen[f"declared None {path}"], path, scale_of), exact)
                for scale_of in (fp8_moe.power_of_two_scale, fp8_moe.continuous_scale)]
    assert powers <= continuous + abs(expected[0] - expected[1]) + 2e-3
    assert powers < 0.06


@pytest.mark.parametrize("configuration, stock_calls", [("declared", 0), ("undeclared", 1)])
def test_activations_quantised_ahead_of_the_second_gemm(base, seen, configuration, stock_calls):
    """By the overlay's quantiser for experts with power-of-two scales, else by the stock one, told which rows are read."""
    if base == trees.BASE:
        pytest.skip("0.5.20 quantises within the call only")
    run = seen[f"ahead {configuration}"]
    first, second = run["gemms"]
    assert first["scale"] is None and second["codes"].dtype == torch.float8_e4m3fn
    assert second["scale"].shape == (*second["codes"].shape[:-1], 3) and second["codes"].shape[0] >= 15
    assert all_powers_of_two(second["scale"]) == (configuration == "declared") == first["scale_ue8m0"]
    assert [set(named) for *_, named in run["stock_quantised"]] == stock_calls * [
        {"sorted_token_ids", "num_tokens_post_padded", "num_valid_tokens"}]


@pytest.mark.parametrize("path", STOCK_PATHS)
@pytest.mark.parametrize("configuration, flag", [("declared", "off"), ("undeclared", None)])
def test_off_and_undeclared_are_stock_bit_for_bit(seen, stock, configuration, flag, path):
    run = seen[f"{configuration} {flag} {path}"]
    assert same(run, stock[f"{configuration} {path}"])
    assert [call[:3] for call in run["stock_quantised"]] == [((5, 256), 128, ()), ((15, 384), 128, ())]
    assert not all_powers_of_two(run["gemms"][0]["scale"]) and not all_powers_of_two(run["gemms"][1]["scale"])
    assert run["told"] is False


@pytest.mark.parametrize("flag", ["declared off", "undeclared None"])
def test_deferred_rows_of_off_and_undeclared_have_continuous_scales(seen, flag):
    run = seen[f"{flag} uncombined"]
    assert len(run["stock_quantised"]) == 2
    assert fp8_moe.relative_error(run["out"], oracle(run, "uncombined", fp8_moe.continuous_scale)) < 4e-3


@pytest.mark.parametrize("path", ["fused", "core"])
@pytest.mark.parametrize("configuration", ["int8", "unquantised"])
def test_other_quantisations_are_stock_bit_for_bit(seen, stock, configuration, path):
    assert same(seen[f"{configuration} None {path}"], stock[f"{configuration} {path}"])


@pytest.mark.parametrize(
    "run, told",
    [("declared None triton", True), ("declared auto triton", True), ("declared on triton", True), ("declared off triton", False),
     ("undeclared auto triton", False), ("undeclared on triton", True), ("per tensor None triton", False), ("mxfp8 None triton", False),
     ("unquantised None triton", False), ("declared None deep_gemm", True)],
)
def test_the_choice(seen, run, told):
    assert seen[f"choice {run}"] == {"told": told}


@pytest.mark.parametrize(
    "run, reason",
    [("per tensor", "FP8 without blocks"), ("unquantised", "not block-quantised FP8 (their quantisation method is UnquantizedFusedMoEMethod)"),
     ("int8", "not block-quantised FP8 (their quantisation method is BlockInt8MoEMethod)"), ("mxfp8", "MXFP8")],
)
def test_on_is_refused_where_it_cannot_be(seen, run, reason):
    refused = seen[f"choice {run} on triton"]["refused"]
    assert refused.startswith("Ue8m0Refused: SGLANG_MOE_TRITON_UE8M0=on: layer 0 cannot take power-of-two activation scales")
    assert reason in refused and "SGLANG_MOE_TRITON_UE8M0=auto" in refused


def test_on_is_refused_with_another_runner(seen):
    assert "its MoE runner is deep_gemm, not triton" in seen["choice declared on deep_gemm"]["refused"]


def test_an_unknown_value_stops_the_build(seen):
    assert seen["choice declared maybe triton"]["refused"] == (
        "FlagError: SGLANG_MOE_TRITON_UE8M0=maybe: valid values are: auto, on, off."
    )


def test_fp4_experts_converted_at_load_take_them(seen):
    assert seen["fp4"] == {"told": True, "dtype": torch.float8_e4m3fn, "block": [128, 128], "fp8": True}


def test_an_input_quantised_once_is_ineligible(seen):
    assert seen["once declared"] == {"eligible": False, "reason": "UE8M0 activation scales"}
    assert seen["once off"] == seen["once undeclared"] == {"eligible": True, "reason": "ok"}


def test_the_choice_is_in_the_custom_ops_schemas_and_comes_last(seen):
    found = seen["schemas"]
    assert all("bool scale_ue8m0=False" in schema for schema in found["ops"].values())
    assert all(parameters[-1] == "scale_ue8m0" for parameters in found["parameters"].values())


@pytest.mark.parametrize("path", ["fused", "inplace"])
@pytest.mark.parametrize("configuration", ["declared", "undeclared"])
def test_the_choice_is_part_of_a_compiled_graph(seen, configuration, path):
    run = seen[f"compiled {configuration} {path}"]
    assert run["same"] and run["choices"] == [configuration == "declared"]
    assert len(run["gemms"]) == 4
    assert all(all_powers_of_two(gemm["scale"]) == (configuration == "declared") for gemm in run["gemms"])


@pytest.mark.parametrize("path", STOCK_PATHS)
def test_the_feature_works_without_the_others(seen, alone, path):
    assert same(alone[f"declared None {path}"], seen[f"declared None {path}"])
