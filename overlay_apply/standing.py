"""How each feature stands at a tree: in or not, switched off or not, and what of its needs is missing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Iterable, List, Optional

from .bases import Base, Manifest
from .environment import Environment
from .needs import FeatureNeeds
from .patches import features_of, load_patches
from .plan import UPSTREAM, is_retired
from .project import Project
from .situation import MODIFIED, PARTLY, Situation

ACTIVE, OFF, LACKING, REFUSED = "active", "off", "lacks", "refused"
PARTLY_IN, NOT_IN, NOT_HERE = "partly in", "not in", "not here"

_WORDS = {
    PARTLY_IN: "the tree holds only parts of the overlay",
    NOT_IN: "`apply` puts it in",
    UPSTREAM: "this SGLang does it by itself",
    NOT_HERE: "there are no patches of it for this base",
}


@dataclass(frozen=True)
class Standings:
    """What decides how features stand: a tree and its base, its environment, and the flags with their values."""

    situation: Situation
    project: Project
    manifest: Manifest
    base: Base
    environment: Environment
    flags: list

    def rows(self) -> List[dict]:
        """Return {feature, state, why, missing, parts} for each feature of the base's patches and of the manifest."""
        patches = load_patches(self.project.patches, self.base.name)
        names = dict.fromkeys([*features_of(patches), *self.manifest.features])
        return [self._row(name, [patch for patch in patches if patch.feature == name]) for name in names]

    def _row(self, name: str, patches: list) -> dict:
        needs = self.manifest.features.get(name, FeatureNeeds())
        absent = self._absent(name, patches)
        if absent in (NOT_HERE, UPSTREAM):
            return {"feature": name, "state": absent, "why": _WORDS[absent], "missing": [], "parts": []}
        missing = needs.needs.unmet(self.base.name, self.environment)
        parts = {part: each.unmet(self.base.name, self.environment) for part, each in needs.parts.items()}
        state, why = (absent, _WORDS[absent]) if absent else self._present(name, needs, missing, parts)
        listed = [{"part": part, "missing": list(dict.fromkeys([*missing, *lacks]))} for part, lacks in parts.items()]
        return {"feature": name, "state": state, "why": why, "missing": missing, "parts": listed}

    def _present(self, name: str, needs: FeatureNeeds, missing: list, parts: dict) -> tuple:
        """Return (state, why) of a feature that is in."""
        # All flags are read at once, so that a refused one stops the server whichever feature's it is.
        refused = [flag["refused"] for flag in self.flags if flag["refused"]]
        if refused:
            return REFUSED, f"the server stops at start-up: {refused[0]}"
        flags = [flag for flag in self.flags if flag["feature"] == name]
        for flag in flags:
            if _value(flag) in (_meanings(needs, flag, "off_by") or ()):
                return OFF, f"by {_shown(flag)}" if flag["set_to"] else f"as {flag['name']} unset means {flag['default']}"
        lacks = [*missing, *_asked_and_missing(needs, flags, parts)]
        if lacks:
            return LACKING, "; ".join(lacks)
        return ACTIVE, "; ".join(_configuration(needs, flags)) or "nothing it needs is missing"

    def _absent(self, name: str, patches: list) -> Optional[str]:
        """Say in which way a feature is not in the tree; None where it is in."""
        receipt, read = self.situation.receipt, self.situation.read_original
        if self._state == PARTLY and patches:
            return PARTLY_IN
        if self._lost and name in receipt.features:
            return PARTLY_IN
        if receipt and name in receipt.features:
            outcomes = {patch["outcome"] for patch in receipt.patches if patch["feature"] == name}
            return UPSTREAM if outcomes == {UPSTREAM} else None
        if patches:
            # Those without a probe first: they settle it, and nothing has to be parsed.
            by_probe = sorted(patches, key=lambda patch: patch.retire_when is not None)
            return UPSTREAM if all(is_retired(patch, read) for patch in by_probe) else NOT_IN
        return UPSTREAM if any(is_retired(patch, read) for patch in self._of_other_bases(name)) else NOT_HERE

    @cached_property
    def _state(self) -> str:
        return self.situation.state

    @cached_property
    def _lost(self) -> bool:
        """Whether the tree has a receipt, and a file of the overlay's, or a call of it in a patched file, is gone."""
        return self._state == MODIFIED and any(entry["now"] != "edited" for entry in self.situation.changed())

    def _of_other_bases(self, name: str) -> Iterable:
        for base in self.manifest.bases:
            yield from (patch for patch in load_patches(self.project.patches, base.name) if patch.feature == name)


def _asked_and_missing(needs: FeatureNeeds, flags: list, parts: dict) -> Iterable[str]:
    """Yield what is missing of the parts that a flag asks for by name."""
    for flag in flags:
        part = (_meanings(needs, flag, "asks_for") or {}).get(_value(flag))
        yield from (f"{flag['name']}={flag['set_to']}: {lack}" for lack in parts.get(part, ()))


def _configuration(needs: FeatureNeeds, flags: list) -> Iterable[str]:
    """Yield the flags that are set, and the others that the manifest has words for."""
    for flag in flags:
        says = (_meanings(needs, flag, "says") or {}).get(_value(flag))
        if says or flag["set_to"]:
            yield f"{_shown(flag)}: {says}" if says else _shown(flag)


def _shown(flag: dict) -> str:
    return f"{flag['name']}={_value(flag)}" if flag["set_to"] else f"{flag['name']} unset"


def _meanings(needs: FeatureNeeds, flag: dict, kind: str) -> Any:
    return needs.flags.get(flag["name"], {}).get(kind)


def _value(flag: dict) -> str:
    """Return what a flag means: what it is set to, as the overlay reads it, else its default."""
    value = (flag["set_to"] or "").strip().lower() or str(flag["default"])
    return str(int(value)) if value.isdecimal() else value


def packages(manifest: Manifest, base: Optional[Base], environment: Environment) -> List[dict]:
    """Return {package, found, pinned, needed} for each package that the base pins or a feature asks for."""
    pins = base.pins if base else {}
    names = dict.fromkeys([*pins, *(name for needs in manifest.features.values() for name in needs.packages())])
    return [
        {"package": name, "found": environment.version(name), "pinned": pins.get(name), "needed": _asked(manifest, name, base)}
        for name in names
    ]


def _asked(manifest: Manifest, package: str, base: Optional[Base]) -> dict:
    """Return the ranges that features ask of a package, by feature."""
    asked = {name: needs.asking(package, base.name) for name, needs in manifest.features.items()} if base else {}
    return {name: ranges for name, ranges in asked.items() if ranges}
