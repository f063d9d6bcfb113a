"""Outcomes made by hand, in which every figure is another one, and replays of a small trace."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from octavo.kv.budget import GIB, Amount, MemoryPlan
from octavo.kv.strategies import STRATEGIES
from octavo.planner.deployment import Deployment, Fidelity, Level, resolve
from octavo.planner.outcome import KV_LINES, Bounds, Distribution, Life, Outcome, PoolMap, Timeline
from octavo.planner.replay import ReplayOptions, replay
from octavo.planner.slo import parse_slo
from octavo.planner.traces.api import BadLine, TraceRequest
from octavo.report.replay_data import Change, Figures, RateCurve, ReplayReport, Setting
from octavo.report.replay_inputs import budget_of, plan_budget, settings_of

SLO = parse_slo("ttft<1s@p99,itl<50ms@p95")
PLAN = MemoryPlan(
    Amount.exactly(24 * GIB, "a card"),
    Fraction(9, 10),
    Amount.exactly(14 * GIB, "counted"),
    Amount(GIB // 2, GIB, "estimate"),
    Amount(GIB // 4, GIB // 2, "estimate"),
    logits=GIB // 8,
)
LIVES = (
    Life("a-0", 0.0, 100, 20, 0.2, 0.5, 3.0, "stop", 16, 0, {"next step": 0.2}),
    Life("a-1", 0.5, 300, 50, 2.0, 2.5, 9.0, "length", 0, 310, {"memory: full": 1.5, "behind": 1.0}, ((4.0, 5.0),)),
    Life("a-2", 1.0, 200, 3, 6.0, 6.5, None, None, 0, 200, {"memory: full": 5.5}, ((8.0, None),)),
    Life("a-3", 1.5, 9000, 0, None, None, None, "refused: too long", 0, 0, {}),
)


def distribution(median: float) -> Distribution:
    return Distribution(97, 1.1 * median, median, 1.5 * median, 1.7 * median, 2.3 * median, 3.1 * median)


def outcome(strategy: str = "paged", **changes: object) -> Outcome:
    """A run that waits for memory."""
    shares = dict.fromkeys(KV_LINES, 0.0) | {"live": 0.61, "cached": 0.2, "slack": 0.04, "free": 0.15}
    made = Outcome(
        strategy=strategy,
        pool_tokens=4096,
        pool_bytes=6 * GIB,
        block_size=16,
        requests=101,
        finished=97,
        refused=4,
        unfinished=0,
        seconds=10.0,
        busy_seconds=9.5,
        steps=412,
        running_mean=31.4,
        running_peak=38,
        waiting_mean=17.3,
        kv_mean=shares,
        kv_peak=shares | {"live": 0.7, "free": 0.06},
        ttft=distribution(0.83),
        itl=distribution(0.021),
        tpot=distribution(0.023),
        e2e=distribution(4.7),
        queue=distribution(0.41),
        attained=0.73,
        goodput=7.3,
        output_tokens=12_345,
        prompt_tokens=40_000,
        preemptions=5,
        discarded=777,
        recomputed=555,
        hit_tokens=8_000,
        query_tokens=40_000,
        waited={"memory: full": 81.0, "slots": 19.0, "next step": 300.0},
        timeline=timeline(),
        map=pool_map(),
        lives=LIVES,
        refusals=(("a-3", "too long"),),
        bounds=Bounds(36.6, 44, 16_000, 12_000),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def timeline() -> Timeline:
    line = dict.fromkeys(KV_LINES, (0.0, 0.0, 0.0)) | {"live": (0.2, 0.9, 0.5), "free": (0.8, 0.1, 0.5)}
    waiting = {"memory: full": (0.0, 9.0, 1.0), "slots": (0.0, 2.0, 0.0)}
    return Timeline((3.0, 7.0, 10.0), (4.0, 38.0, 6.0), waiting, line, (0, 5, 0), (1, 60, 36), (0.02, 0.05, 0.03))


def pool_map() -> PoolMap:
    owner = ((-1, -1, 0, 0), (1, 1, 0, -2), (1, -1, -2, -2))
    written = ((False, False, True, False), (True, False, True, False), (True, False, False, False))
    return PoolMap((0.0, 4.0, 8.0), owner, written, ("a-0", "a-1"))


def change(name: str, after: Figures | None, error: float | None = 0.09, note: str = "") -> Change:
    return Change(name, f"--octavo {name}", f"--vllm {name}", Figures(31.4, 7.3, 12.1, 9.9), after, error, note)


CHANGES = (
    change("blocks of 8", Figures(31.6, 7.31, 12.0, 9.8)),
    change("fp8 KV", Figures(71.0, 13.7, 2.3, 4.4)),
    change("no prefix cache", Figures(24.0, 4.4, 20.0, 14.0)),
    change("TP 2", None, None, "one device is there"),
)


def curve(strategy: str, knee: float | None) -> RateCurve:
    rates = (1.0, 2.0, 4.0, 8.0)
    goodput = tuple(min(rate, knee or 0.5) for rate in rates)
    return RateCurve(
        strategy, rates, goodput, (1.0, 0.99, 0.7, 0.3), (3.0, 7.0, 20.0, 38.0), (0.2, 0.4, 3.0, 30.0), knee, 0.05
    )


def report(**changes: object) -> ReplayReport:
    """Everything that a report can have."""
    made = ReplayReport(
        title="A day of chat",
        command="octavo replay day.csv --model m --gpu g",
        trace="day.csv, Azure",
        model="Llama-3.1-8B",
        device="RTX 4090",
        strategy="paged",
        outcomes=(outcome("reserve-max", running_mean=2.9, running_peak=3, attained=0.1, goodput=1.0), outcome()),
        slo=SLO,
        settings=(Setting("block_size", "16", "flag"), Setting("max_num_seqs", "256", "engine profile octavo")),
        budget=plan_budget(PLAN, 6 * GIB),
        fidelity=Fidelity(Level.BUNDLED, 0.05, "held-out error 5 %", ("the link runs at 16 GB/s",)),
        curves=(curve("reserve-max", None), curve("paged", 2.6)),
        changes=CHANGES,
        bottleneck="The bottleneck is KV memory.",
        bad_lines=(BadLine(7, "no number of tokens"),),
        notes=("Weights are an interval.",),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def replayed(strategies: tuple[str, ...] = STRATEGIES) -> ReplayReport:
    """Forty requests through the real scheduler in a pool that is too small for them."""
    resolved = resolve(Deployment("Qwen/Qwen3-8B", gpu="RTX 4090", num_blocks=96, max_model_len=512))
    trace = [TraceRequest(0.05 * i, 40 + (i * 37) % 200, 10 + (i * 23) % 60, f"r{i:02d}") for i in range(40)]
    options = [ReplayOptions(strategy=name, slo=SLO, lives=100, map=True) for name in strategies]
    return ReplayReport(
        title="Forty requests",
        command="octavo replay forty.csv",
        trace="forty requests",
        model="Qwen3-8B",
        device="RTX 4090",
        strategy="paged",
        outcomes=tuple(replay(trace, resolved, option) for option in options),
        slo=SLO,
        settings=settings_of(resolved),
        budget=budget_of(resolved),
        fidelity=resolved.fidelity,
        notes=resolved.notes,
    )
