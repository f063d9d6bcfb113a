"""What to change: every knob re-simulated alone, then the best in pairs, ranked, with error bars and a diagnosis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import combinations

from octavo.errors import OctavoError
from octavo.planner.deployment import Deployment, Resolved
from octavo.planner.replay import ReplayOptions
from octavo.planner.search.changes import Change, Figures, Judge, Verdict, figures_of
from octavo.planner.search.jobs import Impossible, Job, Workers, run_job
from octavo.planner.search.knobs import Knob, knobs_for, twice_the_pool
from octavo.planner.search.samples import Requests, redrawn
from octavo.scheduler.config import SchedulerConfig

PAIRED = 4  # so many of the best knobs are tried in pairs
UNSURE = 0.05  # relative relief within its error bar above which the error bar is to blame
LIGHT = 0.05  # share of a request's life in the queue below which nothing is called a bottleneck

Turned = tuple[Knob, ...]
Runs = tuple[Figures, ...]


class Bottleneck(StrEnum):
    """What more of would help."""

    NOTHING = "nothing"
    MEMORY = "KV memory"
    SLOTS = "max_num_seqs"
    BUDGET = "max_num_batched_tokens"
    COMPUTE = "compute"
    UNCLEAR = "not clear"


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The ranked answer: means over `seeds` redrawings of `requests` requests.

    judged_by   the figure that ranks
    probe       the run with twice the KV memory, which nobody sells
    statement   the bottleneck in a sentence with numbers
    """

    deployment: Deployment
    before: Figures
    changes: tuple[Change, ...]
    probe: Change
    judged_by: str
    bottleneck: Bottleneck
    statement: str
    requests: int
    seeds: int


def what_if(
    resolved: Resolved,
    requests: Requests,
    options: ReplayOptions,
    workers: Workers,
    *,
    seeds: int = 4,
    devices: Sequence[str] = (),
) -> WhatIf:
    """Turn every knob of the deployment on these requests, redrawn so many times (see `redrawn`).

    Ranked by goodput where the options have an SLO, else by the mean time of a whole request. The outcome does not
    depend on the number of workers. Raises OctavoError if the deployment itself cannot work.
    """
    if seeds < 2:
        raise OctavoError(f"seeds is {seeds}; a change needs at least 2 for its error bar.")
    samples = tuple(redrawn(requests, seed) for seed in range(seeds))
    study = _Study(resolved.deployment, samples, options, workers)
    probe, singles = (twice_the_pool(resolved),), [(knob,) for knob in knobs_for(resolved, requests, devices)]
    judge = Judge(study.baseline(), "e2e" if options.slo is None else "goodput")
    doubled, *alone = study.changes([probe, *singles], judge)
    couples = _couples(judge, alone)
    together = study.changes(couples, judge)
    kind, statement = _bottleneck(judge, resolved.scheduler, doubled, alone)
    together = [pair for pair in together if not any(_is_all_of(single, pair) for single in alone)]
    ranked = tuple(judge.rank([*alone, *together]))
    return WhatIf(
        deployment=resolved.deployment,
        before=judge.before,
        changes=ranked,
        probe=doubled,
        judged_by=judge.by,
        bottleneck=kind,
        statement=statement,
        requests=len(requests),
        seeds=seeds,
    )


def _is_all_of(single: Change, pair: Change) -> bool:
    """Whether one of the two does alone what the pair does: then the pair is no advice of its own."""
    return single.knobs[0] in pair.knobs and single.after == pair.after


@dataclass(frozen=True, slots=True)
class _Study:
    """The runs of a what-if: turned knobs in, figures of every seed out."""

    deployment: Deployment
    samples: tuple[Requests, ...]
    options: ReplayOptions
    workers: Workers

    def baseline(self) -> Runs:
        """The deployment as it is. Raises OctavoError if it cannot work."""
        runs: list[Figures] = []
        for found in self._run([()], range(len(self.samples)))[0]:
            if isinstance(found, Impossible):
                raise OctavoError(found.reason)
            runs.append(found)
        return tuple(runs)

    def changes(self, choices: Sequence[Turned], judge: Judge) -> list[Change]:
        """Each choice on the traffic as recorded; those that make any difference there on the other seeds, too."""
        first = [found[0] for found in self._run(choices, range(1))]
        moved = [at for at, run in enumerate(first) if isinstance(run, Figures) and run != judge.runs[0]]
        others = dict(zip(moved, self._run([choices[at] for at in moved], range(1, len(self.samples))), strict=True))
        changes: list[Change] = []
        for at, (turned, run) in enumerate(zip(choices, first, strict=True)):
            runs = [run, *others.get(at, ())]
            failed = next((each for each in runs if isinstance(each, Impossible)), None)
            if failed is not None:
                changes.append(Change(turned, None, {}, Verdict.IMPOSSIBLE, reason=failed.reason))
            elif at in others:
                changes.append(judge.change(turned, [each for each in runs if isinstance(each, Figures)]))
            else:
                changes.append(judge.same(turned))
        return changes

    def _run(self, choices: Sequence[Turned], seeds: range) -> list[list[Figures | Impossible]]:
        found = iter(self.workers.map(run_figures, [self._job(turned, seed) for turned in choices for seed in seeds]))
        return [[next(found) for _ in seeds] for _ in choices]

    def _job(self, turned: Turned, seed: int) -> Job:
        deployment = self.deployment
        for knob in turned:
            deployment = knob.apply(deployment)
        options = replace(self.options, strategy=None, lives=0, map=False, timeline=False)
        return Job(deployment, self.samples[seed], options, seed)


