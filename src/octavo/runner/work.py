"""What one step of a model computes on one tensor-parallel rank, layer kind by layer kind, from its config.

Counts only: matrices, KV bytes, floating-point operations. `octavo.runner.timing` turns them into seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.kv.fields import Fields
from octavo.kv.heads import MLAShape, mla_shape
from octavo.kv.mlp import Mlp, layer_mlp
from octavo.kv.params import TRAITS, Traits
from octavo.kv.spec import KVSpec, LayerGroup, LayerKind
from octavo.kv.weights import WeightFormat

_STATE_NOTE = "Recurrent layers are timed as their state read and written plus 4 x hidden^2 of projections."


@dataclass(frozen=True, slots=True)
class Linear:
    """A matrix of `outputs` x `inputs` that a step multiplies with in `times` layers."""

    outputs: int
    inputs: int
    times: int = 1


@dataclass(frozen=True, slots=True)
class Attention:
    """Layers that attend in one way.

    layers      how many, those that read another layer's KV included
    heads, kv_heads   query heads and KV heads of one rank
    window      tokens that a query sees at most; None: all
    row_bytes   K and V of one token in one layer
    flops       per (query, key) pair and layer, while a prompt is computed
    decode_flops  the same for one new token (larger for a latent: it is expanded on the fly)
    """

    latent: bool
    layers: int
    heads: float
    kv_heads: int
    window: int | None
    row_bytes: float
    flops: float
    decode_flops: float


def skewed_touched(experts: Any, active: Any, tokens: Any, skew: float) -> Any:
    """Experts that at least one token chooses if their popularity is spread like a gamma distribution of variance
    `skew` around 1. Floats or numpy arrays."""
    return experts * (1.0 - (1.0 + skew * tokens * active / experts) ** (-1.0 / skew))


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed experts of `layers` layers: `active` of `experts` per token, each `matrices` of hidden x `width`."""

    layers: int
    experts: int
    active: int
    width: int
    matrices: int

    def activations(self, hidden: int) -> float:
        """Bytes that one (token, expert) pair moves in 16 bits: in and out, gate and up written, their product."""
        return 2.0 * (2 * hidden + 3 * self.width)

    def touched(self, tokens: float, skew: float = 0.0) -> float:
        """Experts that at least one of `tokens` tokens chooses. All equally likely (skew 0): E (1 - (1 - k/E)^B); else
        as `skewed_touched` says."""
        if skew:
            return float(skewed_touched(self.experts, self.active, tokens, skew))
        return float(self.experts * (1.0 - (1.0 - self.active / self.experts) ** tokens))


@dataclass(frozen=True, slots=True)
class ModelWork:
    """A model as its steps see it, on one rank.

    linears            all matrices but head and experts; head: the output matrix
    elementwise_bytes  read and written per token in all layers by norms, rotary embedding and activation
    state_bytes        recurrent state per sequence, all layers
    reductions         all-reduces per step (0 without tensor parallelism), each of tokens x hidden values
    weight_bytes, expert_bytes, head_bytes   per element; activation_bytes: of what is computed
    assumptions        what the config does not say
    """

    layers: int
    hidden: int
    vocab: int
    tp: int
    linears: tuple[Linear, ...]
    head: Linear
    attention: tuple[Attention, ...]
    experts: Experts | None
    elementwise_bytes: float
    state_bytes: float
    reductions: int
    weight_bytes: float = 2.0
    expert_bytes: float = 2.0
    head_bytes: float = 2.0
    activation_bytes: float = 2.0
    assumptions: tuple[str, ...] = ()

    @property
    def windows(self) -> tuple[int, ...]:
        """The different windows, in the order in which `StepShape.windowed` gives their sums."""
        return tuple(dict.fromkeys(kind.window for kind in self.attention if kind.window is not None))

    @property
    def resident_bytes(self) -> float:
        """Weights that one rank holds, the embedding left out (a step reads a few rows of it)."""
        dense = sum(m.outputs * m.inputs * m.times for m in self.linears) * self.weight_bytes
        head = self.head.outputs * self.head.inputs * self.head_bytes
        routed = 0.0
        if (e := self.experts) is not None:
            routed = e.layers * e.experts * e.matrices * e.width * self.hidden * self.expert_bytes
        return dense + head + routed


