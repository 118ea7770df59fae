"""What the seams of ``layer_boundary`` leave to SGLang; the rest is in ``test_boundary.py``, on real layers of both bases."""

from types import SimpleNamespace

import pytest

from sglang_overlay.srt import environ
from sglang_overlay.srt.layers import layer_boundary
from sglang_overlay.srt.models import deepseek_v2


@pytest.fixture
def flag(monkeypatch):
    """Sets a flag, that for deferral if none is named, as a server that starts with it sees it."""

    def set_flag(value, flag=environ.ENABLE):
        monkeypatch.setenv(flag.name, value)
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


@pytest.mark.parametrize("enable", ["0", "1", ""])
def test_switched_off_by_its_tokens_the_experts_are_stocks_own(flag, enable):
    flag(enable)
    flag("0", environ.MAX_TOKENS)
    moe = SimpleNamespace(experts=object())
    assert deepseek_v2.experts_or_deferred(moe) is moe.experts


def test_a_caller_that_wants_the_pieces_gets_stock_experts(flag):
    """It merges routed and shared output itself, and knows tensors only."""
    flag("1")
    experts = SimpleNamespace(supports_deferred_finalize=True)
    moe = SimpleNamespace(experts=experts)
    assert layer_boundary.experts_or_deferred(moe, True) is experts
    assert layer_boundary.stock_defers(moe, None, True) is True
