"""The TRT-LLM producers through SGLang's own call sites, on a CPU with the kernels stood in for (cases C1 to C5)."""

from pathlib import Path

import pytest
import torch

from cpu_serving import trees, workers
from sglang_overlay.srt.layers.moe.deferred_output import DeferredMoeOutput, finalize

HERE = Path(__file__).parent
FACTOR = 1.5
BF16_ROUNDING = 2.0**-8  # half a unit in the last of bf16's 8 significant bits
LOGITS, ROUTED = ["nvfp4", "fp8"], ["nvfp4_routed", "fp8_routed", "mxfp4"]
CONFIGURATIONS = LOGITS + ROUTED
DEFERRED = ["forwards", "bundle", "one_expert", "more_rows", "carried", "mutations", "unfit_routing", "unused_output"]
ENABLE = "SGLANG_ENABLE_MOE_DEFERRED_FINALIZE"
REASONS = {
    "FP8 with one scale per tensor": {"configuration": "fp8", "per_tensor": True, "set": {}},
    "MXFP8 experts": {"configuration": "fp8", "set": {"quant_method.use_mxfp8": True}},
    "activation gelu": {"configuration": "nvfp4", "activation": "gelu"},
    "routing inside the kernel": {"configuration": "fp8", "routing_method": 1},
    "a padded hidden size": {"configuration": "mxfp4", "set": {"experts.hidden_size_unpadded": 250}},
}

ON = {"flag": "1", "as_if_on_cuda": True}
EXPLAINED = {
    **REASONS,
    "the shared expert is replicated": {"configuration": "mxfp4", "set": {"moe._shared_expert_tp1": True}},
    "standard routing, where the configuration takes bypassed": {"configuration": "nvfp4", "standard_routing": True},
    "could not be looked at: AttributeError": {"configuration": "nvfp4", "set": {"experts.moe_runner_config": None}},
}

# name of a run -> what its worker is told
PATCHED = {
    **{name: {"configuration": name, **ON, "scenarios": DEFERRED} for name in CONFIGURATIONS},
    **{
        f"{name}_second_half": {"configuration": name, **ON, "scenarios": ["forwards"], "ep_rank": 1}
        for name in ("nvfp4", "fp8_routed", "mxfp4")
    },
    **{
        f"{name}_old_flashinfer": {"configuration": name, **ON, "scenarios": ["forwards"], "flashinfer": "0.6.14"}
        for name in LOGITS
    },
    "mxfp4_factor_left": {
        "configuration": "mxfp4", **ON, "scenarios": ["forwards", "bundle", "one_expert"], "factor_left_to_finalize": True,
    },
    **{reason: {**told, **ON, "scenarios": ["reason"]} for reason, told in REASONS.items()},
    **{
        f"explained {reason}": {**told, **ON, "flag": None, "scenarios": ["explained"]}
        for reason, told in {"": {"configuration": "fp8"}, **EXPLAINED}.items()
    },
    "silent": {"configuration": "fp8", "flag": "0", "scenarios": ["explained"]},
}
OFF = {
    f"{name}_{flag}": {"configuration": name, "flag": flag, "scenarios": ["forwards"]}
    for name in CONFIGURATIONS
    for flag in ("0", None)
}


def run_worker(tree, runs, folder):
    """Run the worker on a tree; return ``name -> what the run saw``."""
    return workers.run_each(HERE / "trtllm_worker.py", tree, runs, folder, (HERE,))


@pytest.fixture(scope="module", params=trees.BASES)
def base(request):
    return request.param


@pytest.fixture(scope="module")
def seen(base, overlay_tree_of, tmp_path_factory):
    return run_worker(overlay_tree_of(base), {**PATCHED, **OFF}, tmp_path_factory.mktemp("patched"))


@pytest.fixture(scope="module")
def stock(base, tmp_path_factory):
    return run_worker(trees.stock_tree(base), OFF, tmp_path_factory.mktemp("stock"))


def reference(forward):
    """``(result, sum of magnitudes)`` in float64: factor times the weighted rows, plus the shared expert."""
    weighted, shared = FACTOR * forward["rows"] * forward["weights"][..., None], forward["shared"].double()
    return weighted.sum(1) + shared, weighted.abs().sum(1) + shared.abs()


def is_one_rounding_away(out, forward):
    """Whether each element is within one bf16 rounding, and fp32's accumulation error, of float64."""
    wanted, magnitude = reference(forward)
    return bool(((out.double() - wanted).abs() <= BF16_ROUNDING * wanted.abs() + 1e-6 * magnitude).all())


DEFERRING_RUNS = [name for name, told in PATCHED.items() if "forwards" in told["scenarios"]]


@pytest.mark.parametrize("way", ["plain", "dual"])
@pytest.mark.parametrize("run", DEFERRING_RUNS)
def test_each_configuration_is_one_rounding_away_from_float64(seen, run, way):
    for forward in seen[run]["forwards"].values():
        assert [(call["do_finalize"], call["output"]) for call in forward[way]["calls"]] == [(False, False)]
        assert is_one_rounding_away(forward[way]["out"], forward)


