"""Log probabilities over HTTP, in both shapes, of prompts too: as lm-eval and the `openai` client read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.server.serving import ScriptedRunner, byte_tokenizer, ids_of, serving, write_checkpoint
from tests.server.talking import ASK, CHAT, COMPLETIONS, Joined, plain, same, stream, text_of

BOTH = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


def written(codec: Any, token: int) -> str:
    """A token as OpenAI writes it: a part of a character by its bytes."""
    text = str(codec.decode([token]))
    byte = {letter: byte for byte, letter in bytes_to_unicode().items()}
    return text if "\ufffd" not in text else f"bytes:\\x{byte[codec.convert_ids_to_tokens(token)]:02x}"


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
            assert logprobs["tokens"][:-1] == [written(codec, token) for token in prompt]
            assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
            for place in range(1, len(prompt)):
                row, token = expected[place - 1], prompt[place]
                assert logprobs["token_logprobs"][place] == pytest.approx(float(row[token]), abs=1e-4)
                top = logprobs["top_logprobs"][place]
                assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-4)
                best = max(top, key=top.__getitem__)
                assert best == written(codec, int(row.argmax()))
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
            assert entry["top_logprobs"][0]["token"] == entry["token"]
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
