"""Ranks of a tiny DeepSeek-V3 in a patched SGLang tree, on CPU and gloo, with its attention stubbed out.

Run by ``test_boundary.py`` as ``boundary_worker.py RUNS.json``, a list of runs, each a list of the specs of its ranks.
Each rank writes what it saw to ``spec["out"]`` as a torch file, its output to ``spec["log"]``. Everything but the attention is SGLang's own:
layers, what joins them, process groups. Where the bases differ in that, ``taker``, ``take`` and the like know it. SGLang is imported once, and each rank forked: importing takes longer than all else.
With ``spec["stand_ins"]`` what a boundary runs on GPUs is stood in for by torch (``boundary_stand_ins.py``), with ``spec["cutedsl"]``
SGLang's own kernel there, which only some bases have.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import boundary_stand_ins
import torch
from cpu_serving import forked, ranks

HIDDEN, TOKENS = 256, 5


def main(runs: list) -> None:
    torch.set_num_threads(1)
    import_sglang()
    for specs in runs:
        pids = [forked.start(run_rank, spec) for spec in specs]
        for pid in pids:
            os.waitpid(pid, 0)


def import_sglang() -> None:
    import sglang.srt.model_loader.loader
    import sglang.srt.models.deepseek_v2
    import sglang.srt.server_args  # noqa: F401
    from sglang.srt.models.registry import ModelRegistry  # noqa: F401  imports every model


def run_rank(spec: dict) -> None:
    """Go through the scenarios; the output file exists only if all got through."""
    os.environ.update(spec["flags"])
    if spec["stand_ins"]:
        spec["made"] = boundary_stand_ins.install(spec.get("failing_rank"))
    if spec.get("cutedsl"):
        choose_cutedsl(spec["cutedsl"])
    try:
        model = build_model(spec)
    except (RuntimeError, ValueError) as error:
        if not spec.get("refused"):
            raise
        torch.save({"refused": str(error)}, spec["out"])
        return
    stub_attention(model)
    scenarios = {name: globals()[f"scenario_{name}"] for name in spec["scenarios"]}
    torch.save({name: run(model, spec) for name, run in scenarios.items()}, spec["out"])


def build_model(spec: dict) -> torch.nn.Module:
    """The model of ``spec["checkpoint"]`` with its weights, in this rank's process groups."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.layernorm_sp import initialize_layernorm_sp
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.moe.token_dispatcher import standard
    from sglang.srt.model_loader.loader import get_model_loader
    from sglang.srt.server_args import ServerArgs

    sizes = spec["sizes"]
    args = ServerArgs(
        model_path=spec["checkpoint"],
        device="cpu",
        dtype=spec["dtype"],
        attention_backend="triton",
        disable_cuda_graph=True,
        skip_tokenizer_init=True,
        sampling_backend="pytorch",
        grammar_backend="none",
        tp_size=sizes["tp"],
        pp_size=sizes["pp"],
        ep_size=sizes["ep"],
    )
    ranks.publish(args, spec["rank"])
    # The map of this rank's experts goes to an accelerator, which is not there.
    standard.get_device = lambda: "cpu"
    initialize_moe_config()
    config = ModelConfig(model_path=spec["checkpoint"], dtype=spec["dtype"])
    ranks.join_groups(args, spec["init_method"], spec["rank"])
    initialize_layernorm_sp(model_config=config)
    loader = get_model_loader(LoadConfig(), config)
    return loader.load_model(model_config=config, device_config=DeviceConfig("cpu")).model


def choose_cutedsl(of_sglang: str) -> None:
    """As ``--flashinfer-allreduce-fusion-backend cutedsl`` on CUDA; with "stock" SGLang also defers by its own means."""
    from sglang.srt.layers.moe.fused_moe_triton import layer
    from sglang.srt.models import deepseek_v2

    deepseek_v2._use_mnnvl_cutedsl_fusion = lambda: True
    if of_sglang == "stock":
        layer.FusedMoE.supports_deferred_finalize = property(lambda experts: True, lambda experts, value: None)


