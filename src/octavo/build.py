"""From settings to a running engine: model, memory budget, layout, KV manager, scheduler, runner."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from octavo import events as ev
from octavo.clock import Clock, WallClock
from octavo.config import EngineConfig
from octavo.engine import Engine, Watcher
from octavo.errors import OctavoError
from octavo.kv.api import longest_length
from octavo.kv.groups import Layout, page_layout
from octavo.kv.strategies import make_manager
from octavo.log import LogHeader, LogWriter
from octavo.models.loader import LoadedModel, load_model
from octavo.models.phases import Phases
from octavo.models.shapes import cache_dtype, cache_layers
from octavo.runner.choice import make_runner
from octavo.runner.structure import Structures
from octavo.scheduler.config import SchedulerConfig

if TYPE_CHECKING:
    from octavo.runner.memory import DeviceBudget


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine and what it was built from."""

    engine: Engine
    config: EngineConfig
    loaded: LoadedModel
    layout: Layout
    pages: int
    max_model_len: int
    budget: DeviceBudget | None  # None: `kv_memory` was given, nothing had to be measured
    log: LogWriter | None  # the decision log that is being written; close it at the end
    kv_dtype: str  # what K and V are stored in; never "auto"
    load_seconds: Mapping[str, float] = field(default_factory=dict)  # where the time of loading went, by phase

    @property
    def kv_bytes(self) -> int:
        return self.pages * self.layout.page_bytes

    @property
    def pool_tokens(self) -> int:
        """The longest single sequence the pool can hold."""
        return longest_length(self.engine.scheduler.kv)


def build_engine(
    config: EngineConfig,
    *,
    loaded: LoadedModel | None = None,
    clock: Clock | None = None,
    sink: ev.Sink = ev.discard,
    watchers: Seq[Watcher] = (),
    log: Path | None = None,
) -> BuiltEngine:
    """Load the model (unless given), measure the memory (unless `kv_memory` is given) and put the parts together.
    `log`: write a decision log there (msgpack for .msgpack, else JSON lines).

    Raises OctavoError with the numbers if the model, the budget and the lengths do not fit together.
    """
    phases = Phases()
    if loaded is None:
        loaded = load_configured(config)
        phases.seconds.update(loaded.load_seconds)
    kv_dtype = cache_dtype(config.kv_dtype, loaded.dtype)
    layout = page_layout(cache_layers(loaded.layers, kv_dtype), config.block_size)
    longest_model = _model_length(config, loaded)
    budget = None
    if config.kv_memory is None:
        from octavo.runner.memory import measure

        with phases.timed("measuring memory"):
            budget = measure(
                loaded,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_num_seqs=config.max_num_seqs,
                kv_dtype=config.kv_dtype,
            )
    kv_bytes = config.kv_memory if budget is None else _kv_share(config, budget, layout, longest_model)
    assert kv_bytes is not None
    if budget is None:
        _check_memory(kv_bytes, loaded)
    max_model_len = _fit_length(config, layout, kv_bytes, longest_model)
    pages = kv_bytes // layout.page_bytes
    header = log_header(config, loaded, layout, pages, _scheduler_config(config, max_model_len))
    with phases.timed("runner"):
        structures = Structures(loaded.tokenizer, loaded.vocab_size, loaded.eos_ids)
        runner = make_runner(loaded, layout, pages, seed=config.seed, kv_dtype=config.kv_dtype, structures=structures)
    writer = None if log is None else LogWriter(log, header)
    scheduler = header.build(sink if writer is None else ev.fan_out(sink, writer))
    engine = Engine(
        scheduler,
        runner,
        clock or WallClock(),
        codec=loaded.tokenizer,
        eos_ids=loaded.eos_ids,
        vocab_size=loaded.vocab_size,
        watchers=watchers,
        check=config.check,
        itl_target=config.itl_target,
        structures=structures,
    )
    return BuiltEngine(
        engine, config, loaded, layout, pages, max_model_len, budget, writer, kv_dtype.name, phases.seconds
    )


def _check_memory(kv_bytes: int, loaded: LoadedModel) -> None:
    """Raises OctavoError if the device could never hold so much KV: it would be found out page by page otherwise."""
    from octavo.runner.memory import device_capacity

    capacity = device_capacity(loaded)
    if capacity is not None and kv_bytes + loaded.weight_bytes > capacity:
        raise OctavoError(
            f"kv_memory is {kv_bytes} bytes; with {loaded.weight_bytes} bytes of weights that is more than the "
            f"{capacity} bytes of the device; lower kv_memory to at most {max(0, capacity - loaded.weight_bytes)}."
        )


