"""What the layer boundary runs on GPUs, in torch on gloo ranks: the fused kernel's contract, FlashInfer's pattern 7, their memory.

``install`` puts them where the overlay finds the real ones. Nothing here shows that a GPU computes the same.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any, Optional

import torch
import torch.distributed as dist

PLANE_ROWS = 8


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, eps: float, weight_bias: float) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (gamma.float() + weight_bias)


def of_all_ranks(own: torch.Tensor, group: Any) -> list:
    """This tensor of each rank, in rank order."""
    if not dist.is_initialized():
        return [own]
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own.contiguous(), group=group)
    return parts


# ---------------------------------------------------------------------------------------------- the fused kernel


@dataclass
class Plane:
    config: Any
    rank: int
    max_tokens: int
    group: Any


def fused_boundary(plane, output, residual, gamma, eps, weight_bias=0.0):
    """Finalize, sum over ranks in rank order and residual in fp32; each result rounded once, the norm from the unrounded sum."""
    from sglang.sglang_overlay.srt.layers.moe.deferred_output import finalize_reference

    assert 0 < output.num_tokens <= plane.max_tokens
    own = finalize_reference(replace(output, gemm2_out=output.gemm2_out.float()))
    total = sum(of_all_ranks(own, plane.group), torch.zeros_like(own)) + residual.float()
    return rms_norm(total, gamma, eps, weight_bias).to(residual.dtype), total.to(residual.dtype)


def create_plane(made: list, failing_rank: Optional[int]):
    """A stand-in for ``ExchangePlane.create``: fails on all ranks where it fails on one."""

    def create(cls, group, config, max_tokens):
        from sglang.sglang_overlay.srt.layers.moe.boundary.plane import PlaneUnavailable

        rank = dist.get_rank(group)
        refusals = [None] * dist.get_world_size(group)
        dist.all_gather_object(refusals, "no peer access" if rank == failing_rank else "", group=group)
        causes = [f"rank {peer}: {cause}" for peer, cause in enumerate(refusals) if cause]
        if causes:
            raise PlaneUnavailable(f"the exchange plane could not be set up ({'; '.join(causes)})")
        made.append(Plane(config, rank, max_tokens, group))
        return made[-1]

    return classmethod(create)


# ------------------------------------------------------------------------------------------------- FlashInfer


class Workspace:
    """FlashInfer's workspace object, as far as it is asked."""

    def __init__(self, group: Any, max_token_num: int, hidden_dim: int) -> None:
        self.group, self.max_token_num, self.hidden_dim = group, max_token_num, hidden_dim

    def is_buffer_size_sufficient(self, tp_size, num_tokens, hidden_dim, dtype, use_oneshot=None) -> bool:
        return num_tokens * hidden_dim <= self.max_token_num * self.hidden_dim


def create_allreduce_fusion_workspace(
    backend="auto", world_size=None, rank=None, max_token_num=None, hidden_dim=None, dtype=None, gpus_per_node=None,
    comm_backend=None, force_oneshot_support=False, group=None,
):
    assert backend == "trtllm" and dtype in (torch.bfloat16, torch.float16)
    return Workspace(group, max_token_num, hidden_dim)


def allreduce_fusion(
    input, workspace, pattern, launch_with_pdl=False, trigger_completion_at_end=True, output=None, residual_out=None,
    norm_out=None, quant_out=None, scale_out=None, residual_in=None, rms_gamma=None, rms_eps=1e-6, scale_factor=None,
    layout_code=None, use_oneshot=None, fp32_acc=False, moe_reduction_device_num_experts=None,
    moe_reduction_scale_input=None, moe_reduction_active_experts_token_input=None, moe_reduction_token_input=None,
    expanded_idx_to_permuted_idx=None, expert_scale_factor=None, shared_expert_output=None, block_quant_group_size=None,
    weight_bias=0.0,
):
    """Pattern 7: accumulates in the activations' dtype; skips -1 and nothing else; reads its buffers by shape and stride of rows H."""
    assert pattern == AllReduceFusionPattern.kMoEFinalizeARResidualRMSNorm
    tokens, hidden = residual_in.shape
    top_k = expanded_idx_to_permuted_idx.shape[-1]
    rows = input.as_strided((input.shape[0], hidden), (hidden, 1))
    index, scales = (buffer.contiguous().view(-1) for buffer in (expanded_idx_to_permuted_idx, expert_scale_factor))
    # Whatever the buffer holds is read as the activations' dtype.
    scales = scales.view(residual_in.dtype)
    total = torch.zeros_like(residual_in)
    for token in range(tokens):
        for k in range(top_k):
            row = int(index[token * top_k + k])
            if row != -1:
                assert 0 <= row < rows.shape[0], "read out of bounds"
                total[token] += (rows[row].float() * scales[token * top_k + k].float()).to(total.dtype)
    if shared_expert_output is not None:
        total = total + shared_expert_output
    parts = of_all_ranks(total, workspace.group)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    residual_out.copy_(total + residual_in)
    norm_out.copy_(rms_norm(residual_out, rms_gamma, rms_eps, weight_bias))
    return norm_out


