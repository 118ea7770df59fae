"""A small overlay project and small SGLang trees for the tests of the patch engine."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Optional

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(REPOSITORY))

from overlay_apply import STATE_NAME, cli, commands  # noqa: E402
from overlay_apply.errors import OverlayError  # noqa: E402
from overlay_apply.fs import Fs  # noqa: E402
from overlay_apply.project import Project  # noqa: E402

NET = '''"""A model."""

from __future__ import annotations

import os


class Net:
    def forward(self, x):
        if x is None:
            return self.experts(os.name)
        return self.experts(x)

    def stop(self, first, *rest):
        return self.close(first, *rest)
'''

COMM = '''import os


class Comm:
    def prepare(self, hidden):
        if self.variant is not None:
            return os.name
        return hidden
'''

PATCHES = {
    "net-experts": """
id: net-experts
feature: alpha
reason: hands-over
why: The experts are called through the overlay.
upstream: none
edits:
  - file: srt/models/net.py
    matches: 2
    imports: [from sglang.sglang_overlay.srt.net import route]
    rule:
      pattern: self.experts
      inside: {kind: call, field: function}
    fix: route(self)
""",
    "comm-prepare": """
id: comm-prepare
feature: alpha
reason: guards
why: A bundle is looked for first.
upstream: none
edits:
  - file: srt/layers/comm.py
    matches: 1
    imports:
      - from sglang.sglang_overlay.srt.net import is_bundle, take
    rule:
      pattern: if
      inside:
        kind: if_statement
        has: {field: condition, pattern: self.variant is not None}
    fix: |-
      if is_bundle(hidden):
          return take(self, hidden)
      if
""",
    "net-close": """
id: net-close
feature: beta
reason: reports
why: Closing is counted.
upstream: example#1
retire_when:
  file: srt/layers/comm.py
  rule: {kind: function_definition, has: {field: name, regex: ^close_all$}}
edits:
  - file: srt/models/net.py
    matches: 1
    imports: [from sglang.sglang_overlay.srt.net import closing]
    rule: {pattern: self.close($$$ARGS)}
    fix: closing(self, $$$ARGS)
""",
}

OVERLAY = {
    "__init__.py": "",
    "srt/__init__.py": "",
    "srt/net.py": "def route(net):\n    return net\n\n\nis_bundle = take = closing = route\n",
    "srt/data/table 1.json": '{"no": "line end"}',
    "srt/environ.py": """from collections import namedtuple

Flag = namedtuple("Flag", "name default values feature help")
FLAGS = (Flag("SGLANG_OVERLAY_TEST_FLAG", "auto", "0, 1", "alpha", "A flag."),)
""",
}

REGISTERED = {"moe/test_overlay_net.py": "NET = 1\n", "moe/overlay_helper.py": "HELP = 1\n"}

PACKAGE = {
    "__init__.py": "",
    "srt/__init__.py": "",
    "srt/models/net.py": NET,
    "srt/layers/comm.py": COMM,
    "srt/layers/other.py": "OTHER = 1\n",
}


@pytest.fixture
def tmp_path():
    """A folder in memory where there is one: the fault tests make and remove thousands of small trees."""
    memory = Path("/dev/shm")
    in_memory = memory.is_dir() and os.access(memory, os.W_OK)
    with tempfile.TemporaryDirectory(dir=memory if in_memory else None, prefix="apply-test-") as folder:
        yield Path(os.path.realpath(folder))


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """A killed process loses nothing that is not flushed; only a lost machine does."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def write_tree(root: Path, files: dict) -> None:
    """Write text or bytes files below a folder."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def manifest(files: Optional[dict] = None) -> dict:
    """Return a manifest with one base, v0.5.20, that pins the small package's files."""
    pins = {"srt/models/net.py": digest(NET), "srt/layers/comm.py": digest(COMM)}
    release = {"file": "sglang-0.5.20.whl", "sha256": "0" * 64, "python": "3.11", "platform": "any"}
    row = {"version": "0.5.20", "release": release, "files": pins if files is None else files}
    return {"bases": {"v0.5.20": row}, "neighbours": {}}


