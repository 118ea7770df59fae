"""What the overlay did in this process, for a server's internal state.

Counts are of Python-level forwards: a replayed CUDA graph repeats what was counted at its capture
without counting again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Dict

from ... import environ

WAYS = (*environ.WAYS, "in_layer")


@dataclass
class Counters:
    """Per layer id: forwards deferred and carried; per way: finalizes; per reason: forwards that did not defer."""

    deferred: Counter = field(default_factory=Counter)
    carried: Counter = field(default_factory=Counter)
    ways: Counter = field(default_factory=Counter)
    not_deferred: Counter = field(default_factory=Counter)
    layers: Dict[int, str] = field(default_factory=dict)

    def snapshot(self) -> Dict[str, Any]:
        """Plain dicts with string keys, as JSON and msgpack want them."""
        return {
            "deferred": _named(self.deferred),
            "carried": _named(self.carried),
            "ways": {way: self.ways[way] for way in WAYS},
            "not_deferred": _named(self.not_deferred),
            "layers": _named(self.layers),
        }


def _named(counts: Dict[Any, Any]) -> Dict[str, Any]:
    return {str(key): value for key, value in sorted(counts.items())}


COUNTERS = Counters()
