"""Published kernel times as fitting problems: tables under shared/facts/profiles in, one `Kernel` per operator out.

    aic/            NVIDIA AIConfigurator (Apache-2.0): GEMM, attention, MoE, MLA module, all-reduce; vLLM's kernels
    llmservingsim/  casys-kaist LLMServingSim (MIT): the layers of three models under vLLM 0.19, mixed batches included

Both are described in SOURCE.md beside them. Times there are per call of one layer on one rank.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from octavo.kv.spec import spec_from_config
from octavo.kv.weights import weight_format
from octavo.planner.catalogue import find_model
from octavo.planner.timing.fits import FitsError
from octavo.planner.timing.fitting import Array, Kernel, Rows
from octavo.runner.rates import (
    Coefficients,
    cache_speedup,
    chunked_seconds,
    decode_rate,
    decode_start,
    elementwise_seconds,
    experts_seconds,
    gemm_seconds,
    reduction_seconds,
)
from octavo.runner.work import Attention, ModelWork, model_work, skewed_touched

#: AIConfigurator's name of a GEMM or MoE format -> (ours, bytes per weight)
GEMM_FORMATS: Mapping[str, tuple[str, float]] = {"bfloat16": ("bf16", 2.0), "fp8": ("fp8", 1.0)}
MOE_FORMATS: Mapping[str, tuple[str, float]] = {
    "bfloat16": ("bf16", 2.0),
    "fp8_block": ("fp8", 1.0),  # as most fp8 checkpoints of MoE models are scaled
    "w4a16_mxfp4": ("mxfp4", 0.53125),
    "int4_wo": ("int4", 0.52),
}
#: Kernels of a MoE format that a table lumps with others of the same format: those of the models published in it.
_MOE_SOURCES: Mapping[str, str] = {"w4a16_mxfp4": "gptoss"}
KV_FORMATS: Mapping[str, tuple[str, int]] = {"bfloat16": ("bf16", 2), "fp8": ("fp8", 1)}
_SHORTEST = 128  # tokens of context: shorter decodes are left out, their steps are all matrices
_MANY = 1000.0  # microseconds or milliseconds


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a gzipped CSV. Raises FitsError if it cannot be read."""
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    except (OSError, ValueError) as error:
        raise FitsError(f"{path} is not a readable table ({error}): name the folder of the profiles.") from error


def _columns(rows: Sequence[Mapping[str, str]], *names: str) -> list[Array]:
    return [np.array([float(row[name]) for row in rows]) for name in names]


def gemm_kernel(rows: Sequence[Mapping[str, str]], dtype: str) -> Kernel:
    """AIC gemm of one dtype, matrices of at least 1,024 x 1,024."""
    name, weight = GEMM_FORMATS[dtype]
    kept = [r for r in rows if r["gemm_dtype"] == dtype and min(int(r["n"]), int(r["k"])) >= 1024]
    m, n, k, ms = _columns(kept, "m", "n", "k", "latency_ms")
    fitted: tuple[str, ...] = ("gemm_start", "gemm_bandwidth", "gemm_compute", "gemm_sharpness")
    fitted += ("quantise_bandwidth",) if name == "fp8" else ()
    return _gemm(name, (m, n, k), ms / _MANY, weight, fitted)


def _shapes(rows: Sequence[Mapping[str, str]], cache: str) -> list[Mapping[str, str]]:
    """Rows of full attention in one KV dtype with head shapes of today's models: 128 wide, 4 to 8 queries per KV."""
    return [
        row
        for row in rows
        if row["kv_cache_dtype"] == cache
        and row.get("window_size", "0") == "0"
        and row["head_dim"] == "128"
        and 4 * int(row["num_key_value_heads"]) <= int(row["num_heads"]) <= 8 * int(row["num_key_value_heads"])
        and int(row["num_key_value_heads"]) <= 8
    ]


def _kind(heads: Any, kv_heads: Any, width: Any, element: int) -> Attention:
    """One full-attention layer; with arrays, one per row."""
    flops = 4.0 * heads * width
    return Attention(False, 1, heads, kv_heads, None, 2.0 * kv_heads * width * element, flops, flops)


