"""Number of parameters of a model from its config, split by what quantisation treats differently.

Exact for the families of `TRAITS` (checked against published counts); for any other family the count takes
gated MLPs without biases and puts the gates in `doubt`. Models with recurrent layers are not counted: give measured
weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.kv.families import TIED_BY_DEFAULT, UNTIED_BY_DEFAULT
from octavo.kv.fields import ConfigError, Fields
from octavo.kv.heads import MLAShape, Shape, attention_shapes, mla_shape, query_heads
from octavo.kv.layer_rules import Layer
from octavo.kv.layers import layer_plan
from octavo.kv.mlp import count_or_largest, dense_width, layer_mlp


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameter counts of the language model.

    embedding   token (and position) tables
    output      the output matrix; 0 when it is tied to the embedding
    matrices    attention and MLP matrices outside the experts
    experts     matrices of the routed experts
    small       norms, biases, routers
    tied        whether output and embedding are one matrix; None: the config and the family do not say
    doubt       how many of them may not exist: the gates of MLPs in a family without traits, and the output
                matrix where neither config nor family says whether it is tied
    """

    embedding: int
    output: int
    matrices: int
    experts: int
    small: int
    tied: bool | None
    doubt: int

    @property
    def total(self) -> int:
        return self.embedding + self.output + self.matrices + self.experts + self.small


@dataclass(frozen=True, slots=True)
class Traits:
    """What a family's modules have beyond q, k, v, o and the MLP."""

    gated: bool = True  # MLP with gate: three matrices, else two
    norms: int = 2  # per layer
    norm_bias: bool = False
    bias: str = ""  # which matrices have one: q (q, k, v), o, m (MLP), l (output)
    qk_norm: str = ""  # "head": one weight per head dimension; "full": per projected channel
    positions: int | None = None  # learned positions: extra rows beyond max_position_embeddings


_GPT = Traits(gated=False, norm_bias=True, bias="qom")
TRAITS: Mapping[str, Traits] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "ministral3", "phi3", "gemma"), Traits()),
    **dict.fromkeys(("qwen2", "qwen2_moe"), Traits(bias="q")),
    **dict.fromkeys(("qwen3", "qwen3_moe"), Traits(qk_norm="head")),
    "gemma2": Traits(norms=4),
    "gemma3_text": Traits(norms=4, qk_norm="head"),
    **dict.fromkeys(("olmo2", "olmo3"), Traits(qk_norm="full")),
    "minimax_m2": Traits(qk_norm="full"),
    "glm4_moe": Traits(bias="q", qk_norm="head"),
    "gpt_oss": Traits(bias="qo"),
    "gpt2": Traits(gated=False, norm_bias=True, bias="qom", positions=0),
    "opt": Traits(gated=False, norm_bias=True, bias="qom", positions=2),
    **dict.fromkeys(("gpt_neox", "bloom", "starcoder2"), _GPT),
    "gptj": Traits(gated=False, norms=1, norm_bias=True, bias="ml"),
    "phi": Traits(gated=False, norms=1, norm_bias=True, bias="qoml"),
    "falcon": Traits(gated=False, norm_bias=True),
    "mpt": Traits(gated=False),
    "cohere": Traits(norms=1),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2"), Traits()),
    "llama4_text": Traits(),
}


def count_parameters(config: Mapping[str, Any], names: Mapping[str, str] | None = None) -> Parameters:
    """Count the parameters of the language model of `config`.

    Raises ConfigError for a missing field and for models whose recurrent or NAS layers have no formula here.
    """
    fields = Fields(config, names)
    layers = layer_plan(fields, None)
    odd = isinstance(fields.data.get("block_configs"), list) or fields.data.get("hidden_size_per_layer_input")
    if any(layer.state for layer in layers) or odd or fields.family == "gemma3n_text":
        raise ConfigError(
            f"The weights of model_type {fields.family} cannot be counted from its config (recurrent, NAS or "
            "per-layer-embedding parts): give their measured size with --weight-memory."
        )
    traits = TRAITS.get(fields.family, Traits())
    if fields.family == "falcon" and not fields.find("new_decoder_architecture"):
        traits = replace(traits, norms=1)
    hidden, vocab = fields.count("hidden_size"), fields.count("vocab_size")
    matrices, small = _attention(fields, layers, traits)
    experts = doubt = 0
    for index in range(len(layers)):
        dense, routed, extra = _mlp(fields, index, traits)
        matrices, experts, small = matrices + dense, experts + routed, small + extra
        doubt += 0 if fields.family in TRAITS else (dense + routed) // 3
    norm = hidden * (2 if traits.norm_bias else 1)
    small += norm * (traits.norms * len(layers) + 1)
    embedding = vocab * hidden
    if traits.positions is not None:
        embedding += (fields.count("max_position_embeddings") + traits.positions) * hidden
    tied = _tied(fields)
    output = 0 if tied else vocab * hidden + (vocab if "l" in traits.bias else 0)
    doubt += output if tied is None else 0
    return Parameters(embedding, output, matrices, experts, small, tied, doubt)


