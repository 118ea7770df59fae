"""Serve a small seeded DeepSeek-V3 with MXFP4 experts on one Hopper GPU in FlashInfer's mega kernel, and by SGLang's own ways.

    python benchmark/serve_mxfp4_hopper.py --tree DIR --model DIR --out benchmark/results/serve_mxfp4_hopper_NAME.json

``--tree`` is the folder of a patched SGLang 0.5.23's ``sglang`` package; SGLang's own ways run from it with the flag at 0. ``--model`` is where the
checkpoint is written. All servers run at once and answer the same prompts greedily, each alone, then all together, then together once more; one
prompt is longer than the largest workspace. Then transformers gives every token's logprob in float32 (teacher-forced, from the same numbers in bf16).
``--interleave-in-torch``: as in ``bench_mxfp4_hopper.py``. Exit status 1 if a check fails:

* the servers with the flag say that the experts run in the mega kernel, the others do not;
* with CUDA graphs every decode step ran in one, and the answers are those without, bit for bit;
* the same batch has the same answers, bit for bit;
* the mean distance of its logprobs to float32 is at most 1.25 times that of SGLang's own FP8 way, which quantises activations as finely;
* with ``--interleave-in-torch`` servers in the mega kernel say that they do.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Dict, List

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "ci"), str(ROOT / "benchmark")]
from cpu_serving.server import Server, serve  # noqa: E402
from boundary_checks import errors  # noqa: E402
from gpu_server import NEW_TOKENS, GpuConfiguration, compare, prompts, versions  # noqa: E402
from mxfp4_checkpoint import make_mxfp4_checkpoint  # noqa: E402
from mxfp4_interleave import SAYS as INTERLEAVES  # noqa: E402
from serve_boundary import Float32  # noqa: E402

FLAG = "SGLANG_MOE_MXFP4_MEGAMOE_SM90"
MEGA = ("--moe-a2a-backend", "flashinfer_megamoe", "--moe-runner-backend", "auto")
# name -> flags, arguments
ARMS = {
    "mega kernel": ({FLAG: "1"}, MEGA),
    "eager": ({FLAG: "1"}, (*MEGA, "--disable-cuda-graph")),
    "triton FP8": ({FLAG: "0", "SGLANG_DSV4_FP4_DEQUANT": "1"}, ("--moe-runner-backend", "auto")),
    "marlin": ({FLAG: "0"}, ("--moe-runner-backend", "marlin")),
}
OWN, EAGER, FP8, *_ = ARMS
# Servers share the GPU, so a cache is bounded by its number of tokens. Without DeepGEMM nothing is compiled for linear layers.
COMMON = ("--mem-fraction-static", "0.9", "--max-total-tokens", "16384", "--decode-log-interval", "1")
FLAGS = {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}
SAYS = "MXFP4 experts run in FlashInfer's mega kernel"
LONG_PROMPT = [(29 * place) % 1000 + 2 for place in range(1500)]
IN_TORCH = (ROOT / "benchmark", ROOT / "benchmark" / "mxfp4_interleave_plugin")  # the module, and what names it to SGLang
FARTHEST = 1.25
PACKAGES = ("flashinfer-python", "sglang-kernel", "transformers", "nvidia-cutlass-dsl", "apache-tvm-ffi")


def main() -> int:
    args = parse_arguments()
    model = make_mxfp4_checkpoint(args.model)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"command": " ".join(sys.argv), "versions": {**versions(args.tree), **{name: installed(name) for name in PACKAGES}}, "arms": {}}
    said: Dict[str, dict] = {}
    with ExitStack() as stack, ThreadPoolExecutor(len(args.arms)) as pool:
        running = {arm: pool.submit(observe, arm, args, model.served, stack) for arm in args.arms}
        for arm, future in running.items():
            try:
                said[arm], result["arms"][arm] = future.result()
            except Exception as failure:  # what befalls one server must not cost what others have said
                result["arms"][arm] = {"failed": f"{type(failure).__name__}: {failure}"[-3000:]}
            print(arm, json.dumps(result["arms"][arm]), flush=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    float32 = Float32(model.plain, "cuda")
    for arm, answers in said.items():
        result["arms"][arm]["to_float32"] = distance(answers["alone"], list(float32.logprobs(asked(), [one["tokens"] for one in answers["alone"]])))
    result["compared"] = comparisons(said)
    result["wrong"] = wrong(result["arms"], said, args.interleave_in_torch)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"compared": result["compared"], **{arm: result["arms"][arm]["to_float32"] for arm in said}}, indent=1))
    print("\n".join(result["wrong"]) or "all checks hold")
    return 1 if result["wrong"] else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("tree", "model", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--arms", nargs="+", default=[OWN, EAGER, FP8], choices=list(ARMS))
    parser.add_argument("--start-limit", type=float, default=600.0, help="seconds for a server to start (default: 600)")
    parser.add_argument("--interleave-in-torch", action="store_true", help="prepare weights without FlashInfer's CUTLASS module")
    return parser.parse_args()


def installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def asked() -> List[List[int]]:
    return [*prompts(), LONG_PROMPT]


def observe(arm: str, args: argparse.Namespace, model: Path, stack: ExitStack) -> tuple:
    """What one arm's server answers, and what its log says; the server goes on until ``stack`` ends, so that all run at once."""
    flags, arguments = ARMS[arm]
    plugins = IN_TORCH if args.interleave_in_torch and flags[FLAG] == "1" else ()
    log = Path(tempfile.gettempdir()) / f"serve-mxfp4-{arm.replace(' ', '-')}.log"
    configuration = GpuConfiguration(args.tree, model, 1, {**FLAGS, **flags}, (*COMMON, *arguments), plugins=plugins)
    server = stack.enter_context(serve(configuration, log, start_limit=args.start_limit))
    return answers_of(server), look_at_log(log.read_text(errors="replace"))


