"""The flags: what they take, what they refuse, and that the documented table is the code's."""

import re
from pathlib import Path

import pytest

from cpu_serving import trees
from sglang_overlay.srt.environ import (
    ENABLE,
    FLAGS,
    FUSION,
    MAX_TOKENS,
    MEGAMOE_TOKENS,
    MXFP4_MEGAMOE,
    POLICY,
    TRITON_UE8M0,
    WAYS,
    FlagError,
    misspelt,
    parse,
)

REPOSITORY = Path(__file__).resolve().parents[2]


def test_unset_flags_mean_auto_and_stock():
    flags = parse({})
    assert (flags.enable, flags.fusion, flags.policy, flags.max_tokens) == ("auto", "auto", None, 192)
    assert flags.by_policy and not flags.is_off
    assert flags.triton_ue8m0 == "auto"
    assert flags.mxfp4_megamoe is False


@pytest.mark.parametrize("word, enable", [("1", "1"), ("TRUE", "1"), ("y", "1"), ("0", "0"), ("No", "0"), ("", "auto"), (" 1 ", "1")])
def test_enable_takes_the_words_stock_takes(word, enable):
    flags = parse({ENABLE.name: word})
    assert flags.enable == enable
    assert (flags.is_off, flags.by_policy) == (enable == "0", enable == "auto")


@pytest.mark.parametrize("word", ["", "1"])
def test_no_tokens_that_may_defer_is_off(word):
    flags = parse({ENABLE.name: word, MAX_TOKENS.name: "0"})
    assert flags.is_off and not flags.by_policy


def test_the_table_of_measurements_is_a_file_or_the_built_in_one():
    assert parse({POLICY.name: "built-in"}).policy is None


@pytest.mark.parametrize("word, choice", [("on", "on"), ("OFF", "off"), (" auto ", "auto"), ("", "auto")])
def test_ue8m0_takes_on_off_and_auto(word, choice):
    assert parse({TRITON_UE8M0.name: word}).triton_ue8m0 == choice


@pytest.mark.parametrize("word, on", [("1", True), ("Yes", True), ("0", False), ("", False)])
def test_the_mega_kernel_is_on_or_off(word, on):
    assert parse({MXFP4_MEGAMOE.name: word}).mxfp4_megamoe is on


@pytest.mark.parametrize("word", ["", "0"])
def test_sglangs_own_no_limit_stops_no_server_that_did_not_ask_for_deferral(word):
    assert parse({ENABLE.name: word, MAX_TOKENS.name: "-1"}).is_off
    with pytest.raises(FlagError, match="0 or more"):
        parse({ENABLE.name: "1", MAX_TOKENS.name: "-1"})


@pytest.mark.parametrize(
    "flag, value",
    [(ENABLE, "maybe"), (ENABLE, "2"), (FUSION, "turbo"), (MAX_TOKENS, "many"), (MAX_TOKENS, "1.5"),
     (TRITON_UE8M0, "1"), (TRITON_UE8M0, "declared"), (MXFP4_MEGAMOE, "auto")],
)
def test_an_unknown_value_is_named_with_the_values_taken(flag, value):
    with pytest.raises(FlagError) as refused:
        parse({flag.name: value})
    assert f"{flag.name}={value}" in str(refused.value)
    assert flag.values in str(refused.value)


@pytest.mark.parametrize("way", ["auto", *WAYS])
def test_every_way_is_taken_and_named_in_the_flags_values(way):
    assert parse({FUSION.name: way.upper()}).fusion == way
    assert way in FUSION.values.split(", ")


@pytest.mark.parametrize("value", ["0", "63", "96", "1000", "-64", "64.0", "1k"])
def test_a_workspace_that_is_no_power_of_two_is_refused(value):
    assert parse({MEGAMOE_TOKENS.name: " 4096 "}).megamoe_tokens == 4096 and parse({}).megamoe_tokens == 1024
    with pytest.raises(FlagError, match=f"{MEGAMOE_TOKENS.name}={value}.*power of two"):
        parse({MEGAMOE_TOKENS.name: value})


def test_a_policy_file_is_named_as_written():
    assert parse({POLICY.name: " /tmp/My Table.json "}).policy == "/tmp/My Table.json"


@pytest.mark.parametrize(
    "variable, flag",
    [
        ("SGLANG_MOE_FINALIZE_FUSON", FUSION), ("SGLANG_MOE_DEFERRED_FINALIZE", ENABLE), ("sglang_moe_finalize_fusion", FUSION),
        ("SGLANG_ENABLE_MOE_DEFERED_FINALIZE", ENABLE), ("MOE_FINALIZE_FUSION", FUSION), ("SGLANG_MOE_TRITON_UEM80", TRITON_UE8M0),
        ("SGLANG_MOE_MXFP4_MEGAMOE", MXFP4_MEGAMOE),
    ],
)
def test_a_variable_that_looks_like_a_flag_is_told_with_the_flag(variable, flag):
    assert list(misspelt([variable, "PATH", *(flag.name for flag in FLAGS)])) == [(variable, flag.name)]
    assert list(misspelt([variable], known={variable})) == []


@pytest.mark.parametrize("base", trees.BASES)
def test_no_variable_of_sglangs_own_looks_like_a_flag(base):
    names = set(re.findall(r"SGLANG_\w+", (trees.stock_tree(base) / "sglang/srt/environ.py").read_text()))
    assert len(names) > 300 and list(misspelt(names)) == []


def test_readme_table_is_the_table_in_code():
    readme = (REPOSITORY / "README.md").read_text()
    rows = dict(re.findall(r"^\| `(SGLANG_\w+)` \| `?([^|`]*)`? \|", readme, re.MULTILINE))
    assert rows == {flag.name: flag.default for flag in FLAGS}


def test_every_flag_the_code_reads_is_in_the_table():
    names = set()
    for source in (REPOSITORY / "sglang_overlay").rglob("*.py"):
        names |= set(re.findall(r"SGLANG_[A-Z0-9_]+", source.read_text()))
    assert names == {flag.name for flag in FLAGS}
