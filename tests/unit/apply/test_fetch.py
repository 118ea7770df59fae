"""Fetching a pinned release: what is kept, what is not trusted. No network: pip is replaced."""

from __future__ import annotations

import io
import shutil
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from conftest import PACKAGE, manifest, snapshot, write_tree
from overlay_apply import fetch
from overlay_apply.fs import sha256


def wheel_bytes(version: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, text in {**PACKAGE, "_version.py": f"version = {version!r}\n"}.items():
            archive.writestr(f"sglang/{name}", text)
        archive.writestr(f"sglang-{version}.dist-info/METADATA", f"Version: {version}\n")
    return stream.getvalue()


class Index:
    """Stands for pip and whatever index it is set up with."""

    def __init__(self):
        self.wheels, self.commands, self.answer = {}, [], None

    def run(self, command, **options):
        self.commands.append(command)
        place = Path(command[command.index("--dest") + 1])
        asked = Path(command[command.index("--requirement") + 1]).read_text()
        if self.answer is not None:
            return subprocess.CompletedProcess(command, 1, "", self.answer)
        for name, data in self.wheels.items():
            if name.split("-")[1] == asked.split("==")[1].split()[0]:
                (place / name).write_bytes(data)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def index(project, monkeypatch):
    """An index with 0.5.20 (the base) and its neighbour 0.5.19."""
    index = Index()
    rows = manifest()
    for version in ("0.5.20", "0.5.19"):
        data = wheel_bytes(version)
        index.wheels[f"sglang-{version}-any.whl"] = data
        row = {"file": f"sglang-{version}-any.whl", "sha256": sha256(data), "python": "3.11", "platform": "any"}
        if version == "0.5.20":
            rows["bases"]["v0.5.20"]["release"] = row
        else:
            rows["neighbours"][version] = row
    (project.patches / "manifest.yml").write_text(yaml.safe_dump(rows))
    monkeypatch.setattr(fetch, "subprocess", SimpleNamespace(run=index.run))
    return index


def test_no_target_means_the_pinned_release(run, project, index):
    place = project.build / "sglang-0.5.20"
    assert run("status").code == 3
    result = run("apply", "--json")
    assert result.code == 0 and result.data["target"] == str(place)
    assert run("status", "--json").data["state"] == "applied"
    assert run("diff").out.startswith("diff --git a/sglang/")
    assert run("revert").code == 0
    assert {path.name for path in project.build.iterdir()} == {"sglang-0.5.20", "sglang-0.5.20-any.whl"}
    assert {name for name in snapshot(place / "sglang") if name.endswith(".py")} == {*PACKAGE, "_version.py"}
    assert len(index.commands) == 1


def test_pip_is_asked_for_one_hashed_wheel_from_nowhere_in_particular(run, index):
    run("apply")
    command = index.commands[0]
    for word in ("download", "--no-deps", "--only-binary", ":all:", "--require-hashes", "--python-version"):
        assert word in command
    assert not [word for word in command if "index" in word or "://" in word]


def test_a_kept_wheel_is_not_fetched_again(run, project, index):
    run("apply")
    shutil.rmtree(project.build / "sglang-0.5.20")
    assert run("apply").code == 0
    assert len(index.commands) == 1


def test_a_corrupt_kept_wheel_is_fetched_again(run, project, index):
    run("apply")
    shutil.rmtree(project.build / "sglang-0.5.20")
    (project.build / "sglang-0.5.20-any.whl").write_bytes(b"half of it")
    assert run("apply").code == 0
    assert len(index.commands) == 2


def test_a_download_that_is_not_the_pinned_file(run, project, index):
    index.wheels["sglang-0.5.20-any.whl"] += b"more"
    result = run("apply", "--json")
    assert result.code == 6 and "not the pinned file" in result.data["error"]["message"]
    assert list(project.build.iterdir()) == []


def test_a_download_that_fails(run, project, index):
    index.answer = "noise\nERROR: no such version\n\n"
    result = run("apply", "--json")
    assert result.code == 6 and "ERROR: no such version" in result.data["error"]["message"]
    assert list(project.build.iterdir()) == []


def test_an_unpacking_that_fails_leaves_nothing_half(run, project, index, monkeypatch):
    def fails(archive, place):
        write_tree(place, {"sglang/__init__.py": ""})
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "extractall", fails)
    assert run("apply").code == 6
    assert [path.name for path in project.build.iterdir()] == ["sglang-0.5.20-any.whl"]


def test_base_and_target_together_are_a_usage_error(run, package):
    assert run("apply", package, "--base", "v0.5.20").code == 2
    assert run("apply", "--base", "v9").code == 2


def test_check_passes_on_the_pinned_release(run, index):
    result = run("check", "--neighbours", "--json")
    assert result.code == 0 and result.data["problems"] == []
    rows = {(row["release"], row["edit"]): row["fits"] for row in result.data["edits"]}
    edits = ("net-experts#1", "comm-prepare#1", "net-close#1")
    assert rows == {(release, edit): True for release in ("0.5.20", "0.5.19") for edit in edits}
    assert "all patches fit" in run("check").out


