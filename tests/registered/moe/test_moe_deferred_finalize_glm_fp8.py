"""GLM with FP8 block-scale experts on 8 H200 or B200: deferred finalize on against off.

On Hopper the experts run in the Triton runner, on Blackwell in FlashInfer's TRT-LLM kernels; both defer.
"""

import unittest

import moe_deferred_finalize_ab
import torch

from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=3600, suite="nightly-8-gpu-common", nightly=True)
FEATURE = "deferred-finalize"


def moe_runner():
    """The runner under test on this GPU."""
    return "flashinfer_trtllm" if torch.cuda.get_device_capability()[0] >= 10 else "triton"


class TestGlmFp8Deferred(moe_deferred_finalize_ab.DeferredFinalizeServer):
    model = "zai-org/GLM-5-FP8"
    gsm8k_score_threshold = 0.92

    @classmethod
    def setUpClass(cls):
        cls.other_args = ["--tp", "8", "--moe-runner-backend", moe_runner(), "--trust-remote-code"]
        super().setUpClass()


class TestGlmFp8Stock(TestGlmFp8Deferred):
    enable = "0"


if __name__ == "__main__":
    unittest.main()
