"""At start-up: whether ``--moe-a2a-backend flashinfer_megamoe`` may run MXFP4 experts on Hopper, and if not, why."""

from __future__ import annotations

import os
from typing import Any, Callable, Iterator, Optional, Tuple

import torch

from ..environ import settings
from ..layers.moe.flashinfer_megamoe import refuse, require_kernel, require_nvshmem

# What a model's configuration calls the number of its routed experts.
EXPERT_COUNTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")


def routes_own_tokens(stock: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether each rank routes tokens of its own: ``stock``'s answer (data-parallel attention), and with the flag also one rank alone."""
    if not settings().mxfp4_megamoe:
        return stock
    return lambda args: stock(args) or args.tp_size == 1


def megamoe_has_gpu(stock: Callable[[], bool], server_args: Any) -> bool:
    """Whether the mega kernels have the GPU they are for: ``stock``'s answer, unless the flag asks for Hopper's kernel.

    Sets, for the server's processes, what FlashInfer and NVSHMEM read from the environment.

    Raises:
        MegaMoeRefused: the flag is on, and something is in the way.
    """
    if not settings().mxfp4_megamoe:
        return stock()
    from sglang.srt.arg_groups.overrides import resolved_view

    args = resolved_view(server_args)
    check_platform()
    check_model(model_of(server_args), args.tp_size)
    check_options(args)
    require_kernel()
    require_nvshmem(args.tp_size)
    set_environment(args.tp_size)
    return True


def model_of(server_args: Any) -> Any:
    from sglang.srt.arg_groups.model_override_base import model_config_of

    return model_config_of(server_args)


def check_platform() -> None:
    """Raise MegaMoeRefused on any GPU but SM90."""
    from sglang.srt.runtime_context import get_platform
    from sglang.srt.utils.common import get_device_sm

    if not get_platform().is_sm90:
        refuse(f"the kernel is for SM90 (Hopper), this GPU is SM{get_device_sm() or ' unknown'}", "On SM100 unset the flag, on others choose another --moe-a2a-backend")


def check_model(model: Any, ranks: int) -> None:
    """Raise MegaMoeRefused unless the experts are MXFP4 and divide among the ranks, and the model runs in bf16, the kernel's output."""
    if not model.is_fp4_experts:
        refuse("the checkpoint's experts are not MXFP4", "Unset the flag, and choose another --moe-a2a-backend")
    if model.dtype != torch.bfloat16:
        refuse(f"the kernel's output is bf16, the model runs in {str(model.dtype).removeprefix('torch.')}", "Add --dtype bfloat16")
    experts = number_of_experts(model.hf_text_config)
    if experts and experts % ranks:
        refuse(f"{experts} experts do not divide among {ranks} ranks", "Choose a --tp-size that divides the number of experts")


def number_of_experts(config: Any) -> Optional[int]:
    found = (getattr(config, name, None) for name in EXPERT_COUNTS)
    return next((count for count in found if count), None)


def check_options(args: Any) -> None:
    """Raise MegaMoeRefused for the first option that the kernel's routing or its shared workspaces exclude."""
    for given, option, reason in _excluded(args):
        if given:
            refuse(f"{option} is set, but {reason}", f"Leave {option} out")


def _excluded(args: Any) -> Iterator[Tuple[bool, str, str]]:
    numbered = "the kernel finds an expert's rank by its number, so each expert is where the checkpoint's order puts it"
    yield args.enable_eplb, "--enable-eplb", numbered
    yield args.ep_num_redundant_experts > 0, "--ep-num-redundant-experts", numbered
    yield args.init_expert_location != "trivial", "--init-expert-location", numbered
    yield bool(args.elastic_ep_backend), "--elastic-ep-backend", numbered
    shared = "layers share workspaces, in which one batch at a time can be"
    yield args.enable_two_batch_overlap, "--enable-two-batch-overlap", shared
    yield args.enable_single_batch_overlap, "--enable-single-batch-overlap", shared
    yield args.enable_pdmux, "--enable-pdmux", shared
    yield args.nnodes > 1, "--nnodes", "ranks read each other's memory, within one node only"


def set_environment(ranks: int) -> None:
    """One rank does without NVSHMEM; several use it without the link's multicast. What the user has set stays.

    Raises:
        MegaMoeRefused: ``MEGA_NO_DIST`` is set, which makes each of several ranks compute as if it were alone.
    """
    if ranks == 1:
        os.environ.setdefault("MEGA_NO_DIST", "1")
        return
    if os.environ.get("MEGA_NO_DIST", "0") != "0":
        refuse(f"MEGA_NO_DIST is set, which is for one rank, and there are {ranks}", "Unset MEGA_NO_DIST")
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
