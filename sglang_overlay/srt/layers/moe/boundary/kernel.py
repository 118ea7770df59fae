"""The boundary in one launch: finalize + shared expert + all-reduce + residual + RMSNorm.

What the kernel does and how its packets travel: ``boundary.cu`` and docs/boundary.md.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Optional, Tuple

import torch

from ..deferred_output import DeferredMoeOutput, is_capturing
from .module import ACTIVATIONS, Config, is_loaded, load
from .plane import ExchangePlane, one_shot_tokens

WORLD_SIZES = range(1, 9)
MAX_HIDDEN = 8192
MAX_TOP_K = 64
MAX_CLUSTER = 8
MAX_THREADS = 512
# What the kernel is compiled for: 64 registers a thread.
THREADS_PER_MULTIPROCESSOR = 1024


class Launch(NamedTuple):
    """How a launch is laid out; the same on every rank, because it fixes which blocks exchange with which.

    Attributes:
        two_shot: tokens are reduced by one rank each (token mod world_size) and sent back, not by all.
        cluster: blocks that share a token, 1 to 8.
        clusters: clusters in the grid; each takes every ``clusters``-th token.
    """

    two_shot: bool
    cluster: int
    clusters: int


def fused_boundary(
    plane: ExchangePlane,
    output: DeferredMoeOutput,
    residual: torch.Tensor,
    gamma: torch.Tensor,
    eps: float,
    weight_bias: float = 0.0,
    launch: Optional[Launch] = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Take a bundle across the layer boundary on every rank of the plane together.

    ``sum = residual + sum over ranks of finalize(output)`` in fp32, in the order of ranks; ``residual_out`` is ``sum``
    rounded once, ``norm_out = sum * rsqrt(mean(sum^2) + eps) * (gamma + weight_bias)`` rounded once, from the unrounded
    ``sum``. The same bits on every rank and in every run. Launches on the current stream, allocates the two results
    and nothing else, never waits for the GPU. A rank whose peers do not come stops its process after
    ``plane.timeout_s``.

    Args:
        output: this rank's bundle of T tokens, T the same on every rank and at most ``plane.max_tokens``.
        residual: ``[T, H]`` bf16 or fp16, the same on every rank; not written.
        gamma: ``[H]`` of the same dtype.
        launch: how to lay the launch out; by default as ``choose_launch`` says.

    Returns:
        ``(norm_out, residual_out)``, both ``[T, H]``, freshly allocated.

    Raises:
        ValueError: ``unmet`` names a condition that does not hold, or the plane has no room for such a ``launch``.
        RuntimeError: the kernel could not be compiled or launched.
    """
    reason = unmet(plane, output, residual, gamma)
    if reason:
        raise ValueError(f"the fused boundary kernel cannot run: {reason}")
    norm_out, residual_out = residual.new_empty(residual.shape), residual.new_empty(residual.shape)
    if output.num_tokens == 0:
        return norm_out, residual_out
    launch = launch or choose_launch(output.num_tokens, output.hidden, plane.config.world_size, plane.multiprocessors)
    region = plane.regions[launch.two_shot]
    if output.num_tokens > region.max_tokens:
        regime = "two-shot" if launch.two_shot else "one-shot"
        raise ValueError(f"the plane holds {region.max_tokens} tokens of {regime} launches, got {output.num_tokens}")
    module_for(plane, output).run(
        output.gemm2_out,
        output.expanded_idx_to_permuted_idx,
        output.expert_weights,
        output.shared_output,
        residual,
        gamma,
        norm_out,
        residual_out,
        output.routed_scaling_factor,
        eps,
        weight_bias,
        region.pointers,
        plane.rank,
        region.max_tokens,
        plane.timeout_s,
        *launch,
    )
    return norm_out, residual_out


def module_for(plane: ExchangePlane, output: DeferredMoeOutput):
    """The compiled kernel for this bundle; compiles where its configuration is new."""
    return load(_config(plane, output))


