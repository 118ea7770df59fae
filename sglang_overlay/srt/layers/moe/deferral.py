"""Whether an MoE layer defers its finalize, and whether the next layer takes the bundle.

Both are decided before compute from facts that are the same on every rank of the group: a rank that
decided otherwise than its peers would hang them or leave them half reduced. Facts that do not change once a
server serves are checked at a layer's first forward (``Deferral.of``), not when the model is built: LoRA wraps the experts,
and quantisation and offloading rework them, only later. The others are checked per forward.

Under ``auto`` only what is handed on defers, where that was measured faster than stock; where nothing was, a layer's first
forward only says why nothing defers, and runs the stock experts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Callable, Optional, Tuple

import torch

from ...environ import ENABLE, settings
from .counters import COUNTERS
from .deferred_output import DeferredMoeOutput, finalize
from .moe_runner.producers import find_row
from .moe_runner.row import Producer, Row

logger = logging.getLogger(__name__)

OFF_UNDER_AUTO = (
    f"off (auto): not measured faster than stock here; set {ENABLE.name}=1 to defer wherever the configuration allows"
)

# Each guard: a test that is true where a layer must not defer, and the reason in words.
Guard = Tuple[Callable[[torch.nn.Module], bool], str]


@dataclass
class Deferral:
    """How one MoE layer defers.

    Attributes:
        experts: the module this was decided for.
        row, producer: its configuration, and what runs its experts uncombined; None where it never defers.
        reason: why it never does (empty where it does).
        keeps_because: why the next layer cannot take its bundle (empty where it can).
        gains: whether handing on a forward of T tokens was measured faster than stock; asked under ``auto`` only.
        carries_now: decided by the decoder layer for the forward under way, taken by the MoE in it.
    """

    experts: torch.nn.Module
    row: Optional[Row]
    producer: Optional[Producer]
    reason: str
    keeps_because: str
    gains: Callable[[int], bool]
    carries_now: bool = False

    @classmethod
    def of(cls, moe: torch.nn.Module) -> "Deferral":
        """Check a layer's configuration against the table and the guards; logged and counted once per layer."""
        row, reason = row_or_reason(moe)
        producer = row.make_producer(moe.experts) if row else None
        COUNTERS.layers[moe.layer_id] = reason or "deferrable"
        keeps_because = moe.__dict__.get("moe_keeps_because", "no next layer was linked")
        gains = moe.moe_boundary.gains if "moe_boundary" in moe.__dict__ else lambda num_tokens: False
        log_once(f"not deferred: {reason}" if reason else f"deferred by {row.quant_method}, {row.runner_backend} runner")
        return cls(moe.experts, row, producer, reason, keeps_because, gains)

    def not_now(self, num_tokens: int) -> str:
        """Why this forward of ``num_tokens`` tokens does not defer; empty where it does."""
        # The kind of graph comes before the table of measurements, which a compiler cannot trace.
        reason = self.reason or _graph_that_cannot_hold_a_bundle()
        if reason:
            return reason
        if num_tokens == 0:
            return "no tokens on this rank"
        if num_tokens > settings().max_tokens:
            return "more tokens than SGLANG_MOE_DEFERRED_FINALIZE_MAX_TOKENS"
        if settings().by_policy and not self.gains(num_tokens):
            return "not measured faster than stock for this number of tokens"
        return ""

    def stays_stock(self, num_tokens: int) -> str:
        """Why the MoE under way runs its stock experts; empty where it defers.

        Under ``auto`` it does so too where its bundle would be finalized in the layer: that was not measured.
        """
        reason = self.not_now(num_tokens)
        if not reason and settings().by_policy and not self.carries_now:
            return "not handed on, and only that was measured"
        return reason

    def take_decision(self) -> bool:
        """Whether the next layer takes this forward's bundle; good for one call."""
        carries, self.carries_now = self.carries_now, False
        return carries


def deferral_of(moe: torch.nn.Module) -> Deferral:
    """The layer's ``Deferral``, made at its first forward, and again should its experts be replaced."""
    deferral = moe.__dict__.get("moe_deferral")
    if deferral is None or deferral.experts is not moe.experts:
        deferral = Deferral.of(moe)
        moe.moe_deferral = deferral
    return deferral


def may_defer(moe: torch.nn.Module) -> bool:
    """Whether a layer's forwards are to be looked at: all with the flag at 1, under auto those that gain from it."""
    flags = settings()
    return not flags.is_off and (not flags.by_policy or "moe_boundary" in moe.__dict__)


def run_experts(moe: torch.nn.Module, hidden_states: torch.Tensor, topk_output: Any, pre_quant_input: Any = None):
    """Run the routed experts: a bundle where this forward defers, else the stock result.

    Args:
        hidden_states: ``[T, H]``, the same T on every rank of the group.
    """
    deferral = deferral_of(moe)
    reason = deferral.stays_stock(hidden_states.shape[0]) or _unfit_routing(deferral.row, topk_output)
    if reason:
        COUNTERS.count_not_deferred(reason)
        extra = {} if pre_quant_input is None else {"pre_quant_input": pre_quant_input}
        return moe.experts(hidden_states, topk_output, **extra)
    COUNTERS.count_deferred(moe.layer_id)
    return deferral.producer(hidden_states, topk_output, pre_quant_input)


