"""The planner against our own engine: workloads run for real, then replayed with step times calibrated on this machine.

Measures, for four workloads that no calibration has seen: means of TTFT, inter-token latency and end-to-end latency
on the real engine (wall clock, `demo` by default) and in `planner.replay`, and the replay's error. The bar: each mean
within 7 %, on at least three of them. As the speed of a shared host drifts, a round of calibration is timed before each
run and after the last, and all rounds are fitted together; with --calibration a finished file is used instead. Needs
a quiet machine: both the calibration and the runs are measured.

    python benchmarks/ourselves.py
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from octavo.openmp import spin_shortly

spin_shortly()

from octavo.build import BuiltEngine, build_engine, load_configured  # noqa: E402
from octavo.calibrating import Calibrator, Rounds  # noqa: E402
from octavo.clock import WallClock  # noqa: E402
from octavo.config import EngineConfig, parse_bytes  # noqa: E402
from octavo.engine import Engine  # noqa: E402
from octavo.models.loader import LoadedModel  # noqa: E402
from octavo.planner.deployment import Deployment, resolve  # noqa: E402
from octavo.planner.replay import ReplayOptions, replay  # noqa: E402
from octavo.planner.timing.calibration import save  # noqa: E402
from octavo.planner.traces.api import TraceRequest  # noqa: E402
from octavo.planner.workload import read_workload, scale  # noqa: E402
from octavo.runner.api import StepPlan  # noqa: E402
from octavo.scheduler.scheduler import Progress, Scheduler  # noqa: E402
from octavo.types import FinishReason, SamplingParams  # noqa: E402
from octavo.types import Sequence as Running  # noqa: E402

AZURE = Path(__file__).parent / "data" / "azure-conv-2023-first200.csv"
BLOCK = 16
BAR, LEAST = 0.07, 3  # largest error of a mean, on so many workloads
SHAPES = 240  # as `octavo calibrate` times by default


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival. `concurrency`: so many in flight, arrivals ignored."""

    name: str
    requests: list[TraceRequest]
    kv_memory: str
    concurrency: int | None = None


def workloads(share: float) -> list[Workload]:
    """The four. `share` of each is used, for a quick look."""

    def count(whole: int) -> int:
        return max(8, round(whole * share))

    rng = random.Random(20)
    azure = scale(read_workload(AZURE), lengths=0.4, time=0.06, limit=count(160))
    conversation = [
        TraceRequest(item.arrival, item.prompt_tokens, item.output_tokens, f"r{i}") for i, item in enumerate(azure)
    ]
    chat = [(_lognormal(rng, 48, 0.7, 400), _lognormal(rng, 120, 0.6, 400)) for _ in range(count(150))]
    shared = [(512 + _lognormal(rng, 60, 0.5, 200), _lognormal(rng, 40, 0.5, 150)) for _ in range(count(200))]
    batch = [(_lognormal(rng, 200, 0.8, 1500), _lognormal(rng, 60, 0.6, 300)) for _ in range(count(128))]
    return [
        Workload("Azure conversation, lengths x 0.4, tight pool", conversation, "160MiB"),
        Workload("chat: short prompts, long answers, Poisson", _poisson(rng, chat, 3.0), "512MiB"),
        Workload("8 shared prefixes of 512 tokens, Poisson", _poisson(rng, shared, 3.0, prefixes=8), "512MiB"),
        Workload("closed loop, 16 in flight", _poisson(rng, batch, 1.0), "512MiB", concurrency=16),
    ]


def _lognormal(rng: random.Random, middle: float, sigma: float, most: int) -> int:
    return min(most, max(1, round(middle * rng.lognormvariate(0.0, sigma))))


