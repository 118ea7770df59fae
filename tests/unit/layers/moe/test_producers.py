"""The producers' parts that need no SGLang: the native experts and the identity index."""

import pytest
import torch
import torch.nn.functional as F

from sglang_overlay.srt.layers.moe.deferred_output import DeferredMoeOutput, finalize
from sglang_overlay.srt.layers.moe.moe_runner import producers
from sglang_overlay.srt.layers.moe.moe_runner.producers import TABLE, identity_index, positions, run_experts_in_order

EXPERTS, HIDDEN, INTERMEDIATE = 6, 16, 12
CPU = torch.device("cpu")


def expert_weights(seed=0, bias=False):
    random = torch.Generator().manual_seed(seed)
    w13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=random)
    w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=random)
    if not bias:
        return w13, w2, None, None
    return w13, w2, torch.randn(EXPERTS, 2 * INTERMEDIATE, generator=random), torch.randn(EXPERTS, HIDDEN, generator=random)


def dense_moe(x, ids, weights, w13, w2, b13, b2, activation):
    """Every token through each of its experts in float64, one by one."""
    act = {"silu": F.silu, "gelu": F.gelu}[activation]
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(ids.shape[0]):
        for expert, weight in zip(ids[token].tolist(), weights[token].double()):
            if expert < 0:
                continue
            gate_up = w13[expert].double() @ x[token].double() + (0 if b13 is None else b13[expert].double())
            gate, up = gate_up[:INTERMEDIATE], gate_up[INTERMEDIATE:]
            out[token] += weight * (w2[expert].double() @ (act(gate) * up) + (0 if b2 is None else b2[expert].double()))
    return out


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("masked", [0.0, 0.5, 1.0])
def test_native_experts_then_finalize_is_the_moe(activation, bias, masked):
    random = torch.Generator().manual_seed(2)
    x = torch.randn(9, HIDDEN, generator=random)
    ids = torch.stack([torch.randperm(EXPERTS, generator=random)[:3] for _ in range(9)]).int()
    ids = torch.where(torch.rand(9, 3, generator=random) < masked, -1, ids)
    weights = torch.rand(9, 3, generator=random)
    experts = expert_weights(bias=bias)
    rows = run_experts_in_order(x, ids, *experts, activation)
    index = rows.expanded_idx_to_permuted_idx
    assert index.dtype == torch.int32 and (index < 0).equal(ids < 0)
    assert sorted(index[index >= 0].tolist()) == list(range(rows.gemm2_out.shape[0]))
    out = finalize(DeferredMoeOutput(rows.gemm2_out, index, weights, 9, 3, HIDDEN))
    reference = dense_moe(x, ids, weights, *experts, activation)
    assert (out.double() - reference).norm() <= 1e-6 * max(reference.norm().item(), 1e-30)


def test_identity_index_marks_pairs_without_a_local_expert():
    ids = torch.tensor([[4, -1], [0, 2]], dtype=torch.int32)
    assert identity_index(ids).tolist() == [[0, -1], [2, 3]]
    assert identity_index(ids).dtype == torch.int32


def test_where_all_experts_are_local_the_identity_is_there_already():
    ids = torch.tensor([[4, 1], [0, 2], [5, 3]])
    index = identity_index(ids, all_are_local=True)
    assert index.tolist() == [[0, 1], [2, 3], [4, 5]] and index.dtype == torch.int32 and index.is_contiguous()
    assert index.data_ptr() == identity_index(ids[:1], all_are_local=True).data_ptr()


def test_positions_made_in_a_capture_are_not_kept(monkeypatch):
    monkeypatch.setattr(producers, "_POSITIONS", {})
    monkeypatch.setattr(producers, "is_capturing", lambda: True)
    assert positions(3, CPU).tolist() == [0, 1, 2] and not producers._POSITIONS
    monkeypatch.setattr(producers, "is_capturing", lambda: False)
    kept = positions(3, CPU)
    assert positions(5, CPU).data_ptr() == kept.data_ptr() == producers._POSITIONS[CPU].data_ptr()


def test_more_positions_than_are_kept_are_made_anew():
    count = producers.KEPT_POSITIONS + 1
    found = positions(count, CPU)
    assert found[-1] == count - 1 and found.data_ptr() != positions(1, CPU).data_ptr()


def test_the_table_names_each_configuration_once():
    keys = [(row.quant_method, row.runner_backend, row.device) for row in TABLE]
    assert len(keys) == len(set(keys))
    assert {row.weight_dtype for row in TABLE} <= {torch.float32, torch.bfloat16}
    assert {row.scale for row in TABLE} <= {"finalize", "kernel", "model", "top-k"}
