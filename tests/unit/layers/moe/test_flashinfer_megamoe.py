"""The adapter of Hopper's mega kernel over its stand-in: weights, routing, workspaces, and what is refused."""

import functools
import sys
from types import SimpleNamespace

import megamoe_stand_in
import mxfp4_moe
import pytest
import torch

from sglang_overlay.srt.arg_groups import moe_hook
from sglang_overlay.srt.environ import MXFP4_MEGAMOE, settings
from sglang_overlay.srt.layers.moe import flashinfer_megamoe
from sglang_overlay.srt.layers.moe.flashinfer_megamoe import (
    CAPACITIES, ExpertShape, ExpertWeights, MegaMoeExperts, MegaMoeRefused, capacities_up_to, capacity_for, launches,
)
from sglang_overlay.srt.layers.quantization import mxfp4_megamoe

SHAPE = mxfp4_moe.Shape(experts=8, intermediate=128, hidden=256, top_k=3)
GRID, RANDOM = (functools.cache(functools.partial(make, SHAPE)) for make in (mxfp4_moe.grid_experts, mxfp4_moe.random_experts))


@pytest.fixture(autouse=True)
def flashinfer(monkeypatch):
    """The stand-in where FlashInfer would be."""
    megamoe_stand_in.install(lambda name, module: monkeypatch.setitem(sys.modules, name, module))
    monkeypatch.setattr(megamoe_stand_in, "capturing", False)
    monkeypatch.setattr(megamoe_stand_in.MoEEpMegaLayer, "made", [])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def shape_of(shape=SHAPE, limit=None, **changed):
    told = {"num_experts": shape.experts, "top_k": shape.top_k, "hidden_size": shape.hidden, "intermediate_size": shape.intermediate,
            "swiglu_limit": limit, "rank": 0, "world_size": 1}
    return ExpertShape(**{**told, **changed})


def made(weights, limit=None, **changed):
    return MegaMoeExperts(shape_of(limit=limit, **changed), ExpertWeights.as_loaded(*weights))


