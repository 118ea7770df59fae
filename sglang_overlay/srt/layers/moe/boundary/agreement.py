"""What the ranks of the tensor-parallel group tell each other while a model is built.

Collective: every rank calls these in the same order. Over the CPU group, as long as nothing serves; on the host, while the
default device of the model that is being built is its GPU.
"""

from __future__ import annotations

from typing import Any, List

import torch


def all_ranks(value: Any) -> List[Any]:
    """``value`` of every rank, in rank order; picklable."""
    import torch.distributed as dist

    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return [value]
    values: List[Any] = [None] * group.world_size
    with torch.device("cpu"):
        dist.all_gather_object(values, value, group=group.cpu_group)
    return values


def first_reason(reason: str) -> str:
    """The first rank's reason that is not empty, so that all ranks have the same; names the rank where not all gave it."""
    reasons = all_ranks(reason)
    rank = next((rank for rank, given in enumerate(reasons) if given), None)
    if rank is None:
        return ""
    return reasons[rank] if len(set(reasons)) == 1 else f"{reasons[rank]} (rank {rank})"


def spans_nodes() -> bool:
    """Whether the group's ranks share no memory, which is how SGLang tells nodes apart."""
    from sglang.srt.distributed import get_tp_group
    from sglang.srt.distributed.parallel_state import in_the_same_node_as

    group = get_tp_group()
    with torch.device("cpu"):
        return group.world_size > 1 and not all(in_the_same_node_as(group.cpu_group, source_rank=0))
