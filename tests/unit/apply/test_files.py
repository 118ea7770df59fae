"""Line ends, marks, links, modes, caches: what a file may be like."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import COMM, NET, perform, snapshot, write_tree
from overlay_apply.fs import Fs
from test_apply import PATCHED_NET

NET_FILE = "sglang/srt/models/net.py"


def test_crlf_files_stay_crlf(run, package):
    net = package / NET_FILE
    net.write_bytes(NET.replace("\n", "\r\n").encode())
    before = snapshot(package)
    assert run("apply", package).code == 0
    assert net.read_bytes() == PATCHED_NET.replace("\n", "\r\n").encode()
    assert run("revert", package).code == 0
    assert snapshot(package) == before


def test_new_lines_end_like_the_line_they_are_at(run, package):
    comm = package / "sglang/srt/layers/comm.py"
    mixed = COMM.replace("        if self.variant is not None:\n", "        if self.variant is not None:\r\n")
    comm.write_bytes(mixed.encode())
    assert run("apply", package).code == 0
    text = comm.read_bytes()
    assert b"if is_bundle(hidden):\r\n            return take(self, hidden)\r\n        if self" in text
    assert text.startswith(b"from sglang.sglang_overlay.srt.net import is_bundle, take\nimport os\n")


def test_a_byte_order_mark_stays(run, package):
    net = package / NET_FILE
    net.write_bytes(b"\xef\xbb\xbf" + NET.encode())
    before = snapshot(package)
    assert run("apply", package, "--try-base", "v0.5.20").code == 0
    assert net.read_bytes() == b"\xef\xbb\xbf" + PATCHED_NET.encode()
    assert run("revert", package).code == 0
    assert snapshot(package) == before


def test_a_file_without_a_last_line_end(run, package):
    net = package / NET_FILE
    net.write_bytes(NET.rstrip("\n").encode())
    before = snapshot(package)
    assert run("apply", package, "--try-base", "v0.5.20").code == 0
    assert net.read_bytes() == PATCHED_NET.rstrip("\n").encode()
    assert run("revert", package).code == 0
    assert snapshot(package) == before


def test_text_beyond_ascii_before_an_edit(run, package):
    net = package / NET_FILE
    wide = '"""A model: \u00e9 \u4e2d \U0001f600."""'
    net.write_bytes(NET.replace('"""A model."""', wide).encode())
    assert run("apply", package, "--try-base", "v0.5.20").code == 0
    assert net.read_text("utf-8") == PATCHED_NET.replace('"""A model."""', wide)


def test_a_file_that_is_not_utf8(run, package):
    (package / NET_FILE).write_bytes(NET.encode() + b"# \xff\n")
    before = snapshot(package)
    result = run("apply", package, "--try-base", "v0.5.20", "--json")
    assert result.code == 4 and result.data["error"]["file"] == "srt/models/net.py"
    assert snapshot(package) == before


def test_a_path_with_spaces(run, package):
    spaced = package.with_name("my site packages")
    package.rename(spaced)
    before = snapshot(spaced)
    assert run("apply", spaced).code == 0
    assert run("status", spaced).code == 0
    assert run("revert", spaced).code == 0
    assert snapshot(spaced) == before


def test_a_linked_checkout(run, checkout, tmp_path):
    before = snapshot(checkout)
    link = tmp_path / "link"
    link.symlink_to(checkout)
    assert run("apply", link).code == 0
    assert run("status", "--json", checkout).data["state"] == "applied"
    assert run("revert", link).code == 0
    assert snapshot(checkout) == before and link.is_symlink()


def test_a_link_out_of_the_tree_is_not_written_through(run, package, tmp_path):
    outside = tmp_path / "cache/net.py"
    write_tree(tmp_path, {"cache/net.py": NET})
    (package / NET_FILE).unlink()
    (package / NET_FILE).symlink_to(outside)
    before = snapshot(package)
    for command in ("apply", "diff"):
        result = run(command, package)
        assert result.code == 6 and NET_FILE in result.err and str(outside) in result.err
    assert snapshot(package) == before and outside.read_text() == NET


def test_a_linked_folder_out_of_the_tree_is_not_written_through(run, package, project):
    (package / "sglang/sglang_overlay").symlink_to(project.overlay)
    before, own = snapshot(package), snapshot(project.root)
    assert run("apply", package).code == 6
    assert snapshot(package) == before and snapshot(project.root) == own


def test_a_linked_state_folder_is_not_followed(run, package, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (package / "sglang/.sglang_overlay_state").symlink_to(tmp_path / "elsewhere")
    assert run("apply", package).code == 6
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_link_within_the_tree_leads_to_the_file_that_is_written(run, package):
    net, real = package / NET_FILE, package / "sglang/srt/real_net.py"
    net.rename(real)
    net.symlink_to("../real_net.py")
    before = snapshot(package)
    assert run("apply", package).code == 0
    assert net.is_symlink() and real.read_text() == PATCHED_NET
    assert run("status", package).code == 0
    assert run("revert", package).code == 0
    assert snapshot(package) == before


def test_two_names_of_one_file(run, package, project):
    (package / "sglang/srt/layers/comm.py").unlink()
    (package / "sglang/srt/layers/comm.py").symlink_to("../models/net.py")
    patch = project.patches / "v0.5.20/comm-prepare.yml"
    text = patch.read_text()
    rule = text[text.index("    rule:") :]
    patch.write_text(text.replace(rule, "    rule: {pattern: os.name}\n    fix: os.sep\n"))
    before = snapshot(package)
    assert run("apply", package, "--try-base", "v0.5.20").code == 6
    assert snapshot(package) == before


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o755])
def test_modes_are_kept(run, package, mode):
    net = package / NET_FILE
    net.chmod(mode)
    before = snapshot(package)
    assert run("apply", package).code == 0
    assert net.stat().st_mode & 0o7777 == mode
    assert run("revert", package).code == 0
    assert snapshot(package) == before


def test_a_hard_linked_copy_is_left_alone(run, package, tmp_path):
    """Package caches share files by hard links; a patch must not reach other environments."""
    cached = tmp_path / "cached.py"
    os.link(package / NET_FILE, cached)
    assert run("apply", package).code == 0
    assert cached.read_text() == NET and (package / NET_FILE).read_text() == PATCHED_NET
    assert run("revert", package).code == 0
    assert cached.read_text() == NET and cached.stat().st_nlink == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can write other users' files as theirs")
def test_the_owner_is_kept_and_handed_on(run, package):
    for path in [package, *package.rglob("*")]:
        os.chown(path, 1234, 4321)
    assert run("apply", package).code == 0
    owners = {(path.stat().st_uid, path.stat().st_gid) for path in (package / "sglang/srt").rglob("*")}
    owners |= {(p.stat().st_uid, p.stat().st_gid) for p in (package / "sglang/sglang_overlay").rglob("*")}
    assert owners == {(1234, 4321)}


def imported(package) -> str:
    """Return what Python, with its caches, takes the module to be."""
    code = "import sys; sys.path.insert(0, 'sglang/srt'); import stale; print(stale.VALUE)"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=package, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_python_does_not_use_a_stale_compiled_file(run, package, project):
    """Original and patched text have the same size, and all happens within one second."""
    write_tree(package, {"sglang/srt/stale.py": "VALUE = 'old'\n"})
    write_tree(
        project.patches / "v0.5.20",
        {
            "stale.yml": """
