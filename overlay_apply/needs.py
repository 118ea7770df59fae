"""What a feature needs of a machine, as the manifest states it, and what of that is missing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import List, Mapping, Optional

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from .environment import Environment, Gpu

_NEED_KEYS = {"packages", "gpu", "commands", "bases"}
_GPU_KEYS = {"arch", "count", "link"}
_FLAG_KEYS = {"off_by", "says", "asks_for"}


@dataclass(frozen=True)
class Needs:
    """Packages by version range, a kind of GPU, commands; `bases` is empty where it is for all of them."""

    packages: Mapping[str, object] = field(default_factory=dict)
    """A range, or a range by base."""
    gpu: Optional[Mapping[str, str]] = None
    commands: tuple = ()
    bases: tuple = ()

    def range_of(self, package: str, base: str) -> str:
        """Return the versions that are taken on a base; empty where it is not needed there."""
        asked = self.packages.get(package, "")
        return str(asked.get(base, "")) if isinstance(asked, Mapping) else str(asked)

    def unmet(self, base: str, environment: Environment) -> List[str]:
        """Say what is missing here, one line each."""
        if self.bases and base not in self.bases:
            return [f"not on {base}"]
        versions = [
            package_unmet(name, self.range_of(name, base), environment.version(name)) for name in self.packages
        ]
        commands = [f"{name} is not on PATH" for name in self.commands if not environment.has_command(name)]
        return [line for line in [*gpu_unmet(self.gpu, environment.gpu), *versions, *commands] if line]


@dataclass(frozen=True)
class FeatureNeeds:
    """A feature's needs, those of its parts, which it can do without, and what the values of its flags mean.

    A flag's `off_by` lists the values that switch the feature off, `says` has words for a value, and `asks_for` the part
    that a value asks for by name.
    """

    needs: Needs = Needs()
    parts: Mapping[str, Needs] = field(default_factory=dict)
    flags: Mapping[str, Mapping] = field(default_factory=dict)

    def packages(self) -> List[str]:
        """Return all packages that it or a part of it asks for."""
        return list(dict.fromkeys(name for needs in (self.needs, *self.parts.values()) for name in needs.packages))

    def asking(self, package: str, base: str) -> List[str]:
        """Return the ranges it and its parts ask for on a base, each once."""
        ranges = (needs.range_of(package, base) for needs in (self.needs, *self.parts.values()))
        return list(dict.fromkeys(filter(None, ranges)))


def parse_feature(row: Mapping) -> FeatureNeeds:
    """Read one feature of the manifest. Raises ValueError naming what is wrong."""
    _check_keys(row, _NEED_KEYS | {"flags", "parts"})
    flags = row.get("flags") or {}
    for flag in flags.values():
        _check_keys(flag, _FLAG_KEYS)
    parts = {name: _parse_needs(part or {}) for name, part in (row.get("parts") or {}).items()}
    own = {key: value for key, value in row.items() if key in _NEED_KEYS}
    return FeatureNeeds(_parse_needs(own), parts, flags)


def _parse_needs(row: Mapping) -> Needs:
    _check_keys(row, _NEED_KEYS)
    packages, gpu = row.get("packages") or {}, row.get("gpu")
    if gpu is not None:
        _check_keys(gpu, _GPU_KEYS)
    ranges = [gpu[key] for key in ("arch", "count") if gpu and key in gpu]
    for asked in packages.values():
        ranges += asked.values() if isinstance(asked, Mapping) else [asked]
    for text in ranges:
        _check_range(text)
    return Needs(packages, gpu, tuple(row.get("commands") or ()), tuple(row.get("bases") or ()))


def _check_keys(row: Mapping, known: set) -> None:
    unknown = sorted(set(row) - known)
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; there are {', '.join(sorted(known))}")


def _check_range(text: object) -> None:
    try:
        SpecifierSet(str(text))
    except InvalidSpecifier:
        raise ValueError(f"not a range of versions: {text!r}") from None


def package_unmet(name: str, wanted: str, found: Optional[str]) -> str:
    """Say why a package's version will not do; empty where it does. A local part (+cu130) does not count."""
    if not wanted or in_range(wanted, found):
        return ""
    return f"{name} {wanted} is needed, {found or 'none'} is installed"


def in_range(wanted: str, found: Optional[str]) -> bool:
    """Tell whether a version is one of a range."""
    try:
        return found is not None and SpecifierSet(wanted).contains(Version(Version(found).public), prereleases=True)
    except InvalidVersion:
        return False


def gpu_unmet(wanted: Optional[Mapping[str, str]], found: Gpu) -> List[str]:
    """Say in what a machine's GPUs fall short."""
    if wanted is None:
        return []
    if not found.count:
        return [f"an NVIDIA GPU is needed, {found.absent}"]
    checks: List[tuple] = [
        ("arch", in_range, found.arch, "compute capability {} is needed, this machine's is {}"),
        ("count", in_range, str(found.count), "{} GPUs are needed, there are {}"),
    ]
    if found.count > 1:
        checks.append(("link", _linked, found.link, "{} links between all GPUs are needed, there are {}"))
    return [
        words.format(wanted[key], has or "none known")
        for key, holds, has, words in checks
        if key in wanted and not holds(str(wanted[key]), has)
    ]


def _linked(kind: str, found: Optional[str]) -> bool:
    return found is not None and all(link.startswith(kind) for link in found.split(", "))
