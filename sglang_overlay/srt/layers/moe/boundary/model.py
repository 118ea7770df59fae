"""How the layers of one model take bundles: the ways that can run, what they need, and which one T tokens take.

Settled once, when the model's layers are built: by then the process groups exist, and no graph has been captured. Every
rank of the tensor-parallel group settles it together and alike: what one rank cannot do, no rank does.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch

from ....environ import FUSION, POLICY, Settings, settings
from ...layernorm import fusion_unmet
from . import agreement, flashinfer
from .kernel import MAX_HIDDEN, MAX_TOP_K, WORLD_SIZES
from .module import ACTIVATIONS
from .policy import Policy, PolicyError, Table

# Rows of a plane, at most. Every rank has room for the rows of all ranks, twice: at 8 ranks and a hidden size of 8192
# this is 151 MB. A boundary of more tokens is bound by bandwidth, where one kernel gains little over two.
FUSED_MAX_TOKENS = 512
# On two H200s FlashInfer's kernel hung from 128 tokens on, now and then (benchmark/results/boundary_h200*.md), and never below.
FLASHINFER_MAX_TOKENS = 64


class Facts(NamedTuple):
    """What of a model matters at its boundaries.

    Attributes:
        world_size: of the tensor-parallel group.
        activation: dtype of hidden states, residual and norm weights.
        weight: the expert weights' dtype that is expected, for which the kernel is compiled beforehand.
        norms: the ``input_layernorm`` of each layer that takes a bundle.
    """

    world_size: int
    hidden: int
    top_k: int
    activation: torch.dtype
    weight: torch.dtype
    norms: Tuple[torch.nn.Module, ...]


@dataclass(frozen=True)
class Boundary:
    """How a model's layers take bundles.

    Attributes:
        wanted: the way that was asked for, or ``auto``.
        separate_up_to: the largest number of tokens for ``separate``; 0 where it cannot run.
        policy: what was measured for this machine and model.
        plane: an ``ExchangePlane`` of this model's own, where ``fused`` can run.
        workspace: FlashInfer's, of this model's own, where ``flashinfer`` can run.
    """

    wanted: str
    separate_up_to: int
    policy: Policy = Policy()
    plane: Optional[Any] = None
    workspace: Optional[flashinfer.Workspace] = None

    def way(self, num_tokens: int) -> str:
        """The way for a forward of this many tokens; the same on every rank."""
        preferred = self.policy.ways(num_tokens) if self.wanted == "auto" else (self.wanted,)
        return next((way for way in preferred if self.takes(way, num_tokens)), self.fallback(num_tokens))

    def fallback(self, num_tokens: int) -> str:
        """The way where no other fits: ``separate`` where it can run and was not ruled out, else ``eager``."""
        return "separate" if self.wanted != "eager" and self.takes("separate", num_tokens) else "eager"

    def takes(self, way: str, num_tokens: int) -> bool:
        """Whether a way has what it needs for this many tokens."""
        if way == "fused":
            return self.plane is not None and num_tokens <= self.plane.max_tokens
        if way == "flashinfer":
            return self.workspace is not None and self.workspace.takes(num_tokens)
        return num_tokens <= self.separate_up_to if way == "separate" else True

    def gains(self, num_tokens: int) -> bool:
        """Whether the way for this many tokens was measured faster than stock."""
        return self.way(num_tokens) in self.policy.ways(num_tokens)

    def gains_up_to(self, max_tokens: int) -> bool:
        """Whether any forward of at most ``max_tokens`` tokens is measured faster than stock."""
        return any(map(self.gains, self._ends(max_tokens)))

    def ranges(self, max_tokens: int) -> str:
        """Which numbers of tokens, up to ``max_tokens``, take which way, in words."""
        steps: List[Tuple[int, str]] = []
        for end in self._ends(max_tokens):
            way = self.way(end) + (" (measured faster than stock)" if self.gains(end) else "")
            if steps and steps[-1][1] == way:
                steps.pop()
            steps.append((end, way))
        return ", ".join(f"{way} up to {end} tokens" for end, way in steps)

    def _ends(self, max_tokens: int) -> List[int]:
        """The last number of tokens of each range within which nothing changes, up to ``max_tokens``."""
        ends = {point.tokens - less for point in self.policy.points for less in (0, 1)}
        ends |= {resource.max_tokens for resource in (self.plane, self.workspace) if resource is not None}
        ends |= {self.separate_up_to, max_tokens}
        return sorted(end for end in ends if 0 < end <= max_tokens)


def agreed_policy(world_size: int, hidden: int) -> Policy:
    """What was measured for this machine and model, restricted to the way asked for; the same on every rank.

    Collective. Ranks that read different tables, or whose flags differ, would part ways at the first forward that
    tells them apart, so they compare what they read before it.

    Raises:
        PolicyError: on every rank, where one cannot use its table, or ranks differ in flags or in a table of the user's.
    """
    flags = settings()
    policy, error = Policy(), ""
    try:
        policy = Table.read(flags.policy).policy(arch(), world_size, hidden)
    except PolicyError as refused:
        error = str(refused)
    error = agreement.first_reason(error)
    if error:
        raise PolicyError(error)
    seen = agreement.all_ranks((asdict(flags), policy))
    odd = next((rank for rank, other in enumerate(seen) if other != seen[0]), None)
    if odd is None:
        return policy if flags.fusion == "auto" else policy.only(flags.fusion)
    if flags.policy is None and all(other == asdict(flags) for other, _ in seen):
        # GPUs of two kinds in one group; the built-in table knows no such machine.
        return Policy()
    raise PolicyError(
        f"ranks 0 and {odd} differ in their flags or in the measurements that {POLICY.name} names: "
        f"{_told(seen[0])} and {_told(seen[odd])}; start all ranks with the same flags and the same file"
    )


def build(
    facts: Facts, policy: Policy, separate_unmet: str, separate_up_to: int, log: Callable[[str], None]
) -> Boundary:
    """Settle how a model's layers take bundles, and set up what that needs.

    Collective, and not while a CUDA graph is being captured: maps memory between ranks, compiles kernels.

    Args:
        separate_unmet: why ``separate`` cannot run; empty where it can, then for up to ``separate_up_to`` tokens.
        log: for what ``auto`` has to do without.

    Raises:
        RuntimeError: on every rank, where the way asked for cannot run; the message names the unmet condition.
    """
    flags = settings()
    boundary = Boundary(flags.fusion, 0 if separate_unmet else separate_up_to, policy)
    if flags.fusion == "separate" and separate_unmet:
        raise RuntimeError(cannot_run("separate", separate_unmet))
    for way, make, field in (("fused", _make_plane, "plane"), ("flashinfer", _make_workspace, "workspace")):
        rows = _rows(way, flags, policy)
        if rows == 0:
            continue
        # The model is built with its GPU as the default device; what ranks exchange here lies on the host.
        with torch.device("cpu"):
            resource, reason = make(facts, rows)
        if reason and flags.fusion == way:
            raise RuntimeError(cannot_run(way, reason))
        if reason:
            log(f"{way} was measured faster than stock but cannot run here: {reason}")
        made: Dict[str, Any] = {field: resource}
        boundary = replace(boundary, **made)
    return boundary


def cannot_run(way: str, reason: str) -> str:
    """The message for a way that was asked for and cannot run."""
    return f"{FUSION.name}={way} cannot run here: {reason}. Use another way, or auto, which takes one that can run."


def arch() -> str:
    """This rank's machine as tables name it: ``sm90`` and so on, ``cpu``, or ``other``."""
    if torch.version.cuda is not None and torch.cuda.is_available():
        return "sm{}{}".format(*torch.cuda.get_device_capability())
    return "other" if torch.accelerator.is_available() else "cpu"