def model_work(
    config: Mapping[str, Any], spec: KVSpec, weights: WeightFormat, names: Mapping[str, str] | None = None
) -> ModelWork:
    """The work of a model from its config, its `spec` (which fixes tp and KV dtype) and its weight format.

    Raises ConfigError for a missing field.
    """
    fields = Fields(config, names)
    hidden, vocab = fields.count("hidden_size"), fields.count("vocab_size")
    mla = mla_shape(fields)
    kinds = [kind for group in spec.groups for kind in _attention(group, spec, mla)]
    linears: Counter[tuple[int, int]] = Counter()
    for group in spec.groups:
        linears.update(_mixing(group, spec, mla, fields, hidden))
    mlps = _mlps(fields, spec)
    matrices = 3 if TRAITS.get(fields.family, Traits()).gated else 2
    channels = 0.0
    for mlp, times in mlps.items():
        if mlp.width:
            linears[(matrices - 1) * _share(mlp.width, spec.tp), hidden] += times
            linears[hidden, _share(mlp.width, spec.tp)] += times
        if mlp.experts:
            linears[mlp.experts, hidden] += times  # the router
        channels += times * (mlp.width + mlp.active * mlp.expert_width) / spec.tp
    state = sum(group.fixed_bytes for group in spec.groups)
    element = max(2.0, float(weights.rest) / 8)
    rotated = sum(heads * width * len(group.layers) for group, heads, width in _rotated(spec, mla))
    return ModelWork(
        layers=spec.num_layers,
        hidden=hidden,
        vocab=vocab,
        tp=spec.tp,
        linears=tuple(Linear(*dims, times) for dims, times in linears.items()),
        head=Linear(_share(vocab, spec.tp), hidden),
        attention=tuple(kinds),
        experts=_experts(mlps, matrices, spec.tp),
        elementwise_bytes=element * (8.0 * hidden * spec.num_layers + 3.0 * channels + 2.0 * rotated),
        state_bytes=float(state),
        reductions=2 * spec.num_layers if spec.tp > 1 else 0,
        weight_bytes=float(weights.matrices) / 8,
        expert_bytes=float(weights.experts) / 8,
        head_bytes=weights.rest / 8,
        activation_bytes=element,
        assumptions=(_STATE_NOTE,) if state else (),
    )


def _share(width: int, tp: int) -> int:
    return -(-width // tp)


def _attention(group: LayerGroup, spec: KVSpec, mla: MLAShape | None) -> list[Attention]:
    """The attention of a group: owners of a cache, and the layers that read it."""
    if group.kind is LayerKind.STATE:
        return []
    readers = sum(owner in group.layers for owner in spec.shared.values())
    layers = len(group.layers) + readers
    row = group.bytes_per_token / len(group.layers)
    heads = (spec.num_attention_heads or 0) / spec.tp
    if mla is not None:
        expanded = 2.0 * heads * (mla.k_dim + mla.v_dim)
        latent = group.kind is LayerKind.LATENT
        absorbed = 2.0 * heads * (2 * mla.latent + mla.rope) if latent else expanded
        return [Attention(latent, layers, heads, 1, None, row, expanded, absorbed)]
    flops = 2.0 * heads * (group.k_dim + group.v_dim)
    return [Attention(False, layers, heads, group.kv_heads, group.window, row, flops, flops)]


def _mixing(
    group: LayerGroup, spec: KVSpec, mla: MLAShape | None, fields: Fields, hidden: int
) -> dict[tuple[int, int], int]:
    """The projections of a group's layers: (outputs, inputs) -> layers."""
    count = len(group.layers)
    if group.kind is LayerKind.STATE:
        return {(_share(3 * hidden, spec.tp), hidden): count, (hidden, _share(hidden, spec.tp)): count}
    heads = (spec.num_attention_heads or 0) // spec.tp
    if mla is not None:
        return _latent_projections(mla, heads, hidden, fields.maybe_count("q_lora_rank"), count)
    queries = heads * group.k_dim
    own = group.kv_heads * (group.k_dim + group.v_dim)
    readers = sum(owner in group.layers for owner in spec.shared.values())
    found: Counter[tuple[int, int]] = Counter()
    found[queries + own, hidden] += count
    if readers:
        found[queries, hidden] += readers
    found[hidden, heads * group.v_dim] += count + readers
    return dict(found)


def _latent_projections(
    mla: MLAShape, heads: int, hidden: int, rank: int | None, count: int
) -> dict[tuple[int, int], int]:
    """MLA: down to the latents on every rank, up per head (absorbed in decode: the same bytes), and the output."""
    found: Counter[tuple[int, int]] = Counter()
    if rank is None:
        found[heads * mla.k_dim + mla.latent + mla.rope, hidden] += count
    else:
        found[rank + mla.latent + mla.rope, hidden] += count
        found[heads * mla.k_dim, rank] += count
    found[heads * (mla.k_dim - mla.rope + mla.v_dim), mla.latent] += count
    found[hidden, heads * mla.v_dim] += count
    return dict(found)


def _rotated(spec: KVSpec, mla: MLAShape | None) -> list[tuple[LayerGroup, int, int]]:
    """(group, heads, width) of what the rotary embedding touches."""
    heads = (spec.num_attention_heads or 0) // spec.tp
    groups = [group for group in spec.groups if group.kind is not LayerKind.STATE]
    if mla is not None:
        return [(group, heads + 1, mla.rope) for group in groups]
    return [(group, heads + group.kv_heads, group.k_dim) for group in groups]


def _mlps(fields: Fields, spec: KVSpec) -> Counter[Mlp]:
    """Each different MLP with the number of its layers. In Nemotron-H an MLP is a layer of its own."""
    layers = spec.uncached if fields.family == "nemotron_h" else range(spec.num_layers)
    return Counter(layer_mlp(fields, index) for index in layers)


def _experts(mlps: Counter[Mlp], matrices: int, tp: int) -> Experts | None:
    """The routed experts; where layers differ in them, the shape that most layers have counts for all."""
    sparse = [(times, mlp) for mlp, times in mlps.items() if mlp.experts]
    if not sparse:
        return None
    _, most = max(sparse, key=lambda pair: pair[0])
    layers = sum(times for times, _ in sparse)
    return Experts(layers, most.experts, most.active, _share(most.expert_width, tp), matrices)
