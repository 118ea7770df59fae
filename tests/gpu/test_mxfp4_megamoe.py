"""MXFP4 experts of SGLang 0.5.23's own layers in FlashInfer's mega kernel: loaded as a checkpoint's are, eagerly and in captured CUDA graphs.

Needs a Hopper GPU, and a patched 0.5.23 and FlashInfer 0.7.4 on the path: ``PYTHONPATH=TREE pytest -m gpu tests/gpu/test_mxfp4_megamoe.py``; with
``PYTHONPATH=TREE:benchmark`` and ``-p mxfp4_interleave`` nothing of FlashInfer's CUTLASS module is compiled for it.
"""

import megamoe_worker
import mxfp4_moe
import pytest
import torch
from megamoe_worker import FLAG, PARAMETERS, SHAPE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"),
]
LIMITS = (None, mxfp4_moe.GRID_LIMIT)


@pytest.fixture(scope="module")
def experts(one_rank):
    """``limit`` -> a layer whose experts are loaded and handed to the kernel, and their weights."""
    from sglang.sglang_overlay.srt.environ import settings
    from sglang.srt.layers.moe.utils import MoeA2ABackend, MoeRunnerBackend
    from sglang.srt.runtime_context import get_flags

    patch = pytest.MonkeyPatch()
    patch.setenv(FLAG, "1")
    patch.setenv("MEGA_NO_DIST", "1")
    settings.cache_clear()
    moe = get_flags().moe
    patch.setattr(moe, "runner_backend", MoeRunnerBackend("flashinfer_megamoe"))
    patch.setattr(moe, "a2a_backend", MoeA2ABackend("flashinfer_megamoe"))
    yield {limit: make(limit) for limit in LIMITS}
    patch.undo()
    settings.cache_clear()


def make(limit):
    weights = mxfp4_moe.grid_experts(SHAPE)
    with torch.device("cuda"):
        layer = megamoe_worker.build_experts({"limit": limit})
    own = megamoe_worker.load(layer, weights, 0)
    assert all(torch.equal(getattr(layer, name).data.view(torch.uint8).cpu(), part) for name, part in zip(PARAMETERS, own))
    layer.quant_method.process_weights_after_loading(layer)
    return layer, mxfp4_moe.Experts(*(part.cuda() for part in weights))


def inputs(tokens, seed):
    x, ids, routing = mxfp4_moe.grid_tokens(SHAPE, tokens, seed, "cuda")
    ids[1::3, 0] = -1
    return x, ids.int(), routing


def forward(layer, x, ids, routing):
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    return layer(x, StandardTopKOutput(routing, ids, None))


@pytest.mark.parametrize("tokens", [0, 1, 3, 64, 65, 256, 1000, 1100])
@pytest.mark.parametrize("limit", LIMITS)
def test_exact_on_the_grid(experts, limit, tokens):
    layer, weights = experts[limit]
    given = inputs(tokens, seed=1)
    out = forward(layer, *given)
    assert out.dtype == torch.bfloat16 and out.shape == given[0].shape
    assert torch.equal(out.double(), mxfp4_moe.moe(*given, weights, limit))


@pytest.mark.parametrize("tokens", [1, 64, 200])
def test_a_captured_graph_of_two_layers_takes_other_tokens(experts, tokens):
    """Layers of one shape share workspaces: neither may write over the other's result."""
    static = inputs(tokens, seed=2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [forward(experts[limit][0], *static) for limit in LIMITS]
    for seed in (3, 4):
        given = inputs(tokens, seed)
        for tensor, new in zip(static, given):
            tensor.copy_(new)
        for out in outputs:
            out.fill_(float("nan"))
        graph.replay()
        for out, limit in zip(outputs, LIMITS):
            assert torch.equal(out.double(), mxfp4_moe.moe(*given, experts[limit][1], limit))
