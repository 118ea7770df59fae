"""The exchange plane: device memory of every rank, mapped by all its peers.

Plain allocations shared by CUDA IPC; no multicast. A plane belongs to one stream of launches: two models that may run
at the same time need a plane each. One-shot and two-shot launches each have a region of it to themselves, since a packet
is told from older ones of its own regime only. A rank alone exchanges nothing, and its plane takes no room.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

import torch

from .links import nvlink_unmet
from .module import Config, load

# How long a rank waits for a peer before it stops its process. Longer than the longest pause of a healthy rank: on a cold
# cache SGLang has one rank compile DeepGEMM kernels inside a forward, which takes 10 to 20 minutes by its own account.
TIMEOUT_S = 1800.0

# One-shot launches may send this much more than two-shot ones would: what the link carries (381 GB/s) during the second hop
# that they save, about 1.0 us by SGLang's kernel on two H200s (benchmark/results/boundary_h200.json, two-shot less one-shot up
# to 16 tokens). With more GPUs not measured.
HOP_BYTES = 384 * 1024
UNLIMITED = 2**31 - 1
ALIGNMENT = 256  # as cudaMalloc's own


class PlaneUnavailable(RuntimeError):
    """Some rank could not set up its part of the plane; raised on every rank."""


def one_shot_tokens(hidden: int, world_size: int) -> int:
    """Up to how many tokens every rank sends its part to every other one; beyond, one rank reduces a token and sends the sum.

    The former is ``world_size - 1`` rows a token and rank, the latter ``2 (world_size - 1) / world_size``: the same at two
    ranks, and nothing at one. A row's packets have 2 bytes an element.
    """
    more = 2 * hidden * (world_size - 1) * (world_size - 2)  # bytes a token, times world_size
    return HOP_BYTES * world_size // more if more else UNLIMITED


class Region(NamedTuple):
    """A part of a plane for the launches of one regime: ``[world_size]`` int64 addresses on the host, and its rows."""

    pointers: torch.Tensor
    max_tokens: int


@dataclass
class ExchangePlane:
    """One rank's view of a plane for ``max_tokens`` rows.

    Attributes:
        config: the kernel configuration it was set up with; another ``top_k`` or dtype may use the plane too.
        multiprocessors: the fewest of any rank's GPU, so that all ranks lay their launches out alike.
        regions: for one-shot and for two-shot launches, each rank's as this process maps it.
    """

    config: Config
    rank: int
    max_tokens: int
    multiprocessors: int
    regions: Tuple[Region, Region]
    timeout_s: float = TIMEOUT_S
    part: Optional["_Part"] = None
    group: Any = None

    @classmethod
    def create(
        cls, group: Any, config: Config, max_tokens: int, timeout_s: float = TIMEOUT_S, rows: Optional[Tuple[int, int]] = None
    ) -> "ExchangePlane":
        """Set up the plane on all ranks of ``group`` together (a torch.distributed group that moves host objects).

        Collective: on every rank, or on none. Not while a CUDA graph is being captured.

        Args:
            rows: tokens that one-shot and two-shot launches may have; by default what ``choose_launch`` needs.

        Raises:
            PlaneUnavailable: on all ranks, where one of them could not compile, allocate or map, or has no NVLink to a
                peer; names rank and cause.
        """
        import torch.distributed as dist

        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        if rows is None:
            one_shot = one_shot_tokens(config.hidden, config.world_size)
            rows = min(one_shot, max_tokens), max_tokens if one_shot < max_tokens else 0
        own, refusal = _attempt(lambda: _Part.allocate(config, rows))
        offers = _all_gather((own and own.offer, refusal), group, world_size)
        pointers = None
        if not any(refusal for _, refusal in offers):
            pointers, refusal = _attempt(lambda: own.map_peers([offer for offer, _ in offers], rank))
        # A second round: a peer may have failed to map what this rank offered.
        refusals = _all_gather(refusal, group, world_size)
        if any(refusals):
            _release(own, group, world_size)
            causes = "; ".join(f"rank {i}: {cause}" for i, cause in enumerate(refusals) if cause)
            raise PlaneUnavailable(f"the exchange plane could not be set up ({causes})")
        multiprocessors = min(offer.multiprocessors for offer, _ in offers)
        return cls(config, rank, max_tokens, multiprocessors, regions_at(pointers, own.sizes, rows), timeout_s, own, group)

    def close(self) -> None:
        """Give the plane's memory back. Collective; every rank must have stopped using the plane."""
        part, self.part = self.part, None
        if part:
            _release(part, self.group, self.config.world_size)


def region_sizes(module: Any, rows: Tuple[int, int]) -> List[int]:
    """Bytes of the one-shot and of the two-shot region; one without rows has none."""
    return [-(-module.plane_bytes(count) // ALIGNMENT) * ALIGNMENT if count else 0 for count in rows]


def regions_at(pointers: List[int], sizes: List[int], rows: Tuple[int, int]) -> Tuple[Region, Region]:
    """The regions of a plane that each rank has at one of ``pointers``, the two-shot one behind the other."""
    starts = torch.tensor(pointers, dtype=torch.int64, device="cpu")
    return Region(starts, rows[0]), Region(starts + sizes[0], rows[1])


class _Offer(NamedTuple):
    handle: bytes
    multiprocessors: int
    uuid: str


@dataclass
class _Part:
    """This rank's memory, and what it mapped of its peers'."""

    module: Any
    pointer: int
    sizes: List[int]
    offer: _Offer
    mapped: List[int] = field(default_factory=list)

    @classmethod
    def allocate(cls, config: Config, rows: Tuple[int, int]) -> "_Part":
        module = load(config)
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        sizes = region_sizes(module, rows)
        pointer = module.plane_allocate(sum(sizes))
        try:
            # Without peers nobody maps it, and a machine on which nobody could will do.
            handle = bytes(module.plane_export(pointer)) if config.world_size > 1 else b""
        except Exception:
            module.plane_free(pointer)
            raise
        return cls(module, pointer, sizes, _Offer(handle, gpu.multi_processor_count, f"GPU-{gpu.uuid}"))

    def map_peers(self, offers: List[_Offer], rank: int) -> List[int]:
        pointers = []
        for peer, offer in enumerate(offers):
            if peer != rank:
                unmet = nvlink_unmet(self.offer.uuid, offer.uuid)
                if unmet:
                    raise RuntimeError(unmet)
                self.mapped.append(self.module.plane_open(offer.handle))
            pointers.append(self.pointer if peer == rank else self.mapped[-1])
        return pointers

    def unmap_peers(self) -> None:
        while self.mapped:
            self.module.plane_close(self.mapped.pop())

    def free(self) -> None:
        self.module.plane_free(self.pointer)


def _release(part: Optional[_Part], group: Any, world_size: int) -> None:
    """Unmap, and free once every rank has: memory that a peer still maps must not go. What fails is left to the process's end."""
    if part:
        _attempt(part.unmap_peers)
    _all_gather(None, group, world_size)
    if part:
        _attempt(part.free)


def _attempt(step: Callable[[], Any]) -> Tuple[Any, str]:
    """The step's result, or why it failed: whatever it is, the peers must hear of it rather than wait."""
    try:
        return step(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"[:500]


def _all_gather(value: Any, group: Any, world_size: int) -> List[Any]:
    import torch.distributed as dist

    values: List[Any] = [None] * world_size
    dist.all_gather_object(values, value, group=group)
    return values
