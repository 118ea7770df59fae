"""Block-quantised FP8 experts of the shapes of real models, and SGLang's fused_experts on them."""

from typing import NamedTuple

import torch

import fp8_moe

BLOCK = 128


class Shape(NamedTuple):
    """The experts of one rank: E experts, ``[2N, K]`` and ``[K, N]`` each, top_k a token."""

    experts: int
    intermediate: int
    hidden: int
    top_k: int


# DeepSeek-V4-Flash: 256 experts of 2048, hidden 4096, 6 a token. GLM-5: 256 of 2048, hidden 6144, 8 a token.
SHAPES = {
    "DeepSeek-V4-Flash TP1": Shape(256, 2048, 4096, 6),
    "DeepSeek-V4-Flash TP8": Shape(256, 256, 4096, 6),
    "GLM-5 TP1": Shape(256, 2048, 6144, 8),
    "GLM-5 TP8": Shape(256, 256, 6144, 8),
}


class Dequantised:
    """``[E, N, K]`` weights in float64, one expert at a time: all of them would not fit."""

    def __init__(self, weight, scale):
        self._weight, self._scale, self.shape = weight, scale, weight.shape

    def __getitem__(self, expert):
        return fp8_moe.dequantised_weight(self._weight[expert : expert + 1], self._scale[expert : expert + 1], BLOCK)[0]


class Experts(NamedTuple):
    """E4M3 weights and fp32 block scales; gate rows before up rows."""

    shape: Shape
    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor
    w2_scale: torch.Tensor

    def in_float64(self):
        return Dequantised(self.w13, self.w13_scale), Dequantised(self.w2, self.w2_scale)


def make_experts(shape: Shape, seed: int = 0) -> Experts:
    """Seeded experts on the GPU, weights of a spread of about ``1 / sqrt(K)``."""
    random = torch.Generator("cuda").manual_seed(seed)

    def quantised(rows, columns):
        weight = torch.empty(shape.experts, rows, columns, dtype=torch.float8_e4m3fn, device="cuda")
        for expert in weight:
            expert.copy_(torch.randn(rows, columns, device="cuda", generator=random) * 60)
        scale = torch.rand(shape.experts, rows // BLOCK, columns // BLOCK, device="cuda", generator=random) + 0.5
        return weight, scale / 60 / columns**0.5

    w13, w13_scale = quantised(2 * shape.intermediate, shape.hidden)
    w2, w2_scale = quantised(shape.hidden, shape.intermediate)
    return Experts(shape, w13, w2, w13_scale, w2_scale)


def make_input(shape: Shape, tokens: int):
    """Activations ``[T, K]`` bf16, whose tokens differ in size, and a routing of distinct experts."""
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    x = torch.randn(tokens, shape.hidden, device="cuda") * torch.exp(torch.randn(tokens, 1, device="cuda"))
    ids = torch.rand(tokens, shape.experts, device="cuda").topk(shape.top_k).indices.int()
    weights = torch.rand(tokens, shape.top_k, device="cuda")
    return x.bfloat16(), StandardTopKOutput(weights / weights.sum(1, keepdim=True), ids, None)


def run(experts: Experts, x, topk_output, **choice):
    """SGLang's fused_experts; ``choice`` is ``scale_ue8m0``, or nothing, as stock callers have it."""
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_experts

    config = MoeRunnerConfig(num_experts=experts.shape.experts, num_local_experts=experts.shape.experts, inplace=False)
    return fused_experts(
        x, experts.w13, experts.w2, topk_output, config, use_fp8_w8a8=True, w1_scale=experts.w13_scale, w2_scale=experts.w2_scale,
        block_shape=[BLOCK, BLOCK], **choice,
    )


def oracle(experts: Experts, x, topk_output, scale_of, dtype=torch.bfloat16):
    """The same in float64 (``fp8_moe.moe``)."""
    w13, w2 = experts.in_float64()
    return fp8_moe.moe(x, w13, w2, topk_output.topk_ids, topk_output.topk_weights, scale_of, dtype=dtype)
