"""Time the fused boundary kernel on one GPU, every rank a stream, beside another version of its source: for work on the kernel without peers.

    git show REVISION:sglang_overlay/srt/layers/moe/boundary/boundary.cu > before.cu
    python benchmark/boundary_one_gpu.py --against before.cu --json benchmark/results/boundary_one_gpu_NAME.json

What a rank does itself is timed, gathering above all. There is no link: packets go to the GPU's own memory, and ranks share its multiprocessors, so the
figures say which version is faster and not how long a boundary takes; that is ``bench_boundary.py``. One CUDA graph holds 20 boundaries of every rank; a
time is the replay's, between two events, over 20. Versions take turns in changing order; figures are medians. The errors are against float64, results
poisoned with NaN before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Tuple
from unittest.mock import patch

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmark")]
from gpu import describe_run, elapsed_us, exact_finalize, exact_norm, gpus_or_exit, in_turns, poison_free_memory, relative_error  # noqa: E402
from sglang_overlay.srt.layers.moe.boundary import kernel  # noqa: E402
from sglang_overlay.srt.layers.moe.boundary.module import SOURCE, Config, build  # noqa: E402
from sglang_overlay.srt.layers.moe.boundary.plane import ExchangePlane, region_sizes, regions_at  # noqa: E402
from sglang_overlay.srt.layers.moe.deferred_output import DeferredMoeOutput  # noqa: E402

CALLS, EPS = 20, 1e-5
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)


class Inputs(NamedTuple):
    """One bundle a rank; residual and gamma are the same on all."""

    bundles: List[DeferredMoeOutput]
    residual: torch.Tensor
    gamma: torch.Tensor


class Version:
    """One source of the kernel, with a plane for each rank."""

    def __init__(self, source: Path, config: Config, multiprocessors: int, max_tokens: int) -> None:
        self.module = build(config, source)
        rows = (max_tokens, max_tokens)
        sizes = region_sizes(self.module, rows)
        regions = regions_at([self.module.plane_allocate(sum(sizes)) for _ in range(config.world_size)], sizes, rows)
        self.planes = [ExchangePlane(config, rank, max_tokens, multiprocessors, regions, timeout_s=4.0) for rank in range(config.world_size)]
        self.streams = [torch.cuda.Stream() for _ in self.planes]

    def run(self, inputs: Inputs, launch: kernel.Launch, calls: int = 1) -> List[Tuple[torch.Tensor, torch.Tensor]]:
        """The results of every rank's last call."""
        main, results = torch.cuda.current_stream(), []
        with patch.object(kernel, "load", lambda config: self.module), patch.object(kernel, "is_loaded", lambda config: True):
            for stream in self.streams:
                stream.wait_stream(main)
            for _ in range(calls):
                results = []
                for plane, stream, bundle in zip(self.planes, self.streams, inputs.bundles):
                    with torch.cuda.stream(stream):
                        results.append(kernel.fused_boundary(plane, bundle, inputs.residual, inputs.gamma, EPS, launch=launch))
            for stream in self.streams:
                main.wait_stream(stream)
        return results


def main() -> None:
    args = parse_arguments()
    gpus_or_exit(1)
    sources = {"this": SOURCE, **({"against": args.against} if args.against else {})}
    report = describe(args)
    for ranks in args.ranks:
        config = Config(ranks, args.hidden, args.top_k, torch.bfloat16, torch.float32)
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        versions = {name: Version(source, config, multiprocessors, max(args.tokens)) for name, source in sources.items()}
        for tokens in args.tokens:
            launch = launch_that_fits(tokens, config, multiprocessors)
            report["points"].append({"ranks": ranks, "tokens": tokens, **launch._asdict(), **measure(versions, make_inputs(config, tokens), launch, args.rounds)})
            print(report["points"][-1], flush=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    args.json.with_suffix(".md").write_text(render(report))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="where to write the results; a table goes beside it as .md")
    parser.add_argument("--against", type=Path, help="another boundary.cu, for the same calls")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="default: 2 4 8")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help=f"default: {TOKENS}")
    parser.add_argument("--rounds", type=int, default=100, help="replays of each version (default: 100)")
    return parser.parse_args()


