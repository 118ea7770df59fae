"""What the A/B tests share: one server, launched with a feature's flags, under an accuracy gate.

Import the module, not the class: unittest runs every test class that a file has by name.
"""

import io
import os

from sglang.srt.utils import kill_process_tree
from sglang.test.kits.eval_accuracy_kit import GSM8KMixin
from sglang.test.test_utils import DEFAULT_URL_FOR_TEST, CustomTestCase, popen_launch_server

LAUNCH_SECONDS = 3600


class Arm(GSM8KMixin, CustomTestCase):
    """One arm of an A/B: serves ``model`` with ``other_args`` and the environment of ``flags()``.

    A class that sets ``model`` is an arm; GSM8K runs on it with the threshold of its pair.
    """

    model = None
    other_args = []
    keeps_log = False
    base_url = DEFAULT_URL_FOR_TEST
    gsm8k_num_examples = 1319

    @classmethod
    def flags(cls):
        """``variable -> value``"""
        return {}

    @classmethod
    def setUpClass(cls):
        cls.said = (io.StringIO(), io.StringIO()) if cls.keeps_log else None
        cls.process = popen_launch_server(
            cls.model,
            cls.base_url,
            timeout=LAUNCH_SECONDS,
            other_args=cls.other_args,
            env={**os.environ, **cls.flags()},
            return_stdout_stderr=cls.said,
        )

    @classmethod
    def tearDownClass(cls):
        kill_process_tree(cls.process.pid)

    def log(self):
        """What the server has said so far; needs ``keeps_log``."""
        return "".join(stream.getvalue() for stream in self.said)
