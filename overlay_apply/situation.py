"""What is at a target now: nothing of ours, an applied overlay, or something in between."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Optional

from . import OVERLAY_NAME
from .adopt import recognise
from .bases import Base, Evidence, Manifest, detect
from .errors import Interfered, Unsupported, UsageFault
from .fs import FileState, read_file, sha256, state_of
from .project import Project
from .state import BYTECODE, PATCHED, Change, FileChange, Receipt, Store
from .target import Target

CLEAN, APPLIED, NO_RECEIPT = "clean", "applied", "applied (no receipt)"
PARTLY, MODIFIED, UNSUPPORTED = "partly applied", "modified since", "unsupported"

CALL = f".{OVERLAY_NAME}.".encode()
_VERSION = re.compile(r"v?[0-9]")


@dataclass
class Situation:
    """A target and what is known about it. `contents` holds bytes that are in no state folder."""

    target: Target
    store: Store
    journal: Optional[Change]
    receipt: Optional[Receipt]
    contents: dict = field(default_factory=dict)
    written: bool = True
    """Whether the receipt is on disk, or was only worked out."""
    callers: list = field(default_factory=list)
    """Without a receipt: the files that call the overlay all the same."""
    manifest: Optional[Manifest] = None

    @property
    def state(self) -> str:
        """CLEAN, APPLIED, NO_RECEIPT, PARTLY or MODIFIED."""
        if self.journal:
            return PARTLY
        if self.receipt is None:
            return PARTLY if self.callers or (self.target.overlay / "__init__.py").exists() else CLEAN
        if self.changed():
            return MODIFIED
        return APPLIED if self.written else NO_RECEIPT

    def changed(self) -> list:
        """Return {file, now} for each file that is not (any longer) what the overlay wrote."""
        changes = []
        for file in self.receipt.files if self.receipt else ():
            now = state_of(self.target.root / file.path)
            if file.kind != BYTECODE and _digest(now) != _digest(file.after):
                as_before = _digest(now) == _digest(file.before)
                changes.append({"file": file.path, "now": "as before apply" if as_before else _how(now)})
        return changes

    def edited(self) -> list:
        """Return the paths of the files that hold somebody's later edits; one that is missing holds none, where the tree still is the patched one."""
        harmless = {"as before apply", *(["missing"] if self._still_patched() else [])}
        return [entry["file"] for entry in self.changed() if entry["now"] not in harmless]

    def _still_patched(self) -> bool:
        return any(file.kind == PATCHED and self._is_ours(file) for file in self.receipt.files) if self.receipt else False

    def replaced_by(self) -> Optional[str]:
        """Return the version of the SGLang that took the place of the patched one since, or None.

        Its files call the overlay nowhere; those that somebody edited still do.
        """
        patched = [file for file in self.receipt.files if file.kind == PATCHED] if self.receipt else []
        if not any(self._is_others(file) for file in patched) or any(self._is_ours(file) for file in patched):
            return None
        version = self._version_now()
        base = base_by_name(self.manifest, self.receipt.base)
        return None if base and version == base.version else version

    def _is_others(self, file: FileChange) -> bool:
        """Tell whether a file is neither as before apply nor as after it."""
        return _digest(state_of(self.target.root / file.path)) not in (_digest(file.before), _digest(file.after))

    def _is_ours(self, file: FileChange) -> bool:
        now = read_file(self.target.root / file.path)
        return now is not None and (sha256(now[0]) == _digest(file.after) or CALL in now[0])

    def _version_now(self) -> Optional[str]:
        """Return the tree's own version as it is by now; None where nothing says it."""

        def read(file: str) -> Optional[bytes]:
            now = read_file(self.target.package / file)
            return now and now[0]

        try:
            return detect(self.target, self.manifest, read)[0].version
        except Unsupported as fault:
            found = fault.found["found"]
            return found if _VERSION.match(found) else None

    def fault_since(self) -> Optional[Interfered]:
        """Return the failure for files that are neither the overlay's nor as before it, or None."""
        edited = self.edited()
        if not edited:
            return None
        version = self.replaced_by()
        return _replaced_fault(edited, self.receipt.base, version) if version else edited_fault(edited)

    def original(self, path: str) -> Optional[tuple]:
        """Return (bytes, mode) of a file as it was before any patch, or None. Raises Interfered."""
        for file in self.receipt.files if self.receipt else ():
            if file.path == path:
                return file.before and (self.bytes_of(file.before.sha256), file.before.mode)
        if self.receipt and path.endswith(".pyc"):
            return None  # compiled since, of what the overlay wrote
        return read_file(self.target.root / path)

    def read_original(self, file: str) -> Optional[bytes]:
        """Return a file's original bytes by its path below the package, or None."""
        found = self.original(self.target.in_package(file))
        return found[0] if found else None

    def bytes_of(self, digest: str) -> bytes:
        """Return kept bytes. Raises Interfered if they are gone."""
        return self.contents[digest] if digest in self.contents else self.store.blob(digest)

    def receipt_on_disk(self) -> Optional[Receipt]:
        return self.receipt if self.written else None

    def base(self, manifest: Manifest, try_base: Optional[str] = None) -> tuple:
        """Return (base, evidence). Raises Unsupported, or UsageFault for an unknown `try_base`."""
        if try_base is not None:
            return manifest.base(try_base), Evidence("--try-base", try_base)
        known = self.receipt and self._base_of_receipt(manifest)
        return known or detect(self.target, manifest, self.read_original)

    def _base_of_receipt(self, manifest: Manifest) -> Optional[tuple]:
        if self.changed():
            return None
        try:
            return manifest.base(self.receipt.base), Evidence(**self.receipt.evidence)
        except UsageFault:
            return None

    def insist_on_whole(self) -> None:
        """Raise Interfered if the tree is partly applied, or a file of the overlay's was edited since.

        Raises Refused if the overlay's place is a symbolic link out of the tree.
        """
        self.target.real(self.target.in_package(OVERLAY_NAME))
        if self.state == PARTLY:
            raise Interfered(
                "the tree is partly applied",
                file=self._where_partly(),
                expected="a tree without the overlay, or with all of it",
                found=self._what_is_left(),
                remedy=self.way_back(),
            )
        fault = self.fault_since()
        if fault:
            raise fault

    def _where_partly(self) -> str:
        if self.journal:
            return str(self.store.journal_file)
        return str(self.target.overlay) if self.target.overlay.exists() else self.callers[0]

    def _what_is_left(self) -> str:
        if self.journal:
            return "a command that was cut short"
        if self.callers:
            return f"no receipt, but calls of the overlay in {', '.join(self.callers)}"
        return "an overlay without a receipt"

    def way_back(self) -> str:
        """Say how a partly applied tree is put right."""
        if self.journal:
            return "run `apply.py revert`, or `apply.py apply` again, with the same --feature if it had some"
        if not self.target.overlay.exists():
            return (
                f"take the imports of {OVERLAY_NAME}, and the calls of what they bring, out of {', '.join(self.callers)}; "
                "or restore what was there before the overlay (`git checkout`, or reinstall sglang)"
            )
        return (
            "take the patch back the way it came in (`git apply -R` on the same diff), or remove "
            f"{self.target.overlay} and restore the patched files (`git checkout`, or reinstall sglang)"
        )


