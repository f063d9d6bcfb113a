"""Which layers of a model keep what: full or windowed KV, a recurrent state, nothing, or another layer's KV.

The kinds come from the config's own layer list where it has one, else from the family's rule in
`octavo.kv.layer_rules`. A family without a rule is taken as plain full attention only if nothing in its
config speaks of windows, chunks, recurrence or sharing; otherwise it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from octavo.kv.families import REFUSED
from octavo.kv.fields import ConfigError, Fields
from octavo.kv.layer_rules import FULL, NONE, RULES, STATE, WINDOW, Layer, LayerKind, check_length, marked, named

_SUSPECT = re.compile(
    r"sliding|window|chunk_size|chunked|local_att|linear_att|linear_num|mamba|ssm|rwkv|recurrent|lru_|"
    r"conv_kernel|conv_l_cache|hybrid|block_types|block_configs|layer_types|layers_block|layer_group_size|"
    r"attn_layer|attn_type_list|full_attn|cross_attention_layers|global_attn_every|kv_shared|share_kv|kv_share|use_cla|kv_source|compress_ratio",
    re.IGNORECASE,
)
MOST_LAYERS = 10_000  # a hundred times what is published: more is a slip, and every layer is listed
_HARMLESS = frozenset({"use_sliding_window", "max_window_layers", "mlp_layer_types"})


def layer_plan(fields: Fields, max_positions: int | None) -> tuple[Layer, ...]:
    """The kind of every layer, in order; windows filled in, windows that never act taken as full attention.

    Raises ConfigError when the config is incomplete or of a kind that has no rule here.
    """
    if fields.family in REFUSED:
        raise ConfigError(f"model_type {fields.family} is not sized by Octavo: {REFUSED[fields.family]}.")
    count = layer_count(fields)
    layers = _from_list(fields, count)
    if layers is None:
        rule = RULES.get(fields.family)
        layers = rule(fields, count) if rule is not None else _plain(fields, count)
    return _share(fields, _with_windows(fields, layers, max_positions))


def layer_count(fields: Fields) -> int:
    """Number of layers; a layer pattern gives it when the config has no count of its own."""
    pattern = fields.data.get("hybrid_override_pattern")
    if isinstance(pattern, str) and fields.find("num_hidden_layers") is None:
        fields.sources["num_hidden_layers"] = f"length of {fields.prefix}hybrid_override_pattern"
        return len(pattern)
    count = fields.count("num_hidden_layers")
    if count > MOST_LAYERS:
        raise ConfigError(
            f"{fields.sources['num_hidden_layers']} is {count}; Octavo sizes models of at most {MOST_LAYERS} layers: "
            "correct the config."
        )
    if fields.family == "longcat_flash" and fields.data.get("num_hidden_layers") is None:
        fields.sources["num_hidden_layers"] = f"2 attention sub-layers x {fields.prefix}num_layers {count}"
        return 2 * count
    return count


def _from_list(fields: Fields, count: int) -> list[Layer] | None:
    """Layer kinds from a list in the config: names, NAS blocks, or per-layer marks."""
    names = fields.find("layer_types")
    if names is not None:
        return named(fields, "layer_types", names, count)
    marks = fields.data.get("sliding_window_pattern")
    if isinstance(marks, list):
        return marked(fields, "sliding_window_pattern", marks, count, {True: WINDOW, False: FULL})
    if fields.data.get("attn_type_list") is not None:  # MiniMax: 0 lightning attention, 1 softmax attention
        return marked(fields, "attn_type_list", fields.data["attn_type_list"], count, {0: STATE, 1: FULL})
    if isinstance(fields.data.get("block_configs"), list):
        return _nas_blocks(fields, fields.data["block_configs"], count)
    return None


def _nas_blocks(fields: Fields, blocks: Sequence[Any], count: int) -> list[Layer]:
    """Nemotron-NAS: a block has attention only if it is neither `no_op` nor replaced by a linear map."""
    where = fields.prefix + "block_configs"
    check_length(where, len(blocks), count)
    fields.sources["layer_kinds"] = f"{where}[i].attention"
    layers = []
    for index, block in enumerate(blocks):
        attention = block.get("attention") if isinstance(block, Mapping) else None
        if not isinstance(attention, Mapping):
            raise ConfigError(f"{where}[{index}].attention is missing; it says whether the layer has a cache.")
        if attention.get("no_op") or attention.get("replace_with_linear"):
            layers.append(NONE)
        elif attention.get("window_length"):
            layers.append(replace(WINDOW, window=fields.as_count("window_length", attention["window_length"])))
        else:
            layers.append(FULL)
    return layers


def _with_windows(fields: Fields, layers: Sequence[Layer], max_positions: int | None) -> list[Layer]:
    """Give windowed and chunked layers their length."""
    lengths: dict[LayerKind, int | None] = {}
    if any(layer.kind is LayerKind.WINDOW and layer.window is None for layer in layers):
        lengths[LayerKind.WINDOW] = _acting(fields, "sliding_window", max_positions)
    if any(layer.kind is LayerKind.CHUNKED for layer in layers):
        lengths[LayerKind.CHUNKED] = _acting(fields, "attention_chunk_size", max_positions)
    filled = []
    for layer in layers:
        if layer.kind in lengths and layer.window is None:
            window = lengths[layer.kind]
            layer = replace(layer, window=window) if window else replace(layer, kind=LayerKind.FULL)
        filled.append(layer)
    return filled


def _acting(fields: Fields, name: str, max_positions: int | None) -> int | None:
    """The window, or None (with a note) when a value is given that never acts."""
    if fields.data.get("use_sliding_window") is False and name == "sliding_window":
        fields.notes.append(f"{fields.prefix}use_sliding_window is false: the window is ignored.")
        return None
    length = fields.count(name)
    if max_positions is not None and length >= max_positions:
        fields.notes.append(
            f"{fields.sources[name]} {length} is not below the {max_positions} positions of the model: it never acts."
        )
        return None
    return length


def _share(fields: Fields, layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Mark the layers that read the KV of an earlier layer."""
    out, count = list(layers), len(layers)
    shared = fields.data.get("num_kv_shared_layers")
    sources = fields.data.get("kv_source_layers")
    if shared:
        number = fields.as_count("num_kv_shared_layers", shared)
        fields.sources["kv_sharing"] = f"{fields.prefix}num_kv_shared_layers"
        for i in range(max(0, count - number), count):
            owners = [j for j in range(count - number) if layers[j].kind is layers[i].kind]
            if not owners:
                raise ConfigError(
                    f"{fields.prefix}num_kv_shared_layers is {number}: no earlier layer of the kind of "
                    f"layer {i} is left to own a cache."
                )
            out[i] = replace(layers[i], reads=owners[-1])
    elif isinstance(sources, list):
        check_length(fields.prefix + "kv_source_layers", len(sources), count)
        fields.sources["kv_sharing"] = f"{fields.prefix}kv_source_layers"
        out = [
            replace(layer, reads=None if s == i else s) for i, (layer, s) in enumerate(zip(out, sources, strict=True))
        ]
    elif fields.data.get("use_cla"):
        factor = fields.count("cla_share_factor")
        fields.sources["kv_sharing"] = f"{fields.prefix}cla_share_factor"
        out = [replace(layer, reads=i - i % factor if i % factor else None) for i, layer in enumerate(out)]
    return tuple(out)


def _plain(fields: Fields, count: int) -> list[Layer]:
    """Full attention everywhere, if nothing in the config says otherwise."""
    window_off = fields.data.get("use_sliding_window") is False
    suspects = [
        f"{fields.prefix}{key}"
        for key, value in fields.data.items()
        if value and _SUSPECT.search(key) and key not in _HARMLESS
        if not (window_off and key == "sliding_window") and not key.startswith(("vision", "audio", "image", "video"))
        if key not in ("num_kv_shared_layers", "kv_source_layers", "use_cla", "cla_share_factor")
    ]
    if suspects:
        raise ConfigError(
            f"model_type {fields.family or '(absent)'} has {', '.join(suspects)}, which Octavo has no rule "
            "for: its layers may keep a window, a state or compressed entries. Give an explicit layer_types "
            "list in the config."
        )
    fields.sources["layer_kinds"] = "every layer is full attention: the config names no other kind"
    return [FULL] * count