def relative_error(result, exact):
    return ((result.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("kind", mxfp4_moe.GRIDS)
@pytest.mark.parametrize("limit", [None, mxfp4_moe.GRID_LIMIT])
def test_exact_on_the_grid(kind, limit):
    weights = GRID(kind=kind)
    x, ids, routing = mxfp4_moe.grid_tokens(SHAPE, 70)
    ids[::5, 1], ids[7] = -1, -1
    exact = mxfp4_moe.moe(x, ids, routing, weights, limit)
    # The same in fp32, in other orders: on the grid nothing but bf16 rounds.
    assert torch.equal(mxfp4_moe.moe(x, ids, routing, weights, limit, dtype=torch.float32), exact)
    out = made(weights, limit).forward(x, ids.int(), routing, len(x))
    assert out.dtype == torch.bfloat16 and torch.equal(out.double(), exact)
    assert not out[7].any()


def test_the_grid_quantises_without_error_and_its_limit_clamps():
    weights, (x, ids, routing) = GRID(), mxfp4_moe.grid_tokens(SHAPE, 40)
    assert torch.equal(mxfp4_moe.quantised(x, SHAPE.hidden), x.double())
    free, exact = (mxfp4_moe.routed_rows(x, ids, routing, weights, quantise=quantise) for quantise in (False, True))
    assert torch.equal(free.bfloat16().double(), exact)
    assert not torch.equal(mxfp4_moe.moe(x, ids, routing, weights, mxfp4_moe.GRID_LIMIT), mxfp4_moe.moe(x, ids, routing, weights))


@pytest.mark.parametrize("kind", mxfp4_moe.GRIDS)
def test_the_limit_of_the_grid_clamps_gates_and_both_sides_of_up(kind):
    weights, limit = GRID(kind=kind), mxfp4_moe.GRID_LIMIT
    gate, up = (mxfp4_moe.grid_tokens(SHAPE, 40)[0].double() @ weights.of(0)[0].T).chunk(2, -1)
    assert (gate > limit).any() and (up > limit).any() and (up < -limit).any() and (up.abs() < limit).any()


def kept(terms: torch.Tensor) -> bool:
    """Whether each of ``[..., N]`` terms is a whole number of the last bit that tensor cores keep of their sum."""
    last = torch.exp2(torch.frexp(terms.abs().amax()).exponent - 1.0 - mxfp4_moe.KEPT_BITS)
    return bool((terms % last == 0).all())


@pytest.mark.parametrize("limit", [None, mxfp4_moe.GRID_LIMIT])
def test_sums_of_the_dense_grid_fit_what_tensor_cores_keep_and_those_of_the_wide_one_do_not(limit):
    fits = {kind: list(map(kept, terms_of(GRID(kind=kind).of(0), limit))) for kind in ("dense", "wide")}
    assert fits == {"dense": [True, True], "wide": [False, False]}


def terms_of(matrices, limit):
    """All products of both GEMMs, in units of the activations' scales."""
    w13, w2 = matrices
    inputs = mxfp4_moe.grid_tokens(SHAPE, 20)[0].double()
    inputs = inputs / (inputs.abs().amax(1, keepdim=True) / mxfp4_moe.E4M3_MAX)
    gate, up = (inputs @ w13.T).chunk(2, -1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    hidden = (gate.clamp(min=0) * up).unflatten(-1, (-1, mxfp4_moe.BLOCK))
    codes = (hidden / (hidden.abs().amax(-1, keepdim=True) / mxfp4_moe.E4M3_MAX)).flatten(-2)
    return inputs[:, None] * w13, codes[:, None] * w2


def test_random_inputs_stay_near_float64():
    weights, (x, ids, routing) = RANDOM(), mxfp4_moe.random_tokens(SHAPE, 33)
    out = made(weights).forward(x, ids, routing, 33)
    assert relative_error(out, mxfp4_moe.moe(x, ids, routing, weights, quantise=False)) < 0.06


def test_weights_reach_the_kernel_as_the_bytes_that_were_loaded(monkeypatch):
    weights = RANDOM()
    loaded = (weights.w13.view(torch.int8), weights.w2.view(torch.int8), *(scale.view(torch.float8_e8m0fnu) for scale in weights[2:]))
    given, prepare = [], megamoe_stand_in.preprocess_sm90_pull_mxfp4_mega_weights
    monkeypatch.setattr(megamoe_stand_in, flashinfer_megamoe.PREPROCESS, lambda pack, **sizes: given.append(pack) or prepare(pack, **sizes))
    made(loaded)
    for name, tensor in zip(ExpertWeights._fields, loaded):
        passed = getattr(given[0], name)
        assert passed.dtype == torch.uint8 and passed.data_ptr() == tensor.data_ptr()
        assert torch.equal(passed, getattr(weights, name))


@pytest.mark.parametrize("place, name", list(enumerate(ExpertWeights._fields)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_were_converted_are_refused(place, name, dtype):
    weights = list(RANDOM())
    weights[place] = weights[place].to(dtype)
    with pytest.raises(MegaMoeRefused, match=f"{name} was loaded as {dtype}"):
        made(weights)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_ids_and_weights_of_any_width_and_stride(dtype, weight_dtype):
    weights = GRID()
    x, ids, routing = mxfp4_moe.grid_tokens(SHAPE, 5)
    strided = torch.cat([ids, ids], 1).to(dtype)[:, : SHAPE.top_k]
    out = made(weights).forward(x.expand(2, -1, -1)[1], strided, routing.to(weight_dtype).T.contiguous().T, 5)
    assert torch.equal(out.double(), mxfp4_moe.moe(x, ids, routing, weights))


@pytest.mark.parametrize("limit", [None, 10.0, 7.0])
def test_the_models_limit_is_always_given(limit):
    made(RANDOM(), limit)
    assert megamoe_stand_in.MoEEpMegaLayer.made[0].config.gate_up_clamp == limit


@pytest.mark.parametrize("tokens, capacity", [(0, 64), (1, 64), (64, 64), (65, 256), (256, 256), (257, 1024), (1024, 1024), (5000, 1024)])
def test_the_smallest_workspace_that_holds_the_batch(tokens, capacity):
    assert capacity_for(tokens) == capacity


@pytest.mark.parametrize(
    "tokens, expected",
    [(0, []), (64, [(0, 64)]), (1024, [(0, 1024)]), (1025, [(0, 1024), (1024, 64)]), (2200, [(0, 1024), (1024, 1024), (2048, 256)])],
)
def test_a_batch_larger_than_any_workspace_is_launched_in_parts(tokens, expected):
    assert [(rows.start, capacity) for rows, capacity in launches(tokens)] == expected


@pytest.mark.parametrize("tokens", [1, 64, 65, 300, 1100])
def test_a_forward_runs_in_the_workspaces_it_should(tokens):
    weights = GRID()
    x, ids, routing = mxfp4_moe.grid_tokens(SHAPE, tokens)
    experts = made(weights)
    out = experts.forward(x, ids, routing, tokens)
    assert torch.equal(out.double(), mxfp4_moe.moe(x, ids, routing, weights))
    (layer,) = megamoe_stand_in.MoEEpMegaLayer.made
    assert layer.launched == [(capacity, len(x[rows])) for rows, capacity in launches(tokens)]


@pytest.mark.parametrize("largest, expected", [(64, (64,)), (128, (64, 128)), (1024, CAPACITIES), (4096, (64, 256, 1024, 4096))])
def test_the_largest_workspace_bounds_the_others(largest, expected):
    assert capacities_up_to(largest) == expected


def test_workspaces_of_other_sizes():
    weights = GRID()
    x, ids, routing = mxfp4_moe.grid_tokens(SHAPE, 300)
    experts = MegaMoeExperts(shape_of(), ExpertWeights.as_loaded(*weights), capacities=(32, 128))
    assert torch.equal(experts.forward(x, ids, routing, 300).double(), mxfp4_moe.moe(x, ids, routing, weights))
    assert megamoe_stand_in.MoEEpMegaLayer.made[0].launched == [(128, 128), (128, 128), (128, 44)]


@pytest.mark.parametrize("fullest, expected", [(0, []), (3, [(64, 0)]), (70, [(256, 0)]), (1025, [(1024, 0), (64, 0)])])
def test_an_idle_rank_launches_what_the_fullest_does(fullest, expected):
    experts = made(RANDOM())
    out = experts.forward(torch.empty(0, SHAPE.hidden).bfloat16(), torch.empty(0, 3).int(), torch.empty(0, 3), fullest)
    assert out.shape == (0, SHAPE.hidden)
    assert megamoe_stand_in.MoEEpMegaLayer.made[0].launched == expected


def test_a_rank_with_more_tokens_than_were_agreed_on_says_so():
    experts, (x, ids, routing) = made(RANDOM()), mxfp4_moe.random_tokens(SHAPE, 4)
    with pytest.raises(RuntimeError, match="4 tokens where the ranks agreed on at most 3"):
        experts.forward(x, ids, routing, 3)


def test_the_result_is_not_overwritten_by_the_next_forward():
    experts, (x, ids, routing) = made(RANDOM()), mxfp4_moe.random_tokens(SHAPE, 4)
    first = experts.forward(x, ids, routing, 4)
    kept = first.clone()
    experts.forward(-x, ids, routing, 4)
    assert torch.equal(first, kept)


def test_nothing_is_made_once_the_layer_is_built(monkeypatch):
    """What a CUDA graph's capture needs: every workspace exists and has run."""
    experts = made(RANDOM())
    (layer,) = megamoe_stand_in.MoEEpMegaLayer.made
    assert list(layer.workspaces) == list(CAPACITIES) and all(workspace.compiled for workspace in layer.workspaces.values())
    monkeypatch.setattr(megamoe_stand_in, "capturing", True)
    for tokens in (1, 100, 1030):
        experts.forward(*mxfp4_moe.random_tokens(SHAPE, tokens), tokens)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"hidden_size": 320}, "hidden_size 320 is not a multiple of 128"),
        ({"intermediate_size": 192}, "intermediate_size 192 is not a multiple of 128"),
        ({"world_size": 3}, "8 experts do not divide among 3 ranks"),
    ],
)
def test_shapes_the_kernel_has_no_tiles_for(changed, message):
    with pytest.raises(MegaMoeRefused, match=message) as refused:
        shape_of(**changed).check()
    assert MXFP4_MEGAMOE.name in str(refused.value)


def runner_config(**changed):
    told = {"activation": "silu", "is_gated": True, "gemm1_alpha": None, "gemm1_clamp_limit": None, "apply_router_weight_on_input": False,
            "no_combine": False, "num_fused_shared_experts": 0}
    return SimpleNamespace(**{**told, **changed})


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"activation": "gelu"}, "activation gelu"),
        ({"is_gated": False}, "not gated"),
        ({"gemm1_alpha": 1.702}, "gemm1_alpha 1.702"),
        ({"gemm1_clamp_limit": 7.0}, "gemm1_clamp_limit 7.0"),
        ({"apply_router_weight_on_input": True}, "router's weights into the experts' input"),
        ({"no_combine": True}, "return them apart"),
        ({"num_fused_shared_experts": 1}, "--disable-shared-experts-fusion"),
    ],
)
def test_experts_of_another_arithmetic_are_refused(changed, message):
    mxfp4_megamoe.refuse_other_arithmetic(runner_config())
    with pytest.raises(MegaMoeRefused, match=message):
        mxfp4_megamoe.refuse_other_arithmetic(runner_config(**changed))


