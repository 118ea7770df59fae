"""The boundary in FlashInfer's kernel: ``allreduce_fusion`` with ``kMoEFinalizeARResidualRMSNorm`` (pattern 7).

Kept beside the own kernel as a way and as what it is measured against. The kernel accumulates in the activations' dtype
and rounds after every step, so its results are further from the exact ones than those of the other ways.

What the call of FlashInfer 0.6.18 does not check, and this module does:

- top_k is the index's last dimension: a flat index is read out of bounds;
- the weights must have the activations' dtype: fp32 is read as pairs of them;
- the unified call drops the routed scaling factor: it goes into the weights, in fp32, before they are rounded;
- of the negative index values the kernel skips -1 only;
- gemm2's rows are adjacent (stride H), its offsets 32 bits wide, and H a multiple of 256, with H / 256 a
  product of at most 8 and at most 32, which are its blocks per cluster and warps per block;
- a workspace over ``MAX_COMM_SIZE`` is cut down to it silently.

A model has a workspace of its own instead of SGLang's, because SGLang's may be of the mnnvl backend, which has no pattern
7, is destroyed and made anew where a larger one is needed, under the graphs that captured it, and is shared by target
and draft model, whose launches would have to be in one order. The price is memory: four times
``max_tokens * H * world_size`` elements per rank.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Dict, Optional, Tuple

import torch

from ..deferred_output import DeferredMoeOutput
from .kernel import rows_unmet

WORLD_SIZES = (2, 4, 8, 16)
DTYPES = (torch.bfloat16, torch.float16)
# As in flashinfer.comm.trtllm_ar: the largest 32-bit size, in whole 2 MiB.
MAX_COMM_SIZE = 2147483647 & ~((1 << 21) - 1)
MAX_BLOCKS, MAX_WARPS = 8, 32

# The op takes no objects, so it names its workspace by number.
_WORKSPACES: Dict[int, "Workspace"] = {}
_NUMBERS = itertools.count()


class WorkspaceUnavailable(RuntimeError):
    """This rank could not set up its part of the workspace."""


@dataclass(frozen=True)
class Workspace:
    """A model's trtllm workspace for ``max_tokens`` rows; ``backing`` is FlashInfer's object.

    Never grown: a forward of more tokens takes another way.
    """

    backing: Any
    world_size: int
    hidden: int
    dtype: torch.dtype
    max_tokens: int
    number: int

    @classmethod
    def create(cls, group: Any, hidden: int, dtype: torch.dtype, max_tokens: int) -> "Workspace":
        """Set up the workspace on all ranks of an SGLang group together, before any graph is captured; compiles the kernels.

        Raises:
            WorkspaceUnavailable: on every rank where memory does not suffice on one of them; where FlashInfer fails
                otherwise, perhaps on this rank only, so the callers have to agree on what they got.
        """
        from sglang.srt.layers import flashinfer_comm_fusion as stock

        world_size = group.world_size
        # A rank that fails to allocate while its peers already exchange handles would leave them waiting.
        if not stock._preflight_check_workspace_memory(world_size, max_tokens, hidden, dtype, group.cpu_group):
            raise WorkspaceUnavailable("a rank cannot allocate FlashInfer's workspace")
        sizes = dict(world_size=world_size, rank=group.rank_in_group, max_token_num=max_tokens, hidden_dim=hidden)
        try:
            backing = _comm().create_allreduce_fusion_workspace(
                backend="trtllm", dtype=dtype, group=group.device_group, comm_backend=_comm_backend(group), **sizes
            )
        except Exception as error:
            raise WorkspaceUnavailable(f"FlashInfer made no workspace: {error}") from error
        return cls.around(backing, world_size, hidden, dtype, max_tokens)

    @classmethod
    def around(cls, backing: Any, world_size: int, hidden: int, dtype: torch.dtype, max_tokens: int) -> "Workspace":
        """The workspace over an object of FlashInfer's, known to the op from now on."""
        workspace = cls(backing, world_size, hidden, dtype, max_tokens, next(_NUMBERS))
        _WORKSPACES[workspace.number] = workspace
        return workspace

    def takes(self, num_tokens: int) -> bool:
        """Whether a forward of this many tokens fits; asked with tokens, never with gemm2's padded rows."""
        return num_tokens <= self.max_tokens and self.backing.is_buffer_size_sufficient(
            tp_size=self.world_size, num_tokens=num_tokens, hidden_dim=self.hidden, dtype=self.dtype
        )


def most_tokens(world_size: int, hidden: int) -> int:
    """The largest T whose rows of two-byte elements FlashInfer's buffers hold: ``T * H * 2 * N <= MAX_COMM_SIZE``."""
    return MAX_COMM_SIZE // (world_size * hidden * 2)


def shape_unmet(world_size: int, hidden: int, dtype: torch.dtype) -> str:
    """The condition a model does not meet, whatever the machine; empty where it meets all."""
    if world_size not in WORLD_SIZES:
        return f"it needs {WORLD_SIZES} ranks, there are {world_size}"
    if dtype not in DTYPES:
        return f"it needs bf16 or fp16 activations, they are {dtype}"
    if hidden % 256 != 0:
        return f"it needs a hidden size that is a multiple of 256, it is {hidden}"
    warps = hidden // 256
    if warps // math.gcd(warps, MAX_BLOCKS) > MAX_WARPS:
        return f"a hidden size of {hidden} does not divide into its blocks"
    return ""