def finish_or_carry(
    moe: torch.nn.Module, routed: DeferredMoeOutput, shared_output: Optional[torch.Tensor]
):
    """Add the shared-expert partial; finalize here unless the next layer takes the bundle."""
    output = routed.with_shared_output(shared_output)
    if deferral_of(moe).take_decision():
        COUNTERS.carried[moe.layer_id] += 1
        return output
    COUNTERS.count_way("in_layer", output.num_tokens)
    return finalize(output)


def is_unexplained(moe: torch.nn.Module) -> bool:
    """Whether ``explain`` has yet to be called for a layer; not while compiling, where a log line would break the graph."""
    return "moe_is_explained" not in moe.__dict__ and not torch.compiler.is_compiling()


def explain(moe: torch.nn.Module, topk_output: Any) -> None:
    """Log, once per server and reason, why a layer does not defer under ``auto``, and whether it would with the flag at 1."""
    moe.moe_is_explained = True
    log_once(OFF_UNDER_AUTO)
    try:
        row, reason = row_or_reason(moe)
        reason = reason or row.unfit_routing(topk_output)
    except Exception as error:
        # A server that is to run as stock must not stop over an explanation.
        reason = f"the configuration could not be looked at: {error!r}"
    if reason:
        log_once(f"not deferred with {ENABLE.name}=1 either: {reason}")


def first_true(guards: Tuple[Guard, ...], subject: Any) -> str:
    return next((reason for holds, reason in guards if holds(subject)), "")


@lru_cache(maxsize=None)
def log_once(what: str) -> None:
    """Log a line once per server (with pipeline parallelism, per stage): what is logged here is the same on every rank."""
    from sglang.srt.utils import log_info_on_rank0

    log_info_on_rank0(logger, f"MoE deferred finalize: {what}")


def row_or_reason(moe: torch.nn.Module) -> Tuple[Optional[Row], str]:
    """A layer's row of the table, or None and why it never defers."""
    reason = first_true(DEFER_GUARDS, moe)
    return (None, reason) if reason else find_row(moe.experts, device())


def _unfit_routing(row: Row, topk_output: Any) -> str:
    reason = row.unfit_routing(topk_output)
    if reason:
        log_once(f"not deferred: {reason}")
    return reason


def device() -> str:
    """Where experts run, by the table's names. Not where weights lie: offloaded ones lie on the CPU."""
    from sglang.srt.utils import is_cuda

    if is_cuda():
        return "cuda"
    return "another accelerator" if torch.accelerator.is_available() else "cpu"


def _graph_that_cannot_hold_a_bundle() -> str:
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import (
        is_in_breakable_cuda_graph,
    )
    from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph.context_manager import (
        is_in_tc_piecewise_cuda_graph,
    )

    if torch.compiler.is_compiling() or is_in_tc_piecewise_cuda_graph() or is_in_breakable_cuda_graph():
        return "a compiled, piecewise or breakable graph, which holds tensors only"
    return ""


def _is_wrapped(moe: torch.nn.Module) -> bool:
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    return type(moe.experts) is not FusedMoE


def _parallel():
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def _uses_all_to_all(moe: torch.nn.Module) -> bool:
    from sglang.srt.layers.moe import get_moe_a2a_backend, should_use_flashinfer_cutlass_moe_fp4_allgather

    return not get_moe_a2a_backend().is_none() or should_use_flashinfer_cutlass_moe_fp4_allgather()


def _uses_dp_attention(moe: torch.nn.Module) -> bool:
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled

    return is_dp_attention_enabled()


def _uses_sequence_parallel_norm(moe: torch.nn.Module) -> bool:
    from sglang.srt.layers.layernorm_sp import layernorm_sp_enabled

    return layernorm_sp_enabled()


def _is_batch_invariant(moe: torch.nn.Module) -> bool:
    from sglang.srt.runtime_context import get_exec

    return bool(get_exec().deterministic.enable_deterministic_inference)


def _multiplexes_streams(moe: torch.nn.Module) -> bool:
    from sglang.srt.runtime_context import get_disagg

    return bool(get_disagg().enable_pdmux)


DEFER_GUARDS: Tuple[Guard, ...] = (
    (_is_wrapped, "the experts are wrapped or of another class (LoRA, expert parallel dispatch)"),
    (lambda moe: "forward" in vars(moe.experts), "the experts' forward is replaced (offloaded weights)"),
    (lambda moe: moe.experts.reduce_results, "the experts reduce their own results"),
    (lambda moe: moe._shared_expert_tp1, "the shared expert is replicated and added after the all-reduce"),
    (lambda moe: moe._fuse_shared_experts_inside_sbo, "the shared expert runs inside single-batch overlap"),
    (_uses_all_to_all, "an all-to-all or all-gather backend combines the experts"),
    (
        lambda moe: _parallel().moe_ep_size > 1 and _parallel().moe_tp_size > 1,
        "hybrid expert and tensor parallelism reduces over two groups",
    ),
    (lambda moe: _parallel().moe_dp_size > 1, "MoE data parallelism"),
    (lambda moe: _parallel().dwdp_size > 1, "distributed weight data parallelism"),
    (lambda moe: _parallel().attn_cp_size > 1, "context parallelism"),
    (_uses_dp_attention, "data-parallel attention"),
    (_uses_sequence_parallel_norm, "sequence-parallel layer norm"),
    (_is_batch_invariant, "deterministic inference"),
    (_multiplexes_streams, "prefill and decode multiplexed on streams"),
)