def test_scales_stored_as_bytes_are_exponents_and_other_scales_are_refused():
    param, exponents = torch.ones(2, 3).to(torch.float8_e8m0fnu), torch.arange(120, 126, dtype=torch.uint8).view(2, 3)
    load = mxfp4_megamoe.keep_bytes(lambda param, loaded, *_: param.copy_(loaded))
    for stored in (exponents, exponents.view(torch.float8_e8m0fnu)):
        load(param.zero_() if param.dtype == torch.uint8 else param, stored, "w13_scale")
        assert torch.equal(param.view(torch.uint8), exponents)
    with pytest.raises(MegaMoeRefused, match="expert scales of torch.float32"):
        load(param, torch.ones(2, 3))


def test_codes_are_bytes_and_weights_of_another_format_are_refused():
    load = mxfp4_megamoe.keep_bytes(lambda param, loaded, *_: param.copy_(loaded))
    codes, stored = torch.zeros(2, 3, dtype=torch.int8), torch.arange(250, 256, dtype=torch.uint8).view(2, 3)
    for kind in (torch.uint8, torch.int8):
        load(codes.zero_(), stored.view(kind))
        assert torch.equal(codes.view(torch.uint8), stored)
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        with pytest.raises(MegaMoeRefused, match=f"expert weights of {dtype}"):
            load(codes, torch.ones(2, 3).to(dtype))


