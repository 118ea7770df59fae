"""Time the layer boundary beside its peers on the GPUs of one host, and measure the errors of all.

    python benchmark/bench_boundary.py --peer DIR --json benchmark/results/boundary_h200.json

One process per GPU and hidden size (SGLang's kernel takes one plane a process). ``DIR`` holds SGLang 0.5.23's ``sglang``
package, the best public peer (leave it out to do without); FlashInfer is taken from the environment. Their kernels are
compiled at first use, which needs nvcc.

The ways:

* fused, fused one-shot, fused two-shot: the overlay's kernel as it launches itself, and in either regime. (At two GPUs both
  send as much: the difference is a hop, from which ``plane.HOP_BYTES`` follows.)
* flashinfer: FlashInfer's pattern 7, one kernel (bf16 weights: it takes no others).
* separate: the overlay's finalize, then FlashInfer's all-reduce + residual + RMSNorm (pattern 1, fp32 accumulation).
* nccl: the overlay's finalize, NCCL's all-reduce, FlashInfer's fused_add_rmsnorm.
* sglang, sglang one-shot, sglang two-shot: ``moe_finalize_all_reduce_residual_norm`` of SGLang 0.5.23 as its own
  policy launches it, and in either regime; up to 384 tokens, the most that SGLang itself calls it with.

On one GPU there is nothing to reduce, and the ways are:

* fused: the overlay's kernel, as one rank compiles it.
* separate: the overlay's finalize, then FlashInfer's fused_add_rmsnorm with PDL, which adds into the residual in place.
* sglang: SGLang's ``moe_finalize_fuse_shared``, then the same.

What is timed. For each (H, K, T) one CUDA graph per way holds 20 calls back to back on the same inputs; a time is the
replay's, between two events, over 20, the larger of the ranks'. The replay is queued behind an all-reduce, whose end
sets the ranks off together; on one GPU behind a kernel of some length. The ways take turns within each round, in changing order; figures are medians over the
rounds.

Errors: ``||result - exact|| / ||exact||`` with exact in float64, results poisoned with NaN before.

A way that does not come back within 6 s (90 s where it may have to compile) (peers were seen to hang) ends the run; the results say which, and the same
command with ``--resume`` goes on without it.

All GPUs that are visible take part (CUDA_VISIBLE_DEVICES=0: one of several).

``--policy FILE`` also writes the points as the table that ``auto`` goes by; how: ``policy_from_results.py``, which makes
the same of a JSON.

The bound of a point: the time of an empty exchange (the overlay's kernel on one token that has no expert; on one GPU a
launch and a norm), plus the longer of the bytes that cross the link over the link's measured rate and the bytes of the GPU's memory over its own.
It is a yardstick, not a floor: the first part is the kernel's own, and what the 20 calls find in the L2 cache (inputs
of up to some 200 tokens fit) comes faster than from memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from functools import lru_cache, partial
from pathlib import Path
from typing import Callable, ContextManager, Dict, List, NamedTuple, Tuple

# The link's multicast stays off, whatever the libraries would choose.
os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")
# SGLang's own check of peer access wants its world group.
os.environ.setdefault("SGLANG_SKIP_P2P_CHECK", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing  # noqa: E402

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]
from policy_from_results import policy_table  # noqa: E402
from gpu import (  # noqa: E402
    copy_bandwidth, describe_run, elapsed_us, exact_finalize, exact_norm, gpus_or_exit, in_turns, poison_free_memory, relative_error, time_limit,
)
from sglang_overlay.srt.layers.moe.boundary.kernel import choose_launch, fused_boundary  # noqa: E402
from sglang_overlay.srt.layers.moe.boundary.module import Config  # noqa: E402
from sglang_overlay.srt.layers.moe.boundary.plane import ExchangePlane  # noqa: E402
from sglang_overlay.srt.layers.moe.deferred_output import DeferredMoeOutput  # noqa: E402
from sglang_overlay.srt.layers.moe.finalize_kernel import finalize_cuda  # noqa: E402

CALLS = 20
EPS = 1e-6
HIDDEN = (4096, 5120, 7168)
TOP_K = (6, 8)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512)
PEER_MAX_TOKENS = 384
REQUIRED = {"hidden": 7168, "top_k": 8}
Boundary = Tuple[torch.Tensor, torch.Tensor]


class Case(NamedTuple):
    hidden: int
    top_k: int
    tokens: int


class Inputs(NamedTuple):
    bundle: DeferredMoeOutput
    residual: torch.Tensor
    gamma: torch.Tensor

    @property
    def flat_index(self) -> torch.Tensor:
        return self.bundle.expanded_idx_to_permuted_idx.view(-1)


def main() -> None:
    args = parse_arguments()
    world_size = gpus_or_exit(1)
    if args.policy and world_size == 1 and not args.peer:
        raise SystemExit("--policy on one GPU needs --peer: stock's time there is that of SGLang's own finalize, where that is the faster")
    source = str(args.json or args.policy)
    with tempfile.TemporaryDirectory() as scratch:
        args.json = args.json or Path(scratch) / "boundary.json"
        for hidden in args.hidden:
            torch.multiprocessing.spawn(run_rank, args=(world_size, args, hidden), nprocs=world_size)
            args.resume = True
        report = json.loads(args.json.read_text())
    print(render(report))
    if args.policy:
        args.policy.write_text(policy_table(report, source).to_json())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer", type=Path, help="folder that holds SGLang 0.5.23's sglang package")
    parser.add_argument("--json", type=Path, help="where to write the results; the tables go beside it as .md")
    parser.add_argument(
        "--policy", type=Path,
        help="also write the points as a table for SGLANG_MOE_FINALIZE_POLICY; what stands for stock's time there: policy_from_results.py",
    )
    parser.add_argument("--rounds", type=int, default=30, help="replays per way and point (default: 30)")
    parser.add_argument("--resume", action="store_true", help="keep the points that --json already holds")
    parser.add_argument("--command", help=argparse.SUPPRESS, default=shlex.join(["python", *sys.argv]))
    for name, values in (("hidden", HIDDEN), ("top-k", TOP_K), ("tokens", TOKENS)):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=values, help=f"default: {values}")
    return parser.parse_args()


def run_rank(rank: int, world_size: int, args: argparse.Namespace, hidden: int) -> None:
    """Measure all points of one hidden size and add them to the JSON."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=world_size, device_id=torch.device("cuda", rank))
    if args.peer:
        sys.path.insert(0, str(args.peer.resolve()))
    host_group = dist.new_group(backend="gloo")
    report = describe(args, world_size)
    report["link_gb_per_s"], report["copy_gb_per_s"] = link_bandwidth() if world_size > 1 else None, copy_bandwidth(gibibytes=1)
    report.update(earlier_results(args))
    done = {(point["hidden"], point["top_k"], point["tokens"]) for point in report["points"]}
    cases = [Case(hidden, k, t) for k in args.top_k for t in args.tokens if (hidden, k, t) not in done]
    if cases:
        ways = Ways(host_group, hidden, max(args.tokens), args.peer is not None)
        empty_us = ways.empty_exchange_us(args.rounds)
    for case in cases:
        point = measure(case, ways, args, report)
        point["empty_us"] = empty_us
        point["bound_us"] = bound_us(case, world_size, empty_us, report)
        report["points"].append(point)
        if rank == 0:
            print(*case, {way: round(us, 2) for way, us in point["us"].items()}, flush=True)
            save(report, args)
    if rank == 0:
        report["summary"] = summarize(report["points"])
        save(report, args)
    dist.barrier()
    dist.destroy_process_group()


