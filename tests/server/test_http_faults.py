"""What fails, fails alone where it can; where it cannot, everybody is told at once and health says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.runner.api import StepPlan
from octavo.server.app import build, create_app
from octavo.server.config import ServerConfig
from octavo.types import Sequence
from tests.server.serving import ScriptedRunner, Serving, ids_of, serving, write_checkpoint
from tests.server.talking import (
    CHAT,
    COMPLETIONS,
    Call,
    Stepping,
    Wire,
    events,
    metric,
    plain,
    refused,
    started,
    stream,
    wire,
)

LONG = {"max_tokens": 30, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


def poisoned_by(token: int, after: int = 0) -> Callable[[StepPlan], None]:
    """Raises whenever a sequence with that token is computed."""

    def fault(plan: StepPlan) -> None:
        if any(token in work.seq.tokens and work.seq.generated >= after for work in plan.work):
            raise RuntimeError("a poisoned request")

    return fault


@pytest.mark.parametrize("after", [0, 5], ids=["prefill", "decode"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_request_that_fails_in_a_step_fails_alone(model: Path, path: str, after: int) -> None:
    runner = ScriptedRunner(delay=0.001)
    runner.fault = poisoned_by(ids_of("!")[0], after)

    def ask(text: str) -> dict[str, Any]:
        asked = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
        return {**asked, **LONG}

    with serving(model, runner=runner) as one, ThreadPoolExecutor(8) as pool:
        good = [pool.submit(stream, one, path, ask(f"good {i}")) for i in range(3)]
        bad = pool.submit(one.client.post, path, json=ask("bad!"))
        streamed = pool.submit(one.client.post, path, json={**ask("worse!"), "stream": True})
        sentence = refused(bad.result(), 500, code="engine_error")
        assert "a poisoned request" in sentence
        if after:
            *chunks, error, last = events(streamed.result().text)
            assert chunks
            assert error["error"]["code"] == "engine_error"
            assert last == "[DONE]"
        else:
            refused(streamed.result(), 500, code="engine_error")
        for answer in good:
            choices = [chunk["choices"][0] for chunk in answer.result()]
            text = "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)
            assert text == "abcdefghij" * 3
        assert one.client.get("/health").status_code == 200
        one.quiet()


def test_others_keep_their_tokens_on_the_real_model(model: Path) -> None:
    """A step that failed is computed again for the others: the same tokens, sampled ones too."""
    bodies = [
        {"prompt": f"text {i}", "seed": i, "temperature": i % 2, "return_token_ids": True, **LONG} for i in range(4)
    ]
    with serving(model) as one:
        expected = [plain(one, COMPLETIONS, body)["choices"][0]["token_ids"] for body in bodies]
        run, poison, failed = one.runner.run, ids_of("!")[0], []

        def faulty(plan: StepPlan) -> Any:
            result = run(plan)  # the others' KV has been written when it goes wrong
            if any(poison in work.seq.request.prompt and work.seq.generated == 4 for work in plan.work):
                failed.append(len(plan.work))
                raise RuntimeError("late")
            return result

        one.runner.run = faulty
        try:
            with ThreadPoolExecutor(5) as pool:
                bad = pool.submit(one.client.post, COMPLETIONS, json={"prompt": "bad!", **LONG})
                got = list(pool.map(lambda body: plain(one, COMPLETIONS, body)["choices"][0]["token_ids"], bodies))
            assert bad.result().status_code == 500
        finally:
            del one.runner.run
        assert got == expected
        assert failed


@pytest.mark.parametrize("where", ["plan", "settle", "command"])
def test_an_error_outside_any_request_ends_all_with_a_clear_one(model: Path, where: str) -> None:
    runner = Stepping()
    with serving(model, runner=runner) as one:
        scheduler = one.built.engine.engine.scheduler
        with wire(one, COMPLETIONS, {"prompt": "a", "stream": True, **LONG}) as streaming:
            runner.to_step(one, 3)
            with ThreadPoolExecutor(4) as pool:
                plains = [pool.submit(one.client.post, path, json=body) for path, body in every(LONG)]
                one.until(lambda: one.state.engine.live == 3)
                runner.to_step(one, runner.steps + 2)

                def broken(*arguments: Any) -> Any:
                    raise RuntimeError("the ceiling fell down")

                if where == "command":
                    scheduler.submit = broken  # whoever asks is refused; the engine goes on
                else:
                    setattr(scheduler, where, broken)
                late = pool.submit(one.client.post, COMPLETIONS, json={"prompt": "late"})
                one.until(lambda: late.done() or one.state.engine.live == 4)
                runner.gate.set()
                if where == "command":
                    refused(late.result(), 500)
                    assert all(answer.result().status_code == 200 for answer in plains)
                    assert events(streaming.answer())[-1] == "[DONE]"
                    del scheduler.submit
                    return
                for answer in [*plains, late]:
                    sentence = refused(answer.result(), 503, code="engine_dead")
                    assert "the ceiling fell down" in sentence
                    assert int(answer.result().headers["Retry-After"]) >= 1
            *_, error, last = events(streaming.answer())
            assert error["error"]["code"] == "engine_dead"
            assert last == "[DONE]"
        dead(one)
    with serving(model, runner=ScriptedRunner()) as again:
        assert plain(again, COMPLETIONS, {"prompt": "a"})["choices"][0]["text"]
        assert again.client.get("/health").status_code == 200


def every(options: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (COMPLETIONS, {"prompt": "b", **options}),
        (CHAT, {"messages": [{"role": "user", "content": "c"}], **options}),
    ]


def dead(one: Serving) -> None:
    """What everybody is told from now on, without delay."""
    for path, body in every({}):
        for streaming in (True, False):
            got = one.client.post(path, json={**body, "stream": streaming})
            refused(got, 503, code="engine_dead")
            assert int(got.headers["Retry-After"]) >= 1
    for path in ("/health", "/ready"):
        got = one.client.get(path)
        assert "the ceiling fell down" in refused(got, 503)
        assert int(got.headers["Retry-After"]) >= 1
    assert one.client.get("/version").status_code == 200
    assert one.client.get("/v1/models").status_code == 200
    assert one.client.get("/metrics").status_code == 200
    assert metric(one, "octavo_engine_responding") == 0
    assert one.client.post("/reset_prefix_cache").status_code == 503
    assert one.state.engine.live == 0
    assert not one.state.labels


def test_a_runner_that_hangs_turns_health_red_and_green_again(model: Path) -> None:
    runner = ScriptedRunner()
    with serving(model, runner=runner, server={"stall_seconds": 0.3}) as one:
        assert one.client.get("/health").json()["busy"] is False
        runner.gate.clear()
        with wire(one, COMPLETIONS, {"prompt": "a", "max_tokens": 3, "stream": True}) as client:
            one.until(lambda: one.client.get("/health").status_code == 503)
            sentence = refused(one.client.get("/health"), 503, code="unhealthy")
            assert "no step for" in sentence
            assert "0.3 s (stall_seconds)" in sentence
            refused(one.client.get("/ready"), 503)
            for path in ("/version", "/v1/models", "/load"):
                assert one.client.get(path).status_code == 200
            with wire(one, COMPLETIONS, {"prompt": "b", "stream": True}) as leaver:
                one.until(lambda: one.state.engine.live == 2)
                leaver.close()
            runner.gate.set()
            client.answer()
        one.until(lambda: one.client.get("/health").status_code == 200)
        assert plain(one, COMPLETIONS, {"prompt": "c", "max_tokens": 2})


def test_an_idle_server_is_healthy_for_ever(model: Path) -> None:
    with serving(model, runner=ScriptedRunner(), server={"stall_seconds": 0.05}) as one:
        plain(one, COMPLETIONS, {"prompt": "a", "max_tokens": 2})
        one.quiet()
        time.sleep(0.2)
        assert one.client.get("/health").status_code == 200


def test_work_that_never_moves_turns_health_red(model: Path) -> None:
    """Steps that compute nothing although somebody waits are no progress."""
    with serving(model, runner=ScriptedRunner(), server={"stall_seconds": 0.3}) as one:
        scheduler = one.built.engine.engine.scheduler
        plan = scheduler.plan
        try:
            scheduler.plan = lambda now, budget=None: StepPlan(0, (), ())
            with wire(one, COMPLETIONS, {"prompt": "a", "max_tokens": 3, "stream": True}) as client:
                one.until(lambda: one.client.get("/health").status_code == 503)
                scheduler.plan = plan
                client.answer()
            assert one.client.get("/health").status_code == 200
        finally:
            scheduler.plan = plan


def test_stopping_tells_whoever_still_waits(model: Path) -> None:
    """The server ends while requests run: nobody hangs."""
    runner = ScriptedRunner(delay=0.005)
    with ThreadPoolExecutor(2) as pool:
        with serving(model, runner=runner) as one:
            client = Wire(one, COMPLETIONS, {"prompt": "a", "max_tokens": 20, "stream": True, "ignore_eos": True})
            client.read_until(b"data:")
            done = pool.submit(client.answer)
        assert done.result(timeout=20).endswith("data: [DONE]\n\n")
        client.close()


def test_stopping_does_not_wait_for_a_step_that_hangs(model: Path) -> None:
    runner = ScriptedRunner()
    config = ServerConfig(EngineConfig(str(model), kv_memory=1 << 20, max_num_seqs=8), access_log=False)
    built = build(config)
    built.engine.engine.runner = runner
    app = create_app(config, built)
    runner.gate.clear()

    async def scenario() -> Call:
        async with started(app) as state:
            call = Call(app, COMPLETIONS, b'{"prompt": "a", "max_tokens": 3}')
            while not state.engine.live:
                await asyncio.sleep(0.005)
        await asyncio.wait_for(call.task, 5)
        return call

    try:
        call = asyncio.run(scenario())
    finally:
        runner.gate.set()
    assert call.status == 503
    assert b"engine_dead" in call.body


@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "plain"])
def test_an_answer_that_cannot_be_written_fails_alone(model: Path, streaming: bool) -> None:
    """Tokenizers are other people's code: one that raises costs its request and no other."""
    letter, poison, asked_for = (ids_of(text)[0] for text in "a!W")

    def say(seq: Sequence) -> int:
        return poison if asked_for in seq.request.prompt and seq.generated == 3 else letter

    with serving(model, runner=ScriptedRunner(say, delay=0.001)) as one:
        tokenizer = one.built.engine.loaded.tokenizer
        decode = tokenizer.decode

        def raises(ids: Any, **options: Any) -> str:
            if poison in ids:
                raise LookupError("no such piece")
            return str(decode(ids, **options))

        try:
            tokenizer.decode = raises
            with ThreadPoolExecutor(2) as pool:
                other = pool.submit(plain, one, COMPLETIONS, {"prompt": "abc", "max_tokens": 11})
                bad = one.client.post(COMPLETIONS, json={"prompt": "W", "n": 2, "stream": streaming, **LONG})
                assert other.result()["choices"][0]["text"] == "a" * 11
        finally:
            del tokenizer.decode
        if streaming:
            assert events(bad.text)[-2]["error"]["code"] == "engine_error"
        else:
            assert "no such piece" in refused(bad, 500, code="engine_error")
        one.quiet()
