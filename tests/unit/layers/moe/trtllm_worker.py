"""SGLang's MoE block over the TRT-LLM runners, on a CPU, with ``trtllm_stand_in`` in place of FlashInfer's kernels.

Run by ``test_trtllm_call_sites.py`` as ``trtllm_worker.py RUNS.json`` with an SGLang tree, stock or patched, on the path. The
MoE block, its quantisation methods, runners and call sites are the tree's own; weights are put in as a kernel reads them.
SGLang is imported once, and each run of the list (a configuration and a flag) forked; it writes a torch file to ``spec["out"]``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import torch
import trtllm_stand_in
from cpu_serving import forked, ranks
from trtllm_layers import (
    CONFIGURATIONS,
    EXPERTS,
    FACTOR,
    HIDDEN,
    TOP_K,
    Fixed,
    build_moe,
    e2m1_values,
    replace_sm100_functions,
    routing_in_float64,
    rows_in_float64,
)

TOKENS = (1, 5, 72)
FLAG = "SGLANG_ENABLE_MOE_DEFERRED_FINALIZE"


def main(runs: list) -> None:
    torch.set_num_threads(1)
    import_sglang()
    forked.fork_each(run_with_flag, runs)


def import_sglang() -> None:
    forked.let_custom_ops_run_on_a_cpu(lambda op_name: op_name.startswith("trtllm_"))
    import sglang.srt.layers.moe.fused_moe_triton.layer
    import sglang.srt.layers.quantization.fp8
    import sglang.srt.layers.quantization.modelopt_quant
    import sglang.srt.models.deepseek_v2
    import sglang.srt.server_args  # noqa: F401


def run_with_flag(spec: dict) -> None:
    """One run; its output file exists only if it got through."""
    os.environ.pop(FLAG, None)
    if spec["flag"] is not None:
        os.environ[FLAG] = spec["flag"]
    torch.save(run_configuration(spec), spec["out"])


def run_configuration(spec: dict) -> dict:
    trtllm_stand_in.install(spec.get("flashinfer", "0.6.18"))
    start_one_rank(spec)
    stand_in_for_cuda()
    moe, dequantised = build_moe(spec, SimpleNamespace(wait_stream=lambda other: None))
    prepare(moe, spec)
    logged = lines_logged()
    with torch.no_grad():
        seen = {name: globals()[f"scenario_{name}"](moe, dequantised, spec) for name in spec["scenarios"]}
    return {**seen, "logged": logged}


def lines_logged() -> list:
    """A list that gets what the overlay logs from here on."""
    lines = []
    overlay = logging.getLogger("sglang.sglang_overlay")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    overlay.addHandler(handler)
    overlay.setLevel(logging.INFO)
    return lines


def start_one_rank(spec: dict) -> None:
    """Process groups and flags of a server of one rank."""
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        model_path=spec["checkpoint"], device="cpu", dtype="bfloat16", attention_backend="triton",
        disable_cuda_graph=True, skip_tokenizer_init=True, sampling_backend="pytorch", grammar_backend="none",
        disable_shared_experts_fusion=True,
    )
    ranks.publish(args)
    initialize_moe_config()
    ranks.join_groups(args, f"file://{spec['out']}.rendezvous")


def stand_in_for_cuda() -> None:
    """What a machine without CUDA lacks, each for the reason beside it."""
    from sglang.srt.models import deepseek_v2
    import sglang.kernels.ops.moe.moe_finalize_fuse_shared as stock_finalize

    replace_sm100_functions(setattr)
    # On a CPU, and there alone, the model code itself multiplies the routed scaling factor.
    deepseek_v2._is_musa = True
    # The stock finalize is a CUDA kernel.
    stock_finalize.moe_finalize_fuse_shared = finalize_fuse_shared
    # Streams are CUDA's, and graphs.
    torch.cuda.is_current_stream_capturing = lambda: False
    stream = SimpleNamespace(wait_stream=lambda other: None)
    torch.cuda.current_stream = lambda: stream
    torch.cuda.stream = lambda other: nullcontext()


def finalize_fuse_shared(gemm2_out, index, weights, shared, top_k, enable_pdl):
    rows = torch.where(index[:, None] < 0, 0.0, gemm2_out[index.clamp_min(0).long()].float())
    routed = (rows.view(-1, top_k, rows.shape[1]) * weights.float()[..., None]).sum(1)
    return (routed + shared.float()).bfloat16()


def prepare(moe, spec: dict) -> None:
    moe.topk_config = moe.topk.topk_config
    moe.topk_config.correction_bias = torch.linspace(-0.1, 0.1, EXPERTS)
    if spec.get("factor_left_to_finalize"):
        moe.experts.should_fuse_routed_scaling_factor_in_topk = False
    owners = {"moe": moe, "experts": moe.experts, "quant_method": moe.experts.quant_method}
    for name, value in spec.get("set", {}).items():
        owner, attribute = name.split(".")
        setattr(owners[owner], attribute, value)
    if spec.get("as_if_on_cuda"):
        as_if_on_cuda()


def as_if_on_cuda() -> None:
    """The table's rows are for CUDA, and the weights lie on a CPU here."""
    from sglang.sglang_overlay.srt.layers.moe import deferral

    find = deferral.find_row
    deferral.find_row = lambda experts, device: find(experts, "cuda")


