"""What a server says of each feature when its model is loaded: active and how, or why not."""

from __future__ import annotations

import logging
import os
from collections import Counter
from typing import Any, Callable, Tuple

import torch

from ..environ import ENABLE, FUSION, MAX_TOKENS, MXFP4_MEGAMOE, TRITON_UE8M0, misspelt_notes, settings
from ..layers.moe.deferral import OFF_UNDER_AUTO, row_or_reason
from ..layers.quantization.fp8 import why_not_ue8m0
from ..layers.quantization.mxfp4_megamoe import Mxfp4MegaMoEMethod
from ..models.deepseek_v2 import is_moe

logger = logging.getLogger(__name__)

NO_MOE = "not active: the model has no MoE layer of the kind it is for"


def tell_features(model: torch.nn.Module) -> None:
    """Log one line for each feature, on one rank. A server that is to run as stock does not stop over it."""
    from sglang.srt.environ import envs
    from sglang.srt.utils import log_info_on_rank0

    for name, say in FEATURES:
        try:
            line = say(model)
        except Exception as error:
            line = f"it could not be told whether it is active: {error!r}"
        log_info_on_rank0(logger, f"MoE overlay, {name}: {line}")
    for note in misspelt_notes(os.environ, vars(type(envs))):
        log_info_on_rank0(logger, f"MoE overlay: {note}")


def deferred_finalize(model: torch.nn.Module) -> str:
    """Which MoE layers defer, which of those hand on, and how."""
    flags = settings()
    if flags.is_off:
        return f"not active: {ENABLE.name}={flags.enable}, {MAX_TOKENS.name}={flags.max_tokens}"
    layers = [module for module in model.modules() if is_moe(module)]
    if not layers:
        return NO_MOE
    if flags.by_policy and not any("moe_boundary" in vars(layer) for layer in layers):
        alone = "" if flags.fusion == "auto" else f"; {FUSION.name}={flags.fusion} alone does not make it defer"
        return f"not active: {OFF_UNDER_AUTO}{alone}"
    reasons = Counter(row_or_reason(layer)[1] for layer in layers)
    return _in_words(reasons, f"{ENABLE.name}={flags.enable}, up to {flags.max_tokens} tokens", _taken(layers))


def _taken(layers: list) -> str:
    """How many layers hand on what they defer, and by which ways it is taken."""
    boundaries = [layer.moe_boundary for layer in layers if "moe_boundary" in vars(layer)]
    if not boundaries:
        return "each finalized in its layer"
    return f"{len(boundaries)} handed to the next layer, taken by {boundaries[0].ranges(settings().max_tokens)}"


def ue8m0_triton_moe(model: torch.nn.Module) -> str:
    """Which MoE layers have power-of-two activation scales."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    layers = [module for module in model.modules() if isinstance(module, FusedMoE)]
    if not layers:
        return NO_MOE
    reasons = Counter(why_not_ue8m0(layer.quant_method) for layer in layers)
    return _in_words(reasons, f"{TRITON_UE8M0.name}={settings().triton_ue8m0}", "activation scales are powers of two")


def _in_words(reasons: Counter, flags: str, how: str) -> str:
    """``reasons`` counts layers by why they are not active; the empty reason those that are."""
    active, total = reasons[""], sum(reasons.values())
    without = [f"{reason} ({count} of {total} MoE layers)" for reason, count in reasons.items() if reason]
    if not active:
        return f"not active ({flags}): {'; '.join(without)}"
    rest = f"; not in others: {'; '.join(without)}" if without else ""
    return f"active in {active} of {total} MoE layers ({flags}): {how}{rest}"


def mxfp4_megamoe_sm90(model: torch.nn.Module) -> str:
    """Which MoE layers run in FlashInfer's mega kernel for MXFP4 on Hopper."""
    flag = f"{MXFP4_MEGAMOE.name}={int(settings().mxfp4_megamoe)}"
    if not settings().mxfp4_megamoe:
        return f"not active: {flag}"
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    layers = [module for module in model.modules() if isinstance(module, FusedMoE)]
    if not layers:
        return NO_MOE
    other = "its experts are of another method, or --moe-a2a-backend is not flashinfer_megamoe"
    reasons = Counter("" if isinstance(layer.quant_method, Mxfp4MegaMoEMethod) else other for layer in layers)
    return _in_words(reasons, flag, "in FlashInfer's mega kernel")


FEATURES: Tuple[Tuple[str, Callable[[Any], str]], ...] = (
    ("deferred-finalize", deferred_finalize),
    ("ue8m0-triton-moe", ue8m0_triton_moe),
    ("mxfp4-megamoe-sm90", mxfp4_megamoe_sm90),
)
