"""What the server run of power-of-two scales rests on: the checkpoint, the recorder of scales, and what is made of them."""

import json
from pathlib import Path

import fp8_moe
import pytest
import torch
from safetensors.torch import load_file

from cpu_serving.checkpoint import Shape, make_checkpoint
from cpu_serving.fp8_checkpoint import make_fp8_checkpoint

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmark"
SMALL = Shape(hidden=256, layers=2, experts=2, topk=1)


@pytest.fixture(scope="module")
def tools():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARK))
        patch.syspath_prepend(str(BENCHMARK / "gemm_scales_plugin"))
        import gemm_scales
        import serve_ue8m0

        yield gemm_scales, serve_ue8m0


def test_the_checkpoint_is_the_plain_one_in_fp8_blocks(tmp_path):
    plain = load_file(make_checkpoint(tmp_path / "plain", SMALL) / "model.safetensors")
    declared = make_fp8_checkpoint(tmp_path / "declared", True, SMALL)
    undeclared = make_fp8_checkpoint(tmp_path / "undeclared", False, SMALL)
    assert (declared / "model.safetensors").read_bytes() == (undeclared / "model.safetensors").read_bytes()
    configs = [json.loads((folder / "config.json").read_text())["quantization_config"] for folder in (declared, undeclared)]
    assert configs[0].pop("scale_fmt") == "ue8m0" and configs[0] == configs[1]
    tensors = load_file(declared / "model.safetensors")
    quantised = {name for name in tensors if tensors[name].dtype == torch.float8_e4m3fn}
    assert {name for name in plain if ".experts." in name} < quantised
    assert not any(part in name for name in quantised for part in ("embed", "lm_head", "gate.weight", "norm"))
    for name in quantised:
        scale = tensors[f"{name}_scale_inv"]
        assert (torch.frexp(scale).mantissa == 0.5).all()
        wide = fp8_moe.dequantised_weight(tensors[name][None], scale[None], 128)[0]
        assert fp8_moe.relative_error(wide, plain[name].double()) < 0.04


def test_the_recorder_keeps_scales_and_launches_the_kernel(tools, tmp_path):
    gemm_scales, serve_ue8m0 = tools
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *given, **options: launched.append((grid, given, options))

    kernel = gemm_scales.Recorder(Kernel(), tmp_path)
    hidden, layers = serve_ue8m0.SHAPE.hidden, serve_ue8m0.MOE_LAYERS
    weights = [torch.empty(2, 4, columns) for _ in range(layers) for columns in (hidden, 256)]
    for scale in (torch.tensor([[0.5, 4.0]]), torch.tensor([[0.25, 0.3]])):
        for weight in weights:
            kernel[(1,)](torch.empty(1, 8), None, weight, None, None, None, scale, "more", top_k=2)
    kernel[(1,)](torch.empty(1, 8), None, weights[0], None, None, None, None)
    assert len(launched) == 4 * layers + 1 and launched[0][2] == {"top_k": 2} and launched[0][1][-1] == "more"
    found = serve_ue8m0.look_at_scales(tmp_path)
    assert [(layer["scales"], layer["powers_of_two"]) for gemm in ("FC1", "FC2") for layer in found[gemm]] == [(4, 3)] * 2 * layers
    assert len(serve_ue8m0.check_scales(found, True)) == len(serve_ue8m0.check_scales(found, False)) == 2 * layers


def test_a_layer_without_scales_is_noticed(tools):
    _, serve_ue8m0 = tools
    wrong = serve_ue8m0.check_scales({"FC1": [], "FC2": []}, True)
    assert wrong == [f"{gemm}: scales of 0 MoE layers, the model has {serve_ue8m0.MOE_LAYERS}" for gemm in ("FC1", "FC2")]
