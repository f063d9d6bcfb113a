"""The PagedAttention paper's comparison (Kwon et al., SOSP 2023, figures 2 and 13), side by side with ours.

    python benchmarks/paged_attention_paper.py [--shared ../shared] [--out benchmarks/data/paged_attention_paper.json]

OPT-13B on an A100 with 12 GiB of KV: 15,728 token slots. Lengths with the paper's published means, and two real tables
of ShareGPT lengths. Everybody knows the true output length, so that Orca (Oracle) is what it was there; `reserve-pow2`
rounds prompt + answer up where Orca (Pow2) rounds the answer alone. Each is run at the paper's rate and saturated.

Columns: published mean of batched requests; the same had their memory been as little fragmented as ours (`packed`);
ours at the paper's rate and saturated; then shares of the KV memory, published and ours.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from octavo.planner.bounds import BoundsMeter, bounds_of
from octavo.planner.deployment import Deployment, Resolved, resolve
from octavo.planner.outcome import Outcome
from octavo.planner.replay import ReplayOptions, replay
from octavo.planner.traces.api import TraceRequest
from octavo.planner.traces.opening import open_trace

STRATEGIES = ("reserve-max", "reserve-pow2", "reserve-oracle", "paged")
NAMES = ("Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "vLLM")
STATES = (20.4, 26.8, 38.2, 96.3)  # % of the KV memory with token states, figure 2
#: External fragmentation and others, figure 2 as remembered: with reserved and never used slots it comes to 100 %.
OTHER = (8.9, 41.6, 36.6, 3.7)
LIMIT = 2048
KV_BYTES = 12 << 30


@dataclass(frozen=True)
class Case:
    """A workload. rate: the paper's, requests/s; seconds: simulated; batched: published means, figure 13."""

    name: str
    trace: str
    rate: float
    seconds: float
    batched: tuple[float, ...]


SHAREGPT = (7.00, 9.81, 13.62, 30.42)
ALPACA = (7.00, 43.24, 72.75, 132.44)
SARATHI = "sarathi-serve/sharegpt_8k_filtered_stats_llama2_tokenizer.csv.gz"
CASES = (
    Case("ShareGPT, published means", "synthetic:sharegpt", 2.0, 900, SHAREGPT),
    Case("ShareGPT, Nanoflow's table", "nanoflow/sharegpt.csv.gz", 2.0, 900, SHAREGPT),
    Case("ShareGPT, Sarathi's table (with history)", SARATHI, 2.0, 900, SHAREGPT),
    Case("Alpaca, published means", "synthetic:alpaca", 30.0, 120, ALPACA),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/data/paged_attention_paper.json"))
    given = parser.parse_args()
    deployment = Deployment(
        model="facebook/opt-13b",
        gpu="A100 SXM 40GB",
        engine="vllm-0.6",
        kv_memory=KV_BYTES,
        max_model_len=LIMIT,
        prefix_caching=False,
    )
    resolved = resolve(deployment)
    results = [result for case in CASES for result in run_case(case, resolved, given.shared / "traces")]
    data = {"slots": resolved.pages * 16, "times": resolved.fidelity.statement, "results": results}
    given.out.write_text(json.dumps(data, indent=1) + "\n")
    print(f"\n{data['slots']} slots; times: {data['times']}")


def requests_of(case: Case, rate: float, traces: Path) -> Iterator[TraceRequest]:
    """Requests within the model's length, as many as come within the simulated time."""
    place = case.trace if case.trace.startswith("synthetic:") else str(traces / case.trace)
    count = f"&requests={int(2 * rate * case.seconds)}" if case.trace.startswith("synthetic:") else ""
    fitting = (
        r for r in open_trace(f"{place}?rate={rate}&seed=0{count}") if r.prompt_tokens + r.output_tokens <= LIMIT
    )
    return islice(fitting, int(1.5 * rate * case.seconds))


def run_case(case: Case, resolved: Resolved, traces: Path) -> Iterable[dict[str, Any]]:
    print(f"\n{case.name}: {case.rate:g} requests/s for {case.seconds:g} s, and saturated")
    print(f"{'':16}{'batched':>9}{'packed':>8}{'at rate':>9}{'saturated':>10}{'states %':>10}", end="")
    print(f"{'ours':>7}{'later':>7}{'never':>7}{'other':>7}")
    bound = bounds_of(requests_of(case, case.rate, traces), BoundsMeter.of(resolved))
    for i, strategy in enumerate(STRATEGIES):
        at_rate, full = (
            replay(
                requests_of(case, rate, traces),
                resolved,
                ReplayOptions(strategy=strategy, known_lengths=True, time_limit=case.seconds, timeline=False),
            )
            for rate in (case.rate, 10 * case.rate)
        )
        row = summary(case, i, at_rate, full)
        ours = row["kv_percent_saturated"]
        print(
            f"{NAMES[i]:16}{case.batched[i]:9.2f}{row['batched_if_packed']:8.2f}{row['batched_at_rate']:9.2f}{row['batched_saturated']:10.2f}"
            f"{STATES[i]:10.1f}{ours['states']:7.1f}{ours['used_later']:7.1f}{ours['never_used']:7.1f}{ours['other']:7.1f}"
        )
        yield row
    print(f"{'upper bound':16}{'':26}{bound.running_mean:10.2f}")


def summary(case: Case, i: int, at_rate: Outcome, full: Outcome) -> dict[str, Any]:
    """Published beside ours. What a running request holds on average is slots x share / batched requests."""
    return {
        "case": case.name,
        "published_as": NAMES[i],
        "strategy": STRATEGIES[i],
        "batched_published": case.batched[i],
        "batched_if_packed": case.batched[i] * (100 - shares(full)["other"]) / (100 - OTHER[i]),
        "batched_at_rate": at_rate.running_mean,
        "waiting_at_rate": at_rate.waiting_mean,
        "batched_saturated": full.running_mean,
        "states_percent_published": STATES[i],
        "kv_percent_at_rate": shares(at_rate),
        "kv_percent_saturated": shares(full),
        "held_published": full.pool_tokens * STATES[i] / 100 / case.batched[i],
        "held_saturated": full.pool_tokens * shares(full)["states"] / 100 / full.running_mean,
    }


def shares(outcome: Outcome) -> dict[str, float]:
    """The ledger in the paper's four parts, % of the pool."""
    kv = outcome.kv_mean
    parts = {
        "states": kv["live"],
        "used_later": kv["reserved_used_later"],
        "never_used": kv["reserved_never_used"] + kv["slack"],
    }
    return {name: round(100 * share, 2) for name, share in (*parts.items(), ("other", 1 - sum(parts.values())))}


if __name__ == "__main__":
    main()
