"""The layer boundary in real SGLang layers, on 1 to 4 gloo ranks (cases C4 to C9 and the guards)."""

import json
import socket
from pathlib import Path

import pytest
import torch

from cpu_serving import trees, workers
from cpu_serving.checkpoint import Shape, make_checkpoint

WORKER = Path(__file__).with_name("boundary_worker.py")
TOLERANCE = 2e-6
# One rounding to bf16, in the 2-norm.
ROUNDING = 1.1 * 2**-9
ENABLE, FUSION, POLICY = "SGLANG_ENABLE_MOE_DEFERRED_FINALIZE", "SGLANG_MOE_FINALIZE_FUSION", "SGLANG_MOE_FINALIZE_POLICY"
CARRYING, LAST = ["1", "2", "3"], "4"

# tp, pp, ep and, where it is not the plain one, a variant -> what its ranks go through. SGLang's own experts on a CPU know no expert parallelism, so there
# the deferred result is compared with that of one rank.
RUNS = {
    (1, 1, 1): ["forward", "decisions", "over_budget", "failed_forward", "declined", "capture",
                "wrapped_experts", "replaced_forward", "triton_producer"],
    (2, 1, 1): ["forward", "decisions", "declined", "capture", "eagle3_case"],
    (4, 1, 1): ["powers_of_two", "ones", "forward"],
    (2, 1, 2): ["deferred_only"],
    (4, 1, 2): ["hybrid"],
    (1, 2, 1): ["forward", "decisions"],
    (2, 1, 1, "fused"): ["made", "forward", "decisions", "declined", "capture", "eagle3_case", "over_plane", "over_budget",
                         "failed_forward", "two_models", "norms", "wrapped_experts", "misfits", "ways"],
    (4, 1, 1, "fused"): ["powers_of_two", "ones", "forward", "ways"],
    (2, 1, 2, "fused"): ["deferred_only"],
    (2, 2, 1, "fused"): ["forward", "decisions", "made"],
    (2, 1, 1, "flashinfer"): ["made", "eagle3_case", "forward", "misfits", "ways"],
    (4, 1, 1, "flashinfer"): ["powers_of_two", "ones", "forward", "ways"],
    (2, 1, 1, "table"): ["made", "forward", "not_carried"],
    (2, 1, 1, "table, flag at 1"): ["made", "forward"],
    (2, 1, 1, "off"): ["made", "forward"],
    (2, 1, 1, "plane fails, auto"): ["made", "forward"],
    (2, 1, 1, "plane fails"): [],
    (2, 1, 1, "workspace fails"): [],
    (2, 1, 1, "fp32 fused"): [],
    (2, 1, 1, "tables differ"): [],
    (2, 1, 1, "no table on rank 1"): [],
    (1, 1, 1, "fused"): ["made", "forward", "decisions", "declined", "capture", "over_plane", "over_budget", "failed_forward", "two_models",
                         "wrapped_experts", "misfits", "ways"],
    (1, 1, 1, "table"): ["made", "forward", "not_carried", "compiled"],
    (1, 2, 1, "table"): ["made", "forward"],
}

# What was "measured" with one rank and with two: the fused kernel is faster up to 4 tokens, and at 5 and more slower.
TABLE = {"version": 1, "entries": [{"arch": "cpu", "world_size": ranks, "hidden": 256, "source": "made up", "points": [
    {"tokens": 4, "stock_us": 9.0, "ways_us": {"fused": 4.0, "separate": 8.0}},
    {"tokens": 5, "stock_us": 9.0, "ways_us": {"fused": 10.0, "separate": 9.5}},
]} for ranks in (1, 2)]}

