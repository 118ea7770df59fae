"""DeepSeek-V4-Flash on 8 H200, its FP4 experts converted to FP8 and run in the Triton MoE: power-of-two activation scales on against off."""

import unittest

import moe_ab

from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=3600, suite="nightly-8-gpu-h200", nightly=True)
FEATURE = "ue8m0-triton-moe"

FLAG = "SGLANG_MOE_TRITON_UE8M0"


class TestDeepSeekV4FlashUe8m0(moe_ab.Arm):
    model = "deepseek-ai/DeepSeek-V4-Flash"
    gsm8k_score_threshold = 0.93
    keeps_log = True
    # The runner is left to SGLang: with converted experts it takes Triton, and no other choice.
    other_args = ["--tp", "8", "--trust-remote-code"]
    choice = "on"
    scales = "powers of two (UE8M0)"

    @classmethod
    def flags(cls):
        return {"SGLANG_DSV4_FP4_DEQUANT": "1", FLAG: cls.choice}

    def test_the_server_takes_these_scales(self):
        """Without it an A/B of two equal arms would pass."""
        self.assertIn(f"activation scales are {self.scales}; {FLAG}={self.choice}", self.log())


class TestDeepSeekV4FlashContinuous(TestDeepSeekV4FlashUe8m0):
    choice = "off"
    scales = "continuous"


if __name__ == "__main__":
    unittest.main()
