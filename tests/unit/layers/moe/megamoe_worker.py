"""SGLang's MXFP4 expert layers and its start-up, with Hopper's mega kernel stood in for, on a CPU and gloo ranks.

Run by ``test_megamoe_layers.py`` as ``megamoe_worker.py RUNS.json``, a list of runs, each a list of the specs of its ranks, with an SGLang tree of
0.5.23 on the path, stock or patched. Arguments, layers, weight loaders, dispatch and process groups are the tree's own; that the GPU is a Hopper is told
to SGLang. SGLang is imported once and each rank forked; it writes what it saw to ``spec["out"]``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import megamoe_stand_in
import mxfp4_moe
import torch
from cpu_serving import forked, ranks

SHAPE = mxfp4_moe.Shape(experts=8, intermediate=128, hidden=256, top_k=3)
FLAG = "SGLANG_MOE_MXFP4_MEGAMOE_SM90"


def main(runs: list) -> None:
    torch.set_num_threads(1)
    import sglang.srt.layers.moe.fused_moe_triton.layer
    import sglang.srt.layers.quantization.fp8
    import sglang.srt.server_args  # noqa: F401

    for specs in runs:
        pids = [forked.start(run_rank, spec) for spec in specs]
        for pid in pids:
            os.waitpid(pid, 0)


def run_rank(spec: dict) -> None:
    """One rank's part in one run; its output file exists only if it got through."""
    from sglang.srt.runtime_context import override_platform

    os.environ.pop(FLAG, None)
    if spec["flag"] is not None:
        os.environ[FLAG] = spec["flag"]
    os.environ.update(spec.get("environment", {}))
    override_platform(**spec.get("platform", {"is_sm90": True})).install()
    with torch.no_grad():
        seen = globals()[f"scenario_{spec['scenario']}"](spec)
    torch.save(seen, spec["out"])


# Start-up.


def scenario_arguments(spec: dict) -> dict:
    """What SGLang makes of a command line, or how it refuses it."""
    from sglang.srt.arg_groups.overrides import resolved_view

    put_flashinfer_on_the_path(spec)
    try:
        args = server_args(spec)
        args.resolve_once()
    except (ValueError, AssertionError) as error:
        return {"refused": str(error), "type": type(error).__name__}
    view = resolved_view(args)
    environment = {name: os.environ.get(name) for name in ("MEGA_NO_DIST", "NVSHMEM_DISABLE_NVLS", "NVSHMEM_REMOTE_TRANSPORT")}
    return {"runner": view.moe_runner_backend, "ep_size": view.ep_size, "environment": environment}


def put_flashinfer_on_the_path(spec: dict) -> None:
    """Packages that are found and never imported, with or without the kernel's file."""
    from sglang.srt.layers.moe import utils  # noqa: F401  what looks for FlashInfer itself has looked

    folder = Path(spec["out"]).with_suffix("")
    kernel = folder / "flashinfer" / "moe_ep/backends/mega/kernel/sm90/fp8_mxfp4_bf16_pull_cutedsl/config.py"
    kernel.parent.mkdir(parents=True)
    (folder / "flashinfer" / "__init__.py").write_text("raise ImportError('not to be imported')")
    if spec.get("kernel", True):
        kernel.write_text("")
    if spec.get("nvshmem", True):
        (folder / "nvshmem").mkdir()
        (folder / "nvshmem" / "__init__.py").write_text("")
    sys.path.insert(0, str(folder))


def server_args(spec: dict):
    from sglang.srt.server_args import ServerArgs

    told = {
        "model_path": spec["checkpoint"], "device": "cpu", "dtype": "bfloat16", "attention_backend": "triton", "disable_cuda_graph": True,
        "skip_tokenizer_init": True, "sampling_backend": "pytorch", "grammar_backend": "none",
    }
    return ServerArgs(**{**told, **spec.get("arguments", {})})


# Layers.


