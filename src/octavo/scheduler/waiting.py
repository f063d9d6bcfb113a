"""The waiting room: offers memory in order, lets later ones pass within bounds, and says why each one waits."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq

from octavo import events as ev
from octavo.kv.api import Ledger, Quote, Why
from octavo.kv.prefix import Key
from octavo.scheduler.admission import CHARGES, Charge, LengthPredictor, Pool
from octavo.scheduler.explain import MEMORY_CAUSES, Cause, Holder, Wait, from_quote
from octavo.scheduler.queue import TenantLines, WaitingQueue
from octavo.scheduler.residents import Residents
from octavo.types import Sequence, Status

_FOR_EVER = 1 << 60  # plans


class WaitingRoom:
    """Sequences without memory. `offer` admits those it has room for; what it refuses, it can explain."""

    def __init__(self, residents: Residents, sink: ev.Sink) -> None:
        self.predictor = LengthPredictor()
        self._residents = residents
        self._config = residents.config
        self._kv = residents.kv
        self._sink = sink
        self._line = self._make_line()
        self.queued_tokens = 0  # prompt tokens of those that were never admitted; all samples of a request share them
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._waits: dict[int, Wait] = {}  # of those offered memory in the last round
        self._barrier: Sequence | None = None  # the one at which the last round stopped
        self._pool: tuple[int, Pool] | None = None  # what charges are computed from, and after which change
        self._relief = -1  # the relief that the last round knew of
        self._touched = False  # somebody has come or gone since
        self._again: dict[int, int] = {}  # sequence -> plan before which asking again is of no use without relief
        self._causes: Counter[str] | None = None  # how many wait for what, once somebody has asked
        self.paced: int | None = (
            None  # prompt tokens to which the last step was held, if that is less than it could take
        )

    def _make_line(self) -> WaitingQueue | TenantLines:
        return WaitingQueue(by_priority=self._config.order == "priority")

    def __len__(self) -> int:
        return len(self._line)

    def load(self, tenant: str) -> tuple[int, int]:
        """(samples that wait: a request counts all of its n, prompt tokens never admitted), whosever they are."""
        return sum(map(self._residents.places, self._line)), self.queued_tokens

    def add(self, seq: Sequence) -> None:
        self._line.add(seq)
        self._causes, self._touched = None, True
        if seq.admitted_at is None:
            self.queued_tokens += seq.prompt_length
        if seq.request.deadline is not None and seq.admitted_at is None:
            heapq.heappush(self._deadlines, (seq.request.deadline, seq.id, seq))
            if len(self._deadlines) > 2 * len(self._line) + 64:  # forget those that have been admitted or ended
                self._deadlines = [entry for entry in self._deadlines if _pending(entry[2])]
                heapq.heapify(self._deadlines)

    def add_preempted(self, seq: Sequence) -> None:
        """Back into the line; it is not offered memory in the step that took its own."""
        self.add(seq)
        quote = self._gate(seq)
        if not quote.ok:
            self._waits[seq.id] = from_quote(quote)

    def remove(self, seq: Sequence) -> None:
        self._leave_line(seq)
        self._causes, self._touched = None, True
        self._waits.pop(seq.id, None)

    def _leave_line(self, seq: Sequence) -> None:
        self._line.remove(seq)
        if seq.admitted_at is None:
            self.queued_tokens -= seq.prompt_length

    def overdue(self, now: float) -> Iterator[Sequence]:
        """Those whose deadline passed before they were ever admitted; each is given once."""
        while self._deadlines and self._deadlines[0][0] <= now:
            seq = heapq.heappop(self._deadlines)[2]
            if _pending(seq):
                yield seq

    def moved(self) -> None:
        """A step has been settled: what was added up over the running sequences is of the past."""
        self._pool = None

    # -- offering memory ----------------------------------------------------------------------------------------------

    def offer(self, budget: int, now: float) -> list[tuple[Sequence, int]]:
        """Admit in order what there is room for: (sequence, tokens to compute now). One that is refused memory may be
        passed `max_skips` times. It is not asked for again before that can be of use."""
        self._pool = None  # whoever runs has grown since anybody asked
        if budget > 0 and self.hopeless:
            return []
        before, self._waits, self._barrier, self._causes = self._waits, {}, None, None
        relieved = self._residents.relief != self._relief or self._kv.windowed
        self._relief = self._residents.relief
        admitted: list[tuple[Sequence, int]] = []
        passed: list[Sequence] = []
        for seq in self._line:
            if passed and self._may_not_pass(passed):
                self._barrier = passed[-1]
                break
            wait = self._hindrance(seq, budget)
            refused = before.get(seq.id)
            if wait is None and not relieved and refused is not None and self._lasts(seq, refused):
                wait = refused
            wait = wait or self._prefix_in_flight(seq)
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
                self._again[seq.id] = self._residents.step + self._lasting(quote)
            self._tell(seq, wait, refused)
            if wait.cause in MEMORY_CAUSES:
                passed.append(seq)
            if wait.cause in (Cause.SLOTS, Cause.BUDGET):
                self._barrier = seq
                break
        self._touched = False
        self._again = {one: self._again[one] for one in self._waits if one in self._again}
        return admitted

    def _lasting(self, quote: Quote) -> int:
        """For how many plans a refusal holds as long as there is no relief. Those who run take from what is available
        what they take from what is still to come. Only the future peak sinks meanwhile, as they get on and the one who
        waits does not: by a token a step; two blocks are for rounding."""
        if quote.why is Why.HELD and self._config.admission == "peak":
            return max(1, (quote.short - 2) * self._kv.block_size)
        return _FOR_EVER

    def _lasts(self, seq: Sequence, wait: Wait) -> bool:
        if wait.cause in MEMORY_CAUSES:
            return self._again.get(seq.id, 0) > self._residents.step
        return wait.shares_prefix

    @property
    def hopeless(self) -> int:
        """How many rounds from now on would end as the last one did: nobody has come or gone, nothing has happened that
        could help, and nobody waits for room in a step."""
        if not self._line:
            return _FOR_EVER
        if self._touched or self._residents.relief != self._relief:
            return 0
        if self._deadlines or self._kv.windowed or self._cause_of_unseen() is Cause.BUDGET:
            return 0
        return max(0, min(self._again.values(), default=_FOR_EVER) - self._residents.step)

    def standing(self) -> tuple[Mapping[int, Wait], Cause]:
        """The waits of those who were offered memory in the last round, by sequence, and what all others wait for."""
        return self._waits, self._cause_of_unseen()

    def _may_not_pass(self, passed: list[Sequence]) -> bool:
        limit = self._config.max_skips
        return len(passed) > limit or any(self._line.skips(seq) >= limit for seq in passed)

    def _hindrance(self, seq: Sequence, budget: int) -> Wait | None:
        """What keeps it from even asking for memory."""
        residents = self._residents
        places, free = residents.places(seq), self._config.max_num_seqs - residents.slots
        if places > free:
            return Wait(Cause.SLOTS, places, free, places - free, "slots")
        if budget <= 0:
            return self._no_tokens()
        return None

    def _no_tokens(self) -> Wait:
        return Wait(Cause.BUDGET, 1, 0, 1, f"of {self._config.max_num_batched_tokens} tokens a step")

    def _of_a_step(self) -> str:
        if self.paced is not None:
            return f"of the {self.paced} prompt tokens a step that itl_target leaves beside running streams"
        return f"of {self._config.max_num_batched_tokens} tokens a step"

    def _prefix_in_flight(self, seq: Sequence) -> Wait | None:
        """Its next missing block is being computed by someone else: waiting is cheaper than computing it twice."""
        residents, size = self._residents, self._kv.block_size
        if not residents.computes:
            return None
        keys = self._keys(seq)
        rivals = residents.computing(keys)
        if not rivals:
            return None
        at = self._kv.quote(residents.ask(seq, 1, keys)).reuse // size
        wanted = keys[: at + 1]
        for other, blocks in rivals:
            if other.sealed // size <= at < min(blocks, len(keys)) and other.keys.upto((at + 1) * size) == wanted:
                if residents.shares is not None and other.request.tenant != seq.request.tenant:
                    return None  # it may not be that tenant's turn for long
                return Wait(Cause.BEHIND, 0, 0, 0, "blocks", behind=other.request.id, shares_prefix=True)
        return None

    def _keys(self, seq: Sequence) -> Seq[Key]:
        """Blocks that may come from the cache. At least one token is computed, for its logits; prompt logprobs
        need every position."""
        if not self._kv.shares or seq.request.params.prompt_logprobs is not None:
            return ()
        return seq.keys.upto(len(seq.tokens) - 1)

    def _gate(self, seq: Sequence) -> Quote:
        """Whether there is room for what the request is charged on entry."""
        if self._kv.final or not self._residents.running:
            # Alone it always fits: submit has seen to that. And a final region is all it will ever take.
            charge = Charge(len(seq.tokens), 0)
        elif seq.preemptions >= self._config.max_preemptions:
            charge = Charge(seq.ceiling, 0)  # from now on it is protected
        else:
            charge = CHARGES[self._config.admission](seq, self._charging())
        hold_back = max(charge.hold_back, self._residents.held_for_protected())
        return self._kv.quote(self._residents.ask(seq, charge.upto, self._keys(seq), hold_back))

    def _charging(self) -> Pool:
        """The pool as it stands; what charges add up over it is kept until something moves."""
        residents = self._residents
        if self._pool is None or self._pool[0] != residents.changes:
            self._pool = (residents.changes, Pool(self._kv, residents.running, residents.lengths(), self.predictor))
        return self._pool[1]

    def _enter(self, seq: Sequence, gate: Quote, budget: int, now: float) -> int:
        """Take memory for the first chunk; returns the tokens in it."""
        known = len(seq.tokens)
        count = min(budget, known - gate.reuse)
        grant = self._residents.enter(seq, gate.reuse + count, gate)
        self._leave_line(seq)
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
        hindrance = self._hindrance(seq, self._config.max_num_batched_tokens) or self._prefix_in_flight(seq)
        if hindrance is not None and hindrance.cause is Cause.SLOTS:
            running = self._residents.running
            holders = tuple(Holder(other.request.id, self._residents.places(other)) for other in running)
            return hindrance._replace(holders=holders)
        stopped = barrier is not None and barrier.status is Status.WAITING
        if stored is None and barrier is not None and stopped and self._line.is_before(barrier, seq):
            wait = self.explain(barrier)
            if wait.cause is Cause.BUDGET:
                return wait  # not that request's doing: the same holds for everyone behind it
            return Wait(Cause.BEHIND, 0, 0, 0, "requests", behind=barrier.request.id, behind_wait=wait)
        if stored is not None and stored.cause is Cause.BUDGET:
            return stored
        if hindrance is not None:
            return hindrance
        quote = self._gate(seq)
        return Wait(Cause.NEXT_STEP, 0, 0, 0, "") if quote.ok else from_quote(quote, self._holders(seq, quote))

    def _holders(self, seq: Sequence, quote: Quote) -> tuple[Holder, ...]:
        """Who sits on it, largest first: for a quota, the tenant's own requests."""
        tenant = seq.request.tenant if quote.why is Why.QUOTA else None
        held = [
            Holder(other.request.id, self._kv.blocks_of(other.id))
            for other in self._residents.running
            if tenant is None or other.request.tenant == tenant
        ]
        return tuple(sorted(held, key=lambda holder: -holder.amount))

    def by_cause(self) -> Counter[str]:
        """How many sequences wait for which cause; those never offered anything share the barrier's."""
        if self._causes is None:
            causes = Counter(wait.cause.value for wait in self._waits.values())
            unseen = len(self._line) - causes.total()
            if unseen > 0:
                causes[self._cause_of_unseen().value] += unseen
            self._causes = causes
        return self._causes

    def _cause_of_unseen(self) -> Cause:
        barrier = self._barrier
        if barrier is None or barrier.id not in self._waits:
            return Cause.NEXT_STEP
        cause = self._waits[barrier.id].cause
        full = self._residents.slots >= self._config.max_num_seqs
        return cause if cause is Cause.BUDGET or (cause is Cause.SLOTS and full) else Cause.BEHIND

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
        return not self._line and not self._waits and not self.queued_tokens


def _pending(seq: Sequence) -> bool:
    """Whether it still waits for its first admission."""
    return seq.status is Status.WAITING and seq.admitted_at is None
