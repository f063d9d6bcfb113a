"""Achieved rates of a device, and the formulas that turn counted work into seconds with them.

Floats or numpy arrays: the same functions time a step and fit a table of kernel times. The form is PLANNER 2b's: smooth
maxima of a memory and a compute time; the terms of mixed attention follow how the kernels tile their work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from octavo.runner.work import Attention

_QUANTISED = 3.0  # bytes per value: 16 bits read, 8 written
_SHARPNESS = 2.5  # q of the smooth maxima beside GEMM, as fitted to mixed batches on two cards


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The named terms of a step's time: seconds, bytes per second, FLOP per second; rates as achieved, not peaks.

    gemm_start, gemm_bandwidth, gemm_compute   one matrix multiplication; gemm_sharpness: how sharply the larger of
        its two times wins (q of the smooth maximum); gemm_factors: (rows, factor) pairs that multiply the time
        between them, for kernels that the roofline alone misses; quantise_bandwidth: of rounding the rows to 8 bits
    elementwise_start      per layer, all small kernels together; elementwise_bandwidth: of what they read and write
    attention_start, attention_sequence, attention_ramp, decode_bandwidth   a layer's attention in a step of decodes
        alone: per layer, per sequence and KV head, the most that these cost together (later ones start while
        earlier ones run), and of the KV it reads
    cache_bytes, cache_gain   KV that stays in the last-level cache up to this working set is read so much faster
    prefill_start, prefill_tile, prefill_compute   attention in a step with prompt chunks: per layer, per tile of
        `query_tile` queries and head, of its products; prefill_span: seconds per key that one tile walks past
    mixed_bandwidth, mixed_compute, mixed_sequence, mixed_idle   what a decode adds to such a step: its KV; its
        products, for which a whole query tile is computed; per sequence and head; per sequence, head and empty tile
    reread_bytes           KV of one head beyond which the query heads that share it no longer find it in the cache
    latent_start, latent_bandwidth, latent_compute   a layer of MLA decode: per layer, latents read, products
    moe_start, moe_bandwidth, moe_compute   routed experts of a layer: per layer, of their weights, of their products;
        moe_activation: of what goes into and out of them; moe_tile: rows computed in vain for each expert touched, as
        its last tile is not full (a time per weight, like reading: a fit shares it out between the two, so
        moe_bandwidth alone may be above the memory's); moe_expert: per expert touched; moe_imbalance: how much longer
        than the average the busiest takes; moe_skew: variance of the experts' popularity, by which fewer are touched
    link_start, link_bandwidth   one all-reduce, ring: 2 (tp - 1) / tp x bytes / bandwidth; link_turn, link_turn_bytes:
        seconds that come on top of it by and by around that message size, where kernels exchange the parts in two
        rounds instead of one; link_fill, link_fill_bytes: the same for large messages, until their pipeline is full
    sampler_start, sampler_bandwidth   fp32 logits of every sampled row
    uneven                 how much longer the KV of a batch of different lengths takes than that of equal ones
    host_start, host_sequence   Python and launches per step and sequence; host_overlaps: under the device's work;
        host_gap: for which the device waits between two steps all the same
    copy_start, copy_bandwidth   blocks copied, read and written
    """

    gemm_start: float
    gemm_bandwidth: float
    gemm_compute: float
    decode_bandwidth: float
    prefill_compute: float
    elementwise_bandwidth: float
    sampler_bandwidth: float
    copy_bandwidth: float
    gemm_sharpness: float = 2.6
    gemm_factors: tuple[tuple[float, float], ...] = ()
    quantise_bandwidth: float = math.inf
    elementwise_start: float = 0.0
    attention_start: float = 0.0
    attention_sequence: float = 0.0
    attention_ramp: float = math.inf
    cache_bytes: float = 0.0
    cache_gain: float = 1.0
    prefill_start: float = 0.0
    prefill_tile: float = 0.0
    prefill_span: float = 0.0
    query_tile: int = 1
    mixed_bandwidth: float = math.inf
    mixed_compute: float = math.inf
    mixed_sequence: float = 0.0
    mixed_idle: float = 0.0
    reread_bytes: float = 1e30
    uneven: float = 1.0
    latent_start: float = 0.0
    latent_bandwidth: float = math.inf
    latent_compute: float = math.inf
    moe_start: float = 0.0
    moe_bandwidth: float = math.inf
    moe_compute: float = math.inf
    moe_activation: float = math.inf
    moe_tile: float = 0.0
    moe_expert: float = 0.0
    moe_imbalance: float = 1.0
    moe_skew: float = 0.0
    link_start: float = 0.0
    link_bandwidth: float = math.inf
    link_turn: float = 0.0
    link_turn_bytes: float = 1.0
    link_fill: float = 0.0
    link_fill_bytes: float = 1.0
    sampler_start: float = 0.0
    host_start: float = 0.0
    host_sequence: float = 0.0
    host_overlaps: bool = False
    host_gap: float = 0.0
    copy_start: float = 0.0


def smooth_max(a: Any, b: Any, q: float) -> Any:
    """(a^q + b^q)^(1/q): the larger of two times where they differ much, up to 2^(1/q) of it where they are equal.
    Floats or numpy arrays."""
    return (a**q + b**q) ** (1.0 / q)


