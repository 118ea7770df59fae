"""What the benchmarks that serve on NVIDIA GPUs share: how a server is started, fixed prompts, how two servers' answers compare."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Sequence

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ci"))

from cpu_serving.server import Configuration  # noqa: E402
from gpu import sglang_version_in  # noqa: E402

ARGUMENTS = (
    "--dtype bfloat16 --skip-tokenizer-init --attention-backend triton --moe-runner-backend triton --sampling-backend pytorch "
    "--grammar-backend none --disable-shared-experts-fusion --mem-fraction-static 0.2 --max-running-requests 16 --context-length 2048 "
    "--disable-radix-cache --skip-server-warmup --cuda-graph-bs-decode 1 2 4 8 16 --cuda-graph-backend-prefill disabled"
).split()
MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
NEW_TOKENS = 32


@dataclass(frozen=True)
class GpuConfiguration(Configuration):
    """A configuration served on GPUs, with SGLang plugins from these folders."""

    plugins: Sequence[Path] = ()

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_") or "SKIP" in name}
        inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        path = os.pathsep.join([str(Path(self.tree).resolve()), *inherited, *map(str, self.plugins)])
        return {**kept, **MULTICAST_OFF, "PYTHONPATH": path, "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0", **self.flags}

    def command(self, port: int) -> list[str]:
        own = ["--model-path", str(self.model), "--tp", str(self.tp), "--host", "127.0.0.1", "--port", str(port)]
        return [sys.executable, "-m", "sglang.launch_server", *ARGUMENTS, *own, *self.arguments]


def prompts() -> list[list[int]]:
    """Prompts of 1 to 40 tokens, fixed."""
    return [[(17 * start + 31 * place) % 1000 + 2 for place in range(length)]
            for start, length in enumerate((1, 2, 5, 9, 16, 24, 33, 40))]


def compare(said: list[dict], reference: list[dict]) -> dict:
    """Tokens and logprobs of one server against another's, up to the first differing token of each answer."""
    same_tokens = sum(one["tokens"] == other["tokens"] for one, other in zip(said, reference))
    distances = []
    for one, other in zip(said, reference):
        for token, other_token, logprob, other_logprob in zip(one["tokens"], other["tokens"], one["logprobs"], other["logprobs"]):
            if token != other_token:
                break
            distances.append(abs(logprob - other_logprob))
    return {"answers": len(said), "same_tokens": same_tokens, "bit_equal": said == reference,
            "logprob_distance_max": max(distances, default=None), "logprob_distance_mean": sum(distances) / len(distances) if distances else None}


def versions(tree: Path) -> dict:
    """What this was run with; ``tree`` holds the ``sglang`` package that is served."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpus = subprocess.run(query, capture_output=True, text=True).stdout if shutil.which("nvidia-smi") else ""
    return {"gpus": gpus.splitlines(), "torch": torch.__version__, "cuda": torch.version.cuda,
            "python": sys.version.split()[0], "sglang": sglang_version_in(tree), "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
