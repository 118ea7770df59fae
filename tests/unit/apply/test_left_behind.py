"""Trees that lost a part of the overlay by other hands, and state folders that were damaged: said, never taken for clean."""

from __future__ import annotations

import json
import shutil

import pytest
import yaml

from conftest import COMM, PACKAGE, commit_all, digest, git, manifest, snapshot, write_tree

NET_FILE, COMM_FILE = "sglang/srt/models/net.py", "sglang/srt/layers/comm.py"


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_patched_files_without_the_overlay_are_not_clean(run, package, command):
    assert run("apply", package).code == 0
    shutil.rmtree(package / "sglang" / "sglang_overlay")
    shutil.rmtree(package / "sglang" / ".sglang_overlay_state")
    (package / NET_FILE).write_text((package / NET_FILE).read_text() + "# edited, so that nothing can be worked out\n")
    before = snapshot(package)
    status = run("status", package, "--json")
    assert (status.code, status.data["state"]) == (5, "partly applied")
    failure = run(command, package, "--json")
    assert failure.code == 5 and NET_FILE in json.dumps(failure.data)
    assert snapshot(package) == before


def test_what_keep_edited_leaves_is_not_clean(run, package):
    assert run("apply", package).code == 0
    (package / NET_FILE).write_text((package / NET_FILE).read_text().replace("route(self)(x)", "route(self)(2 * x)"))
    assert run("revert", package, "--keep-edited").code == 0
    status = run("status", package, "--json")
    assert (status.code, status.data["state"]) == (5, "partly applied")
    for command in ("revert", "apply"):
        error = run(command, package, "--json").data["error"]
        assert error["file"] == NET_FILE and f"out of {NET_FILE}" in error["remedy"] and "reinstall sglang" in error["remedy"]
        assert "remove" not in error["remedy"]


NEWER = {"_version.py": "__version__ = '0.5.21'\n", "srt/models/net.py": "NEWER = 1\n", "srt/layers/comm.py": "NEWER = 2\n"}


@pytest.fixture
def upgraded(run, package):
    """A package that was upgraded with the overlay in it: ours and the state folder stay behind."""
    write_tree(package / "sglang", {"_version.py": "__version__ = '0.5.20'\n"})
    assert run("apply", package).code == 0
    write_tree(package / "sglang", NEWER)
    return package


def test_an_upgrade_is_told_as_one(run, upgraded):
    before = snapshot(upgraded)
    for command in ("apply", "revert", "diff"):
        result = run(command, upgraded)
        assert result.code == 5 and "SGLang was replaced by 0.5.21 since" in result.err
        assert "revert --keep-edited" in result.err and "then `apply` again" in result.err and "your edit" not in result.err
    status = run("status", upgraded, "--json")
    assert (status.code, status.data["state"]) == (5, "modified since") and "replaced by 0.5.21" in status.data["notes"][0]
    assert snapshot(upgraded) == before


def test_revert_leaves_the_new_release_and_takes_the_overlay_out(run, upgraded):
    (upgraded / "sglang/srt/layers/comm.py").unlink()
    result = run("revert", "--keep-edited", upgraded)
    assert result.code == 0 and "note: SGLang was replaced by 0.5.21 since" in result.out
    assert "your edits" not in result.out and "comm.py" not in result.out + result.err
    files = {**PACKAGE, **NEWER}
    del files["srt/layers/comm.py"]
    write_tree(upgraded.parent / "wanted" / "sglang", files)
    assert snapshot(upgraded) == snapshot(upgraded.parent / "wanted")


def test_an_upgrade_to_another_base_is_told_with_its_version(run, project, upgraded):
    data = manifest()
    data["bases"]["v0.5.23"] = {**data["bases"]["v0.5.20"], "version": "0.5.23"}
    data["bases"]["v0.5.23"]["files"] = {name: digest(text) for name, text in NEWER.items() if name.startswith("srt/")}
    write_tree(project.patches, {"manifest.yml": yaml.safe_dump(data)})
    assert "SGLang was replaced by 0.5.23 since" in run("revert", upgraded).err