def set_routing(moe, tokens: int, spec: dict, weights=None, ids=None):
    """Fix the routing of ``tokens`` tokens; return ids and weights, without the factor and as the kernel gets to see them."""
    from sglang.srt.layers.moe.topk import BypassedTopKOutput, StandardTopKOutput

    random = torch.Generator().manual_seed(tokens)
    logits = torch.randn(tokens, EXPERTS, generator=random)
    moe.gate = Fixed(logits)
    if CONFIGURATIONS[spec["configuration"]][1]:
        config = moe.topk_config
        moe.topk = Fixed(BypassedTopKOutput(torch.empty(tokens, HIDDEN), logits, config))
        return routing_in_float64(logits, config)
    ids = torch.rand(tokens, EXPERTS, generator=random).topk(TOP_K).indices.int() if ids is None else ids
    # The factor makes n/6 of them: 1/6, 1/3, 1/2 ...
    weights = (torch.arange(tokens * ids.shape[1]).view(ids.shape) % 7 + 1) / 9 if weights is None else weights
    in_top_k = FACTOR if moe.experts.should_fuse_routed_scaling_factor_in_topk else 1.0
    moe.topk = Fixed(StandardTopKOutput(weights * in_top_k, ids, logits))
    return ids, (weights * in_top_k).double() / in_top_k


def inputs(tokens: int) -> torch.Tensor:
    return e2m1_values((tokens, HIDDEN), torch.Generator().manual_seed(100 + tokens)).bfloat16()


def scenario_forwards(moe, dequantised, spec) -> dict:
    """Plain and dual-stream forwards, and what they should give."""
    seen = {}
    for tokens in TOKENS:
        ids, weights = set_routing(moe, tokens, spec)
        x = inputs(tokens)
        seen[tokens] = {
            "rows": rows_in_float64(x, ids, dequantised, spec.get("ep_rank")),
            "weights": weights,
            "shared": moe._forward_shared_experts(x).clone(),
            "plain": counted(lambda: moe.forward_normal(x.clone())),
            "dual": counted(lambda: moe.forward_normal_dual_stream(x.clone())),
        }
    return seen


def counted(forward) -> dict:
    """The result of a forward, and what it called of the kernels."""
    trtllm_stand_in.CALLS.clear()
    return {"out": forward(), "calls": list(trtllm_stand_in.CALLS)}


def scenario_bundle(moe, dequantised, spec) -> dict:
    """The bundle of five tokens, with what it should combine to before shared expert and rounding."""
    from sglang.sglang_overlay.srt.layers.moe.deferral import deferral_of, run_experts

    ids, weights = set_routing(moe, 5, spec)
    bundle = run_experts(moe, inputs(5), moe.topk.value)
    rows = rows_in_float64(inputs(5), ids, dequantised, spec.get("ep_rank"))
    return {"bundle": vars(bundle), "scale": deferral_of(moe).row.scale, "rows": rows, "weights": weights}


def scenario_one_expert(moe, dequantised, spec) -> dict:
    """Case C5: one expert, weight 1."""
    from dataclasses import replace

    from sglang.sglang_overlay.srt.layers.moe.deferral import run_experts
    from sglang.sglang_overlay.srt.layers.moe.deferred_output import finalize

    config, experts = moe.topk_config, moe.experts
    moe.topk_config, experts.moe_runner_config.top_k = replace(config, top_k=1), 1
    ids, _ = set_routing(moe, 1, spec, torch.ones(1, 1), torch.tensor([[6]], dtype=torch.int32))
    out = finalize(run_experts(moe, inputs(1), moe.topk.value))
    moe.topk_config, experts.moe_runner_config.top_k = config, TOP_K
    return {"out": out, "row": rows_in_float64(inputs(1), ids, dequantised, None)[:, 0]}


def scenario_carried(moe, dequantised, spec) -> dict:
    """A dual-stream forward whose bundle the next layer takes."""
    from sglang.sglang_overlay.srt.layers.moe.deferral import deferral_of
    from sglang.sglang_overlay.srt.layers.moe.deferred_output import finalize, is_deferred
    from sglang.sglang_overlay.srt.models.deepseek_v2 import stock_defers

    set_routing(moe, 5, spec)
    deferral = deferral_of(moe)
    with handing_on(moe, deferral):
        carried = moe.forward_normal_dual_stream(inputs(5))
    # A layer boundary carries a bundle in an object of its own.
    carried = getattr(carried, "output", carried) if has_layer_boundary() else carried
    finalized = finalize(carried)
    in_layer = moe.forward_normal_dual_stream(inputs(5))
    gives_way = not stock_defers(moe, inputs(5))
    over_budget = stock_defers(moe, torch.empty(193, HIDDEN)) == moe.experts.supports_deferred_finalize
    return {
        "is_bundle": is_deferred(carried), "finalized": finalized, "in_layer": in_layer,
        "stock_gives_way": gives_way, "stock_over_budget": over_budget,
    }