# What is looked at when a server starts.


@pytest.fixture
def without_flashinfer(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
        monkeypatch.delitem(sys.modules, name)


def installed(folder, monkeypatch, version, with_kernel):
    """A FlashInfer of this version, on disk; no code in it."""
    package = folder / "flashinfer"
    kernel = package / flashinfer_megamoe.KERNEL_FILE
    kernel.parent.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('was imported')")
    if with_kernel:
        kernel.write_text("")
    metadata = folder / f"flashinfer_python-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flashinfer-python\nVersion: {version}\n")
    monkeypatch.setattr(sys, "path", [str(folder)])


def test_a_flashinfer_without_the_kernel_is_named_with_the_version_that_has_it(tmp_path, without_flashinfer, monkeypatch):
    installed(tmp_path, monkeypatch, "0.7.2", with_kernel=False)
    with pytest.raises(MegaMoeRefused, match="FlashInfer 0.7.2 has no MXFP4 kernel for Hopper.*flashinfer-python 0.7.4"):
        flashinfer_megamoe.require_kernel()


def test_a_flashinfer_with_the_kernel_is_not_imported_to_be_known(tmp_path, without_flashinfer, monkeypatch):
    installed(tmp_path, monkeypatch, "0.7.4", with_kernel=True)
    flashinfer_megamoe.require_kernel()


def test_no_flashinfer_at_all(without_flashinfer):
    for look in (flashinfer_megamoe.require_kernel, flashinfer_megamoe.import_kernel):
        with pytest.raises(MegaMoeRefused, match="FlashInfer is not installed"):
            look()


