"""Carry a change out whole or not at all.

1. New and old contents are written into the state folder. A failure here has not touched the tree.
2. The journal is put in place. From here on a killed process leaves a tree that `recover` undoes.
3. Directories, files (each by one rename) and the receipt follow.
4. The journal is removed: the change counts.

Undoing is carrying out the inverse change. Each step of it looks at what is there first, so it
can itself be killed and started again.
"""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path
from typing import Collection, Mapping, Optional

from .bytecode import hiding, source_of
from .errors import Interfered, Refused
from .fs import FileState, state_of
from .state import BYTECODE, Change, FileChange, Store

PARTLY = "the tree is partly applied; when the cause is gone, `revert` puts it right"
DONE = "the change itself is done, only tidying up is left"


def commit(store: Store, change: Change, contents: Mapping[str, bytes]) -> None:
    """Carry out a change. `contents` holds the bytes of every state in it, by SHA-256.

    Raises Refused if the file system says no, Interfered if a file changed since the change was
    planned; the tree is then as it was before.
    """
    _check_unchanged(store, change)
    try:
        staged = _prepare(store, change, contents)
        store.write_journal(change)
        _carry_out(store, change, staged)
    except OSError as fault:
        _roll_back(store, change, fault)
    _finish(store)


def recover(store: Store, leave: frozenset = frozenset()) -> bool:
    """Undo a change that was cut short; return whether there was one.

    Files in `leave` stay as they are. Raises Interfered, before anything is changed, if other
    files were edited since; Refused if the file system says no.
    """
    journal = store.journal()
    if journal is None:
        return False
    try:
        _undo(store, journal, leave)
    except OSError as fault:
        raise _refusal(fault, PARTLY) from fault
    return True


def clear_leftovers(store: Store) -> None:
    """Remove what an interrupted command left in the state folder. Raises Refused."""
    try:
        store.tidy()
    except OSError as fault:
        raise _refusal(fault, "the tree itself is whole; run again") from fault


def edited_since(store: Store, files: list) -> list:
    """Return the paths of those files that are neither in their old nor in their new state."""
    sources = [file for file in files if file.kind != BYTECODE]
    return [file.path for file in sources if not _is_known(store, file)]


def is_left(file: FileChange, leave: Collection[str]) -> bool:
    """Tell whether a file stays as it is where those in `leave` do: it is one of them, or what was compiled from one."""
    return file.path in leave or (file.kind == BYTECODE and source_of(file.path) in leave)


def _check_unchanged(store: Store, change: Change) -> None:
    """Raise Interfered if the tree is not in the change's before state (any longer)."""
    same_receipt = store.journal() is None and store.receipt() == change.receipt_before
    changed = [
        file.path
        for file in change.files
        if not _same(state_of(store.target.root / file.path), file.before)
    ]
    if changed or not same_receipt:
        raise Interfered(
            "the tree was changed while the command was looking at it; nothing was written",
            file=changed[0] if changed else str(store.folder),
            remedy="run the command again",
        )


def _is_known(store: Store, file: FileChange) -> bool:
    now = state_of(store.target.root / file.path)
    return _same(now, file.before) or _same(now, file.after)


def _same(left: Optional[FileState], right: Optional[FileState]) -> bool:
    """Compare by content: a mode that somebody changed is not an edit to protect."""
    return (left and left.sha256) == (right and right.sha256)


def _prepare(store: Store, change: Change, contents: Mapping[str, bytes]) -> dict:
    """Write all new contents, and keep all old ones; return where each path's new contents are."""
    store.make_folders()
    kept = [file.before for file in change.files]
    kept += [state for file in change.receipt_after.files for state in file.kept()] if change.receipt_after else []
    for state in kept:
        if state is not None and state.sha256 in contents:
            store.keep(state.sha256, contents[state.sha256])
    staged = {}
    for number, file in enumerate(change.files):
        if file.after is not None:
            staged[file.path] = store.staged / str(number)
            _stage(store, file, staged[file.path], contents[file.after.sha256])
    store.fs.sync_dir(store.blobs)
    return staged


def _stage(store: Store, file: FileChange, place: Path, data: bytes) -> None:
    stands_for = store.target.root / file.path
    # A new folder does not exist yet; its files get the owner of the folder above it.
    while not stands_for.parent.exists():
        stands_for = stands_for.parent
    store.fs.write(place, data, file.after.mode, stands_for=stands_for)


