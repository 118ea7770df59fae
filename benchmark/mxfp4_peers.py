"""SGLang's own ways for MXFP4 experts on Hopper, through the expert layers of 0.5.23 or 0.5.20, on one GPU."""

from __future__ import annotations

import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Callable, Dict, NamedTuple, Optional

import mxfp4_moe
import torch

TUNED_TOKENS = 2048


class Peer(NamedTuple):
    """How a layer is told to take a way: ``--moe-runner-backend``, ``--flashinfer-mxfp4-moe-precision``, SGLANG_DSV4_FP4_DEQUANT."""

    runner: str
    precision: str = "default"
    dequantised: bool = False


PEERS: Dict[str, Peer] = {
    "flashinfer W4A16": Peer("flashinfer_mxfp4"),
    "flashinfer W4A8": Peer("flashinfer_mxfp4", precision="fp8"),
    "humming": Peer("humming"),
    "marlin": Peer("marlin"),
    "triton FP8": Peer("auto", dequantised=True),
}


def start(tree: Path) -> None:
    """Make this process SGLang's only rank; ``tree`` holds its package."""
    sys.path.insert(0, str(tree.resolve()))
    from sglang_rank import start_one_rank

    with tempfile.TemporaryDirectory() as folder:
        start_one_rank(Path(folder))


class Layer(NamedTuple):
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    weight_bytes: int


def make_layer(peer: Peer, shape: Any, weights: Any, limit: Optional[float]) -> Layer:
    """A layer with these weights, prepared as the way wants them; raises whatever SGLang or the way's library raises."""
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.layers.moe.utils import MoeRunnerBackend
    from sglang.srt.runtime_context import get_exec, get_flags

    before = torch.cuda.memory_allocated()
    told = {} if peer.precision == "default" else {"flashinfer_mxfp4_moe_precision": peer.precision}
    with get_exec().moe.override(**told) if told else nullcontext():
        get_flags().moe.runner_backend = MoeRunnerBackend(peer.runner)
        experts = _build(peer, shape, limit)
        _fill(experts, weights)
        experts.quant_method.process_weights_after_loading(experts)
    torch.cuda.empty_cache()

    def run(x: torch.Tensor, ids: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
        # Kernels may write over their input; of the router's logits one asks the shape.
        return experts(x.clone(), StandardTopKOutput(routing, ids.int(), routing.new_empty(len(x), shape.experts)))

    held = torch.cuda.memory_allocated() - before
    if peer.runner == "flashinfer_mxfp4":
        _tune(run, shape)
    return Layer(run, held)


def _tune(run: Callable[..., torch.Tensor], shape: Any) -> None:
    """What SGLang does at start-up for this runner: FlashInfer times its tactics, here up to ``TUNED_TOKENS``."""
    from flashinfer.autotuner import autotune

    with autotune(True):
        run(*mxfp4_moe.random_tokens(shape, TUNED_TOKENS, device="cuda"))
    torch.cuda.empty_cache()


def _build(peer: Peer, shape: Any, limit: Optional[float]) -> torch.nn.Module:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    config = Fp8Config.from_config({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]})
    config.is_fp4_experts, config.dequant_fp4_to_fp8 = True, peer.dequantised
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return FusedMoE(
                num_experts=shape.experts, top_k=shape.top_k, layer_id=0, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
                params_dtype=torch.bfloat16, quant_config=config, prefix="mlp.experts", swiglu_limit=limit, inplace=False,
            )
    finally:
        torch.set_default_dtype(default)


def _fill(experts: torch.nn.Module, weights: Any) -> None:
    """What the weight loaders would put there; some ways want the up rows first."""
    swapped = getattr(experts.quant_method, "load_up_proj_weight_first", False)

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(tensor.chunk(2, 1)[::-1], 1) if swapped else tensor

    experts.w13_weight.data.copy_(rows(weights.w13).view(torch.int8))
    experts.w2_weight.data.copy_(weights.w2.view(torch.int8))
    experts.w13_weight_scale_inv.data.copy_(rows(weights.w13_scale).view(torch.float8_e8m0fnu))
    experts.w2_weight_scale_inv.data.copy_(weights.w2_scale.view(torch.float8_e8m0fnu))