def test_a_flashinfer_that_lost_the_kernel_is_refused_when_weights_are_processed(monkeypatch):
    monkeypatch.delattr(megamoe_stand_in, flashinfer_megamoe.CONFIG)
    with pytest.raises(MegaMoeRefused, match=flashinfer_megamoe.KERNEL_SINCE):
        made(RANDOM())


def test_nvshmem_is_needed_by_several_ranks_only(without_flashinfer):
    flashinfer_megamoe.require_nvshmem(1)
    with pytest.raises(MegaMoeRefused, match="nvshmem4py"):
        flashinfer_megamoe.require_nvshmem(8)


def options(**changed):
    told = {"enable_eplb": False, "ep_num_redundant_experts": 0, "init_expert_location": "trivial", "elastic_ep_backend": None,
            "enable_two_batch_overlap": False, "enable_single_batch_overlap": False, "enable_pdmux": False, "nnodes": 1}
    return SimpleNamespace(**{**told, **changed})


@pytest.mark.parametrize(
    "changed, option",
    [({"enable_eplb": True}, "--enable-eplb"), ({"ep_num_redundant_experts": 2}, "--ep-num-redundant-experts"),
     ({"init_expert_location": "map.json"}, "--init-expert-location"), ({"elastic_ep_backend": "mooncake"}, "--elastic-ep-backend"),
     ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"), ({"enable_single_batch_overlap": True}, "--enable-single-batch-overlap"),
     ({"enable_pdmux": True}, "--enable-pdmux"), ({"nnodes": 2}, "--nnodes")],
)
def test_options_that_the_kernel_excludes(changed, option):
    moe_hook.check_options(options())
    with pytest.raises(MegaMoeRefused, match=f"{option} is set.*Leave {option} out"):
        moe_hook.check_options(options(**changed))


def model(experts=256, **changed):
    config = SimpleNamespace(**({"n_routed_experts": experts} if experts else {}))
    return SimpleNamespace(**{"is_fp4_experts": True, "hf_text_config": config, "dtype": torch.bfloat16, **changed})


def test_models_that_are_not_for_it():
    moe_hook.check_model(model(), 8)
    moe_hook.check_model(model(experts=None), 8)
    with pytest.raises(MegaMoeRefused, match="not MXFP4"):
        moe_hook.check_model(model(is_fp4_experts=False), 8)
    with pytest.raises(MegaMoeRefused, match="runs in float16. Add --dtype bfloat16"):
        moe_hook.check_model(model(dtype=torch.float16), 8)
    with pytest.raises(MegaMoeRefused, match="256 experts do not divide among 6 ranks"):
        moe_hook.check_model(model(), 6)


@pytest.fixture
def environment(monkeypatch):
    for name in ("MEGA_NO_DIST", "NVSHMEM_DISABLE_NVLS", MXFP4_MEGAMOE.name):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    settings.cache_clear()
    yield moe_hook.os.environ
    settings.cache_clear()


def test_one_rank_does_without_nvshmem_and_several_without_multicast(environment):
    moe_hook.set_environment(1)
    assert environment["MEGA_NO_DIST"] == "1" and "NVSHMEM_DISABLE_NVLS" not in environment
    with pytest.raises(MegaMoeRefused, match="Unset MEGA_NO_DIST"):
        moe_hook.set_environment(8)
    del environment["MEGA_NO_DIST"]
    moe_hook.set_environment(8)
    assert environment["NVSHMEM_DISABLE_NVLS"] == "1" and "MEGA_NO_DIST" not in environment


def test_with_the_flag_off_the_gates_are_the_stock_ones(environment):
    stock = object()
    assert moe_hook.routes_own_tokens(stock) is stock
    assert moe_hook.megamoe_has_gpu(lambda: "stock's answer", None) == "stock's answer"


def test_with_the_flag_on_one_rank_routes_its_own_tokens(environment, monkeypatch):
    monkeypatch.setenv(MXFP4_MEGAMOE.name, "1")
    routes = moe_hook.routes_own_tokens(lambda args: args.attn_dp_size > 1)
    assert routes(SimpleNamespace(attn_dp_size=1, tp_size=1)) and routes(SimpleNamespace(attn_dp_size=8, tp_size=8))
    assert not routes(SimpleNamespace(attn_dp_size=1, tp_size=8))
