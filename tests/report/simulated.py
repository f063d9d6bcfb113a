"""A comparison made by the simulated engine: real scheduler, real KV managers, a timing model for the clock."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from octavo.clock import VirtualClock
from octavo.kv.strategies import STRATEGIES, make_manager
from octavo.report.comparison import Comparison, StrategyRun, compare
from octavo.report.recorder import Recorder
from octavo.runner.simulated import LinearTiming, SimulatedRunner
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.scheduler import Scheduler
from octavo.types import Request, RequestError, SamplingParams

BYTES_PER_TOKEN = 23_040  # SmolLM2-135M in bfloat16
# (arrival in seconds, prompt tokens, output tokens): the shape of chat traffic, a few long ones among short ones
LENGTHS = [(0.05 * i, 24 + (i * 37) % 90 + (180 if i % 9 == 4 else 0), 8 + (i * 23) % 60) for i in range(30)]


def simulate(
    strategy: str,
    lengths: Sequence[tuple[float, int, int]] = LENGTHS,
    *,
    pages: int = 64,
    block: int = 16,
    max_model_len: int = 512,
    max_num_seqs: int = 16,
    budget: int = 128,
    step_seconds: float = 5e-3,
    ids: Sequence[str] = (),
) -> StrategyRun:
    """Run the requests to their end and record it."""
    settings = SchedulerConfig(
        max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_skips=2
    )
    clock, recorder = VirtualClock(), Recorder()
    manager = make_manager(strategy, pages, block, max_model_len=max_model_len, chunk=budget)
    scheduler = Scheduler(settings, manager, recorder.on_event)
    runner = SimulatedRunner(clock, LinearTiming(step=step_seconds))
    todo = list(enumerate(lengths))
    while todo or scheduler.busy:
        if not scheduler.busy and todo[0][1][0] > clock.now():
            clock.advance(todo[0][1][0] - clock.now())
        while todo and todo[0][1][0] <= clock.now():
            number, (arrival, prompt, output) = todo.pop(0)
            submit(scheduler, ids[number] if ids else f"r{number:02d}", number, arrival, prompt, output)
        if not scheduler.busy:
            continue
        start = clock.now()
        plan = scheduler.plan(start)
        result = runner.run(plan)
        progress = scheduler.settle(plan, result, clock.now(), lambda: recorder.on_written(scheduler))
        recorder.on_step(scheduler, plan, progress, start, clock.now())
    tokens = manager.capacity * manager.block_size
    return StrategyRun.of(strategy, recorder, tokens, tokens * BYTES_PER_TOKEN)


def submit(scheduler: Scheduler, name: str, number: int, arrival: float, prompt: int, output: int) -> None:
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    tokens = tuple(number * 5000 + i for i in range(prompt))
    request = Request(prompt=tokens, params=params, id=name, arrival=arrival, output_length=output)
    with suppress(RequestError):  # refused: the recorder has it
        scheduler.submit(request, arrival)


def simulated(strategies: Sequence[str] = STRATEGIES, **settings) -> Comparison:
    """All strategies on the same requests and bytes."""
    pages, block = settings.get("pages", 64), settings.get("block", 16)
    return compare(
        [simulate(name, **settings) for name in strategies],
        title="Where the KV memory goes",
        model="SmolLM2-135M-Instruct",
        machine="no machine: simulated engine, LinearTiming",
        command="octavo compare demo --workload chat.jsonl --kv-memory 23592960",
        workload="30 chat requests, 24 to 293 prompt tokens and 8 to 67 output tokens, one each 50 ms.",
        kv_bytes=pages * block * BYTES_PER_TOKEN,
        block_size=block,
        max_model_len=settings.get("max_model_len", 512),
        simulated=True,
        notes=("Durations: 5 ms a step and 50 µs a computed token; an illustration, not a device.",),
    )
