"""SGLang plugin, found through its entry point when this folder is on PYTHONPATH: keeps the activation scales of each MoE GEMM.

It stands before the Triton GEMM kernel itself, so it sees what the kernel is given, whoever quantised. Calls within a CUDA graph capture
are not kept, for their contents come later. Needs GEMM_SCALES=FOLDER; each call writes one file there.
"""
import itertools
import os
from pathlib import Path

import torch

FOLDER = "GEMM_SCALES"
MOST_CALLS = 2000


def register() -> None:
    """Called by SGLang once in each process, before it builds a model."""
    if os.environ.get(FOLDER):
        from sglang.kernels.ops.moe import fused_moe_triton_kernels

        fused_moe_triton_kernels.fused_moe_kernel = Recorder(fused_moe_triton_kernels.fused_moe_kernel, Path(os.environ[FOLDER]))


class Recorder:
    """The kernel; each launch is recorded first."""

    def __init__(self, kernel, folder: Path):
        self._kernel, self._folder, self._calls = kernel, folder, itertools.count()

    def __getattr__(self, name):
        return getattr(self._kernel, name)

    def __getitem__(self, grid):
        launch = self._kernel[grid]

        def recorded(activations, activations_desc, weight, weight_desc, bias, out, scale, *rest, **options):
            if scale is not None and not (scale.is_cuda and torch.cuda.is_current_stream_capturing()):
                self._keep(activations, weight, scale)
            return launch(activations, activations_desc, weight, weight_desc, bias, out, scale, *rest, **options)

        return recorded

    def _keep(self, activations, weight, scale) -> None:
        call = next(self._calls)
        if call < MOST_CALLS:
            seen = {"weight": weight.data_ptr(), "weight_shape": tuple(weight.shape), "dtype": str(activations.dtype), "scale": scale.float().cpu()}
            torch.save(seen, self._folder / f"{os.getpid()}-{call:05d}.pt")
