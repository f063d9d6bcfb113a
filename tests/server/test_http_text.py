"""What comes back over HTTP is what the engine said: text, tokens, logprobs and usage, streamed or not."""

from __future__ import annotations

import random
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from octavo.llm import LLM
from octavo.types import SamplingParams, derive_seed
from tests.server.serving import EOS, ScriptedRunner, byte_tokenizer, ids_of, saying, serving, write_checkpoint
from tests.server.talking import CHAT, COMPLETIONS, PAGE, Stepping, Wire, events, metric, plain, stream

ASK = {COMPLETIONS: {"prompt": "Hi. ABC"}, CHAT: {"messages": [{"role": "user", "content": "Hi. ABC"}]}}
BOTH = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


def text_of(choice: dict[str, Any]) -> str:
    """Of a choice or of a chunk's choice."""
    if "text" in choice:
        return str(choice["text"])
    return str(choice.get("message", choice.get("delta", {})).get("content") or "")


class Joined:
    """A stream put together: per choice its text, tokens, logprobs and end."""

    def __init__(self, chunks: list[Any]) -> None:
        self.usage = chunks[-1].get("usage")
        self.texts: dict[int, str] = defaultdict(str)
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.logprobs: dict[int, list[Any]] = defaultdict(list)
        self.ends: dict[int, list[tuple[str, Any]]] = defaultdict(list)
        for chunk in chunks:
            for choice in chunk["choices"]:
                i = choice["index"]
                self.texts[i] += text_of(choice)
                self.tokens[i] += choice.get("token_ids") or []
                if choice["logprobs"] is not None:
                    self.logprobs[i] += choice["logprobs"].get("content") or choice["logprobs"].get("tokens") or []
                if choice["finish_reason"] is not None:
                    self.ends[i].append((choice["finish_reason"], choice["stop_reason"]))


