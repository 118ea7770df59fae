"""The seams of a base whose layers meet in ``layer_boundary`` (0.5.23).

There a stage asks its *fusions*, before compute, whether its MoE may hand on an unfinalized output, and publishes the answer;
what is handed on must be a ``DeferredFinalize``, and the next stage offers it to its own fusions. So one small object per
layer stands for both ends. With deferral off every function here does what the stock line it replaced did.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, Callable, Optional, Tuple

import torch

from ..environ import FUSION, settings
from ..models import deepseek_v2 as seams
from . import cutedsl
from .communicator import Outputs, all_reduce, take_over, unlinked
from .moe.counters import COUNTERS
from .moe.deferral import Deferral, Guard, deferral_of, first_true, log_once, may_defer
from .moe.deferred_output import DeferredMoeOutput, finalize, is_deferred


class MoeFinalizeFusion:
    """A decoder layer's part in handing bundles on: given to both of its stages, as the stock kernels for a boundary are.

    Attributes:
        moe_boundary: how this layer takes a bundle; set when the model is linked.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        self._layer = layer
        self.moe_boundary = None

    @property
    def input_layernorm(self) -> torch.nn.Module:
        return self._layer.input_layernorm

    def attn_input_fusions(self, plan: Any) -> Tuple[Callable[..., Optional[Outputs]], ...]:
        return (partial(self._take, plan),)

    def ffn_input_fusions(self, plan: Any) -> tuple:
        return ()

    def can_defer_all_reduce(self, plan: Any, forward_batch: Any) -> bool:
        return False

    def can_defer_finalize(self, plan: Any, forward_batch: Any) -> bool:
        """Whether this layer's MoE hands on a bundle in this forward. The same on all ranks; asked before compute."""
        moe = self._layer.mlp
        if plan.terminal or not seams.is_moe(moe) or not may_defer(moe) or forward_batch.input_ids is None:
            return False
        return seams.carries(deferral_of(moe), forward_batch, forward_batch.input_ids.shape[0])

    def _take(self, plan: Any, owed: Any, residual: Any, forward_batch: Any, addition: Any) -> Optional[Outputs]:
        if not isinstance(owed, _handoff()):
            return None
        return take_over(self.moe_boundary or unlinked(), plan.norm, owed.output, residual, addition)


@lru_cache(maxsize=1)
def _handoff() -> Any:
    """The class of a bundle on its way to the next layer: of the kind the boundary knows, made when SGLang is there."""
    from sglang.srt.layers.layer_boundary.output import DeferredFinalize

    class BundleHandoff(DeferredFinalize, frozen=True):  # type: ignore[call-arg]
        output: DeferredMoeOutput

        def complete(self) -> torch.Tensor:
            """For a reader that does not know bundles: what the MoE would have returned, reduced."""
            COUNTERS.count_way("eager", self.output.num_tokens)
            return all_reduce(finalize(self.output))

    return BundleHandoff


def boundary_fusions(layer: torch.nn.Module, stock: Any) -> Any:
    """The fusions of a decoder layer's stages: the stock ones where there are any, else ours where layers may defer."""
    if stock is not None or settings().is_off or not _is_plain(layer):
        return stock
    return MoeFinalizeFusion(layer)


def experts_or_deferred(moe: torch.nn.Module, in_pieces: bool) -> Callable[..., Any]:
    """What to call with ``(hidden_states, topk_output)`` in place of ``moe.experts``.

    ``in_pieces``: the caller of the MoE wants routed and shared output apart, and knows tensors only.
    """
    if in_pieces or cutedsl.takes(moe) == cutedsl.STOCK:
        return moe.experts
    _heed_decision(moe)
    return seams.experts_or_deferred(moe)


