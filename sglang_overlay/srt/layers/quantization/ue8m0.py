"""Activations in E4M3 with power-of-two (UE8M0) scales, one per token and group: the definition, and who computes it.

A group's scale is the least power of two that brings its largest magnitude within E4M3's range,
``2 ** ceil(log2(amax / 448))`` (E4M3 and UE8M0 as in the OCP Microscaling Formats specification, and DeepSeek's
checkpoints of ``scale_fmt: ue8m0``). It is taken from the bits of ``amax``, so it is exact, where ``log2`` in floating
point may be off by one at a power of two; and before any code, so that codes and scale belong together.
"""

from __future__ import annotations

from typing import Any, Callable, Tuple

import torch

E4M3_MAX = 448.0
# In the bits of an fp32. 448 is 1.75 * 2**8: a mantissa over 1.75 needs one exponent more, and adding this to the bits
# carries into the exponent just there.
ROUND_UP_OVER_1_75 = 0x1FFFFF
EXPONENT_OF_448 = 8
MANTISSA_BITS = 23
LARGEST_FINITE = 0x7F7FFFFF
INFINITY = 0x7F800000
MAGNITUDE = 0x7FFFFFFF

Quantized = Tuple[torch.Tensor, torch.Tensor]


def ue8m0_scale(amax: torch.Tensor) -> torch.Tensor:
    """``2 ** ceil(log2(amax / 448))``, exact, with the stated outcomes at the edges.

    Args:
        amax: any shape, fp32, magnitudes.

    Returns:
        fp32 of the same shape: a power of two from ``2**-126`` (also for 0 and wherever the formula gives less, for UE8M0's
        lowest step is a denormal in fp32) to ``2**120``. Inf counts as the largest finite number; NaN as 0.
    """
    bits = amax.float().view(torch.int32) & MAGNITUDE
    bits = torch.where(bits > INFINITY, 0, bits).clamp_max(LARGEST_FINITE)
    exponent = ((bits + ROUND_UP_OVER_1_75) >> MANTISSA_BITS) - EXPONENT_OF_448
    return (exponent.clamp_min(1) << MANTISSA_BITS).view(torch.float32)


def quantize_reference(x: torch.Tensor, group_size: int) -> Quantized:
    """The definition in torch: ``codes = e4m3(x / scale)``, rounded to nearest even; ``scale`` by ``ue8m0_scale``.

    Dividing by a power of two is exact, so each code is the one nearest to ``x / scale``. NaN and positive Inf get the code
    of 448 and negative Inf that of -448, as in SGLang's own quantisers; a NaN does not change its group's scale.

    Args:
        x: ``[..., K]`` bf16, fp16 or fp32, contiguous; K a multiple of ``group_size``.

    Returns:
        codes ``[..., K]`` float8_e4m3fn; scales ``[..., K / group_size]`` fp32, row-major.

    Raises:
        ValueError: K is no multiple of ``group_size``, or ``x`` is not contiguous.
    """
    require_groups(x, group_size)
    groups = x.float().unflatten(-1, (-1, group_size))
    scale = ue8m0_scale(groups.abs().nan_to_num(0.0, float("inf")).amax(-1))
    scaled = (groups / scale[..., None]).nan_to_num(E4M3_MAX).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).flatten(-2), scale


def quantize(x: torch.Tensor, group_size: int, **rows_read: Any) -> Quantized:
    """``quantize_reference`` as one kernel where ``x`` is on a GPU.

    Takes the place of SGLang's group quantisers: the same first two arguments, the same shapes and dtypes back. What a
    caller adds to name the rows it will read (``rows_read``) is not used; all rows are quantised.

    Raises:
        ValueError: as ``quantize_reference``; on a GPU also for a group size that is no power of two.
    """
    if not x.is_cuda:
        return quantize_reference(x, group_size)
    from .ue8m0_kernel import quantize_cuda

    return quantize_cuda(x, group_size)


def activation_quantizer(stock: Callable[..., Quantized], scale_ue8m0: bool) -> Callable[..., Quantized]:
    """The quantiser of a GEMM's activations: ``stock`` itself, unless the caller asked for power-of-two scales."""
    return quantize if scale_ue8m0 else stock


def require_groups(x: torch.Tensor, group_size: int) -> None:
    """Raise ValueError unless the last dimension of ``x`` falls into groups that are adjacent in memory."""
    if x.shape[-1] % group_size:
        raise ValueError(f"activations of shape {tuple(x.shape)} do not fall into groups of {group_size}")
    if not x.is_contiguous():
        raise ValueError(f"activations must be contiguous, got strides {x.stride()} for shape {tuple(x.shape)}")
