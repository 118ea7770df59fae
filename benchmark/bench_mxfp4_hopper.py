"""Check and time MXFP4 experts in FlashInfer 0.7.4's mega kernel, through the overlay, beside SGLang's ways on Hopper.

    python benchmark/bench_mxfp4_hopper.py --json benchmark/results/mxfp4_hopper_h200.json --sglang DIR
    python benchmark/bench_mxfp4_hopper.py --json benchmark/results/mxfp4_hopper_h200.json --sglang DIR --resume    # until nothing is left
    python benchmark/bench_mxfp4_hopper.py --json benchmark/results/mxfp4_hopper_2xh200.json --ranks 2              # needs NVSHMEM
    python benchmark/bench_mxfp4_hopper.py --json benchmark/results/mxfp4_hopper_NAME.json --ranks 2 --one-gpu      # what is exact, not how fast

``DIR`` holds an ``sglang`` package, of 0.5.23 or 0.5.20, which have the same ways; left out, or where a way cannot run, the results say so. A call ends by itself within
``--minutes``; each point is written when it is there, and ``--resume`` goes on with those that are not. A point that does not come back ends the run
and is left out from then on. ``--interleave-in-torch`` does without FlashInfer's CUTLASS module when the mega kernel's weights are prepared (nvcc,
minutes). ``--one-gpu`` has both ranks on the first GPU, whose time their kernels share: nothing is timed then.

What is checked. ``exact``: on the grid of ``tests/oracles/mxfp4_moe.py`` the result must be that of float64, rounded as the kernel rounds, bit for bit:
every code in sums of all columns, or one column a row and exponents over 11 steps; with and without a limit that clamps; some routes and one
token without an expert; free memory filled with NaN before; the same bits when called again, from a CUDA graph, and from that graph with other
tokens in the same memory. With several ranks each has tokens of its own, and then the last one none. ``idle``: a forward without tokens, then one with. ``wide``: the grid in
sums that Hopper's FP8 tensor cores do not keep whole, of which nothing is asked; the elements that differ are counted. ``error``:
``||result - exact|| / ||exact||``, here too, with random inputs, against a float64 MoE of the dequantised weights that quantises no activations.

What is timed. CUDA graphs of 8 calls, each with tokens and a routing of its own, so that experts are read from memory as they are in a
model; a time is the replay's, between two events, over 8, after an untimed replay; figures are medians over the rounds; with several ranks
those of the slowest. ``capacity``: likewise, with one workspace and as many tokens as that holds. ``memory`` is what
the layer holds for its weights.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import shlex
import statistics
import sys
import time
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Callable, ContextManager, Dict, List, NamedTuple, Optional, Tuple

# The link's multicast stays off, whatever the libraries would choose.
os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmark"), str(ROOT / "ci"), str(ROOT / "tests" / "oracles")]
import mxfp4_moe  # noqa: E402
import mxfp4_peers  # noqa: E402
from gpu import describe_run, elapsed_us, poison_free_memory, relative_error, sglang_version_in, time_limit  # noqa: E402
from mxfp4_interleave import interleaving_in_torch  # noqa: E402
from mxfp4_moe import Shape  # noqa: E402
from sglang_overlay.srt.layers.moe.flashinfer_megamoe import ExpertShape, ExpertWeights, MegaMoeExperts  # noqa: E402

CALLS = 8
SHAPES: Dict[str, Shape] = {
    "DeepSeek-V4-Flash": Shape(256, 2048, 4096, 6),
    "H2048 I1024": Shape(128, 1024, 2048, 8),
    "H5120 I1536": Shape(128, 1536, 5120, 8),
    "H7168 I2048": Shape(256, 2048, 7168, 8),
}
WIDE_TOKENS = 256
LIMITS = {"DeepSeek-V4-Flash": 10.0}  # of the model's SwiGLU, with random inputs
EXACT_TOKENS = (1, 3, 64, 256, 1000)
ERROR_TOKENS = (1, 128)
TIMED_TOKENS = (1, 8, 32, 64, 128, 192, 1024, 2048)
CAPACITIES = (64, 256, 1024, 2048, 4096)
TIMED_KINDS = ("timed", "capacity")
# What a file's runs have in common, and what may differ; a point's "run" is its place among them.
SAME_IN_ALL_RUNS = ("device", "ranks", "one_gpu", "torch", "flashinfer", "cutlass_dsl", "interleaved_in_torch")
OF_A_RUN = ("date", "driver", "sglang")
OWN = "mega kernel"
# Seconds: what a point may take before it counts as hung, and what must be left for one to begin: where its layer is there, where the mega
# kernel's has to be made, and where one of SGLang's has to (which may compile).
HUNG_AFTER, ROOM, ROOM_TO_MAKE, ROOM_TO_MAKE_PEER, GRACE = 60.0, 30.0, 120.0, 150.0, 40.0


class Point(NamedTuple):
    """What is measured: ``kind`` is exact, idle, wide, error, timed, capacity or memory; ``way`` the mega kernel or one of SGLang's."""

    kind: str
    shape: str
    way: str
    weights: str  # random, or a grid of the oracle
    limit: Optional[float]
    tokens: int
    idle_rank: bool = False

    @property
    def key(self) -> str:
        return " | ".join(map(str, self))


