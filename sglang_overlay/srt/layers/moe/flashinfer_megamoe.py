"""MXFP4 experts in FlashInfer's mega kernel for Hopper: what it needs, its weights, its workspaces, and a forward.

One launch does it all for every expert-parallel rank: it fetches the tokens from the ranks that have them, runs both GEMMs with SwiGLU
between, and brings the rows back, weighed and summed. ``docs/mxfp4_hopper.md`` has the arithmetic and what travels how.
Nothing here is of SGLang's; FlashInfer is imported only where a layer is built.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, NamedTuple, NoReturn, Optional, Tuple

import torch

from ...environ import MXFP4_MEGAMOE

KERNEL_SINCE = "0.7.4"
CONFIG = "Sm90_Fp8_Mxfp4_Bf16_PullCutedsl_MegaMoeConfig"
PREPROCESS = "preprocess_sm90_pull_mxfp4_mega_weights"
KERNEL_FILE = "moe_ep/backends/mega/kernel/sm90/fp8_mxfp4_bf16_pull_cutedsl/config.py"
# A launch costs what its workspace's capacity costs, so a decode of a few tokens must not run in one made for prefill.
CAPACITIES = (64, 256, 1024)
DIVISOR = 128
GROUP = 32


class MegaMoeRefused(ValueError):
    """MXFP4 experts cannot go to Hopper's mega kernel here; the message names what is in the way and the way out."""


def refuse(reason: str, remedy: str) -> NoReturn:
    """Raise MegaMoeRefused with both, and with the flag that asked for the kernel."""
    raise MegaMoeRefused(f"{MXFP4_MEGAMOE.name}=1: {reason}. {remedy}.")


def require_kernel() -> None:
    """Raise MegaMoeRefused unless the installed FlashInfer has the kernel; known by its files, nothing is imported."""
    spec = importlib.util.find_spec("flashinfer")
    folders = spec.submodule_search_locations or () if spec else ()
    if not any((Path(folder) / KERNEL_FILE).is_file() for folder in folders):
        _refuse_flashinfer()


def require_nvshmem(world_size: int) -> None:
    """Raise MegaMoeRefused where several ranks would share rows and NVSHMEM's Python package is not there."""
    if world_size > 1 and importlib.util.find_spec("nvshmem") is None:
        refuse(f"{world_size} ranks exchange rows through NVSHMEM, which is not installed", "Install nvshmem4py-cu13")


def import_kernel() -> Any:
    """``flashinfer.moe_ep``, which must have the kernel's configuration and weight preparation (raises MegaMoeRefused)."""
    try:
        moe_ep = importlib.import_module("flashinfer.moe_ep")
    except ImportError as fault:
        _refuse_flashinfer(f" ({fault})")
    if not (hasattr(moe_ep, CONFIG) and hasattr(moe_ep, PREPROCESS)):
        _refuse_flashinfer()
    return moe_ep


def _refuse_flashinfer(detail: str = "") -> NoReturn:
    try:
        found = f"FlashInfer {importlib.metadata.version('flashinfer-python')} has no MXFP4 kernel for Hopper"
    except importlib.metadata.PackageNotFoundError:
        found = "FlashInfer is not installed"
    refuse(found + detail, f"Install flashinfer-python {KERNEL_SINCE} beside SGLang: docs/mxfp4_hopper.md says how")


@dataclass(frozen=True)
class ExpertShape:
    """The experts of one layer, over all ranks.

    ``num_experts`` counts those of all ranks, ``intermediate_size`` is that of one expert after SwiGLU, ``swiglu_limit`` bounds the gate
    from above and the up projection on both sides (None: neither).
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    swiglu_limit: Optional[float]
    rank: int
    world_size: int

    def check(self) -> None:
        """Raise MegaMoeRefused where the kernel has no tiles for these experts."""
        for name in ("hidden_size", "intermediate_size"):
            size = getattr(self, name)
            if size % DIVISOR:
                refuse(f"{name} {size} is not a multiple of {DIVISOR}", "Serve this model with another --moe-a2a-backend")
        if self.num_experts % self.world_size:
            refuse(
                f"{self.num_experts} experts do not divide among {self.world_size} ranks",
                "Choose a --tp-size that divides the number of experts",
            )


class ExpertWeights(NamedTuple):
    """One rank's E experts as a checkpoint holds them, all uint8 and contiguous.

    ``w13`` [E, 2I, H/2] and ``w2`` [E, H, I/2] are pairs of E2M1 codes, the lower four bits first; ``w13`` is [gate; up].
    ``w13_scale`` [E, 2I, H/32] and ``w2_scale`` [E, H, I/32] are E8M0 exponents (OCP Microscaling Formats specification).
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor
    w2_scale: torch.Tensor

    @classmethod
    def as_loaded(cls, w13: torch.Tensor, w2: torch.Tensor, w13_scale: torch.Tensor, w2_scale: torch.Tensor) -> ExpertWeights:
        """The bytes of these tensors, whatever one-byte dtype they are held in; nothing is copied or converted.

        Raises:
            MegaMoeRefused: a tensor has elements of more than one byte, which would mean that it was converted when loaded.
        """
        named = zip(cls._fields, (w13, w2, w13_scale, w2_scale))
        return cls(*(_bytes_of(name, tensor) for name, tensor in named))


