"""Wrong patch data is named, with its file, before anything is touched."""

from __future__ import annotations

import pytest

from conftest import PATCHES, snapshot

GOOD = PATCHES["net-experts"]

WRONG = {
    "not yaml": "a: [",
    "a list": "- 1\n",
    "another id": GOOD.replace("id: net-experts", "id: other"),
    "no why": GOOD.replace("why: The experts are called through the overlay.\n", ""),
    "an empty why": GOOD.replace("The experts are called through the overlay.", "''"),
    "an unknown reason": GOOD.replace("hands-over", "because"),
    "an unknown key": GOOD + "extra: 1\n",
    "no edits": GOOD[: GOOD.index("edits:")] + "edits: []\n",
    "zero matches": GOOD.replace("matches: 2", "matches: 0"),
    "matches in words": GOOD.replace("matches: 2", "matches: two"),
    "no matches": GOOD.replace("    matches: 2\n", ""),
    "a path out of the package": GOOD.replace("srt/models/net.py", "../net.py"),
    "an absolute path": GOOD.replace("srt/models/net.py", "/net.py"),
    "a fix that is no text": GOOD.replace("fix: route(self)", "fix: 1"),
    "half an import": GOOD.replace("[from sglang", "[half, from sglang"),
    "an empty rule": GOOD.replace("      pattern: self.experts\n      inside: {kind: call, field: function}\n", ""),
    "a rule ast-grep does not take": GOOD.replace("kind: call", "kind: no_such_kind"),
    "an unknown key in an edit": GOOD.replace("    fix:", "    fux: 1\n    fix:"),
    "retire_when without a rule": GOOD + "retire_when: {file: srt/models/net.py}\n",
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_patch(what, run, project, package):
    assert WRONG[what] != GOOD
    (project.patches / "v0.5.20/net-experts.yml").write_text(WRONG[what])
    before = snapshot(package)
    result = run("apply", "--json", package)
    assert result.code == 4
    error = result.data["error"]
    assert error["kind"] == "patch-data"
    assert "net-experts" in error.get("patch", "") or "net-experts.yml" in error["file"]
    assert snapshot(package) == before


def test_a_probe_without_a_file_looks_at_the_first_edits(run, project, package):
    path = project.patches / "v0.5.20/net-experts.yml"
    path.write_text(GOOD + "retire_when: {rule: {pattern: self.close}}\n")
    result = run("apply", "--json", package)
    assert result.data["patches"][0]["outcome"] == "upstream has it"


def test_a_patch_that_is_not_in_the_series(run, project, package):
    (project.patches / "series").write_text("net-experts\ncomm-prepare\n")
    result = run("apply", "--json", package)
    assert result.code == 4 and result.data["error"]["patch"] == "net-close"


def test_a_patch_of_the_series_that_a_base_lacks_is_not_part_of_it(run, project, package):
    (project.patches / "v0.5.20/net-close.yml").unlink()
    result = run("apply", "--json", package)
    assert [patch["id"] for patch in result.data["patches"]] == ["net-experts", "comm-prepare"]
    assert result.data["features"] == {"in": ["alpha"], "out": []}


def test_twice_in_the_series(run, project, package):
    series = project.patches / "series"
    series.write_text(series.read_text() + "net-close\n")
    assert run("apply", package).code == 4


def test_no_patches_at_all_is_a_failure(run, project, package):
    for path in (project.patches / "v0.5.20").iterdir():
        path.unlink()
    before = snapshot(package)
    assert run("apply", package).code == 4
    assert snapshot(package) == before


@pytest.mark.parametrize(
    "text",
    ["", "bases: {}", "bases: {v1: {}}", "bases: {v1: {version: x, release: {}}}", "bases: ["],
)
def test_a_malformed_manifest(run, project, package, text):
    (project.patches / "manifest.yml").write_text(text)
    result = run("apply", "--json", package)
    assert result.code == 4 and result.data["error"]["file"].endswith("manifest.yml")


def test_a_pin_that_is_no_hash(run, project, package):
    path = project.patches / "manifest.yml"
    path.write_text(path.read_text().replace("srt/layers/comm.py: ", "srt/layers/comm.py: z"))
    assert run("apply", package).code == 4


def test_a_missing_overlay_package(run, project, package):
    (project.overlay / "__init__.py").unlink()
    assert run("apply", package).code == 4


def test_order_is_the_series(run, project, package):
    (project.patches / "series").write_text("net-close\nnet-experts\ncomm-prepare\n")
    assert run("apply", package).code == 0
    text = (package / "sglang/srt/models/net.py").read_text()
    assert text.index("import closing") < text.index("import route")
