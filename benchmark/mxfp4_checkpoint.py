"""The seeded DeepSeek-V3 of ``cpu_serving.fp8_checkpoint`` with MXFP4 routed experts, and the same numbers in bf16.

As a mixed checkpoint has it: ``routed_experts_quant_method: mxfp4``; an expert's codes int8 ``[N, K/2]``, its scales float8_e8m0fnu ``[N, K/32]``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Dict, Iterator, NamedTuple, Tuple

import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "ci"), str(ROOT / "tests" / "oracles")]
import fp8_moe  # noqa: E402
import mxfp4_moe  # noqa: E402
from cpu_serving.checkpoint import Shape  # noqa: E402
from cpu_serving.fp8_checkpoint import BLOCK, make_fp8_checkpoint  # noqa: E402

SHAPE = Shape(hidden=2048, layers=3, experts=32, topk=4, expert_width=1024, spread=0.03)
# One group of experts: SGLang then routes by a Triton kernel of its own. The factor keeps the experts' sum at the size of their input.
ROUTING = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 0.5}
SCALE = "_scale_inv"


class Checkpoints(NamedTuple):
    """``served`` is what a server loads, ``plain`` the same numbers in bf16, which has them all."""

    served: Path
    plain: Path


def make_mxfp4_checkpoint(folder: Path, shape: Shape = SHAPE) -> Checkpoints:
    """Write both, the same bytes for the same shape; hidden size and expert width must be multiples of 128."""
    made = Checkpoints(make_fp8_checkpoint(Path(folder) / "served", False, shape), Path(folder) / "plain")
    tensors, wide = load_file(made.served / "model.safetensors"), {}
    for layer in range(shape.first_k_dense_replace, shape.layers):
        for name, codes, exponents in _experts(layer, shape):
            tensors[name], tensors[name + SCALE] = codes.view(torch.int8), exponents.view(torch.float8_e8m0fnu)
            wide[name] = mxfp4_moe.dequantised(codes, exponents).bfloat16()
    made.plain.mkdir(parents=True, exist_ok=True)
    save_file(tensors, made.served / "model.safetensors", metadata={"format": "pt"})
    save_file({**_plain(tensors), **wide}, made.plain / "model.safetensors", metadata={"format": "pt"})
    config = {**json.loads((made.served / "config.json").read_text()), **ROUTING}
    quantization = {**config.pop("quantization_config"), "routed_experts_quant_method": "mxfp4"}
    (made.plain / "config.json").write_text(json.dumps(config, indent=1))
    (made.served / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}, indent=1))
    return made


def _experts(layer: int, shape: Shape) -> Iterator[Tuple[str, torch.Tensor, torch.Tensor]]:
    """The name, codes and exponents of each matrix of a layer's routed experts."""
    size = mxfp4_moe.Shape(shape.experts, shape.expert_width, shape.hidden, shape.topk)
    experts = mxfp4_moe.random_experts(size, seed=layer)
    for expert in range(shape.experts):
        gate, up = zip(experts.w13[expert].chunk(2), experts.w13_scale[expert].chunk(2))
        for part, (codes, exponents) in {"gate": gate, "up": up, "down": (experts.w2[expert], experts.w2_scale[expert])}.items():
            name = f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
            yield name, codes.contiguous(), exponents.contiguous()


def _plain(tensors: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    """All but routed experts' matrices and scales, FP8 ones times their blocks' scales."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            found[name] = fp8_moe.dequantised_weight(tensor[None], tensors[name + SCALE][None], BLOCK)[0].bfloat16()
        elif tensor.dtype != torch.int8 and not name.endswith(SCALE):
            found[name] = tensor
    return found
