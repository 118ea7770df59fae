"""The Triton FP8 MoE with power-of-two activation scales on a GPU, against float64 and beside continuous scales.

Needs a patched SGLang on the path: ``PYTHONPATH=TREE:. pytest -m gpu tests/gpu/test_ue8m0_moe.py``.
"""

import fp8_experts
import fp8_moe
import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_rank")]

TOKENS = (1, 2, 7, 16, 64, 192, 512, 1024, 4096)
SMALL = fp8_experts.Shape(experts=16, intermediate=256, hidden=512, top_k=4)
# Where fp32 and float64 round FC1's output to different bf16 values, a code of FC2's input may differ by a whole step. Quantisation
# itself costs about 0.045.
CODE_FLIPS = 2e-2


@pytest.fixture(scope="module", params=fp8_experts.SHAPES)
def experts(request):
    yield fp8_experts.make_experts(fp8_experts.SHAPES[request.param])
    torch.cuda.empty_cache()


@pytest.fixture
def scales(monkeypatch):
    """The inputs and scales of each quantisation with power-of-two scales, in order."""
    from sglang.sglang_overlay.srt.layers.quantization import ue8m0

    seen, quantize = [], ue8m0.quantize

    def recorded(x, group_size, **more):
        codes, scale = quantize(x, group_size, **more)
        seen.append((x.clone(), scale.clone()))
        return codes, scale

    monkeypatch.setattr(ue8m0, "quantize", recorded)
    return seen


@pytest.mark.parametrize("tokens", TOKENS)
def test_the_whole_moe_against_float64(experts, scales, tokens):
    x, topk_output = fp8_experts.make_input(experts.shape, tokens)
    powers = fp8_experts.run(experts, x, topk_output, scale_ue8m0=True)
    assert len(scales) == 2, "FC1 and FC2 are both quantised"
    rows = tokens * experts.shape.top_k
    for (given, scale), count in zip(scales, (tokens, rows)):
        # Where FC2's input is sorted by expert, it has rows that no token has and nobody wrote.
        finite = given.isfinite().all(1)
        _, expected = fp8_moe.quantise(given[finite], fp8_experts.BLOCK, fp8_moe.power_of_two_scale)
        assert finite.sum() >= count and torch.equal(scale[finite].double(), expected)
        assert (torch.frexp(scale).mantissa == 0.5).all()
    continuous = fp8_experts.run(experts, x, topk_output)
    assert len(scales) == 2, "continuous scales went through the overlay's quantiser"
    assert torch.equal(continuous, fp8_experts.run(experts, x, topk_output, scale_ue8m0=False))

    exact = fp8_experts.oracle(experts, x, topk_output, None, dtype=None)
    wanted = {kind: fp8_experts.oracle(experts, x, topk_output, scale_of)
              for kind, scale_of in (("powers", fp8_moe.power_of_two_scale), ("continuous", fp8_moe.continuous_scale))}
    error = {kind: fp8_moe.relative_error(found, exact) for kind, found in (("powers", powers), ("continuous", continuous))}
    step = {kind: fp8_moe.relative_error(wanted[kind], exact) for kind in wanted}
    own = {"powers": fp8_moe.relative_error(powers, wanted["powers"]), "continuous": fp8_moe.relative_error(continuous, wanted["continuous"])}
    print(f"{experts.shape} T={tokens}: error {error}, of quantisation alone {step}, against the same quantisation {own}")
    assert error["powers"] <= error["continuous"] + max(0.0, step["powers"] - step["continuous"]) + 0.1 * error["continuous"]
    assert own["powers"] <= CODE_FLIPS


@pytest.fixture
def with_flag(monkeypatch):
    from sglang.sglang_overlay.srt import environ

    def set_flag(value):
        monkeypatch.setenv(environ.TRITON_UE8M0.name, value)
        environ.settings.cache_clear()

    yield set_flag
    environ.settings.cache_clear()