# variant -> the flags of its ranks, and what is different about them. A {rank} in a flag is the rank's.
VARIANTS = {
    "fused": {FUSION: "fused"},
    "flashinfer": {FUSION: "flashinfer"},
    "table": {ENABLE: "", POLICY: "{folder}/table.json"},
    "table, flag at 1": {POLICY: "{folder}/table.json"},
    "off": {ENABLE: "0", FUSION: "fused"},
    "plane fails, auto": {POLICY: "{folder}/table.json"},
    "plane fails": {FUSION: "fused"},
    "workspace fails": {FUSION: "flashinfer"},
    "fp32 fused": {FUSION: "fused"},
    "tables differ": {ENABLE: "", POLICY: "{folder}/table-{rank}.json"},
    "no table on rank 1": {ENABLE: "", POLICY: "{folder}/only-{rank}.json"},
}
ONE_KERNEL = [((1, 1, 1), "fused"), *(((ranks, 1, 1), way) for ranks in (2, 4) for way in ("fused", "flashinfer"))]
REFUSED = [key for key, scenarios in RUNS.items() if not scenarios]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("boundary") / "model", Shape(layers=5))


@pytest.fixture(scope="module", params=trees.BASES)
def seen(request, checkpoint, overlay_tree_of, tmp_path_factory):
    """``(tp, pp, ep) -> [what each rank saw]``, with the variant after the sizes where there is one."""
    folder = tmp_path_factory.mktemp("ranks")
    slower = json.loads(json.dumps(TABLE).replace("4.0", "4.5"))
    for name, table in (("table", TABLE), ("table-0", TABLE), ("table-1", slower), ("only-0", TABLE)):
        (folder / f"{name}.json").write_text(json.dumps(table))
    runs = {key: [spec_of(rank, key, checkpoint, folder) for rank in range(key[0] * key[1])] for key in RUNS}
    for ranks in runs.values():
        init_method = f"tcp://127.0.0.1:{free_port()}"
        for spec in ranks:
            spec["init_method"] = init_method
    workers.start(
        WORKER, overlay_tree_of(request.param), list(runs.values()), folder, (WORKER.parent / "moe",), {ENABLE: "1"}
    )

    def get(*key):
        return [workers.what_it_saw(spec) for spec in runs[key]]

    return get


def spec_of(rank, key, checkpoint, folder):
    sizes, variant = key[:3], "".join(key[3:])
    name = "-".join(map(str, (*key, rank)))
    flags = {flag: value.format(folder=folder, rank=rank) for flag, value in VARIANTS.get(variant, {}).items()}
    return {
        "rank": rank, "sizes": dict(zip(("tp", "pp", "ep"), sizes)), "scenarios": RUNS[key], "flags": flags,
        "stand_ins": bool(variant), "dtype": "bfloat16" if variant and not variant.startswith("fp32") else "float32",
        "failing_rank": 1 if "fails" in variant else None, "refused": key in REFUSED,
        "checkpoint": str(checkpoint), "out": str(folder / f"{name}.pt"), "log": str(folder / f"{name}.log"),
    }


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def close(result, reference):
    return (result.double() - reference.double()).norm() <= TOLERANCE * reference.double().norm()


def carried(compared):
    return compared["counters"]["carried"]


def taken(compared):
    """way -> how often, of the ways that were taken."""
    return {way: count for way, count in compared["counters"]["ways"].items() if count}


def about(result, reference):
    """Equal but for the roundings of some layers of bf16."""
    return (result.double() - reference.double()).norm() <= 2e-2 * reference.double().norm()


def error(result, exact):
    return float((result.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1), (4, 1, 1)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_carried_bundle_gives_the_stock_result_on_every_rank(seen, sizes, tokens):
    ranks = [rank["forward"][tokens] for rank in seen(*sizes)]
    for rank in ranks:
        assert close(rank["deferred"], rank["stock"])
        assert torch.equal(rank["deferred"], ranks[0]["deferred"])
        assert rank["counters"]["deferred"] == {layer: 1 for layer in [*CARRYING, LAST]}
        assert carried(rank) == {layer: 1 for layer in CARRYING}
        assert taken(rank) == {"eager": len(CARRYING), "in_layer": 1}


def test_the_moe_matters_to_the_result(seen):
    """Else the comparisons above would pass whatever the experts gave: take the routed part away and see."""
    (rank,) = seen(1, 1, 1)
    plain, without = rank["forward"][5]["stock"], rank["forward"]["without_experts"]
    assert (plain - without).norm() > 0.05 * plain.norm()


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1)])
def test_what_cannot_be_carried_is_decided_before_compute(seen, sizes):
    for rank in seen(*sizes):
        decided = rank["decisions"]
        assert decided.pop("plain") == [1, 2, 3]
        assert decided and set(map(tuple, decided.values())) == {()}


