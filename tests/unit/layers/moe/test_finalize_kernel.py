"""The finalize kernel against float64, and bit for bit against the torch reference where its products are exact.

On a CPU it runs in Triton's interpreter (fp32 and fp16, whose bf16 rounds differently) and is compiled for the GPU
targets; with ``-m gpu`` it runs on the GPU.
"""

import dataclasses
import re

import pytest
import torch

from sglang_overlay.srt.layers.moe import deferred_output
from sglang_overlay.srt.layers.moe.deferred_output import DeferredMoeOutput, finalize, finalize_reference

pytest.importorskip("triton")
from sglang_overlay.srt.layers.moe import finalize_kernel  # noqa: E402

gpu = pytest.mark.gpu
ROUNDING = {torch.float32: 3e-7, torch.float16: 8e-4, torch.bfloat16: 6e-3}
GUARD, POISON = 64, -12345.0


@pytest.fixture(scope="module")
def interpreted(interpret):
    return interpret(finalize_kernel)


def bundle(tokens, top_k, hidden, *, device="cpu", dtype=torch.float32, weights_dtype=torch.float32, padding=0,
           masked=0.0, shared=True, scale=2.5, shared_padding=0, offset=0, spare_rows=5):
    """A bundle of fresh random contents: permuted rows, NaN in every row and column that no token uses.

    Args:
        padding, shared_padding: columns between the rows of ``gemm2_out`` and ``shared_output``.
        offset: elements between an aligned address and each tensor's first element.
    """
    pairs = tokens * top_k
    rows = pairs + spare_rows
    index = torch.randperm(rows, device=device)[:pairs]
    index = torch.where(torch.rand(pairs, device=device) < masked, -1, index)
    used = torch.zeros(rows, 1, dtype=torch.bool, device=device)
    used[index[index >= 0]] = True
    gemm2_out = matrix(rows, hidden, padding, offset, dtype, device)
    gemm2_out[:, :hidden] = torch.where(used, torch.randn(rows, hidden, device=device), float("nan"))
    weights = matrix(tokens, top_k, 0, offset, weights_dtype, device).uniform_(-1, 1)
    shared_output = matrix(tokens, hidden, shared_padding, offset, dtype, device)[:, :hidden].normal_()
    index = matrix(tokens, top_k, 0, offset, torch.int32, device).copy_(index.view(tokens, top_k))
    return DeferredMoeOutput(
        gemm2_out, index, weights, tokens, top_k, hidden, scale, shared_output if shared else None
    )


def matrix(rows, columns, padding, offset, dtype, device):
    """``[rows, columns + padding]``, its first element ``offset`` elements after an aligned address; NaN or 0."""
    fill = float("nan") if dtype.is_floating_point else 0
    size = rows * (columns + padding)
    return torch.full((offset + size,), fill, dtype=dtype, device=device)[offset:].view(rows, columns + padding)


def in_float64(output):
    """``scale * sum_k weight * row + shared`` in float64."""
    index = output.expanded_idx_to_permuted_idx.long()
    total = torch.zeros(output.num_tokens, output.hidden, dtype=torch.float64, device=index.device)
    for k in range(output.top_k):
        rows = output.gemm2_out[:, : output.hidden].index_select(0, index[:, k].clamp_min(0)).double()
        weighted = rows * output.expert_weights[:, k, None].double()
        total += torch.where(index[:, k, None] >= 0, weighted, 0.0)
    total *= output.routed_scaling_factor
    return total if output.shared_output is None else total + output.shared_output.double()


def accumulated(output):
    """What fp32 sums may be off by, by the sum of the terms' magnitudes: of few elements, a result may be next to nothing."""
    shared = None if output.shared_output is None else output.shared_output.abs()
    magnitudes = dataclasses.replace(
        output, gemm2_out=output.gemm2_out.abs(), expert_weights=output.expert_weights.abs(), shared_output=shared)
    return (output.top_k + 2) * 2.0**-24 * in_float64(magnitudes).norm()


def with_exact_products(output):
    """The bundle with powers of two for weights and scale: every rounding left is one that the reference makes too."""
    exponents = torch.randint(-3, 1, output.expert_weights.shape, device=output.expert_weights.device)
    weights = torch.where(exponents % 2 == 0, 1.0, -1.0) * 2.0**exponents
    return dataclasses.replace(output, expert_weights=like(weights, output.expert_weights), routed_scaling_factor=2.0)


def like(values, tensor):
    """``values`` in memory laid out as ``tensor``'s, at the same distance from an aligned address."""
    offset = tensor.storage_offset() if tensor.stride(0) == tensor.shape[1] else 0
    return matrix(*tensor.shape, 0, offset, tensor.dtype, tensor.device).copy_(values)


