"""Our registered tests are what SGLang's own collector takes, and the CPU one passes in a patched tree."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cpu_serving import trees
from cpu_serving.server import SERVER_ENVIRONMENT, SUPPORT_PATHS
from overlay_apply.bases import assignments

REGISTERED = Path(__file__).resolve().parents[2] / "registered"
FILES = sorted(REGISTERED.rglob("test_*.py"))
COLLECT = """
import sys
from sglang.test.ci.ci_register import collect_tests
for test in collect_tests(sys.argv[1:], sanity_check=True):
    print(test.backend.name, test.filename)
"""


@pytest.fixture(scope="module", params=trees.BASES)
def python(request, overlay_tree_of):
    """Run Python with the patched tree on its path."""
    path = os.pathsep.join(map(str, (overlay_tree_of(request.param), *SUPPORT_PATHS)))
    environment = {**os.environ, **SERVER_ENVIRONMENT, "PYTHONPATH": path}

    def run(*arguments):
        return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)

    return run


def test_sglangs_collector_takes_every_registered_test(python):
    collected = python("-c", COLLECT, *map(str, FILES))
    assert collected.returncode == 0, collected.stderr
    assert {Path(line.split(" ", 1)[1]) for line in collected.stdout.splitlines()} == set(FILES)


def test_every_registered_test_names_the_feature_it_comes_with():
    features = yaml.safe_load((REGISTERED.parents[1] / "patches" / "manifest.yml").read_text())["features"]
    named = {file.name: dict(assignments(ast.parse(file.read_text()))).get("FEATURE") for file in FILES}
    assert set(named.values()) == set(features), named


def test_the_cpu_test_passes(python):
    done = python(str(REGISTERED / "moe" / "test_moe_deferred_finalize_cpu.py"))
    assert done.returncode == 0, done.stderr
    assert "Ran 2 tests" in done.stderr and "OK" in done.stderr


NAMED = """
import importlib, sys, unittest
for file in sys.argv[1:]:
    sys.path[:0] = [file.rpartition("/")[0]]
    module = importlib.import_module(file.rpartition("/")[2].removesuffix(".py"))
    suites = [list(suite) for suite in unittest.TestLoader().loadTestsFromModule(module)]
    print(module.__name__, *(f"{suite[0].__class__.__module__}.{suite[0].__class__.__name__}" for suite in suites if suite))
"""


def test_no_file_runs_a_base_class_of_its_arms(python):
    """unittest runs all test classes that a module names, also imported ones; a base class has no model to serve."""
    named = python("-c", NAMED, *map(str, FILES))
    assert named.returncode == 0, named.stderr
    lines = [line.split() for line in named.stdout.splitlines() if line.startswith("test_")]
    assert len(lines) == len(FILES)
    assert all(cases and all(case.startswith(f"{module}.") for case in cases) for module, *cases in lines), named.stdout
