"""The seam between deciding and computing: a plan goes in, sampled tokens come out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from octavo.kv.api import Copy
from octavo.types import Sequence


class SeqWork(NamedTuple):
    """Compute KV for `count` tokens from position `start` on and write it through `seq.view`.

    The tokens are `seq.tokens[start:]` and then those of `draft`: guesses that `seq.tokens` does not contain, to be
    verified by this very step. `samples`: the sequences that draw a token from the logits of the last position. () for
    a prompt chunk that is not the last; (seq,) normally, and always with a draft; all samples of the request when a
    prompt with n > 1 is complete. The runner reads the sequences and never changes them.
    """

    seq: Sequence
    start: int
    count: int  # type: ignore[assignment]  # shadows tuple.count, which nobody needs here
    samples: tuple[Sequence, ...]
    draft: tuple[int, ...] = ()

    @property
    def known(self) -> int:
        """How many of the `count` tokens are certain."""
        return self.count - len(self.draft)

    def gained(self, drawn: Iterator[int]) -> tuple[int, ...]:
        """What drafted work gains: the tokens drawn behind the certain one, behind the first drafted one and so on, up
        to and with the first that differs from its draft. Takes no more of `drawn` than that."""
        run = []
        for token, guess in zip(drawn, (*self.draft, None), strict=False):
            run.append(token)
            if token != guess:
                break
        return tuple(run)


class Coasting(NamedTuple):
    """Sequences that go on by one token each and that a simulation does not list: how many, the sum of the tokens that
    their queries attend to, and for each of the model's windows the sum of min(those tokens, window). `woke`: those
    that had coasted until this step, whether or not they go on."""

    sequences: int = 0
    context: int = 0
    windowed: tuple[int, ...] = ()
    woke: tuple[Sequence, ...] = ()


NOBODY = Coasting()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: first the copies in order, then all work as one flat ragged batch (no padding). `coasting` is empty
    except in simulations."""

    index: int
    copies: tuple[Copy, ...]
    work: tuple[SeqWork, ...]
    coasting: Coasting = NOBODY

    @property
    def tokens(self) -> int:
        return sum(w.count for w in self.work) + self.coasting.sequences

    @property
    def decode_tokens(self) -> int:
        """Tokens of sequences that go on by one certain token, with their drafts."""
        return sum(w.count for w in self.work if w.count - len(w.draft) == 1) + self.coasting.sequences

    @property
    def empty(self) -> bool:
        return not self.work and not self.copies and not self.coasting.sequences


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of one token and of the most likely alternatives, best first: (token id, logprob)."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came out of a step.

    tokens[i][j] is the token drawn by `plan.work[i].samples[j]`; for work with a draft tokens[i] is the run of tokens
    that its sequence gained, 1 to len(draft)+1: the accepted drafts and the one drawn behind them. `logprobs` maps a
    sequence id to the logprobs of its drawn tokens, one each; `prompt_logprobs` maps a sequence id to those of the
    prompt tokens at positions start+1 .. start+count of its work (only where asked for).
    """

    tokens: tuple[tuple[int, ...], ...]
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)


class Runner(Protocol):
    """Who computes: torch, or a timing model."""

    def run(self, plan: StepPlan) -> StepResult:
        """Execute the plan. Raises only if the whole step failed; nothing is half done."""

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended: drop whatever is kept for it (random generator, penalty counts)."""
