"""SGLang's MoE block over the TRT-LLM runners, on a CPU, with ``trtllm_stand_in`` in place of FlashInfer's kernels.

Run by ``test_trtllm_call_sites.py`` as ``trtllm_worker.py RUNS.json`` with an SGLang tree, stock or patched, on the path. The
MoE block, its quantisation methods, runners and call sites are the tree's own; weights are put in as a kernel reads them.
SGLang is imported once, and each run of the list (a configuration and a flag) forked; it writes a torch file to ``spec["out"]``.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import torch
import trtllm_stand_in
from cpu_serving import forked
from cpu_serving.checkpoint import Shape, model_config

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, FACTOR = 8, 3, 256, 128, 1.5
TOKENS = (1, 5, 72)
FLAG = "SGLANG_ENABLE_MOE_DEFERRED_FINALIZE"

# configuration -> SGLang's runner, whether the kernel routes
CONFIGURATIONS = {
    "nvfp4": ("flashinfer_trtllm", True),
    "nvfp4_routed": ("flashinfer_trtllm_routed", False),
    "fp8": ("flashinfer_trtllm", True),
    "fp8_routed": ("flashinfer_trtllm_routed", False),
    "mxfp4": ("flashinfer_mxfp4", False),
}


def main(runs: list) -> None:
    torch.set_num_threads(1)
    import_sglang()
    for spec in runs:
        os.waitpid(forked.start(run_with_flag, spec), 0)


def import_sglang() -> None:
    let_custom_ops_run_on_a_cpu()
    import sglang.srt.layers.moe.fused_moe_triton.layer
    import sglang.srt.layers.quantization.fp8
    import sglang.srt.layers.quantization.modelopt_quant
    import sglang.srt.models.deepseek_v2
    import sglang.srt.server_args  # noqa: F401


def let_custom_ops_run_on_a_cpu() -> None:
    """SGLang registers its custom ops for CUDA alone; these do nothing that is CUDA's."""
    from sglang.srt.utils import common

    register = common.direct_register_custom_op

    def register_for_both(op_name, op_func, **kwargs):
        register(op_name=op_name, op_func=op_func, **kwargs)
        if op_name.startswith("trtllm_"):
            common.sglang_lib.impl(op_name, op_func, "CPU")

    common.direct_register_custom_op = register_for_both


def run_with_flag(spec: dict) -> None:
    """One run; its output file exists only if it got through."""
    os.environ.pop(FLAG, None)
    if spec["flag"] is not None:
        os.environ[FLAG] = spec["flag"]
    torch.save(run_configuration(spec), spec["out"])


def run_configuration(spec: dict) -> dict:
    trtllm_stand_in.install(spec.get("flashinfer", "0.6.18"))
    start_one_rank(spec)
    stand_in_for_cuda()
    moe, dequantised = build_moe(spec)
    prepare(moe, spec)
    with torch.no_grad():
        return {name: globals()[f"scenario_{name}"](moe, dequantised, spec) for name in spec["scenarios"]}


def start_one_rank(spec: dict) -> None:
    """Process groups and flags of a server of one rank."""
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        model_path=spec["checkpoint"], device="cpu", dtype="bfloat16", attention_backend="triton",
        disable_cuda_graph=True, skip_tokenizer_init=True, sampling_backend="pytorch", grammar_backend="none",
        disable_shared_experts_fusion=True,
    )
    publish(args, role="weight_cache_daemon")
    initialize_moe_config()
    init_distributed_environment(
        world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{spec['out']}.rendezvous", backend="gloo"
    )
    initialize_model_parallel(backend="gloo")
    initialize_dp_attention(args, ModelConfig(model_path=spec["checkpoint"], dtype="bfloat16"))


