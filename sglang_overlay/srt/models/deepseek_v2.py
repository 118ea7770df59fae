"""The seams of ``deepseek_v2.py``: each is one call from the stock file, with the logic here.

With deferral off every function here does what the stock line it replaced did.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from ..environ import settings
from ..layers.communicator import all_reduce, keeps_because, separate_unmet, separate_up_to
from ..layers.moe.boundary import model as boundaries
from ..layers.moe.deferral import (
    DEFER_GUARDS,
    OFF_UNDER_AUTO,
    Deferral,
    deferral_of,
    device,
    explain,
    finish_or_carry,
    first_true,
    is_unexplained,
    log_once,
    may_defer,
    run_experts,
)
from ..layers.moe.deferred_output import is_deferred
from ..layers.moe.moe_runner.producers import expected_weight_dtype
from ..upstream import input_is_scattered

# An MoE layer, what takes bundles for the layer after it (its communicator; None where SGLang does), and why that cannot take this layer's.
Link = Tuple[torch.nn.Module, Any, str]
# The last two of a link, of a layer and the one after it; None for a layer that is left alone.
Join = Callable[[torch.nn.Module, Optional[torch.nn.Module]], Optional[Tuple[Any, str]]]


def experts_or_deferred(moe: torch.nn.Module) -> Callable[..., Any]:
    """What to call with ``(hidden_states, topk_output)`` in place of ``moe.experts``."""
    if may_defer(moe):
        return partial(run_experts, moe)
    if settings().by_policy and is_unexplained(moe):
        return partial(_explain_and_run, moe)
    return moe.experts


def stock_defers(moe: torch.nn.Module, hidden_states: torch.Tensor) -> bool:
    """Whether the stock dual-stream forward may defer by its own means, which finalize within the layer.

    Not where this forward of ``hidden_states`` ``[T, H]`` defers through the overlay: only a bundle can be handed on.
    """
    if may_defer(moe) and not deferral_of(moe).stays_stock(hidden_states.shape[0]):
        return False
    return moe.experts.supports_deferred_finalize


def add_shared_output(moe: torch.nn.Module, stock_add: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """What to call in place of the stock shared-expert add, with the same four arguments."""

    def add(experts, routed, shared_output: Optional[torch.Tensor], routed_scaling_factor: float):
        if is_deferred(routed):
            return finish_or_carry(moe, routed, shared_output)
        return stock_add(experts, routed, shared_output, routed_scaling_factor)

    return add


def fuse_or_carry(layer: torch.nn.Module, forward_batch: Any, hidden_states: torch.Tensor) -> bool:
    """Whether the next layer absorbs this layer's post-MoE all-reduce, by a bundle or the stock way.

    Decides, before compute, whether the MoE under way hands on a bundle. ``hidden_states`` is its input, ``[T, H]``.
    """
    if is_moe(layer.mlp) and may_defer(layer.mlp):
        deferral = deferral_of(layer.mlp)
        deferral.carries_now = carries(deferral, forward_batch, hidden_states.shape[0])
        if deferral.carries_now:
            return True
    return layer.layer_communicator.should_fuse_mlp_allreduce_with_next_layer(forward_batch)


def mark_for_next_layer(layer: torch.nn.Module, hidden_states: Any) -> Any:
    """Mark an unreduced MoE output for the next layer's fused all-reduce; a bundle needs no mark.

    Where a bundle was decided on and the MoE gave a tensor all the same, the all-reduce it left out is done here.
    """
    if is_deferred(hidden_states):
        return hidden_states
    if _decision_left_over(layer):
        return all_reduce(hidden_states)
    hidden_states._sglang_needs_allreduce_fusion = True
    return hidden_states


def tensor_or_none(hidden_states: Any) -> Optional[torch.Tensor]:
    """A layer's input as an output buffer for its MoE: a bundle is none."""
    return None if is_deferred(hidden_states) else hidden_states


def link_boundaries(model: torch.nn.Module) -> None:
    """Tell each MoE layer of this pipeline stage whether the layer after it can take its bundle, and that layer how.

    Called once, when the layers are built, so that a wrong flag stops the server before it loads weights, and every
    model has planes and workspaces of its own: target and draft may run at the same time. Collective.

    Raises:
        FlagError: a flag holds a value it does not take.
        PolicyError: a table of measurements cannot be used, or ranks differ in theirs.
        RuntimeError: the way asked for cannot run here.
    """
    link(model, _join)


