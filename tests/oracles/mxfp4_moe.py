"""MXFP4 experts in float64, the arithmetic of Hopper's mega kernel step by step, and inputs on which that is exact.

MXFP4: E2M1 codes in pairs, the lower four bits first, and an E8M0 exponent for each 32 of a row (OCP Microscaling Formats specification).
"""

from typing import NamedTuple, Optional

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP, BLOCK = 32, 64
E4M3_MAX, BIAS = 448.0, 127


class Shape(NamedTuple):
    """E experts ``[2I, H]`` and ``[H, I]``, top_k a token."""

    experts: int
    intermediate: int
    hidden: int
    top_k: int


class Experts(NamedTuple):
    """All uint8: ``w13`` [E, 2I, H/2] gate rows before up rows, ``w2`` [E, H, I/2], scales [E, rows, columns/32]."""

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor
    w2_scale: torch.Tensor

    def of(self, expert: int) -> tuple:
        """One expert's two matrices in float64."""
        return dequantised(self.w13[expert], self.w13_scale[expert]), dequantised(self.w2[expert], self.w2_scale[expert])


def dequantised(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """``[..., N]`` float64 of ``[..., N/2]`` codes and ``[..., N/32]`` exponents."""
    values = torch.tensor(E2M1 + tuple(-value for value in E2M1), dtype=torch.float64, device=codes.device)
    pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
    return values[pairs.long()] * torch.exp2(exponents.double() - BIAS).repeat_interleave(GROUP, -1)


def packed(values: torch.Tensor) -> torch.Tensor:
    """``[..., N/2]`` codes of ``[..., N]`` numbers, each of which E2M1 has."""
    table = torch.tensor(E2M1, dtype=torch.float64, device=values.device)
    magnitude = torch.searchsorted(table, values.double().abs())
    assert torch.equal(table[magnitude], values.double().abs())
    codes = (magnitude + 8 * (values < 0)).to(torch.uint8).unflatten(-1, (-1, 2))
    return codes[..., 0] | codes[..., 1] << 4


def quantised(x: torch.Tensor, group: int) -> torch.Tensor:
    """``x`` as E4M3 with one fp32 scale ``amax / 448`` for each ``group`` of a row; what that holds, in float64."""
    groups = x.float().unflatten(-1, (-1, group))
    scale = (groups.abs().amax(-1, keepdim=True) / E4M3_MAX).clamp_min(1e-30)
    codes = (groups / scale).to(torch.float8_e4m3fn)
    return (codes.double() * scale.double()).flatten(-2)


def moe(x, ids, weights, experts: Experts, limit: Optional[float] = None, *, quantise: bool = True, dtype=torch.float64, first_expert: int = 0):
    """The weighted sum of each token's experts, float64.

    ``x`` [T, H], ``ids`` [T, K] (negative, or an expert that is not among these: none), ``weights`` [T, K]. The gate is clamped to ``limit`` from above and
    up to both sides. With ``quantise`` it rounds where the kernel does: activations of both GEMMs to E4M3, one scale a token and one for each
    64 of a row, the weight multiplied in before; each expert's row to bf16; their sum, in fp32, to bf16. ``dtype`` is that of the GEMMs.
    """
    rows = routed_rows(x, ids, weights, experts, limit, quantise=quantise, dtype=dtype, first_expert=first_expert)
    return combined(rows) if quantise else rows.sum(1)


def routed_rows(x, ids, weights, experts: Experts, limit=None, *, quantise=True, dtype=torch.float64, first_expert=0):
    """``[T, K, H]`` float64: each expert's row for each token, zero where there is none."""
    tokens, top_k = ids.shape
    rows = torch.zeros(tokens, top_k, x.shape[1], dtype=torch.float64, device=x.device)
    inputs = (quantised(x, x.shape[1]) if quantise else x.double()).to(dtype)
    for expert in range(experts.w13.shape[0]):
        token, place = (ids == expert + first_expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        w13, w2 = (matrix.to(dtype) for matrix in experts.of(expert))
        gate, up = (inputs[token] @ w13.T).chunk(2, -1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        hidden = gate * torch.sigmoid(gate) * up * weights[token, place, None].to(dtype)
        row = (quantised(hidden, BLOCK).to(dtype) if quantise else hidden) @ w2.T
        rows[token, place] = row.bfloat16().double() if quantise else row.double()
    return rows


def combined(rows: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(rows[:, 0], dtype=torch.float32)
    for place in range(rows.shape[1]):
        total = total + rows[:, place].float()
    return total.bfloat16().double()


def random_experts(shape: Shape, seed: int = 0, device="cpu", spread: int = 5) -> Experts:
    """Every code equally often, exponents over ``spread`` steps, results of a size that neither over- nor underflows."""
    random = torch.Generator(device).manual_seed(seed)

    def matrix(rows, columns):
        # Codes have a root mean square of about 2.9: a row's sum then has the size of an input.
        middle = BIAS - round(torch.log2(torch.tensor(2.9 * columns**0.5)).item())
        codes = torch.randint(256, (shape.experts, rows, columns // 2), generator=random, device=device, dtype=torch.uint8)
        low = middle - spread // 2
        scale = torch.randint(low, low + spread, (shape.experts, rows, columns // GROUP), generator=random, device=device, dtype=torch.uint8)
        return codes, scale

    (w13, w13_scale), (w2, w2_scale) = matrix(2 * shape.intermediate, shape.hidden), matrix(shape.hidden, shape.intermediate)
    return Experts(w13, w2, w13_scale, w2_scale)


def random_tokens(shape: Shape, tokens: int, seed: int = 1, device="cpu") -> tuple:
    """``x`` [T, H] bf16, ``ids`` [T, K] int64 of different experts, ``weights`` [T, K] fp32 that sum to 1.5."""
    random = torch.Generator(device).manual_seed(seed)
    x = torch.randn(tokens, shape.hidden, generator=random, device=device).bfloat16()
    weights = torch.rand(tokens, shape.top_k, generator=random, device=device)
    return x, routes(shape, tokens, random, device), weights / weights.sum(1, keepdim=True) * 1.5


def routes(shape: Shape, tokens: int, random, device) -> torch.Tensor:
    return torch.rand(tokens, shape.experts, generator=random, device=device).topk(shape.top_k, 1).indices


# Inputs on which the kernel's arithmetic rounds nowhere but to bf16. What makes them so:
# * a token's largest magnitude is 448 * 2**k, and each value E4M3 at that scale: quantising x is exact;
# * columns of x come in equal pairs, and rows of w13 and w2 in opposite ones, but for one column a row: sums are dense and exact;
# * what a gate row picks is a power of two from 512 on, or 0, or at most -200: SiLU is the gate itself, or 0; a limit of 448 makes all the former alike;
# * up rows pick three bits of mantissa; the first row of each 64 picks the most, 448 * 2**k: quantising FC2's input is exact;
# * weights are powers of two.
GATE_COLUMNS, UP_COLUMNS = slice(2, 64), slice(64, 128)
GATE_INPUTS = (0.0, 256.0, 128.0, -256.0, -448.0)
UP_INPUTS = (448.0, 320.0, 256.0, 192.0, 112.0, 64.0, -384.0, -224.0, -96.0)
OTHER_INPUTS = (0.0, 64.0, 128.0, -128.0, 256.0)
GRID_LIMIT = E4M3_MAX


class Grid(NamedTuple):
    """Codes and the exponents ``[low, high)`` of what rows pick, and the exponents of all else in w13 and of w2."""

    dense: bool
    gate: tuple
    gate_exponents: tuple
    up: tuple
    up_exponents: tuple
    w13_exponents: tuple
    w2_exponents: tuple


# ``sparse``: one column a row, exponents over 11 steps. ``dense``: every code is used, and each term is a multiple of the largest one's power of two over
# 2**12. ``wide``: dense over 7 steps, which is more than Hopper's FP8 tensor cores keep of a sum: some 14 bits, the leading one among them
# (DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.3.2).
GRIDS = {
    "sparse": Grid(False, (2.0, 4.0), (2, 4), (0.5, 1.0), (-3, 1), (-7, 4), (-7, 4)),
    "dense": Grid(True, (4.0,), (1, 2), (0.5, 1.0), (0, 1), (-2, 3), (-1, 2)),
    "wide": Grid(True, (2.0, 4.0), (2, 4), (0.5, 1.0), (-3, 1), (-3, 4), (-3, 4)),
}
KEPT_BITS = 13  # below the leading one


def grid_tokens(shape: Shape, tokens: int, seed: int = 1, device="cpu") -> tuple:
    """``x``, ``ids`` and ``weights`` as of ``random_tokens``, on the grid."""
    random = torch.Generator(device).manual_seed(seed)

    def pick(values, *size):
        return torch.tensor(values, device=device)[torch.randint(len(values), size, generator=random, device=device)]

    half = pick(OTHER_INPUTS, tokens, shape.hidden // 2)
    half[:, GATE_COLUMNS.start // 2 : GATE_COLUMNS.stop // 2] = pick(GATE_INPUTS, tokens, 31)
    half[:, UP_COLUMNS.start // 2 : UP_COLUMNS.stop // 2] = pick(UP_INPUTS, tokens, 32)
    half[:, 0] = 256.0  # what the first gate row of each 64 picks
    half[:, UP_COLUMNS.start // 2] = E4M3_MAX  # likewise the first up row
    x = half.repeat_interleave(2, 1) * pick((0.5, 1.0, 2.0), tokens, 1)
    weights = pick((0.125, 0.25, 0.5, 1.0), tokens, shape.top_k)
    return x.bfloat16(), routes(shape, tokens, random, device), weights.float()


def grid_experts(shape: Shape, seed: int = 0, device="cpu", kind: str = "dense") -> Experts:
    """Experts on one of ``GRIDS``."""
    grid = _Grid(shape, seed, device, GRIDS[kind])
    parts = [grid.expert() for _ in range(shape.experts)]
    return Experts(*(torch.stack(part) for part in zip(*parts)))


class _Grid:
    def __init__(self, shape: Shape, seed: int, device, grid: Grid) -> None:
        self.shape, self.device, self.grid = shape, device, grid
        self.random = torch.Generator(device).manual_seed(seed)

    def expert(self) -> tuple:
        grid, shape = self.grid, self.shape
        gate = self.picking_rows(GATE_COLUMNS, grid.gate, grid.gate_exponents, column_of_first=0)
        up = self.picking_rows(UP_COLUMNS, grid.up, grid.up_exponents, column_of_first=UP_COLUMNS.start)
        w13, w13_scale = (torch.cat(both) for both in zip(gate, up))
        columns = self.integers(0, shape.intermediate, shape.hidden)
        codes = self.pick((0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -3.0, -6.0), shape.hidden)
        w2, w2_scale = self.rows(columns, codes, shape.intermediate, grid.w2_exponents)
        return packed(w13), packed(w2), w13_scale, w2_scale

    def picking_rows(self, columns: slice, codes: tuple, exponents: tuple, column_of_first: int) -> tuple:
        """Rows in equal pairs; the first of each 64 has the largest code and exponent, and a column of its own."""
        pairs = self.shape.intermediate // 2
        column, code = self.integers(columns.start, columns.stop, pairs), self.pick(codes, pairs)
        exponent = self.integers(*exponents, pairs)
        first = torch.arange(0, pairs, BLOCK // 2, device=self.device)
        column[first], code[first], exponent[first] = column_of_first, max(codes), exponents[1] - 1
        matrix, scale = self.rows(column, code, self.shape.hidden, self.grid.w13_exponents, exponent)
        return matrix.repeat_interleave(2, 0), scale.repeat_interleave(2, 0)

    def rows(self, column, code, width: int, exponents: tuple, exponent=None) -> tuple:
        """``[len(column), width]`` numbers of E2M1 and their exponents: ``code * 2**exponent`` in ``column``, else pairs that cancel."""
        count, place = len(column), torch.arange(len(column), device=self.device)
        matrix = torch.zeros(count, width, device=self.device)
        if self.grid.dense:
            half = self.pick(E2M1 + tuple(-value for value in E2M1[1:]), count, width // 2)
            matrix = torch.stack([half, -half], -1).flatten(1)
            matrix[place, column ^ 1] = 0
        matrix[place, column] = code.float()
        scale = self.integers(*exponents, count, width // GROUP)
        if exponent is not None:
            scale[place, column // GROUP] = exponent
        return matrix, (scale + BIAS).to(torch.uint8)

    def integers(self, low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, generator=self.random, device=self.device)

    def pick(self, values: tuple, *size: int) -> torch.Tensor:
        return torch.tensor(values, device=self.device)[self.integers(0, len(values), *size)]
