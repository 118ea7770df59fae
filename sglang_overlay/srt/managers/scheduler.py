"""The seam of ``scheduler.py``: the overlay's counters in the server's internal state."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Dict

from ..environ import settings
from ..layers.moe.counters import COUNTERS


def with_moe_finalize(internal_state: Dict[str, Any]) -> Dict[str, Any]:
    """``internal_state`` with ``moe_finalize``: the flags of this scheduler's process and what it counted."""
    return {**internal_state, "moe_finalize": {**asdict(settings()), **COUNTERS.snapshot()}}
