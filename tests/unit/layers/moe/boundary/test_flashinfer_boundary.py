"""The op over FlashInfer's pattern 7, on one rank and a stand-in for the kernel; its arguments beside FlashInfer 0.6.18's own."""

import ast
import inspect
import sys
from dataclasses import replace

import boundary_stand_ins
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from cpu_serving import trees
from flashinfer_wheels import OF_BASE, syntax_trees
from test_trtllm_signatures import parameters

from sglang_overlay.srt.layers.moe.boundary import flashinfer
from sglang_overlay.srt.layers.moe.deferred_output import DeferredMoeOutput

HIDDEN = 256


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    for name, module in boundary_stand_ins.flashinfer_modules().items():
        monkeypatch.setitem(sys.modules, name, module)


def workspace(rows=64):
    backing = boundary_stand_ins.Workspace(None, rows, HIDDEN)
    return flashinfer.Workspace.around(backing, 2, HIDDEN, torch.bfloat16, rows)


def bundle(tokens=3, top_k=2, rows=16, weight_dtype=torch.float32, dtype=torch.bfloat16, **changes):
    """Rows of small integers, which all dtypes hold; rows that no index names are NaN."""
    random = torch.Generator().manual_seed(tokens)
    index = torch.randperm(rows, generator=random)[: tokens * top_k].int().view(tokens, top_k)
    gemm2_out = torch.full((rows, HIDDEN), float("nan"))
    gemm2_out[index.flatten().long()] = torch.randint(-4, 5, (tokens * top_k, HIDDEN), generator=random).float()
    weights = torch.randint(1, 4, (tokens, top_k), generator=random) / 4
    fields = dict(
        gemm2_out=gemm2_out.to(dtype), expanded_idx_to_permuted_idx=index, expert_weights=weights.to(weight_dtype),
        num_tokens=tokens, top_k=top_k, hidden=HIDDEN,
    )
    return DeferredMoeOutput(**{**fields, **changes})


def take(output, residual=None, weight_bias=0.0):
    residual = torch.zeros(output.num_tokens, HIDDEN, dtype=output.gemm2_out.dtype) if residual is None else residual
    gamma = torch.full((HIDDEN,), 0.5, dtype=residual.dtype)
    return flashinfer.take(workspace(), output, residual, gamma, 1e-6, weight_bias)


