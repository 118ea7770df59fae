"""The bundle and its reference finalize (cases C1 to C5)."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings, strategies as st

from sglang_overlay.srt.layers.moe.deferred_output import DeferredMoeOutput, finalize, is_deferred

ROUNDING = {torch.float32: 3e-7, torch.float16: 8e-4, torch.bfloat16: 6e-3}


def bundle(tokens=3, top_k=2, hidden=8, *, dtype=torch.float32, weights_dtype=torch.float32, rows=None, stride=0,
           masked=0.0, shared=False, scale=1.0, seed=0):
    """A bundle with random contents: permuted rows, NaN in rows and columns that no token uses."""
    random = torch.Generator().manual_seed(seed)
    pairs = tokens * top_k
    rows = pairs + 5 if rows is None else rows
    gemm2_out = torch.full((rows, hidden + stride), float("nan"), dtype=dtype)
    index = torch.randperm(rows, generator=random)[:pairs]
    gemm2_out[index, :hidden] = torch.randn(pairs, hidden, generator=random).to(dtype)
    index = torch.where(torch.rand(pairs, generator=random) < masked, -1, index).int()
    weights = torch.rand(tokens, top_k, generator=random).to(weights_dtype)
    shared_output = torch.randn(tokens, hidden, generator=random).to(dtype) if shared else None
    return DeferredMoeOutput(gemm2_out, index.view(tokens, top_k), weights, tokens, top_k, hidden, scale, shared_output)


def in_float64(output):
    """``scale * sum_k weight * row + shared`` in float64, from the contract alone."""
    total = torch.zeros(output.num_tokens, output.hidden, dtype=torch.float64)
    for token in range(output.num_tokens):
        for k in range(output.top_k):
            row = int(output.expanded_idx_to_permuted_idx[token, k])
            if row >= 0:
                total[token] += output.expert_weights[token, k].double() * output.gemm2_out[row, : output.hidden].double()
    total *= output.routed_scaling_factor
    return total if output.shared_output is None else total + output.shared_output.double()


def relative_error(result, reference):
    return ((result.double() - reference).norm() / reference.norm().clamp_min(1e-30)).item()


@settings(max_examples=80, deadline=None)
@given(
    tokens=st.integers(0, 20), top_k=st.integers(1, 9), hidden=st.integers(1, 40),
    dtype=st.sampled_from(sorted(ROUNDING, key=str)), weights_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    stride=st.integers(0, 9), masked=st.sampled_from([0.0, 0.4, 1.0]), shared=st.booleans(),
    scale=st.sampled_from([1.0, 2.5, 0.1]), seed=st.integers(0, 10_000),
)
def test_finalize_is_the_formula_to_one_rounding(tokens, top_k, hidden, dtype, weights_dtype, stride, masked, shared, scale, seed):
    output = bundle(tokens, top_k, hidden, dtype=dtype, weights_dtype=weights_dtype, stride=stride, masked=masked,
                    shared=shared, scale=scale, seed=seed)
    result, reference = finalize(output), in_float64(output)
    assert result.shape == (tokens, hidden) and result.dtype == dtype
    assert torch.isfinite(result).all()
    assert relative_error(result, reference) <= ROUNDING[dtype] * 3


@pytest.mark.parametrize("dtype", ROUNDING)
def test_finalize_is_exact_on_a_grid(dtype):
    random = torch.Generator().manual_seed(1)
    output = dataclasses.replace(
        bundle(16, 4, 24, dtype=dtype),
        gemm2_out=torch.randint(-4, 5, (64, 24), generator=random).to(dtype),
        expanded_idx_to_permuted_idx=torch.randperm(64, generator=random).int().view(16, 4),
        expert_weights=2.0 ** -torch.randint(0, 3, (16, 4), generator=random),
        routed_scaling_factor=2.0,
    )
    assert torch.equal(finalize(output).double(), in_float64(output))


def test_c1_fp32_weights_stay_the_fp32_values():
    weights = torch.arange(1, 9).view(1, 8) / 3
    rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(3))
    output = DeferredMoeOutput(rows, torch.arange(8).int().view(1, 8), weights, 1, 8, 16)
    assert torch.equal(output.expert_weights, weights) and output.expert_weights.dtype == torch.float32
    assert relative_error(finalize(output), in_float64(output)) < 1e-6
    packed = dataclasses.replace(output, expert_weights=weights.bfloat16())
    assert relative_error(finalize(packed), in_float64(output)) > 100 * relative_error(finalize(output), in_float64(output))


@pytest.mark.parametrize("tokens, top_k", [(72, 8), (1, 1)])
def test_c2_rows_keep_their_own_weights(tokens, top_k):
    output = bundle(tokens, top_k, 16, seed=4)
    assert relative_error(finalize(output), in_float64(output)) < 1e-6
    if tokens > 1:
        result = finalize(dataclasses.replace(output, gemm2_out=torch.ones_like(output.gemm2_out)))[:, 0]
        assert torch.allclose(result, output.expert_weights.sum(1)) and result.unique().numel() > tokens // 2


def test_c3_a_flat_index_is_shaped_or_refused():
    output = bundle(3, 2)
    flat = dataclasses.replace(output, expanded_idx_to_permuted_idx=output.expanded_idx_to_permuted_idx.flatten())
    assert torch.equal(finalize(flat), finalize(output))
    for shape in ([5], [7], [2, 3], [6, 1]):
        with pytest.raises(ValueError, match=rf"\[3, 2\] or flat \[6\], got \[{', '.join(map(str, shape))}\]"):
            dataclasses.replace(output, expanded_idx_to_permuted_idx=torch.zeros(shape, dtype=torch.int32))


@pytest.mark.parametrize("tokens, rows", [(1, 64), (16, 6272)])
def test_c4_padded_rows_are_not_tokens(tokens, rows):
    padded = bundle(tokens, 8, 16, rows=rows, seed=5)
    assert (padded.num_tokens, padded.gemm2_out.shape[0]) == (tokens, rows)
    result = finalize(padded)
    assert result.shape == (tokens, 16) and torch.isfinite(result).all()
    other_padding = torch.where(padded.gemm2_out.isnan(), 7.0, padded.gemm2_out)
    assert torch.equal(finalize(dataclasses.replace(padded, gemm2_out=other_padding)), result)


def test_c5_the_scaling_factor_is_applied_exactly_once():
    one = DeferredMoeOutput(torch.full((1, 4), 3.0), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1), 1, 1, 4)
    assert finalize(one).tolist() == [[3.0] * 4]
    assert finalize(one * 1.5).tolist() == [[4.5] * 4]
    scaled_in_place = one
    scaled_in_place *= 1.5
    assert is_deferred(scaled_in_place) and finalize(scaled_in_place).tolist() == [[4.5] * 4]
    assert finalize((one * 1.5).with_shared_output(torch.ones(1, 4))).tolist() == [[5.5] * 4]


def test_masked_pairs_contribute_nothing_even_where_everything_else_is_nan():
    output = DeferredMoeOutput(
        torch.full((2, 4), float("nan")), torch.full((2, 3), -1, dtype=torch.int32), torch.full((2, 3), float("nan")),
        2, 3, 4, shared_output=torch.ones(2, 4),
    )
    assert finalize(output).tolist() == [[1.0] * 4] * 2


def test_no_expert_rows_at_all():
    output = DeferredMoeOutput(torch.empty(0, 4), torch.full((2, 1), -1, dtype=torch.int32), torch.ones(2, 1), 2, 1, 4)
    assert finalize(output).tolist() == [[0.0] * 4] * 2


def test_the_shared_output_is_added_once_and_after_the_scale():
    output = bundle(shared=True)
    with pytest.raises(ValueError, match="already holds a shared-expert output"):
        output.with_shared_output(torch.zeros(3, 8))
    with pytest.raises(ValueError, match="before the shared output is added"):
        output * 2.0
    assert output.with_shared_output(None) is output


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(gemm2_out=torch.zeros(9, 7)), ValueError, r"gemm2_out must be \[P, >= 8\], got \[9, 7\]"),
        (dict(gemm2_out=torch.zeros(9)), ValueError, "gemm2_out must be"),
        (dict(gemm2_out=torch.zeros(9, 8, dtype=torch.float64)), TypeError, "gemm2_out must be one of"),
        (dict(expert_weights=torch.zeros(6)), ValueError, r"expert_weights must be \[3, 2\], got \[6\]"),
        (dict(expert_weights=torch.zeros(3, 2, dtype=torch.float16)), TypeError, "expert_weights must be fp32 or bf16"),
        (dict(expanded_idx_to_permuted_idx=torch.zeros(3, 2, dtype=torch.int64)), TypeError, "must be int32"),
        (dict(shared_output=torch.zeros(2, 8)), ValueError, r"shared_output must be \[3, 8\], got \[2, 8\]"),
    ],
)
def test_what_breaks_the_contract_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(bundle(), **change)


def test_a_bundle_is_not_taken_for_a_tensor():
    output = bundle()
    assert is_deferred(output) and not is_deferred(output.gemm2_out) and not is_deferred(None)
    with pytest.raises(AttributeError, match=r"expects a tensor \(it asked for \.shape\)"):
        output.shape
    assert not hasattr(output, "_sglang_needs_allreduce_fusion")
    with pytest.raises(dataclasses.FrozenInstanceError):
        output._sglang_needs_allreduce_fusion = True
    with pytest.raises(TypeError):
        output + torch.zeros(3, 8)
