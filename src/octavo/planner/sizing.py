"""`octavo size` without its output: model name and options in, KV spec and memory plan out.

Every figure carries where it came from. A flag beats what files or catalogues say.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kv.budget import Amount, BudgetError, MemoryPlan, Pool, kv_bytes_for, require_length
from octavo.kv.spec import ConfigError, KVSpec, spec_from_config
from octavo.kv.weights import weight_format
from octavo.models.config_source import ModelSource, find_source
from octavo.planner.catalogue import find_device
from octavo.planner.costs import costs_of_rank, device_total, memory_plan, parse_utilization, reading
from octavo.planner.engines import EngineCosts, EngineProfile, find_engine

_MOST = 10**15  # tokens, blocks or sequences: beyond any machine


@dataclass(frozen=True, slots=True)
class SizeRequest:
    """What was asked. Bytes are those of one tensor-parallel rank (one device).

    memory, gpu      the device's total, or its catalogue name
    kv_memory        KV bytes as given; num_blocks: measured blocks, as an engine logs them
    weight_memory    measured bytes of the weights; weight_dtype: how they are stored instead of as published
    users, length    for the inverse: memory in which so many sequences of that length run
    engine           whose memory costs and defaults: those of utilization, max_num_seqs and max_batched_tokens where
                     they are None
    """

    model: str
    kv_dtype: str = "bf16"
    tp: int = 1
    mla: str = "latent"
    block_size: int = 16
    max_model_len: int | None = None
    memory: int | None = None
    gpu: str | None = None
    kv_memory: int | None = None
    num_blocks: int | None = None
    weight_dtype: str | None = None
    weight_memory: int | None = None
    users: int | None = None
    length: int | None = None
    utilization: str | None = None
    max_num_seqs: int | None = None
    max_batched_tokens: int | None = None
    engine: str = "octavo"


@dataclass(frozen=True, slots=True)
class Limits:
    """What the request left open, filled in from the engine's profile."""

    profile: EngineProfile
    utilization: str
    max_num_seqs: int
    max_batched_tokens: int


@dataclass(frozen=True, slots=True)
class Inverse:
    """Memory for `users` sequences of `length`: KV bytes exactly, the device total when its costs are known."""

    users: int
    length: int
    kv_bytes: int
    device: Amount | None


@dataclass(frozen=True, slots=True)
class SizeResult:
    """The answer. `pools` are the KV memory at the low and at the high end (one pool when it is exact)."""

    request: SizeRequest
    limits: Limits
    source: ModelSource
    spec: KVSpec
    max_length: int | None  # --max-model-len, or the model's own
    plan: MemoryPlan | None
    kv: Amount | None
    pools: tuple[Pool, ...]
    inverse: Inverse | None
    notes: tuple[str, ...]

    def lengths(self) -> list[int]:
        """Lengths worth showing: powers of two and the longest."""
        top = self.max_length or 131072
        shown = [n for n in (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072) if n < top]
        return [*shown, top]


def size_model(request: SizeRequest) -> SizeResult:
    """Answer `request`. Raises OctavoError: a config that says too little, or memory that is too small."""
    profile, note = find_engine(request.engine)
    _check(request, profile)
    source = find_source(request.model)
    with reading(source):
        spec = spec_from_config(
            source.config,
            kv_dtype=profile.kv_dtype(request.kv_dtype),
            tp=request.tp,
            mla_form=request.mla,
            names=source.names,
        )
    notes = [*([] if note is None else [note]), *spec.notes]
    if source.unverified:
        notes.append(f"Not confirmed by a primary source in the catalogue: {', '.join(source.unverified)}.")
    max_length = _max_length(request, spec)
    limits = _limits(request, profile, max_length)
    total = device_total(None if request.gpu is None else find_device(request.gpu), request.memory)
    costs = None if total is None and request.users is None else _costs(request, limits, source, total, notes)
    plan = memory_plan(total, parse_utilization(limits.utilization), *costs) if total and costs else None
    kv = _kv_amount(request, spec, plan, notes)
    pools: tuple[Pool, ...] = ()
    if kv is not None:
        ends = sorted({max(0, kv.low), kv.high})
        pools = tuple(Pool(spec, end, request.block_size, limits.max_batched_tokens) for end in ends)
        _require_fit(request, pools[-1], max_length, notes)
    inverse = _inverse(request, limits, spec, costs, max_length)
    return SizeResult(request, limits, source, spec, max_length, plan, kv, pools, inverse, tuple(notes))


def _limits(request: SizeRequest, profile: EngineProfile, max_length: int | None) -> Limits:
    """The settings as asked, else the engine's defaults for the device."""
    device = None if request.gpu is None else find_device(request.gpu)
    tokens, seqs = profile.step_limits(device, request.memory, max_length)
    return Limits(
        profile,
        profile.utilization if request.utilization is None else request.utilization,
        seqs if request.max_num_seqs is None else request.max_num_seqs,
        tokens if request.max_batched_tokens is None else request.max_batched_tokens,
    )


