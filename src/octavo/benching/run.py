"""Runs a plan on the real engine, round after round, and notes what came of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from octavo.benching.costs import model_cost
from octavo.benching.figures import Figures, figures
from octavo.benching.meter import StepMeter, StepRecord
from octavo.benching.plan import BenchPlan, Point, make_prompts
from octavo.benching.probe import CpuTime, MachineProbe, Probe, machine
from octavo.benching.result import BenchResult, PointResult
from octavo.benching.roofline import Limits, step_kinds
from octavo.build import BuiltEngine, build_engine, load_configured
from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.errors import OctavoError
from octavo.outputs import RequestOutput
from octavo.planner.workload import WorkItem
from octavo.report.wording import size
from octavo.types import SamplingParams

WARM_UP_TOKENS = 4
WARM_UP = (
    f"Before the rounds of each point its first requests, as many as run at once, ran with {WARM_UP_TOKENS} output "
    "tokens each, unmeasured."
)
Prompt = str | list[int]
MakeProbe = Callable[[torch.device], Probe]


def run_bench(
    plan: BenchPlan,
    config: EngineConfig,
    *,
    command: str = "",
    threads: int | None = None,
    make_probe: MakeProbe = MachineProbe,
) -> BenchResult:
    """Load the model once and run all points. Raises OctavoError for requests that cannot run on this engine."""
    if threads is not None:
        torch.set_num_threads(threads)
    begin = time.perf_counter()
    loaded = load_configured(config)
    read = time.perf_counter()
    meter = StepMeter()
    built = build_engine(config, loaded=loaded, watchers=(meter,))
    load = {**(loaded.load_seconds or {"model": read - begin}), "engine": time.perf_counter() - read}
    _check_lengths(plan, built)
    meter.attach(built.engine, model_cost(built))
    probe = make_probe(loaded.device)
    with _progress() as progress:
        points = [_point(point, plan, built, meter, probe, progress) for point in plan.points]
    return BenchResult(
        title=f"How fast {loaded.name} runs here",
        model=_describe(built),
        command=command,
        workload=plan.workload,
        warm_up=WARM_UP,
        facts=_facts(plan, built),
        load=load,
        machine=machine(probe, loaded.device),
        points=tuple(points),
    )


def _progress() -> Progress:
    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, disable=not sys.stderr.isatty(), transient=True)


def _point(
    point: Point, plan: BenchPlan, built: BuiltEngine, meter: StepMeter, probe: Probe, progress: Progress
) -> PointResult:
    engine = built.engine
    prompts = make_prompts(point.items, built.loaded.vocab_size, plan.seed)
    short = [replace(item, output_tokens=min(item.output_tokens, WARM_UP_TOKENS)) for item in point.items]
    drive(engine, meter, prompts[: point.concurrency], short[: point.concurrency], point.concurrency)
    task = progress.add_task(point.name, total=plan.rounds * len(prompts))
    rounds: list[Figures] = []
    steps: list[StepRecord] = []
    before, cpu = probe(), CpuTime.now()
    for _ in range(plan.rounds):
        engine.scheduler.reset_cache()  # each round finds the prefix cache empty
        meter.take()
        outputs = drive(engine, meter, prompts, point.items, point.concurrency, lambda: progress.advance(task))
        taken = meter.take()
        rounds.append(figures(outputs, taken))
        steps += taken
    foreign = None if cpu is None else cpu.foreign_share(CpuTime.now())
    after = probe()
    if progress.disable:
        print(f"{point.name}: {rounds[-1].output_tokens_per_second:.1f} output tokens/s", file=sys.stderr, flush=True)
    limits = Limits((before.bandwidth + after.bandwidth) / 2, (before.flops + after.flops) / 2)
    kinds = step_kinds(steps, limits)
    return PointResult(point.name, point.mode, point.concurrency, tuple(rounds), kinds, before, after, foreign)


def drive(
    engine: Engine,
    meter: StepMeter,
    prompts: Sequence[Prompt],
    items: Sequence[WorkItem],
    concurrency: int,
    on_done: Callable[[], object] = lambda: None,
) -> list[RequestOutput]:
    """Keep `concurrency` requests in flight until all have ended; returns them as they ended. Raises OctavoError if
    one is refused or fails: the figures would mean nothing."""
    done: list[RequestOutput] = []
    sent = 0
    while len(done) < len(items):
        while sent < len(items) and sent - len(done) < concurrency:
            _send(engine, prompts[sent], items[sent].output_tokens, f"r{sent}")
            sent += 1
        for output in meter.step():
            if output.error:
                raise OctavoError(f"request {output.request_id} failed, so nothing is measured: {output.error}")
            if output.finished:
                done.append(output)
                on_done()
    return done


def _send(engine: Engine, prompt: Prompt, output_tokens: int, name: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    engine.submit(prompt, params, request_id=name, output_length=output_tokens)


def _check_lengths(plan: BenchPlan, built: BuiltEngine) -> None:
    for point in plan.points:
        if point.longest > built.max_model_len:
            item = max(point.items, key=lambda item: item.prompt_tokens + item.output_tokens)
            raise OctavoError(
                f"the longest request ({point.name}) has {item.prompt_tokens} prompt and {item.output_tokens} output "
                f"tokens, {point.longest} together; max_model_len is {built.max_model_len} here, with {built.kv_bytes} "
                "bytes of KV: lower input_len or output_len, or raise max_model_len or kv_memory as far as the model "
                f"allows ({built.loaded.max_positions} tokens)."
            )


def _describe(built: BuiltEngine) -> str:
    loaded = built.loaded
    dtype = str(loaded.dtype).removeprefix("torch.")
    weights = dtype if loaded.weights == dtype else f"{dtype}, weights in {loaded.weights}"
    by = "native code" if loaded.native is not None else f"transformers' code ({loaded.not_native})"
    return f"{loaded.name}, {weights}, {size(loaded.weight_bytes)}, KV in {built.kv_dtype}, run by {by}"


def _model_facts(built: BuiltEngine) -> dict[str, object]:
    loaded = built.loaded
    return {
        "name": loaded.name,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "weights": loaded.weights,
        "weight_bytes": loaded.weight_bytes,
        "implementation": "transformers" if loaded.native is None else "native",
        "not_native": loaded.not_native,
        "kv_dtype": built.kv_dtype,
    }


def _facts(plan: BenchPlan, built: BuiltEngine) -> dict[str, object]:
    config = built.config
    names = (
        "kv_strategy",
        "block_size",
        "max_num_seqs",
        "max_num_batched_tokens",
        "enable_prefix_caching",
        "speculative_tokens",
        "itl_target",
    )
    engine: dict[str, object] = {name: getattr(config, name) for name in names}
    engine |= {"max_model_len": built.max_model_len, "kv_bytes": built.kv_bytes, "pool_tokens": built.pool_tokens}
    return {"model": _model_facts(built), "engine": engine, "rounds": plan.rounds, "seed": plan.seed}