def earlier_results(args: argparse.Namespace) -> dict:
    if args.resume and args.json.exists():
        earlier = json.loads(args.json.read_text())
        return {"points": earlier["points"], "hung": earlier["hung"]}
    return {"points": [], "hung": []}


def watched(case: Case, way: str, report: dict, args: argparse.Namespace, seconds: float = 6.0) -> ContextManager[None]:
    """``time_limit`` for one way at one case, which is noted as hung."""

    def note() -> None:
        report["hung"].append([*case, way])
        if dist.get_rank() == 0:
            print("hung:", *case, way, flush=True)
            save(report, args)
        else:
            time.sleep(2)  # the first rank writes before its peer's end takes it along

    return time_limit(seconds, note)


def save(report: dict, args: argparse.Namespace) -> None:
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    if "summary" in report:
        args.json.with_suffix(".md").write_text(render(report))


def describe(args: argparse.Namespace, world_size: int) -> dict:
    """What a reader needs to judge or repeat the run."""
    return {
        **describe_run(),
        "command": args.command,
        "arch": "sm{}{}".format(*torch.cuda.get_device_capability()),
        "world_size": world_size,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "flashinfer": version_of("flashinfer"),
        "sglang": version_of("sglang.version") if args.peer else "not run",
        "calls_per_graph": CALLS,
        "rounds": args.rounds,
    }


