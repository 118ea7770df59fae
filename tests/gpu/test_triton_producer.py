"""The Triton runner's producer on a GPU, for each weight format the table names, beside the stock MoE on the same layer.

Needs a patched SGLang on the path: ``PYTHONPATH=TREE pytest -m gpu tests/gpu``.
"""

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_rank")]

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, SCALE = 16, 512, 256, 4, 2.5
ONE_BF16_ROUNDING = 2.0**-8


def quant_configs():
    from sglang.srt.layers.quantization.blockwise_int8 import BlockInt8Config
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.layers.quantization.w8a8_fp8 import W8A8Fp8Config
    from sglang.srt.layers.quantization.w8a8_int8 import W8A8Int8Config

    return {
        "UnquantizedFusedMoEMethod": None,
        "Fp8MoEMethod": Fp8Config(is_checkpoint_fp8_serialized=True, weight_block_size=[128, 128]),
        "Fp8MoEMethod per tensor": Fp8Config(is_checkpoint_fp8_serialized=True),
        "W8A8FP8MoEMethod": W8A8Fp8Config(is_checkpoint_fp8_serialized=True),
        "W8A8Int8MoEMethod": W8A8Int8Config({}),
        "BlockInt8MoEMethod": BlockInt8Config(is_checkpoint_int8_serialized=True, weight_block_size=[128, 128]),
    }


def make_experts(name):
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    torch.manual_seed(0)
    with torch.device("cuda"):
        experts = FusedMoE(EXPERTS, HIDDEN, INTERMEDIATE, layer_id=0, top_k=TOP_K, params_dtype=torch.bfloat16,
                           quant_config=quant_configs()[name], routed_scaling_factor=SCALE, prefix="experts")
    for parameter in experts.parameters():
        fill(parameter.data)
    experts.quant_method.process_weights_after_loading(experts)
    return experts


def fill(data):
    if data.dtype == torch.int8:
        data.copy_(torch.randint(-127, 128, data.shape, device="cuda"))
    elif data.dtype == torch.float32:  # scales: weights of about 0.05
        data.copy_(torch.rand(data.shape, device="cuda") * 4e-4 + 4e-4)
    else:
        spread = 60.0 if data.dtype == torch.float8_e4m3fn else 0.05
        data.copy_((torch.randn(data.shape, device="cuda") * spread).to(data.dtype))


def routing(tokens, masked=False):
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    ids = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K).indices.int()
    if masked:
        ids = torch.where(torch.rand(ids.shape, device="cuda") < 0.3, -1, ids)
    return StandardTopKOutput(torch.rand(tokens, TOP_K, device="cuda"), ids, None)


def in_float64(bundle):
    rows = bundle.gemm2_out.double()[bundle.expanded_idx_to_permuted_idx.clamp_min(0).long()]
    weights = (bundle.expert_weights.double() * (bundle.expanded_idx_to_permuted_idx >= 0))[..., None]
    return bundle.routed_scaling_factor * (rows * weights).sum(1)


def relative_error(result, reference):
    return ((result.double() - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("name", ["UnquantizedFusedMoEMethod", "Fp8MoEMethod", "Fp8MoEMethod per tensor", "W8A8FP8MoEMethod",
                                  "W8A8Int8MoEMethod", "BlockInt8MoEMethod"])
@pytest.mark.parametrize("tokens", [1, 7, 192])
def test_deferred_then_finalized_is_the_stock_moe(name, tokens):
    from sglang.sglang_overlay.srt.layers.moe.deferred_output import finalize
    from sglang.sglang_overlay.srt.layers.moe.moe_runner.producers import find_row

    experts = make_experts(name)
    row, reason = find_row(experts, "cuda")
    assert row is not None and row.quant_method == name.split()[0], reason
    x, topk_output = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16), routing(tokens)
    before = x.clone()
    bundle = row.make_producer(experts)(x, topk_output)
    assert torch.equal(x, before), "the producer wrote into its input"
    assert bundle.expert_weights.dtype == torch.float32 and torch.equal(bundle.expert_weights, topk_output.topk_weights)
    deferred, stock = finalize(bundle), experts(x.clone(), topk_output)
    reference = in_float64(bundle)
    deferred_error, stock_error = relative_error(deferred, reference), relative_error(stock, reference)
    print(f"{name} T={tokens}: error of the combine, deferred {deferred_error:.2e}, stock {stock_error:.2e}")
    assert deferred_error <= ONE_BF16_ROUNDING / 2
    assert stock_error <= 4 * ONE_BF16_ROUNDING
    assert deferred_error <= stock_error


def test_pairs_without_a_local_expert_are_marked_and_add_nothing():
    from sglang.sglang_overlay.srt.layers.moe.deferred_output import finalize
    from sglang.sglang_overlay.srt.layers.moe.moe_runner.producers import triton_producer

    experts = make_experts("UnquantizedFusedMoEMethod")
    # Negative ids are legal only where other ranks hold further experts; the runner then looks out for them.
    experts.moe_runner_config.num_experts = 2 * EXPERTS
    topk_output = routing(32, masked=True)
    bundle = triton_producer(experts)(torch.randn(32, HIDDEN, device="cuda", dtype=torch.bfloat16), topk_output)
    assert torch.equal(bundle.expanded_idx_to_permuted_idx < 0, topk_output.topk_ids < 0)
    assert relative_error(finalize(bundle), in_float64(bundle)) <= ONE_BF16_ROUNDING / 2
