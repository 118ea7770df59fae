"""What ``serve_boundary.py`` concludes from what it saw; nothing here needs a GPU, torch or a server.

An answer is what a server said to one prompt: ``{"tokens": […], "logprobs": […]}``, and may have ``"float32"``, what
transformers gives the same tokens after the same prompt in float32.

The rules:

* **Ties.** Two arms' greedy tokens may part where float32 has no clear favourite: at the first differing token, where
  both still follow the same text, float32's logprobs of the two tokens are at most ``tolerance`` apart, twice the 99.9th
  percentile of stock's own distance to float32. (An arm puts its own token first by two of its logprobs, each of which is
  off by about that much.) Behind it the texts differ, so an answer is compared up to there.
* **Distance to float32.** |logprob - float32's| over all tokens of an arm's own answers. It may be larger than stock's by
  no more than two standard errors of the difference between answers of the same place.
* **Distance to stock.** |logprob - stock's| up to the first differing token; its mean is at most that of stock's to float32.
* **Speed.** In each round stock and the arms that are up take turns twice, S A B S' A' B' (who begins changes with the
  round). An arm's ratio is (A + A') / (S + S'), stock's ratio to itself S' / S. ``auto`` is not slower where the median of
  its ratio is at least 1 less the spread, the largest distance of stock's ratio to itself from 1.
"""

from __future__ import annotations

import math
import statistics
from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Set

OFF_ARMS = ("stock", "stock again", "off")
ERRORS_PER_TIE = 2


def ways_counted(counters: Optional[dict]) -> Dict[str, int]:
    """How many bundles each way took; what was finalized within a layer is left out."""
    return {way: count for way, count in (counters or {}).get("ways", {}).items() if count and way != "in_layer"}


def way_unmet(arm: str, counters: Optional[dict], named: Iterable[str] = (), overlay: bool = True) -> str:
    """What is wrong with the ways a server took; empty where the arm's own ran and no other.

    ``named``: the ways the policy names; ``auto`` must have taken all of them.
    """
    ways, named = set(ways_counted(counters)), set(named)
    if overlay and counters is None:
        return "the server has no counters: its tree is without the overlay"
    if arm in OFF_ARMS:
        return f"bundles went by {_listed(ways)}, nothing should defer" if ways or (counters or {}).get("deferred") else ""
    if not ways:
        return f"no bundle was taken; not deferred: {counters['not_deferred']}, layers: {counters['layers']}"
    if arm == "auto":
        return _auto_unmet(ways, named)
    return "" if ways == {arm} else f"bundles went by {_listed(ways)}, not by {arm} alone"


def _auto_unmet(ways: Set[str], named: Set[str]) -> str:
    if not named:
        return "the policy names no way for any batch size"
    if named <= ways:
        return ""
    return f"the policy names {_listed(named)}, bundles went by {_listed(ways)}"


def _listed(ways: Iterable[str]) -> str:
    return ", ".join(sorted(ways)) or "no way"


def first_difference(one: Sequence[int], other: Sequence[int]) -> Optional[int]:
    """The first place where two answers part; None where they are the same."""
    return next((place for place, (a, b) in enumerate(zip(one, other)) if a != b), None)


def gap(one: Mapping, other: Mapping, place: int) -> Optional[float]:
    """How far apart float32 puts two answers' tokens at a place before which they are the same; None where it was not asked."""
    if "float32" not in one or "float32" not in other:
        return None
    return abs(one["float32"][place] - other["float32"][place])


def percentile(values: Iterable[float], share: float) -> float:
    """The least value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def errors(answer: Mapping) -> List[float]:
    """|logprob - float32's|, token by token."""
    return [abs(logprob - exact) for logprob, exact in zip(answer["logprobs"], answer["float32"])]


def tie_tolerance(stock: Iterable[Mapping]) -> float:
    """The largest gap that is a tie; see the module's docstring."""
    return ERRORS_PER_TIE * percentile((error for answer in stock for error in errors(answer)), 0.999)


def compare_tokens(arm: Sequence[Mapping], stock: Sequence[Mapping]) -> dict:
    """How many answers are the same, where the others part, and by what gap."""
    places = [first_difference(one["tokens"], other["tokens"]) for one, other in zip(arm, stock)]
    apart = [(place, gap(one, other, place)) for one, other, place in zip(arm, stock, places) if place is not None]
    compared = sum(len(one["tokens"]) if place is None else place + 1 for one, place in zip(arm, places))
    same = all(one["tokens"] == other["tokens"] and one["logprobs"] == other["logprobs"] for one, other in zip(arm, stock))
    return {
        "answers": len(places), "same": len(places) - len(apart), "bit_equal": same,
        "tokens": sum(len(one["tokens"]) for one in arm), "tokens_compared": compared,
        "first_difference_median": statistics.median(place for place, _ in apart) if apart else None,
        "gaps": sorted(found for _, found in apart if found is not None),
    }


