"""Where the bases differ: what the overlay borrows of SGLang under another name, or does without, on some of them.

Known by what is there, never by a version. Everything else the overlay imports of SGLang is the same on all bases.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=1)
def has_layer_boundary() -> bool:
    """Whether layers meet in ``layer_boundary`` (0.5.23), and not in ``communicator.py`` (0.5.20)."""
    try:
        return importlib.util.find_spec("sglang.srt.layers.layer_boundary") is not None
    except ModuleNotFoundError:
        return False


def fused_all_reduce() -> Any:
    """The module that holds on what hardware, and up to how many tokens, stock fuses all-reduce and norm."""
    if has_layer_boundary():
        from sglang.srt.layers.layer_boundary.residual import add_norm

        return add_norm
    from sglang.srt.layers import communicator

    return communicator


def input_is_scattered() -> bool:
    """Whether this forward's attention takes a slice of the tokens on each rank."""
    if has_layer_boundary():
        from sglang.srt.layers.layer_boundary import get_attn_tp_context
    else:
        from sglang.srt.layers.communicator import get_attn_tp_context

    return get_attn_tp_context().input_scattered


def trtllm_unmet() -> str:
    """Why the TRT-LLM runners do not defer through the overlay on this base; empty where they do."""
    return "the TRT-LLM runners have no seams on this base, and defer by SGLang's own means" if has_layer_boundary() else ""