def gemm_seconds(c: Coefficients, rows: Any, outputs: Any, inputs: Any, weight: float, activation: float) -> Any:
    """One multiplication of (rows, inputs) with a matrix; `weight`, `activation`: bytes per element."""
    moved = outputs * inputs * weight + rows * (outputs + inputs) * activation
    flops = 2.0 * rows * outputs * inputs
    product = smooth_max(moved / c.gemm_bandwidth, flops / c.gemm_compute, c.gemm_sharpness)
    return c.gemm_start + product + _QUANTISED * rows * inputs / c.quantise_bandwidth


def elementwise_seconds(c: Coefficients, moved: Any) -> Any:
    """Norms, rotary embedding and activation of one layer that read and write `moved` bytes: while these stay in the
    cache, launching is all that counts."""
    return smooth_max(c.elementwise_start, moved / c.elementwise_bandwidth, _SHARPNESS)


def experts_seconds(
    c: Coefficients, touched: Any, routed: Any, weights: Any, weight: float, activations: Any, even: Any = False
) -> Any:
    """The experts of one layer: `touched` of them read, `routed` (token, expert) pairs.

    weights, weight: values of one expert and bytes per value; activations: bytes that one pair moves; even: all
    experts get as many pairs.
    """
    busiest = 1.0 + (c.moe_imbalance - 1.0) * (1.0 - even)
    computed = 2.0 * weights * (routed * busiest + touched * c.moe_tile) / c.moe_compute
    product = smooth_max(touched * weights * weight / c.moe_bandwidth, computed, _SHARPNESS)
    return c.moe_start + touched * c.moe_expert + product + routed * activations / c.moe_activation


def reduction_seconds(c: Coefficients, message: Any, ranks: int) -> Any:
    """One all-reduce of `message` bytes."""
    ring = 2.0 * (ranks - 1) / ranks * message / c.link_bandwidth
    turn = c.link_turn * message / (message + c.link_turn_bytes)
    return c.link_start + ring + turn + c.link_fill * message / (message + c.link_fill_bytes)


def cache_speedup(c: Coefficients, footprint: Any) -> Any:
    """How much faster KV is read than from memory when `footprint` bytes are all that is read between two uses."""
    return 1.0 + (c.cache_gain - 1.0) / (1.0 + (footprint / (c.cache_bytes + 1.0)) ** 8)


def decode_start(c: Coefficients, kind: Attention, sequences: Any) -> Any:
    """Seconds of one layer of a step of `sequences` decodes beside the KV it reads."""
    if kind.latent:
        return c.latent_start
    each = c.attention_sequence * sequences * kind.kv_heads
    return c.attention_start + each / (1.0 + each / c.attention_ramp)


def decode_rate(c: Coefficients, kind: Attention, gain: Any = 1.0) -> Any:
    """Seconds per token of context in one layer of a step that only decodes; `gain`: of a cache that holds the KV."""
    speed, compute = c.decode_bandwidth * gain, c.prefill_compute
    if kind.latent:
        speed, compute = c.latent_bandwidth, c.latent_compute
    return smooth_max(kind.row_bytes / speed, kind.decode_flops / compute, _SHARPNESS)


def chunked_seconds(
    c: Coefficients, kind: Attention, queries: Any, tiles: Any, longest: Any, sequences: Any, context: Any
) -> Any:
    """Attention of one layer in a step with prompt chunks, decodes in the same kernel.

    queries: (query, key) pairs of the chunks, tiles filled up; tiles: of `query_tile` queries; longest: keys that one
    tile walks past at most; sequences, context: the decodes and the tokens they see together. A decode occupies a
    query tile of which one row counts, and every query head reads the KV again unless the cache still holds it.
    """
    prompt = queries * kind.flops / c.prefill_compute + c.prefill_tile * tiles * kind.heads
    moved = context * kind.row_bytes
    head = moved / kind.kv_heads
    over = head - c.reread_bytes
    missed = (over + abs(over)) / 2.0 / (head + 1.0)
    moved = moved * (1.0 + (kind.heads / kind.kv_heads - 1.0) * missed)
    decode = smooth_max(moved / c.mixed_bandwidth, context * kind.decode_flops / c.mixed_compute, _SHARPNESS)
    each = (c.mixed_sequence + c.mixed_idle * tiles) * sequences * kind.heads
    return c.prefill_start + each + smooth_max(prompt + decode, c.prefill_span * longest, _SHARPNESS)


def pairs(count: int, start: int, window: int | None = None) -> float:
    """(query, key) pairs of a causal chunk of `count` queries behind `start` tokens, half the diagonal included."""
    if window is None or start + count <= window:
        return count * (start + 0.5 * count)
    if start >= window:
        return float(count * window)
    growing = window - start
    return growing * (start + 0.5 * growing) + (count - growing) * float(window)


def factor_at(factors: Sequence[tuple[float, float]], rows: float) -> float:
    """The factor at `rows`, linear in log rows between the pairs given and constant beyond; 1 without any."""
    if not factors:
        return 1.0
    if rows <= factors[0][0]:
        return factors[0][1]
    for (low, before), (high, after) in pairwise(factors):
        if rows <= high:
            return before + (after - before) * math.log(rows / low) / math.log(high / low)
    return factors[-1][1]
