"""From logits to tokens: penalties, filters, seeded draws, log probabilities.

Order (vLLM's): min_tokens mask, logit bias, penalties; temperature; min-p, top-k, top-p; draw. Log probabilities are
those of the raw logits. Nothing is remembered between steps except the seed of an unseeded sequence: penalties are
recomputed from the tokens, and the random number of generated token i is a pure function of (seed, i), so batch mix,
preemption and recomputation cannot change a draw.
"""

from __future__ import annotations

import os
from collections.abc import Sequence as Seq

import torch

from octavo.runner.api import TokenLogprobs
from octavo.types import Request, RequestError, SamplingParams, Sequence, derive_seed

_MASK64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_TOP_P_GUESS = 1024  # candidates to sort before falling back to the whole vocabulary


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


def check_ids(request: Request, vocab_size: int) -> None:
    """Raise RequestError for a token id outside the vocabulary; to be called at submit, because inside a step it
    would fail everybody's."""
    fields: list[tuple[str, Seq[int]]] = [
        ("prompt", request.prompt),
        ("logit_bias", tuple(request.params.logit_bias)),
        ("stop_token_ids", tuple(request.stop_token_ids)),
    ]
    for field, ids in fields:
        if ids and not 0 <= (worst := min(ids) if min(ids) < 0 else max(ids)) < vocab_size:
            raise RequestError(
                f"{field} holds token id {worst}; the model's vocabulary has ids 0 to {vocab_size - 1}.",
                field=field,
            )


class Sampler:
    """Draws tokens. Holds the seeds of unseeded sequences until they are forgotten."""

    def __init__(self, seed: int | None = None) -> None:
        """`seed` makes sequences without a seed reproducible, too; None takes theirs from the system."""
        self._seed = seed
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

    def sample(
        self, logits: torch.Tensor, rows: list[int], seqs: list[Sequence]
    ) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """Draw one token for each sequence: `seqs[i]` from `logits[rows[i]]`; logits [n, vocabulary], any dtype.

        Several sequences may share a row. Returns the tokens and, by sequence id, the log probabilities asked for.
        """
        params = [seq.request.params for seq in seqs]
        picked = logits if rows == list(range(len(logits))) else logits[rows]
        if all(p.greedy and p.logprobs is None and not _adjusts(seq) for p, seq in zip(params, seqs, strict=True)):
            return picked.argmax(-1).tolist(), {}
        adjusted = picked.float() if picked.dtype != torch.float32 else picked.clone()
        for row, seq in zip(adjusted, seqs, strict=True):
            if _adjusts(seq):
                _adjust(row, seq)
        tokens = adjusted.argmax(-1)
        random = [i for i, p in enumerate(params) if not p.greedy]
        if random:
            chances = [uniform(self.seed_for(seqs[i]), seqs[i].generated) for i in random]
            tokens[random] = _draw(adjusted[random], [params[i] for i in random], chances)
        drawn: list[int] = tokens.tolist()
        return drawn, _report(picked, seqs, drawn)


def _adjusts(seq: Sequence) -> bool:
    p = seq.request.params
    return bool(
        p.logit_bias
        or p.repetition_penalty != 1.0
        or p.presence_penalty
        or p.frequency_penalty
        or seq.generated < p.min_tokens
    )


def _adjust(row: torch.Tensor, seq: Sequence) -> None:
    """Apply the mask, bias and penalties of one sequence to its logits [vocabulary], in place."""
    p, device = seq.request.params, row.device
    if seq.generated < p.min_tokens and seq.request.stop_token_ids:
        row[torch.tensor(sorted(seq.request.stop_token_ids), device=device)] = float("-inf")
    if p.logit_bias:
        row[torch.tensor(list(p.logit_bias), device=device)] += torch.tensor(
            list(p.logit_bias.values()), device=device, dtype=row.dtype
        )
    if p.repetition_penalty != 1.0:  # prompt and output; as in transformers
        seen = torch.tensor(sorted(set(seq.tokens)), device=device)
        value = row[seen]
        row[seen] = torch.where(value > 0, value / p.repetition_penalty, value * p.repetition_penalty)
    if (p.presence_penalty or p.frequency_penalty) and seq.generated:  # output only
        ids, counts = torch.tensor(seq.output, device=device).unique(return_counts=True)
        row[ids] -= counts * p.frequency_penalty + p.presence_penalty