def kernel_workspace(model, top_k: int, max_m: int = 64):
    """SGLang's handle of its kernel, with the stand-in for FlashInfer's workspace in it."""
    from sglang.srt.distributed import get_tp_group

    service, eps = taker(stage(model)[-1]).service, stage(model)[-1].input_layernorm.variance_epsilon
    service._workspace = boundary_stand_ins.KernelWorkspace(HIDDEN, top_k, eps, max_m, get_tp_group().device_group)
    service.max_m = max_m
    return service._workspace


class StubAttention(torch.nn.Module):
    """Stands for attention: hands its input through, divided so that the tensor-parallel sum restores it."""

    def __init__(self, tp_size: int) -> None:
        super().__init__()
        self.tp_size = tp_size

    def maybe_use_decode_attn_tp(self, forward_batch):
        return nullcontext()

    def forward(self, hidden_states, **_):
        return hidden_states / self.tp_size


def stub_attention(model: torch.nn.Module) -> None:
    from sglang.srt.runtime_context import get_parallel

    for layer in stage(model):
        layer.self_attn = StubAttention(get_parallel().tp_size)
        owner = layer.attn_boundary.plan if has_layer_boundary() else layer.layer_communicator
        owner.qkv_latent_func = None


def has_layer_boundary() -> bool:
    from sglang.sglang_overlay.srt.upstream import has_layer_boundary

    return has_layer_boundary()


def seams():
    """The overlay's module with the seams of this base's decoder layers."""
    from sglang.sglang_overlay.srt.models import deepseek_v2

    if not has_layer_boundary():
        return deepseek_v2
    from sglang.sglang_overlay.srt.layers import layer_boundary

    return layer_boundary


def taker(layer):
    """What takes a bundle for a layer."""
    return layer.attn_boundary.fusions if has_layer_boundary() else layer.layer_communicator


def take(layer, bundle, residual, capture=None, handed=None):
    """``(norm_out, residual_out)`` of a layer that is handed a bundle, as ``handed`` if that is given."""
    batch = forward_batch(bundle.num_tokens)
    if not has_layer_boundary():
        return layer.layer_communicator.prepare_attn_and_capture_last_layer_outputs(bundle, residual, batch, capture)
    from sglang.srt.layers.layer_boundary.residual.add_norm import PLAIN_ADD
    from sglang.srt.layers.layer_boundary.residual.stream import ResidualStream

    batch.residual_stream = ResidualStream(residual)
    handed = batch.residual_stream.record(handed or seams()._handoff()(bundle), PLAIN_ADD)
    collector = None if capture is None else SimpleNamespace(capture=lambda value, **_: capture.append(value.clone()))
    return layer.attn_boundary.prepare(handed, batch, capture_gathered=collector), batch.residual_stream.residual


def decides_to_carry(layer, batch, hidden_states) -> bool:
    if not has_layer_boundary():
        return seams().fuse_or_carry(layer, batch, hidden_states)
    return layer.ffn_boundary.fusions.can_defer_finalize(layer.ffn_boundary.plan, batch)


def stage(model):
    return model.layers[model.start_layer : model.end_layer]


def moe_layers(model):
    from sglang.sglang_overlay.srt.models.deepseek_v2 import is_moe

    return [layer for layer in stage(model) if is_moe(layer.mlp)]


def forward_batch(num_tokens: int, **fields):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch = dict(
        forward_mode=ForwardMode.DECODE,
        input_ids=torch.arange(num_tokens) % 1024,
        can_run_tbo=False,
        attn_cp_metadata=None,
        dp_padding_mode=None,
        residual_stream=None,
    )
    return SimpleNamespace(**{**batch, **fields})


