"""Runs a real ``sglang serve`` on the CPU, from any tree that holds an sglang package, and talks to it.

    with serve(Configuration(tree, model, tp=2, flags={"SOME_FLAG": "1"}), log) as server:
        print(server.generate([5, 6, 7], new_tokens=4).tokens)
"""
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
SUPPORT_PATHS = (HERE / "shim", HERE / "plugin")
START_LIMIT = 600.0  # seconds, for busy machines; on two idle cores a start takes about 15 s, 30 s for two ranks
REQUEST_LIMIT = 120.0
STOP_LIMIT = 10.0
LOG_TAIL_LINES = 40

# What a CPU needs, and what keeps one run comparable with the next: no prefix cache, no overlap, no hidden requests.
# One KV split, because interpreted Triton pays for each.
SERVER_ARGUMENTS = (
    "--device cpu --dtype float32 --attention-backend triton --triton-attention-num-kv-splits 1 "
    "--disable-cuda-graph --disable-overlap-schedule --skip-tokenizer-init --skip-server-warmup "
    "--sampling-backend pytorch --grammar-backend none "
    "--disable-radix-cache --max-total-tokens 4096 --max-running-requests 8 --context-length 1024"
).split()
SERVER_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "TRITON_INTERPRET": "1",
    "HF_HUB_OFFLINE": "1",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # else every health check is a forward
}
LOG_NOISE = ("nanobind:", " - leaked ", " - ... skipped remainder", "See https://nanobind")


class ServerFailed(RuntimeError):
    """The server did not come up or did not answer; the message ends with the tail of its log."""


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One way of serving: which sglang, which model, how many ranks, which flags."""

    tree: Path  # the folder that holds the sglang package
    model: Path
    tp: int = 1
    flags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    arguments: Sequence[str] = ()
    capture_layers: Sequence[int] = ()  # whose input hidden states the server hands out, as for Eagle3

    def environment(self) -> dict[str, str]:
        """The caller's environment without its SGLang settings, plus this configuration's own."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SGLANG_", "SGL_"))}
        path = os.pathsep.join(str(entry) for entry in (Path(self.tree).resolve(), *SUPPORT_PATHS))
        own = {"PYTHONPATH": path, "SGLANG_CPU_OMP_THREADS_BIND": _cores_per_rank(self.tp)}
        if self.capture_layers:
            own["CPU_SERVING_CAPTURE_LAYERS"] = ",".join(map(str, self.capture_layers))
        return {**inherited, **SERVER_ENVIRONMENT, **own, **self.flags}

    def command(self, port: int) -> list[str]:
        """The command line that serves this configuration on a local port."""
        own = ["--model-path", str(self.model), "--tp", str(self.tp), "--host", "127.0.0.1", "--port", str(port)]
        if self.capture_layers:
            own.append("--enable-return-hidden-states")
        return [str(_sglang_command()), "serve", *SERVER_ARGUMENTS, *own, *self.arguments]


@dataclasses.dataclass(frozen=True)
class Generation:
    """What the server said for one prompt: greedy tokens and their logprobs, unrounded."""

    tokens: list[int]
    logprobs: list[float]


