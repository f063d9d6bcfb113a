"""A deployment on paper: model, device, engine and settings in; KV pool, scheduler settings and timer out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from octavo.errors import OctavoError
from octavo.kv.budget import BudgetError, MemoryPlan
from octavo.kv.dtypes import kv_dtype
from octavo.kv.spec import ConfigError, KVSpec, spec_from_config
from octavo.kv.weights import published_format
from octavo.models.config_source import ModelSource, find_source
from octavo.planner.catalogue import Device, find_device
from octavo.planner.costs import costs_of_rank, device_total, memory_plan, parse_utilization, reading, storage_of
from octavo.planner.engines import EngineProfile, find_engine
from octavo.planner.paging import pages_of
from octavo.planner.pools import PoolRequest, SimulatedPool, simulated_pool
from octavo.runner.timing import StepTimer
from octavo.scheduler.config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class Deployment:
    """One engine replica. None: what the engine profile or the model says.

    engine        whose rules and memory costs: "octavo" or "vllm-<version>"
    num_blocks    measured KV blocks; beats kv_memory (bytes), which beats the memory plan
    calibration   path of a calibration file; None: the bundled fit for device and model, else the datasheet
    """

    model: str
    gpu: str | None = None
    memory: int | None = None
    tp: int = 1
    engine: str = "octavo"
    strategy: str = "paged"
    block_size: int = 16
    kv_dtype: str = "bf16"
    weight_dtype: str | None = None
    utilization: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    admission: str | None = None
    victims: str | None = None
    max_skips: int | None = None
    prefix_caching: bool = True
    kv_memory: int | None = None
    num_blocks: int | None = None
    calibration: str | None = None


class Level(StrEnum):
    """How much is known about the times."""

    DATASHEET = "datasheet"  # uncalibrated: peak figures times typical efficiencies
    BUNDLED = "bundled fit"  # fitted to published kernel times of this device
    CALIBRATED = "calibrated here"  # `octavo calibrate` on this machine, or from an engine's own log


@dataclass(frozen=True, slots=True)
class Fidelity:
    """The calibration level with its error, printed with every answer.

    error        expected or held-out median error of a step's time (0.05 = 5 %)
    statement    the sentence for people
    assumptions  everything that was taken on trust
    """

    level: Level
    error: float
    statement: str
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Resolved:
    """A deployment worked out: what the simulator runs.

    deployment       as asked, with the engine's utilization where none was given
    pages, windows   for `make_manager`; block_bytes: bytes of one page on one rank
    sources          setting -> where its value came from, for the report ("flag", "engine profile", "model config" ...)
    """

    deployment: Deployment
    spec: KVSpec
    scheduler: SchedulerConfig
    pages: int
    windows: tuple[int | None, ...]
    block_bytes: int
    timer: StepTimer
    plan: MemoryPlan | None
    fidelity: Fidelity
    notes: tuple[str, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)


def resolve(deployment: Deployment) -> Resolved:
    """Work out a deployment. Raises OctavoError with the shortfall in bytes if it cannot work."""
    notes: list[str] = []
    sources: dict[str, str] = {}
    profile, note = find_engine(deployment.engine)
    if note is not None:
        notes.append(note)
    sources["engine"] = f"engine profile {profile.name}: {profile.source}"
    source = find_source(deployment.model)
    sources["model"] = source.where
    spec = _spec(deployment, profile, source, sources, notes)
    device = None if deployment.gpu is None else find_device(deployment.gpu)
    length = _length(deployment, spec, sources)
    tokens, seqs = _step_limits(deployment, profile, device, length, sources)
    plan = _plan(deployment, profile, source, device, (tokens, seqs), sources, notes)
    wanted = PoolRequest(
        strategy=deployment.strategy,
        length=length,
        length_given=deployment.max_model_len is not None,
        max_num_seqs=seqs,
        seqs_given=deployment.max_num_seqs is not None,
        chunk=tokens,
        num_blocks=deployment.num_blocks,
        kv_memory=deployment.kv_memory,
    )
    pool = simulated_pool(wanted, spec, pages_of(spec, deployment.block_size, profile), profile, plan)
    sources |= pool.sources
    scheduler = _scheduler(deployment, profile, tokens, pool, sources)
    timer, fidelity = _timer(deployment, spec, source, device, pool)
    sources["times"] = fidelity.statement
    return Resolved(
        deployment=deployment if deployment.utilization else replace(deployment, utilization=profile.utilization),
        spec=spec,
        scheduler=scheduler,
        pages=pool.pages,
        windows=pool.layout.windows,
        block_bytes=pool.layout.page_bytes,
        timer=timer,
        plan=plan,
        fidelity=fidelity,
        notes=(*notes, *pool.notes),
        sources=sources,
    )


def _origin(given: object, otherwise: str) -> str:
    return otherwise if given is None else "flag"


def _spec(
    deployment: Deployment, profile: EngineProfile, source: ModelSource, sources: dict[str, str], notes: list[str]
) -> KVSpec:
    """What the model caches on this engine. `auto` is the model's own dtype."""
    asked, origin = deployment.kv_dtype, "flag, or its default"
    if asked.strip().lower() == "auto":
        asked, origin = _own_dtype(source) if deployment.calibration is None else _calibrated(deployment.calibration)
    stored = kv_dtype(profile.kv_dtype(asked)).name
    if stored not in profile.kv_dtypes:
        raise OctavoError(
            f"kv_dtype is {deployment.kv_dtype!r}, which {profile.name} does not store KV in; choose one of auto, "
            f"{', '.join(profile.kv_dtypes)}. (`octavo size` sizes other formats, too.)"
        )
    with reading(source):
        spec = spec_from_config(
            source.config,
            kv_dtype=stored,
            tp=deployment.tp,
            mla_form=profile.mla,
            names=source.names,
        )
    sources["kv_dtype"] = origin
    notes += spec.notes
    if spec.mla is not None:
        notes.append(f"Multi-head latent attention is cached in its {spec.mla.form} form, as {profile.name} does.")
    if source.unverified:
        notes.append(f"Not confirmed by a primary source in the catalogue: {', '.join(source.unverified)}.")
    return spec