def exact(output):
    has_expert = output.expanded_idx_to_permuted_idx >= 0
    rows = output.gemm2_out[:, :HIDDEN].double()[output.expanded_idx_to_permuted_idx.clamp_min(0).long()]
    weighted = (rows * output.expert_weights.double()[..., None]).masked_fill(~has_expert[..., None], 0.0)
    return output.routed_scaling_factor * weighted.sum(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_weights_of_both_dtypes_arrive_as_they_are(dtype, weight_dtype):
    output = bundle(weight_dtype=weight_dtype, dtype=dtype)
    _, residual_out = take(output)
    assert torch.equal(residual_out.double(), exact(output)) and residual_out.dtype == dtype


def test_c3_a_flat_index_is_refused_with_its_shape():
    output = bundle()
    flat = output.expanded_idx_to_permuted_idx.flatten()
    residual = torch.zeros(3, HIDDEN, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"must be \[3, K\] like the weights \[3, 2\], got \[6\]"):
        flashinfer.moe_finalize_allreduce_residual_rmsnorm(
            output.gemm2_out, flat, output.expert_weights, None, residual, residual[0], 1.0, 1e-6, 0.0, workspace().number
        )


def test_c3_a_bundle_with_a_flat_index_is_right():
    output = bundle()
    flat = replace(output, expanded_idx_to_permuted_idx=output.expanded_idx_to_permuted_idx.flatten())
    assert torch.equal(take(flat)[1], take(output)[1])


@pytest.mark.parametrize("tokens, rows", [(1, 64), (16, 6272)])
def test_c4_padded_rows_are_no_tokens(tokens, rows):
    output = bundle(tokens=tokens, top_k=8, rows=rows)
    norm_out, residual_out = take(output)
    assert norm_out.shape == residual_out.shape == (tokens, HIDDEN)
    assert torch.equal(residual_out.double(), exact(output))
    assert workspace(rows=tokens).takes(tokens)


def test_c5_the_factor_is_applied_once():
    x = torch.arange(HIDDEN).bfloat16()[None] / 256
    output = bundle(1, 1, 1, gemm2_out=x, expanded_idx_to_permuted_idx=torch.zeros(1, 1, dtype=torch.int32),
                    expert_weights=torch.ones(1, 1), routed_scaling_factor=1.5)
    assert torch.equal(take(output)[1], (1.5 * x.float()).bfloat16())


def test_the_factor_is_multiplied_before_the_weights_are_rounded():
    weights = torch.full((1, 1), 1 / 3)
    assert flashinfer.scale_factors(weights, 2.5, torch.bfloat16).item() == (weights * 2.5).bfloat16().item()
    assert flashinfer.scale_factors(weights, 2.5, torch.bfloat16).item() != (weights.bfloat16() * 2.5).item()


def test_any_negative_index_is_no_expert():
    index = torch.tensor([[0, -1], [-7, 1]], dtype=torch.int32)
    output = bundle(2, 2, 4, gemm2_out=torch.ones(2, HIDDEN).bfloat16(), expanded_idx_to_permuted_idx=index,
                    expert_weights=torch.tensor([[1.0, float("nan")], [float("nan"), 2.0]]))
    assert take(output)[1][:, 0].tolist() == [1.0, 2.0]


def test_shared_output_residual_and_gemma_norm():
    output = bundle().with_shared_output(torch.ones(HIDDEN, 3).bfloat16().t())
    residual = torch.full((HIDDEN, 3), 2.0).bfloat16().t()
    norm_out, residual_out = take(output, residual, weight_bias=1.0)
    assert torch.equal(residual_out.double(), exact(output) + 3)
    assert torch.equal(norm_out, boundary_stand_ins.rms_norm(residual_out, torch.tensor(0.5), 1e-6, 1.0).bfloat16())
    assert residual.unique().tolist() == [2.0] and residual_out.is_contiguous()


def test_no_tokens_are_no_call():
    norm_out, residual_out = take(bundle(tokens=0))
    assert norm_out.shape == residual_out.shape == (0, HIDDEN)


def test_the_fake_op_has_t_rows():
    from torch._subclasses.fake_tensor import FakeTensorMode

    output, number = bundle(tokens=3, rows=64), workspace().number
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        tensors = [mode.from_tensor(t) for t in (output.gemm2_out, output.expanded_idx_to_permuted_idx, output.expert_weights)]
        residual = torch.empty(3, HIDDEN, dtype=torch.bfloat16)
        outs = flashinfer.moe_finalize_allreduce_residual_rmsnorm(*tensors, None, residual, residual[0], 1.0, 1e-6, 0.0, number)
    assert [(tuple(out.shape), out.dtype) for out in outs] == [((3, HIDDEN), torch.bfloat16)] * 2


def test_the_op_is_what_its_schema_says():
    output, residual = bundle(), torch.zeros(3, HIDDEN, dtype=torch.bfloat16)
    arguments = (output.gemm2_out, output.expanded_idx_to_permuted_idx, output.expert_weights, None, residual,
                 torch.ones(HIDDEN).bfloat16(), 1.0, 1e-6, 0.0, workspace().number)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(flashinfer.moe_finalize_allreduce_residual_rmsnorm, arguments, test_utils=checks)


@pytest.mark.parametrize("change, words", [
    ({"gemm2_out": torch.zeros(16, 2 * HIDDEN).bfloat16()[:, :HIDDEN]}, "row stride must be 256"),
    ({"gemm2_out": torch.zeros(16, HIDDEN)}, "all be bf16 or all fp16"),
])
def test_what_flashinfer_would_misread_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        take(bundle(**change), torch.zeros(3, HIDDEN, dtype=torch.bfloat16))


@pytest.mark.parametrize("world_size, hidden, dtype, words", [
    (3, 7168, torch.bfloat16, "ranks, there are 3"),
    (2, 7168, torch.float32, "bf16 or fp16"),
    (2, 7168 + 128, torch.bfloat16, "multiple of 256"),
    (2, 256 * 33, torch.bfloat16, "does not divide"),
])
def test_what_a_model_does_not_meet_is_named(world_size, hidden, dtype, words):
    assert words in flashinfer.shape_unmet(world_size, hidden, dtype)


@pytest.mark.parametrize("world_size", flashinfer.WORLD_SIZES)
@pytest.mark.parametrize("hidden", [256, 2048, 5120, 6144, 7168, 8192, 16384])
def test_models_there_are_meet_it(world_size, hidden):
    assert flashinfer.shape_unmet(world_size, hidden, torch.bfloat16) == ""


@given(st.sampled_from(flashinfer.WORLD_SIZES), st.integers(1, 64).map(lambda blocks: 256 * blocks))
def test_the_most_tokens_are_those_that_fit_the_largest_buffer(world_size, hidden):
    tokens = flashinfer.most_tokens(world_size, hidden)
    assert tokens * hidden * 2 * world_size <= flashinfer.MAX_COMM_SIZE < (tokens + 1) * hidden * 2 * world_size


def test_a_workspace_takes_no_more_tokens_than_it_was_made_for():
    assert workspace(rows=8).takes(8) and not workspace(rows=8).takes(9)


# ------------------------------------------------------------------------------------------- beside FlashInfer's own


@pytest.fixture(scope="module")
def real():
    """``file -> syntax tree`` of FlashInfer 0.6.18, read without running."""
    trees = syntax_trees(OF_BASE["0.5.20"], ["comm/allreduce.py", "comm/trtllm_ar.py"])
    return {file.removeprefix("comm/").removesuffix(".py"): tree for file, tree in trees.items()}


def functions(tree):
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", ["allreduce_fusion", "create_allreduce_fusion_workspace"])
def test_the_stand_in_has_the_real_parameters(real, name):
    signature = inspect.signature(getattr(boundary_stand_ins, name))
    ours = {parameter.name: parameter.default is not parameter.empty for parameter in signature.parameters.values()}
    assert list(ours.items()) == list(parameters(functions(real["allreduce"])[name]).items())


def test_a_workspace_is_asked_with_the_real_parameters(real):
    classes = {node.name: node for node in real["allreduce"].body if isinstance(node, ast.ClassDef)}
    method = functions(classes["TRTLLMAllReduceFusionWorkspace"])["is_buffer_size_sufficient"]
    assert list(parameters(method)) == list(inspect.signature(boundary_stand_ins.Workspace.is_buffer_size_sufficient).parameters)


def test_the_pattern_and_the_largest_size_are_flashinfers(real):
    assigned = {}
    for node in ast.walk(real["trtllm_ar"]):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            assigned.setdefault(node.targets[0].id, ast.unparse(node.value))
    assert eval(assigned["MAX_COMM_SIZE"]) == flashinfer.MAX_COMM_SIZE
    assert int(assigned["kMoEFinalizeARResidualRMSNorm"]) == boundary_stand_ins.AllReduceFusionPattern.kMoEFinalizeARResidualRMSNorm


def test_the_unified_call_still_drops_the_factor(real):
    """Which is why it goes into the weights; once FlashInfer hands it on, it may be left to the kernel."""
    function = functions(real["allreduce"])["allreduce_fusion"]
    assert "routed_scaling_factor" not in parameters(function)


@pytest.mark.parametrize("base", trees.BASES)
def test_what_is_borrowed_of_sglang_is_there(base):
    """Its probe of memory and its transport, both private to its module; with the parameters they are called with."""
    file = trees.stock_tree(base) / "sglang" / "srt" / "layers" / "flashinfer_comm_fusion.py"
    tree = ast.parse(file.read_text())
    probe = functions(tree)["_preflight_check_workspace_memory"]
    assert list(parameters(probe)) == ["world_size", "max_token_num", "hidden_dim", "dtype", "cpu_group"]
    (transport,) = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == "_FixedTorchDistBackend"]
    assert list(parameters(functions(transport)["__init__"])) == ["self", "device_group", "cpu_group"]
    assigned = [ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Assign)]
    assert {"_TorchDistBackend = None", "_TorchDistBackend = _FixedTorchDistBackend"} <= set(assigned)
