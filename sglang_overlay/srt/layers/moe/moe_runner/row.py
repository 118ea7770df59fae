"""One row of the configuration table, and what every producer needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Tuple

import torch

from ..deferred_output import DeferredMoeOutput

Producer = Callable[..., DeferredMoeOutput]


@dataclass(frozen=True)
class Row:
    """One deferrable configuration.

    Attributes:
        quant_method: class name of the layer's quantisation method.
        runner_backend: SGLang's name of the MoE runner; ``none`` where the method calls its kernel itself.
        device: ``cuda`` or ``cpu``.
        routing: the one routing format the configuration takes, by SGLang's name in lower case: ``standard``
            (ids and weights) or ``bypassed`` (logits, the kernel routes).
        weight_dtype: dtype of the expert weights the routing hands over.
        scale: who multiplies the routed scaling factor: ``finalize`` (the bundle carries it), ``kernel`` (the
            kernel's routing), ``top-k`` (SGLang's routing; the bundle carries it where that left it out) or
            ``model`` (the model code multiplies it onto the bundle, as it does onto a tensor).
        make_producer: ``(experts) -> Producer``, called once per layer.
        unfit: ``(experts) -> reason`` why a layer of this configuration does not defer all the same; empty where it does.
    """

    quant_method: str
    runner_backend: str
    device: str
    routing: str
    weight_dtype: torch.dtype
    scale: str
    make_producer: Callable[[torch.nn.Module], Producer]
    unfit: Callable[[torch.nn.Module], str] = lambda experts: ""

    @property
    def key(self) -> tuple:
        """What a layer is looked up by."""
        return self.quant_method, self.runner_backend, self.device

    def unfit_routing(self, topk_output: Any) -> str:
        """Why the routing of one forward does not fit; empty where it does."""
        given = topk_output.format.name.lower()
        return "" if given == self.routing else f"{given} routing, where the configuration takes {self.routing}"


def dispatch(experts: torch.nn.Module, hidden_states: torch.Tensor, topk_output: Any, pre_quant_input: Any) -> Any:
    """SGLang's dispatch for ``hidden_states`` ``[T, H]``, with the pre-quantised input where there is one."""
    dispatched = experts.dispatcher.dispatch(hidden_states=hidden_states, topk_output=topk_output)
    if pre_quant_input is not None and dispatched.hidden_states_scale is None:
        dispatched = dispatched._replace(hidden_states_pre_quant=pre_quant_input)
    return dispatched


def bundle_of(unfinalized: Any, expert_weights: torch.Tensor, shape: Tuple[int, int], scale: float) -> DeferredMoeOutput:
    """The bundle of a producer's rows.

    Args:
        unfinalized: with ``gemm2_out`` and ``expanded_idx_to_permuted_idx`` as a bundle takes them.
        expert_weights: ``[T, K]`` fp32 or bf16.
        shape: ``(T, H)`` of the hidden states, whatever the rows' own shape.
        scale: the part of the routed scaling factor that is still to be applied.
    """
    num_tokens, hidden = shape
    return DeferredMoeOutput(
        gemm2_out=unfinalized.gemm2_out,
        expanded_idx_to_permuted_idx=unfinalized.expanded_idx_to_permuted_idx,
        expert_weights=expert_weights,
        num_tokens=num_tokens,
        top_k=expert_weights.shape[-1],
        hidden=hidden,
        routed_scaling_factor=scale,
    )
