"""The adapter to FlashInfer's unfinalized results, without SGLang: cases C1 to C4, and FlashInfers that mislabel weights."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch
import trtllm_stand_in
from trtllm_stand_in import under_fp32_label

from sglang_overlay.srt.layers.moe.deferred_output import finalize
from sglang_overlay.srt.layers.moe.moe_runner import flashinfer_trtllm
from sglang_overlay.srt.layers.moe.moe_runner.flashinfer_trtllm import (
    Unfinalized,
    adapting,
    allocating,
    deferring,
    routed_producer,
)
from sglang_overlay.srt.layers.moe.moe_runner.producers import TABLE

HIDDEN = INTERMEDIATE = 32


@pytest.fixture(autouse=True)
def flashinfer(monkeypatch):
    """Install the stand-in as a FlashInfer of a version, for one test."""
    monkeypatch.setitem(sys.modules, "sglang", None)
    for name in ("flashinfer", "flashinfer.fused_moe", "flashinfer.fused_moe.core"):
        monkeypatch.setitem(sys.modules, name, None)
    trtllm_stand_in.install()
    return trtllm_stand_in.install


class Experts(SimpleNamespace):
    """As much of SGLang's expert layer as the producer asks for, over a 4-bit call with unpacked routing."""

    def __init__(self, experts, factor=None, in_top_k=True):
        random = torch.Generator().manual_seed(0)
        codes = [torch.randint(0, 256, (experts, rows, 16), dtype=torch.uint8, generator=random) for rows in (64, 32)]
        scales = [torch.full((experts, rows, 2), 2.0**-5).to(torch.float8_e4m3fn) for rows in (64, 32)]
        super().__init__(
            gemms=list(zip(codes, scales)),
            moe_runner_config=SimpleNamespace(routed_scaling_factor=factor),
            should_fuse_routed_scaling_factor_in_topk=in_top_k,
            dispatcher=SimpleNamespace(dispatch=lambda **given: SimpleNamespace(**given)),
        )

    def run_moe_core(self, dispatch_output):
        experts, ones = self.gemms[0][0].shape[0], torch.ones(self.gemms[0][0].shape[0])
        x, (weights, ids) = dispatch_output.hidden_states, dispatch_output.topk_output
        call = deferring(trtllm_stand_in.trtllm_fp4_block_scale_routed_moe)
        out = call(
            topk_ids=(ids, weights), routing_bias=None, hidden_states=x, hidden_states_scale=None,
            gemm1_weights=self.gemms[0][0], gemm1_weights_scale=self.gemms[0][1], gemm1_bias=None,
            gemm1_alpha=None, gemm1_beta=None, gemm1_clamp_limit=None,
            gemm2_weights=self.gemms[1][0], gemm2_weights_scale=self.gemms[1][1], gemm2_bias=None,
            output1_scale_scalar=ones, output1_scale_gate_scalar=ones, output2_scale_scalar=ones,
            num_experts=experts, top_k=ids.shape[1], n_group=1, topk_group=1, intermediate_size=INTERMEDIATE,
            local_expert_offset=0, local_num_experts=experts, routed_scaling_factor=1.0, do_finalize=True,
            output=torch.empty(x.shape, dtype=torch.bfloat16),
        )[0]
        return SimpleNamespace(hidden_states=out)

    def rows(self, x, ids):
        """``[T, K, H]`` float64: each pair's expert by itself."""
        experts = trtllm_stand_in.Experts(*(trtllm_stand_in.from_fp4(*gemm) for gemm in self.gemms))
        of_token = trtllm_stand_in.rows_of_every_expert(x.double(), experts).double().transpose(0, 1)
        return torch.stack([rows[chosen.long()] for rows, chosen in zip(of_token, ids, strict=True)])


def produced(experts, tokens, top_k, weights=None):
    """``(bundle, weights, its result in float64)`` for random tokens and weights of n/3."""
    random = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=random).bfloat16()
    ids = torch.rand(tokens, experts.gemms[0][0].shape[0], generator=random).topk(top_k).indices.int()
    weights = (torch.arange(tokens * top_k).view(tokens, top_k) % 29 + 1) / 3 if weights is None else weights
    bundle = routed_producer(experts)(x, (weights, ids))
    return bundle, weights, (experts.rows(x, ids) * weights.double()[..., None]).sum(1)


def before_rounding(bundle):
    return finalize(dataclasses.replace(bundle, gemm2_out=bundle.gemm2_out.float()))


def close(result, wanted):
    return (result.double() - wanted).norm() <= 1e-6 * wanted.norm()


