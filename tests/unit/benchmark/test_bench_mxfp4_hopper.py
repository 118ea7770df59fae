"""How the benchmark of MXFP4 experts on Hopper goes through its points, without a GPU: over the kernel's stand-in, at a small size."""

import json
import sys
import time

import megamoe_stand_in
import mxfp4_moe
import pytest
import torch

SHAPE = mxfp4_moe.Shape(experts=4, intermediate=128, hidden=128, top_k=2)


@pytest.fixture
def bench(benchmark_module, monkeypatch):
    module = benchmark_module("bench_mxfp4_hopper")
    megamoe_stand_in.install(lambda name, stand_in: monkeypatch.setitem(sys.modules, name, stand_in))
    monkeypatch.setattr(megamoe_stand_in, "capturing", False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, value in {"CALLS": 2, "SHAPES": {"small": SHAPE, "other": SHAPE}, "EXACT_TOKENS": (1, 3, 70), "TIMED_TOKENS": (1, 8), "ERROR_TOKENS": (5,), "CAPACITIES": (64, 128)}.items():
        monkeypatch.setattr(module, name, value)
    yield module
    torch.set_num_threads(threads)


@pytest.fixture
def run(bench, tmp_path):
    def run(*words, minutes=60.0, ranks=1, with_peers=False):
        args = bench.parse_arguments(["--json", str(tmp_path / "found.json"), "--shapes", "small", "--rounds", "2", *words])
        args.minutes = minutes
        going = bench.Bench(args, "cpu", time.monotonic())
        going.run(bench.plan(args.shapes, ranks, with_peers))
        return json.loads((tmp_path / "found.json").read_text()), (tmp_path / "found.md").read_text()

    return run


def test_all_points_of_the_kernel_are_measured_and_exact(bench, run):
    report, page = run()
    points = report["points"].values()
    assert len(points) == len(bench.plan(["small"], 1, False)) and report["left"] == 0 and not report["failed"]
    assert all(bench.is_exact(point) for point in points if point["kind"] in ("exact", "idle"))
    assert "14 of 14 points" in page and "| µs, T=8 |" in page and "| 128 |" in page and "not exact" not in page
    (error,) = [point["error"] for point in points if point["kind"] == "error"]
    assert 0 < error < 0.06


def test_two_ranks_on_one_gpu_are_checked_and_not_timed(bench, tmp_path, capsys):
    points = bench.plan(["small"], 2, False, with_times=False)
    assert {point.kind for point in points} == {"exact", "idle", "wide", "error", "memory"} and any(point.idle_rank for point in points)
    args = bench.parse_arguments(["--json", str(tmp_path / "found.json"), "--ranks", "2", "--one-gpu", "--shapes", "small"])
    assert bench.render({**bench.describe(args), "device": "GPU"}).startswith("# MXFP4 experts in FlashInfer's mega kernel on one GPU, 2 ranks\n")
    with pytest.raises(SystemExit):
        bench.parse_arguments(["--json", "found.json", "--one-gpu"])
    assert "--one-gpu is for --ranks 2" in capsys.readouterr().err


def test_what_is_there_is_not_measured_again(run, monkeypatch):
    first, _ = run()
    monkeypatch.setattr(megamoe_stand_in, "MoEEpMegaLayer", None)
    again, _ = run("--resume")
    assert again["points"] == first["points"]


def test_a_file_says_which_run_found_what_and_takes_no_other_kind(bench, run, monkeypatch):
    run(minutes=0.0)
    monkeypatch.setattr(bench, "version_of", lambda module: "another" if module == "cutlass" else "not installed")
    with pytest.raises(SystemExit, match="another kind of run, with another cutlass_dsl"):
        run("--resume")


def test_points_of_a_second_run_are_told_apart(run, tmp_path):
    first, _ = run()
    kept = {**first, "points": {key: point for key, point in first["points"].items() if point["kind"] != "timed"}}
    (tmp_path / "found.json").write_text(json.dumps(kept))
    report, page = run("--resume")
    assert [len(report["runs"]), {point["run"] for point in report["points"].values()}] == [2, {0, 1}]
    assert all((point["run"] == 1) == (point["kind"] == "timed") for point in report["points"].values())
    assert page.count("- Run of ") == 2 and ": timed." in page


def test_it_ends_in_time_and_goes_on_later(run):
    report, page = run(minutes=0.0)
    assert report["points"] == {} and report["left"] == 21 and "Exact checks: none yet." in page
    report, _ = run("--resume")
    assert len(report["points"]) == 21 and report["left"] == 0


def test_a_way_that_cannot_run_is_named_once_with_its_reason(bench, run):
    report, page = run(with_peers=True)
    assert len(report["failed"]) == len(bench.mxfp4_peers.PEERS) * 4
    assert page.count("did not run: small, marlin: RuntimeError: no --sglang") == 1


def test_a_wrong_element_is_counted(bench, run, monkeypatch):
    right = megamoe_stand_in.MoEEpMegaLayer.forward

    def wrong(layer, t, **told):
        out = right(layer, t, **told)
        out[..., 0] += 4096
        return out

    monkeypatch.setattr(megamoe_stand_in.MoEEpMegaLayer, "forward", wrong)
    report, page = run()
    point = next(point for point in report["points"].values() if point["kind"] == "exact" and point["tokens"] == 70)
    assert point["mismatches"] > 0 and not bench.is_exact(point)
    assert "0 of 14 points" in page and "- not exact: kind exact, shape small" in page


def test_an_unwritten_element_is_seen(run, monkeypatch):
    monkeypatch.setattr(megamoe_stand_in.MoEEpMegaLayer, "forward", lambda layer, t, **told: t.output.fill_(float("nan")))
    report, _ = run()
    assert all(point["mismatches"] == point["elements"] for point in report["points"].values() if point["kind"] == "exact")


def test_two_ranks_have_points_with_one_of_them_idle(bench):
    points = bench.plan(["small"], 2, True)
    assert {point.tokens for point in points if point.idle_rank} == {1, 3, 70}
    assert {point.way for point in points if point.kind != "capacity"} == {bench.OWN}
    assert len({point.key for point in points}) == len(points)


def test_interleaving_loses_no_bit_and_mixes_no_two(benchmark_module):
    interleave = benchmark_module("mxfp4_interleave").interleave
    random = torch.Generator().manual_seed(0)
    a, b = (torch.randint(256, (2, 32, 128), generator=random, dtype=torch.uint8) for _ in range(2))
    assert torch.equal(interleave(a) | interleave(b), interleave(a | b)) and torch.equal(interleave(a) ^ interleave(b), interleave(a ^ b))
    ones = sum(((interleave(a) >> bit & 1).sum() for bit in range(8)))
    assert ones == sum((a >> bit & 1).sum() for bit in range(8))
    for bit in (0, 3, 4, 7):  # each bit somewhere of its own
        one = torch.zeros(1, 16, 64, dtype=torch.uint8)
        places = set()
        for place in range(0, one.numel(), 7):
            one.zero_().view(-1)[place] = 1 << bit
            places.add(tuple(map(int, interleave(one).nonzero()[0])))
        assert len(places) == len(range(0, one.numel(), 7))
