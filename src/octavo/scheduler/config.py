"""The scheduler's settings, validated in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.errors import OctavoError


class SchedulerConfigError(OctavoError, ValueError):
    """A setting is out of its limits."""


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
    order                   `fcfs`, or `priority` (lower first, then first come)
    max_queue               most sequences that may wait (n samples count n); None: no limit
    quotas                  tenant -> most blocks its sequences may hold together
    """

    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    admission: str = "peak"
    victims: str = "cheapest"
    max_preemptions: int = 3
    max_skips: int = 8
    order: str = "fcfs"
    max_queue: int | None = None
    quotas: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_preemptions"):
            if getattr(self, name) < 1:
                raise SchedulerConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        for name, choices in (
            ("admission", ("prompt", "ceiling", "peak")),
            ("victims", ("cheapest", "newest")),
            ("order", ("fcfs", "priority")),
        ):
            if getattr(self, name) not in choices:
                raise SchedulerConfigError(
                    f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(choices)}."
                )
        if self.max_skips < 0:
            raise SchedulerConfigError(f"max_skips is {self.max_skips}; it must be 0 (strict order) or more.")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise SchedulerConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs "
                f"({self.max_num_seqs}): a step could not give every running sequence its token; "
                "raise the former or lower the latter."
            )