@pytest.fixture
def project(tmp_path) -> Project:
    """An overlay project with two features on one base."""
    root = tmp_path / "project"
    write_tree(root / "patches" / "v0.5.20", {f"{name}.yml": text for name, text in PATCHES.items()})
    write_tree(root / "patches", {"series": "# order\n" + "\n".join(PATCHES) + "\n"})
    write_tree(root / "patches", {"manifest.yml": yaml.safe_dump(manifest())})
    write_tree(root / "sglang_overlay", OVERLAY)
    write_tree(root / "sglang_overlay", {"srt/__pycache__/net.cpython-311.pyc": b"x", "README.md": "x"})
    write_tree(root / "tests" / "registered", REGISTERED)
    write_tree(root / "tests" / "registered", {"README.md": "x", "__pycache__/a.pyc": b"x"})
    return Project(root)


@pytest.fixture
def package(tmp_path) -> Path:
    """An installed package's site-packages folder."""
    root = tmp_path / "site-packages"
    write_tree(root / "sglang", PACKAGE)
    return root


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A checkout without .git."""
    root = tmp_path / "checkout"
    write_tree(root / "python" / "sglang", PACKAGE)
    write_tree(root, {"python/pyproject.toml": "", "test/registered/moe/test_theirs.py": "THEIRS = 1\n"})
    return root


def git(root: Path, *arguments: str) -> str:
    """Run git in a folder, whatever the user's own configuration is."""
    names = ["-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "core.autocrlf=false"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment.update(GIT_CONFIG_GLOBAL=os.devnull, GIT_CONFIG_NOSYSTEM="1")
    done = subprocess.run(
        ["git", "-C", str(root), *names, *arguments], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def commit_all(root: Path, tag: Optional[str] = None) -> None:
    """Make a folder a git repository with one commit."""
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "all")
    if tag:
        git(root, "tag", tag)


@dataclasses.dataclass
class Outcome:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> dict:
        return json.loads(self.out)


@pytest.fixture
def run(project, capfd):
    """Run a command on the project, in this process."""

    def run_command(*argv, fs: Optional[Fs] = None) -> Outcome:
        capfd.readouterr()
        code = cli.run([str(word) for word in argv], project, fs)
        sys.stdout.flush()
        return Outcome(code, *capfd.readouterr())

    return run_command


def perform(project: Project, name: str, path: Path, fs: Optional[Fs] = None, **options) -> dict:
    """Run a command without the command line; failures come as the dict that --json prints."""
    asked = {key: options.pop(key) for key in ("features", "try_base") if key in options}
    request = commands.Request(project, fs or Fs(), path, **asked)
    try:
        return getattr(commands, name)(request, **options)
    except OverlayError as fault:
        return {"ok": False, "exit_code": fault.exit_code, "error": fault.as_dict()}


@pytest.fixture
def tool(project):
    """Run a command on the project as a process of its own: apply.py with a copy of the engine."""
    shutil.copy(REPOSITORY / "apply.py", project.root)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "overlay_apply", project.root / "overlay_apply", ignore=ignored)

    def run_tool(*argv, **options) -> Outcome:
        command = [sys.executable, str(project.root / "apply.py"), *map(str, argv)]
        done = subprocess.run(command, capture_output=True, text=True, **options)
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run_tool


def snapshot(root: Path, leave_out: tuple = (".git",)) -> dict:
    """Return everything below a folder: directories, links, and files with bytes and mode."""
    found = {}
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in leave_out)
        for name in sorted([*names, *files]):
            path = Path(folder) / name
            key = str(path.relative_to(root))
            if path.is_symlink():
                found[key] = ("link", os.readlink(path))
            elif path.is_dir():
                found[key] = ("dir", stat.S_IMODE(path.stat().st_mode))
            else:
                found[key] = (path.read_bytes(), stat.S_IMODE(path.stat().st_mode))
    return found


def without_state(root: Path) -> dict:
    """Return a snapshot that leaves the overlay's state folder out."""
    return snapshot(root, (".git", STATE_NAME))
