"""What an apply would write: computed in memory from the tree as it was before any patch."""

from __future__ import annotations

import ast
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Callable, Iterable, Optional

from . import OVERLAY_NAME
from .bases import assignments
from .bytecode import compiled_of, is_unchecked
from .errors import Drift, Interfered, PatchFault, Refused
from .fs import FileState, read_file, sha256
from .patches import Edit, Patch
from .project import Project
from .rewrite import Source, check_compiles
from .state import BYTECODE, OVERLAY, PATCHED, TEST, FileChange
from .target import REGISTERED, Target

NEW_FILE_MODE = 0o644
UPSTREAM = "upstream has it"

_LEFT_OUT = {"__pycache__", "tests"}


@dataclass(frozen=True)
class EditReport:
    """How one edit fits."""

    patch: str
    edit: str
    file: str
    expected: int
    found: Optional[int]
    """None if there is no such file."""

    @property
    def fits(self) -> bool:
        return self.found == self.expected

    def to_dict(self) -> dict:
        return {**asdict(self), "fits": self.fits}


@dataclass
class Plan:
    """The files as the overlay wants them. `contents` holds all bytes by SHA-256."""

    files: list = field(default_factory=list)
    """FileChange from the true original to the overlay's file."""
    patches: list = field(default_factory=list)
    """One {id, feature, outcome} for each patch of the base."""
    edits: list = field(default_factory=list)
    contents: dict = field(default_factory=dict)

    def add(self, path: str, kind: str, before: Optional[tuple], after: Optional[tuple]) -> None:
        """Note a file's change from (bytes, mode) to (bytes, mode); None where there is none."""
        self.files.append(FileChange(path, kind, self._keep(before), self._keep(after)))

    def _keep(self, file: Optional[tuple]) -> Optional[FileState]:
        if file is None:
            return None
        state = FileState(sha256(file[0]), file[1])
        self.contents[state.sha256] = file[0]
        return state


Originals = Callable[[str], Optional[tuple]]
"""Returns (bytes, mode) of a file before any patch, by its path below the root, or None."""


def fit(read: Callable[[str], Optional[bytes]], patches: Iterable, features: list) -> tuple:
    """Try patches on a tree without writing; return (sources, splices, edits, outcomes).

    `read` gives original bytes by path below the package. `sources` and `splices` are by that path.
    Raises PatchFault if a rule or fix is wrong. Edits that do not fit are only reported.
    """
    sources: dict = {}

    def source(file: str) -> Optional[Source]:
        if file not in sources:
            data = read(file)
            sources[file] = None if data is None else Source(data, file)
        return sources[file]

    splices: dict = {}
    imports: dict = {}
    reports, outcomes = [], []
    for patch in patches:
        outcome = _outcome(patch, features, source)
        outcomes.append({"id": patch.id, "feature": patch.feature, "outcome": outcome})
        for edit in patch.edits if outcome == "applied" else ():
            file = source(edit.where.file)
            nodes = file.find(edit.where, edit.name) if file else None
            reports.append(_report(edit, nodes))
            if nodes and reports[-1].fits:
                splices.setdefault(edit.where.file, []).extend(file.splice(n, edit) for n in nodes)
                imports.setdefault(edit.where.file, []).extend((i, edit.name) for i in edit.imports)
    for file, lines in imports.items():
        if lines:
            once = list(dict.fromkeys(line for line, _ in lines))
            splices[file].append(source(file).import_splice(once, lines[0][1]))
    return sources, splices, reports, outcomes


def _outcome(patch: Patch, features: list, source: Callable) -> str:
    """Say what becomes of a patch: applied, "not chosen", or "upstream has it"."""
    if patch.feature not in features:
        return "not chosen"
    return UPSTREAM if _probe_finds(patch, source) else "applied"


def is_retired(patch: Patch, read: Callable[[str], Optional[bytes]]) -> bool:
    """Tell whether a patch's own probe finds, in original files, what the patch is for."""

    def source(file: str) -> Optional[Source]:
        data = read(file)
        return None if data is None else Source(data, file)

    return _probe_finds(patch, source)


def _probe_finds(patch: Patch, source: Callable[[str], Optional[Source]]) -> bool:
    probe = patch.retire_when
    file = source(probe.file) if probe else None
    return file is not None and bool(file.find(probe, f"{patch.id}#retire_when"))


def _report(edit: Edit, nodes: Optional[list]) -> EditReport:
    found = None if nodes is None else len(nodes)
    return EditReport(edit.patch, edit.name, edit.where.file, edit.matches, found)


def drift(edits: list, where: str) -> Optional[Drift]:
    """Return the failure for edits that do not fit, with how each edit fits, or None if all do."""
    misfits = [edit for edit in edits if not edit.fits]
    if not misfits:
        return None
    first = misfits[0]
    found = "no such file" if first.found is None else first.found
    return Drift(
        f"{len(misfits)} of {len(edits)} edits do not fit {where}; nothing was written",
        patch=first.patch,
        file=first.file,
        expected=first.expected,
        found=found,
        remedy="undo local changes to these places, use a supported release, or leave the feature out",
        details=[edit.to_dict() for edit in edits],
    )


