"""Which MoE configurations can hand on their expert outputs uncombined, and how each does it.

The table has one row per (quantisation method, runner backend, device), which says what routing format the
configuration takes. A configuration that no row names is not deferred. Where the routed scaling factor is still to be
applied is part of a producer's result: it is the bundle's ``routed_scaling_factor``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F

from ..deferred_output import DeferredMoeOutput, is_capturing
from . import flashinfer_trtllm
from .row import Producer, Row, bundle_of, dispatch

# 256 KiB a device: 8192 tokens of top_k 8.
KEPT_POSITIONS = 1 << 16
_POSITIONS: Dict[torch.device, torch.Tensor] = {}


class ExpertRows(NamedTuple):
    """Expert outputs in expert order, ``[P, H]``, and the row of each (token, k), ``[T, K]`` int32."""

    gemm2_out: torch.Tensor
    expanded_idx_to_permuted_idx: torch.Tensor


def triton_producer(experts: torch.nn.Module) -> Producer:
    """A producer over SGLang's Triton MoE runner, for any weight format that runner takes.

    The runner's ``no_combine`` mode writes one row per (token, k) in token order, without router weight,
    scaling factor or sum; so ``P = T * K`` and the index is the identity, negative where routing names no
    local expert. That it may do only where other ranks hold further experts (else the runner would not look out for it).
    """
    from sglang.srt.layers.moe.moe_runner import MoeRunner
    from sglang.srt.layers.moe.utils import MoeRunnerBackend

    config = experts.moe_runner_config
    runner = MoeRunner(MoeRunnerBackend.TRITON, replace(config, no_combine=True, inplace=False))
    scale = 1.0 if config.routed_scaling_factor is None else float(config.routed_scaling_factor)
    all_are_local = config.num_experts is not None and config.num_experts == config.num_local_experts

    def produce(hidden_states, topk_output, pre_quant_input=None) -> DeferredMoeOutput:
        dispatched = dispatch(experts, hidden_states, topk_output, pre_quant_input)
        quant_info = experts.quant_method.get_triton_quant_info(experts)
        rows = runner.run(dispatched, quant_info).hidden_states
        topk_ids = dispatched.topk_output.topk_ids
        identity = ExpertRows(rows.flatten(0, 1), identity_index(topk_ids, all_are_local))
        return bundle_of(identity, dispatched.topk_output.topk_weights, hidden_states.shape, scale)

    return produce


def native_producer(experts: torch.nn.Module) -> Producer:
    """A producer for unquantised experts on a CPU, in plain torch.

    On a CPU SGLang's model code multiplies the routed scaling factor after the experts, so the bundle starts with 1.
    """

    def produce(hidden_states, topk_output, pre_quant_input=None) -> DeferredMoeOutput:
        dispatched = dispatch(experts, hidden_states, topk_output, pre_quant_input)
        rows = run_experts_in_order(
            dispatched.hidden_states,
            dispatched.topk_output.topk_ids,
            experts.w13_weight,
            experts.w2_weight,
            getattr(experts, "w13_weight_bias", None),
            getattr(experts, "w2_weight_bias", None),
            experts.moe_runner_config.activation,
        )
        return bundle_of(rows, dispatched.topk_output.topk_weights, hidden_states.shape, 1.0)

    return produce


def find_row(experts: torch.nn.Module, device: str) -> Tuple[Optional[Row], str]:
    """The table's row for a layer's experts, or None and the reason there is none."""
    key = _key(experts, device)
    for row in TABLE:
        if row.key == key:
            reason = _unfit_config(experts) or row.unfit(experts)
            return (None, reason) if reason else (row, "")
    return None, "no deferrable configuration for {} with the {} runner on {}".format(*key)


def expected_weight_dtype(experts: torch.nn.Module, device: str) -> torch.dtype:
    """The dtype of a layer's expert weights, known before its first forward; fp32 where no row says."""
    key = _key(experts, device)
    return next((row.weight_dtype for row in TABLE if row.key == key), torch.float32)


def identity_index(topk_ids: torch.Tensor, all_are_local: bool = False) -> torch.Tensor:
    """``[T, K]`` int32, not to be written to: each (token, k)'s own position, negative where ``topk_ids`` is negative.

    ``all_are_local``: no id is negative, so that nothing need be launched.
    """
    own = positions(topk_ids.numel(), topk_ids.device).view(topk_ids.shape)
    return own if all_are_local else torch.where(topk_ids < 0, -1, own)


