"""The tiny seeded DeepSeek-V3 of ``checkpoint``, block-quantised to FP8 as DeepSeek publishes its own.

Every projection is E4M3 in blocks of 128 x 128, each with one scale (``weight_scale_inv``, fp32, a power of two); embeddings, head, router and norms stay bf16.
The configuration declares ``scale_fmt: ue8m0``, or does not; the weights are the same.
"""
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from .checkpoint import Shape, make_checkpoint

BLOCK = 128
E4M3_MAX = 448.0
SHAPE = Shape(hidden=512, layers=4, experts=16, topk=4)


def make_fp8_checkpoint(folder: Path, declared: bool, shape: Shape = SHAPE) -> Path:
    """Write a checkpoint of this shape, the same bytes for the same arguments; its hidden size must be a multiple of 128."""
    folder = make_checkpoint(Path(folder), shape)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors.update(_quantised(name, tensor) if name.endswith("_proj.weight") or "_proj_with_" in name else {name: _kept(name, tensor)})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    if declared:
        quantization["scale_fmt"] = "ue8m0"
    config = {**json.loads(path.read_text()), "torch_dtype": "bfloat16", "quantization_config": quantization}
    path.write_text(json.dumps(config, indent=1))
    return folder


def _kept(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16()


def _quantised(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    rows, columns = weight.shape
    blocks = F.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK)).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax((1, 3)) / E4M3_MAX)))
    codes = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
    return {name: codes.contiguous().to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
