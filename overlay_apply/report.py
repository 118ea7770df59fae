"""Shows results to people: rich tables on a terminal, plain text elsewhere; or one JSON object."""

from __future__ import annotations

import json
import sys
from typing import Iterable

from .errors import OverlayError


def show_json(result: dict) -> None:
    """Print one JSON object."""
    print(json.dumps(result, indent=2))


def show_error(fault: OverlayError) -> None:
    """Tell a failure: what, where, expected, found, and what to do."""
    _error_lines(fault.as_dict())
    edits = [entry for entry in fault.details if "edit" in entry]
    if edits:
        _table(_EDIT_COLUMNS, map(_edit_row, edits), sys.stderr)
    for entry in fault.details:
        for label in ("edited", "taken"):
            if label in entry:
                print(f"  {label}: {entry[label]}", file=sys.stderr)


def _error_lines(facts: dict) -> None:
    print(f"error: {facts['message']}", file=sys.stderr)
    for label in ("patch", "file", "expected", "found", "remedy"):
        if label in facts:
            name = "what to do" if label == "remedy" else label
            print(f"  {name}: {_words(facts[label])}", file=sys.stderr)


def show_apply(result: dict) -> None:
    """Tell what apply did."""
    print(f"{result['target']}: {result['outcome']}")
    _pairs([("base", _base(result)), *_feature_pairs(result)])
    if result["tried"]:
        _table(_EDIT_COLUMNS, map(_edit_row, result["edits"]))
        print("note: every edit found its place, but on this version nothing of this was ever run: test it before you serve with it")
    _table(("patch", "feature", "outcome"), (tuple(patch.values()) for patch in result["patches"]))
    _files(result["files"])
    _notes(result)


def show_status(result: dict) -> None:
    """Tell what is at a tree."""
    print(f"{result['target']}: {result['state']}")
    _pairs([("base", _base(result)), *_feature_pairs(result)])
    if result["changed"]:
        _table(("file", "now"), (tuple(entry.values()) for entry in result["changed"]))
    _standings(result["standings"])
    if result["flags"]:
        _table(("flag", "set to", "default", "values"), map(_flag_row, result["flags"]))
    _machine(result)
    if "error" in result:
        _error_lines(result["error"])
    _notes(result)


def _notes(result: dict) -> None:
    for note in result.get("notes", ()):
        print(f"note: {note}")


def _standings(standings: list) -> None:
    """One line for each feature, and one for each part of it."""
    if not standings:
        return
    _table(("feature", "is", "why"), ((each["feature"], each["state"], each["why"]) for each in standings))
    parts = [(each["feature"], part) for each in standings for part in each["parts"]]
    if parts:
        _table(("feature", "part", "on this machine"), ((name, part["part"], _part_state(part)) for name, part in parts))


def _part_state(part: dict) -> str:
    return "; ".join(part["missing"]) or "can run"


def _machine(result: dict) -> None:
    """The environment's versions against what is asked of them, and the GPUs."""
    gpu, environment = result["gpu"], result["environment"]
    if gpu["count"]:
        link = f", linked by {gpu['link']}" if gpu["link"] else ""
        about = f"{gpu['count']} x {_words(gpu['names'])}, compute capability {gpu['arch']}, driver {gpu['driver']}{link}"
    else:
        about = f"none ({gpu['absent']})"
    _pairs([("environment", environment["source"]), ("NVIDIA GPUs", about)])
    if environment["packages"]:
        columns = ("package", "installed", "this SGLang pins", "features need")
        _table(columns, map(_package_row, environment["packages"]))


def _package_row(row: dict) -> tuple:
    needed = (f"{name} {' or '.join(ranges)}" for name, ranges in row["needed"].items())
    return row["package"], row["found"] or "-", row["pinned"] or "-", "; ".join(needed) or "-"


def show_revert(result: dict) -> None:
    """Tell what revert did."""
    print(f"{result['target']}: {result['outcome']}")
    _files(result["files"])
    for path in result.get("merged", ()):
        print(f"taken out of it, with your edits left in: {path}")
    for path in result["left"]:
        print(f"left as it is, with your edits (and what the overlay put in): {path}")
    for path in result.get("left_dirs", ()):
        print(f"left, since it holds files that are not the overlay's: {path}")
    _notes(result)