def positions(count: int, device: torch.device) -> torch.Tensor:
    """``[count]`` int32: 0, 1, 2, …; of memory that is kept for good, since captured graphs go on reading it.

    Memory made while a graph is captured holds its numbers only once that graph has run, so that is not kept.
    """
    if count > KEPT_POSITIONS:
        return torch.arange(count, dtype=torch.int32, device=device)
    kept = _POSITIONS.get(device)
    if kept is None:
        kept = torch.arange(KEPT_POSITIONS, dtype=torch.int32, device=device)
        if not is_capturing():
            _POSITIONS[device] = kept
    return kept[:count]


def run_experts_in_order(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    b13: Optional[torch.Tensor] = None,
    b2: Optional[torch.Tensor] = None,
    activation: str = "silu",
) -> ExpertRows:
    """Every routed expert's gated MLP, expert by expert: ``w2 @ (act(gate) * up)``.

    Args:
        hidden_states: ``[T, H]``.
        topk_ids: ``[T, K]`` integer ids below E; negative: no expert.
        w13: ``[E, 2I, H]``, gate rows before up rows; w2: ``[E, H, I]``; b13: ``[E, 2I]``; b2: ``[E, H]``.
        activation: ``silu`` or ``gelu``.
    """
    num_experts, top_k = w13.shape[0], topk_ids.shape[1]
    flat_ids = topk_ids.flatten().long()
    by_expert = flat_ids.argsort(stable=True)
    counts = torch.bincount(flat_ids.clamp_min(-1) + 1, minlength=num_experts + 1).tolist()
    routed = by_expert[counts[0] :]
    index = torch.full_like(flat_ids, -1, dtype=torch.int32)
    index[routed] = torch.arange(routed.numel(), dtype=torch.int32, device=index.device)
    gemm2_out = hidden_states.new_empty((routed.numel(), w2.shape[1]))
    start = 0
    for expert, count in enumerate(counts[1:]):
        if count == 0:
            continue
        rows = slice(start, start + count)
        inputs = hidden_states[routed[rows] // top_k]
        gate_up = F.linear(inputs, w13[expert], _of(b13, expert))
        gemm2_out[rows] = F.linear(_gated(gate_up, activation), w2[expert], _of(b2, expert))
        start += count
    return ExpertRows(gemm2_out, index.view(topk_ids.shape))


def _key(experts: torch.nn.Module, device: str) -> Tuple[str, str, str]:
    """What the table is looked up by."""
    runner = getattr(experts.quant_method, "runner", None)
    backend = getattr(getattr(runner, "runner_backend", None), "value", "none")
    return type(experts.quant_method).__name__, backend, device


def _gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate)) * up


def _of(bias: Optional[torch.Tensor], expert: int) -> Optional[torch.Tensor]:
    return None if bias is None else bias[expert]


def _unfit_config(experts: torch.nn.Module) -> str:
    if experts.moe_runner_config.apply_router_weight_on_input:
        return "the router weight is applied to the experts' input"
    return ""


def _unfit_native(experts: torch.nn.Module) -> str:
    config = experts.moe_runner_config
    if getattr(experts, "use_intel_amx_backend", False):
        return "the CPU engine combines experts inside its own kernel"
    if config.activation not in ("silu", "gelu") or not config.is_gated:
        return f"activation {config.activation} (gated: {config.is_gated}) on a CPU"
    if any(value is not None for value in (config.gemm1_alpha, config.gemm1_clamp_limit, config.swiglu_limit)):
        return "a clamped or scaled SwiGLU on a CPU"
    return ""


CUDA_TRITON_METHODS = (
    "UnquantizedFusedMoEMethod",
    "Fp8MoEMethod",
    "W8A8FP8MoEMethod",
    "W8A8Int8MoEMethod",
    "BlockInt8MoEMethod",
)
TABLE: Tuple[Row, ...] = (
    Row("UnquantizedFusedMoEMethod", "triton", "cpu", "standard", torch.float32, "model", native_producer, _unfit_native),
    *(
        Row(method, "triton", "cuda", "standard", torch.float32, "finalize", triton_producer)
        for method in CUDA_TRITON_METHODS
    ),
    *flashinfer_trtllm.ROWS,
)