def _calibrated(path: str) -> tuple[str, str]:
    """The KV dtype that a calibration was made with. Imported here: it needs this module's `Fidelity`."""
    from octavo.planner.timing.calibration import load

    return load(Path(path)).kv_dtype, "calibration"


def _own_dtype(source: ModelSource) -> tuple[str, str]:
    """The dtype that the model computes in and the config path that says so."""
    try:
        form, where = published_format(source.config)
    except ConfigError as error:
        raise OctavoError(
            f"kv_dtype is 'auto' and {source.where} names no dtype: give kv_dtype, such as bf16 or float32."
        ) from error
    return form.name if form.name in ("float32", "fp16") else "bf16", f"model config: {where}"


def _length(deployment: Deployment, spec: KVSpec, sources: dict[str, str]) -> int:
    """max_model_len as asked, or the model's own; the pool may shorten the latter."""
    given, positions = deployment.max_model_len, spec.max_positions
    if given is not None and given < 1:
        raise BudgetError(f"max_model_len is {given}; it must be at least 1.")
    if positions is None:
        if given is None:
            raise OctavoError(f"{deployment.model}: the config gives no maximum length; give max_model_len.")
    elif given is None or given > positions:
        where = spec.sources["max_position_embeddings"]
        if given is not None:
            raise BudgetError(f"max_model_len is {given}, the model takes at most {positions} ({where}): lower it.")
        sources["max_model_len"] = f"model config: {where}"
        return positions
    assert given is not None
    sources["max_model_len"] = "flag"
    return given


def _step_limits(
    deployment: Deployment, profile: EngineProfile, device: Device | None, length: int, sources: dict[str, str]
) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs): as asked, else the engine's defaults for the device."""
    for name in ("block_size", "max_num_batched_tokens", "max_num_seqs"):
        value = getattr(deployment, name)
        if value is not None and value < 1:
            raise BudgetError(f"{name} is {value}; it must be at least 1.")
    tokens, seqs = profile.step_limits(device, deployment.memory, length)
    default = f"engine profile {profile.name}"
    sources["max_num_batched_tokens"] = _origin(deployment.max_num_batched_tokens, default)
    sources["max_num_seqs"] = _origin(deployment.max_num_seqs, default)
    if deployment.max_num_batched_tokens is not None:
        tokens = deployment.max_num_batched_tokens
        if profile.is_vllm and tokens < seqs:
            seqs = tokens
            sources["max_num_seqs"] = f"{default}, lowered to max_num_batched_tokens as vLLM does"
    return tokens, seqs if deployment.max_num_seqs is None else deployment.max_num_seqs


def _plan(
    deployment: Deployment,
    profile: EngineProfile,
    source: ModelSource,
    device: Device | None,
    limits: tuple[int, int],
    sources: dict[str, str],
    notes: list[str],
) -> MemoryPlan | None:
    """The memory plan, if the device's memory is known."""
    utilization = profile.utilization if deployment.utilization is None else deployment.utilization
    share = parse_utilization(utilization)
    total = device_total(device, deployment.memory)
    if total is None:
        return None
    sources["memory"] = total.source
    sources["utilization"] = _origin(deployment.utilization, f"engine profile {profile.name}")
    weights, costs = costs_of_rank(
        source,
        profile,
        tp=deployment.tp,
        max_batched_tokens=limits[0],
        max_num_seqs=limits[1],
        weight_dtype=deployment.weight_dtype,
        notes=notes,
    )
    sources["weights"] = weights.source
    return memory_plan(total, share, weights, costs)


def _scheduler(
    deployment: Deployment,
    profile: EngineProfile,
    max_num_batched_tokens: int,
    pool: SimulatedPool,
    sources: dict[str, str],
) -> SchedulerConfig:
    """Flags over the engine's rules."""
    chosen = {}
    for name in ("admission", "victims", "max_skips"):
        given = getattr(deployment, name)
        chosen[name] = getattr(profile, name) if given is None else given
        sources[name] = _origin(given, f"engine profile {profile.name}")
    return SchedulerConfig(
        max_model_len=pool.max_model_len,
        max_num_seqs=pool.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_preemptions=profile.max_preemptions,
        **chosen,
    )


def _timer(
    deployment: Deployment, spec: KVSpec, source: ModelSource, device: Device | None, pool: SimulatedPool
) -> tuple[StepTimer, Fidelity]:
    """The timing model. Imported here: it needs this module's `Fidelity`."""
    from octavo.planner.timing.fits import timer_for

    with reading(source):
        return timer_for(
            source.config,
            spec,
            None if device is None else device.name,
            weights=storage_of(source, deployment.weight_dtype),
            names=source.names,
            calibration=deployment.calibration,
            block_bytes=pool.layout.page_bytes,
        )