def test_an_edited_overlay_file_is_left_after_an_upgrade(run, upgraded):
    ours = "sglang/sglang_overlay/srt/net.py"
    write_tree(upgraded, {ours: "MINE = 1\n"})
    answer = run("revert", "--keep-edited", upgraded, "--json")
    assert (answer.data["left"], answer.data["replaced_by"]) == ([ours], "0.5.21")


def test_an_edit_on_a_tried_base_is_no_upgrade(run, package):
    """The tree's version is not the receipt's base, and never was."""
    write_tree(package / "sglang", {"_version.py": "__version__ = '0.5.21'\n", "srt/layers/comm.py": COMM + "# of 0.5.21\n"})
    assert run("apply", package, "--try-base", "v0.5.20").code == 0
    (package / NET_FILE).write_text((package / NET_FILE).read_text().replace("route(self)(x)", "route(self)(2 * x)"))
    assert "a file of the overlay's was edited since" in run("revert", package).err
    assert run("revert", "--keep-edited", package, "--json").data["left"] == [NET_FILE]


def test_a_removed_file_is_not_said_to_be_left(run, package):
    assert run("apply", package).code == 0
    for file in (NET_FILE, COMM_FILE):
        (package / file).unlink()  # as an installer that takes SGLang out
    answer = run("revert", "--keep-edited", package, "--json")
    assert (answer.data["left"], answer.data["gone"]) == ([], [COMM_FILE, NET_FILE])
    assert answer.data["notes"][0].startswith(f"not put back, since it was removed: {COMM_FILE}")


@pytest.mark.parametrize("below", ["", "sglang"])
@pytest.mark.parametrize("command", ["status", "apply", "revert"])
def test_leftovers_after_sglang_was_uninstalled_are_told_as_such(run, package, command, below):
    assert run("apply", package).code == 0
    for name in ("srt", "__init__.py"):
        path = package / "sglang" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    error = run(command, package / below, "--json").data["error"]
    assert error["kind"] == "unsupported" and "leftovers of the overlay" in error["message"]
    assert error["remedy"] == f"delete {package / 'sglang'}; or reinstall the same version of sglang, and revert"


def test_leftovers_beside_other_files_are_named_one_by_one(run, package):
    assert run("apply", package).code == 0
    (package / "sglang/__init__.py").unlink()
    ours = [str(package / "sglang" / name) for name in ("sglang_overlay", ".sglang_overlay_state")]
    assert f"delete {' and '.join(ours)};" in run("revert", package).err
    shutil.rmtree(ours[1])
    assert "not an SGLang tree" in run("revert", package).err


@pytest.mark.parametrize("name", ["receipt.json", "journal.json"])
@pytest.mark.parametrize("text", ['{"format": 1}', '{"format": 1, "files": 5}', "[]", "3", '{"format": 99}'])
@pytest.mark.parametrize("command", ["status", "apply", "revert"])
def test_a_damaged_record_is_named(run, package, name, text, command):
    assert run("apply", package).code == 0
    record = package / "sglang" / ".sglang_overlay_state" / name
    record.write_text(text)
    failure = run(command, package, "--json")
    assert failure.code == 5
    assert failure.data["ok"] is False and name in json.dumps(failure.data["error"])


@pytest.mark.parametrize("field", ["base", "features", "patches", "evidence", "dirs", "prefix"])
def test_a_receipt_without_one_of_its_parts_is_named_and_can_be_done_without(run, checkout, field):
    git(checkout, "init", "-q")
    commit_all(checkout, "theirs")
    before = snapshot(checkout)
    assert run("apply", checkout).code == 0
    record = checkout / "python/sglang/.sglang_overlay_state/receipt.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), field: None}))
    for command in ("status", "revert"):
        error = run(command, checkout, "--json").data["error"]
        assert f"{field} is None" in error["message"] and error["remedy"].startswith("in a git checkout, remove that file and run again")
    record.unlink()
    assert run("revert", checkout).code == 0 and snapshot(checkout) == before
