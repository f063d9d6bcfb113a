"""Random lives in which every sequence reads its own tokens back: through moves, compaction, copy-on-write, forks,
hits, evictions, preemptions, aborts, deadlines and quotas, under every strategy, charge, order and window.

The runner of the bench keeps a memory: it runs the copies of each plan in order, writes what the KV of each token
depends on (identity, all tokens up to it, layer group) into the slot that the view gives it, and then reads back
every position that attention would see.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from octavo.kv.strategies import STRATEGIES
from octavo.runner.simulated import placeholder_token
from octavo.types import FinishReason, RequestError, Sequence, Status
from tests.simulation import Bench

SETTINGS: list[dict[str, Any]] = [
    dict(admission="prompt", victims="cheapest", max_preemptions=1, max_skips=0),
    dict(admission="prompt", victims="newest", max_preemptions=3, order="priority"),
    dict(admission="peak", victims="cheapest", max_skips=2),
    dict(admission="ceiling", order="priority", max_queue=20),
]
KINDS = {
    "full": (None,),
    "window": (None, 10),
    "windows": (7, None, 10),
    "only windows": (9, 6),
}


def habitual(seq: Sequence) -> int:
    """Mostly what it said four tokens ago, so that drafts are right and wrong in turns: a function of its history."""
    mixed = hash((*seq.tokens[-3:], len(seq.tokens)))
    return seq.tokens[-4] if len(seq.tokens) > 4 and mixed % 4 else mixed % 5


def paged_pages(windows: tuple[int | None, ...]) -> int:
    """Few enough that a full house does not fit."""
    return 30 + 15 * (len(windows) - 1) if None in windows else 22


class Life:
    """One engine's life, driven by one seed."""

    def __init__(
        self, strategy: str, windows: tuple[int | None, ...], sharing: bool, seed: int, drafts: int = 0
    ) -> None:
        self.rng = random.Random(seed)
        config = dict(max_model_len=64, max_num_seqs=5, max_num_batched_tokens=12) | SETTINGS[seed % len(SETTINGS)]
        config |= dict(speculative_tokens=drafts, speculative_limit=9)
        pages = paged_pages(windows) if strategy == "paged" else 30 * len(windows)
        token = habitual if drafts else placeholder_token
        self.bench = Bench(strategy, pages=pages, windows=windows, sharing=sharing, config=config, token=token)
        self.seen: Counter[str] = Counter()
        self.prompts: list[list[int]] = [[1, 2, 3, 4, 5, 6, 7, 8]]
        self.alive: dict[str, int] = {}  # max_tokens of those that nobody ended early

    def prompt(self) -> list[int]:
        rng = self.rng
        length = max(1, rng.randint(0, 6) * 4 + rng.choice((-1, 0, 1, 2)))
        own = [rng.randint(0, 3) for _ in range(length)]
        prompt = (rng.choice(self.prompts)[: rng.randint(0, 30)] + own)[:40] if rng.random() < 0.5 else own
        self.prompts = [*self.prompts[-10:], prompt]
        return prompt

    def add(self) -> None:
        rng, b = self.rng, self.bench
        out = rng.choice((0, 1, 4, 9, 20))
        params: dict[str, Any] = dict(
            n=rng.choice((1, 1, 1, 2, 3)),
            seed=rng.randint(0, 9),
            priority=rng.choice((0, 0, 1, 2)),
            identity=rng.choice(((), (), (("salt", "x"),))),
        )
        if rng.random() < 0.1:
            params["deadline"] = b.clock.now() + rng.choice((0.0, 0.01, 0.1))
        try:
            r = b.add(self.prompt(), out, **params)
        except RequestError as error:
            self.seen[error.code] += 1
            return
        self.seen["add"] += 1
        if "deadline" not in params:
            self.alive[r] = out

    def end(self) -> None:
        """Abort or stop somebody, in whatever phase."""
        b, rng = self.bench, self.rng
        if not b.scheduler.requests:
            return
        r = rng.choice(list(b.scheduler.requests))
        self.alive.pop(r, None)
        running = [s for s in b.all[r] if s.status is Status.RUNNING and s.generated]
        if running and rng.random() < 0.5:
            b.scheduler.stop(rng.choice(running), FinishReason.STOP, b.clock.now())
        else:
            b.scheduler.abort(r, b.clock.now())

    def preempt(self) -> None:
        b = self.bench
        if b.scheduler.requests:
            r = self.rng.choice(list(b.scheduler.requests))
            if all(s.preemptions < b.scheduler.config.max_preemptions for s in b.all[r]):
                self.seen["asked"] += b.scheduler.preempt(r, b.clock.now())

    def step(self) -> None:
        b = self.bench
        plan = b.scheduler.plan(b.clock.now())
        b.look()
        result = b.runner.run(plan)
        if self.rng.random() < 0.02:
            self.end()
        out = b.scheduler.settle(plan, result, b.clock.now())
        self.seen["copies"] += len(plan.copies)
        self.seen["expired"] += sum(p.finished is FinishReason.ERROR for p in out)

    def act(self) -> None:
        action = self.rng.random()
        if action < 0.25 and self.bench.scheduler.waiting < 8:
            self.add()
        elif action < 0.28:
            self.end()
        elif action < 0.30:
            self.preempt()
        elif action < 0.305:
            self.bench.scheduler.reset_cache()
        elif action < 0.33:
            self.bench.waits()
        else:
            self.step()
        self.bench.look()

    def live(self, steps: int) -> None:
        for step in range(steps):
            try:
                self.act()
            except Exception as error:
                raise AssertionError(f"action {step}: {error!r}") from error
        self.bench.run()
        for r, out in self.alive.items():
            assert all(len(seq.output) == out for seq in self.bench.all[r])
            assert len({tuple(seq.output) for seq in self.bench.all[r]}) == 1


