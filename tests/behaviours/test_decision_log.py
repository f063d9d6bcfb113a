"""A recorded log replays to the same decisions; a change in it is found."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from octavo.events import Preempted
from octavo.kv.strategies import STRATEGIES
from octavo.log import LogError, LogHeader, LogWriter, read_log, replay
from octavo.types import RequestError
from tests.simulation import Bench


def record(path: Path, strategy: str, **settings: Any) -> Bench:
    """A busy little life: preemptions, forks, aborts, refusals, deadlines, cache resets, stops from outside, drafts,
    steps with a budget."""
    config = {"admission": "prompt", "max_num_batched_tokens": 16, "max_model_len": 96, "speculative_tokens": 4}
    config |= settings
    bench = Bench(strategy, pages=30, config=config, token=lambda seq: len(seq.tokens) % (3 + len(seq.tokens) // 20))
    header = LogHeader(strategy, 30, 4, (None,), True, bench.scheduler.config)
    writer = LogWriter(path, header)
    bench.scheduler = header.build(lambda event: (writer(event), bench.events.append(event)))
    bench.kv = bench.scheduler.kv
    rng = random.Random(5)
    for step in range(400):
        if rng.random() < 0.3:
            prompt = [rng.randint(0, 3) for _ in range(rng.randint(1, 40))]
            deadline = bench.clock.now() + 0.05 if rng.random() < 0.2 else None
            with contextlib.suppress(RequestError):  # a refusal is an event like any other
                params = dict(n=rng.choice((1, 2)), seed=step, deadline=deadline, tenant="abb"[step % 3])
                bench.add(prompt, rng.choice((1, 9, 30, 200)), **params)
        live = sorted(bench.scheduler.requests)
        if live and rng.random() < 0.05:
            bench.scheduler.abort(rng.choice(live), bench.clock.now())
        elif live and rng.random() < 0.05:
            bench.scheduler.preempt(rng.choice(live), bench.clock.now())
        elif rng.random() < 0.02:
            bench.scheduler.reset_cache()
        bench.budget = rng.choice((None, 0, 7, 100))
        bench.step()
    bench.run()
    assert bench.scheduler.totals.drafts_accepted > 100
    writer.close()
    return bench


@pytest.mark.parametrize("suffix", [".jsonl", ".msgpack"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_log_replays_to_identical_decisions(tmp_path: Path, strategy: str, suffix: str) -> None:
    path = tmp_path / f"log{suffix}"
    bench = record(path, strategy)
    outcome = replay(path)
    assert outcome.difference is None
    assert outcome.events == len(bench.events) > 1000


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fair_share_replays_to_identical_decisions(tmp_path: Path, strategy: str) -> None:
    path = tmp_path / "log.jsonl"
    weights = {"a": 0.3, "b": 1}
    bench = record(path, strategy, order="fair", tenant_weights=weights, max_num_seqs=4, max_queued_tokens=200)
    assert bench.of(Preempted)
    outcome = replay(path)
    assert outcome.difference is None
    assert outcome.events == len(bench.events) > 1000


def test_changed_decision_is_found(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    record(path, "paged")
    lines = path.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"event":"Granted"' in line and i > 100)
    changed = json.loads(lines[at])
    changed["slots"] += 4
    lines[at] = json.dumps(changed)
    path.write_text("\n".join(lines) + "\n")
    outcome = replay(path)
    assert outcome.difference is not None
    assert outcome.difference[0] == changed
    assert outcome.events == at - 1  # the header is no event


def test_unreadable_logs_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(LogError, match=r"no\.jsonl does not exist"):
        read_log(tmp_path / "no.jsonl")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"event": "Planned"}\n')
    with pytest.raises(LogError, match="is no Octavo log of version 4"):
        read_log(bad)
    bad.write_text("nonsense\n")
    with pytest.raises(LogError, match="line 1: not JSON"):
        read_log(bad)