def show_check(result: dict) -> None:
    """Tell which edits fit, and where the others may belong."""
    columns = ("base", "release", *_EDIT_COLUMNS)
    _table(columns, ((row["base"], row["release"], *_edit_row(row)) for row in result["edits"]))
    for row in result["edits"]:
        if "candidates" in row and row["base"] == result["best"]:
            _nearest(row)
    if "best" in result:
        _verdict(result)
        return
    for problem in result["problems"]:
        _error_lines(problem)
    print("all patches fit their bases" if result["ok"] else f"{len(result['problems'])} problems")


def _nearest(row: dict) -> None:
    """Tell where an edit that drifted may belong, and what became of its names."""
    print(f"{row['edit']} drifted: {row['file']}: {_edit_row(row)[3]} in place of {row['expected']}")
    for name in row["names"]:
        near = f"; near it: {_words(name['near'])}" if name["near"] else ""
        elsewhere = f"; defined in {_words(name['elsewhere'])}" if name["elsewhere"] else ""
        print(f"  gone: {name['name']}{near}{elsewhere}")
    for place in row["candidates"]:
        print(f"  maybe: {place['file']}:{place['line']} in {place['scope']} ({place['how']}): {place['text']}")


def _verdict(result: dict) -> None:
    """Sum up each base that was tried on a tree."""
    for base in dict.fromkeys(row["base"] for row in result["edits"]):
        outcomes = [row["outcome"] for row in result["edits"] if row["base"] == base]
        counts = ", ".join(f"{outcomes.count(each)} {each}" for each in dict.fromkeys(outcomes))
        print(f"{base}: {len(outcomes)} edits: {counts}")
    for problem in result["problems"]:
        if problem["kind"] == "patch-data":
            _error_lines(problem)
    for row in result["lost"] or ():
        print(f"gone, though the overlay imports it: {row['name']} (in {_words(row['by'])})")
    if result["lost"] is None:
        print(f"not compared: what the overlay imports ({result['best']}'s release is not in build/; `check --base {result['best']}` fetches it)")
    found = result["evidence"]
    print(f"{'all of it fits' if result['ok'] else 'best'}: {result['best']} (the tree is {found['found']}, by {found['kind']})")


def show_features(result: dict) -> None:
    """Tell what each base has of each patch."""
    rows = ((row["patch"], row["feature"], *row["bases"].values()) for row in result["patches"])
    _table(("patch", "feature", *result["bases"]), rows)


_EDIT_COLUMNS = ("edit", "file", "expected", "found", "fits")


def _edit_row(row: dict) -> tuple:
    found = "no such file" if row["found"] is None else row["found"]
    return row["edit"], row["file"], row["expected"], found, row.get("outcome") or ("yes" if row["fits"] else "NO")


def _flag_row(flag: dict) -> tuple:
    set_to = "(unset)" if flag["set_to"] is None else f"{flag['set_to']}{' (refused)' if flag['refused'] else ''}"
    return flag["name"], set_to, flag["default"], flag["values"]


def _base(result: dict) -> str:
    evidence = result["evidence"]
    how = f"{evidence['kind']}: {evidence['found']}" if isinstance(evidence, dict) else "unknown"
    return f"{result['base'] or 'none'} ({how})"


def _feature_pairs(result: dict) -> list:
    features = result["features"]
    return [("features in", _words(features["in"])), ("features out", _words(features["out"]))]


def _files(files: list) -> None:
    if files:
        kinds: dict = {}
        for entry in files:
            kinds.setdefault(entry["kind"], []).append(entry["file"])
        _pairs([(f"{kind} files", len(names)) for kind, names in kinds.items()])


def _pairs(pairs: Iterable) -> None:
    for label, value in pairs:
        print(f"  {label}: {value}")


def _words(value: object) -> str:
    if isinstance(value, dict) and set(value) == {"kind", "found"}:
        return f"{value['found']} (by {value['kind']})"
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _table(columns: Iterable, rows: Iterable, stream=None) -> None:
    """Print a table: drawn on a terminal, plain columns elsewhere."""
    stream = stream or sys.stdout
    cells = [[str(cell) for cell in row] for row in rows]
    if stream.isatty():
        _drawn(list(columns), cells, stream)
        return
    lines = [list(columns), *cells]
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        print("  " + "  ".join(map(str.ljust, line, widths)).rstrip(), file=stream)


def _drawn(columns: list, cells: list, stream) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns)
    for row in cells:
        table.add_row(*map(Text, row))
    Console(file=stream).print(table)