def way_on(version: str) -> str:
    """Say what to do with a tree whose SGLang was replaced while the overlay was in it."""
    return (
        f"`revert --keep-edited` takes out what is left of the overlay and leaves the files of {version} as they are; "
        "then `apply` again"
    )


def _replaced_fault(files: list, base: str, version: str) -> Interfered:
    return Interfered(
        f"SGLang was replaced by {version} since the overlay was put in; nothing was written",
        file=files[0],
        expected=f"the file of {base}, as the overlay wrote it",
        found=f"that of {version}",
        remedy=way_on(version),
        details=[{"replaced": path} for path in files],
    )


def edited_fault(edited: list) -> Interfered:
    """Return the failure for files with somebody's later edits."""
    return Interfered(
        "a file of the overlay's was edited since it was applied; nothing was written",
        file=edited[0],
        expected="the file as the overlay wrote it",
        found="other contents",
        remedy="take your edit back (or keep it aside) and run again, or `revert --keep-edited`, which restores all other files, "
        "takes what the overlay put in out of the edited ones, and leaves those alone where your edit is in the middle of that",
        details=[{"edited": path} for path in edited],
    )


def look(target: Target, project: Project, manifest: Manifest, store: Optional[Store] = None) -> Situation:
    """Find out what is at a target, without changing anything.

    Raises Interfered if its state folder is damaged or belongs to another place.
    """
    store = store or Store(target)
    situation = Situation(target, store, store.journal(), store.receipt(), manifest=manifest)
    receipt = situation.receipt
    if receipt is not None and receipt.prefix != target.prefix:
        raise Interfered(
            "the receipt is of another kind of tree (the package folder was copied or moved)",
            file=str(store.receipt_file),
            expected=target.prefix,
            found=receipt.prefix,
            remedy="give the tree the overlay was applied to, or reinstall sglang",
        )
    if receipt is None and situation.journal is None:
        recognised = recognise(target, project, manifest)
        if recognised:
            situation.receipt, situation.contents = recognised
            situation.written = False
        else:
            situation.callers = _callers(target, manifest)
    return situation


def _callers(target: Target, manifest: Manifest) -> list:
    """Return the patched files of any base that call the overlay: without it they cannot be imported."""
    paths = {target.in_package(file) for base in manifest.bases for file in base.files}
    texts = {path: read_file(target.root / path) for path in sorted(paths)}
    return [path for path, found in texts.items() if found and CALL in found[0]]


def current(target: Target, path: str, contents: dict) -> Optional[FileState]:
    """Return a file's state now, keeping its bytes in `contents`."""
    found = read_file(target.root / path)
    if found is None:
        return None
    state = FileState(sha256(found[0]), found[1])
    contents[state.sha256] = found[0]
    return state


def _digest(state: Optional[FileState]) -> Optional[str]:
    return state.sha256 if state else None


def _how(now: Optional[FileState]) -> str:
    return "edited" if now else "missing"


def base_by_name(manifest: Manifest, name: str) -> Optional[Base]:
    """Return a base, or None if the manifest has none of that name (any longer)."""
    return next((base for base in manifest.bases if base.name == name), None)
