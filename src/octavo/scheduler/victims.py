"""Whom to preempt when a running sequence needs a block and there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from octavo.types import Sequence

Order = Callable[[Sequence], tuple[float, ...]]


def cheapest(seq: Sequence) -> tuple[float, ...]:
    """The fewest tokens to compute again, then the newest."""
    return (seq.computed, -seq.id)


def newest(seq: Sequence) -> tuple[float, ...]:
    """The last to arrive."""
    return (-seq.id,)


ORDERS: Mapping[str, Order] = {"cheapest": cheapest, "newest": newest}


def choose(
    needy: Sequence, running: Iterable[Sequence], order: Order, limit: int, *, by_priority: bool
) -> Sequence | None:
    """The victim for `needy`, possibly itself; None if everyone else is protected or of better priority.

    A sequence that was preempted `limit` times is protected: it was admitted with room to its end. `by_priority`: the
    worst priority goes first, and nobody of better priority goes at all; otherwise priorities mean nothing.
    """

    def worst(seq: Sequence) -> int:
        return -seq.request.priority if by_priority else 0

    candidates = [seq for seq in running if seq.preemptions < limit and worst(seq) <= worst(needy)]
    return min(candidates, key=lambda seq: (worst(seq), *order(seq)), default=None)
