"""The overlay's environment flags: one table, read once per process.

Pure Python on purpose: ``apply.py status`` loads this file by its path.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Mapping, Optional, Tuple

TRUE_WORDS = ("1", "true", "yes", "y")
FALSE_WORDS = ("0", "false", "no", "n")


@dataclass(frozen=True)
class Flag:
    """One environment variable: what it is called, takes and does.

    ``default`` is what an unset (or empty) variable means, ``values`` the accepted values in words.
    """

    name: str
    default: str
    values: str
    feature: str
    help: str


ENABLE = Flag(
    name="SGLANG_ENABLE_MOE_DEFERRED_FINALIZE",
    default="auto",
    values="0, 1 (also false/no/n, true/yes/y)",
    feature="deferred-finalize",
    help=(
        "0: nothing defers, exactly the stock release with 0. 1: defer wherever the configuration "
        "table allows. Unset (auto): defer only where it was measured faster than stock, else stock."
    ),
)
FUSION = Flag(
    name="SGLANG_MOE_FINALIZE_FUSION",
    default="auto",
    values="auto, separate, eager",
    feature="deferred-finalize",
    help=(
        "How the next layer takes a deferred MoE output. eager: finalize, all-reduce, norm. separate: "
        "finalize, then FlashInfer's fused all-reduce + norm. auto: separate where it can run, else eager."
    ),
)
MAX_TOKENS = Flag(
    name="SGLANG_MOE_DEFERRED_FINALIZE_MAX_TOKENS",
    default="192",
    values="an integer, 0 or more",
    feature="deferred-finalize",
    help="Forwards with more tokens than this do not defer; 0 disables deferral.",
)
TRITON_UE8M0 = Flag(
    name="SGLANG_MOE_TRITON_UE8M0",
    default="auto",
    values="auto, on, off",
    feature="ue8m0-triton-moe",
    help=(
        "Power-of-two (UE8M0) activation scales in the Triton MoE of block-quantised FP8 experts. auto: where the "
        "checkpoint declares scale_fmt ue8m0. on: also where it does not. off: nowhere, exactly the stock release."
    ),
)
FLAGS: Tuple[Flag, ...] = (ENABLE, FUSION, MAX_TOKENS, TRITON_UE8M0)

_FUSION_WAYS = ("auto", "separate", "eager")
_FUSION_WAYS_TO_COME = ("fused", "flashinfer")
_UE8M0_CHOICES = ("auto", "on", "off")


class FlagError(ValueError):
    """A flag holds a value it does not take."""


@dataclass(frozen=True)
class Settings:
    """The flags of this process, parsed.

    ``enable`` is ``"0"``, ``"1"`` or ``"auto"``; ``fusion`` one of ``auto``, ``separate``, ``eager``;
    ``max_tokens`` the largest deferred batch in tokens; ``triton_ue8m0`` one of ``auto``, ``on``, ``off``.
    """

    enable: str
    fusion: str
    max_tokens: int
    triton_ue8m0: str

    @property
    def defers(self) -> bool:
        """Whether any layer may defer.

        ``auto`` defers where a measurement says it is faster than stock; there is no such
        measurement yet, so it is stock.
        """
        return self.enable == "1" and self.max_tokens > 0


def parse(environ: Mapping[str, str]) -> Settings:
    """Parse the flags of ``environ``.

    Raises:
        FlagError: a flag holds a value it does not take; the message names flag, value and the values taken.
    """
    return Settings(
        enable=_parse_enable(_value(environ, ENABLE)),
        fusion=_parse_fusion(_value(environ, FUSION)),
        max_tokens=_parse_max_tokens(_value(environ, MAX_TOKENS) or MAX_TOKENS.default),
        triton_ue8m0=_parse_ue8m0(_value(environ, TRITON_UE8M0) or TRITON_UE8M0.default),
    )


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The flags of this process; read once, so that every layer and rank sees the same (raises FlagError)."""
    return parse(os.environ)


def _value(environ: Mapping[str, str], flag: Flag) -> Optional[str]:
    return environ.get(flag.name, "").strip().lower() or None


def _parse_enable(value: Optional[str]) -> str:
    if value is None:
        return ENABLE.default
    if value in TRUE_WORDS:
        return "1"
    if value in FALSE_WORDS:
        return "0"
    raise _bad(ENABLE, value)


def _parse_fusion(value: Optional[str]) -> str:
    if value is None:
        return FUSION.default
    if value in _FUSION_WAYS_TO_COME:
        raise _bad(FUSION, value, "this version of the overlay does not have it yet; ")
    if value not in _FUSION_WAYS:
        raise _bad(FUSION, value)
    return value


def _parse_max_tokens(value: str) -> int:
    if not value.isdecimal():
        raise _bad(MAX_TOKENS, value)
    return int(value)


def _parse_ue8m0(value: str) -> str:
    if value not in _UE8M0_CHOICES:
        raise _bad(TRITON_UE8M0, value)
    return value


def _bad(flag: Flag, value: str, why: str = "") -> FlagError:
    return FlagError(f"{flag.name}={value}: {why}valid values are: {flag.values}.")