def fused_unmet(facts: Facts) -> str:
    """The condition that keeps the own kernel from this rank; empty where it runs."""
    if _machine_unmet():
        return _machine_unmet()
    if facts.world_size not in WORLD_SIZES:
        return f"it needs 1 to 8 ranks, there are {facts.world_size}"
    if facts.activation not in ACTIVATIONS:
        return f"it needs bf16 or fp16 activations, they are {facts.activation}"
    if facts.hidden % 8 != 0 or facts.hidden > MAX_HIDDEN:
        return f"it needs a hidden size that is a multiple of 8 and at most {MAX_HIDDEN}, it is {facts.hidden}"
    if not 1 <= facts.top_k <= MAX_TOP_K:
        return f"it needs 1 to {MAX_TOP_K} experts a token, there are {facts.top_k}"
    return _norm_unmet(facts) or _compiler_unmet()


def flashinfer_unmet(facts: Facts) -> str:
    """The condition that keeps FlashInfer's kernel from this rank; empty where it runs."""
    return (
        _machine_unmet()
        or _flashinfer_missing()
        or flashinfer.shape_unmet(facts.world_size, facts.hidden, facts.activation)
        or _norm_unmet(facts)
    )


def _rows(way: str, flags: Settings, policy: Policy) -> int:
    """The rows to set a way up for; 0 where nothing asks for it."""
    if flags.fusion not in ("auto", way):
        return 0
    wanted = flags.max_tokens if flags.fusion == way else policy.largest(way)
    return min(wanted, flags.max_tokens, FUSED_MAX_TOKENS if way == "fused" else FLASHINFER_MAX_TOKENS)


