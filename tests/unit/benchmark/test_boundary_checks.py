"""What is concluded from what servers said: ties, distances, pairs of timings, ways that did not run."""

import pytest


@pytest.fixture(scope="module")
def checks(benchmark_module):
    return benchmark_module("boundary_checks")


def answer(tokens, logprobs=None, float32=None):
    logprobs = logprobs or [-1.0] * len(tokens)
    return {"tokens": tokens, "logprobs": logprobs, "float32": float32 or logprobs}


def stock_answer(float32=None):
    return answer([5, 7, 9], float32=float32)


def test_answers_part_at_the_first_differing_token(checks):
    assert checks.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert checks.first_difference([1, 2, 3], [1, 4, 5]) == 1


def test_the_gap_is_float32s_whoever_it_favours(checks):
    stock, arm = stock_answer([-1.0, -1.0, -1.0]), answer([5, 8, 9], float32=[-1.0, -0.5, -9.0])
    assert checks.gap(arm, stock, 1) == checks.gap(stock, arm, 1) == 0.5
    assert checks.gap(arm, {"tokens": [5, 7, 9], "logprobs": [-1.0] * 3}, 1) is None


def test_the_tolerance_is_two_of_stocks_errors_but_the_rarest(checks):
    many = answer([1] * 2000, [-1.0] * 2000, [-1.02] * 1998 + [-3.0] * 2)
    assert checks.tie_tolerance([many]) == pytest.approx(0.04)
    assert checks.percentile([3, 1, 2], 0.5) == 2 and checks.percentile([3, 1, 2], 1) == 3


@pytest.mark.parametrize("tokens, float32, gaps, wrong", [
    ([5, 7, 9], [-1.0, -1.0, -1.0], [], ""),
    ([6, 1, 1], [-1.01, -9.0, -9.0], [pytest.approx(0.01)], ""),  # a tie: what comes behind it is not looked at
    ([5, 8, 9], [-1.0, -1.5, -1.0], [0.5], "1 answers part where float32's gap is over 0.1: 0.5"),
    ([5, 7, 1], [-1.0, -1.0, -0.25], [0.75], "1 answers part where float32's gap is over 0.1: 0.75"),
])
def test_only_ties_may_part(checks, tokens, float32, gaps, wrong):
    compared = checks.compare_tokens([answer(tokens, float32=float32)], [stock_answer()])
    assert compared["gaps"] == gaps and compared["same"] == (not gaps)
    assert checks.gaps_unmet(compared, 0.1) == wrong


def test_what_was_compared_is_counted(checks):
    compared = checks.compare_tokens([answer([5, 8, 1]), answer([5, 7, 9])], [stock_answer()] * 2)
    assert (compared["tokens_compared"], compared["tokens"], compared["first_difference_median"]) == (5, 6, 1)
    assert not compared["bit_equal"]
    assert checks.compare_tokens([stock_answer()], [stock_answer()])["bit_equal"]
    assert not checks.compare_tokens([answer([5, 7, 9], [-1.0, -1.0, -1.0001])], [stock_answer()])["bit_equal"]


def test_distances(checks):
    arm = answer([5, 8, 1], [-1.1, -1.3, -9.0], [-1.0, -1.0, -9.5])
    near = checks.distance_to_stock([arm], [stock_answer()])
    assert near["mean"] == near["max"] == pytest.approx(0.1)
    far = checks.distance_to_float32([arm] * 2, [stock_answer([-1.1] * 3)] * 2)
    assert far["mean"] == pytest.approx(0.3) and far["max"] == 0.5
    assert far["more_than_stock"] == pytest.approx(0.2) and far["standard_error"] == 0
    assert checks.distance_to_stock([answer([1])], [stock_answer()])["mean"] == 0  # parts at once: nothing to compare


def test_turns_alternate_within_and_between_rounds(checks):
    assert checks.turns(0, ["auto"]) == ["stock", "auto", "stock", "auto"]
    assert checks.turns(1, ["auto"]) == ["auto", "stock", "auto", "stock"]
    assert checks.turns(2, ["auto", "off"]) == ["off", "stock", "auto"] * 2


def test_pairs(checks):
    rounds = [{"stock": [100, 102], "arm": [110, 112]}, {"stock": [100, 97], "arm": [100, 97]}, {"stock": [100, 100], "arm": [104, 104]}]
    paired = checks.pair(rounds)
    assert paired["ratio"] == 1.04 and paired["ratio_least"] == 1 and paired["rounds"] == 3
    assert paired["spread"] == pytest.approx(0.03) and paired["stock_ratio_to_itself"] == 1
    assert not checks.is_slower(paired)


