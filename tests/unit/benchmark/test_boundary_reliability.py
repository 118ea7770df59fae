"""Which scenarios ``benchmark/boundary_reliability.py`` runs."""

import pytest


@pytest.mark.parametrize(
    "ranks, gpus, left_out",
    [
        (1, 1, {"skewed", "rank dies", "other number of tokens", "allocation fails", "two groups"}),
        (2, 2, set()),
        (8, 8, set()),
        (2, 1, {"other number of tokens"}),
        (4, 1, {"other number of tokens", "rank dies"}),
    ],
)
def test_what_its_ranks_and_gpus_allow(benchmark_module, monkeypatch, ranks, gpus, left_out):
    module = benchmark_module("boundary_reliability")
    monkeypatch.setattr(module.torch.cuda, "device_count", lambda: gpus)
    assert set(module.scenarios(ranks)) == {*module.SCENARIOS, "two groups"} - left_out
