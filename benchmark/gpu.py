"""What the benchmarks measure with, and say about the machine."""

from __future__ import annotations

import os
import platform
import shlex
import statistics
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional

import torch


@contextmanager
def time_limit(seconds: float, before_the_end: Callable[[], object]) -> Iterator[None]:
    """End the process, status 3, where the block does not end in time: a kernel that waits for ever leaves nothing else to do."""

    def give_up() -> None:
        before_the_end()
        os._exit(3)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def gpus_or_exit(least: int) -> int:
    """How many GPUs there are; ends the program where there are fewer than it needs."""
    found = torch.cuda.device_count()
    if found < least:
        raise SystemExit(f"needs {least} GPUs, found {found}")
    return found


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """``||result - exact|| / ||exact||``; ``exact`` is float64."""
    return ((result.double() - exact).norm() / exact.norm()).item()


def poison_free_memory(like: torch.Tensor) -> None:
    """Fill what the allocator hands out next with NaN, so that an element never written shows."""
    blocks = [torch.full_like(like, float("nan")) for _ in range(40)]
    if like.is_cuda:
        torch.cuda.synchronize()
    del blocks


def exact_finalize(bundle: Any) -> torch.Tensor:
    """``[T, H]`` float64: a ``DeferredMoeOutput`` that has a row for every pair, and a shared expert, finalized."""
    rows = bundle.gemm2_out[bundle.expanded_idx_to_permuted_idx.long()].double()
    return (rows * bundle.expert_weights[..., None].double()).sum(1) * bundle.routed_scaling_factor + bundle.shared_output.double()


def exact_norm(total: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of float64 rows."""
    return total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps) * gamma.double()


def sglang_version_in(tree: Optional[Path]) -> str:
    """Of the package in a folder, by the name of its metadata, which pip leaves beside it."""
    if tree is None:
        return "not run"
    return next((folder.stem.split("-")[1] for folder in sorted(tree.glob("sglang-*.dist-info"))), "of unknown version")


def describe_run() -> dict:
    """What a reader of any result needs to judge or repeat it: when, by which command, on which machine."""
    on_gpu = torch.cuda.is_available()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name() if on_gpu else "CPU",
        "driver": driver_version() if on_gpu else "none",
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def in_turns(works: Mapping[str, Callable[[], float]], rounds: int) -> Dict[str, List[float]]:
    """What each work returned in each round. Works take turns within a round, forwards and backwards in turn."""
    found: Dict[str, List[float]] = {name: [] for name in works}
    for number in range(rounds):
        for name in list(works)[:: -1 if number % 2 else 1]:
            found[name].append(works[name]())
    return found


def driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]


def elapsed_us(work: Callable[[], object]) -> float:
    """Microseconds of the GPU for ``work()``, between two events on the current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def host_us(run: Callable[[], object], calls: int) -> float:
    """Microseconds of host time per call outside a CUDA graph."""
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / calls * 1e6


def copy_bandwidth(gibibytes: int) -> float:
    """GB/s of a device-to-device copy, bytes read plus bytes written; the median of 20."""
    source = torch.ones(gibibytes << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / statistics.median([elapsed_us(lambda: target.copy_(source)) for _ in range(20)]) / 1e3
