"""Time the finalize kernel beside SGLang's ``moe_finalize_fuse_shared`` on one GPU.

    python benchmark/bench_finalize.py --peer DIR --json benchmark/results/finalize_h200.json

``DIR`` holds an installed ``sglang`` package (leave ``--peer`` out where ``import sglang`` finds it already); its
JIT compiles the peer at first use and needs nvcc. Writes the JSON file and, beside it, the table as ``.md``.

What is timed. For each (H, K, T) one CUDA graph per kernel holds 20 calls back to back, both kernels launched with
programmatic dependent launch as SGLang launches its own; a time is the replay's, between two events, over 20.
bf16 rows, fp32 weights, fp32 accumulation, shared expert added; every token reads K rows of its own, at random
places. The peer has no scaling factor; the kernel multiplies by 1.

* cold: each of the 20 calls has inputs and a result of its own, and a 512 MiB buffer is read before each replay,
  so that nothing a call reads is in the L2 cache. Bandwidth is counted from this time: T*K*H gathered, T*H shared
  and T*H written elements of 2 bytes, against a device-to-device copy of 2 GiB (bytes read plus bytes written).
* warm: all 20 calls share the inputs, and the graph was replayed just before: what fits in L2 is there, as after
  the second expert GEMM of a small batch.

The kernels take turns within each round, in changing order; the figures are medians over the rounds.

In such a chain a kernel's work ahead of its wait for the kernel before it overlaps that kernel's end: own prefetches
index, weights and shared rows into L2 there, and the peer loads index and weights there where it has many tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple

import torch
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu import copy_bandwidth, describe_run, elapsed_us, exact_finalize, host_us, in_turns, relative_error  # noqa: E402
from sglang_overlay.srt.layers.moe.deferred_output import DeferredMoeOutput  # noqa: E402
from sglang_overlay.srt.layers.moe.finalize_kernel import finalize_cuda  # noqa: E402

CALLS = 20
HIDDEN = (2048, 4096, 5120, 7168)
TOP_K = (4, 6, 8)
TOKENS = (1, 4, 16, 64, 256, 1024)
Finalize = Callable[[DeferredMoeOutput], torch.Tensor]


class Case(NamedTuple):
    hidden: int
    top_k: int
    tokens: int

    @property
    def moved_bytes(self) -> int:
        return self.tokens * (self.top_k + 2) * self.hidden * 2


def main() -> None:
    args = parse_arguments()
    kernels = {"own": finalize_cuda, "peer": load_peer(args.peer)}
    flush = torch.zeros(128 << 20, dtype=torch.float32, device="cuda")
    cases = [Case(h, k, t) for h in args.hidden for k in args.top_k for t in args.tokens]
    report = describe(args)
    report["copy_gb_per_s"] = copy_bandwidth(gibibytes=2)
    report["points"] = [measure(case, kernels, flush, args.rounds, report["copy_gb_per_s"]) for case in cases]
    report["summary"] = summarize(report["points"])
    report["host_us"] = {name: host_us(partial(run, make_bundle(Case(7168, 8, 4))), calls=500) for name, run in kernels.items()}
    table = render(report)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
        args.json.with_suffix(".md").write_text(table)
    print(table)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer", type=Path, help="folder that holds the installed sglang package")
    parser.add_argument("--json", type=Path, help="where to write the results; the table goes beside it as .md")
    parser.add_argument("--rounds", type=int, default=60, help="replays per kernel, point and mode (default: 60)")
    for name, values in (("hidden", HIDDEN), ("top-k", TOP_K), ("tokens", TOKENS)):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=values, help=f"default: {values}")
    return parser.parse_args()


def load_peer(folder: Path | None) -> Finalize:
    """SGLang's kernel behind the bundle; compiled by SGLang's own JIT."""
    if folder:
        sys.path.insert(0, str(folder.resolve()))
    from sglang.kernels.ops.moe.moe_finalize_fuse_shared import moe_finalize_fuse_shared

    def peer(output: DeferredMoeOutput) -> torch.Tensor:
        return moe_finalize_fuse_shared(
            output.gemm2_out,
            output.expanded_idx_to_permuted_idx.view(-1),
            output.expert_weights,
            output.shared_output,
            output.top_k,
            enable_pdl=torch.cuda.get_device_capability() >= (9, 0),
        )

    return peer


def describe(args: argparse.Namespace) -> dict:
    """What a reader needs to judge or repeat the run."""
    properties = torch.cuda.get_device_properties(0)
    return {
        **describe_run(),
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "triton": triton.__version__,
        "sglang": sglang_version(),
        "calls_per_graph": CALLS,
        "rounds": args.rounds,
    }


def sglang_version() -> str:
    try:
        from sglang.version import __version__
    except ImportError:
        return "unknown"
    return __version__


def measure(case: Case, kernels: Dict[str, Finalize], flush: torch.Tensor, rounds: int, copy_gb_per_s: float) -> dict:
    """One point: errors, and the median times of both kernels in both modes."""
    bundles = [make_bundle(case) for _ in range(CALLS)]
    point = {**case._asdict(), "error": {name: error(run, bundles[0]) for name, run in kernels.items()}}
    for mode, inputs in (("cold", bundles), ("warm", bundles[:1] * CALLS)):
        graphs = {name: Captured(run, inputs) for name, run in kernels.items()}
        before = (lambda _: flush.sum()) if mode == "cold" else Captured.replay
        timed = in_turns({name: partial(replay_us, graph, before) for name, graph in graphs.items()}, rounds)
        times = {name: statistics.median(found) for name, found in timed.items()}
        point[mode] = {"own_us": times["own"], "peer_us": times["peer"], "ratio": times["own"] / times["peer"]}
    gb_per_s = case.moved_bytes / point["cold"]["own_us"] / 1e3
    point["gb_per_s"], point["of_copy"] = gb_per_s, gb_per_s / copy_gb_per_s
    return point


def make_bundle(case: Case) -> DeferredMoeOutput:
    hidden, top_k, tokens = case
    pairs, rows = tokens * top_k, tokens * top_k + 128
    index = torch.randperm(rows, device="cuda")[:pairs].int().view(tokens, top_k)
    gemm2_out = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    shared_output = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    weights = torch.rand(tokens, top_k, device="cuda")
    weights /= weights.sum(1, keepdim=True)
    return DeferredMoeOutput(gemm2_out, index, weights, tokens, top_k, hidden, 1.0, shared_output)


def error(run: Finalize, output: DeferredMoeOutput) -> float:
    """``||result - exact|| / ||exact||``, exact in float64."""
    return relative_error(run(output), exact_finalize(output))


class Captured:
    """One CUDA graph of a call per input; the results stay allocated, each in memory of its own."""

    def __init__(self, run: Finalize, inputs: List[DeferredMoeOutput]) -> None:
        run(inputs[0])
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = [run(output) for output in inputs]
        self.replay()

    def replay(self) -> None:
        self.graph.replay()


def replay_us(graph: Captured, before: Callable[[Captured], object]) -> float:
    """Microseconds per call; ``before(graph)`` is queued ahead of the timed replay."""
    before(graph)
    return elapsed_us(graph.replay) / CALLS


def summarize(points: List[dict]) -> dict:
    summary = {}
    for mode in ("cold", "warm"):
        ratios = [point[mode]["ratio"] for point in points]
        summary[mode] = {"geometric_mean": statistics.geometric_mean(ratios), "largest": max(ratios)}
    most_tokens = max(point["tokens"] for point in points)
    summary["least_of_copy"] = min(point["of_copy"] for point in points if point["tokens"] == most_tokens)
    summary["largest_error"] = {name: max(point["error"][name] for point in points) for name in ("own", "peer")}
    return summary


def render(report: dict) -> str:
    summary, points = report["summary"], report["points"]
    most_tokens = max(point["tokens"] for point in points)
    lines = [
        f"# finalize on one {report['device']}",
        "",
        f"{report['date'][:10]}, driver {report['driver']}, CUDA {report['cuda']}, torch {report['torch']}, "
        f"Triton {report['triton']}, Python {report['python']}; "
        f"peer: `moe_finalize_fuse_shared` of SGLang {report['sglang']}.",
        f"`{report['command']}`; how: the docstring of `benchmark/bench_finalize.py`.",
        "",
        f"Microseconds per call, median of {report['rounds']} replays of a CUDA graph of {report['calls_per_graph']} "
        "calls; ratio: own / peer (below 1: own is faster).",
        "",
        *(
            f"- {mode}: geometric mean of the ratios {summary[mode]['geometric_mean']:.3f}, largest "
            f"{summary[mode]['largest']:.3f}"
            for mode in ("cold", "warm")
        ),
        f"- bandwidth at T={most_tokens}, cold: at least {summary['least_of_copy']:.0%} of the copy's "
        f"{report['copy_gb_per_s']:.0f} GB/s",
        f"- host time per call outside a CUDA graph: own {report['host_us']['own']:.0f} µs, peer "
        f"{report['host_us']['peer']:.0f} µs",
        f"- largest relative error against float64: own {summary['largest_error']['own']:.2e}, "
        f"peer {summary['largest_error']['peer']:.2e}",
        "",
        "| H | K | T | own, cold | peer, cold | ratio | own, warm | peer, warm | ratio | GB/s, cold | of copy |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join(lines + [render_row(point) for point in points]) + "\n"


def render_row(point: dict) -> str:
    cells = [point["hidden"], point["top_k"], point["tokens"]]
    for mode in ("cold", "warm"):
        found = point[mode]
        cells += [f"{found['own_us']:.2f}", f"{found['peer_us']:.2f}", f"{found['ratio']:.3f}"]
    cells += [f"{point['gb_per_s']:.0f}", f"{point['of_copy']:.0%}"]
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    main()
