"""apply, status and revert on a package and on a checkout. C13 and C14 are here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from conftest import COMM, NET, OVERLAY, PATCHES, REGISTERED, REPOSITORY, commit_all, git, snapshot, write_tree

PATCHED_NET = '''"""A model."""

from __future__ import annotations

from sglang.sglang_overlay.srt.net import route
from sglang.sglang_overlay.srt.net import closing
import os


class Net:
    def forward(self, x):
        if x is None:
            return route(self)(os.name)
        return route(self)(x)

    def stop(self, first, *rest):
        return closing(self, first, *rest)
'''

PATCHED_COMM = '''from sglang.sglang_overlay.srt.net import is_bundle, take
import os


class Comm:
    def prepare(self, hidden):
        if is_bundle(hidden):
            return take(self, hidden)
        if self.variant is not None:
            return os.name
        return hidden
'''


def test_apply_status_revert_on_a_package(run, package):
    before = snapshot(package)
    assert run("status", "--json", package).data["state"] == "clean"
    result = run("apply", "--json", package)
    assert result.code == 0 and result.data["outcome"] == "applied"
    assert (package / "sglang/srt/models/net.py").read_text() == PATCHED_NET
    assert (package / "sglang/srt/layers/comm.py").read_text() == PATCHED_COMM
    own = package / "sglang/sglang_overlay"
    assert {str(p.relative_to(own)) for p in own.rglob("*") if p.is_file()} == set(OVERLAY)
    assert not (package / "test").exists()
    status = run("status", "--json", package).data
    assert (status["state"], status["base"]) == ("applied", "v0.5.20")
    assert status["evidence"] == {"kind": "sha256", "found": "2 files of v0.5.20"}
    assert status["features"] == {"in": ["alpha", "beta"], "out": []}
    assert run("revert", package).code == 0
    assert snapshot(package) == before


@pytest.mark.parametrize("below", ["sglang", "."])
def test_every_way_to_name_a_package(run, package, below):
    assert run("apply", "--json", package / below).data["target"] == str(package)
    assert run("status", package).code == 0


@pytest.mark.parametrize("below", [".", "python", "python/sglang"])
def test_a_checkout_gets_the_registered_tests(run, checkout, below):
    before = snapshot(checkout)
    assert run("apply", checkout / below).code == 0
    laid = checkout / "test/registered"
    found = {str(path.relative_to(laid)) for path in laid.rglob("*.py")}
    assert found == {*REGISTERED, "moe/test_theirs.py"}
    write_tree(laid, {"moe/__pycache__/test_overlay_net.cpython-311-pytest-9.pyc": b"x"})
    assert run("revert", checkout / below).code == 0
    assert snapshot(checkout) == before


def test_a_registered_test_comes_with_its_feature_alone(run, project, checkout):
    write_tree(project.registered, {"moe/test_alpha.py": "FEATURE = 'alpha'\n", "moe/test_beta.py": "FEATURE = 'beta'\n", "moe/data.txt": "FEATURE ="})
    laid = checkout / "test/registered/moe"
    for features, there in ((["alpha"], (True, False)), (["beta"], (False, True)), (["alpha", "beta"], (True, True))):
        assert run("apply", checkout, *(word for name in features for word in ("--feature", name))).code == 0
        assert tuple((laid / f"test_{name}.py").exists() for name in ("alpha", "beta")) == there and (laid / "data.txt").exists()
    before = snapshot(checkout)
    assert run("revert", checkout).code == 0 and not (laid / "test_alpha.py").exists() and run("apply", checkout).code == 0
    assert snapshot(checkout) == before


def test_registered_tests_go_with_the_directories_that_became_empty(run, checkout):
    (checkout / "test/registered/moe/test_theirs.py").unlink()
    (checkout / "test/registered/moe").rmdir()
    before = snapshot(checkout)
    assert run("apply", checkout).code == 0
    assert run("revert", checkout).code == 0
    assert snapshot(checkout) == before


def test_somebody_elses_file_of_the_same_name_is_kept(run, checkout):
    write_tree(checkout, {"test/registered/moe/test_overlay_net.py": "THEIRS = 1\n"})
    before = snapshot(checkout)
    result = run("apply", "--json", checkout)
    assert result.code == 5
    assert result.data["error"]["file"] == "test/registered/moe/test_overlay_net.py"
    assert snapshot(checkout) == before


def test_features_are_chosen_and_changed(run, package):
    before = snapshot(package)
    assert run("apply", package, "--feature", "beta").code == 0
    net = (package / "sglang/srt/models/net.py").read_text()
    assert "closing(self, first, *rest)" in net and "route" not in net
    assert (package / "sglang/srt/layers/comm.py").read_text() == COMM
    assert run("status", "--json", package).data["features"] == {"in": ["beta"], "out": ["alpha"]}
    assert run("apply", package, "--feature", "alpha", "--feature", "beta").code == 0
    assert (package / "sglang/srt/models/net.py").read_text() == PATCHED_NET
    assert run("apply", package, "--feature", "beta").code == 0
    assert (package / "sglang/srt/layers/comm.py").read_text() == COMM
    assert run("revert", package).code == 0
    assert snapshot(package) == before


def test_unknown_feature(run, package):
    result = run("apply", package, "--feature", "gamma", "--json")
    assert result.code == 2
    assert result.data["error"]["expected"] == ["alpha", "beta"]


def test_applied_already(run, package):
    assert run("apply", package).code == 0
    before = snapshot(package)
    result = run("apply", "--json", package)
    assert (result.code, result.data["outcome"]) == (0, "nothing to do")
    assert snapshot(package) == before


def test_nothing_to_revert(run, package):
    before = snapshot(package)
    result = run("revert", "--json", package)
    assert (result.code, result.data["outcome"]) == (0, "nothing to do")
    assert snapshot(package) == before


def test_dry_run_writes_nothing(run, package):
    before = snapshot(package)
    result = run("apply", "--dry-run", "--json", package)
    assert (result.code, result.data["outcome"]) == (0, "would apply")
    assert snapshot(package) == before


def test_a_newer_overlay_replaces_an_older_one(run, package, project):
    before = snapshot(package)
    assert run("apply", package).code == 0
    (project.overlay / "srt/net.py").unlink()
    write_tree(project.overlay, {"srt/deep/er/net.py": "route = 1\n", "srt/__init__.py": "NEW = 1\n"})
    patch = project.patches / "v0.5.20/net-close.yml"
    patch.write_text(patch.read_text().replace("closing", "closing_now"))
    assert run("apply", package).code == 0
    own = package / "sglang/sglang_overlay"
    assert not (own / "srt/net.py").exists() and (own / "srt/deep/er/net.py").exists()
    assert "closing_now(self" in (package / "sglang/srt/models/net.py").read_text()
    (project.overlay / "srt/deep/er/net.py").unlink()
    assert run("apply", package).code == 0
    assert not (own / "srt/deep").exists()
    assert run("revert", package).code == 0
    assert snapshot(package) == before


def test_upstream_has_it(run, package, project):
    comm = package / "sglang/srt/layers/comm.py"
    comm.write_text(COMM + "\n    def close_all(self):\n        pass\n")
    result = run("apply", package, "--try-base", "v0.5.20", "--json")
    assert result.code == 0
    outcomes = {patch["id"]: patch["outcome"] for patch in result.data["patches"]}
    assert outcomes == {
        "net-experts": "applied",
        "comm-prepare": "applied",
        "net-close": "upstream has it",
    }
    assert "self.close(" in (package / "sglang/srt/models/net.py").read_text()
    assert run("revert", package).code == 0
    before = snapshot(package)
    result = run("apply", package, "--try-base", "v0.5.20", "--feature", "beta", "--json")
    assert (result.code, result.data["outcome"]) == (0, "nothing to do")
    assert snapshot(package) == before


@pytest.mark.parametrize("times", [0, 2])
def test_c13_an_edit_matches_another_number_of_places(run, package, times):
    line = "        return self.close(first, *rest)\n"
    assert line in NET
    net = package / "sglang/srt/models/net.py"
    net.write_text(NET.replace(line, line * times or "        pass\n"))
    before = snapshot(package)
    result = run("apply", package, "--try-base", "v0.5.20", "--json")
    assert result.code == 4
    error = result.data["error"]
    assert (error["patch"], error["file"]) == ("net-close", "srt/models/net.py")
    assert (error["expected"], error["found"]) == (1, times) and error["remedy"]
    fits = {edit["edit"]: edit["fits"] for edit in error["details"]}
    assert fits == {"net-experts#1": True, "comm-prepare#1": True, "net-close#1": False}
    assert snapshot(package) == before
    told = run("apply", package, "--try-base", "v0.5.20")
    for word in ("net-close", "srt/models/net.py", "expected: 1", f"found: {times}", "what to do"):
        assert word in told.err


def test_c13_a_file_to_patch_is_gone(run, package):
    (package / "sglang/srt/layers/comm.py").unlink()
    before = snapshot(package)
    result = run("apply", package, "--try-base", "v0.5.20", "--json")
    assert result.code == 4 and result.data["error"]["found"] == "no such file"
    assert snapshot(package) == before


def test_c13_a_read_only_file(run, package):
    comm = package / "sglang/srt/layers/comm.py"
    comm.chmod(0o444)
    before = snapshot(package)
    result = run("apply", "--json", package)
    assert result.code == 6
    assert result.data["error"]["file"] == "sglang/srt/layers/comm.py"
    assert "chmod u+w" in result.data["error"]["remedy"]
    assert snapshot(package) == before


def test_c13_a_read_only_folder(run, package):
    folder = package / "sglang/srt/layers"
    folder.chmod(0o555)
    before = snapshot(package)
    result = run("apply", "--json", package)
    folder.chmod(0o755)
    assert result.code == 6 and result.data["error"]["file"] == "sglang/srt/layers"
    folder.chmod(0o555)
    assert snapshot(package) == before
    folder.chmod(0o755)


def test_c13_read_only_at_revert(run, package):
    assert run("apply", package).code == 0
    comm = package / "sglang/srt/layers/comm.py"
    comm.chmod(0o444)
    before = snapshot(package)
    assert run("revert", package).code == 6
    assert snapshot(package) == before
    comm.chmod(0o644)
    assert run("revert", package).code == 0


def test_c14_a_users_own_edit_before_apply_survives_both(run, checkout):
    commit_all(checkout)
    comm = checkout / "python/sglang/srt/layers/comm.py"
    mine = "\n\ndef mine():\n    return 1\n"
    comm.write_text(COMM + mine)
    before = snapshot(checkout)
    result = run("apply", "--json", checkout)
    assert result.code == 0 and result.data["evidence"]["kind"] == "sha256 at HEAD"
    assert comm.read_text() == PATCHED_COMM + mine
    assert run("revert", checkout).code == 0
    assert snapshot(checkout) == before
    assert git(checkout, "status", "--short") == " M python/sglang/srt/layers/comm.py\n"


def test_c14_a_committed_edit_on_the_tag(run, checkout):
    comm = checkout / "python/sglang/srt/layers/comm.py"
    comm.write_text(COMM + "\nMINE = 1\n")
    commit_all(checkout, tag="v0.5.20")
    before = snapshot(checkout)
    assert run("apply", "--json", checkout).data["evidence"] == {"kind": "git tag", "found": "v0.5.20"}
    assert comm.read_text() == PATCHED_COMM + "\nMINE = 1\n"
    assert run("revert", checkout).code == 0
    assert snapshot(checkout) == before


def test_the_state_folder_does_not_show_in_git(run, checkout):
    commit_all(checkout)
    assert run("apply", checkout).code == 0
    assert ".sglang_overlay_state" not in git(checkout, "status", "--short", "-uall")


def test_a_later_edit_is_not_discarded(run, package):
    assert run("apply", package).code == 0
    net = package / "sglang/srt/models/net.py"
    net.write_text(PATCHED_NET + "# mine\n")
    status = run("status", "--json", package)
    assert (status.code, status.data["state"]) == (5, "modified since")
    assert status.data["changed"] == [{"file": "sglang/srt/models/net.py", "now": "edited"}]
    before = snapshot(package)
    for command in ("revert", "apply", "diff"):
        result = run(command, package)
        assert result.code == 5
        assert "sglang/srt/models/net.py" in result.err and "--keep-edited" in result.err
        assert snapshot(package) == before


EDITED_NET = PATCHED_NET.replace("return route(self)(x)", "return route(self)(2 * x)")


def test_keep_edited_restores_all_the_rest(run, package):
    before = snapshot(package)
    assert run("apply", package).code == 0
    net = package / "sglang/srt/models/net.py"
    net.write_text(EDITED_NET)
    result = run("revert", "--keep-edited", package)
    assert result.code == 0 and "sglang/srt/models/net.py" in result.out
    assert net.read_text() == EDITED_NET
    net.write_text(NET)
    assert snapshot(package) == before


def test_keep_edited_after_an_upgrade_over_the_patched_tree(run, package):
    """An installer replaces the files it knows; ours and the state folder stay behind."""
    assert run("apply", package).code == 0
    newer = {"srt/models/net.py": "NEWER = 1\n", "srt/layers/comm.py": "NEWER = 2\n"}
    write_tree(package / "sglang", newer)
    assert run("revert", package).code == 5
    result = run("revert", "--keep-edited", "--json", package)
    assert result.data["left"] == ["sglang/srt/layers/comm.py", "sglang/srt/models/net.py"]
    assert not (package / "sglang/sglang_overlay").exists()
    assert not (package / "sglang/.sglang_overlay_state").exists()
    assert (package / "sglang/srt/models/net.py").read_text() == "NEWER = 1\n"


def test_a_file_somebody_restored_already_is_no_edit(run, package):
    before = snapshot(package)
    assert run("apply", package).code == 0
    (package / "sglang/srt/models/net.py").write_text(NET)
    (package / "sglang/sglang_overlay/srt/net.py").unlink()
    status = run("status", "--json", package)
    assert status.code == 5 and {entry["now"] for entry in status.data["changed"]} == {"as before apply"}
    assert run("apply", package).code == 0
    assert (package / "sglang/srt/models/net.py").read_text() == PATCHED_NET
    (package / "sglang/srt/models/net.py").write_text(NET)
    assert run("revert", package).code == 0
    assert snapshot(package) == before


def test_a_deleted_patched_file_is_named(run, package):
    assert run("apply", package).code == 0
    (package / "sglang/srt/models/net.py").unlink()
    status = run("status", "--json", package)
    assert status.data["changed"] == [{"file": "sglang/srt/models/net.py", "now": "missing"}]
    assert run("apply", package).code == 0 and (package / "sglang/srt/models/net.py").read_text() == PATCHED_NET


@pytest.mark.parametrize("options", [[], ["--keep-edited"]])
def test_a_deleted_patched_file_is_put_back(run, package, options):
    before = snapshot(package)
    assert run("apply", package).code == 0
    (package / "sglang/srt/models/net.py").unlink()
    assert run("revert", *options, package).code == 0
    assert snapshot(package) == before


def test_a_file_that_was_no_python_before_is_not_blamed_on_the_patch(run, package):
    net = package / "sglang/srt/models/net.py"
    net.write_text(net.read_text() + "def (\n")
    before = snapshot(package)
    error = run("apply", package, "--try-base", "v0.5.20", "--json").data["error"]
    assert "not valid Python as it is" in error["message"] and error["file"].endswith("net.py") and "mend it" in error["remedy"]
    assert snapshot(package) == before


def test_files_somebody_put_into_our_folder_stay(run, package):
    assert run("apply", package).code == 0
    write_tree(package, {"sglang/sglang_overlay/srt/notes.txt": "mine"})
    result = run("revert", package)
    assert result.code == 0 and "sglang/sglang_overlay/srt" in result.out
    left = [str(p.relative_to(package)) for p in (package / "sglang/sglang_overlay").rglob("*") if p.is_file()]
    assert left == ["sglang/sglang_overlay/srt/notes.txt"]
    assert run("apply", package).code == 0


def test_another_kind_of_tree_with_our_receipt(run, checkout, tmp_path):
    """The package folder of an applied checkout, copied elsewhere, is refused with a sentence."""
    assert run("apply", checkout).code == 0
    os.rename(checkout / "python", tmp_path / "moved")
    for command in ("status", "apply", "revert"):
        assert run(command, tmp_path / "moved").code == 5


def test_a_moved_checkout_is_still_known(run, checkout, tmp_path):
    before = snapshot(checkout)
    assert run("apply", checkout).code == 0
    moved = tmp_path / "elsewhere"
    os.rename(checkout, moved)
    assert run("status", moved).code == 0
    assert run("revert", moved).code == 0
    assert snapshot(moved) == before


def test_a_misspelt_flag_is_told(run, project, package, monkeypatch):
    shutil.copy(REPOSITORY / "sglang_overlay/srt/environ.py", project.overlay / "srt/environ.py")
    write_tree(package, {"sglang/srt/environ.py": "SGLANG_MOE_FINALIZE_FUSIONS = 1\n"})
    monkeypatch.setenv("SGLANG_MOE_FINALIZE_FUSON", "1")
    monkeypatch.setenv("SGLANG_MOE_FINALIZE_FUSIONS", "1")
    told = run("status", "--json", package)
    assert told.code == 0
    assert told.data["notes"] == ["SGLANG_MOE_FINALIZE_FUSON is set, and nothing reads it; the flag is SGLANG_MOE_FINALIZE_FUSION"]


def test_flags_are_shown_with_what_they_are_set_to(run, package, monkeypatch):
    monkeypatch.setenv("SGLANG_OVERLAY_TEST_FLAG", "1")
    flags = run("status", "--json", package).data["flags"]
    row = {"name": "SGLANG_OVERLAY_TEST_FLAG", "feature": "alpha", "default": "auto", "values": "0, 1"}
    assert flags == [{**row, "help": "A flag.", "set_to": "1", "refused": None}]
    told = run("status", package).out
    assert "SGLANG_OVERLAY_TEST_FLAG" in told


def test_status_without_a_flag_table(run, package, project):
    (project.overlay / "srt/environ.py").unlink()
    assert run("status", "--json", package).data["flags"] == []


def test_a_broken_overlay_file_is_not_laid(run, package, project):
    write_tree(project.overlay, {"srt/net.py": "def broken(:\n"})
    before = snapshot(package)
    result = run("apply", "--json", package)
    assert result.code == 4 and result.data["error"]["file"].endswith("srt/net.py")
    assert snapshot(package) == before


def test_a_fix_that_breaks_the_file_is_not_written(run, package, project):
    patch = project.patches / "v0.5.20/net-close.yml"
    patch.write_text(PATCHES["net-close"].replace("closing(self, $$$ARGS)", "closing(self,, $$$ARGS)"))
    before = snapshot(package)
    result = run("apply", "--json", package)
    assert result.code == 4 and "net-close#1" in result.data["error"]["patch"]
    assert snapshot(package) == before


def test_a_terminal_without_the_letters_of_a_path_is_no_failure(run, package, tmp_path):
    tree = tmp_path / "Größe 模型"
    shutil.copytree(package, tree)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, str(REPOSITORY / "apply.py"), "status", str(tree)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "Traceback" not in done.stderr and "Gr\\xf6\\xdfe" in done.stdout + done.stderr
