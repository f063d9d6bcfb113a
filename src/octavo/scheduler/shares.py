"""Fair share between tenants: who has had how much, and whose turn it is. Whole numbers only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from math import lcm

GENERATED = 2  # what a generated token counts; a computed one counts 1


class Shares:
    """Virtual token counters, one a tenant: they rise with every token computed or generated for it, divided by its
    weight, and the tenant with the smallest one is served next. (VTC: Sheng et al., Fairness in Serving Large Language
    Models, OSDI 2024.) Tokens from the prefix cache cost nothing.

    A tenant *contends* while it wants more tokens of a step than decodes take by themselves: it has a sequence waiting
    or a prompt half done. One that begins to is lifted to the smallest counter of those that went on contending, less
    `grace` tokens: what it did not ask for in the past is not owed to it, but one that asks for little gets a step to
    itself at once. When nobody goes on, nobody is owed anything and all counters are forgotten.
    """

    def __init__(self, weights: Mapping[str, float], grace: int) -> None:
        fractions = {tenant: Fraction(str(weight)) for tenant, weight in weights.items()}
        self._one = lcm(*(fraction.denominator for fraction in fractions.values()))  # a weight of 1
        self._weights = {tenant: int(fraction * self._one) for tenant, fraction in fractions.items()}
        self._cost = lcm(self._one, *self._weights.values())  # of a token for a tenant of the weight 1 / `_one`
        self._grace = grace * (self._cost // self._one)
        self._counters: dict[str, int] = {}
        self._pledged: dict[str, int] = {}  # what the plan being made will add
        self._contending: frozenset[str] = frozenset()
        self._floor = 0  # where those begin who begin to contend

    def weight(self, tenant: str) -> int:
        """In units of which `Fraction(weight(a), weight(b))` is what matters."""
        return self._weights.get(tenant, self._one)

    def contend(self, tenants: Iterable[str]) -> None:
        """A plan begins, and these tenants want tokens of its step."""
        tenants = frozenset(tenants)
        staying = tenants & self._contending  # in no order, and nothing below depends on any
        self._pledged.clear()
        if not staying:
            self._counters, self._floor = {}, 0
        else:
            self._floor = max(self._floor, min(self._counters[tenant] for tenant in staying) - self._grace)
        for tenant in tenants - staying:
            self._counters[tenant] = self._lifted(tenant)
        self._counters = {t: n for t, n in self._counters.items() if t in tenants or n > self._floor}
        self._contending = tenants

    @property
    def contending(self) -> frozenset[str]:
        """As of the last plan."""
        return self._contending

    def _lifted(self, tenant: str) -> int:
        return max(self._counters.get(tenant, self._floor), self._floor)

    def pledge(self, tenant: str, tokens: int) -> None:
        """So many prompt tokens of the tenant are in the plan being made."""
        self._pledged[tenant] = self._pledged.get(tenant, 0) + self._price(tenant, tokens)

    def charge(self, tenant: str, computed: int, generated: int) -> None:
        """A step has been made. While nobody contends nobody is measured."""
        if self._contending:
            self._counters[tenant] = self._lifted(tenant) + self._price(tenant, computed + GENERATED * generated)

    def _price(self, tenant: str, tokens: int) -> int:
        return tokens * (self._cost // self.weight(tenant))

    def virtual(self, tenant: str) -> int:
        """Its counter, with what the plan being made will add: the smallest is next."""
        return self._lifted(tenant) + self._pledged.get(tenant, 0)

    def had(self, tenant: str) -> int:
        """The counter in tokens of a tenant of weight 1, for people."""
        return self.virtual(tenant) // (self._cost // self._one)