def check_seen(life: Life, strategy: str, sharing: bool, seed: int) -> None:
    """The life was worth living: the things that it is to try have happened."""
    seen, totals = life.seen, life.bench.scheduler.totals
    assert seen["add"] > 50
    assert seen["expired"] > 0
    if strategy == "paged":
        assert seen["copies"] > 0
        assert (totals.hit_tokens > 0) == sharing
    if strategy == "growing":
        assert seen["copies"] > 0
    if strategy in ("growing", "paged") and seed % len(SETTINGS) < 2:
        assert totals.preemptions > seen["asked"]


@pytest.mark.parametrize("seed", range(len(SETTINGS)))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", [*STRATEGIES, "paged without cache"])
def test_everyone_reads_its_own_tokens_through_a_random_life(strategy: str, kind: str, seed: int) -> None:
    sharing = strategy != "paged without cache"
    strategy = strategy.split()[0]
    life = Life(strategy, KINDS[kind], sharing, seed)
    life.live(400)
    check_seen(life, strategy, sharing, seed)


@pytest.mark.parametrize("seed", range(len(SETTINGS)))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", [*STRATEGIES, "paged without cache"])
def test_everyone_reads_its_own_tokens_with_drafts(strategy: str, kind: str, seed: int) -> None:
    life = Life(strategy.split()[0], KINDS[kind], strategy != "paged without cache", seed, drafts=(4, 7)[seed % 2])
    life.live(500)
    totals = life.bench.scheduler.totals
    assert 30 < totals.drafts_accepted < totals.drafted - 30
    assert life.seen["add"] > 50


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 104))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", [*STRATEGIES, "paged without cache"])
def test_everyone_reads_its_own_tokens_through_a_long_random_life(strategy: str, kind: str, seed: int) -> None:
    drafts = (0, 5)[seed % 2]
    life = Life(strategy.split()[0], KINDS[kind], strategy != "paged without cache", seed, drafts)
    life.live(3000)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tenants_with_quotas_all_end(strategy: str, seed: int) -> None:
    rng = random.Random(seed)
    b = Bench(
        strategy,
        pages=40,
        config=dict(
            max_model_len=64,
            max_num_seqs=6,
            max_num_batched_tokens=16,
            admission="prompt",
            max_preemptions=1 + seed % 3,
            quotas={"t": 20, "u": 16},
        ),
    )
    ids = {}
    for _ in range(80):
        out = rng.randint(1, 30)
        prompt = [rng.randint(0, 2) for _ in range(rng.randint(1, 30))]
        ids[b.add(prompt, out, tenant=rng.choice(("t", "u", "v")), n=rng.choice((1, 1, 2)))] = out
        if rng.random() < 0.7:
            b.step()
    b.run()
    assert all(len(seq.output) == out for r, out in ids.items() for seq in b.all[r])