def run_figures(job: Job) -> Figures | Impossible:
    """Run one job and keep what is compared. A top-level function: workers import it."""
    outcome = run_job(job)
    return outcome if isinstance(outcome, Impossible) else figures_of(outcome)


def _couples(judge: Judge, alone: Sequence[Change]) -> list[Turned]:
    """Pairs of the best knobs that help, one step of each."""
    best: dict[str, Knob] = {}
    for change in judge.rank(alone):
        if change.verdict is Verdict.BETTER or judge.gain(change) > 0:
            best.setdefault(change.knobs[0].setting, change.knobs[0])
    return list(combinations(list(best.values())[:PAIRED], 2))


def _bottleneck(
    judge: Judge, settings: SchedulerConfig, doubled: Change, alone: Sequence[Change]
) -> tuple[Bottleneck, str]:
    """The limit whose lifting helps most; compute when lifting none of them does."""
    before = judge.before
    if before.e2e == 0 or before.waited < LIGHT * before.e2e:
        share = before.waited / before.e2e if before.e2e else 0.0
        return Bottleneck.NOTHING, (
            f"Nothing is scarce: requests wait for {share:.1%} of their life, and the device is busy "
            f"{before.busy:.0%} of the time."
        )
    lifted = [(Bottleneck.MEMORY, doubled)]
    for kind in (Bottleneck.SLOTS, Bottleneck.BUDGET):
        limit = getattr(settings, kind.value)
        lifted += [(kind, c) for c in alone if c.knobs[0].setting == kind and c.knobs[0].changes[kind] > limit]
    kind, change = max(lifted, key=lambda entry: _relief(judge, entry[1]))
    if _relief(judge, change) > 0:
        return kind, _statement(judge, kind, change, doubled)
    kind, change = max(lifted, key=lambda entry: _hope(judge, entry[1]))
    if _hope(judge, change) > UNSURE:
        return Bottleneck.UNCLEAR, (
            f"The bottleneck is not clear: with {change.name}, {_figure(judge, change)}, but seeds differ by more than "
            "that. Give more seeds or a longer window."
        )
    return Bottleneck.COMPUTE, (
        f"The bottleneck is compute, not memory: twice the KV memory changes nothing measurable "
        f"({_figure(judge, doubled)}), and neither do more sequences or tokens a step; the device is busy "
        f"{before.busy:.0%} of the time. A faster device, more of them or shorter requests help."
    )


def _relief(judge: Judge, change: Change) -> float:
    """How much lifting a limit improves the ranking figure, or the time of a whole request where that stands still.
    Nothing, if it only trades one figure for another."""
    if change.verdict is not Verdict.BETTER:
        return max(0.0, judge.gain(change))
    if gain := judge.gain(change):
        return gain
    return max(0.0, -change.difference["e2e"].mean / judge.before.e2e)


def _hope(judge: Judge, change: Change) -> float:
    """Relative relief in the ranking figure or the time of a whole request, sure or not."""
    if change.after is None:
        return 0.0
    before, after = judge.before, change.after
    goodput = after.goodput / before.goodput - 1 if before.goodput else 0.0
    return max(goodput, 1 - after.e2e / before.e2e)


def _statement(judge: Judge, kind: Bottleneck, change: Change, doubled: Change) -> str:
    memory = "" if doubled.verdict is not Verdict.NONE else " Twice the KV memory would change nothing measurable."
    return f"The bottleneck is {kind.value}: with {change.name}, {_figure(judge, change)}.{memory}"


def _figure(judge: Judge, change: Change) -> str:
    """What a change does to concurrency and to the ranking figure, in numbers."""
    before, after = judge.before, change.after
    if after is None:
        return change.reason
    running = f"{before.running_mean:.3g} -> {after.running_mean:.3g} requests run at once"
    life = f"a request takes {before.e2e:.3g} -> {after.e2e:.3g} s"
    if judge.by == "goodput":
        return f"{running}, goodput is {before.goodput:.3g} -> {after.goodput:.3g} a second, {life}"
    return f"{running}, {life}"