def _tied(fields: Fields) -> bool | None:
    given = fields.anywhere("tie_word_embeddings")
    if isinstance(given, bool):
        return given
    if fields.family in TIED_BY_DEFAULT:
        return True
    return False if fields.family in UNTIED_BY_DEFAULT else None


def _attention(fields: Fields, layers: Sequence[Layer], traits: Traits) -> tuple[int, int]:
    """(matrix, small) parameters of all attention layers."""
    mla = mla_shape(fields)
    if mla is not None:
        matrices, small = _latent(fields, mla)
        return matrices * len(layers), small * len(layers)
    hidden, heads = fields.count("hidden_size"), query_heads(fields)
    matrices = small = 0
    for shape in attention_shapes(fields, layers):
        if shape is not None:
            q, kv = heads * shape.k_dim, shape.kv_heads * (shape.k_dim + shape.v_dim)
            matrices += hidden * (q + kv) + heads * shape.v_dim * hidden
            small += _attention_extras(fields, shape, q, kv, traits)
    return matrices, small


def _attention_extras(fields: Fields, shape: Shape, q: int, kv: int, traits: Traits) -> int:
    hidden = fields.count("hidden_size")
    everywhere = bool(fields.data.get("attention_bias")) and not traits.bias
    small = q + kv if "q" in traits.bias or everywhere else 0
    small += hidden if "o" in traits.bias or everywhere else 0
    if traits.qk_norm == "head":
        small += 2 * shape.k_dim
    elif traits.qk_norm == "full":
        small += q + shape.kv_heads * shape.k_dim
    if fields.family == "gpt_oss":
        small += query_heads(fields)  # attention sinks
    return small


def _latent(fields: Fields, mla: MLAShape) -> tuple[int, int]:
    """DeepSeek MLA: low-rank q (optional) and kv, decompression, output; and the norms between."""
    hidden, heads = fields.count("hidden_size"), mla.heads
    rank = fields.maybe_count("q_lora_rank")
    q = hidden * heads * mla.k_dim if rank is None else rank * (hidden + heads * mla.k_dim)
    down = hidden * (mla.latent + mla.rope)
    up = mla.latent * heads * (mla.k_dim - mla.rope + mla.v_dim)
    return q + down + up + heads * mla.v_dim * hidden, mla.latent + (rank or 0)


def _mlp(fields: Fields, index: int, traits: Traits) -> tuple[int, int, int]:
    """(matrix, expert, small) parameters of the MLP of layer `index`."""
    hidden = fields.count("hidden_size")
    sides = 3 if traits.gated else 2
    mlp = layer_mlp(fields, index)
    dense = sides * hidden * mlp.width
    if not mlp.experts:
        bias = mlp.width * (sides - 1) + hidden if "m" in traits.bias or fields.data.get("mlp_bias") else 0
        return dense, 0, bias
    small = hidden * mlp.experts  # the router
    if fields.family == "gpt_oss":
        small += mlp.experts * (1 + 2 * mlp.expert_width + hidden)
    return dense, sides * hidden * mlp.expert_width * mlp.experts, small


def mlp_width(config: Mapping[str, Any], names: Mapping[str, str] | None = None) -> int:
    """Channels of the MLP that one token passes: the dense width, or that of its active experts together."""
    fields = Fields(config, names)
    active = count_or_largest(fields, "num_experts_per_tok")
    if active is None or fields.find("num_experts") is None:
        return dense_width(fields)
    width = count_or_largest(fields, "moe_intermediate_size") or fields.count("intermediate_size")
    shared = (count_or_largest(fields, "n_shared_experts") or 0) * width
    return active * width + shared + (fields.maybe_count("shared_expert_intermediate_size") or 0)
