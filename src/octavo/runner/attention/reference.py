"""The reference attention backend: plain torch, any device, any head size.

It reads K and V through the block table: only blocks that hold positions the queries can see, never an entry of -1.
Sequences that compute one token are batched in buckets of similar length; padding exists only inside that gather and
is masked. Sequences that compute several tokens are done one by one. A cache in another dtype than the model's is read
as values of the query's dtype, this step's own K and V included: what attention sees never depends on the chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from octavo.runner.attention import LayerCache, Row, Scoring

_SMALL_BLOCK = 8  # below this a block is too small for a matrix product of its own: join blocks first
_MAX_SCORES = 1 << 24  # scores computed at once by the explicit path (64 MiB of float32)


@dataclass(slots=True)
class Bucket:
    """Sequences of one new token each, padded to `width` blocks of the widest.

    tokens [n] places in the flat batch; blocks [n * width]; hidden [n, 1, 1, width * block] (True: not visible).
    """

    tokens: torch.Tensor
    blocks: torch.Tensor
    width: int
    hidden: torch.Tensor


@dataclass(slots=True)
class Span:
    """One sequence of several new tokens, whose queries see positions [first, row.length).

    blocks: those that hold these positions; mask [count, row.length - first] (True: visible), None for plain causal
    attention from position 0.
    """

    row: Row
    blocks: torch.Tensor
    first: int
    mask: torch.Tensor | None


@dataclass(slots=True)
class ReferencePlan:
    buckets: list[Bucket]
    spans: list[Span]


class ReferenceAttention:
    """See the module's text. Stateless."""

    token_major = False

    def plan(
        self, rows: list[Row], tables: list[list[int]], window: int | None, block_size: int, device: torch.device
    ) -> ReferencePlan:
        """Index tensors for one layer group and one step."""
        single = [i for i, row in enumerate(rows) if row.count == 1]
        buckets = [
            _bucket([rows[i] for i in members], [tables[i] for i in members], window, block_size, device)
            for members in _similar(single, rows, window, block_size)
        ]
        spans = [
            _span(row, table, window, block_size, device)
            for row, table in zip(rows, tables, strict=True)
            if row.count > 1
        ]
        return ReferencePlan(buckets, spans)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        scoring: Scoring,
        plan: ReferencePlan | None = None,
    ) -> torch.Tensor:
        """See `Backend.attend`. `plan` is the cache's own unless another backend delegates to this one."""
        heads, tokens, _ = query.shape
        plan = cache.plan if plan is None else plan
        out = query.new_empty(tokens, heads, cache.shape.v_dim)
        for bucket in plan.buckets:
            out[bucket.tokens] = _decode(query[:, bucket.tokens], cache, bucket, scoring)
        for span in plan.spans:
            at = slice(span.row.offset, span.row.offset + span.row.count)
            if span.row.start == 0 and cache.writes and cache.k.dtype == key.dtype:  # all of it is in this very step
                k, v = key[:, at], value[:, at]
            else:
                k, v = _gather(cache, span, query.dtype)
            out[at] = _prefill(query[:, at], k, v, span.mask, scoring).transpose(0, 1)
        return out


def _first_block(row: Row, window: int | None, block_size: int) -> int:
    """Index in the table of the first block that the first query of `row` can see."""
    return 0 if window is None else max(0, row.start + 1 - window) // block_size


