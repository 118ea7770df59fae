"""Draw what the benchmarks measured, from their committed results.

    python benchmark/plot_results.py                   # every picture of the docs
    python benchmark/plot_results.py --finalize benchmark/results/finalize_h200.json    # one, of any machine

Writes ``NAME.svg`` of each ``NAME.json`` into ``docs/images``:

* boundary: microseconds per layer boundary over the number of tokens by every way, and the bound (both as ``bench_boundary.py`` defines them);
* serve: decode output of each arm over stock's for each batch size, with the least and the largest round, and stock's spread against itself;
* finalize: microseconds of the finalize kernel and of SGLang's, with the L2 cache cold and warm;
* ue8m0: the whole FP8 MoE with power-of-two scales over the same with continuous ones;
* mxfp4: microseconds of a layer of MXFP4 experts by the mega kernel and by SGLang's ways, at one shape.

Needs matplotlib, which nothing else here does: ``pip install matplotlib``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Dict, List, Mapping, Tuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmark"))
from boundary_checks import speed_table  # noqa: E402

BOUND = "bound"
OWN = "fused"
Curve = List[Tuple[int, float]]


def curves(report: Mapping, hidden: int, top_k: int) -> Dict[str, Curve]:
    """Way -> (tokens, microseconds), ascending; the bound comes last."""
    points = [point for point in report["points"] if (point["hidden"], point["top_k"]) == (hidden, top_k)]
    found: Dict[str, Curve] = {}
    for point in sorted(points, key=lambda point: point["tokens"]):
        for way, us in (*point["us"].items(), (BOUND, point["bound_us"])):
            found.setdefault(way, []).append((point["tokens"], us))
    if not found:
        raise ValueError(f"nothing was measured at hidden {hidden}, top_k {top_k}")
    found[BOUND] = found.pop(BOUND)
    return found


def ratios(results: Mapping) -> Dict[str, List[Tuple[int, dict]]]:
    """Arm -> (batch size, what ``boundary_checks.pair`` says of it), ascending."""
    return {arm: sorted((int(batch), paired) for batch, paired in batches.items()) for arm, batches in speed_table(results["speed"]).items()}


def spreads(results: Mapping) -> Curve:
    """Batch size -> the largest spread of stock against itself beside any arm."""
    found: Dict[int, float] = {}
    for points in ratios(results).values():
        for batch, paired in points:
            found[batch] = max(found.get(batch, 0.0), paired["spread"])
    return sorted(found.items())


def draw_times(report: Mapping, hidden: int, top_k: int, file: Path) -> None:
    figure, axes = _axes(f"{report['world_size']}×{report['device']}, hidden {hidden}, top_k {top_k}", "tokens", "µs per boundary")
    for way, curve in curves(report, hidden, top_k).items():
        style = {BOUND: {"color": "black", "linestyle": ":"}, OWN: {"linewidth": 2.5, "marker": "o"}}.get(way, {"linewidth": 1, "marker": "."})
        axes.plot(*zip(*curve), label=way, **style)
    axes.set_yscale("log")
    # Powers of two: between them there is no room for a number.
    ticks = sorted({point["tokens"] for point in report["points"] if point["tokens"].bit_count() == 1})
    _finish(figure, axes, ticks, file)


def draw_ratios(results: Mapping, file: Path) -> None:
    figure, axes = _axes("Decode output over stock's", "batch size", "ratio of tokens per second")
    for arm, points in ratios(results).items():
        batches, paired = zip(*points)
        middle = [each["ratio"] for each in paired]
        reach = [[m - each["ratio_least"] for m, each in zip(middle, paired)], [each["ratio_largest"] - m for m, each in zip(middle, paired)]]
        axes.errorbar(batches, middle, yerr=reach, label=arm, marker="o", capsize=3, linewidth=2.5 if arm == "auto" else 1)
    batches, spread = zip(*spreads(results))
    axes.fill_between(batches, [1 - each for each in spread], [1 + each for each in spread], color="gray", alpha=0.25, label="stock against itself")
    _finish(figure, axes, list(batches), file)


def finalize_curves(report: Mapping, hidden: int, top_k: int) -> Dict[str, Curve]:
    """``own`` and ``peer``, each ``cold`` and ``warm`` -> (tokens, microseconds), ascending."""
    points = [point for point in report["points"] if (point["hidden"], point["top_k"]) == (hidden, top_k)]
    found: Dict[str, Curve] = {}
    for point in sorted(points, key=lambda point: point["tokens"]):
        for cache in ("cold", "warm"):
            for kernel in ("own", "peer"):
                found.setdefault(f"{kernel}, {cache}", []).append((point["tokens"], point[cache][f"{kernel}_us"]))
    if not found:
        raise ValueError(f"nothing was measured at hidden {hidden}, top_k {top_k}")
    return found


def scale_ratios(report: Mapping) -> Dict[str, Curve]:
    """Shape of the MoE -> (tokens, power-of-two scales' time over continuous ones'), ascending."""
    found: Dict[str, Curve] = {}
    for point in sorted(report["points"], key=lambda point: point["tokens"]):
        found.setdefault(point["shape"], []).append((point["tokens"], point["ratio"]))
    return found


def draw_finalize(report: Mapping, hidden: int, top_k: int, file: Path) -> None:
    figure, axes = _axes(f"finalize on {report['device']}, hidden {hidden}, top_k {top_k}", "tokens", "µs per call")
    found = finalize_curves(report, hidden, top_k)
    for name, curve in found.items():
        kernel, cache = name.split(", ")
        label = f"{'overlay' if kernel == 'own' else 'SGLang'}, L2 {cache}"
        axes.plot(*zip(*curve), label=label, marker="o", color=f"C{kernel == 'peer':d}", linestyle="-" if cache == "cold" else "--")
    axes.set_yscale("log")
    _finish(figure, axes, [tokens for tokens, _ in next(iter(found.values()))], file)


def draw_scale_ratios(report: Mapping, file: Path) -> None:
    figure, axes = _axes(f"Triton FP8 MoE on {report['device']}", "tokens", "power-of-two scales / continuous, time")
    found = scale_ratios(report)
    for shape, curve in found.items():
        axes.plot(*zip(*curve), label=shape, marker="o")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.axhline(1.01, color="black", linewidth=0.8, linestyle=":", label="aim: at most 1.01")
    _finish(figure, axes, sorted({tokens for curve in found.values() for tokens, _ in curve}), file)


ONE_LAUNCH = "mega kernel, a workspace of T tokens"


def way_curves(report: Mapping, shape: str) -> Dict[str, Curve]:
    """Way -> (tokens, microseconds), ascending; also the mega kernel's in a workspace of as many tokens."""
    found: Dict[str, Curve] = {}
    for point in report["points"].values():
        if point["shape"] == shape and point["kind"] in ("timed", "capacity"):
            way = point["way"] if point["kind"] == "timed" else ONE_LAUNCH
            found.setdefault(way, []).append((point["tokens"], point["us"]))
    if not found:
        raise ValueError(f"nothing was measured at {shape}")
    return {way: sorted(curve) for way, curve in found.items()}


