"""Who runs next: every step moves computed tokens towards known tokens, under one token budget."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass

from octavo import events as ev
from octavo.kv.api import KVManager, Ledger, Quote, Why, longest_length
from octavo.kv.check import require
from octavo.kv.prefix import BlockKey, Digest, KeyChain, Miss, blake2b_256, encode_identity
from octavo.runner.api import SeqWork, StepPlan, StepResult
from octavo.scheduler.accept import ceiling_of, check_room
from octavo.scheduler.admission import CHARGES, Charge, LengthPredictor, Pool
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.explain import MEMORY_CAUSES, Cause, Holder, Wait, from_quote
from octavo.scheduler.queue import WaitingQueue
from octavo.scheduler.residents import Residents
from octavo.types import FinishReason, Request, RequestError, Sequence, Status


@dataclass(frozen=True, slots=True)
class Progress:
    """What one sequence got out of a step: the new token (None: none) and whether it ended."""

    seq: Sequence
    token: int | None
    finished: FinishReason | None


class Scheduler:
    """Owns the waiting line, the running set and the KV manager; plain integers, no clock of its own.

    One step is `plan(now)`, the runner's work, `settle(plan, result, now)`. Inputs and decisions go to `sink`.
    `engine_identity` (model, KV dtype ...) goes into every prefix hash.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        sink: ev.Sink = ev.discard,
        *,
        engine_identity: tuple[str, ...] = (),
        digest: Digest = blake2b_256,
    ) -> None:
        self.config = config
        self.kv = kv
        self.requests: dict[str, list[Sequence]] = {}
        self.last_step: float | None = None
        self._sink = sink
        self._engine_identity = engine_identity
        self._digest = digest
        self._residents = Residents(config, kv, sink)
        self._waiting = WaitingQueue(by_priority=config.order == "priority")
        self._waits: dict[int, Wait] = {}  # of those offered memory in the last plan
        self._barrier: Sequence | None = None  # the one at which the last plan stopped offering
        self._calm: tuple[int, ...] | None = None  # what would have to change before offering again is worth it
        self._predictor = LengthPredictor()
        self._next_id = 0
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._expired: list[Progress] = []
        self._longest = longest_length(kv)
        self.totals = self._residents.totals

    @property
    def longest(self) -> int:
        """The longest sequence that is accepted, in tokens: the model length, or the whole pool if that is less."""
        return min(self.config.max_model_len, self._longest)

    @property
    def running(self) -> list[Sequence]:
        return self._residents.running

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def steps(self) -> int:
        """Plans made so far."""
        return self._residents.step

    @property
    def busy(self) -> bool:
        return bool(self.running or self._waiting or self._residents.copies or self._expired)

    # -- in and out ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> list[Sequence]:
        """Queue a request; one Sequence per sample. Raises RequestError, keeping nothing, if it can never run."""
        try:
            ceiling = self._accept(request)
        except RequestError as error:
            self.totals.refused += 1
            self._sink(ev.Refused(self.steps, now, request, error.code, str(error)))
            raise
        seqs = [self._sequence(request, i, ceiling) for i in range(request.params.n)]
        seqs[0].draws = tuple(seqs) if ceiling > len(request.prompt) else ()
        self.requests[request.id] = seqs
        self.totals.accepted += 1
        self._wait(seqs[0])
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, seqs[0].id, seqs[0]))
        self._sink(ev.Submitted(self.steps, now, request, tuple(seq.id for seq in seqs)))
        return seqs

    def _accept(self, request: Request) -> int:
        if request.id in self.requests:
            raise RequestError(f"id {request.id!r} belongs to a request that still runs; choose another.", field="id")
        ceiling = ceiling_of(request, self.config.max_model_len, self._longest)
        check_room(request, ceiling, self.kv, self.config, self._longest)
        limit = self.config.max_queue
        if limit is not None:
            waiting = sum(self._residents.places(seq) for seq in self._waiting)
            if waiting + request.params.n > limit:
                raise RequestError(
                    f"{waiting} of at most {limit} sequences wait already (max_queue) and this request needs "
                    f"{request.params.n} places; try again later.",
                    code="queue_full",
                )
        return ceiling

    def _sequence(self, request: Request, index: int, ceiling: int) -> Sequence:
        tokens = list(request.prompt)
        identity = encode_identity(request.identity, *self._engine_identity)
        chain = KeyChain(tokens, self.kv.block_size, identity, self._digest)
        self._next_id += 1
        seq = Sequence(self._next_id, request, index, tokens, ceiling, chain)
        seq.draws = (seq,)
        return seq

    def _wait(self, seq: Sequence) -> None:
        self._waiting.add(seq)
        self._calm = None

    def abort(self, request_id: str, now: float) -> list[Sequence]:
        """End what is left of a request and give its memory back at once. An unknown or ended id is not an error."""
        ended = [seq for seq in self.requests.get(request_id, []) if seq.status is not Status.FINISHED]
        for seq in ended:
            self.stop(seq, FinishReason.ABORT, now)
        return ended

    def stop(self, seq: Sequence, reason: FinishReason, now: float) -> None:
        """End a sequence from outside, between two steps: a stop string was seen, or the client is gone."""
        if seq.status is not Status.FINISHED:
            self._sink(ev.Stopped(self.steps, now, seq.id, reason.value))
            self._finish(seq, reason)

    def reset_cache(self) -> int:
        """Forget every cached prefix that nobody uses; returns the blocks that became free."""
        return self.kv.reset_cache()

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        released = 0
        if seq.status is Status.RUNNING:
            released = self._residents.leave(seq)
        elif seq.forked or seq.index == 0:  # samples that were never forked stand in no line
            self._waiting.remove(seq)
            self._waits.pop(seq.id, None)
            self._calm = None
        seq.status = Status.FINISHED
        seq.finish_reason = reason
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._predictor.learn(seq.generated)
        self.totals.finished += 1
        self._sink(ev.Finished(self.steps, seq.id, reason.value, len(seq.tokens), released))
        if all(other.status is Status.FINISHED for other in self.requests[seq.request.id]):
            del self.requests[seq.request.id]

    # -- one step -----------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan:
        """Decide the next step. Decodes first, then prompt chunks of running sequences, then new ones."""
        residents = self._residents
        self.last_step = now
        if self._deadlines:
            self._expire(now)
        work: dict[int, SeqWork] = {}
        chunks: list[Sequence] = []
        for seq in tuple(residents.running):
            computed = seq.computed
            if len(seq.tokens) - computed > 1:
                chunks.append(seq)
            elif computed < seq.slots or residents.grow(seq, computed + 1):
                work[seq.id] = SeqWork(seq, computed, 1, seq.draws)
        budget = self.config.max_num_batched_tokens - len(work)
        for seq in chunks:
            if budget > 0:
                budget -= self._chunk(seq, budget, work)
        if residents.victims:  # whoever lost its memory in this step does not compete for it in the same step
            for seq in residents.victims:
                work.pop(seq.id, None)
                self._wait(seq)
            residents.victims.clear()
        elif self._waiting:
            self._admit(budget, work)
        return self._planned(now, work)

    def _planned(self, now: float, work: dict[int, SeqWork]) -> StepPlan:
        residents = self._residents
        plan = StepPlan(residents.step, tuple(residents.copies), tuple(work.values()))
        residents.copies.clear()
        residents.step += 1
        if not plan.empty:
            log = tuple((w.seq.id, w.start, w.count, len(w.samples)) for w in plan.work)
            self._sink(ev.Planned(plan.index, now, log, plan.copies))
        return plan

    def _chunk(self, seq: Sequence, budget: int, work: dict[int, SeqWork]) -> int:
        """Schedule the next prompt chunk of a running sequence; returns the tokens used."""
        if seq.status is not Status.RUNNING:
            return 0  # preempted for one before it
        known, start = len(seq.tokens), seq.computed
        count = min(budget, known - start)
        if start + count > seq.slots and not self._residents.grow(seq, start + count):
            return 0
        work[seq.id] = SeqWork(seq, start, count, seq.draws if start + count == known else ())
        return count

    def settle(self, plan: StepPlan, result: StepResult, now: float) -> list[Progress]:
        """Take the step's tokens: advance, publish full blocks, fork what waited for it, end what has ended."""
        residents, size = self._residents, self.kv.block_size
        self._sink(ev.Settled(plan.index, now, result.tokens))
        if plan.copies:
            self.kv.done(plan.copies)
        out, self._expired = self._expired, []
        for (seq, start, count, samples), drawn in zip(plan.work, result.tokens, strict=True):
            if seq.status is not Status.RUNNING:
                continue  # aborted while the step ran
            seq.computed = end = start + count
            if end > seq.high_water:
                self.totals.recomputed += max(0, seq.high_water - start)
                seq.high_water = end
            else:
                self.totals.recomputed += count
            self.totals.computed += count
            if end // size > seq.sealed // size:
                residents.seal(seq)
            if len(samples) > 1:
                for child in residents.fork(seq, samples):
                    self._wait(child)
            for sample, token in zip(samples, drawn, strict=True):
                out.append(self._advance(sample, token))
            if not samples and end >= seq.ceiling:  # max_tokens 0: only the prompt was wanted
                for sample in self.requests[seq.request.id]:
                    self._finish(sample, FinishReason.LENGTH)
                    out.append(Progress(sample, None, FinishReason.LENGTH))
        return out

    def _advance(self, seq: Sequence, token: int) -> Progress:
        seq.tokens.append(token)
        self.totals.generated += 1
        reason = None
        if token in seq.request.stop_token_ids and seq.generated > seq.request.params.min_tokens:
            reason = FinishReason.STOP
            seq.stop_match = token
        elif len(seq.tokens) >= seq.ceiling:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._finish(seq, reason)
        return Progress(seq, token, reason)

    # -- admission ----------------------------------------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            seq = heapq.heappop(self._deadlines)[2]
            if seq.status is not Status.WAITING or seq.admitted_at is not None:
                continue
            for sample in self.requests[seq.request.id]:
                self._sink(ev.Stopped(self.steps, now, sample.id, FinishReason.ERROR.value))
                self._finish(sample, FinishReason.ERROR)
                self._expired.append(Progress(sample, None, FinishReason.ERROR))
            self.totals.expired += 1

    def _admit(self, budget: int, work: dict[int, SeqWork]) -> None:
        """Offer memory to the waiting line in order. One that is refused may be passed `max_skips` times."""
        state = (self._residents.changes, len(self._waiting))
        available = self.kv.free + self.kv.evictable
        if self._calm is not None and self._calm[:2] == state and available <= self._calm[2]:
            return
        before, self._waits, self._barrier = self._waits, {}, None
        passed: list[Sequence] = []
        for seq in self._waiting:
            wait = self._hindrance(seq, budget)
            if wait is None:
                quote = self._gate(seq)
                if quote.ok:
                    budget -= self._enter(seq, quote, budget, work)
                    for other in passed:
                        self._waiting.passed(other)
                    continue
                if quote.why is Why.FRAGMENTED and not self._residents.copies:
                    self._residents.compact(after=None)
                wait = from_quote(quote)
            self._blocked(seq, wait, before.get(seq.id))
            if wait.cause in MEMORY_CAUSES:
                passed.append(seq)
            if wait.cause in (Cause.SLOTS, Cause.BUDGET) or self._may_not_pass(passed):
                self._barrier = seq
                break
        calm = all(wait.cause in MEMORY_CAUSES or wait.cause is Cause.SLOTS for wait in self._waits.values())
        state = (self._residents.changes, len(self._waiting))
        calm = calm and not self._residents.copies
        self._calm = (*state, self.kv.free + self.kv.evictable) if calm else None

    def _may_not_pass(self, passed: list[Sequence]) -> bool:
        limit = self.config.max_skips
        return len(passed) > limit or any(self._waiting.skips(seq) >= limit for seq in passed)

    def _hindrance(self, seq: Sequence, budget: int) -> Wait | None:
        """What keeps it from even asking for memory."""
        residents = self._residents
        places, free = residents.places(seq), self.config.max_num_seqs - residents.slots
        if places > free:
            holders = tuple(Holder(other.request.id, residents.places(other)) for other in self.running)
            return Wait(Cause.SLOTS, places, free, places - free, "slots", holders=holders)
        if budget <= 0:
            return Wait(Cause.BUDGET, 1, 0, 1, f"of {self.config.max_num_batched_tokens} tokens a step")
        if residents.in_flight:
            return self._prefix_in_flight(seq)
        return None

    def _prefix_in_flight(self, seq: Sequence) -> Wait | None:
        """Its next missing block is being computed by someone else: waiting is cheaper than computing it twice."""
        keys, in_flight = self._keys(seq), self._residents.in_flight
        if not any(key.digest in in_flight for key in keys):
            return None
        reused = self.kv.quote(self._residents.ask(seq, 1, keys)).reuse // self.kv.block_size
        owner = in_flight.get(keys[reused].digest) if reused < len(keys) else None
        if owner is None:
            return None
        return Wait(Cause.BEHIND, 0, 0, 0, "blocks", behind=owner.request.id, shares_prefix=True)

    def _keys(self, seq: Sequence) -> tuple[BlockKey, ...]:
        """Blocks that may come from the cache. At least one token is computed, for its logits; prompt logprobs
        need every position."""
        if not self.kv.shares or seq.request.params.prompt_logprobs is not None:
            return ()
        return tuple(seq.keys.upto(len(seq.tokens) - 1))

    def _gate(self, seq: Sequence) -> Quote:
        """Whether there is room for what the request is charged on entry."""
        if seq.preemptions >= self.config.max_preemptions:
            charge = Charge(seq.ceiling, 0)  # from now on it is protected
        elif not self.running:
            charge = Charge(len(seq.tokens), 0)  # alone it always fits: submit has seen to that
        else:
            pool = Pool(self.kv, self.running, self._predictor)
            charge = CHARGES[self.config.admission](seq, pool)
        hold_back = max(charge.hold_back, self._residents.held_for_protected())
        return self.kv.quote(self._residents.ask(seq, charge.upto, self._keys(seq), hold_back))

    def _enter(self, seq: Sequence, gate: Quote, budget: int, work: dict[int, SeqWork]) -> int:
        """Admit: take memory for the first chunk. Returns the tokens scheduled."""
        known = len(seq.tokens)
        count = min(budget, known - gate.reuse)
        again = seq.admitted_at is not None
        grant = self._residents.enter(seq, gate.reuse + count, self._keys(seq))
        self._waiting.remove(seq)
        if not again:
            seq.reused = grant.reused
            self.totals.hit_tokens += grant.reused
            self.totals.query_tokens += known
        seq.admitted_at = self.last_step
        self._sink(ev.Admitted(self.steps, seq.id, known, grant.reused, again))
        samples = seq.draws if grant.reused + count == known else ()
        work[seq.id] = SeqWork(seq, grant.reused, count, samples)
        return count

    def _blocked(self, seq: Sequence, wait: Wait, before: Wait | None) -> None:
        self._waits[seq.id] = wait
        if before is None or before.key() != wait.key():
            self._sink(ev.Blocked(self.steps, seq.id, wait.cause.value, wait.need, wait.have, wait.short, wait.behind))

    # -- explaining ---------------------------------------------------------------------------------------------------

    def explain(self, request_id: str, now: float, patience: float = 1.0) -> Wait | None:
        """Why a request does not run, with the numbers of this moment; None if it runs or is unknown.

        `patience`: seconds without a step after which the scheduler itself is the reason.
        """
        seqs = self.requests.get(request_id, ())
        seq = next((s for s in seqs if s.status is Status.WAITING and (s.forked or not s.index)), None)
        if seq is None:
            return None
        if self.last_step is not None and now - self.last_step > patience:
            return Wait(Cause.STALLED, int(now - self.last_step), 0, 0, "s")
        return self._explain(seq)

    def _explain(self, seq: Sequence) -> Wait:
        stored, barrier = self._waits.get(seq.id), self._barrier
        if stored is None and barrier is not None and barrier is not seq and barrier.status is Status.WAITING:
            wait = self._explain(barrier)
            if wait.cause in (Cause.SLOTS, Cause.BUDGET):
                return wait  # not that request's doing: the same holds for everyone behind it
            return Wait(Cause.BEHIND, 0, 0, 0, "requests", behind=barrier.request.id, behind_wait=wait)
        if stored is not None and stored.cause is Cause.BUDGET:
            return stored
        wait_now = self._hindrance(seq, self.config.max_num_batched_tokens)
        if wait_now is not None:
            return wait_now
        quote = self._gate(seq)
        return Wait(Cause.NEXT_STEP, 0, 0, 0, "") if quote.ok else from_quote(quote, self._holders())

    def _holders(self) -> tuple[Holder, ...]:
        held = [Holder(seq.request.id, self.kv.blocks_of(seq.id)) for seq in self.running]
        return tuple(sorted(held, key=lambda holder: -holder.amount))

    def miss(self, request_id: str) -> Miss | None:
        """Why the prefix cache did not serve more of a live request's prompt."""
        seqs = self.requests.get(request_id)
        return self.kv.miss(seqs[0].keys) if seqs else None

    def waiting_by_cause(self) -> Counter[str]:
        """How many sequences wait for which cause; those never offered anything share the barrier's."""
        causes = Counter(wait.cause.value for wait in self._waits.values())
        unseen = len(self._waiting) - causes.total()
        if unseen > 0:
            wait = self._waits.get(self._barrier.id) if self._barrier else None
            own = wait is not None and wait.cause in (Cause.SLOTS, Cause.BUDGET)
            causes[wait.cause.value if wait and own else Cause.BEHIND.value] += unseen
        return causes

    def ledger(self) -> Ledger:
        """Where every slot of the pool is, at this moment."""
        self._residents.seal_all()
        first = self._waiting.first()
        wait = self._waits.get(first.id) if first else None
        if wait is None or wait.cause not in MEMORY_CAUSES:
            return self.kv.ledger(self._residents.held_for_protected())
        return self.kv.ledger(wait.held, wait.need)

    def check(self) -> None:
        """Raise InvariantError if the bookkeeping is wrong; when nothing is left, also if anything stays pinned."""
        residents, config = self._residents, self.config
        self.kv.check()
        places = sum(residents.places(seq) for seq in residents.running)
        require(residents.slots == places, "occupied slots equal the running sequences")
        require(places <= config.max_num_seqs, "running sequences fit max_num_seqs")
        for seq in residents.running:
            require(seq.computed <= min(seq.slots, len(seq.tokens)), "computed <= slots, known", seq=seq.id)
            require(seq.preemptions <= config.max_preemptions, "preempted at most k times", seq=seq.id)
        if not self.requests:
            require(not residents.running and not self._waiting, "no sequence without a request")
            waits_for_copies = self.kv.ledger().quarantined // self.kv.block_size
            available = self.kv.free + self.kv.evictable + waits_for_copies
            require(available == self.kv.capacity, "all memory is available at rest")
            left = residents.in_flight or residents.protected or self._waits
            require(not left, "nothing is left behind")