def run_stage(model, num_tokens: int = TOKENS, capture=(), **fields):
    """One forward of this pipeline stage; fixed inputs, the same on every tensor-parallel rank."""
    from sglang.srt.model_executor.forward_batch_info import PPProxyTensors

    generator = torch.Generator().manual_seed(7)
    dtype = model.layers[model.start_layer].input_layernorm.weight.dtype
    hidden, residual = (torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype) for _ in range(2))
    proxy = None if model.pp_group.is_first_rank else PPProxyTensors({"hidden_states": hidden, "residual": residual})
    batch = forward_batch(num_tokens, **fields)
    model.layers_to_capture = list(capture)
    with torch.no_grad():
        out = model(batch.input_ids, torch.arange(num_tokens), batch, hidden, proxy)
    model.layers_to_capture = []
    return out.tensors if isinstance(out, PPProxyTensors) else out


def counted(call):
    """``(result, what the counters gained)`` of a call."""
    from sglang.sglang_overlay.srt.layers.moe.counters import COUNTERS

    for counter in (COUNTERS.deferred, COUNTERS.carried, COUNTERS.ways, COUNTERS.not_deferred):
        counter.clear()
    result = call()
    return result, COUNTERS.snapshot()


def without_deferral(model, call):
    """The result of ``call`` with every layer told not to defer, that is the stock path."""
    from sglang.sglang_overlay.srt.layers.moe.deferral import deferral_of

    deferrals = [deferral_of(layer.mlp) for layer in moe_layers(model)]
    for deferral in deferrals:
        deferral.reason = "switched off by the test"
    try:
        return call()
    finally:
        for deferral in deferrals:
            deferral.reason = ""


def compare(model, **kwargs):
    """A forward deferred and the same forward stock, with the deferred one's counters."""
    deferred, counters = counted(lambda: run_stage(model, **kwargs))
    return {"deferred": deferred, "stock": without_deferral(model, lambda: run_stage(model, **kwargs)), "counters": counters}


def scenario_forward(model, spec):
    compared = {num_tokens: compare(model, num_tokens=num_tokens) for num_tokens in (1, TOKENS)}
    if model.pp_group.world_size == 1:
        compared["without_experts"] = without_deferral(model, lambda: run_without_experts(model))
    return compared


def run_without_experts(model):
    for layer in moe_layers(model):
        layer.mlp.experts.forward = lambda hidden_states, topk_output, **_: torch.zeros_like(hidden_states)
    try:
        return run_stage(model)
    finally:
        for layer in moe_layers(model):
            del layer.mlp.experts.forward


def scenario_deferred_only(model, spec):
    return counted(lambda: run_stage(model))


def scenario_hybrid(model, spec):
    set_up = [layer.layer_id for layer in stage(model) if getattr(taker(layer), "moe_boundary", None)]
    return {"carried": carried_layers(model), "layers": counted(lambda: None)[1]["layers"], "set_up": set_up}


def carried_layers(model, num_tokens=TOKENS, **fields):
    """Ids of the layers that decide to hand a bundle on."""
    batch, hidden_states = forward_batch(num_tokens, **fields), torch.empty(num_tokens, HIDDEN)
    return [layer.layer_id for layer in moe_layers(model) if decides_to_carry(layer, batch, hidden_states)]


def scenario_decisions(model, spec):
    from sglang.srt.runtime_context import get_forward

    decided = {
        "plain": carried_layers(model),
        "two_batch_overlap": carried_layers(model, can_run_tbo=True),
        "idle": carried_layers(model, num_tokens=0),
        "over_budget": carried_layers(model, num_tokens=193),
    }
    with get_forward().scoped(attn_input_scattered=True):
        decided["scattered_input"] = carried_layers(model)
    return decided


def scenario_over_budget(model, spec):
    return compare(model, num_tokens=193)


