"""What the tests of the benchmarks' own logic share."""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmark"


@pytest.fixture(scope="session")
def benchmark_module():
    """Import a file of ``benchmark/`` by its name, without leaving the folder on the path."""

    def load(name: str):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "path", [str(BENCHMARK), *sys.path])
            return importlib.import_module(name)

    return load
