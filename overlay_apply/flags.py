"""The overlay's environment flags, from its own table."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Optional

from . import OVERLAY_NAME

TABLE = "srt/environ.py"


def load_table(overlay: Path) -> Optional[ModuleType]:
    """Load the table by its path: importing the package would pull in what status does not need. None without one."""
    path = overlay / TABLE
    if not path.is_file():
        return None
    name = f"_{OVERLAY_NAME}_flags"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


def read_flags(table: Optional[ModuleType]) -> list:
    """Return one {name, feature, default, values, help, set_to, refused} for each flag; none without a table."""
    return [_row(flag, table) for flag in getattr(table, "FLAGS", ())]


def misspelt_notes(table: Optional[ModuleType], known: str) -> list:
    """Return a sentence on each variable that looks like a flag and is none; `known` names those that SGLang has, in a text."""
    find = getattr(table, "misspelt_notes", None)
    return list(find(os.environ, known)) if find else []


def _row(flag, module) -> dict:
    fields = {field: getattr(flag, field, None) for field in ("name", "feature", "default", "values", "help")}
    set_to = os.environ.get(fields["name"] or "")
    refused = _refused(module, fields["name"], set_to)
    if not refused and set_to and getattr(flag, "is_json_file", False) and not _is_off(module):
        refused = _unreadable(fields["name"], set_to, fields["default"])
    return {**fields, "set_to": set_to, "refused": refused}


def _refused(module, name: str, set_to: Optional[str]) -> Optional[str]:
    """Return why the overlay does not take a flag's value, in its own words; None where it does."""
    if set_to is None or not hasattr(module, "parse"):
        return None
    try:
        module.parse({name: set_to})
    except module.FlagError as fault:
        return str(fault)
    return None


def _is_off(module) -> bool:
    """Tell whether the flags as they are make the overlay read no file."""
    try:
        return module.parse(os.environ).is_off
    except module.FlagError:
        return False


def _unreadable(name: str, path: str, default: str) -> Optional[str]:
    """Return why a flag's file cannot be used, as far as that shows without knowing its form; None where it may."""
    if path.strip().lower() == default:
        return None
    try:
        json.loads(Path(path.strip()).read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        return f"{name}={path}: no JSON file ({fault})"
    return None
