"""What was measured at the layer boundary, and which way is the fastest for a number of tokens.

The table is a JSON file: ``policy_table.json`` beside this module, or the file ``SGLANG_MOE_FINALIZE_POLICY`` names,
which is then read in its place. A benchmark writes one with ``Table(entries).to_json()``::

    {"version": 1,
     "entries": [
       {"arch": "sm90", "world_size": 2, "hidden": 7168, "source": "benchmark/results/boundary_h200.md",
        "points": [
          {"tokens": 1, "stock_us": 6.9, "ways_us": {"fused": 4.1, "flashinfer": 6.8, "separate": 6.9}},
          {"tokens": 64, "stock_us": 13.9, "ways_us": {"fused": 7.5, "flashinfer": 15.8}}]}]}

- ``arch``: ``sm90`` and so on by compute capability, or ``cpu``. One entry per (arch, world_size, hidden).
- ``source``: where the figures come from; it is logged.
- ``tokens``: ascending. ``stock_us``: microseconds of what stock does at this boundary, finalize in the layer and, fused, all-reduce
  (with several ranks) and norm. ``ways_us``: of the same boundary by each way that was measured; the kernels before it are not counted.

All figures are kept, not only the fastest way, because between two points a way counts only where it was faster than stock
at both of them.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from ....environ import POLICY, WAYS

BUILT_IN = Path(__file__).with_name("policy_table.json")
VERSION = 1


class PolicyError(ValueError):
    """A table cannot be used; the message names the file, what is wrong with it and what to do."""


@dataclass(frozen=True)
class Point:
    """One measured number of tokens: microseconds of stock, and of each way."""

    tokens: int
    stock_us: float
    ways_us: Dict[str, float]

    def faster(self) -> Tuple[str, ...]:
        """The ways measured faster than stock, the fastest first."""
        return tuple(way for us, way in sorted((us, way) for way, us in self.ways_us.items()) if us < self.stock_us)


@dataclass(frozen=True)
class Policy:
    """The points measured for one (arch, world_size, hidden), ascending in tokens; none where nothing was measured."""

    points: Tuple[Point, ...] = ()
    source: str = ""

    def ways(self, num_tokens: int) -> Tuple[str, ...]:
        """The ways that were measured faster than stock around ``num_tokens``, the fastest first; none beyond the points.

        Goes by the point at or next above; a way that was not faster at the point next below is left out.
        """
        above = next((point for point in self.points if point.tokens >= num_tokens), None)
        if above is None:
            return ()
        below = [point for point in self.points if point.tokens < num_tokens]
        if above.tokens == num_tokens or not below:
            return above.faster()
        return tuple(way for way in above.faster() if way in below[-1].faster())

    def largest(self, way: str) -> int:
        """The largest number of tokens this way is ever chosen for; 0 where it never is."""
        return max((point.tokens for point in self.points if way in point.faster()), default=0)

    def wins_up_to(self, max_tokens: int) -> bool:
        """Whether any way was measured faster than stock for some number of tokens up to ``max_tokens``."""
        return any(self.ways(min(point.tokens, max_tokens)) for point in self.points)

    def only(self, way: str) -> "Policy":
        """What was measured of one way."""
        kept = (Point(p.tokens, p.stock_us, {w: us for w, us in p.ways_us.items() if w == way}) for p in self.points)
        return Policy(tuple(kept), self.source)


@dataclass(frozen=True)
class Entry:
    """Measurements of one configuration; see the module's docstring."""

    arch: str
    world_size: int
    hidden: int
    source: str
    points: List[Point] = field(default_factory=list)

    @property
    def key(self) -> Tuple[str, int, int]:
        return self.arch, self.world_size, self.hidden


@dataclass(frozen=True)
class Table:
    """All entries of one file."""

    entries: List[Entry] = field(default_factory=list)

    @classmethod
    def read(cls, path: Optional[str] = None) -> "Table":
        """The table of a file; the built-in one without a path.

        Raises:
            PolicyError: the file cannot be read, is not JSON, or is not of the form above.
        """
        file = BUILT_IN if path is None else Path(path)
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PolicyError(f"{_named(str(file))} cannot be read ({error}); name a JSON file or unset the flag") from None
        return cls.from_json(text, str(file))

    @classmethod
    def from_json(cls, text: str, file: str = "the policy table") -> "Table":
        """The table of a file's text; raises PolicyError, which names ``file``."""
        try:
            return _table(json.loads(text))
        except json.JSONDecodeError as error:
            raise PolicyError(f"{_named(file)} is not JSON: {error}") from None
        except _Malformed as error:
            raise PolicyError(f"{_named(file)}: {error}; the form is in {Path(__file__).name} beside {BUILT_IN.name}") from None

    def to_json(self) -> str:
        """The text of a file with this table."""
        return json.dumps({"version": VERSION, "entries": [asdict(entry) for entry in self.entries]}, indent=2) + "\n"

    def policy(self, arch: str, world_size: int, hidden: int) -> Policy:
        """What was measured for this configuration; an empty policy where nothing was."""
        for entry in self.entries:
            if entry.key == (arch, world_size, hidden):
                return Policy(tuple(entry.points), entry.source)
        return Policy()


class _Malformed(ValueError):
    """Where in a table something is not as it must be, and what was expected."""


def _named(file: str) -> str:
    return f"the MoE boundary's policy table {file} ({POLICY.name})"


def _table(value: Any) -> Table:
    fields = _fields(value, "the table", {"version": int, "entries": list})
    if fields["version"] != VERSION:
        raise _Malformed(f"version must be {VERSION}, got {fields['version']}")
    entries = [_entry(entry, f"entries[{i}]") for i, entry in enumerate(fields["entries"])]
    keys = [entry.key for entry in entries]
    for i, key in enumerate(keys):
        if key in keys[:i]:
            raise _Malformed(f"entries[{i}] is a second entry for arch, world_size, hidden = {key}")
    return Table(entries)


def _entry(value: Any, where: str) -> Entry:
    kinds = {"arch": str, "world_size": int, "hidden": int, "source": str, "points": list}
    fields = _fields(value, where, kinds)
    points = [_point(point, f"{where}.points[{i}]") for i, point in enumerate(fields.pop("points"))]
    tokens = [point.tokens for point in points]
    if tokens != sorted(set(tokens)):
        raise _Malformed(f"{where}.points must ascend in tokens, got {tokens}")
    return Entry(**fields, points=points)


def _point(value: Any, where: str) -> Point:
    fields = _fields(value, where, {"tokens": int, "stock_us": float, "ways_us": dict})
    for way in fields["ways_us"]:
        if way not in WAYS:
            raise _Malformed(f"{where}.ways_us names the unknown way {way!r}; there are {', '.join(WAYS)}")
    ways = {way: _checked(us, float, f"{where}.ways_us.{way}") for way, us in fields["ways_us"].items()}
    return Point(fields["tokens"], fields["stock_us"], ways)


def _fields(value: Any, where: str, kinds: Dict[str, type]) -> Dict[str, Any]:
    if not isinstance(value, dict) or set(value) != set(kinds):
        got = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise _Malformed(f"{where} must be an object with {', '.join(kinds)}, got {got}")
    return {name: _checked(value[name], kind, f"{where}.{name}") for name, kind in kinds.items()}


def _checked(value: Any, kind: Any, where: str) -> Any:
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise _Malformed(f"{where} must be of type {kind.__name__}, got {value!r}")
    if kind in (int, float) and not (value > 0 and math.isfinite(value)):
        raise _Malformed(f"{where} must be a finite number above 0, got {value!r}")
    return value
