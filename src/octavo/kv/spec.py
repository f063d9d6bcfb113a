"""KV bytes of a model, from its config alone: one group of layers per kind of cache, each with its formula.

    spec = spec_from_config(config, kv_dtype="bf16", tp=1)
    spec.bytes_per_token        before any window is full
    spec.growing, spec.windowed the part that grows for ever, and the part that stops at its window
    spec.fixed_bytes            recurrent state per sequence

All bytes are those of one tensor-parallel rank. Nothing is guessed: a missing field is a `ConfigError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.kv.dtypes import KVDtype
from octavo.kv.dtypes import kv_dtype as dtype_named
from octavo.kv.fields import ConfigError, Fields
from octavo.kv.heads import MLAShape, Shape, attention_shapes, mla_shape, query_heads
from octavo.kv.layer_rules import Layer, LayerKind
from octavo.kv.layers import layer_plan
from octavo.kv.state import element_bytes, layer_state

__all__ = ["ConfigError", "KVSpec", "LayerGroup", "LayerKind", "MLABytes", "spec_from_config"]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose caches have one shape and one lifetime.

    layers           indices of the layers that own a cache
    kv_heads         KV heads held by one rank (1 for a latent, 0 for a state)
    k_dim, v_dim     values of K and V per head and token (v_dim 0 for a latent: V is computed from it)
    window           tokens needed at most, None: all
    bytes_per_token  all layers of the group, one rank, scales included
    fixed_bytes      per sequence, all layers of the group, one rank (recurrent state)
    formula          how the bytes come about
    """

    kind: LayerKind
    layers: tuple[int, ...]
    kv_heads: int
    k_dim: int
    v_dim: int
    window: int | None
    bytes_per_token: int
    fixed_bytes: int
    formula: str

    @property
    def cap_bytes(self) -> int | None:
        """Most bytes one sequence needs here, None when it grows without limit."""
        if self.kind is LayerKind.STATE:
            return self.fixed_bytes
        return None if self.window is None else self.window * self.bytes_per_token


@dataclass(frozen=True, slots=True)
class MLABytes:
    """Bytes per token of both ways to store multi-head latent attention, all layers, one rank."""

    form: str  # the one that the spec's groups assume: "latent" or "expanded"
    latent: int
    expanded: int
    formula_latent: str
    formula_expanded: str


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What a model caches. `values` are the numbers used, `sources` their config paths or derivations."""

    model_type: str
    groups: tuple[LayerGroup, ...]
    dtype: str
    tp: int
    num_layers: int
    num_attention_heads: int | None  # None for models without attention
    max_positions: int | None  # None when the config gives no length
    mla: MLABytes | None = None
    #: layer → the layer whose KV it reads
    shared: Mapping[int, int] = field(default_factory=dict, hash=False)
    uncached: tuple[int, ...] = ()  # layers that keep nothing at all
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    values: Mapping[str, Any] = field(default_factory=dict, hash=False)
    notes: tuple[str, ...] = ()

    @property
    def growing(self) -> int:
        """Bytes per token of the groups that grow without limit."""
        return sum(g.bytes_per_token for g in self.groups if g.window is None)

    @property
    def windowed(self) -> int:
        """Bytes per token of the windowed and chunked groups, while their window is not full."""
        return sum(g.bytes_per_token for g in self.groups if g.window is not None)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token before any window is full: no layer is left out."""
        return self.growing + self.windowed

    @property
    def windowed_cap(self) -> int:
        """Bytes at which the windowed part of a sequence stops growing."""
        return sum(g.window * g.bytes_per_token for g in self.groups if g.window is not None)

    @property
    def window_tokens(self) -> int | None:
        """The longest window, None without one."""
        return max((g.window for g in self.groups if g.window is not None), default=None)

    @property
    def fixed_bytes(self) -> int:
        """Recurrent state per sequence."""
        return sum(g.fixed_bytes for g in self.groups)

    @property
    def owners(self) -> int:
        """Number of layers that own a cache (KV or state)."""
        return len({layer for g in self.groups for layer in g.layers})

    def bytes_at(self, tokens: int) -> int:
        """Bytes of a sequence of `tokens` when what left a window is freed at once; no block rounding."""
        spans = (min(tokens, g.window or tokens) * g.bytes_per_token for g in self.groups)
        return sum(spans) + self.fixed_bytes

    def bytes_unwindowed(self, tokens: int) -> int:
        """Bytes of a sequence when all layers share pages, so that windowed layers keep everything."""
        return tokens * self.bytes_per_token + self.fixed_bytes


