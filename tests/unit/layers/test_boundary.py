"""The layer boundary in real SGLang layers, on 1 to 4 gloo ranks (cases C4 to C9 and the guards)."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cpu_serving import trees
from cpu_serving.checkpoint import Shape, make_checkpoint
from cpu_serving.server import SERVER_ENVIRONMENT, SUPPORT_PATHS

WORKER = Path(__file__).with_name("boundary_worker.py")
LIMIT_SECONDS = 600
TOLERANCE = 2e-6
CARRYING, LAST = ["1", "2", "3"], "4"

# tp, pp, ep -> what its ranks go through. SGLang's own experts on a CPU know no expert parallelism, so there
# the deferred result is compared with that of one rank.
RUNS = {
    (1, 1, 1): ["forward", "decisions", "over_budget", "failed_forward", "declined", "capture",
                "wrapped_experts", "replaced_forward", "triton_producer"],
    (2, 1, 1): ["forward", "decisions", "declined", "capture", "eagle3_case"],
    (4, 1, 1): ["powers_of_two", "ones", "forward"],
    (2, 1, 2): ["deferred_only"],
    (4, 1, 2): ["hybrid"],
    (1, 2, 1): ["forward", "decisions"],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("boundary") / "model", Shape(layers=5))


@pytest.fixture(scope="module")
def seen(checkpoint, overlay_tree, tmp_path_factory):
    """``(tp, pp, ep) -> [what each rank saw]``."""
    folder = tmp_path_factory.mktemp("ranks")
    runs = {sizes: [spec_of(rank, sizes, checkpoint, folder) for rank in range(sizes[0] * sizes[1])] for sizes in RUNS}
    for ranks in runs.values():
        init_method = f"tcp://127.0.0.1:{free_port()}"
        for spec in ranks:
            spec["init_method"] = init_method
    (folder / "runs.json").write_text(json.dumps(list(runs.values())))
    path = os.pathsep.join(map(str, (overlay_tree, *SUPPORT_PATHS, trees.ROOT / "ci")))
    environment = {**os.environ, **SERVER_ENVIRONMENT, "PYTHONPATH": path, "SGLANG_ENABLE_MOE_DEFERRED_FINALIZE": "1"}
    command = [sys.executable, str(WORKER), str(folder / "runs.json")]
    subprocess.run(command, env=environment, timeout=LIMIT_SECONDS, check=True)

    def get(*sizes):
        return [what_it_saw(spec) for spec in runs[sizes]]

    return get


def spec_of(rank, sizes, checkpoint, folder):
    name = "-".join(map(str, (*sizes, rank)))
    return {
        "rank": rank, "sizes": dict(zip(("tp", "pp", "ep"), sizes)), "scenarios": RUNS[sizes],
        "checkpoint": str(checkpoint), "out": str(folder / f"{name}.pt"), "log": str(folder / f"{name}.log"),
    }


def what_it_saw(spec):
    assert Path(spec["out"]).exists(), Path(spec["log"]).read_text()[-4000:]
    return torch.load(spec["out"], weights_only=False)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def close(result, reference):
    return (result.double() - reference.double()).norm() <= TOLERANCE * reference.double().norm()


def carried(compared):
    return compared["counters"]["carried"]


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1), (4, 1, 1)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_carried_bundle_gives_the_stock_result_on_every_rank(seen, sizes, tokens):
    ranks = [rank["forward"][tokens] for rank in seen(*sizes)]
    for rank in ranks:
        assert close(rank["deferred"], rank["stock"])
        assert torch.equal(rank["deferred"], ranks[0]["deferred"])
        assert rank["counters"]["deferred"] == {layer: 1 for layer in [*CARRYING, LAST]}
        assert carried(rank) == {layer: 1 for layer in CARRYING}
        assert rank["counters"]["ways"] == {"eager": len(CARRYING), "separate": 0, "in_layer": 1}


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
        assert rank["hybrid"]["carried"] == []
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
