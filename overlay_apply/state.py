"""The state folder inside a target: receipt, journal, kept bytes, and the lock.

    .sglang_overlay_state/
        receipt.json   what is applied, and what each file was before
        journal.json   there only while a change is under way, or after it was cut short
        blobs/         kept file contents, each named by its SHA-256
        staged/        new contents on their way into the tree
        lock           held while a command changes the tree
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Callable, Iterator, Optional, get_type_hints

from . import OVERLAY_NAME, STATE_NAME
from .errors import Interfered, OverlayError, Refused
from .fs import FileState, Fs, read_file, sha256
from .target import Target

FORMAT = 1

PATCHED, OVERLAY, TEST, BYTECODE = "patched", "overlay", "test", "bytecode"

NO_TRUST = (
    "restore the patched files by the tree's own means (`git checkout` of them, or reinstall sglang), "
    f"then remove {STATE_NAME} and {OVERLAY_NAME} in the package folder"
)
RECOGNISE = "in a git checkout, remove that file and run again: the overlay is known by what it wrote, if nobody edited that. Else "


@dataclass(frozen=True)
class FileChange:
    """One file's states before and after a change; None where it does not exist."""

    path: str
    kind: str
    """PATCHED, OVERLAY, TEST or BYTECODE."""
    before: Optional[FileState]
    after: Optional[FileState]

    def inverse(self) -> "FileChange":
        return replace(self, before=self.after, after=self.before)

    def kept(self) -> Iterator[FileState]:
        """Yield the states whose bytes stay in the state folder: the original, and what the overlay made of it."""
        yield from filter(None, (self.before, self.after if self.kind == PATCHED else None))

    @staticmethod
    def from_dict(data: dict) -> "FileChange":
        states = {side: data[side] and FileState(**data[side]) for side in ("before", "after")}
        return FileChange(data["path"], data["kind"], **states)


@dataclass(frozen=True)
class Receipt:
    """What is applied to a target. `files` go from the true originals to the overlay's files."""

    tool: str
    prefix: str
    base: str
    evidence: dict
    features: list
    patches: list
    """One {id, feature, outcome} for each patch of the base."""
    files: list
    dirs: list
    """Directories that the overlay made, parents first."""

    def to_dict(self) -> dict:
        return {"format": FORMAT, **asdict(self)}

    @staticmethod
    def from_dict(data: dict) -> "Receipt":
        fields = {name: value for name, value in data.items() if name != "format"}
        fields["files"] = [FileChange.from_dict(entry) for entry in fields["files"]]
        receipt = Receipt(**fields)
        for name, kind in get_type_hints(Receipt).items():
            if not isinstance(fields[name], kind):
                raise TypeError(f"{name} is {fields[name]!r}")
        return receipt


@dataclass(frozen=True)
class Change:
    """A step from one state of the tree to another; the journal holds exactly this."""

    files: list
    mkdirs: list
    """Parents first."""
    rmdirs: list
    """Children first; those that are not empty stay."""
    receipt_before: Optional[Receipt]
    receipt_after: Optional[Receipt]

    def inverse(self) -> "Change":
        return Change(
            files=[file.inverse() for file in reversed(self.files)],
            mkdirs=self.rmdirs[::-1],
            rmdirs=self.mkdirs[::-1],
            receipt_before=self.receipt_after,
            receipt_after=self.receipt_before,
        )

    def to_dict(self) -> dict:
        return {
            "format": FORMAT,
            "files": [asdict(file) for file in self.files],
            "mkdirs": self.mkdirs,
            "rmdirs": self.rmdirs,
            "receipt_before": self.receipt_before and self.receipt_before.to_dict(),
            "receipt_after": self.receipt_after and self.receipt_after.to_dict(),
        }

    @staticmethod
    def from_dict(data: dict) -> "Change":
        return Change(
            files=[FileChange.from_dict(entry) for entry in data["files"]],
            mkdirs=data["mkdirs"],
            rmdirs=data["rmdirs"],
            receipt_before=data["receipt_before"] and Receipt.from_dict(data["receipt_before"]),
            receipt_after=data["receipt_after"] and Receipt.from_dict(data["receipt_after"]),
        )


