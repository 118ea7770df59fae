"""Time SGLang's whole Triton FP8 MoE with power-of-two activation scales beside continuous ones, on one GPU.

    python benchmark/bench_ue8m0.py --tree DIR --json benchmark/results/ue8m0_h200.json

``DIR`` holds an ``sglang`` package with the overlay applied; its own quantiser is compiled at first use and needs nvcc. Writes
the JSON file after each point, and beside it the table as ``.md``.

What is timed. ``fused_experts`` as a server calls it: routing alignment, quantisation, FC1, SwiGLU, quantisation, FC2, sum over k.
Continuous is what stock calls, the same function objects. For each shape and T, CUDA graphs of 8 calls, each call with
tokens and a routing of its own, so that experts are read from memory as they are in a model; a time is the replay's, between two
events, over 8. Two graphs of each kind are captured and replayed in turns, A B A B, the order reversed every other round;
the figures are medians over the rounds. The second graph of continuous scales against the first tells how far two
captures of the same thing are apart. ``quantizers`` are the two quantisations alone, in graphs of 20.
``host_us`` is the host's time per call outside a graph.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Callable, Dict, List

import torch
import triton

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "ci"), str(ROOT / "tests" / "oracles")]
import fp8_experts  # noqa: E402
from gpu import describe_run, elapsed_us, host_us, in_turns  # noqa: E402
from sglang_rank import start_one_rank  # noqa: E402

CALLS, QUANTIZER_CALLS = 8, 20
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
LIMIT = 1.01


def main() -> None:
    args = parse_arguments()
    sys.path.insert(0, str(args.tree.resolve()))
    with tempfile.TemporaryDirectory() as folder:
        start_one_rank(Path(folder))
    report = describe(args)
    report["points"] = []
    for name in args.shapes:
        experts = fp8_experts.make_experts(fp8_experts.SHAPES[name])
        for tokens in args.tokens:
            report["points"].append({"shape": name, **measure(experts, tokens, args.rounds)})
            write(report, args.json)
        del experts
        torch.cuda.empty_cache()
    print(render(report))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tree", type=Path, required=True, help="folder that holds the patched sglang package")
    parser.add_argument("--json", type=Path, help="where to write the results; the table goes beside it as .md")
    parser.add_argument("--rounds", type=int, default=40, help="replays of each graph (default: 40)")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help=f"default: {TOKENS}")
    parser.add_argument("--shapes", nargs="+", default=list(fp8_experts.SHAPES), choices=list(fp8_experts.SHAPES))
    return parser.parse_args()


def describe(args: argparse.Namespace) -> dict:
    """What a reader needs to judge or repeat the run."""
    from sglang.version import __version__

    return {
        **describe_run(),
        "triton": triton.__version__,
        "sglang": __version__,
        "calls_per_graph": CALLS,
        "rounds": args.rounds,
    }


def measure(experts: fp8_experts.Experts, tokens: int, rounds: int) -> dict:
    """One point: the whole MoE, its two quantisations, and the host's time."""
    inputs = [fp8_experts.make_input(experts.shape, tokens) for _ in range(CALLS)]

    def whole(scale_ue8m0: bool) -> Callable[[], None]:
        return lambda: [fp8_experts.run(experts, *given, scale_ue8m0=scale_ue8m0) for given in inputs]

    times = take_turns({"A1": whole(False), "B1": whole(True), "A2": whole(False), "B2": whole(True)}, rounds, CALLS)
    continuous, powers = (statistics.median(times[f"{kind}1"] + times[f"{kind}2"]) for kind in "AB")
    return {
        "tokens": tokens, "continuous_us": continuous, "powers_us": powers, "ratio": powers / continuous,
        "second_capture": statistics.median(times["A2"]) / statistics.median(times["A1"]),
        "quantizers": {name: measure_quantizers(rows, columns, rounds) for name, rows, columns in (
            ("FC1", tokens, experts.shape.hidden), ("FC2", tokens * experts.shape.top_k, experts.shape.intermediate))},
        "host_us": {kind: host_us(lambda: fp8_experts.run(experts, *inputs[0], scale_ue8m0=choice), calls=100)
                    for kind, choice in (("continuous", False), ("powers", True))},
    }


def measure_quantizers(rows: int, columns: int, rounds: int) -> dict:
    """The quantiser that stock calls and the overlay's, alone."""
    from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8
    from sglang.sglang_overlay.srt.layers.quantization.ue8m0 import quantize

    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    run = {name: (lambda quantizer=quantizer: [quantizer(x, fp8_experts.BLOCK) for _ in range(QUANTIZER_CALLS)])
           for name, quantizer in (("continuous", sglang_per_token_group_quant_fp8), ("powers", quantize))}
    times = take_turns(run, rounds, QUANTIZER_CALLS)
    return {f"{name}_us": statistics.median(found) for name, found in times.items()}


def take_turns(works: Dict[str, Callable[[], object]], rounds: int, calls: int) -> Dict[str, List[float]]:
    """Microseconds per call of each work, captured, in each round; each timed replay follows an untimed one of its own."""

    def timed(graph: torch.cuda.CUDAGraph) -> float:
        graph.replay()
        return elapsed_us(graph.replay) / calls

    return in_turns({name: partial(timed, captured(work)) for name, work in works.items()}, rounds)


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def write(report: dict, path: Path | None) -> None:
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
        path.with_suffix(".md").write_text(render(report))


def render(report: dict) -> str:
    points = report["points"]
    over = [point for point in points if point["ratio"] > LIMIT]
    worst = max(points, key=lambda point: point["ratio"])
    lines = [
        f"# The Triton FP8 MoE with power-of-two scales on one {report['device']}",
        "",
        f"{report['date'][:10]}, driver {report['driver']}, CUDA {report['cuda']}, torch {report['torch']}, Triton {report['triton']}, "
        f"Python {report['python']}, SGLang {report['sglang']}.",
        f"`{report['command']}`; how: the docstring of `benchmark/bench_ue8m0.py`.",
        "",
        f"Microseconds per call of `fused_experts`, medians of {report['rounds']} replays of each of two CUDA graphs of "
        f"{report['calls_per_graph']} calls; ratio: powers of two / continuous.",
        "",
        f"- geometric mean of the ratios {statistics.geometric_mean(point['ratio'] for point in points):.4f}, largest {worst['ratio']:.4f} "
        f"({worst['shape']}, T={worst['tokens']})",
        f"- points over {LIMIT}: {len(over)} of {len(points)}",
        "",
        "| shape | T | continuous | powers of two | ratio | two captures of continuous | quantise FC1, stock → own | quantise FC2, stock → own | host, stock → own |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join(lines + [render_row(point) for point in points]) + "\n"


def render_row(point: dict) -> str:
    pairs = [*point["quantizers"].values(), {f"{kind}_us": value for kind, value in point["host_us"].items()}]
    cells = [point["shape"], point["tokens"], f"{point['continuous_us']:.2f}", f"{point['powers_us']:.2f}", f"{point['ratio']:.4f}",
             f"{point['second_capture']:.4f}", *(f"{pair['continuous_us']:.2f} → {pair['powers_us']:.2f}" for pair in pairs)]
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    main()
