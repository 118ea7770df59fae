"""The environment a tree is used in: versions of packages, commands and GPUs. Nothing of it is imported or changed."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Iterable, List, Optional

from .errors import UsageFault
from .target import Target

_SITES = ("site-packages", "dist-packages")
_VENVS = (".venv", "venv")
_ASK = "import json, sys; print(json.dumps([sys.path, sys.prefix]))"
_LIMIT = 20  # seconds for a command that only reads


@dataclass(frozen=True)
class Gpu:
    """A machine's NVIDIA GPUs; `absent` says why there are none."""

    count: int = 0
    names: tuple = ()
    arch: Optional[str] = None
    """Compute capability, the lowest of all GPUs."""
    driver: Optional[str] = None
    link: Optional[str] = None
    """How the GPUs reach each other, as `nvidia-smi topo -m` names it: NV18, PIX, SYS, ...; None for a single one."""
    absent: str = ""

    def to_dict(self) -> dict:
        facts = {"count": self.count, "names": list(self.names), "arch": self.arch, "driver": self.driver, "link": self.link}
        return {**facts, "absent": self.absent} if self.absent else facts


@dataclass
class Environment:
    """Where packages and commands are looked for. `source` says why there."""

    source: str
    paths: tuple
    folders: tuple = ()
    """Where its commands are, before those on PATH."""
    _versions: dict = field(default_factory=dict)

    def version(self, package: str) -> Optional[str]:
        """Return the version of an installed package, from its metadata; None if it is not installed."""
        if package not in self._versions:
            found = importlib.metadata.distributions(name=package, path=list(self.paths))
            self._versions[package] = next((str(each.metadata["Version"]) for each in found), None)
        return self._versions[package]

    def has_command(self, name: str) -> bool:
        """Tell whether a command is in the environment, on PATH or in CUDA's folder."""
        cuda = [os.environ.get(variable) for variable in ("CUDA_HOME", "CUDA_PATH")]
        folders = [*self.folders, *(f"{home}/bin" for home in (*cuda, "/usr/local/cuda") if home)]
        return bool(shutil.which(name) or shutil.which(name, path=os.pathsep.join(map(str, folders))))

    @cached_property
    def gpu(self) -> Gpu:
        """The machine's GPUs, by nvidia-smi."""
        return find_gpus()


def environment_of(target: Target, python: Optional[Path] = None) -> Environment:
    """Return the environment a tree belongs to: the one asked for, the one that holds it, else this Python's.

    Raises UsageFault if `python` cannot be run.
    """
    if python is not None:
        return _of_python(python)
    holder = target.package.parent
    ours = {os.path.realpath(path) for path in sys.path}
    if holder.name in _SITES and str(holder) not in ours:
        return Environment("the folder that holds it", (str(holder),), _commands_above(holder))
    for name in _VENVS:
        sites = sorted((target.root / name).glob("lib/python*/site-packages")) if target.is_checkout else []
        if sites:
            return Environment(f"{name} in the checkout", tuple(map(str, sites)), (target.root / name / "bin",))
    return Environment(f"this Python, {sys.executable}", tuple(sys.path), (Path(sys.prefix) / "bin",))


def _commands_above(site: Path) -> tuple:
    """Return the folder of the commands that belong to PREFIX/lib/pythonX.Y/site-packages."""
    return (site.parents[2] / "bin",) if len(site.parents) > 2 else ()


def _of_python(python: Path) -> Environment:
    try:
        done = subprocess.run([str(python), "-c", _ASK], capture_output=True, text=True, timeout=_LIMIT, check=True)
        paths, prefix = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as fault:
        raise UsageFault(
            f"--python does not run: {fault}",
            file=str(python),
            expected="a Python interpreter",
            remedy="name the interpreter that SGLang is run with, or leave --python out",
        ) from None
    return Environment(str(python), tuple(paths), (Path(prefix) / "bin",))


def find_gpus() -> Gpu:
    """Ask nvidia-smi for this machine's GPUs."""
    if shutil.which("nvidia-smi") is None:
        return Gpu(absent="nvidia-smi is not on PATH")
    listed = _output("nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader")
    rows = [[cell.strip() for cell in line.split(",")] for line in (listed or "").splitlines()]
    rows = [row for row in rows if len(row) == 3 and re.fullmatch(r"\d+\.\d+", row[1])]
    if not rows:
        return Gpu(absent="nvidia-smi names none")
    lowest = min((row[1] for row in rows), key=lambda arch: tuple(map(int, arch.split("."))))
    link = _links(_output("nvidia-smi", "topo", "-m") or "") if len(rows) > 1 else None
    return Gpu(len(rows), tuple(dict.fromkeys(row[0] for row in rows)), lowest, rows[0][2], link)


def _output(*command: str) -> Optional[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _links(matrix: str) -> Optional[str]:
    """Return the kinds of links in the matrix that `nvidia-smi topo -m` prints, or None if there is none."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split("\t") for line in matrix.splitlines()]
    rows = [[cell.strip() for cell in line] for line in lines if _is_gpu(line[0])]
    kinds = sorted(set(_others(rows)))
    return ", ".join(kinds) or None


def _others(rows: List[list]) -> Iterable[str]:
    """Yield the links between each two GPUs; the columns of other devices come after those of the GPUs."""
    return (cell for row in rows for cell in row[1 : len(rows) + 1] if cell != "X")


def _is_gpu(name: str) -> bool:
    return re.fullmatch(r"GPU\d+", name.strip()) is not None
