"""Try to break the fused boundary kernel on the GPUs of one host, and write down what happened.

    python benchmark/boundary_reliability.py --json benchmark/results/boundary_reliability_h200.json

One process per rank and scenario, each scenario in processes of its own, so that one that ends its process (as a rank
without peers must) spoils no other. A scenario passes where all its ranks did what it expects; exit code 1 otherwise.

A rank has a GPU to itself, unless ``--ranks`` asks for more ranks than there are GPUs: these share GPUs, which give each process
its slice of time, so that a rank that waits is taken off the GPU in the middle of its kernel. A boundary then takes
milliseconds; ``--replays`` says how many are enough. Scenarios that end several ranks are left out then, unless ``--only`` names
them: processes that share a GPU were seen not to end within the 150 s that a scenario has. With one rank so are those about
its peers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable, Dict, List

os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu import describe_run, exact_finalize, exact_norm, gpus_or_exit, relative_error  # noqa: E402
from sglang_overlay.srt.layers.moe.boundary import plane as plane_module  # noqa: E402
from sglang_overlay.srt.layers.moe.boundary.kernel import WORLD_SIZES, fused_boundary  # noqa: E402
from sglang_overlay.srt.layers.moe.boundary.module import Config, load  # noqa: E402
from sglang_overlay.srt.layers.moe.boundary.plane import ExchangePlane, PlaneUnavailable  # noqa: E402
from sglang_overlay.srt.layers.moe.deferred_output import DeferredMoeOutput  # noqa: E402

HIDDEN, TOP_K, EPS = 7168, 8, 1e-6
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
REPLAYS = 100_000
# How long a rank waits for a peer that never comes, in the scenarios about that.
SHORT_TIMEOUT_S = 5.0


class Rank:
    """This process: its plane, and for each number of tokens a captured graph with the result it must give."""

    def __init__(self, timeout_s: float = 120.0) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.config = Config(self.world_size, HIDDEN, TOP_K, torch.bfloat16, torch.float32)
        self.plane = ExchangePlane.create(dist.group.WORLD, self.config, max(SIZES), timeout_s)

    def inputs(self, tokens: int) -> tuple:
        own = torch.Generator("cuda").manual_seed(1000 * self.rank + tokens)
        common = torch.Generator("cuda").manual_seed(tokens)
        rows = tokens * TOP_K + 64
        gemm2_out = torch.randn(rows, HIDDEN, device="cuda", generator=own).bfloat16()
        index = torch.randperm(rows, device="cuda", generator=own)[: tokens * TOP_K].int().view(tokens, TOP_K)
        weights = torch.rand(tokens, TOP_K, device="cuda", generator=common)
        shared_output = torch.randn(tokens, HIDDEN, device="cuda", generator=own).bfloat16()
        bundle = DeferredMoeOutput(gemm2_out, index, weights, tokens, TOP_K, HIDDEN, 0.3, shared_output)
        residual = torch.randn(tokens, HIDDEN, device="cuda", generator=common).bfloat16()
        return bundle, residual, torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)

    def run(self, inputs: tuple) -> tuple:
        return fused_boundary(self.plane, *inputs, EPS)

    def capture(self, tokens: int) -> "Replay":
        return Replay(self, self.inputs(tokens))

    def error(self, inputs: tuple, results: tuple) -> float:
        """The larger relative error of norm_out and residual_out against float64; parts travel over the host group."""
        bundle, residual, gamma = inputs
        part = exact_finalize(bundle).cpu()
        dist.all_reduce(part)
        total = part.cuda() + residual.double()
        return max(relative_error(result, exact) for result, exact in zip(results, (exact_norm(total, gamma, EPS), total)))


class Replay:
    def __init__(self, rank: Rank, inputs: tuple) -> None:
        self.inputs = inputs
        self.expected = [result.clone() for result in rank.run(inputs)]
        self.error = rank.error(inputs, self.expected)
        torch.cuda.synchronize()
        dist.barrier()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = rank.run(inputs)

    def poison(self) -> None:
        for result in self.results:
            result.fill_(float("nan"))

    def is_right(self) -> bool:
        return all(torch.equal(result, expected) for result, expected in zip(self.results, self.expected))


def replays(count: int = REPLAYS, pause: Callable[[int], None] = lambda number: None, checks: int = 200) -> dict:
    """Replay graphs of changing sizes, in an order all ranks share; so many times, evenly, to the bit what it must be."""
    check_every = max(1, count // checks)
    rank, order = Rank(), random.Random(0)
    captured = {tokens: rank.capture(tokens) for tokens in SIZES}
    largest_error = max(replay.error for replay in captured.values())
    begin, checked_so_far = time.monotonic(), 0
    for number in range(count):
        replay = captured[order.choice(SIZES)]
        checked = number % check_every == check_every - 1
        if checked:
            replay.poison()
        pause(number)
        replay.graph.replay()
        if checked:
            torch.cuda.synchronize()
            assert replay.is_right(), f"wrong after {number + 1} replays"
            checked_so_far += 1
    torch.cuda.synchronize()
    assert all(replay.error < 2.2e-3 for replay in captured.values()), "wrong against float64"
    return {"replays": count, "checks": checked_so_far, "seconds": time.monotonic() - begin, "largest_error": largest_error}


def skewed() -> dict:
    """Ranks enter up to 10 ms apart, one or the other late."""
    own = random.Random(dist.get_rank() + 1)

    def pause(number: int) -> None:
        if number % dist.get_world_size() == dist.get_rank():
            time.sleep(own.uniform(0, 0.010))

    return replays(1000, pause, checks=1000)


def no_tokens() -> dict:
    """Batches without tokens between others: nothing is exchanged, nothing gets out of step."""
    rank = Rank()
    full, empty = rank.capture(4), rank.inputs(0)
    for number in range(300):
        assert rank.run(empty)[0].shape == (0, HIDDEN)
        full.poison()
        full.graph.replay()
        torch.cuda.synchronize()
        assert full.is_right(), number
    return {"replays": 300}


def not_numbers() -> dict:
    """NaN and Inf in a rank's part reach every rank's result, and nothing of them stays for the next launch."""
    rank = Rank()
    replay = rank.capture(8)
    shared = replay.inputs[0].shared_output
    clean = shared.clone()
    for bad in (float("nan"), float("inf"), -float("inf")) * 20:
        if rank.rank == rank.world_size - 1:
            shared[3, 100] = bad
        replay.poison()
        replay.graph.replay()
        torch.cuda.synchronize()
        norm_out, residual_out = replay.results
        assert residual_out.isfinite().logical_not().nonzero().tolist() == [[3, 100]]
        assert norm_out.isfinite().all(1).tolist() == [token != 3 for token in range(8)]
        shared.copy_(clean)
        replay.graph.replay()
        torch.cuda.synchronize()
        assert replay.is_right()
    return {"replays": 120}


def small() -> dict:
    """A few launches, for compute-sanitizer."""
    rank = Rank(timeout_s=300.0)
    errors = []
    for tokens in (1, 3, 8):
        inputs = rank.inputs(tokens)
        errors.append(rank.error(inputs, rank.run(inputs)))
    assert max(errors) < 2.2e-3
    return {"largest_error": max(errors)}


def rank_dies() -> dict:
    """The last rank ends without a word; the others must end too, and say why."""
    rank = Rank(SHORT_TIMEOUT_S)
    replay = rank.capture(4)
    if rank.rank == rank.world_size - 1:
        sys.stdout.flush()
        os._exit(0)
    return wait_in_vain(replay)


def other_number_of_tokens() -> dict:
    """A rank runs fewer tokens than the others: an error on every rank in the end, not a wrong result."""
    rank = Rank(SHORT_TIMEOUT_S)
    many, few = rank.capture(8), rank.capture(4)
    if rank.rank == 0:
        return wait_in_vain(many)
    few.graph.replay()
    return wait_in_vain(many, expect_wait=False)


def wait_in_vain(replay: Replay, expect_wait: bool = True) -> dict:
    begin = time.monotonic()
    try:
        replay.graph.replay()
        torch.cuda.synchronize()
    except Exception as error:  # torch raises its own classes here, which differ between releases
        waited = time.monotonic() - begin
        assert not expect_wait or waited >= SHORT_TIMEOUT_S * 0.9, waited
        return {"timeout_s": SHORT_TIMEOUT_S, "ended_after_s": waited, "error": str(error).splitlines()[0]}
    raise AssertionError("finished although a peer did not take part")


def allocation_fails() -> dict:
    """One rank has no memory for its plane: every rank hears of it, and a plane can still be made afterwards."""
    if dist.get_rank() == 1:
        real = plane_module.load

        class NoMemory:
            def __init__(self, module):
                self.module = module

            def __getattr__(self, name):
                return getattr(self.module, name)

            def plane_bytes(self, max_tokens):
                return 1 << 45

        plane_module.load = lambda config: NoMemory(real(config))
    try:
        Rank()
    except PlaneUnavailable as error:
        message = str(error)
    else:
        raise AssertionError("a plane of 32 TiB was set up")
    assert "rank 1" in message and "out of memory" in message, message
    if dist.get_rank() == 1:
        plane_module.load = real
    return {"message": message, "afterwards": replays(100, checks=100)}


SCENARIOS: Dict[str, Callable[[], dict]] = {
    "replays": replays,
    "skewed": skewed,
    "no tokens": no_tokens,
    "not numbers": not_numbers,
    "small": small,
    "rank dies": rank_dies,
    "other number of tokens": other_number_of_tokens,
    "allocation fails": allocation_fails,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--only", nargs="+", choices=[*SCENARIOS, "two groups"], help="run these scenarios")
    parser.add_argument("--ranks", type=int, help="how many (default: as many as there are GPUs)")
    parser.add_argument("--replays", type=int, default=REPLAYS, help=f"of the scenario of that name (default: {REPLAYS})")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.ranks = args.ranks or gpus_or_exit(1)
    if args.ranks not in WORLD_SIZES:
        parser.error(f"--ranks takes 1 to 8, got {args.ranks}")
    if args.rank is not None:
        return run_rank(args)
    load(Config(args.ranks, HIDDEN, TOP_K, torch.bfloat16, torch.float32))
    report = describe(args.ranks)
    for name in args.only or scenarios(args.ranks):
        report["scenarios"][name] = two_groups(args) if name == "two groups" else collect(start(name, 29611, args))
        print(name, json.dumps(report["scenarios"][name]), flush=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(not all(found["passed"] for found in report["scenarios"].values()))


def scenarios(ranks: int) -> List[str]:
    left_out = set()
    if ranks == 1:
        left_out = {"skewed", "rank dies", "other number of tokens", "allocation fails", "two groups"}
    elif ranks > torch.cuda.device_count():
        left_out = {"other number of tokens", *(["rank dies"] if ranks > 2 else [])}
    return [name for name in (*SCENARIOS, "two groups") if name not in left_out]


def describe(ranks: int) -> dict:
    return {
        **describe_run(),
        "world_size": ranks,
        "gpus": torch.cuda.device_count(),
        "scenarios": {},
    }


def two_groups(args: argparse.Namespace) -> dict:
    """Two groups of processes with a plane each on the same GPUs at the same time, as two servers are."""
    groups = [start("skewed", port, args) for port in (29621, 29622)]
    found = [collect(group) for group in groups]
    return {"passed": all(each["passed"] for each in found), "groups": found}


def start(name: str, port: int, args: argparse.Namespace) -> List[subprocess.Popen]:
    told = {"only": name, "port": port, "ranks": args.ranks, "replays": args.replays}
    command = [sys.executable, __file__, *(word for option, value in told.items() for word in (f"--{option}", str(value)))]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return [subprocess.Popen([*command, "--rank", str(rank)], **pipes) for rank in range(args.ranks)]


def collect(processes: List[subprocess.Popen]) -> dict:
    outputs = []
    for process in processes:
        try:
            outputs.append(process.communicate(timeout=150)[0])
        except subprocess.TimeoutExpired:
            process.kill()
            outputs.append(process.communicate()[0] + "\nhung for 150 s")
    ranks = [last_json(output) for output in outputs]
    for rank, output in zip(ranks, outputs):
        rank["said"] = [line for line in output.splitlines() if "MoE boundary kernel" in line][:1]
        if not rank.get("passed") and not rank.get("left"):
            rank["output"] = output[-1500:]
    return {"passed": all(rank.get("passed") or rank.get("left") for rank in ranks), "ranks": ranks}


def last_json(output: str) -> dict:
    found = [line for line in output.splitlines() if line.startswith('{"passed"')]
    return json.loads(found[-1]) if found else {"left": "rank left" in output}


def run_rank(args: argparse.Namespace) -> None:
    name = args.only[0]
    torch.cuda.set_device(args.rank % torch.cuda.device_count())
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{args.port}", rank=args.rank, world_size=args.ranks)
    if name == "rank dies" and args.rank == args.ranks - 1:
        print("rank left", flush=True)
    result = replays(args.replays) if name == "replays" else SCENARIOS[name]()
    print(json.dumps({"passed": True, **result}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # the process may hold a GPU context that an expected failure ended


if __name__ == "__main__":
    main()
