"""SGLang's FP8 experts in its Triton runner, on a CPU, each GEMM kernel stood in for by a float64 product.

Run by ``test_ue8m0_moe.py`` as ``ue8m0_worker.py RUNS.json`` with an SGLang tree, stock or patched, on the path. Layers,
quantisation methods, runners, custom ops and the function that quantises and launches are the tree's own. SGLang is imported once
and each run forked; it writes what the GEMMs were given, and the result, to ``spec["out"]``.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

import fp8_moe
import torch
from cpu_serving import forked, ranks

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, TOKENS, FACTOR = 8, 3, 256, 384, 5, 1.5
FLAG = "SGLANG_MOE_TRITON_UE8M0"
GATE_UP_DELTA, DOWN_DELTA = 0.25, 0.125  # what the stand-in for LoRA adds


def main(runs: list) -> None:
    torch.set_num_threads(1)
    import_sglang()
    forked.fork_each(run_with_flag, runs)


def import_sglang() -> None:
    forked.let_custom_ops_run_on_a_cpu(lambda op_name: op_name.endswith("place_fused_experts"))
    import sglang.srt.layers.moe.fused_moe_triton.layer
    import sglang.srt.layers.quantization.fp8
    import sglang.srt.lora.layers
    import sglang.srt.models.deepseek_v2
    import sglang.srt.server_args  # noqa: F401


def run_with_flag(spec: dict) -> None:
    """One run; its output file exists only if it got through."""
    os.environ.pop(FLAG, None)
    if spec["flag"] is not None:
        os.environ[FLAG] = spec["flag"]
    os.environ["SGLANG_CI_DISABLE_MOE_FUSED_FUNC"] = "1" if spec["path"] == "core" else "0"
    start_one_rank(spec)
    with torch.no_grad():
        seen = globals()[f"scenario_{spec['scenario']}"](spec)
    torch.save(seen, spec["out"])


def start_one_rank(spec: dict) -> None:
    """Process groups and flags of a server of one rank."""
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.moe.utils import MoeRunnerBackend
    from sglang.srt.runtime_context import get_flags
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        model_path=spec["checkpoint"], device="cpu", dtype="bfloat16", attention_backend="triton", disable_cuda_graph=True,
        skip_tokenizer_init=True, sampling_backend="pytorch", grammar_backend="none", disable_shared_experts_fusion=True,
    )
    ranks.publish(args)
    initialize_moe_config()
    get_flags().moe.runner_backend = MoeRunnerBackend(spec.get("runner", "triton"))
    ranks.join_groups(args, f"file://{spec['out']}.rendezvous")


def scenario_forward(spec: dict) -> dict:
    """One forward on the spec's path: what both GEMMs were given, what came out, and how it was quantised."""
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.layers.moe.moe_runner.triton_utils import override_config

    gemms, stock_quantised = stand_in_for_the_gpu()
    experts = build_experts(spec)
    weights = fill(experts)
    random = torch.Generator().manual_seed(7)
    x = (torch.randn(TOKENS, HIDDEN, generator=random) * torch.rand(TOKENS, 1, generator=random) * 40).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=random)[:TOP_K] for _ in range(TOKENS)]).int()
    topk_output = StandardTopKOutput(torch.rand(TOKENS, TOP_K, generator=random), ids, None)
    # Block sizes are chosen by the GPU's name, which is not there.
    with override_config({"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1}):
        out = run_path(experts, x.clone(), topk_output, spec)
    return {
        "out": out, "gemms": gemms, "stock_quantised": stock_quantised, "x": x, "ids": ids, "weights": topk_output.topk_weights, **weights,
        "told": getattr(experts.quant_method.get_triton_quant_info(experts), "scale_ue8m0", None),
    }


def run_path(experts, x, topk_output, spec: dict) -> torch.Tensor:
    if spec["path"] == "uncombined":
        from sglang.sglang_overlay.srt.layers.moe.moe_runner.producers import triton_producer

        bundle = triton_producer(experts)(x, topk_output)
        return bundle.gemm2_out.view(TOKENS, TOP_K, HIDDEN)
    if spec["path"] == "lora":
        return run_with_lora(experts, x, topk_output)
    experts.moe_runner_config.inplace = spec["path"] == "inplace"
    return experts(x, topk_output)


def scenario_ahead(spec: dict) -> dict:
    """A second GEMM that loads by TMA: its activations are quantised ahead of the call. What quantised them, and what it was given."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    _, stock_quantised = stand_in_for_the_gpu()
    gemms, random = [], torch.Generator().manual_seed(7)
    fused_moe._is_cuda, fused_moe._moe_support_tma = True, lambda: True
    config = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1}
    fused_moe.try_get_optimal_moe_config = lambda *_, **__: (config, ({**config, "USE_TMA": True}, 16))
    # CUDA kernels, imported only there: the quantiser, the activation (any values do), the GEMM.
    from sglang.kernels.ops.moe import fused_moe_triton_kernels as kernels

    fused_moe.per_token_group_quant = kernels.per_token_group_quant_fp8
    fused_moe.silu_and_mul = lambda x, out, **_: out.copy_(torch.randn(out.shape, generator=random) * 40)
    fused_moe.invoke_fused_moe_kernel = lambda a, weight, bias, out, scale, *_, **named: gemms.append(
        {"codes": a.clone(), "scale": scale, "scale_ue8m0": named.get("scale_ue8m0")})
    experts = build_experts(spec)
    fill(experts)
    x = torch.randn(TOKENS, HIDDEN, generator=random).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=random)[:TOP_K] for _ in range(TOKENS)]).int()
    run_path(experts, x, StandardTopKOutput(torch.rand(TOKENS, TOP_K, generator=random), ids, None), {**spec, "path": "uncombined"})
    return {"gemms": gemms, "stock_quantised": stock_quantised}


def run_with_lora(experts, x, topk_output) -> torch.Tensor:
    """SGLang's LoRA wrapper of the layer; the deltas of an adapter are constants."""
    from sglang.srt.lora import lora_moe_runners
    from sglang.srt.lora.layers import FusedMoEWithLoRA

    lora_moe_runners.build_lora_hooks = lambda *_: SimpleNamespace(
        after_gate_up=lambda hidden, buffer, *_: buffer.add_(GATE_UP_DELTA), after_down=lambda hidden, buffer, *_: buffer.add_(DOWN_DELTA)
    )
    wrapped = FusedMoEWithLoRA(experts, SimpleNamespace(name="triton"))
    return wrapped._forward_with_lora(x, topk_output, SimpleNamespace())


def scenario_compiled(spec: dict) -> dict:
    """The runner's function under a compiler: what the graph holds, and that it computes what was not compiled computes."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import override_config
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    os.environ.pop("TORCHDYNAMO_DISABLE")  # set for all CPU runs
    torch._dynamo.config.disable = False
    gemms, _ = stand_in_for_the_gpu()
    experts = build_experts(spec)
    fill(experts)
    experts.moe_runner_config.inplace = spec["path"] == "inplace"
    method, graphs = experts.quant_method, []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def run(x, weights, ids):
        dispatched = experts.dispatcher.dispatch(hidden_states=x, topk_output=StandardTopKOutput(weights, ids, None))
        return method.runner.run(dispatched, method.get_triton_quant_info(experts)).hidden_states * 2

    random = torch.Generator().manual_seed(7)
    x, weights = torch.randn(TOKENS, HIDDEN, generator=random).bfloat16(), torch.rand(TOKENS, TOP_K, generator=random)
    ids = torch.stack([torch.randperm(EXPERTS, generator=random)[:TOP_K] for _ in range(TOKENS)]).int()
    with override_config({"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 1}):
        eager = run(x.clone(), weights, ids)
        compiled = torch.compile(run, backend=keep)(x.clone(), weights, ids)
    ops = [node for graph in graphs for node in graph.graph.nodes if "place_fused_experts" in str(node.target)]
    return {"same": torch.equal(eager, compiled), "choices": [node.kwargs.get("scale_ue8m0") for node in ops], "gemms": gemms}


def scenario_choice(spec: dict) -> dict:
    """What is told to the runner, or how it was refused."""
    try:
        experts = build_experts(spec)
    except ValueError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    return {"told": experts.quant_method.get_triton_quant_info(experts).scale_ue8m0}


def scenario_fp4(spec: dict) -> dict:
    """FP4 experts that are converted to FP8 when loaded."""
    from sglang.srt.layers import deep_gemm_wrapper  # noqa: F401

    experts = build_experts(spec)
    method, random = experts.quant_method, torch.Generator().manual_seed(3)
    for name in ("w13_weight", "w2_weight"):
        weight = getattr(experts, name)
        weight.data = torch.randint(-128, 128, weight.shape, generator=random, dtype=torch.int8)
        scale = getattr(experts, f"{name}_scale_inv")
        scale.data = torch.full(scale.shape, 2.0**-4).to(scale.dtype)
    method.process_weights_after_loading(experts)
    info = method.get_triton_quant_info(experts)
    return {"told": info.scale_ue8m0, "dtype": info.w13_weight.dtype, "block": info.block_shape, "fp8": info.use_fp8_w8a8}


def scenario_quant_once(spec: dict) -> dict:
    """Whether the experts are eligible for an input that is quantised once, all else being so."""
    from sglang.srt.environ import envs
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
    from sglang.srt.layers.quantization.fp8_utils import cutlass_w8a8_block_fp8_linear_with_fallback
    from sglang.srt.models import deepseek_v2

    deepseek_v2._is_cuda = True
    linear = object.__new__(Fp8LinearMethod)
    linear.w8a8_block_fp8_linear = cutlass_w8a8_block_fp8_linear_with_fallback
    shared = SimpleNamespace(gate_up_proj=SimpleNamespace(quant_method=linear, weight=torch.empty(256, 256)))
    block = SimpleNamespace(
        _enable_a2a_moe=False, _fuse_shared_experts_inside_sbo=False, num_fused_shared_experts=0, shared_experts=shared,
        shared_experts_is_fp8=True, shared_experts_weight_block_size=[128, 128], experts=build_experts(spec),
    )
    with envs.SGLANG_OPT_MOE_QUANT_ONCE.override(True):
        eligible, reason = deepseek_v2.DeepseekV2MoE._compute_moe_quant_once_enabled(block)
    return {"eligible": eligible, "reason": reason}


def scenario_schemas(spec: dict) -> dict:
    """The custom ops' schemas and signatures, as a compiler sees them."""
    import inspect

    from sglang.kernels.ops.moe.fused_moe_triton_kernels import invoke_fused_moe_kernel
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

    for path in ("fused", "inplace"):  # an op is registered at its first call at the latest
        scenario_forward({**spec, "path": path})
    ops = {name: str(getattr(torch.ops.sglang, name).default._schema) for name in ("inplace_fused_experts", "outplace_fused_experts")}
    functions = {"fused_experts": fused_moe.fused_experts, "invoke_fused_moe_kernel": invoke_fused_moe_kernel,
                 "_fused_moe_kernel_sequence": fused_moe._fused_moe_kernel_sequence, "fused_experts_impl": fused_moe.fused_experts_impl}
    return {"ops": ops, "parameters": {name: list(inspect.signature(function).parameters) for name, function in functions.items()}}


def quant_config(name: str):
    from sglang.srt.layers.quantization.blockwise_int8 import BlockInt8Config
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    if name == "unquantised":
        return None
    if name == "int8":
        return BlockInt8Config(is_checkpoint_int8_serialized=True, weight_block_size=[128, 128])
    # As a checkpoint's config.json gives it.
    told = {"quant_method": "mxfp8" if name == "mxfp8" else "fp8", "activation_scheme": "dynamic"}
    if name != "per tensor":
        told["weight_block_size"] = [1, 32] if name == "mxfp8" else [128, 128]
    if name != "undeclared":
        told["scale_fmt"] = "ue8m0"
    config = Fp8Config.from_config(told)
    if name == "fp4":
        config.is_fp4_experts = config.dequant_fp4_to_fp8 = True
    return config


def build_experts(spec: dict) -> torch.nn.Module:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    torch.set_default_dtype(torch.bfloat16)
    experts = FusedMoE(
        num_experts=EXPERTS, top_k=TOP_K, layer_id=0, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, params_dtype=torch.bfloat16,
        quant_config=quant_config(spec["configuration"]), routed_scaling_factor=FACTOR, prefix="mlp.experts",
    )
    torch.set_default_dtype(torch.float32)
    return experts


def fill(experts) -> dict:
    """Random weights and scales; returns them dequantised."""
    random, wide = torch.Generator().manual_seed(1), {}
    for name in ("w13_weight", "w2_weight"):
        weight = getattr(experts, name)
        values = torch.randn(weight.shape, generator=random)
        weight.data = (values * 60).to(weight.dtype) if weight.dtype == torch.float8_e4m3fn else (values * 0.05).to(weight.dtype)
        if hasattr(experts, f"{name}_scale_inv"):
            scale = getattr(experts, f"{name}_scale_inv")
            scale.data = torch.rand(scale.shape, generator=random) * 1e-3 + 5e-4
            wide[name] = fp8_moe.dequantised_weight(weight, scale.data, 128)
    return wide


def stand_in_for_the_gpu() -> tuple:
    """What a machine without a GPU lacks, each for the reason beside it."""
    import cpu_reference_kernels
    from sglang.kernels.ops.moe import fused_moe_triton_kernels as kernels
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

    gemms, stock_quantised = [], []
    # Has no CPU build.
    fused_moe.moe_align_block_size = cpu_reference_kernels.moe_align_block_size
    # The interpreter knows no FP8 products.
    kernels.fused_moe_kernel = Gemm(gemms)

    # The stock quantiser: its cast to FP8 is wrong in the interpreter.
    def per_token_group_quant_fp8(x, group_size, *more, **named):
        stock_quantised.append((tuple(x.shape), group_size, more, named))
        codes, scale = fp8_moe.quantise(x, group_size, fp8_moe.continuous_scale)
        return codes.to(torch.float8_e4m3fn), scale.float()

    kernels.per_token_group_quant_fp8 = per_token_group_quant_fp8
    return gemms, stock_quantised


class Gemm:
    """In place of the Triton GEMM kernel: the same arguments, float64 products, a record of the activations."""

    def __init__(self, gemms: list):
        self.gemms = gemms

    def __getitem__(self, grid):
        return self.launch

    def launch(self, a, a_desc, b, b_desc, bias, c, a_scale, b_scale, topk_weights, slots, block_experts, padded, mask, n, k, *rest, **meta):
        self.gemms.append({"codes": a.clone(), "scale": None if a_scale is None else a_scale.clone(),
                           "meta": {name: value for name, value in meta.items() if isinstance(value, (bool, int))}})
        group = a.shape[-1] // a_scale.shape[-1] if a_scale is not None else 1
        inputs = a.double() if a_scale is None else a.double() * a_scale.double().repeat_interleave(group, -1)
        weight = b.double() if b_scale is None else fp8_moe.dequantised_weight(b, b_scale, 128)
        out, num_slots = c.view(-1, c.shape[-1]), topk_weights.numel()
        for place, expert in enumerate(block_experts.tolist()):
            own = slots[place * meta["BLOCK_SIZE_M"] : (place + 1) * meta["BLOCK_SIZE_M"]].long()
            own = own[own < num_slots]
            rows = inputs[own // meta["top_k"]] @ weight[expert].T
            if meta["MUL_ROUTED_WEIGHT"]:
                rows = rows * topk_weights.flatten()[own][:, None].double()
            out[own] = rows.to(c.dtype)


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        main(json.load(file))
