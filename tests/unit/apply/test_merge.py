"""Edits made to a patched file since: kept, with the overlay taken out around them; left alone where that is a guess."""

from __future__ import annotations

import random

import pytest

from conftest import NET
from overlay_apply.merge import taken_out

FILE = "sglang/srt/models/net.py"


@pytest.fixture
def patched_net(run, package) -> str:
    assert run("apply", package).code == 0
    return (package / FILE).read_text()


def patched(original: list, at: dict) -> list:
    """Lines with others in place of, or before, some of them."""
    return [line for number, old in enumerate(original) for line in at.get(number, [old])]


def test_every_edit_away_from_ours_survives_and_none_of_ours_does():
    random.seed(7)
    for _ in range(200):
        original = [f"line {number} {random.randrange(4)}\n" for number in range(40)]
        ours = {5: ["ours\n"], 12: [], 20: ["ours\n", original[20]], 30: ["a\n", "b\n", original[30]]}
        free = [number for number in range(40) if all(abs(number - place) > 1 for place in ours)]
        theirs = {number: random.choice([["theirs\n"], [], [original[number], "theirs\n"]]) for number in random.sample(free, 5)}
        result = taken_out(*("".join(lines).encode() for lines in (patched(original, ours), original, patched(original, {**ours, **theirs}))))
        assert result == "".join(patched(original, theirs)).encode()


@pytest.mark.parametrize(
    "edit",
    [
        lambda lines: [*lines[:3], "mine\n", *lines[3:]],  # in the middle of ours
        lambda lines: [*lines[:2], *lines[3:]],  # one of ours is gone
        lambda lines: [*lines[:1], "mine\n", *lines[2:]],  # the line above ours
        lambda lines: [*lines[:4], "mine\n", *lines[5:]],  # the line below
        lambda lines: ["mine\n"],
        lambda lines: [],
    ],
)
def test_an_edit_at_ours_is_not_guessed_at(edit):
    original = ["a\n", "b\n", "c\n", "d\n"]
    ours = ["a\n", "b\n", "ours 1\n", "ours 2\n", "c\n", "d\n"]
    assert taken_out(*("".join(lines).encode() for lines in (ours, original, edit(ours)))) is None


@pytest.mark.parametrize("original, ours", [(["b\n"], ["ours\n", "b\n"]), (["b\n"], ["b\n", "ours\n"]), (["a\n", "b\n"], ["b\n"]), (["b"], ["b\n", "ours"])])
def test_changes_at_either_end(original, ours):
    sides = ["".join(lines).encode() for lines in (ours, original)]
    assert taken_out(*sides, sides[0]) == sides[1]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_revert_keeps_an_edit_and_takes_the_overlay_out_around_it(run, package, end):
    file = package / FILE
    file.write_bytes(NET.replace("\n", end).encode())
    assert run("apply", package).code == 0
    file.write_bytes(file.read_bytes().replace(b"A model.", b"My model."))
    result = run("revert", "--keep-edited", "--json", package)
    assert (result.code, result.data["merged"], result.data["left"]) == (0, [FILE], [])
    assert file.read_bytes() == NET.replace("A model.", "My model.").replace("\n", end).encode()
    assert b"overlay" not in file.read_bytes() and not (package / "sglang/sglang_overlay").exists()
    assert run("apply", package, "--try-base", "v0.5.20").code == 0


def test_revert_leaves_a_file_that_was_edited_at_a_call_of_ours(run, package, patched_net):
    line = next(line for line in patched_net.splitlines() if line not in NET.splitlines() and "import" not in line)
    edited = patched_net.replace(line, line + "  # mine")
    (package / FILE).write_text(edited)
    result = run("revert", "--keep-edited", "--json", package)
    assert (result.code, result.data["merged"], result.data["left"]) == (0, [], [FILE])
    assert (package / FILE).read_text() == edited


def test_a_call_of_the_overlay_that_somebody_added_is_not_left_dangling(run, package, patched_net):
    edited = patched_net + "import sglang.sglang_overlay.srt.net\n"
    (package / FILE).write_text(edited)
    result = run("revert", "--keep-edited", "--json", package)
    assert (result.data["merged"], result.data["left"]) == ([], [FILE]) and (package / FILE).read_text() == edited


def test_what_an_older_version_did_not_keep_is_left(run, package, patched_net):
    for blob in (package / "sglang/.sglang_overlay_state/blobs").iterdir():
        if blob.read_text() == patched_net:
            blob.unlink()
    edited = patched_net.replace("A model.", "My model.")
    (package / FILE).write_text(edited)
    result = run("revert", "--keep-edited", "--json", package)
    assert (result.code, result.data["left"]) == (0, [FILE]) and (package / FILE).read_text() == edited
