"""What the server run of MXFP4 experts rests on: the two checkpoints, the plugin, and what is made of answers and logs."""

import importlib.metadata
import json
import sys
from types import SimpleNamespace

import mxfp4_moe
import pytest
import torch
from safetensors.torch import load_file

from cpu_serving.checkpoint import Shape

SMALL = Shape(hidden=256, layers=2, experts=3, topk=2, expert_width=128)


@pytest.fixture(scope="module")
def made(benchmark_module, tmp_path_factory):
    return benchmark_module("mxfp4_checkpoint").make_mxfp4_checkpoint(tmp_path_factory.mktemp("model"), SMALL)


@pytest.fixture(scope="module")
def script(benchmark_module):
    return benchmark_module("serve_mxfp4_hopper")


def test_both_checkpoints_hold_the_same_numbers(made):
    served, plain = (load_file(folder / "model.safetensors") for folder in made)
    experts = [name for name in plain if ".mlp.experts." in name]
    assert len(experts) == 3 * SMALL.experts
    for name in experts:
        assert served[name].dtype == torch.int8 and served[f"{name}_scale_inv"].dtype == torch.float8_e8m0fnu
        exact = mxfp4_moe.dequantised(served[name].view(torch.uint8), served[f"{name}_scale_inv"].view(torch.uint8))
        assert torch.equal(plain[name].double(), exact) and 0.01 < exact.std() < 1
    name = "model.layers.0.mlp.gate_proj.weight"
    assert served[name].dtype == torch.float8_e4m3fn and torch.equal(plain[name][:128, :128].double(), served[name][:128, :128].double() * served[f"{name}_scale_inv"][0, 0].double())
    assert all(torch.equal(served[name], plain[name]) for name in plain if served[name].dtype in (torch.bfloat16, torch.float32))
    assert {name for name in served if not name.endswith("_scale_inv")} == set(plain)


def test_the_served_one_says_that_its_experts_are_mxfp4(made):
    served, plain = (json.loads((folder / "config.json").read_text()) for folder in made)
    assert served.pop("quantization_config")["routed_experts_quant_method"] == "mxfp4" and served == plain and plain["n_group"] == 1


def test_the_reference_reads_the_plain_one(made, benchmark_module):
    float32 = benchmark_module("serve_boundary").Float32(made.plain, "cpu")
    (said,) = float32.logprobs([[2, 3, 4]], [[5, 6]])
    assert len(said) == 2 and all(logprob < 0 for logprob in said)


def test_servers_find_the_plugin(benchmark_module, script, monkeypatch):
    configuration = script.GpuConfiguration("tree", "model", 1, {}, plugins=script.IN_TORCH)
    for folder in configuration.environment()["PYTHONPATH"].split(":")[-2:]:
        monkeypatch.syspath_prepend(folder)
    (point,) = [point for point in importlib.metadata.entry_points(group="sglang.srt.plugins") if point.name == "mxfp4_interleave"]
    core = SimpleNamespace(get_cutlass_fused_moe_module=None)
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flashinfer.fused_moe", SimpleNamespace(core=core))
    point.load()()
    codes = torch.randint(256, (1, 16, 64), dtype=torch.uint8)
    out = torch.zeros_like(codes)
    core.get_cutlass_fused_moe_module("sm90").interleave_moe_weights_for_sm90_mixed_gemm(codes, out, "fp4")
    assert torch.equal(out, benchmark_module("mxfp4_interleave").interleave(codes)) and not torch.equal(out, codes)


ANSWERS = [{"tokens": [1, 2], "logprobs": [-0.5, -0.25]}]
SAID = {"alone": ANSWERS, "together": ANSWERS, "again": ANSWERS}


def seen(script, arm, mean=0.1, steps=4):
    in_graphs = 0 if arm == script.EAGER else steps
    says = ["they do"] if arm in (script.OWN, script.EAGER) else []
    return {"says": says, "interleaves": False, "decode_steps": steps, "decode_steps_in_graphs": in_graphs, "to_float32": {"mean": mean}}


def test_nothing_is_wrong_with_a_run_that_holds(script):
    arms = {arm: seen(script, arm) for arm in (script.OWN, script.EAGER, script.FP8)}
    assert script.wrong(arms, dict.fromkeys(arms, SAID)) == []


def test_each_check_can_fail(script):
    arms = {arm: seen(script, arm) for arm in (script.OWN, script.EAGER, script.FP8)}
    said = dict.fromkeys(arms, SAID)
    other = {**SAID, "again": [{"tokens": [1, 3], "logprobs": [-0.5, -0.25]}]}

    def wrong(change=None, **answers):
        changed = {**arms, **{arm: {**arms[arm], **made} for arm, made in (change or {}).items()}}
        return script.wrong(changed, {**said, script.OWN: answers["own"]} if answers else said)

    assert wrong({script.OWN: {"says": []}}) == ["mega kernel: its log does not say that the experts run in the mega kernel"]
    assert wrong({script.FP8: {"says": ["x"]}}) == ["triton FP8: its log says that the experts run in the mega kernel"]
    assert wrong({script.OWN: {"decode_steps_in_graphs": 3}}) == ["mega kernel: 3 of 4 decode steps ran in CUDA graphs"]
    assert wrong({script.FP8: {"interleaves": True}}) == ["triton FP8: weights were interleaved in torch"]
    unsaid = script.wrong(arms, said, in_torch=True)
    assert unsaid == [f"{arm}: weights were not interleaved in torch" for arm in (script.OWN, script.EAGER)]
    assert wrong({script.EAGER: {"decode_steps": 0}}) == ["eager: 0 of 0 decode steps ran in CUDA graphs"]
    assert wrong({script.OWN: {"to_float32": {"mean": 0.126}}}) == ["logprobs are farther from float32 than those of triton FP8"]
    assert wrong(own=other) == ["mega kernel: the same batch has other answers the second time", "the answers with CUDA graphs are not those without"]
    assert script.wrong({script.OWN: {"failed": "x"}}, {}) == ["mega kernel: its server failed"]


def test_a_log_is_counted(script):
    log = f"{script.INTERLEAVES}\n{script.SAYS} for SM90\nDecode batch, cuda graph: True\nDecode batch, cuda graph: False\n"
    assert script.look_at_log(log) == {"says": [f"{script.SAYS} for SM90"], "interleaves": True, "decode_steps": 2, "decode_steps_in_graphs": 1}
    assert script.distance(ANSWERS, [[-0.5, -0.5]]) == {"tokens": 2, "mean": 0.125, "max": 0.25}
    assert max(script.LONG_PROMPT) < 1024 and len(script.LONG_PROMPT) > 1024


def test_the_log_line_is_the_one_that_servers_write(script):
    source = (script.ROOT / "sglang_overlay/srt/layers/quantization/mxfp4_megamoe.py").read_text()
    assert script.SAYS in source
