"""Compiled files that Python goes on using whatever their source says (PEP 552: named by a source hash, and never compared)."""

from __future__ import annotations

import importlib.util
from pathlib import Path, PurePosixPath
from typing import List, Optional

from .fs import read_file

_UNCHECKED = 0b01
_CACHE = "__pycache__"


def is_unchecked(data: bytes) -> bool:
    """Tell whether Python uses a compiled file without a look at its source."""
    return len(data) >= 16 and int.from_bytes(data[4:8], "little") == _UNCHECKED


def source_of(path: str) -> str:
    """Return the path of the source that a compiled file is of."""
    compiled = PurePosixPath(path)
    return (compiled.parent.parent / f"{compiled.name.split('.')[0]}.py").as_posix()


def compiled_of(root: Path, source: str) -> List[str]:
    """Return the paths of the compiled files that there are of a source, in whatever way they are checked."""
    path = PurePosixPath(source)
    if path.suffix != ".py":
        return []
    found = sorted((root / path.parent / _CACHE).glob(f"{path.stem}.*.pyc"))
    return [compiled.relative_to(root).as_posix() for compiled in found]


def hiding(root: Path, source: str, text: Optional[bytes] = None) -> List[str]:
    """Return the compiled files that keep Python from running a source as it is now, or as `text`."""
    if text is None:
        found = read_file(root / source)
        text = found and found[0]
    return [path for path in compiled_of(root, source) if _hides(read_file(root / path), text)]


def _hides(compiled, text) -> bool:
    if compiled is None or not is_unchecked(compiled[0]):
        return False
    # Another Python hashes in another way: what it compiled counts as stale, and it compiles again.
    ours = compiled[0][:4] == importlib.util.MAGIC_NUMBER
    return not (ours and text and compiled[0][8:16] == importlib.util.source_hash(text))
