"""Do the patches still fit the pinned releases, or an arbitrary tree, and which would fit the releases around the bases?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional

from .bases import Base, Manifest, Reader, digest_lf, load_manifest
from .borrowed import lost_of
from .commands import Request
from .errors import OverlayError, PatchFault, Unsupported
from .fetch import fetch_wheel, wheel_reader
from .nearest import Tree, nearest
from .patches import features_of, load_patches, load_series
from .plan import UPSTREAM, fit, rendered_whole
from .situation import Situation, look
from .target import Target, locate

FITS, DRIFTED = "fits", "drifted"


@dataclass(frozen=True)
class Place:
    """What one base's patches are tried on. `tree` is there where candidates are looked for."""

    base: Base
    name: str
    read: Reader
    tree: Optional[Tree] = None


def check(request: Request, neighbours: bool = False) -> dict:
    """Try every edit on each base's pinned release; or on a given tree, of whatever version, and say where drifted ones may belong.

    The result has exit code 4 if anything does not fit; a tree that is no base's is held against the base that fits it best.
    Releases around the bases are only reported. Raises Refused if a release cannot be fetched, Unsupported for no SGLang tree.
    """
    manifest = load_manifest(request.project.patches)
    if request.path is not None:
        return _check_tree(request, manifest)
    rows, problems = [], []
    chosen = [manifest.base(request.base)] if request.base else manifest.bases
    for base in chosen:
        place = Place(base, base.version, wheel_reader(fetch_wheel(request.project, base.release)))
        patches = load_patches(request.project.patches, base.name)
        try:
            tried, faults = _try(place, patches)
            rows += tried
            problems += [_misfit(row) for row in tried if not row["fits"]] + faults + _wrong_pins(place, patches)
        except OverlayError as fault:
            problems.append(fault.as_dict())
    problems += _unused(request, manifest)
    if neighbours:
        rows += _neighbours(request, manifest)
    return _result(rows, problems)


def _check_tree(request: Request, manifest: Manifest) -> dict:
    target = locate(request.path)
    situation = look(target, request.project, manifest)
    bases, evidence = _bases_for(situation, manifest, request.try_base)
    tree = Tree(situation.read_original, _python_files(target))
    places = [Place(base, str(target.root), situation.read_original, tree) for base in bases]
    tried = {place.base.name: _try(place, load_patches(request.project.patches, place.base.name)) for place in places}
    best = min(reversed(bases), key=lambda base: _distance(*tried[base.name]))
    best_rows, faults = tried[best.name]
    problems = [_misfit(row) for row in best_rows if row["outcome"] == DRIFTED] + faults
    rows = [row for base in bases for row in tried[base.name][0]]
    names = lost_of(request.project, best, situation.read_original)
    problems += [_lost_name(row, str(target.root), best) for row in names or ()]
    return {**_result(rows, problems), "evidence": evidence, "best": best.name, "lost": names}


def _distance(rows: list, faults: list) -> int:
    """Count what keeps a base from a tree: also edits that upstream made idle, since the others were written to go with them."""
    return sum(not row["fits"] for row in rows) + len(faults)


def _bases_for(situation: Situation, manifest: Manifest, try_base: Optional[str]) -> tuple:
    """Return (bases, evidence): the tree's own base or the one asked for; all of them for a tree of another version."""
    try:
        base, evidence = situation.base(manifest, try_base)
    except Unsupported as fault:
        return list(manifest.bases), fault.found
    return [base], evidence.to_dict()


def _lost_name(row: dict, where: str, base: Base) -> dict:
    return {
        "kind": "lost-name",
        "message": f"the overlay imports {row['name']}, which {where} has no longer",
        "file": row["by"][0],
        "expected": f"a name that {base.name} has",
        "found": "no such name",
        "remedy": "have the overlay do without it where it is not there (sglang_overlay/srt/upstream.py holds what differs)",
    }


