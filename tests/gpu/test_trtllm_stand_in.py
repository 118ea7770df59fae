"""The TRT-LLM producers through SGLang's own call sites and the finalize kernel, eagerly and in a captured CUDA graph.

FlashInfer's kernels need SM100; ``trtllm_stand_in`` takes their place here, and ``trtllm_layers.replace_sm100_functions`` that of
the quantisers before them. Everything is compared with float64, in the 2-norm.

Needs a patched SGLang on the path: ``PYTHONPATH=TREE pytest -m gpu tests/gpu``. Where there is no GPU, the eager tests
run on the CPU; ``tests/unit`` has them run there.
"""

import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import Any, Callable, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import trtllm_stand_in
from trtllm_layers import (
    CONFIGURATIONS,
    EXPERTS,
    FACTOR,
    HIDDEN,
    TOP_K,
    Fixed,
    build_experts,
    build_moe,
    e2m1_values,
    fill_experts,
    replace_sm100_functions,
    routing_in_float64,
    rows_in_float64,
)

TOKENS = (1, 7, 64, 192)
REPLAYS = 3
# No element is further than half a unit in the last of bf16's 8 bits; the rest is for fp32 sums, and for routing weights
# whose bf16 rounding falls on the other side than float64's.
ONE_BF16_ROUNDING = 1.1 * 2.0**-9
ROUTED = [name for name, (_, kernel_routes) in CONFIGURATIONS.items() if not kernel_routes]


@dataclasses.dataclass(frozen=True)
class Layer:
    """Experts of one configuration, their producer, and their weights in float64."""

    kernel_routes: bool
    device: str
    experts: torch.nn.Module
    produce: Callable[..., Any]
    dequantised: dict
    routing: Any


class Inputs(NamedTuple):
    """``x`` and ``shared`` ``[T, H]`` bf16, ``logits`` ``[T, E]`` fp32, ``ids`` ``[T, K]`` int32, ``weights`` ``[T, K]`` fp32."""

    x: torch.Tensor
    logits: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    shared: torch.Tensor

    def to(self, device):
        return Inputs(*(tensor.to(device) for tensor in self))


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, one_rank):
    if request.param not in (one_rank, "meta"):
        pytest.skip(f"SGLang runs on {one_rank} in this process")
    return request.param


@pytest.fixture(scope="module")
def stand_in(one_rank):
    """The stand-in for what needs SM100, over an installed FlashInfer or instead of one."""
    with pytest.MonkeyPatch.context() as patch:
        # Where SGLang finds no FlashInfer, it does not import from it, and the names are not there.
        replace = partial(patch.setattr, raising=False)
        try:
            trtllm_stand_in.install_over_flashinfer(replace)
        except ImportError:
            trtllm_stand_in.install()
        replace_sm100_functions(replace)
        yield


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def configuration(request, stand_in):
    """The name of a configuration, whose runner is SGLang's as long as it is in use."""
    from sglang.srt.runtime_context import get_flags

    backend = get_flags().moe.runner_backend
    yield request.param
    get_flags().moe.runner_backend = backend


@pytest.fixture(scope="module")
def layer(device, configuration):
    from sglang.sglang_overlay.srt.layers.moe.moe_runner.producers import find_row

    with torch.device(device):
        experts = build_experts({"configuration": configuration})
        dequantised = fill_experts(experts, configuration, None)
    row, reason = find_row(experts, "cuda")
    assert row is not None, reason
    kernel_routes = CONFIGURATIONS[configuration][1]
    return Layer(kernel_routes, device, experts, row.make_producer(experts), dequantised, routing_config(device))


def routing_config(device):
    from sglang.srt.layers.moe.topk import TopKConfig

    bias = torch.linspace(-0.1, 0.1, EXPERTS).to(device)
    return TopKConfig(top_k=TOP_K, use_grouped_topk=True, num_expert_group=2, topk_group=1, correction_bias=bias)


def fresh(tokens, seed):
    """Random inputs, on the CPU; weights n/6 (1/6, 1/3, 1/2 …), some pairs without an expert."""
    random = torch.Generator().manual_seed(1000 * tokens + seed)
    ids = torch.rand(tokens, EXPERTS, generator=random).topk(TOP_K).indices.int()
    if tokens > 1:
        ids = torch.where(torch.rand(ids.shape, generator=random) < 0.1, -1, ids)
    return Inputs(
        x=e2m1_values((tokens, HIDDEN), random).bfloat16(),
        logits=torch.randn(tokens, EXPERTS, generator=random),
        ids=ids,
        weights=torch.randint(1, 8, ids.shape, generator=random) / 6,
        shared=torch.randn(tokens, HIDDEN, generator=random).bfloat16(),
    )


def topk_output(layer, inputs):
    from sglang.srt.layers.moe.topk import BypassedTopKOutput, StandardTopKOutput

    if layer.kernel_routes:
        return BypassedTopKOutput(inputs.x, inputs.logits, layer.routing)
    return StandardTopKOutput(inputs.weights, inputs.ids, inputs.logits)


def bundle_of(layer, inputs):
    return layer.produce(inputs.x, topk_output(layer, inputs)).with_shared_output(inputs.shared)


def finalized(bundle):
    """The result of the finalize kernel on a GPU, of the reference elsewhere, in memory that held NaN before."""
    from sglang.sglang_overlay.srt.layers.moe.deferred_output import finalize
    from sglang.sglang_overlay.srt.layers.moe.finalize_kernel import can_run

    assert can_run(bundle) == bundle.gemm2_out.is_cuda
    torch.full((bundle.num_tokens, bundle.hidden), float("nan"), dtype=torch.bfloat16, device=bundle.gemm2_out.device)
    return finalize(bundle)