def main() -> None:
    args = parse_arguments()
    if args.ranks == 1:
        os.environ["MEGA_NO_DIST"] = "1"
        run_rank(0, args)
    elif importlib.util.find_spec("nvshmem") is None:
        raise SystemExit("two ranks exchange rows through NVSHMEM, which is not installed: nvshmem4py-cu13")
    else:
        torch.multiprocessing.spawn(run_rank, args=(args,), nprocs=args.ranks)


def parse_arguments(words: Optional[List[str]] = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="where to write the results; the tables go beside it as .md")
    parser.add_argument("--sglang", type=Path, help="folder that holds SGLang's package, for its own ways")
    parser.add_argument("--resume", action="store_true", help="keep the points that --json already holds")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin nothing that may end later than this (default: 8)")
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2), help="expert-parallel ranks (default: 1)")
    parser.add_argument("--one-gpu", action="store_true", help="with --ranks 2: both on the first GPU, and nothing timed")
    parser.add_argument("--rounds", type=int, default=20, help="replays of each graph (default: 20)")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--interleave-in-torch", action="store_true", help="prepare weights without FlashInfer's CUTLASS module")
    parser.add_argument("--command", help=argparse.SUPPRESS, default=shlex.join(["python", *sys.argv]))
    args = parser.parse_args(words)
    if args.one_gpu and args.ranks == 1:
        parser.error("--one-gpu is for --ranks 2: one rank has one GPU anyway")
    return args


def run_rank(rank: int, args: argparse.Namespace) -> None:
    started = time.monotonic()
    device = torch.device("cuda", 0 if args.one_gpu else rank)
    torch.cuda.set_device(device)
    if args.ranks > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(args.ranks), LOCAL_RANK=str(device.index))
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29519")
        # NCCL takes one rank a GPU.
        backend = {"backend": "gloo"} if args.one_gpu else {"backend": "nccl", "device_id": device}
        dist.init_process_group(rank=rank, world_size=args.ranks, **backend)
    bench = Bench(args, "cuda", started, rank)
    bench.run(plan(args.shapes, args.ranks, args.sglang is not None, with_times=not args.one_gpu))
    if rank == 0:
        print(render(bench.report))
    sys.stdout.flush()
    # Nothing is taken down: the layers' pools and NVSHMEM go with the process, in no order that matters.
    os._exit(0)