class Store:
    """Reads and writes one target's state folder. Reading needs no lock."""

    def __init__(self, target: Target, fs: Optional[Fs] = None):
        self.target = target
        self.fs = fs or Fs()
        self.folder = target.state
        self.receipt_file = self.folder / "receipt.json"
        self.journal_file = self.folder / "journal.json"
        self.blobs = self.folder / "blobs"
        self.staged = self.folder / "staged"
        self.lock_file = self.folder / "lock"
        self.ignore_file = self.folder / ".gitignore"

    def exists(self) -> bool:
        """Tell whether there is a state folder at all. Raises Refused if it is a symbolic link."""
        if self.folder.is_symlink():
            raise Refused(
                "the state folder is a symbolic link; nothing was written",
                file=str(self.folder),
                expected="a folder of the tree itself",
                found=os.readlink(self.folder),
                remedy="remove the link",
            )
        return self.folder.exists()

    def receipt(self) -> Optional[Receipt]:
        """Return what is applied, or None. Raises Interfered if the receipt cannot be read."""
        return self._load(self.receipt_file, Receipt.from_dict)

    def journal(self) -> Optional[Change]:
        """Return the change that was cut short, or None. Raises Interfered if it cannot be read."""
        return self._load(self.journal_file, Change.from_dict)

    def _load(self, path: Path, make: Callable[[dict], Any]) -> Any:
        found = read_file(path) if self.exists() else None
        if found is None:
            return None
        try:
            data = json.loads(found[0])
            if data["format"] == FORMAT:
                return make(data)
        except (ValueError, KeyError, TypeError, AttributeError) as fault:
            raise Interfered(
                f"cannot read {path.name}: {fault!r}",
                file=str(path),
                remedy=(RECOGNISE if path == self.receipt_file else "") + NO_TRUST,
            ) from None
        else:
            raise Interfered(
                f"{path.name} is of another version of this tool",
                file=str(path),
                expected=f"format {FORMAT}",
                found=f"format {data['format']}",
                remedy="revert with the version of the overlay that applied it",
            )

    def blob(self, digest: str) -> bytes:
        """Return kept bytes. Raises Interfered if they are gone or not what they were."""
        path = self.blobs / digest
        found = read_file(path)
        if found is None or sha256(found[0]) != digest:
            raise Interfered(
                "a kept original is damaged" if found else "a kept original is missing",
                file=str(path),
                expected=f"sha256 {digest}",
                found=sha256(found[0]) if found else "no file",
                remedy=NO_TRUST,
            )
        return found[0]

    def keep(self, digest: str, data: bytes) -> None:
        """Keep bytes, unless they are kept already."""
        path = self.blobs / digest
        present = read_file(path)
        if present is None or present[0] != data:
            self._write_whole(path, data)

    def write_journal(self, change: Change) -> None:
        """Put the journal in place; from now on the change is under way."""
        self._write_whole(self.journal_file, _json(change.to_dict()))
        self.fs.sync_dir(self.folder)
        self.fs.sync_dir(self.folder.parent)

    def write_receipt(self, receipt: Optional[Receipt]) -> None:
        """Put a receipt in place, or take it away."""
        if receipt is not None:
            self._write_whole(self.receipt_file, _json(receipt.to_dict()))
        elif self.receipt_file.exists():
            self.fs.unlink(self.receipt_file)
        self.fs.sync_dir(self.folder)

    def drop_journal(self) -> None:
        """End a change: the one step that makes it count."""
        self.fs.unlink(self.journal_file)
        self.fs.sync_dir(self.folder)

    def _write_whole(self, path: Path, data: bytes) -> None:
        """Write a file of the state folder so that it is there whole, or not at all."""
        passing = path.with_name(path.name + ".new")
        self.fs.write(passing, data)
        self.fs.rename(passing, path)

    def make_folders(self) -> None:
        """Make the folders for kept and staged contents."""
        for folder in (self.blobs, self.staged):
            if not folder.exists():
                self.fs.mkdir(folder)

    def tidy(self) -> None:
        """Remove what nothing refers to; with no receipt and no journal that is the whole folder."""
        if self.journal_file.exists() or not self.exists():
            return
        receipt = self.receipt()
        wanted = {state.sha256 for file in receipt.files for state in file.kept()} if receipt else set()
        lasting = {self.receipt_file.name, self.lock_file.name, self.ignore_file.name}
        self._clear(self.staged, keep=set())
        self._clear(self.blobs, keep=wanted)
        for path in sorted(self.folder.iterdir()):
            if path.name not in lasting and path.is_file():
                self.fs.unlink(path)
        if receipt is None:
            self._remove_folder()

    def _clear(self, folder: Path, keep: set) -> None:
        if not folder.is_dir():
            return
        for path in sorted(folder.iterdir()):
            if path.name not in keep:
                self.fs.unlink(path)
        if not keep:
            self.fs.rmdir(folder)

    def _remove_folder(self) -> None:
        # The lock goes last: while it is there no other process takes the folder for its own.
        for path in (self.ignore_file, self.lock_file):
            if path.exists():
                self.fs.unlink(path)
        if not any(self.folder.iterdir()):
            self.fs.rmdir(self.folder)


@contextlib.contextmanager
def locked(target: Target, fs: Fs) -> Iterator[Store]:
    """Hold the target's lock, making the state folder if needed, and leave no empty one behind.

    Raises Refused if another process holds the lock or the folder cannot be made.
    """
    store = Store(target, fs)
    try:
        handle = _take_lock(store)
    except OSError as fault:
        raise Refused(
            f"cannot make the state folder: {fault.strerror}; nothing was written",
            file=str(store.folder),
            remedy="make the package folder writable (and see that there is room), then run again",
        ) from fault
    try:
        yield store
    except OverlayError:
        with contextlib.suppress(OSError, Interfered):
            store.tidy()
        raise
    finally:
        os.close(handle)


def _take_lock(store: Store) -> int:
    """Return a handle that holds the lock; closing it, or dying, gives the lock back."""
    while True:
        if not store.exists():
            with contextlib.suppress(FileExistsError):
                store.fs.mkdir(store.folder)
        try:
            handle = store.fs.open_lock(store.lock_file)
        except FileNotFoundError:  # another process finished a revert in between
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_same_file(handle, store.lock_file):
                os.close(handle)
                continue
            if not store.ignore_file.exists():
                store.fs.write(store.ignore_file, b"*\n")
            return handle
        except BlockingIOError:
            os.close(handle)
            raise Refused(
                "another apply or revert is at work on this tree",
                file=str(store.lock_file),
                remedy="wait until it has ended",
            ) from None
        except OSError:
            with contextlib.suppress(OSError):
                store.tidy()
            os.close(handle)
            raise


def _is_same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _json(data: dict) -> bytes:
    return (json.dumps(data, indent=1, sort_keys=True) + "\n").encode()
