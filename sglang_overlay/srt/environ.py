"""The overlay's environment flags: one table, read once per process.

Pure Python on purpose: ``apply.py status`` loads this file by its path.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Container, Iterable, Iterator, Mapping, Optional, Tuple

TRUE_WORDS = ("1", "true", "yes", "y")
FALSE_WORDS = ("0", "false", "no", "n")


@dataclass(frozen=True)
class Flag:
    """One environment variable: what it is called, takes and does.

    ``default`` is what an unset (or empty) variable means, ``values`` the accepted values in words; ``is_json_file``: a path.
    """

    name: str
    default: str
    values: str
    feature: str
    help: str
    is_json_file: bool = False


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
    values="auto, fused, flashinfer, separate, eager",
    feature="deferred-finalize",
    help=(
        "How the next layer takes a deferred MoE output. fused: all of it in one kernel. flashinfer: all of it in "
        "FlashInfer's kernel. separate: finalize, then FlashInfer's fused all-reduce + norm. eager: finalize, "
        "all-reduce, norm. auto: the fastest by the table of measurements; where that names none, separate "
        "where it can run, else eager."
    ),
)
POLICY = Flag(
    name="SGLANG_MOE_FINALIZE_POLICY",
    default="built-in",
    values="a JSON file of measurements; its form: sglang_overlay/srt/layers/moe/boundary/policy.py",
    feature="deferred-finalize",
    help="The table of measurements that auto goes by, in place of the built-in one; the same file on every rank.",
    is_json_file=True,
)
MAX_TOKENS = Flag(
    name="SGLANG_MOE_DEFERRED_FINALIZE_MAX_TOKENS",
    default="192",
    values="an integer, 0 or more",
    feature="deferred-finalize",
    help="Forwards with more tokens than this do not defer; 0: nothing of the overlay's defers.",
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
MXFP4_MEGAMOE = Flag(
    name="SGLANG_MOE_MXFP4_MEGAMOE_SM90",
    default="0",
    values="0, 1 (also false/no/n, true/yes/y)",
    feature="mxfp4-megamoe-sm90",
    help=(
        "1: --moe-a2a-backend flashinfer_megamoe runs MXFP4 experts on Hopper, in the kernel that FlashInfer 0.7.4 has "
        "for it; what cannot run there stops the server at start-up. 0: exactly the stock release."
    ),
)
MEGAMOE_TOKENS = Flag(
    name="SGLANG_MOE_MXFP4_MEGAMOE_TOKENS",
    default="1024",
    values="a power of two from 64 on",
    feature="mxfp4-megamoe-sm90",
    help=(
        "Tokens of one rank that the mega kernel's largest workspace holds; longer forwards run in parts of that. "
        "Larger: faster prefill, more memory. The same on every rank."
    ),
)
FLAGS: Tuple[Flag, ...] = (ENABLE, FUSION, POLICY, MAX_TOKENS, TRITON_UE8M0, MXFP4_MEGAMOE, MEGAMOE_TOKENS)

# How the next layer can take a bundle.
WAYS = ("fused", "flashinfer", "separate", "eager")
_UE8M0_CHOICES = ("auto", "on", "off")


class FlagError(ValueError):
    """A flag holds a value it does not take."""


@dataclass(frozen=True)
class Settings:
    """The flags of this process, parsed.

    ``enable`` is ``"0"``, ``"1"`` or ``"auto"``; ``fusion`` is ``auto`` or one of ``WAYS``;
    ``policy`` the file of the user's own measurements, or None; ``max_tokens`` the largest deferred batch in tokens;
    ``triton_ue8m0`` one of ``auto``, ``on``, ``off``; ``mxfp4_megamoe`` whether Hopper's MXFP4 experts may go to the mega kernel;
    ``megamoe_tokens`` what that kernel's largest workspace holds of one rank.
    """

    enable: str
    fusion: str
    policy: Optional[str]
    max_tokens: int
    triton_ue8m0: str
    mxfp4_megamoe: bool
    megamoe_tokens: int

    @property
    def is_off(self) -> bool:
        """Whether no layer defers, whatever was measured."""
        return self.enable == "0" or self.max_tokens == 0

    @property
    def by_policy(self) -> bool:
        """Whether a layer defers only where a measurement says that this is faster than stock."""
        return self.enable == "auto" and not self.is_off


def parse(environ: Mapping[str, str]) -> Settings:
    """Parse the flags of ``environ``.

    Raises:
        FlagError: a flag holds a value it does not take; the message names flag, value and the values taken.
    """
    enable = _parse_enable(_value(environ, ENABLE))
    return Settings(
        enable=enable,
        fusion=_parse_fusion(_value(environ, FUSION)),
        policy=None if _value(environ, POLICY) == POLICY.default else environ.get(POLICY.name, "").strip() or None,
        max_tokens=_parse_max_tokens(_value(environ, MAX_TOKENS) or MAX_TOKENS.default, enable),
        triton_ue8m0=_parse_ue8m0(_value(environ, TRITON_UE8M0) or TRITON_UE8M0.default),
        mxfp4_megamoe=_parse_bool(MXFP4_MEGAMOE, _value(environ, MXFP4_MEGAMOE) or MXFP4_MEGAMOE.default),
        megamoe_tokens=_parse_capacity(_value(environ, MEGAMOE_TOKENS) or MEGAMOE_TOKENS.default),
    )


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The flags of this process; read once, so that every layer and rank sees the same (raises FlagError)."""
    return parse(os.environ)


