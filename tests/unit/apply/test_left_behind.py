"""Trees that lost a part of the overlay by other hands, and state folders that were damaged: said, never taken for clean."""

from __future__ import annotations

import json
import shutil

import pytest

from conftest import snapshot

NET_FILE = "sglang/srt/models/net.py"


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
    (package / NET_FILE).write_text((package / NET_FILE).read_text() + "# mine\n")
    assert run("revert", package, "--keep-edited").code == 0
    status = run("status", package, "--json")
    assert (status.code, status.data["state"]) == (5, "partly applied")


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