def _config(plane: ExchangePlane, output: DeferredMoeOutput) -> Config:
    dtypes = output.gemm2_out.dtype, output.expert_weights.dtype
    return Config(plane.config.world_size, output.hidden, output.top_k, *dtypes)


def unmet(
    plane: ExchangePlane, output: DeferredMoeOutput, residual: torch.Tensor, gamma: torch.Tensor
) -> str:
    """The condition that keeps the kernel from taking this bundle, in words; empty where it runs.

    Looks at shapes, dtypes, strides, alignment and what was compiled before, which are the same on every rank.
    """
    dtype = output.gemm2_out.dtype
    if output.hidden != plane.config.hidden:
        return f"the plane is for hidden {plane.config.hidden}, got {output.hidden}"
    if output.num_tokens > plane.max_tokens:
        return f"the plane holds {plane.max_tokens} tokens, got {output.num_tokens}"
    if not 1 <= output.top_k <= MAX_TOP_K:
        return f"top_k must be 1 to {MAX_TOP_K}, got {output.top_k}"
    if dtype not in ACTIVATIONS:
        return f"gemm2_out must be bf16 or fp16, got {dtype}"
    if tuple(residual.shape) != (output.num_tokens, output.hidden) or tuple(gamma.shape) != (output.hidden,):
        return f"residual {list(residual.shape)} or gamma {list(gamma.shape)} do not fit [{output.num_tokens}, {output.hidden}]"
    if not all(map(_is_packed, (output.expanded_idx_to_permuted_idx, output.expert_weights))):
        return "index and expert weights must be contiguous and start at multiples of 16 bytes"
    reason = rows_unmet(output, residual, gamma)
    if not reason and not is_loaded(_config(plane, output)) and is_capturing():
        return "its kernel for this top_k and these dtypes is not compiled, and a graph is being captured"
    return reason


def rows_unmet(output: DeferredMoeOutput, residual: torch.Tensor, gamma: torch.Tensor) -> str:
    """Why rows of these tensors cannot be read 16 bytes at a time as one dtype; empty where they can."""
    tensors = [output.gemm2_out, residual, gamma] + ([] if output.shared_output is None else [output.shared_output])
    if len({tensor.dtype for tensor in tensors}) > 1:
        return f"gemm2_out, residual, gamma and shared_output must share a dtype, got {[t.dtype for t in tensors]}"
    if not all(map(_has_packed_rows, tensors)):
        return "rows must start at multiples of 16 bytes and hold adjacent columns"
    return ""


def _has_packed_rows(tensor: torch.Tensor) -> bool:
    strides = tensor.stride()
    return strides[-1] == 1 and all(stride % 8 == 0 for stride in strides[:-1]) and tensor.data_ptr() % 16 == 0


def _is_packed(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


@lru_cache(maxsize=None)
def choose_launch(num_tokens: int, hidden: int, world_size: int, multiprocessors: int) -> Launch:
    """Few tokens: as many blocks a token as there are multiprocessors for. Many: all blocks resident, evenly loaded.

    A rank alone waits for nobody, so that its blocks need not be resident: a cluster for every token. The regime is that of
    ``one_shot_tokens``.
    """
    two_shot = num_tokens > one_shot_tokens(hidden, world_size)
    cluster = next((c for c in (8, 4, 2) if c * num_tokens <= multiprocessors), 2)
    if world_size == 1:
        return Launch(two_shot, cluster, num_tokens)
    resident = multiprocessors * (THREADS_PER_MULTIPROCESSOR // _threads(hidden, cluster)) // cluster
    turns = -(-num_tokens // max(1, resident))
    return Launch(two_shot, cluster, -(-num_tokens // turns))


def _threads(hidden: int, cluster: int) -> int:
    """Threads of a block: one for each packet of 8 elements, in whole warps."""
    return -(-hidden // (8 * cluster * 32)) * 32