id: stale
feature: alpha
reason: corrects
why: Same size.
upstream: none
edits:
  - {file: srt/stale.py, matches: 1, rule: {pattern: "'old'"}, fix: "'new'"}
"""
        },
    )
    series = project.patches / "series"
    series.write_text(series.read_text() + "stale\n")
    assert imported(package) == "old"
    for _ in range(2):
        assert run("apply", package).code == 0
        assert imported(package) == "new"
        assert run("revert", package).code == 0
        assert imported(package) == "old"


def test_compiled_files_that_python_never_checks_are_taken_away_and_put_back(run, package):
    net = package / NET_FILE
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    cached = py_compile.compile(str(net), invalidation_mode=mode, doraise=True)
    before = snapshot(package)
    assert run("apply", package, "--feature", "alpha").code == 0
    assert not os.path.exists(cached)
    assert run("apply", package).code == 0
    assert run("status", package).code == 0
    write_tree(package, {os.path.relpath(cached, package): b"compiled from the patched file"})
    assert run("status", package).code == 0
    assert run("revert", package).code == 0
    assert snapshot(package) == before


UNCHECKED = py_compile.PycInvalidationMode.UNCHECKED_HASH


def value_of(package, name) -> str:
    """Return what a module's name is when Python imports it from the tree."""
    code = f"import sys; sys.dont_write_bytecode = True; from sglang.srt.layers import plain; print(getattr(plain, {name!r}, None))"
    return subprocess.run([sys.executable, "-c", code], cwd=package, capture_output=True, text=True, check=True).stdout.strip()


def compiled(source):
    py_compile.compile(str(source), invalidation_mode=UNCHECKED, doraise=True)


@pytest.fixture
def plain(project, package):
    """A patched module that can be imported, with a compiled file that Python never checks."""
    patch = """
id: plain
feature: alpha
reason: reports
why: A value.
upstream: none
edits:
  - {file: srt/layers/plain.py, matches: 1, rule: {pattern: "'old'"}, fix: "'new'"}
"""
    write_tree(project.patches / "v0.5.20", {"plain.yml": patch})
    series = project.patches / "series"
    series.write_text(series.read_text() + "plain\n")
    source = package / "sglang/srt/layers/plain.py"
    write_tree(package, {"sglang/srt/layers/plain.py": "VALUE = 'old'\n"})
    compiled(source)
    return source


@pytest.mark.parametrize("again", [[], ["--feature", "beta"]])
def test_what_was_compiled_of_the_patched_file_does_not_outlive_it(run, package, plain, again):
    """Neither does it count as what was there before the overlay."""
    assert run("apply", package).code == 0
    compiled(plain)
    if again:
        assert run("apply", *again, package).code == 0 and value_of(package, "VALUE") == "old"
        compiled(plain)
        assert run("apply", package).code == 0 and value_of(package, "VALUE") == "new"
        compiled(plain)
    assert run("revert", package).code == 0
    assert value_of(package, "VALUE") == "old"


