"""DeepSeek-V4-Flash on 8 H200, its MXFP4 experts in FlashInfer's mega kernel for Hopper against stock's way on Hopper."""

import unittest

import moe_ab

from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=3600, suite="nightly-8-gpu-h200", nightly=True)
FEATURE = "mxfp4-megamoe-sm90"

FLAG = "SGLANG_MOE_MXFP4_MEGAMOE_SM90"
SHARED_ARGS = ["--tp", "8", "--attn-dp-size", "8", "--trust-remote-code"]


class TestDeepSeekV4FlashMegaMoe(moe_ab.Arm):
    """Needs flashinfer-python 0.7.4 and nvshmem4py-cu13; without them the server says so and stops."""

    model = "deepseek-ai/DeepSeek-V4-Flash"
    gsm8k_score_threshold = 0.93
    flag = "1"
    keeps_log = True
    other_args = [*SHARED_ARGS, "--moe-a2a-backend", "flashinfer_megamoe"]
    in_megamoe = True

    @classmethod
    def flags(cls):
        return {FLAG: cls.flag}

    def test_the_experts_are_where_they_should_be(self):
        """Without it an A/B of two equal arms would pass."""
        said = "MXFP4 experts run in FlashInfer's mega kernel for SM90" in self.log()
        self.assertEqual(said, self.in_megamoe)


class TestDeepSeekV4FlashStock(TestDeepSeekV4FlashMegaMoe):
    flag = "0"
    other_args = SHARED_ARGS
    in_megamoe = False


if __name__ == "__main__":
    unittest.main()
