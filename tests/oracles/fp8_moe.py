"""float64 oracles of FP8 activation quantisation and of the two-GEMM MoE; nothing here is taken from the code under test.

Scales come from ``frexp``, codes from a search in the list of all E4M3 values, products and sums are float64.
"""

import torch

E4M3_MAX = 448.0
SMALLEST_EXPONENT = -126


def e4m3_values():
    """All finite non-negative E4M3 values, ascending, float64: 1 sign, 4 exponent (bias 7) and 3 mantissa bits."""
    subnormal = [mantissa * 2.0**-9 for mantissa in range(8)]
    normal = [(1 + mantissa / 8) * 2.0**exponent for exponent in range(-6, 9) for mantissa in range(8)]
    return torch.tensor(subnormal + normal[:-1], dtype=torch.float64)  # the last would be 480, which is NaN's code


def nearest_e4m3(x):
    """``x`` (float64, within 448) rounded to E4M3, ties to the value with an even mantissa."""
    values = e4m3_values().to(x.device)
    magnitude = x.abs().clamp_max(E4M3_MAX)
    above = torch.searchsorted(values, magnitude.contiguous()).clamp_max(len(values) - 1)
    below = (above - 1).clamp_min(0)
    up, down = values[above] - magnitude, magnitude - values[below]
    take_above = (up < down) | ((up == down) & (above % 2 == 0))
    return torch.where(take_above, values[above], values[below]).copysign(x)


def power_of_two_scale(amax):
    """The least power of two ``s >= 2**-126`` with ``448 * s >= amax``; float64, exact."""
    mantissa, exponent = torch.frexp(amax.double())  # amax = mantissa * 2**exponent, mantissa in [1/2, 1); 448 = 0.875 * 2**9
    power = torch.where(mantissa <= 0.875, exponent - 9, exponent - 8)
    power = torch.where(amax == 0, SMALLEST_EXPONENT, power).clamp_min(SMALLEST_EXPONENT)
    return ((power.long() + 1023) << 52).view(torch.float64)  # the bits of a float64; a power function need not be exact


def continuous_scale(amax):
    """``amax / 448`` with SGLang's floor of 1e-10 for ``amax``."""
    return amax.double().clamp_min(1e-10) / E4M3_MAX


def quantise(x, group, scale_of):
    """Codes (as values) and scales of the groups of ``x``'s last dimension, float64."""
    groups = x.double().unflatten(-1, (-1, group))
    scale = scale_of(groups.abs().amax(-1))
    return nearest_e4m3(groups / scale[..., None]).flatten(-2), scale


def dequantised(x, group, scale_of):
    """``x`` after quantisation, float64; ``x`` itself where ``scale_of`` is None."""
    if scale_of is None:
        return x.double()
    codes, scale = quantise(x, group, scale_of)
    return codes * scale.repeat_interleave(group, -1)


def dequantised_weight(weight, scale, block):
    """``[E, N, K]`` weights times their block scales ``[E, N / block, K / block]``, float64."""
    wide = scale.double().repeat_interleave(block, 1).repeat_interleave(block, 2)
    return weight.double() * wide[:, : weight.shape[1], : weight.shape[2]]


def moe(x, w13, w2, ids, weights, scale_of, group=128, dtype=None, gate_rounded=False,
        gate_up_delta=0.0, down_delta=0.0, combine=True):
    """The whole MoE: quantise, FC1, SwiGLU, quantise, FC2, weigh, sum over k.

    Args:
        x: ``[T, H]``; w13: ``[E, 2I, H]``, gate before up, dequantised; w2: ``[E, H, I]``; ids, weights: ``[T, K]``.
        scale_of: the scale of a group by its amax; None: activations are not quantised.
        dtype: what intermediates are rounded to where a kernel writes them to memory; None: not at all.
        gate_rounded: the activated gate is rounded too, as by SGLang on a CPU, before it meets up.
        gate_up_delta, down_delta: what LoRA adds after each GEMM.
        combine: else ``[T, K, H]``, neither weighted nor summed.
    """
    def written(value):
        return value if dtype is None else value.to(dtype).double()

    inputs = dequantised(x, group, scale_of)
    intermediate = w2.shape[2]
    rows = torch.zeros(*ids.shape, w2.shape[1], dtype=torch.float64, device=x.device)
    for expert in ids.unique().tolist():
        token, k = (ids == expert).nonzero(as_tuple=True)
        gate_up = written(written(inputs[token] @ w13[expert].double().T) + gate_up_delta)
        gate, up = gate_up.split(intermediate, -1)
        activated = gate * gate.sigmoid()
        hidden = written((written(activated) if gate_rounded else activated) * up)
        rows[token, k] = dequantised(hidden, group, scale_of) @ w2[expert].double().T
    if not combine:
        return written(rows)
    rows = written(written(rows * weights.double()[..., None]) + down_delta)
    return rows.sum(1)


def relative_error(result, reference):
    """``||result - reference|| / ||reference||``."""
    return ((result.double() - reference).norm() / reference.norm()).item()