def _costs(
    request: SizeRequest, limits: Limits, source: ModelSource, total: Amount | None, notes: list[str]
) -> tuple[Amount, EngineCosts] | None:
    """Weights and the engine's own memory; None, with a note, where only the inverse wants them and they cannot
    be counted."""
    try:
        return costs_of_rank(
            source,
            limits.profile,
            tp=request.tp,
            max_batched_tokens=limits.max_batched_tokens,
            max_num_seqs=limits.max_num_seqs,
            weight_dtype=request.weight_dtype,
            weight_memory=request.weight_memory,
            notes=notes,
        )
    except ConfigError as error:
        if total is not None:
            raise
        notes.append(str(error))  # the KV bytes of the inverse need no weights
        return None


def _check(request: SizeRequest, profile: EngineProfile) -> None:
    """Every option, whether or not this request needs it."""
    parse_utilization(profile.utilization if request.utilization is None else request.utilization)
    if request.weight_dtype is not None:
        weight_format(request.weight_dtype)
    if (request.users is None) != (request.length is None):
        given, other = ("users", "length") if request.length is None else ("length", "users")
        raise BudgetError(
            f"{given} is {getattr(request, given)} and {other} is not given: --users sequences of --length tokens go "
            f"together; give --{other} too."
        )
    if request.memory is not None and request.gpu is not None:
        raise BudgetError("--memory and --gpu both name the device's memory: give one of them.")
    for name in ("block_size", "max_num_seqs", "max_batched_tokens", "max_model_len", "num_blocks", "users", "length"):
        value = getattr(request, name)
        if value is not None and not 1 <= value <= _MOST:
            raise BudgetError(f"{name} is {value}; it must be at least 1 and at most {_MOST}.")


def _max_length(request: SizeRequest, spec: KVSpec) -> int | None:
    given = request.max_model_len
    if given is None:
        return spec.max_positions
    if spec.max_positions is not None and given > spec.max_positions:
        where = spec.sources["max_position_embeddings"]
        raise BudgetError(
            f"max_model_len is {given}, the model takes at most {spec.max_positions} ({where}): lower it."
        )
    return given


def _require_fit(request: SizeRequest, pool: Pool, max_length: int | None, notes: list[str]) -> None:
    """Stop when the length asked for, or even one block, does not fit; note it for the model's own maximum."""
    if request.max_model_len is not None:
        require_length(pool, request.max_model_len)
    require_length(pool, request.block_size)
    if max_length is not None and pool.sequence_bytes(max_length) > pool.kv_bytes:
        notes.append(
            f"One sequence of the model's {max_length} tokens needs {pool.sequence_bytes(max_length)} bytes of KV "
            f"memory and does not fit: start with --max-model-len {pool.longest()} or less."
        )


def _kv_amount(request: SizeRequest, spec: KVSpec, plan: MemoryPlan | None, notes: list[str]) -> Amount | None:
    """The KV memory: measured blocks, then --kv-memory, then what the plan leaves."""
    derived = plan.kv() if plan is not None else None
    given: Amount | None = None
    if request.num_blocks is not None:
        if len(spec.groups) != 1 or spec.fixed_bytes:
            raise BudgetError(
                f"num_blocks is {request.num_blocks}, but the model has blocks of several sizes, which no single "
                "number counts; give --kv-memory instead."
            )
        page = request.block_size * spec.bytes_per_token
        given = Amount.exactly(request.num_blocks * page, f"--num-blocks {request.num_blocks} x {page} bytes")
        if request.kv_memory is not None and request.kv_memory // page != request.num_blocks:
            raise BudgetError(
                f"--num-blocks {request.num_blocks} and --kv-memory {request.kv_memory} disagree: those bytes are "
                f"{request.kv_memory // page} blocks; give one of them."
            )
    elif request.kv_memory is not None:
        given = Amount.exactly(request.kv_memory, "--kv-memory")
    if given is None:
        return derived
    if derived is not None and not derived.low <= given.low <= derived.high:
        notes.append(
            f"The KV memory is taken from {given.source}; the plan itself would leave {derived.low} to {derived.high} "
            "bytes."
        )
    return given


def _inverse(
    request: SizeRequest,
    limits: Limits,
    spec: KVSpec,
    costs: tuple[Amount, EngineCosts] | None,
    max_length: int | None,
) -> Inverse | None:
    users, length = request.users, request.length
    if users is None or length is None:
        return None
    if max_length is not None and length > max_length:
        raise BudgetError(f"length is {length}, above the maximum of {max_length} tokens: lower it.")
    kv = kv_bytes_for(spec, users, length, block_size=request.block_size, chunk=limits.max_batched_tokens)
    if costs is None:
        return Inverse(users, length, kv, None)
    plan = memory_plan(Amount.exactly(0, "not given"), parse_utilization(limits.utilization), *costs)
    return Inverse(users, length, kv, plan.device_for(kv))
