"""A stand-in for FlashInfer's TRT-LLM MoE kernels, which exist for SM100 only: their contract, in torch.

Follows the docstrings of FlashInfer 0.6.18 (``fused_moe/core.py``). With ``do_finalize=False`` a function returns
``[gemm2_out, expert_weights, expanded_idx_to_permuted_idx]``:

* ``gemm2_out`` ``[P, H]`` bf16: expert by expert, each expert's rows padded to a multiple of ``TILE``, ``P`` the most that any
  routing of as many tokens can need. Padding rows are NaN here, so that whoever reads one shows it.
* ``expert_weights`` ``[T, K]``: bf16 where the function routes or unpacks; the caller's own tensor where ids and weights came apart.
* ``expanded_idx_to_permuted_idx`` ``[T * K]`` int32: the row of each (token, k); -1 where the expert is not local, or masked.

Installed as a FlashInfer before 0.6.15, it hands bf16 weights over in a buffer labelled fp32 where the logits are fp32, as that one
did (flashinfer#3595).

Runs on a CPU and on CUDA. Nothing here waits for a GPU or copies to it, so that a call can be captured in a CUDA graph; what a
call asks for is checked by value only outside a capture.

Only routing from logits applies ``routed_scaling_factor``. What is left out: shuffled weight layouts, quantisation between
the two GEMMs, activations other than plain SwiGLU (up rows before gate rows), per-tensor scales other than 1, biases; asking for one
of those is an error. Experts compute in float64, so that a row depends on its token and expert alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import IntEnum
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from packaging.version import Version

TILE = 8
# Rows of weights and index beyond the tokens', which hold NaN, and a row that is not there.
MORE_ROWS = 0
ROUTES_LIKE_DEEPSEEK_V3 = 2
CALLS: list = []


class Fp8QuantizationType(IntEnum):
    NoneFp8 = 0
    DeepSeekFp8 = 1
    MxFp8 = 2


class ActivationType(IntEnum):
    Gelu = 0
    Silu = 2
    Swiglu = 3
    Geglu = 4
    Relu2 = 6
    Situ = 10


class Routed(NamedTuple):
    """Global expert ids ``[T, K]`` (negative: masked) and the weights ``[T, K]`` in the dtype that is returned."""

    ids: torch.Tensor
    weights: torch.Tensor


class Experts(NamedTuple):
    """Dequantised local experts in float64: ``[E, 2I, H]``, up rows before gate rows, and ``[E, H, I]``."""

    gemm1: torch.Tensor
    gemm2: torch.Tensor


def route(logits, bias, top_k, n_group, topk_group, factor) -> Routed:
    """DeepSeek-V3's routing (arXiv 2412.19437, section 2.1.2): sigmoid scores, groups chosen by their two best biased scores,
    experts by biased score within them, weights the plain scores normalised, times the factor, in bf16."""
    scores = logits.float().sigmoid()
    biased = scores if bias is None else scores + bias.float()
    if n_group and n_group > 1:
        by_group = biased.unflatten(-1, (n_group, -1))
        best_groups = by_group.topk(2).values.sum(-1).topk(topk_group).indices
        allowed = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(-1, best_groups, True)
        biased = by_group.masked_fill(~allowed[..., None], float("-inf")).flatten(-2)
    ids = biased.topk(top_k).indices
    weights = scores.gather(-1, ids)
    weights = weights / weights.sum(-1, keepdim=True) * (1.0 if factor is None else factor)
    return Routed(ids, weights.bfloat16())


def given(topk_ids) -> Routed:
    """Routing made elsewhere: a pair of ids and weights, or both packed as ``id << 16 | bits of the bf16 weight``."""
    if isinstance(topk_ids, tuple):
        ids, weights = topk_ids
        assert ids.dtype == torch.int32 and weights.dtype in (torch.bfloat16, torch.float32)
        return Routed(ids.long(), weights)
    assert topk_ids.dtype == torch.int32
    low = topk_ids & 0xFFFF
    bits = torch.where(low >= 0x8000, low - 0x10000, low).to(torch.int16)
    return Routed((topk_ids >> 16).long(), bits.view(torch.bfloat16))


def rows_of_every_expert(x: torch.Tensor, experts: Experts) -> torch.Tensor:
    """What each expert gives for each token of ``x`` ``[T, H]`` float64: ``[E, T, H]`` bf16."""
    up, gate = (x @ experts.gemm1.transpose(1, 2)).chunk(2, dim=-1)
    return ((F.silu(gate) * up) @ experts.gemm2.transpose(1, 2)).bfloat16()


def places(local: torch.Tensor, num_experts: int) -> torch.Tensor:
    """The row of each (token, k) ``[T * K]`` int32, expert by expert with padding; -1 where ``local`` names no expert."""
    of_expert = local[:, None] == torch.arange(num_experts, device=local.device)
    padded = (of_expert.sum(0) + TILE - 1) // TILE * TILE
    first = padded.cumsum(0) - padded
    place = torch.where(of_expert, first + of_expert.cumsum(0) - 1, 0).sum(1)
    return torch.where(of_expert.any(1), place, -1).int()


def run(x: torch.Tensor, experts: Experts, routed: Routed, offset: int, do_finalize: bool, output) -> list:
    """One call of a kernel whose experts ``offset`` and up are local. See the module's docstring."""
    (tokens, top_k), num_experts = routed.ids.shape, experts.gemm1.shape[0]
    local = torch.where(routed.ids >= 0, routed.ids - offset, -1).flatten()
    index = places(local, num_experts)
    token = torch.arange(tokens * top_k, device=x.device) // top_k
    rows = rows_of_every_expert(x, experts)[local.clamp(0, num_experts - 1), token]
    most = (tokens * top_k + num_experts * (TILE - 1)) // TILE * TILE + TILE
    gemm2_out = rows.new_full((most, x.shape[1]), float("nan"))
    # Pairs without a local expert go to the last row, which is padding.
    gemm2_out[torch.where(index < 0, most - 1, index).long()] = rows
    gemm2_out[-1].fill_(float("nan"))
    if not do_finalize:
        return [gemm2_out, *with_more_rows(routed.weights, index)]
    picked = torch.where(index[:, None] < 0, 0.0, gemm2_out[index.clamp_min(0).long()].float())
    finished = (picked.view(-1, top_k, x.shape[1]) * routed.weights.float()[..., None]).sum(1).bfloat16()
    return [finished if output is None else output.copy_(finished)]