def stand_in_for_cuda() -> None:
    """What a machine without CUDA lacks, each for the reason beside it."""
    from sglang.srt.layers.moe.moe_runner import flashinfer_trtllm
    from sglang.srt.layers.quantization import modelopt_quant, mxfp4_flashinfer_trtllm_moe
    from sglang.srt.models import deepseek_v2
    import sglang.kernels.ops.moe.moe_finalize_fuse_shared as stock_finalize

    # Imported by SGLang only where there is CUDA.
    mxfp4_flashinfer_trtllm_moe.trtllm_fp4_block_scale_routed_moe = trtllm_stand_in.trtllm_fp4_block_scale_routed_moe
    # Quantisers are CUDA kernels. Inputs here are E2M1 values, which 4 and 8 bits hold exactly with a scale of 1.
    flashinfer_trtllm.fp4_quantize = fp4_quantize
    flashinfer_trtllm.per_token_group_quant_fp8 = fp8_quantize
    # Asks for the GPU's architecture.
    flashinfer_trtllm.trtllm_moe_enable_pdl = lambda num_tokens: False
    # NVFP4 is refused elsewhere than on Blackwell.
    modelopt_quant.get_platform = lambda: SimpleNamespace(is_blackwell=True, is_sm100=True)
    # On a CPU, and there alone, the model code itself multiplies the routed scaling factor.
    deepseek_v2._is_musa = True
    # The stock finalize is a CUDA kernel.
    stock_finalize.moe_finalize_fuse_shared = finalize_fuse_shared
    # Streams are CUDA's.
    stream = SimpleNamespace(wait_stream=lambda other: None)
    torch.cuda.current_stream = lambda: stream
    torch.cuda.stream = lambda other: nullcontext()


