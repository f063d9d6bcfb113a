"""The waiting line: its order, and how often the one in front has been passed."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from octavo.types import Sequence


class WaitingQueue:
    """Sequences in the order in which they are offered memory: by priority (if asked for), then by arrival. A
    preempted sequence returns to the place that its arrival gives it, so before everything that came later."""

    def __init__(self, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._line: list[tuple[int, int, Sequence]] = []  # (priority, sequence id, ...): ids rise with arrival
        self._skipped: dict[int, int] = {}

    def _key(self, seq: Sequence) -> tuple[int, int]:
        return (seq.request.priority if self._by_priority else 0, seq.id)

    def add(self, seq: Sequence) -> None:
        insort(self._line, (*self._key(seq), seq), key=lambda entry: entry[:2])

    def remove(self, seq: Sequence) -> None:
        """Raises ValueError if the sequence does not wait here."""
        i = bisect_left(self._line, self._key(seq), key=lambda entry: entry[:2])
        if i == len(self._line) or self._line[i][2] is not seq:
            raise ValueError(f"sequence {seq.id} is not waiting")
        del self._line[i]
        self._skipped.pop(seq.id, None)

    def is_before(self, one: Sequence, other: Sequence) -> bool:
        return self._key(one) < self._key(other)

    def passed(self, seq: Sequence) -> None:
        """A later sequence was admitted before this one."""
        self._skipped[seq.id] = self._skipped.get(seq.id, 0) + 1

    def skips(self, seq: Sequence) -> int:
        return self._skipped.get(seq.id, 0)

    def first(self) -> Sequence | None:
        return self._line[0][2] if self._line else None

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        """In order; the entry given out last may be removed meanwhile."""
        at = 0
        while at < len(self._line):
            seq = self._line[at][2]
            yield seq
            if at < len(self._line) and self._line[at][2] is seq:
                at += 1


class TenantLines:
    """One line for each tenant, first come, first served; `rank` says which tenant's line is in front, the smallest
    first."""

    def __init__(self, rank: Callable[[str], tuple[int, ...]]) -> None:
        self._rank = rank
        self._lines: dict[str, WaitingQueue] = {}
        self.changes = 0  # how often a tenant came or went

    @property
    def tenants(self) -> Iterator[str]:
        return iter(self._lines)

    def of(self, tenant: str) -> WaitingQueue | tuple[()]:
        return self._lines.get(tenant, ())

    def add(self, seq: Sequence) -> None:
        tenant = seq.request.tenant
        if tenant not in self._lines:
            self._lines[tenant] = WaitingQueue(by_priority=False)
            self.changes += 1
        self._lines[tenant].add(seq)

    def remove(self, seq: Sequence) -> None:
        """Raises ValueError if the sequence does not wait here."""
        tenant = seq.request.tenant
        if tenant not in self._lines:
            raise ValueError(f"sequence {seq.id} is not waiting")
        line = self._lines[tenant]
        line.remove(seq)
        if not line:
            del self._lines[tenant]
            self.changes += 1

    def is_before(self, one: Sequence, other: Sequence) -> bool:
        return (*self._rank(one.request.tenant), one.id) < (*self._rank(other.request.tenant), other.id)

    def passed(self, seq: Sequence) -> None:
        """A later sequence was admitted before this one."""
        self._lines[seq.request.tenant].passed(seq)

    def skips(self, seq: Sequence) -> int:
        return self._lines[seq.request.tenant].skips(seq)

    def first(self) -> Sequence | None:
        return self._lines[min(self._lines, key=self._rank)].first() if self._lines else None

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[Sequence]:
        """Tenant by tenant."""
        for tenant in sorted(self._lines, key=self._rank):
            yield from self._lines[tenant]
