"""What is made of the boundary's measured points: auto's table, and the curves that are drawn."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_overlay.srt.layers.moe.boundary.policy import BUILT_IN, Table

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmark"


def point(hidden, top_k, tokens, **us):
    return {"hidden": hidden, "top_k": top_k, "tokens": tokens, "us": us, "bound_us": 1.0}


REPORT = {
    "world_size": 2, "arch": "sm90", "device": "A GPU",
    "points": [
        point(7168, 8, 4, fused=5.0, flashinfer=8.0, separate=7.0, nccl=15.0, sglang=4.0),
        point(7168, 8, 1, fused=4.00049, flashinfer=6.0, separate=7.0),
        point(7168, 6, 1, fused=1.0, separate=2.0),
        point(4096, 6, 1, fused=3.0, separate=2.0),
        point(4096, 6, 2, fused=3.0),  # separate hung
    ],
}


def test_only_others_kernels_are_peers(benchmark_module):
    """The overlay's own kernel in the regime that it did not choose is no rival, nor the measure of its error."""
    us = {"fused": 6.0, "fused one-shot": 6.0, "fused two-shot": 5.0, "separate": 12.0, "sglang one-shot": 8.0}
    error = {way: [1.0, 2.0] if way == "fused" else [0.5, 0.5] if way.startswith("fused") else [1.5, 2.5] for way in us}
    bench = benchmark_module("bench_boundary")
    found = bench.summarize([{**point(7168, 8, 4, **us), "error": error, "repeatable": dict.fromkeys(us, True)}])
    assert found["error_below_every_peer"] and found["required"]["geometric_mean"] == pytest.approx(0.75)


@pytest.fixture(scope="module")
def policy_table(benchmark_module):
    return benchmark_module("policy_from_results").policy_table


def test_the_table_is_one_that_servers_read(policy_table):
    table = Table.from_json(policy_table(REPORT, "somewhere.json").to_json())
    assert [(entry.key, entry.source) for entry in table.entries] == [
        (("sm90", 2, 4096), "somewhere.json"), (("sm90", 2, 7168), "somewhere.json")]
    wide = table.policy("sm90", 2, 7168)
    assert [(each.tokens, each.stock_us, each.ways_us) for each in wide.points] == [
        (1, 7.0, {"fused": 4.0, "flashinfer": 6.0, "separate": 7.0}), (4, 7.0, {"fused": 5.0, "flashinfer": 8.0, "separate": 7.0})]
    assert wide.ways(1) == ("fused", "flashinfer") and wide.ways(3) == ("fused",)


def test_separate_stands_for_stock_and_is_never_named(policy_table):
    narrow = Table.from_json(policy_table(REPORT, "x").to_json()).policy("sm90", 2, 4096)
    assert [each.tokens for each in narrow.points] == [1] and narrow.ways(1) == ()


def test_on_one_gpu_the_faster_of_two_stands_for_stock(policy_table):
    points = [point(512, 8, 1, fused=2.0, separate=4.0, sglang=5.0), point(512, 8, 2, fused=4.5, separate=5.0, sglang=4.0)]
    without = point(512, 8, 4, fused=1.0, separate=2.0)
    alone = policy_table({**REPORT, "world_size": 1, "points": [*points, without]}, "x").policy("sm90", 1, 512)
    assert [(each.stock_us, each.ways_us, each.faster()) for each in alone.points] == [
        (4.0, {"fused": 2.0, "separate": 4.0}, ("fused",)), (4.0, {"fused": 4.5, "separate": 5.0}, ())]
    with pytest.raises(ValueError, match="separate and sglang"):
        policy_table({**REPORT, "world_size": 1, "points": [without]}, "x")


def test_of_several_top_k_the_one_counts_that_gains_least(policy_table):
    points = [point(512, k, t, fused=us, separate=4.0) for k, t, us in ((6, 2, 4.5), (8, 2, 3.0), (8, 1, 2.0), (6, 1, 1.0))]
    found = policy_table({**REPORT, "points": points}, "x").policy("sm90", 2, 512)
    assert [(each.tokens, each.ways_us["fused"]) for each in found.points] == [(1, 2.0), (2, 4.5)] and found.ways(2) == ()
    hung = policy_table({**REPORT, "points": [*points, point(512, 4, 1, separate=9.0)]}, "x").policy("sm90", 2, 512)
    assert hung.ways(1) == ()


def test_what_the_report_lacks_is_asked_for(policy_table):
    old = {name: value for name, value in REPORT.items() if name != "arch"}
    assert policy_table(old, "x", "sm90").entries[0].arch == "sm90"
    with pytest.raises(ValueError, match="--arch"):
        policy_table(old, "x")
    with pytest.raises(ValueError, match="separate"):
        policy_table({**REPORT, "points": [point(64, 8, 1, fused=1.0)]}, "x")


def test_the_built_in_table_is_what_was_measured(policy_table):
    files = [f"benchmark/results/{name}.json" for name in ("boundary_one_rank_h200", "boundary_h200")]
    tables = [policy_table(json.loads((BENCHMARK.parent / file).read_text()), file, "sm90") for file in files]
    assert BUILT_IN.read_text() == Table([entry for table in tables for entry in table.entries]).to_json()