def spec_from_config(
    config: Mapping[str, Any],
    *,
    kv_dtype: str = "bf16",
    tp: int = 1,
    mla_form: str = "latent",
    names: Mapping[str, str] | None = None,
) -> KVSpec:
    """Read a model config (the parsed config.json) into a `KVSpec`.

    kv_dtype   one of `dtypes.FORMATS`: float32, bf16, fp16, int8, fp8 …; quantised ones count their scales
    tp         tensor-parallel degree: KV heads are split over min(tp, KV heads) ranks and replicated beyond;
               an MLA latent is held whole by every rank
    mla_form   "latent" (absorbed) or "expanded" (K and V per head); ignored by models without MLA
    names      field → its name in the original file, where that is not a config.json

    Raises ConfigError with the field, its value, the limit and the remedy.
    """
    dtype = dtype_named(kv_dtype)
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        raise ConfigError(f"tp is {tp!r}; it must be a whole number of at least 1.")
    if mla_form not in ("latent", "expanded"):
        raise ConfigError(f"mla_form is {mla_form!r}; it must be latent or expanded.")
    fields = Fields(config, names)
    if fields.data.get("is_encoder_decoder") or fields.top.get("is_encoder_decoder"):
        raise ConfigError("is_encoder_decoder is true; Octavo sizes decoder-only models.")
    positions = _max_positions(fields)
    layers = layer_plan(fields, positions)
    heads = query_heads(fields) if any(layer.kind for layer in layers) else None
    if heads is not None and heads % tp:
        raise ConfigError(f"num_attention_heads {heads} is not a multiple of tp {tp}: choose a tp that divides it.")
    mla = _mla_bytes(fields, layers, dtype, tp, mla_form)
    _note_side_caches(fields, layers, dtype)
    groups = [*_attention_groups(fields, layers, dtype, tp, mla), *_state_groups(fields, layers, tp)]
    return KVSpec(
        model_type=fields.family,
        groups=tuple(groups),
        dtype=dtype.name,
        tp=tp,
        num_layers=len(layers),
        num_attention_heads=heads,
        max_positions=positions,
        mla=mla[1] if mla else None,
        shared={i: layer.reads for i, layer in enumerate(layers) if layer.reads is not None},
        uncached=tuple(i for i, layer in enumerate(layers) if layer.kind is None and not layer.state),
        sources=fields.sources,
        values=fields.values,
        notes=tuple(fields.notes),
    )


