"""Kimi-K2.5 with NVFP4 experts and an EAGLE3 draft on 8 B200: deferred finalize on against off, accept length compared.

The target's hidden states feed the draft: a residual captured before its reduce would cost accept length before it costs accuracy.
"""

import unittest

import moe_deferred_finalize_ab
import requests

from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=5400, suite="nightly-8-gpu-b200", nightly=True)
FEATURE = "deferred-finalize"

ACCEPT_LENGTHS = {}
LARGEST_LOSS = 0.05  # of an accept length, between the two arms


class TestKimiK25Stock(moe_deferred_finalize_ab.DeferredFinalizeServer):
    model = "nvidia/Kimi-K2.5-NVFP4"
    enable = "0"
    gsm8k_score_threshold = 0.92
    other_args = [
        "--tp", "8", "--moe-runner-backend", "flashinfer_trtllm", "--trust-remote-code",
        "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "lightseekorg/kimi-k2.5-eagle3",
        "--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4",
    ]  # fmt: skip

    def test_gsm8k(self):
        super().test_gsm8k()
        state = requests.get(self.base_url + "/server_info", timeout=60).json()["internal_states"][0]
        ACCEPT_LENGTHS[self.enable] = state["avg_spec_accept_length"]


class TestKimiK25ToDeferred(TestKimiK25Stock):
    """Runs after the stock arm: unittest goes by name."""

    enable = "1"

    def test_gsm8k(self):
        super().test_gsm8k()
        self.assertIn("0", ACCEPT_LENGTHS, "run the whole file: the stock arm gives the accept length to compare with")
        self.assertGreater(ACCEPT_LENGTHS["1"], ACCEPT_LENGTHS["0"] - LARGEST_LOSS)


if __name__ == "__main__":
    unittest.main()
