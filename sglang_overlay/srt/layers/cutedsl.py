"""Bundles into the kernel that SGLang 0.5.23 has for a layer boundary: FlashInfer's CuTeDSL finalize, all-reduce and norm (SM100).

With ``--flashinfer-allreduce-fusion-backend cutedsl`` SGLang gives its layers that kernel, decides before compute whether a
forward may be handed into it, and hands on what its own deferral leaves unfinalized. Such layers are left to it. What the
overlay defers in other layers, with the flag at 1, is handed on in the form the kernel takes.

What the kernel (FlashInfer 0.7.2) asks of its operands: bf16 weights that hold the whole routed scaling factor, a shared
expert's output, ``[T, K]`` int32 index of whose negative values it skips -1 only, and all of them contiguous.
"""

from __future__ import annotations

from typing import Any, Callable, Optional

import torch

from ..environ import settings
from .moe.boundary.flashinfer import scale_factors
from .moe.deferral import DEFER_GUARDS, first_true, log_once
from .moe.deferred_output import DeferredMoeOutput

BUNDLES, STOCK = "bundles", "what SGLang defers"


def has_kernel(layer: torch.nn.Module) -> bool:
    """Whether SGLang gave a decoder layer its kernel."""
    fusions = getattr(layer.__dict__.get("ffn_boundary"), "fusions", None)
    return type(fusions).__name__ == "CuteDSLFusion"


def mark(layer: torch.nn.Module) -> None:
    """Note on the MoE of a layer with the kernel what that takes from it."""
    if has_kernel(layer):
        layer.mlp.moe_kernel_takes = STOCK if _sglang_defers(layer.mlp) else BUNDLES


def takes(moe: torch.nn.Module) -> Optional[str]:
    """What SGLang's kernel takes from an MoE: ``BUNDLES``, ``STOCK``, or None where there is no kernel."""
    return moe.__dict__.get("moe_kernel_takes")


def needs_own_shared_output(moe: torch.nn.Module) -> bool:
    """Whether an MoE lacks the shared expert's output that the kernel was compiled for."""
    return bool(moe.num_fused_shared_experts) or getattr(moe, "shared_experts", None) is None


def handing_bundles_on(install: Callable[..., Any]) -> Callable[..., Any]:
    """What to call in place of SGLang's ``install_cutedsl_fusion``: layers that hand on bundles may defer too.

    Under auto, too, that is the stock function: nothing was measured into this kernel.
    """
    if settings().is_off or settings().by_policy:
        return install

    def call(layers: Any, *, can_defer_finalize: Callable[[torch.nn.Module], bool], **rest: Any) -> Any:
        handle = install(layers, can_defer_finalize=lambda layer: can_defer_finalize(layer) or _hands_on(layer.mlp), **rest)
        if handle is not None:
            _log(layers)
        return handle

    return call


def unmet(output: DeferredMoeOutput) -> str:
    """The condition a bundle does not meet, by dtypes and strides, which are equal on all ranks; empty where it meets all."""
    gemm2_out, shared_output = output.gemm2_out, output.shared_output
    if gemm2_out.dtype != torch.bfloat16 or gemm2_out.stride() != (output.hidden, 1):
        return f"gemm2 must be bf16 with rows of {output.hidden}, got {gemm2_out.dtype} of strides {gemm2_out.stride()}"
    if shared_output is None or shared_output.dtype != torch.bfloat16:
        return "it takes a bf16 output of the shared expert"
    return ""


def handoff(output: DeferredMoeOutput, complete: Callable[[], torch.Tensor]) -> Any:
    """SGLang's own object for an unfinalized output, of a bundle that ``unmet`` has nothing against.

    Args:
        complete: ``() -> [T, H]``, finalized and reduced, for a reader that is not the kernel. It has the weights as they
            are; the kernel gets them rounded to bf16.
    """
    from sglang.srt.layers.layer_boundary.fusions.moe_finalize import MoeDeferredFinalize

    return MoeDeferredFinalize(
        routed_output=output.gemm2_out,
        expert_weights=scale_factors(output.expert_weights, output.routed_scaling_factor, torch.bfloat16),
        permuted_indices=output.expanded_idx_to_permuted_idx.clamp_min(-1).contiguous(),
        gated_shared_output=output.shared_output.contiguous(),
        m=output.num_tokens,
        finish=complete,
    )


def _sglang_defers(moe: torch.nn.Module) -> bool:
    """Whether SGLang hands this MoE's output into its kernel by its own means."""
    return moe.experts.supports_deferred_finalize and not needs_own_shared_output(moe) and not moe._shared_expert_tp1


def _hands_on(mlp: torch.nn.Module) -> bool:
    # What one of the guards holds back at the start it holds back for good.
    return takes(mlp) == BUNDLES and not mlp.moe_keeps_because and not first_true(DEFER_GUARDS, mlp)


def _log(layers: Any) -> None:
    into_kernel = [layer.layer_id for layer in layers if _hands_on(layer.mlp)]
    left = [layer.layer_id for layer in layers if takes(layer.mlp) == STOCK]
    if into_kernel:
        log_once(f"what layers {into_kernel} defer is handed to the next layer, taken by SGLang's own kernel")
    if left:
        log_once(f"layers {left} are left to SGLang's own deferral and kernel")