def fp4_quantize(x, *_):
    scales = torch.ones(x.shape[0], x.shape[1] // 16).to(torch.float8_e4m3fn)
    return pack_fp4(x.double()), scales.view(torch.uint8)


def fp8_quantize(x, group, column_major_scales):
    return x.to(torch.float8_e4m3fn), torch.ones(x.shape[1] // group, x.shape[0]).T


def finalize_fuse_shared(gemm2_out, index, weights, shared, top_k, enable_pdl):
    rows = torch.where(index[:, None] < 0, 0.0, gemm2_out[index.clamp_min(0).long()].float())
    routed = (rows.view(-1, top_k, rows.shape[1]) * weights.float()[..., None]).sum(1)
    return (routed + shared.float()).bfloat16()


def build_moe(spec: dict):
    """An MoE block whose experts have the configuration, and its dequantised expert weights in float64."""
    from sglang.srt.models.deepseek_v2 import DeepseekV2MoE
    from transformers import DeepseekV3Config

    shape = Shape(hidden=HIDDEN, experts=EXPERTS, topk=TOP_K)
    config = DeepseekV3Config(**{**model_config(shape), "routed_scaling_factor": FACTOR, "moe_intermediate_size": INTERMEDIATE})
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    moe = DeepseekV2MoE(config, layer_id=0, prefix="mlp", alt_stream=SimpleNamespace(wait_stream=lambda other: None))
    for parameter in moe.shared_experts.parameters():
        parameter.data.normal_(std=0.05)
    moe.experts = build_experts(spec, config)
    torch.set_default_dtype(torch.float32)
    moe.experts.dispatcher.skip_local_expert_mapping = True
    return moe, fill_experts(moe.experts, spec["configuration"], spec.get("ep_rank"))


def build_experts(spec: dict, config) -> torch.nn.Module:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.moe.utils import MoeRunnerBackend, RoutingMethodType
    from sglang.srt.runtime_context import get_flags

    get_flags().moe.runner_backend = MoeRunnerBackend(CONFIGURATIONS[spec["configuration"]][0])
    return FusedMoE(
        num_experts=EXPERTS, top_k=TOP_K, layer_id=0, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE,
        params_dtype=torch.bfloat16, quant_config=quant_config(spec), routed_scaling_factor=FACTOR,
        routing_method_type=RoutingMethodType(spec.get("routing_method", 2)), activation=spec.get("activation", "silu"),
        prefix="mlp.experts",
    )


def quant_config(spec: dict):
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config

    if spec["configuration"].startswith("nvfp4"):
        return ModelOptFp4Config(is_checkpoint_nvfp4_serialized=True, group_size=16, exclude_modules=[], packed_modules_mapping={})
    block = None if spec.get("per_tensor") else [128, 128]
    return Fp8Config(
        is_checkpoint_fp8_serialized=True, weight_block_size=block, is_fp4_experts=spec["configuration"] == "mxfp4"
    )


def fill_experts(experts, configuration: str, ep_rank):
    """Put weights in as the kernels read them, without the layouts the stand-in does not model; return them dequantised."""
    random = torch.Generator().manual_seed(1)
    sizes = {"w13": (EXPERTS, 2 * INTERMEDIATE, HIDDEN), "w2": (EXPERTS, HIDDEN, INTERMEDIATE)}
    local = slice(None) if ep_rank is None else slice(ep_rank * EXPERTS // 2, (ep_rank + 1) * EXPERTS // 2)
    dequantised = {}
    for name, size in sizes.items():
        weight, scale, dequantised[name] = quantised(size, configuration, random)
        scale_name = f"{name}_weight_scale" if configuration.startswith("nvfp4") else f"{name}_weight_scale_inv"
        setattr(experts, f"{name}_weight", torch.nn.Parameter(weight[local], requires_grad=False))
        setattr(experts, scale_name, torch.nn.Parameter(scale[local], requires_grad=False))
    if ep_rank is not None:
        experts.num_local_experts, experts.moe_ep_rank = EXPERTS // 2, ep_rank
    finish_loading(experts, configuration)
    return dequantised


def finish_loading(experts, configuration: str) -> None:
    """What loading leaves on the layer beside its weights."""
    if configuration.startswith("nvfp4"):
        for name in ("g1_scale_c", "g1_alphas", "g2_alphas", "w13_input_scale_quant"):
            setattr(experts, name, torch.nn.Parameter(torch.ones(experts.num_local_experts), requires_grad=False))
    elif configuration == "mxfp4":
        experts.quant_method.flashinfer_mxfp4_moe_precision = "bf16"
        experts.quant_method._register_static_scale_ones(experts)
    else:
        experts.quant_method._prepare_flashinfer_trtllm_activation_params(experts)


def quantised(size, configuration: str, random):
    """``(weights, scales, both multiplied in float64)`` of a random tensor."""
    codes = e2m1_values(size, random)
    if configuration.startswith("fp8"):
        scale = 2.0 ** torch.randint(-7, -4, (size[0], size[1] // 128, size[2] // 128), generator=random).float()
        return codes.to(torch.float8_e4m3fn), scale, codes * scale.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
    block, kind = (32, torch.float8_e8m0fnu) if configuration == "mxfp4" else (16, torch.float8_e4m3fn)
    scale = 2.0 ** torch.randint(-7, -4, (*size[:2], size[2] // block), generator=random).float()
    packed_scale = scale.to(kind).view(torch.uint8).view(torch.float8_e4m3fn)
    return pack_fp4(codes), packed_scale, codes * scale.double().repeat_interleave(block, -1)


def e2m1_values(size, random) -> torch.Tensor:
    magnitudes = trtllm_stand_in.E2M1.double()[torch.randint(0, 8, size, generator=random)]
    return magnitudes * (torch.randint(0, 2, size, generator=random) * 2 - 1)


def pack_fp4(values: torch.Tensor) -> torch.Tensor:
    """E2M1 values ``[..., N]`` as codes, two to a byte, the first one low."""
    codes = torch.bucketize(values.abs().float(), trtllm_stand_in.E2M1) + 8 * (values < 0)
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return (low | high << 4).to(torch.uint8)


def prepare(moe, spec: dict) -> None:
    moe.topk_config = moe.topk.topk_config
    moe.topk_config.correction_bias = torch.linspace(-0.1, 0.1, EXPERTS)
    if spec.get("factor_left_to_finalize"):
        moe.experts.should_fuse_routed_scaling_factor_in_topk = False
    if spec["flag"] == "1":
        as_if_on_cuda()


def as_if_on_cuda() -> None:
    """The table's rows are for CUDA, and the weights lie on a CPU here."""
    from sglang.sglang_overlay.srt.layers.moe import deferral

    find = deferral.find_row
    deferral.find_row = lambda experts, device: find(experts, "cuda")


class Fixed(torch.nn.Module):
    """Stands for a gate or a top-k: gives what it was made with."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, *_, **__):
        return self.value


def set_routing(moe, tokens: int, spec: dict, weights=None, ids=None):
    """Fix the routing of ``tokens`` tokens; return ids and weights, without the factor and as the kernel gets to see them."""
    from sglang.srt.layers.moe.topk import BypassedTopKOutput, StandardTopKOutput

    random = torch.Generator().manual_seed(tokens)
    logits = torch.randn(tokens, EXPERTS, generator=random)
    moe.gate = Fixed(logits)
    if CONFIGURATIONS[spec["configuration"]][1]:
        config = moe.topk_config
        moe.topk = Fixed(BypassedTopKOutput(torch.empty(tokens, HIDDEN), logits, config))
        return routing_in_float64(logits, config)
    ids = torch.rand(tokens, EXPERTS, generator=random).topk(TOP_K).indices.int() if ids is None else ids
    # The factor makes n/6 of them: 1/6, 1/3, 1/2 ...
    weights = (torch.arange(tokens * ids.shape[1]).view(ids.shape) % 7 + 1) / 9 if weights is None else weights
    in_top_k = FACTOR if moe.experts.should_fuse_routed_scaling_factor_in_topk else 1.0
    moe.topk = Fixed(StandardTopKOutput(weights * in_top_k, ids, logits))
    return ids, (weights * in_top_k).double() / in_top_k


def routing_in_float64(logits, config):
    """DeepSeek-V3's routing, token by token: ids, and weights whose product with the factor is a bf16 number."""
    scores = logits.double().sigmoid()
    biased = scores + config.correction_bias.double()
    ids = torch.empty(len(logits), config.top_k, dtype=torch.int32)
    size = logits.shape[1] // config.num_expert_group
    for token, row in enumerate(biased):
        best = sorted(range(config.num_expert_group), key=lambda g: -row[g * size : (g + 1) * size].topk(2).values.sum())
        allowed = [e for e in range(len(row)) if e // size in best[: config.topk_group]]
        ids[token] = torch.tensor(sorted(allowed, key=lambda e: -row[e])[: config.top_k])
    weights = scores.gather(-1, ids.long())
    return ids, (weights / weights.sum(-1, keepdim=True) * FACTOR).bfloat16().double() / FACTOR


def rows_in_float64(x, ids, dequantised, ep_rank):
    """Each token's experts one by one: ``[T, K, H]``, rounded to bf16 as the second GEMM does; 0 where the expert is elsewhere."""
    rows = torch.zeros(*ids.shape, HIDDEN, dtype=torch.float64)
    for token, k in torch.cartesian_prod(torch.arange(ids.shape[0]), torch.arange(ids.shape[1])).tolist():
        expert = int(ids[token, k])
        if expert < 0 or (ep_rank is not None and expert // (EXPERTS // 2) != ep_rank):
            continue
        up, gate = (dequantised["w13"][expert] @ x[token].double()).chunk(2)
        rows[token, k] = (dequantised["w2"][expert] @ (gate / (1 + torch.exp(-gate)) * up)).bfloat16().double()
    return rows


def inputs(tokens: int) -> torch.Tensor:
    return e2m1_values((tokens, HIDDEN), torch.Generator().manual_seed(100 + tokens)).bfloat16()


def scenario_forwards(moe, dequantised, spec) -> dict:
    """Plain and dual-stream forwards, and what they should give."""
    seen = {}
    for tokens in TOKENS:
        ids, weights = set_routing(moe, tokens, spec)
        x = inputs(tokens)
        seen[tokens] = {
            "rows": rows_in_float64(x, ids, dequantised, spec.get("ep_rank")),
            "weights": weights,
            "shared": moe._forward_shared_experts(x).clone(),
            "plain": counted(lambda: moe.forward_normal(x.clone())),
            "dual": counted(lambda: moe.forward_normal_dual_stream(x.clone())),
        }
    return seen


def counted(forward) -> dict:
    """The result of a forward, and what it called of the kernels."""
    trtllm_stand_in.CALLS.clear()
    return {"out": forward(), "calls": list(trtllm_stand_in.CALLS)}


def scenario_bundle(moe, dequantised, spec) -> dict:
    """The bundle of five tokens, with what it should combine to before shared expert and rounding."""
    from sglang.sglang_overlay.srt.layers.moe.deferral import deferral_of, run_experts

    ids, weights = set_routing(moe, 5, spec)
    bundle = run_experts(moe, inputs(5), moe.topk.value)
    rows = rows_in_float64(inputs(5), ids, dequantised, spec.get("ep_rank"))
    return {"bundle": vars(bundle), "scale": deferral_of(moe).row.scale, "rows": rows, "weights": weights}


def scenario_one_expert(moe, dequantised, spec) -> dict:
    """Case C5: one expert, weight 1."""
    from dataclasses import replace

    from sglang.sglang_overlay.srt.layers.moe.deferral import run_experts
    from sglang.sglang_overlay.srt.layers.moe.deferred_output import finalize

    config, experts = moe.topk_config, moe.experts
    moe.topk_config, experts.moe_runner_config.top_k = replace(config, top_k=1), 1
    ids, _ = set_routing(moe, 1, spec, torch.ones(1, 1), torch.tensor([[6]], dtype=torch.int32))
    out = finalize(run_experts(moe, inputs(1), moe.topk.value))
    moe.topk_config, experts.moe_runner_config.top_k = config, TOP_K
    return {"out": out, "row": rows_in_float64(inputs(1), ids, dequantised, None)[:, 0]}


def scenario_carried(moe, dequantised, spec) -> dict:
    """A dual-stream forward whose bundle the next layer takes."""
    from sglang.sglang_overlay.srt.layers.moe.deferral import deferral_of
    from sglang.sglang_overlay.srt.layers.moe.deferred_output import finalize, is_deferred
    from sglang.sglang_overlay.srt.models.deepseek_v2 import stock_defers

    set_routing(moe, 5, spec)
    deferral = deferral_of(moe)
    deferral.carries_now = True
    carried = moe.forward_normal_dual_stream(inputs(5))
    finalized = finalize(carried)
    in_layer = moe.forward_normal_dual_stream(inputs(5))
    gives_way = not stock_defers(moe, inputs(5))
    over_budget = stock_defers(moe, torch.empty(193, HIDDEN)) == moe.experts.supports_deferred_finalize
    return {
        "is_bundle": is_deferred(carried), "finalized": finalized, "in_layer": in_layer,
        "stock_gives_way": gives_way, "stock_over_budget": over_budget,
    }


def scenario_mutations(moe, dequantised, spec) -> dict:
    """Plain forwards of five tokens with a fault put into the overlay."""
    from sglang.sglang_overlay.srt.layers.moe.moe_runner import flashinfer_trtllm

    sound, seen = flashinfer_trtllm.bundle_of, {}
    for name, mutate in MUTATIONS.items():
        set_routing(moe, 5, spec)
        flashinfer_trtllm.bundle_of = partial(faulty_bundle, sound, mutate)
        seen[name] = moe.forward_normal(inputs(5))
    flashinfer_trtllm.bundle_of = sound
    return seen


def faulty_bundle(sound, mutate, unfinalized, weights, shape, scale):
    weights, scale = mutate(weights, scale)
    return sound(unfinalized, weights, shape, scale)


def read_as_bf16(weights):
    """What the stock adapter does with fp32 weights."""
    if weights.dtype != torch.float32:
        return weights
    return weights.contiguous().view(torch.bfloat16).view(-1, weights.shape[1])[: weights.shape[0]]


MUTATIONS = {
    "none": lambda weights, scale: (weights, scale),
    "reinterpreted": lambda weights, scale: (read_as_bf16(weights), scale),
    "scaled_twice": lambda weights, scale: (weights, scale * FACTOR),
    "scaled_never": lambda weights, scale: (weights, scale / FACTOR),
}


def scenario_reason(moe, dequantised, spec) -> str:
    """Why the layer does not defer."""
    from sglang.sglang_overlay.srt.layers.moe.moe_runner.producers import find_row

    for name, value in spec.get("set", {}).items():
        owner, _, attribute = name.rpartition(".")
        setattr(moe.experts.quant_method if owner else moe.experts, attribute, value)
    return find_row(moe.experts, "cuda")[1]


def scenario_unfit_routing(moe, dequantised, spec) -> dict:
    """A forward whose routing has the format that the configuration does not take."""
    from sglang.sglang_overlay.srt.layers.moe.deferral import deferral_of
    from sglang.srt.layers.moe.topk import BypassedTopKOutput, StandardTopKOutput

    outputs = (BypassedTopKOutput(None, None, None), StandardTopKOutput(None, None, None))
    return {output.format.name.lower(): deferral_of(moe).row.unfit_routing(output) for output in outputs}


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        main(json.load(file))
