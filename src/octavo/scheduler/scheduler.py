"""Who runs next: every step moves computed tokens towards known tokens, under one token budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from octavo import events as ev
from octavo.kv.api import KVManager, Ledger, longest_length
from octavo.kv.check import require
from octavo.kv.prefix import Digest, KeyChain, Miss, blake2b_256, encode_identity
from octavo.runner.api import NOBODY, Coasting, SeqWork, StepPlan, StepResult
from octavo.scheduler.accept import ceiling_of, check_queue, check_room
from octavo.scheduler.coasting import Foresight
from octavo.scheduler.config import SchedulerConfig, SchedulerConfigError
from octavo.scheduler.explain import Cause, Wait
from octavo.scheduler.fair_room import FairRoom
from octavo.scheduler.residents import Residents
from octavo.scheduler.speculation import Speculation
from octavo.scheduler.waiting import WaitingRoom
from octavo.types import FinishReason, Request, RequestError, Sequence, Status


class Progress(NamedTuple):
    """What one sequence got out of a step: a new token (None: none) and whether it ended with it. Who gained several
    tokens has one of these for each: `nth` counts them."""

    seq: Sequence
    token: int | None
    finished: FinishReason | None
    nth: int = 0


class Scheduler:
    """Owns the waiting line, the running set and the KV manager; plain integers, no clock of its own.

    One step is `plan(now)`, the runner's work, `settle(plan, result, now)`. Inputs and decisions go to `sink`.
    `engine_identity` (model, KV dtype ...) goes into every prefix hash. `chain` makes the key chain of a request from
    its growing token list; None: hashes of the tokens (`digest`). With `foresight`, which only a simulated
    runner has, plans leave out the sequences that coast.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVManager,
        sink: ev.Sink = ev.discard,
        *,
        engine_identity: tuple[str, ...] = (),
        digest: Digest = blake2b_256,
        chain: Callable[[Request, list[int]], KeyChain] | None = None,
        foresight: Foresight | None = None,
    ) -> None:
        self.config = config
        self.kv = kv
        self.requests: dict[str, list[Sequence]] = {}
        self.last_step: float | None = None  # when a plan was last asked for or settled
        self._sink = sink
        self._engine_identity = engine_identity
        self._digest = digest
        self._chain = chain or self._hashed
        self._residents = Residents(config, kv, sink, foresight)
        shares = self._residents.shares
        self._fair = None if shares is None else FairRoom(self._residents, shares, sink)
        self._waiting = WaitingRoom(self._residents, sink) if self._fair is None else self._fair
        self._speculation = Speculation(config, self._residents) if config.speculative_tokens else None
        self._next_id = 0
        self._ended_early: list[Progress] = []
        self._longest = longest_length(kv)
        if self._longest < 1:
            raise SchedulerConfigError(
                f"max_model_len is {config.max_model_len} tokens: every request would take "
                f"{kv.ceiling_blocks(1, 1)} blocks and the pool has {kv.capacity}, so nothing could ever run; lower "
                "max_model_len or give the engine more KV memory."
            )
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
        return bool(self.running or self._waiting or self._residents.copies or self._ended_early)

    # -- in and out ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> list[Sequence]:
        """Queue a request; one Sequence per sample. Raises RequestError, keeping nothing, if it can never run."""
        try:
            ceiling = self._accept(request)
        except RequestError as error:
            self.totals.refused += 1
            self._sink(ev.Refused(self.steps, now, request, error.code, str(error)))
            raise
        seqs = [self._sequence(request, i, ceiling, now) for i in range(request.params.n)]
        seqs[0].draws = tuple(seqs) if ceiling > len(request.prompt) else ()
        self.requests[request.id] = seqs
        self.totals.accepted += 1
        self._waiting.add(seqs[0])
        self._sink(ev.Submitted(self.steps, now, request, tuple(seq.id for seq in seqs)))
        return seqs

    def _accept(self, request: Request) -> int:
        if request.id in self.requests:
            raise RequestError(f"id {request.id!r} belongs to a request that still runs; choose another.", field="id")
        ceiling = ceiling_of(request, self.config.max_model_len, self._longest)
        check_room(request, ceiling, self.kv, self.config, self._longest)
        check_queue(request, self.config, self._waiting)
        return ceiling

    def _sequence(self, request: Request, index: int, ceiling: int, now: float) -> Sequence:
        # Tokens that nobody reads take a byte each.
        tokens: Any = bytearray(request.prompt) if isinstance(request.prompt, bytes) else list(request.prompt)
        self._next_id += 1
        seq = Sequence(self._next_id, request, index, tokens, ceiling, self._chain(request, tokens), now)
        seq.draws = (seq,)
        return seq

    def _hashed(self, request: Request, tokens: list[int]) -> KeyChain:
        identity = encode_identity(request.identity, *self._engine_identity)
        return KeyChain(tokens, self.kv.block_size, identity, self._digest)

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

    def preempt(self, request_id: str, now: float) -> int:
        """Take the memory of a running request back, between two steps; it keeps its tokens and resumes when there
        is room. Returns the sequences preempted. One that is protected (`max_preemptions`) keeps its memory."""
        self._sink(ev.PreemptAsked(self.steps, now, request_id))
        residents = self._residents
        for seq in self.requests.get(request_id, ()):
            if seq.status is Status.RUNNING and seq.id not in residents.protected:
                residents.preempt(seq, by=seq)
        return self._requeue_victims()

    def _requeue_victims(self) -> int:
        victims = self._residents.victims
        for seq in victims:
            self._waiting.add_preempted(seq)
        count = len(victims)
        victims.clear()
        return count

    def reset_cache(self) -> int:
        """Forget every cached prefix that nobody uses; returns the blocks that became free."""
        freed = self.kv.reset_cache()
        self._residents.relief += 1
        self._sink(ev.CacheReset(self.steps, freed))
        return freed

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        released = 0
        if seq.status is Status.RUNNING:
            released = self._residents.leave(seq)
        elif seq.forked or seq.index == 0:  # samples that were never forked stand in no line
            self._waiting.remove(seq)
        seq.status = Status.FINISHED
        seq.finish_reason = reason
        seq.draws = ()  # it referred to itself, and whoever runs without a garbage collector would keep it
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._waiting.predictor.learn(seq.generated)
        if self._speculation is not None:
            self._speculation.forget(seq)
        self.totals.finished += 1
        self._sink(ev.Finished(self.steps, seq.id, reason.value, len(seq.tokens), released))
        if all(other.status is Status.FINISHED for other in self.requests[seq.request.id]):
            del self.requests[seq.request.id]

    # -- one step -----------------------------------------------------------------------------------------------------

    def plan(self, now: float, budget: int | None = None) -> StepPlan:
        """Decide the next step. Decodes first, then prompt chunks of running sequences, then new ones, then drafts.

        `budget`: most prompt tokens in a step in which anybody decodes, so that those need not wait long for their next
        token. A block of them is always computed, and never more than `max_num_batched_tokens` allows.
        """
        residents = self._residents
        self.last_step = now
        self._sink(ev.PlanBegan(residents.step, now, budget))
        for seq in self._waiting.overdue(now):
            self._expire(seq, now)
        work: dict[int, SeqWork] = {}
        chunks: list[Sequence] = []
        coast = residents.coast
        if coast is not None:
            coast.wake()
        for seq in tuple(residents.awake):
            computed = seq.computed
            if len(seq.tokens) - computed > 1:
                chunks.append(seq)
            elif (computed < seq.slots or residents.grow(seq, computed + 1)) and (coast is None or not coast.take(seq)):
                work[seq.id] = SeqWork(seq, computed, 1, seq.draws)
        for seq in residents.victims:
            work.pop(seq.id, None)
        decoding = len(work) + (0 if coast is None else len(coast))
        left = self.config.max_num_batched_tokens - decoding
        self._waiting.paced = None
        if budget is not None and decoding and (paced := max(budget, self.kv.block_size)) < left:
            left = self._waiting.paced = paced
        if self._fair is not None:
            self._deal(chunks, left, work, now)
        else:
            self._in_order(chunks, left, work, now)
        if self._speculation is not None:
            self._speculation.extend(work)
        return self._planned(now, work)

    def _in_order(self, chunks: list[Sequence], left: int, work: dict[int, SeqWork], now: float) -> None:
        """Prompt chunks of running sequences, then those who wait, in their order."""
        residents = self._residents
        for seq in chunks:
            if left > 0:
                left -= self._chunk(seq, left, work)
        self._end_outgrown()
        if residents.victims:  # whoever lost its memory in this step does not compete for it in the same step
            for seq in residents.victims:
                work.pop(seq.id, None)
            self._requeue_victims()
        elif self._waiting:
            for seq, count in self._waiting.offer(left, now):
                end = seq.computed + count
                work[seq.id] = SeqWork(seq, seq.computed, count, seq.draws if end == len(seq.tokens) else ())

    def _deal(self, chunks: list[Sequence], left: int, work: dict[int, SeqWork], now: float) -> None:
        """The same under fair share: tenant by tenant, whoever has had least first."""
        assert self._fair is not None
        self._end_outgrown()
        self._fair.deal(chunks, left, now, self._chunk, work)
        self._end_outgrown()
        for seq in self._residents.victims:
            work.pop(seq.id, None)
        self._requeue_victims()

    def _end_outgrown(self) -> None:
        for seq in self._residents.outgrown:
            self._finish(seq, FinishReason.LENGTH)
            self._ended_early.append(Progress(seq, None, FinishReason.LENGTH))
        self._residents.outgrown.clear()

    def _planned(self, now: float, work: dict[int, SeqWork]) -> StepPlan:
        residents = self._residents
        coasting = NOBODY if residents.coast is None else residents.coast.depart()
        plan = StepPlan(residents.step, tuple(residents.copies), tuple(work.values()), coasting)
        residents.copies.clear()
        residents.step += 1
        if not plan.empty:
            log = tuple((w.seq.id, w.start, w.count, len(w.samples)) for w in plan.work)
            drafts = () if self._speculation is None else tuple((w.seq.id, w.draft) for w in plan.work if w.draft)
            self._sink(ev.Planned(plan.index, now, log, plan.copies, drafts))
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

    def _expire(self, seq: Sequence, now: float) -> None:
        for sample in self.requests[seq.request.id]:
            sample.stop_match = "deadline"
            self.stop(sample, FinishReason.ERROR, now)
            self._ended_early.append(Progress(sample, None, FinishReason.ERROR))
        self.totals.expired += 1

    def settle(
        self, plan: StepPlan, result: StepResult, now: float, on_written: Callable[[], None] | None = None
    ) -> list[Progress]:
        """Take the step's tokens: advance, publish full blocks, fork what waited for it, end what has ended.

        `on_written` is called when the step's KV is real and nothing has been given back yet: the moment at which the
        memory is as full as the step made it. Drafts are judged after it.
        """
        self._sink(ev.Settled(plan.index, now, result.tokens))
        self.last_step = now
        self._waiting.moved()
        if plan.copies:
            self.kv.done(plan.copies)
            self._residents.relief += 1
        self._written(plan)
        if self._fair is not None:
            self._fair.charge(plan.work, result.tokens)
        coast = self._residents.coast
        if coast is not None:
            coasted = coast.advance()
            self.totals.computed += coasted
            self.totals.generated += coasted
        if on_written is not None:
            on_written()
        out, self._ended_early = self._ended_early, []
        for (seq, _, count, samples, draft), drawn in zip(plan.work, result.tokens, strict=True):
            if seq.status is not Status.RUNNING:
                continue  # aborted while the step ran
            if draft:
                self.totals.computed += count
                out += self._judge(seq, draft, drawn)
                continue
            if len(samples) > 1:
                for child in self._residents.fork(seq, samples):
                    self._waiting.add(child)
            for sample, token in zip(samples, drawn, strict=True):
                out.append(self._advance(sample, token))
            if not samples and seq.computed >= seq.ceiling:  # max_tokens 0: only the prompt was wanted
                for sample in self.requests[seq.request.id]:
                    self._finish(sample, FinishReason.LENGTH)
                    out.append(Progress(sample, None, FinishReason.LENGTH))
        if coast is not None:
            coast.gained(item.seq.id for item in out if item.token is not None)
        return out

    def _written(self, plan: StepPlan) -> None:
        """The KV of the plan's tokens is real."""
        residents, size, windowed, totals = self._residents, self.kv.block_size, self.kv.windowed, self.totals
        for seq, start, count, _, draft in plan.work:
            if draft or seq.status is not Status.RUNNING:
                continue
            seq.computed = end = start + count
            totals.computed += count
            if end > seq.high_water:
                if seq.high_water > start:
                    totals.recomputed += seq.high_water - start
                seq.high_water = end
            else:
                totals.recomputed += count
            if end // size > seq.sealed // size or windowed:
                residents.seal(seq)

    # -- steps in which nothing is decided ----------------------------------------------------------------------------

    @property
    def undisturbed(self) -> int:
        """How many plans from now on would list nobody and change nothing: all who run coast, and who waits would be
        refused again. Only with foresight; as long as nobody is submitted or stopped."""
        coast = self._residents.coast
        if coast is None or self._residents.copies or self._ended_early:
            return 0
        return min(coast.undisturbed(), self._waiting.hopeless)

    def coasting(self, ahead: int) -> Coasting:
        """What the coasting sequences will add to the step that comes `ahead` steps after the next one."""
        return NOBODY if self._residents.coast is None else self._residents.coast.batch(ahead)

    def skip(self, steps: int, now: float) -> None:
        """So many undisturbed steps have run, the last one planned at `now`."""
        assert self._residents.coast is not None
        self._residents.step += steps
        self.last_step = now
        gained = self._residents.coast.advance(steps)
        self.totals.computed += gained
        self.totals.generated += gained
        self._waiting.moved()

    def fail(self, plan: StepPlan, now: float) -> list[Sequence]:
        """The runner could not run `plan`, or this part of one: end its requests with an error, leave all others as
        they are."""
        self._sink(ev.Failed(plan.index, now, tuple(work.seq.id for work in plan.work)))
        ended = []
        for request_id in dict.fromkeys(work.seq.request.id for work in plan.work):
            for seq in self.requests.get(request_id, ()):
                if seq.status is not Status.FINISHED:
                    self._finish(seq, FinishReason.ERROR)
                    ended.append(seq)
        self._residents.lost_copies(plan.copies)
        self._requeue_victims()
        self.kv.done(plan.copies)
        self._residents.relief += 1
        return ended

    def _judge(self, seq: Sequence, draft: tuple[int, ...], run: tuple[int, ...]) -> list[Progress]:
        """The step has verified a draft: take the tokens gained, up to where the sequence ends. The KV of all but the
        last is real."""
        out: list[Progress] = []
        for nth, token in enumerate(run):
            seq.computed = seq.high_water = len(seq.tokens)
            out.append(self._advance(seq, token, nth))
            if seq.status is not Status.RUNNING:
                break
        else:
            self._residents.drop_lookahead(seq)
        assert self._speculation is not None
        self._speculation.judged(seq, len(draft), min(len(out), len(run) - 1))
        return out

    def _advance(self, seq: Sequence, token: int, nth: int = 0) -> Progress:
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
        return Progress(seq, token, reason, nth)

    # -- explaining ---------------------------------------------------------------------------------------------------

    def explain(self, request_id: str, now: float, patience: float = 1.0) -> Wait | None:
        """Why a request does not run, with the numbers of this moment; None if it runs or is unknown.

        `patience`: seconds without a step after which the scheduler itself is the reason.
        """
        seqs = self.requests.get(request_id, ())
        seq = next((s for s in seqs if s.status is Status.WAITING and (s.forked or not s.index)), None)
        if seq is None:
            return None
        since = max(seq.submitted_at, self.last_step if self.last_step is not None else seq.submitted_at)
        if now - since > patience:
            return Wait(Cause.STALLED, int(now - since), 0, 0, "s")
        return self._waiting.explain(seq)

    def miss(self, request_id: str) -> Miss | None:
        """Why the prefix cache did not serve more of a live request's prompt."""
        seqs = self.requests.get(request_id)
        if not seqs:
            return None
        first = seqs[0]
        if first.status is Status.RUNNING and not first.preemptions:
            return self.kv.miss(first.keys, first.reused, first.id)
        return self.kv.miss(first.keys)

    def waiting_by_cause(self) -> Counter[str]:
        """How many sequences wait for which cause."""
        return self._waiting.by_cause()

    def standing(self) -> tuple[Mapping[int, Wait], Cause]:
        """The waits of the sequences that were offered memory in the last plan, by id, and what all others wait for;
        `explain` has the numbers of this moment."""
        return self._waiting.standing()

    def ledger(self) -> Ledger:
        """Where every slot of the pool is, at this moment."""
        self._residents.seal_all()
        return self._waiting.ledger()

    def check(self) -> None:
        """Raise InvariantError if the bookkeeping is wrong; when nothing is left, also if anything stays pinned."""
        residents, config = self._residents, self.config
        if residents.coast is not None:
            residents.coast.sync()
        self.kv.check()
        places = sum(residents.places(seq) for seq in residents.running)
        require(residents.slots == places, "occupied slots equal the running sequences")
        require(places <= config.max_num_seqs, "running sequences fit max_num_seqs")
        for seq in residents.running:
            require(seq.computed <= min(seq.slots, len(seq.tokens)), "computed <= slots, known", seq=seq.id)
            require(seq.preemptions <= config.max_preemptions, "preempted at most k times", seq=seq.id)
        if not self.requests:
            require(not residents.running, "no sequence without a request")
            waits_for_copies = self.kv.ledger().quarantined // self.kv.block_size
            available = self.kv.free + self.kv.evictable + waits_for_copies
            require(available == self.kv.capacity, "all memory is available at rest")
            left = residents.computes or residents.protected or not self._waiting.at_rest
            drafting = self._speculation is not None and not self._speculation.at_rest
            require(not left and not drafting, "nothing is left behind")