def scenario_choice(spec: dict) -> dict:
    """Which method a layer's experts get, or how the layer is refused."""
    start_rank(spec)
    try:
        method = build_experts(spec).quant_method
    except (ValueError, NotImplementedError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    return {"method": type(method).__name__}


def scenario_forward(spec: dict) -> dict:
    """A checkpoint's experts, loaded as SGLang loads them, and forwards of ``spec["tokens"]`` on each rank."""
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.model_executor.model_runner_components.weight_updater import _unsupported_derived_weight_cache_error

    start_rank(spec)
    megamoe_stand_in.install()
    experts, rank = build_experts(spec), spec["rank"]
    weights = mxfp4_moe.grid_experts(SHAPE)
    own = load(experts, weights, rank * experts.num_local_experts)
    kept = [getattr(experts, name).data.view(torch.uint8).clone() for name in PARAMETERS]
    experts.quant_method.process_weights_after_loading(experts)
    (layer,) = megamoe_stand_in.MoEEpMegaLayer.made
    forwards = []
    megamoe_stand_in.capturing = True
    for counts in spec["tokens"]:
        dp_attention.set_dp_buffer_len(sum(counts), counts[rank], False, counts)
        x, ids, routing = mxfp4_moe.grid_tokens(SHAPE, counts[rank], seed=rank)
        ids[1::3, 0] = -1
        layer.launched.clear()
        out = experts(x, StandardTopKOutput(routing, ids.int(), None))
        exact = mxfp4_moe.moe(x, ids, routing, weights, spec["limit"])
        forwards.append({"same": torch.equal(out.double(), exact), "shape": tuple(out.shape), "launched": list(layer.launched)})
    return {
        "bytes": all(torch.equal(a, b) for a, b in zip(kept, own)), "forwards": forwards, "limit": layer.config.gate_up_clamp,
        "fused_factor": experts.should_fuse_routed_scaling_factor_in_topk, "reloaded": refusal(experts),
        "update_refused": _unsupported_derived_weight_cache_error(experts),
        "parameters": [tuple(getattr(experts, name).shape) for name in PARAMETERS],
    }


PARAMETERS = ("w13_weight", "w2_weight", "w13_weight_scale_inv", "w2_weight_scale_inv")


def refusal(experts) -> str:
    try:
        experts.quant_method.process_weights_after_loading(experts)
    except ValueError as error:
        return str(error)
    return ""


def load(experts, weights: mxfp4_moe.Experts, first: int) -> list:
    """Through the loaders of the layer's parameters, a matrix at a time, scales as either dtype a checkpoint may have; this rank's bytes."""
    for expert in range(SHAPE.experts):
        gate, up = weights.w13[expert].chunk(2)
        gate_scale, up_scale = weights.w13_scale[expert].chunk(2)
        kinds = {"w1": (gate, gate_scale), "w3": (up, up_scale), "w2": (weights.w2[expert], weights.w2_scale[expert])}
        for shard, (codes, scale) in kinds.items():
            name = "w2" if shard == "w2" else "w13"
            scale = scale if expert % 2 else scale.view(torch.float8_e8m0fnu)
            for parameter, loaded in ((f"{name}_weight", codes.view(torch.int8)), (f"{name}_weight_scale_inv", scale)):
                param = getattr(experts, parameter)
                param.weight_loader(param, loaded, parameter, shard_id=shard, expert_id=expert)
    local = slice(first, first + experts.num_local_experts)
    return [part[local] for part in (weights.w13, weights.w2, weights.w13_scale, weights.w2_scale)]


def start_rank(spec: dict) -> None:
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.moe.utils import MoeA2ABackend, MoeRunnerBackend
    from sglang.srt.runtime_context import get_flags

    size = spec.get("ranks", 1)
    args = server_args({**spec, "arguments": {"tp_size": size, "ep_size": size, "disable_shared_experts_fusion": True}})
    ranks.publish(args, spec["rank"])
    initialize_moe_config()
    moe = get_flags().moe
    moe.runner_backend = MoeRunnerBackend(spec.get("runner", "flashinfer_megamoe"))
    moe.a2a_backend = MoeA2ABackend(spec.get("a2a", "flashinfer_megamoe"))
    ranks.join_groups(args, spec["init_method"], spec["rank"])


def build_experts(spec: dict) -> torch.nn.Module:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    config = Fp8Config.from_config(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    )
    config.is_fp4_experts = spec.get("fp4", True)
    told = {"num_experts": SHAPE.experts, "top_k": SHAPE.top_k, "layer_id": 0, "hidden_size": SHAPE.hidden, "intermediate_size": SHAPE.intermediate,
            "params_dtype": torch.bfloat16, "quant_config": config, "prefix": "mlp.experts", "swiglu_limit": spec.get("limit")}
    torch.set_default_dtype(torch.bfloat16)
    experts = FusedMoE(**{**told, **spec.get("layer", {})})
    torch.set_default_dtype(torch.float32)
    return experts


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        main(json.load(file))