def load_configured(config: EngineConfig) -> LoadedModel:
    """The model that the settings name. Raises ModelError."""
    return load_model(
        config.model,
        dtype=config.dtype,
        device=config.device,
        weights=config.weights,
        implementation=config.implementation,
    )


def _model_length(config: EngineConfig, loaded: LoadedModel) -> int:
    longest = loaded.max_positions
    if config.max_model_len is not None and config.max_model_len > longest:
        why = f" ({loaded.max_positions_note})" if loaded.max_positions_note else ""
        raise OctavoError(
            f"max_model_len is {config.max_model_len}; {loaded.name} takes at most {longest} tokens{why}; "
            f"set max_model_len to {longest} or less."
        )
    return config.max_model_len or longest


def _kv_share(config: EngineConfig, budget: DeviceBudget, layout: Layout, max_model_len: int) -> int:
    """KV bytes when nobody says how many: what the device has left, but no more than max_num_seqs full sequences."""
    usable = int(budget.total * config.memory_utilization)
    left = usable - budget.weights - budget.activations - budget.workspace
    most = config.max_num_seqs * -(-max_model_len // layout.block_size) * len(layout.groups) * layout.page_bytes
    if left < layout.page_bytes:
        raise OctavoError(
            f"no memory is left for KV: {usable} usable bytes (memory_utilization {config.memory_utilization} of "
            f"{budget.total}) less {budget.weights} weights, {budget.activations} activations and "
            f"{budget.workspace} workspace is {left}; free memory, raise memory_utilization or lower "
            "max_num_batched_tokens."
        )
    return min(left, most)


def _scheduler_config(config: EngineConfig, max_model_len: int) -> SchedulerConfig:
    return SchedulerConfig(
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        admission=config.admission,
        victims=config.victims,
        max_preemptions=config.max_preemptions,
        max_skips=config.max_skips,
        order=config.order,
        tenant_weights=config.tenant_weights,
        max_queue=config.max_queue,
        max_queued_tokens=config.max_queued_tokens,
        quotas=config.quotas,
        speculative_tokens=config.speculative_tokens,
        speculative_limit=config.speculative_limit,
    )


def log_header(
    config: EngineConfig, loaded: LoadedModel, layout: Layout, pages: int, settings: SchedulerConfig
) -> LogHeader:
    """What a decision log of this engine has to say first."""
    stored = cache_dtype(config.kv_dtype, loaded.dtype)
    return LogHeader(
        strategy=config.kv_strategy,
        pages=pages,
        block_size=config.block_size,
        windows=layout.windows,
        sharing=config.enable_prefix_caching,
        scheduler=settings,
        engine_identity=(loaded.name, str(loaded.dtype), loaded.weights, stored.name),
    )


def _fit_length(config: EngineConfig, layout: Layout, kv_bytes: int, longest_model: int) -> int:
    """The longest sequence the engine promises: as configured, else the model's length or what the pool can hold.

    Raises OctavoError with what is needed and what is possible if the pool cannot keep a configured promise.
    """
    pages = kv_bytes // layout.page_bytes
    if pages < len(layout.groups):
        need = layout.page_bytes * len(layout.groups)
        raise OctavoError(
            f"kv_memory is {kv_bytes} bytes, less than one block: {config.block_size} tokens need {need} bytes; "
            "raise kv_memory or lower block_size."
        )
    kv = make_manager(
        "growing" if config.kv_strategy.startswith("reserve") else config.kv_strategy,
        pages,
        config.block_size,
        max_model_len=longest_model,
        windows=layout.windows,
        chunk=config.max_num_batched_tokens,
    )
    possible = longest_length(kv)
    if config.max_model_len is None:
        return min(longest_model, possible)
    if config.max_model_len > possible:
        need = kv.ceiling_blocks(config.max_model_len, config.max_model_len) * kv.pages_per_block * layout.page_bytes
        raise OctavoError(
            f"max_model_len is {config.max_model_len} tokens, which need {need} bytes of KV; there are {kv_bytes}, "
            f"enough for {possible} tokens; set max_model_len to {possible} or less, or raise kv_memory to {need}."
        )
    return config.max_model_len