def plan(shapes: List[str], ranks: int, with_peers: bool, with_times: bool = True) -> List[Point]:
    """All points, those that share a layer next to each other."""
    points = [Point("capacity", shapes[0], f"{OWN}, {capacity}", "random", LIMITS.get(shapes[0]), capacity) for capacity in CAPACITIES]
    for shape in shapes:
        for limit in (None, mxfp4_moe.GRID_LIMIT):
            for weights in ("dense", "sparse"):
                points += [Point("exact", shape, OWN, weights, limit, tokens) for tokens in EXACT_TOKENS]
                points += [Point("idle", shape, OWN, weights, limit, 64)] if weights == "dense" else []
                if ranks > 1:
                    points += [Point("exact", shape, OWN, weights, limit, tokens, idle_rank=True) for tokens in EXACT_TOKENS]
        points.append(Point("wide", shape, OWN, "wide", None, WIDE_TOKENS))
        for way in [OWN, *(mxfp4_peers.PEERS if with_peers and ranks == 1 else ())]:
            points.append(Point("memory", shape, way, "random", LIMITS.get(shape), 0))
            points += [Point("error", shape, way, "random", LIMITS.get(shape), tokens) for tokens in ERROR_TOKENS]
            points += [Point("timed", shape, way, "random", LIMITS.get(shape), tokens) for tokens in TIMED_TOKENS]
    return [point for point in points if with_times or point.kind not in TIMED_KINDS]


