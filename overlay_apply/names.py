"""Names that a source uses and nothing defines: what a fix leaves behind where its surroundings are not what it was written for."""

from __future__ import annotations

import builtins
import symtable
from typing import Iterator

# Set by Python itself in every module.
_GIVEN = {*dir(builtins), "__file__", "__path__", "__builtins__"}


def undefined(data: bytes, file: str) -> set:
    """Return the names that are read somewhere and bound nowhere; none where a star import may bring any name."""
    text = data.decode("utf-8-sig")
    table = symtable.symtable(text, file, "exec")
    if "import *" in text:
        return set()
    bound = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()}
    bound |= {symbol.get_name() for scope in _scopes(table) for symbol in scope.get_symbols() if symbol.is_declared_global()}
    return {name for name in _read_as_global(table) if name not in bound and name not in _GIVEN}


def _read_as_global(table: symtable.SymbolTable) -> Iterator[str]:
    for scope in _scopes(table):
        yield from (symbol.get_name() for symbol in scope.get_symbols() if symbol.is_global() and symbol.is_referenced())


def _scopes(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _scopes(child)
