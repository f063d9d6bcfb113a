"""What comes back over HTTP is what the engine said: text, tokens and usage, streamed or not."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from octavo.llm import LLM
from octavo.types import SamplingParams, derive_seed
from tests.server.serving import ScriptedRunner, ids_of, saying, serving, write_checkpoint
from tests.server.talking import (
    ASK,
    CHAT,
    COMPLETIONS,
    PAGE,
    Joined,
    Stepping,
    Wire,
    events,
    metric,
    plain,
    same,
    stream,
    text_of,
)

BOTH = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


# -- T1: stop strings -------------------------------------------------------------------------------------------------

STOPS = [
    # what the model says, the stops, what is shown, which of them matched
    ("abcDEFGHIJxyz", ["DEFGHIJ"], "abc", "DEFGHIJ"),
    ("abcDEFGHXyz", ["DEFGHIJ"], "abcDEFGHXyz", None),
    ("abcDEFGDEFGHIJx", ["DEFGHIJ"], "abcDEFG", "DEFGHIJ"),
    ("abcDEFGHIJ", ["DEF", "DEFGHIJ"], "abc", "DEF"),
    ("abcDEFGHIJ", ["one", "two", "GHI", "EFGHIJ"], "abcDEF", "GHI"),
    ("abc DEFG", ["DEFGHIJ"], "abc DEFG", None),
    ("DEFGHIJ", ["DEFGHIJ"], "", "DEFGHIJ"),
    ("DEF ABC", ["ABCDEF"], "DEF ABC", None),  # the prompt ends with ABC: a stop does not reach back into it
    ("äöü€", ["ü"], "äö", "ü"),
    ("aaaaaaab", ["aab"], "aaaaa", "aab"),
]


@BOTH
@pytest.mark.parametrize(("says", "stops", "shown", "match"), STOPS)
def test_no_character_of_a_stop_string_is_sent(
    model: Path, path: str, says: str, stops: list[str], shown: str, match: str | None
) -> None:
    with serving(model, runner=ScriptedRunner(saying(says))) as one:
        body = {**ASK[path], "max_tokens": 60, "stop": stops}
        (choice,) = same(one, path, body)["choices"]
        assert text_of(choice) == shown
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] == match
        (choice,) = same(one, path, {**body, "include_stop_str_in_output": True})["choices"]
        assert text_of(choice) == shown + (match or "")
        if match is not None:  # in the last token that is allowed
            size = len(ids_of(says[: says.index(match) + len(match)]))
            (choice,) = same(one, path, {**body, "max_tokens": size})["choices"]
            assert (text_of(choice), choice["finish_reason"]) == (shown, "stop")
            (choice,) = same(one, path, {**body, "max_tokens": max(size - 1, 1)})["choices"]
            assert choice["finish_reason"] == "length" or len(match) == 1


@BOTH
def test_text_is_held_back_no_longer_than_a_stop_string_needs(model: Path, path: str) -> None:
    runner = Stepping(saying("abcSTOX" + "z" * 20))
    with serving(model, runner=runner) as one:
        client = Wire(one, path, {**ASK[path], "max_tokens": 20, "stop": "STOP", "stream": True})
        # One step at a time up to "c": tokens that come while a busy loop lags go out together.
        for shown, steps in ((b'"a"', 1), (b'"b"', 2), (b'"c"', 3), (b'"STOX"', 7), (b'"z"', 8)):
            runner.to_step(one, steps)
            seen = client.read_until(shown)
            assert (b'"z"' in seen) == (steps == 8)
        runner.gate.set()
        client.answer()
        client.close()


@BOTH
def test_one_chunk_for_each_token(model: Path, path: str) -> None:
    runner = Stepping(saying("a b,"))
    with serving(model, runner=runner) as one:
        client = Wire(one, path, {**ASK[path], "max_tokens": 4, "stream": True})
        for i, letter in enumerate("a b,"):
            runner.to_step(one, i)
            runner.allow()
            client.read_until(f'"{letter}"'.encode())
        runner.gate.set()
        chunks = events(client.answer())[:-1]
        client.close()
    if path == CHAT:
        begin, *chunks, end = chunks
        assert begin["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert end["choices"][0]["delta"] == {}
        assert end["choices"][0]["finish_reason"] == "length"
        assert all(set(chunk["choices"][0]["delta"]) == {"content"} for chunk in chunks)
    assert [text_of(chunk["choices"][0]) for chunk in chunks] == ["a", " ", "b", ","]
    assert all("usage" not in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == len({chunk["created"] for chunk in chunks}) == 1
    kind = "chat.completion.chunk" if path == CHAT else "text_completion"
    assert {chunk["object"] for chunk in chunks} == {kind}


@BOTH
@pytest.mark.parametrize("text", ["grüße 🦜 €5 日本", "🦜🦜", "é"])
def test_characters_of_several_tokens_come_whole(model: Path, path: str, text: str) -> None:
    with serving(model, runner=ScriptedRunner(saying(text), delay=0.001)) as one:
        (choice,) = same(one, path, {**ASK[path], "max_tokens": 100})["choices"]
        assert text_of(choice) == text
        assert "\ufffd" not in "".join(text_of(c["choices"][0]) for c in stream(one, path, ASK[path]) if c["choices"])
        size = len(text.encode()) - 1  # the last character is not complete: it shows as U+FFFD, once the end is there
        (choice,) = same(one, path, {**ASK[path], "max_tokens": size})["choices"]
        assert text_of(choice).endswith("\ufffd")


# -- usage and options ------------------------------------------------------------------------------------------------


@BOTH
def test_usage_in_each_chunk_and_at_the_end(model: Path, path: str) -> None:
    with serving(model, runner=ScriptedRunner(delay=0.001)) as one:
        body = {**ASK[path], "max_tokens": 9}
        *chunks, last = stream(one, path, {**body, "stream_options": {"include_usage": True}})
        assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 9
        each = {"include_usage": True, "continuous_usage_stats": True}
        *chunks, last = stream(one, path, {**body, "stream_options": each})
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 9
        assert last["usage"]["completion_tokens"] == 9
        for options in ({}, None, {"include_usage": False}):
            chunks = stream(one, path, {**body, "stream_options": options})
            assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_cached_tokens_are_told(model: Path) -> None:
    with serving(model) as one:
        body = {"prompt": "p" * 50, "max_tokens": 2}
        first, second = plain(one, COMPLETIONS, body), plain(one, COMPLETIONS, body)
        assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert second["usage"]["prompt_tokens_details"] == {"cached_tokens": 48}


@BOTH
def test_min_tokens_ignore_eos_and_stop_tokens(model: Path, path: str) -> None:
    with serving(model, runner=ScriptedRunner(saying("abc"))) as one:
        (choice,) = same(one, path, {**ASK[path], "max_tokens": 10})["choices"]
        assert (text_of(choice), choice["finish_reason"]) == ("abc", "stop")
        (choice,) = same(one, path, {**ASK[path], "max_tokens": 10, "ignore_eos": True})["choices"]
        assert (len(choice["token_ids"]), choice["finish_reason"]) == (10, "length")
        (choice,) = same(one, path, {**ASK[path], "max_tokens": 10, "min_tokens": 6})["choices"]
        assert (len(choice["token_ids"]), choice["finish_reason"]) == (7, "stop")
        b = ids_of("b")[0]
        (choice,) = same(one, path, {**ASK[path], "max_tokens": 10, "stop_token_ids": [b]})["choices"]
        assert (text_of(choice), choice["stop_reason"]) == ("a", b)


@BOTH
def test_logit_bias_decides(model: Path, path: str) -> None:
    with serving(model) as one:
        z = ids_of("z")[0]
        body = {**ASK[path], "max_tokens": 5, "temperature": 0, "logit_bias": {str(z): 100}}
        assert text_of(same(one, path, body)["choices"][0]) == "zzzzz"


# -- N1: several samples ----------------------------------------------------------------------------------------------


@BOTH
def test_samples_share_the_prompt_and_equal_single_runs(model: Path, path: str) -> None:
    ask = {"messages": [{"role": "user", "content": "Q" * 20}]} if path == CHAT else {"prompt": "Q" * 35}
    body = {**ask, "max_tokens": 40, "temperature": 1, "seed": 7, "ignore_eos": True}
    with serving(model) as one:
        answer = same(one, path, {**body, "n": 4})
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        singles = [plain(one, path, {**body, "seed": derive_seed(7, i)}) for i in range(4)]
        assert [text_of(c) for c in answer["choices"]] == [text_of(s["choices"][0]) for s in singles]
        assert len({text_of(c) for c in answer["choices"]}) == 4
        assert answer["usage"]["prompt_tokens"] == singles[0]["usage"]["prompt_tokens"]
        assert answer["usage"]["completion_tokens"] == 4 * 40


def test_prompts_times_samples_are_counted_through(model: Path) -> None:
    body = {"prompt": ["a", [5, 6, 7]], "n": 2, "max_tokens": 4, "temperature": 1, "seed": 3, "ignore_eos": True}
    with serving(model) as one:
        with pytest.raises(Exception, match="prompt"):
            plain(one, COMPLETIONS, body)  # a list of texts and token ids is neither
        for prompts in (["a", "bcd"], [[5], [5, 6, 7]]):
            answer = same(one, COMPLETIONS, {**body, "prompt": prompts})
            assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
            assert answer["usage"]["prompt_tokens"] == 4
            assert answer["usage"]["completion_tokens"] == 16
            alone = plain(one, COMPLETIONS, {**body, "prompt": prompts[1]})
            assert [c["text"] for c in alone["choices"]] == [c["text"] for c in answer["choices"][2:]]


# -- G1: seeds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 3, "max_num_batched_tokens": 8}, {"kv_strategy": "growing"}])
def test_a_seed_gives_the_same_whatever_its_neighbours(model: Path, settings: dict[str, Any]) -> None:
    drawn = random.Random(1)
    bodies = [
        {"prompt": f"number {i} " * (1 + i % 3), "seed": i, "temperature": 0.9, "max_tokens": 10, "ignore_eos": True}
        for i in range(1, 9)
    ]
    bodies[3]["n"] = 2
    with serving(model, **settings) as one, ThreadPoolExecutor(8) as pool:

        def ask(body: dict[str, Any]) -> list[str]:
            return [choice["text"] for choice in plain(one, COMPLETIONS, body)["choices"]]

        alone = {body["seed"]: ask(body) for body in bodies}
        for _ in range(2):
            drawn.shuffle(bodies)
            together = dict(zip([body["seed"] for body in bodies], pool.map(ask, bodies), strict=True))
            assert together == alone
        free = {key: value for key, value in bodies[0].items() if key not in ("seed", "n")}
        assert ask(free) != ask(free)


# -- P2: preemption ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_preemption_changes_no_answer(model: Path, path: str) -> None:
    ways: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 5, "frequency_penalty": 0.5},
        {"temperature": 0, "logprobs": 2} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 2, "seed": 1},
        {"temperature": 0.8, "seed": 6, "stop": ["\x01"]},
        {"temperature": 0, "presence_penalty": 0.5},
        {"temperature": 0.8, "seed": 8},
    ]
    bodies: list[dict[str, Any]] = []
    for i, way in enumerate(ways):
        text = chr(97 + i) * 24
        ask = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
        bodies.append({**ask, **way, "max_tokens": 48, "ignore_eos": True, "return_token_ids": True})
    tight: dict[str, Any] = dict(kv_memory=9 * PAGE, admission="prompt", max_num_batched_tokens=8)

    def told(answer: dict[str, Any]) -> list[Any]:
        (choice,) = answer["choices"]
        return [choice["token_ids"], text_of(choice), choice["logprobs"], choice["finish_reason"]]

    with serving(model) as one:
        expected = [told(plain(one, path, body)) for body in bodies]
    with serving(model, **tight) as one, ThreadPoolExecutor(6) as pool:
        got = [told(answer) for answer in pool.map(lambda body: plain(one, path, body), bodies)]
        joined = [Joined(chunks) for chunks in pool.map(lambda body: stream(one, path, body), bodies)]
        assert metric(one, "octavo_preemptions_total") >= 4
    for i, (tokens, text, logprobs, reason) in enumerate(expected):
        assert got[i][0] == joined[i].tokens[0] == tokens
        assert got[i][1] == joined[i].texts[0] == text
        assert got[i][3] == reason
        if logprobs is not None:
            listed = logprobs["content"] if path == CHAT else logprobs["tokens"]
            assert len(joined[i].logprobs[0]) == len(listed) == len(tokens)
            assert numbers(got[i][2]) == pytest.approx(numbers(logprobs), abs=1e-4)


def numbers(logprobs: dict[str, Any]) -> list[float]:
    if "token_logprobs" in logprobs:
        return list(logprobs["token_logprobs"])
    return [entry["logprob"] for entry in logprobs["content"]]


# -- the same as offline ----------------------------------------------------------------------------------------------


def test_greedy_tokens_equal_the_offline_engine_and_transformers(model: Path) -> None:
    prompts = ["hello world", "a", "Ünïcödé", "x" * 70]
    reference = tf.LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    llm = LLM(str(model), dtype="float32", kv_memory=4 << 20)
    offline = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24))
    with serving(model) as one, ThreadPoolExecutor(4) as pool:
        body = {"max_tokens": 24, "temperature": 0, "return_token_ids": True}
        answers = list(pool.map(lambda prompt: plain(one, COMPLETIONS, {**body, "prompt": prompt}), prompts))
    for prompt, answer, own in zip(prompts, answers, offline, strict=True):
        (choice,) = answer["choices"]
        assert choice["token_ids"] == list(own.outputs[0].token_ids)
        assert choice["text"] == own.outputs[0].text
        ids = torch.tensor([ids_of(prompt)])
        with torch.no_grad():
            made = reference.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)
        assert choice["token_ids"] == made[0, ids.shape[1] :].tolist()