def link(model: torch.nn.Module, join: Join) -> None:
    """``link_boundaries`` for whatever joins the layers; raises as it does."""
    if settings().is_off:
        return
    links = _links(model, join)
    # What one of these guards holds back at the start it holds back for good: nothing to set up for.
    used = [link for link in links if link[1] and not link[2] and not first_true(DEFER_GUARDS, link[0].mlp)]
    boundary = _boundary(model, used) if used else None
    if settings().by_policy and not (boundary and boundary.gains_up_to(settings().max_tokens)):
        log_once(OFF_UNDER_AUTO)
        return
    for layer, _, reason in links:
        layer.mlp.moe_keeps_because = reason
        layer.mlp.moe_is_explained = True
    for layer, following, _ in used:
        layer.mlp.moe_boundary = following.moe_boundary = boundary
    _log_links(links, boundary)


def _links(model: torch.nn.Module, join: Join) -> List[Link]:
    """Each MoE layer of this pipeline stage with what ``join`` says of it and the layer after it (None after the last)."""
    stage = list(model.layers[model.start_layer : model.end_layer])
    pairs = [pair for pair in zip(stage, stage[1:] + [None]) if is_moe(pair[0].mlp)]
    return [(pair[0], *joined) for pair in pairs if (joined := join(*pair)) is not None]


def _join(layer: torch.nn.Module, following: Optional[torch.nn.Module]) -> Tuple[Any, str]:
    after = following and following.layer_communicator
    return after, keeps_because(layer.layer_communicator, after)


def _boundary(model: torch.nn.Module, links: List[Link]) -> Optional[boundaries.Boundary]:
    """How the layers after ``links`` take bundles; None where by the measurements there is nothing to take."""
    from sglang.srt.runtime_context import get_parallel

    experts = links[0][0].mlp.experts
    norms = tuple(following.input_layernorm for _, following, _ in links)
    facts = boundaries.Facts(
        world_size=get_parallel().tp_size,
        hidden=model.config.hidden_size,
        top_k=experts.top_k,
        activation=norms[0].weight.dtype,
        weight=expected_weight_dtype(experts, device()),
        norms=norms,
    )
    policy = boundaries.agreed_policy(facts.world_size, facts.hidden)
    if settings().by_policy and not policy.wins_up_to(settings().max_tokens):
        return None
    unmet = separate_unmet(norms)
    return boundaries.build(facts, policy, unmet, separate_up_to(), log_once)


def _log_links(links: List[Link], boundary: Optional[boundaries.Boundary]) -> None:
    by_reason: Dict[str, List[int]] = {}
    for layer, _, reason in links:
        if reason or boundary:
            by_reason.setdefault(reason, []).append(layer.layer_id)
    for reason, layer_ids in by_reason.items():
        taken = f"finalized in the layer: {reason}" if reason else f"handed to the next layer, {_taken(boundary)}"
        log_once(f"what layers {layer_ids} defer is {taken}")


def _taken(boundary: boundaries.Boundary) -> str:
    source = boundary.policy.source
    return f"taken by {boundary.ranges(settings().max_tokens)}" + (f" ({source})" if source else "")


def _explain_and_run(moe: torch.nn.Module, hidden_states: torch.Tensor, topk_output: Any, **extra: Any) -> Any:
    explain(moe, topk_output)
    return moe.experts(hidden_states, topk_output, **extra)


def carries(deferral: Deferral, forward_batch: Any, num_tokens: int) -> bool:
    """Whether the next layer takes this forward's bundle. By facts that are the same on all ranks; asked before compute."""
    if deferral.keeps_because or deferral.not_now(num_tokens):
        return False
    # Two-batch overlap slices the hidden states, and scattered input splits them, before the next layer takes them.
    return not forward_batch.can_run_tbo and not input_is_scattered()


def _decision_left_over(layer: torch.nn.Module) -> bool:
    return is_moe(layer.mlp) and may_defer(layer.mlp) and deferral_of(layer.mlp).take_decision()


def is_moe(mlp: torch.nn.Module) -> bool:
    """Whether a layer's feed-forward block is a ``DeepseekV2MoE``."""
    from sglang.srt.models.deepseek_v2 import DeepseekV2MoE

    return isinstance(mlp, DeepseekV2MoE)