@contextmanager
def handing_on(moe, deferral):
    """As within a decoder layer that has decided to hand its MoE's bundle on."""
    from sglang.srt.runtime_context import get_forward

    deferral.carries_now, deferral.keeps_because = True, ""
    if not has_layer_boundary():
        yield
        return
    moe.reduce_results = False
    with get_forward().scoped(defer_moe_finalize=True):
        yield


def has_layer_boundary() -> bool:
    from sglang.sglang_overlay.srt.upstream import has_layer_boundary

    return has_layer_boundary()


def scenario_more_rows(moe, dequantised, spec) -> dict:
    """A plain forward of five tokens, of whose kernel weights and index have seven rows."""
    set_routing(moe, 5, spec)
    trtllm_stand_in.MORE_ROWS = 2
    out = moe.forward_normal(inputs(5))
    trtllm_stand_in.MORE_ROWS = 0
    return out


def scenario_mutations(moe, dequantised, spec) -> dict:
    """Plain forwards of five tokens with a fault put into the overlay."""
    from sglang.sglang_overlay.srt.layers.moe.moe_runner import flashinfer_trtllm

    sound, seen = flashinfer_trtllm.bundle_of, {}
    for name, mutate in MUTATIONS.items():
        set_routing(moe, 5, spec)
        flashinfer_trtllm.bundle_of = partial(faulty_bundle, sound, mutate)
        seen[name] = moe.forward_normal(inputs(5))
    flashinfer_trtllm.bundle_of = sound
    return seen


def faulty_bundle(sound, mutate, unfinalized, weights, shape, scale):
    weights, scale = mutate(weights, scale)
    return sound(unfinalized, weights, shape, scale)


def read_as_bf16(weights):
    """What the stock adapter does with fp32 weights."""
    if weights.dtype != torch.float32:
        return weights
    return weights.contiguous().view(torch.bfloat16).view(-1, weights.shape[1])[: weights.shape[0]]


MUTATIONS = {
    "none": lambda weights, scale: (weights, scale),
    "reinterpreted": lambda weights, scale: (read_as_bf16(weights), scale),
    "scaled_twice": lambda weights, scale: (weights, scale * FACTOR),
    "scaled_never": lambda weights, scale: (weights, scale / FACTOR),
}


def scenario_reason(moe, dequantised, spec) -> str:
    """Why the layer does not defer."""
    from sglang.sglang_overlay.srt.layers.moe.moe_runner.producers import find_row

    return find_row(moe.experts, "cuda")[1]


def scenario_explained(moe, dequantised, spec) -> None:
    """A start and the ways of three forwards to their experts, of the same layer and of another; the experts do nothing."""
    from sglang.sglang_overlay.srt.models.deepseek_v2 import experts_or_deferred, link_boundaries
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    set_routing(moe, 5, spec)
    topk_output = StandardTopKOutput(None, None, None) if spec.get("standard_routing") else moe.topk.value
    moe.experts.forward_impl = lambda hidden_states, topk_output, **_: hidden_states
    link_boundaries(SimpleNamespace(layers=[], start_layer=0, end_layer=0))
    for _ in range(2):
        experts_or_deferred(moe)(inputs(5), topk_output)
    assert experts_or_deferred(moe) is moe.experts
    vars(moe).pop("moe_is_explained", None)
    experts_or_deferred(moe)(inputs(5), topk_output)


def scenario_unused_output(moe, dequantised, spec) -> list:
    """Shapes of what SGLang makes with ``torch.empty`` in a deferred forward of five tokens."""
    from sglang.sglang_overlay.srt.layers.moe.deferral import run_experts

    set_routing(moe, 5, spec)
    empty, shapes = torch.empty, []
    torch.empty = lambda *size, **kwargs: shapes.append(size) or empty(*size, **kwargs)
    run_experts(moe, inputs(5), moe.topk.value)
    torch.empty = empty
    return shapes


def scenario_unfit_routing(moe, dequantised, spec) -> dict:
    """A forward whose routing has the format that the configuration does not take."""
    from sglang.sglang_overlay.srt.layers.moe.deferral import deferral_of
    from sglang.srt.layers.moe.topk import BypassedTopKOutput, StandardTopKOutput

    outputs = (BypassedTopKOutput(None, None, None), StandardTopKOutput(None, None, None))
    return {output.format.name.lower(): deferral_of(moe).row.unfit_routing(output) for output in outputs}


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        main(json.load(file))
