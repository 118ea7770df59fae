"""Every change to a file system goes through `Fs`; reading helpers stand beside it."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Optional

WRITE_BITS = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True)
class FileState:
    """What a file holds, and its permission bits."""

    sha256: str
    mode: int


def sha256(data: bytes) -> str:
    """Return the hex SHA-256 of some bytes."""
    return hashlib.sha256(data).hexdigest()


def read_file(path: Path) -> Optional[tuple[bytes, int]]:
    """Return a regular file's bytes and permission bits, or None if there is no such file."""
    try:
        with open(path, "rb") as stream:
            return stream.read(), stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def state_of(path: Path) -> Optional[FileState]:
    """Return the state of a file, or None if there is no such file."""
    found = read_file(path)
    return None if found is None else FileState(sha256(found[0]), found[1])


def _nothing(operation: str, path: Path) -> None:
    """The default observer."""


class Fs:
    """The only place that mutates a file system.

    `observe` is called before every single mutation with its name and path, so that a test
    can stop the process, or raise an OSError, at each of them.
    """

    def __init__(self, observe: Callable[[str, Path], None] = _nothing):
        self._observe = observe

    def write(
        self, path: Path, data: bytes, mode: int = 0o644, *, stands_for: Optional[Path] = None
    ) -> None:
        """Write a file's bytes to disk, flushed.

        With `stands_for`, the file is going to replace that one: it gets the same owner (or the
        owner of its folder when it is new) and a later modification time.
        """
        self._observe("create", path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
        with open(os.open(path, flags, 0o600), "wb", buffering=0) as stream:
            half = len(data) // 2
            _write_all(stream, data[:half], path)
            self._observe("write", path)
            _write_all(stream, data[half:], path)
            if stands_for is not None:
                _adopt_owner(stream.fileno(), stands_for)
            os.fchmod(stream.fileno(), mode)
            self._observe("fsync", path)
            os.fsync(stream.fileno())
        if stands_for is not None:
            self._make_later(path, stands_for)

    def _make_later(self, path: Path, than: Path) -> None:
        """Give a file a modification time at least one whole second after another's.

        Python trusts a cached .pyc if the source's size and its modification time in whole
        seconds are the recorded ones. A file that is replaced twice within a second by text of
        the same size would be served stale code; with times that only ever grow it cannot be.
        For the same reason a revert does not set the old time back.
        """
        try:
            floor = int(os.stat(than).st_mtime) + 1
        except FileNotFoundError:
            return
        if os.stat(path).st_mtime < floor:
            self._observe("utime", path)
            os.utime(path, (floor, floor))

    def rename(self, source: Path, target: Path) -> None:
        """Put a file in the place of another (which keeps its hard-linked copies as they are)."""
        self._observe("rename", target)
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        self._observe("unlink", path)
        os.unlink(path)

    def mkdir(self, path: Path) -> None:
        """Make one directory, with the owner of the one above it."""
        self._observe("mkdir", path)
        os.mkdir(path)
        if os.geteuid() == 0:
            above = os.stat(path.parent)
            os.chown(path, above.st_uid, above.st_gid)

    def rmdir(self, path: Path) -> None:
        """Remove one empty directory."""
        self._observe("rmdir", path)
        os.rmdir(path)

    def open_lock(self, path: Path) -> int:
        """Open a lock file, making it if needed; return its handle."""
        self._observe("create", path)
        return os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)

    def sync_dir(self, path: Path) -> None:
        """Flush a directory's entries to disk."""
        self._observe("fsync-dir", path)
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _write_all(stream, data: bytes, path: Path) -> None:
    """Write all bytes to an unbuffered stream; an OSError names the path, which the system's own does not."""
    view = memoryview(data)
    try:
        while view:
            view = view[stream.write(view) :]
    except OSError as fault:
        fault.filename = str(path)
        raise


def _adopt_owner(handle: int, stands_for: Path) -> None:
    """Give an open file the owner of the file it replaces; only the superuser can."""
    if os.geteuid() != 0:
        return
    try:
        owner = os.stat(stands_for)
    except FileNotFoundError:
        owner = os.stat(stands_for.parent)
    os.fchown(handle, owner.st_uid, owner.st_gid)
