"""The figures of one run under one strategy, and the JSON that reports and scripts read."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from octavo.planner.outcome import KV_LINES
from octavo.report.recorder import Recorder, StepSample


@dataclass(frozen=True, slots=True)
class Percentiles:
    p50: float
    p99: float


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One strategy's run. Shares are of the KV pool: `kv_mean` weighted by time, `kv_peak` at the step with most
    running requests (the fullest of them). Times in seconds."""

    strategy: str
    pool_tokens: int
    pool_bytes: int
    requests: int
    refused: int
    waited: int  # requests that were not admitted in the first step after their arrival
    mean_running: float
    peak_running: int
    kv_mean: dict[str, float]
    kv_peak: dict[str, float]
    preemptions: int
    ttft: Percentiles
    itl: Percentiles
    output_tokens: int
    tokens_per_second: float
    seconds: float
    waited_by_cause: dict[str, float]

    @property
    def holding_mean(self) -> float:
        """Share of the pool that held token states, over time."""
        return self.kv_mean["live"] + self.kv_mean["cached"]

    @property
    def holding_peak(self) -> float:
        return self.kv_peak["live"] + self.kv_peak["cached"]


def percentile(values: list[float], q: float) -> float:
    """Nearest-rank percentile; 0.0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered) / 100) - 1)]


def _shares(sample: StepSample, never: int) -> dict[str, float]:
    ledger = sample.ledger
    lines = asdict(ledger)
    reserved = lines.pop("reserved")
    lines["slack"] += lines.pop("lookahead")  # slots without a verified token, for this step only
    lines["reserved_never_used"] = never
    lines["reserved_used_later"] = reserved - never
    return {name: lines[name] / ledger.capacity for name in KV_LINES}


def summarise(strategy: str, recorder: Recorder, pool_tokens: int, pool_bytes: int) -> RunSummary:
    """Boil a recorded run down to its figures."""
    steps, never = recorder.steps, recorder.never_used()
    busy = sum(sample.end - sample.start for sample in steps) or 1.0
    shares = [_shares(sample, unused) for sample, unused in zip(steps, never, strict=True)]
    mean = dict.fromkeys(KV_LINES, 0.0)
    waited: dict[str, float] = {}
    for sample, share in zip(steps, shares, strict=True):
        seconds = sample.end - sample.start
        for name, value in share.items():
            mean[name] += value * seconds / busy
        for cause, count in sample.waiting_by_cause.items():
            waited[cause] = waited.get(cause, 0.0) + count * seconds
    peak_running = max((sample.running for sample in steps), default=0)
    peak = max(
        (share for sample, share in zip(steps, shares, strict=True) if sample.running == peak_running),
        key=lambda share: share["live"] + share["cached"],
        default=dict.fromkeys(KV_LINES, 0.0),
    )
    records = list(recorder.requests.values())
    ttft = [record.ttft for record in records if record.ttft is not None]
    gaps = [b - a for r in records for a, b in zip(r.token_times, r.token_times[1:], strict=False)]
    output = sum(record.output_tokens for record in records)
    seconds = steps[-1].end - steps[0].start if steps else 0.0
    return RunSummary(
        strategy=strategy,
        pool_tokens=pool_tokens,
        pool_bytes=pool_bytes,
        requests=len(records),
        refused=len(recorder.refused),
        waited=sum(record.waited for record in records),
        mean_running=sum(s.running * (s.end - s.start) for s in steps) / busy,
        peak_running=peak_running,
        kv_mean=mean,
        kv_peak=peak,
        preemptions=sum(sample.preemptions for sample in steps),
        ttft=Percentiles(percentile(ttft, 50), percentile(ttft, 99)),
        itl=Percentiles(percentile(gaps, 50), percentile(gaps, 99)),
        output_tokens=output,
        tokens_per_second=output / seconds if seconds else 0.0,
        seconds=seconds,
        waited_by_cause=waited,
    )


def timeline(recorder: Recorder, points: int = 400) -> dict[str, list[object]]:
    """The run over time in at most `points` stretches: column name -> values, each a mean over its stretch weighted by
    time (shares of the pool for KV); `t` is where the stretch ends, `preemptions` their number in it."""
    steps, never = recorder.steps, recorder.never_used()
    every = max(1, -(-len(steps) // points))
    columns: dict[str, list[object]] = {name: [] for name in ("t", "running", "waiting", "causes", "preemptions")}
    columns |= {name: [] for name in KV_LINES}
    for i in range(0, len(steps), every):
        stretch = steps[i : i + every]
        last = stretch[-1]
        columns["t"].append(round(last.end, 4))
        columns["running"].append(round(_mean(stretch, [s.running for s in stretch]), 2))
        columns["waiting"].append(round(_mean(stretch, [s.waiting for s in stretch]), 2))
        columns["causes"].append(last.waiting_by_cause)
        columns["preemptions"].append(sum(s.preemptions for s in stretch))
        shares = [_shares(s, unused) for s, unused in zip(stretch, never[i : i + every], strict=True)]
        for name in KV_LINES:
            columns[name].append(round(_mean(stretch, [share[name] for share in shares]), 5))
    return columns


def _mean(stretch: list[StepSample], values: list[float] | list[int]) -> float:
    """Mean weighted by the steps' durations."""
    seconds = [s.end - s.start for s in stretch]
    total = sum(seconds)
    if not total:
        return sum(values) / len(values)
    return sum(value * weight for value, weight in zip(values, seconds, strict=True)) / total


def block_map(recorder: Recorder) -> dict[str, object]:
    """Snapshots of the pool: times, and per snapshot the owner of each stretch of blocks and whether it is written."""
    return {
        "t": [round(column.at, 4) for column in recorder.map],
        "owner": [list(column.cells) for column in recorder.map],
        "written": [[int(w) for w in column.written] for column in recorder.map],
    }


def request_rows(recorder: Recorder) -> list[dict[str, object]]:
    """One row per request, for tables and waterfalls."""
    return [
        {
            "id": record.id,
            "arrival": record.arrival,
            "admitted": record.admitted,
            "first_token": record.token_times[0] if record.token_times else None,
            "finished": record.finished,
            "reason": record.reason,
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": record.output_tokens,
            "cached_tokens": record.cached_tokens,
            "preemptions": record.preemptions,
        }
        for record in recorder.requests.values()
    ]
