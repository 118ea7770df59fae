"""What each base has of each patch: ours, upstream's own, or neither; told by the patches' own probes."""

from __future__ import annotations

from .bases import Base, Reader, load_manifest
from .commands import Request
from .fetch import fetch_wheel, wheel_reader
from .patches import Patch, load_patches, load_series
from .plan import UPSTREAM, fit

OURS, NOT_HERE = "ours", "not here"


def features(request: Request) -> dict:
    """Return a row for each patch of the series: what each base (or the one asked for) has of it.

    Raises Refused if a release cannot be fetched, PatchFault for wrong patch data, UsageFault for an unknown base.
    """
    manifest = load_manifest(request.project.patches)
    bases = [manifest.base(request.base)] if request.base else manifest.bases
    by_base = {base.name: _patches(request, base) for base in manifest.bases}
    readers = {base.name: wheel_reader(fetch_wheel(request.project, base.release)) for base in bases}
    rows = []
    for name in load_series(request.project.patches):
        known = [patches[name] for patches in by_base.values() if name in patches]
        if not known:
            continue  # `check` names it
        states = {base.name: _state(by_base[base.name].get(name), known, readers[base.name]) for base in bases}
        rows.append({"patch": name, "feature": known[0].feature, "upstream": known[0].upstream, "bases": states})
    return {"ok": True, "exit_code": 0, "command": "features", "bases": [base.name for base in bases], "patches": rows}


def _patches(request: Request, base: Base) -> dict:
    return {patch.id: patch for patch in load_patches(request.project.patches, base.name)}


def _state(own: Patch | None, known: list, reader: Reader) -> str:
    """A base's own patch is in unless its probe retires it; else any base's probe may say that upstream has it."""
    outcomes = [outcome["outcome"] for patch in ([own] if own else known) for outcome in fit(reader, [patch], [patch.feature])[3]]
    if UPSTREAM in outcomes:
        return UPSTREAM
    return OURS if own else NOT_HERE