def test_more_tokens_than_the_budget_are_stock(seen):
    (rank,) = seen(1, 1, 1)
    compared = rank["over_budget"]
    assert torch.equal(compared["deferred"], compared["stock"])
    assert compared["counters"]["deferred"] == {}
    assert compared["counters"]["not_deferred"] == {"more tokens than SGLANG_MOE_DEFERRED_FINALIZE_MAX_TOKENS": 4}


def test_a_forward_that_fails_leaves_nothing_behind(seen):
    (rank,) = seen(1, 1, 1)
    compared = rank["failed_forward"]
    assert compared["died"] and close(compared["deferred"], compared["stock"])
    assert rank["failed_forward"]["undecided_after"] == []


def test_experts_wrapped_after_the_model_was_built_are_used_and_not_deferred(seen):
    """LoRA wraps experts that late."""
    (rank,) = seen(1, 1, 1)
    compared = rank["wrapped_experts"]
    assert torch.equal(compared["deferred"], compared["stock"])
    assert not close(compared["deferred"], compared["plain"])
    assert compared["counters"]["deferred"] == {}
    (reason,) = compared["counters"]["not_deferred"]
    assert reason.startswith("the experts are wrapped")


def test_experts_with_a_replaced_forward_do_not_defer(seen):
    (rank,) = seen(1, 1, 1)
    assert rank["replaced_forward"] == "the experts' forward is replaced (offloaded weights)"


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1)])
def test_an_moe_that_declines_after_the_decision_is_still_reduced(seen, sizes):
    for rank in seen(*sizes):
        compared = rank["declined"]
        assert close(compared["deferred"], compared["stock"])
        assert compared["counters"]["deferred"] == {}


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1)])
def test_eagle3_captures_complete_residuals(seen, sizes):
    for rank in seen(*sizes):
        compared = rank["capture"]
        assert carried(compared) == {layer: 1 for layer in CARRYING}
        for deferred, stock in zip(compared["deferred"], compared["stock"], strict=True):
            assert close(deferred, stock)


def test_the_triton_runner_produces_the_same_moe(seen):
    (rank,) = seen(1, 1, 1)
    produced = rank["triton_producer"]
    assert produced["index"].tolist() == [[2 * token, 2 * token + 1] for token in range(5)]
    assert produced["scale"] == 2.5 and produced["input_kept"]
    assert (produced["triton"].double() - produced["native"].double()).norm() < 2e-3 * produced["native"].double().norm()


def test_c6_each_rank_contributes_a_power_of_two(seen):
    for rank in seen(4, 1, 1):
        assert rank["powers_of_two"]["residual"].unique().tolist() == [15.0]


def test_c6_hybrid_expert_and_tensor_parallelism_never_defers(seen):
    for rank in seen(4, 1, 2):
        assert rank["hybrid"]["carried"] == rank["hybrid"]["set_up"] == []
        reasons = set(rank["hybrid"]["layers"].values())
        assert reasons == {"hybrid expert and tensor parallelism reduces over two groups"}


def test_c7_ones_on_four_ranks_are_four(seen):
    for rank in seen(4, 1, 1):
        assert rank["ones"]["residual"].unique().tolist() == [4.0]
        assert torch.allclose(rank["ones"]["norm"], rank["ones"]["norm_weight"], rtol=1e-5)


