"""The layer boundary: how the next layer's ``prepare_attn`` takes a deferred MoE output.

A way turns a bundle and the residual into ``(norm_out, residual_out)``, both ``[T, H]``, fresh and complete
on every rank: ``norm_out = RMSNorm(residual_out)``, ``residual_out = residual + all_reduce(finalize(bundle))``.
Which way a forward takes is settled per model, in ``moe/boundary/model.py``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Callable, Dict, Optional, Tuple

import torch

from ..upstream import fused_all_reduce, input_is_scattered
from .layernorm import fusion_unmet, weight_bias
from .moe.boundary import flashinfer as flashinfer_kernel
from .moe.boundary import kernel as fused_kernel
from .moe.boundary.model import Boundary
from .moe.counters import COUNTERS
from .moe.deferral import Guard, first_true, log_once
from .moe.deferred_output import DeferredMoeOutput, finalize

Outputs = Tuple[torch.Tensor, torch.Tensor]
Way = Callable[[Boundary, torch.nn.Module, DeferredMoeOutput, torch.Tensor], Outputs]


def take_deferred(
    communicator: Any,
    output: DeferredMoeOutput,
    residual: Optional[torch.Tensor],
    forward_batch: Any,
    post_residual_addition: Optional[torch.Tensor] = None,
) -> Outputs:
    """``LayerCommunicator.prepare_attn`` for a bundle: looked at before anything that asks for a shape.

    Raises:
        RuntimeError: no residual of T rows came with the bundle, or the layer's input is scattered;
            the decision to carry is made so that neither happens.
    """
    boundary = getattr(communicator, "moe_boundary", None) or unlinked()
    hidden_states, residual = take_over(boundary, communicator.input_layernorm, output, residual, post_residual_addition)
    return _enter_attention(communicator, hidden_states, forward_batch), residual


def take_over(
    boundary: Boundary,
    layernorm: torch.nn.Module,
    output: DeferredMoeOutput,
    residual: Optional[torch.Tensor],
    post_residual_addition: Optional[torch.Tensor],
) -> Outputs:
    """Finish a bundle by the boundary's way for it; raises RuntimeError as ``take_deferred`` does."""
    _check_hand_over(output, residual)
    if post_residual_addition is not None:
        residual = residual + post_residual_addition
    way = way_for(boundary, layernorm, output, residual)
    COUNTERS.count_way(way, output.num_tokens)
    return WAYS[way](boundary, layernorm, output, residual)


def way_for(boundary: Boundary, layernorm: torch.nn.Module, output: DeferredMoeOutput, residual: torch.Tensor) -> str:
    """The model's way for this many tokens; the one to fall back to where the bundle is not of the form it takes."""
    way = boundary.way(output.num_tokens)
    reason = bundle_unmet(way, boundary, layernorm, output, residual)
    if not reason:
        return way
    fallback = boundary.fallback(output.num_tokens)
    log_once(f"{fallback} in place of {way}: {reason}")
    return fallback


def bundle_unmet(
    way: str, boundary: Boundary, layernorm: torch.nn.Module, output: DeferredMoeOutput, residual: torch.Tensor
) -> str:
    """Why a way does not take a bundle; empty where it does. By dtypes, shapes and strides, which are equal on all ranks."""
    if way == "fused":
        return fused_kernel.unmet(boundary.plane, output, residual, layernorm.weight)
    if way == "flashinfer":
        return flashinfer_kernel.bundle_unmet(output, residual, layernorm.weight)
    return ""


def fused(boundary: Boundary, layernorm: torch.nn.Module, output: DeferredMoeOutput, residual: torch.Tensor) -> Outputs:
    """All of it in one kernel, over the model's exchange plane."""
    gamma, eps = layernorm.weight.data, layernorm.variance_epsilon
    return fused_kernel.fused_boundary(boundary.plane, output, residual, gamma, eps, weight_bias(layernorm))


def flashinfer(boundary: Boundary, layernorm: torch.nn.Module, output: DeferredMoeOutput, residual: torch.Tensor) -> Outputs:
    """All of it in FlashInfer's kernel, over the model's workspace."""
    gamma, eps = layernorm.weight.data, layernorm.variance_epsilon
    return flashinfer_kernel.take(boundary.workspace, output, residual, gamma, eps, weight_bias(layernorm))


def eager(boundary: Boundary, layernorm: torch.nn.Module, output: DeferredMoeOutput, residual: torch.Tensor) -> Outputs:
    """Finalize, all-reduce, norm: three steps, on every device."""
    # A clone, because the plain norm adds into the residual in place and an earlier layer's may be held elsewhere.
    return layernorm(all_reduce(finalize(output)), residual.clone())


