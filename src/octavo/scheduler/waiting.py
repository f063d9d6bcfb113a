"""The waiting room: offers memory in order, lets later ones pass within bounds, and says why each one waits."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator

from octavo import events as ev
from octavo.kv.api import Ledger, Quote, Why
from octavo.kv.prefix import BlockKey
from octavo.scheduler.admission import CHARGES, Charge, LengthPredictor, Pool
from octavo.scheduler.explain import MEMORY_CAUSES, Cause, Holder, Wait, from_quote
from octavo.scheduler.queue import WaitingQueue
from octavo.scheduler.residents import Residents
from octavo.types import Sequence, Status


class WaitingRoom:
    """Sequences without memory. `offer` admits those it has room for; what it refuses, it can explain."""

    def __init__(self, residents: Residents, sink: ev.Sink) -> None:
        self.predictor = LengthPredictor()
        self._residents = residents
        self._config = residents.config
        self._kv = residents.kv
        self._sink = sink
        self._line = WaitingQueue(by_priority=self._config.order == "priority")
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._waits: dict[int, Wait] = {}  # of those offered memory in the last round
        self._barrier: Sequence | None = None  # the one at which the last round stopped
        self._calm: tuple[int, ...] | None = None  # what would have to change before another round is worth it

    def __len__(self) -> int:
        return len(self._line)

    @property
    def places(self) -> int:
        """Samples that wait: a request counts all of its n."""
        return sum(self._residents.places(seq) for seq in self._line)

    def add(self, seq: Sequence) -> None:
        self._line.add(seq)
        self._calm = None
        if seq.request.deadline is not None and seq.admitted_at is None:
            heapq.heappush(self._deadlines, (seq.request.deadline, seq.id, seq))

    def remove(self, seq: Sequence) -> None:
        self._line.remove(seq)
        self._waits.pop(seq.id, None)
        self._calm = None

    def overdue(self, now: float) -> Iterator[Sequence]:
        """Those whose deadline passed before they were ever admitted; each is given once."""
        while self._deadlines and self._deadlines[0][0] <= now:
            seq = heapq.heappop(self._deadlines)[2]
            if seq.status is Status.WAITING and seq.admitted_at is None:
                yield seq

    # -- offering memory ----------------------------------------------------------------------------------------------

    def offer(self, budget: int, now: float) -> list[tuple[Sequence, int]]:
        """Admit in order what there is room for: (sequence, tokens to compute now). One that is refused memory may be
        passed `max_skips` times."""
        if self._nothing_changed():
            return []
        before, self._waits, self._barrier = self._waits, {}, None
        admitted: list[tuple[Sequence, int]] = []
        passed: list[Sequence] = []
        for seq in self._line:
            wait = self._hindrance(seq, budget)
            if wait is None:
                quote = self._gate(seq)
                if quote.ok:
                    count = self._enter(seq, quote, budget, now)
                    admitted.append((seq, count))
                    budget -= count
                    for other in passed:
                        self._line.passed(other)
                    continue
                if quote.why is Why.FRAGMENTED and not self._residents.copies:
                    self._residents.compact(after=None)
                wait = from_quote(quote)
            self._tell(seq, wait, before.get(seq.id))
            if wait.cause in MEMORY_CAUSES:
                passed.append(seq)
            if wait.cause in (Cause.SLOTS, Cause.BUDGET) or self._may_not_pass(passed):
                self._barrier = seq
                break
        self._remember()
        return admitted

    def _state(self) -> tuple[int, int]:
        return (self._residents.changes, len(self._line))

    def _nothing_changed(self) -> bool:
        """Whether another round would end like the last one: running sequences only grow until one leaves."""
        calm = self._calm
        return calm is not None and calm[:2] == self._state() and self._kv.free + self._kv.evictable <= calm[2]

    def _remember(self) -> None:
        lasting = MEMORY_CAUSES | {Cause.SLOTS}
        calm = not self._residents.copies and all(wait.cause in lasting for wait in self._waits.values())
        self._calm = (*self._state(), self._kv.free + self._kv.evictable) if calm else None

    def _may_not_pass(self, passed: list[Sequence]) -> bool:
        limit = self._config.max_skips
        return len(passed) > limit or any(self._line.skips(seq) >= limit for seq in passed)

    def _hindrance(self, seq: Sequence, budget: int) -> Wait | None:
        """What keeps it from even asking for memory."""
        residents = self._residents
        places, free = residents.places(seq), self._config.max_num_seqs - residents.slots
        if places > free:
            holders = tuple(Holder(other.request.id, residents.places(other)) for other in residents.running)
            return Wait(Cause.SLOTS, places, free, places - free, "slots", holders=holders)
        if budget <= 0:
            return Wait(Cause.BUDGET, 1, 0, 1, f"of {self._config.max_num_batched_tokens} tokens a step")
        if residents.in_flight:
            return self._prefix_in_flight(seq)
        return None

    def _prefix_in_flight(self, seq: Sequence) -> Wait | None:
        """Its next missing block is being computed by someone else: waiting is cheaper than computing it twice."""
        keys, in_flight = self._keys(seq), self._residents.in_flight
        if not any(key.digest in in_flight for key in keys):
            return None
        reused = self._kv.quote(self._residents.ask(seq, 1, keys)).reuse // self._kv.block_size
        owner = in_flight.get(keys[reused].digest) if reused < len(keys) else None
        if owner is None:
            return None
        return Wait(Cause.BEHIND, 0, 0, 0, "blocks", behind=owner.request.id, shares_prefix=True)

    def _keys(self, seq: Sequence) -> tuple[BlockKey, ...]:
        """Blocks that may come from the cache. At least one token is computed, for its logits; prompt logprobs
        need every position."""
        if not self._kv.shares or seq.request.params.prompt_logprobs is not None:
            return ()
        return tuple(seq.keys.upto(len(seq.tokens) - 1))

    def _gate(self, seq: Sequence) -> Quote:
        """Whether there is room for what the request is charged on entry."""
        running = self._residents.running
        if seq.preemptions >= self._config.max_preemptions:
            charge = Charge(seq.ceiling, 0)  # from now on it is protected
        elif not running:
            charge = Charge(len(seq.tokens), 0)  # alone it always fits: submit has seen to that
        else:
            charge = CHARGES[self._config.admission](seq, Pool(self._kv, running, self.predictor))
        hold_back = max(charge.hold_back, self._residents.held_for_protected())
        return self._kv.quote(self._residents.ask(seq, charge.upto, self._keys(seq), hold_back))

    def _enter(self, seq: Sequence, gate: Quote, budget: int, now: float) -> int:
        """Take memory for the first chunk; returns the tokens in it."""
        known = len(seq.tokens)
        count = min(budget, known - gate.reuse)
        grant = self._residents.enter(seq, gate.reuse + count, self._keys(seq))
        self._line.remove(seq)
        again = seq.admitted_at is not None
        if not again:
            seq.reused = grant.reused
            self._residents.totals.hit_tokens += grant.reused
            self._residents.totals.query_tokens += known
            seq.admitted_at = now
        self._sink(ev.Admitted(self._residents.step, seq.id, known, grant.reused, again))
        return count

    def _tell(self, seq: Sequence, wait: Wait, before: Wait | None) -> None:
        self._waits[seq.id] = wait
        if before is None or before.key() != wait.key():
            numbers = (wait.need, wait.have, wait.short)
            self._sink(ev.Blocked(self._residents.step, seq.id, wait.cause.value, *numbers, wait.behind))

    # -- explaining ---------------------------------------------------------------------------------------------------

    def explain(self, seq: Sequence) -> Wait:
        """Why a waiting sequence does not run, with the numbers of this moment."""
        stored, barrier = self._waits.get(seq.id), self._barrier
        if stored is None and barrier is not None and barrier is not seq and barrier.status is Status.WAITING:
            wait = self.explain(barrier)
            if wait.cause in (Cause.SLOTS, Cause.BUDGET):
                return wait  # not that request's doing: the same holds for everyone behind it
            return Wait(Cause.BEHIND, 0, 0, 0, "requests", behind=barrier.request.id, behind_wait=wait)
        if stored is not None and stored.cause is Cause.BUDGET:
            return stored
        hindrance = self._hindrance(seq, self._config.max_num_batched_tokens)
        if hindrance is not None:
            return hindrance
        quote = self._gate(seq)
        return Wait(Cause.NEXT_STEP, 0, 0, 0, "") if quote.ok else from_quote(quote, self._holders())

    def _holders(self) -> tuple[Holder, ...]:
        held = [Holder(seq.request.id, self._kv.blocks_of(seq.id)) for seq in self._residents.running]
        return tuple(sorted(held, key=lambda holder: -holder.amount))

    def by_cause(self) -> Counter[str]:
        """How many sequences wait for which cause; those never offered anything share the barrier's."""
        causes = Counter(wait.cause.value for wait in self._waits.values())
        unseen = len(self._line) - causes.total()
        if unseen > 0:
            wait = self._waits.get(self._barrier.id) if self._barrier else None
            own = wait is not None and wait.cause in (Cause.SLOTS, Cause.BUDGET)
            causes[wait.cause.value if wait and own else Cause.BEHIND.value] += unseen
        return causes

    def ledger(self) -> Ledger:
        """The pool's ledger as the head of the line sees it: what is free to it and what is not."""
        first = self._line.first()
        wait = self._waits.get(first.id) if first else None
        if wait is None or wait.cause not in MEMORY_CAUSES:
            return self._kv.ledger(self._residents.held_for_protected())
        return self._kv.ledger(wait.held, wait.need)

    @property
    def at_rest(self) -> bool:
        """Nothing waits and nothing is remembered of anyone who did."""
        return not self._line and not self._waits