def misspelt(variables: Iterable[str], known: Container[str] = ()) -> Iterator[Tuple[str, str]]:
    """Yield (variable, flag) of each variable that is no flag of ours, nor ``known``, and looks like one."""
    ours = [flag.name for flag in FLAGS]
    for variable in sorted(variables):
        near = difflib.get_close_matches(variable.upper(), ours, n=1, cutoff=0.84)
        if near and variable not in ours and variable not in known:
            yield variable, near[0]


def misspelt_notes(variables: Iterable[str], known: Container[str] = ()) -> Iterator[str]:
    """Yield a sentence on each of those."""
    for variable, flag in misspelt(variables, known):
        yield f"{variable} is set, and nothing reads it; the flag is {flag}"


def _value(environ: Mapping[str, str], flag: Flag) -> Optional[str]:
    return environ.get(flag.name, "").strip().lower() or None


def _parse_enable(value: Optional[str]) -> str:
    if value is None:
        return ENABLE.default
    return "1" if _parse_bool(ENABLE, value) else "0"


def _parse_bool(flag: Flag, value: str) -> bool:
    if value not in TRUE_WORDS + FALSE_WORDS:
        raise _bad(flag, value)
    return value in TRUE_WORDS


def _parse_fusion(value: Optional[str]) -> str:
    if value is None:
        return FUSION.default
    if value != "auto" and value not in WAYS:
        raise _bad(FUSION, value)
    return value


def _parse_max_tokens(value: str, enable: str) -> int:
    # A negative number is one that SGLang 0.5.23 itself takes, for its own deferral: no reason to stop a server that did not ask for ours.
    if value.isdecimal() or (enable != "1" and value.removeprefix("-").isdecimal()):
        return max(0, int(value))
    raise _bad(MAX_TOKENS, value)


def _parse_capacity(value: str) -> int:
    if not value.isdecimal() or int(value) < 64 or int(value) & (int(value) - 1):
        raise _bad(MEGAMOE_TOKENS, value)
    return int(value)


def _parse_ue8m0(value: str) -> str:
    if value not in _UE8M0_CHOICES:
        raise _bad(TRITON_UE8M0, value)
    return value


def _bad(flag: Flag, value: str) -> FlagError:
    return FlagError(f"{flag.name}={value}: valid values are: {flag.values}.")