def scenario_failed_forward(model, spec):
    """A forward that dies inside an MoE must not change the next one."""
    layer = moe_layers(model)[0]
    gate, layer.mlp.gate = layer.mlp.gate, None
    try:
        run_stage(model)
        died = False
    except (TypeError, AttributeError):
        died = True
    layer.mlp.gate = gate
    carried_layers(model, num_tokens=0)
    undecided_after = [layer.layer_id for layer in moe_layers(model) if layer.mlp.moe_deferral.carries_now]
    return {"died": died, "undecided_after": undecided_after, **compare(model)}


def scenario_wrapped_experts(model, spec):
    """As LoRA does once the model is built: the experts are wrapped in a module of another class, here one that doubles."""

    class Doubled(torch.nn.Module):
        def __init__(self, experts):
            super().__init__()
            self.experts, self.moe_runner_config = experts, experts.moe_runner_config
            self.quant_method = experts.quant_method

        def forward(self, *inputs, **kwargs):
            return 2 * self.experts(*inputs, **kwargs)

    plain = without_deferral(model, lambda: run_stage(model))
    moes = [layer.mlp for layer in moe_layers(model)]
    for moe in moes:
        moe.experts = Doubled(moe.experts)
    seen = compare(model)
    for moe in moes:
        moe.experts = moe.experts.experts
    return {**seen, "plain": plain}


def scenario_replaced_forward(model, spec):
    """As weight offloading does: the experts' forward is replaced on the instance; deferral must not go past it."""
    from sglang.sglang_overlay.srt.layers.moe.deferral import Deferral

    moe = moe_layers(model)[0].mlp
    moe.experts.forward = moe.experts.forward
    reason = Deferral.of(moe).reason
    del moe.experts.forward
    return reason


def scenario_declined(model, spec):
    """The layer was to hand on a bundle, and its MoE gives a partial tensor all the same."""
    from sglang.sglang_overlay.srt.models import deepseek_v2

    original = deepseek_v2.run_experts
    deepseek_v2.run_experts = lambda moe, hidden_states, topk_output, **extra: moe.experts(hidden_states, topk_output, **extra)
    try:
        return compare(model)
    finally:
        deepseek_v2.run_experts = original


def scenario_capture(model, spec):
    """Eagle3 auxiliary hidden states of every layer that can take a bundle."""
    captured = [layer.layer_id for layer in stage(model)[1:]]
    return compare(model, capture=captured)


def hand_over(model, value: float, residual: float, capture: bool = False):
    """Give the last layer a bundle of one expert whose rows are all ``value``."""
    from sglang.sglang_overlay.srt.layers.moe.deferred_output import DeferredMoeOutput

    layer = stage(model)[-1]
    dtype = layer.input_layernorm.weight.dtype
    poison = torch.full((3, HIDDEN), float("nan"), dtype=dtype)
    bundle = DeferredMoeOutput(
        gemm2_out=torch.cat([poison, torch.full((1, HIDDEN), value, dtype=dtype), poison]),
        expanded_idx_to_permuted_idx=torch.tensor([[3, -1]], dtype=torch.int32),
        expert_weights=torch.tensor([[1.0, float("nan")]]),
        num_tokens=1,
        top_k=2,
        hidden=HIDDEN,
    )
    seen, residual_in = [], torch.full((1, HIDDEN), residual, dtype=dtype)
    with torch.no_grad():
        norm_out, residual_out = take(layer, bundle, residual_in, seen if capture else None)
    return {
        "norm": norm_out,
        "norm_weight": layer.input_layernorm.weight.data[None],
        "residual": residual_out,
        "residual_in": residual_in,
        "captured": seen,
    }


def scenario_powers_of_two(model, spec):
    return hand_over(model, 2.0 ** spec["rank"], 0.0)


def scenario_ones(model, spec):
    return hand_over(model, 1.0, 0.0)


def scenario_eagle3_case(model, spec):
    return hand_over(model, 1.0 + spec["rank"], 10.0, capture=True)


