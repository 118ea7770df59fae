"""Whether FP8 experts take power-of-two (UE8M0) activation scales in the Triton MoE.

Decided once per layer, when its quantisation method is built, and kept on the method as a plain bool; from there it travels as
an argument (``docs/ue8m0.md``).
"""

from __future__ import annotations

import logging
from dataclasses import fields
from functools import lru_cache
from typing import Any

from ...environ import TRITON_UE8M0, settings

logger = logging.getLogger(__name__)

DECLARED = "ue8m0"


class Ue8m0Refused(ValueError):
    """Power-of-two activation scales were asked for where they cannot be; the message names layer, reason and way out."""


def choose_scale_ue8m0(method: Any) -> bool:
    """Whether the Triton MoE of this ``Fp8MoEMethod`` quantises its activations with power-of-two scales.

    ``auto``: where the checkpoint's ``quantization_config`` declares ``scale_fmt: ue8m0`` and the experts are block-quantised FP8,
    also such as are converted from FP4 when loaded. ``on``: wherever they are block-quantised FP8. ``off``: never.

    Raises:
        FlagError: the flag holds a value it does not take.
    """
    choice = settings().triton_ue8m0
    return choice != "off" and (choice == "on" or _declares(method)) and not _unfit_format(method)


def check_scale_ue8m0(experts: Any) -> None:
    """Once a layer's runner is known: refuse ``on`` where it would do nothing, and log what declared experts do.

    Raises:
        Ue8m0Refused: the flag is ``on``, and the experts are not block-quantised FP8 in the Triton runner.
    """
    choice = settings().triton_ue8m0
    reason = _unfit(experts.quant_method)
    if reason and choice == "on":
        raise Ue8m0Refused(
            f"{TRITON_UE8M0.name}=on: layer {getattr(experts, 'layer_id', '?')} cannot take power-of-two activation scales: "
            f"{reason}. {TRITON_UE8M0.name}=auto takes them only where the checkpoint declares them and they can be."
        )
    if not reason and (choice == "on" or _declares(experts.quant_method)):
        _log_once(experts.quant_method.scale_ue8m0, choice)


def why_not_ue8m0(method: Any) -> str:
    """Why a layer's activation scales are not powers of two; empty where they are."""
    choice = settings().triton_ue8m0
    if not _is_in_the_tree():
        return "the feature was left out of this tree"
    if choice == "off":
        return f"{TRITON_UE8M0.name}=off"
    reason = _unfit(method)
    if reason:
        return reason
    if choice == "auto" and not _declares(method):
        return f"the checkpoint does not declare scale_fmt: {DECLARED}"
    return "" if method.scale_ue8m0 else "its experts were of another format until their weights were loaded"


def _is_in_the_tree() -> bool:
    from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo

    return any(field.name == "scale_ue8m0" for field in fields(TritonMoeQuantInfo))


def _declares(method: Any) -> bool:
    return getattr(getattr(method, "quant_config", None), "scale_fmt", None) == DECLARED


def _unfit(method: Any) -> str:
    """Why a layer's experts cannot have power-of-two activation scales; empty where they can."""
    if not hasattr(method, "scale_ue8m0"):
        return f"its experts are not block-quantised FP8 (their quantisation method is {type(method).__name__})"
    return _unfit_format(method) or _unfit_runner(method)


def _unfit_format(method: Any) -> str:
    if not method.block_quant:
        return "its experts are FP8 without blocks (no weight_block_size in the checkpoint)"
    if method.use_mxfp8:
        return "its experts are MXFP8, whose activation format is its own"
    return _unfit_platform()


def _unfit_platform() -> str:
    from sglang.srt.utils import is_hip, is_musa, is_npu, is_xpu

    return "the quantiser is for NVIDIA GPUs" if is_hip() or is_musa() or is_npu() or is_xpu() else ""


def _unfit_runner(method: Any) -> str:
    runner = getattr(method, "runner", None)
    backend = getattr(getattr(runner, "runner_backend", None), "value", "none")
    return "" if backend == "triton" else f"its MoE runner is {backend}, not triton (--moe-runner-backend triton)"


@lru_cache(maxsize=None)
def _log_once(scale_ue8m0: bool, choice: str) -> None:
    from sglang.srt.utils import log_info_on_rank0

    kind = "powers of two (UE8M0)" if scale_ue8m0 else "continuous"
    log_info_on_rank0(logger, f"Triton MoE, block-quantised FP8: activation scales are {kind}; {TRITON_UE8M0.name}={choice}.")
