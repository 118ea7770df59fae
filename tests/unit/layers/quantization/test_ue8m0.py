"""The power-of-two quantiser against float64: scales bit for bit, codes the nearest (cases C10 and C11).

On a CPU the kernel runs in Triton's interpreter, whose E4M3 cast is wrong, so its scales are compared there and its codes on
the GPU (``-m gpu``); the torch version's codes are compared here.
"""

import math
import re

import fp8_moe
import pytest
import torch

from sglang_overlay.srt.layers.quantization import ue8m0

pytest.importorskip("triton")
from sglang_overlay.srt.layers.quantization import ue8m0_kernel  # noqa: E402

gpu = pytest.mark.gpu
GROUP = 128
POISON_SCALE, POISON_CODE, GUARD = -3.0, 0x5A, 64
INFINITY = float("inf")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(scope="module")
def interpreted(interpret):
    return interpret(ue8m0_kernel)


def run_guarded(module, x, group, patch):
    """The kernel's codes (bytes) and scales, their memory poisoned before; what lies beside them is checked to be as before."""
    groups = x.numel() // group
    codes = torch.full((x.numel() + 2 * GUARD,), POISON_CODE, dtype=torch.uint8, device=x.device)
    scales = torch.full((groups + 2 * GUARD,), POISON_SCALE, device=x.device)
    inner = codes[GUARD : GUARD + x.numel()].view(torch.float8_e4m3fn).view(x.shape), scales[GUARD : GUARD + groups].view(*x.shape[:-1], -1)
    patch.setattr(module, "_new_results", lambda *_: inner)
    found, scale = module.quantize_cuda(x, group) if x.is_cuda else module._launch(x, group)
    for memory, poison in ((codes, POISON_CODE), (scales, POISON_SCALE)):
        assert (memory[:GUARD] == poison).all() and (memory[-GUARD:] == poison).all()
    assert not (scale == POISON_SCALE).any(), "a scale was not written"
    return found.view(torch.uint8), scale


def groups_of(amaxes, dtype=torch.float32, group=GROUP, device="cpu"):
    """``[len(amaxes), group]``: each group's largest magnitude is the given one, at a random place and of random sign."""
    amaxes = torch.tensor(amaxes, dtype=torch.float64, device=device)
    x = (torch.rand(len(amaxes), group, dtype=torch.float64, device=device) * 2 - 1) * amaxes[:, None] * 0.99
    place = torch.randint(group, (len(amaxes), 1), device=device)
    sign = torch.where(torch.rand(len(amaxes), 1, device=device) < 0.5, -1.0, 1.0).double()
    return x.scatter(1, place, sign * amaxes[:, None]).to(dtype)


def edges(dtype):
    """amax at, and one step of the dtype beside, 448 times each power of two the dtype holds; also the smallest and largest."""
    info = torch.finfo(dtype)
    powers = range(max(-126, math.floor(math.log2(info.tiny)) - 8), math.floor(math.log2(info.max)) - 8)
    at = torch.tensor([448.0 * 2.0**power for power in powers], dtype=dtype)
    at = at[torch.isfinite(at) & (at > 0)]
    bits = at.view(torch.int32 if dtype == torch.float32 else torch.int16)
    beside = [(bits + step).view(dtype) for step in (-1, 0, 1)]
    ends = torch.tensor([0.0, info.smallest_normal, info.max, 1.0, 1e-5], dtype=dtype)
    smallest = torch.ones(1, dtype=bits.dtype).view(dtype)
    return torch.cat([*beside, ends, smallest])


def expected(x, group=GROUP):
    """Codes and scales by the oracle; of finite ``x``."""
    codes, scale = fp8_moe.quantise(x, group, fp8_moe.power_of_two_scale)
    return codes.to(torch.float8_e4m3fn).view(torch.uint8), scale.float()


def assert_reference_is_right(x, group=GROUP):
    codes, scale = ue8m0.quantize_reference(x, group)
    expected_codes, expected_scale = expected(x, group)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(codes.view(torch.uint8), expected_codes)


