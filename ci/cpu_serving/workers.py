"""Runs a worker script of the tests in an SGLang tree: a process that imports SGLang once and forks for each run."""
import json
import os
import subprocess
import sys
from pathlib import Path

from cpu_serving.checkpoint import Shape, model_config
from cpu_serving.server import SERVER_ENVIRONMENT, SUPPORT_PATHS

CI = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 600


def run_each(worker: Path, tree: Path, runs: dict[str, dict], folder: Path, paths: tuple = ()) -> dict:
    """Run a worker on a tree, with ``paths`` importable; return ``name -> what that run saw``.

    Each run's spec gets a checkpoint's folder, and files for its output and its log.
    """
    (folder / "config.json").write_text(json.dumps({**model_config(Shape()), "torch_dtype": "bfloat16"}))
    specs = {
        name: {**told, "checkpoint": str(folder), "out": str(folder / f"{place}.pt"), "log": str(folder / f"{place}.log")}
        for place, (name, told) in enumerate(runs.items())
    }
    start(worker, tree, list(specs.values()), folder, paths)
    return {name: what_it_saw(spec) for name, spec in specs.items()}


def start(worker: Path, tree: Path, runs: list, folder: Path, paths: tuple = (), flags: dict | None = None) -> None:
    """Run a worker on a tree with the list of runs, written to ``folder``, until it has forked for each of them."""
    (folder / "runs.json").write_text(json.dumps(runs))
    path = os.pathsep.join(map(str, (tree, *SUPPORT_PATHS, CI, *paths)))
    environment = {**os.environ, **SERVER_ENVIRONMENT, "PYTHONPATH": path, **(flags or {})}
    command = [sys.executable, str(worker), str(folder / "runs.json")]
    subprocess.run(command, env=environment, timeout=LIMIT_SECONDS, check=True)


def what_it_saw(spec: dict) -> dict:
    """What a run wrote to its output; fails with its log where it did not get that far."""
    import torch

    assert Path(spec["out"]).exists(), Path(spec["log"]).read_text()[-4000:]
    return torch.load(spec["out"], weights_only=False)