def test_c8_a_pipeline_stage_sends_finalized_and_reduced_hidden_states(seen):
    first, second = seen(1, 2, 1)
    sent = first["forward"][5]
    assert set(sent["deferred"]) == {"hidden_states", "residual"}
    for name in sent["deferred"]:
        assert close(sent["deferred"][name], sent["stock"][name])
    assert sent["counters"]["ways"]["in_layer"] == 1 and carried(sent) == {}
    assert first["decisions"]["plain"] == [] and second["decisions"]["plain"] == [2, 3]
    assert close(second["forward"][5]["deferred"], second["forward"][5]["stock"])


def test_c9_eagle3_captures_the_residual_after_the_reduce(seen):
    for rank in seen(2, 1, 1):
        case = rank["eagle3_case"]
        assert [captured.unique().tolist() for captured in case["captured"]] == [[13.0]]
        assert case["residual"].unique().tolist() == [13.0]
        assert case["residual_in"].unique().tolist() == [10.0]


def test_expert_parallel_ranks_defer_what_they_hold(seen):
    reference = seen(1, 1, 1)[0]["forward"][5]["deferred"]
    for rank in seen(2, 1, 2):
        deferred, counters = rank["deferred_only"]
        assert close(deferred, reference)
        assert counters["carried"] == {layer: 1 for layer in CARRYING}


@pytest.mark.parametrize("sizes, way", ONE_KERNEL)
@pytest.mark.parametrize("tokens", [1, 5])
def test_one_kernel_gives_about_the_stock_result_on_every_rank(seen, sizes, way, tokens):
    ranks = [rank["forward"][tokens] for rank in seen(*sizes, way)]
    for rank in ranks:
        assert about(rank["deferred"], rank["stock"])
        assert torch.equal(rank["deferred"], ranks[0]["deferred"])
        assert carried(rank) == {layer: 1 for layer in CARRYING}
        assert taken(rank) == {way: len(CARRYING), "in_layer": 1}


@pytest.mark.parametrize("sizes, way", ONE_KERNEL)
def test_all_ways_agree_within_their_roundings(seen, sizes, way):
    """Masked pairs, fp32 weights, a factor of 2.5, and NaN in the rows that no index names."""
    # finalize, all-reduce, + residual each round once; FlashInfer's kernel rounds after every expert and rank.
    roundings = {"fused": 1, "separate": 2, "eager": 3, "flashinfer": 4}
    ranks = [rank["ways"] for rank in seen(*sizes, way)]
    for rank in ranks:
        assert set(rank["results"]) == {way, "separate", "eager"} and rank["padding_matters"] == []
        for name, (norm_out, residual_out) in rank["results"].items():
            assert error(norm_out, rank["exact"][0]) < (roundings[name] + 1) * ROUNDING
            assert error(residual_out, rank["exact"][1]) < roundings[name] * ROUNDING
            assert torch.equal(residual_out, ranks[0]["results"][name][1])
    fused = {name: error(result[1], ranks[0]["exact"][1]) for name, result in ranks[0]["results"].items()}
    assert min(fused, key=fused.get) == "fused" or way == "flashinfer"


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_plane_is_of_the_models_own_and_its_kernel_compiled_for_it(seen, ranks):
    for rank in seen(ranks, 1, 1, "fused"):
        ((config, rows),) = rank["made"]["planes"]
        assert config == {"world_size": ranks, "hidden": 256, "top_k": 2, "activation": torch.bfloat16, "weight": torch.float32}
        assert rows == 8
        assert rank["made"]["ranges"] == "fused up to 8 tokens, eager up to 192 tokens"


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_models_share_no_plane(seen, ranks):
    assert [rank["two_models"] for rank in seen(ranks, 1, 1, "fused")] == [False] * ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_more_tokens_than_the_plane_has_rows_fall_back(seen, ranks):
    for rank in seen(ranks, 1, 1, "fused"):
        ways = {rows: taken(compared) for rows, compared in rank["over_plane"].items()}
        assert ways == {8: {"fused": 3, "in_layer": 1}, 9: {"eager": 3, "in_layer": 1}}
        assert all(about(compared["deferred"], compared["stock"]) for compared in rank["over_plane"].values())