def _draw(logits: torch.Tensor, params: list[SamplingParams], chances: list[float]) -> torch.Tensor:
    """Tokens [n] by inverse CDF in vocabulary order; logits [n, vocabulary] float32 are spoilt."""
    device = logits.device
    temperature = torch.tensor([p.temperature for p in params], device=device, dtype=torch.float32)
    top = logits.amax(-1, keepdim=True)  # subtracted first, so that a tiny temperature cannot overflow
    probs = ((logits - top) / temperature[:, None]).softmax(-1)
    if any(p.min_p > 0 for p in params):
        floor = torch.tensor([p.min_p for p in params], device=device)[:, None] * probs.amax(-1, keepdim=True)
        probs = torch.where(probs < floor, 0.0, probs)
    _keep_top_k(probs, [i for i, p in enumerate(params) if 0 < p.top_k < probs.shape[1]], params)
    _keep_top_p(probs, [i for i, p in enumerate(params) if p.top_p < 1.0], params)
    total = probs.cumsum(-1, dtype=torch.float64)
    target = torch.tensor(chances, device=device, dtype=torch.float64)[:, None] * total[:, -1:]
    highest = torch.nextafter(total[:, -1:], torch.zeros_like(total[:, -1:]))
    return torch.searchsorted(total, torch.minimum(target, highest), right=True).squeeze(-1)


def _keep_top_k(probs: torch.Tensor, rows: list[int], params: list[SamplingParams]) -> None:
    """Zero all but the k most likely tokens of `rows` (ties with the last one stay), in place."""
    if not rows:
        return
    counts = torch.tensor([params[i].top_k for i in rows], device=probs.device)
    chosen = probs[rows]
    best = chosen.topk(int(counts.max()), dim=-1).values
    probs[rows] = torch.where(chosen < best.gather(1, counts[:, None] - 1), 0.0, chosen)


def _keep_top_p(probs: torch.Tensor, rows: list[int], params: list[SamplingParams]) -> None:
    """Keep in `rows` the smallest set of most likely tokens whose mass reaches top_p, in place.

    Tokens as likely as the last one kept stay too, so that the result does not depend on how ties are sorted.
    """
    if not rows:
        return
    chosen = probs[rows]
    wanted = torch.tensor([params[i].top_p for i in rows], device=probs.device, dtype=torch.float64)[:, None]
    wanted = wanted * chosen.sum(-1, keepdim=True, dtype=torch.float64)
    best = chosen.topk(min(_TOP_P_GUESS, chosen.shape[1]), dim=-1).values
    mass = best.cumsum(-1, dtype=torch.float64)
    if best.shape[1] < chosen.shape[1] and bool((mass[:, -1:] < wanted).any()):
        best = chosen.sort(-1, descending=True).values
        mass = best.cumsum(-1, dtype=torch.float64)
    last = (mass < wanted).sum(-1, keepdim=True).clamp(max=best.shape[1] - 1)
    probs[rows] = torch.where(chosen < best.gather(1, last), 0.0, chosen)


def _report(logits: torch.Tensor, seqs: list[Sequence], tokens: list[int]) -> dict[int, TokenLogprobs]:
    wanted = [i for i, seq in enumerate(seqs) if seq.request.params.logprobs is not None]
    if not wanted:
        return {}
    tops = [seqs[i].request.params.logprobs or 0 for i in wanted]
    found = describe(logits[wanted], [tokens[i] for i in wanted], tops)
    return {seqs[i].id: entry for i, entry in zip(wanted, found, strict=True)}


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