def test_what_is_quoted_of_the_figures_holds():
    """``policy_from_results`` argues by these."""
    two, one = (json.loads((BENCHMARK / "results" / f"{name}.json").read_text())["points"] for name in ("boundary_h200", "boundary_one_rank_h200"))
    assert min(each["us"]["separate"] - each["us"]["fused"] for each in two if "separate" in each["us"]) > 2.15
    faster = [each for each in one if each["us"]["sglang"] < each["us"]["separate"]]
    assert max(each["us"]["separate"] - each["us"]["sglang"] for each in faster) < 1.7 and min(each["tokens"] for each in faster) == 32


@pytest.mark.parametrize("name", ["boundary_h200", "boundary_one_rank_h200", "boundary_one_rank_h200_in_turns"])
def test_the_tables_of_the_boundary_are_those_of_its_results(benchmark_module, name):
    report = json.loads((BENCHMARK / "results" / f"{name}.json").read_text())
    assert benchmark_module("bench_boundary").render(report) == (BENCHMARK / "results" / f"{name}.md").read_text()


def test_from_files(tmp_path):
    results, table = tmp_path / "results.json", tmp_path / "table.json"
    results.write_text(json.dumps(REPORT))
    command = [sys.executable, str(BENCHMARK / "policy_from_results.py"), "--out", str(table), str(results)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "hidden 7168: 1: fused, 4: fused" in shown and "hidden 4096: 1: stock" in shown
    assert Table.read(str(table)).entries[0].source == str(results)
    again = subprocess.run([*command, str(results)], capture_output=True, text=True)
    assert again.returncode == 2 and "second entry" in again.stderr


def test_curves(benchmark_module):
    plot = benchmark_module("plot_results")
    found = plot.curves(REPORT, 7168, 8)
    assert list(found) == ["fused", "flashinfer", "separate", "nccl", "sglang", "bound"]
    assert found["fused"] == [(1, 4.00049), (4, 5.0)] and found["sglang"] == [(4, 4.0)] and found["bound"] == [(1, 1.0), (4, 1.0)]
    with pytest.raises(ValueError, match="hidden 128"):
        plot.curves(REPORT, 128, 8)


def test_ratios(benchmark_module):
    plot = benchmark_module("plot_results")
    even, ahead = {"stock": [100, 102], "arm": [101, 101]}, {"stock": [100, 99], "arm": [110, 110]}
    served = {"speed": {"auto": {"16": [ahead], "4": [even]}, "fused": {"4": [ahead], "16": []}}}
    found = plot.ratios(served)
    assert [batch for batch, _ in found["auto"]] == [4, 16] and found["auto"][0][1]["ratio"] == 1
    assert [batch for batch, _ in found["fused"]] == [4]
    assert plot.spreads(served) == [(4, pytest.approx(0.02)), (16, pytest.approx(0.01))]


def test_finalize_curves(benchmark_module):
    plot = benchmark_module("plot_results")
    times = {"own_us": 1.0, "peer_us": 2.0}
    report = {"points": [{"hidden": 64, "top_k": 2, "tokens": tokens, "cold": times, "warm": {**times, "own_us": 0.5}} for tokens in (4, 1)]}
    found = plot.finalize_curves(report, 64, 2)
    assert found["own, cold"] == [(1, 1.0), (4, 1.0)] and found["own, warm"] == [(1, 0.5), (4, 0.5)] and found["peer, warm"][0] == (1, 2.0)
    with pytest.raises(ValueError, match="top_k 8"):
        plot.finalize_curves(report, 64, 8)


def test_scale_ratios(benchmark_module):
    points = [{"shape": "wide", "tokens": 8, "ratio": 1.01}, {"shape": "wide", "tokens": 1, "ratio": 0.99}]
    assert benchmark_module("plot_results").scale_ratios({"points": points}) == {"wide": [(1, 0.99), (8, 1.01)]}


def test_curves_of_the_ways_for_mxfp4_experts(benchmark_module):
    plot = benchmark_module("plot_results")
    rows = [("timed", "wide", "own", 8, 2.0), ("timed", "wide", "own", 1, 1.0), ("timed", "wide", "peer", 1, 3.0), ("timed", "other", "own", 1, 4.0), ("error", "wide", "own", 1, 0),
            ("capacity", "wide", "own, 64", 64, 5.0)]
    report = {"points": {str(row): dict(zip(("kind", "shape", "way", "tokens", "us"), row)) for row in rows}}
    assert plot.way_curves(report, "wide") == {"own": [(1, 1.0), (8, 2.0)], "peer": [(1, 3.0)], plot.ONE_LAUNCH: [(64, 5.0)]}
    with pytest.raises(ValueError, match="nothing was measured at narrow"):
        plot.way_curves(report, "narrow")


def test_every_committed_result_that_is_drawn_is_there_with_its_picture(benchmark_module):
    plot = benchmark_module("plot_results")
    images = BENCHMARK.parent / "docs" / "images"
    drawn = [name for names in plot.COMMITTED.values() for name in names]
    assert all((BENCHMARK / "results" / f"{name}.json").is_file() and (images / f"{name}.svg").is_file() for name in drawn)
    assert sorted(file.stem for file in images.iterdir()) == sorted(drawn)
