"""The figures of a round under the names that load generators use, and the median of several rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from octavo.report.summary import percentile

if TYPE_CHECKING:
    from octavo.benching.meter import StepRecord
    from octavo.outputs import RequestOutput


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds; percentiles are nearest-rank."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: list[float]) -> Spread | None:
        """None for no values."""
        if not values:
            return None
        return cls(sum(values) / len(values), *(percentile(values, q) for q in (50, 90, 99)))


@dataclass(frozen=True, slots=True)
class Figures:
    """One round. Times in seconds.

    seconds     from the first request sent to the last token
    ttft        from sending a request to its first token
    itl         between two deliveries of a request; tokens that come together (accepted drafts) are one delivery
    tpot        of a request: time from its first to its last token, over its tokens but the first
    e2e         from sending a request to its last token
    prefill_…   prompt tokens over TTFT, decode_…: tokens but the first over the time they took; single stream only
    …_running   requests in a step; the mean is weighted by time
    …_kv_utilisation  share of the KV blocks that running requests hold
    """

    seconds: float
    requests: int
    prompt_tokens: int
    output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    prefill_tokens_per_second: float | None
    decode_tokens_per_second: float | None
    ttft: Spread | None
    itl: Spread | None
    tpot: Spread | None
    e2e: Spread | None
    steps: int
    mean_running: float
    peak_running: int
    mean_kv_utilisation: float
    peak_kv_utilisation: float
    preemptions: int
    cached_tokens: int
    drafted_tokens: int
    accepted_tokens: int


def figures(outputs: Sequence[RequestOutput], steps: Sequence[StepRecord]) -> Figures:
    """Boil a round down: its finished requests and its steps."""
    metrics = [output.metrics for output in outputs]
    times = [m.token_times for m in metrics]
    seconds = max(t[-1] for t in times) - min(m.arrival for m in metrics)
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    output_tokens = sum(len(t) for t in times)
    busy = sum(step.seconds for step in steps)
    first = [t[0] - m.arrival for t, m in zip(times, metrics, strict=True)]
    alone = len(outputs) == 1
    decoding = times[0][-1] - times[0][0]
    return Figures(
        seconds=seconds,
        requests=len(outputs),
        prompt_tokens=prompt,
        output_tokens=output_tokens,
        requests_per_second=len(outputs) / seconds,
        output_tokens_per_second=output_tokens / seconds,
        total_tokens_per_second=(prompt + output_tokens) / seconds,
        prefill_tokens_per_second=prompt / first[0] if alone else None,
        decode_tokens_per_second=(output_tokens - 1) / decoding if alone and decoding > 0 else None,
        ttft=Spread.of(first),
        itl=Spread.of([b - a for t in times for a, b in pairwise(sorted(set(t)))]),
        tpot=Spread.of([(t[-1] - t[0]) / (len(t) - 1) for t in times if len(t) > 1]),
        e2e=Spread.of([t[-1] - m.arrival for t, m in zip(times, metrics, strict=True)]),
        steps=len(steps),
        mean_running=sum(step.sequences * step.seconds for step in steps) / busy,
        peak_running=max(step.sequences for step in steps),
        mean_kv_utilisation=sum(step.kv_used * step.seconds for step in steps) / busy,
        peak_kv_utilisation=max(step.kv_used for step in steps),
        preemptions=sum(m.preemptions for m in metrics),
        cached_tokens=sum(m.cached_tokens for m in metrics),
        drafted_tokens=sum(m.drafted_tokens for m in metrics),
        accepted_tokens=sum(m.accepted_tokens for m in metrics),
    )


def median_of(rounds: Sequence[Any]) -> Any:
    """Field by field the median of dataclasses of one kind; None where any round has None."""
    values = {field.name: [getattr(one, field.name) for one in rounds] for field in fields(rounds[0])}
    return type(rounds[0])(**{name: _median(column) for name, column in values.items()})


def _median(column: list[Any]) -> Any:
    if any(value is None for value in column):
        return None
    if is_dataclass(column[0]):
        return median_of(column)
    middle = median(column)
    return int(middle) if all(isinstance(value, int) for value in column) and middle == int(middle) else middle
