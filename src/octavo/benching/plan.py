"""What a bench runs: points of so many requests at once. Imports no torch, so that bad input is told at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.errors import OctavoError
from octavo.planner.workload import WorkItem

MODES = ("latency", "throughput", "sweep")
SWEEP = (1, 2, 4, 8, 16, 32, 64)
REQUESTS = 64  # of a batch, unless told otherwise; `THROUGHPUT` of them at once
THROUGHPUT = 64
SINGLE_INPUT, SINGLE_OUTPUT = 512, 128  # tokens of the single stream, unless told otherwise
MOST_AT_ONCE = 100_000
MOST_LENGTH = 1_000_000
# Lognormal lengths: mean of the logarithm, its deviation, the shortest and the longest
PROMPTS = (150, 0.8, 32, 512)
OUTPUTS = (80, 0.8, 16, 256)


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: `items` with `concurrency` of them in flight."""

    mode: str
    concurrency: int
    items: tuple[WorkItem, ...]

    @property
    def name(self) -> str:
        return "single stream" if self.mode == "latency" else f"{self.concurrency:,} at once"

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence whose prompt is given as a length."""
        return max(item.prompt_tokens + item.output_tokens for item in self.items)


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """`rounds` of every point; `workload` says in a sentence where the requests come from, `seed` makes them again."""

    points: tuple[Point, ...]
    rounds: int
    seed: int
    workload: str

    @property
    def concurrency(self) -> int:
        """Most requests in flight at any point."""
        return max(point.concurrency for point in self.points)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options as they were given; None: not given. `items`: the requests of a workload file called `source`."""

    mode: str | None = None
    concurrency: str | None = None
    input_len: int | None = None
    output_len: int | None = None
    num_prompts: int | None = None
    rounds: int = 3
    seed: int = 1234
    items: tuple[WorkItem, ...] | None = None
    source: str = ""


def make_plan(options: BenchOptions) -> BenchPlan:
    """The points of a mode; without one: the single stream, then the sweep. Raises OctavoError."""
    _check(options)
    modes = ("latency", "sweep") if options.mode is None else (options.mode,)
    points: list[Point] = []
    words: list[str] = []
    if "latency" in modes:
        points.append(_single(options))
        item = points[0].items[0]
        words.append(f"single stream: {item.prompt_tokens:,} prompt tokens, {item.output_tokens:,} output tokens")
    if modes != ("latency",):
        items, said = _batch(options)
        points += [
            Point(modes[-1], many, items if modes[-1] == "throughput" else items[: sweep_share(many)])
            for many in _concurrencies(options, modes[-1])
        ]
        words.append(said)
    return BenchPlan(tuple(points), options.rounds, options.seed, "; ".join(words))


def sweep_share(concurrency: int) -> int:
    """How many requests a point of a sweep runs: low concurrency is slow, so it is measured on the first few."""
    return max(6, 4 * concurrency)


def lognormal(count: int, seed: int) -> list[WorkItem]:
    """Requests as chats are: many short, a few long; the same for the same arguments on every machine."""
    random = np.random.default_rng(seed)
    prompts, outputs = (_lengths(random, count, *shape) for shape in (PROMPTS, OUTPUTS))
    return [WorkItem(0.0, output, prompt_tokens=prompt) for prompt, output in zip(prompts, outputs, strict=True)]


def _lengths(random: np.random.Generator, count: int, middle: int, spread: float, low: int, high: int) -> list[int]:
    values = np.exp(random.normal(np.log(middle), spread, count)).round().astype(int)
    return [int(value) for value in values.clip(low, high)]


def make_prompts(items: Sequence[WorkItem], vocab_size: int, seed: int) -> list[str | list[int]]:
    """The texts where the workload has them, else random token ids: no two prompts share a prefix."""
    random = np.random.default_rng((seed, 1))
    low, high = (1000, 40000) if vocab_size > 40000 else (0, vocab_size)  # large vocabularies: below special tokens
    return [
        item.prompt if item.prompt is not None else random.integers(low, high, item.prompt_tokens).tolist()
        for item in items
    ]


