"""How each feature stands at a tree: in or not, switched off or not, and what of its needs is missing."""

from __future__ import annotations

from typing import Iterable, List, Optional

from .bases import Base, Manifest
from .environment import Environment
from .needs import FeatureNeeds
from .patches import Patch, features_of, load_patches
from .plan import UPSTREAM, is_retired
from .project import Project
from .situation import Situation

ACTIVE, OFF, LACKING, REFUSED = "active", "off", "lacks", "refused"
NOT_IN, NOT_HERE = "not in", "not here"

_NO_NEEDS = FeatureNeeds()


def standings(
    situation: Situation, project: Project, manifest: Manifest, base: Base, environment: Environment, flags: list
) -> list:
    """Return {feature, state, why, missing, parts} for each feature of the manifest and of the base's patches."""
    patches = load_patches(project.patches, base.name)
    names = dict.fromkeys([*features_of(patches), *manifest.features])
    return [
        _standing(name, _place(name, situation, project, manifest, patches), manifest, base, environment, flags)
        for name in names
    ]


def _standing(
    name: str, place: Optional[str], manifest: Manifest, base: Base, environment: Environment, flags: list
) -> dict:
    """`place` says why a feature is not in; None where it is."""
    needs = manifest.features.get(name, _NO_NEEDS)
    missing = needs.needs.unmet(base.name, environment)
    parts = {part: part_needs.unmet(base.name, environment) for part, part_needs in needs.parts.items()}
    own_flags = [flag for flag in flags if flag["feature"] == name]
    state, why = (place, _WORDS[place]) if place else _present(needs, own_flags, missing, parts)
    return {
        "feature": name,
        "state": state,
        "why": why,
        "missing": missing,
        "parts": [{"part": part, "missing": lacks} for part, lacks in parts.items()],
    }


_WORDS = {
    NOT_IN: "`apply` puts it in",
    UPSTREAM: "this SGLang does it by itself",
    NOT_HERE: "there are no patches of it for this base",
}


def _present(needs: FeatureNeeds, flags: list, missing: list, parts: dict) -> tuple:
    """Return (state, why) of a feature that is in."""
    refused = [flag["refused"] for flag in flags if flag["refused"]]
    if refused:
        return REFUSED, f"the server stops at start-up: {refused[0]}"
    for flag in flags:
        if _value(flag) in _meanings(needs, flag, "off_by"):
            return OFF, f"by {flag['name']}={flag['set_to']}"
    lacks = [*missing, *_asked_and_missing(needs, flags, parts)]
    if lacks:
        return LACKING, "; ".join(lacks)
    return ACTIVE, "; ".join(_configuration(needs, flags)) or "it has no flag"


def _asked_and_missing(needs: FeatureNeeds, flags: list, parts: dict) -> Iterable[str]:
    """Yield what is missing of the parts that a flag asks for by name."""
    for flag in flags:
        part = _meanings(needs, flag, "asks_for").get(_value(flag))
        yield from (f"{flag['name']}={flag['set_to']}: {lack}" for lack in parts.get(part, ()))


def _meanings(needs: FeatureNeeds, flag: dict, kind: str) -> dict:
    return needs.flags.get(flag["name"], {}).get(kind) or {}


def _configuration(needs: FeatureNeeds, flags: list) -> Iterable[str]:
    """Yield the flags that are set, and the others that the manifest has words for."""
    for flag in flags:
        says = _meanings(needs, flag, "says").get(_value(flag))
        if says or flag["set_to"]:
            shown = f"{flag['name']}={_value(flag)}" if flag["set_to"] else f"{flag['name']} unset"
            yield f"{shown}: {says}" if says else shown


def _value(flag: dict) -> str:
    """Return what a flag means: what it is set to, as the overlay reads it, else its default."""
    return (flag["set_to"] or "").strip().lower() or str(flag["default"])


def _place(name: str, situation: Situation, project: Project, manifest: Manifest, patches: List[Patch]) -> Optional[str]:
    """Say why a feature is not in a tree; None where it is."""
    own = [patch for patch in patches if patch.feature == name]
    receipt = situation.receipt
    if receipt and name in receipt.features:
        outcomes = [patch["outcome"] for patch in receipt.patches if patch["feature"] == name]
        return UPSTREAM if outcomes and set(outcomes) == {UPSTREAM} else None
    if own:
        # Those without a probe first: they settle it, and nothing has to be parsed.
        own.sort(key=lambda patch: patch.retire_when is not None)
        return UPSTREAM if all(is_retired(patch, situation.read_original) for patch in own) else NOT_IN
    others = [patch for base in manifest.bases for patch in load_patches(project.patches, base.name)]
    known = [patch for patch in others if patch.feature == name]
    return UPSTREAM if any(is_retired(patch, situation.read_original) for patch in known) else NOT_HERE


def packages(manifest: Manifest, base: Optional[Base], environment: Environment) -> list:
    """Return {package, found, pinned, needed} for each package that the base pins or a feature asks for."""
    pins = base.pins if base else {}
    names = dict.fromkeys([*pins, *(name for needs in manifest.features.values() for name in needs.packages())])
    return [
        {
            "package": name,
            "found": environment.version(name),
            "pinned": pins.get(name),
            "needed": _asked(manifest, name, base),
        }
        for name in names
    ]


def _asked(manifest: Manifest, package: str, base: Optional[Base]) -> dict:
    """Return the ranges that features ask of a package, by feature."""
    asked = {name: needs.asking(package, base.name) for name, needs in manifest.features.items()} if base else {}
    return {name: ranges for name, ranges in asked.items() if ranges}
