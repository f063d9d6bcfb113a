"""Where the time of a step went, and what it could not have avoided reading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepProfile:
    """
    seconds       by part of the step
    weight_bytes  of all weights, which a step reads once
    kv_bytes      of the KV that the step's queries see, written tokens included
    """

    seconds: Mapping[str, float]
    tokens: int
    sequences: int
    logit_rows: int
    weight_bytes: int
    kv_bytes: int

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def floor(self, bandwidth: float) -> float:
        """Seconds that reading weights and KV once takes at `bandwidth` bytes per second."""
        return (self.weight_bytes + self.kv_bytes) / bandwidth
