"""The diff gives `git apply` exactly what apply does, and such a tree is known and taken back."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from unittest import mock

import pytest

from conftest import NET, commit_all, git, snapshot, without_state, write_tree
from overlay_apply import cli


@pytest.fixture
def diff_of(project):
    """Return the raw bytes that diff prints."""
    def get(*argv) -> bytes:
        stream = io.TextIOWrapper(io.BytesIO(), "utf-8")
        with mock.patch.object(sys, "stdout", stream):
            assert cli.run(["diff", *map(str, argv)], project) == 0
        return stream.buffer.getvalue()

    return get


def git_apply(root, text: bytes) -> None:
    if not (root / ".git").exists():
        git(root, "init", "-q")
    done = subprocess.run(["git", "-C", str(root), "apply", "-"], input=text, capture_output=True)
    assert done.returncode == 0, done.stderr


SOURCES = {
    "plain": NET,
    "crlf": NET.replace("\n", "\r\n"),
    "mixed": NET.replace("import os\n", "import os\r\n"),
    "no last line end": NET.rstrip("\n"),
    "mark": "\ufeff" + NET,
}


@pytest.mark.parametrize("source", SOURCES)
def test_git_apply_gives_the_same_tree(source, run, diff_of, package, project, tmp_path):
    write_tree(
        project.overlay,
        {"srt/data/\u00fc.json": "{}", "srt/data/a\tb.json": "1\r\n2", "srt/data/raw.bin": b"\0\xff\r\n\0"},
    )
    (package / "sglang/srt/models/net.py").write_bytes(SOURCES[source].encode())
    (package / "sglang/srt/layers/comm.py").chmod(0o755)
    second = tmp_path / "second"
    shutil.copytree(package, second)
    text = diff_of(package, "--try-base", "v0.5.20")
    git_apply(second, text)
    assert run("apply", package, "--try-base", "v0.5.20").code == 0
    assert snapshot(second) == without_state(package)
    assert diff_of(package) == text, "what was applied is what would have been"


def test_paths_start_at_the_checkout(run, diff_of, checkout, tmp_path):
    second = tmp_path / "second copy"
    shutil.copytree(checkout, second)
    text = diff_of(checkout)
    assert b"diff --git a/python/sglang/srt/models/net.py b/python/sglang/srt/models/net.py\n" in text
    assert b"+++ b/test/registered/moe/test_overlay_net.py\n" in text
    git_apply(second, text)
    assert run("apply", checkout).code == 0
    assert snapshot(second) == without_state(checkout)


def test_one_feature_only(diff_of, package):
    text = diff_of(package, "--feature", "beta")
    assert b"closing(self" in text and b"route(self)" not in text and b"comm.py" not in text


def test_diff_writes_nothing(diff_of, package):
    before = snapshot(package)
    diff_of(package)
    assert snapshot(package) == before


def test_nothing_but_the_diff_is_printed(tool, package):
    result = tool("diff", package)
    assert result.code == 0 and result.err == "" and result.out.startswith("diff --git ")


@pytest.mark.parametrize("feature", [None, "alpha", "beta"])
@pytest.mark.parametrize("crlf", [False, True])
def test_a_tree_patched_by_git_apply_is_known_and_reverted(run, diff_of, checkout, feature, crlf):
    commit_all(checkout)
    for name in ("models/net.py", "layers/comm.py") if crlf else ():
        path = checkout / "python/sglang/srt" / name
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    before = snapshot(checkout)
    git_apply(checkout, diff_of(checkout, *(["--feature", feature] if feature else [])))
    status = run("status", "--json", checkout)
    assert (status.code, status.data["state"]) == (0, "applied (no receipt)")
    assert status.data["features"]["in"] == ([feature] if feature else ["alpha", "beta"])
    assert run("revert", checkout).code == 0
    assert snapshot(checkout) == before


def test_new_files_may_have_the_line_ends_git_gives_them(run, diff_of, checkout):
    """core.autocrlf with `* text=auto`: what git writes of the diff has CRLF."""
    commit_all(checkout)
    before = snapshot(checkout)
    git_apply(checkout, diff_of(checkout))
    for path in (checkout / "python/sglang/sglang_overlay").rglob("*.py"):
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert run("status", "--json", checkout).data["state"] == "applied (no receipt)"
    assert run("revert", checkout).code == 0
    assert snapshot(checkout) == before


def test_apply_writes_the_missing_receipt(run, diff_of, checkout):
    commit_all(checkout)
    before = snapshot(checkout)
    git_apply(checkout, diff_of(checkout))
    patched = snapshot(checkout)
    assert run("apply", "--json", checkout).data["outcome"] == "applied"
    assert without_state(checkout) == patched
    assert run("status", "--json", checkout).data["state"] == "applied"
    assert run("revert", checkout).code == 0
    assert snapshot(checkout) == before


def test_without_originals_the_way_back_is_named(run, diff_of, package):
    """Neither a commit nor a fetched release: nothing is guessed."""
    git_apply(package, diff_of(package))
    shutil.rmtree(package / ".git")
    before = snapshot(package)
    status = run("status", "--json", package)
    assert (status.code, status.data["state"]) == (5, "partly applied")
    for command in ("revert", "apply", "diff"):
        result = run(command, package)
        assert result.code == 5 and "git apply -R" in result.err
    assert snapshot(package) == before


def test_an_edited_tree_without_a_receipt_is_not_taken_for_ours(run, diff_of, checkout):
    commit_all(checkout)
    git_apply(checkout, diff_of(checkout))
    comm = checkout / "python/sglang/srt/layers/comm.py"
    comm.write_text(comm.read_text() + "# mine\n")
    before = snapshot(checkout)
    assert run("revert", checkout).code == 5
    assert snapshot(checkout) == before