def test_c1_fp32_weights_arrive_as_they_were():
    bundle, weights, wanted = produced(Experts(256), 1, 8)
    assert torch.equal(bundle.expert_weights, weights) and bundle.expert_weights.dtype == torch.float32
    assert abs(bundle.expert_weights.double().sum() - weights.double().sum()) <= 1e-6 * weights.double().sum()
    assert close(before_rounding(bundle), wanted)


@pytest.mark.parametrize("tokens, top_k", [(72, 8), (1, 1)])
def test_c2_fp32_weights_are_not_read_as_bf16(tokens, top_k):
    bundle, weights, wanted = produced(Experts(16), tokens, top_k)
    assert torch.equal(bundle.expert_weights, weights)
    assert close(before_rounding(bundle), wanted)


def test_c3_a_flat_index_is_reshaped():
    bundle, _, wanted = produced(Experts(8), 3, 2)
    assert bundle.expanded_idx_to_permuted_idx.shape == (3, 2) and close(before_rounding(bundle), wanted)


def test_c3_an_index_that_fits_no_shape_is_named():
    result = Unfinalized(torch.zeros(8, HIDDEN), torch.ones(3, 2), torch.zeros(7, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"\[3, 2\] or flat \[6\], got \[7\]"):
        flashinfer_trtllm.bundle_of(result, result.expert_weights, (3, HIDDEN), 1.0)


@pytest.mark.parametrize("tokens, tile, at_least", [(1, 8, 64), (16, 128, 6272)])
def test_c4_padding_rows_are_not_tokens(monkeypatch, tokens, tile, at_least):
    monkeypatch.setattr(trtllm_stand_in, "TILE", tile)
    bundle, _, wanted = produced(Experts(8 if tokens == 1 else 64), tokens, 8)
    assert bundle.gemm2_out.shape[0] >= at_least
    assert bundle.num_tokens == tokens and bundle.gemm2_out.isnan().any()
    assert finalize(bundle).shape == (tokens, HIDDEN) and close(before_rounding(bundle), wanted)


@pytest.mark.parametrize("in_top_k, left", [(True, 1.0), (False, 1.5)])
def test_c5_the_factor_is_left_to_finalize_only_where_top_k_left_it(in_top_k, left):
    bundle, _, wanted = produced(Experts(8, factor=1.5, in_top_k=in_top_k), 4, 2)
    assert bundle.routed_scaling_factor == left and close(before_rounding(bundle), left * wanted)


@pytest.mark.parametrize(
    "version, mislabels",
    [("0.6.9", True), ("0.6.14", True), ("0.6.14+cu130", True), ("0.6.15", False), ("0.6.15+cu130", False), ("0.7.2", False), ("x", False)],
)
def test_a_flashinfer_that_mislabels_is_known_by_its_version(flashinfer, version, mislabels):
    flashinfer(version)
    assert flashinfer_trtllm._mislabels_weights() is mislabels


@pytest.mark.parametrize("tokens, top_k", [(1, 1), (3, 2), (72, 8)])
def test_mislabelled_weights_are_read_from_the_front_of_their_buffer(tokens, top_k):
    weights = torch.rand(tokens, top_k).bfloat16()
    read = flashinfer_trtllm._weights_under_fp32_label(Unfinalized(None, under_fp32_label(weights), None))
    assert read.dtype == torch.bfloat16 and torch.equal(read, weights)


def test_rightly_labelled_weights_are_left_alone():
    weights = torch.rand(3, 2).bfloat16()
    assert flashinfer_trtllm._weights_under_fp32_label(Unfinalized(None, weights, None)) is weights


def test_outside_a_deferral_the_seams_are_the_stock_callees():
    for seam in (allocating, deferring, adapting, flashinfer_trtllm.deferring_fp8_routed):
        assert seam(print) is print


def test_a_kernel_that_fails_leaves_no_deferral_behind():
    experts = Experts(8)
    experts.gemms[0] = (experts.gemms[0][0], None)
    with pytest.raises(AttributeError):
        produced(experts, 2, 2)
    assert deferring(print) is print


def test_packed_routing_is_unpacked():
    weights = torch.tensor([[0.5, -0.25]]).bfloat16()
    packed = torch.tensor([[3, 260]], dtype=torch.int32) << 16 | (weights.view(torch.int16).int() & 0xFFFF)
    routed = trtllm_stand_in.given(packed)
    assert routed.ids.tolist() == [[3, 260]] and torch.equal(routed.weights, weights)


def test_each_trtllm_row_says_what_its_routing_hands_over():
    rows = [row for row in TABLE if row in flashinfer_trtllm.ROWS]
    assert len(rows) == 5
    for row in rows:
        by_kernel = row.routing == "bypassed"
        assert row.weight_dtype == (torch.bfloat16 if by_kernel else torch.float32)
        assert row.scale == ("kernel" if by_kernel else "top-k")