def _attention_groups(
    fields: Fields, layers: Sequence[Layer], dtype: KVDtype, tp: int, mla: tuple[MLAShape, MLABytes] | None
) -> list[LayerGroup]:
    """One group per kind, window and shape, in the order of their first layers."""
    owners = [i for i, layer in enumerate(layers) if layer.kind is not None and layer.reads is None]
    if mla is not None:
        shape, both = mla
        if both.form == "latent":
            width = shape.latent + shape.rope
            kind, dims = LayerKind.LATENT, (1, width, 0)
            total, formula = both.latent, both.formula_latent
        else:
            kind, dims = LayerKind.FULL, (shape.heads // tp, shape.k_dim, shape.v_dim)
            total, formula = both.expanded, both.formula_expanded
        return [LayerGroup(kind, tuple(owners), *dims, None, total, 0, formula)]
    shapes = attention_shapes(fields, layers)
    members: dict[tuple[LayerKind, int | None, Shape], list[int]] = {}
    for i in owners:
        kind_of, shape_of = layers[i].kind, shapes[i]
        if kind_of is not None and shape_of is not None:
            members.setdefault((kind_of, layers[i].window, shape_of), []).append(i)
    return [_group(*key, tuple(found), dtype, tp) for key, found in members.items()]


def _group(
    kind: LayerKind, window: int | None, shape: Shape, layers: tuple[int, ...], dtype: KVDtype, tp: int
) -> LayerGroup:
    heads = _heads_per_rank(shape.kv_heads, tp)
    row = dtype.row_bytes(shape.k_dim) + dtype.row_bytes(shape.v_dim)
    total = len(layers) * heads * row
    dims = f"2 x {shape.k_dim}" if shape.k_dim == shape.v_dim else f"({shape.k_dim} + {shape.v_dim})"
    split = "" if tp == 1 else f" (of {shape.kv_heads}, TP {tp})"
    formula = f"{len(layers)} {kind.value} layers x {heads} KV heads{split} x {dtype.formula(dims, 2)} = {total}"
    if window is not None:
        formula += f"; x {window} tokens = {total * window} at most"
    return LayerGroup(kind, layers, heads, shape.k_dim, shape.v_dim, window, total, 0, formula)


def _heads_per_rank(kv_heads: int, tp: int) -> int:
    """KV heads of one rank: split while ranks last, then replicated."""
    if kv_heads % tp and tp % kv_heads:
        raise ConfigError(
            f"num_key_value_heads {kv_heads} and tp {tp} do not divide each other: the heads can "
            "neither be split nor be replicated evenly; choose another tp."
        )
    return max(1, kv_heads // tp)


def _mla_bytes(
    fields: Fields, layers: Sequence[Layer], dtype: KVDtype, tp: int, form: str
) -> tuple[MLAShape, MLABytes] | None:
    shape = mla_shape(fields)
    if shape is None:
        return None
    odd = {layer.kind.value for layer in layers if layer.kind not in (None, LayerKind.FULL) and layer.kind}
    if odd:
        raise ConfigError(
            f"{fields.sources['kv_lora_rank']} says MLA, but there are {', '.join(sorted(odd))} layers: "
            "Octavo has no rule for MLA with windows."
        )
    count = sum(layer.kind is not None and layer.reads is None for layer in layers)
    heads = shape.heads // tp
    latent = count * dtype.row_bytes(shape.latent + shape.rope)
    expanded = count * heads * (dtype.row_bytes(shape.k_dim) + dtype.row_bytes(shape.v_dim))
    ranks = "" if tp == 1 else f" on each of {tp} ranks"
    both = MLABytes(
        form=form,
        latent=latent,
        expanded=expanded,
        formula_latent=(
            f"{count} MLA layers x {dtype.formula(f'({shape.latent} + {shape.rope})', 1)} = {latent}{ranks}"
        ),
        formula_expanded=(
            f"{count} MLA layers x {heads} heads x {dtype.formula(f'({shape.k_dim} + {shape.v_dim})', 2)} = {expanded}"
        ),
    )
    return shape, both


def _state_groups(fields: Fields, layers: Sequence[Layer], tp: int) -> list[LayerGroup]:
    owners = tuple(i for i, layer in enumerate(layers) if layer.state)
    if not owners:
        return []
    state = layer_state(fields, tp)
    ssm, conv = element_bytes(fields)
    total = len(owners) * (state.ssm * ssm + state.conv * conv)
    sizes = f"{ssm} B" if ssm == conv else f"ssm {ssm} B, conv {conv} B"
    formula = f"{len(owners)} state layers x ({state.formula}) at {sizes} = {total} per sequence"
    if ssm != 2:
        at_two = len(owners) * 2 * (state.ssm + state.conv)
        fields.notes.append(f"With every state element at 2 B the state is {at_two} B per sequence.")
    return [LayerGroup(LayerKind.STATE, owners, 0, 0, 0, None, 0, total, formula)]


def _note_side_caches(fields: Fields, layers: Sequence[Layer], dtype: KVDtype) -> None:
    """Say what is kept beside K and V and not counted: the keys of sparse-attention indexers."""
    sparse = fields.data.get("sparse_attention_config")
    width = fields.maybe_count("index_head_dim")
    marked = len(layers)
    if width is None and isinstance(sparse, Mapping) and sparse.get("sparse_index_dim"):
        width = fields.as_count("sparse_index_dim", sparse["sparse_index_dim"])
        marked = sum(bool(mark) for mark in sparse.get("sparse_attention_freq") or [1] * len(layers))
    if width is not None:
        fields.notes.append(
            f"Not counted: the sparse-attention indexer keeps one more {width}-wide key per token in "
            f"{marked} layers, {marked * dtype.row_bytes(width)} B per token at {dtype.name}."
        )


def _max_positions(fields: Fields) -> int | None:
    """The model's length: max_position_embeddings, stretched by rope_scaling where that is not yet in it.

    The rule is vLLM's (`_get_and_verify_max_len`): linear, dynamic and yarn multiply their original length;
    Gemma 3 publishes the stretched length already; the others (llama3, longrope, su, mrope) do not stretch.
    """
    length = fields.maybe_count("max_position_embeddings")
    scaling = fields.data.get("rope_scaling") or fields.data.get("rope_parameters")
    if length is None or not isinstance(scaling, Mapping) or fields.family == "gemma3_text":
        return length
    kind = scaling.get("rope_type", scaling.get("type"))
    factor = scaling.get("factor")
    if kind not in ("linear", "dynamic", "yarn") or not isinstance(factor, (int, float)):
        return length
    if not 0 < factor < 1e9:
        raise ConfigError(f"{fields.prefix}rope_scaling.factor is {factor}; it must be a number above 0 and below 1e9.")
    given = scaling.get("original_max_position_embeddings")
    original = length if given is None else fields.as_count("original_max_position_embeddings", given)
    stretched = int(original * factor)
    if stretched <= length:
        return length
    where = fields.sources["max_position_embeddings"]
    why = f"{where} {length}, {kind} factor {factor:g} x {original} = {stretched}"
    return int(fields.derived("max_position_embeddings", stretched, why))
