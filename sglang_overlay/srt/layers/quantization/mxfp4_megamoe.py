"""The quantisation method of MXFP4 experts that run in Hopper's mega kernel.

Takes the place of ``Fp8MoEMethod`` where the flag, the runner and the experts say so; weights are created and loaded by that method's
own code, with scales kept as the checkpoint's bytes.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any, Callable, Tuple

import torch

from ...environ import settings
from ..moe.flashinfer_megamoe import ExpertShape, ExpertWeights, MegaMoeExperts, capacities_up_to, refuse

logger = logging.getLogger(__name__)

OTHER_BACKEND = "Serve this model with another --moe-a2a-backend"
IN_OTHER_LAYOUT = "the MXFP4 experts' weights are in the layout of FlashInfer's mega kernel, where no others can be loaded", "Restart the server"
# By the dtype of a parameter: what the checkpoint's bytes are, and as which dtypes it may have them.
AS_BYTES = {
    torch.int8: ("weights", "E2M1 codes, two a byte", (torch.int8, torch.uint8)),
    torch.float8_e8m0fnu: ("scales", "E8M0", (torch.float8_e8m0fnu, torch.uint8)),
}


def choose_fp4_method(stock: Any, prefix: str) -> Any:
    """``stock``, an ``Fp8MoEMethod``, unless these are MXFP4 experts, in FlashInfer's mega runner, on Hopper, and the flag is on."""
    from sglang.srt.layers.moe.utils import get_moe_runner_backend
    from sglang.srt.runtime_context import get_platform

    if not (settings().mxfp4_megamoe and stock.is_fp4_expert and get_moe_runner_backend().is_flashinfer_megamoe()):
        return stock
    return Mxfp4MegaMoEMethod(stock, prefix) if get_platform().is_sm90 else stock


class Mxfp4MegaMoEMethod:
    """Experts of E2M1 codes and E8M0 scales, which go to the kernel as they are loaded."""

    # The top-k multiplies its fp32 weights, so that nothing is rounded once more for it.
    fuse_routed_scaling_factor_in_topk = True
    load_up_proj_weight_first = False

    def __init__(self, fp8_method: Any, prefix: str) -> None:
        self._fp8 = fp8_method
        self.quant_config = fp8_method.quant_config
        self.prefix = prefix
        self.runner: Any = None
        self.experts: Any = None

    def create_weights(self, layer: Any, *args: Any, weight_loader: Callable, with_bias: bool = False, **kwargs: Any) -> None:
        """Parameters for the checkpoint's bytes: codes int8, scales float8_e8m0fnu (raises MegaMoeRefused)."""
        if with_bias:
            refuse("its experts have biases, which the kernel does not add", OTHER_BACKEND)
        shape_of(layer).check()
        self._fp8.create_weights(
            layer, *args, weight_loader=keep_bytes(weight_loader), fp4_scale_dtype=torch.float8_e8m0fnu, **kwargs
        )

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        """SGLang's mega runner, for what asks a layer for it; raises MegaMoeRefused for experts of another arithmetic."""
        from sglang.srt.layers.moe.moe_runner.runner import MoeRunner
        from sglang.srt.layers.moe.utils import MoeRunnerBackend

        refuse_other_arithmetic(moe_runner_config)
        self.moe_runner_config = moe_runner_config
        self.runner = MoeRunner(MoeRunnerBackend.FLASHINFER_MEGAMOE, moe_runner_config)

    def get_moe_runner_backend(self, layer: Any) -> Any:
        return self.runner.runner_backend

    def get_moe_routing_method_type(self, layer: Any, requested_method: Any) -> Any:
        return requested_method

    def process_weights_after_loading(self, layer: Any) -> None:
        """Collective: hand the weights to the kernel, make its workspaces and warm them up, before memory is shared out and graphs are captured.

        Raises:
            MegaMoeRefused: the weights were already handed over, or the kernel does not take them.
        """
        if self.experts is not None:
            refuse(*IN_OTHER_LAYOUT)
        weights = ExpertWeights.as_loaded(
            layer.w13_weight.data, layer.w2_weight.data, layer.w13_weight_scale_inv.data, layer.w2_weight_scale_inv.data
        )
        self.experts = MegaMoeExperts(shape_of(layer), weights, expert_group(), capacities_up_to(settings().megamoe_tokens))
        keep_only_transformed(layer, self.experts.transformed)
        layer._derived_weight_cache_error = ". ".join(IN_OTHER_LAYOUT)  # SGLang answers a request to update weights with it, before it writes any
        log_once(self.experts.shape.world_size, self.experts.capacities)

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """One forward; every rank of the group takes part, also one without tokens."""
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

        hidden_states, routed = dispatch_output.hidden_states, dispatch_output.topk_output
        output = self.experts.forward(
            hidden_states, routed.topk_ids, routed.topk_weights, tokens_of_fullest_rank(hidden_states, self.experts.shape.world_size)
        )
        return StandardCombineInput(hidden_states=output)


