#!/usr/bin/env python3
"""How long apply and status take as whole processes on the pinned release.

    python benchmark/bench_apply.py [--runs 11]

Works on a copy of the release, prints a table, writes benchmark/results/apply_speed.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results" / "apply_speed.json"
TARGETS = {"apply": 2.0, "status": 0.5}

sys.path.insert(0, str(ROOT))

from overlay_apply.bases import load_manifest  # noqa: E402
from overlay_apply.fetch import fetch_wheel  # noqa: E402
from overlay_apply.project import here  # noqa: E402


def timed(command: str, tree: Path) -> float:
    """Run one command as a process of its own and return its seconds."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, str(ROOT / "apply.py"), command, str(tree)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - start


def measure(tree: Path, runs: int) -> dict:
    """Return the seconds of each run by command, after one round that fills the caches."""
    seconds: dict = {"apply": [], "status": [], "revert": []}
    for round_number in range(runs + 1):
        for command, times in seconds.items():
            value = timed(command, tree)
            if round_number:
                times.append(value)
    return seconds


def machine() -> dict:
    """Return what the numbers depend on."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    packages = ("ast-grep-py", "typer", "rich", "packaging", "PyYAML")
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load": [round(value, 2) for value in os.getloadavg()],
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in packages},
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=11, help="at least 9")
    runs = max(9, parser.parse_args().runs)
    project = here()
    base = load_manifest(project.patches).base("v0.5.20")
    wheel = fetch_wheel(project, base.release)
    facts = machine()
    with tempfile.TemporaryDirectory(dir=project.build) as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        seconds = measure(Path(folder), runs)
    rows = {
        command: {
            "median_s": round(statistics.median(times), 3),
            "fastest_s": round(min(times), 3),
            "slowest_s": round(max(times), 3),
            "target_s": TARGETS.get(command),
        }
        for command, times in seconds.items()
    }
    print(f"{'command':10}{'median s':>10}{'fastest':>10}{'slowest':>10}{'target':>10}")
    for command, row in rows.items():
        print(
            f"{command:10}{row['median_s']:>10}{row['fastest_s']:>10}{row['slowest_s']:>10}"
            f"{row['target_s'] or '-':>10}"
        )
    result = {
        "command": " ".join(["python benchmark/bench_apply.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "release": base.version,
        "runs": runs,
        "machine": facts,
        "seconds": rows,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
