"""In place of ``flashinfer.moe_ep`` 0.7.4: the names the adapter uses, the real parameters, and the refusals of the real kernel, in torch.

Parameters are compared with the real ones in ``test_megamoe_signatures.py``. Computes what ``mxfp4_moe.moe`` defines. Ranks meet over
their process group, as the real ones do in memory they share: a launch in which a rank is missing, or is in a workspace of another capacity, does
not go through. Weights keep their bytes; the real ones are laid out anew.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field
from typing import Any, Optional

import mxfp4_moe
import torch
import torch.distributed as dist

capturing = False  # as while a CUDA graph is captured: nothing may be made or compiled


def install(setitem=sys.modules.__setitem__) -> None:
    """Make this the module ``flashinfer.moe_ep``."""
    package = types.ModuleType("flashinfer")
    package.moe_ep = sys.modules[__name__]
    setitem("flashinfer", package)
    setitem("flashinfer.moe_ep", sys.modules[__name__])


class MoEEpConfigError(ValueError):
    pass


@dataclass(frozen=True)
class BootstrapConfig:
    world_size: int
    rank: int
    stream: int = 0
    auto_bootstrap: bool = True
    device: Optional[int] = field(default=None, kw_only=True)
    nccl_comm: Optional[int] = None
    process_group: Any = None
    tcp_store: Any = None


@dataclass(frozen=True)
class FleetParams:
    num_experts: int
    max_tokens_per_rank: int
    token_hidden_size: int
    dtype_bytes: int = 2
    algorithm: Any = None
    layout: Any = None
    tuning_live_tokens: Optional[int] = None


@dataclass(frozen=True)
class MegaConfig:
    megakernel: object
    quantize_input: bool = True
    preprocess_weights: bool = True
    transformed_weights: Optional[object] = None


@dataclass
class Sm90_Fp8_Mxfp4_Bf16_PullCutedsl_MegaMoeConfig:
    intermediate_size: int
    top_k: int
    kernel_name: str = "sm90_fp8_mxfp4_bf16_pull_cutedsl"
    kind: str = "fp8_e4m3"
    fp8_scale_mode: str = "mxfp4_hybrid"
    fp8_accum_mode: str = "1xacc"
    humming_max_range: int = 11
    preprocess_expert_chunk_size: int = 4
    knobs: Any = None
    swap_ab: Any = None
    pingpong: Any = None
    mma_tiler_mnk: Any = None
    cluster_shape_mnk: Any = None
    load_balance_mode: Any = None
    gate_up_clamp: Optional[float] = 10.0
    activation_clamp: Optional[float] = None
    fast_math: bool = True
    enable_in_kernel_fc2_reduce: bool = False
    token_back_mode: Any = None
    dedup_dispatch: Any = None
    grouped_token_back: bool = False
    combine_format: str = "bf16"
    active_dispatch_warps: Any = None
    fc1_store_offload: Any = None
    fc1_early_done_publish: Any = None
    fold_producer_warps: Any = None
    compact_pull_buffer: bool = False
    routing_profile: str = field(default="", kw_only=True)


@dataclass
class PrequantizedMoEWeights:
    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor
    w2_scale: torch.Tensor


@dataclass
class MoEEpTensors:
    hidden_states: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    scales: Any = None
    fc1_alpha: Any = None
    fc2_alpha: Any = None
    fc1_norm_const: Any = None
    fc1_activation_per_token_scale: Any = None
    recv_count: Any = None
    num_tokens_per_expert: Any = None
    output: Any = None
    runtime_max_tokens_per_rank: Optional[int] = None


def preprocess_sm90_pull_mxfp4_mega_weights(
    weights, *, intermediate_size: int, hidden_size: int, humming_max_range: int = 11, expert_chunk_size: int = 4
) -> tuple:
    experts, wide = weights.w13.shape[0], 2 * intermediate_size
    expected = {
        "w13": (experts, wide, hidden_size // 2), "w13_scale": (experts, wide, hidden_size // 32),
        "w2": (experts, hidden_size, intermediate_size // 2), "w2_scale": (experts, hidden_size, intermediate_size // 32),
    }
    if hidden_size % 128 or intermediate_size % 128:
        raise MoEEpConfigError("sizes")
    for name, shape in expected.items():
        tensor = getattr(weights, name)
        if tensor.dtype != torch.uint8 or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise MoEEpConfigError(f"{name}: {tensor.dtype} {tuple(tensor.shape)}")
    return tuple(
        (codes.clone().transpose(1, 2), scale.clone(), torch.ones(1), torch.ones(experts))
        for codes, scale in ((weights.w13, weights.w13_scale), (weights.w2, weights.w2_scale))
    )


class Workspace:
    def __init__(self, capacity: int) -> None:
        self.capacity, self.compiled = capacity, False


class MoEEpMegaLayer:
    made: list = []

    def __init__(self, bootstrap, fleet_params, weights, backend) -> None:
        assert not capturing and weights is None and not backend.preprocess_weights and backend.quantize_input
        if bootstrap.process_group is not None:
            assert (dist.get_world_size(bootstrap.process_group), dist.get_rank(bootstrap.process_group)) == (bootstrap.world_size, bootstrap.rank)
        self.bootstrap, self.fleet, self.config = bootstrap, fleet_params, backend.megakernel
        self.transformed = backend.transformed_weights
        self.launched, self.workspaces = [], {}
        MoEEpMegaLayer.made.append(self)

    def create_workspace(self, max_tokens_per_rank: int, *, live_tokens=None, knobs=None) -> Workspace:
        if capturing or max_tokens_per_rank in self.workspaces:
            raise MoEEpConfigError("workspace")
        self.workspaces[max_tokens_per_rank] = Workspace(max_tokens_per_rank)
        return self.workspaces[max_tokens_per_rank]

    def warmup(self, t=None, *, workspace=None) -> None:
        if capturing:
            raise MoEEpConfigError("warmup")
        self._check(t, workspace)
        self._meet((workspace.capacity,), workspace)
        workspace.compiled = True

    def forward(self, t, *, workspace=None, return_workspace_view: bool = False) -> torch.Tensor:
        if not workspace.compiled:
            raise MoEEpConfigError("not warmed up")
        return self._run(t, workspace)

    def _run(self, t, workspace) -> torch.Tensor:
        self._check(t, workspace)
        tokens = t.hidden_states.shape[0]
        self.launched.append((workspace.capacity, tokens))
        group, ranks = self.bootstrap.process_group, self.bootstrap.world_size
        inputs = self._meet((workspace.capacity, t.hidden_states, t.topk_ids, t.topk_weights), workspace)
        own = [mxfp4_moe.routed_rows(x, ids, w, self._experts(), self.config.gate_up_clamp, first_expert=self._first_expert()) for _, x, ids, w in inputs]
        rows = sum(parts[self.bootstrap.rank] for parts in gathered(own, group, ranks))
        t.output.copy_(mxfp4_moe.combined(rows))
        return t.output

    def _meet(self, value: tuple, workspace) -> list:
        values = gathered(value, self.bootstrap.process_group, self.bootstrap.world_size)
        assert {capacity for capacity, *_ in values} == {workspace.capacity}, "ranks in workspaces of different capacities"
        return values

    def _experts(self):
        (w13, w13_scale, *_), (w2, w2_scale, *_) = self.transformed
        return mxfp4_moe.Experts(w13.transpose(1, 2), w2.transpose(1, 2), w13_scale, w2_scale)

    def _first_expert(self) -> int:
        return self.fleet.num_experts // self.bootstrap.world_size * self.bootstrap.rank

    def _check(self, t, workspace) -> None:
        tokens = t.hidden_states.shape[0]
        wanted = {
            "hidden_states": (torch.bfloat16, (tokens, self.fleet.token_hidden_size)),
            "topk_ids": (torch.int64, (tokens, self.config.top_k)),
            "topk_weights": (torch.float32, (tokens, self.config.top_k)),
            "output": (torch.bfloat16, (tokens, self.fleet.token_hidden_size)),
        }
        for name, (dtype, shape) in wanted.items():
            tensor = getattr(t, name)
            if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
                raise MoEEpConfigError(f"{name}: {tensor.dtype} {tuple(tensor.shape)}")
        if tokens > workspace.capacity:
            raise MoEEpConfigError("over capacity")


def gathered(value, group, ranks: int) -> list:
    if ranks == 1:
        return [value]
    values = [None] * ranks
    dist.all_gather_object(values, value, group=group)
    return values