class Bench:
    """Goes through points, as far as the time allows, and keeps the report."""

    def __init__(self, args: argparse.Namespace, device: str, started: float, rank: int = 0) -> None:
        self.args, self.device, self.rank = args, device, rank
        self.deadline = started + 60 * args.minutes
        self.layers = Layers(args, device, rank)
        self.report = describe(args)
        if args.resume and args.json.exists():
            self.go_on(json.loads(args.json.read_text()))
        self.report["runs"].append({name: self.report[name] for name in OF_A_RUN})

    def go_on(self, kept: dict) -> None:
        """Take over what earlier runs of the same kind found."""
        differ = [name for name in SAME_IN_ALL_RUNS if kept.get(name, False) != self.report[name]]
        if differ:
            raise SystemExit(f"{self.args.json} is of another kind of run, with another {', '.join(differ)}: --resume cannot go on with it")
        earlier = kept.get("runs") or [{name: kept[name] for name in OF_A_RUN}]
        self.report.update({name: kept[name] for name in ("points", "failed", "hung")}, runs=earlier, shapes={**kept["shapes"], **self.report["shapes"]})

    def run(self, points: List[Point]) -> None:
        done = self.agree({*self.report["points"], *self.report["hung"], *self.report["failed"]})
        left = [point for point in points if point.key not in done]
        for number, point in enumerate(left):
            if self.agree(time.monotonic() + self.room(point) > self.deadline):
                self.finish(len(left) - number)
                return
            self.take(point)
        self.finish(0)

    def room(self, point: Point) -> float:
        if self.layers.has(point):
            return ROOM
        return ROOM_TO_MAKE if point.way.startswith(OWN) else ROOM_TO_MAKE_PEER

    def take(self, point: Point) -> None:
        """Measure one point; a way that cannot run is named with its reason, once for all of its points of this shape."""
        with self.watched(point):
            try:
                found = getattr(self, f"measure_{point.kind}")(point)
            except Exception as error:  # whatever a library raises is what the results say of it
                if self.args.ranks > 1:
                    raise  # its peers would wait
                traceback.print_exc(limit=4)
                self.report["failed"][point.key] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            else:
                self.report["points"][point.key] = {**point._asdict(), **found, "run": len(self.report["runs"]) - 1}
                if self.rank == 0:
                    print(point.key, found, flush=True)
        self.save()

    def watched(self, point: Point) -> ContextManager[None]:
        """``time_limit`` for one point, which is noted as hung."""

        def note() -> None:
            self.report["hung"].append(point.key)
            self.save()

        left = self.deadline - time.monotonic() + GRACE
        return time_limit(left if self.room(point) > ROOM else min(left, HUNG_AFTER), note)

    def agree(self, value: Any) -> Any:
        """The first rank's value."""
        if self.args.ranks == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def finish(self, left: int) -> None:
        self.report["left"] = left
        self.save()
        if self.rank == 0:
            print(f"{left} points left" + (": run again with --resume" if left else ""), flush=True)

    def save(self) -> None:
        if self.rank == 0:
            self.args.json.parent.mkdir(parents=True, exist_ok=True)
            self.args.json.write_text(json.dumps(self.report, indent=1) + "\n")
            self.args.json.with_suffix(".md").write_text(render(self.report))

    # What is measured at a point.

    def measure_exact(self, point: Point) -> dict:
        shape, layer = SHAPES[point.shape], self.layers.of(point)
        own = 0 if point.idle_rank and self.rank == self.args.ranks - 1 else point.tokens
        given, other = (self.masked(mxfp4_moe.grid_tokens(shape, own, seed + self.rank, self.device)) for seed in (10, 20))
        wanted = [mxfp4_moe.moe(*tokens, layer.weights, point.limit) for tokens in (given, other)]
        static = [tensor.clone() for tensor in given]
        run = lambda: layer.run(*static, point.tokens)  # noqa: E731
        poison_free_memory(given[0])
        first = run().clone()
        again = run()
        replay, graph_out = replayable(run, self.device)
        same = [torch.equal(first, again)]
        replay()
        same.append(torch.equal(graph_out().double(), wanted[0]))
        for tensor, new in zip(static, other):
            tensor.copy_(new)
        graph_out().fill_(float("nan"))
        replay()
        same.append(torch.equal(graph_out().double(), wanted[1]))
        return {**self.compared(first, wanted[0]), "again_graph_other": self.on_all_ranks(same)}

    def compared(self, result: torch.Tensor, wanted: torch.Tensor) -> dict:
        """Elements of all ranks that are not equal; NaN is unequal to everything."""
        counts = torch.tensor([int((result.double() != wanted).sum()), result.numel()], device=self.device)
        if self.args.ranks > 1:
            dist.all_reduce(counts)
        return dict(zip(("mismatches", "elements"), counts.tolist()))

    def on_all_ranks(self, facts: List[bool]) -> List[bool]:
        held = torch.tensor(facts, dtype=torch.int32, device=self.device)
        if self.args.ranks > 1:
            dist.all_reduce(held, op=dist.ReduceOp.MIN)
        return [bool(fact) for fact in held.tolist()]

    def masked(self, tokens: Tuple[torch.Tensor, ...]) -> Tuple[torch.Tensor, ...]:
        x, ids, weights = tokens
        if len(ids) >= 3:
            ids[::3, 1], ids[2] = -1, -1
        return x, ids, weights

    def measure_idle(self, point: Point) -> dict:
        shape, layer = SHAPES[point.shape], self.layers.of(point)
        nothing = mxfp4_moe.grid_tokens(shape, 0, 1, self.device)
        empty = layer.run(*nothing, point.tokens)
        given = mxfp4_moe.grid_tokens(shape, point.tokens, 30 + self.rank, self.device)
        after = layer.run(*given, point.tokens)
        wanted = mxfp4_moe.moe(*given, layer.weights, point.limit)
        return {**self.compared(after, wanted), "empty": list(empty.shape)}

    def measure_wide(self, point: Point) -> dict:
        shape, layer = SHAPES[point.shape], self.layers.of(point)
        given = mxfp4_moe.grid_tokens(shape, point.tokens, 60 + self.rank, self.device)
        wanted = mxfp4_moe.moe(*given, layer.weights, point.limit)
        out = layer.run(*given, point.tokens)
        return {**self.compared(out, wanted), "error": relative_error(out, wanted)}

    def measure_error(self, point: Point) -> dict:
        shape, layer = SHAPES[point.shape], self.layers.of(point)
        given = mxfp4_moe.random_tokens(shape, point.tokens, 40 + self.rank, self.device)
        exact = mxfp4_moe.moe(*given, layer.weights, point.limit, quantise=False)
        poison_free_memory(given[0])
        out = layer.run(*given, point.tokens)
        return {"error": relative_error(out, exact)}

    def measure_timed(self, point: Point) -> dict:
        shape, layer = SHAPES[point.shape], self.layers.of(point)
        inputs = [mxfp4_moe.random_tokens(shape, point.tokens, 50 + self.rank + call, self.device) for call in range(CALLS)]

        def calls() -> torch.Tensor:
            return [layer.run(*given, point.tokens) for given in inputs][-1]

        replay, _ = replayable(calls, self.device)
        times = []
        for _ in range(self.args.rounds):
            self.agree(None)
            replay()
            times.append(timed(replay, self.device) / CALLS)
        return {"us": self.slowest(times)}

    def slowest(self, times: List[float]) -> float:
        if self.args.ranks > 1:
            rounds = torch.tensor(times, device=self.device)
            dist.all_reduce(rounds, op=dist.ReduceOp.MAX)
            times = rounds.tolist()
        return statistics.median(times)

    measure_capacity = measure_timed

    def measure_memory(self, point: Point) -> dict:
        return {"bytes": self.layers.of(point).weight_bytes, "checkpoint_bytes": sum(part.nbytes for part in self.layers.of(point).weights)}