def _poisson(
    rng: random.Random, lengths: Sequence[tuple[int, int]], rate: float, prefixes: int = 0
) -> list[TraceRequest]:
    """Requests at `rate` a second; each begins with one of `prefixes` prefixes of 512 tokens."""
    out, now = [], 0.0
    for i, (prompt, output) in enumerate(lengths):
        hashes: tuple[int, ...] = ()
        if prefixes:
            first = 1000 * (1 + rng.randrange(prefixes))
            hashes = tuple(range(first, first + 512 // BLOCK))
        out.append(TraceRequest(now, prompt, output, f"r{i}", hashes, BLOCK if hashes else 0))
        now += rng.expovariate(rate)
    return out


def prompt_of(request: TraceRequest, vocabulary: int) -> list[int]:
    """Token ids: equal hashes give equal tokens, the rest is the request's own."""
    tokens: list[int] = []
    for identity in request.hashes:
        own = random.Random(identity)
        tokens += [own.randrange(3, vocabulary) for _ in range(request.hash_block)]
    own = random.Random(request.id)
    return tokens + [own.randrange(3, vocabulary) for _ in range(request.prompt_tokens - len(tokens))]


@dataclass
class Latencies:
    """An engine watcher: when each request got its tokens."""

    arrivals: dict[str, float] = field(default_factory=dict)
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)
    last: dict[str, float] = field(default_factory=dict)

    def on_written(self, scheduler: Scheduler) -> None:
        pass

    def on_step(
        self, scheduler: Scheduler, plan: StepPlan, progress: Sequence[Progress], start: float, end: float
    ) -> None:
        for item in progress:
            name = item.seq.request.id
            if item.token is not None:
                if name in self.last:
                    self.itl.append(end - self.last[name])
                else:
                    self.ttft.append(end - self.arrivals[name])
                self.last[name] = end
            if item.finished is not None:
                self.e2e.append(end - self.arrivals[name])

    def on_finish(self, seq: Running, reason: FinishReason, now: float) -> None:
        pass


@dataclass(frozen=True)
class Means:
    ttft: float
    itl: float
    e2e: float
    preemptions: int
    seconds: float


def measured(workload: Workload, loaded: LoadedModel, model: str) -> Means:
    """Through the real engine, on the wall clock."""
    seen = Latencies()
    config = EngineConfig(model=model, kv_memory=parse_bytes(workload.kv_memory, "kv_memory"), block_size=BLOCK)
    built = build_engine(config, loaded=loaded, watchers=(seen,))
    prompts = [prompt_of(request, loaded.vocab_size) for request in workload.requests]
    warm_up(built, prompts, seen)
    engine, begin = built.engine, time.monotonic()
    drive(engine, workload, prompts, seen)
    seconds = time.monotonic() - begin
    assert len(seen.e2e) == len(workload.requests), "every request has run"
    return Means(fmean(seen.ttft), fmean(seen.itl), fmean(seen.e2e), engine.scheduler.totals.preemptions, seconds)


def warm_up(built: BuiltEngine, prompts: Sequence[list[int]], seen: Latencies) -> None:
    """A few requests, unmeasured."""
    for i, prompt in enumerate(prompts[:4]):
        seen.arrivals[f"w{i}"] = 0.0
        built.engine.submit(prompt, _greedy(4), request_id=f"w{i}", output_length=4)
    built.engine.drain()
    built.engine.scheduler.reset_cache()
    built.engine.clock = WallClock()
    for noted in (seen.arrivals, seen.ttft, seen.itl, seen.e2e, seen.last):
        noted.clear()


def drive(engine: Engine, workload: Workload, prompts: Sequence[list[int]], seen: Latencies) -> None:
    """Submit each request when it is due, or when fewer than `concurrency` are in flight, and step until all ended."""
    requests, concurrency, clock = workload.requests, workload.concurrency, engine.clock
    at = 0
    while at < len(requests) or engine.busy:
        while at < len(requests) and _due(requests[at], concurrency, at - len(seen.e2e), clock.now):
            traced = requests[at]
            arrival = traced.arrival if concurrency is None else clock.now()
            seen.arrivals[traced.id] = arrival
            length = traced.output_tokens
            engine.submit(prompts[at], _greedy(length), request_id=traced.id, arrival=arrival, output_length=length)
            at += 1
        if engine.busy:
            engine.step()
        elif at < len(requests):
            clock.wait_until(requests[at].arrival)


def _due(request: TraceRequest, concurrency: int | None, in_flight: int, now: Callable[[], float]) -> bool:
    return request.arrival <= now() if concurrency is None else in_flight < concurrency


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def predicted(workload: Workload, model: str, calibration: Path) -> Means:
    """Through the planner, on the calibrated timer."""
    begin = time.monotonic()
    deployment = Deployment(
        model=model,
        kv_memory=parse_bytes(workload.kv_memory, "kv_memory"),
        block_size=BLOCK,
        calibration=str(calibration),
    )
    options = ReplayOptions(concurrency=workload.concurrency, known_lengths=True)
    found = replay(workload.requests, resolve(deployment), options)
    return Means(found.ttft.mean, found.itl.mean, found.e2e.mean, found.preemptions, time.monotonic() - begin)


def pooled(runs: Sequence[Means]) -> Means:
    """Several runs of a workload as one."""
    ttft, itl, e2e, seconds = (fmean(getattr(run, name) for run in runs) for name in ("ttft", "itl", "e2e", "seconds"))
    return Means(ttft, itl, e2e, runs[0].preemptions, seconds)


def run_all(
    chosen: Sequence[Workload], model: str, repeats: int, calibration: Path | None, made: Path
) -> tuple[list[list[Means]], Path]:
    """(the runs of each workload, the calibration file): that given, or one made between the runs."""
    loaded = load_configured(EngineConfig(model=model))
    runs: list[list[Means]] = [[] for _ in chosen]
    rounds = None
    if calibration is None:
        calibrator = Calibrator(EngineConfig(model=model, kv_memory=parse_bytes("1GiB", "kv_memory")))
        rounds = Rounds(calibrator.clock, calibrator.room, SHAPES)
    for _ in range(repeats):
        for workload, seen in zip(chosen, runs, strict=True):
            if rounds is not None:
                rounds.run()
            seen.append(measured(workload, loaded, model))
    if rounds is None:
        assert calibration is not None
        return runs, calibration
    rounds.run()
    fitted = calibrator.made(rounds.taken())
    save(fitted, made)
    print(f"{fitted.statement}; {rounds.done} rounds between the runs\n")
    return runs, made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibration", type=Path, help="use this file instead of calibrating between the runs")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each workload; their means are averaged")
    parser.add_argument("--share", type=float, default=1.0, help="share of each workload, for a quick look")
    parser.add_argument("--only", type=int, help="one workload, counted from 0")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    every = workloads(options.share)
    chosen = every if options.only is None else [every[options.only]]
    with TemporaryDirectory() as folder:
        made = Path(folder) / "calibration.json"
        runs, calibration = run_all(chosen, options.model, options.repeats, options.calibration, made)
        print(f"{'workload':<46} {'':>4} {'real ms':>9} {'replay ms':>10} {'error':>7}   {'of single runs':>14}")
        rows = [
            _print(workload, seen, predicted(workload, options.model, calibration))
            for workload, seen in zip(chosen, runs, strict=True)
        ]
    within = sum(max(map(abs, row["errors"].values())) <= BAR for row in rows)
    verdict = "met" if within >= LEAST else "missed"
    print(f"{within} of {len(rows)} workloads within {BAR:.0%} in every mean; the bar is {LEAST}: {verdict}")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1))


def _print(workload: Workload, runs: Sequence[Means], ours: Means) -> dict:
    errors, real = {}, pooled(runs)
    for i, name in enumerate(("ttft", "itl", "e2e")):
        one, other = getattr(real, name), getattr(ours, name)
        errors[name] = other / one - 1
        label = workload.name if not i else ""
        each = "  ".join(f"{other / getattr(run, name) - 1:+.1%}" for run in runs)
        print(
            f"{label:<46} {name:>4} {one * 1e3:>9.1f} {other * 1e3:>10.1f} {errors[name]:>+7.1%}   {each}", flush=True
        )
    took = f"{real.seconds:.1f} s real, {ours.seconds:.2f} s replayed"
    print(f"{'':<46} preemptions {real.preemptions} / {ours.preemptions}; {took}", flush=True)
    return {
        "workload": workload.name,
        "real": [run.__dict__ for run in runs],
        "replay": ours.__dict__,
        "errors": errors,
    }


if __name__ == "__main__":
    main()