def version_of(module: str) -> str:
    try:
        return __import__(module, fromlist=["__version__"]).__version__
    except ImportError:
        return "not installed"


def link_bandwidth() -> float:
    """GB/s a GPU sends while it receives as much: 256 MiB copied to the next rank's GPU, as every rank does."""
    sent = torch.ones(1 << 26, device="cuda")
    received = torch.empty_like(sent, device=f"cuda:{(dist.get_rank() + 1) % dist.get_world_size()}")
    received.copy_(sent)
    dist.all_reduce(starting_gun())
    times = [elapsed_us(lambda: received.copy_(sent)) for _ in range(20)]
    return sent.nbytes / statistics.median(times) / 1e3


def bound_us(case: Case, world_size: int, empty_us: float, report: dict) -> float:
    row = case.tokens * case.hidden * 2
    link = row * 2 * (world_size - 1) / world_size  # two-shot's, the fewest; at two ranks one-shot's too
    # gemm2 rows, shared, residual, two results, packets out of and into the plane.
    memory = row * (case.top_k + 4) + 2 * link
    return empty_us + max(link / report["link_gb_per_s"] if link else 0, memory / report["copy_gb_per_s"]) / 1e3


def make_inputs(case: Case) -> Inputs:
    """Random inputs; weights, residual and gamma the same on every rank, the rest its own."""
    hidden, top_k, tokens = case
    own = torch.Generator("cuda").manual_seed(1000 * dist.get_rank() + tokens)
    common = torch.Generator("cuda").manual_seed(tokens)
    rows = tokens * top_k + 128

    def randn(*shape: int, generator=own) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    gemm2_out = (randn(rows, hidden) * 0.5).bfloat16()
    index = torch.randperm(rows, device="cuda", generator=own)[: tokens * top_k].int().view(tokens, top_k)
    weights = torch.rand(tokens, top_k, device="cuda", generator=common)
    weights = weights / weights.sum(1, keepdim=True) * 2.5
    shared_output = (randn(tokens, hidden) * 0.5).bfloat16()
    bundle = DeferredMoeOutput(gemm2_out, index, weights, tokens, top_k, hidden, 1.0, shared_output)
    residual = randn(tokens, hidden, generator=common).bfloat16()
    gamma = (1 + 0.1 * randn(hidden, generator=common)).bfloat16()
    return Inputs(bundle, residual, gamma)


