"""A change as a unified diff in git's format, which `git apply` takes."""

from __future__ import annotations

import difflib
import hashlib
from typing import Iterable, Mapping

from .state import BYTECODE, FileChange

_ESCAPES = {ord("\\"): "\\\\", ord('"'): '\\"', ord("\n"): "\\n", ord("\t"): "\\t"}


def render(files: Iterable[FileChange], contents: Mapping[str, bytes]) -> bytes:
    """Return the diff of all files, in the order of their paths; compiled files are left out."""
    sources = [file for file in files if file.kind != BYTECODE and file.before != file.after]
    sources.sort(key=lambda file: file.path)
    return b"".join(_file(file, contents) for file in sources)


def _file(file: FileChange, contents: Mapping[str, bytes]) -> bytes:
    old = contents[file.before.sha256] if file.before else b""
    new = contents[file.after.sha256] if file.after else b""
    old_id = _blob_id(old) if file.before else "0" * 40
    new_id = _blob_id(new) if file.after else "0" * 40
    left, right = _name("a/" + file.path), _name("b/" + file.path)
    header = f"diff --git {left} {right}\n"
    if file.before is None:
        header += f"new file mode {_git_mode(file.after)}\nindex {old_id}..{new_id}\n"
    elif file.after is None:
        header += f"deleted file mode {_git_mode(file.before)}\nindex {old_id}..{new_id}\n"
    else:
        header += f"index {old_id}..{new_id} {_git_mode(file.before)}\n"
    hunks = _hunks(old, new)
    if hunks:
        header += f"--- {_line_name(left) if file.before else '/dev/null'}\n"
        header += f"+++ {_line_name(right) if file.after else '/dev/null'}\n"
    return header.encode() + hunks


def _hunks(old: bytes, new: bytes) -> bytes:
    lines = difflib.diff_bytes(
        difflib.unified_diff, _lines(old), _lines(new), b"old", b"new", lineterm=b"\n"
    )
    return b"".join(_ended(line) for line in list(lines)[2:])


def _lines(data: bytes) -> list:
    """Split at line feeds only, as git does: a carriage return belongs to its line."""
    lines = data.split(b"\n")
    return [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _ended(line: bytes) -> bytes:
    return line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n"


def _git_mode(state) -> str:
    return "100755" if state.mode & 0o100 else "100644"


def _blob_id(data: bytes) -> str:
    """Return git's own name for some contents (which is a SHA-1 by git's format)."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _name(path: str) -> str:
    """Quote a path the way git does, if it needs it."""
    quoted = path.translate(_ESCAPES)
    if quoted == path and path.isascii() and path.isprintable():
        return path
    bytes_ = "".join(c if c.isascii() else "".join(f"\\{b:03o}" for b in c.encode()) for c in quoted)
    return f'"{bytes_}"'


def _line_name(name: str) -> str:
    """A name with a space is closed by a tab in the --- and +++ lines, so that it is read whole."""
    return name + "\t" if " " in name and not name.startswith('"') else name
