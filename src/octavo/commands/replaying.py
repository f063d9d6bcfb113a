"""A trace replayed under several strategies, and the report of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from octavo.errors import OctavoError
from octavo.planner.bounds import BoundsMeter
from octavo.planner.deployment import Resolved
from octavo.planner.outcome import Bounds, Outcome
from octavo.planner.replay import ReplayOptions
from octavo.planner.search.jobs import Impossible, Job, Workers, run_job
from octavo.planner.slo import SLO
from octavo.planner.traces.api import Trace
from octavo.report.replay_data import ReplayReport
from octavo.report.replay_inputs import budget_of, settings_of


def run_strategies(
    trace: Trace, resolved: Sequence[Resolved], options: ReplayOptions, workers: Workers
) -> tuple[Outcome, ...]:
    """One outcome for each deployment (they differ in strategy), with the bounds that no scheduler could beat."""
    found = workers.map(run_job, [Job(each.deployment, trace, options) for each in resolved])
    outcomes: list[Outcome] = []
    for outcome in found:
        if isinstance(outcome, Impossible):
            raise OctavoError(outcome.reason)
        outcomes.append(outcome)
    if not outcomes[0].requests:
        raise OctavoError(f"{trace.name} has no request: widen --window, or leave it and --requests out.")
    return _bounded(trace, resolved[0], outcomes)


def _bounded(trace: Trace, resolved: Resolved, outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """The bounds depend on the trace and the pool alone, so one reading serves all strategies.

    It is also this process's own reading, after which the trace knows its bad lines.
    """
    size, deployment = resolved.deployment.block_size, resolved.deployment
    meter = BoundsMeter(
        resolved.pages * size,
        resolved.scheduler.max_num_seqs,
        size,
        longest=min(resolved.scheduler.max_model_len, resolved.pages * size),
        windows=resolved.windows,
        sharing=deployment.prefix_caching,
    )
    for request in trace:
        meter.add(request)
    return tuple(
        replace(outcome, bounds=_at_least(meter.result(outcome.running_mean + outcome.waiting_mean), outcomes))
        for outcome in outcomes
    )


def _at_least(bounds: Bounds, outcomes: Sequence[Outcome]) -> Bounds:
    """Chunked prompts and preemption can pass the bound on concurrency (see `bounds`): then what was reached is it."""
    return replace(
        bounds,
        running_mean=max(bounds.running_mean, *(outcome.running_mean for outcome in outcomes)),
        running_peak=max(bounds.running_peak, *(outcome.running_peak for outcome in outcomes)),
    )


def report_of(
    title: str,
    command: str,
    trace: Trace,
    resolved: Sequence[Resolved],
    outcomes: tuple[Outcome, ...],
    slo: SLO | None,
    *,
    given_limits: bool = False,
) -> ReplayReport:
    """The report; its verdict is about paging where that was replayed, else about the first strategy."""
    names = [each.deployment.strategy for each in resolved]
    chosen = resolved[names.index("paged") if "paged" in names else 0]
    deployment = chosen.deployment
    return ReplayReport(
        title=title,
        command=command,
        trace=trace.name,
        model=deployment.model,
        device=device_words(chosen),
        strategy=deployment.strategy,
        outcomes=outcomes,
        slo=slo,
        settings=settings_of(chosen),
        budget=budget_of(chosen),
        fidelity=chosen.fidelity,
        bad_lines=trace.bad_lines,
        notes=(*chosen.notes, *_client_limits(outcomes, given_limits)),
    )


def _client_limits(outcomes: Sequence[Outcome], given: bool) -> tuple[str, ...]:
    """What was taken for granted about the limits that clients gave."""
    if given or not any(outcome.strategy.startswith("reserve") for outcome in outcomes):
        return ()
    return (
        "Where the trace does not say what limit a client gave, it is taken to allow the model length, so reserve-pow2 "
        "reserves what reserve-max does; give --max-tokens for another limit.",
    )


def device_words(resolved: Resolved) -> str:
    """The device as people say it, and how many."""
    deployment = resolved.deployment
    name = deployment.gpu or ("a device that is not named" if deployment.memory is None else f"{deployment.memory:,} B")
    return name if deployment.tp == 1 else f"{deployment.tp} x {name}"