def _single(options: BenchOptions) -> Point:
    prompt, output = options.input_len or SINGLE_INPUT, options.output_len or SINGLE_OUTPUT
    return Point("latency", 1, (WorkItem(0.0, output, prompt_tokens=prompt),))


def _batch(options: BenchOptions) -> tuple[tuple[WorkItem, ...], str]:
    if options.items is not None:
        items = options.items[: options.num_prompts]
        return items, f"{len(items):,} requests of {options.source}, arrival times left out"
    drawn = lognormal(options.num_prompts or REQUESTS, options.seed)
    items = tuple(
        WorkItem(0.0, options.output_len or item.output_tokens, prompt_tokens=options.input_len or item.prompt_tokens)
        for item in drawn
    )
    prompts, outputs = [i.prompt_tokens for i in items], [i.output_tokens for i in items]
    said = f"{len(items):,} requests, prompts of {_range(prompts)} and outputs of {_range(outputs)} tokens"
    return items, f"{said}, seed {options.seed}"


def _range(lengths: Sequence[int]) -> str:
    low, high, mean = min(lengths), max(lengths), sum(lengths) / len(lengths)
    return f"{low:,}" if low == high else f"{low:,} to {high:,} (mean {mean:.0f})"


def _concurrencies(options: BenchOptions, mode: str) -> tuple[int, ...]:
    if options.concurrency is None:
        return SWEEP if mode == "sweep" else (THROUGHPUT,)
    found = tuple(_at_once(text.strip(), options.concurrency) for text in options.concurrency.split(","))
    if mode == "throughput" and len(found) > 1:
        raise OctavoError(f"concurrency is {options.concurrency!r}; mode throughput takes one number: use mode sweep.")
    for many in found:
        if found.count(many) > 1:
            raise OctavoError(f"concurrency names {many} {found.count(many)} times; name each number once.")
    return found


def _at_once(text: str, whole: str) -> int:
    many = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
    if not 1 <= many <= MOST_AT_ONCE:
        raise OctavoError(
            f"concurrency is {whole!r}; it must be a whole number from 1 to {MOST_AT_ONCE}, or for a sweep a list of "
            "them such as 1,4,16."
        )
    return many


def _check(options: BenchOptions) -> None:
    mode = options.mode
    if mode is not None and mode not in MODES:
        raise OctavoError(f"mode is {mode!r}; it must be one of {', '.join(MODES)}, or left out: latency, then sweep.")
    for name in ("input_len", "output_len", "num_prompts", "rounds"):
        value = getattr(options, name)
        if value is not None and not 1 <= value <= MOST_LENGTH:
            raise OctavoError(f"{name} is {value}; it must be from 1 to {MOST_LENGTH}.")
    if options.seed < 0:
        raise OctavoError(f"seed is {options.seed}; it must be 0 or more.")
    if options.items is not None and not options.items:
        raise OctavoError(f"workload {options.source} has no requests; give one with at least one.")
    _check_together(options)


def _check_together(options: BenchOptions) -> None:
    """What a mode has no use for is refused rather than passed over."""
    if options.mode == "latency":
        for name, value in (
            ("concurrency", options.concurrency),
            ("num_prompts", options.num_prompts),
            ("workload", options.source or None),
        ):
            if value is not None:
                raise OctavoError(
                    f"{name} is {value!r}, but mode latency runs one request of input_len and output_len at a time; "
                    "leave it out or use mode throughput."
                )
    elif options.mode is not None and options.items is not None:
        for name in ("input_len", "output_len"):
            if getattr(options, name) is not None:
                raise OctavoError(
                    f"{name} is {getattr(options, name)}, but the requests are those of {options.source}; "
                    "leave one of them out."
                )
