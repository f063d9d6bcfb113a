"""The fixed state of recurrent layers: elements per sequence, split over tensor-parallel ranks.

Two parts: the recurrent state itself (`ssm`) and the last inputs of the short convolution (`conv`, kernel - 1
columns). Formulas follow the modules of transformers and vLLM (`mamba_utils.py`, MambaStateShapeCalculator).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from octavo.kv.fields import ConfigError, Fields
from octavo.kv.heads import head_dim, query_heads


@dataclass(frozen=True, slots=True)
class State:
    """State of one layer for one sequence on one rank, in elements, and the formula of both parts."""

    ssm: int
    conv: int
    formula: str


def layer_state(fields: Fields, tp: int) -> State:
    """The state of one recurrent layer. Raises ConfigError for a family without a rule here."""
    rule = RULES.get(fields.family)
    if rule is None and fields.maybe_count("linear_num_value_heads") is not None:
        rule = _delta_net
    if rule is None:
        raise ConfigError(
            f"model_type {fields.family or '(absent)'} has recurrent layers whose state Octavo cannot size; "
            f"it knows {', '.join(sorted(RULES))}."
        )
    return rule(fields, tp)


def element_bytes(fields: Fields) -> tuple[int, int]:
    """Bytes per element of (ssm, conv): the model's dtype, unless the config names one for the ssm state."""
    sizes = {"float32": 4, "float16": 2, "bfloat16": 2, "half": 2, "float": 4}
    model = fields.anywhere("torch_dtype")
    conv = sizes.get(str(model).removeprefix("torch."), 2)
    if model is None:
        fields.sources["state dtype"] = "2 B per element: the config names no dtype, 16 bits taken"
    else:
        fields.sources["state dtype"] = f"{fields.sources['torch_dtype']} {model}"
    ssm = fields.find("ssm_dtype")
    if ssm is None:
        return conv, conv
    if str(ssm) not in sizes:
        raise ConfigError(f"{fields.sources['ssm_dtype']} is {ssm!r}; it must be one of {', '.join(sizes)}.")
    fields.sources["state dtype"] = f"{fields.sources['ssm_dtype']} {ssm}, convolution {conv} B per element"
    return sizes[str(ssm)], conv


def _split(what: str, number: int, tp: int) -> int:
    if number % tp:
        raise ConfigError(f"{what} {number} is not a multiple of tp {tp}: choose a tp that divides it.")
    return number // tp


def _first(fields: Fields, *names: str) -> int:
    """The first of several family-specific names of one number."""
    for name in names:
        value = fields.maybe_count(name)
        if value is not None:
            return value
    raise fields.missing(names[0])


def _mamba1(fields: Fields, tp: int) -> State:
    """Selective scan: d_inner x d_state, and d_inner channels of convolution."""
    hidden = fields.count("hidden_size")
    inner = hidden * _first(fields, "mamba_expand", "expand")
    inner = _split("the Mamba inner size", inner, tp)
    state = _first(fields, "mamba_d_state", "state_size")
    kernel = _first(fields, "mamba_d_conv", "conv_kernel", "d_conv")
    return State(inner * state, inner * (kernel - 1), f"ssm {inner} x {state}, conv {inner} x {kernel - 1}")


def _mamba2(fields: Fields, tp: int) -> State:
    """Mamba-2: heads x head_dim x d_state; the convolution also runs over B and C of each group."""
    heads = _first(fields, "mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads")
    width = _mamba2_head(fields, heads)
    state = _first(fields, "ssm_state_size", "mamba_d_state", "state_size")
    kernel = _first(fields, "conv_kernel", "mamba_d_conv")
    groups = _first(fields, "n_groups", "mamba_n_groups", "mamba_ngroups")
    heads = _split("the Mamba head count", heads, tp)
    groups = 1 if groups == 1 else _split("the Mamba group count", groups, tp)  # a single group is replicated
    channels = heads * width + 2 * groups * state
    conv = channels * (kernel - 1)
    formula = f"ssm {heads} x {width} x {state}, conv ({heads * width} + 2 x {groups} x {state}) x {kernel - 1}"
    return State(heads * width * state, conv, formula)