def with_more_rows(weights: torch.Tensor, index: torch.Tensor) -> tuple:
    if not MORE_ROWS:
        return weights, index
    more = weights.new_full((MORE_ROWS, weights.shape[1]), float("nan"))
    return torch.cat([weights, more]), torch.cat([index, index.new_full((more.numel(),), 2**30)])


def from_fp4(packed: torch.Tensor, scale: Optional[torch.Tensor]) -> torch.Tensor:
    """E2M1 codes, the low half of a byte first, times a scale per 16 (e4m3) or per 32 (e8m0) of them; in float64.

    Values that are not packed come back as they are.
    """
    if packed.dtype not in (torch.uint8, torch.int8):
        assert scale is None
        return packed.double()
    codes = torch.stack([packed.view(torch.uint8) & 15, packed.view(torch.uint8) >> 4], -1).flatten(-2)
    values = from_e2m1(codes)
    block = values.shape[-1] // scale.shape[-1]
    decode = {16: from_e4m3, 32: from_e8m0}[block]
    return values * decode(scale.view(torch.uint8)).repeat_interleave(block, -1)


def from_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """0, 0.5, 1, 1.5, 2, 3, 4, 6 and, from code 8 on, the same negative; in float64."""
    exponent, mantissa = (codes >> 1 & 3).int(), (codes & 1).int()
    halves = torch.where(exponent == 0, mantissa, (2 + mantissa) << (exponent - 1).clamp_min(0))
    return torch.where(codes >= 8, -0.5, 0.5).double() * halves


def from_e4m3(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.float8_e4m3fn).float().double()


def from_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """Powers of two by their exponent's bits, which are those of an fp32's."""
    return (codes.int() << 23).view(torch.float32).double()


