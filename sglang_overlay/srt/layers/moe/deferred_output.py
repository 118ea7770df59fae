"""The finalize bundle: what an MoE layer hands on when it does not combine its experts itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Optional

import torch

WEIGHT_DTYPES = (torch.float32, torch.bfloat16)
OUTPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class DeferredMoeOutput:
    """Permuted, unweighted expert outputs (gemm2) and all that is needed to combine them.

    Not a tensor on purpose: code that does not know it fails at once, where a tensor with an
    attribute would lose the attribute on a clone or a view and be taken for a finished result.

    Attributes:
        gemm2_out: ``[P, Hp]`` bf16, fp16 or fp32; permuted expert outputs, ``P >= `` the number of
            (token, k) pairs that have an expert here, ``Hp >= hidden``; rows no index names may hold anything.
        expanded_idx_to_permuted_idx: ``[T, K]`` int32; the row of ``gemm2_out`` of each (token, k);
            negative: no expert on this rank, contributes exactly nothing.
        expert_weights: ``[T, K]`` fp32 or bf16, as routing produced them.
        num_tokens, top_k, hidden: ``T``, ``K`` and ``H``. ``T`` comes from the weights, never from ``gemm2_out``.
        routed_scaling_factor: what is still to be multiplied onto the routed sum, in finalize and nowhere else.
        shared_output: ``[T, H]`` this rank's shared-expert partial, or None.

    Raises:
        ValueError: a shape that does not fit ``T``, ``K``, ``H``.
        TypeError: a dtype outside the contract.
    """

    gemm2_out: torch.Tensor
    expanded_idx_to_permuted_idx: torch.Tensor
    expert_weights: torch.Tensor
    num_tokens: int
    top_k: int
    hidden: int
    routed_scaling_factor: float = 1.0
    shared_output: Optional[torch.Tensor] = None

    def __post_init__(self) -> None:
        self._check_gemm2_out()
        self._check_weights()
        object.__setattr__(self, "expanded_idx_to_permuted_idx", self._index_as_matrix())
        self._check_shared_output()

    def with_shared_output(self, shared_output: Optional[torch.Tensor]) -> "DeferredMoeOutput":
        """This bundle with the shared-expert partial ``[T, H]`` added (None: unchanged).

        Raises:
            ValueError: it already holds one; adding a second would be a fault of the caller.
        """
        if shared_output is None:
            return self
        if self.shared_output is not None:
            raise ValueError("this deferred MoE output already holds a shared-expert output")
        return replace(self, shared_output=shared_output)

    def __mul__(self, factor: float) -> "DeferredMoeOutput":
        """A bundle whose routed part will be scaled by ``factor`` too, in finalize.

        So that ``output *= routed_scaling_factor`` means the same for a bundle as for a tensor.
        """
        if not isinstance(factor, (int, float)):
            return NotImplemented
        if self.shared_output is not None:
            raise ValueError("the routed scaling factor must be applied before the shared output is added")
        return replace(self, routed_scaling_factor=self.routed_scaling_factor * factor)

    def __getattr__(self, name: str):
        # Only reached for names a bundle does not have.
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"a deferred MoE output reached code that expects a tensor (it asked for .{name}); finalize it first"
        )

    def _check_gemm2_out(self) -> None:
        if self.gemm2_out.dtype not in OUTPUT_DTYPES:
            raise TypeError(f"gemm2_out must be one of {OUTPUT_DTYPES}, got {self.gemm2_out.dtype}")
        if self.gemm2_out.dim() != 2 or self.gemm2_out.shape[1] < self.hidden:
            raise ValueError(
                f"gemm2_out must be [P, >= {self.hidden}], got {list(self.gemm2_out.shape)}"
            )

    def _check_weights(self) -> None:
        if self.expert_weights.dtype not in WEIGHT_DTYPES:
            raise TypeError(f"expert_weights must be fp32 or bf16, got {self.expert_weights.dtype}")
        if tuple(self.expert_weights.shape) != (self.num_tokens, self.top_k):
            raise ValueError(
                f"expert_weights must be [{self.num_tokens}, {self.top_k}], got {list(self.expert_weights.shape)}"
            )

    def _index_as_matrix(self) -> torch.Tensor:
        index = self.expanded_idx_to_permuted_idx
        if index.dtype != torch.int32:
            raise TypeError(f"expanded_idx_to_permuted_idx must be int32, got {index.dtype}")
        matrix = (self.num_tokens, self.top_k)
        if tuple(index.shape) not in (matrix, (self.num_tokens * self.top_k,)):
            raise ValueError(
                f"expanded_idx_to_permuted_idx must be {list(matrix)} or flat "
                f"[{self.num_tokens * self.top_k}], got {list(index.shape)}"
            )
        return index.reshape(matrix)

    def _check_shared_output(self) -> None:
        if self.shared_output is None:
            return
        if tuple(self.shared_output.shape) != (self.num_tokens, self.hidden):
            raise ValueError(
                f"shared_output must be [{self.num_tokens}, {self.hidden}], got {list(self.shared_output.shape)}"
            )


def is_deferred(value: object) -> bool:
    """Whether ``value`` is a bundle rather than a finished tensor."""
    return isinstance(value, DeferredMoeOutput)


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured, so that nothing may be compiled or kept of what is allocated."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def finalize(output: DeferredMoeOutput) -> torch.Tensor:
    """Combine a bundle: ``finalize_reference``'s formula, by the GPU kernel where it can run.

    Returns:
        ``[T, H]`` in the dtype of ``gemm2_out``, freshly allocated.
    """
    if output.gemm2_out.is_cuda:
        # Here, because this module must import where Triton is not installed.
        from .finalize_kernel import can_run, finalize_cuda

        if can_run(output):
            return finalize_cuda(output)
    return finalize_reference(output)


def finalize_reference(output: DeferredMoeOutput) -> torch.Tensor:
    """Combine a bundle: ``out[t] = scale * sum_k weight[t, k] * gemm2_out[index[t, k]] + shared[t]``.

    Accumulates in fp32 in the order of k and rounds once. This torch version is the definition that
    every kernel is compared with; it runs on every device.

    Returns:
        ``[T, H]`` in the dtype of ``gemm2_out``, freshly allocated.
    """
    index = output.expanded_idx_to_permuted_idx
    has_expert = index >= 0
    rows = index.clamp_min(0).long()
    weights = output.expert_weights.float()
    gemm2_out = output.gemm2_out[:, : output.hidden]
    total = gemm2_out.new_zeros((output.num_tokens, output.hidden), dtype=torch.float32)
    if gemm2_out.shape[0] > 0:
        for k in range(output.top_k):
            weighted = gemm2_out.index_select(0, rows[:, k]).float() * weights[:, k, None]
            total += weighted.masked_fill(~has_expert[:, k, None], 0.0)
    total *= output.routed_scaling_factor
    if output.shared_output is not None:
        total += output.shared_output.float()
    return total.to(gemm2_out.dtype)
