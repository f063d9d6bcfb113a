"""What a kind of step takes, part by part, against what the machine needs at least for its bytes and arithmetic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.report.wording import percent, seconds, size

if TYPE_CHECKING:
    from octavo.benching.meter import StepRecord

ENOUGH = 5  # steps of one batch size that make it a kind; fewer are taken only if there is nothing else
NAMED = 4  # parts that the verdict names


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine can do: bytes read and floating-point operations per second. `flops` 0: not known."""

    bandwidth: float
    flops: float

    def floor(self, bytes_: float, flops: float) -> float:
        """Seconds that both take at least: the larger of the two."""
        return max(bytes_ / self.bandwidth, flops / self.flops if self.flops else 0.0)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a step: what it took, and what it had to read and compute."""

    name: str
    seconds: float
    bytes: float
    flops: float


@dataclass(frozen=True, slots=True)
class StepKind:
    """Steps of one kind, each value the mean over the middle half of them by duration. Times in seconds.

    decode     every sequence computes one token (and its drafts); otherwise prompts alone are computed
    context    KV tokens that the step's queries see, of all sequences together
    parts      sum to the whole step
    profiled   whether the runner told its parts apart
    """

    decode: bool
    steps: int
    sequences: float
    tokens: float
    context: float
    parts: tuple[Part, ...]
    limits: Limits
    profiled: bool

    @property
    def name(self) -> str:
        if self.decode:
            return f"decode at batch {self.sequences:.0f}"
        return f"prompt chunk of {self.tokens:,.0f} tokens"

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def bytes(self) -> float:
        return sum(part.bytes for part in self.parts)

    @property
    def flops(self) -> float:
        return sum(part.flops for part in self.parts)

    @property
    def floor(self) -> float:
        return self.limits.floor(self.bytes, self.flops)

    @property
    def bound(self) -> str:
        """What the floor is made of: memory or arithmetic."""
        return "memory" if self.bytes / self.limits.bandwidth >= self.floor else "arithmetic"

    @property
    def ratio(self) -> float:
        return self.seconds / self.floor

    def floor_of(self, part: Part) -> float:
        return self.limits.floor(part.bytes, part.flops)

    def to_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "decode": self.decode,
            "steps": self.steps,
            "sequences": self.sequences,
            "tokens": self.tokens,
            "context": self.context,
            "seconds": self.seconds,
            "bytes": self.bytes,
            "flops": self.flops,
            "floor_seconds": self.floor,
            "bound": self.bound,
            "ratio": self.ratio,
            "bandwidth": self.limits.bandwidth,
            "flops_per_second": self.limits.flops,
            "profiled": self.profiled,
            "parts": [
                {
                    "name": part.name,
                    "seconds": part.seconds,
                    "share": part.seconds / self.seconds,
                    "bytes": part.bytes,
                    "flops": part.flops,
                    "floor_seconds": self.floor_of(part),
                }
                for part in self.parts
            ],
        }


def step_kinds(steps: Sequence[StepRecord], limits: Limits) -> tuple[StepKind, ...]:
    """The fullest batch that only decoded and the largest chunk of prompts alone, where there were such steps."""
    decodes = [step for step in steps if step.decodes == step.sequences]
    prompts = [step for step in steps if not step.decodes]
    kinds = []
    if decodes:
        many = _fullest(Counter(step.sequences for step in decodes))
        kinds.append(_kind([step for step in decodes if step.sequences == many], limits, decode=True))
    if prompts:
        most = max(step.tokens for step in prompts)
        kinds.append(_kind([step for step in prompts if step.tokens == most], limits, decode=False))
    return tuple(kinds)


def _fullest(counts: Mapping[int, int]) -> int:
    """The largest batch that was seen often enough."""
    enough = min(ENOUGH, max(counts.values()))
    return max(batch for batch, times in counts.items() if times >= enough)


def _kind(steps: list[StepRecord], limits: Limits, *, decode: bool) -> StepKind:
    typical = _middle_half(steps)
    names = list(dict.fromkeys(name for step in typical for name in step.parts))
    parts = []
    for name in names:
        needs = [step.needs.get(name) for step in typical]
        parts.append(
            Part(
                name,
                _mean([step.parts.get(name, 0.0) for step in typical]),
                _mean([need.bytes if need else 0.0 for need in needs]),
                _mean([need.flops if need else 0.0 for need in needs]),
            )
        )
    return StepKind(
        decode=decode,
        steps=len(steps),
        sequences=_mean([step.sequences for step in typical]),
        tokens=_mean([step.tokens for step in typical]),
        context=_mean([step.context for step in typical]),
        parts=tuple(parts),
        limits=limits,
        profiled=all(step.profiled for step in typical),
    )


def _middle_half(steps: list[StepRecord]) -> list[StepRecord]:
    """Without the fastest and the slowest quarter: one disturbed step must not colour the mean."""
    ordered, cut = sorted(steps, key=lambda step: step.seconds), len(steps) // 4
    return ordered[cut : len(steps) - cut]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def verdict(kind: StepKind) -> str:
    """One kind of step in a sentence or two: how far from its floor, and what the rest is spent on."""
    limits = kind.limits
    if kind.bound == "memory":
        what, how = "reading its bytes once", f"{size(kind.bytes)} at {size(limits.bandwidth)}/s"
    else:
        what, how = "its arithmetic", f"{kind.flops / 1e9:.3g} GFLOP at {limits.flops / 1e9:.3g} GFLOP/s"
    text = (
        f"{kind.name.capitalize() if kind.decode else f'A {kind.name}'} takes {kind.ratio:.2f}x the time of {what} "
        f"({seconds(kind.seconds)}; {how} take {seconds(kind.floor)})"
    )
    return f"{text}; {_rest(kind)}"


def _rest(kind: StepKind) -> str:
    if not kind.profiled:
        return "the runner does not tell its parts apart."
    over = sorted(((part.seconds - kind.floor_of(part), part.name) for part in kind.parts), reverse=True)
    named = [f"{name} {seconds(excess)}" for excess, name in over[:NAMED] if excess > 0.005 * kind.seconds]
    if kind.ratio <= 1:
        return (
            "no slower than the probe itself (caches hold a part, its numbers are narrower than the probed ones, or "
            "the machine was slower while it was probed)."
        )
    share = percent(1 - kind.floor / kind.seconds)
    return f"the rest, {share} of the step, is mostly {', '.join(named)}." if named else f"the rest is {share} of it."