@pytest.mark.parametrize("run", [*CONFIGURATIONS, "mxfp4_factor_left"])
def test_c5_the_factor_is_applied_once(seen, run):
    case = seen[run]["one_expert"]
    assert torch.equal(case["out"], (FACTOR * case["row"]).bfloat16())


@pytest.mark.parametrize("run", [*CONFIGURATIONS, "mxfp4_factor_left"])
def test_the_bundle_is_what_the_table_says(seen, run):
    fields, scale = (seen[run]["bundle"][name] for name in ("bundle", "scale"))
    assert fields["expert_weights"].dtype == (torch.bfloat16 if run in LOGITS else torch.float32)
    assert fields["expanded_idx_to_permuted_idx"].shape == (5, 3)
    assert scale == ("kernel" if run in LOGITS else "top-k")
    assert fields["routed_scaling_factor"] == (FACTOR if run == "mxfp4_factor_left" else 1.0)
    assert fields["gemm2_out"].shape[0] > 15 and fields["gemm2_out"].isnan().any()


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_rows_beyond_the_tokens_are_not_taken(seen, name):
    assert torch.equal(seen[name]["more_rows"], seen[name]["forwards"][5]["plain"]["out"])


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_routing_format_follows_from_the_configuration(seen, name):
    reasons = seen[name]["unfit_routing"]
    taken = "bypassed" if name in LOGITS else "standard"
    assert reasons.pop(taken) == ""
    ((other, reason),) = reasons.items()
    assert other in reason and taken in reason


@pytest.mark.parametrize("name", ROUTED)
def test_fp32_weights_are_closer_than_packed_bf16_ones(seen, name, record_property):
    """Weights of 1/6, 1/3, 1/2 …: relative error in the 2-norm before and after the output's rounding."""
    case = seen[name]["bundle"]
    # The factor is in the weights of these configurations.
    wanted = (FACTOR * case["rows"] * case["weights"][..., None]).sum(1)
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        fields = {**case["bundle"], "expert_weights": case["bundle"]["expert_weights"].to(dtype)}
        after = finalize(DeferredMoeOutput(**fields))
        before = finalize(DeferredMoeOutput(**{**fields, "gemm2_out": fields["gemm2_out"].float()}))
        errors[dtype] = [((out.double() - wanted).norm() / wanted.norm()).item() for out in (before, after)]
    (fp32_before, fp32_after), (bf16_before, bf16_after) = errors.values()
    figure = f"{name}: fp32 {fp32_before:.1e} -> {fp32_after:.2e} rounded, bf16 {bf16_before:.1e} -> {bf16_after:.2e} rounded"
    record_property("relative_error", figure)
    print(figure)
    assert fp32_before < 1e-6 and bf16_before > 1e-4 and fp32_after < bf16_after


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_dual_stream_forward_hands_its_bundle_on(seen, name):
    case = seen[name]["carried"]
    assert case["is_bundle"] and torch.equal(case["finalized"], case["in_layer"])
    assert case["stock_gives_way"] and case["stock_over_budget"]


@pytest.mark.parametrize("mutation", ["none", "reinterpreted", "scaled_twice", "scaled_never"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_fault_put_in_shows(seen, name, mutation):
    out, forward = seen[name]["mutations"][mutation], seen[name]["forwards"][5]
    harmless = mutation == "none" or (mutation == "reinterpreted" and name in LOGITS)
    assert is_one_rounding_away(out, forward) == harmless


@pytest.mark.parametrize("reason", REASONS)
def test_what_is_not_deferred_says_why(seen, reason):
    assert reason in seen[reason]["reason"]


@pytest.mark.parametrize("run", OFF)
def test_off_is_the_stock_release_bit_for_bit(seen, stock, run):
    for tokens, forward in stock[run]["forwards"].items():
        for way in ("plain", "dual"):
            ours = seen[run]["forwards"][tokens][way]
            assert torch.equal(ours["out"], forward[way]["out"]) and ours["calls"] == forward[way]["calls"]
            # NVFP4's own deferral is on unless it is switched off.
            stock_deferral = run == "nvfp4_None" and way == "dual"
            assert ours["calls"][0]["do_finalize"] is not stock_deferral


def test_auto_says_once_that_it_leaves_all_to_the_stock_release(seen):
    (line,) = seen["explained "]["logged"]
    assert "off (auto): not measured faster than stock here" in line and f"{ENABLE}=1" in line


@pytest.mark.parametrize("reason", EXPLAINED)
def test_auto_says_once_why_a_configuration_would_not_defer_either(seen, reason):
    off, why = seen[f"explained {reason}"]["logged"]
    assert "off (auto)" in off and f"not deferred with {ENABLE}=1 either: " in why and reason in why


def test_switched_off_it_says_nothing(seen):
    assert [seen[run]["logged"] for run in ("silent", *(f"{name}_0" for name in CONFIGURATIONS))] == [[]] * 6


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_what_defers_is_logged_once(seen, name):
    """Though some forwards of this run are not deferred: they are over the budget, or their routing is of another format."""
    (line,) = seen[name]["logged"]
    assert line.startswith("MoE deferred finalize: deferred by ")


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_deferred_forward_makes_no_output_to_finalize_into(seen, name):
    assert (5, 256) not in seen[name]["unused_output"]
