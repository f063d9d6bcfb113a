"""What a bench has found: what the tables, the page and the JSON are made of."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.benching.figures import Figures, median_of
from octavo.benching.roofline import Limits, StepKind, verdict
from octavo.report.wording import percent, rate, seconds

if TYPE_CHECKING:
    from octavo.benching.probe import Machine

SCHEMA = "octavo.bench"
VERSION = 1  # raised when a key is renamed, removed or changes its meaning; new keys do not raise it
MUCH_FOREIGN = 0.05  # share of the CPU time that others may take before it is said
MUCH_DRIFT = 0.15  # change of the bandwidth from before to after before it is said


@dataclass(frozen=True, slots=True)
class PointResult:
    """One point of the plan: its rounds, and the machine right before and after them.

    kinds          of steps, by what they computed
    foreign_share  of the CPU time taken by others during the rounds; None: it cannot be told
    """

    name: str
    mode: str
    concurrency: int
    rounds: tuple[Figures, ...]
    kinds: tuple[StepKind, ...]
    before: Limits
    after: Limits
    foreign_share: float | None

    @property
    def median(self) -> Figures:
        found: Figures = median_of(self.rounds)
        return found

    @property
    def drift(self) -> float:
        """By how much the bandwidth changed, as a share of the larger one."""
        return 1 - min(self.before.bandwidth, self.after.bandwidth) / max(self.before.bandwidth, self.after.bandwidth)

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "mode": self.mode,
            "concurrency": self.concurrency,
            "probe": {
                "before": {"bandwidth": self.before.bandwidth, "flops_per_second": self.before.flops},
                "after": {"bandwidth": self.after.bandwidth, "flops_per_second": self.after.flops},
            },
            "foreign_cpu_share": self.foreign_share,
            "median": asdict(self.median),
            "rounds": [asdict(one) for one in self.rounds],
            "step_kinds": [kind.to_json() for kind in self.kinds],
        }


@dataclass(frozen=True, slots=True)
class BenchResult:
    """
    model     one line: name, dtypes, bytes of weights, who computes
    facts     about model and engine by name, for the JSON
    workload  in a sentence; warm_up: what ran before the rounds, unmeasured
    load      seconds by phase from the start of loading until the engine was ready
    """

    title: str
    model: str
    command: str
    workload: str
    warm_up: str
    facts: dict[str, object]
    load: dict[str, float]
    machine: Machine
    points: tuple[PointResult, ...]

    @property
    def single(self) -> PointResult | None:
        """The single stream, if it was measured."""
        return next((point for point in self.points if point.mode == "latency"), None)

    @property
    def batches(self) -> tuple[PointResult, ...]:
        """All points but the single stream."""
        return tuple(point for point in self.points if point.mode != "latency")

    @property
    def kinds(self) -> tuple[StepKind, ...]:
        """Decodes in the order of the points, the first of each batch size; behind them the first prompt chunk."""
        found = [kind for point in self.points for kind in point.kinds]
        decodes = {kind.name: kind for kind in reversed(found) if kind.decode}
        return (*reversed(decodes.values()), *[kind for kind in found if not kind.decode][:1])

    @property
    def detailed(self) -> tuple[StepKind, ...]:
        """The kinds that are worth a table of their own: the smallest batch, the largest, and the prompt chunk."""
        decodes = [kind for kind in self.kinds if kind.decode]
        ends = [decodes[0], max(decodes, key=lambda kind: kind.sequences)] if decodes else []
        prompts = [kind for kind in self.kinds if not kind.decode]
        return tuple(dict.fromkeys((*ends[:1], *prompts, *(k for k in ends[1:] if k.sequences > ends[0].sequences))))

    @property
    def verdict(self) -> tuple[str, ...]:
        """The answer in a few sentences."""
        return (*self._growth(), *(verdict(kind) for kind in self.detailed))

    @property
    def cautions(self) -> tuple[str, ...]:
        """What a reader must know before trusting the figures."""
        out = []
        shares = [point.foreign_share for point in self.points if point.foreign_share is not None]
        if shares and max(shares) > MUCH_FOREIGN:
            out.append(
                f"Others took up to {percent(max(shares))} of the CPU time while this ran: the figures are lower than "
                "the machine's."
            )
        if max(point.drift for point in self.points) > MUCH_DRIFT:
            out.append("The memory bandwidth changed by more than 15 % within a point: floors are of the mean of both.")
        if not all(kind.profiled for kind in self.kinds):
            out.append(
                "This model runs through transformers' code, which does not tell the parts of a step apart; the floor "
                "is that of its bytes alone."
            )
        return tuple(out)

    def _growth(self) -> tuple[str, ...]:
        if len(self.batches) < 2:
            return ()
        points = sorted(self.batches, key=lambda point: point.concurrency)
        first, best = points[0], max(points, key=lambda point: point.median.output_tokens_per_second)
        low, high = first.median, best.median
        gaps = ""
        if low.itl is not None and high.itl is not None:
            gaps = f"; the median gap between tokens goes from {seconds(low.itl.p50)} to {seconds(high.itl.p50)}"
        return (
            f"Output goes from {rate(low.output_tokens_per_second)} tokens/s at {first.concurrency} to "
            f"{rate(high.output_tokens_per_second)} at {best.concurrency} requests at once "
            f"({high.output_tokens_per_second / low.output_tokens_per_second:.1f}x){gaps}.",
        )

    def to_json(self) -> dict[str, object]:
        """A JSON-ready dict; times in seconds, rates per second."""
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "title": self.title,
            "command": self.command,
            "model": self.model,
            "workload": self.workload,
            "warm_up": self.warm_up,
            "facts": self.facts,
            "load_seconds": self.load,
            "machine": self.machine.to_json(),
            "points": [point.to_json() for point in self.points],
            "verdict": list(self.verdict),
            "cautions": list(self.cautions),
        }


def write_json(path: Path, result: BenchResult) -> None:
    """Write the result as one JSON file."""
    path.write_text(json.dumps(result.to_json(), allow_nan=False, indent=1) + "\n", encoding="utf-8")
