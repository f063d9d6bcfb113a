"""A client that goes away, whenever it does, gives its memory back within two steps and costs nobody anything."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.server.app import build, create_app
from octavo.server.config import ServerConfig
from tests.server.serving import ScriptedRunner, Serving, serving, write_checkpoint
from tests.server.talking import (
    CHAT,
    COMPLETIONS,
    PAGE,
    Call,
    Stepping,
    Wire,
    at_rest,
    events,
    plain,
    started,
    stream,
    wire,
)

PROMPT = "the quick brown fox jumps over a lazy dog"  # 41 tokens: chunks of 16, 16 and 9
BODY = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True}
# Steps that the request has had while its client goes, and what it is found doing at the end of the step it is in.
PHASES = {"queued": (0, "queued"), "first chunk": (1, "prefill"), "last chunk": (2, "decode"), "decode": (6, "decode")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


def aborts(log: pytest.LogCaptureFixture) -> list[str]:
    """What was said about aborts: the phase of each."""
    lines = [r.getMessage() for r in log.records if r.name == "octavo.engine" and "abort" in r.getMessage()]
    return [line.rpartition(" while ")[2] for line in lines]


def pinned(one: Serving) -> int:
    kv = one.built.engine.engine.scheduler.kv
    return kv.capacity - kv.free - kv.evictable


@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "plain"])
@pytest.mark.parametrize("phase", PHASES)
def test_memory_is_back_within_two_steps(
    model: Path, phase: str, streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "octavo.engine")
    runner = Stepping()
    slots = 1 if phase == "queued" else 2
    with serving(model, runner=runner, max_num_seqs=slots, max_num_batched_tokens=16) as one:
        scheduler = one.built.engine.engine.scheduler
        with wire(one, COMPLETIONS, {"prompt": "neighbour", "max_tokens": 60, "ignore_eos": True}) as other:
            runner.to_step(one, 1)
            held = pinned(one)
            client = Wire(one, COMPLETIONS, {**BODY, "stream": streaming})
            one.until(lambda: one.state.engine.live == 2)
            runner.to_step(one, runner.steps + 1)  # it is submitted between two steps
            assert one.until(lambda: len(scheduler.requests) == 2)
            runner.to_step(one, runner.steps + PHASES[phase][0])
            assert pinned(one) > held or phase == "queued"
            client.close()
            one.until(lambda: one.state.engine.live == 1)
            before = runner.steps
            runner.to_step(one, before + 2)
            assert len(scheduler.requests) == 1
            assert pinned(one) <= held + 1  # the neighbour may have grown into its next block
            runner.gate.set()
            assert b'"finish_reason":"length"' in other.read_until(b"finish_reason")
        one.quiet()
    assert aborts(caplog) == [PHASES[phase][1]]


@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "plain"])
def test_a_preempted_request_leaves_the_line(model: Path, streaming: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "octavo.engine")
    runner = Stepping()
    settings: dict[str, Any] = dict(kv_memory=8 * PAGE, admission="prompt", max_model_len=128, victims="newest")
    with serving(model, runner=runner, **settings) as one:
        scheduler = one.built.engine.engine.scheduler
        with wire(one, COMPLETIONS, {"prompt": "a" * 40, "max_tokens": 80, "ignore_eos": True}) as other:
            runner.to_step(one, 1)
            client = Wire(one, COMPLETIONS, {"prompt": "b" * 40, "max_tokens": 80, "stream": streaming})
            one.until(lambda: one.state.engine.live == 2)
            for _ in range(60):
                runner.to_step(one, runner.steps + 1)
                if scheduler.waiting and any(seqs[0].preemptions for seqs in scheduler.requests.values()):
                    break
            assert scheduler.waiting == 1
            client.close()
            one.until(lambda: one.state.engine.live == 1)
            runner.to_step(one, runner.steps + 2)
            assert len(scheduler.requests) == 1
            assert scheduler.waiting == 0
            runner.gate.set()
            assert b'"finish_reason":"length"' in other.read_until(b"finish_reason")
    assert aborts(caplog) == ["preempted"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "plain"])
def test_a_normal_end_is_no_abort(model: Path, path: str, streaming: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "octavo.engine")
    asked = {"prompt": "hello"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hello"}]}
    with serving(model, runner=ScriptedRunner()) as one:
        for _ in range(5):
            client = Wire(one, path, {**asked, "max_tokens": 5, "stream": streaming})
            client.read_until(b"[DONE]" if streaming else b'"usage"')
            client.close()
            (stream if streaming else plain)(one, path, {**asked, "max_tokens": 5})
        one.quiet()
    assert aborts(caplog) == []


def test_several_prompts_and_samples_go_together(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One HTTP request may be several of the engine's, each with several samples."""
    caplog.set_level(logging.INFO, "octavo.engine")
    runner = Stepping()
    with serving(model, runner=runner) as one:
        for streaming in (True, False):
            client = Wire(one, COMPLETIONS, {**BODY, "prompt": ["a", "b", "c"], "n": 2, "stream": streaming})
            one.until(lambda: one.state.engine.live == 3)
            runner.to_step(one, runner.steps + 4)
            client.close()
            one.until(lambda: one.state.engine.live == 0)
            runner.allow(2)
            one.quiet()
    assert len(aborts(caplog)) == 6