def scenario_triton_producer(model, spec):
    """The Triton runner's producer, its kernels interpreted, beside the native one; fp16, which the interpreter gets right."""
    import cpu_reference_kernels
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe, override_config
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.sglang_overlay.srt.layers.moe.deferred_output import finalize
    from sglang.sglang_overlay.srt.layers.moe.moe_runner import producers

    fused_moe.moe_align_block_size = cpu_reference_kernels.moe_align_block_size
    # The fused function goes through a custom op that is registered for CUDA only; the runner core calls the same kernels.
    os.environ["SGLANG_CI_DISABLE_MOE_FUSED_FUNC"] = "1"
    experts = moe_layers(model)[0].mlp.experts
    for name in ("w13_weight", "w2_weight"):
        getattr(experts, name).data = getattr(experts, name).data.half()
    random = torch.Generator().manual_seed(3)
    x = torch.randn(TOKENS, HIDDEN, generator=random).half()
    ids = torch.stack([torch.randperm(8, generator=random)[:2] for _ in range(TOKENS)]).int()
    topk_output = StandardTopKOutput(torch.rand(TOKENS, 2, generator=random), ids, None)
    # Block sizes are chosen by the GPU's name, which is not there.
    with override_config({"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 1}):
        bundle = producers.triton_producer(experts)(x, topk_output)
    return {
        "triton": finalize(bundle),
        "index": bundle.expanded_idx_to_permuted_idx,
        "scale": bundle.routed_scaling_factor,
        "native": finalize(producers.native_producer(experts)(x, topk_output) * bundle.routed_scaling_factor),
        "input_kept": torch.equal(x, torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(3)).half()),
    }


def scenario_made(model, spec):
    """What was set up for this model."""
    boundary = getattr(taker(stage(model)[-1]), "moe_boundary", None)
    planes = [(plane.config._asdict(), plane.max_tokens) for plane in spec["made"].planes]
    return {"planes": planes, "ranges": boundary.ranges(192) if boundary else ""}


def scenario_two_models(model, spec):
    """A second model in the same process, as a draft is: do the two share a plane?"""
    own = taker(stage(model)[-1]).moe_boundary
    seams().link_boundaries(model)
    return taker(stage(model)[-1]).moe_boundary.plane is own.plane


def scenario_not_carried(model, spec):
    """A forward of few tokens whose bundle the next layer may not take, as with two-batch overlap."""
    owner, name = (seams().MoeFinalizeFusion, "can_defer_finalize") if has_layer_boundary() else (seams(), "carries")
    decide = getattr(owner, name)
    setattr(owner, name, lambda *_: False)
    try:
        return compare(model, num_tokens=1)
    finally:
        setattr(owner, name, decide)


def scenario_compiled(model, spec):
    """Whether a forward defers that is being compiled in one piece, as SGLang compiles prefill graphs, by its tokens; after one that was not."""
    from sglang.sglang_overlay.srt.layers.moe.deferral import deferral_of

    os.environ.pop("TORCHDYNAMO_DISABLE", None)  # set for all CPU runs
    torch._dynamo.config.disable = False
    run_stage(model, num_tokens=1)
    deferral = deferral_of(moe_layers(model)[0].mlp)

    def defers(x):
        return x + (0 if deferral.stays_stock(x.shape[0]) else 1)

    compiled = torch.compile(defers, backend="eager", fullgraph=True, dynamic=True)
    deferral.carries_now = True
    return {tokens: (bool(compiled(torch.zeros(tokens)).any()), bool(defers(torch.zeros(tokens)).any())) for tokens in (300, TOKENS, 4, 1)}


def scenario_over_plane(model, spec):
    """One token more than the plane has rows, and as many as it has."""
    return {rows: compare(model, num_tokens=rows) for rows in (boundary_stand_ins.PLANE_ROWS, boundary_stand_ins.PLANE_ROWS + 1)}


def scenario_into_kernel(model, spec):
    """Forwards with SGLang's own kernel: deferred beside stock, and what it finalized meanwhile."""
    workspace = kernel_workspace(model, model.config.num_experts_per_tok, max_m=TOKENS)
    seen = {}
    for tokens in (1, TOKENS, TOKENS + 1):
        workspace.taken.clear()
        seen[tokens] = {**compare(model, num_tokens=tokens), "taken": list(workspace.taken)}
    return seen


def scenario_kernel_facts(model, spec):
    """What the kernel was told, and what the overlay leaves alone."""
    from sglang.sglang_overlay.srt.environ import settings

    moes = [layer.mlp for layer in moe_layers(model)]
    return {
        "told": [layer.layer_id for layer in stage(model) if taker(layer).defers_finalize],
        "stock_experts": [moe.layer_id for moe in moes if seams().experts_or_deferred(moe, False) is moe.experts],
        "stock_defers": [moe.layer_id for moe in moes if seams().stock_defers(moe, torch.empty(TOKENS, HIDDEN), False)],
        "keeps_because": [vars(moe).get("moe_keeps_because") for moe in moes],
        "enable": settings().enable,
    }


def scenario_kernel_exact(model, spec):
    """Bundles handed to a layer with SGLang's own kernel, and what they should give, in float64."""
    from dataclasses import replace

    from sglang.srt.distributed import get_tp_group

    layer, moe = stage(model)[-1], moe_layers(model)[0].mlp
    workspace = kernel_workspace(model, top_k=3)
    bundle, residual = random_bundle(layer, spec["rank"], float("nan"))
    unpadded, _ = random_bundle(layer, spec["rank"], 0.0)
    sixths = replace(bundle, expert_weights=(torch.arange(3 * TOKENS).view(TOKENS, 3) % 7 + 1) / 6)
    bundles = {
        "random": bundle,
        "sixths": sixths,
        "longer rows": replace(bundle, gemm2_out=torch.cat([bundle.gemm2_out, bundle.gemm2_out], dim=1)),
        "declined": bundle,
    }
    seen = {}
    for name, given in bundles.items():
        workspace.taken.clear()
        workspace.max_m = 1 if name == "declined" else 64
        handed = seams()._handed_on(moe, given)
        with torch.no_grad():
            out = take(layer, given, residual, handed=handed)
        exact = replace(unpadded, expert_weights=given.expert_weights)
        seen[name] = {
            "out": out, "taken": list(workspace.taken), "kind": type(handed).__name__,
            "exact": exact_boundary(exact, residual, layer.input_layernorm, get_tp_group().cpu_group),
        }
    return seen


def random_bundle(layer, rank: int, padding: float, tokens: int = TOKENS):
    """``(bundle, residual)``: 3 experts a token, one in six not on this rank; rows that no index names hold ``padding``."""
    from sglang.sglang_overlay.srt.layers.moe.deferred_output import DeferredMoeOutput

    top_k, rows = 3, 5 * tokens
    own, same = torch.Generator().manual_seed(rank), torch.Generator().manual_seed(99)
    dtype = layer.input_layernorm.weight.dtype
    index = torch.randperm(rows, generator=own)[: tokens * top_k].int().view(tokens, top_k)
    gemm2_out = torch.randn(rows, HIDDEN, generator=own)
    index[torch.rand(tokens, top_k, generator=own) < 1 / 6] = -7
    named = index[index >= 0].long()
    gemm2_out = torch.full_like(gemm2_out, padding).index_copy(0, named, gemm2_out[named])
    bundle = DeferredMoeOutput(
        gemm2_out=gemm2_out.to(dtype),
        expanded_idx_to_permuted_idx=index,
        expert_weights=torch.rand(tokens, top_k, generator=same),
        num_tokens=tokens,
        top_k=top_k,
        hidden=HIDDEN,
        routed_scaling_factor=2.5,
        shared_output=torch.randn(tokens, HIDDEN, generator=own).to(dtype),
    )
    return bundle, torch.randn(tokens, HIDDEN, generator=same).to(dtype)


def scenario_ways(model, spec):
    """The same bundle by each way that is set up, and in float64."""
    from sglang.sglang_overlay.srt.layers.communicator import WAYS
    from sglang.srt.distributed import get_tp_group

    layer = stage(model)[-1]
    norm, boundary = layer.input_layernorm, taker(layer).moe_boundary
    norm.weight.data.copy_(1 + 0.1 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(5)))
    bundle, residual = random_bundle(layer, spec["rank"], float("nan"))
    unpadded, _ = random_bundle(layer, spec["rank"], 0.0)
    before = residual.clone()
    names = [way for way in WAYS if (way != "fused" or boundary.plane) and (way != "flashinfer" or boundary.workspace)]
    with torch.no_grad():
        results = {way: WAYS[way](boundary, norm, bundle, residual) for way in names}
        again = {way: WAYS[way](boundary, norm, unpadded, residual) for way in names}
    assert torch.equal(residual, before)
    return {
        "results": results,
        "padding_matters": [way for way in names if not all(map(torch.equal, results[way], again[way]))],
        "exact": exact_boundary(unpadded, residual, norm, get_tp_group().cpu_group),
    }