@pytest.mark.parametrize("rate, slower", [(99, False), (98, False), (97, True)])
def test_slower_is_what_stocks_own_spread_does_not_explain(checks, rate, slower):
    stock, arm = {"stock": [100, 102]}, {"arm": [rate * 1.01] * 2}
    assert checks.is_slower(checks.pair([{**stock, **arm}])) is slower


COUNTED = {"deferred": {"1": 3}, "not_deferred": {"too many tokens": 1}, "layers": {"1": "hands on"}}


@pytest.mark.parametrize("arm, ways, named, wrong", [
    ("fused", {"fused": 9, "in_layer": 3}, (), ""),
    ("fused", {"fused": 9, "separate": 1}, (), "bundles went by fused, separate, not by fused alone"),
    ("fused", {"fused": 0, "in_layer": 3}, (), "no bundle was taken; not deferred: {'too many tokens': 1}, layers: {'1': 'hands on'}"),
    ("auto", {"fused": 9}, ("fused",), ""),
    ("auto", {"fused": 9}, ("fused", "flashinfer"), "the policy names flashinfer, fused, bundles went by fused"),
    ("auto", {"separate": 9}, ("fused",), "the policy names fused, bundles went by separate"),
    ("auto", {"separate": 9}, (), "the policy names no way for any batch size"),
    ("off", {"eager": 1}, (), "bundles went by eager, nothing should defer"),
])
def test_a_way_that_did_not_run_is_noticed(checks, arm, ways, named, wrong):
    assert checks.way_unmet(arm, {**COUNTED, "ways": ways}, named) == wrong


def test_a_tree_without_the_overlay_is_noticed_where_one_was_asked_for(checks):
    nothing = {"deferred": {}, "ways": {"fused": 0}}
    assert checks.way_unmet("stock", None, overlay=False) == checks.way_unmet("off", nothing) == ""
    assert "without the overlay" in checks.way_unmet("off", None)
    assert "nothing should defer" in checks.way_unmet("off", {**COUNTED, "ways": {"in_layer": 2}})


def results(found):
    versions = {"date": "2030-01-01T00:00", "gpus": ["A GPU, 1.0"], "cuda": "1", "torch": "1", "sglang": "1", "python": "3"}
    servers = {"auto": {"start_seconds": 41.7, "counters": {"ways": {"fused": 5, "in_layer": 2}}}, "stock": {"start_seconds": 40, "counters": None}}
    return {"versions": versions, "commands": ["python x"], "model": "hidden 8", "servers": servers, "found": found}


def test_everything_together(checks):
    stock = {"3": [stock_answer([-1.01] * 3)] * 2, "1": [stock_answer([-1.01] * 3)] * 2}
    good = {"3": [answer([6, 1, 1], [-1.001] * 3, [-1.0] * 3)] * 2}
    bad = {"3": [answer([5, 8, 1], [-1.2, -1.71, -1.2], [-1.0, -1.51, -1.0])] * 2}
    off = {"1": [answer([5, 7, 9], [-1.0, -1.0, -1.1])] * 2}
    speed = {"auto": {"1": [{"stock": [100, 100], "arm": [90, 90]}], "4": [{"stock": [100, 101], "arm": [110, 110]}]}}
    found = checks.conclude({"fused": good, "stock": stock, "separate": bad, "off": off}, speed)
    assert found["tolerance"]["3"] == pytest.approx(0.02)
    assert found["wrong"] == [
        "separate, 3 at a time: 2 answers part where float32's gap is over 0.02: 0.5, 0.5",
        "separate, 3 at a time: logprobs are 0.2 from stock's, stock's own 0.01 from float32",
        "separate, 3 at a time: logprobs are 0.2 from float32, stock's 0.01",
        "off, 1 at a time: tokens or logprobs are not stock's, bit for bit",
        "auto, batch 1: 0.9000 of stock's speed, spread 0.0000",
    ]
    text = checks.render(results(found))
    assert "| auto | 42 | fused 5 |" in text and "| stock | 40 | none |" in text
    assert "| fused | 3 | 0 of 2 | no | 2 of 6 | 0.01 |" in text
    assert "| auto | 4 | 100 | 110 | 1.0945 (1.0945 to 1.0945) | 0.0100 | 1 |" in text
    assert "- auto, batch 1: 0.9000" in text


def test_a_report_without_a_reference_judges_no_ties(checks):
    stock = {"3": [{name: value for name, value in stock_answer().items() if name != "float32"}]}
    arm = {"3": [{"tokens": [5, 8, 1], "logprobs": [-1.0] * 3}]}
    found = checks.conclude({"stock": stock, "fused": arm}, {})
    assert found["wrong"] == [] and "tolerance" not in found
    assert "not run" in checks.render(results(found))
    assert checks.conclude({}, {}) == {"tokens": {}, "speed": {}, "wrong": []}
