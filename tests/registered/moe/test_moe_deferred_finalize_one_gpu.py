"""DeepSeek-Coder-V2-Lite on one GPU, experts in the Triton runner: deferred finalize on against off.

On Hopper the bundles go by the fused way, which the built-in table of measurements names for its hidden size of 2048.
"""

import unittest

import moe_deferred_finalize_ab

from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.test_utils import DEFAULT_MLA_MODEL_NAME_FOR_TEST

register_cuda_ci(est_time=1200, suite="nightly-1-gpu", nightly=True)
FEATURE = "deferred-finalize"


class TestOneGpuDeferred(moe_deferred_finalize_ab.DeferredFinalizeServer):
    model = DEFAULT_MLA_MODEL_NAME_FOR_TEST
    other_args = ["--moe-runner-backend", "triton", "--trust-remote-code"]
    gsm8k_score_threshold = 0.7


class TestOneGpuStock(TestOneGpuDeferred):
    enable = "0"


if __name__ == "__main__":
    unittest.main()