def _bytes_of(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.element_size() != 1:
        refuse(
            f"{name} was loaded as {tensor.dtype}, not as the bytes of an MXFP4 checkpoint",
            "Serve a checkpoint whose experts have E2M1 codes and E8M0 scales",
        )
    return tensor.detach().view(torch.uint8)


def capacities_up_to(largest: int) -> Tuple[int, ...]:
    """The workspaces there are where the largest holds this many tokens of one rank."""
    return (*(capacity for capacity in CAPACITIES if capacity < largest), largest)


def capacity_for(tokens: int, capacities: Tuple[int, ...] = CAPACITIES) -> int:
    """The smallest workspace that holds ``tokens`` of one rank, at most the largest there is."""
    return next((capacity for capacity in capacities if tokens <= capacity), capacities[-1])


def launches(tokens: int, capacities: Tuple[int, ...] = CAPACITIES) -> Iterator[Tuple[slice, int]]:
    """``(rows, capacity)`` of each launch of a forward, from the tokens of the rank that has most.

    Every rank must give the same number: all ranks take part in a launch or none does, and in a workspace of the same capacity.
    """
    largest = capacities[-1]
    for begin in range(0, tokens, largest):
        yield slice(begin, begin + largest), capacity_for(tokens - begin, capacities)


class MegaMoeExperts:
    """One layer's experts, ready to be captured in a CUDA graph once it is built.

    Building is collective: the ranks of ``group`` build their layers in the same order. Workspaces and compiled kernels are
    shared by the layers of one shape, so only the first of them compiles (seconds a capacity) and takes memory.
    """

    def __init__(
        self, shape: ExpertShape, weights: ExpertWeights, group: Any = None, capacities: Tuple[int, ...] = CAPACITIES
    ) -> None:
        """Prepare the weights, make the workspaces and run each of them once.

        Args:
            group: the process group of the expert-parallel ranks; None where there is one rank and no process group.
            capacities: tokens of one rank that each workspace holds, ascending.

        Raises:
            MegaMoeRefused: the kernel does not take these experts, or FlashInfer does not have it.
        """
        shape.check()
        self.shape, self.capacities = shape, capacities
        self._moe_ep = import_kernel()
        self.transformed = self._preprocess(weights)
        self._layer = self._make_layer(weights.w13.device, group)
        self._workspaces = {capacity: self._layer.create_workspace(capacity) for capacity in capacities}
        for capacity, workspace in self._workspaces.items():
            self._layer.warmup(self._warm_up_tokens(capacity, weights.w13.device), workspace=workspace)

    def _preprocess(self, weights: ExpertWeights) -> Any:
        pack = self._moe_ep.PrequantizedMoEWeights(**weights._asdict())
        return getattr(self._moe_ep, PREPROCESS)(
            pack, intermediate_size=self.shape.intermediate_size, hidden_size=self.shape.hidden_size
        )

    def _make_layer(self, device: torch.device, group: Any) -> Any:
        shape, moe_ep = self.shape, self._moe_ep
        # The limit is given in every case: left out, FlashInfer clamps at 10.
        config = getattr(moe_ep, CONFIG)(
            intermediate_size=shape.intermediate_size, top_k=shape.top_k, gate_up_clamp=shape.swiglu_limit
        )
        return moe_ep.MoEEpMegaLayer(
            bootstrap=moe_ep.BootstrapConfig(
                world_size=shape.world_size, rank=shape.rank, device=device.index, process_group=group
            ),
            fleet_params=moe_ep.FleetParams(
                num_experts=shape.num_experts, max_tokens_per_rank=self.capacities[-1], token_hidden_size=shape.hidden_size
            ),
            weights=None,
            backend=moe_ep.MegaConfig(
                megakernel=config, quantize_input=True, preprocess_weights=False, transformed_weights=self.transformed
            ),
        )

    def _warm_up_tokens(self, tokens: int, device: torch.device) -> Any:
        """Full to capacity, spread over all experts; into an output of their own, as in a forward."""
        top_k = self.shape.top_k
        routes = torch.arange(tokens * top_k, device=device) % self.shape.num_experts
        hidden = torch.zeros(tokens, self.shape.hidden_size, dtype=torch.bfloat16, device=device)
        return self._moe_ep.MoEEpTensors(
            hidden_states=hidden,
            topk_ids=routes.view(tokens, top_k),
            topk_weights=torch.ones(tokens, top_k, dtype=torch.float32, device=device),
            output=torch.empty_like(hidden),
        )

    def forward(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, tokens_of_fullest_rank: int
    ) -> torch.Tensor:
        """The experts' weighted sum for this rank's tokens.

        Args:
            hidden_states: ``[T, H]`` bf16; T = 0 on an idle rank.
            topk_ids: ``[T, K]`` integers, experts counted over all ranks; negative: no expert.
            topk_weights: ``[T, K]``; whatever scales the routed experts is multiplied in already.
            tokens_of_fullest_rank: the largest T of any rank, the same number on all of them.

        Returns:
            ``[T, H]`` bf16, in memory that no later forward writes to.

        Raises:
            RuntimeError: this rank has more tokens than the number says; its peers would wait for launches it does not make.
        """
        tokens = hidden_states.shape[0]
        if tokens > tokens_of_fullest_rank:
            raise RuntimeError(
                f"this rank has {tokens} tokens where the ranks agreed on at most {tokens_of_fullest_rank}: "
                "their token counts were not gathered for this forward"
            )
        hidden_states = hidden_states.bfloat16().contiguous()
        ids = topk_ids.long().contiguous().view(tokens, self.shape.top_k)
        weights = topk_weights.float().contiguous().view(tokens, self.shape.top_k)
        output = torch.empty_like(hidden_states)
        for rows, capacity in launches(tokens_of_fullest_rank, self.capacities):
            part = self._moe_ep.MoEEpTensors(
                hidden_states=hidden_states[rows], topk_ids=ids[rows], topk_weights=weights[rows], output=output[rows]
            )
            self._layer.forward(part, workspace=self._workspaces[capacity])
        return output
