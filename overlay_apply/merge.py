"""Taking the overlay's changes out of a file that somebody edited since."""

from __future__ import annotations

import difflib
from typing import Dict, Optional


def taken_out(patched: bytes, original: bytes, now: bytes) -> Optional[bytes]:
    """Return `now` with every change from `original` to `patched` undone and all other lines as they are.

    None if one of the overlay's changes, or a line next to it, was edited: then only a person can tell what is wanted.
    """
    ours, before, edited = (data.splitlines(keepends=True) for data in (patched, original, now))
    places = _places(ours, edited)
    result = list(edited)
    for begin, end, first, last in reversed(_changes(ours, before)):
        near = [places.get(line) for line in range(max(begin - 1, 0), min(end + 1, len(ours)))]
        if not near or None in near or near != list(range(near[0], near[0] + len(near))):
            return None
        start = places[begin] if begin in places else places[begin - 1] + 1
        result[start : start + end - begin] = before[first:last]
    return b"".join(result)


def _changes(ours: list, before: list) -> list:
    """Return (begin, end, first, last) of each stretch of our lines that stands for another of the original's."""
    return [place for tag, *place in difflib.SequenceMatcher(None, ours, before, autojunk=False).get_opcodes() if tag != "equal"]


def _places(ours: list, edited: list) -> Dict[int, int]:
    """Return where each of our lines is now, for those that still are there."""
    blocks = difflib.SequenceMatcher(None, ours, edited, autojunk=False).get_matching_blocks()
    return {a + step: b + step for a, b, size in blocks for step in range(size)}