def separate(boundary: Boundary, layernorm: torch.nn.Module, output: DeferredMoeOutput, residual: torch.Tensor) -> Outputs:
    """Finalize, then FlashInfer's fused all-reduce + residual + RMSNorm.

    Calls the fused op itself: where it declines, the stock norm would go on without the all-reduce.
    """
    from sglang.srt.layers.flashinfer_comm_fusion import flashinfer_allreduce_residual_rmsnorm

    hidden_states = finalize(output)
    norm_out, residual_out = flashinfer_allreduce_residual_rmsnorm(
        input_tensor=hidden_states,
        residual=residual,
        weight=layernorm.weight,
        eps=layernorm.variance_epsilon,
        # As stock asks, so that the two share one workspace and none grows while serving.
        max_token_num=separate_up_to(),
        use_attn_tp_group=False,
    )
    if norm_out is None:
        return layernorm(all_reduce(hidden_states), residual.clone())
    return norm_out, residual_out


WAYS: Dict[str, Way] = {"fused": fused, "flashinfer": flashinfer, "separate": separate, "eager": eager}


def separate_up_to() -> int:
    """The most tokens that ``separate`` takes: those of SGLang's own workspace."""
    return fused_all_reduce().FUSE_ALLREDUCE_MAX_BATCH_SIZE


@lru_cache(maxsize=1)
def unlinked() -> Boundary:
    """For a layer that no model has linked and that is handed a bundle all the same."""
    return Boundary(wanted="eager", separate_up_to=0)


def separate_unmet(norms: Tuple[torch.nn.Module, ...]) -> str:
    """The condition that keeps FlashInfer's fused all-reduce + norm from running before these norms; empty where it runs."""
    from sglang.srt.layers.flashinfer_comm_fusion import is_flashinfer_allreduce_unavailable
    from sglang.srt.runtime_context import get_exec, get_parallel

    stock = fused_all_reduce()
    return first_true(
        (
            (
                lambda _: not (stock._is_sm90_supported or stock._is_sm100_supported),
                "it needs an NVIDIA GPU of SM90 or SM100",
            ),
            (lambda _: not stock._is_flashinfer_available, "FlashInfer is not installed"),
            (lambda _: get_parallel().tp_size == 1, "there is nothing to reduce at world size 1"),
            (
                lambda _: get_exec().comm.flashinfer_allreduce_fusion_backend is None,
                "FlashInfer all-reduce fusion is off (--flashinfer-allreduce-fusion-backend)",
            ),
            (lambda _: is_flashinfer_allreduce_unavailable(), "FlashInfer's all-reduce workspace is unavailable"),
            (
                lambda norms: any(fusion_unmet(norm) or weight_bias(norm) for norm in norms),
                "a layer's norm is not the plain RMSNorm",
            ),
        ),
        norms,
    )


def all_reduce(hidden_states: torch.Tensor) -> torch.Tensor:
    """Sum ``[T, H]`` over the tensor-parallel group, as the stock MoE does after its experts."""
    from sglang.srt.distributed import tensor_model_parallel_all_reduce
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().tp_size == 1:
        return hidden_states
    return tensor_model_parallel_all_reduce(hidden_states)


def keeps_because(communicator: Any, next_communicator: Any) -> str:
    """Why a bundle cannot pass from one layer's communicator to the next's; empty where it can."""
    return first_true(CARRY_GUARDS, (communicator, next_communicator))


def _is_plain(communicator: Any) -> bool:
    from sglang.srt.layers.communicator import LayerCommunicator

    return type(communicator) is LayerCommunicator


def _moves_tokens(communicators: Tuple[Any, Any]) -> bool:
    from sglang.srt.layers.communicator import (
        CommunicateSimpleFn,
        CommunicateSummableTensorPairFn,
        ScatterMode,
    )

    this, following = communicators
    return (
        this.layer_scatter_modes.mlp_mode != ScatterMode.FULL
        or this._communicate_summable_tensor_pair_fn is not CommunicateSummableTensorPairFn._trivial
        or following._communicate_simple_fn is not CommunicateSimpleFn._trivial
    )


CARRY_GUARDS: Tuple[Guard, ...] = (
    (lambda pair: pair[1] is None, "the last layer of the model or of its pipeline stage"),
    (lambda pair: not all(map(_is_plain, pair)), "a layer communicator of its own"),
    (_moves_tokens, "tokens are scattered or gathered between the layers"),
)


def _check_hand_over(output: DeferredMoeOutput, residual: Optional[torch.Tensor]) -> None:
    if residual is None or residual.shape[0] != output.num_tokens:
        rows = "no residual" if residual is None else f"a residual of {residual.shape[0]} rows"
        raise RuntimeError(f"a deferred MoE output of {output.num_tokens} tokens arrived with {rows}")
    if input_is_scattered():
        raise RuntimeError("a deferred MoE output arrived at a layer whose input is scattered")


def _enter_attention(communicator: Any, hidden_states: torch.Tensor, forward_batch: Any) -> torch.Tensor:
    from sglang.srt.layers.communicator import AttentionInputs, get_attn_tp_context

    hidden_states = communicator._communicate_simple_fn(
        hidden_states=hidden_states, forward_batch=forward_batch, context=communicator._context
    )
    if communicator.qkv_latent_func is not None:
        inputs = AttentionInputs(hidden_states, forward_batch, communicator.qkv_latent_func)
        get_attn_tp_context().set_attn_inputs(inputs)
    return hidden_states
