"""MoE layers of SGLang over the TRT-LLM runners, filled with weights as a kernel reads them, and what they should give.

With ``trtllm_stand_in`` in place of FlashInfer's kernels, on a CPU or on CUDA. SGLang is imported where it is used: a process
may have to prepare first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import trtllm_stand_in

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, FACTOR = 8, 3, 256, 128, 1.5
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

# configuration -> SGLang's runner, whether the kernel routes
CONFIGURATIONS = {
    "nvfp4": ("flashinfer_trtllm", True),
    "nvfp4_routed": ("flashinfer_trtllm_routed", False),
    "fp8": ("flashinfer_trtllm", True),
    "fp8_routed": ("flashinfer_trtllm_routed", False),
    "mxfp4": ("flashinfer_mxfp4", False),
}


def replace_sm100_functions(replace: Callable[[Any, str, Any], None]) -> None:
    """What needs SM100 (or, on a CPU, CUDA) around the MoE kernels, each for the reason beside it.

    The kernels themselves are replaced in FlashInfer, from where SGLang imports them when it calls them.
    """
    from sglang.srt.layers.moe.moe_runner import flashinfer_trtllm
    from sglang.srt.layers.quantization import fp8, modelopt_quant, mxfp4_flashinfer_trtllm_moe

    # Imported by SGLang when the module is, and only where there is CUDA.
    kernel = trtllm_stand_in.trtllm_fp4_block_scale_routed_moe
    replace(mxfp4_flashinfer_trtllm_moe, kernel.__name__, kernel)
    # Quantisers are CUDA kernels, that to 4 bits for SM100. Inputs here are E2M1 values, which 4 and 8 bits hold exactly
    # with a scale of 1.
    replace(flashinfer_trtllm, "fp4_quantize", fp4_quantize)
    replace(flashinfer_trtllm, "per_token_group_quant_fp8", fp8_quantize)
    # Compiles something to ask for the GPU's architecture.
    replace(flashinfer_trtllm, "trtllm_moe_enable_pdl", lambda num_tokens: False)
    # NVFP4 is refused elsewhere than on Blackwell, and MXFP4 goes to other kernels on SM90.
    replace(modelopt_quant, "get_platform", Blackwell)
    replace(fp8, "get_platform", Blackwell)


class Blackwell:
    """SGLang's platform, of another architecture."""

    is_blackwell, is_sm90, is_sm100, is_sm120 = True, False, True, False

    def __getattr__(self, name: str) -> Any:
        from sglang.srt.runtime_context import get_platform

        return getattr(get_platform(), name)


def fp4_quantize(x, *_):
    scales = torch.ones(x.shape[0], x.shape[1] // 16, device=x.device).to(torch.float8_e4m3fn)
    return pack_fp4(x.double()), scales.view(torch.uint8)


def fp8_quantize(x, group, column_major_scales):
    return x.to(torch.float8_e4m3fn), torch.ones(x.shape[1] // group, x.shape[0], device=x.device).T


def build_moe(spec: dict, alt_stream: Any):
    """An MoE block whose experts have the configuration, and its dequantised expert weights in float64."""
    from cpu_serving.checkpoint import Shape, model_config
    from sglang.srt.models.deepseek_v2 import DeepseekV2MoE
    from transformers import DeepseekV3Config

    shape = Shape(hidden=HIDDEN, experts=EXPERTS, topk=TOP_K)
    config = DeepseekV3Config(**{**model_config(shape), "routed_scaling_factor": FACTOR, "moe_intermediate_size": INTERMEDIATE})
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    moe = DeepseekV2MoE(config, layer_id=0, prefix="mlp", alt_stream=alt_stream)
    for parameter in moe.shared_experts.parameters():
        parameter.data.normal_(std=0.05)
    moe.experts = build_experts(spec)
    torch.set_default_dtype(torch.float32)
    moe.experts.dispatcher.skip_local_expert_mapping = True
    return moe, fill_experts(moe.experts, spec["configuration"], spec.get("ep_rank"))


def build_experts(spec: dict) -> torch.nn.Module:
    """SGLang's experts of a configuration, their weights not filled; sets SGLang's runner."""
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
        setattr(experts, f"{name}_weight", constant(weight[local]))
        setattr(experts, scale_name, constant(scale[local]))
    if ep_rank is not None:
        experts.num_local_experts, experts.moe_ep_rank = EXPERTS // 2, ep_rank
    finish_loading(experts, configuration)
    return dequantised


def constant(tensor: torch.Tensor) -> torch.nn.Parameter:
    """A weight on the device under way."""
    return torch.nn.Parameter(tensor.to(torch.get_default_device()), requires_grad=False)


def finish_loading(experts, configuration: str) -> None:
    """What loading leaves on the layer beside its weights."""
    if configuration.startswith("nvfp4"):
        for name in ("g1_scale_c", "g1_alphas", "g2_alphas", "w13_input_scale_quant"):
            setattr(experts, name, constant(torch.ones(experts.num_local_experts)))
        experts.trtllm_padded_hidden_size = None
    elif configuration == "mxfp4":
        experts.quant_method.flashinfer_mxfp4_moe_precision = "bf16"
        experts.quant_method._register_static_scale_ones(experts)
    else:
        experts.quant_method._prepare_flashinfer_trtllm_activation_params(experts)


def quantised(size, configuration: str, random):
    """``(weights, scales, both multiplied in float64)`` of a random tensor."""
    codes = e2m1_values(size, random)
    if configuration.startswith("fp8"):
        scale = 2.0 ** torch.randint(-7, -4, (size[0], size[1] // 128, size[2] // 128), generator=random, device="cpu").float()
        return codes.to(torch.float8_e4m3fn), scale, codes * scale.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
    block, kind = (32, torch.float8_e8m0fnu) if configuration == "mxfp4" else (16, torch.float8_e4m3fn)
    scale = 2.0 ** torch.randint(-7, -4, (*size[:2], size[2] // block), generator=random, device="cpu").float()
    packed_scale = scale.to(kind).view(torch.uint8).view(torch.float8_e4m3fn)
    return pack_fp4(codes), packed_scale, codes * scale.double().repeat_interleave(block, -1)


def e2m1_values(size, random) -> torch.Tensor:
    magnitudes = E2M1.double()[torch.randint(0, 8, size, generator=random, device="cpu")]
    return magnitudes * (torch.randint(0, 2, size, generator=random, device="cpu") * 2 - 1)


def pack_fp4(values: torch.Tensor) -> torch.Tensor:
    """E2M1 values ``[..., N]`` as codes, two to a byte, the first one low."""
    codes = sum((values.abs() >= magnitude) for magnitude in E2M1.tolist()[1:]) + 8 * (values < 0)
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return (low | high << 4).to(torch.uint8)


class Fixed(torch.nn.Module):
    """Stands for a gate or a top-k: gives what it was made with."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, *_, **__):
        return self.value


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
