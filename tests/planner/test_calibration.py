"""Calibration: known step times are found again, what points do not bear out is refused, a file comes back equal."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.calibrating import Room, ShapeClock, Target, measure, targets
from octavo.clock import VirtualClock
from octavo.engine import Engine
from octavo.kv.strategies import make_manager
from octavo.log import LogHeader, LogWriter
from octavo.planner.deployment import Deployment, Level, resolve
from octavo.planner.timing.calibration import Calibration, load, reach_of, save
from octavo.planner.timing.fitting import Bound, HeldOut
from octavo.planner.timing.from_log import log_points, split_log
from octavo.planner.timing.step_times import PLAIN, CalibrationError, FittedTimer, StepFit, Terms, fit_steps, knots_upto
from octavo.runner.api import StepPlan, StepResult
from octavo.runner.simulated import SimulatedRunner
from octavo.runner.timing import StepShape, shape_of
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.scheduler import Scheduler
from octavo.types import SamplingParams

SETTINGS = SchedulerConfig(max_model_len=2048, max_num_seqs=64, max_num_batched_tokens=256)
PAGES, BLOCK = 1024, 16


def device(shape: StepShape) -> float:
    """A device unlike the fitted form: a roofline in the tokens, prompt attention in tiles of 32 queries."""
    linear = max(2.5e-3, 4e-4 * shape.tokens)
    prompts = sum(4e-7 * 32 * -(-count // 32) * (start + count / 2) for count, start in shape.chunks)
    seconds = 1e-3 + linear + prompts + 1.1e-6 * shape.context + 2e-5 * shape.decodes
    return seconds + 7e-7 * sum(shape.windowed) + 5e-5 * shape.samples + 3e-5 * shape.copied


class Timed(SimulatedRunner):
    """A device on a virtual clock: known step times, and noise."""

    def __init__(self, clock: VirtualClock, noise: Callable[[], float], windows: tuple[int, ...] = ()) -> None:
        super().__init__(clock, lambda plan: device(shape_of(plan, windows)) * noise())
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        return super().run(plan)


def noise(sigma: float, seed: int = 0) -> Callable[[], float]:
    rng = random.Random(seed)
    return lambda: rng.lognormvariate(0.0, sigma)


def bench(
    slower: Callable[[], float] | float = 0.0, windows: tuple[int | None, ...] = (None,)
) -> tuple[ShapeClock, Room, Timed]:
    """`slower`: by which factor a step is, or the sigma of noise."""
    clock = VirtualClock()
    own = tuple(window for window in windows if window is not None)
    kv = make_manager("paged", PAGES * len(windows), BLOCK, max_model_len=2048, windows=windows, chunk=256)
    runner = Timed(clock, slower if callable(slower) else noise(slower), own)
    engine = Engine(Scheduler(SETTINGS, kv), runner, clock)
    return ShapeClock(engine, own, PAGES, clock.now), Room.of(engine), runner


def median_error(timer: FittedTimer, shapes: list[StepShape]) -> float:
    errors = sorted(abs(timer.seconds(shape) / device(shape) - 1) for shape in shapes)
    return errors[len(errors) // 2]


def random_shapes(count: int, windows: tuple[int, ...] = ()) -> list[StepShape]:
    rng = random.Random(99)
    out = []
    for _ in range(count):
        decodes, context = rng.randrange(1, 40), rng.randrange(20, 300)
        chunks = ((rng.randrange(4, 200), rng.randrange(0, 1500)),) if rng.random() < 0.5 else ()
        windowed = tuple(decodes * min(context, window) for window in windows)
        out.append(StepShape(chunks, decodes, decodes * context, windowed, decodes + len(chunks)))
    return out


# -- measuring --------------------------------------------------------------------------------------------------------


def test_the_step_that_is_timed_is_the_one_that_was_asked_for() -> None:
    clock, _, runner = bench()
    for target in (
        Target(decodes=1, context=700),
        Target(decodes=40, context=60),
        Target(decodes=7, context=500, copied=20),
        Target(prompts=1, tokens=90, start=600),
        Target(prompts=3, tokens=101),
        Target(decodes=5, context=333, prompts=1, tokens=17, start=256),
        Target(decodes=30, context=20, prompts=4, tokens=64),
    ):
        runner.plans.clear()
        shape, seconds = clock.time(target)
        assert shape == shape_of(runner.plans[0])
        assert seconds == pytest.approx(device(shape), rel=0.01)
        assert (shape.decodes, shape.copied) == (target.decodes, target.copied)
        assert sum(count for count, _ in shape.chunks) == target.tokens
        assert [start for _, start in shape.chunks] == [target.start] * target.prompts
        if target.decodes:
            assert shape.context / shape.decodes == pytest.approx(target.context, rel=0.15)


def test_all_shapes_that_are_chosen_fit_and_reach_the_ends() -> None:
    _, room, _ = bench()
    fitted, held = targets(room, 240)
    assert len(fitted) == 180
    assert len(held) == 60
    assert all(room.fits(target) for target in (*fitted, *held))
    assert not set(fitted) & set(held)
    for chosen in (fitted, held):
        assert max(target.decodes for target in chosen) > 40
        assert max(target.tokens for target in chosen) > 150
        assert max(target.start for target in chosen) > 1000
        assert min(target.decodes for target in chosen if target.decodes) <= 2
        assert max(target.decodes * target.context for target in chosen) > 0.4 * PAGES * BLOCK


@pytest.mark.parametrize("windows", [(None,), (None, 128)], ids=["full", "window"])
def test_known_step_times_are_found_again(windows: tuple[int | None, ...]) -> None:
    clock, room, _ = bench(0.03, windows)
    own = tuple(window for window in windows if window is not None)
    taken = measure(clock, room, 240, 0.0)
    fit = fit_steps(taken.points, taken.held, own)
    assert fit.held_out.median < 0.06
    assert median_error(fit.timer(), random_shapes(200, own)) < 0.06
    found = dict(zip(fit.terms.names, fit.values, strict=True))
    assert found["context"] == pytest.approx(1.1e-6, rel=0.3)
    assert found["copied_block"] == pytest.approx(3e-5, rel=0.4)


def test_a_noisy_machine_is_refused() -> None:
    clock, room, _ = bench(0.8)
    taken = measure(clock, room, 240, 0.0)
    with pytest.raises(CalibrationError, match=r"refused: on 60 held-out steps .*%.*bound is 10% and 25%. Free it\."):
        fit_steps(taken.points, taken.held, remedy="Free it.")


def test_bursts_in_which_a_machine_is_slower_are_part_of_its_times() -> None:
    rng = random.Random(3)
    clock, room, _ = bench(lambda: 1.6 if rng.random() < 0.25 else 1.0)
    taken = measure(clock, room, 240, 0.0)
    timer = fit_steps(taken.points, taken.held, bound=Bound(0.2, 0.5)).timer()
    shapes = random_shapes(200)
    ratio = sum(timer.seconds(shape) / device(shape) for shape in shapes) / len(shapes)
    assert ratio == pytest.approx(1.15, abs=0.05)


def test_held_out_steps_of_another_machine_are_refused() -> None:
    clock, room, _ = bench()
    taken = measure(clock, room, 120, 0.0)
    slower = [(shape, 1.2 * seconds) for shape, seconds in taken.held]
    with pytest.raises(CalibrationError, match="its error is 1"):
        fit_steps(taken.points, slower)


def test_one_step_in_ten_that_stalls_does_not_matter() -> None:
    clock, room, _ = bench(0.02)
    taken = measure(clock, room, 240, 0.0)
    stalled = [(shape, seconds * (6 if i % 10 == 0 else 1)) for i, (shape, seconds) in enumerate(taken.points)]
    assert median_error(fit_steps(stalled, taken.held).timer(), random_shapes(200)) < 0.08


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda points: points[:10], "10 steps to fit"),
        (lambda points: [(points[0][0], 0.0), *points[1:]], "not a number above 0"),
    ],
    ids=["few", "zero"],
)
def test_points_that_are_no_measurement_are_refused(spoil: Callable, sentence: str) -> None:
    points = [(shape, device(shape)) for shape in random_shapes(60)]
    with pytest.raises(CalibrationError, match=sentence):
        fit_steps(spoil(points), points)


# -- the timer --------------------------------------------------------------------------------------------------------


@pytest.fixture
def timer() -> FittedTimer:
    terms = Terms((128,), knots_upto(256))
    rng = random.Random(3)
    return FittedTimer(terms, [rng.uniform(1e-7, 1e-4) for _ in terms.names])


def test_the_parts_of_a_step_sum_to_it(timer: FittedTimer) -> None:
    for shape in (*random_shapes(30, (128,)), StepShape(((1000, 50), (3, 0)), 0, 0, (0,), 2, 5)):
        assert sum(timer.breakdown(shape).values()) == pytest.approx(timer.seconds(shape))
        terms = zip(timer.terms.of(shape), timer.values, strict=True)
        assert sum(count * value for count, value in terms) == pytest.approx(timer.seconds(shape))


def test_decodes_are_affine_in_context_and_more_work_never_takes_less(timer: FittedTimer) -> None:
    def seconds(context: int, decodes: int = 8) -> float:
        return timer.seconds(StepShape((), decodes, context, (8 * 128,), decodes))

    _, slope = timer.affine(StepShape((), 8, 4000, (8 * 128,), 8))
    assert seconds(4000) - seconds(3000) == pytest.approx(1000 * slope)
    assert seconds(9000) - seconds(4000) == pytest.approx(5000 * slope)
    by_size = [seconds(4000, decodes) for decodes in range(1, 300)]
    assert by_size == sorted(by_size)


def test_error_bars_come_from_refits() -> None:
    points = [(shape, device(shape) * factor) for shape, factor in zip(random_shapes(160), _factors(160), strict=True)]
    timer = fit_steps(points[:120], points[120:]).timer()
    shape = StepShape(((100, 0),), 10, 3000, (), 11)
    others = [other.seconds(shape) for other in timer.alternatives()]
    assert len(timer.alternatives(3)) == 3
    assert len(set(others)) > 1
    assert all(0.9 < other / timer.seconds(shape) < 1.1 for other in others)


def _factors(count: int) -> list[float]:
    draw = noise(0.05)
    return [draw() for _ in range(count)]


# -- the file ---------------------------------------------------------------------------------------------------------


def made(windows: tuple[int, ...] = (), shape: tuple[int, int, int] = (32, 4096, 128256)) -> Calibration:
    terms = Terms(windows, knots_upto(64))
    values = tuple(float(f"{i + 1}e-6") for i in range(len(terms.names)))
    fit = StepFit(terms, values, (values, values), HeldOut(0.031, 0.12, 60), 180)
    return Calibration(
        fit, "Llama-3.1-8B", "a device", "octavo", "bf16", "bf16", shape, {"tokens": 64}, "2026-01-01", "octavo", {}
    )


def test_a_file_comes_back_equal(tmp_path: Path) -> None:
    for calibration in (made(), made(windows=(128, 4096))):
        save(calibration, tmp_path / "c.json")
        assert load(tmp_path / "c.json") == calibration
    assert (tmp_path / "c.json").stat().st_size < 8192


def test_a_deployment_uses_it_and_says_how_good_it_is(tmp_path: Path) -> None:
    save(made(), tmp_path / "c.json")
    resolved = resolve(
        Deployment(model="Llama-3.1-8B", calibration=str(tmp_path / "c.json"), kv_memory=4 << 30, max_model_len=4096)
    )
    assert resolved.fidelity.level is Level.CALIBRATED
    assert resolved.fidelity.error == 0.031
    assert "3.1%" in resolved.fidelity.statement
    assert "12.0%" in resolved.fidelity.statement
    assert resolved.timer.seconds(StepShape((), 1, 10, (), 1)) > 0


def test_kv_is_stored_as_it_was_while_calibrating_unless_asked_for_otherwise(tmp_path: Path) -> None:
    save(replace(made(), kv_dtype="int8"), tmp_path / "c.json")
    deployment = Deployment(
        model="Llama-3.1-8B", calibration=str(tmp_path / "c.json"), kv_memory=4 << 30, max_model_len=4096
    )
    assert resolve(replace(deployment, kv_dtype="auto")).spec.dtype == "int8"
    other = resolve(replace(deployment, kv_dtype="bf16"))
    assert other.spec.dtype == "bf16"
    assert "Calibrated with bf16 weights and int8 KV; used for bf16 and bf16." in other.fidelity.assumptions


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": 2}, "not a calibration file of version 1"),
        ({"format": "octavo.replay/1"}, "not a calibration file"),
        ({"seconds": {}}, "lacks something"),
        ({"knots": [1, 2]}, "lacks something"),
        ({"draws": [[-1.0]]}, "lacks something"),
        ({"held_out": None}, "lacks something"),
    ],
)
def test_a_spoilt_file_is_refused_by_name(change: dict, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    save(made(), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CalibrationError, match=sentence) as error:
        load(path)
    assert "c.json" in str(error.value)


def test_what_is_no_json_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("{")
    for name in ("c.json", "none.json"):
        with pytest.raises(CalibrationError, match=name):
            load(tmp_path / name)


@pytest.mark.parametrize("other", [made(shape=(16, 2048, 128256)), made(windows=(512,))], ids=["size", "windows"])
def test_another_models_calibration_is_refused(other: Calibration, tmp_path: Path) -> None:
    save(other, tmp_path / "c.json")
    deployment = Deployment(model="Llama-3.1-8B", calibration=str(tmp_path / "c.json"), kv_memory=4 << 30)
    with pytest.raises(CalibrationError, match="run `octavo calibrate` with its model"):
        resolve(replace(deployment, max_model_len=4096))


# -- from a log -------------------------------------------------------------------------------------------------------


def run_with_log(path: Path, sigma: float, requests: int = 150) -> list[tuple[StepShape, float]]:
    """An engine on a virtual clock serves requests with pauses between and writes a log; returns its steps."""
    rng = random.Random(5)
    clock = VirtualClock()
    header = LogHeader("paged", PAGES, BLOCK, (None,), True, SETTINGS, ("some model", "bf16", "bf16", "bf16"))
    writer = LogWriter(path, header)
    runner = Timed(clock, noise(sigma))
    engine = Engine(header.build(writer), runner, clock)
    steps: list[tuple[StepShape, float]] = []
    for number in range(requests):
        if rng.random() < 0.3:
            _drain(engine, steps, runner)
            clock.advance(rng.uniform(1.0, 9.0))
        prompt = [3 + number, *[1] * round(rng.lognormvariate(4.5, 1.0))][:1500]
        length = rng.randrange(2, 60)
        engine.submit(prompt, SamplingParams(max_tokens=length, ignore_eos=True), output_length=length)
        for _ in range(rng.randrange(6)):
            _step(engine, steps, runner)
    _drain(engine, steps, runner)
    writer.close()
    return steps


def _drain(engine: Engine, steps: list[tuple[StepShape, float]], runner: Timed) -> None:
    while engine.busy:
        _step(engine, steps, runner)


def _step(engine: Engine, steps: list[tuple[StepShape, float]], runner: Timed) -> None:
    begin = engine.clock.now()
    engine.step()
    if engine.clock.now() > begin:
        steps.append((shape_of(runner.plans[-1]), engine.clock.now() - begin))


@pytest.mark.parametrize("name", ["run.jsonl", "run.msgpack"])
def test_a_log_gives_every_step_with_its_duration_and_no_pause(name: str, tmp_path: Path) -> None:
    steps = run_with_log(tmp_path / name, 0.05, requests=40)
    points, windows = log_points(tmp_path / name)
    assert windows == ()
    assert [shape for shape, _ in points] == [shape for shape, _ in steps]
    assert [seconds for _, seconds in points] == pytest.approx([seconds for _, seconds in steps])


def test_step_times_are_found_from_a_log(tmp_path: Path) -> None:
    run_with_log(tmp_path / "run.jsonl", 0.05)
    points, _ = log_points(tmp_path / "run.jsonl")
    fitted, held = split_log(points, most=1500)
    assert len(fitted) + len(held) <= 1500
    assert 0.2 < len(held) / (len(fitted) + len(held)) < 0.3
    fit = fit_steps(fitted, held)
    assert fit.held_out.median < 0.06
    seen = [shape for shape, _ in points[::7]]
    assert median_error(fit.timer(), seen) < 0.05
    assert reach_of(points)["decodes"] == max(shape.decodes for shape, _ in points)


def test_the_plain_terms_are_named_once() -> None:
    names = Terms((64, 128), knots_upto(512)).names
    assert len(names) == len(set(names))
    assert names[: len(PLAIN)] == PLAIN
