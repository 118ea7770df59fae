"""The table of measurements: what it takes and refuses, and that no way is picked that was measured slower than stock nearby."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_overlay.srt.environ import POLICY, WAYS
from sglang_overlay.srt.layers.moe.boundary.model import Boundary
from sglang_overlay.srt.layers.moe.boundary.policy import BUILT_IN, Entry, Point, Policy, PolicyError, Table

microseconds = st.floats(0.5, 500)
figures = st.dictionaries(st.sampled_from(WAYS), microseconds)
points = st.lists(st.integers(1, 300), unique=True, max_size=6).flatmap(
    lambda tokens: st.tuples(*(st.builds(Point, st.just(count), microseconds, figures) for count in sorted(tokens)))
)
policies = points.map(lambda measured: Policy(measured, "made up"))
tokens = st.integers(1, 400)

POINT = {"tokens": 1, "stock_us": 6.9, "ways_us": {"fused": 4.2}}
ENTRY = {"arch": "sm90", "world_size": 2, "hidden": 7168, "source": "made up", "points": [POINT]}


def neighbours(policy, num_tokens):
    """The measured points at or around a number of tokens."""
    at = [point for point in policy.points if point.tokens == num_tokens]
    below = [point for point in policy.points if point.tokens < num_tokens][-1:]
    above = [point for point in policy.points if point.tokens > num_tokens][:1]
    return at or below + above


@given(policies, tokens)
def test_a_way_is_named_only_if_it_was_faster_than_stock_at_every_neighbour(policy, num_tokens):
    for way in policy.ways(num_tokens):
        assert all(point.ways_us[way] < point.stock_us for point in neighbours(policy, num_tokens))


@given(policies, tokens)
def test_the_first_named_is_the_fastest_at_the_next_point(policy, num_tokens):
    named = policy.ways(num_tokens)
    if named:
        above = next(point for point in policy.points if point.tokens >= num_tokens)
        assert [above.ways_us[way] for way in named] == sorted(above.ways_us[way] for way in named)


@given(policies, tokens)
def test_beyond_the_points_nothing_is_named(policy, num_tokens):
    if all(point.tokens < num_tokens for point in policy.points):
        assert policy.ways(num_tokens) == ()


@given(policies, tokens, st.sampled_from(WAYS))
def test_a_way_is_never_named_beyond_its_largest(policy, num_tokens, way):
    assert (way in policy.ways(num_tokens)) <= (num_tokens <= policy.largest(way))
    assert (policy.largest(way) == 0) or way in policy.ways(policy.largest(way))


@given(policies, tokens)
def test_wins_up_to_says_whether_any_smaller_forward_gains(policy, max_tokens):
    assert policy.wins_up_to(max_tokens) == any(policy.ways(count) for count in range(1, max_tokens + 1))


@given(policies, tokens, st.sampled_from(("auto", *WAYS)), st.integers(0, 300))
def test_a_boundary_says_what_it_takes_and_gains_in_every_range(policy, max_tokens, wanted, separate_up_to):
    kept = policy if wanted == "auto" else policy.only(wanted)
    boundary = Boundary(wanted, separate_up_to, kept)
    assert boundary.gains_up_to(max_tokens) == any(map(boundary.gains, range(1, max_tokens + 1)))
    told = re.findall(r"(\w+)( \(measured faster than stock\))? up to (\d+) tokens", boundary.ranges(max_tokens))
    for count in range(1, max_tokens + 1):
        way, gains = next((way, bool(gains)) for way, gains, end in told if count <= int(end))
        assert (way, gains) == (boundary.way(count), boundary.gains(count))


@given(policies, tokens, st.sampled_from(WAYS))
def test_auto_takes_no_way_it_cannot_run(policy, num_tokens, way):
    assert Boundary("auto", 0, policy).way(num_tokens) == "eager"
    assert Boundary(way, 0).way(num_tokens) == "eager"


@given(policies)
def test_a_table_survives_its_file(policy):
    table = Table([Entry("sm90", 4, 7168, "made up", list(policy.points)), Entry("sm100", 4, 7168, "made up", [])])
    assert Table.from_json(table.to_json()) == table
    assert table.policy("sm90", 4, 7168) == policy
    assert table.policy("sm90", 8, 7168) == Policy()


def test_the_built_in_table_can_be_read():
    assert BUILT_IN.is_file()
    Table.read()


@pytest.mark.parametrize("change, words", [
    ({"version": 2, "entries": []}, "version must be 1, got 2"),
    ({"entries": []}, "the table must be an object with version, entries"),
    ([], "the table must be an object"),
    ({"version": 1, "entries": [{**ENTRY, "top_k": 8}]}, "entries[0] must be an object with arch"),
    ({"version": 1, "entries": [{**ENTRY, "hidden": "7168"}]}, "entries[0].hidden must be of type int, got '7168'"),
    ({"version": 1, "entries": [{**ENTRY, "world_size": True}]}, "entries[0].world_size must be of type int, got True"),
    ({"version": 1, "entries": [ENTRY, ENTRY]}, "entries[1] is a second entry"),
    ({"version": 1, "entries": [{**ENTRY, "points": [POINT, POINT]}]}, "entries[0].points must ascend in tokens, got [1, 1]"),
    ({"version": 1, "entries": [{**ENTRY, "points": [{**POINT, "tokens": 0}]}]}, "tokens must be a finite number above 0"),
    ({"version": 1, "entries": [{**ENTRY, "points": [{**POINT, "stock_us": float("nan")}]}]}, "stock_us must be a finite"),
    ({"version": 1, "entries": [{**ENTRY, "points": [{**POINT, "ways_us": {"turbo": 1}}]}]}, "unknown way 'turbo'; there are fused"),
    ({"version": 1, "entries": [{**ENTRY, "points": [{**POINT, "ways_us": {"fused": "4"}}]}]}, "ways_us.fused must be of type float"),
])
def test_a_malformed_table_is_refused_with_the_place(tmp_path, change, words):
    file = tmp_path / "table.json"
    file.write_text(json.dumps(change))
    with pytest.raises(PolicyError) as refused:
        Table.read(str(file))
    assert words in str(refused.value) and str(file) in str(refused.value) and POLICY.name in str(refused.value)


@pytest.mark.parametrize("content, words", [(None, "cannot be read"), (b"{", "is not JSON"), (b"\xff\xfe\xff", "cannot be read")])
def test_a_file_that_is_no_table_is_named(tmp_path, content, words):
    file = tmp_path / "table.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(PolicyError, match=words) as refused:
        Table.read(str(file))
    assert str(file) in str(refused.value)
