"""Patch data: the series file and one YAML file for each patch of a base (see patches/README.md)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Optional

import yaml

from .errors import PatchFault, UsageFault

REASONS = {
    "hands-over": "a call into the overlay takes over",
    "guards": "keeps a bundle from leaking",
    "reports": "counters and logs",
    "corrects": "a fault upstream still has",
}

_PATCH_KEYS = {"id", "feature", "reason", "why", "upstream", "edits"}
_RULE_KEYS = {"rule", "constraints", "utils"}
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Rule:
    """An ast-grep rule on one file below the sglang package."""

    file: str
    config: dict


@dataclass(frozen=True)
class Edit:
    """One replacement, at exactly `matches` places."""

    patch: str
    number: int
    """Counts from 1 within its patch."""
    where: Rule
    matches: int
    fix: str
    imports: tuple

    @property
    def name(self) -> str:
        return f"{self.patch}#{self.number}"


@dataclass(frozen=True)
class Patch:
    """One patch of a base."""

    id: str
    feature: str
    reason: str
    why: str
    upstream: str
    retire_when: Optional[Rule]
    edits: tuple


def load_yaml(path: Path) -> Any:
    """Read a YAML file. Raises PatchFault if it is missing or not YAML."""
    try:
        return yaml.load(path.read_bytes(), _Loader)
    except (OSError, yaml.YAMLError) as fault:
        raise PatchFault(
            f"cannot read patch data: {fault}", file=str(path), remedy="correct the file"
        ) from None


def load_series(folder: Path) -> list:
    """Return the patch ids of the series file, in order. Raises PatchFault."""
    path = folder / "series"
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as fault:
        raise PatchFault(f"cannot read the series: {fault}", file=str(path)) from None
    ids = [line.split("#")[0].strip() for line in lines]
    ids = [name for name in ids if name]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise PatchFault(f"listed twice: {', '.join(twice)}", file=str(path), remedy="list it once")
    return ids


def load_patches(folder: Path, base: str) -> list:
    """Return a base's patches in series order.

    Raises PatchFault if a file is malformed or not in the series, or if there are no patches.
    """
    series = load_series(folder)
    files = {path.stem: path for path in sorted((folder / base).glob("*.yml"))}
    strangers = sorted(set(files) - set(series))
    if strangers:
        raise PatchFault(
            "a patch is not in the series",
            patch=strangers[0],
            file=str(files[strangers[0]]),
            remedy=f"add it to {folder / 'series'}",
        )
    if not files:
        raise PatchFault(
            f"no patches for {base}", file=str(folder / base), expected="at least one", found=0
        )
    return [load_patch(files[name]) for name in series if name in files]


def load_patch(path: Path) -> Patch:
    """Read one patch. Raises PatchFault naming what is wrong with it."""
    data = load_yaml(path)
    fault = _Fault(path)
    fault.keys(data, _PATCH_KEYS, {"retire_when"}, "the patch")
    fault.unless(data["id"] == path.stem, "id is not the file's name", path.stem, data["id"])
    fault.unless(data["reason"] in REASONS, "unknown reason", sorted(REASONS), data["reason"])
    for key in ("feature", "why", "upstream"):
        fault.unless(_is_text(data[key]), f"{key} says nothing", "text", data[key])
    fault.unless(_is_list(data["edits"]), "no edits", "a list", data["edits"])
    probe = data.get("retire_when")
    if probe is not None:
        fault.keys(probe, {"rule"}, _RULE_KEYS | {"file"}, "retire_when")
    edits = tuple(_edit(entry, data["id"], i, fault) for i, entry in enumerate(data["edits"], 1))
    return Patch(
        id=data["id"],
        feature=data["feature"],
        reason=data["reason"],
        why=data["why"].strip(),
        upstream=data["upstream"],
        retire_when=probe and _rule({"file": edits[0].where.file, **probe}, fault),
        edits=edits,
    )


def _edit(data: Any, patch: str, number: int, fault: "_Fault") -> Edit:
    where = f"edit {number}"
    fault.keys(data, {"file", "matches", "rule", "fix"}, _RULE_KEYS | {"imports"}, where)
    matches, imports = data["matches"], data.get("imports") or []
    fault.unless(type(matches) is int and matches > 0, f"{where}: matches", "1 or more", matches)
    fault.unless(isinstance(data["fix"], str), f"{where}: fix", "text", data["fix"])
    fault.unless(
        isinstance(imports, list) and all(map(_is_import, imports)),
        f"{where}: imports",
        "a list of import lines",
        imports,
    )
    return Edit(patch, number, _rule(data, fault), matches, data["fix"], tuple(imports))


def _rule(data: dict, fault: "_Fault") -> Rule:
    file, rule = data["file"], data["rule"]
    inside = isinstance(file, str) and not PurePosixPath(file).is_absolute() and ".." not in file
    fault.unless(inside, "file", "a path below the sglang package", file)
    fault.unless(isinstance(rule, dict) and rule, "rule", "an ast-grep rule", rule)
    return Rule(file, {key: data[key] for key in sorted(_RULE_KEYS) if key in data})


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_import(line: Any) -> bool:
    """Tell an import statement from, say, the half of one that a YAML flow list cut at a comma."""
    return _is_text(line) and "\n" not in line and line.startswith(("import ", "from "))


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


class _Fault:
    """Raises PatchFault for one patch file."""

    def __init__(self, path: Path):
        self.path = path

    def unless(self, good: Any, message: str, expected: Any, found: Any) -> None:
        if not good:
            raise PatchFault(
                message,
                patch=self.path.stem,
                file=str(self.path),
                expected=expected,
                found=repr(found),
                remedy="correct the patch (patches/README.md shows the form)",
            )

    def keys(self, data: Any, needed: set, optional: set, where: str) -> None:
        """Raise unless `data` is a mapping with all needed keys and no unknown ones."""
        self.unless(isinstance(data, dict), f"{where} is not a mapping", "a mapping", data)
        missing, unknown = sorted(needed - set(data)), sorted(set(data) - needed - optional)
        self.unless(not missing, f"{where} lacks keys", sorted(needed), missing)
        self.unless(not unknown, f"{where} has unknown keys", sorted(needed | optional), unknown)


def features_of(patches: list) -> list:
    """Return the features of some patches, in series order."""
    return list(dict.fromkeys(patch.feature for patch in patches))


def choose(patches: list, features: list, base: str) -> list:
    """Return the features asked for (all of them if none are), in series order.

    Raises UsageFault for one that the base of these patches does not have.
    """
    known = features_of(patches)
    unknown = [name for name in features if name not in known]
    if unknown:
        raise UsageFault(
            f"no such feature on {base}: {', '.join(unknown)}",
            expected=known,
            found=unknown,
            remedy=f"choose from: {', '.join(known)}",
        )
    return [name for name in known if name in features] if features else known
