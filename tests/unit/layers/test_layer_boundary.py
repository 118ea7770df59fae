"""What the seams of ``layer_boundary`` leave to SGLang; the rest is in ``test_boundary.py``, on real layers of both bases."""

from types import SimpleNamespace

import pytest

from sglang_overlay.srt import environ, upstream
from sglang_overlay.srt.layers import layer_boundary
from sglang_overlay.srt.layers.moe.moe_runner import flashinfer_trtllm


@pytest.fixture
def flag(monkeypatch):
    """Sets the flag for deferral, as a server that starts with it sees it."""

    def set_flag(value):
        monkeypatch.setenv(environ.ENABLE.name, value)
        environ.settings.cache_clear()

    yield set_flag
    environ.settings.cache_clear()


@pytest.mark.parametrize("value", ["0", "1"])
def test_boundary_kernels_of_sglangs_own_stay(flag, value):
    flag(value)
    stock = object()
    assert layer_boundary.boundary_fusions(SimpleNamespace(), stock) is stock


def test_switched_off_a_stage_has_no_fusions(flag):
    """As in the stock release; SGLang need not even be there to say so."""
    flag("0")
    assert layer_boundary.boundary_fusions(SimpleNamespace(), None) is None


def test_a_caller_that_wants_the_pieces_gets_stock_experts(flag):
    """It merges routed and shared output itself, and knows tensors only."""
    flag("1")
    experts = SimpleNamespace(supports_deferred_finalize=True)
    moe = SimpleNamespace(experts=experts)
    assert layer_boundary.experts_or_deferred(moe, True) is experts
    assert layer_boundary.stock_defers(moe, None, True) is True


def test_trtllm_runners_without_seams_do_not_defer(monkeypatch):
    """There SGLang's own deferral stays as it is; the overlay's producers would meet a kernel that always finalizes."""
    experts = SimpleNamespace(
        moe_runner_config=SimpleNamespace(activation="silu", is_gated=True),
        w2_weight=SimpleNamespace(shape=(8, 256, 128)), hidden_size_unpadded=256,
    )
    reasons = []
    for base_has_it in (False, True):
        monkeypatch.setattr(upstream, "has_layer_boundary", lambda: base_has_it)
        reasons.append(flashinfer_trtllm.unfit_experts(experts))
    assert reasons[0] == "" and "no seams on this base" in reasons[1]
