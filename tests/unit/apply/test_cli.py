"""The command as a process: exit codes, what goes to which stream, and what it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from conftest import NET, REPOSITORY, snapshot, write_tree


def test_every_exit_code(tool, run, package, tmp_path):
    """0 done, 2 usage, 3 unsupported, 4 drift, 5 changed since, 6 refused; each also as one JSON object."""
    net = package / "sglang/srt/models/net.py"

    def expect(code, *argv):
        told = tool(*argv)
        assert told.code == code, told.err
        assert "Traceback" not in told.err
        answer = run(*argv, "--json")
        assert answer.code == code and answer.err == ""
        assert answer.data["exit_code"] == code and answer.data["ok"] == (code == 0)
        if code:
            assert told.out == "" and "what to do" in told.err
            assert answer.data["error"]["message"] and answer.data["error"]["remedy"]

    expect(2, "apply", package, "--feature", "nonsense")
    expect(3, "apply", tmp_path)
    net.write_text(NET.replace("self.close", "self.shut"))
    expect(4, "apply", package, "--try-base", "v0.5.20")
    net.write_text(NET)
    net.chmod(0o444)
    expect(6, "apply", package)
    net.chmod(0o644)
    expect(0, "apply", package)
    net.write_text(NET + "# mine\n")
    expect(5, "revert", package)
    net.write_text(NET)
    expect(0, "revert", package)


@pytest.mark.parametrize("argv", [["nonsense"], ["apply", "--nonsense"], ["apply", "a", "b"]])
def test_usage_errors(run, argv):
    result = run(*argv)
    assert result.code == 2 and result.out == "" and "apply.py --help" in result.err
    answer = run(*argv, "--json")
    assert answer.code == 2 and answer.data["error"]["kind"] == "usage"


def test_help_and_version(run, tool):
    assert tool("--help").code == 0
    for command in ("apply", "status", "revert", "diff", "check"):
        assert run(command, "--help").code == 0
    assert run("--version").out.strip()


def test_no_arguments_show_the_help_and_no_empty_error(tool):
    told = tool()
    assert told.code == 2 and "Usage: apply.py" in told.out + told.err and "error" not in told.err


def test_missing_dependencies_are_named(project, tool):
    """Without its dependencies the command says which, and how to get them."""
    script = (
        "import runpy, sys, importlib.util as util; real = util.find_spec; "
        "util.find_spec = lambda name, *rest: None if name in ('rich', 'ast_grep_py') else real(name, *rest); "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", script, str(project.root / "apply.py"), "status", "."]
    told = subprocess.run(command, capture_output=True, text=True)
    assert told.returncode == 2 and told.stdout == "" and "Traceback" not in told.stderr
    assert "ast-grep-py, rich" in told.stderr and "pip install -r requirements.txt" in told.stderr
    answer = subprocess.run([*command, "--json"], capture_output=True, text=True)
    assert answer.returncode == 2 and json.loads(answer.stdout)["error"]["kind"] == "missing-dependency"


def test_every_dependency_is_in_the_requirements():
    text = (REPOSITORY / "requirements.txt").read_text()
    for name in ("ast-grep-py", "packaging", "rich", "typer", "PyYAML"):
        lines = [line for line in text.splitlines() if line.startswith(name)]
        assert len(lines) == 1 and ">=" in lines[0] and "<" in lines[0]


def test_status_needs_no_parser(tool, project, package):
    """status of an applied tree starts fast: it parses nothing and draws nothing."""
    assert tool("apply", package).code == 0
    script = (
        f"import sys; sys.path.insert(0, {str(project.root)!r}); from overlay_apply import cli; "
        f"cli.run(['status', {str(package)!r}]); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "overlay_apply.commands" in loaded
    assert not loaded & {"ast_grep_py", "rich.table", "overlay_apply.fetch", "overlay_apply.check"}


def test_an_interrupt_from_the_keyboard(tool, project, package):
    """SIGINT in the middle of an apply: a sentence, exit code 130, and revert repairs."""
    before = snapshot(package)
    script = (
        "import os, signal, sys\n"
        # A parent that runs in the background may have had it ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"sys.path.insert(0, {str(project.root)!r})\n"
        "from overlay_apply import cli\nfrom overlay_apply.fs import Fs\n"
        "seen = []\n"
        "def observe(operation, path):\n"
        "    seen.append(path)\n"
        "    if operation == 'rename' and path.name == 'net.py':\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        f"sys.exit(cli.run(['apply', {str(package)!r}], fs=Fs(observe)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 130 and "Traceback" not in done.stderr and "revert" in done.stderr
    assert tool("status", package).code == 5
    assert tool("revert", package).code == 0
    assert snapshot(package) == before


def test_a_terminal_gets_drawn_tables(tool, package, project):
    import pty

    master, slave = pty.openpty()
    command = [sys.executable, str(project.root / "apply.py"), "apply", str(package), "--dry-run"]
    child = subprocess.Popen(command, stdout=slave, stderr=slave)
    os.close(slave)
    shown = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    os.close(master)
    assert child.wait() == 0 and "\u2503".encode() in shown and b"net-experts" in shown
    plain = tool("apply", package, "--dry-run").out
    assert plain.isascii() and "net-experts" in plain


def test_a_reader_that_goes_away(project, package, tool):
    write_tree(project.overlay, {"big.txt": "line\n" * 200_000})
    child = subprocess.Popen(
        [sys.executable, str(project.root / "apply.py"), "diff", str(package)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    child.stdout.read(10)
    child.stdout.close()
    assert b"Traceback" not in child.stderr.read()
    child.wait()