def stock_defers(moe: torch.nn.Module, hidden_states: torch.Tensor, in_pieces: bool) -> bool:
    """Whether the stock dual-stream forward may defer by its own means: not where the overlay does."""
    if in_pieces or cutedsl.takes(moe) == cutedsl.STOCK:
        return moe.experts.supports_deferred_finalize
    _heed_decision(moe)
    return seams.stock_defers(moe, hidden_states)


def add_shared_output(moe: torch.nn.Module, stock_add: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """What to call in place of the stock shared-expert add, with the same four arguments."""

    finish = seams.add_shared_output(moe, stock_add)

    def add(*arguments: Any) -> Any:
        finished = finish(*arguments)
        return _handed_on(moe, finished) if is_deferred(finished) else finished

    return add


def _handed_on(moe: torch.nn.Module, output: DeferredMoeOutput) -> Any:
    """A bundle as what takes it knows it: the overlay in the next layer, or SGLang's own kernel."""
    bundle = _handoff()(output)
    if cutedsl.takes(moe) != cutedsl.BUNDLES:
        return bundle
    reason = cutedsl.unmet(output)
    if reason:
        log_once(f"eager in place of SGLang's own kernel: {reason}")
        return bundle
    return cutedsl.handoff(output, bundle.complete)


def link_boundaries(model: torch.nn.Module) -> None:
    """``models.deepseek_v2.link_boundaries`` for layers that meet in ``layer_boundary``."""
    if settings().is_off:
        return
    for layer in model.layers[model.start_layer : model.end_layer]:
        if seams.is_moe(layer.mlp):
            cutedsl.mark(layer)
    seams.link(model, _join)


def _join(layer: torch.nn.Module, following: Optional[torch.nn.Module]) -> Optional[Tuple[Any, str]]:
    kernel_takes = cutedsl.takes(layer.mlp)
    if kernel_takes == cutedsl.STOCK:
        return None
    if kernel_takes == cutedsl.BUNDLES:
        return None, first_true(KERNEL_GUARDS, (layer, following))
    return following and _fusions(following), first_true(CARRY_GUARDS, (layer, following))


def _fusions(layer: torch.nn.Module) -> Any:
    return layer.attn_boundary.fusions


_ANY_GUARDS: Tuple[Guard, ...] = (
    (lambda pair: pair[1] is None, "the last layer of the model or of its pipeline stage"),
    (lambda pair: not all(map(_is_plain, pair)), "a decoder layer of another class"),
    (lambda pair: pair[0].mlp.reduce_results, "the MoE reduces its own output"),
)
CARRY_GUARDS: Tuple[Guard, ...] = (
    *_ANY_GUARDS,
    (
        lambda pair: not all(isinstance(_fusions(layer), MoeFinalizeFusion) for layer in pair),
        "the layers' boundaries have kernels of SGLang's own",
    ),
)
# Into SGLang's own kernel.
KERNEL_GUARDS: Tuple[Guard, ...] = (
    *_ANY_GUARDS,
    (
        lambda pair: settings().fusion != "auto",
        f"layers have SGLang's own kernel (--flashinfer-allreduce-fusion-backend cutedsl), and {FUSION.name} asks for another way",
    ),
    (
        lambda pair: cutedsl.needs_own_shared_output(pair[0].mlp),
        "SGLang's own kernel takes a shared expert that is not fused with the routed ones",
    ),
)


def _is_plain(layer: torch.nn.Module) -> bool:
    """Whether a layer's forward is the one that finishes its MoE through the boundary's exit; subclasses may not."""
    from sglang.srt.models.deepseek_v2 import DeepseekV2DecoderLayer

    return type(layer) is DeepseekV2DecoderLayer


def _heed_decision(moe: torch.nn.Module) -> None:
    """Take over what the boundary decided before compute; it publishes False where no boundary asked."""
    if may_defer(moe):
        deferral: Deferral = deferral_of(moe)
        deferral.carries_now = not deferral.keeps_because and _published()


def _published() -> bool:
    from sglang.srt.runtime_context import get_forward

    return get_forward().defer_moe_finalize
