"""The overlay's counters among SGLang's own Prometheus metrics.

SGLang runs prometheus_client in its multiprocess mode: each scheduler writes into files of the folder that
``PROMETHEUS_MULTIPROC_DIR`` names, and the HTTP process adds up what it finds there. So these need no server of their own.
"""

from __future__ import annotations

from typing import Any, Dict, Tuple

DEFERRED = "sglang:moe_finalize_deferred"
NOT_DEFERRED = "sglang:moe_finalize_not_deferred"
FINALIZED = "sglang:moe_finalize_finalized"


class MoeFinalizeMetrics:
    """An exporter of ``Counters``, with the labels and the metric classes of SGLang's own scheduler metrics."""

    def __init__(self, collector: Any) -> None:
        # Here and not at the top: prometheus_client looks for the folder when it is imported.
        from prometheus_client import Counter

        self._labels = dict(collector.labels)
        self._class = getattr(collector, "_counter_cls", None) or Counter
        self._series: Dict[Tuple[Any, ...], Any] = {}
        self._deferred = self._counter(DEFERRED, "MoE layers that ran without their finalize, over all forwards.")
        self._not_deferred = self._counter(
            NOT_DEFERRED, "MoE layers that ran as in the stock release, over all forwards, by why.", "reason"
        )
        self._finalized = self._counter(
            FINALIZED, "Finalizes of deferred MoE outputs, by way and number of tokens.", "way", "up_to_tokens"
        )

    def deferred(self, count: int) -> None:
        self._add(self._deferred, count)

    def not_deferred(self, count: int, reason: str) -> None:
        self._add(self._not_deferred, count, reason)

    def finalized(self, count: int, way: str, up_to_tokens: int) -> None:
        self._add(self._finalized, count, way, str(up_to_tokens))

    def _counter(self, name: str, documentation: str, *own: str) -> Any:
        return self._class(name=name, documentation=documentation, labelnames=[*self._labels, *own])

    def _add(self, counter: Any, count: int, *own: str) -> None:
        key = (id(counter), *own)
        if key not in self._series:
            self._series[key] = counter.labels(*self._labels.values(), *own)
        self._series[key].inc(count)