def test_an_upload_that_is_cut_off_is_nothing_but_over(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with serving(model, runner=ScriptedRunner()) as one:
        for path in (COMPLETIONS, CHAT, "/tokenize"):
            with wire(one, path, b'{"prompt": "abc', announced=500):
                continue
        assert one.client.get("/health").status_code == 200
        assert plain(one, COMPLETIONS, {"prompt": "hello"})
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_random_disconnects_leave_only_computed_blocks_in_the_cache(model: Path) -> None:
    """200 clients that share prefixes go away at random; what is cached then gives the answers of no cache at all."""
    drawn = random.Random(5)
    base = "".join(drawn.choice("abcdefgh") for _ in range(200))
    prompts = [base[:cut] + tail for cut in (30, 64, 65, 130) for tail in ("", "XY", "Q" * 40)]
    ask = {"max_tokens": 12, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    with serving(model, enable_prefix_caching=False) as one:
        expected = [plain(one, COMPLETIONS, {**ask, "prompt": p})["choices"][0]["token_ids"] for p in prompts]
    with serving(model, max_num_batched_tokens=16, kv_memory=48 * PAGE, admission="prompt", max_model_len=300) as one:

        def leave(number: int) -> None:
            own = random.Random(number)
            body = {
                **ask,
                "prompt": own.choice(prompts),
                "max_tokens": own.randint(1, 40),
                "stream": own.random() < 0.5,
            }
            with wire(one, COMPLETIONS, body) as client:
                client.socket.settimeout(own.uniform(0.001, 0.08))
                try:
                    client.read_until(b"never")
                except TimeoutError:
                    return

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(leave, range(200)))
        one.quiet()
        for _ in range(2):
            got = [plain(one, COMPLETIONS, {**ask, "prompt": p})["choices"][0]["token_ids"] for p in prompts]
            assert got == expected


# -- ids and cancellation ---------------------------------------------------------------------------------------------


def test_one_label_on_two_live_requests(model: Path) -> None:
    runner = Stepping()
    with serving(model, runner=runner) as one:
        both = [Wire(one, COMPLETIONS, {**BODY, "stream": True}, label="mine") for _ in range(2)]
        one.until(lambda: one.state.engine.live == 2)
        runner.to_step(one, 5)
        assert list(one.state.labels.values()) == ["mine", "mine"]
        both[0].close()
        one.until(lambda: one.state.engine.live == 1)
        runner.gate.set()
        chunks = events(both[1].answer())
        assert len("".join(chunk["choices"][0]["text"] for chunk in chunks[:-1])) == 40
        both[1].close()


def asgi(model: Path, runner: Any, **engine: Any) -> Any:
    defaults: dict[str, Any] = dict(kv_memory=4 << 20, max_num_batched_tokens=64, max_num_seqs=8, dtype="float32")
    config = ServerConfig(EngineConfig(str(model), **defaults | engine), access_log=False)
    built = build(config)
    built.engine.engine.runner = runner
    return create_app(config, built)


def test_hanging_up_and_asking_again_in_one_tick(model: Path) -> None:
    """The old request goes and the new one of the same label runs to its end, 300 times."""
    app = asgi(model, ScriptedRunner())
    raw = json.dumps({"prompt": "abc", "max_tokens": 3, "stream": True}).encode()

    async def scenario() -> None:
        async with started(app) as state:
            for i in range(300):
                old = Call(app, COMPLETIONS, raw, label="same")
                for _ in range(i % 30):
                    await asyncio.sleep(0)
                old.hang_up()
                new = Call(app, COMPLETIONS, raw, label="same")
                await asyncio.wait_for(asyncio.gather(old.task, new.task), 20)
                assert new.status == 200
                assert new.body.endswith(b"data: [DONE]\n\n")
            await at_rest(state)
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            assert left == []

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["cancel", "hang up"])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"], "x" * 5000], ids=["one", "two", "long"])
def test_ending_a_handler_at_each_await(model: Path, how: str, prompt: Any) -> None:
    """Nothing stays behind wherever it is cut: while the body comes, while it is tokenised, submitted, answered."""
    runner = ScriptedRunner()
    app = asgi(model, runner)

    async def scenario() -> None:
        async with started(app) as state:
            cut = 0
            for streaming in (True, False):
                raw = json.dumps({"prompt": prompt, "max_tokens": 5, "stream": streaming}).encode()
                for ticks in range(60):
                    runner.gate.clear() if ticks % 2 else runner.gate.set()
                    call = Call(app, COMPLETIONS, raw, label="l", pieces=3)
                    for _ in range(ticks):
                        await asyncio.sleep(0)
                    cut += not call.task.done()
                    call.task.cancel() if how == "cancel" else call.hang_up()
                    runner.gate.set()
                    await asyncio.wait([call.task], timeout=20)
                    assert call.task.done()
                    assert call.task.cancelled() or call.task.exception() is None
                await at_rest(state)
            assert cut > 20
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            assert left == []

    asyncio.run(scenario())