def decode_kernel(rows: Sequence[Mapping[str, str]], cache: str, warm: bool) -> Kernel:
    """AIC attention_decode. warm: the device's last-level cache holds the KV of a kernel called again and again."""
    name, element = KV_FORMATS[cache]
    batch, isl, step, heads, kv, width, ms = _columns(
        [row for row in _shapes(rows, cache) if int(row["isl"]) + int(row["step"]) >= _SHORTEST],
        *("batch_size", "isl", "step", "num_heads", "num_key_value_heads", "head_dim", "latency_ms"),
    )
    context = batch * (isl + step)
    fitted: tuple[str, ...] = ("attention_start", "attention_sequence", "attention_ramp", "decode_bandwidth")
    fitted += ("cache_bytes", "cache_gain") if warm else ()

    def predict(c: Coefficients, i: Rows) -> Array:
        kind = _kind(heads[i], kv[i], width[i], element)
        gain = cache_speedup(c, context[i] * kind.row_bytes) if warm else 1.0
        return np.asarray(decode_start(c, kind, batch[i]) + context[i] * decode_rate(c, kind, gain))

    return Kernel("decode", name, ms / _MANY, fitted, predict)


def prefill_kernel(rows: Sequence[Mapping[str, str]], cache: str) -> Kernel:
    """AIC attention_prefill: whole prompts of equal length."""
    name, element = KV_FORMATS[cache]
    batch, isl, heads, kv, width, ms = _columns(
        _shapes(rows, cache), *("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim", "latency_ms")
    )

    def predict(c: Coefficients, i: Rows) -> Array:
        tiles = np.ceil(isl[i] / c.query_tile)
        queries = batch[i] * tiles * c.query_tile * isl[i] / 2.0
        kind = _kind(heads[i], kv[i], width[i], element)
        return np.asarray(chunked_seconds(c, kind, queries, batch[i] * tiles, isl[i], 0.0, 0.0))

    fitted = ("prefill_start", "prefill_tile", "prefill_compute", "prefill_span")
    return Kernel("prefill", name, ms / _MANY, fitted, predict)


_MOE_FITTED = ("moe_start", "moe_bandwidth", "moe_compute", "moe_activation", "moe_tile")


