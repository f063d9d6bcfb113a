"""Times steps of chosen shapes on the real engine: scheduler, KV manager, runner and text, all as when it serves.

A batch is brought to where it should be (so many sequences with so much context, a prompt computed so far) by the
engine's own steps with a runner that computes nothing; then the real runner takes its place and whole engine steps are
timed. What lies in the KV cache does not matter for the time; it is filled with numbers once, because memory that was
never written reads faster.
"""

from __future__ import annotations

import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from octavo import __version__
from octavo.benching.probe import CpuTime
from octavo.build import BuiltEngine, build_engine
from octavo.comparing import processor
from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.errors import OctavoError
from octavo.kv.api import Copy
from octavo.planner.timing.calibration import Calibration, reach_of, shape_of_model, today
from octavo.planner.timing.fitting import Point, space_filling
from octavo.planner.timing.step_times import fit_steps
from octavo.runner.api import Runner, StepPlan, StepResult
from octavo.runner.timing import StepShape, shape_of
from octavo.types import SamplingParams
from octavo.types import Sequence as Running

FILLER = 0x3C  # this byte throughout is a small number in every KV format
DECODE_STEPS = 3  # timed in a row, when a batch only decodes
MOST_COPIED = 64
LEAST_CHUNK = 4  # tokens: fewer of a prompt are seldom left over, and kernels may treat them as decodes
CANDIDATES = 1500  # of each kind, of which the space-filling ones are timed
HELD_EVERY = 4  # in the order of the space-filling choice, so that the held-out ones fill the space, too
SPARE = 6  # steps that bringing the engine to a shape may take beside those that the prompts' tokens ask for
HEADROOM = 0.95  # of the pool
ROUNDS = (3, 7)


@dataclass(frozen=True, slots=True)
class Target:
    """A step to be timed.

    decodes, context   sequences that go on by a token, and the mean of what each attends to
    prompts, tokens    prompts in the step and their tokens together
    start              tokens of the prompt that steps before have computed (one prompt only)
    copied             blocks copied
    """

    decodes: int = 0
    context: int = 0
    prompts: int = 0
    tokens: int = 0
    start: int = 0
    copied: int = 0

    def shape(self) -> StepShape:
        chunks = tuple((count, self.start) for count in shares(self.tokens, self.prompts))
        samples = self.decodes + self.prompts
        return StepShape(chunks, self.decodes, self.decodes * self.context, (), samples, self.copied)