def bundle_unmet(output: DeferredMoeOutput, residual: torch.Tensor, gamma: torch.Tensor) -> str:
    """The condition a bundle does not meet, by facts that are equal on all ranks; empty where it meets all."""
    gemm2_out = output.gemm2_out
    if gemm2_out.stride() != (output.hidden, 1):
        return f"gemm2's rows must be adjacent, their stride is {gemm2_out.stride()} for H = {output.hidden}"
    if gemm2_out.numel() >= 1 << 31:
        return f"gemm2 must have less than 2**31 elements, it has {gemm2_out.numel()}"
    return rows_unmet(output, residual, gamma)


def take(
    workspace: Workspace, output: DeferredMoeOutput, residual: torch.Tensor, gamma: torch.Tensor, eps: float, weight_bias: float
) -> Tuple[torch.Tensor, torch.Tensor]:
    """``(norm_out, residual_out)`` of a bundle; both ``[T, H]`` in the residual's dtype, fresh."""
    return moe_finalize_allreduce_residual_rmsnorm(
        output.gemm2_out,
        output.expanded_idx_to_permuted_idx,
        output.expert_weights,
        output.shared_output,
        residual,
        gamma,
        output.routed_scaling_factor,
        eps,
        weight_bias,
        workspace.number,
    )


@torch.library.custom_op("moe_finalize_overlay::moe_finalize_allreduce_residual_rmsnorm", mutates_args=())
def moe_finalize_allreduce_residual_rmsnorm(
    gemm2_out: torch.Tensor,
    index: torch.Tensor,
    expert_weights: torch.Tensor,
    shared_output: Optional[torch.Tensor],
    residual: torch.Tensor,
    gamma: torch.Tensor,
    routed_scaling_factor: float,
    eps: float,
    weight_bias: float,
    workspace: int,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """FlashInfer's pattern 7 on tensors of one rank.

    Args:
        gemm2_out: ``[P, H]`` bf16 or fp16, its rows adjacent.
        index: ``[T, K]`` int32; negative: no expert here.
        expert_weights: ``[T, K]`` fp32 or bf16, without the routed scaling factor that is given beside them.
        shared_output: ``[T, H]`` or None. residual: ``[T, H]``. gamma: ``[H]``.
        weight_bias: added to gamma: 0, or 1 for Gemma's norm.
        workspace: ``Workspace.number``.

    Returns:
        ``norm_out`` and ``residual_out``, ``[T, H]`` like ``residual``.

    Raises:
        ValueError: a shape or dtype that FlashInfer would misread; the message names it.
    """
    backing = _WORKSPACES[workspace].backing
    _check(gemm2_out, index, expert_weights, residual, gamma)
    norm_out, residual_out = _empty_outputs(residual)
    if residual.shape[0] == 0:
        return norm_out, residual_out
    comm = _comm()
    comm.allreduce_fusion(
        input=gemm2_out,
        workspace=backing,
        pattern=comm.AllReduceFusionPattern.kMoEFinalizeARResidualRMSNorm,
        launch_with_pdl=True,
        residual_in=residual.contiguous(),
        residual_out=residual_out,
        norm_out=norm_out,
        rms_gamma=gamma,
        rms_eps=eps,
        weight_bias=weight_bias,
        expanded_idx_to_permuted_idx=index.clamp_min(-1).contiguous(),
        expert_scale_factor=scale_factors(expert_weights, routed_scaling_factor, residual.dtype),
        shared_expert_output=None if shared_output is None else shared_output.contiguous(),
    )
    return norm_out, residual_out


@moe_finalize_allreduce_residual_rmsnorm.register_fake
def _(gemm2_out, index, expert_weights, shared_output, residual, *rest):
    return _empty_outputs(residual)


def scale_factors(expert_weights: torch.Tensor, routed_scaling_factor: float, dtype: torch.dtype) -> torch.Tensor:
    """The weights ``[T, K]`` as the kernel reads them: scaled in fp32, then rounded once to the activations' dtype."""
    if routed_scaling_factor != 1.0:
        expert_weights = expert_weights.float() * routed_scaling_factor
    return expert_weights.to(dtype).contiguous()


def _empty_outputs(residual: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    # Contiguous whatever the residual's strides, as the kernel writes rows of H.
    return residual.new_empty(residual.shape), residual.new_empty(residual.shape)


def _check(gemm2_out, index, expert_weights, residual, gamma) -> None:
    tokens, hidden = residual.shape
    if index.dim() != 2 or index.shape != expert_weights.shape or index.shape[0] != tokens:
        raise ValueError(
            f"the index must be [{tokens}, K] like the weights {list(expert_weights.shape)}, got {list(index.shape)}"
        )
    if index.dtype != torch.int32:
        raise ValueError(f"the index must be int32, got {index.dtype}")
    if gemm2_out.stride() != (hidden, 1):
        raise ValueError(f"gemm2's row stride must be {hidden}, got {gemm2_out.stride()}")
    if not gemm2_out.dtype == residual.dtype == gamma.dtype or residual.dtype not in DTYPES:
        raise ValueError(
            f"gemm2, residual and gamma must all be bf16 or all fp16, got {gemm2_out.dtype}, {residual.dtype}, {gamma.dtype}"
        )


def _comm() -> Any:
    import flashinfer.comm

    return flashinfer.comm


def _comm_backend(group: Any) -> Any:
    from sglang.srt.layers import flashinfer_comm_fusion as stock

    if stock._TorchDistBackend is None:
        return None
    return stock._TorchDistBackend(device_group=group.device_group, cpu_group=group.cpu_group)
