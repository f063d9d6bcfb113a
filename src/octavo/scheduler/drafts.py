"""Prompt lookup: guesses what a sequence says next by finding what followed the same words before.

A guess costs a token of the step and no model; a wrong one changes nothing but the time. So each sequence is watched:
one whose guesses come true gets longer ones, one whose guesses do not gets none for a while, and then one more chance.
(Prompt lookup decoding, A. Saxena 2023; here with an index, so that a step never scans the context.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import cycle, islice

from octavo.types import Sequence

LONGEST = 4  # most last tokens that are compared; at least two must match
CANDIDATES = 16  # earlier places that are compared, latest first
STRIDE = 4096  # tokens indexed in one step: a long prompt is read over several
FIRST = 2  # tokens of the first draft; each that comes true doubles the next
WINDOW = 32  # drafted tokens after which the past counts half
JUDGED = 8  # drafted tokens before a sequence is judged
WORTH = 4  # one in so many drafted tokens must come true
REST, LONGEST_REST = 16, 512  # tokens without drafts after it did not pay; doubled each time


@dataclass(slots=True)
class _History:
    """Where each pair of neighbouring tokens ends: the latest place, and for every place the one before it."""

    latest: dict[int, int] = field(default_factory=dict)
    before: list[int] = field(default_factory=list)

    def read(self, tokens: list[int]) -> bool:
        """Index what is new, up to STRIDE tokens; True if nothing is left."""
        start = len(self.before)
        end = min(len(tokens), start + STRIDE)
        latest, before = self.latest, self.before
        last = tokens[start - 1] if start else -1
        for i in range(start, end):
            token = tokens[i]
            pair = last << 32 | token
            before.append(latest.get(pair, -1))
            latest[pair] = i
            last = token
        return end == len(tokens)

    def find(self, tokens: list[int]) -> int:
        """The earlier place that agrees with the end of `tokens` longest, the latest of these; -1 if none does."""
        best, longest = -1, 1
        at = self.before[-1]
        for _ in range(CANDIDATES):
            if at < 0:
                break
            same = _agreement(tokens, at)
            if same > longest:
                best, longest = at, same
                if same == LONGEST:
                    break
            at = self.before[at]
        return best


def _agreement(tokens: list[int], at: int) -> int:
    """How many tokens up to place `at` equal the last ones, at most LONGEST."""
    same, end = 0, len(tokens) - 1
    while same < LONGEST and same <= at and tokens[at - same] == tokens[end - same]:
        same += 1
    return same


@dataclass(slots=True)
class _Record:
    """How the drafts of one sequence fared."""

    history: _History = field(default_factory=_History)
    width: int = FIRST
    drafted: int = 0
    accepted: int = 0
    rest: int = REST
    resting_until: int = 0  # its length in tokens at which it gets another chance

    def learn(self, length: int, drafted: int, accepted: int) -> None:
        self.width = max(self.width, 2 * drafted) if accepted == drafted else accepted + 1
        self.drafted += drafted
        self.accepted += accepted
        if self.drafted >= JUDGED and WORTH * self.accepted < self.drafted:
            self.resting_until = length + self.rest
            self.rest = min(2 * self.rest, LONGEST_REST)
            self.width, self.drafted, self.accepted = 1, 0, 0
        elif self.drafted > WINDOW:
            self.drafted //= 2
            self.accepted //= 2
            self.rest = REST


class Drafter:
    """Proposes drafts and learns how they fared. Its state is a function of what it has been told."""

    def __init__(self, most: int) -> None:
        """`most`: tokens of the longest draft."""
        self._most = most
        self._records: dict[int, _Record] = {}

    def propose(self, seq: Sequence, room: int) -> tuple[int, ...]:
        """At most `room` tokens that may follow `seq.tokens`; () if nothing suggests any, or it does not pay."""
        tokens = seq.tokens
        record = self._records.get(seq.id)
        if record is None:
            record = self._records[seq.id] = _Record()
        if len(tokens) < record.resting_until or not record.history.read(tokens):
            return ()
        at = record.history.find(tokens)
        if at < 0:
            return ()
        # What followed then; where that runs into the end, the text repeats itself: so does the draft.
        width = min(record.width, self._most, room)
        return tuple(islice(cycle(tokens[at + 1 : at + 1 + width]), width))

    def learn(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """`accepted` of `drafted` tokens came true; `seq` has them already."""
        if seq.id in self._records:
            self._records[seq.id].learn(len(seq.tokens), drafted, accepted)

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended."""
        self._records.pop(seq.id, None)

    @property
    def at_rest(self) -> bool:
        """Nothing is remembered of anyone."""
        return not self._records
