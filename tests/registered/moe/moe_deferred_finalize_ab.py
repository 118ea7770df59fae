"""What the A/B tests of deferred finalize share: the same server with the flag on and off, under the same accuracy gate."""

import os

import requests

from sglang.srt.utils import kill_process_tree
from sglang.test.kits.eval_accuracy_kit import GSM8KMixin
from sglang.test.test_utils import DEFAULT_URL_FOR_TEST, CustomTestCase, popen_launch_server

ENABLE = "SGLANG_ENABLE_MOE_DEFERRED_FINALIZE"
LAUNCH_SECONDS = 3600


def moe_finalize(base_url):
    """The overlay's counters of the first scheduler."""
    return requests.get(base_url + "/server_info", timeout=60).json()["internal_states"][0]["moe_finalize"]


class DeferredFinalizeServer(GSM8KMixin, CustomTestCase):
    """One arm of an A/B: serves ``model`` with ``other_args`` and the flag at ``enable``.

    A class that sets ``model`` is an arm; GSM8K runs on it with the threshold of its pair.
    """

    model = None
    other_args = []
    enable = "1"
    base_url = DEFAULT_URL_FOR_TEST
    gsm8k_num_examples = 1319

    @classmethod
    def setUpClass(cls):
        cls.process = popen_launch_server(
            cls.model,
            cls.base_url,
            timeout=LAUNCH_SECONDS,
            other_args=cls.other_args,
            env={**os.environ, ENABLE: cls.enable},
        )

    @classmethod
    def tearDownClass(cls):
        kill_process_tree(cls.process.pid)

    def test_what_deferred(self):
        """On, some layer deferred; off, none did: else the A/B compares nothing."""
        requests.post(
            self.base_url + "/generate",
            json={"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 8}},
            timeout=600,
        ).raise_for_status()
        deferred = sum(moe_finalize(self.base_url)["deferred"].values())
        self.assertEqual(deferred > 0, self.enable == "1")
