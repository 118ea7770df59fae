"""Bundles into the kernel that SGLang 0.5.23 has for a layer boundary, in real layers on 2 gloo ranks, the kernel stood in for."""

from pathlib import Path

import pytest
import torch

from cpu_serving import workers
from cpu_serving.checkpoint import Shape, make_checkpoint
from sglang_overlay.srt.layers import cutedsl
from sglang_overlay.srt.layers.moe.deferred_output import DeferredMoeOutput

BASE = "0.5.23"
WORKER = Path(__file__).with_name("boundary_worker.py")
# One rounding to bf16, in the 2-norm; and that of the weights, which the kernel takes in bf16 only, besides.
ROUNDING = 1.1 * 2**-9
CARRYING, LAST = [1, 2, 3], 4
ENABLE, FUSION = "SGLANG_ENABLE_MOE_DEFERRED_FINALIZE", "SGLANG_MOE_FINALIZE_FUSION"

# run -> the flags, what of SGLang's there is, the scenarios
RUNS = {
    "on": ({ENABLE: "1"}, "kernel", ["kernel_facts", "into_kernel", "kernel_exact"]),
    "off": ({ENABLE: "0"}, "kernel", ["kernel_facts"]),
    "auto": ({}, "kernel", ["kernel_facts"]),
    "another way": ({ENABLE: "1", FUSION: "eager"}, "kernel", ["kernel_facts", "into_kernel"]),
    "stock defers": ({ENABLE: "1"}, "stock", ["kernel_facts"]),
    "stock defers, off": ({ENABLE: "0"}, "stock", ["kernel_facts"]),
}


@pytest.fixture(scope="module")
def seen(overlay_tree_of, tmp_path_factory):
    """``run -> [what each rank saw]``."""
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("cutedsl") / "model", Shape(layers=5))
    folder = tmp_path_factory.mktemp("ranks")
    runs = {name: [spec_of(rank, name, checkpoint, folder) for rank in range(2)] for name in RUNS}
    workers.start(WORKER, overlay_tree_of(BASE), list(runs.values()), folder, (WORKER.parent / "moe",))
    return {name: [workers.what_it_saw(spec) for spec in specs] for name, specs in runs.items()}


def spec_of(rank, name, checkpoint, folder):
    flags, of_sglang, scenarios = RUNS[name]
    file = f"{name.replace(' ', '-')}-{rank}"
    return {
        "rank": rank, "sizes": {"tp": 2, "pp": 1, "ep": 1}, "scenarios": scenarios, "flags": {ENABLE: "", FUSION: "", **flags},
        "stand_ins": False, "cutedsl": of_sglang, "dtype": "bfloat16", "init_method": f"file://{folder / name}.rendezvous",
        "checkpoint": str(checkpoint), "out": str(folder / f"{file}.pt"), "log": str(folder / f"{file}.log"),
    }


def error(result, exact):
    return float((result.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("tokens", [1, 5])
def test_bundles_go_into_sglangs_kernel(seen, tokens):
    ranks = [rank["into_kernel"][tokens] for rank in seen["on"]]
    for rank in ranks:
        assert rank["taken"] == [tokens] * len(CARRYING)
        assert rank["counters"]["carried"] == {str(layer): 1 for layer in CARRYING}
        assert error(rank["deferred"], rank["stock"].double()) <= 2e-2
        assert torch.equal(rank["deferred"], ranks[0]["deferred"])


def test_a_forward_that_the_kernel_has_no_room_for_is_finalized_in_the_layer(seen):
    for rank in seen["on"]:
        over = rank["into_kernel"][6]
        assert over["taken"] == [] and over["counters"]["carried"] == {} and over["counters"]["ways"]["in_layer"] == 4
        assert error(over["deferred"], over["stock"].double()) <= 2e-2


@pytest.mark.parametrize("case", ["random", "sixths"])
def test_what_the_kernel_gives_is_two_roundings_away_from_float64(seen, case):
    """Masked pairs name row -7 and padding rows are NaN; the factor, 2.5, is in no weight yet."""
    for rank in seen["on"]:
        given = rank["kernel_exact"][case]
        assert given["kind"] == "MoeDeferredFinalize" and given["taken"] == [5]
        for out, exact in zip(given["out"], given["exact"], strict=True):
            assert error(out, exact) <= 2 * ROUNDING


@pytest.mark.parametrize("case, kind", [("longer rows", "BundleHandoff"), ("declined", "MoeDeferredFinalize")])
def test_what_the_kernel_does_not_take_is_finished_with_the_weights_as_they_are(seen, case, kind):
    for rank in seen["on"]:
        given = rank["kernel_exact"][case]
        assert given["kind"] == kind and given["taken"] == []
        for out, exact in zip(given["out"], given["exact"], strict=True):
            assert error(out, exact) <= 2 * ROUNDING


@pytest.mark.parametrize("run, told", [("on", CARRYING), ("off", []), ("auto", []), ("another way", [])])
def test_the_kernel_is_told_which_layers_hand_on(seen, run, told):
    assert [rank["kernel_facts"]["told"] for rank in seen[run]] == [told, told]


def test_a_way_asked_for_by_name_is_not_overruled(seen):
    for rank in seen["another way"]:
        facts, forward = rank["kernel_facts"], rank["into_kernel"][5]
        assert all(FUSION in reason for reason in facts["keeps_because"][:-1])
        assert forward["taken"] == [] and forward["counters"]["ways"]["in_layer"] == 4


@pytest.mark.parametrize("run", ["stock defers", "stock defers, off"])
def test_what_sglang_hands_on_itself_is_left_to_it(seen, run):
    for rank in seen[run]:
        facts = rank["kernel_facts"]
        assert facts["told"][-4:] == facts["stock_experts"] == facts["stock_defers"] == [*CARRYING, LAST]
        assert facts["enable"] == RUNS[run][0][ENABLE]


def bundle(**changed):
    fields = dict(
        gemm2_out=torch.ones(8, 16).bfloat16(), expanded_idx_to_permuted_idx=torch.zeros(2, 3, dtype=torch.int32),
        expert_weights=torch.ones(2, 3), num_tokens=2, top_k=3, hidden=16, shared_output=torch.ones(2, 16).bfloat16(),
    )
    return DeferredMoeOutput(**{**fields, **changed})


@pytest.mark.parametrize(
    "changed, named",
    [({}, ""), ({"gemm2_out": torch.ones(8, 16)}, "float32"), ({"gemm2_out": torch.ones(8, 32).bfloat16()}, "(32, 1)"),
     ({"shared_output": None}, "shared expert"), ({"shared_output": torch.ones(2, 16)}, "shared expert")],
)
def test_a_bundle_that_the_kernel_would_refuse_is_named(changed, named):
    reason = cutedsl.unmet(bundle(**changed))
    assert bool(reason) == bool(named) and named in reason
