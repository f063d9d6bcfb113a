"""The same work under several strategies: what the page, the table and the JSON are made of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from octavo.errors import OctavoError
from octavo.report.recorder import Recorder
from octavo.report.summary import Percentiles, RunSummary, block_map, request_rows, summarise, timeline
from octavo.report.verdict import verdict

SCHEMA = "octavo.comparison"
VERSION = 1  # raised when a key is renamed, removed or changes its meaning; new keys do not raise it


class ComparisonError(OctavoError, ValueError):
    """The JSON is not a comparison that this version can read."""


@dataclass(frozen=True, slots=True)
class StrategyRun:
    """One strategy's run: its figures, and what they were boiled down from.

    timeline and block_map are as `summary.timeline` and `summary.block_map` make them, requests as
    `summary.request_rows`; a number in block_map["owner"] is an index into `requests`.
    """

    summary: RunSummary
    timeline: Mapping[str, Sequence[object]]
    block_map: Mapping[str, object]
    requests: Sequence[Mapping[str, object]]

    @classmethod
    def of(cls, strategy: str, recorder: Recorder, pool_tokens: int, pool_bytes: int) -> StrategyRun:
        """From a recorded run; the pool as the strategy was given it."""
        figures = summarise(strategy, recorder, pool_tokens, pool_bytes)
        return cls(figures, timeline(recorder), block_map(recorder), request_rows(recorder))


@dataclass(frozen=True, slots=True)
class Comparison:
    """
    machine        one line: processor or GPU, memory, threads
    command        the command line that makes this comparison again
    workload       one or two sentences: where the requests come from, how many, how long
    verdict        the answer in a few sentences, see `verdict.py`
    kv_bytes       KV memory every strategy was given
    block_size     tokens a block
    max_model_len  longest sequence the engine allowed, in tokens
    simulated      True: lengths and durations come from a timing model, no tokens were computed
    notes          further sentences for the box "How this was measured"
    """

    title: str
    model: str
    machine: str
    command: str
    workload: str
    verdict: str
    kv_bytes: int
    block_size: int
    max_model_len: int
    runs: tuple[StrategyRun, ...]
    simulated: bool = False
    notes: tuple[str, ...] = field(default=())

    @property
    def summaries(self) -> tuple[RunSummary, ...]:
        return tuple(run.summary for run in self.runs)

    def to_json(self) -> dict[str, object]:
        """A JSON-ready dict; shares are of the KV pool, times in seconds, `requests[].arrival` on the run's clock."""
        out: dict[str, object] = {"schema": SCHEMA, "version": VERSION}
        for name in _PLAIN:
            out[name] = getattr(self, name)
        out["notes"] = list(self.notes)
        out["runs"] = [
            {
                "summary": asdict(run.summary)
                | {"holding_mean": run.summary.holding_mean, "holding_peak": run.summary.holding_peak},
                "timeline": {name: list(values) for name, values in run.timeline.items()},
                "block_map": dict(run.block_map),
                "requests": [dict(row) for row in run.requests],
            }
            for run in self.runs
        ]
        return out

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Comparison:
        """The inverse of `to_json`. Raises ComparisonError with the field that is wrong or missing."""
        if data.get("schema") != SCHEMA or data.get("version") != VERSION:
            raise ComparisonError(
                f"schema is {data.get('schema')!r}, version {data.get('version')!r}; "
                f"this Octavo reads {SCHEMA!r}, version {VERSION}."
            )
        try:
            plain = {name: data[name] for name in _PLAIN}
            runs = tuple(_run(item) for item in data["runs"])  # type: ignore[attr-defined]
            return cls(**plain, runs=runs, notes=tuple(data["notes"]))  # type: ignore[arg-type]
        except KeyError as error:
            raise ComparisonError(f"The comparison has no field {error}.") from error
        except TypeError as error:
            raise ComparisonError(f"The comparison has a field of the wrong kind: {error}.") from error


_PLAIN = (
    "title",
    "model",
    "machine",
    "command",
    "workload",
    "verdict",
    "kv_bytes",
    "block_size",
    "max_model_len",
    "simulated",
)


def _run(item: Mapping[str, object]) -> StrategyRun:
    figures = dict(item["summary"])  # type: ignore[call-overload]
    for derived in ("holding_mean", "holding_peak"):
        figures.pop(derived, None)
    for name in ("ttft", "itl"):
        figures[name] = Percentiles(**figures[name])
    return StrategyRun(
        RunSummary(**figures),
        item["timeline"],  # type: ignore[arg-type]
        item["block_map"],  # type: ignore[arg-type]
        item["requests"],  # type: ignore[arg-type]
    )


def write_json(path: Path, comparison: Comparison) -> None:
    """Write the comparison as one JSON file."""
    path.write_text(json.dumps(comparison.to_json(), allow_nan=False, separators=(",", ":")) + "\n", encoding="utf-8")


def compare(
    runs: Sequence[StrategyRun],
    *,
    title: str,
    model: str,
    machine: str,
    command: str,
    workload: str,
    kv_bytes: int,
    block_size: int,
    max_model_len: int,
    simulated: bool = False,
    notes: Sequence[str] = (),
) -> Comparison:
    """Put runs side by side and answer the question."""
    return Comparison(
        title=title,
        model=model,
        machine=machine,
        command=command,
        workload=workload,
        verdict=verdict([run.summary for run in runs], max_model_len=max_model_len),
        kv_bytes=kv_bytes,
        block_size=block_size,
        max_model_len=max_model_len,
        runs=tuple(runs),
        simulated=simulated,
        notes=tuple(notes),
    )