class Ways:
    """The ways to cross the boundary with rows of ``hidden``."""

    def __init__(self, host_group, hidden: int, max_tokens: int, with_peer: bool) -> None:
        import flashinfer.comm

        self.comm = flashinfer.comm
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        config = Config(self.world_size, hidden, 8, torch.bfloat16, torch.float32)
        self.plane = ExchangePlane.create(host_group, config, max_tokens, timeout_s=4.0, rows=(max_tokens, max_tokens))
        self.workspace = self.peer = None
        if self.world_size > 1:
            self.workspace = self.comm.create_allreduce_fusion_workspace(
                backend="trtllm", world_size=self.world_size, rank=self.rank, max_token_num=2048, hidden_dim=hidden,
                dtype=torch.bfloat16, group=dist.group.WORLD,
            )
        if with_peer:
            self.peer = load_peer(host_group) if self.world_size > 1 else load_finalize()

    def of(self, inputs: Inputs) -> Dict[str, Callable[[], Boundary]]:
        if self.world_size == 1:
            return self.alone(inputs)
        ways = {
            "fused": lambda: self.fused(inputs),
            "fused one-shot": lambda: self.fused_in(inputs, two_shot=False),
            "fused two-shot": lambda: self.fused_in(inputs, two_shot=True),
            "flashinfer": self.flashinfer(inputs),
            "separate": lambda: self.reduce_and_norm(inputs, finalize_cuda(inputs.bundle)),
            "nccl": lambda: self.nccl(inputs, finalize_cuda(inputs.bundle)),
        }
        if self.peer and inputs.bundle.num_tokens <= PEER_MAX_TOKENS:
            ways["sglang"] = lambda: self.sglang(inputs)
            ways["sglang one-shot"] = lambda: self.sglang(inputs, two_shot=False)
            ways["sglang two-shot"] = lambda: self.sglang(inputs, two_shot=True)
        return ways

    def alone(self, inputs: Inputs) -> Dict[str, Callable[[], Boundary]]:
        """On one GPU."""
        from flashinfer.norm import fused_add_rmsnorm

        residual = inputs.residual.clone()

        def add_and_norm(part: torch.Tensor) -> Boundary:
            # Captured calls add into what the one before left, as stock does between its layers, where nothing is copied either.
            if not torch.cuda.is_current_stream_capturing():
                residual.copy_(inputs.residual)
            fused_add_rmsnorm(part, residual, inputs.gamma, EPS, enable_pdl=True)
            return part, residual

        ways = {"fused": lambda: self.fused(inputs), "separate": lambda: add_and_norm(finalize_cuda(inputs.bundle))}
        if self.peer:
            bundle = inputs.bundle
            ways["sglang"] = lambda: add_and_norm(self.peer(
                bundle.gemm2_out, inputs.flat_index, bundle.expert_weights, bundle.shared_output, bundle.top_k, enable_pdl=True,
            ))
        return ways

    def fused(self, inputs: Inputs) -> Boundary:
        return fused_boundary(self.plane, inputs.bundle, inputs.residual, inputs.gamma, EPS)

    def fused_in(self, inputs: Inputs, two_shot: bool) -> Boundary:
        bundle, plane = inputs.bundle, self.plane
        launch = choose_launch(bundle.num_tokens, bundle.hidden, self.world_size, plane.multiprocessors)
        return fused_boundary(plane, bundle, inputs.residual, inputs.gamma, EPS, launch=launch._replace(two_shot=two_shot))

    def flashinfer(self, inputs: Inputs) -> Callable[[], Boundary]:
        weights = inputs.bundle.expert_weights.bfloat16()
        norm_out, residual_out = (torch.full_like(inputs.residual, float("nan")) for _ in range(2))

        def run() -> Boundary:
            self.comm.allreduce_fusion(
                input=inputs.bundle.gemm2_out, workspace=self.workspace, launch_with_pdl=True,
                pattern=self.comm.AllReduceFusionPattern.kMoEFinalizeARResidualRMSNorm,
                residual_in=inputs.residual, residual_out=residual_out, norm_out=norm_out,
                rms_gamma=inputs.gamma, rms_eps=EPS, expert_scale_factor=weights,
                expanded_idx_to_permuted_idx=inputs.bundle.expanded_idx_to_permuted_idx,
                shared_expert_output=inputs.bundle.shared_output,
            )
            return norm_out, residual_out

        return run

    def reduce_and_norm(self, inputs: Inputs, part: torch.Tensor) -> Boundary:
        norm_out, residual_out = torch.empty_like(part), torch.empty_like(part)
        self.comm.allreduce_fusion(
            input=part, workspace=self.workspace, launch_with_pdl=True, fp32_acc=True,
            pattern=self.comm.AllReduceFusionPattern.kARResidualRMSNorm,
            residual_in=inputs.residual, residual_out=residual_out, norm_out=norm_out,
            rms_gamma=inputs.gamma, rms_eps=EPS,
        )
        return norm_out, residual_out

    def nccl(self, inputs: Inputs, part: torch.Tensor) -> Boundary:
        from flashinfer.norm import fused_add_rmsnorm

        dist.all_reduce(part)
        residual = inputs.residual.clone()
        fused_add_rmsnorm(part, residual, inputs.gamma, EPS, enable_pdl=False)
        return part, residual

    def sglang(self, inputs: Inputs, **regime: bool) -> Boundary:
        bundle = inputs.bundle
        return self.peer.moe_finalize_all_reduce_residual_norm(
            bundle.gemm2_out, inputs.flat_index, bundle.expert_weights, bundle.top_k, bundle.shared_output,
            inputs.residual, inputs.gamma, EPS, world_size=self.world_size, hidden_dim=bundle.hidden,
            residual_out=torch.empty_like(inputs.residual), **regime,
        )

    def empty_exchange_us(self, rounds: int) -> float:
        """The fused kernel on one token without an expert: launch, one packet each way per thread, norm."""
        inputs = make_inputs(Case(self.plane.config.hidden, 8, 1))
        bundle = inputs.bundle
        nobody = torch.full_like(bundle.expanded_idx_to_permuted_idx, -1)
        empty = DeferredMoeOutput(bundle.gemm2_out, nobody, bundle.expert_weights, 1, bundle.top_k, bundle.hidden)
        run = lambda: fused_boundary(self.plane, empty, inputs.residual, inputs.gamma, EPS)  # noqa: E731
        captured = Captured(run)
        return median_over_ranks({"empty": [timed_replay(captured) for _ in range(rounds)]})["empty"]