def make_plan(
    target: Target, project: Project, patches: list, features: list, originals: Originals
) -> Plan:
    """Compute all files of an apply.

    Raises Drift if an edit does not fit, PatchFault if the patch data or the overlay is wrong, and
    Refused if a symbolic link leads out of the tree.
    """

    def read(file: str) -> Optional[bytes]:
        found = originals(target.real(target.in_package(file)))
        return found[0] if found else None

    sources, splices, edits, outcomes = fit(read, patches, features)
    misfit = drift(edits, str(target.root))
    if misfit:
        raise misfit
    plan = Plan(patches=outcomes, edits=edits)
    if not edits:
        return plan  # upstream has all of it
    for file in sorted(splices):
        path = target.real(target.in_package(file))
        data, mode = originals(path)
        rendered = rendered_whole(sources[file], splices[file])
        plan.add(path, PATCHED, (data, mode), (rendered, mode))
        _add_unchecked_bytecode(plan, target, path, originals)
    _check_apart(plan)
    laid = {outcome["feature"] for outcome in outcomes if outcome["outcome"] == "applied"}
    for path, data in overlay_files(project, target, laid):
        kind = TEST if path.startswith(REGISTERED + "/") else OVERLAY
        plan.add(target.real(path), kind, originals(target.real(path)), (data, NEW_FILE_MODE))
    return plan


def rendered_whole(source: Source, splices: list) -> bytes:
    """Return a file with its replacements, checked. Raises PatchFault if it would not compile, or not run for want of a name."""
    data = source.render(splices)
    source.check_names(data, splices)
    return data


def _add_unchecked_bytecode(plan: Plan, target: Target, path: str, originals: Originals) -> None:
    """Take away compiled files that Python would go on using although the source changed."""
    for name in compiled_of(target.root, path):
        found = read_file(target.root / name)
        if found and is_unchecked(found[0]):
            plan.add(name, BYTECODE, originals(name), None)


def _check_apart(plan: Plan) -> None:
    """Raise Refused if two patched paths are one file by way of a symbolic link."""
    paths = [file.path for file in plan.files]
    for path in paths:
        if paths.count(path) > 1:
            raise Refused(
                "two patched files are one file by a symbolic link; nothing was written",
                file=path,
                expected="two files",
                found="one file",
                remedy="replace the link by a copy of the file",
            )


def overlay_files(project: Project, target: Target, features: set) -> Iterable:
    """Yield (path below the root, bytes) of all files of our own. Raises PatchFault if one is broken.

    A registered test that assigns FEATURE comes with that feature alone.
    """
    if not (project.overlay / "__init__.py").is_file():
        raise PatchFault(
            "the overlay package is missing",
            file=str(project.overlay / "__init__.py"),
            remedy="get the whole repository",
        )
    yield from _ours(project.overlay, f"{target.prefix}/{OVERLAY_NAME}", _LEFT_OUT)
    if target.is_checkout:
        tests = _ours(project.registered, REGISTERED, {"__pycache__"})
        yield from ((path, data) for path, data in tests if _feature_of(path, data) in {None, *features})


def _feature_of(path: str, data: bytes) -> Optional[str]:
    return dict(assignments(ast.parse(data))).get("FEATURE") if path.endswith(".py") else None


def _ours(folder: Path, place: str, left_out: set) -> Iterable:
    for path in _tree(folder, left_out):
        data = path.read_bytes()
        if path.suffix == ".py":
            check_compiles(data, str(path), [])
        yield f"{place}/{path.relative_to(folder).as_posix()}", data


def _tree(folder: Path, left_out: set) -> Iterable:
    """Yield the files below a folder that belong into a target, in a stable order."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith(".") or path.name in left_out:
            continue
        if path.is_dir():
            yield from _tree(path, left_out)
        elif path.suffix not in (".pyc", ".md"):
            yield path


def foreign(plan: Plan) -> Optional[Interfered]:
    """Return the failure for a file of ours whose place somebody else's file takes, or None."""
    taken = [file.path for file in plan.files if file.kind in (OVERLAY, TEST) and file.before]
    if not taken:
        return None
    return Interfered(
        "a file of that name is there already and is not the overlay's; nothing was written",
        file=taken[0],
        expected="no such file",
        found="a file",
        remedy="move it away (or, if it is of an older apply without a receipt, remove it) and run again",
        details=[{"taken": path} for path in taken],
    )


def new_dirs(target: Target, files: list, owned: list) -> list:
    """Return the directories that only the overlay needs, parents first.

    That is every one above a new file that is not there, or that the overlay made before (`owned`).
    """
    wanted = set()
    for file in files:
        if file.before is None and file.after is not None:
            wanted |= {parent.as_posix() for parent in PurePosixPath(file.path).parents}
    ours = {d for d in wanted if d in owned or not (target.root / d).exists()}
    return sorted(ours - {"."}, key=lambda path: (path.count("/"), path))
