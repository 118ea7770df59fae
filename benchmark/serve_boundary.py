"""Serve a wide seeded DeepSeek-V3 on two GPUs (or ``--tp`` of them) by every way at the layer boundary: tokens, logprobs, decode speed, beside stock.

    python benchmark/serve_boundary.py --overlay DIR [--stock DIR] --model DIR --policy FILE --out benchmark/results/serve_boundary_NAME.json

``DIR`` holds the ``sglang`` package, with and without the overlay; without ``--stock``, stock is the overlay's tree with
SGLANG_ENABLE_MOE_DEFERRED_FINALIZE=0. The arms: ``off`` (that flag at 0), ``separate``, ``flashinfer``, ``fused``,
``eager``, and ``auto`` (flag unset, which way by the table of ``--policy``). CUDA graphs are on, multicast is off.

Phases, any of which a call may run alone (``--phases``, ``--arms``):

* checkpoint: the model is made where it is served, seeded, in bf16; nothing if it is there.
* tokens: every prompt greedily, in groups (all at once, 8 at a time, alone), with logprobs.
* speed: decode output tokens per second. The same prompts are continued by a few and by many tokens (``--steps``); the
  rate is that of the tokens between. Stock's server and those of some arms (``--at-once``) are up on the same GPUs and are
  driven in turns, one at a time.
* reference: transformers' logprobs, in float32, of the tokens every arm said (teacher-forced), on one GPU.
* report: what ``boundary_checks`` (which states the rules) concludes; writes the .md. Status 1 if anything is wrong.

An arm whose server's counters show that its way did not run, or that another did, has failed, and so has the call (status 1); the
others go on.
Calls add to one JSON: with ``--resume`` what it holds is not measured again, rounds are added up to ``--rounds``. A call stops
at the end of ``--time-limit`` with status 2; the same call with ``--resume`` goes on. Answers lie beside the JSON, in
``NAME.answers/ARM.json``.

``--device cpu`` takes the servers of ``ci/cpu_serving``, where the ways but ``eager`` cannot run: for trying the script.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Dict, Iterator, List, Tuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "ci"), str(ROOT / "benchmark")]
from boundary_checks import conclude, render, turns, way_unmet, ways_counted  # noqa: E402
from cpu_serving.checkpoint import VOCABULARY, Shape, make_checkpoint  # noqa: E402
from cpu_serving.server import Configuration, Server, ServerFailed, serve  # noqa: E402
from gpu_server import GpuConfiguration, versions  # noqa: E402
from sglang_overlay.srt.environ import ENABLE, FUSION, MAX_TOKENS, POLICY  # noqa: E402
from sglang_overlay.srt.layers.moe.boundary.model import FLASHINFER_MAX_TOKENS  # noqa: E402
from sglang_overlay.srt.layers.moe.boundary.policy import Table  # noqa: E402

PHASES = ("checkpoint", "tokens", "speed", "reference", "report")
WAYS = ("separate", "flashinfer", "fused", "eager")
ARMS = ("off", *WAYS, "auto")
DEFAULT_ARMS = ("off", "separate", "flashinfer", "fused", "auto")
SERVER_INFO = ("flashinfer_allreduce_fusion_backend", "attention_backend", "moe_runner_backend", "disable_cuda_graph", "tp_size")
# Enough layers that a decode step is the GPUs' time and not the scheduler's; weights as wide as DeepSeek's own initializer.
SHAPE = Shape(hidden=7168, layers=40, experts=64, topk=8, expert_width=256, spread=0.02)
ARGUMENTS = (
    "--dtype bfloat16 --skip-tokenizer-init --attention-backend triton --moe-runner-backend triton --sampling-backend pytorch "
    "--grammar-backend none --disable-shared-experts-fusion --disable-radix-cache --skip-server-warmup --context-length 2048 "
    "--max-running-requests 256 --max-total-tokens 98304 --chunked-prefill-size 2048 --cuda-graph-backend-prefill disabled --random-seed 0 "
    "--flashinfer-allreduce-fusion-backend auto"
).split()
# What stock logs where it has its fused all-reduce + norm, without which it is not the release at its best.
STOCK_FUSES = "FlashInfer AllReduce Fusion enabled and workspace initialized"
COMMAND = "import sys; from sglang.cli.main import main; sys.exit(main())"


class OutOfTime(Exception):
    """The call's time is over; what was measured is saved."""


