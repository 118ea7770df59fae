"""The fused boundary kernel on one GPU: every rank of a group is a stream of this process, with a plane of its own.

What needs real peers (links, processes, failures) is in benchmark/boundary_reliability.py.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import List, NamedTuple, Optional

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("needs an NVIDIA GPU of SM90 or newer", allow_module_level=True)

from sglang_overlay.srt.layers.moe.boundary.kernel import Launch, choose_launch, fused_boundary  # noqa: E402
from sglang_overlay.srt.layers.moe.boundary.module import Config, load  # noqa: E402
from sglang_overlay.srt.layers.moe.boundary.plane import ExchangePlane, one_shot_tokens, region_sizes, regions_at  # noqa: E402
from sglang_overlay.srt.layers.moe.deferred_output import DeferredMoeOutput  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CONFIGS = [
    Config(2, 7168, 8, BF16, FP32),
    Config(2, 7168, 8, BF16, BF16),
    Config(2, 4096, 6, FP16, FP32),
    Config(2, 1000, 1, BF16, FP32),
    Config(2, 8192, 4, BF16, FP32),
    Config(3, 512, 11, BF16, FP32),
    Config(4, 7168, 8, BF16, FP32),
    Config(5, 2048, 64, FP16, BF16),
    Config(8, 7168, 8, BF16, FP32),
    Config(1, 7168, 8, BF16, FP32),
    Config(1, 2048, 6, BF16, BF16),
    Config(1, 1000, 11, FP16, FP32),
]
TWO, ALONE = CONFIGS[0], CONFIGS[9]
EPS = 1e-5
MAX_TOKENS = 48
# One rounding to the result's dtype, with room for the packets' 11 bits.
ERROR = {BF16: 1.1 * 2**-9, FP16: 2**-11}


class Inputs(NamedTuple):
    bundle: DeferredMoeOutput
    residual: torch.Tensor
    gamma: torch.Tensor


@pytest.fixture(scope="module", autouse=True)
def compiled():
    with ThreadPoolExecutor(len(CONFIGS)) as pool:
        list(pool.map(load, CONFIGS))


class Group:
    """The ranks of a group on one GPU, with room for every launch; a rank that waits in vain stops the test after 20 s."""

    def __init__(self, config: Config, max_tokens: int = MAX_TOKENS) -> None:
        self.config = config
        self.streams = [torch.cuda.Stream() for _ in range(config.world_size)]
        module, rows = load(config), (max_tokens, max_tokens)
        sizes = region_sizes(module, rows)
        regions = regions_at([module.plane_allocate(sum(sizes)) for _ in self.streams], sizes, rows)
        self.planes = [ExchangePlane(config, rank, max_tokens, 132, regions, timeout_s=20.0) for rank in range(config.world_size)]

    def run(self, inputs: List[Inputs], launch: Optional[Launch] = None, weight_bias: float = 0.0) -> List[tuple]:
        poison_free_memory(inputs[0].residual)
        torch.cuda.synchronize()
        results = []
        for plane, stream, (bundle, residual, gamma) in zip(self.planes, self.streams, inputs):
            with torch.cuda.stream(stream):
                results.append(fused_boundary(plane, bundle, residual, gamma, EPS, weight_bias, launch))
        torch.cuda.synchronize()
        return results


def poison_free_memory(like: torch.Tensor) -> None:
    """Fill what the allocator hands out next with NaN, so that an element never written shows."""
    blocks = [torch.full_like(like, float("nan")) for _ in range(20)]
    torch.cuda.synchronize()
    del blocks


def make_inputs(config: Config, tokens: int, seed: int = 0, padded: bool = False, holes: bool = False,
                shared: bool = True, scale: float = 2.5) -> List[Inputs]:
    generator = torch.Generator("cuda").manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, device="cuda", generator=generator)

    hidden, top_k, pad = config.hidden, config.top_k, 64 if padded else 0
    residual = randn(tokens, hidden).to(config.activation)
    gamma = (1 + 0.1 * randn(hidden)).to(config.activation)
    inputs = []
    for _ in range(config.world_size):
        rows = tokens * top_k + 128
        gemm2_out = randn(rows, hidden + pad).to(config.activation)
        index = torch.randperm(rows, device="cuda", generator=generator)[: tokens * top_k].int().view(tokens, top_k)
        weights = torch.rand(tokens, top_k, device="cuda", generator=generator)
        if holes:
            index = torch.where(torch.rand(tokens, top_k, device="cuda", generator=generator) < 0.4, -1, index)
            index[tokens // 2] = -1
            weights = torch.where(index < 0, float("nan"), weights)
            used = torch.zeros(rows, dtype=torch.bool, device="cuda")
            used[index[index >= 0].long()] = True
            gemm2_out[~used] = float("nan")
        shared_output = randn(tokens, hidden + pad).to(config.activation)[:, :hidden] if shared else None
        bundle = DeferredMoeOutput(
            gemm2_out, index, weights.to(config.weight), tokens, top_k, hidden, scale / top_k, shared_output
        )
        inputs.append(Inputs(bundle, residual, gamma))
    return inputs


def exact(inputs: List[Inputs], weight_bias: float = 0.0) -> tuple:
    total = inputs[0].residual.double()
    for bundle, _, _ in inputs:
        index = bundle.expanded_idx_to_permuted_idx
        rows = bundle.gemm2_out[:, : bundle.hidden][index.clamp_min(0).long()].double()
        weighted = rows * bundle.expert_weights.double()[..., None]
        routed = torch.where((index >= 0)[..., None], weighted, 0.0).sum(1)
        total = total + routed * bundle.routed_scaling_factor
        if bundle.shared_output is not None:
            total = total + bundle.shared_output.double()
    norm = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS)
    return norm * (inputs[0].gamma.double() + weight_bias), total


def error(result: torch.Tensor, truth: torch.Tensor) -> float:
    return ((result.double() - truth).norm() / truth.norm()).item()


def assert_right(results: List[tuple], inputs: List[Inputs], weight_bias: float = 0.0) -> None:
    for result, truth in zip(results[0], exact(inputs, weight_bias)):
        assert error(result, truth) < ERROR[result.dtype]
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0])), "ranks differ"


def launches(config: Config, tokens: int) -> List[Launch]:
    """Both regimes, one turn and several, the default's cluster and the smallest that fits."""
    default = choose_launch(tokens, config.hidden, config.world_size, 132)
    few = max(1, tokens // 3)
    smallest = 1 if config.hidden <= 4096 else 2
    return [
        Launch(two_shot, cluster, clusters)
        for two_shot in (False, True)
        for cluster, clusters in {(default.cluster, tokens), (smallest, few), (4, few)}
    ]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("kind", ["plain", "padded", "holes", "no shared expert"])
def test_every_rank_gets_one_rounding_of_the_exact_boundary(config, kind):
    group = Group(config)
    for tokens in (1, 2, 5):
        for number, launch in enumerate(launches(config, tokens)):
            inputs = make_inputs(config, tokens, 100 * tokens + number, padded=kind == "padded", holes=kind == "holes",
                                 shared=kind not in ("holes", "no shared expert"))
            assert_right(group.run(inputs, launch), inputs)


@pytest.mark.parametrize("config", [TWO, ALONE], ids=str)
def test_many_tokens_at_once(config):
    group = Group(config, 512)
    for tokens, launch in ((33, Launch(False, 2, 33)), (300, Launch(False, 2, 30)), (512, Launch(True, 2, 32))):
        inputs = make_inputs(config, tokens, tokens)
        assert_right(group.run(inputs, launch), inputs)


@pytest.mark.parametrize("tokens", [133, 192, 512])
def test_alone_more_clusters_than_fit_at_once(tokens):
    inputs = make_inputs(ALONE, tokens, tokens)
    assert choose_launch(tokens, ALONE.hidden, 1, 132).clusters == tokens
    assert_right(Group(ALONE, 512).run(inputs), inputs)


@pytest.mark.parametrize("config", [TWO, ALONE], ids=str)
def test_results_repeat_to_the_bit_and_do_not_touch_their_inputs(config):
    group = Group(config)
    inputs = make_inputs(config, 7)
    before = [[t.clone() for t in (i.bundle.gemm2_out, i.bundle.shared_output, i.residual)] for i in inputs]
    first = group.run(inputs)
    for _ in range(20):
        again = group.run(inputs)
        assert all(torch.equal(a, b) for x, y in zip(first, again) for a, b in zip(x, y))
    after = [(i.bundle.gemm2_out, i.bundle.shared_output, i.residual) for i in inputs]
    assert all(torch.equal(a, b) for x, y in zip(before, after) for a, b in zip(x, y))


def test_changing_numbers_of_tokens_for_longer_than_tags_last():
    config = TWO
    group = Group(config)
    sizes = [1, 4, 16, 2, 9, 48]
    inputs = {tokens: make_inputs(config, tokens, tokens) for tokens in sizes}
    expected = {tokens: group.run(inputs[tokens], Launch(tokens % 2 == 0, 8, min(tokens, 8))) for tokens in sizes}
    for number in range(400):
        tokens = sizes[(number * number + number // 7) % len(sizes)]
        results = group.run(inputs[tokens], Launch(tokens % 2 == 0, 8, min(tokens, 8)))
        assert all(torch.equal(a, b) for x, y in zip(results, expected[tokens]) for a, b in zip(x, y)), number


@pytest.mark.parametrize("config", [TWO, ALONE], ids=str)
@pytest.mark.parametrize("two_shot", [False, True])
def test_small_integers_come_out_exact(two_shot, config):
    inputs = []
    for made in make_inputs(config, 6, scale=config.top_k):
        bundle = made.bundle
        whole = torch.randint(-3, 4, bundle.gemm2_out.shape, device="cuda").to(config.activation)
        shared = torch.randint(-9, 10, bundle.shared_output.shape, device="cuda").to(config.activation)
        ones = torch.ones_like(bundle.expert_weights)
        inputs.append(Inputs(
            DeferredMoeOutput(whole, bundle.expanded_idx_to_permuted_idx, ones, 6, config.top_k, config.hidden, 1.0, shared),
            torch.randint(-50, 51, made.residual.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(config.activation),
            made.gamma,
        ))
    results = Group(config).run(inputs, Launch(two_shot, 8, 6))
    truth = exact(inputs)[1]
    for _, residual_out in results:
        assert torch.equal(residual_out.double(), truth)


@pytest.mark.parametrize("two_shot", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("config", [TWO, ALONE], ids=str)
def test_values_that_are_no_numbers_arrive_where_they_belong_and_nowhere_else(config, bad, two_shot):
    inputs = make_inputs(config, 4)
    inputs[-1].bundle.shared_output[2, 77] = bad
    results = Group(config).run(inputs, Launch(two_shot, 8, 4))
    norm, total = exact(inputs)
    clean = torch.tensor([0, 1, 3], device="cuda")
    for norm_out, residual_out in results:
        assert error(norm_out[clean], norm[clean]) < ERROR[BF16] and error(residual_out[clean], total[clean]) < ERROR[BF16]
        got, wanted = residual_out[2].double(), total[2]
        assert torch.equal(got.isnan(), wanted.isnan()) and torch.equal(got.isinf(), wanted.isinf())
        finite = wanted.abs() < 1e30
        assert error(got[finite], wanted[finite]) < ERROR[BF16] * 2  # neighbours in the packet keep six bits
    assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for r in results[1:] for a, b in zip(r, results[0]))


@pytest.mark.parametrize("size", [1e-28, 1e-12, 1.0, 1e9, 1e17])
@pytest.mark.parametrize("config", [TWO, ALONE], ids=str)
def test_the_size_of_values_does_not_matter(config, size):
    inputs = [Inputs(i.bundle.__class__(i.bundle.gemm2_out * size, i.bundle.expanded_idx_to_permuted_idx, i.bundle.expert_weights, 3,
                                        config.top_k, config.hidden, i.bundle.routed_scaling_factor, i.bundle.shared_output * size),
                     i.residual * size, i.gamma) for i in make_inputs(config, 3)]
    truth = exact(inputs)[1]
    for _, residual_out in Group(config).run(inputs):
        assert ((residual_out.double() - truth).norm() / truth.norm()).item() < ERROR[BF16]


@pytest.mark.parametrize("config, factor", [(TWO, 200), (ALONE, 1e6)], ids=str)
def test_an_outlier_does_not_coarsen_its_neighbours(config, factor):
    """Massive activations: a value 200 times its neighbours leaves them bf16's precision; without packets, any value."""
    inputs = make_inputs(config, 3)
    for i in inputs:
        i.bundle.shared_output[:, ::64] *= factor
    truth = exact(inputs)[1]
    quiet = torch.ones(config.hidden, dtype=torch.bool, device="cuda")
    quiet[::64] = False
    for _, residual_out in Group(config).run(inputs):
        assert error(residual_out[:, quiet], truth[:, quiet]) < ERROR[BF16]


@pytest.mark.parametrize("config", [TWO, ALONE], ids=str)
def test_gemma_style_weights_and_no_tokens(config):
    group = Group(config)
    inputs = make_inputs(config, 3)
    assert_right(group.run(inputs, weight_bias=1.0), inputs, weight_bias=1.0)
    for norm_out, residual_out in group.run(make_inputs(config, 0)):
        assert norm_out.shape == residual_out.shape == (0, config.hidden)


@pytest.mark.parametrize("config", [TWO, ALONE], ids=str)
def test_captured_graphs_of_changing_sizes_replay_with_new_inputs(config):
    group = Group(config)
    graphs, inputs, results = {}, {}, {}
    for tokens in (1, 4, 16):
        inputs[tokens] = make_inputs(config, tokens, tokens)
        group.run(inputs[tokens])
        graphs[tokens] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[tokens]):
            main = torch.cuda.current_stream()
            for stream in group.streams:
                stream.wait_stream(main)
            results[tokens] = []
            for plane, stream, (bundle, residual, gamma) in zip(group.planes, group.streams, inputs[tokens]):
                with torch.cuda.stream(stream):
                    results[tokens].append(fused_boundary(plane, bundle, residual, gamma, EPS))
            for stream in group.streams:
                main.wait_stream(stream)
    for number in range(100):
        tokens = (1, 4, 16)[number % 3 if number % 5 else 0]
        for i in inputs[tokens]:
            i.bundle.gemm2_out.copy_(torch.randn_like(i.bundle.gemm2_out))
        for result in results[tokens]:
            for tensor in result:
                tensor.fill_(float("nan"))
        graphs[tokens].replay()
        torch.cuda.synchronize()
        assert_right(results[tokens], inputs[tokens])


@pytest.mark.parametrize("config", [config for config in CONFIGS if config.world_size > 3], ids=str)
def test_the_default_turns_from_one_shot_to_two_shot_and_back(config):
    """A region keeps its packets while the other one is used, here for as many launches as tags tell apart."""
    most = one_shot_tokens(config.hidden, config.world_size)
    regimes = [choose_launch(tokens, config.hidden, config.world_size, 132).two_shot for tokens in (1, most, most + 1)]
    assert regimes == [False, False, True]
    group = Group(config, most + 1)
    for number in range(130):
        inputs = make_inputs(config, most + 1 if number % 64 == 0 else most if number % 64 == 1 else 1, seed=number)
        assert_right(group.run(inputs), inputs)


def test_refusals_name_the_condition():
    group = Group(TWO)
    (bundle, residual, gamma), _ = make_inputs(TWO, 3)
    with pytest.raises(ValueError, match="holds 48 tokens, got 49"):
        group.run(make_inputs(TWO, 49))
    one_shot, two_shot = group.planes[0].regions
    small = replace(group.planes[0], regions=(one_shot, two_shot._replace(max_tokens=2)))
    with pytest.raises(ValueError, match="holds 2 tokens of two-shot launches, got 3"):
        fused_boundary(small, bundle, residual, gamma, EPS, launch=Launch(True, 8, 3))
    with pytest.raises(ValueError, match="share a dtype"):
        fused_boundary(group.planes[0], bundle, residual.half(), gamma, EPS)
    with pytest.raises(ValueError, match="adjacent columns"):
        fused_boundary(group.planes[0], bundle, residual.t().contiguous().t(), gamma, EPS)
    with pytest.raises(ValueError, match="plane is for hidden 7168, got 512"):
        fused_boundary(group.planes[0], *make_inputs(CONFIGS[5], 2)[0], EPS)
