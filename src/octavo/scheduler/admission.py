"""What a request is charged on entry: named charge functions, and the lengths they predict from finished requests."""

from __future__ import annotations

from array import array
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from octavo.kv.api import KVManager
from octavo.scheduler.roster import Ints, Lengths
from octavo.types import Sequence

HISTORY = 256  # finished requests that predictions are learned from
FIRST_GUESS = 128  # tokens still to come when nothing has finished yet
QUANTILE = 0.75  # of the finished lengths that exceed what has been generated already


class LengthPredictor:
    """Predicts how many tokens a sequence will still generate, from the output lengths of finished ones."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted = array("q")
        self._history: Ints | None = None  # the same as an array, once somebody has asked

    def learn(self, generated: int) -> None:
        self._history = None
        self._recent.append(generated)
        insort(self._sorted, generated)
        if len(self._recent) > HISTORY:
            oldest = self._recent.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]

    def remaining(self, seq: Sequence) -> int:
        """Tokens still to come: exact where the request fixes its length, else a quantile of longer outputs."""
        room = max(0, seq.ceiling - len(seq.tokens))
        if seq.request.params.ignore_eos:
            return room
        generated = seq.generated
        longer = bisect_right(self._sorted, generated)
        if longer == len(self._sorted):
            return min(room, FIRST_GUESS if not self._sorted else max(32, generated // 2))
        at = longer + int(QUANTILE * (len(self._sorted) - longer - 1))
        return min(room, self._sorted[at] - generated)

    def remaining_of(self, lengths: Lengths) -> Ints:
        """`remaining` of all running sequences."""
        generated, count = lengths.generated, len(self._sorted)
        if not count:
            guess = np.full_like(generated, FIRST_GUESS)
        else:
            if self._history is None:
                self._history = np.array(self._sorted, dtype=np.int64)
            longer = self._history.searchsorted(generated, side="right")
            guess = self._history.take(_ranks(count).take(longer)) - generated
            outlived = longer == count
            if outlived.any():
                guess = np.where(outlived, np.maximum(32, generated // 2), guess)
        return np.minimum(lengths.room, np.maximum(lengths.least, guess))


@lru_cache(HISTORY)
def _ranks(count: int) -> Ints:
    """Of `count` sorted lengths the one that is predicted, by how many of them have been outlived already."""
    longer = np.arange(count + 1)
    return np.minimum(count - 1, longer + (QUANTILE * (count - 1 - longer)).astype(np.int64))


@dataclass(frozen=True, slots=True)
class Charge:
    """`upto` tokens must fit now, and `hold_back` blocks must stay available behind them."""

    upto: int
    hold_back: int


class Pool:
    """What charge functions look at. Made anew when anything has moved: it remembers what it adds up."""

    def __init__(self, kv: KVManager, running: Seq[Sequence], lengths: Lengths, predictor: LengthPredictor) -> None:
        self.kv = kv
        self.running = running
        self.lengths = lengths
        self.predictor = predictor

    @cached_property
    def outstanding(self) -> int:
        """Blocks that everybody running may still take."""
        return sum(outstanding(seq, self.kv) for seq in self.running)

    @cached_property
    def profile(self) -> PeakProfile:
        return peak_profile(self.kv, self.lengths, self.predictor.remaining_of(self.lengths))


@dataclass(frozen=True, slots=True)
class PeakProfile:
    """The running sequences, longest remaining first, summed up so that one more is quickly put among them.

    shortness  minus the tokens to come of each, which rises
    tokens     sum of the tokens known, up to and with each;  fixed: of the blocks of their window groups
    highest    largest number of blocks in use when one of those so far ends
    later      tokens in use when each ends if one more runs besides, without what that one knows, and with the tails;
               where no window group counts besides, of all that end from then on the most
    held       blocks they hold now
    """

    shortness: Ints
    tokens: Ints
    fixed: Ints
    highest: Ints
    later: Ints
    held: int


def peak_profile(kv: KVManager, lengths: Lengths, remaining: Ints) -> PeakProfile:
    """`remaining`: tokens still to come, per entry of `lengths`. Half of the tail blocks, on average, are not covered
    by a sum of tokens."""
    groups, size = kv.growing_groups, kv.block_size
    shortness = -remaining
    order = shortness.argsort(kind="stable")
    shortness, known = shortness[order], lengths.known[order]
    tokens, (count, tails, tails_beside) = known.cumsum(), _tails(len(known), size)
    ends = tokens - count * shortness
    highest, later = -groups * (-(ends + tails) // size), ends - shortness + tails_beside
    held = -int((-lengths.slots // size).sum()) * groups
    fixed = np.zeros(len(known), dtype=np.int64)
    if kv.windowed:
        fixed = np.array([window_blocks(kv, int(n)) for n in known - shortness], dtype=np.int64).cumsum()
        highest += fixed
        held += int(fixed[-1]) if len(fixed) else 0
    else:
        later = np.maximum.accumulate(later[::-1])[::-1]
    return PeakProfile(shortness, tokens, fixed, np.maximum.accumulate(highest), later, held)


@lru_cache(1024)
def _tails(running: int, size: int) -> tuple[Ints, Ints, Ints]:
    """For the first, the first two ... of so many sequences: how many they are, the tokens that half of their tail
    blocks come to, and the same if one more runs besides."""
    count = np.arange(1, running + 1)
    return count, size * ((count - 1) // 2), size * (count // 2)


ChargeFunction = Callable[[Sequence, Pool], Charge]


def charge_prompt(seq: Sequence, pool: Pool) -> Charge:
    """The tokens known now: more requests start, and some may have to be preempted later."""
    return Charge(len(seq.tokens), 0)


def charge_ceiling(seq: Sequence, pool: Pool) -> Charge:
    """Prompt + max_tokens, on top of what everybody running may still take: nobody is preempted, except samples of one
    request (n > 1) that do not fit the pool together, or that a region strategy could not copy the prompt for."""
    return Charge(seq.ceiling, pool.outstanding + unforked(seq, pool.kv))


def charge_peak(seq: Sequence, pool: Pool) -> Charge:
    """The exact future peak. Requests end one after another; when the one with r tokens to go ends, everyone with
    at least as much to go has grown by r. The largest of these sums must fit. (LightLLM's admission, with lengths
    learned online and in blocks.)
    """
    kv, profile = pool.kv, pool.profile
    groups, size = kv.growing_groups, kv.block_size
    remaining, known = pool.predictor.remaining(seq), len(seq.tokens)
    own = window_blocks(kv, known + remaining)
    at = int(profile.shortness.searchsorted(-remaining))
    before, fixed = (int(profile.tokens[at - 1]), int(profile.fixed[at - 1])) if at else (0, 0)
    peak = groups * (-(-(before + known + (at + 1) * remaining) // size) + at // 2) + fixed + own
    if at:
        peak = max(peak, int(profile.highest[at - 1]))
    if at < len(profile.later):  # it is still there when these end
        if kv.windowed:
            later = int((profile.fixed[at:] - groups * (-(profile.later[at:] + known) // size)).max())
        else:
            later = groups * -(-(int(profile.later[at]) + known) // size)
        peak = max(peak, later + own)
    now = profile.held + own + groups * -(-known // size)
    return Charge(known, max(0, peak - now))


CHARGES: Mapping[str, ChargeFunction] = {
    "prompt": charge_prompt,
    "ceiling": charge_ceiling,
    "peak": charge_peak,
}


def window_blocks(kv: KVManager, tokens: int) -> int:
    """Blocks that the window groups of a sequence of `tokens` tokens hold."""
    if not kv.windowed:
        return 0
    return kv.ceiling_blocks(tokens, tokens) - kv.growing_groups * -(-tokens // kv.block_size)


def outstanding(seq: Sequence, kv: KVManager) -> int:
    """Blocks that a running sequence, and the samples it has not forked yet, may still take."""
    return kv.outstanding(seq.id, seq.ceiling) + unforked(seq, kv)


def unforked(seq: Sequence, kv: KVManager) -> int:
    """Blocks for the samples of a request with n > 1 that will share its prompt and grow on their own."""
    if kv.final or seq.forked or seq.index or seq.request.params.n == 1:
        return 0
    shared = seq.prompt_length // kv.block_size * kv.growing_groups if kv.shares else 0
    return (seq.request.params.n - 1) * (kv.ceiling_blocks(seq.ceiling, seq.ceiling) - shared)
