"""What a layer's norm computes, in the terms of the fused boundaries: ``x / rms(x) * (weight + weight_bias)``."""

from __future__ import annotations

from typing import Dict

import torch


def fusion_unmet(layernorm: torch.nn.Module) -> str:
    """Why a fused boundary cannot compute this norm; empty where it can.

    Only the exact classes are known: a subclass may compute something else.
    """
    if type(layernorm) not in _weight_biases():
        return f"the norm is a {type(layernorm).__name__}"
    for name, plain in _PLAIN.items():
        if getattr(layernorm, name, plain) != plain:
            return f"the norm is not plain: {name} is {getattr(layernorm, name)}"
    return ""


def weight_bias(layernorm: torch.nn.Module) -> float:
    """What this norm adds to its weight: 0, or 1 for Gemma's, whose ``weight`` is stored less 1."""
    return _weight_biases()[type(layernorm)]


# Of SGLang's RMSNorm: the arguments that change what is computed, and the values with which it is the plain norm.
_PLAIN = {
    "has_weight": True,
    "cast_x_before_out_mul": False,
    "fp32_residual": False,
    "variance_size_override": None,
    "override_orig_dtype": None,
    "x_pad_to_multiple": 0,
}


def _weight_biases() -> Dict[type, float]:
    from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm

    return {RMSNorm: 0.0, GemmaRMSNorm: 1.0}
