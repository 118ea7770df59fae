"""What one server says for the prompts, and what its counters must have counted for them."""
from collections import Counter
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from configurations import CARRYING_LAYERS, MOE_LAYERS, NEW_TOKENS, PROMPTS
from cpu_serving.server import Generation, Server

TOO_MANY_TOKENS = "more tokens than SGLANG_MOE_DEFERRED_FINALIZE_MAX_TOKENS"


@dataclass(frozen=True)
class Observation:
    """One server's answers: each prompt alone, all as one batch, and the first alone once more; counters around them.

    ``captured`` holds the hidden states of one more answer to the last prompt, where the way of serving captures any;
    ``metrics`` what /metrics says after the prompts, where the server has it; ``log`` the server's log.
    """

    alone: list[Generation]
    batch: list[Generation]
    again: Generation
    counters_before: dict | None
    counters_after: dict | None
    captured: list[list[float]]
    metrics: str
    log: str

    def counted(self, name: str) -> dict:
        """How much one group of counters grew while the prompts were served, without what did not grow."""
        growth = Counter(self.counters_after[name])
        growth.subtract(self.counters_before[name])
        return {key: count for key, count in growth.items() if count}


def observe(server: Server, captures: bool, metrics: bool) -> Observation:
    """Serve the prompts."""
    before = server.moe_finalize()
    alone = [server.generate(prompt, NEW_TOKENS) for prompt in PROMPTS]
    batch = server.generate_batch(PROMPTS, NEW_TOKENS)
    again = server.generate(PROMPTS[0], NEW_TOKENS)
    after = server.moe_finalize()
    counted = server.metrics() if metrics else ""
    captured = server.captured_states(PROMPTS[-1], NEW_TOKENS) if captures else []
    return Observation(alone, batch, again, before, after, captured, counted, server.log.read_text(errors="replace"))


def series(metrics: str, name: str, *labels: str) -> dict:
    """The values of one counter in Prometheus' text form, by the values of some of its labels (or one of them)."""
    found: Counter = Counter()
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == f"{name}_total":
                key = tuple(sample.labels[label] for label in labels)
                found[key[0] if len(key) == 1 else key] += int(sample.value)
    return dict(found)


def forward_sizes() -> list[int]:
    """Tokens of each forward of ``observe``: a prefill, then a decode for each further token."""
    sizes = []
    for prompts in [[prompt] for prompt in PROMPTS] + [PROMPTS, PROMPTS[:1]]:
        sizes += [sum(map(len, prompts))] + [len(prompts)] * (NEW_TOKENS - 1)
    return sizes


def expected_counts(max_tokens: int) -> dict[str, dict]:
    """What deferral must have counted for ``observe`` on a CPU."""
    deferred = sum(size <= max_tokens for size in forward_sizes())
    too_large = len(forward_sizes()) - deferred
    return {
        "deferred": dict.fromkeys(MOE_LAYERS, deferred),
        "carried": dict.fromkeys(CARRYING_LAYERS, deferred),
        "ways": {"eager": deferred * len(CARRYING_LAYERS), "in_layer": deferred},
        "not_deferred": {TOO_MANY_TOKENS: too_large * len(MOE_LAYERS)} if too_large else {},
    }