def load_peer(host_group):
    """SGLang 0.5.23's kernel, on an exchange plane of its own of 512 rows."""
    from sglang.kernels.ops.communication import all_reduce_fusion
    from sglang.srt.distributed.device_communicators.custom_all_reduce_v2 import CustomAllReduceV2

    device = torch.device("cuda", dist.get_rank())
    plane = CustomAllReduceV2(
        host_group, device, max_pull_size=0, max_pull_blocks=0, max_push_size=8 << 20, max_push_blocks=512
    )
    all_reduce_fusion.register_comm(plane.obj)
    all_reduce_fusion.plane_of_the_benchmark = plane  # kept alive with the module that uses it
    return all_reduce_fusion


def load_finalize():
    """SGLang's finalize, which adds the shared expert's output; compiled by SGLang's own JIT."""
    from sglang.kernels.ops.moe.moe_finalize_fuse_shared import moe_finalize_fuse_shared

    return moe_finalize_fuse_shared


def measure(case: Case, ways: Ways, args: argparse.Namespace, report: dict) -> dict:
    inputs = make_inputs(case)
    runs = {way: run for way, run in ways.of(inputs).items() if [*case, way] not in report["hung"]}
    errors, repeatable, graphs = {}, {}, {}
    exact = exact_boundary(inputs)
    for name, run in runs.items():
        with watched(case, name, report, args, seconds=90.0):  # the first call of a shape compiles
            poison_free_memory(inputs.residual)
            first = [result.clone() for result in run()]
            again = run()
            errors[name] = [relative_error(result, truth) for result, truth in zip(first, exact)]
            repeatable[name] = all(torch.equal(a, b) for a, b in zip(first, again)) and same_on_all_ranks(first)
            graphs[name] = Captured(run)

    def timed(name: str) -> float:
        with watched(case, name, report, args):
            return timed_replay(graphs[name])

    times = in_turns({name: partial(timed, name) for name in graphs}, args.rounds + 1)
    us = median_over_ranks({name: found[1:] for name, found in times.items()})
    return {**case._asdict(), "us": {name: us[name] for name in runs}, "error": errors, "repeatable": repeatable}


def exact_boundary(inputs: Inputs) -> Boundary:
    part = exact_finalize(inputs.bundle)
    dist.all_reduce(part)
    residual = part + inputs.residual.double()
    return exact_norm(residual, inputs.gamma, EPS), residual


def same_on_all_ranks(results: List[torch.Tensor]) -> bool:
    for result in results:
        everywhere = [torch.empty_like(result) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, result)
        if not all(torch.equal(everywhere[0], other) for other in everywhere):
            return False
    return True


class Captured:
    """One CUDA graph of 20 calls."""

    def __init__(self, run: Callable[[], Boundary]) -> None:
        run()
        torch.cuda.synchronize()
        dist.barrier()
        self.graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run()
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph, stream=stream):
                for _ in range(CALLS):
                    run()
        torch.cuda.synchronize()
        dist.barrier()


def timed_replay(captured: Captured) -> float:
    """Microseconds per call of one replay on this rank."""
    torch.cuda.synchronize()
    # Long enough that the replay is queued before it ends: what host or peer do late then delays nobody.
    if dist.get_world_size() > 1:
        dist.all_reduce(starting_gun())
    else:
        torch.cuda._sleep(400_000)  # cycles, some 0.2 ms: NCCL launches nothing for one rank
    return elapsed_us(captured.graph.replay) / CALLS


@lru_cache(maxsize=None)
def starting_gun() -> torch.Tensor:
    return torch.zeros(16 << 20, device="cuda")


def median_over_ranks(times: Dict[str, List[float]]) -> Dict[str, float]:
    """The median over the rounds of the slowest rank's time."""
    names = sorted(times)
    rounds = torch.tensor([times[name] for name in names], device="cuda")
    dist.all_reduce(rounds, op=dist.ReduceOp.MAX)
    return dict(zip(names, rounds.median(dim=1).values.tolist()))


