"""Compiles and loads ``boundary.cu``, once per configuration.

By apache-tvm-ffi's build helper, which SGLang and FlashInfer bring along for their own kernels: it runs nvcc through
ninja, keeps the library, and locks the build so that ranks share one. The library's name holds a hash of the source,
which the helper itself leaves to the files' times. It needs no
torch headers (a torch extension of the same source compiles three times as long and is bound to one torch release).
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any, List, NamedTuple, Set

import torch

SOURCE = Path(__file__).with_name("boundary.cu")
ACTIVATIONS = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
WEIGHTS = {torch.float32: "float", torch.bfloat16: "__nv_bfloat16"}


_LOADED: Set["Config"] = set()


class Config(NamedTuple):
    """What is compiled in: ``world_size`` ranks, rows of ``hidden`` elements of ``activation``, ``top_k`` weights of ``weight``."""

    world_size: int
    hidden: int
    top_k: int
    activation: torch.dtype
    weight: torch.dtype

    @property
    def flags(self) -> List[str]:
        return [
            f"-DWORLD_SIZE={self.world_size}",
            f"-DHIDDEN={self.hidden}",
            f"-DTOP_K={self.top_k}",
            f"-DACTIVATION={ACTIVATIONS[self.activation]}",
            f"-DWEIGHT={WEIGHTS[self.weight]}",
        ]


@lru_cache(maxsize=None)
def load(config: Config) -> Any:
    """The module of this configuration, compiled now where no earlier process did (some 20 s).

    Not for use while a CUDA graph is being captured: compile before.

    Raises:
        RuntimeError: the compiler is missing or fails; the message holds its output.
    """
    module = build(config, SOURCE)
    _LOADED.add(config)
    return module


def build(config: Config, source: Path) -> Any:
    """As ``load``, of any version of ``boundary.cu``, anew with each call."""
    import tvm_ffi.cpp

    name = "moe_boundary_{}_w{}_h{}_k{}_{}_{}".format(
        hashlib.sha256(source.read_bytes()).hexdigest()[:12],
        config.world_size,
        config.hidden,
        config.top_k,
        _short(config.activation),
        _short(config.weight),
    )
    module = tvm_ffi.cpp.load(name, cuda_files=[str(source)], extra_cuda_cflags=config.flags)
    module.prepare()
    return module


def is_loaded(config: Config) -> bool:
    """Whether ``load`` would return without compiling."""
    return config in _LOADED


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[dtype]