@lru_cache(maxsize=None)
def log_once(ranks: int, capacities: Tuple[int, ...]) -> None:
    from sglang.srt.utils import log_info_on_rank0

    workspaces = ", ".join(map(str, capacities))
    log_info_on_rank0(
        logger, f"MXFP4 experts run in FlashInfer's mega kernel for SM90, over {ranks} ranks, in workspaces of {workspaces} tokens a rank."
    )


def shape_of(layer: Any) -> ExpertShape:
    return ExpertShape(
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size_per_partition,
        swiglu_limit=layer.moe_runner_config.swiglu_limit,
        rank=layer.moe_ep_rank,
        world_size=layer.moe_ep_size,
    )


def refuse_other_arithmetic(config: Any) -> None:
    """Raise MegaMoeRefused unless the experts are SwiGLU, weighed after it, and summed.

    Args:
        config: SGLang's ``MoeRunnerConfig``. ``gemm1_alpha`` and ``gemm1_clamp_limit`` belong to variants of SwiGLU.
    """
    variants = [name for name in ("gemm1_alpha", "gemm1_clamp_limit") if getattr(config, name) is not None]
    if config.activation != "silu" or not config.is_gated or variants:
        gated = "gated" if config.is_gated else "not gated"
        told = ", ".join([f"activation {config.activation}", gated, *(f"{name} {getattr(config, name)}" for name in variants)])
        refuse(f"the kernel's activation is SwiGLU with or without a limit, this model's is another ({told})", OTHER_BACKEND)
    if config.apply_router_weight_on_input:
        refuse("this model multiplies the router's weights into the experts' input, the kernel into what SwiGLU gives", OTHER_BACKEND)
    if config.no_combine:
        refuse("the kernel sums each token's experts, but this layer is to return them apart", OTHER_BACKEND)
    if config.num_fused_shared_experts:
        refuse("shared experts are fused with the routed ones", "Add --disable-shared-experts-fusion")


def keep_bytes(load: Callable) -> Callable:
    """SGLang's weight loader, for bytes: codes and exponents that a checkpoint stores as uint8 are no numbers to convert.

    Raises MegaMoeRefused for experts' weights and scales of dtypes that are not MXFP4's.
    """

    def load_bytes(param: Any, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if param.dtype in AS_BYTES:
            what, of_mxfp4, dtypes = AS_BYTES[param.dtype]
            if loaded_weight.dtype not in dtypes:
                refuse(f"the checkpoint has expert {what} of {loaded_weight.dtype}, MXFP4 has {of_mxfp4}", OTHER_BACKEND)
            loaded_weight = loaded_weight.view(param.dtype)
        return load(param, loaded_weight, *args, **kwargs)

    return load_bytes


def keep_only_transformed(layer: Any, transformed: Any) -> None:
    """Let go of the loaded weights: the layer's parameters become the kernel's own tensors, as they are laid out.

    ``transformed`` is FlashInfer's: for each GEMM weights, folded scales and two more, of which only the former two replace parameters.
    """
    for name, leg in zip(("w13", "w2"), transformed):
        for parameter, tensor in zip((f"{name}_weight", f"{name}_weight_scale_inv"), leg):
            setattr(layer, parameter, torch.nn.Parameter(tensor, requires_grad=False))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def expert_group() -> Any:
    """The process group of the expert-parallel ranks, on their devices."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().moe_ep_group.device_group


def tokens_of_fullest_rank(hidden_states: torch.Tensor, world_size: int) -> int:
    """The tokens of the rank that has most, the same number on every rank.

    Raises:
        RuntimeError: there are several ranks and SGLang has not gathered their token counts.
    """
    if world_size == 1:
        return hidden_states.shape[0]
    from sglang.srt.layers.dp_attention import get_dp_global_num_tokens

    counts = get_dp_global_num_tokens()
    if counts is None:
        raise RuntimeError("the ranks' token counts were not gathered for this forward, so they could not choose the same workspace")
    return max(counts)