def answers_of(server: Server) -> Dict[str, List[dict]]:
    alone = [server.generate(prompt, NEW_TOKENS) for prompt in asked()]
    together, again = (server.generate_batch(asked(), NEW_TOKENS) for _ in range(2))
    return {name: [asdict(one) for one in answers] for name, answers in (("alone", alone), ("together", together), ("again", again))}


def look_at_log(text: str) -> dict:
    lines = text.splitlines()
    steps = [line for line in lines if "Decode batch" in line]
    return {"says": [line[-200:] for line in lines if SAYS in line][-1:], "interleaves": INTERLEAVES in text, "decode_steps": len(steps),
            "decode_steps_in_graphs": sum("cuda graph: True" in line for line in steps)}


def distance(answers: List[dict], exact: List[List[float]]) -> dict:
    """Between an arm's logprobs of its own tokens and float32's of the same."""
    apart = [error for one, truth in zip(answers, exact) for error in errors({**one, "float32": truth})]
    return {"tokens": len(apart), "mean": sum(apart) / len(apart), "max": max(apart)}


def comparisons(said: Dict[str, dict]) -> Dict[str, dict]:
    pairs = [(OWN, EAGER), (OWN, FP8)]
    found = {f"{one} / {other}": compare_all(said[one], said[other]) for one, other in pairs if one in said and other in said}
    return {**found, **{f"{arm}, its batch again": compare(answers["together"], answers["again"]) for arm, answers in said.items()}}


def compare_all(said: dict, reference: dict) -> dict:
    return compare([*said["alone"], *said["together"]], [*reference["alone"], *reference["together"]])


def wrong(arms: Dict[str, dict], said: Dict[str, dict], in_torch: bool = False) -> List[str]:
    """The checks of this script that do not hold, in words."""
    found = []
    for arm, seen in arms.items():
        if arm not in said:
            found.append(f"{arm}: its server failed")
            continue
        flags, arguments = ARMS[arm]
        if bool(seen["says"]) != (flags[FLAG] == "1"):
            found.append(f"{arm}: its log {'says' if seen['says'] else 'does not say'} that the experts run in the mega kernel")
        if seen["interleaves"] != (in_torch and flags[FLAG] == "1"):
            found.append(f"{arm}: weights were {'' if seen['interleaves'] else 'not '}interleaved in torch")
        steps, in_graphs = seen["decode_steps"], seen["decode_steps_in_graphs"]
        if in_graphs != (0 if "--disable-cuda-graph" in arguments else steps) or not steps:
            found.append(f"{arm}: {in_graphs} of {steps} decode steps ran in CUDA graphs")
        if said[arm]["together"] != said[arm]["again"]:
            found.append(f"{arm}: the same batch has other answers the second time")
    if OWN in said and EAGER in said and said[OWN] != said[EAGER]:
        found.append("the answers with CUDA graphs are not those without")
    if OWN in said and FP8 in said and arms[OWN]["to_float32"]["mean"] > FARTHEST * arms[FP8]["to_float32"]["mean"]:
        found.append(f"logprobs are farther from float32 than those of {FP8}")
    return found


if __name__ == "__main__":
    sys.exit(main())