class Layer(NamedTuple):
    """``run(x, ids, routing, tokens of the fullest rank)``; ``weights`` are those of all ranks."""

    run: Callable[..., torch.Tensor]
    weights: Any
    weight_bytes: int


class Layers:
    """The layers of one shape, made when a point needs them and kept: layers of one configuration share what is compiled."""

    def __init__(self, args: argparse.Namespace, device: str, rank: int) -> None:
        self.args, self.device, self.rank = args, device, rank
        self.shape, self.made, self.weights, self.failed = None, {}, {}, {}
        self.sglang: Optional[str] = None if args.sglang else "no --sglang"
        self.sglang_started = False

    def has(self, point: Point) -> bool:
        """Whether a point's layer is made, or known not to be made."""
        which = (point.way, point.weights, point.limit)
        return point.shape == self.shape and (which in self.made or which in self.failed)

    def of(self, point: Point) -> Layer:
        if point.shape != self.shape:
            self.made.clear()
            self.weights.clear()
            self.failed.clear()
            self.shape = point.shape
        which = (point.way, point.weights, point.limit)
        if which in self.failed:
            raise RuntimeError(self.failed[which])
        if which not in self.made:
            self.keep_one_peer(point.way)
            try:
                self.made[which] = self.make(point)
            except Exception as error:
                self.failed[which] = f"{type(error).__name__}: {error}"
                raise
        return self.made[which]

    def keep_one_peer(self, way: str) -> None:
        """Others hold weights of their own, up to twice the checkpoint's: one at a time."""
        for which in [which for which in self.made if which[0] != OWN and which[0] != way]:
            del self.made[which]
        gc.collect()  # also what a layer left that could not be made
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def make(self, point: Point) -> Layer:
        shape, weights = SHAPES[point.shape], self.weights_of(point)
        if point.way == OWN:
            return self.make_own(shape, weights, point.limit)
        if point.kind == "capacity":
            return self.make_own(shape, weights, point.limit, capacities=(point.tokens,))
        self.start_sglang()
        layer = mxfp4_peers.make_layer(mxfp4_peers.PEERS[point.way], shape, weights, point.limit)
        layer.run(*mxfp4_moe.random_tokens(shape, 1, device=self.device))  # some are compiled when they are called
        return Layer(lambda x, ids, routing, _: layer.run(x, ids, routing), weights, layer.weight_bytes)

    def weights_of(self, point: Point) -> Any:
        shape = SHAPES[point.shape]
        if point.weights not in self.weights:
            self.weights[point.weights] = (
                mxfp4_moe.random_experts(shape, 1, self.device) if point.weights == "random"
                else mxfp4_moe.grid_experts(shape, 2, self.device, point.weights)
            )
        return self.weights[point.weights]

    def make_own(self, shape: Shape, weights: Any, limit: Optional[float], **workspaces: Any) -> Layer:
        ranks = self.args.ranks
        local = slice(self.rank * shape.experts // ranks, (self.rank + 1) * shape.experts // ranks)
        own = ExpertWeights.as_loaded(*(part[local].contiguous() for part in weights))
        told = ExpertShape(shape.experts, shape.top_k, shape.hidden, shape.intermediate, limit, self.rank, ranks)
        with interleaving_in_torch() if self.args.interleave_in_torch else nullcontext():
            experts = MegaMoeExperts(told, own, dist.group.WORLD if ranks > 1 else None, **workspaces)
        held = sum(tensor.nbytes for leg in experts.transformed for tensor in leg)
        return Layer(experts.forward, weights, held)

    def start_sglang(self) -> None:
        if self.sglang is not None:
            raise RuntimeError(self.sglang)
        if not self.sglang_started:
            try:
                mxfp4_peers.start(self.args.sglang)
            except Exception as error:
                self.sglang = f"SGLang did not start: {type(error).__name__}: {error}"
                raise
            self.sglang_started = True


def replayable(run: Callable[[], torch.Tensor], device: str) -> Tuple[Callable[[], None], Callable[[], torch.Tensor]]:
    """``run`` as a captured graph's replay, and what gives the result it writes; without a GPU ``run`` itself."""
    if device != "cuda":
        holder = [run()]
        return lambda: holder.__setitem__(0, run()), lambda: holder[0]
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph.replay, lambda: out


def timed(replay: Callable[[], None], device: str) -> float:
    if device == "cuda":
        return elapsed_us(replay)
    start = time.perf_counter()
    replay()
    return (time.perf_counter() - start) * 1e6


def describe(args: argparse.Namespace) -> dict:
    """What a reader needs to judge or repeat the run."""
    return {
        **describe_run(),
        "command": args.command,
        "ranks": args.ranks,
        "one_gpu": args.one_gpu,
        "flashinfer": version_of("flashinfer"),
        "cutlass_dsl": version_of("cutlass"),
        "sglang": sglang_version_in(args.sglang),
        "interleaved_in_torch": args.interleave_in_torch,
        "calls_per_graph": CALLS,
        "rounds": args.rounds,
        "shapes": {name: SHAPES[name]._asdict() for name in args.shapes},
        "points": {},
        "failed": {},
        "hung": [],
        "runs": [],
        "left": None,
    }


def version_of(module: str) -> str:
    try:
        return __import__(module).__version__
    except (ImportError, AttributeError):
        return "not installed"


def render(report: dict) -> str:
    points = list(report["points"].values())
    where = f"one {report['device']}, {report['ranks']} ranks" if report.get("one_gpu") else f"{report['ranks']}×{report['device']}"
    lines = [
        f"# MXFP4 experts in FlashInfer's mega kernel on {where}",
        "",
        f"{report['date'][:10]}, driver {report['driver']}, CUDA {report['cuda']}, torch {report['torch']}, FlashInfer {report['flashinfer']}, "
        f"cutlass-dsl {report['cutlass_dsl']}, SGLang {report['sglang']}, Python {report['python']}; weights interleaved {'in torch' if report['interleaved_in_torch'] else 'by FlashInfer'}.",
        f"`{report['command']}`; how: the docstring of `benchmark/bench_mxfp4_hopper.py`. Points left: {report['left']}.",
        *render_runs(report),
        "",
        *render_exact([point for point in points if point["kind"] in ("exact", "idle")]),
        *(
            f"Wider sums, {point['shape']}, T={point['tokens']}: {point['mismatches']} of {point['elements']} elements differ, error {point['error']:.1e}."
            for point in points if point["kind"] == "wide"
        ),
        *render_capacities([point for point in points if point["kind"] == "capacity"]),
    ]
    for shape, size in report["shapes"].items():
        measured = [point for point in points if point["shape"] == shape and point["kind"] in ("error", "timed", "memory")]
        if measured:
            lines += ["", f"## {shape}: E={size['experts']}, H={size['hidden']}, I={size['intermediate']}, top_k={size['top_k']}", "", *render_ways(measured)]
    problems = [*(f"hung: {key}" for key in report["hung"]), *(f"did not run: {key}: {why}" for key, why in failures(report["failed"]).items())]
    return "\n".join(lines + ["", *(f"- {problem}" for problem in problems)]).rstrip() + "\n"


def render_runs(report: dict) -> List[str]:
    """Which kinds of points each run has, where there was more than one."""
    kinds: Dict[int, List[str]] = {}
    for point in report["points"].values():
        names = kinds.setdefault(point.get("run", 0), [])
        names += [point["kind"]] if point["kind"] not in names else []
    runs = [(report["runs"][number], kinds[number]) for number in sorted(kinds)] if len(kinds) > 1 else []
    return ["", *(f"- Run of {run['date'].replace('T', ' ')[:16]}, SGLang {run['sglang']}: {', '.join(names)}." for run, names in runs)] if runs else []


def failures(failed: Dict[str, str]) -> Dict[str, str]:
    """One entry for each reason of a shape and way."""
    grouped: Dict[str, str] = {}
    for key, why in failed.items():
        _, shape, way, *_ = key.split(" | ")
        grouped.setdefault(f"{shape}, {way}", why)
    return grouped


def is_exact(point: dict) -> bool:
    return point["mismatches"] == 0 and all(point.get("again_graph_other", [True]))


def render_exact(points: List[dict]) -> List[str]:
    if not points:
        return ["Exact checks: none yet."]
    wrong = [point for point in points if not is_exact(point)]
    lines = [f"Exact on the grid, bit for bit, also called again, from a graph, and from the graph with other tokens: {len(points) - len(wrong)} of {len(points)} points."]
    for point in wrong:
        named = ", ".join(f"{name} {point[name]}" for name in ("kind", "shape", "weights", "limit", "tokens", "idle_rank"))
        lines.append(f"- not exact: {named}: {point['mismatches']} of {point['elements']} elements, again/graph/other {point.get('again_graph_other')}")
    return lines


def render_capacities(points: List[dict]) -> List[str]:
    if not points:
        return []
    lines = ["", f"Workspaces, {points[0]['shape']}, each full of tokens:", "", "| tokens | µs |", "|---|---|"]
    return lines + [f"| {point['tokens']} | {point['us']:.1f} |" for point in points]


def render_ways(points: List[dict]) -> List[str]:
    ways = list(dict.fromkeys(point["way"] for point in points))
    found = {(point["kind"], point["way"], point["tokens"]): point for point in points}

    def row(name: str, kind: str, tokens: int, cell: Callable[[dict], str]) -> List[str]:
        cells = [cell(found[kind, way, tokens]) if (kind, way, tokens) in found else "" for way in ways]
        return ["| " + " | ".join([name, *cells]) + " |"] if any(cells) else []

    lines = ["| | " + " | ".join(ways) + " |", "|---" * (len(ways) + 1) + "|"]
    lines += row("weights, GB", "memory", 0, lambda point: f"{point['bytes'] / 1e9:.2f}")
    for tokens in ERROR_TOKENS:
        lines += row(f"error, T={tokens}", "error", tokens, lambda point: f"{point['error']:.2e}")
    for tokens in TIMED_TOKENS:
        lines += row(f"µs, T={tokens}", "timed", tokens, lambda point: f"{point['us']:.1f}")
    return lines


if __name__ == "__main__":
    main()
