"""What each tenant may claim: its share of the slots and of the memory, and whom it may displace to get it.

A tenant is entitled to `its weight / the weights of all tenants present` of both. What the others leave it may use as
well, until they claim it. Two rules keep claims from going back and forth: only a tenant that stays within its share of
slots *and* memory may claim (or one that holds nothing at all), and nobody is displaced whose tenant would then hold
less than its share. So whoever was displaced has nothing to claim.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING

from octavo.kv.api import Quote, Why
from octavo.scheduler.victims import ORDERS
from octavo.types import Sequence

if TYPE_CHECKING:
    from octavo.scheduler.residents import Residents
    from octavo.scheduler.shares import Shares

Measure = Callable[[Sequence], int]


class Holdings:
    """Who holds what at one moment, by tenant. `waiting`: tenants that are present although they may hold nothing."""

    def __init__(self, residents: Residents, shares: Shares, waiting: frozenset[str]) -> None:
        self._residents = residents
        self._shares = shares
        self.sequences: Mapping[str, list[Sequence]] = defaultdict(list)
        for seq in residents.running:
            self.sequences[seq.request.tenant].append(seq)
        self.present = frozenset(self.sequences) | waiting
        self.slots = {t: sum(residents.places(seq) for seq in own) for t, own in self.sequences.items()}
        self._total = sum(shares.weight(tenant) for tenant in self.present)

    @cached_property
    def blocks(self) -> dict[str, int]:
        kv = self._residents.kv
        return {tenant: kv.held_by(seq.id for seq in own) for tenant, own in self.sequences.items()}

    def share(self, tenant: str, whole: int) -> Fraction:
        """The tenant's part of `whole` slots or blocks."""
        return Fraction(whole * self._shares.weight(tenant), self._total)

    def is_poor(self, tenant: str) -> bool:
        """Holds less than its share, of slots and of memory."""
        slots, blocks = self._residents.config.max_num_seqs, self._residents.kv.capacity
        if self.slots.get(tenant, 0) >= self.share(tenant, slots):
            return False
        return self.blocks.get(tenant, 0) < self.share(tenant, blocks)

    def has_slots_for(self, seq: Sequence) -> bool:
        """Whether its tenant stays within its share of the slots with it."""
        tenant = seq.request.tenant
        slots = self.slots.get(tenant, 0) + self._residents.places(seq)
        return slots <= self.share(tenant, self._residents.config.max_num_seqs)

    def has_blocks_for(self, tenant: str, more: int) -> bool:
        """Whether it stays within its share of the memory with `more` blocks."""
        return self.blocks.get(tenant, 0) + more <= self.share(tenant, self._residents.kv.capacity)

    def for_its_weight(self, held: Mapping[str, int], tenant: str) -> Fraction:
        """What it holds, to compare with others."""
        return Fraction(held[tenant], self._shares.weight(tenant))


def displaced_by(seq: Sequence, quote: Quote, holdings: Holdings, residents: Residents) -> tuple[Sequence, ...] | None:
    """Whom to preempt for a sequence that is entitled to get in; None if that would not help. `quote`: what the manager
    says to it now. For regions that never move that is one whose region is long enough, never several small ones."""
    if quote.why in (Why.QUOTA, Why.NEVER):
        return None
    lacking = residents.places(seq) - (residents.config.max_num_seqs - residents.slots)
    if lacking <= 0 and (quote.ok or (quote.why is Why.FRAGMENTED and not residents.kv.final)):
        return ()  # there is enough, though holes may have to be joined first
    choice = _Choice(seq, holdings, residents)
    if lacking > 0 and not choice.take(residents.places, holdings.slots, residents.config.max_num_seqs, lacking, 1):
        return None
    kv = residents.kv
    if not quote.ok:
        least = max(quote.take, quote.short) if kv.final else 1  # regions that go must leave a hole that is long enough
        freed = [kv.blocks_of(victim.id) for victim in choice.victims]
        short = quote.short - sum(freed) if not kv.final else 1 - any(n >= least for n in freed)
        if short > 0 and not choice.take(_held_by(residents), holdings.blocks, kv.capacity, short, least):
            return None
    return tuple(choice.victims)


def _held_by(residents: Residents) -> Measure:
    return lambda seq: residents.kv.blocks_of(seq.id)


class _Choice:
    """Victims for one sequence, chosen one by one: the cheapest of the tenant that holds most for its weight."""

    def __init__(self, seq: Sequence, holdings: Holdings, residents: Residents) -> None:
        limit = residents.config.max_preemptions
        self.victims: list[Sequence] = []
        self._holdings = holdings
        self._order = ORDERS[residents.config.victims]
        self._left = {
            tenant: [s for s in own if s.preemptions < limit and s not in residents.outgrown]
            for tenant, own in holdings.sequences.items()
            if tenant != seq.request.tenant
        }

    def take(self, measure: Measure, held: Mapping[str, int], whole: int, lacking: int, least: int) -> bool:
        """Choose until `lacking` is made up for by victims that give `least` or more each; False: there are not
        enough. No tenant gets below its share of `whole`."""
        left = dict(held)
        for victim in self.victims:
            left[victim.request.tenant] -= measure(victim)
        while lacking > 0:
            spare = {t: left[t] - self._holdings.share(t, whole) for t in self._left}
            eligible = {
                tenant: [s for s in own if least <= measure(s) <= spare[tenant]]
                for tenant, own in self._left.items()
                if spare[tenant] >= least
            }
            tenants = [tenant for tenant, own in eligible.items() if own]
            if not tenants:
                return False
            tenant = max(tenants, key=lambda t: (self._holdings.for_its_weight(left, t), t))
            victim = min(eligible[tenant], key=self._order)
            self._left[tenant].remove(victim)
            self.victims.append(victim)
            left[tenant] -= measure(victim)
            lacking -= measure(victim)
        return True


def growth_victim(needy: Sequence, rivals: Seq[Sequence], holdings: Holdings, residents: Residents) -> Sequence | None:
    """Whom to preempt for a running sequence that grows: one of the tenant that holds most for its weight, if that is
    more than its share, else one of its own tenant's. Possibly itself."""
    limit, capacity = residents.config.max_preemptions, residents.kv.capacity
    own, blocks = needy.request.tenant, holdings.blocks
    candidates: dict[str, list[Sequence]] = defaultdict(list)
    for seq in rivals:
        tenant = seq.request.tenant
        if seq.preemptions < limit and (tenant == own or blocks[tenant] > holdings.share(tenant, capacity)):
            candidates[tenant].append(seq)
    if not candidates:
        return None
    richest = max(candidates, key=lambda t: (holdings.for_its_weight(blocks, t), t == own, t))
    return min(candidates[richest], key=ORDERS[residents.config.victims])