def launch_that_fits(tokens: int, config: Config, multiprocessors: int) -> kernel.Launch:
    """The usual launch, with so few clusters that one block of all ranks fits on each multiprocessor: ranks that wait must not keep others out."""
    launch = kernel.choose_launch(tokens, config.hidden, config.world_size, multiprocessors)
    return launch._replace(clusters=max(1, min(launch.clusters, multiprocessors // (config.world_size * launch.cluster))))


def make_inputs(config: Config, tokens: int) -> Inputs:
    generator = torch.Generator("cuda").manual_seed(tokens)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    rows, bundles = tokens * config.top_k + 128, []
    for _ in range(config.world_size):
        index = torch.randperm(rows, device="cuda", generator=generator)[: tokens * config.top_k].int().view(tokens, config.top_k)
        weights = torch.rand(tokens, config.top_k, device="cuda", generator=generator) / config.top_k
        gemm2_out, shared = (randn(rows, config.hidden) * 0.5).bfloat16(), (randn(tokens, config.hidden) * 0.5).bfloat16()
        bundles.append(DeferredMoeOutput(gemm2_out, index, weights, tokens, config.top_k, config.hidden, 2.5, shared))
    return Inputs(bundles, randn(tokens, config.hidden).bfloat16(), (1 + 0.1 * randn(config.hidden)).bfloat16())


def exact_boundary(inputs: Inputs) -> Tuple[torch.Tensor, torch.Tensor]:
    total = inputs.residual.double() + sum(map(exact_finalize, inputs.bundles))
    return exact_norm(total, inputs.gamma, EPS), total


def measure(versions: Dict[str, Version], inputs: Inputs, launch: kernel.Launch, rounds: int) -> dict:
    exact, error, results, graphs = exact_boundary(inputs), {}, {}, {}
    for name, version in versions.items():
        poison_free_memory(inputs.residual)
        ranks = version.run(inputs, launch)
        torch.cuda.synchronize()
        same = all(torch.equal(one, other) for rank in ranks[1:] for one, other in zip(rank, ranks[0]))
        error[name] = [*(relative_error(result, truth) for result, truth in zip(ranks[0], exact)), same]
        results[name] = [result.clone() for result in ranks[0]]
        graphs[name] = captured(lambda version=version: version.run(inputs, launch, CALLS))
    times = in_turns({name: lambda graph=graph: elapsed_us(graph.replay) / CALLS for name, graph in graphs.items()}, rounds + 1)
    us = {name: statistics.median(found[1:]) for name, found in times.items()}
    differ = [bool(torch.ne(*pair).any()) for pair in zip(*results.values())] if len(results) == 2 else []
    return {"us": us, "error_norm_residual_same_on_all_ranks": error, "norm_residual_differ": differ}


def captured(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def describe(args: argparse.Namespace) -> dict:
    return {
        **describe_run(), "hidden": args.hidden, "top_k": args.top_k, "rounds": args.rounds, "points": [],
    }


def render(report: dict) -> str:
    lines = [
        f"# The fused boundary kernel on one {report['device']}, ranks as streams",
        "",
        f"{report['date'][:10]}, driver {report['driver']}, CUDA {report['cuda']}, torch {report['torch']}, Python {report['python']}; "
        f"hidden {report['hidden']}, top_k {report['top_k']}. `{report['command']}`; how: the docstring of `benchmark/boundary_one_gpu.py`.",
        "Microseconds, medians. Not how long a boundary takes: there is no link, and ranks share the GPU.",
        "",
        "| ranks | tokens | this | against | ratio |",
        "|---|---|---|---|---|",
    ]
    for point in report["points"]:
        this, against = point["us"]["this"], point["us"].get("against")
        cells = [str(point["ranks"]), str(point["tokens"]), f"{this:.2f}", *([f"{against:.2f}", f"{this / against:.3f}"] if against else ["", ""])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
