"""Where the bases differ: what the overlay borrows of SGLang under another name, or does without, on some of them.

Known by what is there, never by a version. Everything else the overlay imports of SGLang is the same on all bases.
"""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, Callable, ContextManager


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


def routed_deferral() -> Callable[[], ContextManager]:
    """What to enter so that TRT-LLM calls with given routing leave their finalize out.

    SGLang's own context where those calls ask it (0.5.23). Elsewhere it makes some of them fail, and the overlay's
    patches take its place.
    """
    try:
        from sglang.srt.layers.moe.moe_runner import flashinfer_trtllm as stock
    except ModuleNotFoundError:
        return nullcontext
    asked = hasattr(stock, "is_deferred_finalize_enabled")
    return stock.flashinfer_trtllm_deferred_finalize_context if asked else nullcontext
