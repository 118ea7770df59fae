"""What the overlay did in this process, for a server's internal state and its metrics.

Counts are of Python-level forwards: a replayed CUDA graph repeats what was counted at its capture
without counting again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Dict, Optional, Protocol

import torch

from ... import environ

WAYS = (*environ.WAYS, "in_layer")


class Exporter(Protocol):
    """Where counts go on to as they are made."""

    def deferred(self, count: int) -> None: ...

    def not_deferred(self, count: int, reason: str) -> None: ...

    def finalized(self, count: int, way: str, up_to_tokens: int) -> None: ...


@dataclass
class Counters:
    """Per layer id: forwards deferred and carried; per way, and per way and bucket: finalizes; per reason: forwards that did not defer."""

    deferred: Counter = field(default_factory=Counter)
    carried: Counter = field(default_factory=Counter)
    ways: Counter = field(default_factory=Counter)
    ways_by_tokens: Counter = field(default_factory=Counter)
    not_deferred: Counter = field(default_factory=Counter)
    layers: Dict[int, str] = field(default_factory=dict)
    exporter: Optional[Exporter] = None

    def count_deferred(self, layer_id: int) -> None:
        self.deferred[layer_id] += 1
        if self._exports():
            self.exporter.deferred(1)

    def count_not_deferred(self, reason: str) -> None:
        self.not_deferred[reason] += 1
        if self._exports():
            self.exporter.not_deferred(1, reason)

    def count_way(self, way: str, num_tokens: int) -> None:
        """Count a finalize of a bundle of ``num_tokens`` tokens."""
        self.ways[way] += 1
        self.ways_by_tokens[way, bucket(num_tokens)] += 1
        if self._exports():
            self.exporter.finalized(1, way, bucket(num_tokens))

    def export_to(self, exporter: Exporter) -> None:
        """Hand on what was counted so far, warm-up and graph captures, and from now on each count."""
        exporter.deferred(sum(self.deferred.values()))
        for reason, count in self.not_deferred.items():
            exporter.not_deferred(count, reason)
        for (way, up_to_tokens), count in self.ways_by_tokens.items():
            exporter.finalized(count, way, up_to_tokens)
        self.exporter = exporter

    def snapshot(self) -> Dict[str, Any]:
        """Plain dicts with string keys, as JSON and msgpack want them."""
        return {
            "deferred": _named(self.deferred),
            "carried": _named(self.carried),
            "ways": {way: self.ways[way] for way in WAYS},
            "ways_by_tokens": {way: self._by_tokens(way) for way in WAYS},
            "not_deferred": _named(self.not_deferred),
            "layers": _named(self.layers),
        }

    def _by_tokens(self, way: str) -> Dict[str, int]:
        return _named({up_to: count for (each, up_to), count in self.ways_by_tokens.items() if each == way})

    def _exports(self) -> bool:
        # A compiled forward would break at an exporter's lock.
        return self.exporter is not None and not torch.compiler.is_compiling()


def bucket(num_tokens: int) -> int:
    """The power of two that a number of tokens is counted under: the least that holds it."""
    return 1 << max(num_tokens - 1, 0).bit_length()


def _named(counts: Dict[Any, Any]) -> Dict[str, Any]:
    return {str(key): value for key, value in sorted(counts.items())}


COUNTERS = Counters()