def exact_boundary(bundle, residual, norm, group):
    """``(norm_out, residual_out)`` in float64."""
    rows = bundle.gemm2_out.double()[bundle.expanded_idx_to_permuted_idx.clamp_min(0).long()]
    weights = bundle.expert_weights.double() * (bundle.expanded_idx_to_permuted_idx >= 0)
    own = 2.5 * (rows * weights[..., None]).sum(1) + bundle.shared_output.double()
    total = sum(boundary_stand_ins.of_all_ranks(own, group)) + residual.double()
    scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
    return total * scale * norm.weight.data.double(), total


def scenario_misfits(model, spec):
    """Bundles of other forms than the model's way takes: by which way they are taken, and whether the result is right."""
    from dataclasses import replace

    from sglang.srt.distributed import get_tp_group

    layer = stage(model)[-1]
    bundle, residual = random_bundle(layer, spec["rank"], 0.0)
    wide = torch.cat([bundle.gemm2_out, bundle.gemm2_out], dim=1)
    misfits = {
        "a row of its own length": bundle,
        "longer rows": replace(bundle, gemm2_out=wide),
        "another dtype": replace(bundle, shared_output=bundle.shared_output.float()),
        "unaligned": replace(bundle, gemm2_out=torch.cat([wide[:, :1], bundle.gemm2_out], dim=1)[:, 1:]),
    }
    exact = exact_boundary(bundle, residual, layer.input_layernorm, get_tp_group().cpu_group)[1]
    seen = {}
    for name, misfit in misfits.items():
        with torch.no_grad():
            (_, out), counters = counted(lambda: take(layer, misfit, residual))
        way = next(way for way, count in counters["ways"].items() if count)
        seen[name] = (way, float((out.double() - exact).norm() / exact.norm()))
    return seen


def scenario_norms(model, spec):
    """Which norms a fused boundary takes, and what it adds to their weights."""
    from sglang.sglang_overlay.srt.layers.layernorm import fusion_unmet, weight_bias
    from sglang.srt.layers import layernorm

    norms = {
        "plain": layernorm.RMSNorm(HIDDEN),
        "gemma": layernorm.GemmaRMSNorm(HIDDEN),
        "gemma3": layernorm.Gemma3RMSNorm(HIDDEN),
        "partial": layernorm.RMSNorm(HIDDEN, var_hidden_size=HIDDEN // 2),
        "hf": layernorm.RMSNorm(HIDDEN, cast_x_before_out_mul=True),
        "fp32": layernorm.RMSNorm(HIDDEN, fp32_residual=True),
        "subclass": type("Mine", (layernorm.RMSNorm,), {})(HIDDEN),
    }
    return {name: fusion_unmet(norm) or weight_bias(norm) for name, norm in norms.items()}


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        main(json.load(file))
