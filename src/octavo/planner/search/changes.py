"""Changes of a deployment, judged: figures before and after over the same seeds, and what may be said of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from statistics import fmean

from octavo.planner.outcome import Outcome
from octavo.planner.search.estimates import Estimate, paired
from octavo.planner.search.knobs import Knob

LEAST = 0.01  # relative changes below this are not called changes, however sure they are


@dataclass(frozen=True, slots=True)
class Figures:
    """One run in numbers, or the means of several. Times in seconds; e2e, waited: means over requests.

    goodput, attained  0 throughout without an SLO
    busy               share of the time with a step running
    waited             time in the queue, before and between admissions
    """

    running_mean: float
    running_peak: float
    goodput: float
    attained: float
    ttft_p99: float
    itl_p99: float
    e2e: float
    tokens_per_second: float
    preemptions: float
    busy: float
    waited: float


#: Judged figures -> whether more is better. Concurrency is told but not judged: a faster run has fewer at once.
MORE_IS_BETTER: Mapping[str, bool] = {"goodput": True, "e2e": False, "ttft_p99": False, "itl_p99": False}


class Verdict(StrEnum):
    BETTER = "better"
    WORSE = "worse"
    MIXED = "mixed"
    NONE = "no measurable change"
    IMPOSSIBLE = "cannot run"


@dataclass(frozen=True, slots=True)
class Change:
    """One or two knobs turned.

    after          means over seeds, None if it cannot run (`reason` says why)
    difference     figure -> change against the deployment as it is, seed by seed, with its error
    better, worse  judged figures that measurably are
    """

    knobs: tuple[Knob, ...]
    after: Figures | None
    difference: Mapping[str, Estimate]
    verdict: Verdict
    better: tuple[str, ...] = ()
    worse: tuple[str, ...] = ()
    reason: str = ""

    @property
    def name(self) -> str:
        return " + ".join(knob.name for knob in self.knobs)

    @property
    def octavo(self) -> str:
        return " ".join(knob.octavo for knob in self.knobs if knob.octavo)

    @property
    def vllm(self) -> str:
        """Empty unless vLLM has a flag for all of it."""
        return " ".join(knob.vllm for knob in self.knobs) if all(knob.vllm for knob in self.knobs) else ""


class Judge:
    """Compares runs with those of the deployment as it is, seed by seed; ranks by one figure."""

    def __init__(self, runs: Sequence[Figures], by: str) -> None:
        self.by = by
        self.before = mean_figures(runs)
        self.runs = tuple(runs)

    def change(self, knobs: tuple[Knob, ...], runs: Sequence[Figures]) -> Change:
        difference = {
            name: paired([getattr(run, name) for run in self.runs], [getattr(run, name) for run in runs])
            for name in _NAMES
        }
        moved = [name for name in MORE_IS_BETTER if self.measurable(name, difference)]
        better = tuple(name for name in moved if (difference[name].mean > 0) == MORE_IS_BETTER[name])
        worse = tuple(name for name in moved if name not in better)
        return Change(knobs, mean_figures(runs), difference, _verdict(better, worse), better, worse)

    def same(self, knobs: tuple[Knob, ...]) -> Change:
        """A change that made no difference at all in the traffic as recorded; no other seed was run."""
        return Change(knobs, self.before, dict.fromkeys(_NAMES, Estimate(0.0, 0.0, 1)), Verdict.NONE)

    def measurable(self, name: str, difference: Mapping[str, Estimate]) -> bool:
        """Whether a figure changed by more than its error bar, and by 1 %."""
        change = difference[name]
        return change.differs_from_zero and abs(change.mean) >= LEAST * abs(getattr(self.before, name))

    def gain(self, change: Change) -> float:
        """Relative improvement of the ranking figure: 0.1 = 10 % better; 0 when not measurable."""
        if change.after is None or not self.measurable(self.by, change.difference):
            return 0.0
        before, moved = getattr(self.before, self.by), change.difference[self.by].mean
        signed = moved if MORE_IS_BETTER[self.by] else -moved
        return float(signed / before) if before else float(signed)

    def rank(self, changes: Iterable[Change]) -> list[Change]:
        """Best first: by the ranking figure, then by verdict, then by the time of a whole request; what cannot run
        comes last."""

        def key(change: Change) -> tuple[bool, float, int, float]:
            verdict = _ORDER.index(change.verdict)
            if change.after is None:
                return (True, 0.0, verdict, 0.0)
            quicker = -change.difference["e2e"].mean if self.measurable("e2e", change.difference) else 0.0
            return (False, -self.gain(change), verdict, -quicker)

        return sorted(changes, key=key)


_ORDER = (Verdict.BETTER, Verdict.MIXED, Verdict.NONE, Verdict.WORSE, Verdict.IMPOSSIBLE)


def _verdict(better: Sequence[str], worse: Sequence[str]) -> Verdict:
    if better and worse:
        return Verdict.MIXED
    return Verdict.BETTER if better else Verdict.WORSE if worse else Verdict.NONE


def figures_of(outcome: Outcome) -> Figures:
    """What is compared of a run."""
    return Figures(
        running_mean=outcome.running_mean,
        running_peak=outcome.running_peak,
        goodput=outcome.goodput or 0.0,
        attained=outcome.attained or 0.0,
        ttft_p99=outcome.ttft.p99,
        itl_p99=outcome.itl.p99,
        e2e=outcome.e2e.mean,
        tokens_per_second=outcome.tokens_per_second,
        preemptions=outcome.preemptions,
        busy=outcome.busy_seconds / outcome.seconds if outcome.seconds else 0.0,
        waited=sum(outcome.waited.values()) / (outcome.requests or 1),
    )


def mean_figures(runs: Sequence[Figures]) -> Figures:
    return Figures(*(fmean(getattr(run, name) for run in runs) for name in _NAMES))


_NAMES = tuple(field.name for field in fields(Figures))