@pytest.mark.parametrize("ranks, way, misfits", [
    (1, "fused", {"another dtype", "unaligned"}),
    (2, "fused", {"another dtype", "unaligned"}),
    (2, "flashinfer", {"another dtype", "unaligned", "longer rows"}),
])
def test_a_bundle_of_another_form_falls_back(seen, ranks, way, misfits):
    for rank in seen(ranks, 1, 1, way):
        for name, (taken_by, error) in rank["misfits"].items():
            assert taken_by == ("eager" if name in misfits else way)
            assert error < 4 * ROUNDING


@pytest.mark.parametrize("ranks", [1, 2])
def test_guards_hold_with_one_kernel(seen, ranks):
    for rank in seen(ranks, 1, 1, "fused"):
        decided = dict(rank["decisions"])
        assert decided.pop("plain") == [1, 2, 3] and set(map(tuple, decided.values())) == {()}
        assert rank["over_budget"]["counters"]["deferred"] == {}
        assert torch.equal(rank["over_budget"]["deferred"], rank["over_budget"]["stock"])
        assert torch.equal(rank["wrapped_experts"]["deferred"], rank["wrapped_experts"]["stock"])
        assert about(rank["declined"]["deferred"], rank["declined"]["stock"])
        assert rank["failed_forward"]["died"] and rank["failed_forward"]["undecided_after"] == []
        assert about(rank["failed_forward"]["deferred"], rank["failed_forward"]["stock"])
        for deferred, stock in zip(rank["capture"]["deferred"], rank["capture"]["stock"], strict=True):
            assert about(deferred, stock)


@pytest.mark.parametrize("way", ["fused", "flashinfer"])
def test_c6_c7_c9_with_one_kernel(seen, way):
    for rank in seen(4, 1, 1, way):
        assert rank["powers_of_two"]["residual"].unique().tolist() == [15.0]
        assert rank["ones"]["residual"].unique().tolist() == [4.0]
    for rank in seen(2, 1, 1, way):
        case = rank["eagle3_case"]
        assert [captured.unique().tolist() for captured in case["captured"]] == [[13.0]]
        assert case["residual_in"].unique().tolist() == [10.0]


def test_c8_a_pipeline_stage_sends_finalized_and_reduced_hidden_states_with_one_kernel(seen):
    ranks = seen(2, 2, 1, "fused")
    for rank in ranks[:2]:
        sent = rank["forward"][5]
        assert all(about(sent["deferred"][name], sent["stock"][name]) for name in ("hidden_states", "residual"))
        assert carried(sent) == {} and rank["decisions"]["plain"] == [] and rank["made"]["planes"] == []
    for rank in ranks[2:]:
        assert taken(rank["forward"][5]) == {"fused": 2, "in_layer": 1} and len(rank["made"]["planes"]) == 1
        assert about(rank["forward"][5]["deferred"], rank["forward"][5]["stock"])


def test_expert_parallel_ranks_share_a_plane(seen):
    ranks = seen(2, 1, 2, "fused")
    reference = seen(2, 1, 1, "fused")[0]["forward"][5]["stock"]
    for deferred, counters in (rank["deferred_only"] for rank in ranks):
        assert about(deferred, reference) and torch.equal(deferred, ranks[0]["deferred_only"][0])
        assert counters["ways"]["fused"] == len(CARRYING)


