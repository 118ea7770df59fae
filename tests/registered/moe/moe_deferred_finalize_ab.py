"""What the A/B tests of deferred finalize share: the same server with the flag on and off, under the same accuracy gate."""

import moe_ab
import requests

FEATURE = "deferred-finalize"
ENABLE = "SGLANG_ENABLE_MOE_DEFERRED_FINALIZE"


def moe_finalize(base_url):
    """The overlay's counters of the first scheduler."""
    return requests.get(base_url + "/server_info", timeout=60).json()["internal_states"][0]["moe_finalize"]


class DeferredFinalizeServer(moe_ab.Arm):
    """One arm, with the flag at ``enable``."""

    enable = "1"

    @classmethod
    def flags(cls):
        return {ENABLE: cls.enable}

    def test_what_deferred(self):
        """On, some layer deferred; off, none did: else the A/B compares nothing."""
        requests.post(
            self.base_url + "/generate",
            json={"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 8}},
            timeout=600,
        ).raise_for_status()
        deferred = sum(moe_finalize(self.base_url)["deferred"].values())
        self.assertEqual(deferred > 0, self.enable == "1")