def test_an_edited_file_that_is_left_is_what_python_runs(run, package, plain):
    """What was compiled from the file before the overlay is not put back over it."""
    assert run("apply", package).code == 0
    plain.write_text("MY_EDIT = 1; " + plain.read_text())
    answer = run("revert", "--keep-edited", package, "--json")
    assert answer.code == 0 and answer.data["left"] == ["sglang/srt/layers/plain.py"]
    assert not list(plain.parent.glob("__pycache__/plain.*"))
    assert (value_of(package, "VALUE"), value_of(package, "MY_EDIT")) == ("new", "1")


def test_an_edited_file_that_the_overlay_is_taken_out_of_is_what_python_runs(run, package, plain):
    assert run("apply", package).code == 0
    plain.write_text(plain.read_text() + "MY_EDIT = 1\n")
    compiled(plain)
    answer = run("revert", "--keep-edited", package, "--json")
    assert answer.code == 0 and answer.data["merged"] == ["sglang/srt/layers/plain.py"]
    assert (value_of(package, "VALUE"), value_of(package, "MY_EDIT")) == ("old", "1")


def test_what_was_compiled_since_does_not_hide_an_edited_file(run, package, plain):
    """It is taken away where it is not of the file as it is now, and stays where it is."""
    for edit_last in (True, False):
        assert run("apply", package).code == 0
        edits = [
            lambda: plain.write_text("MY_EDIT = 1; " + plain.read_text()),
            lambda: compiled(plain),
        ]
        for act in reversed(edits) if edit_last else edits:
            act()
        assert run("revert", "--keep-edited", package).code == 0
        assert bool(list(plain.parent.glob("__pycache__/plain.*"))) is not edit_last
        assert value_of(package, "MY_EDIT") == "1"
        plain.write_text("VALUE = 'old'\n")


@pytest.mark.parametrize("taken_away", [False, True])
def test_an_edited_file_of_a_cut_short_apply_is_what_python_runs(run, project, package, plain, taken_away):
    """Killed around the step that takes the compiled file away, edited, and reverted."""

    class Killed(BaseException):
        pass

    done = []

    def die(operation, path):
        if done and taken_away or (path.name.startswith("plain.") and operation == "unlink" and not taken_away):
            raise Killed
        done.extend([path] if path.name.startswith("plain.") and operation == "unlink" else [])

    with pytest.raises(Killed):
        perform(project, "apply", package, Fs(die))
    assert bool(list(plain.parent.glob("__pycache__/plain.*"))) is not taken_away
    plain.write_text(plain.read_text() + "MY_EDIT = 1\n")
    answer = run("revert", "--keep-edited", package, "--json")
    assert answer.code == 0 and answer.data["left"] == ["sglang/srt/layers/plain.py"]
    assert value_of(package, "MY_EDIT") == "1"


LINES = st.lists(
    st.sampled_from(
        ["import os", "x = 1", "", "# \u4e2d", "def f(self, a):", "    return self.experts(a, 2)", "y = '\\n'"]
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), LINES, st.booleans(), st.booleans())
def test_apply_then_revert_is_identity(make_case, data, lines, mark, last_end):
    """On any source, with any mix of line ends, revert gives back every byte."""
    lines = [*lines, "def g(self, a):", "    return self.experts(a, 2)"]
    ends = data.draw(st.lists(st.sampled_from(["\n", "\r\n"]), min_size=len(lines), max_size=len(lines)))
    ends[-1] = ends[-1] if last_end else ""
    text = "".join(map(str.__add__, lines, ends))
    source = (b"\xef\xbb\xbf" if mark else b"") + text.encode()
    project, package = make_case(source, text.count("self.experts"))
    before = snapshot(package)
    try:
        compile(source, "source", "exec")
    except SyntaxError:
        assert perform(project, "apply", package, try_base="v0.5.20")["exit_code"] == 5
        assert snapshot(package) == before
        return
    assert perform(project, "apply", package, try_base="v0.5.20")["ok"]
    patched = (package / NET_FILE).read_bytes()
    assert patched.count(b"route(self)(a, 2)") == text.count("self.experts")
    unpatched = patched.replace(b"route(self)", b"self.experts")
    start = unpatched.index(b"from sglang.sglang_overlay")
    end = unpatched.index(b"\n", start) + 1
    assert unpatched[:start] + unpatched[end:] == source
    assert perform(project, "revert", package)["ok"]
    assert snapshot(package) == before


@pytest.fixture
def make_case(project, package):
    """Return a function that sets the one patched file, and how often its patch matches."""
    for name in ("comm-prepare", "net-close"):
        (project.patches / f"v0.5.20/{name}.yml").unlink()
    patch = project.patches / "v0.5.20/net-experts.yml"
    text = patch.read_text()

    def case(source: bytes, matches: int):
        patch.write_text(text.replace("matches: 2", f"matches: {matches}"))
        (package / NET_FILE).write_bytes(source)
        return project, package

    return case
