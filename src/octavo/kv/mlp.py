"""The MLP of a layer: dense, or routed experts with what stands beside them."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kv.fields import Fields

_FOUR_TIMES = ("gpt2", "gptj", "gpt_neo", "codegen", "bloom", "gpt_bigcode", "mpt", "falcon")


@dataclass(frozen=True, slots=True)
class Mlp:
    """One layer's MLP, whole model.

    width     channels of the dense part: the MLP itself, or what runs beside the experts (shared experts); may be 0
    experts   routed experts, 0 for a dense layer; active: experts per token; expert_width: channels of one
    """

    width: int
    experts: int = 0
    active: int = 0
    expert_width: int = 0


def layer_mlp(fields: Fields, index: int) -> Mlp:
    """The MLP of layer `index`. Raises ConfigError for a missing width."""
    experts = count_or_largest(fields, "num_experts")
    if experts is None or experts == 1 or not _is_sparse(fields, index):
        return Mlp(fields.maybe_count("intermediate_size_mlp") or dense_width(fields))
    width = count_or_largest(fields, "moe_intermediate_size") or fields.count("intermediate_size")
    shared = (count_or_largest(fields, "n_shared_experts") or 0) * width
    shared += fields.maybe_count("shared_expert_intermediate_size") or 0
    if fields.family == "llama4_text":
        shared = width
    if fields.family == "gemma4_text":  # the experts stand beside a dense MLP
        shared = dense_width(fields)
    return Mlp(shared, experts, count_or_largest(fields, "num_experts_per_tok") or 1, width)


def count_or_largest(fields: Fields, name: str) -> int | None:
    """A positive integer, or the largest of a list with one per layer."""
    value = fields.find(name)
    if isinstance(value, list) and value:
        value = max(value)
    return fields.as_count(name, value) if value else None


def dense_width(fields: Fields) -> int:
    """MLP width; GPT-2-like configs leave it out when it is four times the hidden size."""
    width = count_or_largest(fields, "intermediate_size")
    if width is None and fields.family in _FOUR_TIMES:
        return 4 * fields.count("hidden_size")
    if width is None:
        raise fields.missing("intermediate_size")
    return width


def _is_sparse(fields: Fields, index: int) -> bool:
    """Whether layer `index` has experts."""
    kinds = fields.data.get("mlp_layer_types")
    if isinstance(kinds, list) and index < len(kinds):
        return bool(kinds[index] == "sparse")
    step = fields.maybe_count("interleave_moe_layer_step") or fields.maybe_count("decoder_sparse_step") or 1
    if (index + 1) % step or index in (fields.data.get("mlp_only_layers") or ()):
        return False
    period = fields.maybe_count("expert_layer_period")  # Jamba
    if period is not None:
        return index % period == (fields.data.get("expert_layer_offset") or 0)
    frequency = fields.data.get("moe_layer_freq")
    if isinstance(frequency, list):
        return index < len(frequency) and bool(frequency[index])
    return index >= (fields.maybe_count("first_k_dense_replace") or 0)
