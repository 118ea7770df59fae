"""Do the patches still fit the pinned releases, and which would fit the releases around them?"""

from __future__ import annotations

from .bases import Base, Manifest, Reader, digest_lf, load_manifest
from .commands import Request
from .errors import OverlayError, PatchFault
from .fetch import fetch_wheel, wheel_reader
from .patches import features_of, load_patches, load_series
from .plan import UPSTREAM, fit
from .situation import look
from .target import locate


def check(request: Request, neighbours: bool = False) -> dict:
    """Try every edit on each base's pinned release, or on a given tree only.

    The result has exit code 4 if anything does not fit. Releases around the bases are only reported.
    Raises Refused if a release cannot be fetched, Unsupported for a tree that no patch set is for.
    """
    manifest = load_manifest(request.project.patches)
    rows, problems = [], []
    for base, name, reader in _places(request, manifest):
        patches = load_patches(request.project.patches, base.name)
        pinned = request.path is None
        try:
            rows += _try(reader, patches, base, name)
            problems += _problems(rows, base, name, reader, patches, pinned)
        except OverlayError as fault:
            problems.append(fault.as_dict())
    if request.path is None:
        problems += _unused(request, manifest)
    if neighbours:
        rows += _neighbours(request, manifest)
    result = {"ok": not problems, "exit_code": 4 if problems else 0, "command": "check"}
    if problems:
        result["error"] = problems[0]
    return {**result, "edits": rows, "problems": problems}


def _places(request: Request, manifest: Manifest):
    """Yield (base, what it is tried on, reader of its original files)."""
    if request.path is not None:
        target = locate(request.path)
        situation = look(target, request.project, manifest)
        base, _ = situation.base(manifest, request.try_base)
        yield base, str(target.root), situation.read_original
        return
    chosen = [manifest.base(request.base)] if request.base else manifest.bases
    for base in chosen:
        yield base, base.version, wheel_reader(fetch_wheel(request.project, base.release))


def _try(reader: Reader, patches: list, base: Base, name: str, strict: bool = True) -> list:
    """Return one row for each edit. With `strict` the results are compiled too (PatchFault)."""
    sources, splices, edits, outcomes = fit(reader, patches, features_of(patches))
    if strict and all(edit.fits for edit in edits):
        for file in splices:
            sources[file].render(splices[file])
    rows = [{"base": base.name, "release": name, **edit.to_dict()} for edit in edits]
    retired = [outcome["id"] for outcome in outcomes if outcome["outcome"] == UPSTREAM]
    for patch in (patch for patch in patches if patch.id in retired):
        for edit in patch.edits:
            row = {"base": base.name, "release": name, "patch": patch.id, "edit": edit.name}
            row.update(file=edit.where.file, expected=edit.matches, found=UPSTREAM, fits=False)
            rows.append(row)
    return rows


def _problems(rows: list, base: Base, name: str, reader: Reader, patches: list, pinned: bool) -> list:
    """Return what is wrong with a base's patches on what they are for."""
    problems = []
    for row in rows:
        if row["base"] == base.name and row["release"] == name and not row["fits"]:
            problems.append(_misfit(row))
    if pinned:
        for file in sorted({edit.where.file for patch in patches for edit in patch.edits}):
            problems += _wrong_pin(base, file, reader)
    return problems


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


def _wrong_pin(base: Base, file: str, reader: Reader) -> list:
    """Return the problem of an edited file whose hash is not in the manifest, or is another there."""
    data = reader(file)
    found = data and digest_lf(data)
    if found is None or found == base.files.get(file):
        return []
    fault = PatchFault(
        f"{base.name} does not pin an edited file as it is in the release",
        file=file,
        expected=base.files.get(file, "a row in the manifest"),
        found=found,
        remedy=f"set it below `files:` of {base.name} in patches/manifest.yml",
    )
    return [fault.as_dict()]


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
            rows += _try(reader, patches, base, release.version, strict=False)
    return rows