def _carry_out(store: Store, change: Change, staged: Mapping[str, Path]) -> None:
    """Bring the tree to the change's after state, from before it or from anywhere in between."""
    root = store.target.root
    for path in change.mkdirs:
        if not (root / path).exists():
            store.fs.mkdir(root / path)
    for file in change.files:
        _place(store, file, staged.get(file.path))
    for path in change.rmdirs:
        _remove_if_empty(store, root / path)
    for folder in sorted({(root / file.path).parent for file in change.files}):
        if folder.exists():
            store.fs.sync_dir(folder)
    store.write_receipt(change.receipt_after)
    store.drop_journal()


def _place(store: Store, file: FileChange, staged: Optional[Path]) -> None:
    """Bring one file to its after state."""
    path = store.target.root / file.path
    if file.after is None:
        if path.exists():
            store.fs.unlink(path)
        _discard_bytecode(store, path)
    elif staged is not None:
        store.fs.rename(staged, path)
    elif not _same(state_of(path), file.after):
        passing = store.staged / "restored"
        if not store.staged.exists():
            store.fs.mkdir(store.staged)
        _stage(store, file, passing, store.blob(file.after.sha256))
        store.fs.rename(passing, path)


def _discard_bytecode(store: Store, source: Path) -> None:
    """Remove what Python compiled from a file of ours that is gone."""
    cache = source.parent / "__pycache__"
    if source.suffix != ".py" or not cache.is_dir():
        return
    for path in sorted(cache.glob("*.pyc")):
        if path.name.split(".")[0] == source.stem:
            store.fs.unlink(path)
    _remove_if_empty(store, cache)


def _remove_if_empty(store: Store, folder: Path) -> None:
    """Remove a directory; one that holds somebody's files stays."""
    if folder.is_dir():
        with contextlib.suppress(OSError) if any(folder.iterdir()) else contextlib.nullcontext():
            if not any(folder.iterdir()):
                store.fs.rmdir(folder)


def _undo(store: Store, journal: Change, leave: frozenset) -> None:
    files = [file for file in journal.files if not is_left(file, leave)]
    edited = edited_since(store, files)
    if edited:
        raise Interfered(
            "a command was cut short here, and this file was edited since",
            file=edited[0],
            expected="the file as the overlay wrote it, or as it was before",
            found="other contents",
            remedy="take your edit back, or `revert --keep-edited` to leave the edited files as they are",
            details=[{"edited": path} for path in edited],
        )
    for source in sorted(leave):
        files += [FileChange(path, BYTECODE, None, None) for path in hiding(store.target.root, source)]
    back = Change(files, journal.mkdirs, journal.rmdirs, journal.receipt_before, journal.receipt_after)
    _carry_out(store, back.inverse(), staged={})


def _roll_back(store: Store, change: Change, fault: OSError) -> None:
    """Undo at once what a refused step had begun, then raise Refused."""
    outcome = "the tree is as it was before"
    try:
        journal = store.journal()
        if journal is not None:
            _undo(store, journal, frozenset())
        elif store.receipt() != change.receipt_before:  # refused after the step that counts
            outcome = DONE
        store.tidy()
    except (OSError, Interfered):
        outcome = PARTLY if store.journal_file.exists() else outcome
    raise _refusal(fault, outcome) from fault


def _finish(store: Store) -> None:
    """Tidy up after a change that counts already."""
    try:
        store.tidy()
    except OSError as fault:
        raise _refusal(fault, DONE) from fault


def _refusal(fault: OSError, outcome: str) -> Refused:
    cures = {
        errno.ENOSPC: "free some space",
        errno.EDQUOT: "free some space",
        errno.EROFS: "the file system is mounted read-only: mount it writable, or copy the tree to one that is",
        errno.EXDEV: "put the whole tree on one file system",
    }
    cure = cures.get(fault.errno, "make the file and its folder writable for this user")
    return Refused(
        f"the file system refused: {fault.strerror or fault}; {outcome}",
        file=str(fault.filename) if fault.filename else None,
        expected="a tree that can be written",
        found=errno.errorcode.get(fault.errno, str(fault.errno)) if fault.errno else str(fault),
        remedy=f"{cure}, then run again",
    )