@pytest.mark.parametrize("ranks", [1, 2])
def test_with_the_flag_unset_only_what_was_measured_faster_defers(seen, ranks):
    for rank in seen(ranks, 1, 1, "table"):
        (_, rows), = rank["made"]["planes"]
        assert rows == 4 and rank["made"]["ranges"].startswith("fused (measured faster than stock) up to 4 tokens, eager up to 192")
        faster, slower = rank["forward"][1], rank["forward"][5]
        assert taken(faster) == {"fused": 3} and set(faster["counters"]["deferred"]) == set(CARRYING)
        assert about(faster["deferred"], faster["stock"])
        assert slower["counters"]["deferred"] == {} and torch.equal(slower["deferred"], slower["stock"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_with_the_flag_unset_what_is_not_handed_on_is_stock(seen, ranks):
    for rank in seen(ranks, 1, 1, "table"):
        compared = rank["not_carried"]
        assert torch.equal(compared["deferred"], compared["stock"]) and compared["counters"]["deferred"] == {}
        assert compared["counters"]["not_deferred"]["not handed on, and only that was measured"] == len(CARRYING)


def test_a_forward_that_is_compiled_stays_stock_whatever_the_table_says(seen):
    """SGLang's prefill graphs are compiled in one piece, where a step that the compiler cannot trace is an error."""
    (rank,) = seen(1, 1, 1, "table")
    assert rank["compiled"] == {300: (False, False), 5: (False, False), 4: (False, True), 1: (False, True)}


def test_pipeline_stages_of_one_rank_go_by_the_table_each(seen):
    first, second = (rank["forward"] for rank in seen(1, 2, 1, "table"))
    for few, many in ((first[1], first[5]), (second[1], second[5])):
        assert many["counters"]["deferred"] == {}
        assert taken(few).get("fused", 0) == len(carried(few))
    for name in ("hidden_states", "residual"):
        assert about(first[1]["deferred"][name], first[1]["stock"][name])
    assert taken(second[1]) == {"fused": 2} and about(second[1]["deferred"], second[1]["stock"])


def test_with_the_flag_at_1_a_way_measured_slower_is_not_picked(seen):
    for rank in seen(2, 1, 1, "table, flag at 1"):
        assert taken(rank["forward"][1]) == {"fused": 3, "in_layer": 1}
        assert taken(rank["forward"][5]) == {"eager": 3, "in_layer": 1}


def test_with_the_flag_at_0_nothing_is_set_up_and_all_is_stock(seen):
    for rank in seen(2, 1, 1, "off"):
        assert rank["made"] == {"planes": [], "ranges": ""}
        for compared in (rank["forward"][1], rank["forward"][5]):
            assert torch.equal(compared["deferred"], compared["stock"]) and compared["counters"]["deferred"] == {}


def test_a_plane_that_fails_on_one_rank_is_done_without_on_all(seen):
    for rank in seen(2, 1, 1, "plane fails, auto"):
        assert rank["made"]["planes"] == []
        assert taken(rank["forward"][1]) == {"eager": 3, "in_layer": 1}
        assert about(rank["forward"][1]["deferred"], rank["forward"][1]["stock"])


@pytest.mark.parametrize("key, words", [
    ((2, 1, 1, "plane fails"), [FUSION + "=fused cannot run here", "rank 1: no peer access"]),
    ((2, 1, 1, "workspace fails"), [FUSION + "=flashinfer cannot run here", "cannot allocate"]),
    ((2, 1, 1, "fp32 fused"), [FUSION + "=fused cannot run here", "bf16 or fp16", "float32"]),
    ((2, 1, 1, "tables differ"), [POLICY, "ranks 0 and 1 differ"]),
    ((2, 1, 1, "no table on rank 1"), [POLICY, "only-1.json", "cannot be read", "rank 1"]),
])
def test_what_cannot_run_stops_every_rank_with_the_reason(seen, key, words):
    for rank in seen(*key):
        assert all(word in rank["refused"] for word in words), rank["refused"]


def test_a_fused_boundary_takes_the_norms_it_computes_and_no_others(seen):
    (norms, _) = (rank["norms"] for rank in seen(2, 1, 1, "fused"))
    assert (norms["plain"], norms["gemma"]) == (0.0, 1.0)
    assert all(isinstance(norms[name], str) and norms[name] for name in set(norms) - {"plain", "gemma"})
