"""One rank's memory beside KV, from a model's config and an engine profile: what `size` and `resolve` share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction

from octavo.errors import OctavoError
from octavo.kv.budget import Amount, BudgetError, MemoryPlan
from octavo.kv.fields import ConfigError, Fields
from octavo.kv.params import count_parameters, mlp_width
from octavo.kv.weights import WeightFormat, published_format, weight_format
from octavo.models.config_source import ModelSource
from octavo.planner.catalogue import Device
from octavo.planner.engines import EngineCosts, EngineProfile, ModelShape, engine_costs


@contextmanager
def reading(source: ModelSource) -> Iterator[None]:
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


def parse_utilization(text: str) -> Fraction:
    """Exactly what was written, where a float is only near it. Raises BudgetError outside (0, 1]."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise BudgetError(f"utilization is {text!r}; it must be a number in (0, 1], such as 0.9.")
    return Fraction(text)


def device_total(device: Device | None, memory: int | None) -> Amount | None:
    """Total memory of one device: as given, else as its driver reports it; None when neither is known."""
    if memory is not None:
        return Amount.exactly(memory, "--memory")
    if device is None:
        return None
    if device.reported_bytes is not None:
        return Amount.exactly(device.reported_bytes, f"{device.name}: total as its driver reports it")
    # Drivers report 2 to 9 % less than the label (gpus.json, meta.reported_total_memory_bytes).
    low = device.memory_bytes * 91 // 100
    return Amount(low, device.memory_bytes, f"{device.name}: label; the driver may report up to 9 % less")


def model_shape(source: ModelSource, notes: list[str]) -> ModelShape:
    """What activations depend on. An unknown MLP width becomes an interval, which `notes` then says."""
    fields = Fields(source.config, source.names)
    hidden, vocab = fields.count("hidden_size"), fields.count("vocab_size")
    try:
        width = mlp_width(source.config, source.names)
        widths = (width, width)
    except ConfigError as error:
        widths = (0, 8 * hidden)
        notes.append(f"The activations are an interval, for MLPs of 0 to 8 x hidden_size channels: {error}")
    return ModelShape(hidden, vocab, widths)


def storage_of(source: ModelSource, weight_dtype: str | None) -> WeightFormat:
    """How the weights are stored: as asked, as published, or, where no dtype is named (GGUF), by the mean bits."""
    if weight_dtype is not None:
        return weight_format(weight_dtype)
    try:
        return published_format(source.config)[0]
    except ConfigError:
        if source.weight_bytes is None:
            raise
    mean = Fraction(8 * source.weight_bytes[0], count_parameters(source.config, source.names).total)
    return WeightFormat(f"{float(mean):.3g} bits", mean, mean, round(mean))


def weights_of_rank(
    source: ModelSource,
    profile: EngineProfile,
    *,
    tp: int,
    weight_dtype: str | None,
    weight_memory: int | None,
    notes: list[str],
) -> Amount:
    """Weights of one rank: measured by flag, measured in the files, counted from the shape, or as published.

    vLLM pads the experts of MXFP4: gpt-oss-20b and -120b took 0.65 and 3.61 GiB more than was counted (0.11, H100).
    """
    if weight_memory is not None:
        return Amount.exactly(weight_memory, "--weight-memory, per device")
    split = f" / tp {tp}" if tp > 1 else ""
    if source.weight_bytes is not None and weight_dtype is None:
        total, where = source.weight_bytes
        return Amount.exactly(-(-total // tp), where + split)
    if weight_dtype is not None:
        form, why = weight_format(weight_dtype), "--weight-dtype"
    else:
        form, why = published_format(source.config)
    try:
        counted = count_parameters(source.config, source.names)
    except ConfigError:
        if source.parameters is None:
            raise
        total = -(-int(source.parameters * form.matrices) // 8)
        return Amount.exactly(
            -(-total // tp), f"{source.parameters:,} parameters as published x {form.name} ({why}){split}"
        )
    high = form.bytes(counted)
    low = high - int(counted.doubt * form.matrices) // 8
    if counted.doubt:
        notes.append("The weights are an interval: the config does not say whether parts of the shape exist.")
    origin = f"{counted.total:,} parameters counted x {form.name} ({why}){split}"
    if profile.is_vllm and form.name == "mxfp4":
        high += int(counted.experts * form.experts) // 8 // 15
        origin += ", and up to 1/15 of the experts as padding"
    return Amount(-(-low // tp), -(-high // tp), origin)


def costs_of_rank(
    source: ModelSource,
    profile: EngineProfile,
    *,
    tp: int,
    max_batched_tokens: int,
    max_num_seqs: int,
    weight_dtype: str | None,
    weight_memory: int | None = None,
    notes: list[str],
) -> tuple[Amount, EngineCosts]:
    """(weights, the engine's own memory) of one rank. Raises ConfigError for a config that says too little."""
    with reading(source):
        shape = model_shape(source, notes)
        costs = engine_costs(profile, shape, tp=tp, max_batched_tokens=max_batched_tokens, max_num_seqs=max_num_seqs)
        weights = weights_of_rank(
            source, profile, tp=tp, weight_dtype=weight_dtype, weight_memory=weight_memory, notes=notes
        )
    return weights, costs


def memory_plan(total: Amount, utilization: Fraction, weights: Amount, costs: EngineCosts) -> MemoryPlan:
    """The plan of one rank."""
    return MemoryPlan(
        total, utilization, weights, costs.activations, costs.workspace, costs.graphs, logits=costs.logits
    )
