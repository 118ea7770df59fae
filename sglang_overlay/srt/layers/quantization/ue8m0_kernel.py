"""``ue8m0.quantize_reference`` as one GPU kernel; the same bits, codes and scales.

Written in Triton for the reasons of ``moe/finalize_kernel.py``. Reads each element once and writes each code once. A thread
loads 16 bytes at a time and the threads of a group share its maximum through shuffles; the maximum is one of integers, the bits
of magnitudes, so NaN and the order of the threads do not matter.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import ue8m0
from .ue8m0 import Quantized, require_groups

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Up to this many groups the kernel is bound by latency: small programs, spread over all multiprocessors, which let the
# GEMM behind them start its launch early.
FEW_GROUPS = 4096

_MAGNITUDE = tl.constexpr(ue8m0.MAGNITUDE)
_INFINITY = tl.constexpr(ue8m0.INFINITY)
_LARGEST_FINITE = tl.constexpr(ue8m0.LARGEST_FINITE)
_ROUND_UP_OVER_1_75 = tl.constexpr(ue8m0.ROUND_UP_OVER_1_75)
_EXPONENT_OF_448 = tl.constexpr(ue8m0.EXPONENT_OF_448)
_MANTISSA_BITS = tl.constexpr(ue8m0.MANTISSA_BITS)
_E4M3_MAX = tl.constexpr(ue8m0.E4M3_MAX)


class Launch(NamedTuple):
    """Elements per program, the warps that share them, and whether the next kernel may launch while this one runs."""

    elements: int
    num_warps: int
    early: bool


def quantize_cuda(x: torch.Tensor, group_size: int) -> Quantized:
    """Quantise on the GPU of ``x``; shapes, dtypes and edges as ``ue8m0.quantize_reference``.

    Launches on the current stream, allocates its two results and nothing else, never waits for the GPU. Compiles at
    first use of a dtype, a group size and a range of sizes (few groups, many): run it before a CUDA graph capture, as
    SGLang's graph runner does.

    Raises:
        ValueError: ``x`` does not fall into adjacent groups, is of another dtype, or ``group_size`` is no power of two.
    """
    require_groups(x, group_size)
    if x.dtype not in INPUT_DTYPES:
        raise ValueError(f"activations must be one of {INPUT_DTYPES}, got {x.dtype}")
    if group_size & (group_size - 1):
        raise ValueError(f"the group size of power-of-two scales must be a power of two, got {group_size}")
    with torch.cuda.device(x.device):
        return _launch(x, group_size)


def _launch(x: torch.Tensor, group_size: int) -> Quantized:
    codes, scales = _new_results(x, group_size)
    num_groups = scales.numel()
    if num_groups == 0:
        return codes, scales
    launch = _choose_launch(num_groups)
    groups = max(1, launch.elements // group_size)
    use_pdl = _has_dependent_launch(x.device)
    _quantize_kernel[(triton.cdiv(num_groups, groups),)](
        x,
        codes,
        scales,
        num_groups,
        GROUP_SIZE=group_size,
        GROUPS=groups,
        USE_PDL=use_pdl,
        EARLY=launch.early,
        num_warps=launch.num_warps,
        num_stages=1,
        **({"launch_pdl": True} if use_pdl else {}),
    )
    return codes, scales


def _new_results(x: torch.Tensor, group_size: int) -> Quantized:
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((*x.shape[:-1], x.shape[-1] // group_size), dtype=torch.float32, device=x.device)
    return codes, scales


def _choose_launch(num_groups: int) -> Launch:
    """16 elements a thread while there are few groups, else 32."""
    if num_groups <= FEW_GROUPS:
        return Launch(512, 1, True)
    return Launch(4096, 4, False)


@lru_cache(maxsize=None)
def _has_dependent_launch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def _larger(left, right):
    return tl.maximum(left, right)


# The number of groups follows the batch: specialised on it, a server would compile again in mid-service.
@triton.jit(do_not_specialize=["num_groups"])
def _quantize_kernel(
    x,
    codes,
    scales,
    num_groups,
    GROUP_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    USE_PDL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program: ``GROUPS`` groups of ``GROUP_SIZE`` elements, which lie one after another in memory."""
    groups = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    inside = groups < num_groups
    elements = groups.to(tl.int64)[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        # Never before the wait: what a dependent kernel reads before its own wait is complete then.
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    values = tl.load(x + elements, mask=inside[:, None], other=0.0).to(tl.float32)

    magnitudes = values.to(tl.int32, bitcast=True) & _MAGNITUDE
    amax = tl.reduce(tl.where(magnitudes > _INFINITY, 0, magnitudes), 1, _larger)
    amax = tl.minimum(amax, _LARGEST_FINITE)
    exponent = tl.maximum(((amax + _ROUND_UP_OVER_1_75) >> _MANTISSA_BITS) - _EXPONENT_OF_448, 1)
    scale = (exponent << _MANTISSA_BITS).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << _MANTISSA_BITS).to(tl.float32, bitcast=True)

    # Of NaN and 448, minimum yields 448. The cast saturates, also at -448.
    scaled = tl.minimum(values * inverse[:, None], _E4M3_MAX)
    tl.store(codes + elements, scaled.to(codes.dtype.element_ty), mask=inside[:, None])
    tl.store(scales + groups, scale, mask=inside)
    if USE_PDL and not EARLY:
        tl.extra.cuda.gdc_launch_dependents()