@pytest.mark.parametrize("exponent", [-126, -100, -8, -1, 0, 1, 37, 118])
def test_c10_rounding_at_the_edge(exponent):
    step = 2.0**exponent
    at = torch.tensor(448.0) * step
    above, below = (torch.nextafter(at, torch.tensor(end)) for end in (INFINITY, 0.0))
    amaxes = [at.item(), above.item(), below.item()]
    assert ue8m0.ue8m0_scale(torch.tensor(amaxes)).tolist() == [step, 2 * step, step]
    x = groups_of(amaxes)
    assert ue8m0.quantize_reference(x, GROUP)[1].flatten().tolist() == [step, 2 * step, step]
    assert_reference_is_right(x)


def test_c10_denormal_has_a_finite_power_of_two():
    x = groups_of([1e-40, 2.0**-149, 2.0**-127])
    codes, scale = ue8m0.quantize_reference(x, GROUP)
    assert scale.flatten().tolist() == [2.0**-126] * 3
    assert torch.isfinite(codes.float()).all()
    assert_reference_is_right(x)


def test_c10_zero_has_a_finite_scale_and_zero_codes():
    codes, scale = ue8m0.quantize_reference(torch.zeros(3, 2 * GROUP), GROUP)
    assert scale.tolist() == [[2.0**-126] * 2] * 3
    assert not codes.float().any()


