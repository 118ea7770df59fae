"""FlashInfer's interleaving of packed 4-bit weights for Hopper's mixed GEMMs, in torch: for hosts where its CUTLASS module is not compiled.

Preparing weights takes one function of that module, which takes minutes to compile. The layout was read off that function's results, as far as the
mega kernel's shapes need it; the benchmark's exact checks would show a code that is out of place. With ``pytest -p mxfp4_interleave``
(this folder on PYTHONPATH) it is so for a whole test run, and with ``mxfp4_interleave_plugin`` on PYTHONPATH too for a server's processes.
"""

import sys
from contextlib import ExitStack, contextmanager

import torch

# Bit 3 of each of eight 4-bit codes in a 32-bit word is its sign. The signs of the lower four go up, those of the upper four down.
SIGN_MOVES = ((0, 4), (1, 8), (2, 12), (3, 16), (4, -16), (5, -12), (6, -8), (7, -4))
WITHOUT_SIGNS = 0x77777777
SAYS = "FlashInfer interleaves packed 4-bit weights in torch"


def interleave(codes: torch.Tensor) -> torch.Tensor:
    """``[E, N, K/2]`` uint8 in the layout of the GEMM, of the same shape; N a multiple of 16, K of 128."""
    experts, rows, width = codes.shape
    halves = codes.contiguous().view(torch.int16).view(experts, rows // 16, 2, 8, width // 32, 2, 2, 4)
    # expert, block of 16 rows, which 8 of them, row, step along K, product, half of it, word: rows r and r + 8 become neighbours.
    words = halves.permute(0, 1, 6, 3, 4, 5, 7, 2).contiguous().view(torch.int32).long() & 0xFFFFFFFF
    moved = words & WITHOUT_SIGNS
    for code, distance in SIGN_MOVES:
        sign = words & (8 << 4 * code)
        moved |= sign << distance if distance > 0 else sign >> -distance
    signed = torch.where(moved >= 1 << 31, moved - (1 << 32), moved).int()
    return signed.contiguous().view(torch.uint8).view(experts, rows, width)


class _Module:
    @staticmethod
    def interleave_moe_weights_for_sm90_mixed_gemm(codes, out, kind) -> None:
        out.copy_(interleave(codes))


def register() -> None:
    """From now on FlashInfer prepares weights without its CUTLASS module, and can do nothing else that needs it.

    As an SGLang plugin it is called once in each process, before a model is built.
    """
    from flashinfer.fused_moe import core

    core.get_cutlass_fused_moe_module = lambda *_, **__: _Module
    print(SAYS, file=sys.stderr, flush=True)


@contextmanager
def interleaving_in_torch():
    """``register``, undone at the end."""
    from flashinfer.fused_moe import core

    stock = core.get_cutlass_fused_moe_module
    register()
    try:
        yield
    finally:
        core.get_cutlass_fused_moe_module = stock


def pytest_configure(config) -> None:
    stack = ExitStack()
    stack.enter_context(interleaving_in_torch())
    config.add_cleanup(stack.close)