def _mamba2_head(fields: Fields, heads: int) -> int:
    for name in ("mamba_head_dim", "mamba_d_head", "mamba_headdim"):
        value = fields.find(name)
        if value is not None and value != "auto":
            return fields.as_count(name, value)
    if fields.family == "mamba2":
        return fields.count("head_dim")
    inner = fields.maybe_count("mamba_d_ssm") or fields.count("hidden_size") * _first(fields, "mamba_expand", "expand")
    return _split("the Mamba inner size", inner, heads)


def _delta_net(fields: Fields, tp: int) -> State:
    """Gated delta net (Qwen3-Next, Qwen3.5): one d_k x d_v matrix per value head."""
    key_heads = _split("linear_num_key_heads", fields.count("linear_num_key_heads"), tp)
    value_heads = _split("linear_num_value_heads", fields.count("linear_num_value_heads"), tp)
    d_k, d_v = fields.count("linear_key_head_dim"), fields.count("linear_value_head_dim")
    kernel = fields.count("linear_conv_kernel_dim")
    channels = 2 * key_heads * d_k + value_heads * d_v
    formula = (
        f"ssm {value_heads} x {d_k} x {d_v}, conv (2 x {key_heads} x {d_k} + {value_heads} x {d_v}) x {kernel - 1}"
    )
    return State(value_heads * d_k * d_v, channels * (kernel - 1), formula)


def _lightning(fields: Fields, tp: int) -> State:
    """Lightning attention (MiniMax-Text-01): one d x d matrix per head, no convolution."""
    heads, width = _split("num_attention_heads", query_heads(fields), tp), head_dim(fields)
    return State(heads * width * width, 0, f"ssm {heads} x {width} x {width}")


def _kimi_delta(fields: Fields, tp: int) -> State:
    """Kimi delta attention: one d x d matrix per head; separate convolutions of q, k and v."""
    lists = fields.need("linear_attn_config")
    heads = fields.as_count("linear_attn_config.num_heads", lists.get("num_heads"))
    width = fields.as_count("linear_attn_config.head_dim", lists.get("head_dim"))
    name = "linear_attn_config.short_conv_kernel_size"
    kernel = fields.as_count(name, lists.get("short_conv_kernel_size"))
    heads = _split("linear_attn_config.num_heads", heads, tp)
    formula = f"ssm {heads} x {width} x {width}, conv 3 x {heads} x {width} x {kernel - 1}"
    return State(heads * width * width, 3 * heads * width * (kernel - 1), formula)


def _lru(fields: Fields, tp: int) -> State:
    """RG-LRU (RecurrentGemma): one number per channel, and the convolution."""
    width = fields.maybe_count("lru_width") or fields.count("hidden_size")
    width = _split("lru_width", width, tp)
    kernel = fields.count("conv1d_width")
    return State(width, width * (kernel - 1), f"ssm {width}, conv {width} x {kernel - 1}")


def _short_conv(fields: Fields, tp: int) -> State:
    """LFM2: gated short convolutions keep their last inputs only."""
    width = _split("hidden_size", fields.count("hidden_size"), tp)
    kernel = fields.count("conv_L_cache")
    return State(0, width * (kernel - 1), f"conv {width} x {kernel - 1}")


RULES: Mapping[str, Callable[[Fields, int], State]] = {
    **dict.fromkeys(("jamba", "mamba", "falcon_mamba"), _mamba1),
    **dict.fromkeys(("nemotron_h", "granitemoehybrid", "bamba", "falcon_h1", "mamba2", "zamba2"), _mamba2),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), _delta_net),
    **dict.fromkeys(("minimax_text_01", "minimax_m1", "minimax"), _lightning),
    "kimi_linear": _kimi_delta,
    "recurrent_gemma": _lru,
    **dict.fromkeys(("lfm2", "lfm2_moe"), _short_conv),
}
