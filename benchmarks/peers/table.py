"""Print one Markdown table from run.py's result files: medians over the rounds.

    python table.py FILE... [--max-foreign 0.05]

`x best` compares with the fastest other engine of the same weight width in the same case; `of limit` with what the
machine could do at most at that moment (limits.py). In single-stream rows tok/s is decode speed after a 512-token
prompt; in batch rows it is output tokens over the whole time, prompts included.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

Row = dict[str, Any]
Case = tuple[str, str, int, int, int]  # model, mode, concurrency, requests, KV MiB
HEAD = [
    "case", "engine", "weights / KV", "tok/s", "x best", "of limit", "prefill tok/s (of limit)", "TTFT p50 / p99 s",
    "ITL p50 / p99 ms", "running peak / mean", "load / first token s", "peak RSS MiB", "runs",
]  # fmt: skip


def read(files: list[Path], max_foreign: float) -> tuple[list[Row], list[Row], int]:
    """Results, failures, and how many results were left out because other processes had the CPU."""
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    results = [row for row in rows if row["kind"] == "result"]
    kept = [row for row in results if row["foreign"] <= max_foreign]
    return kept, [row for row in rows if row["kind"] == "failure"], len(results) - len(kept)


def speed(row: Row) -> float:
    return row["decode_tok_s"] if row["mode"] == "single" else row["out_tok_s"]


def limit(row: Row) -> float:
    return row["limit_decode_tok_s"] if row["mode"] == "single" else row["limit_out_tok_s"]


def middle(rows: list[Row], name: str, digits: int = 0) -> str:
    values = [row[name] for row in rows if name in row]
    return f"{median(values):.{digits}f}" if values else "-"


def pair(rows: list[Row], first: str, second: str, digits: int = 0) -> str:
    return f"{middle(rows, first, digits)} / {middle(rows, second, digits)}" if first in rows[0] else "-"


def prefill(rows: list[Row]) -> str:
    if "prefill_tok_s" not in rows[0]:
        return "-"
    share = median(row["prefill_tok_s"] / row["limit_prefill_tok_s"] for row in rows)
    return f"{middle(rows, 'prefill_tok_s')} ({share:.0%})"


def case_name(case: Case) -> str:
    model, mode, concurrency, requests, kv_mib = case
    what = "single stream" if mode == "single" else f"{requests} requests, {concurrency} at once"
    return f"{model}, {what}, {kv_mib} MiB KV"


def line(case: Case, rows: list[Row], best: float | None) -> list[str]:
    own = median(map(speed, rows))
    return [
        case_name(case),
        rows[0]["peer"],
        f"{rows[0]['weights']} / {rows[0]['kv']}",
        f"{own:.1f}",
        f"{own / best:.2f}" if best else "-",
        f"{median(speed(row) / limit(row) for row in rows):.0%}",
        prefill(rows),
        pair(rows, "ttft_p50_s", "ttft_p99_s", 2) if rows[0]["mode"] == "batch" else middle(rows, "ttft_s", 2),
        pair(rows, "itl_p50_ms", "itl_p99_ms"),
        pair(rows, "running_peak", "running_mean", 1),
        pair(rows, "load_s", "first_token_s", 1),
        middle(rows, "peak_rss_mib"),
        str(len(rows)),
    ]


def lines(results: list[Row]) -> list[list[str]]:
    """One line an engine and case, the fastest first; the ratio is to the fastest peer that is not Octavo."""
    cases: dict[Case, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in results:
        case = (row["model"], row["mode"], row["concurrency"], row["requests"], row["kv_mib"])
        cases[case][row["peer"]].append(row)
    table = []
    for case in sorted(cases, key=lambda case: (case[0], case[1] == "batch", *case[2:])):
        engines = sorted(cases[case].values(), key=lambda rows: -median(map(speed, rows)))
        for rows in engines:
            rivals = [
                median(map(speed, other))
                for other in engines
                if other[0]["engine"] != "octavo" and other[0]["weights"] == rows[0]["weights"]
            ]
            table.append(line(case, rows, max(rivals, default=None)))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--max-foreign", type=float, default=0.05, help="CPU share of others that spoils a run")
    args = parser.parse_args()
    results, failures, left_out = read(args.files, args.max_foreign)
    for cells in [HEAD, ["---"] * len(HEAD), *lines(results)]:
        print(f"| {' | '.join(cells)} |")
    if left_out:
        print(f"\n{left_out} results are left out: other processes had more than {args.max_foreign:.0%} of the CPU.")
    for row in failures:
        print(f"\nFailed: {row['peer']} on {row['model']}, round {row['round']}: {row['why'].strip().splitlines()[-1]}")


if __name__ == "__main__":
    main()
