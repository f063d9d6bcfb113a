"""Whatever a client sends, it gets an answer that names what is wrong; nobody else notices and nothing is left."""

from __future__ import annotations

import json
import types
import typing
from typing import Any

import pytest
from pydantic import BaseModel

from tests.server.serving import Serving
from tests.server.talking import BODIES, CHAT, COMPLETIONS, GOOD, is_refused, plain, refused, send

pytestmark = pytest.mark.usefixtures("stream_beside")


# -- bodies that are none ---------------------------------------------------------------------------------------------

RAW: dict[str, bytes] = {
    "nothing": b"",
    "space": b"  \n ",
    "half": b'{"prompt": "x"',
    "list": b"[1, 2]",
    "text": b'"prompt"',
    "number": b"17",
    "null": b"null",
    "twice": b'{"prompt": "x"}{"prompt": "y"}',
    "comma": b'{"prompt": "x",}',
    "quotes": b"{'prompt': 'x'}",
    "not a number": b'{"prompt": NaN}',
    "deep list": b"[" * 100_000,
    "deep object": b'{"prompt":' * 50_000 + b"1" + b"}" * 50_000,
    "deep field": b'{"prompt": 5, "messages": [{"role": ' + b"[" * 190 + b"]" * 190 + b"}]}",
    "broken UTF-8": b'{"prompt": "\xff\xfe"}',
    "overlong UTF-8": b'{"prompt": "\xc0\x80"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "byte order mark": b'\xef\xbb\xbf{"prompt": 5}',
    "half of a pair": b'{"prompt": "a\\ud800b", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "the other half": b'{"prompt": "\\udfff", "messages": [{"role": "\\udfff", "content": ""}]}',
    "NUL": b"\x00" * 20,
    "random": bytes(range(256)),
    "long number": b'{"prompt": ' + b"9" * 5000 + b', "messages": ' + b"9" * 5000 + b"}",
    "minus": b'{"prompt": [-]}',
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("body", RAW)
def test_bodies_that_are_no_request(one: Serving, path: str, body: str) -> None:
    is_refused(send(one, path, RAW[body]))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("number", ["1e400", "-1e400", "9" * 4000, "9" * 5000, "NaN", "Infinity", "-Infinity"])
def test_numbers_that_nobody_can_count(one: Serving, path: str, number: str) -> None:
    for name, field in typing.get_type_hints(BODIES[path]).items():
        if name == "model_config" or not takes_number(field):
            continue
        raw = json.dumps(GOOD[path] | {name: 0}).replace(f'"{name}": 0', f'"{name}": {number}')
        sentence = is_refused(send(one, path, raw))
        assert name in sentence or "JSON" in sentence
    for name in ("response_format", "structured_outputs", "tools", "messages", "stream_options", "logit_bias"):
        raw = json.dumps(GOOD[path] | {name: 0}).replace(f'"{name}": 0', f'"{name}": {{"type": {number}}}')
        assert send(one, path, raw).status_code < 500
        raw = json.dumps(GOOD[path] | {name: 0}).replace(f'"{name}": 0', f'"{name}": [{{"content": {number}}}]')
        assert send(one, path, raw).status_code < 500


def takes_number(kind: Any) -> bool:
    if kind in (int, float):
        return True
    return kind is not bool and any(takes_number(inner) for inner in typing.get_args(kind))


# -- fields -----------------------------------------------------------------------------------------------------------

VALUES: list[Any] = [True, 7, -1, 2.5, "text", "", [], [1], ["a"], [[1]], [[["a"]]], {}, {"a": 1}, [None], {"a": None}]


def allowed(kind: Any, value: Any) -> bool:
    """Whether `value` is of the type that a field is declared to have. Objects are open: anything may be inside."""
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        return allowed(typing.get_args(kind)[0], value)
    if origin in (types.UnionType, typing.Union):
        return any(allowed(member, value) for member in typing.get_args(kind))
    if origin is typing.Literal:
        return value in typing.get_args(kind)
    if origin is list:
        return isinstance(value, list) and all(allowed(typing.get_args(kind)[0], item) for item in value)
    if origin is dict:
        inner = typing.get_args(kind)[1]
        return isinstance(value, dict) and (inner is Any or all(allowed(inner, item) for item in value.values()))
    if kind is type(None):
        return value is None
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return isinstance(value, dict)
    return isinstance(value, kind)


@pytest.mark.parametrize("path", BODIES)
def test_each_field_refuses_other_types_and_is_named(one: Serving, path: str) -> None:
    tried = 0
    for name, kind in typing.get_type_hints(BODIES[path], include_extras=True).items():
        if name == "model_config":
            continue
        for value in VALUES:
            response = one.client.post(path, json={**GOOD[path], name: value})
            if allowed(kind, value):
                assert response.status_code < 500, (name, value, response.text)
                if response.status_code != 200:
                    is_refused(response)
                continue
            tried += 1
            sentence = refused(response, 400)
            param = response.json()["error"]["param"]
            assert param == name or param.startswith((f"{name}.", f"{name}[")), (name, value, sentence)
            assert param in sentence
    assert tried > 10


@pytest.mark.parametrize("path", BODIES)
def test_null_is_the_default_and_unknown_fields_are_ignored(one: Serving, path: str) -> None:
    needed = {"prompt", "messages", "tokens"}
    nulls = {name: None for name in BODIES[path].model_fields if name not in needed}
    answer = plain(one, path, {**GOOD[path], **nulls, "max_tokens": 2, "who": {"knows": [1]}, "x" * 300: "y"})
    assert answer
    missing = one.client.post(path, json={})
    assert refused(missing, 400).startswith(("prompt", "messages", "tokens", "give"))


RANGES: list[tuple[str, list[Any]]] = [
    ("n", [0, -1, 9, 129, 10**9]),
    ("temperature", [-0.1]),
    ("top_p", [0, 1.1, -1]),
    ("top_k", [-2]),
    ("min_p", [-0.1, 1.1]),
    ("repetition_penalty", [0, -1, 1e30]),
    ("presence_penalty", [-2.1, 3]),
    ("frequency_penalty", [-2.1, 1e300]),
    ("seed", [2**63, -(2**63) - 1]),
    ("max_tokens", [-1, 2**63]),
    ("min_tokens", [-1, 3]),
    ("stop", [[""], ["a", ""], "", ["x"] * 100_000, "s" * 100_000]),
    ("stop_token_ids", [[260], [-1], [2**62]]),
    ("logit_bias", [{"260": 1}, {"-1": 1}, {"a": 1}, {"1.5": 1}, {"1": 101}, {"1": -1e9}, {"9" * 30: 1}, {"²": 1}]),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("name", "values"), RANGES, ids=[name for name, _ in RANGES])
def test_each_field_has_its_limits(one: Serving, path: str, name: str, values: list[Any]) -> None:
    for value in values:
        response = one.client.post(path, json={**GOOD[path], "temperature": 1, name: value})
        refused(response, 400)
        assert response.json()["error"]["param"].startswith(name), response.text


def test_fields_of_completions_have_their_limits(one: Serving) -> None:
    bad: list[dict[str, Any]] = [
        {"logprobs": 21},
        {"logprobs": -1},
        {"logprobs": 10**12},
        {"best_of": 3},
        {"suffix": "x"},
        {"prompt": [260]},
        {"prompt": [-1]},
        {"prompt": [2**63 - 1]},
        {"prompt": [[5], [260]]},
        {"prompt": [[5], "a"]},
        {"prompt": ["a"] * 3000},
        {"prompt": [["a"]]},
        {"prompt": {"text": "a"}},
        {"prompt": ["a"] * 2000, "n": 8},
    ]
    for fields in bad:
        refused(one.client.post(COMPLETIONS, json={**GOOD[COMPLETIONS], **fields}), 400)


CONVERSATIONS: list[Any] = [
    [],
    [{}],
    [{"role": "user"}],
    [{"content": "hi"}],
    [{"role": 5, "content": "hi"}],
    [{"role": "", "content": "hi"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": {"type": "text", "text": "x"}}],
    [{"role": "user", "content": [5]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "text", "text": 5}]}],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_conversations_that_are_none(one: Serving, messages: Any) -> None:
    for path in (CHAT, "/tokenize"):
        refused(one.client.post(path, json={"messages": messages}), 400, param="messages")


def test_fields_of_chats_have_their_limits(one: Serving) -> None:
    bad: list[tuple[str, dict[str, Any]]] = [
        ("top_logprobs", {"top_logprobs": 3}),
        ("logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("max_completion_tokens", {"max_completion_tokens": -1}),
        ("continue_final_message", {"continue_final_message": True}),
        ("add_generation_prompt", {"add_generation_prompt": False}),
        ("response_format", {"response_format": {}}),
        ("response_format", {"response_format": {"type": 5}}),
        ("response_format", {"response_format": {"type": "json_schema"}}),
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}),
    ]
    for name, fields in bad:
        response = one.client.post(CHAT, json={**GOOD[CHAT], **fields})
        refused(response, 400)
        assert name in response.json()["error"]["param"], response.text


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_model_is_not_found(one: Serving, path: str) -> None:
    for name in ("nope", "", "x" * 10_000, "../../etc/passwd", "\u0000", "a\nb"):
        response = one.client.post(path, json={**GOOD[path], "model": name})
        refused(response, 404, code="model_not_found", param="model")
    refused(one.client.get("/v1/models/nope"), 404, code="model_not_found")
    refused(one.client.get("/v1/models/%00%ff/../x"), 404)


def test_odd_text_is_text(one: Serving) -> None:
    """NUL bytes, bidi marks, noncharacters and the like are no error."""
    for text in ("\x00", "a\x00b", "\u202e", "\ufffe\uffff", "\U0010ffff", "</s><|im_end|>", "\r\n\t"):
        assert plain(one, COMPLETIONS, {**GOOD[COMPLETIONS], "prompt": text, "stop": text + "!", "user": text})
        assert plain(one, CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 1})
        tokens = plain(one, "/tokenize", {"prompt": text})["tokens"]
        assert plain(one, "/detokenize", {"tokens": tokens})["prompt"] == text
