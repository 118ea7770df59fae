"""Serve a small seeded FP8 DeepSeek-V3 on one NVIDIA GPU with power-of-two activation scales off and on, and look at the scales it used.

    python benchmark/serve_ue8m0.py --stock DIR --overlay DIR --models DIR --out benchmark/results/serve_ue8m0_NAME.json

DIR holds the ``sglang`` package, without and with the overlay; ``--models`` is where the two checkpoints are written, which differ in ``scale_fmt: ue8m0``
alone. Every server answers the same prompts greedily. Those without CUDA graphs also write down the activation scales that the
MoE's GEMM kernel was given (``gemm_scales_plugin``). Exit status 1 if a check fails:

* off, and a checkpoint without the declaration: tokens and logprobs are stock's, bit for bit; scales are continuous;
* declared, and ``on``: every scale of FC1 and of FC2 in every MoE layer is a power of two; the two agree bit for bit.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "ci"), str(ROOT / "benchmark")]
from cpu_serving.fp8_checkpoint import SHAPE, make_fp8_checkpoint  # noqa: E402
from cpu_serving.server import ServerFailed, serve  # noqa: E402
from gpu_server import NEW_TOKENS, GpuConfiguration, compare, prompts, versions  # noqa: E402

PLUGIN = ROOT / "benchmark" / "gemm_scales_plugin"
FLAG, FOLDER = "SGLANG_MOE_TRITON_UE8M0", "GEMM_SCALES"
MOE_LAYERS = SHAPE.layers - SHAPE.first_k_dense_replace
EAGER = ("--disable-cuda-graph",)
# No linear layer's kernel is compiled for this; the MoE is the Triton runner's in any case.
COMMON = {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}

# name -> tree, is the checkpoint declared, flag, arguments, name of the arm it must agree with, are scales powers of two
ARMS = {
    "stock": ("stock", True, None, EAGER, None, False),
    "off": ("overlay", True, "off", EAGER, "stock", False),
    "auto, undeclared": ("overlay", False, None, EAGER, "stock", False),
    "auto, declared": ("overlay", True, None, EAGER, None, True),
    "on, undeclared": ("overlay", False, "on", EAGER, "auto, declared", True),
    "stock, CUDA graphs": ("stock", True, None, (), None, None),
    "off, CUDA graphs": ("overlay", True, "off", (), "stock, CUDA graphs", None),
    "auto, CUDA graphs": ("overlay", True, None, (), None, None),
}


def observe(configuration: GpuConfiguration, log: Path, start_limit: float) -> list[dict]:
    """What one server says to each prompt alone and to all at once."""
    with serve(configuration, log, start_limit=start_limit) as server:
        said = [*(server.generate(prompt, NEW_TOKENS) for prompt in prompts()), *server.generate_batch(prompts(), NEW_TOKENS)]
    return [{"tokens": one.tokens, "logprobs": one.logprobs} for one in said]


def look_at_scales(folder: Path) -> dict:
    """Per GEMM and layer, in the order of the model: how many scales there were, and how many of them powers of two."""
    layers: dict[str, dict[int, list]] = {"FC1": defaultdict(list), "FC2": defaultdict(list)}
    for file in sorted(folder.glob("*.pt")):
        call = torch.load(file)
        gemm = "FC1" if call["weight_shape"][2] == SHAPE.hidden else "FC2"
        layers[gemm][call["weight"]].append(call["scale"].flatten())
    found = {}
    for gemm, calls in layers.items():
        scales = [torch.cat(each) for each in calls.values()]
        found[gemm] = [{"scales": len(each), "powers_of_two": int((torch.frexp(each).mantissa == 0.5).sum()), "least": each.min().item(),
                        "largest": each.max().item()} for each in scales]
    return found


def check_scales(found: dict, powers: bool) -> list[str]:
    """What is wrong with the scales of one arm."""
    wrong = []
    for gemm, layers in found.items():
        if len(layers) != MOE_LAYERS:
            wrong.append(f"{gemm}: scales of {len(layers)} MoE layers, the model has {MOE_LAYERS}")
        for place, layer in enumerate(layers):
            share = layer["powers_of_two"] / layer["scales"]
            if share != 1 if powers else share > 0.5:
                wrong.append(f"{gemm} of MoE layer {place}: {layer['powers_of_two']} of {layer['scales']} scales are powers of two")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("stock", "overlay", "models", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--start-limit", type=float, default=240.0, help="seconds for a server to start (default: 240)")
    arguments = parser.parse_args()
    models = {declared: make_fp8_checkpoint(arguments.models / ("declared" if declared else "undeclared"), declared) for declared in (True, False)}
    result = {"command": " ".join(sys.argv), "versions": versions(arguments.stock), "arms": {}}
    said, failures = {}, []
    for name in arguments.arms:
        seen, wrong = run_arm(name, arguments, models, said)
        result["arms"][name] = {**seen, "wrong": wrong}
        failures += [f"{name}: {each}" for each in wrong]
        print(name, json.dumps(result["arms"][name]), flush=True)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(failures) or "all checks hold")
    return 1 if failures else 0


def run_arm(name: str, arguments: argparse.Namespace, models: dict, said: dict) -> tuple[dict, list[str]]:
    """Serve one arm; what it showed, and what of it is wrong."""
    tree, declared, flag, options, reference, powers = ARMS[name]
    folder = Path(tempfile.mkdtemp(prefix="gemm-scales-"))
    flags = {**COMMON, **({FLAG: flag} if flag else {}), **({FOLDER: str(folder)} if powers is not None else {})}
    configuration = GpuConfiguration(getattr(arguments, tree), models[declared], 1, flags, options, plugins=[PLUGIN])
    log = Path(tempfile.gettempdir()) / f"serve-ue8m0-{name.replace(' ', '-').replace(',', '')}.log"
    try:
        said[name] = observe(configuration, log, arguments.start_limit)
        seen = {"scales": look_at_scales(folder)} if powers is not None else {}
    except ServerFailed as failure:
        return {}, [str(failure)[-3000:]]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    wrong = check_scales(seen["scales"], powers) if seen else []
    seen["log"] = [line for line in log.read_text(errors="replace").splitlines() if "activation scales are" in line][-1:]
    if reference in said:
        seen["against"], seen["compared"] = reference, compare(said[name], said[reference])
        if not seen["compared"]["bit_equal"]:
            wrong.append(f"tokens or logprobs are not those of: {reference}")
    return seen, wrong


if __name__ == "__main__":
    sys.exit(main())