class WayDidNotRun(Exception):
    """A server that was to go by one way went by another, or by none."""


@dataclass(frozen=True)
class OnGpus(GpuConfiguration):
    """``sglang serve`` on GPUs, with this file's arguments."""

    def environment(self) -> Dict[str, str]:
        # Each server has a temporary folder of its own; what one compiled the next need not. Several start at a time, so
        # that one finds the GPUs' memory filled unevenly by another.
        return {"TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / "serve-boundary-inductor"),
                **super().environment(), "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}

    def command(self, port: int) -> List[str]:
        own = ["--model-path", str(self.model), "--tp", str(self.tp), "--host", "127.0.0.1", "--port", str(port)]
        return [sys.executable, "-c", COMMAND, "serve", *ARGUMENTS, *own, *self.arguments]


def main() -> int:
    args = parse_arguments()
    run = Run(args)
    steps = ((("checkpoint",), run.checkpoint), (("tokens", "speed"), run.servers), (("reference",), run.reference), (("report",), run.report))
    try:
        for phases, step in steps:
            if set(phases) & set(args.phases):
                step()
    except OutOfTime as end:
        print(f"out of time before {end}; the same call with --resume goes on", flush=True)
        return 2
    except (ServerFailed, WayDidNotRun) as failure:
        print(f"FAILED: stock: {failure}", flush=True)
        return 1
    wrong = run.results.get("found", {}).get("wrong") if "report" in args.phases else None
    return 1 if wrong or run.failed else 0


def parse_arguments(given: List[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--overlay", type=Path, required=True, help="folder that holds the sglang package with the overlay")
    add("--stock", type=Path, help="folder that holds the pristine package; left out: the overlay's with the flag at 0")
    add("--model", type=Path, required=True, help="the checkpoint's folder; made if it is not there")
    add("--out", type=Path, required=True, help="the results' JSON")
    add("--policy", type=Path, help="auto's table of measurements (bench_boundary.py --policy); left out: the built-in one")
    add("--phases", nargs="+", default=PHASES, choices=PHASES, help="default: all")
    add("--arms", nargs="+", default=DEFAULT_ARMS, choices=ARMS, help=f"default: {' '.join(DEFAULT_ARMS)}")
    add("--resume", action="store_true", help="keep what --out holds and measure what is missing")
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--tp", type=int, default=2)
    add("--mem-fraction-static", default="0.8", help="of what a server finds free; its size is bounded by its tokens (default: 0.8)")
    add("--at-once", type=int, default=3, help="arms whose servers are up beside stock's at a time (default: 3)")
    add("--max-tokens", type=int, default=256, help=f"{MAX_TOKENS.name} (default: 256)")
    add("--prompts", type=int, default=64)
    add("--new-tokens", type=int, default=128)
    add("--groups", type=int, nargs="+", default=[64, 8, 1], help="prompts at a time in the tokens phase (default: 64 8 1)")
    add("--batches", type=int, nargs="+", default=[1, 4, 16, 64, 256], help="of the speed phase (default: 1 4 16 64 256)")
    add("--steps", type=int, nargs=2, default=[64, 320], help="few and many new tokens of the speed phase (default: 64 320)")
    add("--rounds", type=int, default=8, help="of the speed phase, per arm; each times stock twice and the arm twice (default: 8)")
    add("--time-limit", type=float, default=560.0, help="seconds this call may take (default: 560)")
    add("--start-limit", type=float, default=240.0, help="seconds for a server to start (default: 240)")
    for name, value in asdict(SHAPE).items():
        add(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"of the model (default: {value})")
    return parser.parse_args(given)


def shape_of(args: argparse.Namespace) -> Shape:
    return Shape(**{name: getattr(args, name) for name in asdict(SHAPE)})


def flags_of(arm: str, args: argparse.Namespace) -> Dict[str, str]:
    """An arm's environment."""
    if arm in ("stock", "off"):
        return {ENABLE.name: "0"}
    most = min(args.max_tokens, FLASHINFER_MAX_TOKENS) if arm == "flashinfer" else args.max_tokens
    flags = {MAX_TOKENS.name: str(most)}
    if arm == "auto":
        return {**flags, **({POLICY.name: str(args.policy.resolve())} if args.policy else {})}
    return {**flags, ENABLE.name: "1", FUSION.name: arm}


def configuration_of(arm: str, args: argparse.Namespace) -> Configuration:
    tree = args.stock or args.overlay if arm == "stock" else args.overlay
    if args.device == "cpu":
        return Configuration(tree, args.model.resolve(), args.tp, flags_of(arm, args))
    graphs = sorted({*args.batches, *args.groups, 1, 2, 8, 32, 128})
    options = ("--mem-fraction-static", args.mem_fraction_static, "--cuda-graph-bs-decode", *map(str, graphs))
    return OnGpus(tree, args.model.resolve(), args.tp, flags_of(arm, args), options)


def named_ways(args: argparse.Namespace) -> set[str]:
    """The ways auto's table names for the batch sizes that are served, whatever the GPU."""
    entries = Table.read(str(args.policy) if args.policy else None).entries
    policies = [Table([entry]).policy(*entry.key) for entry in entries if entry.key[1:] == (args.tp, args.hidden)]
    batches = [batch for batch in args.batches if batch <= args.max_tokens]
    return {policy.ways(batch)[0] for policy in policies for batch in batches if policy.ways(batch)}


def prompts(count: int, longest: int = 40) -> List[List[int]]:
    """Prompts of 1 to ``longest`` tokens, fixed and all different."""
    lengths = islice(cycle((1, 2, 5, 9, 16, 24, 33, longest)), count)
    return [[(37 * number + 31 * place + number * place) % (VOCABULARY - 2) + 2 for place in range(length)]
            for number, length in enumerate(lengths)]


def decode_rate(server: Server, batch: int, steps: Tuple[int, int]) -> float:
    """Output tokens per second between ``steps[0]`` and ``steps[1]`` new tokens of a batch."""
    asked = [[(13 * number + place) % (VOCABULARY - 2) + 2 for place in range(4)] for number in range(batch)]
    for _ in range(3):  # a machine that is busy otherwise may have the longer run take less time, which is no figure at all
        few, many = (server.seconds_for(asked, step) for step in steps)
        if many > few:
            return batch * (steps[1] - steps[0]) / (many - few)
    raise ServerFailed(f"{steps[1]} tokens took {many:.3f} s, {steps[0]} took {few:.3f} s: too few to time")


def in_a_line(failure: str) -> str:
    """What became of a server, and the last error that the end of its log has."""
    first, *log = failure.splitlines()
    errors = [line for line in log if re.match(r"[\w.]+(Error|Exception|Refused)\b", line)]
    return f"{first} {errors[-1]}" if errors else first


class Run:
    """One call: what it was asked for, what is known so far, and when it has to end."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.end = time.monotonic() + args.time_limit
        self.answers_folder = args.out.with_suffix(".answers")
        self.results: dict = {"commands": [], "servers": {}, "speed": {}}
        measures = {"tokens", "speed"} & set(args.phases)
        if args.out.exists() and (args.resume or not measures):
            self.results = json.loads(args.out.read_text())
        elif self.answers_folder.exists() and measures:
            shutil.rmtree(self.answers_folder)
        self.results["commands"].append(shlex.join(["python", *sys.argv]))
        if measures or "versions" not in self.results:
            self.results["versions"] = versions(args.overlay)
        self.results["model"] = ", ".join(f"{name} {value}" for name, value in asdict(shape_of(args)).items())
        self.failed: Dict[str, str] = self.results.setdefault("failed", {})
        self.slowest_start = self.slowest_round = 0.0

    def save(self) -> None:
        self.args.out.parent.mkdir(parents=True, exist_ok=True)
        self.args.out.write_text(json.dumps(self.results, indent=1) + "\n")

    def time_for(self, what: str, seconds: float) -> None:
        if time.monotonic() + seconds > self.end:
            raise OutOfTime(what)

    # checkpoint

    def checkpoint(self) -> None:
        import torch

        if not self.args.model.exists():
            dtype = torch.bfloat16 if self.args.device == "cuda" else torch.float32
            started = time.monotonic()
            partial = self.args.model.with_suffix(".partial")
            make_checkpoint(partial, shape_of(self.args), dtype, self.args.device).rename(self.args.model)
            print(f"made the checkpoint in {time.monotonic() - started:.0f} s", flush=True)
            if self.args.device == "cuda":
                torch.cuda.empty_cache()

    # tokens and speed

    def servers(self) -> None:
        """Start stock and, beside it, some arms at a time, and ask each what is still missing."""
        missing = [arm for arm in self.args.arms if self.is_missing(arm)]
        if not missing and not self.wants_tokens("stock"):
            return
        waves = [missing[start:start + self.args.at_once] for start in range(0, len(missing), self.args.at_once)] or [[]]
        with ExitStack() as stack:
            stock: Dict[str, Server] = {}
            for wave in waves:
                with ExitStack() as ends_with_wave:
                    wanted = dict.fromkeys(wave, ends_with_wave)
                    servers = {**stock, **self.start(wanted if stock else {"stock": stack, **wanted})}
                    stock = {"stock": servers["stock"]}
                    self.ask(servers)

    def ask(self, servers: Dict[str, Server]) -> None:
        """All that is missing of stock and of the arms that are up beside it."""
        self.tokens("stock", servers["stock"])
        self.tokens("stock again", servers["stock"])
        for arm, server in self.arms_of(servers).items():
            with self.noting(arm, servers):
                self.tokens(arm, server)
        self.speed(servers)
        for arm, server in self.arms_of(servers).items():
            with self.noting(arm, servers):
                self.check_way(arm, server, final=True)

    @staticmethod
    def arms_of(servers: Dict[str, Server]) -> Dict[str, Server]:
        return {arm: server for arm, server in servers.items() if arm != "stock"}

    @contextmanager
    def noting(self, arm: str, servers: Dict[str, Server]) -> Iterator[None]:
        """Note the failure of an arm and leave its server out from here on; stock's ends the call."""
        try:
            yield
        except (ServerFailed, WayDidNotRun) as failure:
            if arm == "stock":
                raise
            servers.pop(arm, None)
            self.failed[arm] = str(failure)[-3000:]
            self.save()
            print(f"FAILED: {arm}: {failure}", flush=True)

    def is_missing(self, arm: str) -> bool:
        return arm in self.failed or self.wants_tokens(arm) or self.wants_speed(arm)

    def wants_tokens(self, arm: str) -> bool:
        return "tokens" in self.args.phases and not set(map(str, self.args.groups)) <= set(self.answers_of(arm))

    def wants_speed(self, arm: str) -> bool:
        if "speed" not in self.args.phases:
            return False
        rounds = self.results["speed"].get(arm, {})
        return any(len(rounds.get(str(batch), ())) < self.args.rounds for batch in self.args.batches)

    def start(self, stacks: Dict[str, ExitStack]) -> Dict[str, Server]:
        """Start the servers of several arms together, each to end with its stack; those of them that came up."""
        self.time_for(f"the servers of {', '.join(stacks)}", self.slowest_start)
        up: Dict[str, Server] = {}
        with ThreadPoolExecutor(len(stacks)) as pool:
            starting = {arm: pool.submit(self.start_one, arm, stack) for arm, stack in stacks.items()}
        for arm, future in starting.items():
            self.failed.pop(arm, None)
            with self.noting(arm, up):
                up[arm], took = future.result()
                self.slowest_start = max(self.slowest_start, took)
                self.note_server(arm, up[arm], took)
                self.check_way(arm, up[arm])
        return up

    def start_one(self, arm: str, stack: ExitStack) -> Tuple[Server, float]:
        """One arm's server and the seconds it took; nothing of the results is touched, several threads are in here."""
        started = time.monotonic()
        log = Path(tempfile.gettempdir()) / f"serve-boundary-{arm}.log"
        limit = min(self.args.start_limit, self.end - started)
        server = stack.enter_context(serve(configuration_of(arm, self.args), log, start_limit=limit))
        return server, time.monotonic() - started

    def note_server(self, arm: str, server: Server, took: float) -> None:
        server.generate([2, 3, 4], 4)
        info = server.server_info()
        self.results["servers"][arm] = {"start_seconds": took, "counters": server.moe_finalize(), "flags": flags_of(arm, self.args),
                                        "info": {name: info.get(name) for name in SERVER_INFO},
                                        "fuses": STOCK_FUSES in server.log.read_text(errors="replace")}
        self.save()
        print(f"{arm}: up after {took:.0f} s, ways {ways_counted(server.moe_finalize())}", flush=True)

    def check_way(self, arm: str, server: Server, final: bool = False) -> None:
        """Raise unless the arm's way ran; what auto's table names need not all have been met before the end."""
        counters, named = server.moe_finalize(), named_ways(self.args) if arm == "auto" else set()
        met = named if final else named & set(ways_counted(counters))
        overlay = arm != "stock" or self.args.stock is None
        reason = way_unmet(arm, counters, met or named, overlay)
        if reason:
            raise WayDidNotRun(f"{arm}: {reason} (log: {server.log})")

    def tokens(self, arm: str, server: Server) -> None:
        if not self.wants_tokens(arm):
            return
        found = {}
        asked = prompts(self.args.prompts)
        for size in self.args.groups:
            self.time_for(f"{arm}'s tokens", 30 if self.args.device == "cuda" else 0)
            said = [one for start in range(0, len(asked), size)
                    for one in server.generate_batch(asked[start:start + size], self.args.new_tokens)]
            found[str(size)] = [asdict(one) for one in said]
        self.write_answers(arm, found)
        print(f"{arm}: {self.args.prompts} prompts answered, {', '.join(found)} at a time", flush=True)

    def speed(self, servers: Dict[str, Server]) -> None:
        """Rounds of stock and the arms that still want some, until each has ``--rounds`` of each batch size."""
        if not any(map(self.wants_speed, self.arms_of(servers))):
            return
        for arm, server in list(servers.items()):
            with self.noting(arm, servers):
                for batch in self.args.batches:
                    server.seconds_for(prompts(batch), self.args.steps[0])
        for number in range(self.args.rounds):
            for batch in self.args.batches:
                self.round(number, batch, servers)

    def round(self, number: int, batch: int, servers: Dict[str, Server]) -> None:
        """Time stock and the arms that have no such round yet."""
        rounds = {arm: self.results["speed"].setdefault(arm, {}).setdefault(str(batch), []) for arm in self.arms_of(servers)}
        due = [arm for arm in rounds if len(rounds[arm]) <= number]
        if not due:
            return
        self.time_for(f"round {number} of {', '.join(due)}, batch {batch}", self.slowest_round)
        started = time.monotonic()
        rates: Dict[str, List[float]] = {}
        for turn in turns(number, due):
            with self.noting(turn, servers):
                if turn in servers:
                    rates.setdefault(turn, []).append(decode_rate(servers[turn], batch, self.args.steps))
        for arm in due:
            if arm in servers:
                rounds[arm].append({"stock": rates["stock"], "arm": rates[arm]})
                print(f"{arm}: round {number}, batch {batch}: {sum(rates[arm]) / sum(rates['stock']):.4f} of stock", flush=True)
        self.slowest_round = max(self.slowest_round, time.monotonic() - started)
        self.save()

    # reference

    def reference(self) -> None:
        """Give every answer its tokens' logprobs in float32."""
        oracle = None
        for arm in self.answered():
            answers = self.answers_of(arm)
            if all("float32" in answer for group in answers.values() for answer in group):
                continue
            self.time_for(f"{arm}'s reference", 30)
            oracle = oracle or Float32(self.args.model, self.args.device)
            for group in answers.values():
                asked = prompts(len(group))
                for answer, exact in zip(group, oracle.logprobs(asked, [answer["tokens"] for answer in group])):
                    answer["float32"] = exact
            self.write_answers(arm, answers)
            print(f"{arm}: float32 logprobs are there", flush=True)

    def answered(self) -> List[str]:
        return [arm for arm in ("stock", "stock again", *ARMS) if self.file_of(arm).exists()]

    def answers_of(self, arm: str) -> Dict[str, List[dict]]:
        return json.loads(self.file_of(arm).read_text()) if self.file_of(arm).exists() else {}

    def write_answers(self, arm: str, answers: Dict[str, List[dict]]) -> None:
        self.answers_folder.mkdir(parents=True, exist_ok=True)
        self.file_of(arm).write_text(json.dumps(answers) + "\n")

    def file_of(self, arm: str) -> Path:
        return self.answers_folder / f"{arm.replace(' ', '-')}.json"

    # report

    def report(self) -> None:
        answers = {arm: self.answers_of(arm) for arm in self.answered()}
        self.results["found"] = conclude(answers, self.results["speed"])
        self.results["found"]["missing"] = self.not_measured(answers)
        self.results["found"]["wrong"] += [f"{arm} failed: {in_a_line(reason)}" for arm, reason in self.failed.items()]
        stock = self.results["servers"].get("stock", {"fuses": True})
        if self.args.device == "cuda" and self.args.tp > 1 and not stock["fuses"]:
            self.results["found"]["wrong"].append("stock ran without its fused all-reduce + norm")
        self.save()
        text = render(self.results)
        self.args.out.with_suffix(".md").write_text(text)
        print(text, flush=True)

    def not_measured(self, answers: Dict[str, dict]) -> List[str]:
        """What of the arms asked about nobody has measured, so that nothing can be wrong with it."""
        silent = [f"{arm}'s tokens" for arm in ("stock", *self.args.arms) if arm not in answers]
        speed = self.results["speed"]
        return silent + [f"{arm}'s speed at batch {batch}" for arm in self.args.arms for batch in self.args.batches
                         if not speed.get(arm, {}).get(str(batch))]


class Float32:
    """The checkpoint in transformers, in float32 without TF32."""

    def __init__(self, model: Path, device: str) -> None:
        import torch
        from transformers import DeepseekV3ForCausalLM

        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        self.torch, self.device = torch, device
        loaded = DeepseekV3ForCausalLM.from_pretrained(model, dtype=torch.float32, experts_implementation="eager")
        self.model = loaded.to(device).eval()

    def logprobs(self, asked: List[List[int]], said: List[List[int]], at_once: int = 16) -> Iterator[List[float]]:
        """Of each answer's tokens, after its prompt and the tokens before."""
        for start in range(0, len(asked), at_once):
            yield from self._logprobs(asked[start:start + at_once], said[start:start + at_once])

    def _logprobs(self, asked: List[List[int]], said: List[List[int]]) -> Iterator[List[float]]:
        torch = self.torch
        texts = [[*prompt, *tokens] for prompt, tokens in zip(asked, said)]
        longest = max(map(len, texts))
        # Padded on the right, where nothing before it looks.
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=self.device)
        with torch.no_grad():
            found = self.model(ids, use_cache=False).logits.float().log_softmax(-1)
        for row, prompt, tokens in zip(found, asked, said):
            places = torch.arange(len(prompt) - 1, len(prompt) - 1 + len(tokens))
            yield row[places, torch.tensor(tokens)].tolist()


if __name__ == "__main__":
    sys.exit(main())
