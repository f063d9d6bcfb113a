"""From logits to tokens: penalties, filters, seeded draws, log probabilities.

Order (vLLM's): min_tokens mask, logit bias, penalties; structure; temperature; min-p, top-k, top-p; draw. Log
probabilities are those of the raw logits. Nothing is remembered between steps except the seed of an unseeded sequence:
penalties and what a structure allows follow from the tokens, and the random number of generated token i is a pure
function of (seed, i), so batch mix, preemption and recomputation cannot change a draw.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.errors import OctavoError
from octavo.runner.api import TokenLogprobs
from octavo.types import SamplingParams, Sequence, derive_seed

if TYPE_CHECKING:
    from octavo.runner.structure import Structures

_MASK64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_CHUNK = 256


def uniform(seed: int, index: int) -> float:
    """The random number in [0, 1) for generated token `index` under `seed`: SplitMix64's output function applied to a
    counter, twice, so that neighbouring seeds and indices are unrelated (Steele et al., OOPSLA 2014)."""
    state = _mix(_mix((seed + _GOLDEN) & _MASK64) + (index + 1) * _GOLDEN)
    return (state >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z &= _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


class Draw(NamedTuple):
    """One token to be drawn by `seq`, behind the drafted tokens `after`."""

    seq: Sequence
    after: tuple[int, ...] = ()

    @property
    def generated(self) -> int:
        return self.seq.generated + len(self.after)

    @property
    def plain(self) -> bool:
        """Whether the most likely token is all that is asked for."""
        p = self.seq.request.params
        return p.greedy and p.logprobs is None and not self.adjusts

    @property
    def adjusts(self) -> bool:
        """Whether a mask, a bias, a penalty or a structure changes its logits."""
        p = self.seq.request.params
        return bool(
            p.logit_bias
            or p.repetition_penalty != 1.0
            or p.presence_penalty
            or p.frequency_penalty
            or self.generated < p.min_tokens
            or p.structure is not None
        )


class Sampler:
    """Draws tokens. Holds the seeds of unseeded sequences until they are forgotten."""

    def __init__(self, seed: int | None = None, structures: Structures | None = None) -> None:
        """`seed` makes sequences without a seed reproducible, too; None takes theirs from the system. `structures`:
        without them nobody may ask for one."""
        self._seed = seed
        self._structures = structures
        self._drawn: dict[int, int] = {}

    def seed_for(self, seq: Sequence) -> int:
        """The seed of a sequence: its request's, per sample; otherwise one drawn once and kept until forgotten."""
        given = seq.request.params.seed
        if given is not None:
            return derive_seed(given, seq.index)
        if seq.id not in self._drawn:
            own = int.from_bytes(os.urandom(8)) if self._seed is None else derive_seed(self._seed, seq.id + 1)
            self._drawn[seq.id] = own
        return self._drawn[seq.id]

    def forget(self, seq: Sequence) -> None:
        self._drawn.pop(seq.id, None)
        if self._structures is not None:
            self._structures.forget(seq)

    def sample(
        self, logits: torch.Tensor, rows: list[int], draws: list[Draw]
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """One token for each draw: `draws[i]` from `logits[rows[i]]`; logits [n, vocabulary], any dtype.

        Several draws may share a row. Returns the tokens and the log probabilities of those that asked.
        """
        params = [draw.seq.request.params for draw in draws]
        picked = logits if rows == list(range(len(logits))) else logits[rows]
        if all(draw.plain for draw in draws):
            return picked.argmax(-1).tolist(), [None] * len(draws)
        adjusted = picked.float() if picked.dtype != torch.float32 else picked.clone()
        for row, draw in zip(adjusted, draws, strict=True):
            if draw.adjusts:
                _adjust(row, draw)
        if strict := [i for i, p in enumerate(params) if p.structure is not None]:
            self._restrict(adjusted, strict, draws)
        random = [i for i, p in enumerate(params) if not p.greedy]
        if len(random) < len(draws):
            tokens = adjusted.argmax(-1)
        else:
            tokens = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
        if random:
            chances = [uniform(self.seed_for(draws[i].seq), draws[i].generated) for i in random]
            tokens[random] = _draw(adjusted[random], [params[i] for i in random], chances)
        drawn: list[int] = tokens.tolist()
        return drawn, _report(picked, draws, drawn)

    def _restrict(self, logits: torch.Tensor, rows: list[int], draws: list[Draw]) -> None:
        """Leave only the tokens that their structures allow to these rows of the logits [draws, vocabulary], in place.
        All at once: small operations cost their threads' meeting, each."""
        forbidden = torch.from_numpy(np.stack([self._forbidden(draws[i]) for i in rows])).to(logits.device)
        places = torch.tensor(rows, device=logits.device)
        logits[places] = logits[places].masked_fill(forbidden, float("-inf"))

    def _forbidden(self, draw: Draw) -> NDArray[np.bool_]:
        """Tokens [vocabulary] that its structure forbids. What would end the answer too early is, too, for as long as
        there is anything else to say."""
        if self._structures is None:
            raise OctavoError("the runner has no structures; build it with those of its model.")
        seq, params = draw.seq, draw.seq.request.params
        allowed = self._structures.allowed(seq, draw.after)
        early = seq.request.stop_token_ids if draw.generated < params.min_tokens else ()
        if ending := sorted({*early, *(self._structures.eos_ids if params.ignore_eos else ())}):
            others = allowed.copy()
            others[ending] = False
            allowed = others if others.any() else allowed
        return ~allowed


def _adjust(row: torch.Tensor, draw: Draw) -> None:
    """Apply the mask, bias and penalties of one draw to its logits [vocabulary], in place."""
    seq, device = draw.seq, row.device
    p = seq.request.params
    if draw.generated < p.min_tokens and seq.request.stop_token_ids and p.structure is None:  # else: `_forbidden`
        row[torch.tensor(sorted(seq.request.stop_token_ids), device=device)] = float("-inf")
    if p.logit_bias:
        row[torch.tensor(list(p.logit_bias), device=device)] += torch.tensor(
            list(p.logit_bias.values()), device=device, dtype=row.dtype
        )
    if p.repetition_penalty != 1.0:  # prompt and output; as in transformers
        seen = torch.tensor(sorted({*seq.tokens, *draw.after}), device=device)
        value = row[seen]
        row[seen] = torch.where(value > 0, value / p.repetition_penalty, value * p.repetition_penalty)
    if (p.presence_penalty or p.frequency_penalty) and draw.generated:  # output only
        ids, counts = torch.tensor([*seq.output, *draw.after], device=device).unique(return_counts=True)
        row[ids] -= counts * p.frequency_penalty + p.presence_penalty


def _draw(logits: torch.Tensor, params: list[SamplingParams], chances: list[float]) -> torch.Tensor:
    """Tokens [n] for logits [n, vocabulary] float32."""
    device = logits.device
    temperature = torch.tensor([p.temperature for p in params], device=device)[:, None]
    top = logits.amax(-1, keepdim=True)  # subtracted first, so that a tiny temperature cannot overflow
    probs = ((logits - top) / temperature).softmax(-1).nan_to_num_(0.0)
    for row, p in zip(probs, params, strict=True):
        if p.min_p > 0 or p.top_k > 0 or p.top_p < 1:
            row.masked_fill_(row < _least(row, p), 0.0)
    return _inverse_cdf(probs, torch.tensor(chances, device=device, dtype=torch.float64))


def _least(row: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    """The probability that a token needs to pass min-p, top-k and top-p: each filter is a threshold.

    Ties with the last token kept stay, so that the result does not depend on how ties are sorted.
    """
    least = p.min_p * row.max()
    if 0 < p.top_k < len(row):
        least = torch.maximum(least, row.topk(p.top_k).values[-1])
    if p.top_p < 1:  # the smallest set of most likely tokens whose share of what is left reaches top_p
        left = torch.where(row < least, 0.0, row)
        mass = left.sum(dtype=torch.float64)
        # All tokens below this floor together have less than the mass that may be dropped: no need to sort them.
        floor = mass * (1 - p.top_p) / len(row)
        best = left[left >= floor].sort(descending=True).values
        last = (best.cumsum(0, dtype=torch.float64) < mass * p.top_p).sum().clamp(max=len(best) - 1)
        least = torch.maximum(least, best[last])
    return least


def _inverse_cdf(weights: torch.Tensor, chances: torch.Tensor) -> torch.Tensor:
    """For each row of weights [n, vocabulary] the first token at which the running sum exceeds chance × total.

    Sums in float64 over chunks, then inside the chunk found: a running sum over the whole row costs ten times more.
    """
    size = weights.shape[1]
    chunks = torch.nn.functional.pad(weights, (0, -size % _CHUNK)).view(len(weights), -1, _CHUNK)
    sums = chunks.sum(-1).cumsum(-1, dtype=torch.float64)
    target = chances[:, None] * sums[:, -1:]
    chunk = _first_above(sums, target)
    before = torch.where(chunk > 0, sums.gather(1, (chunk - 1).clamp(min=0)), 0.0)
    inner = chunks[torch.arange(len(chunks), device=weights.device), chunk[:, 0]].cumsum(-1, dtype=torch.float64)
    return (chunk * _CHUNK + _first_above(inner, target - before))[:, 0].clamp(max=size - 1)


def _first_above(sums: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Index [n, 1] of the first running sum above the target; the last one with weight if rounding leaves none, and
    some index if the sums are no numbers (a model that overflowed must not fail the others' step)."""
    total = sums[:, -1:]
    found = torch.searchsorted(sums, torch.minimum(target, torch.nextafter(total, -total)), right=True)
    return found.clamp(max=sums.shape[1] - 1)


def _report(logits: torch.Tensor, draws: list[Draw], tokens: list[int]) -> list[TokenLogprobs | None]:
    out: list[TokenLogprobs | None] = [None] * len(draws)
    wanted = [i for i, draw in enumerate(draws) if draw.seq.request.params.logprobs is not None]
    if wanted:
        tops = [draws[i].seq.request.params.logprobs or 0 for i in wanted]
        for i, entry in zip(wanted, describe(logits[wanted], [tokens[i] for i in wanted], tops), strict=True):
            out[i] = entry
    return out


def describe(logits: torch.Tensor, tokens: list[int], tops: list[int]) -> list[TokenLogprobs]:
    """Log probability, rank and the `tops[i]` best alternatives of `tokens[i]` under raw logits [n, vocabulary]."""
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])
    ranks = ((logprobs > own).sum(-1) + 1).tolist()
    best = logprobs.topk(max(tops), dim=-1) if max(tops) else None
    out = []
    for i, (token, count) in enumerate(zip(tokens, tops, strict=True)):
        top = () if best is None or not count else _pairs(best.indices[i, :count], best.values[i, :count])
        out.append(TokenLogprobs(token, float(own[i, 0]), ranks[i], top))
    return out


def _pairs(ids: torch.Tensor, values: torch.Tensor) -> tuple[tuple[int, float], ...]:
    return tuple(zip(ids.tolist(), values.tolist(), strict=True))
