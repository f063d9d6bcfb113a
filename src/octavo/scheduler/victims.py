"""Whom to preempt when a running sequence needs a block and there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from octavo.types import Sequence

Order = Callable[[Sequence], tuple[float, ...]]


def cheapest(seq: Sequence) -> tuple[float, ...]:
    """Worst priority first, then the fewest tokens to compute again, then the newest."""
    return (-seq.request.priority, seq.computed, -seq.id)


def newest(seq: Sequence) -> tuple[float, ...]:
    """Worst priority first, then the last to arrive."""
    return (-seq.request.priority, -seq.id)


ORDERS: Mapping[str, Order] = {"cheapest": cheapest, "newest": newest}


def choose(needy: Sequence, running: Iterable[Sequence], order: Order, limit: int) -> Sequence | None:
    """The victim for `needy`, possibly itself; None if everyone else is protected or of better priority.

    A sequence that was preempted `limit` times is protected: it was admitted with room to its end.
    """
    candidates = [seq for seq in running if seq.preemptions < limit and seq.request.priority >= needy.request.priority]
    return min(candidates, key=order, default=None)
