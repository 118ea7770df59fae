"""Ranks of a tiny DeepSeek-V3 in a patched SGLang tree, on CPU and gloo, with its attention stubbed out.

Run by ``test_boundary.py`` as ``boundary_worker.py RUNS.json``, a list of runs, each a list of the specs of its ranks.
Each rank writes what it saw to ``spec["out"]`` as a torch file, its output to ``spec["log"]``. Everything but the attention is SGLang's own:
layers, communicators, process groups. SGLang is imported once, and each rank forked: importing takes longer than all else.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from cpu_serving import forked

HIDDEN, TOKENS = 256, 5


def main(runs: list) -> None:
    torch.set_num_threads(1)
    import_sglang()
    for ranks in runs:
        pids = [forked.start(run_rank, spec) for spec in ranks]
        for pid in pids:
            os.waitpid(pid, 0)


def import_sglang() -> None:
    import sglang.srt.model_loader.loader
    import sglang.srt.models.deepseek_v2
    import sglang.srt.server_args
    from sglang.srt.models.registry import ModelRegistry  # noqa: F401  imports every model


def run_rank(spec: dict) -> None:
    """Go through the scenarios; the output file exists only if all got through."""
    model = build_model(spec)
    stub_attention(model)
    scenarios = {name: globals()[f"scenario_{name}"] for name in spec["scenarios"]}
    torch.save({name: run(model, spec) for name, run in scenarios.items()}, spec["out"])


def build_model(spec: dict) -> torch.nn.Module:
    """The model of ``spec["checkpoint"]`` with its weights, in this rank's process groups."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.layernorm_sp import initialize_layernorm_sp
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.moe.token_dispatcher import standard
    from sglang.srt.model_loader.loader import get_model_loader
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    sizes = spec["sizes"]
    args = ServerArgs(
        model_path=spec["checkpoint"],
        device="cpu",
        dtype="float32",
        attention_backend="triton",
        disable_cuda_graph=True,
        skip_tokenizer_init=True,
        sampling_backend="pytorch",
        grammar_backend="none",
        tp_size=sizes["tp"],
        pp_size=sizes["pp"],
        ep_size=sizes["ep"],
    )
    publish(args, role="weight_cache_daemon")
    # The map of this rank's experts goes to an accelerator, which is not there.
    standard.get_device = lambda: "cpu"
    initialize_moe_config()
    config = ModelConfig(model_path=spec["checkpoint"], dtype="float32")
    init_distributed_environment(
        world_size=sizes["tp"] * sizes["pp"],
        rank=spec["rank"],
        local_rank=spec["rank"],
        distributed_init_method=spec["init_method"],
        backend="gloo",
    )
    initialize_model_parallel(
        tensor_model_parallel_size=sizes["tp"],
        pipeline_model_parallel_size=sizes["pp"],
        expert_model_parallel_size=sizes["ep"],
        backend="gloo",
    )
    initialize_dp_attention(args, config)
    initialize_layernorm_sp(model_config=config)
    loader = get_model_loader(LoadConfig(), config)
    return loader.load_model(model_config=config, device_config=DeviceConfig("cpu")).model


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
        layer.layer_communicator.qkv_latent_func = None


def stage(model):
    return model.layers[model.start_layer : model.end_layer]


def moe_layers(model):
    from sglang.sglang_overlay.srt.models.deepseek_v2 import _is_moe

    return [layer for layer in stage(model) if _is_moe(layer.mlp)]


def forward_batch(num_tokens: int, **fields):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch = dict(
        forward_mode=ForwardMode.DECODE,
        input_ids=torch.arange(num_tokens) % 1024,
        can_run_tbo=False,
        attn_cp_metadata=None,
        dp_padding_mode=None,
    )
    return SimpleNamespace(**{**batch, **fields})


def run_stage(model, num_tokens: int = TOKENS, capture=(), **fields):
    """One forward of this pipeline stage; fixed inputs, the same on every tensor-parallel rank."""
    from sglang.srt.model_executor.forward_batch_info import PPProxyTensors

    generator = torch.Generator().manual_seed(7)
    hidden, residual = (torch.randn(num_tokens, HIDDEN, generator=generator) for _ in range(2))
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
    return {"carried": carried_layers(model), "layers": counted(lambda: None)[1]["layers"]}


def carried_layers(model, num_tokens=TOKENS, **fields):
    """Ids of the layers that decide to hand a bundle on."""
    from sglang.sglang_overlay.srt.models.deepseek_v2 import fuse_or_carry

    batch, hidden_states = forward_batch(num_tokens, **fields), torch.empty(num_tokens, HIDDEN)
    return [layer.layer_id for layer in moe_layers(model) if fuse_or_carry(layer, batch, hidden_states)]


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
    except TypeError:
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
    from sglang.sglang_overlay.srt.models import deepseek_v2 as seams

    original = seams.run_experts
    seams.run_experts = lambda moe, hidden_states, topk_output, **extra: moe.experts(hidden_states, topk_output, **extra)
    try:
        return compare(model)
    finally:
        seams.run_experts = original


def scenario_capture(model, spec):
    """Eagle3 auxiliary hidden states of every layer that can take a bundle."""
    captured = [layer.layer_id for layer in stage(model)[1:]]
    return compare(model, capture=captured)


def hand_over(model, value: float, residual: float, capture: bool = False):
    """Give the last layer's communicator a bundle of one expert whose rows are all ``value``."""
    from sglang.sglang_overlay.srt.layers.moe.deferred_output import DeferredMoeOutput

    communicator = stage(model)[-1].layer_communicator
    poison = torch.full((3, HIDDEN), float("nan"))
    bundle = DeferredMoeOutput(
        gemm2_out=torch.cat([poison, torch.full((1, HIDDEN), value), poison]),
        expanded_idx_to_permuted_idx=torch.tensor([[3, -1]], dtype=torch.int32),
        expert_weights=torch.tensor([[1.0, float("nan")]]),
        num_tokens=1,
        top_k=2,
        hidden=HIDDEN,
    )
    seen, residual_in = [], torch.full((1, HIDDEN), residual)
    with torch.no_grad():
        norm_out, residual_out = communicator.prepare_attn_and_capture_last_layer_outputs(
            bundle, residual_in, forward_batch(1), seen if capture else None
        )
    return {
        "norm": norm_out,
        "norm_weight": communicator.input_layernorm.weight.data[None],
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


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        main(json.load(file))
