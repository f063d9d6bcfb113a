"""A replay's report as data: what page, table, verdict, CSV and trace are made of, with a stable JSON schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.planner.deployment import Fidelity
from octavo.planner.outcome import SCHEMA, Outcome
from octavo.planner.slo import SLO
from octavo.planner.traces.api import BadLine
from octavo.report.replay_json import ReportError, from_plain, to_plain

POOL = "KV pool"


@dataclass(frozen=True, slots=True)
class Setting:
    """A resolved setting, and where its value came from: "flag", "engine profile", "model config" ..."""

    name: str
    value: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class BudgetLine:
    """A part of the device's memory in bytes of one rank, between `low` and `high`.

    parts   what of `low` is known to be which, as ("logits: vocabulary x sequences", bytes); may be ()
    source  where the number comes from
    """

    name: str
    low: int
    high: int
    source: str = ""
    parts: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Budget:
    """`total` bytes of a device; its lines are exclusive and add up to it within their intervals, the pool last."""

    total: int
    lines: tuple[BudgetLine, ...]

    @property
    def pool(self) -> BudgetLine | None:
        return next((line for line in self.lines if line.name == POOL), None)


@dataclass(frozen=True, slots=True)
class RateCurve:
    """What a strategy makes of rising load: columns of equal length over `rates` (requests offered a second).

    goodput   requests a second within the SLO; attained: share of the requests within it; None without an SLO
    running   requests at once, mean; ttft_p99 in seconds
    knee      largest rate at which the SLO holds, None when it holds at none or there is no SLO
    error     relative error of `knee` (0.05 = 5 %), None when it is not known
    """

    strategy: str
    rates: tuple[float, ...]
    goodput: tuple[float | None, ...]
    attained: tuple[float | None, ...]
    running: tuple[float, ...]
    ttft_p99: tuple[float, ...]
    knee: float | None = None
    error: float | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """What a change does: requests at once (mean), requests a second within the SLO (None without one), p99 TTFT and
    mean time of a whole request in seconds."""

    concurrency: float
    goodput: float | None
    ttft_p99: float
    e2e: float


@dataclass(frozen=True, slots=True)
class Change:
    """One change of the deployment, re-simulated; judged by goodput, without an SLO by the time of a whole request.

    name                    as in "fp8 KV"
    flag_octavo, flag_vllm  what to set, "" where the engine has no such flag
    after                   None: it cannot run, `note` says why
    error                   half the 95 % interval of the judged figure's change, in parts of what it was before
                            (0.09 = 9 %); None when it is not known
    """

    name: str
    flag_octavo: str
    flag_vllm: str
    before: Figures
    after: Figures | None
    error: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """One trace replayed under one or more strategies.

    strategy  whose outcome the verdict is about, the deployed one; the first outcome's when it is not among them
    trace     its name; command: the command line that makes this report again
    model, device   as people call them
    budget, fidelity, curves, changes: None where that was not asked for or is not known
    bottleneck  what the changes together say is scarce, in a sentence; "" when none were tried
    bad_lines lines of the trace left out (at most the first 100)
    """

    title: str
    command: str
    trace: str
    model: str
    device: str
    strategy: str
    outcomes: tuple[Outcome, ...]
    slo: SLO | None = None
    settings: tuple[Setting, ...] = ()
    budget: Budget | None = None
    fidelity: Fidelity | None = None
    curves: tuple[RateCurve, ...] | None = None
    changes: tuple[Change, ...] | None = None
    bottleneck: str = ""
    bad_lines: tuple[BadLine, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def main(self) -> Outcome | None:
        """The outcome that the verdict is about."""
        named = (outcome for outcome in self.outcomes if outcome.strategy == self.strategy)
        return next(named, self.outcomes[0] if self.outcomes else None)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict: "schema" = "octavo.replay/1", then every field under its name.

        Dataclasses are objects with their fields as keys, tuples lists, times seconds, shares of the pool in 0..1.
        Keys are only ever added under this schema; one that is renamed, removed or changes its meaning raises it.

            outcomes[]   strategy, figures (see `Outcome`), kv_mean, kv_peak, waited, timeline, map, lives[], bounds
            budget       total, lines[]: name, low, high, source, parts
            fidelity     level, error, statement, assumptions;  settings[]: name, value, source
            curves[]     strategy, rates, goodput, attained, running, ttft_p99, knee, error
            changes[]    name, flag_octavo, flag_vllm, before, after, error, note
            bad_lines[]  line, reason;  slo.bounds[]: metric, seconds, share
        """
        return {"schema": SCHEMA, **to_plain(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ReplayReport:
        """The inverse of `to_json`. Raises ReportError with the field that is wrong or missing."""
        if data.get("schema") != SCHEMA:
            raise ReportError(f"schema is {data.get('schema')!r}; this Octavo reads {SCHEMA!r}.")
        report: ReplayReport = from_plain(cls, {key: value for key, value in data.items() if key != "schema"})
        return report


def write_json(path: Path, report: ReplayReport) -> None:
    """Write the report as one JSON file."""
    path.write_text(json.dumps(report.to_json(), allow_nan=False, separators=(",", ":")) + "\n", encoding="utf-8")


def read_json(path: Path) -> ReplayReport:
    """Read what `write_json` wrote. Raises ReportError."""
    try:
        return ReplayReport.from_json(json.loads(path.read_text(encoding="utf-8")))
    except json.JSONDecodeError as error:
        raise ReportError(f"{path} is not JSON (line {error.lineno}: {error.msg}).") from error
