"""DeepSeek-V4-Flash on 8 H200, its MXFP4 experts in FlashInfer's mega kernel for Hopper against stock's way on Hopper."""

import io
import os
import unittest

from sglang.srt.utils import kill_process_tree
from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.kits.eval_accuracy_kit import GSM8KMixin
from sglang.test.test_utils import DEFAULT_URL_FOR_TEST, CustomTestCase, popen_launch_server

register_cuda_ci(est_time=3600, suite="nightly-8-gpu-h200", nightly=True)

FLAG = "SGLANG_MOE_MXFP4_MEGAMOE_SM90"
LAUNCH_SECONDS = 3600
SHARED_ARGS = ["--tp", "8", "--attn-dp-size", "8", "--trust-remote-code"]


class TestDeepSeekV4FlashMegaMoe(GSM8KMixin, CustomTestCase):
    """Needs flashinfer-python 0.7.4 and nvshmem4py-cu13; without them the server says so and stops."""

    model = "deepseek-ai/DeepSeek-V4-Flash"
    base_url = DEFAULT_URL_FOR_TEST
    gsm8k_score_threshold = 0.93
    gsm8k_num_examples = 1319
    flag = "1"
    backend_args = ["--moe-a2a-backend", "flashinfer_megamoe"]
    in_megamoe = True

    @classmethod
    def setUpClass(cls):
        cls.said = (io.StringIO(), io.StringIO())
        cls.process = popen_launch_server(
            cls.model,
            cls.base_url,
            timeout=LAUNCH_SECONDS,
            other_args=SHARED_ARGS + cls.backend_args,
            env={**os.environ, FLAG: cls.flag},
            return_stdout_stderr=cls.said,
        )

    @classmethod
    def tearDownClass(cls):
        kill_process_tree(cls.process.pid)

    def test_the_experts_are_where_they_should_be(self):
        """Without it an A/B of two equal arms would pass."""
        log = "".join(stream.getvalue() for stream in self.said)
        said = "MXFP4 experts run in FlashInfer's mega kernel for SM90" in log
        self.assertEqual(said, self.in_megamoe)


class TestDeepSeekV4FlashStock(TestDeepSeekV4FlashMegaMoe):
    flag = "0"
    backend_args = []
    in_megamoe = False


if __name__ == "__main__":
    unittest.main()
