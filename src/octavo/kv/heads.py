"""The shape of a layer's KV: how many heads are cached and how wide K and V are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.kv.families import KV_HEADS_DEFAULT_TO_HEADS, MULTI_HEAD
from octavo.kv.fields import ConfigError, Fields
from octavo.kv.layer_rules import Layer, LayerKind


@dataclass(frozen=True, slots=True)
class Shape:
    """KV of one token in one layer of the whole model (before tensor parallelism)."""

    kv_heads: int
    k_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class MLAShape:
    """Multi-head latent attention: the compressed entry, and what it expands to per head."""

    latent: int  # kv_lora_rank
    rope: int  # qk_rope_head_dim, cached beside the latent
    heads: int
    k_dim: int  # qk_nope_head_dim + qk_rope_head_dim
    v_dim: int


def mla_shape(fields: Fields) -> MLAShape | None:
    """The MLA widths, or None for a model without `kv_lora_rank`."""
    rank = fields.maybe_count("kv_lora_rank")
    if rank is None:
        return None
    rope = fields.count("qk_rope_head_dim")
    nope = fields.count("qk_nope_head_dim")
    # MiniCPM3 leaves v_head_dim to hidden_size / num_attention_heads.
    v_dim = fields.maybe_count("v_head_dim") or (head_dim(fields) if fields.family == "minicpm3" else None)
    if v_dim is None:
        raise fields.missing("v_head_dim")
    return MLAShape(rank, rope, query_heads(fields), nope + rope, v_dim)


def query_heads(fields: Fields) -> int:
    """Number of query heads; the largest where it differs by layer."""
    heads = fields.need("num_attention_heads")
    if isinstance(heads, list) and heads:
        heads = max(heads)
    return fields.as_count("num_attention_heads", heads)


def attention_shapes(fields: Fields, layers: Sequence[Layer]) -> list[Shape | None]:
    """The KV shape of every layer with an attention cache, None for the others.

    Raises ConfigError for a missing head count or a head size that is not a whole number.
    """
    if all(layer.kind is None for layer in layers):
        return [None] * len(layers)
    usual = _per_layer(fields, len(layers))
    own = {LayerKind.WINDOW: _window_shape(fields), LayerKind.FULL: _global_shape(fields)}
    shapes: list[Shape | None] = []
    for layer, shape in zip(layers, usual, strict=True):
        if layer.kind is None or shape is None:
            shapes.append(None)
        else:
            heads, k_dim, v_dim = own.get(layer.kind, (None, None, None))
            shapes.append(Shape(heads or shape.kv_heads, k_dim or shape.k_dim, v_dim or shape.v_dim))
    return shapes


def _per_layer(fields: Fields, count: int) -> list[Shape | None]:
    blocks = fields.data.get("block_configs")
    heads: list[Any]
    if isinstance(blocks, list):
        heads = [_nas_heads(fields, block) for block in blocks]
    else:
        value = kv_heads(fields)
        heads = list(value) if isinstance(value, list) else [value] * count
        if len(heads) != count:
            where = fields.sources["num_key_value_heads"]
            raise ConfigError(f"{where} has {len(heads)} entries but the model has {count} layers.")
        _require_multiples(fields, heads)
    k_dim = head_dim(fields)
    v_dim = fields.maybe_count("v_head_dim") or k_dim
    return [Shape(h, k_dim, v_dim) if h else None for h in heads]


def _require_multiples(fields: Fields, kept: list[Any]) -> None:
    """Each KV head serves the same number of query heads: in every layer these must be a multiple of those."""
    given = fields.need("num_attention_heads")
    queries = given if isinstance(given, list) and len(given) == len(kept) else [query_heads(fields)] * len(kept)
    for asking, heads in zip(queries, kept, strict=True):
        if heads and fields.as_count("num_attention_heads", asking or heads) % heads:
            raise ConfigError(
                f"{fields.sources['num_attention_heads']} {asking} is not a multiple of "
                f"{fields.sources['num_key_value_heads']} {heads}: each KV head must serve as many query heads as "
                "the others; correct the config."
            )


def kv_heads(fields: Fields) -> int | list[int]:
    """Number of KV heads, or one number per layer.

    multi_query true means one KV head whatever the count says, unless new_decoder_architecture is true:
    Falcon-7B publishes num_kv_heads 71 and caches one. MPT says it in attn_config.attn_type, ChatGLM in
    multi_query_group_num.
    """
    attention = fields.data.get("attn_config")
    kind = attention.get("attn_type") if isinstance(attention, dict) else None
    if kind == "multiquery_attention":
        return int(fields.derived("num_key_value_heads", 1, f"{fields.prefix}attn_config.attn_type {kind}"))
    if fields.data.get("multi_query") and not fields.find("new_decoder_architecture"):
        why = f"{fields.prefix}multi_query is true and new_decoder_architecture is not"
        return int(fields.derived("num_key_value_heads", 1, why))
    if fields.data.get("multi_query_attention"):
        return fields.count("multi_query_group_num")
    value = fields.find("num_key_value_heads")
    if isinstance(value, list):
        return [fields.as_count("num_key_value_heads", v) if v else 0 for v in value]
    if value is not None:
        return fields.as_count("num_key_value_heads", value)
    if fields.family in MULTI_HEAD:
        why = f"{fields.family} is multi-head attention"
    elif fields.family in KV_HEADS_DEFAULT_TO_HEADS:
        why = f"family default of {fields.family} in transformers"
    else:
        raise fields.missing("num_key_value_heads")
    heads = query_heads(fields)
    fields.derived("num_key_value_heads", heads, f"num_attention_heads ({why})")
    return heads


def _nas_heads(fields: Fields, block: Any) -> int | None:
    """Nemotron-NAS gives query heads per KV head, block by block."""
    group = block["attention"].get("n_heads_in_group")
    if group is None:
        return None
    heads, size = query_heads(fields), fields.as_count("n_heads_in_group", group)
    if heads % size:
        raise ConfigError(f"num_attention_heads {heads} is not a multiple of n_heads_in_group {size}.")
    fields.sources["num_key_value_heads"] = (
        f"num_attention_heads / {fields.prefix}block_configs[i].attention.n_heads_in_group"
    )
    return heads // size


def head_dim(fields: Fields) -> int:
    """Width of a head: `head_dim`, or hidden_size / num_attention_heads where that is a whole number."""
    given = fields.maybe_count("head_dim")
    if given is not None:
        return given
    hidden, heads = fields.count("hidden_size"), query_heads(fields)
    if hidden % heads:
        raise ConfigError(
            f"head_dim is missing and hidden_size / num_attention_heads = {hidden} / {heads} = "
            f"{hidden / heads:g} is not a whole number: add head_dim to the config."
        )
    width = hidden // heads
    fields.derived("head_dim", width, f"hidden_size / num_attention_heads = {hidden} / {heads} = {width}")
    return width


#: KV heads, k_dim, v_dim of one kind of layer; None: as usual.
_Own = tuple[int | None, int | None, int | None]


def _window_shape(fields: Fields) -> _Own:
    """Sliding layers with a shape of their own: MiMo-V2 (swa_*) and Step-3.5 (attention_other_setting)."""
    other = fields.data.get("attention_other_setting")
    if isinstance(other, dict):
        where = f"{fields.prefix}attention_other_setting"
        fields.sources["num_key_value_heads (sliding)"] = f"{where}.num_attention_groups"
        heads = fields.as_count(f"{where}.num_attention_groups", other.get("num_attention_groups"))
        width = fields.as_count(f"{where}.head_dim", other.get("head_dim"))
        return heads, width, width
    k_dim = fields.maybe_count("swa_head_dim")
    return fields.maybe_count("swa_num_key_value_heads"), k_dim, fields.maybe_count("swa_v_head_dim") or k_dim


def _global_shape(fields: Fields) -> _Own:
    """Gemma 4: full layers have their own head size, and head count when K and V share a projection."""
    width = fields.maybe_count("global_head_dim")
    if width is None:
        return None, None, None
    heads = fields.maybe_count("num_global_key_value_heads") if fields.data.get("attention_k_eq_v") else None
    return heads, width, width
