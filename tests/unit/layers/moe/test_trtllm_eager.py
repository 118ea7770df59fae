"""The eager tests of ``tests/gpu/test_trtllm_stand_in.py`` on a CPU: in a pytest of their own, which has the patched SGLang on its path."""

import os
import re
import subprocess
import sys

import pytest

from cpu_serving import trees
from cpu_serving.server import SERVER_ENVIRONMENT, SUPPORT_PATHS

LIMIT_SECONDS = 600
CONFIGURATIONS, ROUTED, TOKENS = 5, 3, 4


@pytest.mark.parametrize("base", trees.BASES)
def test_the_gpu_tests_without_a_graph_pass_on_a_cpu(overlay_tree_of, base):
    path = os.pathsep.join(map(str, (overlay_tree_of(base), *SUPPORT_PATHS)))
    environment = {**os.environ, **SERVER_ENVIRONMENT, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/test_trtllm_stand_in.py"]
    done = subprocess.run(command, cwd=trees.ROOT, env=environment, timeout=LIMIT_SECONDS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed(?!.*(failed|skipped|error))", done.stdout)
    assert passed and int(passed[1]) == (CONFIGURATIONS + ROUTED) * TOKENS + CONFIGURATIONS, done.stdout[-1000:]