# -- slow readers -----------------------------------------------------------------------------------------------------

HUGE = "m" * 20_000  # the model's name is in every chunk: what no socket buffer holds


@pytest.mark.parametrize("prompts", [1, 2])
def test_a_reader_that_does_not_read_loses_its_request(model: Path, prompts: int) -> None:
    runner = ScriptedRunner(delay=0.001)
    server = {"max_unread_tokens": 50, "served_model_name": ("short", HUGE)}
    body = {"model": HUGE, "prompt": [[5]] * prompts, "max_tokens": 1000, "stream": True, "ignore_eos": True}
    with serving(model, runner=runner, server=server) as one:
        with wire(one, COMPLETIONS, body) as lazy:
            lazy.read_until(b"200 OK")
            ids = [[6 + i] for i in range(3)]
            with ThreadPoolExecutor(3) as pool:
                ask = {"model": "short", "max_tokens": 100, "ignore_eos": True}
                answers = [pool.submit(stream, one, COMPLETIONS, {**ask, "prompt": own}) for own in ids]
                texts = ["".join(c["choices"][0]["text"] for c in answer.result()) for answer in answers]
            assert texts == ["abcdefghij" * 10] * 3
            one.until(lambda: one.state.engine.live == 0)
            assert runner.steps < 1500
            seen = lazy.read_until(b"[DONE]")
        last = json.loads(seen.split(b"data: ")[-2])
        assert last["error"]["code"] == "slow_reader"
        assert "max_unread_tokens" in last["error"]["message"]
        assert "50" in last["error"]["message"]


def test_an_answer_that_is_not_streamed_may_be_as_long_as_it_likes(model: Path) -> None:
    with serving(model, runner=ScriptedRunner(), server={"max_unread_tokens": 10}) as one:
        answer = plain(one, COMPLETIONS, {"prompt": "a", "max_tokens": 500, "ignore_eos": True})
        assert answer["usage"]["completion_tokens"] == 500
        assert answer["choices"][0]["text"] == "abcdefghij" * 50
