"""What a request is charged on entry: named charge functions, and the lengths they predict from finished requests."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

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


ChargeFunction = Callable[[Sequence, "Pool"], Charge]


@dataclass(frozen=True, slots=True)
class Pool:
    """What a charge function looks at."""

    kv: KVManager
    running: Iterable[Sequence]
    predictor: LengthPredictor


def charge_prompt(seq: Sequence, pool: Pool) -> Charge:
    """The tokens known now: more requests start, and some may have to be preempted later."""
    return Charge(len(seq.tokens), 0)


def charge_ceiling(seq: Sequence, pool: Pool) -> Charge:
    """Prompt + max_tokens, on top of what everybody running may still take: nobody is ever preempted."""
    hold_back = sum(outstanding(other, pool.kv) for other in pool.running)
    return Charge(seq.ceiling, hold_back + unforked(seq, pool.kv))


def charge_peak(seq: Sequence, pool: Pool) -> Charge:
    """The exact future peak. Requests end one after another; when the one with r tokens to go ends, everyone with
    at least as much to go has grown by r. The largest of these sums must fit. (LightLLM's admission, with lengths
    learned online and in blocks.)
    """
    kv, size = pool.kv, pool.kv.block_size
    grow = kv.growing_groups
    everyone = [(pool.predictor.remaining(s), len(s.tokens), s) for s in (*pool.running, seq)]
    everyone.sort(key=lambda entry: -entry[0])
    peak = tokens = windowed = now = 0
    for count, (remaining, known, s) in enumerate(everyone, 1):
        tokens += known
        final = known + remaining
        fixed = kv.ceiling_blocks(final, final) - grow * -(-final // size)  # what its window groups hold
        windowed += fixed
        now += fixed + grow * -(-(known if s is seq else s.slots) // size)
        rounding = (count - 1) // 2  # half of the tail blocks, on average, are not covered by the sum
        peak = max(peak, grow * (-(-(tokens + count * remaining) // size) + rounding) + windowed)
    return Charge(len(seq.tokens), max(0, peak - now))


CHARGES: Mapping[str, ChargeFunction] = {
    "prompt": charge_prompt,
    "ceiling": charge_ceiling,
    "peak": charge_peak,
}


def outstanding(seq: Sequence, kv: KVManager) -> int:
    """Blocks that a running sequence, and the samples it has not forked yet, may still take."""
    own = kv.ceiling_blocks(seq.ceiling, seq.ceiling) - kv.blocks_of(seq.id)
    return max(0, own) + unforked(seq, kv)


def unforked(seq: Sequence, kv: KVManager) -> int:
    """Blocks for the samples of a request with n > 1 that will share its prompt and grow on their own."""
    if seq.forked or seq.index or seq.request.params.n == 1:
        return 0
    shared = seq.prompt_length // kv.block_size * kv.growing_groups if kv.shares else 0
    return (seq.request.params.n - 1) * (kv.ceiling_blocks(seq.ceiling, seq.ceiling) - shared)
