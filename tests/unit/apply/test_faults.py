"""Stop the tool at every single step it takes on disk, and let every step be refused once.

After each of these the tree is as it was before, or `revert` makes it so, and so does the next `apply`.
"""

from __future__ import annotations

import errno
import functools
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from conftest import PACKAGE, perform, snapshot, without_state, write_tree
from overlay_apply import bases, fs, patches
from overlay_apply.fs import Fs

KILLED = 99


class Steps:
    """Counts the steps of a command; acts at the n-th (or from the n-th on)."""

    def __init__(self, act=None, at=None, on_all_later=False):
        self.count, self.act, self.at, self.on_all_later = 0, act, at, on_all_later

    def __call__(self, operation, path):
        self.count += 1
        if self.act and (self.count == self.at or (self.on_all_later and self.count > self.at)):
            self.act(operation, path)


def die(operation, path):
    os._exit(KILLED)


def refuse(operation, path):
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


@pytest.fixture(autouse=True)
def read_patch_data_once(monkeypatch):
    """The thousands of commands here all read the same few files."""
    once = functools.lru_cache(patches.load_yaml)
    monkeypatch.setattr(patches, "load_yaml", once)
    monkeypatch.setattr(bases, "load_yaml", once)


FAR_OFF = 4_000_000_000
"""A modification time in the future: every replaced file needs its time moved on, whenever this runs."""


@pytest.fixture
def start(tmp_path, project, checkout):
    """Make fresh trees in a named state: clean, applied with one feature, or applied with all."""
    made = {}

    def fresh(state: str):
        if state not in made:
            made[state] = tmp_path / f"start-{state}"
            shutil.copytree(checkout, made[state])
            if state != "clean":
                features = ("alpha",) if state == "alpha" else ()
                assert perform(project, "apply", made[state], features=features)["ok"]
            for path in made[state].rglob("*.*"):
                os.utime(path, (FAR_OFF, FAR_OFF))
        tree = tmp_path / "tree"
        shutil.rmtree(tree, ignore_errors=True)
        shutil.copytree(made[state], tree, symlinks=True)
        return tree

    return fresh


COMMANDS = {
    "apply": ("clean", "apply", {}, 70),
    "apply-again": ("alpha", "apply", {}, 25),
    "apply-less": ("all", "apply", {"features": ("beta",)}, 25),
    "revert": ("all", "revert", {}, 70),
}
"""Start state, command, options, and how many steps there are at least (fewer would test something else)."""


def killed(project, at, name, tree, **options) -> bool:
    """Run a command in a child that dies at its n-th step; return whether it got that far."""
    child = os.fork()
    if child == 0:
        os._exit(perform(project, name, tree, Fs(Steps(die, at)), **options).get("exit_code", 1))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED)
    return code == KILLED


def count_steps(project, name, tree, **options) -> int:
    steps = Steps()
    assert perform(project, name, tree, Fs(steps), **options)["ok"]
    return steps.count


@pytest.fixture
def case(request, project, start):
    """One of COMMANDS, with the tree before and after it."""
    state, name, options, least = COMMANDS[request.param]
    before = without_state(start(state))
    tree = start(state)
    steps = count_steps(project, name, tree, **options)
    assert steps >= least
    return SimpleNamespace(
        fresh=lambda: start(state),
        name=name,
        options=options,
        steps=steps,
        before=before,
        after=without_state(tree),
    )


every_command = pytest.mark.parametrize("case", COMMANDS, indirect=True)


@every_command
def test_kill_at_every_step(case, start, project, checkout):
    """A kill leaves the tree as before, as after, or partly applied; revert and apply both repair it."""
    pristine = snapshot(checkout)
    complete = without_state(start("all"))
    partly = 0
    for at in range(1, case.steps + 1):
        tree = case.fresh()
        assert killed(project, at, case.name, tree, **case.options)
        status = perform(project, "status", tree)
        now = without_state(tree)
        if status["exit_code"] == 5:
            assert (status["state"], status["base"]) == ("partly applied", "v0.5.20")
            partly += 1
        else:
            assert status["exit_code"] == 0 and now in (case.before, case.after)
        half = tree.with_name("half")
        shutil.rmtree(half, ignore_errors=True)
        shutil.copytree(tree, half, symlinks=True)
        assert perform(project, "revert", tree)["ok"]
        assert snapshot(tree) == pristine, f"revert after a kill at step {at}"
        assert perform(project, "apply", half)["ok"]
        assert without_state(half) == complete, f"apply after a kill at step {at}"
        if at % 4 == 0:
            assert perform(project, "revert", half)["ok"]
            assert snapshot(half) == pristine
    assert partly >= 10


