"""SGLang in this process: one rank, on the GPU where there is one, else on the CPU."""

import os

import pytest
from sglang_rank import start_one_rank


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory):
    """SGLang's process groups and settings for one rank, with deferral on; gives the device."""
    os.environ["SGLANG_ENABLE_MOE_DEFERRED_FINALIZE"] = "1"
    return start_one_rank(tmp_path_factory.mktemp("model"))
