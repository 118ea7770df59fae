"""The seams of the scheduler: the overlay's counters in the server's internal state and metrics, and what it says at start-up."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any, Dict

from ..environ import settings
from ..layers.moe.counters import COUNTERS

logger = logging.getLogger(__name__)


def with_moe_finalize(internal_state: Dict[str, Any]) -> Dict[str, Any]:
    """``internal_state`` with ``moe_finalize``: the flags of this scheduler's process and what it counted."""
    return {**internal_state, "moe_finalize": {**asdict(settings()), **COUNTERS.snapshot()}}


def tell_start(scheduler: Any) -> None:
    """Once a scheduler has its model: say how each feature stands, and count on SGLang's ``/metrics`` where those are on.

    A server does not stop over either, but does over its flags: with no MoE layer in its model nothing has read them yet.

    Raises:
        FlagError: a flag holds a value it does not take.
    """
    settings()
    for step in (_tell_features, _export_counters):
        try:
            step(scheduler)
        except Exception:
            logger.warning("MoE overlay: %s failed; serving goes on without it", step.__name__.strip("_"), exc_info=True)


def _tell_features(scheduler: Any) -> None:
    from .start import tell_features

    tell_features(scheduler.tp_worker.model_runner.model)


def _export_counters(scheduler: Any) -> None:
    # Ranks count the same, which would add up: only where SGLang itself counts.
    if scheduler.metrics_collector_context.current_scheduler_metrics_enabled:
        from ..observability.metrics_collector import MoeFinalizeMetrics

        COUNTERS.export_to(MoeFinalizeMetrics(scheduler.metrics_collector))
