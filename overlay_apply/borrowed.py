"""What the overlay borrows of SGLang by name, and what of that a tree no longer has.

An edit may fit a release whose modules no longer have what the overlay imports from them. Names that a base's own release
lacks too are left out: the overlay asks for them on other bases only.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Tuple

from .bases import Base, Reader
from .fetch import kept_reader
from .project import Project

_PACKAGE = "sglang."
_OURS = "sglang.sglang_overlay"


def lost_of(project: Project, base: Base, read: Reader) -> Optional[List[dict]]:
    """Return what the overlay borrows of a base's release that a tree has no longer; None where the release was never fetched."""
    read_base = kept_reader(project, base.release)
    return lost(project.overlay, read, read_base) if read_base else None


def lost(overlay: Path, read: Reader, read_base: Reader) -> List[dict]:
    """Return {name, by} for each name that the base has and this tree has not: module.name, and the overlay's files that import it."""
    here, there = Modules(read), Modules(read_base)
    gone: Dict[str, List[str]] = {}
    for module, name, file in _borrowed(overlay):
        if there.has(module, name) and not here.has(module, name):
            gone.setdefault(f"{module}.{name}" if name else module, []).append(file)
    return [{"name": name, "by": sorted(set(files))} for name, files in sorted(gone.items())]


def _borrowed(overlay: Path) -> Iterator[Tuple[str, str, str]]:
    """Yield (module, name, file) of each import of SGLang's in the overlay; an empty name for a whole module."""
    for path in sorted(overlay.rglob("*.py")):
        file = path.relative_to(overlay).as_posix()
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and _is_theirs(node.module or ""):
                yield from ((node.module or "", alias.name, file) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((alias.name, "", file) for alias in node.names if _is_theirs(alias.name))


def _is_theirs(module: str) -> bool:
    return module.startswith(_PACKAGE) and not module.startswith(_OURS)


class Modules:
    """Which names the modules of a tree have at their top level."""

    def __init__(self, read: Reader) -> None:
        self._read = read
        self._names: Dict[str, Optional[set]] = {}

    def has(self, module: str, name: str) -> bool:
        """Tell whether a module has a name, or is there at all; a star import in it may bring any name."""
        names = self._of(module)
        if names is None:
            return False
        return not name or name in names or "*" in names or self._of(f"{module}.{name}") is not None

    def _of(self, module: str) -> Optional[set]:
        if module not in self._names:
            place = module[len(_PACKAGE) :].replace(".", "/")
            data = self._read(f"{place}.py")
            data = self._read(f"{place}/__init__.py") if data is None else data
            self._names[module] = None if data is None else _names_in(data)
        return self._names[module]


def _names_in(data: bytes) -> set:
    """Return the names at the top level of a module; any, where this Python cannot read it."""
    try:
        return set(_top_names(ast.parse(data).body))
    except (SyntaxError, ValueError):
        return {"*"}


def _top_names(body: List[ast.stmt]) -> Iterator[str]:
    """Yield the names that statements bind, also those under `if`, `try` and `with`."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            yield from (each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
        else:
            for inner in ("body", "orelse", "finalbody"):
                yield from _top_names(getattr(node, inner, []))
            for handler in getattr(node, "handlers", []):
                yield from _top_names(handler.body)
