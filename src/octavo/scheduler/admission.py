"""What a request is charged on entry: named charge functions, and the lengths they predict from finished requests."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from octavo.kv.api import KVManager
from octavo.types import Sequence

HISTORY = 256  # finished requests that predictions are learned from
FIRST_GUESS = 128  # tokens still to come when nothing has finished yet
QUANTILE = 0.75  # of the finished lengths that exceed what has been generated already


class LengthPredictor:
    """Predicts how many tokens a sequence will still generate, from the output lengths of finished ones."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def learn(self, generated: int) -> None:
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


@dataclass(frozen=True, slots=True)
class Charge:
    """`upto` tokens must fit now, and `hold_back` blocks must stay available behind them."""

    upto: int
    hold_back: int


class Pool:
    """What charge functions look at. Made anew when somebody has entered or left: it remembers what it adds up."""

    def __init__(self, kv: KVManager, running: Seq[Sequence], predictor: LengthPredictor) -> None:
        self.kv = kv
        self.running = tuple(running)
        self.predictor = predictor

    @cached_property
    def outstanding(self) -> int:
        """Blocks that everybody running may still take."""
        return sum(outstanding(seq, self.kv) for seq in self.running)

    @cached_property
    def profile(self) -> PeakProfile:
        """The running sequences, longest remaining first."""
        entries = sorted(((self.predictor.remaining(s), len(s.tokens), s) for s in self.running), key=lambda e: -e[0])
        remaining = np.array([entry[0] for entry in entries], dtype=np.int64)
        known = np.array([entry[1] for entry in entries], dtype=np.int64)
        kv = self.kv
        fixed = np.array([window_blocks(kv, r + k) for r, k, _ in entries], dtype=np.int64)
        held = sum(kv.growing_groups * -(-s.slots // kv.block_size) for s in self.running) + int(fixed.sum())
        return PeakProfile(remaining, known, fixed, held)


@dataclass(frozen=True, slots=True)
class PeakProfile:
    """Per running sequence, longest remaining first: tokens to come, tokens known, blocks of its window groups."""

    remaining: NDArray[np.int64]
    known: NDArray[np.int64]
    fixed: NDArray[np.int64]
    held: int  # blocks they hold now


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
    kv, size, profile = pool.kv, pool.kv.block_size, pool.profile
    remaining, known = pool.predictor.remaining(seq), len(seq.tokens)
    own_fixed = window_blocks(kv, known + remaining)
    at = int(np.searchsorted(-profile.remaining, -remaining))
    to_go = np.insert(profile.remaining, at, remaining)
    tokens = np.insert(profile.known, at, known).cumsum()
    fixed = np.insert(profile.fixed, at, own_fixed).cumsum()
    count = np.arange(1, len(to_go) + 1)
    # Half of the tail blocks, on average, are not covered by the sum of the tokens.
    blocks = kv.growing_groups * (-(-(tokens + count * to_go) // size) + (count - 1) // 2) + fixed
    now = profile.held + own_fixed + kv.growing_groups * -(-known // size)
    return Charge(known, max(0, int(blocks.max()) - now))


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
