"""Measured serving points of real GPUs against the simulator: errors of mean TTFT and TPOT per engine and device.

    python benchmarks/silicon_e2e.py [--shared ../shared] [--per-group 8] [--engine vllm] [--system h100_sxm] [--jobs 2]

Conventions, and which rows are left out by which rule, are those of `octavo.planner.validation.points`.
`--per-group`: so many rows, drawn at random, of each engine, device, model and precision; 0: all. Rows are appended to
the results file as they are done; a second call goes on where the first stopped (--fresh: anew).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from typing import Any

from octavo.errors import OctavoError
from octavo.planner.validation.points import Point, left_out, read_points, rerun

WORST = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--out", type=Path, default=Path("out/silicon_e2e.jsonl"))
    parser.add_argument("--per-group", type=int, default=8)
    parser.add_argument("--engine")
    parser.add_argument("--system")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--fresh", action="store_true")
    given = parser.parse_args()
    every = read_points(given.shared / "facts" / "profiles" / "aic" / "silicon_e2e.csv.gz")
    points = [p for p in every if given.engine in (None, p.engine) and given.system in (None, p.system)]
    chosen = chosen_of([p for p in points if left_out(p) is None], given.per_group)
    given.out.parent.mkdir(exist_ok=True)
    if given.fresh:
        given.out.unlink(missing_ok=True)
    done = read_done(given.out)
    with given.out.open("a") as file, ProcessPoolExecutor(given.jobs) as pool:
        for result in pool.map(result_of, [p for p in chosen if p.id not in done]):
            done[result["id"]] = result
            print(json.dumps(result), file=file, flush=True)
    report([done[p.id] for p in chosen], Counter(reason for p in points if (reason := left_out(p))))


def chosen_of(points: list[Point], per_group: int) -> list[Point]:
    """A random part of each group, always the same, groups taking turns, so that what is done early is spread."""
    groups: dict[tuple[str, ...], list[Point]] = defaultdict(list)
    for point in points:
        groups[point.engine, point.system, point.model, point.precision].append(point)
    for group in groups.values():
        group.sort(key=lambda point: sha256(point.id.encode()).digest())
    parts = [group[: per_group or None] for _, group in sorted(groups.items())]
    return [point for turn in zip_longest(*parts) for point in turn if point is not None]


def read_done(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    return {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}


def result_of(point: Point) -> dict[str, Any]:
    row = {name: getattr(point, name) for name in Point.__slots__}
    try:
        found = rerun(point)
    except OctavoError as error:
        return row | {"refused": str(error)}
    simulated = {"simulated_ttft": found.ttft, "simulated_tpot": found.tpot, "preemptions": found.preemptions}
    return row | simulated | {"ttft_error": found.ttft_error, "tpot_error": found.tpot_error, "level": found.level}


def report(rows: list[dict[str, Any]], out: Counter[str]) -> None:
    """Per engine and device: medians of the absolute errors, and their signs; then the worst rows."""
    ran = [row for row in rows if "refused" not in row]
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in ran:
        groups[f"{row['engine']} {row['system']}"].append(row)
        groups[f"{row['engine']} {row['system']} {row['model']} {row['precision'] or 'bf16'}"].append(row)
        groups[row["engine"]].append(row)
        groups["all"].append(row)
    print(f"{'':72}{'rows':>5}{'TPOT median':>13}{'bias':>8}{'TTFT median':>13}{'bias':>8}")
    for name, group in sorted(groups.items()):
        print(f"{name:72}{len(group):5}", end="")
        for metric, width in (("tpot_error", 13), ("ttft_error", 13)):
            errors = [row[metric] for row in group]
            size, bias = statistics.median(map(abs, errors)), statistics.median(errors)
            print(f"{size:{width}.1%}{bias:+8.1%}", end="")
        print()
    for metric in ("tpot_error", "ttft_error"):
        print(f"\nWorst by {metric}:")
        for row in sorted(ran, key=lambda row: -abs(row[metric]))[:WORST]:
            print(f"  {row['id']:70} C={row['concurrency']:<4} tp={row['tp']} {row[metric]:+.1%}")
    for row in rows:
        if "refused" in row:
            print(f"Cannot work on paper: {row['id']}: {row['refused'][:160]}")
    print("\nLeft out by rule:", "; ".join(f"{count} {reason}" for reason, count in out.most_common()) or "none")


if __name__ == "__main__":
    main()
