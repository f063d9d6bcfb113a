"""Where the time of a step went. What the step could not have avoided is counted in `benching/costs.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepProfile:
    """`seconds` by part of the step; `logit_rows`: rows whose logits were computed."""

    seconds: Mapping[str, float]
    logit_rows: int
