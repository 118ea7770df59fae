"""Real servers on real input: the stock release, the overlay switched off, and the overlay at work.

The oracle is transformers, which shares no code with the server. Exact comparisons are between servers of one machine
that get the same messages in the same order, so that the scheduler makes the same batches.
"""
import pytest
import torch

from configurations import (
    CARRYING_LAYERS,
    DEFAULT_MAX_TOKENS,
    ENABLE,
    MAX_TOKENS,
    MOE_LAYERS,
    OFF,
    OFF_0,
    OFF_UNSET,
    ON,
    ON_AUTO,
    ON_EAGER,
    PLACES,
    PROMPTS,
    STOCK,
    TAKING_LAYERS,
    stock_beside,
    ways_at,
)
from observations import expected_counts, series

LOGPROB_TOLERANCE = 1e-4
HIDDEN_TOLERANCE = 1e-4  # relative to the largest value of a row
COUNTERS = ("deferred", "carried", "ways", "not_deferred")

each_place = pytest.mark.parametrize("place", PLACES, ids=str)


def each(*ways):
    """Parametrize a test over places and the ways of serving that are served there."""
    served = [pytest.param(place, way, id=f"{way}-{place}") for way in ways for place in PLACES if ways_at(place, way)]
    return pytest.mark.parametrize("place, way", served)


def test_the_prompts_leave_no_doubt(oracle):
    """No token is so nearly tied that rounding could choose another."""
    assert min(min(continuation.margins) for continuation in oracle) > 10 * LOGPROB_TOLERANCE


@each(*STOCK, *OFF, *ON)
def test_says_what_transformers_says(place, way, observed, oracle):
    """Tokens equal, logprobs close: one prompt at a time and as a batch."""
    seen = observed(place, way)
    for answers in (seen.alone, seen.batch):
        assert [answer.tokens for answer in answers] == [expected.tokens for expected in oracle]
        for answer, expected in zip(answers, oracle):
            assert answer.logprobs == pytest.approx(expected.logprobs, abs=LOGPROB_TOLERANCE, rel=0)


@each(*STOCK, *OFF, *ON)
def test_an_answer_does_not_depend_on_earlier_requests(place, way, observed):
    """Nothing of a forward is left behind for the next one; the floats are equal bit for bit."""
    seen = observed(place, way)
    assert seen.again == seen.alone[0]


@each(*OFF)
def test_switched_off_it_is_the_stock_release(place, way, observed):
    """Floats are equal bit for bit, one prompt at a time and as a batch. Stock's own use of the flag is for kernels of SM100."""
    with_overlay, without = observed(place, way), observed(place, stock_beside(place))
    assert with_overlay.alone == without.alone
    assert with_overlay.batch == without.batch


@each(*STOCK)
def test_the_stock_release_reports_no_counters(place, way, observed):
    """So the servers that are called stock are."""
    assert observed(place, way).counters_after is None


@each(*OFF)
def test_switched_off_nothing_is_counted(place, way, observed):
    """Neither deferred nor reported as not deferred: the overlay's code is not reached."""
    seen = observed(place, way)
    assert seen.counters_after["enable"] == dict(way.flags).get(ENABLE, "auto")
    assert [sum(seen.counters_after[name].values()) for name in COUNTERS] == [0, 0, 0, 0]


@each(*ON)
def test_switched_on_every_moe_layer_defers(place, way, observed):
    """In each forward that fits the token limit; all layers but the last hand their output on, and the next takes it."""
    seen = observed(place, way)
    max_tokens = int(dict(way.flags).get(MAX_TOKENS, DEFAULT_MAX_TOKENS))
    assert seen.counters_after["max_tokens"] == max_tokens
    assert seen.counters_after["layers"] == dict.fromkeys(MOE_LAYERS, "deferrable")
    assert {name: seen.counted(name) for name in COUNTERS} == expected_counts(max_tokens)


@each_place
def test_metrics_say_what_the_counters_say(place, observed):
    """Once, not once per rank; by way and bucket, and by reason."""
    seen = observed(place, ON_EAGER)
    counters = seen.counters_after
    by_tokens = {(way, bucket): count for way, counts in counters["ways_by_tokens"].items() for bucket, count in counts.items()}
    assert series(seen.metrics, "sglang:moe_finalize_finalized", "way", "up_to_tokens") == by_tokens
    assert series(seen.metrics, "sglang:moe_finalize_not_deferred", "reason") == counters["not_deferred"]
    assert series(seen.metrics, "sglang:moe_finalize_deferred", "tp_rank") == {"0": sum(counters["deferred"].values())}
    assert {bucket for _, bucket in by_tokens} == {"1", "4", "8", "16"}


START_LINES = {
    OFF_0: f"not active: {ENABLE}=0",
    OFF_UNSET: "not active: off (auto): not measured faster than stock here",
    ON_AUTO: f"handed to the next layer, taken by eager up to {DEFAULT_MAX_TOKENS} tokens",
    ON_EAGER: f"active in {len(MOE_LAYERS)} of {len(MOE_LAYERS)} MoE layers ({ENABLE}=1, up to 32 tokens): {len(CARRYING_LAYERS)} handed",
}


@each(*STOCK, *OFF, *ON)
def test_at_the_start_each_feature_has_one_line(place, way, observed):
    """On one rank; none with the stock release."""
    lines = [line for line in observed(place, way).log.splitlines() if "MoE overlay" in line]
    if way in STOCK:
        assert lines == []
        return
    deferral, ue8m0, megamoe = lines
    assert "MoE overlay, deferred-finalize: " in deferral and START_LINES[way] in deferral
    assert "MoE overlay, ue8m0-triton-moe: not active (SGLANG_MOE_TRITON_UE8M0=auto): its experts are not block-quantised FP8" in ue8m0
    assert "MoE overlay, mxfp4-megamoe-sm90: not active: SGLANG_MOE_MXFP4_MEGAMOE_SM90=0" in megamoe


@each_place
def test_captured_hidden_states_are_complete(place, observed, oracle, reference):
    """What Eagle3 would see where a layer takes a bundle: finalized, reduced over the ranks, with the residual."""
    *computed_on, _ = [*PROMPTS[-1], *oracle[-1].tokens]
    captured = torch.tensor(observed(place, ON_AUTO).captured)
    expected = reference.layer_inputs(computed_on, TAKING_LAYERS)
    assert captured.shape == expected.shape
    row_sizes = expected.abs().amax(dim=-1, keepdim=True)
    assert ((captured - expected).abs() / row_sizes).max() < HIDDEN_TOLERANCE