def gaps_unmet(compared: Mapping, tolerance: float) -> str:
    """What is wrong where answers part; empty where all are ties."""
    wide = [found for found in compared["gaps"] if found > tolerance]
    named = ", ".join(f"{found:.3g}" for found in wide)
    return f"{len(wide)} answers part where float32's gap is over {tolerance:.3g}: {named}" if wide else ""


def distance_to_stock(arm: Sequence[Mapping], stock: Sequence[Mapping]) -> dict:
    """|logprob - stock's| up to the first differing token of each answer."""
    found = []
    for one, other in zip(arm, stock):
        place = first_difference(one["tokens"], other["tokens"])
        found += [abs(a - b) for a, b in zip(one["logprobs"][:place], other["logprobs"][:place])]
    return _spread_of(found)


def distance_to_float32(arm: Sequence[Mapping], stock: Sequence[Mapping]) -> dict:
    """|logprob - float32's| over all tokens, and how much more that is than stock's, answer by answer."""
    own, theirs = ([statistics.mean(errors(answer)) for answer in answers] for answers in (arm, stock))
    more = [a - b for a, b in zip(own, theirs)]
    error = statistics.stdev(more) / math.sqrt(len(more)) if len(more) > 1 else 0.0
    found = _spread_of([error for answer in arm for error in errors(answer)])
    return {**found, "more_than_stock": statistics.mean(more), "standard_error": error}


def _spread_of(values: Sequence[float]) -> dict:
    if not values:
        return {"mean": 0.0, "p99": 0.0, "max": 0.0}
    return {"mean": statistics.mean(values), "p99": percentile(values, 0.99), "max": max(values)}


def turns(number: int, arms: Sequence[str]) -> List[str]:
    """Who is timed when in a round: by turns, and who begins changes with the round."""
    everyone = ["stock", *arms]
    first = number % len(everyone)
    return (everyone[first:] + everyone[:first]) * 2


def pair(rounds: Sequence[Mapping[str, Sequence[float]]]) -> dict:
    """Ratios of tokens per second; a round has two figures of ``stock`` and two of ``arm``."""
    ratios = [sum(each["arm"]) / sum(each["stock"]) for each in rounds]
    own = [each["stock"][1] / each["stock"][0] for each in rounds]
    return {
        "rounds": len(rounds),
        "stock": statistics.median(rate for each in rounds for rate in each["stock"]),
        "arm": statistics.median(rate for each in rounds for rate in each["arm"]),
        "ratio": statistics.median(ratios), "ratio_least": min(ratios), "ratio_largest": max(ratios),
        "stock_ratio_to_itself": statistics.median(own), "spread": max(abs(ratio - 1) for ratio in own),
    }


def is_slower(paired: Mapping) -> bool:
    """Whether an arm is slower than stock by more than stock differs from itself."""
    return paired["ratio"] < 1 - paired["spread"]


def speed_table(speed: Mapping[str, Mapping[str, Sequence]]) -> Dict[str, Dict[str, dict]]:
    """Of all measured rounds: arm -> batch size -> what ``pair`` says."""
    return {arm: {batch: pair(rounds) for batch, rounds in batches.items() if rounds} for arm, batches in speed.items()}


def conclude(answers: Mapping[str, Mapping[str, Sequence[Mapping]]], speed: Mapping) -> dict:
    """Everything there is to say: tokens and distances per arm and group size, speed per arm and batch size, what is wrong."""
    found: dict = {"tokens": {}, "speed": speed_table(speed), "wrong": []}
    stock = answers.get("stock", {})
    if stock and all("float32" in answer for group in stock.values() for answer in group):
        found["tolerance"] = {size: tie_tolerance(group) for size, group in stock.items()}
    for arm, groups in {"stock": stock, **answers}.items():
        for size in (size for size in groups if size in stock):
            seen = _conclude_tokens(groups[size], stock[size])
            found["tokens"].setdefault(arm, {})[size] = seen
            found["wrong"] += [f"{arm}, {size} at a time: {each}" for each in _tokens_wrong(arm, size, seen, found)]
    for batch, paired in found["speed"].get("auto", {}).items():
        if is_slower(paired):
            found["wrong"].append(f"auto, batch {batch}: {paired['ratio']:.4f} of stock's speed, spread {paired['spread']:.4f}")
    return found


