"""`octavo size` without its output: model name and options in, KV spec and memory plan out.

Every figure carries where it came from. A flag beats what files or catalogues say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction

from octavo.errors import OctavoError
from octavo.kv.budget import (
    Amount,
    BudgetError,
    MemoryPlan,
    Pool,
    activation_allowance,
    kv_bytes_for,
    require_length,
    workspace_allowance,
)
from octavo.kv.fields import Fields
from octavo.kv.params import count_parameters, mlp_width
from octavo.kv.spec import ConfigError, KVSpec, spec_from_config
from octavo.kv.weights import published_format, weight_format
from octavo.models.config_source import ModelSource, find_source
from octavo.planner.catalogue import find_device

_MOST = 10**15  # tokens, blocks or sequences: beyond any machine


@dataclass(frozen=True, slots=True)
class SizeRequest:
    """What was asked. Bytes are those of one tensor-parallel rank (one device).

    memory, gpu      the device's total, or its catalogue name
    kv_memory        KV bytes as given; num_blocks: measured blocks, as an engine logs them
    weight_memory    measured bytes of the weights; weight_dtype: how they are stored instead of as published
    users, length    for the inverse: memory in which so many sequences of that length run
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
    utilization: str = "0.9"
    max_num_seqs: int = 256
    max_batched_tokens: int = 512


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
    _check(request)
    source = find_source(request.model)
    with _reading(source):
        spec = spec_from_config(
            source.config, kv_dtype=request.kv_dtype, tp=request.tp, mla_form=request.mla, names=source.names
        )
    notes = list(spec.notes)
    if source.unverified:
        notes.append(f"Not confirmed by a primary source in the catalogue: {', '.join(source.unverified)}.")
    max_length = _max_length(request, spec)
    wants_plan = request.memory is not None or request.gpu is not None
    costs = None
    if wants_plan or request.users is not None:
        try:
            with _reading(source):
                costs = _costs(request, source, notes)
        except ConfigError as error:
            if wants_plan:
                raise
            notes.append(str(error))  # the KV bytes of the inverse need no weights
    plan = _plan(request, costs) if wants_plan and costs is not None else None
    kv = _kv_amount(request, spec, plan, notes)
    pools: tuple[Pool, ...] = ()
    if kv is not None:
        ends = sorted({max(0, kv.low), kv.high})
        pools = tuple(Pool(spec, end, request.block_size, request.max_batched_tokens) for end in ends)
        _require_fit(request, pools[-1], max_length, notes)
    inverse = _inverse(request, spec, plan or (costs and _costs_only(request, costs)), max_length)
    return SizeResult(request, source, spec, max_length, plan, kv, pools, inverse, tuple(notes))


def _check(request: SizeRequest) -> None:
    """Every option, whether or not this request needs it."""
    _utilization(request.utilization)
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


@contextmanager
def _reading(source: ModelSource) -> Iterator[None]:
    """A field of a kind that no rule expects (a text for a list, say) is an error in the config, not in Octavo."""
    try:
        yield
    except OctavoError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise ConfigError(
            f"{source.where}: a field holds a value of a kind that Octavo does not expect "
            f"({type(error).__name__}: {error}); compare it with the published config."
        ) from error


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


def _costs(request: SizeRequest, source: ModelSource, notes: list[str]) -> tuple[Amount, Amount, Amount]:
    """(weights, activations, workspace) of one rank."""
    fields = Fields(source.config, source.names)
    hidden, vocab = fields.count("hidden_size"), fields.count("vocab_size")
    try:
        widths = [mlp_width(source.config, source.names)]
    except ConfigError as error:
        widths = [0, 8 * hidden]
        notes.append(f"The activations are an interval, for MLPs of 0 to 8 x hidden_size channels: {error}")
    ends = [
        activation_allowance(
            hidden=hidden,
            mlp_width=width,
            vocab=vocab,
            tp=request.tp,
            max_batched_tokens=request.max_batched_tokens,
            max_num_seqs=request.max_num_seqs,
        )
        for width in widths
    ]
    activations = Amount(ends[0].low, ends[-1].high, ends[-1].source)
    return _weights(request, source, notes), activations, workspace_allowance(request.tp)


def _weights(request: SizeRequest, source: ModelSource, notes: list[str]) -> Amount:
    """Weights of one rank: measured by flag, measured in the files, counted from the shape, or as published."""
    if request.weight_memory is not None:
        return Amount.exactly(request.weight_memory, "--weight-memory, per device")
    ranks = request.tp
    if source.weight_bytes is not None and request.weight_dtype is None:
        total, where = source.weight_bytes
        return Amount.exactly(-(-total // ranks), where + (f" / tp {ranks}" if ranks > 1 else ""))
    if request.weight_dtype is not None:
        form, why = weight_format(request.weight_dtype), "--weight-dtype"
    else:
        form, why = published_format(source.config)
    split = f" / tp {ranks}" if ranks > 1 else ""
    try:
        counted = count_parameters(source.config, source.names)
    except ConfigError:
        if source.parameters is None:
            raise
        total = -(-int(source.parameters * form.matrices) // 8)
        return Amount.exactly(
            -(-total // ranks), f"{source.parameters:,} parameters as published x {form.name} ({why}){split}"
        )
    high = form.bytes(counted)
    low = high - int(counted.doubt * form.matrices) // 8
    if counted.doubt:
        notes.append("The weights are an interval: the config does not say whether parts of the shape exist.")
    return Amount(
        -(-low // ranks), -(-high // ranks), f"{counted.total:,} parameters counted x {form.name} ({why}){split}"
    )


def _plan(request: SizeRequest, costs: tuple[Amount, Amount, Amount]) -> MemoryPlan:
    if request.memory is not None:
        total = Amount.exactly(request.memory, "--memory")
    else:
        device = find_device(request.gpu or "")
        if device.reported_bytes is not None:
            total = Amount.exactly(device.reported_bytes, f"{device.name}: total as its driver reports it")
        else:
            # Drivers report 2 to 9 % less than the label (gpus.json, meta.reported_total_memory_bytes).
            low = device.memory_bytes * 91 // 100
            total = Amount(low, device.memory_bytes, f"{device.name}: label; the driver may report up to 9 % less")
    return MemoryPlan(total, _utilization(request.utilization), *costs)


def _costs_only(request: SizeRequest, costs: tuple[Amount, Amount, Amount]) -> MemoryPlan:
    """A plan without a device, for the inverse."""
    return MemoryPlan(Amount.exactly(0, "not given"), _utilization(request.utilization), *costs)


def _utilization(text: str) -> Fraction:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise BudgetError(f"utilization is {text!r}; it must be a number in (0, 1], such as 0.9.")
    return Fraction(text)  # exactly what was written, where a float is only near it


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


def _inverse(request: SizeRequest, spec: KVSpec, plan: MemoryPlan | None, max_length: int | None) -> Inverse | None:
    users, length = request.users, request.length
    if users is None or length is None:
        return None
    if max_length is not None and length > max_length:
        raise BudgetError(f"length is {length}, above the maximum of {max_length} tokens: lower it.")
    kv = kv_bytes_for(spec, users, length, block_size=request.block_size, chunk=request.max_batched_tokens)
    return Inverse(users, length, kv, plan.device_for(kv) if plan is not None else None)
