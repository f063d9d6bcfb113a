"""Engines for the server's tests: the real scheduler and KV managers, a simulated runner, no model to load."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from types import SimpleNamespace
from typing import Any

from octavo import events as ev
from octavo.build import BuiltEngine
from octavo.clock import Clock, VirtualClock
from octavo.config import EngineConfig
from octavo.engine import Engine, Watcher
from octavo.kv.groups import LayerKV, page_layout
from octavo.kv.strategies import make_manager
from octavo.runner.api import Runner
from octavo.runner.memory import DeviceBudget
from octavo.runner.simulated import SimulatedRunner
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.scheduler import Scheduler

WEIGHTS = 1_000_000


def simulated(
    sink: ev.Sink = ev.discard,
    watchers: Seq[Watcher] = (),
    *,
    strategy: str = "paged",
    pages: int = 64,
    block: int = 4,
    spare: int = 0,
    windows: tuple[int | None, ...] = (None,),
    sharing: bool = True,
    max_model_len: int = 256,
    measured: DeviceBudget | None = None,
    clock: Clock | None = None,
    runner: Runner | None = None,
    **config: Any,
) -> BuiltEngine:
    """`spare`: bytes of kv_memory that make no page. `measured`: the device's budget, instead of kv_memory. Others are
    the scheduler's settings."""
    layers = [LayerKV(i, 2, 8, 8, 2, window) for i, window in enumerate(windows)]
    layout = page_layout(layers, block)
    settings = SchedulerConfig(
        **{"max_model_len": max_model_len, "max_num_seqs": 8, "max_num_batched_tokens": 64} | config
    )
    manager = make_manager(
        strategy,
        pages,
        block,
        max_model_len=max_model_len,
        windows=layout.windows,
        chunk=settings.max_num_batched_tokens,
        sharing=sharing,
    )
    clock = clock or VirtualClock()
    runner = runner or SimulatedRunner(clock)  # type: ignore[arg-type]  # whoever brings another clock brings a runner
    engine = Engine(Scheduler(settings, manager, sink), runner, clock, watchers=watchers, check=True)
    made = EngineConfig(
        model="simulated",
        kv_strategy=strategy,
        block_size=block,
        kv_memory=None if measured else pages * layout.page_bytes + spare,
        max_model_len=max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        enable_prefix_caching=sharing,
        admission=settings.admission,
    )
    loaded: Any = SimpleNamespace(name="simulated", weight_bytes=WEIGHTS, vocab_size=100_000, tokenizer=None)
    return BuiltEngine(engine, made, loaded, layout, pages, max_model_len, measured, None, "bfloat16")
