"""Between a plan and flat arrays: tokens and positions going in, the rows that need logits, tokens coming out.

Every runner that computes uses these, so a token is drawn in one way only. All arrays are in batch order, one row per
token of the step; drafted tokens stand behind the certain ones of their sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.runner.api import SeqWork, TokenLogprobs
from octavo.runner.sampler import Draw, Sampler

Work = tuple[SeqWork, ...]
LogitsOf = Callable[[NDArray[np.int64]], torch.Tensor]  # entries of `rows_to_sample` → their logits [n, vocabulary]


def flat_tokens(work: Work) -> NDArray[np.int32]:
    """Token ids of the step [tokens]."""
    parts: list[list[int] | tuple[int, ...]] = []
    for seq, start, count, _, draft in work:
        parts.append(seq.tokens[start : start + count])
        if draft:
            parts.append(draft)
    return np.fromiter(chain.from_iterable(parts), np.int32, sum(w.count for w in work))


def flat_positions(work: Work) -> NDArray[np.int64]:
    """Positions of the step's tokens in their sequences [tokens]."""
    starts, counts = _column(work, 1), _column(work, 2)
    first = starts - np.cumsum(counts) + counts  # a sequence's first position less its first row
    return np.repeat(first, counts) + np.arange(int(counts.sum()))


def rows_to_sample(work: Work) -> NDArray[np.int64]:
    """Rows whose logits are needed: the last one of each sequence that draws, with a draft one more for each token."""
    ends = np.cumsum(_column(work, 2))
    needs = np.fromiter((1 + len(w.draft) if w.samples else 0 for w in work), np.int64, len(work))
    first = np.cumsum(needs) - needs  # where a sequence's rows begin in the answer
    return np.repeat(ends - needs - first, needs) + np.arange(int(needs.sum()))


def _column(work: Work, field: int) -> NDArray[np.int64]:
    return np.fromiter((w[field] for w in work), np.int64, len(work))


def draw(
    work: Work,
    logits: torch.Tensor | LogitsOf,
    sampler: Sampler,
    argmax: NDArray[np.integer] | None = None,
) -> tuple[tuple[tuple[int, ...], ...], dict[int, tuple[TokenLogprobs, ...]]]:
    """The tokens of a `StepResult` and the log probabilities of those who asked.

    `logits`: of the rows of `rows_to_sample(work)` [rows, vocabulary]; or a function that gives them for some of these
    rows, by index, and is called at most once and only if needed. `argmax`: the most likely token of each row, where
    the runner knows it already: with it, plain greedy rows need no logits.

    A drafted token is accepted if it equals the token drawn in its place. Each is drawn as if those before it had been
    accepted, with the random number of its own index: what comes out is what would have come out one by one.
    """
    draws: list[Draw] = []
    rows: list[int] = []
    row = 0
    for _, _, _, samples, draft in work:
        if draft:
            draws += [Draw(samples[0], draft[:n]) for n in range(len(draft) + 1)]
            rows += range(row, row + len(draft) + 1)
        else:
            draws += map(Draw, samples)
            rows += [row] * len(samples)
        row += 1 + len(draft) if samples else 0
    if not draws:
        return tuple(() for _ in work), {}
    drawn, entries = _sample(draws, rows, row, logits, sampler, argmax)
    following = iter(drawn)
    own = [tuple(islice(following, len(w.draft) + 1 if w.draft else len(w.samples))) for w in work]
    tokens = tuple(w.gained(iter(some)) if w.draft else some for w, some in zip(work, own, strict=True))
    return tokens, _logprobs(work, tokens, entries)


def _sample(
    draws: list[Draw],
    rows: list[int],
    count: int,
    logits: torch.Tensor | LogitsOf,
    sampler: Sampler,
    argmax: NDArray[np.integer] | None,
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """One token for each draw, from `rows[i]` of `count`; with the log probabilities asked for."""
    hard = [i for i, one in enumerate(draws) if not one.plain] if argmax is not None else list(range(len(draws)))
    tokens = [0] * len(draws) if argmax is None else argmax[rows].tolist()
    entries: list[TokenLogprobs | None] = [None] * len(draws)
    if hard:
        wanted = np.unique([rows[i] for i in hard])
        if callable(logits):
            logits = logits(wanted)
        elif len(wanted) < count:
            logits = logits[torch.from_numpy(wanted).to(logits.device)]
        own = np.searchsorted(wanted, [rows[i] for i in hard]).tolist()
        found = sampler.sample(logits, own, [draws[i] for i in hard])
        for i, token, entry in zip(hard, *found, strict=True):
            tokens[i], entries[i] = token, entry
    return tokens, entries


def _logprobs(
    work: Work, tokens: tuple[tuple[int, ...], ...], entries: list[TokenLogprobs | None]
) -> dict[int, tuple[TokenLogprobs, ...]]:
    """By sequence: one entry for each token that it gained."""
    if not any(entries):
        return {}
    out = {}
    following: Iterator[TokenLogprobs | None] = iter(entries)
    for w, gained in zip(work, tokens, strict=True):
        if w.draft:
            own = list(islice(following, len(w.draft) + 1))[: len(gained)]
            out[w.seq.id] = tuple(entry for entry in own if entry is not None)
        else:
            for seq in w.samples:
                entry = next(following)
                out[seq.id] = () if entry is None else (entry,)
    return {seq: found for seq, found in out.items() if found}
