"""The scheduler's settings, validated in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real

from octavo.errors import OctavoError


class SchedulerConfigError(OctavoError, ValueError):
    """A setting is out of its limits."""


_LEAST = {
    "max_model_len": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_preemptions": 1,
    "max_skips": 0,
    "max_queue": 1,
    "max_queued_tokens": 1,
    "speculative_tokens": 0,
    "speculative_limit": 1,
}
_OPTIONAL = ("max_queue", "max_queued_tokens")
_WEIGHTS = (0.001, 1000)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """
    max_model_len           longest sequence, prompt and generated tokens together
    max_num_seqs            most sequences that run at once
    max_num_batched_tokens  most tokens computed in one step (decodes first, the rest is for prompt chunks)
    admission               what a request is charged on entry: `prompt`, `ceiling` (prompt + max_tokens) or `peak`
                            (the exact future peak of everything running, with predicted lengths)
    victims                 whom to preempt: `cheapest` (fewest tokens to recompute) or `newest`
    max_preemptions         after so many a sequence is protected: it is admitted only when it can run to its end
    max_skips               how often later requests may pass one that waits for memory; 0: strict order
    order                   `fcfs`, or `priority` (lower first, then first come; the worst is preempted first), or
                            `fair`: tenants take turns by the tokens they have had (first come, first served within
                            each), and one that has less than its share of slots and memory may displace the sequences
                            of one that has more
    tenant_weights          tenant -> its part in a fair share, from 0.001 to 1000; 1 where none is given
    max_queue               most sequences that may wait (n samples count n), with order `fair` of each tenant, so that
                            one cannot take all places; None: no limit
    max_queued_tokens       most prompt tokens of requests that were never admitted yet (n samples count once), with
                            order `fair` of each tenant; None: no limit
    quotas                  tenant -> most blocks its sequences may hold together
    speculative_tokens      most tokens drafted ahead for a sequence and verified in the same step; 0: none
    speculative_limit       most tokens of decodes and drafts together in a step that drafts: as long as a step takes
                            its time to read the weights, more tokens cost little; on a CPU that is up to about 16
    """

    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    admission: str = "peak"
    victims: str = "cheapest"
    max_preemptions: int = 3
    max_skips: int = 8
    order: str = "fcfs"
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    max_queue: int | None = None
    max_queued_tokens: int | None = None
    quotas: Mapping[str, int] = field(default_factory=dict)
    speculative_tokens: int = 0
    speculative_limit: int = 16

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if name in _OPTIONAL and value is None:
                continue
            if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
                raise SchedulerConfigError(f"{name} is {value!r}; it must be a whole number of at least {least}.")
        for name, choices in (
            ("admission", ("prompt", "ceiling", "peak")),
            ("victims", ("cheapest", "newest")),
            ("order", ("fcfs", "priority", "fair")),
        ):
            if getattr(self, name) not in choices:
                raise SchedulerConfigError(
                    f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(choices)}."
                )
        self._check_weights()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise SchedulerConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs "
                f"({self.max_num_seqs}): a step could not give every running sequence its token; "
                "raise the former or lower the latter."
            )

    def _check_weights(self) -> None:
        least, most = _WEIGHTS
        for tenant, weight in self.tenant_weights.items():
            if not isinstance(weight, Real) or isinstance(weight, bool) or not least <= weight <= most:
                raise SchedulerConfigError(
                    f"tenant_weights of {tenant!r} is {weight!r}; it must be a number from {least} to {most}."
                )
        if self.tenant_weights and self.order != "fair":
            raise SchedulerConfigError(
                f"tenant_weights are given and order is {self.order!r}, which knows no tenants; set order to 'fair' or "
                "leave the weights out."
            )
