"""Limits over HTTP: whatever cannot run is refused at once with the numbers, and nobody else notices."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.server.serving import ScriptedRunner, Serving, serving, write_checkpoint
from tests.server.talking import CHAT, COMPLETIONS, PAGE, Stepping, events, metric, plain, refused, stream, wire

MARKER = "MARK "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


def asked(path: str, text: str) -> dict[str, Any]:
    return {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}


# -- L2: none and one -------------------------------------------------------------------------------------------------


def test_empty_prompts_and_none_and_one_token(model: Path) -> None:
    """With a stream running meanwhile, which is unharmed."""
    runner = ScriptedRunner(delay=0.001)
    with serving(model, runner=runner) as one:
        with wire(one, COMPLETIONS, {"prompt": "x", "max_tokens": 300, "stream": True, "ignore_eos": True}) as other:
            other.read_until(b"data:")
            for prompt in ("", [], ["a", ""], [[5], []], [""]):
                for streaming in (True, False):
                    got = one.client.post(COMPLETIONS, json={"prompt": prompt, "stream": streaming})
                    refused(got, 400, param="prompt")
            refused(one.client.post(CHAT, json={"messages": []}), 400, param="messages")
            for path in (COMPLETIONS, CHAT):
                answer = plain(one, path, {**asked(path, "ab"), "max_tokens": 1})
                assert answer["usage"]["completion_tokens"] == 1
                assert answer["choices"][0]["finish_reason"] == "length"
                answer = plain(one, path, {**asked(path, "ab"), "max_tokens": 0})
                assert answer["usage"]["completion_tokens"] == 0
                assert answer["choices"][0]["finish_reason"] == "length"
                chunks = stream(one, path, {**asked(path, "ab"), "max_tokens": 0})
                assert chunks[-1]["choices"][0]["finish_reason"] == "length"
            refused(one.client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": -1}), 400, param="max_tokens")
            text = "".join(chunk["choices"][0]["text"] for chunk in events(other.answer())[:-1])
        assert text == "abcdefghij" * 30


def test_nothing_generated_is_enough_to_score(model: Path) -> None:
    """echo and logprobs with max_tokens 0: the prompt's own, and the same as with one token."""
    ask = {"prompt": [[10, 11, 12, 13], [20, 21]], "echo": True, "logprobs": 2, "temperature": 0}
    with serving(model) as one:
        scored = plain(one, COMPLETIONS, {**ask, "max_tokens": 0})
        longer = plain(one, COMPLETIONS, {**ask, "max_tokens": 1})
        streamed = stream(one, COMPLETIONS, {**ask, "max_tokens": 0})
    for i, (short, long) in enumerate(zip(scored["choices"], longer["choices"], strict=True)):
        count = len(ask["prompt"][i])  # type: ignore[index]
        assert short["logprobs"]["token_logprobs"][0] is None
        assert short["logprobs"]["token_logprobs"][1:] == pytest.approx(
            long["logprobs"]["token_logprobs"][1:count], abs=1e-5
        )
        assert len(short["logprobs"]["tokens"]) == count
        (own,) = [chunk["choices"][0] for chunk in streamed if chunk["choices"][0]["index"] == i]
        assert own["logprobs"] == short["logprobs"]
        assert own["text"] == short["text"]


# -- L3: nothing is cut -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "plain"])
def test_a_long_prompt_is_refused_never_cut(model: Path, path: str, streaming: bool) -> None:
    with serving(model, runner=ScriptedRunner(), max_model_len=128) as one:
        around = one.client.post("/tokenize", json=asked(path, "")).json()["count"] if path == CHAT else 0
        for tokens in (129, 5 * 128):
            text = MARKER + "x" * (tokens - around - len(MARKER))
            got = one.client.post(path, json={**asked(path, text), "stream": streaming, "max_tokens": 1})
            sentence = refused(got, 400, code="context_length_exceeded")
            assert str(tokens) in sentence
            assert "128" in sentence
        text = MARKER + "x" * (127 - around - len(MARKER))
        answer = plain(one, path, {**asked(path, text), "max_tokens": 1})
        assert answer["usage"]["prompt_tokens"] == 127
        assert metric(one, "octavo_generated_tokens_total") == 1


def test_clients_cannot_ask_the_template_to_cut(model: Path) -> None:
    cut = {"truncation": True, "max_length": 8, "padding": "max_length", "return_tensors": "pt", "return_dict": True}
    body = {**asked(CHAT, MARKER + "x" * 200), "max_tokens": 1}
    with serving(model, runner=ScriptedRunner()) as one:
        whole = plain(one, CHAT, body)["usage"]["prompt_tokens"]
        for name, value in cut.items():
            got = one.client.post(CHAT, json={**body, "chat_template_kwargs": {name: value}})
            assert got.status_code == 400 or got.json()["usage"]["prompt_tokens"] == whole, (name, got.text)