@pytest.mark.parametrize("case", ["apply", "revert"], indirect=True)
@pytest.mark.parametrize("repair", ["revert", "apply"])
def test_kill_during_recovery(case, repair, project, checkout):
    """The repair can be killed at every step as well, and be started again."""
    pristine = snapshot(checkout)
    half = case.fresh().with_name("half")
    case.fresh().rename(half)
    assert killed(project, case.steps * 3 // 4, case.name, half, **case.options)
    assert perform(project, "status", half)["state"] == "partly applied"
    kills = 0
    while True:
        tree = half.with_name("tree")
        shutil.rmtree(tree, ignore_errors=True)
        shutil.copytree(half, tree, symlinks=True)
        if not killed(project, kills + 1, repair, tree):
            break
        kills += 1
        assert perform(project, "revert", tree)["ok"]
        assert snapshot(tree) == pristine, f"kill at step {kills} of the repair"
    assert kills >= 20


@every_command
def test_every_step_refused_once(case, project, checkout):
    """A refused step is rolled back at once, with exit code 6."""
    pristine = snapshot(checkout)
    rolled_back = 0
    for at in range(1, case.steps + 1):
        tree = case.fresh()
        result = perform(project, case.name, tree, Fs(Steps(refuse, at)), **case.options)
        assert result["exit_code"] == 6, at
        message = result["error"]["message"]
        done = "the change itself is done" in message
        assert without_state(tree) == (case.after if done else case.before), f"step {at}: {message}"
        assert perform(project, "status", tree)["ok"]
        rolled_back += not done
        assert perform(project, "revert", tree)["ok"]
        assert snapshot(tree) == pristine
    assert rolled_back >= case.steps // 2


@every_command
def test_everything_refused_from_a_step_on(case, project, checkout):
    """Where even the roll-back is refused, status says so and a later revert puts it right."""
    pristine = snapshot(checkout)
    for at in range(1, case.steps + 1):
        tree = case.fresh()
        result = perform(project, case.name, tree, Fs(Steps(refuse, at, True)), **case.options)
        assert result["exit_code"] == 6
        status = perform(project, "status", tree)
        if status["exit_code"] == 5:
            assert status["state"] == "partly applied"
            assert "partly applied" in result["error"]["message"]
        else:
            assert without_state(tree) in (case.before, case.after)
        assert perform(project, "revert", tree)["ok"]
        assert snapshot(tree) == pristine


def test_a_full_disk_is_noticed_before_the_tree_is_touched(start, run):
    """All new contents are on disk before the first file of the tree is replaced."""
    seen = []
    tree = start("clean")
    assert run("apply", tree, fs=Fs(lambda operation, path: seen.append((operation, str(path))))).code == 0
    in_tree = [i for i, (op, path) in enumerate(seen) if op == "rename" and ".sglang_overlay" not in path]
    writes = [i for i, (op, path) in enumerate(seen) if op == "create"]
    later = [seen[i] for i in writes if i > in_tree[0]]
    assert [path.rsplit("/", 1)[1] for _, path in later] == ["receipt.json.new"]


def test_two_at_the_same_time(start, project, run):
    """The second of two applies is turned away and changes nothing."""
    tree = start("clean")
    answers = []

    def other(operation, path):
        if operation == "rename" and path.name == "net.py" and not answers:
            answers.append(os.waitstatus_to_exitcode(os.waitpid(_apply_in_child(project, tree), 0)[1]))

    assert run("apply", tree, fs=Fs(other)).code == 0
    assert answers == [6]
    assert run("status", tree).code == 0


def _apply_in_child(project, tree) -> int:
    child = os.fork()
    if child == 0:
        os._exit(perform(project, "apply", tree)["exit_code"])
    return child


def test_an_edit_between_a_kill_and_the_repair_is_not_lost(start, project, run, checkout):
    tree = start("clean")
    at = count_steps(project, "apply", tree)
    while True:  # the last kill point that leaves the tree partly applied
        tree = start("clean")
        assert killed(project, at, "apply", tree)
        if run("status", tree).code == 5:
            break
        at -= 1
    net = tree / "python/sglang/srt/models/net.py"
    net.write_text(net.read_text() + "# mine\n")
    for words in (["revert", tree], ["apply", tree]):
        result = run(*words, "--json")
        assert result.code == 5 and "net.py" in result.data["error"]["file"]
        assert net.read_text().endswith("# mine\n")
    result = run("revert", "--keep-edited", "--json", tree)
    assert result.code == 0 and result.data["left"] == ["python/sglang/srt/models/net.py"]
    assert net.read_text().endswith("# mine\n")
    net.write_text(PACKAGE["srt/models/net.py"])
    assert snapshot(tree) == snapshot(checkout)


def test_interrupt_is_like_a_kill(start, run, checkout):
    """Ctrl-C in the middle ends with a sentence, and revert repairs."""

    def interrupt(operation, path):
        raise KeyboardInterrupt

    tree = start("clean")
    result = run("apply", tree, fs=Fs(Steps(interrupt, 60)))
    assert result.code == 130 and "revert" in result.err and "Traceback" not in result.err
    assert run("revert", tree).code == 0
    assert snapshot(tree) == snapshot(checkout)


def test_a_damaged_blob_is_not_written_back(start, run):
    tree = start("all")
    blobs = tree / "python/sglang/.sglang_overlay_state/blobs"
    for blob in blobs.iterdir():
        blob.write_bytes(b"damaged")
    result = run("revert", "--json", tree)
    assert result.code == 5 and "damaged" in result.data["error"]["message"]
    write_tree(tree / "python/sglang/.sglang_overlay_state", {"receipt.json": b"{"})
    for command in ("status", "apply", "revert"):
        assert run(command, tree).code == 5


def test_a_full_disk_names_the_file_that_did_not_fit():
    """The system's own error for a write has no name in it."""
    target = Path("/dev/full")
    if not target.exists():
        pytest.skip("this system has no /dev/full")
    with open(target, "wb", buffering=0) as stream, pytest.raises(OSError) as fault:
        fs._write_all(stream, b"text", Path("some/file.py"))
    assert fault.value.errno == errno.ENOSPC and fault.value.filename == "some/file.py"
