"""The repository's own patches on each base's pinned release itself (fetched once, kept in build/)."""

from __future__ import annotations

import re
import shutil
import subprocess
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from conftest import REPOSITORY, commit_all, git, perform, snapshot, without_state
from overlay_apply import cli
from overlay_apply.bases import load_manifest
from overlay_apply.commands import Request, unified_diff
from overlay_apply.fetch import fetch_wheel
from overlay_apply.fs import Fs
from overlay_apply.project import Project

REAL = Project(REPOSITORY)
BASES = load_manifest(REAL.patches).bases
each_base = pytest.mark.parametrize("base", BASES, ids=lambda base: base.name)
each_file = pytest.mark.parametrize(
    "base, file", [pytest.param(base, file, id=f"{base.name}-{file}") for base in BASES for file in sorted(base.files)]
)


@pytest.fixture
def wheel(base):
    return fetch_wheel(REAL, base.release)


@pytest.fixture
def release(wheel, tmp_path):
    """The release as an install folder has it: all of it."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "install")
    return tmp_path / "install"


@pytest.fixture
def repository(base, wheel, tmp_path):
    """A git checkout with those files of the release that matter here."""
    root = tmp_path / "checkout"
    with zipfile.ZipFile(wheel) as archive:
        for name in ("__init__.py", *base.files):
            place = root / "python/sglang" / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(archive.read(f"sglang/{name}"))
    commit_all(root)
    return root


@each_base
def test_every_patch_fits_the_release(base, capfd):
    code = cli.run(["check", "--base", base.name, "--json"], REAL)
    assert code == 0, capfd.readouterr().out


@each_base
def test_pins_are_the_releases_own(base, wheel):
    """The manifest's `pins`, which status compares with, are what the release's metadata asks for."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"sglang-{base.version}.dist-info/METADATA").decode().split("\n\n", 1)[0]
    asked = [Requirement(value) for value in re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)]
    found = {canonicalize_name(each.name): str(each.specifier) for each in asked if each.marker is None}
    assert base.pins and dict(base.pins) == {name: found[name] for name in base.pins}


@each_base
def test_apply_then_revert_gives_the_release_back(base, release):
    before = snapshot(release)
    result = perform(REAL, "apply", release)
    assert result["ok"] and (result["base"], result["evidence"]["kind"]) == (base.name, "sha256")
    assert {entry["file"] for entry in result["files"] if entry["kind"] == "patched"}
    assert perform(REAL, "status", release)["state"] == "applied"
    assert perform(REAL, "revert", release)["ok"]
    assert snapshot(release) == before


@each_base
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


@each_file
def test_c14_a_users_own_edit_in_each_file(repository, file):
    path = repository / "python/sglang" / file
    path.write_bytes(path.read_bytes() + b"\n\ndef mine():\n    return 1\n")
    before = snapshot(repository)
    assert perform(REAL, "apply", repository)["evidence"]["kind"] == "sha256 at HEAD"
    assert path.read_bytes().endswith(b"\n\ndef mine():\n    return 1\n")
    assert perform(REAL, "revert", repository)["ok"]
    assert snapshot(repository) == before


@each_file
def test_c13_an_empty_file_where_an_edit_belongs(repository, file):
    (repository / "python/sglang" / file).write_bytes(b"")
    before = snapshot(repository)
    result = perform(REAL, "apply", repository)
    assert result["exit_code"] == 4 and result["error"]["file"] == file
    assert (result["error"]["found"], snapshot(repository)) == (0, before)


@each_base
def test_every_line_end_style_gives_the_same_code(base, repository):
    """A checkout with CRLF line ends gets the same edits."""
    assert perform(REAL, "apply", repository)["ok"]
    plain = {file: (repository / "python/sglang" / file).read_bytes() for file in base.files}
    assert perform(REAL, "revert", repository)["ok"]
    for file in base.files:
        path = repository / "python/sglang" / file
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert perform(REAL, "apply", repository)["ok"]
    for file, data in plain.items():
        assert (repository / "python/sglang" / file).read_bytes() == data.replace(b"\n", b"\r\n")