def assert_right(module, output, patch):
    """Every element written and no other, as near to float64 as one rounding allows; where all products are exact,
    the reference's bits."""
    result = run_guarded(module, output, patch)
    assert result.shape == (output.num_tokens, output.hidden) and result.dtype == output.gemm2_out.dtype
    exact = in_float64(output)
    error = (result.double() - exact).norm()
    assert error <= 3 * ROUNDING[result.dtype] * exact.norm() + accumulated(output), f"relative error {error / exact.norm():.2e}"
    output = with_exact_products(output)
    assert torch.equal(run_guarded(module, output, patch), finalize_reference(output))


def run(module, output):
    return module.finalize_cuda(output) if output.gemm2_out.is_cuda else module._launch(output)


def run_guarded(module, output, patch):
    """The kernel's result, its memory poisoned before; what lies beside it is checked to be as before."""
    size = output.num_tokens * output.hidden
    memory = output.gemm2_out.new_full((size + 2 * GUARD,), POISON)
    patch.setattr(module, "_new_result", lambda _: memory[GUARD : GUARD + size].view(-1, output.hidden))
    result = run(module, output)
    assert size == 0 or result.data_ptr() == memory[GUARD:].data_ptr()
    assert (memory[:GUARD] == POISON).all() and (memory[GUARD + size :] == POISON).all()
    assert not (result == POISON).any(), "an element was not written"
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("hidden", [1, 7, 8, 1037])
@pytest.mark.parametrize("top_k", [1, 8, 17])
def test_interpreted_kernel_is_the_reference(interpreted, monkeypatch, dtype, hidden, top_k):
    options = (dict(masked=0.4), dict(shared=False, padding=3), dict(padding=8, shared_padding=5, offset=1))
    for tokens, layout in enumerate(options, start=1):
        assert_right(interpreted, bundle(tokens, top_k, hidden, dtype=dtype, **layout), monkeypatch)


def test_interpreted_kernel_of_no_tokens(interpreted):
    assert interpreted._launch(bundle(0, 2, 8)).shape == (0, 8)


def test_interpreted_kernel_takes_64_experts(interpreted, monkeypatch):
    assert_right(interpreted, bundle(2, 64, 24, masked=0.2), monkeypatch)


def test_interpreted_kernel_takes_no_expert_rows(interpreted):
    none = DeferredMoeOutput(torch.empty(0, 4), torch.full((2, 1), -1, dtype=torch.int32), torch.ones(2, 1), 2, 1, 4)
    assert interpreted._launch(none).tolist() == [[0.0] * 4] * 2


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_masked_pairs_contribute_nothing_even_where_everything_else_is_nan(interpreted, device):
    module = interpreted if device == "cpu" else finalize_kernel
    output = DeferredMoeOutput(
        torch.full((2, 16), float("nan"), device=device), torch.full((2, 3), -1, dtype=torch.int32, device=device),
        torch.full((2, 3), float("nan"), device=device), 2, 3, 16, shared_output=torch.ones(2, 16, device=device),
    )
    assert run(module, output).tolist() == [[1.0] * 16] * 2


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(
    "hidden, padding, vector",
    [(7168, 0, True), (7176, 0, True), (8, 8, True), (7168, 4, False), (7175, 0, False)],
)
def test_compiles_for_the_gpus_with_16_byte_access_where_rows_allow(arch, hidden, padding, vector):
    ptx = compiled(arch, hidden, hidden + padding)
    assert bool(re.search(r"ld\.global\S*\.v4\.b32", ptx)) == vector
    assert ("griddepcontrol.wait" in ptx) == (arch >= 90)


