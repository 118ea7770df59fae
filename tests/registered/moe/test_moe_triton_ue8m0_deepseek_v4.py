"""DeepSeek-V4-Flash on 8 H200, its FP4 experts converted to FP8 and run in the Triton MoE: power-of-two activation scales on against off."""

import io
import os
import unittest

from sglang.srt.utils import kill_process_tree
from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.kits.eval_accuracy_kit import GSM8KMixin
from sglang.test.test_utils import DEFAULT_URL_FOR_TEST, CustomTestCase, popen_launch_server

register_cuda_ci(est_time=3600, suite="nightly-8-gpu-h200", nightly=True)

FLAG = "SGLANG_MOE_TRITON_UE8M0"
LAUNCH_SECONDS = 3600


class TestDeepSeekV4FlashUe8m0(GSM8KMixin, CustomTestCase):
    model = "deepseek-ai/DeepSeek-V4-Flash"
    base_url = DEFAULT_URL_FOR_TEST
    gsm8k_score_threshold = 0.93
    gsm8k_num_examples = 1319
    choice = "on"
    scales = "powers of two (UE8M0)"

    @classmethod
    def setUpClass(cls):
        cls.said = (io.StringIO(), io.StringIO())
        cls.process = popen_launch_server(
            cls.model,
            cls.base_url,
            timeout=LAUNCH_SECONDS,
            # The runner is left to SGLang: with converted experts it takes Triton, and no other choice.
            other_args=["--tp", "8", "--trust-remote-code"],
            env={**os.environ, "SGLANG_DSV4_FP4_DEQUANT": "1", FLAG: cls.choice},
            return_stdout_stderr=cls.said,
        )

    @classmethod
    def tearDownClass(cls):
        kill_process_tree(cls.process.pid)

    def test_the_server_takes_these_scales(self):
        """Without it an A/B of two equal arms would pass."""
        log = "".join(stream.getvalue() for stream in self.said)
        self.assertIn(f"activation scales are {self.scales}; {FLAG}={self.choice}", log)


class TestDeepSeekV4FlashContinuous(TestDeepSeekV4FlashUe8m0):
    choice = "off"
    scales = "continuous"


if __name__ == "__main__":
    unittest.main()
