"""Reading a model's config: under which of its names a value stands, where, and a record of both.

A field that is absent is an error that names it, the names tried and the place looked in. The only values
not read from the config are those of the closed table `octavo.kv.families.DEFAULTS`, and they say so in
`Fields.sources`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import OctavoError
from octavo.kv.families import CANONICAL, DEFAULTS


class ConfigError(OctavoError, ValueError):
    """A model config that does not say enough, contradicts itself, or is of a kind Octavo cannot size."""


MOST = 2**48  # of anything a config counts

#: Sub-configs that hold the language model, outermost first. Vision and audio towers are never read.
NESTED = ("thinker_config", "text_config", "llm_config", "language_config", "language_model_config")

#: Other names of a field in published configs; a dot reaches into a sub-mapping.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "num_transformer_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "num_query_heads", "attention_heads"),
    "hidden_size": ("n_embd", "n_embed", "d_model", "model_dim"),
    "num_key_value_heads": (
        "num_kv_heads",
        "n_head_kv",
        "n_kv_heads",
        "num_attention_groups",
        "num_key_value_heads_per_layer",
        "attn_config.kv_n_heads",
    ),
    "head_dim": ("attention_head_dim", "kv_channels", "head_size"),
    "max_position_embeddings": (
        "n_positions",
        "max_seq_len",
        "max_sequence_length",
        "seq_length",
        "model_max_length",
        "max_context_length",
        "n_ctx",
    ),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "ffn_hidden", "d_ff"),
    "vocab_size": ("padded_vocab_size",),
    "sliding_window": ("attention_window_size", "sliding_window_size", "window_size"),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts", "ffn_config.moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_token", "top_k_experts", "moe_top_k", "moe_topk", "moe_k"),
    "moe_intermediate_size": ("expert_ffn_hidden_size", "ffn_config.ffn_hidden_size"),
    "torch_dtype": ("dtype",),
    "ssm_dtype": ("mamba_ssm_dtype", "mamba_ssm_cache_dtype"),
    "layer_types": ("layers_block_type", "layer_block_types"),
}


class Fields:
    """The language model's part of a config, with every value's origin recorded in `sources`.

    `names` maps a field to the name it has in the original file where that is not a config.json (GGUF
    metadata). `prefix` is the path of the part that is read, such as "thinker_config.text_config." or "".
    """

    def __init__(self, config: Mapping[str, Any], names: Mapping[str, str] | None = None) -> None:
        if not isinstance(config, Mapping):
            raise ConfigError(f"The model config is a {type(config).__name__}; it must be a JSON object.")
        self.top: Mapping[str, Any] = config
        self.data, self.prefix = _language_part(config)
        self.names: Mapping[str, str] = names or {}
        self.sources: dict[str, str] = {}
        self.values: dict[str, Any] = {}  # the single numbers and names that were read, for showing
        self.notes: list[str] = []
        family = self.data.get("model_type") or config.get("model_type")
        self.family: str = CANONICAL.get(family, family) if isinstance(family, str) else ""

    def find(self, name: str) -> Any:
        """The value of `name` or of one of its aliases, or None; null counts as absent. Records the
        origin.
        """
        for key in (name, *ALIASES.get(name, ())):
            value = _reach(self.data, key)
            if value is not None:
                return self.derived(name, value, self.names.get(key, f"{self.prefix}{key}"))
        if name in DEFAULTS.get(self.family, {}):
            default = DEFAULTS[self.family][name]
            return self.derived(name, default, f"family default of {self.family} in transformers")
        return None

    def derived(self, name: str, value: Any, source: str) -> Any:
        """Record that `name` has `value` because of `source`, and return the value."""
        self.sources[name] = source
        if not isinstance(value, (list, tuple, Mapping)):
            self.values[name] = value
        return value

    def anywhere(self, name: str) -> Any:
        """Like `find`, but a field that is not about dimensions may also stand at the top of the config."""
        value = self.find(name)
        if value is None:
            for key in (name, *ALIASES.get(name, ())):
                if self.top.get(key) is not None:
                    return self.derived(name, self.top[key], key)
        return value

    def need(self, name: str) -> Any:
        """Like `find`, but absence is a ConfigError that says what was tried and where."""
        value = self.find(name)
        if value is None:
            raise self.missing(name)
        return value

    def count(self, name: str) -> int:
        """A field that must be a positive integer."""
        return self.as_count(name, self.need(name))

    def maybe_count(self, name: str) -> int | None:
        """A positive integer, or None when the field is absent or null."""
        value = self.find(name)
        return None if value is None else self.as_count(name, value)

    def as_count(self, name: str, value: Any) -> int:
        """`value` of the field `name` as a positive integer; anything else is a ConfigError."""
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or value < 1:
            where = self.sources.get(name, name)
            raise ConfigError(f"{where} is {value!r}; it must be a whole number of at least 1.")
        if value > MOST:
            where = self.sources.get(name, name)
            raise ConfigError(f"{where} is {value:.3g}; it must be at most {MOST}: correct the config.")
        return int(value)

    def missing(self, name: str) -> ConfigError:
        """The error for an absent field: its name, the names tried, and where they were looked for."""
        tried = ", ".join(self.names.get(key, key) for key in (name, *ALIASES.get(name, ())))
        where = self.prefix.rstrip(".") or ("the GGUF header" if self.names else "the top level of the config")
        named = self.data.get("_name_or_path")
        hint = f" {where} only names another model ({named}): size that one." if self.prefix and named else ""
        return ConfigError(f"{name} is missing: looked in {where} for {tried}.{hint} Octavo does not guess it.")


def _reach(data: Mapping[str, Any], path: str) -> Any:
    value: Any = data
    for part in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def _language_part(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The innermost language-model mapping and the path to it."""
    data, prefix = config, ""
    while True:
        for key in NESTED:
            if isinstance(data.get(key), Mapping):
                data, prefix = data[key], f"{prefix}{key}."
                break
        else:
            return data, prefix
