"""Torch references, computed in fp32, for the ops that SGLang imports from vLLM where there is no GPU."""
import torch
import torch.nn.functional as F


def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    """Write silu(first half) * second half to out."""
    _gate_and_multiply(F.silu, out, x)


def gelu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    """Write gelu(first half) * second half to out."""
    _gate_and_multiply(F.gelu, out, x)


def moe_sum(per_expert: torch.Tensor, out: torch.Tensor) -> None:
    """Sum [tokens, top_k, hidden] over top_k."""
    out.copy_(per_expert.sum(dim=1, dtype=torch.float32))


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox) -> None:
    """Rotate query and key in place; each row of the cache holds the cosines, then the sines."""
    rows = cos_sin_cache[positions.flatten()].float().unsqueeze(1)
    cos, sin = rows.chunk(2, dim=-1)
    for tensor in (query, key):
        if tensor is not None:
            heads = tensor.view(positions.numel(), -1, head_size)
            _rotate(heads[..., : cos_sin_cache.shape[-1]], cos, sin, is_neox)


def _gate_and_multiply(activation, out, x) -> None:
    gate, up = x.chunk(2, dim=-1)
    out.copy_(activation(gate.float()).to(x.dtype) * up)


def _rotate(part, cos, sin, is_neox) -> None:
    """Rotate pairs of columns: (i, i + half) in the neox order, else (2i, 2i + 1)."""
    if is_neox:
        first, second = part.chunk(2, dim=-1)
    else:
        first, second = part[..., 0::2], part[..., 1::2]
    x, y = first.float(), second.float()
    first.copy_(x * cos - y * sin)
    second.copy_(y * cos + x * sin)
