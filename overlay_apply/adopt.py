"""Recognise a tree that was patched without a receipt (`apply.py diff | git apply`), by its contents.

The originals come from the checked-out commit, or from the release's wheel if it was fetched before.
If the overlay, put on them, gives exactly the tree that is there, a receipt can be written after all.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Iterable, Iterator, Optional

from . import __version__
from .bases import Base, Manifest, digest_lf, read_head
from .errors import OverlayError
from .fs import read_file, sha256
from .patches import features_of, load_patches
from .plan import Plan, make_plan
from .project import Project
from .state import BYTECODE, PATCHED, Receipt
from .target import REGISTERED, Target

_MOST_FEATURES = 6  # all subsets of them are tried


def recognise(target: Target, project: Project, manifest: Manifest) -> Optional[tuple]:
    """Return (receipt, contents by SHA-256) of a tree that holds the overlay whole, or None."""
    if not (target.overlay / "__init__.py").exists():
        return None
    for base in reversed(manifest.bases):
        patches = load_patches(project.patches, base.name)
        for kind, originals in _originals(target, project, base):
            for features in _subsets(features_of(patches)):
                try:
                    plan = make_plan(target, project, patches, features, originals)
                except OverlayError:
                    continue
                found = _as_found(plan, target)
                if found:
                    return _receipt(found, target, base, kind, features), plan.contents
    return None


def _originals(target: Target, project: Project, base: Base) -> Iterator[tuple]:
    """Yield (kind of evidence, originals function) for each place that has the original files."""
    head = read_head(target, sorted(base.files))
    if head:
        yield "contents, from HEAD", _reader(target, head)
    from .fetch import kept_reader  # only here, so that status starts fast

    read = kept_reader(project, base.release)
    if read:
        yield "contents, from the release", _reader(target, {file: read(file) for file in base.files})


def _reader(target: Target, contents: dict):
    """Serve original bytes with the mode, and the line ends, of the file that is there now."""
    by_path = {target.in_package(file): data for file, data in contents.items()}

    def originals(path: str) -> Optional[tuple]:
        now = read_file(target.root / path)
        data = by_path.get(path)
        if data is None:
            is_ours = path.startswith((f"{target.prefix}/{target.overlay.name}/", REGISTERED + "/"))
            return None if is_ours else now
        mode = now[1] if now else 0o644
        return (data.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n") if _is_crlf(now) else data), mode

    return originals


def _is_crlf(file: Optional[tuple]) -> bool:
    return file is not None and b"\r\n" in file[0] and file[0].count(b"\r\n") == file[0].count(b"\n")


def _subsets(features: list) -> Iterable:
    """Yield all features together, then the smaller sets of them."""
    sizes = range(len(features), 0, -1) if len(features) <= _MOST_FEATURES else [len(features)]
    return (list(chosen) for size in sizes for chosen in itertools.combinations(features, size))


def _as_found(plan: Plan, target: Target) -> Optional[Plan]:
    """Return a plan with its files as the tree holds them, or None if it holds others.

    New ones may have the line ends that git gives a text file in this checkout.
    """
    if not any(file.kind == PATCHED for file in plan.files):
        return None
    found = []
    for file in plan.files:
        if file.kind == BYTECODE:
            continue
        now = read_file(target.root / file.path)
        digest = digest_lf if file.before is None else sha256
        if now is None or digest(now[0]) != digest(plan.contents[file.after.sha256]):
            return None
        found.append(replace(file, after=replace(file.after, sha256=sha256(now[0]))))
    return replace(plan, files=found)


def _receipt(plan: Plan, target: Target, base: Base, kind: str, features: list) -> Receipt:
    made = {
        parent.as_posix()
        for file in plan.files
        if file.before is None
        for parent in (target.root / file.path).relative_to(target.root).parents
    }
    kept = {".", target.prefix, "test", REGISTERED, *(p.as_posix() for p in _above(target))}
    dirs = sorted(made - kept, key=lambda path: (path.count("/"), path))
    evidence = {"kind": kind, "found": base.name}
    return Receipt(__version__, target.prefix, base.name, evidence, features, plan.patches, plan.files, dirs)


def _above(target: Target) -> Iterable:
    return target.package.relative_to(target.root).parents
