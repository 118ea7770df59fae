"""SGLang 0.5.23's start-up and MXFP4 expert layers, patched and stock, with Hopper's mega kernel stood in for, on a CPU."""

import json
from pathlib import Path

import pytest

from cpu_serving import trees, workers
from cpu_serving.checkpoint import Shape, model_config

HERE = Path(__file__).parent
BASE = "0.5.23"
MEGAMOE = {"moe_a2a_backend": "flashinfer_megamoe"}
EIGHT = {**MEGAMOE, "tp_size": 8, "attn_dp_size": 8}
QUANTISED = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "routed_experts_quant_method": "mxfp4"}

# name of a run -> what its worker is told
ARGUMENTS = {
    "eight ranks": {"arguments": EIGHT},
    "one rank": {"arguments": {**MEGAMOE, "tp_size": 1}},
    "flag off": {"arguments": EIGHT, "flag": "0"},
    "flag unset": {"arguments": EIGHT, "flag": None},
    "flag unset, one rank": {"arguments": {**MEGAMOE, "tp_size": 1}, "flag": None},
    "two ranks without data-parallel attention": {"arguments": {**MEGAMOE, "tp_size": 2}},
    "not Hopper": {"arguments": EIGHT, "platform": {"is_sm90": False}},
    "no kernel": {"arguments": EIGHT, "kernel": False},
    "no nvshmem": {"arguments": EIGHT, "nvshmem": False},
    "eplb": {"arguments": {**EIGHT, "enable_eplb": True}},
    "redundant experts": {"arguments": {**EIGHT, "ep_num_redundant_experts": 8}},
    "two-batch overlap": {"arguments": {**EIGHT, "enable_two_batch_overlap": True}},
    "three ranks": {"arguments": {**MEGAMOE, "tp_size": 3, "attn_dp_size": 3}},
    "not mxfp4": {"arguments": {**EIGHT, "quantization": "mxfp8"}, "mxfp4": False},
}
CHOICES = {
    "mega": {},
    "mega, flag off": {"flag": "0"},
    "mega, flag unset": {"flag": None},
    "mega, not Hopper": {"platform": {"is_sm90": False}},
    "triton": {"runner": "triton", "a2a": "none"},
    "fp8 experts": {"fp4": False},
    "weights on input": {"layer": {"apply_router_weight_on_input": True}},
    "gelu": {"layer": {"activation": "gelu"}},
    "not gated": {"layer": {"is_gated": False}},
    "alpha": {"layer": {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}},
    "bias": {"layer": {"with_bias": True}},
    "hidden 320": {"layer": {"hidden_size": 320}},
    "intermediate 192": {"layer": {"intermediate_size": 192}},
}
FORWARDS = {
    "one rank": {"tokens": [[5], [0], [64], [65], [1030]]},
    "one rank, limited": {"tokens": [[7]], "limit": 1024.0},
    "one rank, up to 128": {"tokens": [[5], [200]], "environment": {"SGLANG_MOE_MXFP4_MEGAMOE_TOKENS": "128"}},
    "two ranks": {"tokens": [[5, 5], [0, 3], [70, 0], [2, 1025], [0, 0]], "ranks": 2},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """``tree, name -> spec`` -> ``name -> what each rank saw``."""

    def run(tree, runs):
        folder = tmp_path_factory.mktemp("runs")
        specs = {name: ranks_of(folder, place, told) for place, (name, told) in enumerate(runs.items())}
        paths = (trees.ROOT / "tests" / "oracles", HERE)
        workers.start(HERE / "megamoe_worker.py", tree, list(specs.values()), folder, paths)
        return {name: [workers.what_it_saw(spec) for spec in ranks] for name, ranks in specs.items()}

    return run


def ranks_of(folder, place, told):
    checkpoint = folder / f"checkpoint{place}"
    checkpoint.mkdir()
    config = {**model_config(Shape()), "torch_dtype": "bfloat16"}
    if told.get("mxfp4", True) and told["scenario"] == "arguments":
        config["quantization_config"] = QUANTISED
    (checkpoint / "config.json").write_text(json.dumps(config))
    shared = {"flag": "1", "limit": None, **told, "checkpoint": str(checkpoint), "init_method": f"file://{folder}/{place}.rendezvous"}
    return [
        {**shared, "rank": rank, "out": str(folder / f"{place}.{rank}.pt"), "log": str(folder / f"{place}.{rank}.log")}
        for rank in range(told.get("ranks", 1))
    ]


def told(scenario, runs):
    return {f"{scenario} {name}": {"scenario": scenario, **spec} for name, spec in runs.items()}


@pytest.fixture(scope="module")
def seen(run, overlay_tree_of):
    return run(overlay_tree_of(BASE), {**told("arguments", ARGUMENTS), **told("choice", CHOICES), **told("forward", FORWARDS)})


@pytest.fixture(scope="module")
def stock(run):
    """The release itself, with the flag set all the same."""
    return run(trees.stock_tree(BASE), {**told("arguments", ARGUMENTS), "choice mega": {"scenario": "choice"}})


@pytest.fixture(scope="module")
def alone(run, tmp_path_factory):
    """A tree that has this feature and no other."""
    tree = trees.overlay_tree(tmp_path_factory.mktemp("alone") / "tree", BASE, "mxfp4-megamoe-sm90")
    return run(tree, told("forward", {"two ranks": FORWARDS["two ranks"]}))


def arguments(seen, name):
    (rank,) = seen[f"arguments {name}"]
    return rank


def test_hopper_starts_with_the_flag(seen):
    eight = arguments(seen, "eight ranks")
    assert (eight["runner"], eight["ep_size"]) == ("flashinfer_megamoe", 8)
    assert eight["environment"] == {"MEGA_NO_DIST": None, "NVSHMEM_DISABLE_NVLS": "1", "NVSHMEM_REMOTE_TRANSPORT": "none"}


def test_one_rank_starts_without_data_parallel_attention_and_nvshmem(seen):
    one = arguments(seen, "one rank")
    assert (one["runner"], one["ep_size"]) == ("flashinfer_megamoe", 1)
    assert one["environment"]["MEGA_NO_DIST"] == "1"


@pytest.mark.parametrize("name", ["flag off", "flag unset", "flag unset, one rank", "two ranks without data-parallel attention"])
def test_without_the_flag_start_up_is_the_stock_one(seen, stock, name):
    assert arguments(seen, name) == arguments(stock, name)
    assert "refused" in arguments(seen, name)


@pytest.mark.parametrize(
    "name, message",
    [("not Hopper", "the kernel is for SM90"), ("no kernel", "flashinfer-python 0.7.4"), ("no nvshmem", "nvshmem4py-cu13"),
     ("eplb", "--enable-eplb is set"), ("redundant experts", "--ep-num-redundant-experts is set"),
     ("two-batch overlap", "--enable-two-batch-overlap is set"), ("three ranks", "8 experts do not divide among 3 ranks"),
     ("not mxfp4", "experts are not MXFP4")],
)
def test_what_cannot_run_stops_the_server_at_start_up(seen, name, message):
    refused = arguments(seen, name)
    assert refused["type"] == "MegaMoeRefused" and message in refused["refused"]
    assert refused["refused"].startswith("SGLANG_MOE_MXFP4_MEGAMOE_SM90=1: ")


def choice(seen, name):
    (rank,) = seen[f"choice {name}"]
    return rank


@pytest.mark.parametrize(
    "name, method",
    [("mega", "Mxfp4MegaMoEMethod"), ("mega, flag off", "Fp8MoEMethod"), ("mega, flag unset", "Fp8MoEMethod"),
     ("mega, not Hopper", "Fp8MoEMethod"), ("triton", "Fp8MoEMethod"), ("fp8 experts", "Fp8MoEMethod")],
)
def test_who_gets_the_overlays_method(seen, name, method):
    assert choice(seen, name) == {"method": method}


def test_the_release_itself_gives_its_own(stock):
    assert choice(stock, "mega") == {"method": "Fp8MoEMethod"}


@pytest.mark.parametrize(
    "name, message",
    [("weights on input", "experts' input"), ("gelu", "activation gelu"), ("not gated", "not gated"), ("alpha", "gemm1_alpha 1.702"),
     ("bias", "biases"), ("hidden 320", "hidden_size 320"), ("intermediate 192", "intermediate_size 192")],
)
def test_a_layer_that_cannot_run_is_refused_when_it_is_built(seen, name, message):
    assert choice(seen, name)["refused"].startswith("MegaMoeRefused: ") and message in choice(seen, name)["refused"]


@pytest.mark.parametrize("name", FORWARDS)
def test_a_loaded_layer_is_exact_on_every_rank(seen, name):
    for rank in seen[f"forward {name}"]:
        assert rank["bytes"] and all(forward["same"] for forward in rank["forwards"])
        assert rank["limit"] == FORWARDS[name].get("limit") and rank["fused_factor"]


def test_ranks_launch_alike_in_the_workspace_of_the_fullest(seen):
    first, second = ([forward["launched"] for forward in rank["forwards"]] for rank in seen["forward two ranks"])
    assert first == [[(64, 5)], [(64, 0)], [(256, 70)], [(1024, 2), (64, 0)], []]
    assert second == [[(64, 5)], [(64, 3)], [(256, 0)], [(1024, 1024), (64, 1)], []]


def test_the_largest_workspace_is_what_the_flag_says(seen):
    (rank,) = seen["forward one rank, up to 128"]
    assert [forward["launched"] for forward in rank["forwards"]] == [[(64, 5)], [(128, 128), (128, 72)]]


def test_the_layer_keeps_the_kernels_weights_only(seen):
    (rank,) = seen["forward one rank"]
    assert rank["parameters"][0] == (8, 128, 256)  # the kernel's: [E, H/2, 2I]
    assert "Restart the server" in rank["reloaded"] and "Restart the server" in rank["update_refused"]


def test_the_feature_works_without_the_others(alone):
    for rank in alone["forward two ranks"]:
        assert rank["bytes"] and all(forward["same"] for forward in rank["forwards"])
