"""Which base a tree is. C12 is here."""

from __future__ import annotations

import shutil

import pytest
import yaml

from conftest import NET, PACKAGE, commit_all, git, manifest, snapshot, write_tree

VERSION_FILE = '''from __future__ import annotations

__all__ = ["__version__"]

version: str
__version__: str

raise SystemExit("this file is read, not run")
__version__ = version = {version!r}
'''

NOT_THE_BASE = ["0.5.20rc1", "0.5.20.post1", "0.5.9", "0.5.21.dev3", "0.5.2", "", "unknown"]


@pytest.fixture
def unknown_contents(project):
    """Let the hashes say nothing, so that the other kinds of evidence are asked."""
    pins = {"srt/models/net.py": "1" * 64}
    (project.patches / "manifest.yml").write_text(yaml.safe_dump(manifest(pins)))


def refused(result, root, before) -> dict:
    assert result.code == 3
    assert snapshot(root) == before
    error = result.data["error"]
    assert error["expected"] == ["v0.5.20"] and "--try-base v0.5.20" in error["remedy"]
    return error["found"]


@pytest.mark.parametrize("version", ["0.5.20", "0.5.20+cu130"])
def test_c12_version_file_of_the_base(run, package, unknown_contents, version):
    write_tree(package, {"sglang/_version.py": VERSION_FILE.format(version=version)})
    result = run("apply", "--json", package)
    assert result.data["evidence"] == {"kind": "_version.py", "found": version}


@pytest.mark.parametrize("version", NOT_THE_BASE)
def test_c12_version_file_of_something_else(run, package, unknown_contents, version):
    write_tree(package, {"sglang/_version.py": VERSION_FILE.format(version=version)})
    found = refused(run("apply", "--json", package), package, snapshot(package))
    assert found == {"kind": "_version.py", "found": version}


@pytest.mark.parametrize("text", ["", "x = (", "__version__ = name()\n"])
def test_c12_version_file_without_a_version(run, package, unknown_contents, text):
    write_tree(package, {"sglang/_version.py": text})
    found = refused(run("apply", "--json", package), package, snapshot(package))
    assert found["kind"] == "_version.py"


def test_c12_no_evidence_at_all(run, package, unknown_contents):
    found = refused(run("apply", "--json", package), package, snapshot(package))
    assert found["kind"] == "no evidence"
    status = run("status", "--json", package)
    assert (status.code, status.data["state"]) == (3, "unsupported")


@pytest.mark.parametrize("version", ["0.5.20", "0.5.20+cu130", *NOT_THE_BASE])
def test_c12_package_metadata(run, package, unknown_contents, version):
    text = f"Metadata-Version: 2.4\nName: sglang\nVersion: {version}\n\nVersion: 0.5.20\n"
    write_tree(package, {"sglang-0.dist-info/METADATA": text})
    result = run("apply", "--json", package)
    if version.startswith("0.5.20") and version not in NOT_THE_BASE:
        assert result.data["evidence"] == {"kind": "package metadata", "found": version}
    else:
        assert refused(result, package, snapshot(package))["found"] == version


def test_c12_two_metadata_folders_decide_nothing(run, package, unknown_contents):
    for version in ("0.5.19", "0.5.20"):
        write_tree(package, {f"sglang-{version}.dist-info/METADATA": f"Name: sglang\nVersion: {version}\n"})
    found = refused(run("apply", "--json", package), package, snapshot(package))
    assert found["found"] == "0.5.19 and 0.5.20"


@pytest.mark.parametrize("tag", ["v0.5.20", "v0.5.20+cu130"])
def test_c12_tag_of_the_base(run, checkout, unknown_contents, tag):
    commit_all(checkout, tag=tag)
    assert run("apply", "--json", checkout).data["evidence"] == {"kind": "git tag", "found": tag}


@pytest.mark.parametrize("tag", ["v0.5.20rc1", "v0.5.20.post1", "v0.5.9", "v0.5.19"])
def test_c12_tag_of_something_else(run, checkout, unknown_contents, tag):
    """The tag decides, also against a version file that was left over from an older build."""
    write_tree(checkout, {"python/sglang/_version.py": VERSION_FILE.format(version="0.5.20")})
    commit_all(checkout, tag=tag)
    found = refused(run("apply", "--json", checkout), checkout, snapshot(checkout))
    assert found == {"kind": "git tag", "found": tag}


def test_c12_commits_after_the_tag_are_not_the_release(run, checkout, unknown_contents):
    commit_all(checkout, tag="v0.5.20")
    git(checkout, "commit", "-q", "--allow-empty", "-m", "one")
    git(checkout, "commit", "-q", "--allow-empty", "-m", "two")
    found = refused(run("apply", "--json", checkout), checkout, snapshot(checkout))
    assert found == {"kind": "git tag", "found": "v0.5.20 and 2 commits since"}


def test_c12_a_shallow_checkout_without_tags_is_known_by_its_contents(run, checkout, tmp_path):
    commit_all(checkout, tag="v0.5.9")
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "-q", "--depth", "1", "--no-tags", f"file://{checkout}", str(shallow))
    assert run("apply", "--json", shallow).data["evidence"]["kind"] == "sha256"


