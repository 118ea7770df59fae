"""Make the table that ``auto`` goes by (``boundary/policy.py``) from what ``bench_boundary.py`` measured; needs no GPU.

    python benchmark/policy_from_results.py benchmark/results/boundary_one_rank_h200.json benchmark/results/boundary_h200.json --out policy_table.json [--arch sm90]

One entry per hidden size; of each number of tokens the measured top_k at which ``fused`` gains least. The ways are fused, flashinfer and separate, as measured.

``stock_us`` stands for what stock takes at the boundary, where it finalizes in the layer by its own kernels and then makes a
fused all-reduce + norm. On several GPUs it is the figure of ``separate``: the overlay's finalize and the same all-reduce +
norm. SGLang's finalize was seen to be faster than the overlay's by at most 1.7 us (boundary_one_rank_h200.json, from 32
tokens on), ``fused`` to be faster than ``separate`` by at least 2.2 (boundary_h200.json), so a way that the table has as
faster than stock is faster, and ``separate`` itself is never named. On one GPU ``sglang`` is SGLang's own finalize before
the same norm; there it is the figure of the faster of the two, and a point without both is left out.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Sequence

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from sglang_overlay.srt.layers.moe.boundary.policy import Entry, Point, Table  # noqa: E402

WAYS = ("fused", "flashinfer", "separate")
STOCK = ("separate",)
STOCK_ON_ONE_GPU = ("separate", "sglang")


def policy_table(report: Mapping, source: str, arch: Optional[str] = None) -> Table:
    """The table of a report of ``bench_boundary.py``.

    Args:
        source: where the report is to be found, for the log of who goes by the table.
        arch: as the table names it, for a report that does not say.

    Raises:
        ValueError: nobody says which architecture this is, or no point has the figure that stands for stock's.
    """
    arch = report.get("arch") or arch
    if not arch:
        raise ValueError("the report does not say which architecture its GPUs are; name it with --arch, sm90 for an H200")
    stock = STOCK_ON_ONE_GPU if report["world_size"] == 1 else STOCK
    points = _points_by_hidden(report["points"], stock)
    if not points:
        raise ValueError(f"no point of the report has a figure for {' and '.join(stock)}, which stands for stock's")
    return Table([Entry(arch, report["world_size"], hidden, source, points[hidden]) for hidden in sorted(points)])


def _points_by_hidden(measured: List[Mapping], stock: Sequence[str]) -> Dict[int, List[Point]]:
    kept: Dict[int, Dict[int, Point]] = {}
    for each in measured:
        if all(way in each["us"] for way in stock):
            point, here = _point(each, stock), kept.setdefault(each["hidden"], {})
            here[point.tokens] = max(here.get(point.tokens, point), point, key=_fused_over_stock)
    return {hidden: [here[tokens] for tokens in sorted(here)] for hidden, here in kept.items()}


def _fused_over_stock(point: Point) -> float:
    return point.ways_us.get("fused", math.inf) / point.stock_us


def _point(measured: Mapping, stock: Sequence[str]) -> Point:
    us = {way: round(taken, 3) for way, taken in measured["us"].items()}
    return Point(measured["tokens"], min(us[way] for way in stock), {way: us[way] for way in WAYS if way in us})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="+", help="JSON files of bench_boundary.py, one per machine and number of GPUs")
    parser.add_argument("--out", type=Path, required=True, help="the table")
    parser.add_argument("--arch", help="sm90 and so on, where the results do not say")
    parser.add_argument("--source", help="what the table says of where its figures are from (default: the results' path)")
    args = parser.parse_args()
    try:
        tables = [policy_table(json.loads(file.read_text()), args.source or str(file), args.arch) for file in args.results]
        # Read back, so that what a server would refuse is refused here: two results of one machine.
        table = Table.from_json(Table([entry for table in tables for entry in table.entries]).to_json(), str(args.out))
    except ValueError as error:
        parser.error(str(error))
    args.out.write_text(table.to_json())
    for entry in table.entries:
        fastest = ", ".join(f"{point.tokens}: {(point.faster() or ('stock',))[0]}" for point in entry.points)
        print(f"{entry.arch}, {entry.world_size} ranks, hidden {entry.hidden}: {fastest}")


if __name__ == "__main__":
    main()