def moe_kernel(rows: Sequence[Mapping[str, str]], dtype: str) -> Kernel:
    """AIC moe without expert parallelism: tokens spread evenly, and by the power law that AIC takes for real ones."""
    name, weight = MOE_FORMATS[dtype]
    kept = [r for r in rows if r["moe_dtype"] == dtype and r["moe_ep_size"] == "1" and int(r["moe_tp_size"]) <= 8]
    kept = [r for r in kept if _MOE_SOURCES.get(dtype, "") in r["kernel_source"]]
    kept = [r for r in kept if r["distribution"] in ("balanced", "power_law_1.2")]
    tokens, hidden, inter, k, experts, split, ms = _columns(
        kept, *("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "latency_ms")
    )
    even = np.array([row["distribution"] == "balanced" for row in kept], float)
    most, weights = np.minimum(experts, tokens * k), 3.0 * hidden * inter / split
    moved = 2.0 * (2.0 * hidden + 3.0 * inter / split)

    def predict(c: Coefficients, i: Rows) -> Array:
        touched = np.where(even[i], most[i], skewed_touched(experts[i], k[i], tokens[i], c.moe_skew))
        return np.asarray(experts_seconds(c, touched, tokens[i] * k[i], weights[i], weight, moved[i], even[i]))

    return Kernel("moe", name, ms / _MANY, (*_MOE_FITTED, "moe_expert", "moe_imbalance", "moe_skew"), predict)


def latent_kernel(rows: Sequence[Mapping[str, str]], cache: str, work: ModelWork) -> Kernel:
    """AIC mla_decode_module of DeepSeek-V3 in bf16: projections (timed by the device's GEMM fit), rope and attention.

    work: DeepSeek-V3's, for its dimensions; the table splits heads itself (`num_heads`).
    """
    name, element = KV_FORMATS[cache]
    kept = [r for r in rows if r["kv_cache_dtype"] == cache and r["gemm_type"] == "bfloat16"]
    kept = [r for r in kept if r["mla_dtype"] == "bfloat16" and int(r["num_heads"]) >= 8]
    batch, isl, step, heads, ms = _columns(kept, "batch_size", "isl", "step", "num_heads", "latency_ms")
    context, whole = batch * (isl + step), work.attention[0].heads

    def predict(c: Coefficients, i: Rows) -> Array:
        share = heads[i] / whole
        linear = sum(gemm_seconds(c, batch[i], n, k, 2.0, 2.0) for n, k in latent_dims(work.hidden, share))
        absorbed = work.attention[0].decode_flops * share
        kind = _latent(heads[i], 576.0 * element, absorbed)
        return np.asarray(linear + decode_start(c, kind, batch[i]) + context[i] * decode_rate(c, kind))

    fitted = ("latent_start", "latent_bandwidth", "latent_compute")
    return Kernel("latent", name, ms / _MANY, fitted, predict)


def _latent(heads: Any, row: float, flops: Any) -> Attention:
    """One MLA layer; with arrays, one per row."""
    return Attention(True, 1, heads, 1, None, row, flops, flops)


def latent_dims(hidden: int, share: Array) -> list[tuple[Any, Any]]:
    """(outputs, inputs) of DeepSeek-V3's MLA projections with a share of its 128 heads."""
    heads = 128.0 * share
    return [(1536 + 576, hidden), (heads * 192, 1536), (heads * 256, 512), (hidden, heads * 128)]


def link_kernel(rows: Sequence[Mapping[str, str]], tp: int) -> Kernel:
    """AIC all-reduces of 4 KB (one token) to 128 MB: per size the faster of vLLM's own in CUDA graphs and NCCL's, as
    engines choose by size."""
    best: dict[float, float] = {}
    for row in rows:
        own = row.get("kernel_source") == "vLLM_custom_graph"
        if int(row["num_gpus"]) == tp and (own or (row.get("op_name") == "all_reduce" and row["nccl_dtype"] == "half")):
            size = float(row["message_size"])
            best[size] = min(best.get(size, np.inf), float(row["latency_ms"]))
    size, ms = np.array(sorted((size, ms) for size, ms in best.items() if 2**12 <= size <= 2**27)).T

    def predict(c: Coefficients, i: Rows) -> Array:
        return np.asarray(reduction_seconds(c, size[i], tp))

    fitted = ("link_start", "link_bandwidth", "link_turn", "link_turn_bytes", "link_fill", "link_fill_bytes")
    return Kernel("link", str(tp), ms / _MANY, fitted, predict)


def served_work(model: str, tp: int) -> ModelWork:
    """A catalogue model in bf16."""
    entry = find_model(model)
    if entry is None:
        raise FitsError(f"{model} is not in the catalogue: name one of its models.")
    return model_work(entry.config, spec_from_config(entry.config, tp=tp), weight_format("bf16"))


def layer_kernels(folder: Path, prefix: str, work: ModelWork, memory: float) -> list[Kernel]:
    """The operators of one LLMServingSim profile (`RTX4090_Llama-3.1-8B_tp1`): layers of `work` on one rank.

    memory: bytes of the card. Batches whose KV it cannot hold beside the weights are left out.
    """
    room = (memory - work.resident_bytes) / sum(kind.layers * kind.row_bytes for kind in work.attention)
    dense = read_table(folder / f"{prefix}_dense.csv.gz")
    ends = read_table(folder / f"{prefix}_per_sequence.csv.gz")
    attention = read_table(folder / f"{prefix}_attention.csv.gz")
    kernels = [_layer_gemm(dense, work), _layer_elementwise(dense, work), _layer_sampler(ends, work)]
    kernels += [_layer_decode(attention, work, room), _layer_chunked(attention, work, room)]
    routed = folder / f"{prefix}_moe.csv.gz"
    return kernels + ([_layer_moe(read_table(routed), work)] if routed.exists() else [])


def _layer_gemm(dense: Sequence[Mapping[str, str]], work: ModelWork) -> Kernel:
    """The matrices of a layer; the output matrix is timed with the same coefficients and kept out of their table."""
    kind = work.attention[0]
    width = kind.flops / (4.0 * kind.heads)
    dims: dict[str, tuple[float, float]] = {
        "qkv_proj": ((kind.heads + 2 * kind.kv_heads) * width, work.hidden),
        "o_proj": (work.hidden, kind.heads * width),
    }
    gates = [m for m in work.linears if m.inputs == work.hidden and m.outputs > 2 * work.hidden]
    if gates and work.experts is None:
        wide = max(gates, key=lambda m: m.outputs)
        dims |= {"gate_up_proj": (wide.outputs, work.hidden), "down_proj": (work.hidden, wide.outputs / 2)}
    kept = [row for row in dense if row["layer"] in dims]
    m, us = _columns(kept, "tokens", "time_us")
    n, k = np.array([dims[row["layer"]] for row in kept]).T

    fitted = ("gemm_start", "gemm_bandwidth", "gemm_compute", "gemm_sharpness")
    return _gemm("bf16", (m, n, k), us * 1e-6, 2.0, fitted)


def _gemm(
    name: str, dims: tuple[Array, Array, Array], measured: Array, weight: float, fitted: tuple[str, ...]
) -> Kernel:
    """Multiplications of (m, k) with (k, n)."""
    m, n, k = dims

    def predict(c: Coefficients, i: Rows) -> Array:
        seconds = gemm_seconds(c, m[i], n[i], k[i], weight, 2.0)
        if c.gemm_factors:
            knots, factors = np.array(c.gemm_factors).T
            seconds = seconds * np.interp(np.log(m[i]), np.log(knots), factors)
        return np.asarray(seconds)

    return Kernel("gemm", name, measured, fitted, predict, m)


_SMALL = {"layernorm": 2.0, "rotary_emb": 1.0, "act_fn": 1.0, "qk_norm": 1.0}  # calls per layer


def _layer_elementwise(dense: Sequence[Mapping[str, str]], work: ModelWork) -> Kernel:
    """Norms, rotary embedding and activation of one layer, added up for each number of tokens."""
    total: dict[float, float] = {}
    for row in dense:
        if row["layer"] in _SMALL:
            tokens = float(row["tokens"])
            total[tokens] = total.get(tokens, 0.0) + _SMALL[row["layer"]] * float(row["time_us"]) * 1e-6
    tokens, measured = np.array(sorted(total.items())).T
    each = work.elementwise_bytes / work.layers

    def predict(c: Coefficients, i: Rows) -> Array:
        return np.asarray(elementwise_seconds(c, each * tokens[i]))

    return Kernel("elementwise", "all", measured, ("elementwise_start", "elementwise_bandwidth"), predict)


def _layer_sampler(ends: Sequence[Mapping[str, str]], work: ModelWork) -> Kernel:
    kept = [row for row in ends if row["layer"] == "sampler"]
    rows, us = _columns(kept, "sequences", "time_us")

    def predict(c: Coefficients, i: Rows) -> Array:
        return np.asarray(c.sampler_start + 4.0 * work.vocab * rows[i] / c.sampler_bandwidth)

    return Kernel("sampler", "all", us * 1e-6, ("sampler_start", "sampler_bandwidth"), predict)


def _holds(row: Mapping[str, str], room: float) -> bool:
    """Whether a card has room for the batch's KV: the profiles go beyond, with a model of one layer."""
    return int(row["n_decode"]) * int(row["kv_decode"]) + int(row["kv_prefill"]) <= room


def _layer_decode(rows: Sequence[Mapping[str, str]], work: ModelWork, room: float) -> Kernel:
    kept = [row for row in rows if row["prefill_chunk"] == "0" and int(row["kv_decode"]) >= _SHORTEST]
    kept = [row for row in kept if _holds(row, room)]
    number, each, us = _columns(kept, "n_decode", "kv_decode", "time_us")
    kind = work.attention[0]

    def predict(c: Coefficients, i: Rows) -> Array:
        return np.asarray(decode_start(c, kind, number[i]) + number[i] * each[i] * decode_rate(c, kind))

    fitted = ("attention_start", "attention_sequence", "attention_ramp", "decode_bandwidth")
    return Kernel("decode", "bf16", us * 1e-6, fitted, predict)


def _layer_chunked(rows: Sequence[Mapping[str, str]], work: ModelWork, room: float) -> Kernel:
    """One prompt chunk, alone or with decodes beside it."""
    kept = [row for row in rows if row["prefill_chunk"] != "0" and _holds(row, room)]
    count, start, number, each, us = _columns(kept, "prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us")
    kind = work.attention[0]

    def predict(c: Coefficients, i: Rows) -> Array:
        tiles = np.ceil(count[i] / c.query_tile)
        queries = tiles * c.query_tile * (start[i] + count[i] / 2.0)
        longest = np.maximum(start[i] + count[i], each[i])
        return np.asarray(chunked_seconds(c, kind, queries, tiles, longest, number[i], number[i] * each[i]))

    fitted: tuple[str, ...] = ("prefill_start", "prefill_tile", "prefill_compute", "prefill_span")
    fitted += ("mixed_bandwidth", "mixed_compute", "mixed_sequence", "mixed_idle", "reread_bytes")
    return Kernel("prefill", "bf16", us * 1e-6, fitted, predict)


def _layer_moe(rows: Sequence[Mapping[str, str]], work: ModelWork) -> Kernel:
    """Routed experts, with the number that the tokens touch given."""
    tokens, touched, us = _columns(rows, "tokens", "activated_experts", "time_us")
    routed = work.experts
    if routed is None:
        raise FitsError("A table of experts for a model without them: name the model of the profile.")
    weights, moved = float(routed.matrices * work.hidden * routed.width), routed.activations(work.hidden)

    def predict(c: Coefficients, i: Rows) -> Array:
        return np.asarray(experts_seconds(c, touched[i], tokens[i] * routed.active, weights, 2.0, moved, 1.0))

    return Kernel("moe", "bf16", us * 1e-6, _MOE_FITTED, predict)