def from_fp8(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """E4M3 values ``[..., M, K]`` times one fp32 scale per 128 x 128, or per 1 x 128 where ``scale`` has M rows; in float64."""
    assert values.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    rows = values.shape[-2] // scale.shape[-2]
    return values.float().double() * scale.double().repeat_interleave(rows, -2).repeat_interleave(128, -1)


def trtllm_fp4_block_scale_moe(
    routing_logits, routing_bias, hidden_states, hidden_states_scale,
    gemm1_weights, gemm1_weights_scale, gemm1_bias, gemm1_alpha, gemm1_beta, gemm1_clamp_limit,
    gemm2_weights, gemm2_weights_scale, gemm2_bias,
    output1_scale_scalar, output1_scale_gate_scalar, output2_scale_scalar,
    num_experts, top_k, n_group, topk_group, intermediate_size, local_expert_offset, local_num_experts,
    routed_scaling_factor, routing_method_type=0, do_finalize=True, enable_pdl=None, activation_type=3,
    per_token_scale=None, output=None, tune_max_num_tokens=8192, norm_topk_prob=True, routing_replay_out=None,
    num_fused_shared_experts=None,
):
    assert routing_method_type == ROUTES_LIKE_DEEPSEEK_V3
    routed = route(routing_logits, routing_bias, top_k, n_group, topk_group, routed_scaling_factor)
    return fp4("trtllm_fp4_block_scale_moe", routed, locals())


def trtllm_fp4_block_scale_routed_moe(
    topk_ids, routing_bias, hidden_states, hidden_states_scale,
    gemm1_weights, gemm1_weights_scale, gemm1_bias, gemm1_alpha, gemm1_beta, gemm1_clamp_limit,
    gemm2_weights, gemm2_weights_scale, gemm2_bias,
    output1_scale_scalar, output1_scale_gate_scalar, output2_scale_scalar,
    num_experts, top_k, n_group, topk_group, intermediate_size, local_expert_offset, local_num_experts,
    routed_scaling_factor, routing_method_type=0, do_finalize=True, enable_pdl=None, activation_type=3,
    per_token_scale=None, output=None, tune_max_num_tokens=8192, gemm1_lora_delta=None,
):
    return fp4("trtllm_fp4_block_scale_routed_moe", given(topk_ids), locals())


def trtllm_fp8_block_scale_moe(
    routing_logits, routing_bias, hidden_states, hidden_states_scale,
    gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale,
    num_experts, top_k, n_group, topk_group, intermediate_size, local_expert_offset, local_num_experts,
    routed_scaling_factor, routing_method_type=0, use_shuffled_weight=False, weight_layout=0, do_finalize=True,
    enable_pdl=None, tune_max_num_tokens=8192, fp8_quantization_type=Fp8QuantizationType.DeepSeekFp8,
    num_fused_shared_experts=None, activation_type=3, norm_topk_prob=True, routing_replay_out=None,
    gemm1_alpha=None, gemm1_beta=None, gemm1_clamp_limit=None, output=None,
):
    assert routing_method_type == ROUTES_LIKE_DEEPSEEK_V3
    routed = route(routing_logits, routing_bias, top_k, n_group, topk_group, routed_scaling_factor)
    return fp8("trtllm_fp8_block_scale_moe", routed, locals())


def trtllm_fp8_block_scale_routed_moe(
    topk_ids, routing_bias, hidden_states, hidden_states_scale,
    gemm1_weights, gemm1_weights_scale, gemm2_weights, gemm2_weights_scale,
    num_experts, top_k, n_group, topk_group, intermediate_size, local_expert_offset, local_num_experts,
    routed_scaling_factor, routing_method_type=0, use_shuffled_weight=False, weight_layout=0, do_finalize=True,
    enable_pdl=None, gemm1_lora_delta=None, output=None, tune_max_num_tokens=8192,
    fp8_quantization_type=Fp8QuantizationType.DeepSeekFp8, activation_type=3,
    gemm1_alpha=None, gemm1_beta=None, gemm1_clamp_limit=None,
):
    return fp8("trtllm_fp8_block_scale_routed_moe", given(topk_ids), locals())


FUNCTIONS = (
    trtllm_fp4_block_scale_moe,
    trtllm_fp4_block_scale_routed_moe,
    trtllm_fp8_block_scale_moe,
    trtllm_fp8_block_scale_routed_moe,
)


def fp4(name: str, routed: Routed, call: dict) -> list:
    """A 4-bit call; a list in either case, as the real functions return."""
    for scale in ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar"):
        assert is_capturing() or bool((call[scale] == 1).all()), f"{scale} other than 1 is not modelled"
    x = from_fp4(call["hidden_states"], call["hidden_states_scale"])
    experts = Experts(*(from_fp4(call[f"{gemm}_weights"], call[f"{gemm}_weights_scale"]) for gemm in ("gemm1", "gemm2")))
    return checked(name, x, experts, routed, call)


def fp8(name: str, routed: Routed, call: dict):
    """An 8-bit call; the finished tensor itself where it finalizes, as the real functions return."""
    assert call["fp8_quantization_type"] == Fp8QuantizationType.DeepSeekFp8 and not call["use_shuffled_weight"]
    x = from_fp8(call["hidden_states"], call["hidden_states_scale"].T)
    experts = Experts(*(from_fp8(call[f"{gemm}_weights"], call[f"{gemm}_weights_scale"]) for gemm in ("gemm1", "gemm2")))
    returned = checked(name, x, experts, routed, call)
    return returned[0] if call["do_finalize"] else returned


def is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


NOT_MODELLED = (
    "gemm1_bias", "gemm2_bias", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "gemm1_lora_delta",
    "per_token_scale", "routing_replay_out", "num_fused_shared_experts",
)


def checked(name: str, x: torch.Tensor, experts: Experts, routed: Routed, call: dict) -> list:
    """Run a call after looking at what it asks for, and write it down in ``CALLS``."""
    asked = [argument for argument in NOT_MODELLED if call.get(argument) is not None]
    assert not asked and call["activation_type"] == ActivationType.Swiglu, asked
    assert call["top_k"] == routed.ids.shape[1] and call["local_num_experts"] == experts.gemm1.shape[0]
    assert experts.gemm2.shape[1:] == (x.shape[1], call["intermediate_size"])
    CALLS.append({"name": name, "do_finalize": call["do_finalize"], "output": call["output"] is not None})
    returned = run(x, experts, routed, call["local_expert_offset"], call["do_finalize"], call["output"])
    if mislabels() and not call["do_finalize"] and "routing_logits" in call and call["routing_logits"].dtype == torch.float32:
        returned[1] = under_fp32_label(returned[1])
    return returned


def under_fp32_label(weights: torch.Tensor) -> torch.Tensor:
    """bf16 weights ``[T, K]`` at the front of a ``[T, K]`` fp32 buffer, the rest of it NaN."""
    buffer = torch.full(weights.shape, float("nan"), device=weights.device)
    buffer.view(torch.bfloat16).flatten()[: weights.numel()] = weights.flatten()
    return buffer


def mislabels() -> bool:
    return Version(sys.modules["flashinfer"].__version__) < Version("0.6.15")


NAMES = {
    **{function.__name__: function for function in FUNCTIONS},
    "ActivationType": ActivationType,
    "Fp8QuantizationType": Fp8QuantizationType,
}


def install(version: str = "0.6.18") -> None:
    """Put the stand-in where ``import flashinfer`` finds it."""
    add_module("flashinfer", __version__=version, __path__=[])
    add_module("flashinfer.fused_moe", __path__=[], **NAMES)
    add_module("flashinfer.fused_moe.core", **NAMES)


def install_over_flashinfer(replace: Callable[[Any, str, Any], None]) -> None:
    """Put the stand-in's functions in the place of an installed FlashInfer's, the rest of which SGLang may use."""
    import flashinfer.fused_moe.core

    for module in (flashinfer.fused_moe, flashinfer.fused_moe.core):
        for name, value in NAMES.items():
            replace(module, name, value)


def add_module(name: str, **contents: Any) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, loader=None)
    vars(module).update(contents)
    sys.modules[name] = module