def in_float64(layer, inputs):
    """What inputs on the CPU should give: routed by hand, each token's experts one by one."""
    if layer.kernel_routes:
        ids, weights = routing_in_float64(inputs.logits, routing_config("cpu"))
        weights = FACTOR * weights
    else:
        ids, weights = inputs.ids, inputs.weights.double()
    rows = rows_in_float64(inputs.x, ids, layer.dequantised, None)
    return (rows * weights[..., None]).sum(1) + inputs.shared.double()


def relative_error(result, reference):
    return ((result.cpu().double() - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("tokens", TOKENS)
def test_eager_is_one_rounding_away_from_float64(layer, configuration, tokens):
    for seed in range(REPLAYS):
        inputs = fresh(tokens, seed)
        bundle = bundle_of(layer, inputs.to(layer.device))
        assert bundle.expert_weights.dtype == (torch.bfloat16 if layer.kernel_routes else torch.float32)
        assert bundle.gemm2_out.shape[0] > tokens * TOP_K and bundle.gemm2_out.isnan().any()
        error = relative_error(finalized(bundle), in_float64(layer, inputs))
        print(f"{configuration} T={tokens}: {error:.2e}")
        assert error <= ONE_BF16_ROUNDING


@pytest.mark.parametrize("configuration", ROUTED, indirect=True)
@pytest.mark.parametrize("tokens", TOKENS)
def test_fp32_weights_are_closer_than_bf16_packed_ones(layer, configuration, tokens):
    inputs = fresh(tokens, 0)._replace(shared=torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16))
    bundle, reference = bundle_of(layer, inputs.to(layer.device)), in_float64(layer, inputs)
    packed = dataclasses.replace(bundle, expert_weights=bundle.expert_weights.bfloat16())
    fp32_error, bf16_error = (relative_error(finalized(output), reference) for output in (bundle, packed))
    print(f"{configuration} T={tokens}: weights fp32 {fp32_error:.2e}, bf16 {bf16_error:.2e}")
    assert fp32_error <= ONE_BF16_ROUNDING and fp32_error < bf16_error


@pytest.mark.parametrize("device", ["meta"], indirect=True)
def test_a_producer_neither_looks_at_a_value_nor_brings_one_from_the_cpu(layer, configuration, monkeypatch):
    """Which a captured graph forbids: tensors without data refuse both."""
    monkeypatch.setattr(trtllm_stand_in, "is_capturing", lambda: True)
    bundle = bundle_of(layer, fresh(7, 0).to("meta"))
    assert {bundle.gemm2_out.device.type, bundle.expanded_idx_to_permuted_idx.device.type} == {"meta"}


def captured(forward):
    """A graph of ``forward()`` and its result, captured once after it ran on a stream of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            forward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward()
    return graph, out


def replay_errors(forward, static, reference):
    """The relative error of each replay of one capture, with fresh inputs copied in and the result poisoned."""
    graph, out = captured(forward)
    tokens, errors = out.shape[0], []
    for seed in range(1, REPLAYS + 1):
        inputs = fresh(tokens, seed)
        for place, value in zip(static, inputs, strict=True):
            place.copy_(value)
        out.fill_(float("nan"))
        graph.replay()
        errors.append(relative_error(out, reference(inputs)))
    return errors


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("tokens", TOKENS)
def test_each_replay_of_a_graph_is_one_rounding_away_from_float64(layer, configuration, tokens):
    static = fresh(tokens, 0).to("cuda")
    errors = replay_errors(
        lambda: finalized(bundle_of(layer, static)), static, lambda inputs: in_float64(layer, inputs)
    )
    print(f"{configuration} T={tokens}: " + ", ".join(f"{error:.2e}" for error in errors))
    assert len(errors) == REPLAYS and max(errors) <= ONE_BF16_ROUNDING


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
@pytest.mark.parametrize("tokens", TOKENS)
def test_the_dual_stream_moe_block_defers_inside_a_graph(device, configuration, tokens):
    from sglang.sglang_overlay.srt.layers.moe.counters import COUNTERS

    static = fresh(tokens, 0).to("cuda")
    moe, layer = dual_stream_moe(configuration, static)
    COUNTERS.deferred.clear()

    def reference(inputs):
        return in_float64(layer, inputs._replace(shared=moe._forward_shared_experts(inputs.x.cuda()).cpu()))

    with torch.no_grad():
        errors = replay_errors(lambda: moe.forward_normal_dual_stream(static.x), static, reference)
    print(f"{configuration} T={tokens}, MoE block: " + ", ".join(f"{error:.2e}" for error in errors))
    assert sum(COUNTERS.deferred.values()) == 3  # two forwards before the capture, and the captured one
    assert max(errors) <= ONE_BF16_ROUNDING


def dual_stream_moe(configuration, static):
    """SGLang's MoE block with the routing of ``static`` and one matrix for a shared expert, and its experts as a layer."""
    from sglang.srt.layers.moe.utils import MoeRunnerBackend
    from sglang.srt.runtime_context import get_flags

    # The block is built with experts that are not quantised, which are then replaced.
    get_flags().moe.runner_backend = MoeRunnerBackend.TRITON
    with torch.device("cuda"):
        moe, dequantised = build_moe({"configuration": configuration}, torch.cuda.Stream())
        shared = torch.randn(HIDDEN, HIDDEN, dtype=torch.bfloat16) / 16
    layer = SimpleNamespace(
        kernel_routes=CONFIGURATIONS[configuration][1], dequantised=dequantised, routing=routing_config("cuda")
    )
    moe._forward_shared_experts = lambda hidden_states, *_, **__: F.linear(hidden_states, shared)
    moe.gate, moe.topk = Fixed(static.logits), Fixed(topk_output(layer, static))
    return moe, layer