def draw_ways(report: Mapping, file: Path) -> None:
    shape, size = next(iter(report["shapes"].items()))
    sizes = ", ".join(f"{short}={size[name]}" for short, name in (("E", "experts"), ("H", "hidden"), ("I", "intermediate"), ("top_k", "top_k")))
    figure, axes = _axes(f"MXFP4 experts of {shape} on {report['ranks']}×{report['device']}\n{sizes}", "tokens", "µs per layer")
    found = way_curves(report, shape)
    styles = {"mega kernel": {"marker": "o", "linewidth": 2.5, "color": "C0"}, ONE_LAUNCH: {"marker": "o", "linestyle": ":", "color": "C0"}}
    others = iter(("C1", "C2", "C3", "C4", "C5"))
    for way, curve in found.items():
        axes.plot(*zip(*curve), label=way, **(styles.get(way) or {"marker": ".", "linewidth": 1, "color": next(others)}))
    axes.set_yscale("log")
    _finish(figure, axes, sorted({tokens for curve in found.values() for tokens, _ in curve if tokens.bit_count() == 1}), file)


def _axes(title: str, across: str, up: str):
    import matplotlib

    matplotlib.use("svg")
    # Letters stay letters and names stay the same from one drawing to the next: small files that can be compared.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "boundary", "font.size": 9})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    axes.set(title=title, xlabel=across, ylabel=up)
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    return figure, axes


def _finish(figure, axes, ticks: List[int], file: Path) -> None:
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    if axes.get_yscale() == "log":
        least, largest = axes.get_ylim()
        marks = [mark for mark in (2, 3, 4, 5, 7, 10, 15, 20, 30, 50, 70, 100, 200, 500, 1000, 2000, 5000) if least <= mark <= largest]
        axes.set_yticks(marks, [str(mark) for mark in marks])
    axes.legend(fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})
    print(f"{file}: {file.stat().st_size} bytes")


COMMITTED = {
    "boundary": ("boundary_h200", "boundary_one_rank_h200"),
    "serve": ("serve_boundary_h200", "serve_boundary_one_gpu_h200"),
    "finalize": ("finalize_h200",),
    "ue8m0": ("ue8m0_h200",),
    "mxfp4": ("mxfp4_hopper_h200_v4_flash",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for kind in COMMITTED:
        parser.add_argument(f"--{kind}", type=Path, help=f"a JSON of results (committed: {', '.join(COMMITTED[kind])})")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images", help="default: docs/images")
    args = parser.parse_args()
    given = [(kind, getattr(args, kind)) for kind in COMMITTED if getattr(args, kind)]
    for kind, file in given or [(kind, ROOT / "benchmark" / "results" / f"{name}.json") for kind, names in COMMITTED.items() for name in names]:
        draw(kind, json.loads(file.read_text()), args, args.images / f"{file.stem}.svg")


def draw(kind: str, results: Mapping, args: argparse.Namespace, file: Path) -> None:
    if kind == "boundary":
        draw_times(results, args.hidden, args.top_k, file)
    elif kind == "serve":
        draw_ratios(results, file)
    elif kind == "finalize":
        draw_finalize(results, args.hidden, args.top_k, file)
    elif kind == "ue8m0":
        draw_scale_ratios(results, file)
    else:
        draw_ways(results, file)


if __name__ == "__main__":
    main()
