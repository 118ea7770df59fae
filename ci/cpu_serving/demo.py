"""The demo: patch the pinned SGLang release, serve a tiny model with it on the CPU, compare with transformers.

Exits with 1 if the tokens differ or if no MoE layer deferred its finalize.
"""
import sys
from pathlib import Path

from cpu_serving import trees
from cpu_serving.checkpoint import DEFAULT_PROMPT, Continuation, Oracle, make_checkpoint
from cpu_serving.server import Configuration, Generation, ServerFailed, serve

NEW_TOKENS = 8
FLAGS = {"SGLANG_ENABLE_MOE_DEFERRED_FINALIZE": "1"}


def main() -> int:
    """Run the demo and return the exit status."""
    step(f"patching SGLang: python apply.py apply --base v{trees.BASE}")
    tree = trees.patched_release()
    print(f"   {shown(tree)}")
    step(f"making a tiny DeepSeek-V3 checkpoint, seeded, in {shown(trees.BUILD / 'demo-model')}")
    model = make_checkpoint(trees.BUILD / "demo-model")
    expected = Oracle(model).greedy(DEFAULT_PROMPT, NEW_TOKENS)
    step("serving it: " + " ".join(f"{flag}={value}" for flag, value in FLAGS.items()) + " sglang serve --device cpu")
    with serve(Configuration(tree, model, flags=FLAGS), trees.LOGS / "demo.log") as server:
        answer = server.generate(DEFAULT_PROMPT, NEW_TOKENS)
        counters = server.moe_finalize() or {}
    step("stopped the server")
    show_answer(answer, expected)
    show_counters(counters)
    return verdict(answer, expected, counters)


def show_answer(answer: Generation, expected: Continuation) -> None:
    """Print both sides' tokens below each other."""
    print(f"\nprompt          {row(DEFAULT_PROMPT)}")
    print(f"SGLang          {row(answer.tokens)}")
    print(f"transformers    {row(expected.tokens)}")
    difference = max(abs(ours - theirs) for ours, theirs in zip(answer.logprobs, expected.logprobs))
    print(f"largest difference of a token's logprob: {difference:.1e}\n")


def show_counters(counters: dict) -> None:
    """Print what the server counted for each MoE layer."""
    print("MoE layer   forwards deferred   of these handed to the next layer")
    for layer in sorted(counters.get("layers", ()), key=int):
        deferred, carried = (counters[name].get(layer, 0) for name in ("deferred", "carried"))
        print(f"{layer:>9}   {deferred:>17}   {carried:>33}")


def verdict(answer: Generation, expected: Continuation, counters: dict) -> int:
    """Print and return what the demo showed: 0 if SGLang is right and deferred, else 1."""
    if answer.tokens != expected.tokens:
        print("\nFAILED: the tokens differ")
    elif not counters.get("deferred"):
        print("\nFAILED: no MoE layer deferred its finalize")
    else:
        print("\nOK: same tokens, with the MoE finalize deferred")
        return 0
    return 1


def step(text: str) -> None:
    """Announce what takes a while."""
    print(f"-- {text}", flush=True)


def row(tokens) -> str:
    """Token ids in columns."""
    return " ".join(f"{token:>4}" for token in tokens)


def shown(path: Path) -> Path:
    """A path as seen from the repository."""
    return path.relative_to(trees.ROOT)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ServerFailed, trees.ApplyFailed) as failure:
        sys.exit(f"\nFAILED: {failure}")
    except KeyboardInterrupt:
        sys.exit(130)
