"""Producers over FlashInfer's TRT-LLM MoE kernels, which can leave their own finalize out.

With ``do_finalize=False`` a kernel returns ``[gemm2_out, expert_weights, expanded_idx_to_permuted_idx]``. The weights
are bf16 where the kernel routes by itself, and the caller's own tensor where ids and weights were given apart
(FlashInfer 0.6.18, ``fused_moe/core.py``). Routing in the kernel multiplies the routed scaling factor into the
weights; given weights are taken as they are, whatever factor the call names.

The stock call sites run as they are. Where one of them heeds SGLang's own context for this, that context is entered.
Where it can only finalize (0.5.20), a patch puts ``deferring`` (or ``deferring_fp8_routed``) around the name of what it
calls, and ``allocating`` around what makes its output; outside a deferral those are the stock callees.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Callable, Iterator, NamedTuple, Optional, Tuple

import torch
from packaging.version import InvalidVersion, Version

from ....upstream import routed_deferral
from ..deferred_output import DeferredMoeOutput
from .row import Producer, Row, bundle_of, dispatch

# From this release on FlashInfer labels the weights of its own routing as what they are, bf16 (flashinfer#3595).
LABELS_WEIGHTS_FROM = Version("0.6.15")


class Unfinalized(NamedTuple):
    """What a kernel returns with ``do_finalize=False``.

    ``gemm2_out`` ``[P, H]`` bf16 with padding rows; ``expert_weights`` ``[T, K]`` bf16 or fp32;
    ``expanded_idx_to_permuted_idx`` ``[T * K]`` or ``[T, K]`` int32.
    """

    gemm2_out: torch.Tensor
    expert_weights: torch.Tensor
    expanded_idx_to_permuted_idx: torch.Tensor


@dataclass
class _Deferral:
    """The kernel call under way: where a seam leaves the result that the stock code has no name for."""

    result: Optional[Unfinalized] = None

    def keep(self, returned: Any) -> list:
        self.result = Unfinalized(*returned[:3])
        return [self.result]


_UNDER_WAY: ContextVar[Optional[_Deferral]] = ContextVar("moe_deferral_under_way", default=None)


def deferring(callee: Callable[..., Any]) -> Callable[..., Any]:
    """What to call in place of a FlashInfer MoE function with ``do_finalize`` and ``output`` among its keywords."""
    under_way = _UNDER_WAY.get()
    if under_way is None:
        return callee

    def call(*, do_finalize: bool = True, output: Optional[torch.Tensor] = None, **kwargs: Any) -> list:
        return under_way.keep(callee(**kwargs, do_finalize=False))

    return call


def allocating(empty: Callable[..., torch.Tensor]) -> Callable[..., Optional[torch.Tensor]]:
    """What to call in place of ``torch.empty`` for a finished output ``[T, H]``: within a deferral nothing is finished."""
    return empty if _UNDER_WAY.get() is None else lambda *size, **kwargs: None


def deferring_fp8_routed(stock_wrapper: Callable[..., None]) -> Callable[..., Any]:
    """What to call in place of SGLang's custom op over ``trtllm_fp8_block_scale_routed_moe``.

    The op hands ids and weights on as a pair and its enumerations as such, and so does this.
    """
    under_way = _UNDER_WAY.get()
    if under_way is None:
        return stock_wrapper

    def call(*, topk_ids, topk_weights, output, fp8_quantization_type, activation_type, **kwargs) -> list:
        from flashinfer.fused_moe import Fp8QuantizationType, trtllm_fp8_block_scale_routed_moe
        from flashinfer.fused_moe.core import ActivationType

        if activation_type is not None:
            kwargs["activation_type"] = ActivationType(activation_type)
        returned = trtllm_fp8_block_scale_routed_moe(
            topk_ids=topk_ids if topk_weights is None else (topk_ids, topk_weights),
            fp8_quantization_type=Fp8QuantizationType(fp8_quantization_type),
            do_finalize=False,
            **kwargs,
        )
        return under_way.keep(returned)

    return call


def adapting(stock_adapter: Callable[..., Any]) -> Callable[..., Any]:
    """What to call in place of the stock adapter, which reads any fp32 weights as bf16."""
    under_way = _UNDER_WAY.get()
    if under_way is None:
        return stock_adapter
    return lambda returned, *, top_k: under_way.keep(returned)[0]


def bypassed_producer(experts: torch.nn.Module) -> Producer:
    """A producer for kernels that take logits and route by themselves.

    Their weights hold the routed scaling factor already, so the bundle's is 1. SGLang's own context makes the stock
    call sites leave the finalize out.
    """
    from sglang.srt.layers.moe.moe_runner.flashinfer_trtllm import flashinfer_trtllm_deferred_finalize_context

    weights_of = _weights_under_fp32_label if _mislabels_weights() else _weights_as_they_are

    def produce(hidden_states, topk_output, pre_quant_input=None) -> DeferredMoeOutput:
        dispatched = dispatch(experts, hidden_states, topk_output, pre_quant_input)
        with flashinfer_trtllm_deferred_finalize_context():
            unfinalized = _run_unfinalized(experts, dispatched)
        return _bundle_of_tokens(unfinalized, weights_of(unfinalized), hidden_states.shape, 1.0)

    return produce


def routed_producer(experts: torch.nn.Module) -> Producer:
    """A producer for kernels that are given ids and fp32 weights.

    Such a kernel never scales: the factor is in the weights where SGLang's top-k put it there, else it is left to finalize.
    """
    factor = experts.moe_runner_config.routed_scaling_factor
    in_weights = experts.should_fuse_routed_scaling_factor_in_topk or factor is None
    scale = 1.0 if in_weights else float(factor)
    leaving_finalize_out = routed_deferral()

    def produce(hidden_states, topk_output, pre_quant_input=None) -> DeferredMoeOutput:
        dispatched = dispatch(experts, hidden_states, topk_output, pre_quant_input)
        with leaving_finalize_out():
            unfinalized = _run_unfinalized(experts, dispatched)
        return _bundle_of_tokens(unfinalized, unfinalized.expert_weights, hidden_states.shape, scale)

    return produce


def unfit_experts(experts: torch.nn.Module) -> str:
    """Why a layer does not defer whatever its weights are: a reason, or empty."""
    config = experts.moe_runner_config
    if config.activation != "silu" or not config.is_gated:
        return f"activation {config.activation} (gated: {config.is_gated}) in a TRT-LLM kernel"
    if experts.w2_weight.shape[1] != experts.hidden_size_unpadded:
        return "a padded hidden size"
    return ""


def unfit_fp8(experts: torch.nn.Module) -> str:
    """Why a layer with 8-bit experts does not defer: a reason, or empty."""
    if not experts.quant_method.block_quant:
        return "FP8 with one scale per tensor, whose kernel call cannot leave its finalize out"
    if experts.quant_method.use_mxfp8:
        return "MXFP8 experts, which nothing here was checked against"
    return unfit_experts(experts)


def unfit_bypassed(unfit: Callable[[torch.nn.Module], str]) -> Callable[[torch.nn.Module], str]:
    """``unfit``, and that the kernel routes the one way that is known to scale its weights."""

    def check(experts: torch.nn.Module) -> str:
        from sglang.srt.layers.moe.utils import RoutingMethodType

        if experts.routing_method_type != RoutingMethodType.DeepSeekV3:
            return "routing inside the kernel by another method than DeepSeek-V3's"
        return unfit(experts)

    return check


@contextmanager
def _under_way() -> Iterator[_Deferral]:
    token = _UNDER_WAY.set(_Deferral())
    try:
        yield _UNDER_WAY.get()
    finally:
        _UNDER_WAY.reset(token)


def _run_unfinalized(experts: torch.nn.Module, dispatched: Any) -> Unfinalized:
    with _under_way() as deferral:
        returned = experts.run_moe_core(dispatch_output=dispatched).hidden_states
    if deferral.result is not None:
        return deferral.result
    # A stock call site that leaves finalize out by itself returns its own class, the result in it untouched.
    return Unfinalized(returned.gemm2_out, returned.expert_weights, returned.expanded_idx_to_permuted_idx)


def _bundle_of_tokens(
    unfinalized: Unfinalized, expert_weights: torch.Tensor, shape: Tuple[int, int], scale: float
) -> DeferredMoeOutput:
    """``bundle_of`` the first T rows of weights and index, where a kernel was run on more rows than there are tokens."""
    num_pairs = shape[0] * expert_weights.shape[-1]
    index = unfinalized.expanded_idx_to_permuted_idx.flatten()[:num_pairs]
    unfinalized = unfinalized._replace(expanded_idx_to_permuted_idx=index)
    return bundle_of(unfinalized, expert_weights[: shape[0]], shape, scale)


def _weights_as_they_are(unfinalized: Unfinalized) -> torch.Tensor:
    return unfinalized.expert_weights


def _weights_under_fp32_label(unfinalized: Unfinalized) -> torch.Tensor:
    """The bf16 weights ``[T, K]`` that an old FlashInfer wrote to the front of a buffer it made for fp32 logits."""
    buffer = unfinalized.expert_weights
    if buffer.dtype != torch.float32:
        return buffer
    return buffer.view(torch.bfloat16).flatten()[: buffer.numel()].view(buffer.shape)


def _mislabels_weights() -> bool:
    """Whether this FlashInfer labels bf16 weights fp32; a version that cannot be read is taken for a new one's build."""
    import flashinfer

    try:
        return Version(flashinfer.__version__) < LABELS_WEIGHTS_FROM
    except InvalidVersion:
        return False


_bypassed_fp4, _bypassed_fp8 = unfit_bypassed(unfit_experts), unfit_bypassed(unfit_fp8)
_BF16, _FP32 = torch.bfloat16, torch.float32
_NVFP4, _FP8, _MXFP4 = "ModelOptNvFp4FusedMoEMethod", "Fp8MoEMethod", "Mxfp4FlashinferTrtllmMoEMethod"
_LOGITS, _ROUTED = "flashinfer_trtllm", "flashinfer_trtllm_routed"
ROWS: Tuple[Row, ...] = (
    Row(_NVFP4, _LOGITS, "cuda", "bypassed", _BF16, "kernel", bypassed_producer, _bypassed_fp4),
    Row(_NVFP4, _ROUTED, "cuda", "standard", _FP32, "top-k", routed_producer, unfit_experts),
    Row(_FP8, _LOGITS, "cuda", "bypassed", _BF16, "kernel", bypassed_producer, _bypassed_fp8),
    Row(_FP8, _ROUTED, "cuda", "standard", _FP32, "top-k", routed_producer, unfit_fp8),
    Row(_MXFP4, "none", "cuda", "standard", _FP32, "top-k", routed_producer, unfit_experts),
)