def shares(total: int, parts: int) -> list[int]:
    """`total` in `parts` whole parts, as equal as can be; none for no parts."""
    return [total * (i + 1) // parts - total * i // parts for i in range(parts)]


@dataclass(frozen=True, slots=True)
class Room:
    """What a step can come to: tokens in a step, sequences, longest sequence, blocks in the pool; `needs`: blocks that
    a sequence of so many tokens comes to hold."""

    batched: int
    seqs: int
    length: int
    blocks: int
    needs: Callable[[int], int]

    @classmethod
    def of(cls, engine: Engine) -> Room:
        """That of an engine."""
        config, kv = engine.scheduler.config, engine.scheduler.kv
        longest = engine.scheduler.longest
        return cls(
            config.max_num_batched_tokens,
            config.max_num_seqs,
            longest,
            kv.capacity,
            lambda tokens: kv.ceiling_blocks(tokens, tokens),
        )

    def fits(self, target: Target) -> bool:
        decoding = target.decodes * target.context
        grown = decoding // self.batched + target.start // self.batched + SPARE + DECODE_STEPS
        together = target.decodes + target.prompts
        return (
            together <= self.seqs
            and target.decodes + target.tokens <= self.batched
            and 1.5 * target.context + 64 <= self.length
            and target.start + target.tokens + 16 <= self.length
            and LEAST_CHUNK * target.prompts <= target.tokens
            and self._held(target, grown) <= HEADROOM * self.blocks
        )

    def _held(self, target: Target, grown: int) -> int:
        """Blocks, when each decode has generated `grown` tokens. Of uneven contexts, the mean stands for all."""
        prompts = sum(
            self.needs(target.start + count + DECODE_STEPS) for count in shares(target.tokens, target.prompts)
        )
        return prompts + target.decodes * (self.needs(target.context + grown) + 1)


def targets(room: Room, count: int, seed: int = 0) -> tuple[list[Target], list[Target]]:
    """(shapes to fit, shapes to hold out): a third of `count` each of batches that only decode, prompts only, and both
    together, each kind space-filling in the logarithms of its counts."""
    rng = random.Random(seed)
    fitted: list[Target] = []
    held: list[Target] = []
    for decodes, prompts in ((True, False), (False, True), (True, True)):
        drawn = {target.shape(): target for target in _candidates(rng, room, decodes, prompts)}
        chosen = [drawn[shape] for shape in space_filling(list(drawn), count // 3)]
        for i, target in enumerate(chosen):
            (held if i % HELD_EVERY == HELD_EVERY - 1 else fitted).append(target)
    return fitted, held


def _candidates(rng: random.Random, room: Room, decodes: bool, prompts: bool) -> Iterator[Target]:
    """Random shapes, uniform in logarithms, that fit the room. Raises OctavoError if hardly any does."""
    found = 0
    for _ in range(50 * CANDIDATES):
        many = 1 if rng.random() < 0.7 else rng.choice((2, 3, 4, 8))
        target = Target(
            decodes=_log_uniform(rng, 1, room.seqs) if decodes else 0,
            context=_log_uniform(rng, 16, room.length) if decodes else 0,
            prompts=many if prompts else 0,
            tokens=_log_uniform(rng, LEAST_CHUNK, room.batched) if prompts else 0,
            start=_log_uniform(rng, 16, room.length) if prompts and many == 1 and rng.random() < 0.5 else 0,
            copied=_log_uniform(rng, 1, MOST_COPIED) if rng.random() < 0.15 else 0,
        )
        if room.fits(target):
            found += 1
            yield target
        if found == CANDIDATES:
            return
    if found < 50:
        raise OctavoError(
            f"hardly any step fits {room.blocks} blocks of KV, {room.batched} tokens a step and sequences of "
            f"{room.length}: raise kv_memory."
        )


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return round(low * math.exp(rng.random() * math.log(max(low, high) / low)))


class _Nothing:
    """A runner that computes nothing."""

    def run(self, plan: StepPlan) -> StepResult:
        return StepResult(tuple((1,) * len(work.samples) for work in plan.work))

    def forget(self, seq: Running) -> None:
        """Nothing is kept per sequence."""


class _Noting:
    """The real runner, with copies added to its plan; notes the shape."""

    def __init__(self, inner: Runner, windows: tuple[int, ...]) -> None:
        self.inner, self._windows = inner, windows
        self.copies: tuple[Copy, ...] = ()
        self.shape: StepShape | None = None

    def run(self, plan: StepPlan) -> StepResult:
        plan = replace(plan, copies=plan.copies + self.copies)
        self.shape = shape_of(plan, self._windows)
        return self.inner.run(plan)

    def forget(self, seq: Running) -> None:
        self.inner.forget(seq)


class ShapeClock:
    """Brings an engine to a shape and times it. The engine is its own: nothing else may run on it."""

    def __init__(
        self,
        engine: Engine,
        windows: tuple[int, ...],
        blocks: int,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`blocks`: in the pool. The engine's runner is replaced for good."""
        self._engine, self._blocks, self.now = engine, blocks, now
        self._real, self._idle = _Noting(engine.runner, windows), _Nothing()
        engine.runner = self._idle
        self._config = engine.scheduler.config
        self._chunk = self._config.max_num_batched_tokens  # most that the KV manager gives a sequence in a step
        self._count = 0

    def time(self, target: Target) -> Point:
        """The step's shape as it came out, and how long the engine took for it (the mean of a few, if it only decodes).
        Raises OctavoError if the engine cannot be brought to it."""
        engine = self._engine
        engine.scheduler.reset_cache()
        try:
            self._decode(target)
            self._prompt(target)
            self._real.copies = self._copies(target.copied)
            engine.runner, engine.scheduler.config = self._real, self._config
            timed = [self._step() for _ in range(1 if target.prompts else DECODE_STEPS)]
        finally:
            engine.runner, engine.scheduler.config = self._idle, self._config
            for request in list(engine.scheduler.requests):
                engine.abort(request)
        shape, _ = timed[0]
        if (shape.decodes, len(shape.chunks)) != (target.decodes, target.prompts):
            raise OctavoError(f"{target} came out as {shape}: raise kv_memory.")
        return shape, fmean(seconds for _, seconds in timed)

    def _step(self) -> Point:
        begin = self.now()
        outputs = self._engine.step()
        seconds = self.now() - begin
        if failed := next((output.error for output in outputs if output.error), None):
            raise OctavoError(f"a step failed, so nothing is calibrated: {failed}")
        assert self._real.shape is not None
        return self._real.shape, seconds

    def _advance(self, prompt_tokens: int) -> None:
        """One step that computes nothing: all decodes, and at most so many prompt tokens."""
        scheduler = self._engine.scheduler
        budget = prompt_tokens + sum(_decodes(seq) for seq in scheduler.running)
        seqs = min(budget, self._config.max_num_seqs)
        scheduler.config = replace(self._config, max_num_batched_tokens=budget, max_num_seqs=seqs)
        self._engine.step()

    def _decode(self, target: Target) -> None:
        """Sequences that decode, their contexts spread evenly from half to one and a half of the mean."""
        spread = [0.5 + (i + 0.5) / target.decodes for i in range(target.decodes)]
        lengths = [max(1, round(target.context * part) - 2) for part in spread]
        at_once = max(lengths, default=0) <= self._chunk
        for i, length in enumerate(lengths):
            behind = 0 if at_once else sum(lengths[i:]) // self._chunk  # steps it decodes in while others enter
            self._submit(length, behind + target.start // self._chunk + SPARE + DECODE_STEPS)
        scheduler = self._engine.scheduler
        for _ in range(sum(lengths) // self._chunk + SPARE):
            if not scheduler.waiting and all(map(_decodes, scheduler.running)):
                return
            self._advance(sum(lengths) if at_once else self._chunk)
        raise OctavoError(f"The engine cannot be brought to {target}: raise kv_memory.")

    def _prompt(self, target: Target) -> None:
        """The prompts, all but what the timed step is to compute."""
        for count in shares(target.tokens, target.prompts):
            self._submit(target.start + count, DECODE_STEPS)
        left = target.start
        while left > 0:
            now = min(left, self._chunk)
            self._advance(now)
            left -= now

    def _submit(self, prompt: int, output: int) -> None:
        self._count += 1
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        tokens = [2 + self._count % 64, 2 + self._count // 64 % 64, *[2] * prompt][:prompt]
        self._engine.submit(tokens, params, request_id=f"c{self._count}", output_length=output)

    def _copies(self, blocks: int) -> tuple[Copy, ...]:
        """Copies of eight blocks each between places anywhere in the pool."""
        half = self._blocks // 2
        runs = [*range(0, min(blocks, half), 8), min(blocks, half)]
        return tuple(Copy(start, half + start, end - start) for start, end in pairwise(runs))


def _decodes(seq: Running) -> bool:
    return len(seq.tokens) - seq.computed == 1


@dataclass(frozen=True, slots=True)
class Measured:
    """Points to fit and held-out ones; in how many rounds; share of the CPU that others took meanwhile (None:
    unknown)."""

    points: list[Point]
    held: list[Point]
    rounds: int
    foreign: float | None


class Rounds:
    """Rounds over the same shapes, each in another order, so that what drifts does not become a trend.

    What counts is the mean over the rounds, not the median: what a shared machine takes away in bursts belongs to the
    time that steps take on it, and a replay with medians is too fast by as much (benchmarks/NOTES.md).
    """

    def __init__(self, clock: ShapeClock, room: Room, count: int, seed: int = 0) -> None:
        self._clock, self._rng = clock, random.Random(seed)
        fitted, held = targets(room, count, seed)
        self._fitted, self._targets = len(fitted), [*fitted, *held]
        self._times: list[list[Point]] = [[] for _ in self._targets]
        self._foreign: list[float] = []
        self.done = 0
        for target in self._targets[:6]:
            clock.time(target)  # warm-up

    def __len__(self) -> int:
        """Shapes in a round."""
        return len(self._targets)

    def run(self, advance: Callable[[], object] = lambda: None) -> None:
        """One more round; `advance` is called after each shape."""
        cpu = CpuTime.now()
        for i in self._rng.sample(range(len(self._targets)), len(self._targets)):
            self._times[i].append(self._clock.time(self._targets[i]))
            advance()
        self.done += 1
        if cpu is not None:
            self._foreign.append(cpu.foreign_share(CpuTime.now()))

    def taken(self) -> Measured:
        """What has been measured so far; at least one round."""
        points = [(timed[0][0], fmean(seconds for _, seconds in timed)) for timed in self._times]
        foreign = fmean(self._foreign) if self._foreign else None
        return Measured(points[: self._fitted], points[self._fitted :], self.done, foreign)


def measure(clock: ShapeClock, room: Room, count: int, seconds: float, seed: int = 0) -> Measured:
    """Time `count` shapes in several rounds. `seconds`: after the third a new one begins only within this time."""
    rounds, begin = Rounds(clock, room, count, seed), clock.now()
    with _progress() as progress:
        task = progress.add_task("timing shapes", total=ROUNDS[0] * len(rounds))
        while rounds.done < ROUNDS[0] or (
            rounds.done < ROUNDS[1] and _another(clock.now() - begin, rounds.done, seconds)
        ):
            rounds.run(lambda: progress.advance(task))
    return rounds.taken()


def _another(spent: float, rounds: int, seconds: float) -> bool:
    """Whether one more round ends in time, if it takes as long as those before."""
    return spent * (rounds + 1) / rounds <= seconds


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, disable=not sys.stderr.isatty(), transient=True)


def windows_of(built: BuiltEngine) -> tuple[int, ...]:
    """The model's different windows, as step shapes count them."""
    return tuple(dict.fromkeys(window for window in built.layout.windows if window is not None))


class Calibrator:
    """An engine of its own, whose steps are timed."""

    def __init__(self, config: EngineConfig, threads: int | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._config = config
        self._built = built = build_engine(config)
        self._windows = windows_of(built)
        store = built.engine.runner.store  # type: ignore[attr-defined]  # both runners have one
        store.buffer.fill_(FILLER)
        self.clock = ShapeClock(built.engine, self._windows, store.num_blocks)
        self.room = Room.of(built.engine)

    def made(self, taken: Measured, command: str = "") -> Calibration:
        """Fit what was measured. Raises CalibrationError if the held-out steps do not bear the fit out."""
        built, config = self._built, self._config
        others = "" if taken.foreign is None else f" (other processes took {taken.foreign:.0%} of it meanwhile)"
        remedy = f"The machine may be busy{others}: free it and calibrate again, or time more (--shapes, --seconds)."
        fit = fit_steps(taken.points, taken.held, self._windows, remedy=remedy)
        loaded = built.loaded
        by = "native code" if loaded.native is not None else "transformers"
        shape, weights = shape_of_model(config.model, built.kv_dtype, config.weights)
        return Calibration(
            fit,
            model=loaded.name,
            device=torch.cuda.get_device_name(loaded.device) if loaded.device.type == "cuda" else processor(),
            engine=f"octavo {__version__}, {by}, {loaded.weights}",
            weights=weights,
            kv_dtype=built.kv_dtype,
            shape=shape,
            reach=reach_of(taken.points),
            date=today(),
            command=command,
            host={
                "threads": torch.get_num_threads(),
                "cores": os.cpu_count() or 0,
                "torch": torch.__version__,
                "rounds": taken.rounds,
                "cpu_taken_by_others": round(taken.foreign or 0.0, 3),
            },
        )


def calibrate_here(
    config: EngineConfig, shapes: int, seconds: float, command: str = "", threads: int | None = None
) -> Calibration:
    """Load the model, time `shapes` steps and fit them. Raises CalibrationError if the held-out ones do not bear the
    fit out."""
    calibrator = Calibrator(config, threads)
    return calibrator.made(measure(calibrator.clock, calibrator.room, shapes, seconds), command)