# -- L4 and K10: tokens of one request --------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"kv_strategy": "reserve-max"}, {}], ids=["reserved", "paged"])
def test_one_at_its_limit_leaves_the_others_alone(model: Path, settings: dict[str, Any]) -> None:
    ask = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    bodies = [{**ask, "prompt": "abc"[i] * 9, "max_tokens": 30} for i in range(3)]
    greedy = {**ask, "prompt": "d" * 10, "max_tokens": 500}
    with serving(model, max_num_seqs=4, max_model_len=64, kv_memory=16 * PAGE, **settings) as one:
        assert one.client.get("/v1/models").json()["data"][0]["max_model_len"] == 64
        alone = [plain(one, COMPLETIONS, body)["choices"][0]["token_ids"] for body in bodies]
        with ThreadPoolExecutor(4) as pool:
            long, *rest = pool.map(lambda body: plain(one, COMPLETIONS, body), [greedy, *bodies])
        assert long["choices"][0]["finish_reason"] == "length"
        assert long["usage"]["total_tokens"] == 64
        assert [answer["choices"][0]["token_ids"] for answer in rest] == alone


def test_an_answer_without_an_end_ends_at_the_model_length(model: Path) -> None:
    with serving(model, runner=ScriptedRunner(), max_model_len=100) as one:
        answer = plain(one, CHAT, asked(CHAT, "hi"))
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == 100