def _conclude_tokens(arm: Sequence[Mapping], stock: Sequence[Mapping]) -> dict:
    seen = {**compare_tokens(arm, stock), "to_stock": distance_to_stock(arm, stock)}
    if all("float32" in answer for answer in (*arm, *stock)):
        seen["to_float32"] = distance_to_float32(arm, stock)
    return seen


def _tokens_wrong(arm: str, size: str, seen: Mapping, found: Mapping) -> List[str]:
    # Of several requests the batches that form may differ from one time to the next, and with them the last bit.
    if arm in OFF_ARMS and size == "1" and not seen["bit_equal"]:
        return ["tokens or logprobs are not stock's, bit for bit"]
    if "tolerance" not in found or "to_float32" not in seen:
        return []
    own = found["tokens"]["stock"][size]["to_float32"]["mean"]
    wrong = [gaps_unmet(seen, found["tolerance"][size])]
    if seen["to_stock"]["mean"] > own:
        wrong.append(f"logprobs are {seen['to_stock']['mean']:.3g} from stock's, stock's own {own:.3g} from float32")
    exact = seen["to_float32"]
    if exact["more_than_stock"] > 2 * exact["standard_error"]:
        wrong.append(f"logprobs are {exact['mean']:.3g} from float32, stock's {own:.3g}")
    return [each for each in wrong if each]


def render(results: Mapping) -> str:
    """The results as Markdown tables."""
    found, versions = results["found"], results["versions"]
    lines = [
        "# Serving with the layer boundary's ways", "",
        f"{versions['date'][:10]}, {', '.join(versions['gpus']) or 'CPU'}, CUDA {versions['cuda']}, torch {versions['torch']}, SGLang "
        f"{versions['sglang']}, Python {versions['python']}.", "",
        *(f"    {command}" for command in results["commands"]), "",
        "How: the docstrings of `benchmark/serve_boundary.py` and `benchmark/boundary_checks.py` (rules).",
        f"Model: {results['model']}.", "", *_server_lines(results["servers"]),
        *_token_lines(found), *_speed_lines(found["speed"]),
        "", "## Verdict", "", *([f"- {each}" for each in found["wrong"]] or ["All checks that had their data hold."]),
        *(["", f"Not measured: {', '.join(found['missing'])}."] if found.get("missing") else []),
    ]
    return "\n".join(lines) + "\n"


def _server_lines(servers: Mapping) -> List[str]:
    rows = ["## Servers", "", "| arm | started in s | bundles taken, counted at capture |", "|---|---|---|"]
    for arm, seen in servers.items():
        ways = ", ".join(f"{way} {count}" for way, count in ways_counted(seen["counters"]).items())
        rows.append(f"| {arm} | {seen['start_seconds']:.0f} | {ways or 'none'} |")
    return [*rows, ""]


def _token_lines(found: Mapping) -> List[str]:
    if not found["tokens"]:
        return []
    rows = ["## Greedy tokens and logprobs", ""]
    for size, tolerance in found.get("tolerance", {}).items():
        rows.append(f"A tie, {size} prompts at a time: a gap of at most {tolerance:.3g}.")
    titles = ("arm", "at a time", "same answers", "bit-equal", "tokens compared", "largest gap in float32 where they part",
              "to stock, mean / max", "to float32, mean / p99 / max")
    rows += ["", f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for arm, sizes in found["tokens"].items():
        rows += [f"| {arm} | {size} | {_token_cells(seen)} |" for size, seen in sizes.items()]
    return [*rows, ""]


def _token_cells(seen: Mapping) -> str:
    gaps, near, exact = seen["gaps"], seen["to_stock"], seen.get("to_float32")
    widest = f"{gaps[-1]:.3g}" if gaps else ""
    return " | ".join([
        f"{seen['same']} of {seen['answers']}", "yes" if seen["bit_equal"] else "no", f"{seen['tokens_compared']} of {seen['tokens']}",
        widest, f"{near['mean']:.2e} / {near['max']:.2e}", f"{exact['mean']:.2e} / {exact['p99']:.2e} / {exact['max']:.2e}" if exact else "not run",
    ])


def _speed_lines(speed: Mapping) -> List[str]:
    if not speed:
        return []
    rows = ["## Decode output, tokens per second", "",
            "Ratio: arm / stock, median (least to largest) of the rounds; spread: stock against itself.", "",
            "| arm | batch | stock | arm | ratio | spread | rounds |", "|---" * 7 + "|"]
    for arm, batches in speed.items():
        for batch, paired in batches.items():
            ratio = f"{paired['ratio']:.4f} ({paired['ratio_least']:.4f} to {paired['ratio_largest']:.4f})"
            rows.append(f"| {arm} | {batch} | {paired['stock']:.0f} | {paired['arm']:.0f} | {ratio} | {paired['spread']:.4f} | {paired['rounds']} |")
    return rows