def test_check_names_an_edit_that_does_not_fit(run, project, index):
    patch = project.patches / "v0.5.20/net-close.yml"
    patch.write_text(patch.read_text().replace("matches: 1", "matches: 2"))
    result = run("check", "--json")
    assert result.code == 4
    assert [(p["patch"], p["expected"], p["found"]) for p in result.data["problems"]] == [("net-close", 2, 1)]


def test_check_names_a_wrong_or_missing_pin_and_tells_the_right_one(run, project, index):
    path = project.patches / "manifest.yml"
    rows = yaml.safe_load(path.read_text())
    files = rows["bases"]["v0.5.20"]["files"]
    right = dict(files)
    files["srt/models/net.py"] = "3" * 64
    del files["srt/layers/comm.py"]
    path.write_text(yaml.safe_dump(rows))
    result = run("check", "--json")
    assert result.code == 4
    assert {p["file"]: p["found"] for p in result.data["problems"]} == right


def test_check_names_a_patch_that_no_base_has(run, project, index):
    series = project.patches / "series"
    series.write_text(series.read_text() + "nobodys\n")
    result = run("check", "--json")
    assert result.code == 4 and result.data["problems"][0]["patch"] == "nobodys"


def test_check_names_a_patch_that_its_own_base_retires(run, project, index):
    patch = project.patches / "v0.5.20/net-close.yml"
    patch.write_text(patch.read_text().replace("close_all", "prepare"))
    result = run("check", "--json")
    assert result.code == 4 and result.data["problems"][0]["found"] == "upstream has it"


def test_check_names_a_fix_that_does_not_compile(run, project, index):
    patch = project.patches / "v0.5.20/net-close.yml"
    patch.write_text(patch.read_text().replace("closing(self,", "closing(self,,"))
    assert run("check").code == 4


def test_check_on_a_tree(run, package, index):
    assert run("check", package).code == 0
    before = snapshot(package)
    (package / "sglang/srt/models/net.py").write_text("")
    result = run("check", package, "--try-base", "v0.5.20", "--json")
    assert result.code == 4 and len(result.data["problems"]) == 2
    (package / "sglang/srt/models/net.py").write_text(PACKAGE["srt/models/net.py"])
    assert snapshot(package) == before


def test_neighbours_that_do_not_fit_are_only_reported(run, project, index):
    path = project.patches / "manifest.yml"
    rows = yaml.safe_load(path.read_text())
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("sglang/__init__.py", "")
    index.wheels["sglang-0.5.19-any.whl"] = stream.getvalue()
    rows["neighbours"]["0.5.19"]["sha256"] = sha256(stream.getvalue())
    path.write_text(yaml.safe_dump(rows))
    result = run("check", "--neighbours", "--json")
    assert result.code == 0
    assert {row["found"] for row in result.data["edits"] if row["release"] == "0.5.19"} == {None}
    assert "no such file" in run("check", "--neighbours").out


def test_a_tree_patched_without_a_receipt_is_known_by_a_fetched_release(run, package, index):
    text = run("diff", package).out
    run("apply")
    before = snapshot(package)
    subprocess.run(["git", "-C", str(package), "apply", "-"], input=text, text=True, check=True)
    assert run("status", "--json", package).data["state"] == "applied (no receipt)"
    assert run("revert", package).code == 0
    assert snapshot(package) == before


@pytest.fixture
def older_base(project, index):
    """v0.5.19 as a second base, that shares one patch and has no other; returns the patch it lacks a file for."""
    path = project.patches / "manifest.yml"
    rows = yaml.safe_load(path.read_text())
    release = rows["neighbours"].pop("0.5.19")
    rows["bases"]["v0.5.19"] = {"version": "0.5.19", "release": release, "files": {}}
    path.write_text(yaml.safe_dump(rows))
    (project.patches / "v0.5.19").mkdir()
    (project.patches / "v0.5.19/net-experts.yml").symlink_to("../v0.5.20/net-experts.yml")
    return project.patches / "v0.5.20/net-close.yml"


def states(result):
    return {row["patch"]: row["bases"] for row in result.data["patches"]}


def test_features_says_what_is_ours_on_each_base(run, older_base):
    result = run("features", "--json")
    assert result.code == 0 and result.data["bases"] == ["v0.5.19", "v0.5.20"]
    assert states(result)["net-experts"] == {"v0.5.19": "ours", "v0.5.20": "ours"}
    assert states(result)["net-close"] == {"v0.5.19": "not here", "v0.5.20": "ours"}
    told = run("features")
    assert told.code == 0 and "net-close" in told.out and "not here" in told.out


def test_features_asks_the_probe_of_another_bases_patch(run, older_base):
    """A base without a file for a patch may lack it because upstream has it there."""
    older_base.write_text(older_base.read_text().replace("close_all", "prepare"))
    assert states(run("features", "--json"))["net-close"] == {"v0.5.19": "upstream has it", "v0.5.20": "upstream has it"}


def test_features_of_one_base(run, older_base):
    assert states(run("features", "--base", "v0.5.19", "--json"))["net-experts"] == {"v0.5.19": "ours"}
    assert run("features", "--base", "v9").code == 2
