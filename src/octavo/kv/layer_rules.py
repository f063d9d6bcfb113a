"""The kinds of layers, and the rules by which the families of transformers lay them out.

Each rule repeats what the family's configuration class in transformers 5.24 does when a config has no layer
list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from octavo.kv.families import (
    ALL_LAYERS_SLIDE,
    EVERY_NTH_ATTENDS,
    EVERY_NTH_FULL,
    WINDOW_OFF_BY_DEFAULT,
)
from octavo.kv.fields import ConfigError, Fields


class LayerKind(Enum):
    """What a layer's cache grows like."""

    FULL = "full"  # one entry per token, for ever
    WINDOW = "window"  # only the last `window` tokens are needed
    CHUNKED = "chunked"  # only the tokens of the current chunk of `window` tokens are needed
    LATENT = "latent"  # MLA: one compressed entry per token, shared by all heads
    STATE = "state"  # a recurrent state of fixed size


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. `kind` None: no attention cache. `reads`: the layer whose KV it reads, itself storing
    nothing.
    """

    kind: LayerKind | None
    window: int | None = None
    state: bool = False
    reads: int | None = None


FULL, WINDOW, CHUNKED = Layer(LayerKind.FULL), Layer(LayerKind.WINDOW), Layer(LayerKind.CHUNKED)
STATE, BOTH, NONE = Layer(None, state=True), Layer(LayerKind.FULL, state=True), Layer(None)

#: Layer names in published layer lists. Sparse attention that selects among kept keys is full attention here.
NAMES: Mapping[str, Layer] = {
    **dict.fromkeys(("full_attention", "attention", "full", "global", "global_attention"), FULL),
    **dict.fromkeys(("indexed_attention", "deepseek_sparse_attention", "minimax_m3_sparse"), FULL),
    **dict.fromkeys(("sliding_attention", "sliding", "local", "local_attention"), WINDOW),
    "chunked_attention": CHUNKED,
    **dict.fromkeys(("linear_attention", "mamba", "recurrent", "conv"), STATE),
    "hybrid": BOTH,
    **dict.fromkeys(("mlp", "moe"), NONE),
}


def named(fields: Fields, name: str, names: Any, count: int) -> list[Layer]:
    where = fields.sources.get(name, name)
    if not isinstance(names, (list, tuple)):
        raise ConfigError(f"{where} is {names!r}; it must be a list with one name per layer.")
    extra = fields.data.get("num_nextn_predict_layers") or 0
    if len(names) == count + extra:  # the list also covers the draft (multi-token prediction) layers
        names = names[:count]
    unknown = sorted({str(n) for n in names if not isinstance(n, str) or n not in NAMES})
    if unknown:
        raise ConfigError(
            f"{where} has layers of kind {', '.join(unknown)}, whose cache Octavo cannot size; "
            f"known kinds: {', '.join(NAMES)}."
        )
    check_length(where, len(names), count)
    fields.sources["layer_kinds"] = where
    return [NAMES[n] for n in names]


def marked(fields: Fields, name: str, marks: Any, count: int, kinds: Mapping[Any, Layer]) -> list[Layer]:
    """Layer kinds from one mark per layer: a list of numbers or the characters of a string."""
    where = fields.prefix + name
    if not isinstance(marks, (list, tuple, str)) or any(m not in kinds for m in marks):
        raise ConfigError(f"{where} is {marks!r}; it must be one of {list(kinds)} per layer.")
    check_length(where, len(marks), count)
    fields.sources["layer_kinds"] = where
    return [kinds[m] for m in marks]


def check_length(where: str, got: int, count: int) -> None:
    if got != count:
        raise ConfigError(f"{where} has {got} entries but the model has {count} layers; they must agree.")


def _window_given(fields: Fields) -> bool:
    """Whether a sliding family really has a window: null means none, absence is an error."""
    if fields.data.get("use_sliding_window") is False:
        return False
    if fields.find("sliding_window") is None:
        if "sliding_window" not in fields.data:
            raise fields.missing("sliding_window")
        return False
    return True


def _every_nth_full(fields: Fields, count: int) -> list[Layer]:
    if not _window_given(fields):
        return [FULL] * count
    pattern = fields.data.get("sliding_window_pattern", fields.data.get("global_attn_every_n_layers"))
    if isinstance(pattern, str) and pattern:  # EXAONE-4: "LLLG", repeated
        fields.sources["layer_kinds"] = f"{fields.prefix}sliding_window_pattern"
        return [WINDOW if pattern[i % len(pattern)] == "L" else FULL for i in range(count)]
    if pattern is not None:
        period = fields.as_count("sliding_window_pattern", pattern)
        source = f"{fields.prefix}sliding_window_pattern"
    else:
        period = EVERY_NTH_FULL[fields.family]
        source = f"family default of {fields.family} in transformers"
    fields.sources["layer_kinds"] = f"every {period}th layer is full, the others slide ({source})"
    return [WINDOW if (i + 1) % period else FULL for i in range(count)]


def _every_nth_attends(fields: Fields, count: int) -> list[Layer]:
    given = fields.maybe_count("full_attention_interval")
    period = given or EVERY_NTH_ATTENDS[fields.family]
    source = fields.sources.get("full_attention_interval", f"family default of {fields.family} in transformers")
    fields.sources["layer_kinds"] = f"every {period}th layer attends, the others keep a state ({source})"
    return [STATE if (i + 1) % period else FULL for i in range(count)]


def _all_slide(fields: Fields, count: int) -> list[Layer]:
    slides = fields.data.get("use_sliding_window") is not False and fields.find("sliding_window") is not None
    if slides:
        fields.sources["layer_kinds"] = f"every layer slides: {fields.sources['sliding_window']}"
    else:
        fields.sources["layer_kinds"] = "every layer is full attention: no sliding_window"
    return [WINDOW if slides else FULL] * count


def _qwen(fields: Fields, count: int) -> list[Layer]:
    """Qwen: the window counts only with use_sliding_window true, and then from layer max_window_layers on."""
    if fields.data.get("use_sliding_window") is not True:
        if fields.data.get("sliding_window"):
            fields.notes.append(f"{fields.prefix}sliding_window is ignored: use_sliding_window is not true.")
        fields.sources["layer_kinds"] = "every layer is full attention: use_sliding_window is not true"
        return [FULL] * count
    if fields.family == "qwen3_moe":
        return _all_slide(fields, count)
    first = fields.data.get("max_window_layers")
    if not isinstance(first, int):
        raise fields.missing("max_window_layers")
    fields.sources["layer_kinds"] = f"{fields.prefix}max_window_layers {first}"
    if fields.family == "qwen2_moe":
        return [WINDOW if i < first and (i + 1) % 2 else FULL for i in range(count)]
    return [WINDOW if i >= first else FULL for i in range(count)]


def _llama4(fields: Fields, count: int) -> list[Layer]:
    """Chunked attention where the layer has rotary positions; every 4th has none and is global."""
    if fields.find("attention_chunk_size") is None:
        if "attention_chunk_size" not in fields.data:
            raise fields.missing("attention_chunk_size")
        return [FULL] * count
    marks = fields.data.get("no_rope_layers")
    if marks:
        return marked(fields, "no_rope_layers", marks, count, {1: CHUNKED, 0: FULL})
    period = fields.maybe_count("no_rope_layer_interval") or 4
    fields.sources["layer_kinds"] = f"every {period}th layer is global (family default of llama4_text in transformers)"
    return [CHUNKED if (i + 1) % period else FULL for i in range(count)]


def _mimo(fields: Fields, count: int) -> list[Layer]:
    marks = fields.need("hybrid_layer_pattern")
    return marked(fields, "hybrid_layer_pattern", marks, count, {0: FULL, 1: WINDOW})


def _nemotron_h(fields: Fields, count: int) -> list[Layer]:
    marks = fields.need("hybrid_override_pattern")
    return marked(fields, "hybrid_override_pattern", marks, count, {"M": STATE, "*": FULL, "-": NONE, "E": NONE})


def _jamba(fields: Fields, count: int) -> list[Layer]:
    period, offset = fields.count("attn_layer_period"), fields.need("attn_layer_offset")
    fields.sources["layer_kinds"] = f"layers i with i % attn_layer_period {period} == attn_layer_offset {offset} attend"
    return [FULL if i % period == offset else STATE for i in range(count)]


def _indexed(name: str, attending: Layer = FULL) -> Callable[[Fields, int], list[Layer]]:
    """A rule for configs that list the indices of the attention layers; the others keep a state."""

    def rule(fields: Fields, count: int) -> list[Layer]:
        chosen = set(fields.need(name))
        fields.sources["layer_kinds"] = f"{fields.prefix}{name}"
        return [attending if i in chosen else STATE for i in range(count)]

    return rule


def _recurrent_gemma(fields: Fields, count: int) -> list[Layer]:
    names = fields.need("block_types")
    fields.sources["layer_kinds"] = f"{fields.prefix}block_types, repeated"
    return [STATE if names[i % len(names)] == "recurrent" else WINDOW for i in range(count)]


def _kimi_linear(fields: Fields, count: int) -> list[Layer]:
    lists = fields.need("linear_attn_config")
    attending = set(lists.get("full_attn_layers") or ())
    states = set(lists.get("kda_layers") or ())
    if attending | states != set(range(1, count + 1)):  # the published lists count from 1
        raise ConfigError(f"{fields.prefix}linear_attn_config must list each of the {count} layers exactly once.")
    fields.sources["layer_kinds"] = f"{fields.prefix}linear_attn_config"
    return [FULL if i + 1 in attending else STATE for i in range(count)]


def _grouped(fields: Fields, count: int) -> list[Layer]:
    period = fields.count("layer_group_size")
    fields.sources["layer_kinds"] = f"every {period}th layer attends ({fields.prefix}layer_group_size)"
    return [STATE if (i + 1) % period else FULL for i in range(count)]


def _gpt_neo(fields: Fields, count: int) -> list[Layer]:
    names = fields.data.get("attention_layers")
    if not names:
        groups = [(list(p), fields.as_count("attention_types", n)) for p, n in fields.need("attention_types")]
        if sum(len(pattern) * times for pattern, times in groups) != count:
            raise ConfigError(
                f"{fields.prefix}attention_types names another number of layers than {count}: correct it."
            )
        names = [n for pattern, times in groups for _ in range(times) for n in pattern]
    fields.sources["attention_layers"] = f"{fields.prefix}attention_layers"
    return named(fields, "attention_layers", names, count)


def _everywhere(layer: Layer) -> Callable[[Fields, int], list[Layer]]:
    return lambda _fields, count: [layer] * count


#: Family → the rule that gives the kinds of its layers.
RULES: Mapping[str, Callable[[Fields, int], list[Layer]]] = {
    **dict.fromkeys(ALL_LAYERS_SLIDE, _all_slide),
    **dict.fromkeys(WINDOW_OFF_BY_DEFAULT, _qwen),
    "llama4_text": _llama4,
    **dict.fromkeys(("mimo_v2_flash", "mimo_v2"), _mimo),
    "nemotron_h": _nemotron_h,
    "jamba": _jamba,
    "bamba": _indexed("attn_layer_indices"),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _indexed("full_attn_idxs")),
    "zamba2": _indexed("hybrid_layer_ids", BOTH),
    "falcon_h1": _everywhere(BOTH),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), _everywhere(STATE)),
    "recurrent_gemma": _recurrent_gemma,
    "kimi_linear": _kimi_linear,
    "bailing_hybrid": _grouped,
    "gpt_neo": _gpt_neo,
    **dict.fromkeys(EVERY_NTH_FULL, _every_nth_full),
    **dict.fromkeys(EVERY_NTH_ATTENDS, _every_nth_attends),
}
