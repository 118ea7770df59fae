"""DeepSeek-V4-Flash, MXFP4 experts through FlashInfer's TRT-LLM kernels on 4 B200: deferred finalize on against off."""

import unittest

import moe_deferred_finalize_ab

from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=2400, suite="nightly-4-gpu-b200", nightly=True)
FEATURE = "deferred-finalize"


class TestDeepSeekV4FlashDeferred(moe_deferred_finalize_ab.DeferredFinalizeServer):
    model = "deepseek-ai/DeepSeek-V4-Flash"
    other_args = ["--tp", "4", "--moe-runner-backend", "flashinfer_mxfp4", "--trust-remote-code"]
    gsm8k_score_threshold = 0.93


class TestDeepSeekV4FlashStock(TestDeepSeekV4FlashDeferred):
    enable = "0"


if __name__ == "__main__":
    unittest.main()