def same(one: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The plain answer, after the stream has said the same: text, tokens, ends, usage."""
    answer = plain(one, path, {**body, "return_token_ids": True})
    chunks = stream(one, path, {**body, "return_token_ids": True, "stream_options": {"include_usage": True}})
    assert chunks[-1]["choices"] == []
    joined = Joined(chunks)
    for choice in answer["choices"]:
        i = choice["index"]
        assert joined.texts[i] == text_of(choice)
        assert joined.tokens[i] == choice["token_ids"]
        assert joined.ends[i] == [(choice["finish_reason"], choice["stop_reason"])]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert joined.usage[name] == answer["usage"][name]
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        first = choice.get("delta", {}).get("role") == "assistant"
        assert text_of(choice) or choice["finish_reason"] or first, "a chunk without text"
    return answer


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
        assert choice["stop_reason"] == (EOS if match is None else match)
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
        for shown, steps in ((b'"c"', 3), (b'"STOX"', 7), (b'"z"', 8)):
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


# -- logprobs ---------------------------------------------------------------------------------------------------------


def test_what_lm_eval_reads_is_right(model: Path) -> None:
    """local-completions: batches of token ids with echo, logprobs 1, max_tokens 1; against `transformers`."""
    prompts = [[10, 20, 30, 40, 50], [60, 70, 80], list(range(100, 140))]
    body = {"prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    reference = tf.LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    codec = byte_tokenizer()
    with serving(model, max_num_batched_tokens=16) as one:
        answer = plain(one, COMPLETIONS, body)
        again = plain(one, COMPLETIONS, body)  # from the prefix cache, if that could be
    for i, prompt in enumerate(prompts):
        with torch.no_grad():
            expected = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
        for choice in (answer["choices"][i], again["choices"][i]):
            assert choice["index"] == i
            logprobs = choice["logprobs"]
            assert logprobs["tokens"][:-1] == [codec.decode([token]) for token in prompt]
            assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
            for place in range(1, len(prompt)):
                row, token = expected[place - 1], prompt[place]
                assert logprobs["token_logprobs"][place] == pytest.approx(float(row[token]), abs=1e-4)
                top = logprobs["top_logprobs"][place]
                assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-4)
                best = max(top, key=top.__getitem__)
                assert best == codec.decode([int(row.argmax())])
            assert len(logprobs["token_logprobs"]) == len(prompt) + 1
            assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


def test_logprobs_of_completions(model: Path) -> None:
    with serving(model) as one:
        body = {"prompt": "abc", "max_tokens": 8, "temperature": 0, "logprobs": 3, "ignore_eos": True}
        answer = same(one, COMPLETIONS, body)
        logprobs = answer["choices"][0]["logprobs"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert len(logprobs[name]) == 8
        for word, value, top in zip(
            logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
        ):
            assert top[word] == value == max(top.values())  # greedy
            assert 1 <= len(top) <= 4
        joined = Joined(stream(one, COMPLETIONS, body))
        assert joined.logprobs[0] == logprobs["tokens"]
        assert plain(one, COMPLETIONS, {**body, "logprobs": None})["choices"][0]["logprobs"] is None
        only = plain(one, COMPLETIONS, {**body, "logprobs": 0})["choices"][0]["logprobs"]
        assert all(len(top) == 1 for top in only["top_logprobs"])
        assert only["token_logprobs"] == pytest.approx(logprobs["token_logprobs"], abs=1e-5)


def test_logprobs_of_chats(model: Path) -> None:
    with serving(model) as one:
        body = {**ASK[CHAT], "max_tokens": 8, "temperature": 0, "logprobs": True, "ignore_eos": True}
        entries = same(one, CHAT, {**body, "top_logprobs": 2})["choices"][0]["logprobs"]["content"]
        assert len(entries) == 8
        for entry in entries:
            assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
            assert [top["token"] for top in entry["top_logprobs"]][0] == entry["token"]
            assert len(entry["top_logprobs"]) == 2
        streamed = Joined(stream(one, CHAT, {**body, "top_logprobs": 2})).logprobs[0]
        assert [entry["token"] for entry in streamed] == [entry["token"] for entry in entries]
        bare = plain(one, CHAT, body)["choices"][0]["logprobs"]["content"]
        assert all(entry["top_logprobs"] == [] for entry in bare)


@BOTH
def test_logprobs_and_tokens_of_text_that_a_stop_string_swallows(model: Path, path: str) -> None:
    """They belong to the answer, streamed or not; the text does not."""
    want = {"logprobs": 1} if path == COMPLETIONS else {"logprobs": True}
    with serving(model) as one:
        body = {**ASK[path], "max_tokens": 12, "temperature": 0, "ignore_eos": True, **want}
        whole = text_of(plain(one, path, {**body, "logit_bias": {str(ids_of("z")[0]): 100}})["choices"][0])
        assert whole == "z" * 12
        ending = {**body, "logit_bias": {str(ids_of("z")[0]): 100}, "stop": "zzzz"}
        answer = plain(one, path, {**ending, "return_token_ids": True})
        joined = Joined(stream(one, path, {**ending, "return_token_ids": True}))
        (choice,) = answer["choices"]
        assert text_of(choice) == joined.texts[0] == ""
        assert joined.tokens[0] == choice["token_ids"] == ids_of("zzzz")
        listed = choice["logprobs"].get("content") or choice["logprobs"]["tokens"]
        assert len(joined.logprobs[0]) == len(listed) == 4


@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "plain"])
def test_an_echo_comes_first_and_once(model: Path, streaming: bool) -> None:
    with serving(model, runner=ScriptedRunner()) as one:
        body = {"prompt": ["héllo ", "x"], "n": 2, "echo": True, "max_tokens": 3}
        if streaming:
            texts = Joined(stream(one, COMPLETIONS, body)).texts
        else:
            texts = {c["index"]: c["text"] for c in plain(one, COMPLETIONS, body)["choices"]}
        assert texts == {0: "héllo abc", 1: "héllo abc", 2: "xabc", 3: "xabc"}
        ids = plain(one, COMPLETIONS, {**body, "prompt": ids_of("héllo "), "n": 1})
        assert ids["choices"][0]["text"] == "héllo abc"


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
