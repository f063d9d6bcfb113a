"""The running set and its memory: growing, preempting, forking, leaving. Everything that takes or gives blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from operator import attrgetter

from octavo import events as ev
from octavo.kv.api import Ask, Copy, Grant, KVManager, Quote, Why
from octavo.kv.prefix import Key
from octavo.scheduler.admission import outstanding
from octavo.scheduler.claims import Holdings, growth_victim
from octavo.scheduler.coasting import Coast, Foresight
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.roster import Lengths, Roster
from octavo.scheduler.shares import Shares
from octavo.scheduler.victims import ORDERS, choose
from octavo.types import Sequence, Status

_entered = attrgetter("entered")


@dataclass(slots=True)
class Totals:
    """Counters since the start. `recomputed` of the `discarded` tokens had to be computed again; the prefix cache
    kept the others. Hits count once, at first admission. `computed` counts drafted tokens, right or wrong."""

    preemptions: int = 0
    discarded: int = 0
    recomputed: int = 0
    hit_tokens: int = 0
    query_tokens: int = 0
    computed: int = 0
    generated: int = 0
    evicted: int = 0
    compactions: int = 0
    accepted: int = 0
    refused: int = 0
    expired: int = 0
    finished: int = 0
    drafted: int = 0
    drafts_accepted: int = 0


class Residents:
    """Sequences that hold memory. `slots` counts the samples a running request has still to fork as well."""

    def __init__(
        self, config: SchedulerConfig, kv: KVManager, sink: ev.Sink, foresight: Foresight | None = None
    ) -> None:
        self.config = config
        self.kv = kv
        self.totals = Totals()
        self.running: list[Sequence] = []
        self.slots = 0
        self.step = 0
        self.changes = 0  # how often somebody entered or left
        self.relief = 0  # how often something happened that can make room for someone who was refused memory
        self.copies: list[Copy] = []  # for the plan being made (forks leave theirs for the next one)
        self.victims: list[Sequence] = []  # preempted while the plan is being made
        self.outgrown: list[Sequence] = []  # whose final region turned out too small
        self.protected: dict[int, Sequence] = {}
        self._computing: dict[int, tuple[Sequence, int]] = {}  # who computes a prompt, of how many full blocks
        self._sink = sink
        self._roster = Roster()
        fair = config.order == "fair"
        self.shares = Shares(config.tenant_weights, config.max_num_batched_tokens) if fair else None
        self.coast: Coast | None = None
        if foresight is not None and self.shares is None:  # whose turn it is changes with every token: nobody coasts
            self.coast = Coast(foresight, self._roster, kv.block_size, self._extend)

    @property
    def awake(self) -> list[Sequence]:
        """The running sequences that a step has to look at, in order of entry."""
        return self.running if self.coast is None else self.coast.awake

    def lengths(self) -> Lengths:
        """How long everybody running is."""
        return self._roster.lengths(self.awake, 0 if self.coast is None else self.coast.now)

    def _join(self, seq: Sequence) -> None:
        """Into the running set."""
        self.running.append(seq)
        self.changes += 1
        seq.entered = self.changes
        self._roster.add(seq)
        if self.coast is not None:
            self.coast.enter(seq)

    # -- asking and taking --------------------------------------------------------------------------------------------

    def ask(self, seq: Sequence, upto: int, keys: Seq[Key] = (), hold_back: int = 0, lookahead: int = 0) -> Ask:
        request, expected = seq.request, seq.ceiling
        if request.output_length is not None:
            expected = min(expected, len(request.prompt) + request.output_length)
        quota = self._quota_left(seq) if self.config.quotas else None
        return Ask(seq.id, upto, len(seq.tokens), seq.ceiling, expected, keys, hold_back, quota, lookahead)

    def _quota_left(self, seq: Sequence) -> int | None:
        """Blocks its tenant may still take, less what the tenant's protected sequences were promised."""
        tenant = seq.request.tenant
        quota = self.config.quotas.get(tenant)
        if quota is None:
            return None
        own = [other for other in self.running if other.request.tenant == tenant]
        left = quota - self.kv.held_by(other.id for other in own)
        if seq.id not in self.protected:
            left -= sum(outstanding(other, self.kv) for other in own if other.id in self.protected)
        return max(0, left)

    def held_for_protected(self) -> int:
        """Blocks that protected sequences may still take: nobody else gets them."""
        if not self.protected:
            return 0
        return sum(outstanding(seq, self.kv) for seq in self.protected.values())

    def _take(self, seq: Sequence, quote: Quote) -> Grant:
        grant = self.kv.commit(quote)
        if seq.view is None:
            seq.view = self.kv.view(seq.id)
        seq.slots = grant.slots
        self.copies.extend(grant.copies)
        self.totals.evicted += grant.evicted
        self._sink(ev.Granted(self.step, seq.id, grant.slots, grant.taken, grant.evicted))
        return grant

    def places(self, seq: Sequence) -> int:
        """Slots it occupies: all samples of a request count until they are forked."""
        return 1 if seq.forked else seq.request.params.n

    def enter(self, seq: Sequence, upto: int, gate: Quote) -> Grant:
        """Admit a sequence whose gate was passed: take memory for its first `upto` tokens."""
        keys = gate.ask.keys
        grant = self._take(seq, gate if gate.ask.upto == upto else self.kv.quote(self.ask(seq, upto, keys)))
        seq.status = Status.RUNNING
        seq.computed = seq.sealed = grant.reused
        self.slots += self.places(seq)
        self._join(seq)
        if seq.preemptions >= self.config.max_preemptions:
            self.protected[seq.id] = seq
        if len(keys) > grant.reused // self.kv.block_size:
            self._computing[seq.id] = (seq, len(keys))
        return grant

    def computing(self, keys: Seq[Key]) -> list[tuple[Sequence, int]]:
        """Who computes a prompt that begins like these keys, and how many full blocks it has."""
        if not keys:
            return []
        size = self.kv.block_size
        return [entry for entry in self._computing.values() if entry[0].keys.upto(size)[0] == keys[0]]

    @property
    def computes(self) -> bool:
        """Whether any prompt is being computed whose blocks others could share."""
        return bool(self._computing)

    def grow(self, seq: Sequence, upto: int) -> bool:
        """Get slots for `upto` tokens, preempting if need be. False: not in this step."""
        if seq.status is not Status.RUNNING:
            return False
        self.seal(seq)
        while True:
            quote = self.kv.quote(self.ask(seq, upto, hold_back=self._held_from(seq)))
            if quote.ok:
                self._take(seq, quote)
                if not self.kv.shares:  # a region grows by more than was foreseen, or leaves its old place
                    self.relief += 1
                return True
            if quote.why is Why.NEVER:
                self.outgrown.append(seq)
                return False
            if quote.why is Why.FRAGMENTED and self.compact(after=seq):
                return False  # the hole behind it is usable once the copies have run
            if self.copies:
                return False  # their sources become free when the step has run
            if self.coast is not None:
                self.coast.sync()  # the choice goes by how far everybody is
            rivals: Seq[Sequence] = self.running
            if quote.why is Why.QUOTA:
                rivals = [other for other in rivals if other.request.tenant == seq.request.tenant]
            victim = self._victim_for(seq, rivals)
            if victim is None:
                return False
            self.preempt(victim, by=seq)
            if victim is seq:
                return False

    def _victim_for(self, seq: Sequence, rivals: Seq[Sequence]) -> Sequence | None:
        config = self.config
        if self.shares is not None:
            return growth_victim(seq, rivals, self.holdings(self.shares.contending), self)
        by_priority = config.order == "priority"
        return choose(seq, rivals, ORDERS[config.victims], config.max_preemptions, by_priority=by_priority)

    def holdings(self, waiting: Iterable[str]) -> Holdings:
        """Who holds what now, by tenant; only with fair shares. `waiting`: tenants that count although they may hold
        nothing."""
        assert self.shares is not None
        return Holdings(self, self.shares, frozenset(waiting))

    def _extend(self, filled: list[Sequence]) -> bool:
        """One more block for each of these sequences that have filled theirs, if nobody could be refused in this step
        whatever the order. False: ask one by one."""
        if self.protected or self.config.quotas or self.copies:
            return False
        spare = len(self.awake) * self.kv.growing_groups
        size, shares = self.kv.block_size, self.kv.shares
        evicted = self.kv.extend(
            [(s.id, s.computed, s.keys.between(s.sealed, s.computed) if shares else ()) for s in filled], spare
        )
        if evicted is None:
            return False
        self.totals.evicted += evicted
        for seq in filled:
            seq.sealed = seq.computed
            seq.slots += size
        self._roster.extended(filled)
        return True

    def _held_from(self, seq: Sequence) -> int:
        """A protected sequence was admitted with room to its end: nothing is held back from it."""
        return 0 if seq.id in self.protected else self.held_for_protected()

    def look_ahead(self, seq: Sequence, drafts: int) -> int:
        """Get slots for drafts behind the next token, without taking anything from anybody; for how many. They are gone
        with the next `seal`."""
        self.seal(seq)
        certain, hold_back = seq.computed + 1, self._held_from(seq)
        for count in (drafts, min(drafts, seq.slots - certain)):
            if count > 0:
                quote = self.kv.quote(self.ask(seq, certain + count, hold_back=hold_back, lookahead=count))
                if quote.ok:
                    self._take(seq, quote)
                    return count
        return 0

    def drop_lookahead(self, seq: Sequence) -> None:
        """The drafts are judged: blocks that only rejected ones needed go back."""
        self.seal(seq)
        assert seq.view is not None
        seq.slots = len(seq.view.tables[0]) * self.kv.block_size

    def preempt(self, victim: Sequence, by: Sequence, *, counted: bool = True) -> None:
        """Take all of its memory back; it keeps its tokens and computes them again when readmitted. `counted`:
        whether that is one of its `max_preemptions`."""
        if self.coast is not None:
            self.coast.rouse(victim)
        self.seal(victim)
        discarded = victim.computed
        released = self.leave(victim)
        victim.status = Status.WAITING
        victim.preemptions += counted
        self.victims.append(victim)
        self.totals.preemptions += 1
        self.totals.discarded += discarded
        self._sink(ev.Preempted(self.step, victim.id, by.id, released, discarded, victim.preemptions))

    # -- giving back --------------------------------------------------------------------------------------------------

    def seal(self, seq: Sequence) -> None:
        """Tell the manager how far the KV of a running sequence is real."""
        computed, size = seq.computed, self.kv.block_size
        if seq.sealed == computed:
            return
        keys: Seq[Key] = ()
        if self.kv.shares and computed // size > seq.sealed // size:
            keys = seq.keys.upto(computed)
        self.kv.seal(seq.id, computed, keys)
        seq.sealed = computed
        if keys and seq.id in self._computing:
            self.relief += 1  # who waits may share them
            if len(keys) >= self._computing[seq.id][1]:
                del self._computing[seq.id]
        if self.kv.windowed:  # blocks may have left the window
            self.relief += 1

    def seal_all(self) -> None:
        if self.coast is not None:
            self.coast.sync()
        for seq in self.running:
            self.seal(seq)

    def leave(self, seq: Sequence) -> int:
        """Out of the running set; returns the blocks that became available."""
        if self.coast is not None:
            self.coast.leave(seq)
        self._roster.remove(seq)
        self.seal(seq)
        self._computing.pop(seq.id, None)
        released = self.kv.release(seq.id)
        del self.running[bisect_left(self.running, seq.entered, key=_entered)]
        self.slots -= self.places(seq)
        self.changes += 1
        self.relief += 1
        self.protected.pop(seq.id, None)
        seq.view = None
        seq.slots = seq.computed = seq.sealed = 0
        return released

    def compact(self, after: Sequence | None) -> bool:
        """Join free holes; True if copies were planned for it."""
        self.seal_all()
        copies = self.kv.compact(self.kv.capacity, None if after is None else after.id)
        if not copies:
            return False
        self.copies.extend(copies)
        self.relief += 1
        self.totals.compactions += 1
        self._sink(ev.Compacted(self.step, copies, None if after is None else after.id))
        return True

    # -- forking ------------------------------------------------------------------------------------------------------

    def fork(self, parent: Sequence, samples: Seq[Sequence]) -> list[Sequence]:
        """The prompt is computed: every further sample shares or copies it. Returns those that found no room and
        have to compute the prompt themselves."""
        self.seal(parent)
        self.slots -= self.places(parent) - 1
        parent.forked = True
        parent.draws = (parent,)
        homeless = []
        for child in samples:
            if child is parent:
                continue
            grant = self.kv.fork(parent.id, child.id) if self._may_fork(parent) else None
            child.forked = True
            child.keys = parent.keys.fork(child.tokens)
            child.admitted_at = parent.admitted_at
            if isinstance(grant, Grant):
                self._settle_in(child, parent, grant)
            else:
                homeless.append(child)
            self._sink(ev.Forked(self.step, parent.id, child.id, isinstance(grant, Grant)))
        if self.kv.shares:
            parent.slots = parent.computed  # its tail is shared now: the next write must ask
        return homeless

    def _may_fork(self, parent: Sequence) -> bool:
        """A shared prompt costs its tenant nothing; a copied one must be within the quota."""
        left = self._quota_left(parent)
        return self.kv.shares or left is None or self.kv.blocks_of(parent.id) <= left

    def lost_copies(self, copies: Seq[Copy]) -> None:
        """Copies may not have run: whoever's KV they were to bring has to compute it again."""
        written = {page for copy in copies for page in range(copy.dst, copy.dst + copy.n)}
        for seq in tuple(self.running):
            if seq.view is not None and any(not written.isdisjoint(table) for table in seq.view.tables):
                self.preempt(seq, by=seq, counted=False)

    def _settle_in(self, child: Sequence, parent: Sequence, grant: Grant) -> None:
        child.status = Status.RUNNING
        child.view = self.kv.view(child.id)
        child.computed = child.sealed = child.high_water = parent.computed
        child.slots = grant.slots
        self.copies.extend(grant.copies)
        self.slots += 1
        self._join(child)