def make_layer(scale_fmt, fused=True, monkeypatch=None):
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    if not fused:
        monkeypatch.setenv("SGLANG_CI_DISABLE_MOE_FUSED_FUNC", "1")
    config = Fp8Config(is_checkpoint_fp8_serialized=True, weight_block_size=[128, 128], scale_fmt=scale_fmt)
    with torch.device("cuda"):
        layer = FusedMoE(SMALL.experts, SMALL.hidden, SMALL.intermediate, layer_id=0, top_k=SMALL.top_k, params_dtype=torch.bfloat16,
                         quant_config=config, prefix="experts")
    made = fp8_experts.make_experts(SMALL)
    for name, value in (("w13_weight", made.w13), ("w2_weight", made.w2), ("w13_weight_scale_inv", made.w13_scale), ("w2_weight_scale_inv", made.w2_scale)):
        getattr(layer, name).data.copy_(value)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


@pytest.mark.parametrize("tokens", [1, 64, 512])
def test_a_declared_layer_on_each_path(with_flag, scales, monkeypatch, tokens):
    from sglang.sglang_overlay.srt.layers.moe.deferred_output import finalize
    from sglang.sglang_overlay.srt.layers.moe.moe_runner.producers import triton_producer

    x, topk_output = fp8_experts.make_input(SMALL, tokens)
    with_flag("auto")
    fused = make_layer("ue8m0")
    core = make_layer("ue8m0", fused=False, monkeypatch=monkeypatch)
    monkeypatch.delenv("SGLANG_CI_DISABLE_MOE_FUSED_FUNC")
    result = fused(x.clone(), topk_output)
    assert len(scales) == 2
    assert torch.equal(core(x.clone(), topk_output), result) and len(scales) == 4
    deferred = finalize(triton_producer(fused)(x.clone(), topk_output))
    assert len(scales) == 6 and all((torch.frexp(scale).mantissa == 0.5).all() for _, scale in scales)
    assert fp8_moe.relative_error(deferred, result.double()) < 1e-2
    with_flag("off")
    off = make_layer("ue8m0")(x.clone(), topk_output)
    with_flag("auto")
    assert torch.equal(off, make_layer(None)(x.clone(), topk_output)) and len(scales) == 6
    assert not torch.equal(off, result)


@pytest.mark.parametrize("tokens", [1, 8, 64])
def test_the_choice_survives_a_cuda_graph(tokens):
    experts = fp8_experts.make_experts(SMALL)
    x, topk_output = fp8_experts.make_input(SMALL, tokens)
    for choice in (True, False):
        fp8_experts.run(experts, x, topk_output, scale_ue8m0=choice)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = fp8_experts.run(experts, x, topk_output, scale_ue8m0=choice)
        for _ in range(3):
            x.copy_(fp8_experts.make_input(SMALL, tokens)[0])
            result.fill_(float("nan"))
            graph.replay()
            assert torch.equal(result, fp8_experts.run(experts, x, topk_output, scale_ue8m0=choice))


def test_the_choice_survives_torch_compile():
    experts = fp8_experts.make_experts(SMALL)
    x, topk_output = fp8_experts.make_input(SMALL, 64)

    @torch.compile(fullgraph=True)
    def compiled(x, ids, weights, choice):
        return torch.ops.sglang.outplace_fused_experts(
            x, experts.w13, experts.w2, weights, ids, use_fp8_w8a8=True, w1_scale=experts.w13_scale, w2_scale=experts.w2_scale,
            block_shape=[128, 128], filter_expert=False, scale_ue8m0=choice,
        ) * 2

    for choice in (True, False, True):
        found = compiled(x, topk_output.topk_ids, topk_output.topk_weights, choice)
        assert torch.equal(found, fp8_experts.run(experts, x, topk_output, scale_ue8m0=choice) * 2)


def test_codes_and_scales_are_those_of_sglangs_own_kernel_of_this_kind():
    """Of bf16 input whose scale its rounding cannot move."""
    from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8
    from sglang.sglang_overlay.srt.layers.quantization.ue8m0 import quantize

    x = torch.randn(512, 4096, device="cuda", dtype=torch.bfloat16)
    codes, scale = quantize(x, 128)
    peer_codes, peer_scale = sglang_per_token_group_quant_fp8(x, 128, scale_ue8m0=True)
    assert torch.equal(scale, peer_scale)
    assert torch.equal(codes.view(torch.uint8), peer_codes.view(torch.uint8))