def _make_plane(facts: Facts, rows: int) -> Tuple[Optional[Any], str]:
    """An exchange plane of ``rows`` rows, its kernel compiled, or the reason there is none; alike on every rank."""
    from sglang.srt.distributed import get_tp_group

    from .module import Config
    from .plane import ExchangePlane, PlaneUnavailable

    reason = agreement.first_reason(fused_unmet(facts)) or _nodes_unmet()
    if reason:
        return None, reason
    config = Config(facts.world_size, facts.hidden, facts.top_k, facts.activation, facts.weight)
    try:
        return ExchangePlane.create(get_tp_group().cpu_group, config, rows), ""
    except PlaneUnavailable as error:
        return None, str(error)


def _make_workspace(facts: Facts, rows: int) -> Tuple[Optional[flashinfer.Workspace], str]:
    """FlashInfer's workspace of ``rows`` rows, or of as many as it can have, or the reason there is none."""
    from sglang.srt.distributed import get_tp_group

    reason = agreement.first_reason(flashinfer_unmet(facts)) or _nodes_unmet()
    if reason:
        return None, reason
    rows = min(rows, flashinfer.most_tokens(facts.world_size, facts.hidden))
    workspace = None
    try:
        workspace = flashinfer.Workspace.create(get_tp_group(), facts.hidden, facts.activation, rows)
    except flashinfer.WorkspaceUnavailable as error:
        reason = str(error)
    reason = agreement.first_reason(reason)
    return (None, reason) if reason else (workspace, "")


def _machine_unmet() -> str:
    if torch.version.cuda is None or not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        return "it needs an NVIDIA GPU of SM90 or newer"
    return ""


def _nodes_unmet() -> str:
    return "the tensor-parallel ranks are on more than one node" if agreement.spans_nodes() else ""


def _norm_unmet(facts: Facts) -> str:
    for norm in facts.norms:
        reason = fusion_unmet(norm)
        if reason:
            return reason
        if norm.weight.dtype != facts.activation:
            return f"the norm's weight is {norm.weight.dtype}, the activations are {facts.activation}"
    return ""


def _compiler_unmet() -> str:
    from torch.utils.cpp_extension import CUDA_HOME

    if not _is_importable("tvm_ffi"):
        return "its kernel is compiled by apache-tvm-ffi, which is not installed"
    if not (shutil.which("nvcc") or (CUDA_HOME and Path(CUDA_HOME, "bin", "nvcc").exists())):
        return "its kernel is compiled by nvcc, which is neither on PATH nor in CUDA_HOME"
    return "" if shutil.which("ninja") else "its kernel is compiled through ninja, which is not on PATH"


def _flashinfer_missing() -> str:
    try:
        import flashinfer.comm as comm
    except Exception as error:
        return f"FlashInfer cannot be imported ({error})"
    if not hasattr(getattr(comm, "AllReduceFusionPattern", None), "kMoEFinalizeARResidualRMSNorm"):
        return "this FlashInfer has no all-reduce fusion with an MoE finalize"
    return ""


def _is_importable(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


def _told(seen: Tuple[dict, Policy]) -> str:
    flags, policy = seen
    return f"{flags} with {len(policy.points)} points measured ({policy.source or 'no entry'})"