def _python_files(target: Target) -> List[str]:
    paths = (path.relative_to(target.package).as_posix() for path in target.package.rglob("*.py"))
    return sorted(path for path in paths if not path.startswith(f"{target.overlay.name}/"))


def _result(rows: list, problems: list) -> dict:
    result = {"ok": not problems, "exit_code": 4 if problems else 0, "command": "check"}
    if problems:
        result["error"] = problems[0]
    return {**result, "edits": rows, "problems": problems}


def _try(place: Place, patches: list) -> tuple:
    """Return one row for each edit, and what is wrong with each file as it would be, where all edits of it fit."""
    sources, splices, reports, outcomes = fit(place.read, patches, features_of(patches))
    faults = []
    drifted = {report.file for report in reports if not report.fits}
    for file in (file for file in splices if file not in drifted):
        try:
            rendered_whole(sources[file], splices[file])
        except PatchFault as fault:
            faults.append(fault.as_dict())
    edits = {edit.name: edit for patch in patches for edit in patch.edits}
    rows = []
    for report in reports:
        row = {**_head(place), **report.to_dict(), "outcome": FITS if report.fits else DRIFTED}
        if place.tree and not report.fits:
            row.update(nearest(edits[report.edit], place.tree))
        rows.append(row)
    retired = {outcome["id"] for outcome in outcomes if outcome["outcome"] == UPSTREAM}
    return rows + [_retired(place, edit) for edit in edits.values() if edit.patch in retired], faults


def _head(place: Place) -> dict:
    return {"base": place.base.name, "release": place.name}


def _retired(place: Place, edit) -> dict:
    row = {**_head(place), "patch": edit.patch, "edit": edit.name, "file": edit.where.file}
    return {**row, "expected": edit.matches, "found": UPSTREAM, "fits": False, "outcome": UPSTREAM}


def _misfit(row: dict) -> dict:
    found = "no such file" if row["found"] is None else row["found"]
    return {
        "kind": "drift",
        "message": f"{row['edit']} does not fit {row['release']}",
        "patch": row["patch"],
        "file": row["file"],
        "expected": row["expected"],
        "found": found,
        "remedy": f"correct the edit's rule or its `matches` in patches/{row['base']}/{row['patch']}.yml",
    }


def _wrong_pins(place: Place, patches: list) -> list:
    """Return a problem for each edited file whose hash is not in the manifest, or is another there."""
    problems = []
    for file in sorted({edit.where.file for patch in patches for edit in patch.edits}):
        data = place.read(file)
        if data is not None and digest_lf(data) != place.base.files.get(file):
            problems.append(_wrong_pin(place.base, file, digest_lf(data)))
    return problems


def _wrong_pin(base: Base, file: str, found: str) -> dict:
    return PatchFault(
        f"{base.name} does not pin an edited file as it is in the release",
        file=file,
        expected=base.files.get(file, "a row in the manifest"),
        found=found,
        remedy=f"set it below `files:` of {base.name} in patches/manifest.yml",
    ).as_dict()


def _unused(request: Request, manifest: Manifest) -> list:
    """Return the problem of patches in the series that no base has."""
    used = {p.id for base in manifest.bases for p in load_patches(request.project.patches, base.name)}
    return [
        PatchFault(
            "a patch of the series is in no base's folder",
            patch=name,
            file="patches/series",
            remedy="take it out of the series, or add its file",
        ).as_dict()
        for name in load_series(request.project.patches)
        if name not in used
    ]


def _neighbours(request: Request, manifest: Manifest) -> list:
    """Return rows for the releases around the bases, which nothing has to fit."""
    rows = []
    for release in manifest.neighbours:
        reader = wheel_reader(fetch_wheel(request.project, release))
        for base in manifest.bases:
            patches = load_patches(request.project.patches, base.name)
            rows += _try(Place(base, release.version, reader), patches)[0]
    return rows