def test_c12_a_shallow_checkout_without_tags_of_something_else(run, checkout, tmp_path, unknown_contents):
    commit_all(checkout)
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "-q", "--depth", "1", "--no-tags", f"file://{checkout}", str(shallow))
    found = refused(run("apply", "--json", shallow), shallow, snapshot(shallow))
    assert found["kind"] == "no evidence"


def test_c12_a_tree_inside_another_repository_has_not_that_ones_tags(run, checkout, unknown_contents):
    outer = checkout.parent
    commit_all(checkout)
    shutil.rmtree(checkout / ".git")
    git(outer, "init", "-q")
    git(outer, "commit", "-q", "--allow-empty", "-m", "outer")
    git(outer, "tag", "v0.5.20")
    found = refused(run("apply", "--json", checkout), checkout, snapshot(checkout))
    assert found["kind"] == "no evidence"


def test_c12_git_settings_of_another_repository_do_not_reach_in(run, checkout, unknown_contents, monkeypatch):
    other = checkout.parent / "other"
    write_tree(other, {"a": "a"})
    commit_all(other, tag="v0.5.20")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert refused(run("apply", "--json", checkout), checkout, snapshot(checkout))["kind"] == "no evidence"


def test_some_known_files_are_not_enough(run, package):
    """A neighbouring release shares many files with the base."""
    net = package / "sglang/srt/models/net.py"
    net.write_text(NET + "\nOTHER = 1\n")
    assert refused(run("apply", "--json", package), package, snapshot(package))["kind"] == "no evidence"


def test_a_base_without_pinned_files_is_not_known_by_contents(run, package, project):
    (project.patches / "manifest.yml").write_text(yaml.safe_dump(manifest({})))
    assert run("apply", package).code == 3


def test_contents_are_compared_with_lf_line_ends(run, package):
    for name in ("srt/models/net.py", "srt/layers/comm.py"):
        path = package / "sglang" / name
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert run("apply", "--json", package).data["evidence"]["kind"] == "sha256"


def test_an_applied_tree_is_known_by_its_originals(run, package):
    assert run("apply", package, "--feature", "alpha").code == 0
    again = run("apply", package, "--json")
    assert (again.data["base"], again.data["evidence"]["kind"]) == ("v0.5.20", "sha256")


def test_try_base_reports_edit_by_edit(run, package, unknown_contents):
    told = run("apply", package, "--try-base", "v0.5.20")
    assert told.code == 0
    for edit in ("net-experts#1", "comm-prepare#1", "net-close#1"):
        assert edit in told.out
    assert "nothing of this was ever run" in told.out
    data = run("apply", package, "--try-base", "0.5.20", "--json").data
    assert data["outcome"] == "nothing to do" and data["tried"]
    assert run("apply", package, "--try-base", "v9").code == 2


def test_a_base_is_added_by_files_only(run, package, project, tmp_path):
    """Two bases: each tree gets the patches of its own."""
    rows = manifest()
    newer = {**rows["bases"]["v0.5.20"], "version": "0.5.23", "files": {"srt/models/net.py": "2" * 64}}
    rows["bases"]["v0.5.23"] = newer
    (project.patches / "manifest.yml").write_text(yaml.safe_dump(rows))
    shutil.copytree(project.patches / "v0.5.20", project.patches / "v0.5.23")
    (project.patches / "v0.5.23/comm-prepare.yml").unlink()
    other = tmp_path / "other"
    write_tree(other / "sglang", {**PACKAGE, "_version.py": "version = '0.5.23'\n"})
    (other / "sglang/srt/layers/comm.py").unlink()
    assert run("apply", "--json", other).data["base"] == "v0.5.23"
    assert run("apply", "--json", package).data["base"] == "v0.5.20"


def test_bases_share_a_patch_by_a_symbolic_link(run, package, project, tmp_path):
    """What fits two bases unchanged is written once."""
    rows = manifest()
    rows["bases"]["v0.5.23"] = {**rows["bases"]["v0.5.20"], "version": "0.5.23", "files": {"srt/models/net.py": "2" * 64}}
    (project.patches / "manifest.yml").write_text(yaml.safe_dump(rows))
    (project.patches / "v0.5.23").mkdir()
    (project.patches / "v0.5.23/net-experts.yml").symlink_to("../v0.5.20/net-experts.yml")
    other = tmp_path / "other"
    write_tree(other / "sglang", {**PACKAGE, "_version.py": "version = '0.5.23'\n"})
    (other / "sglang/srt/layers/comm.py").unlink()
    before = snapshot(other)
    result = run("apply", "--json", other).data
    assert (result["base"], [patch["id"] for patch in result["patches"]]) == ("v0.5.23", ["net-experts"])
    assert run("revert", "--json", other).code == 0 and snapshot(other) == before


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir(), lambda p: write_tree(p, {"sglang/x": ""})])
def test_not_an_sglang_tree(run, tmp_path, make):
    place = tmp_path / "place"
    make(place)
    for command in ("apply", "status", "revert", "diff"):
        result = run(command, place)
        assert result.code == 3 and "not an SGLang tree" in result.err and "what to do" in result.err