def test_c11_codes_belong_to_the_scale():
    x = groups_of([300.0])
    codes, scale = ue8m0.quantize_reference(x, GROUP)
    assert scale.item() == 1.0
    step = torch.maximum(2.0 ** (torch.floor(torch.log2(x.double().abs())) - 3), torch.tensor(2.0**-9)) * scale.item()
    error = (codes.double() * scale.double() - x.double()).abs()
    assert (error <= step / 2).all()
    assert_reference_is_right(x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_reference_is_the_oracle(dtype, group):
    assert_reference_is_right(groups_of(edges(dtype).tolist(), dtype, group), group)
    spread = torch.exp(torch.randn(64, 4 * group) * 3) * torch.randn(64, 4 * group)
    assert_reference_is_right(spread.clamp(-60000, 60000).to(dtype), group)


def test_every_code_is_reached_and_ties_go_to_even():
    values = fp8_moe.e4m3_values()
    ties = (values[1:] + values[:-1]) / 2
    x = torch.cat([values, ties, -values, -ties, torch.tensor([448.0])]).float()
    x = torch.nn.functional.pad(x, (0, -len(x) % GROUP), value=448.0).view(-1, GROUP)
    x[:, 0] = 448.0
    assert_reference_is_right(x)
    assert ue8m0.quantize_reference(x, GROUP)[1].unique().tolist() == [1.0]


@pytest.mark.parametrize(
    "value, scale, code",
    [(INFINITY, 2.0**120, 448.0), (-INFINITY, 2.0**120, -448.0), (float("nan"), 2.0, 448.0)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite(value, scale, code, dtype, interpreted, monkeypatch):
    x = groups_of([500.0], dtype)
    x[0, 17] = value
    x[0, 18] = 500.0
    codes, found = ue8m0.quantize_reference(x, GROUP)
    assert (found.item(), codes[0, 17].item()) == (scale, code)
    assert torch.isfinite(codes.float()).all()
    assert run_guarded(interpreted, x, GROUP, monkeypatch)[1].item() == scale


def test_a_group_of_nan_alone():
    codes, scale = ue8m0.quantize_reference(torch.full((1, GROUP), float("nan")), GROUP)
    assert scale.item() == 2.0**-126 and (codes.float() == 448).all()


def test_dequantising_after_the_gemm_overflows_where_the_input_was_infinite():
    assert math.isinf(torch.tensor(448.0) * 2.0**120)


def test_shapes_and_layout():
    codes, scale = ue8m0.quantize_reference(torch.randn(5, 3, 256), 64)
    assert codes.shape == (5, 3, 256) and codes.dtype == torch.float8_e4m3fn and codes.is_contiguous()
    assert scale.shape == (5, 3, 4) and scale.dtype == torch.float32 and scale.is_contiguous()
    codes, scale = ue8m0.quantize_reference(torch.empty(0, 256), 128)
    assert codes.shape == (0, 256) and scale.shape == (0, 2)


@pytest.mark.parametrize("shape, group", [((2, 100), 128), ((2, 192), 128)])
def test_what_does_not_fall_into_groups_is_named(shape, group):
    with pytest.raises(ValueError, match=r"shape \(2, \d+\) do not fall into groups of 128"):
        ue8m0.quantize_reference(torch.zeros(shape), group)


def test_what_is_not_contiguous_is_named():
    with pytest.raises(ValueError, match="must be contiguous"):
        ue8m0.quantize_reference(torch.zeros(128, 128).t(), 128)


def test_the_kernel_names_a_dtype_and_a_group_size_it_does_not_take():
    with pytest.raises(ValueError, match="got torch.int8"):
        ue8m0_kernel.quantize_cuda(torch.zeros(2, 128, dtype=torch.int8), 128)
    with pytest.raises(ValueError, match="must be a power of two, got 96"):
        ue8m0_kernel.quantize_cuda(torch.zeros(2, 192), 96)


def test_without_the_choice_the_quantiser_is_the_stock_one():
    def stock(x, group_size):
        raise AssertionError

    assert ue8m0.activation_quantizer(stock, False) is stock
    x = torch.randn(2, 256)
    codes, scale = ue8m0.activation_quantizer(stock, True)(x, 128)
    expected_codes, expected_scale = expected(x)
    assert torch.equal(scale, expected_scale) and torch.equal(codes.view(torch.uint8), expected_codes)


def test_a_caller_that_names_the_rows_it_reads_gets_all_rows():
    x = torch.randn(2, 256)
    quantizer = ue8m0.activation_quantizer(None, True)
    codes, _ = quantizer(x, group_size=128, sorted_token_ids=None, num_tokens_post_padded=None, num_valid_tokens=1)
    assert torch.equal(codes.view(torch.uint8), ue8m0.quantize_reference(x, 128)[0].view(torch.uint8))


# The kernel, interpreted: scales.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [16, 64, 128])
def test_interpreted_scales_are_exact(interpreted, monkeypatch, dtype, group):
    x = groups_of(edges(dtype).tolist(), dtype, group)
    assert torch.equal(run_guarded(interpreted, x, group, monkeypatch)[1], expected(x, group)[1])


@pytest.mark.parametrize("many", [False, True])
def test_interpreted_scales_of_few_groups_and_of_many(interpreted, monkeypatch, many):
    monkeypatch.setattr(interpreted, "FEW_GROUPS", 0 if many else 4096)
    for rows in (1, 2, 37):
        x = torch.randn(rows, 7 * GROUP) * torch.exp(torch.randn(rows, 1) * 5)
        assert torch.equal(run_guarded(interpreted, x, GROUP, monkeypatch)[1], expected(x)[1])


def test_interpreted_kernel_of_no_rows(interpreted):
    codes, scale = interpreted._launch(torch.empty(0, 256), 128)
    assert codes.shape == (0, 256) and scale.shape == (0, 2)


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("num_groups", [8, 10**6])
def test_compiles_for_the_gpus_with_16_byte_loads(arch, num_groups):
    ptx = compiled(arch, ue8m0_kernel._choose_launch(num_groups))
    assert re.search(r"ld\.global\S*\.v4\.b32", ptx)
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert ptx.index("griddepcontrol.wait") < ptx.index("griddepcontrol.launch_dependents")
    assert ptx.index("griddepcontrol.wait") < ptx.index("ld.global")


def compiled(arch, launch):
    """The kernel's PTX for an SM, bf16, aligned base pointers."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    kernel = ue8m0_kernel._quantize_kernel
    pointers = dict(x="*bf16", codes="*fp8e4nv", scales="*fp32")
    constants = dict(GROUP_SIZE=GROUP, GROUPS=launch.elements // GROUP, USE_PDL=True, EARLY=launch.early)
    types = {**pointers, "num_groups": "i32", **dict.fromkeys(constants, "constexpr")}
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    source = ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, constants, aligned)
    return compile(source, target=GPUTarget("cuda", arch, 32), options=dict(num_warps=launch.num_warps, num_stages=1)).asm["ptx"]


# The kernel on the GPU: codes and scales.


def assert_kernel_is_right(x, patch, group=GROUP):
    codes, scale = run_guarded(ue8m0_kernel, x, group, patch)
    expected_codes, expected_scale = expected(x, group)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(codes, expected_codes)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [16, 32, 64, 128, 256])
def test_gpu_at_the_edges(monkeypatch, dtype, group):
    assert_kernel_is_right(groups_of(edges(dtype).tolist(), dtype, group, "cuda"), monkeypatch, group)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_a_million_groups(monkeypatch, dtype):
    """10**6 groups: random ones over the dtype's whole range, and ones at the edges of the exponents."""
    at_edges = edges(dtype).double().cuda()
    for _ in range(16):
        exponents = torch.rand(62_500, 1, device="cuda") * 240 - 124 if dtype != torch.float16 else torch.rand(62_500, 1, device="cuda") * 38 - 23
        x = (torch.randn(62_500, GROUP, device="cuda") * torch.exp2(exponents)).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
        picked = at_edges[torch.randint(len(at_edges), (31_250,), device="cuda")]
        x[:31_250] = (torch.rand(31_250, GROUP, device="cuda", dtype=torch.float64) * 0.99 * picked[:, None]).float()
        x[:31_250, 5] = -picked.float()
        assert_kernel_is_right(x.to(dtype), monkeypatch)


@gpu
@pytest.mark.parametrize("rows", [1, 2, 3, 64, 1000, 4096])
@pytest.mark.parametrize("columns", [128, 256, 384, 2048, 4096, 6144, 7168])
def test_gpu_shapes(monkeypatch, rows, columns):
    assert_kernel_is_right(torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16), monkeypatch)


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_what_is_not_finite_is_as_in_the_reference(monkeypatch, dtype):
    x = torch.randn(4096, GROUP, device="cuda", dtype=dtype)
    for value in (INFINITY, -INFINITY, float("nan")):
        x[torch.randint(4096, (500,)), torch.randint(GROUP, (500,))] = value
    x[7] = float("nan")
    codes, scale = run_guarded(ue8m0_kernel, x, GROUP, monkeypatch)
    reference_codes, reference_scale = ue8m0.quantize_reference(x.cpu(), GROUP)
    assert torch.equal(scale.cpu(), reference_scale)
    assert torch.equal(codes.cpu(), reference_codes.view(torch.uint8))


@gpu
def test_gpu_more_than_2_to_the_31_elements():
    x = torch.randn(1, 1 << 14, device="cuda", dtype=torch.bfloat16).expand((1 << 17) + 3, -1).contiguous()
    assert x.numel() > 2**31
    codes, scale = ue8m0_kernel.quantize_cuda(x, GROUP)
    expected_codes, expected_scale = expected(x[:1])
    assert (scale == expected_scale).all()
    assert all((part.view(torch.uint8) == expected_codes).all() for part in codes.split(4096))


@gpu
@pytest.mark.parametrize("rows", [1, 64, 4096])
def test_gpu_replays_from_a_cuda_graph_behind_the_kernel_that_writes_its_input(rows):
    x = torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16)
    source, graph = x.clone(), torch.cuda.CUDAGraph()
    ue8m0.quantize(x, GROUP)
    with torch.cuda.graph(graph):
        x.copy_(source)
        codes, scale = ue8m0.quantize(x, GROUP)
        again, scale_again = ue8m0.quantize((codes.float() * 3).bfloat16(), GROUP)
    for _ in range(5):
        source.copy_(torch.randn_like(source))
        x.fill_(float("nan"))
        graph.replay()
        expected_codes, expected_scale = expected(source)
        assert torch.equal(codes.view(torch.uint8), expected_codes) and torch.equal(scale, expected_scale)
        expected_codes, expected_scale = expected((codes.float() * 3).bfloat16())
        assert torch.equal(again.view(torch.uint8), expected_codes) and torch.equal(scale_again, expected_scale)


@gpu
def test_gpu_compiles_for_two_ranges_of_sizes_and_no_more():
    """A batch size met for the first time in mid-service must not compile."""
    kernel = ue8m0_kernel._quantize_kernel
    for rows in (1, 4096):
        ue8m0.quantize(torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16), GROUP)
    before = sum(len(cache[0]) for cache in kernel.device_caches.values())
    for rows in (2, 3, 16, 31, 33, 511, 513, 2000, 4095):
        ue8m0.quantize(torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16), GROUP)
    assert sum(len(cache[0]) for cache in kernel.device_caches.values()) == before


@gpu
def test_gpu_allocates_its_results_and_nothing_else():
    x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    ue8m0.quantize(x, GROUP)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    codes, scale = ue8m0.quantize(x, GROUP)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 2
