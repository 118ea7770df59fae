"""The deferred-finalize bundle and its reference finalize, as SGLang's CPU suite runs them on a patched checkout."""

import unittest

import torch

from sglang.sglang_overlay.srt.layers.moe.deferred_output import DeferredMoeOutput, finalize
from sglang.sglang_overlay.srt.layers.moe.moe_runner.producers import run_experts_in_order
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=5, suite="base-a-test-cpu")
FEATURE = "deferred-finalize"

TOKENS, TOP_K, EXPERTS, HIDDEN, INTERMEDIATE = 7, 2, 4, 32, 24


class TestMoeDeferredFinalize(CustomTestCase):
    def setUp(self):
        random = torch.Generator().manual_seed(0)
        self.x = torch.randn(TOKENS, HIDDEN, generator=random)
        self.ids = torch.stack([torch.randperm(EXPERTS, generator=random)[:TOP_K] for _ in range(TOKENS)]).int()
        self.weights = torch.rand(TOKENS, TOP_K, generator=random)
        self.w13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=random)
        self.w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=random)
        self.shared = torch.randn(TOKENS, HIDDEN, generator=random)

    def expected(self, scale):
        """The MoE in float64, each token through its experts one by one."""
        total = self.shared.double()
        for token in range(TOKENS):
            for expert, weight in zip(self.ids[token].tolist(), self.weights[token].double()):
                gate, up = (self.w13[expert].double() @ self.x[token].double()).chunk(2)
                gated = torch.nn.functional.silu(gate) * up
                total[token] += scale * weight * (self.w2[expert].double() @ gated)
        return total

    def test_experts_deferred_then_finalized(self):
        rows = run_experts_in_order(self.x, self.ids, self.w13, self.w2)
        bundle = DeferredMoeOutput(
            rows.gemm2_out, rows.expanded_idx_to_permuted_idx, self.weights, TOKENS, TOP_K, HIDDEN
        )
        result = finalize((bundle * 2.5).with_shared_output(self.shared))
        error = (result.double() - self.expected(2.5)).norm() / self.expected(2.5).norm()
        self.assertLess(error.item(), 1e-6)

    def test_a_pair_without_an_expert_contributes_nothing(self):
        rows = torch.full((1, HIDDEN), float("nan"))
        index = torch.full((TOKENS, TOP_K), -1, dtype=torch.int32)
        bundle = DeferredMoeOutput(rows, index, self.weights, TOKENS, TOP_K, HIDDEN, 1.0, self.shared)
        self.assertTrue(torch.equal(finalize(bundle), self.shared))


if __name__ == "__main__":
    unittest.main()
