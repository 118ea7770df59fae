"""The repository's own patches on the pinned release itself (fetched once, kept in build/)."""

from __future__ import annotations

import shutil
import subprocess
import zipfile

import pytest

from conftest import REPOSITORY, commit_all, git, perform, snapshot, without_state
from overlay_apply import cli
from overlay_apply.bases import load_manifest
from overlay_apply.commands import Request, unified_diff
from overlay_apply.fetch import fetch_wheel
from overlay_apply.fs import Fs
from overlay_apply.project import Project

REAL = Project(REPOSITORY)
BASE = load_manifest(REAL.patches).base("v0.5.20")


@pytest.fixture(scope="session")
def wheel():
    return fetch_wheel(REAL, BASE.release)


@pytest.fixture
def release(wheel, tmp_path):
    """The release as an install folder has it: all of it."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "install")
    return tmp_path / "install"


@pytest.fixture
def repository(wheel, tmp_path):
    """A git checkout with those files of the release that matter here."""
    root = tmp_path / "checkout"
    with zipfile.ZipFile(wheel) as archive:
        for name in ("__init__.py", *BASE.files):
            place = root / "python/sglang" / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(archive.read(f"sglang/{name}"))
    commit_all(root)
    return root


def test_every_patch_fits_the_release(capfd):
    code = cli.run(["check", "--base", "v0.5.20", "--json"], REAL)
    assert code == 0, capfd.readouterr().out


def test_apply_then_revert_gives_the_release_back(release):
    before = snapshot(release)
    result = perform(REAL, "apply", release)
    assert result["ok"] and result["evidence"]["kind"] == "sha256"
    assert {entry["file"] for entry in result["files"] if entry["kind"] == "patched"}
    assert perform(REAL, "status", release)["state"] == "applied"
    assert perform(REAL, "revert", release)["ok"]
    assert snapshot(release) == before


def test_the_diff_gives_git_apply_the_same_tree(repository, tmp_path):
    second = tmp_path / "second"
    shutil.copytree(repository, second)
    text = unified_diff(Request(REAL, Fs(), repository))
    subprocess.run(["git", "-C", str(second), "apply", "-"], input=text, check=True)
    assert perform(REAL, "apply", repository)["ok"]
    assert snapshot(second) == without_state(repository)
    assert perform(REAL, "status", second)["state"] == "applied (no receipt)"
    for tree in (repository, second):
        assert perform(REAL, "revert", tree)["ok"]
        assert git(tree, "status", "--short", "--ignored") == ""


@pytest.mark.parametrize("file", sorted(BASE.files))
def test_c14_a_users_own_edit_in_each_file(repository, file):
    path = repository / "python/sglang" / file
    path.write_bytes(path.read_bytes() + b"\n\ndef mine():\n    return 1\n")
    before = snapshot(repository)
    assert perform(REAL, "apply", repository)["evidence"]["kind"] == "sha256 at HEAD"
    assert path.read_bytes().endswith(b"\n\ndef mine():\n    return 1\n")
    assert perform(REAL, "revert", repository)["ok"]
    assert snapshot(repository) == before


@pytest.mark.parametrize("file", sorted(BASE.files))
def test_c13_an_empty_file_where_an_edit_belongs(repository, file):
    (repository / "python/sglang" / file).write_bytes(b"")
    before = snapshot(repository)
    result = perform(REAL, "apply", repository)
    assert result["exit_code"] == 4 and result["error"]["file"] == file
    assert (result["error"]["found"], snapshot(repository)) == (0, before)


def test_every_line_end_style_gives_the_same_code(repository):
    """A checkout with CRLF line ends gets the same edits."""
    assert perform(REAL, "apply", repository)["ok"]
    plain = {file: (repository / "python/sglang" / file).read_bytes() for file in BASE.files}
    assert perform(REAL, "revert", repository)["ok"]
    for file in BASE.files:
        path = repository / "python/sglang" / file
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert perform(REAL, "apply", repository)["ok"]
    for file, data in plain.items():
        assert (repository / "python/sglang" / file).read_bytes() == data.replace(b"\n", b"\r\n")