@pytest.mark.parametrize("strategy", ["paged", "reserve-max", "growing"])
@pytest.mark.parametrize("blocks", [5, 9])
def test_the_length_printed_is_reached_and_no_more(model: Path, strategy: str, blocks: int) -> None:
    settings: dict[str, Any] = dict(kv_strategy=strategy, kv_memory=blocks * PAGE + 100)
    with serving(model, runner=ScriptedRunner(), **settings) as one:
        longest = one.client.get("/v1/models").json()["data"][0]["max_model_len"]
        assert longest >= (blocks - 1) * 16
        for prompt in (1, longest // 2, longest - 1):
            body = {"prompt": [7] * prompt, "max_tokens": longest - prompt, "ignore_eos": True}
            answer = plain(one, COMPLETIONS, body)
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["total_tokens"] == longest
        for prompt in (longest, longest + 1, 5 * longest):
            got = one.client.post(COMPLETIONS, json={"prompt": [7] * prompt, "max_tokens": 1})
            sentence = refused(got, 400, code="context_length_exceeded", param="prompt")
            assert str(prompt) in sentence
            assert str(longest) in sentence


# -- S1: what never fits ----------------------------------------------------------------------------------------------


def test_a_request_that_can_never_fit_keeps_nobody_waiting(model: Path) -> None:
    """Pool of 128 tokens, model length of 1024: as the case says."""
    with serving(model, runner=ScriptedRunner(), kv_memory=8 * PAGE) as one:
        limit = one.client.get("/v1/models").json()["data"][0]["max_model_len"]
        assert limit == 128
        got = one.client.post(COMPLETIONS, json={"prompt": [7] * 200, "max_tokens": 1})
        sentence = refused(got, 400, param="prompt")
        assert "200" in sentence
        assert "128" in sentence
        second = one.client.post(COMPLETIONS, json={"prompt": [7] * 100, "max_tokens": 100, "ignore_eos": True})
        assert second.status_code == 200
        assert second.json()["choices"][0]["finish_reason"] == "length"
        assert second.json()["usage"]["total_tokens"] == 128
        short = plain(one, COMPLETIONS, {"prompt": "hi", "max_tokens": 2})
        assert short["usage"]["completion_tokens"] == 2
        assert one.client.get("/health").status_code == 200


def test_more_samples_than_can_run_are_refused(model: Path) -> None:
    with serving(model, runner=ScriptedRunner(), max_num_seqs=3) as one:
        sentence = refused(one.client.post(COMPLETIONS, json={"prompt": "a", "n": 4}), 400, param="n")
        assert "3" in sentence


# -- S6: the queue ----------------------------------------------------------------------------------------------------


class Filled:
    """One request runs and as many wait as are sent; all end well at the end."""

    def __init__(self, one: Serving, runner: Stepping) -> None:
        self.one, self.runner = one, runner
        self.pool = ThreadPoolExecutor(16)
        self.answers: list[Any] = []

    def send(self, body: dict[str, Any], live: int) -> None:
        """`live`: how many of the engine's requests there are then."""
        self.answers.append(self.pool.submit(self.one.client.post, COMPLETIONS, json={"max_tokens": 2, **body}))
        self.one.until(lambda: self.one.state.engine.live == live)
        self.runner.to_step(self.one, self.runner.steps + 1)

    def finish(self) -> list[Any]:
        self.runner.gate.set()
        self.pool.shutdown()
        return [answer.result() for answer in self.answers]


def test_a_full_queue_says_so(model: Path) -> None:
    runner = Stepping()
    with serving(model, runner=runner, max_queue=4, max_num_seqs=4) as one:
        filled = Filled(one, runner)
        filled.send({"prompt": "blocker", "max_tokens": 90, "n": 4}, 1)
        filled.send({"prompt": "a", "n": 2}, 2)
        filled.send({"prompt": "b"}, 3)
        sent, answers = 3, []
        # The thread is in a step until it is told: answers come between two steps.
        for body in ({"n": 4}, {"n": 2}, {"prompt": ["x", "y"]}, {"prompt": ["x", "y"], "stream": True}):
            waiting = filled.pool.submit(one.client.post, COMPLETIONS, json={"prompt": "c", "max_tokens": 1, **body})
            one.until(lambda waiting=waiting: runner.allow() or waiting.done())
            answers.append(waiting.result())
        for got in answers:
            sentence = refused(got, 429, code="queue_full")
            assert int(got.headers["Retry-After"]) >= 1
            assert "max_queue" in sentence
            assert "4" in sentence
        assert one.ask(lambda engine: len(engine.scheduler.requests)) == 3  # all or nothing
        too_many = filled.pool.submit(one.client.post, COMPLETIONS, json={"prompt": ["x"] * 5})
        one.until(lambda: runner.allow() or too_many.done())
        assert "max_queue" in refused(too_many.result(), 400, param="prompt")
        assert [got.status_code for got in filled.finish()] == [200] * sent
        one.quiet()
        rejected = metric(one, "octavo_http_rejected_total", reason="max_num_queued_reqs")
        assert rejected == len(answers)
        assert metric(one, "octavo_requests_refused_total", code="queue_full") == len(answers)


def test_sent_is_accepted_and_refused_and_expired(model: Path) -> None:
    runner = ScriptedRunner(delay=0.002)
    with serving(model, runner=runner, max_queue=4, max_num_seqs=2, server={"max_queue_seconds": 0.1}) as one:
        done = threading.Barrier(12)

        def send(number: int) -> int:
            done.wait()
            body = {"prompt": "x", "max_tokens": 60, "n": 1 + (number % 4 == 0), "ignore_eos": True}
            return int(one.client.post(COMPLETIONS, json={**body, "stream": number % 2 == 0}).status_code)

        with ThreadPoolExecutor(12) as pool:
            statuses = list(pool.map(send, range(12)))
        one.quiet()
        assert set(statuses) <= {200, 429, 503}
        assert statuses.count(429) >= 1
        accepted = metric(one, "octavo_requests_accepted_total")
        expired = metric(one, "octavo_requests_expired_total")
        refusals = metric(one, "octavo_requests_refused_total")
        assert (accepted - expired, refusals, expired) == tuple(map(statuses.count, (200, 429, 503)))
        assert metric(one, "octavo_http_rejected_total") == refusals + expired


@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "plain"])
def test_who_waits_too_long_ends_with_a_clear_error(model: Path, streaming: bool) -> None:
    runner = ScriptedRunner(delay=0.005)
    with serving(model, runner=runner, max_num_seqs=1, server={"max_queue_seconds": 0.15}) as one:
        with wire(one, COMPLETIONS, {"prompt": "x", "max_tokens": 200, "stream": True, "ignore_eos": True}) as other:
            other.read_until(b"data:")
            got = one.client.post(COMPLETIONS, json={"prompt": "late", "stream": streaming})
            sentence = refused(got, 503, code="queue_timeout")
            assert "0.15" in sentence
            assert "max_queue_seconds" in sentence
            assert int(got.headers["Retry-After"]) >= 1
            assert one.ask(lambda engine: len(engine.scheduler.requests)) == 1
            assert other.answer().count('"text":') > 0
        assert metric(one, "octavo_http_rejected_total", reason="queue_timeout") == 1
        assert metric(one, "octavo_requests_expired_total") == 1


def test_a_deadline_passes_for_one_prompt_of_several(model: Path) -> None:
    """The whole HTTP request ends with it; nothing of it goes on."""
    runner = ScriptedRunner(delay=0.005)
    with serving(model, runner=runner, max_num_seqs=1, server={"max_queue_seconds": 0.1}) as one:
        for streaming in (True, False):
            body = {"prompt": ["a", "b"], "max_tokens": 100, "stream": streaming, "ignore_eos": True}
            got = one.client.post(COMPLETIONS, json=body)
            if streaming:
                *_, error, last = events(got.text)
                assert error["error"]["code"] == "queue_timeout"
                assert last == "[DONE]"
            else:
                refused(got, 503, code="queue_timeout")
            one.quiet()
