"""finalize as one GPU kernel: gather, weigh, sum over k, scale, add the shared expert, round once.

The formula, and the torch version it is compared with: ``deferred_output.finalize_reference``. Results may differ from
that version's in the last bit, because the kernel rounds a product and its addition once, not twice.

Written in Triton: the kernel is bound by latency (few tokens) or memory bandwidth (many tokens), and the loads of all
k in flight at once reach both without CUDA C++. It compiles in about a second at first use, needs neither nvcc nor
headers where it runs, and the same code runs in Triton's interpreter on a CPU.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .deferred_output import OUTPUT_DTYPES, DeferredMoeOutput

MAX_TOP_K = 64


class Launch(NamedTuple):
    """Columns of a token per program, and the warps that share them."""

    block: int
    num_warps: int


def can_run(output: DeferredMoeOutput) -> bool:
    """Whether ``finalize_cuda`` takes this bundle; where not, ``finalize_reference`` does."""
    return not _unmet(output)


def finalize_cuda(output: DeferredMoeOutput) -> torch.Tensor:
    """Combine a bundle on its GPU: ``out[t] = scale * sum_k weight[t, k] * gemm2_out[index[t, k]] + shared[t]``.

    Accumulates in fp32 in the order of k and rounds once; the same bits in every run. Launches on the current stream,
    allocates the result and nothing else, never waits for the GPU. Compiles at first use of a shape: run it before
    a CUDA graph capture of that shape, as SGLang's graph runner does.

    Args:
        output: of at most 64 experts a token; rows of any stride and alignment, their columns adjacent.

    Returns:
        ``[T, H]`` in the dtype of ``gemm2_out``, contiguous.

    Raises:
        ValueError: ``can_run`` is false; the message names the unmet condition.
    """
    unmet = _unmet(output)
    if unmet:
        raise ValueError(f"the finalize kernel cannot run: {unmet}")
    with torch.cuda.device(output.gemm2_out.device):
        return _launch(output)


def _unmet(output: DeferredMoeOutput) -> str:
    """The condition that keeps the kernel from running, in words; empty where it runs."""
    tensors = _tensors(output)
    device = output.gemm2_out.device
    if device.type != "cuda" or not _is_supported(device):
        return f"it needs an NVIDIA GPU of SM80 or newer, got {device}"
    if any(tensor.device != device for tensor in tensors):
        return f"all tensors must be on {device}, got {[str(tensor.device) for tensor in tensors]}"
    if not 1 <= output.top_k <= MAX_TOP_K:
        return f"top_k must be 1 to {MAX_TOP_K}, got {output.top_k}"
    if any(tensor.stride(1) != 1 and tensor.shape[1] > 1 for tensor in tensors):
        return "the columns of every tensor must be adjacent in memory"
    if output.shared_output is not None and output.shared_output.dtype not in OUTPUT_DTYPES:
        return f"shared_output must be one of {OUTPUT_DTYPES}, got {output.shared_output.dtype}"
    return ""


def _tensors(output: DeferredMoeOutput) -> list:
    tensors = [output.gemm2_out, output.expanded_idx_to_permuted_idx, output.expert_weights]
    return tensors if output.shared_output is None else [*tensors, output.shared_output]


@lru_cache(maxsize=None)
def _is_supported(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


@lru_cache(maxsize=None)
def _has_dependent_launch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _launch(output: DeferredMoeOutput) -> torch.Tensor:
    gemm2_out, shared_output = output.gemm2_out, output.shared_output
    out = _new_result(output)
    if out.numel() == 0:
        return out
    launch = _choose_launch(output.num_tokens, output.hidden, out.element_size())
    use_pdl = _has_dependent_launch(gemm2_out.device)
    _finalize_kernel[(output.num_tokens * triton.cdiv(output.hidden, launch.block),)](
        out,
        gemm2_out,
        output.expanded_idx_to_permuted_idx,
        output.expert_weights,
        out if shared_output is None else shared_output,
        float(output.routed_scaling_factor),
        output.expanded_idx_to_permuted_idx.stride(0),
        output.expert_weights.stride(0),
        GEMM2_STRIDE=gemm2_out.stride(0),
        SHARED_STRIDE=0 if shared_output is None else shared_output.stride(0),
        HIDDEN=output.hidden,
        TOP_K=output.top_k,
        UNROLL=min(output.top_k, 8),
        BLOCK=launch.block,
        HAS_SHARED=shared_output is not None,
        USE_PDL=use_pdl,
        num_warps=launch.num_warps,
        num_stages=1,
        # Stated, because the default differs between versions of Triton.
        enable_fp_fusion=True,
        **({"launch_pdl": True} if use_pdl else {}),
    )
    return out


def _new_result(output: DeferredMoeOutput) -> torch.Tensor:
    return output.gemm2_out.new_empty((output.num_tokens, output.hidden))


def _choose_launch(num_tokens: int, hidden: int, element_size: int) -> Launch:
    """Threads of 8 bytes while the result has few, else of 16; large programs where they divide a row evenly.

    Chosen by times on an H200 (132 multiprocessors); right everywhere, not the fastest everywhere.
    """
    row_bytes = hidden * element_size
    if num_tokens * row_bytes <= 256 * 1024:
        return Launch(1024 // element_size, 4)
    if row_bytes % 4096 == 0:
        return Launch(4096 // element_size, 8)
    return Launch(2048 // element_size, 4)


@triton.jit
def _add_experts(
    total,
    gemm2_out,
    index,
    weights,
    columns,
    GEMM2_STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    COUNT: tl.constexpr,
):
    """``total`` with ``COUNT`` weighted rows added one by one; those of a negative index are not read."""
    rows = ()
    for k in tl.static_range(COUNT):
        rows = rows + (tl.load(index + k),)
    values = ()
    for k in tl.static_range(COUNT):
        row = gemm2_out + rows[k].to(tl.int64) * GEMM2_STRIDE
        readable = tl.where(rows[k] >= 0, HIDDEN, 0)
        values = values + (tl.load(row + columns, mask=columns < readable, other=0.0),)
    # The assembler spreads loads out to save registers, but moves none over a barrier. With the weights loaded
    # behind it, all rows are in flight before the first product.
    tl.debug_barrier()
    factors = ()
    for k in tl.static_range(COUNT):
        factors = factors + (tl.load(weights + k).to(tl.float32),)
    for k in tl.static_range(COUNT):
        total += values[k].to(tl.float32) * tl.where(rows[k] >= 0, factors[k], 0.0)
    return total


@triton.jit
def _prefetch(pointer, size):
    """Bring the first ``size`` bytes at ``pointer`` into the L2 cache, as far as 32 bytes per thread reach."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred within;
        .reg .b32 thread, offset;
        .reg .b64 address;
        mov.u32 thread, %tid.x;
        shl.b32 offset, thread, 5;
        setp.lt.u32 within, offset, $2;
        cvt.u64.u32 address, offset;
        add.u64 address, address, $1;
        @within prefetch.global.L2 [address];
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [pointer, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _finalize_kernel(
    out,
    gemm2_out,
    index,
    weights,
    shared,
    scale,
    index_stride,
    weights_stride,
    GEMM2_STRIDE: tl.constexpr,
    SHARED_STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program: ``BLOCK`` columns of one token, ``UNROLL`` of its ``TOP_K`` rows at a time.

    ``HIDDEN`` and the row strides are constants of a model; compiled in, they tell how far loads are aligned.
    """
    blocks_per_row: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    token = (program // blocks_per_row).to(tl.int64)
    first_column = (program % blocks_per_row) * BLOCK
    columns = first_column + tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    index += token * index_stride
    weights += token * weights_stride
    if USE_PDL:
        # Fetched while the kernel before this one ends, into L2 only: L2 is coherent, so what that kernel still
        # writes there is what is read after the wait.
        _prefetch(index, TOP_K * index.dtype.element_ty.primitive_bitwidth // 8)
        _prefetch(weights, TOP_K * weights.dtype.element_ty.primitive_bitwidth // 8)
        if HAS_SHARED:
            count = tl.minimum(HIDDEN - first_column, BLOCK)
            element_size: tl.constexpr = shared.dtype.element_ty.primitive_bitwidth // 8
            _prefetch(shared + token * SHARED_STRIDE + first_column, count * element_size)
        tl.extra.cuda.gdc_wait()
        # Only after the wait: what a dependent kernel reads before its own wait is then complete.
        tl.extra.cuda.gdc_launch_dependents()

    if HAS_SHARED:
        shared_values = tl.load(shared + token * SHARED_STRIDE + columns, mask=inside, other=0.0)
    total = tl.full([BLOCK], 0.0, dtype=tl.float32)
    for first in range(0, TOP_K // UNROLL * UNROLL, UNROLL):
        total = _add_experts(
            total, gemm2_out, index + first, weights + first, columns, GEMM2_STRIDE, HIDDEN, UNROLL
        )
    if TOP_K % UNROLL > 0:
        rest: tl.constexpr = TOP_K % UNROLL
        total = _add_experts(
            total, gemm2_out, index + (TOP_K - rest), weights + (TOP_K - rest), columns, GEMM2_STRIDE, HIDDEN, rest
        )
    total *= scale
    if HAS_SHARED:
        total += shared_values.to(tl.float32)
    tl.store(out + token * HIDDEN + columns, total.to(out.dtype.element_ty), mask=inside)
