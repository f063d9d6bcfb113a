"""The waiting room under fair share: tenants take turns, with prompts half done as with newcomers, and one that has
less than its share need not wait until somebody else has finished."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from octavo import events as ev
from octavo.kv.api import Quote, Why
from octavo.runner.api import SeqWork
from octavo.scheduler.claims import Holdings, displaced_by
from octavo.scheduler.explain import MEMORY_CAUSES, Cause, Part, Turn, Wait, from_quote
from octavo.scheduler.queue import TenantLines, WaitingQueue
from octavo.scheduler.residents import Residents
from octavo.scheduler.shares import Shares
from octavo.scheduler.waiting import WaitingRoom
from octavo.types import Sequence

Work = dict[int, SeqWork]
ChunkTaker = Callable[[Sequence, int, Work], int]

_CLAIMABLE = MEMORY_CAUSES | {Cause.SLOTS}


@dataclass(slots=True)
class _Deal:
    """The making of one plan."""

    budget: int
    now: float
    take_chunk: ChunkTaker
    work: Work
    before: Mapping[int, Wait]  # what those who wait were told last
    chunks: dict[str, deque[Sequence]] = field(default_factory=dict)  # by tenant
    lines: dict[str, Iterator[Sequence]] = field(default_factory=dict)
    passed: list[Sequence] = field(default_factory=list)  # for whom there was no room
    barrier: Sequence | None = None  # nobody gets in behind it, unless as of right


class FairRoom(WaitingRoom):
    """`deal` takes the place of `offer`: it gives the step's prompt tokens to prompts half done and to newcomers."""

    def __init__(self, residents: Residents, shares: Shares, sink: ev.Sink) -> None:
        self._shares = shares
        self._held: tuple[tuple[int, int, int], Holdings] | None = None  # who holds what, and as of when
        self._passed: list[Sequence] = []  # for whom there was no room in the last plan
        super().__init__(residents, sink)

    def _make_line(self) -> WaitingQueue | TenantLines:
        self._tenants = TenantLines(self._rank)
        return self._tenants

    @property
    def hopeless(self) -> int:
        return 0  # whose turn it is may change with every token

    def load(self, tenant: str) -> tuple[int, int]:
        """The tenant's own: if one floods the line, the others' places are not taken."""
        own = tuple(self._tenants.of(tenant))
        fresh = sum(seq.prompt_length for seq in own if seq.admitted_at is None)
        return sum(map(self._residents.places, own)), fresh

    def _holdings(self) -> Holdings:
        at = (self._residents.step, self._residents.changes, self._tenants.changes)
        if self._held is None or self._held[0] != at:
            self._held = (at, self._residents.holdings(self._tenants.tenants))
        return self._held[1]

    def _rank(self, tenant: str) -> tuple[int, ...]:
        """The smallest is served first. Among equals who holds fewer slots, then who has waited longer."""
        first = next(iter(self._tenants.of(tenant)), None)
        slots = self._holdings().slots.get(tenant, 0)
        return (self._shares.virtual(tenant), slots, 0 if first is None else first.id)

    # -- a plan -------------------------------------------------------------------------------------------------------

    def deal(self, chunks: Seq[Sequence], budget: int, now: float, take_chunk: ChunkTaker, work: Work) -> None:
        """Give the step's tokens to the tenants in turn: to the prompts it has half done, then to those who wait.

        `chunks`: running sequences with a prompt to go on with; `take_chunk` puts one into `work` and returns the
        tokens it got. In a plan in which anybody lost its memory only those who claim their tenant's share get in.
        """
        self._pool = self._held = None
        deal = _Deal(budget, now, take_chunk, work, self._waits)
        for seq in chunks:
            deal.chunks.setdefault(seq.request.tenant, deque()).append(seq)
        for tenant in self._tenants.tenants:
            deal.lines[tenant] = iter(self._tenants.of(tenant))
        self._shares.contend({*deal.lines, *deal.chunks})
        self._causes = None
        if not self._residents.victims:  # otherwise most are not asked, and what they were told goes on to hold
            self._waits, self._barrier = {}, None
        turns = [(self._rank(tenant), tenant) for tenant in {**deal.lines, **deal.chunks}]
        heapq.heapify(turns)
        while turns:
            tenant = heapq.heappop(turns)[1]
            if self._turn(tenant, deal):
                heapq.heappush(turns, (self._rank(tenant), tenant))
        if deal.barrier is not None:
            self._barrier = deal.barrier
        self._passed = deal.passed

    def _turn(self, tenant: str, deal: _Deal) -> bool:
        """One chunk, or one of those who wait; whether the tenant wants another turn."""
        if chunks := deal.chunks.get(tenant):
            if deal.budget <= 0:
                chunks.clear()
                return True
            tokens = deal.take_chunk(chunks.popleft(), deal.budget, deal.work)
            deal.budget -= tokens
            self._shares.pledge(tenant, tokens)
            return True
        seq = next(deal.lines.get(tenant, iter(())), None)
        return seq is not None and self._offer_to(seq, deal)

    def _offer_to(self, seq: Sequence, deal: _Deal) -> bool:
        """Admit it if there is room or if it may make room; whether the next of its tenant is to be asked, too."""
        by_right = bool(self._residents.victims) or deal.barrier is not None or self._is_held_up(deal.passed)
        if by_right and not self.entitled(seq):
            self._stop_at(seq, deal)
            return False
        if by_right and self._is_held_up(counting := [other for other in deal.passed if self._counts(other, seq)]):
            deal.barrier = deal.barrier or counting[-1]
            return False
        wait, quote = self._ask(seq, deal.budget)
        if wait is not None and wait.cause in _CLAIMABLE and (claimed := self._claim(seq, deal)):
            wait, quote, by_right = None, claimed, True
        if wait is None and quote is not None:
            for other in deal.passed:
                if not by_right or self._counts(other, seq):
                    self._line.passed(other)
            self._admit(seq, quote, deal)
            return True
        assert wait is not None
        if deal.budget <= 0 and wait.cause in _CLAIMABLE and self._victims(seq) is not None:
            wait = self._no_tokens()  # it could make room, but could not use it in this step
        self._tell(seq, wait, deal.before.get(seq.id))
        if wait.cause in _CLAIMABLE:
            deal.passed.append(seq)
        if wait.cause not in (Cause.SLOTS, Cause.BUDGET):
            return True
        deal.barrier = deal.barrier or seq
        return False

    def _is_held_up(self, passed: list[Sequence]) -> bool:
        return bool(passed) and self._may_not_pass(passed)

    def _counts(self, passed: Sequence, seq: Sequence) -> bool:
        """Whether `seq`, which claims its tenant's share, must mind that it passes that one: it is its own tenant's, or
        of another one that has less than its share, too. Without that a big request could wait for ever."""
        tenant = passed.request.tenant
        return tenant == seq.request.tenant or self._holdings().is_poor(tenant)

    def _stop_at(self, seq: Sequence, deal: _Deal) -> None:
        """It may not get in in this plan, and nobody behind it unless as of right."""
        if deal.barrier is not None:
            return
        if self._is_held_up(deal.passed):
            deal.barrier = deal.passed[-1]
            return
        wait, _ = self._ask(seq, deal.budget)
        if wait is not None:  # else there will be room for it in the next step
            self._tell(seq, wait, deal.before.get(seq.id))
            deal.barrier = seq

    def _ask(self, seq: Sequence, budget: int) -> tuple[Wait | None, Quote | None]:
        """What keeps it waiting, or the quote it can be admitted with."""
        wait = self._hindrance(seq, budget) or self._prefix_in_flight(seq)
        if wait is not None:
            return wait, None
        quote = self._gate(seq)
        if quote.why is Why.FRAGMENTED and not self._residents.copies:
            self._residents.compact(after=None)
        return (None, quote) if quote.ok else (from_quote(quote), None)

    def _claim(self, seq: Sequence, deal: _Deal) -> Quote | None:
        """Displace others for it if it has a right to that; what it can be admitted with then."""
        victims = self._victims(seq)
        if victims is None:
            return None
        freed = sum(deal.work[victim.id].count for victim in victims if victim.id in deal.work)
        if deal.budget + freed <= 0:
            return None
        for victim in victims:
            self._residents.preempt(victim, by=seq)
            deal.work.pop(victim.id, None)
        deal.budget += freed
        quote = self._claim_quote(seq)
        if quote.why is Why.FRAGMENTED and not self._residents.copies:
            self._residents.compact(after=None)
        return quote if quote.ok else None

    def _admit(self, seq: Sequence, quote: Quote, deal: _Deal) -> None:
        tokens = self._enter(seq, quote, deal.budget, deal.now)
        self._waits.pop(seq.id, None)
        end = seq.computed + tokens
        deal.work[seq.id] = SeqWork(seq, seq.computed, tokens, seq.draws if end == len(seq.tokens) else ())
        deal.budget -= tokens
        self._shares.pledge(seq.request.tenant, tokens)

    def charge(self, work: Iterable[SeqWork], tokens: Iterable[tuple[int, ...]]) -> None:
        """A step has run: book what everybody got."""
        for (seq, start, count, samples, draft), drawn in zip(work, tokens, strict=True):
            decodes = bool(draft) or (count == 1 and bool(samples) and start >= seq.prompt_length)
            self._shares.charge(seq.request.tenant, 0 if decodes else count, len(drawn))

    # -- claims -------------------------------------------------------------------------------------------------------

    def entitled(self, seq: Sequence) -> bool:
        """Whether it may claim room: its tenant stays within its share of slots and memory with it and with what its
        running ones will still take, or holds nothing at all; and it is not alone."""
        holdings = self._holdings()
        if len(holdings.present) < 2:
            return False
        own = holdings.sequences.get(seq.request.tenant)
        if not own:
            return True
        if not holdings.has_slots_for(seq):
            return False
        return holdings.has_blocks_for(seq.request.tenant, self._need(seq) + sum(map(self._growth, own)))

    def _target(self, seq: Sequence) -> int:
        """Tokens that admission reckons with."""
        if self._config.admission == "ceiling" or seq.preemptions >= self._config.max_preemptions:
            return seq.ceiling
        known = len(seq.tokens)
        return known if self._config.admission == "prompt" else known + self.predictor.remaining(seq)

    def _growth(self, seq: Sequence) -> int:
        return self._kv.outstanding(seq.id, self._target(seq))

    def _need(self, seq: Sequence) -> int:
        target = self._target(seq)
        reused = self._claim_quote(seq).reuse // self._kv.block_size * self._kv.growing_groups
        return max(0, self._kv.ceiling_blocks(target, min(target, seq.ceiling)) - reused)

    def _claim_quote(self, seq: Sequence) -> Quote:
        """Nothing is held back from who claims a share, except what protected sequences were promised."""
        protected = seq.preemptions >= self._config.max_preemptions
        upto = seq.ceiling if protected or self._config.admission == "ceiling" else len(seq.tokens)
        return self._kv.quote(self._residents.ask(seq, upto, self._keys(seq), self._residents.held_for_protected()))

    def _victims(self, seq: Sequence) -> tuple[Sequence, ...] | None:
        """Whom it may displace to get in as of right; None if it may not, or if that would not help."""
        if not self.entitled(seq):
            return None
        return displaced_by(seq, self._claim_quote(seq), self._holdings(), self._residents)

    # -- explaining ---------------------------------------------------------------------------------------------------

    def explain(self, seq: Sequence) -> Wait:
        """Why a waiting sequence does not run, with the numbers of this moment; where that is a matter of shares, what
        tenants have and had."""
        self._held = None
        wait = super().explain(seq)
        if wait.shares_prefix or wait.cause in (Cause.BUDGET, Cause.QUOTA):
            return wait
        if (held_up_by := self._held_up_by(seq)) is not None:
            behind = held_up_by.request.id
            return Wait(Cause.BEHIND, 0, 0, 0, "requests", behind=behind, behind_wait=self._waits[held_up_by.id])
        tenant = seq.request.tenant
        if wait.cause is Cause.NEXT_STEP or (seq is next(iter(self._tenants.of(tenant))) and self._can_claim(seq)):
            return Wait(Cause.NEXT_STEP, 0, 0, 0, "")
        if wait.cause is Cause.BEHIND:
            assert self._barrier is not None
            other = self._barrier.request.tenant
            had = self._shares.had
            return wait if other == tenant else wait._replace(turn=Turn(other, had(other), tenant, had(tenant)))
        holdings = self._holdings()
        if wait.cause is Cause.SLOTS:
            held, whole = holdings.slots.get(tenant, 0), self._config.max_num_seqs
        else:
            held, whole = holdings.blocks.get(tenant, 0), self._kv.capacity
        return wait._replace(part=Part(tenant, held, whole, holdings.share(tenant, whole)))

    def _can_claim(self, seq: Sequence) -> bool:
        victims = self._victims(seq)
        return bool(victims) or (victims is not None and self._claim_quote(seq).ok)

    def _held_up_by(self, seq: Sequence) -> Sequence | None:
        """Whom it may not pass any more although it could get in as of right."""
        before = self._passed[: self._passed.index(seq)] if seq in self._passed else self._passed
        counting = [other for other in before if other.id in self._waits and self._counts(other, seq)]
        return counting[-1] if self._is_held_up(counting) and self.entitled(seq) else None