def compiled(arch, hidden, gemm2_stride):
    """The kernel's PTX for an SM, bf16, aligned base pointers."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    kernel = finalize_kernel._finalize_kernel
    pointers = dict(out="*bf16", gemm2_out="*bf16", index="*i32", weights="*fp32", shared="*bf16")
    constants = dict(GEMM2_STRIDE=gemm2_stride, SHARED_STRIDE=0, HIDDEN=hidden, TOP_K=2, UNROLL=2, BLOCK=1024,
                     HAS_SHARED=False, USE_PDL=arch >= 90)
    numbers = dict(scale="fp32", index_stride="i32", weights_stride="i32")
    types = {**pointers, **numbers, **dict.fromkeys(constants, "constexpr")}
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    source = ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, constants, aligned)
    options = dict(num_warps=4, enable_fp_fusion=False)
    return compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm["ptx"]


def test_a_cpu_bundle_goes_to_the_reference():
    output = bundle(3, 2, 8)
    assert not finalize_kernel.can_run(output)
    assert torch.equal(finalize(output), finalize_reference(output))
    with pytest.raises(ValueError, match="needs an NVIDIA GPU of SM80 or newer, got cpu"):
        finalize_kernel.finalize_cuda(output)


# On the GPU.


@gpu
@pytest.mark.parametrize("hidden", [1, 7, 8, 100, 2048, 7168, 7175])
@pytest.mark.parametrize("top_k", [1, 2, 6, 8, 17, 64])
def test_shapes(monkeypatch, hidden, top_k):
    for tokens in (0, 1, 3, 64, 1000):
        output = bundle(tokens, top_k, hidden, device="cuda", dtype=torch.bfloat16, masked=0.2)
        assert_right(finalize_kernel, output, monkeypatch)


@gpu
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("weights_dtype", deferred_output.WEIGHT_DTYPES)
@pytest.mark.parametrize("hidden", [7, 8, 100, 7168])
def test_dtypes(monkeypatch, dtype, weights_dtype, hidden):
    for shared in (True, False):
        output = bundle(64, 8, hidden, device="cuda", dtype=dtype, weights_dtype=weights_dtype, shared=shared)
        assert_right(finalize_kernel, output, monkeypatch)


@gpu
@pytest.mark.parametrize("shared_dtype", ROUNDING)
def test_shared_output_of_another_dtype(monkeypatch, shared_dtype):
    output = bundle(3, 8, 2048, device="cuda", dtype=torch.bfloat16)
    shared_output = output.shared_output.to(shared_dtype)
    assert_right(finalize_kernel, dataclasses.replace(output, shared_output=shared_output), monkeypatch)


@gpu
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("padding", [0, 1, 8, 100])
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_strides_and_alignments(monkeypatch, dtype, padding, offset):
    for hidden in (8, 2048, 7175):
        options = dict(padding=padding, shared_padding=padding // 2, offset=offset, masked=0.2)
        assert_right(finalize_kernel, bundle(64, 6, hidden, device="cuda", dtype=dtype, **options), monkeypatch)


@gpu
def test_weights_index_and_shared_output_in_wider_tensors(monkeypatch):
    wide = bundle(64, 16, 2048, device="cuda", dtype=torch.bfloat16)
    narrow = dataclasses.replace(
        wide, top_k=6, expert_weights=wide.expert_weights[:, 3:9],
        expanded_idx_to_permuted_idx=wide.expanded_idx_to_permuted_idx[:, 5:11],
        shared_output=wide.shared_output[:1].expand(64, 2048),
    )
    assert_right(finalize_kernel, narrow, monkeypatch)


@gpu
@pytest.mark.parametrize("dtype", ROUNDING)
def test_exact_on_a_grid(dtype):
    output = bundle(64, 8, 2048, device="cuda", dtype=dtype)
    grid = dataclasses.replace(
        output,
        gemm2_out=torch.randint(-4, 5, output.gemm2_out.shape, device="cuda").to(dtype),
        expert_weights=2.0 ** -torch.randint(0, 3, (64, 8), device="cuda"),
        shared_output=torch.randint(-8, 9, (64, 2048), device="cuda").to(dtype),
        routed_scaling_factor=2.0,
    )
    assert torch.equal(finalize(grid).double(), in_float64(grid).to(dtype).double())


@gpu
def test_every_token_masked_leaves_the_shared_output():
    output = bundle(64, 8, 7168, device="cuda", dtype=torch.bfloat16, masked=1.0)
    output.gemm2_out.fill_(float("nan"))
    assert torch.equal(finalize(output), output.shared_output)


@gpu
def test_rows_past_2_to_the_31_elements(monkeypatch):
    hidden, pairs = 7168, 64 * 8
    rows = 2**31 // hidden + 1000
    gemm2_out = torch.full((rows, hidden), float("nan"), dtype=torch.bfloat16, device="cuda")
    index = rows - 1 - torch.randperm(900, device="cuda")[:pairs]
    gemm2_out[index] = torch.randn(pairs, hidden, dtype=torch.bfloat16, device="cuda")
    assert index.min() * hidden >= 2**31
    output = dataclasses.replace(
        bundle(64, 8, hidden, device="cuda", dtype=torch.bfloat16), gemm2_out=gemm2_out,
        expanded_idx_to_permuted_idx=index.int().view(64, 8),
    )
    assert_right(finalize_kernel, output, monkeypatch)


@gpu
def test_65536_tokens_and_results_past_2_to_the_31_elements():
    tokens, hidden = 65536, 33024
    few = with_exact_products(bundle(64, 2, hidden, device="cuda", dtype=torch.bfloat16))
    output = dataclasses.replace(
        few, num_tokens=tokens, expert_weights=few.expert_weights.repeat(1024, 1),
        expanded_idx_to_permuted_idx=few.expanded_idx_to_permuted_idx.repeat(1024, 1),
        shared_output=few.shared_output.repeat(1024, 1),
    )
    assert tokens * hidden > 2**31
    result = finalize_kernel.finalize_cuda(output).view(1024, 64, hidden)
    expected = finalize_reference(few)
    assert all(torch.equal(part, expected) for part in result)


@gpu
def test_finalize_takes_the_kernel(monkeypatch):
    output = bundle(3, 8, 2048, device="cuda", dtype=torch.bfloat16)
    assert finalize_kernel.can_run(output)
    monkeypatch.setattr(deferred_output, "finalize_reference", lambda _: pytest.fail("the reference ran"))
    assert torch.isfinite(finalize(output)).all()


@gpu
def test_columns_apart_go_to_the_reference():
    output = with_exact_products(bundle(3, 2, 16, device="cuda"))
    apart = dataclasses.replace(output, gemm2_out=output.gemm2_out.t().contiguous().t())
    assert torch.equal(finalize(apart), finalize(output))
    with pytest.raises(ValueError, match="columns of every tensor must be adjacent"):
        finalize_kernel.finalize_cuda(apart)


@gpu
def test_more_than_64_experts_go_to_the_reference():
    output = bundle(3, 65, 16, device="cuda")
    assert not finalize_kernel.can_run(output)
    assert torch.equal(finalize(output), finalize_reference(output))


@gpu
@pytest.mark.parametrize("tokens", [1, 64, 1000])
def test_the_same_bits_in_every_run(tokens):
    output = bundle(tokens, 8, 7168, device="cuda", dtype=torch.bfloat16, masked=0.2)
    first = finalize(output)
    for _ in range(50):
        assert torch.equal(finalize(output), first)


@gpu
def test_allocates_the_result_and_nothing_else():
    output = bundle(64, 8, 7168, device="cuda", dtype=torch.bfloat16)
    finalize(output)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    result = finalize(output)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 1
    assert result.is_contiguous() and result.untyped_storage().nbytes() == result.nbytes


@gpu
@pytest.mark.parametrize("tokens", [1, 64, 1000])
def test_replays_from_a_cuda_graph(tokens):
    output = bundle(tokens, 8, 7168, device="cuda", dtype=torch.bfloat16, scale=2.0)
    finalize(output)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = finalize(output)
    for _ in range(3):
        other = with_exact_products(bundle(tokens, 8, 7168, device="cuda", dtype=torch.bfloat16, masked=0.3))
        output.gemm2_out.copy_(other.gemm2_out)
        output.expanded_idx_to_permuted_idx.copy_(other.expanded_idx_to_permuted_idx)
        output.expert_weights.copy_(other.expert_weights)
        output.shared_output.copy_(other.shared_output)
        result.fill_(POISON)
        graph.replay()
        assert torch.equal(result, finalize_reference(other))


@gpu
@pytest.mark.parametrize("tokens", [1, 16, 256])
def test_a_chain_in_a_graph_waits_for_what_it_reads(tokens):
    """Each result is the next call's expert rows or shared output, written just before it, also by other kernels."""
    first = with_exact_products(bundle(tokens, 1, 7168, device="cuda", dtype=torch.bfloat16, spare_rows=0))

    def chain(combine):
        output = first
        for step in range(24):
            result = combine(output)
            name = ("gemm2_out", "shared_output")[step % 2]
            output = dataclasses.replace(output, **{name: result.neg() if step % 3 == 0 else result})
        return combine(output)

    expected = chain(finalize_reference)
    chain(finalize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain(finalize)
    for _ in range(20):
        result.fill_(POISON)
        graph.replay()
        assert torch.equal(result, expected)


@gpu
def test_waits_in_a_graph_for_a_shared_output_of_another_stream():
    output = with_exact_products(bundle(64, 8, 7168, device="cuda", dtype=torch.bfloat16))
    expected, shared, rows = finalize_reference(output), output.shared_output.clone(), output.gemm2_out.clone()
    other, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    finalize(output)
    with torch.cuda.graph(graph):
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            torch.cuda._sleep(200_000)
            output.shared_output.copy_(shared)
        output.gemm2_out.copy_(rows)
        torch.cuda.current_stream().wait_stream(other)
        result = finalize(output)
    for _ in range(10):
        output.shared_output.fill_(POISON)
        output.gemm2_out.fill_(POISON)
        graph.replay()
        assert torch.equal(result, expected)


@gpu
def test_runs_on_the_current_stream():
    output = with_exact_products(bundle(64, 8, 7168, device="cuda", dtype=torch.bfloat16))
    expected, stream = finalize_reference(output), torch.cuda.Stream()
    for _ in range(20):
        output.gemm2_out.neg_()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000)
            output.gemm2_out.neg_()
            result = finalize(output)
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(result, expected)