class Server:
    """A server that is up."""

    def __init__(self, port: int, log: Path):
        self._url = f"http://127.0.0.1:{port}"
        self.log = log

    def generate(self, prompt: Sequence[int], new_tokens: int) -> Generation:
        """Continue one prompt of token ids greedily."""
        return _generation(self._generate(list(prompt), new_tokens))

    def generate_batch(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Generation]:
        """Continue several prompts that reach the scheduler as one message, so that they are batched the same way."""
        replies = self._generate([list(prompt) for prompt in prompts], new_tokens)
        return [_generation(reply) for reply in replies]

    def seconds_for(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
        """How long the server takes to continue all prompts, which reach it as one message; nothing but tokens is asked for."""
        body = {"input_ids": [list(prompt) for prompt in prompts], "sampling_params": _greedy(new_tokens)}
        started = time.perf_counter()
        replies = self._ask("generate", body)
        seconds = time.perf_counter() - started
        if [len(reply["output_ids"]) for reply in replies] != [new_tokens] * len(prompts):
            raise ServerFailed(f"asked for {new_tokens} tokens, got {[len(reply['output_ids']) for reply in replies]}")
        return seconds

    def captured_states(self, prompt: Sequence[int], new_tokens: int) -> list[list[float]]:
        """Continue one prompt and return the captured hidden states: a row for each token that was computed on.

        Needs a configuration with ``capture_layers``.
        """
        prefill, *decodes = self._generate(list(prompt), new_tokens, hidden_states=True)["meta_info"]["hidden_states"]
        return [*prefill, *decodes]

    def server_info(self) -> dict:
        """What the server says of itself."""
        return self._ask("server_info")

    def moe_finalize(self) -> dict | None:
        """The overlay's counters on the first scheduler, or None where there is no overlay."""
        return self.server_info()["internal_states"][0].get("moe_finalize")

    def metrics(self) -> str:
        """What /metrics says, in Prometheus' text form; needs --enable-metrics."""
        with _open(urllib.request.Request(f"{self._url}/metrics"), REQUEST_LIMIT) as reply:
            return reply.read().decode()

    def is_healthy(self) -> bool:
        """Whether the server takes requests."""
        try:
            with _open(urllib.request.Request(f"{self._url}/health"), limit=5):
                return True
        except OSError:
            return False

    def _generate(self, input_ids, new_tokens: int, hidden_states: bool = False):
        body = {"input_ids": input_ids, "sampling_params": _greedy(new_tokens), "return_logprob": True}
        if hidden_states:
            body["return_hidden_states"] = True
        return self._ask("generate", body)

    def _ask(self, route: str, body: dict | None = None):
        try:
            return _fetch_json(f"{self._url}/{route}", body)
        except OSError as error:  # also what urllib raises for a refused request
            reason = error.read().decode() if isinstance(error, urllib.error.HTTPError) else error
            raise ServerFailed(f"/{route} failed: {reason}\n{log_tail(self.log)}") from error


@contextlib.contextmanager
def serve(configuration: Configuration, log: Path, start_limit: float = START_LIMIT) -> Iterator[Server]:
    """Start a server, yield it once it is healthy, and leave no process behind whatever happens.

    Raises ServerFailed as soon as the server's process ends, or after start_limit seconds.
    """
    check_tree(configuration)
    log = Path(log)
    log.parent.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    # The server leaves sockets in its temporary folder when it is killed.
    scratch_folder = tempfile.TemporaryDirectory(prefix="cpu-serving-", ignore_cleanup_errors=True)
    with _sigterm_as_interrupt(), scratch_folder as scratch:
        environment = {**configuration.environment(), "TMPDIR": scratch}
        with log.open("wb") as output:
            process = subprocess.Popen(
                configuration.command(port), env=environment, cwd=scratch, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True)
        try:
            with _guard(process.pid):
                server = Server(port, log)
                _wait_until_healthy(server, process, start_limit)
                yield server
        finally:
            _stop_group(process)


def check_tree(configuration: Configuration) -> Path:
    """Raise unless Python, with the server's environment, takes sglang from the configured tree."""
    found = subprocess.run(
        [sys.executable, "-c", "import importlib.util as util; print(util.find_spec('sglang').origin)"],
        env=configuration.environment(), cwd=tempfile.gettempdir(), capture_output=True, text=True, check=False)
    wanted = Path(configuration.tree).resolve() / "sglang" / "__init__.py"
    if found.returncode or Path(found.stdout.strip()).resolve() != wanted:
        raise ServerFailed(f"expected sglang from {wanted}, found {found.stdout.strip() or found.stderr.strip()}")
    return wanted


def log_tail(log: Path, lines: int = LOG_TAIL_LINES) -> str:
    """The end of a server's log without what interpreters print on the way out."""
    kept = [line for line in log.read_text(errors="replace").splitlines() if not line.startswith(LOG_NOISE)]
    return "\n".join(kept[-lines:])


def _sglang_command() -> Path:
    command = Path(sys.executable).parent / "sglang"
    if not command.exists():
        raise ServerFailed(f"no sglang command beside {sys.executable}; run ci/setup.sh and use its .venv")
    return command


def _cores_per_rank(ranks: int) -> str:
    """Share out the cores this process may use; ranks share cores where there are too few."""
    cores = sorted(os.sched_getaffinity(0))
    shares = [cores[rank::ranks] or [cores[rank % len(cores)]] for rank in range(ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Have SIGTERM raise KeyboardInterrupt: it ends the caller too, but not before the server is stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _wait_until_healthy(server: Server, process: subprocess.Popen, limit: float) -> None:
    deadline = time.monotonic() + limit
    while not server.is_healthy():
        if process.poll() is not None:
            raise ServerFailed(f"the server ended with status {process.returncode}:\n{log_tail(server.log)}")
        if time.monotonic() > deadline:
            raise ServerFailed(f"the server was not up after {limit:.0f} s:\n{log_tail(server.log)}")
        time.sleep(0.3)


@contextlib.contextmanager
def _guard(group: int) -> Iterator[None]:
    """Have a process group killed even if this process is: the guard's input then ends."""
    guard = subprocess.Popen(
        ["/bin/sh", "-c", 'read -r _; kill -s KILL -- "-$0"', str(group)], stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        guard.kill()
        guard.communicate()


def _stop_group(process: subprocess.Popen) -> None:
    """Kill the server's whole process group and remove the shared memory it leaves.

    At once, since SGLang's graceful stop takes ten seconds and leaves shared memory all the same.
    """
    shared_memory = {file for member in _members(process.pid) for file in _shared_memory_of(member)}
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + STOP_LIMIT
    while _members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    for file in shared_memory:
        file.unlink(missing_ok=True)


def _members(group: int) -> list[int]:
    """The live processes of a process group, from Linux's process table."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _is_live(entry, group)]


def _is_live(entry: Path, group: int) -> bool:
    try:
        state, _, entry_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
    except OSError:  # gone in the meantime
        return False
    return int(entry_group) == group and state != "Z"


def _shared_memory_of(pid: int) -> set[Path]:
    """The files in /dev/shm that a process has mapped."""
    try:
        mappings = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    paths = (line.split(maxsplit=5)[5] for line in mappings if " /dev/shm/" in line)
    return {Path(path) for path in paths if not path.endswith(" (deleted)")}


def _greedy(new_tokens: int) -> dict:
    return {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}


def _generation(reply: dict) -> Generation:
    meta = reply["meta_info"]
    return Generation(reply["output_ids"], [logprob for logprob, *_ in meta["output_token_logprobs"]])


def _fetch_json(url: str, body: dict | None = None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with _open(request, REQUEST_LIMIT) as reply:
        return json.load(reply)


def _open(request: urllib.request.Request, limit: float):
    """Open a local address, past any proxy in the environment."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=limit)