def ratio_to_best_peer(point: dict) -> float:
    return point["us"]["fused"] / min(of_peers(point["us"]).values())


def of_peers(found: dict) -> dict:
    """Without the overlay's own kernel, in whichever regime."""
    return {way: value for way, value in found.items() if not way.startswith("fused")}


def summarize(points: List[dict]) -> dict:
    required = [p for p in points if p["hidden"] == REQUIRED["hidden"] and p["top_k"] == REQUIRED["top_k"]]
    summary = {"all": _ratios(points)}
    if required:
        summary["required"] = _ratios(required)
    summary["error_below_every_peer"] = all(
        point["error"]["fused"][i] < min(error[i] for error in of_peers(point["error"]).values())
        for point in points
        for i in range(2)
    )
    summary["fused_repeatable_and_same_on_all_ranks"] = all(point["repeatable"]["fused"] for point in points)
    return summary


def _ratios(points: List[dict]) -> dict:
    few = [ratio_to_best_peer(point) for point in points if point["tokens"] <= 32]
    many = [ratio_to_best_peer(point) for point in points if point["tokens"] >= 64]
    return {
        "geometric_mean": statistics.geometric_mean(few + many),
        "geometric_mean_up_to_384_tokens": statistics.geometric_mean(
            [ratio_to_best_peer(point) for point in points if point["tokens"] <= PEER_MAX_TOKENS]
        ),
        "largest_up_to_32_tokens": max(few, default=None),
        "largest_from_64_tokens": max(many, default=None),
    }


def render(report: dict) -> str:
    lines = [
        f"# The layer boundary on {report['world_size']}×{report['device']}",
        "",
        f"{report['date'][:10]}, driver {report['driver']}, CUDA {report['cuda']}, torch {report['torch']}, NCCL "
        f"{report['nccl']}, FlashInfer {report['flashinfer']}, SGLang {report['sglang']}, Python {report['python']}.",
        f"`{report['command']}`; how: the docstring of `benchmark/bench_boundary.py`.",
        "",
        (f"Link {report['link_gb_per_s']:.0f} GB/s a direction, m" if report["link_gb_per_s"] else "M") + f"emory {report['copy_gb_per_s']:.0f} GB/s (copy).",
        "Microseconds per call, medians; ratio: fused / the fastest peer (below 1: fused is faster).",
        *(f"Hung and was left out: {way} at hidden {h}, top_k {k}, {t} tokens." for h, k, t, way in report["hung"]),
        "",
    ]
    for name, found in report["summary"].items():
        lines.append(f"- {name.replace('_', ' ')}: {found if isinstance(found, bool) else _words(found)}")
    for hidden in sorted({point["hidden"] for point in report["points"]}):
        for top_k in sorted({point["top_k"] for point in report["points"]}):
            points = [p for p in report["points"] if (p["hidden"], p["top_k"]) == (hidden, top_k)]
            if points:
                lines += ["", f"## hidden {hidden}, top_k {top_k}", "", *_table(points)]
    return "\n".join(lines) + "\n"


def _words(found: dict) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {value:.3f}" for key, value in found.items() if value is not None)


def _table(points: List[dict]) -> List[str]:
    ways = list(points[0]["us"])
    rows = ["| T | " + " | ".join(ways) + " | ratio | bound | of bound |", "|---" * (len(ways) + 4) + "|"]
    for point in points:
        times = [f"{point['us'][way]:.2f}" if way in point["us"] else "" for way in ways]
        bound = point["bound_us"]
        cells = [str(point["tokens"]), *times, f"{ratio_to_best_peer(point):.3f}", f"{bound:.2f}"]
        rows.append("| " + " | ".join([*cells, f"{point['us']['fused'] / bound:.2f}"]) + " |")
    rows += ["", "Relative error against float64, norm / residual:", ""]
    rows += ["| T | " + " | ".join(ways) + " |", "|---" * (len(ways) + 1) + "|"]
    for point in points:
        errors = [" / ".join(f"{e:.2e}" for e in point["error"][way]) if way in point["error"] else "" for way in ways]
        rows.append(f"| {point['tokens']} | " + " | ".join(errors) + " |")
    return rows


if __name__ == "__main__":
    main()