def _similar(members: list[int], rows: list[Row], window: int | None, block_size: int) -> list[list[int]]:
    """Deal single-token rows into buckets in which the shortest is at least three quarters of the longest."""

    def width(i: int) -> int:
        return -(-rows[i].length // block_size) - _first_block(rows[i], window, block_size)

    out: list[list[int]] = []
    longest = 0
    for i in sorted(members, key=width, reverse=True):
        if not out or width(i) * 4 < longest * 3:
            out.append([])
            longest = width(i)
        out[-1].append(i)
    return out


def _bucket(
    rows: list[Row], tables: list[list[int]], window: int | None, block_size: int, device: torch.device
) -> Bucket:
    firsts = np.array([_first_block(row, window, block_size) for row in rows])
    lengths = np.array([row.length for row in rows])
    ends = -(-lengths // block_size)
    width = int((ends - firsts).max())
    blocks = np.empty((len(rows), width), dtype=np.int64)
    for i, table in enumerate(tables):
        held = table[firsts[i] : ends[i]]
        blocks[i, : len(held)] = held
        blocks[i, len(held) :] = held[-1]  # padding reads a block of its own, masked below
    position = firsts[:, None] * block_size + np.arange(width * block_size)
    visible = position < lengths[:, None]
    if window is not None:
        visible &= position >= lengths[:, None] - window
    return Bucket(
        torch.tensor([row.offset for row in rows], device=device),
        torch.from_numpy(blocks.reshape(-1)).to(device),
        width,
        torch.from_numpy(~visible[:, None, None, :]).to(device),
    )


def _span(row: Row, table: list[int], window: int | None, block_size: int, device: torch.device) -> Span:
    low = _first_block(row, window, block_size)
    first = low * block_size
    blocks = torch.tensor(table[low : -(-row.length // block_size)], device=device)
    if row.start == 0 and (window is None or row.count <= window):
        return Span(row, blocks, first, None)
    query = torch.arange(row.start, row.length, device=device)[:, None]
    position = torch.arange(first, row.length, device=device)[None, :]
    mask = position <= query
    if window is not None:
        mask &= position > query - window
    return Span(row, blocks, first, mask)


def _decode(query: torch.Tensor, cache: LayerCache, bucket: Bucket, scoring: Scoring) -> torch.Tensor:
    """One query per sequence, block by block, so that K and V are gathered in whole pages and never rearranged.

    query [heads, n, k_dim] → [n, heads, v_dim].
    """
    heads, n, dim = query.shape
    k, v = (_pages(read, bucket) for read in cache.read(bucket.blocks, query.dtype))  # [n, pages, kv_heads, page, dim]
    pages, kv_heads, page = k.shape[1:4]
    grouped = query.transpose(0, 1).reshape(n, 1, kv_heads, heads // kv_heads, dim)
    scores = torch.matmul(grouped, k.transpose(-1, -2))  # [n, pages, kv_heads, group, page]
    scores = scores.permute(0, 2, 3, 1, 4).reshape(n, heads, 1, pages * page).to(torch.float32)
    weights = _softmax(scores, bucket.hidden, scoring).to(v.dtype)
    weights = weights.view(n, kv_heads, heads // kv_heads, pages, page).permute(0, 3, 1, 2, 4)
    return torch.matmul(weights, v).sum(1).view(n, heads, v.shape[-1])


def _pages(blocks: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """The bucket's blocks as [n, pages, kv_heads, page, dim]; small blocks are joined into one page."""
    heads, block, dim = blocks.shape[1:]
    n = len(bucket.tokens)
    picked = blocks.view(n, bucket.width, heads, block, dim)
    if block >= _SMALL_BLOCK:
        return picked
    return picked.transpose(1, 2).reshape(n, 1, heads, bucket.width * block, dim)


def _gather(cache: LayerCache, span: Span, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of positions [span.first, length) as [kv_heads, positions, dim]."""
    count = span.row.length - span.first
    k, v = (read.transpose(0, 1).flatten(1, 2)[:, :count] for read in cache.read(span.blocks, dtype))
    return k, v


def _prefill(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
) -> torch.Tensor:
    """query [heads, count, k_dim], key and value [kv_heads, positions, dim] → [heads, count, v_dim]."""
    if scoring.softcap is None and scoring.sinks is None:
        return scaled_dot_product_attention(
            query[None], key[None], value[None], mask, scale=scoring.scale, is_causal=mask is None, enable_gqa=True
        )[0]
    if mask is None:
        mask = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool, device=query.device).tril()
    heads, count, _ = query.shape
    kv_heads, positions = key.shape[:2]
    step = max(1, _MAX_SCORES // (heads * positions))
    out = query.new_empty(heads, count, value.shape[-1])
    for low in range(0, count, step):
        part = query[:, low : low + step]
        size = part.shape[1]
        grouped = part.reshape(kv_heads, heads // kv_heads * size, -1)
        scores = torch.matmul(grouped, key.transpose(-1, -2)).view(1, heads, size, positions).float()
        weights = _softmax(scores, ~mask[low : low + step], scoring).to(value.dtype)
        weights = weights.view(kv_heads, heads // kv_heads * size, positions)
        out[:, low : low + step] = torch.matmul(weights, value).view(heads, size, -1)
    return out


def _softmax(scores: torch.Tensor, hidden: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """scores [n, heads, queries, positions] in float32, spoilt → weights. A sink takes weight and gives no value.

    Hidden scores are replaced, not added to: what an earlier holder left in a slot may be infinite or no number.
    """
    scores.mul_(scoring.scale)
    if scoring.softcap is not None:
        scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    scores.masked_fill_(hidden, float("-inf"))
    if scoring.sinks is None:
        return scores.softmax(-1)
    sinks = scoring.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