class AllReduceFusionPattern:
    kMoEFinalizeARResidualRMSNorm = 7


def flashinfer_modules() -> dict:
    """Modules by name, for ``sys.modules``."""
    comm, package = ModuleType("flashinfer.comm"), ModuleType("flashinfer")
    for stand_in in (allreduce_fusion, create_allreduce_fusion_workspace, AllReduceFusionPattern):
        setattr(comm, stand_in.__name__, stand_in)
    package.comm = comm
    return {"flashinfer": package, "flashinfer.comm": comm}


def fused_all_reduce_norm(
    input_tensor, residual, weight, eps=1e-6, max_token_num=2048, use_oneshot=None, trigger_completion_at_end=False,
    fp32_acc=True, use_attn_tp_group=True,
):
    """SGLang's ``flashinfer_allreduce_residual_rmsnorm``."""
    from sglang.srt.distributed import get_tp_group

    parts = of_all_ranks(input_tensor.float(), get_tp_group().device_group)
    total = sum(parts, torch.zeros_like(parts[0])) + residual.float()
    return rms_norm(total, weight, eps, 0.0).to(residual.dtype), total.to(residual.dtype)


# --------------------------------------------------------------------------- SGLang's own kernel (0.5.23, CuTeDSL)


class KernelWorkspace:
    """FlashInfer's CuTeDSL workspace as SGLang holds it: refuses what FlashInfer 0.7.2 refuses, computes in fp32.

    ``taken`` lists what it finalized, by number of tokens.
    """

    def __init__(self, hidden: int, top_k: int, eps: float, max_m: int, group: Any) -> None:
        self.hidden, self.top_k, self.eps, self.max_m, self.group = hidden, top_k, eps, max_m, group
        self.taken = []

    def supports(self, m: int) -> bool:
        return 1 <= m <= self.max_m

    def moe_finalize_all_reduce_rms_norm(
        self, *, routed_output, expert_weights, permuted_indices, gated_shared_output, residual, gamma
    ):
        tokens = permuted_indices.shape[0]
        self._check("input", routed_output, (routed_output.shape[0], self.hidden))
        self._check("expert_scale_factor", expert_weights, (tokens, self.top_k))
        self._check("expanded_idx_to_permuted_idx", permuted_indices, (tokens, self.top_k), torch.int32)
        self._check("shared_expert_output", gated_shared_output, (tokens, self.hidden))
        self.taken.append(tokens)
        is_here = permuted_indices != -1
        assert bool((permuted_indices[is_here] >= 0).all()), "read out of bounds"
        rows = routed_output[permuted_indices.clamp_min(0).long()].float()
        weighted = torch.where(is_here[..., None], rows * expert_weights.float()[..., None], 0.0)
        return self._finish(weighted.sum(1) + gated_shared_output.float(), residual, gamma)

    def all_reduce_residual_rms_norm(self, *, local_contribution, residual, gamma):
        return self._finish(local_contribution.float(), residual, gamma)

    def _finish(self, own, residual, gamma):
        total = sum(of_all_ranks(own, self.group)) + residual.float()
        norm_out, residual_out = (torch.full_like(residual, float("nan")) for _ in range(2))
        norm_out.copy_(rms_norm(total, gamma, self.eps, 0.0))
        return norm_out, residual_out.copy_(total)

    def _check(self, name, tensor, shape, dtype=torch.bfloat16):
        if tensor is None or tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous {list(shape)} {dtype}, got {tensor if tensor is None else tensor.dtype}")


# ------------------------------------------------------------------------------------------------------ all of it


def install(failing_rank: Optional[int] = None) -> SimpleNamespace:
    """Take the place of the GPU in this process; ``planes`` lists the planes that are made."""
    from sglang.sglang_overlay.srt.layers.moe.boundary import kernel, model, plane
    from sglang.srt.layers import flashinfer_comm_fusion as stock

    made = SimpleNamespace(planes=[])
    plane.ExchangePlane.create = create_plane(made.planes, failing_rank)
    kernel.fused_boundary = fused_boundary
    model._machine_unmet = model._compiler_unmet = lambda: ""
    model.FUSED_MAX_TOKENS = PLANE_ROWS
    stock._preflight_check_workspace_memory = lambda *args: all(votes(dist.get_rank(args[-1]) != failing_rank, args[-1]))
    stock.flashinfer_allreduce_residual_rmsnorm = fused_all_reduce_norm
    sys.modules.update(flashinfer_modules())
    return made


def votes(own: bool, group: Any) -> list:
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, own, group=group)
    return values
