"""Whatever a client sends, it gets an answer that names what is wrong; nobody else notices and nothing is left."""

from __future__ import annotations

import json
import socket
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from octavo.server.errors import ApiError
from octavo.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse
from tests.server.serving import ScriptedRunner, Serving, serving, write_checkpoint
from tests.server.talking import CHAT, COMPLETIONS, Wire, events, plain, refused, wire

PATHS = {COMPLETIONS: CompletionBody, CHAT: ChatBody, "/tokenize": TokenizeBody, "/detokenize": DetokenizeBody}
GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi", "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server for the whole file, on which a stream runs all the time."""
    model = write_checkpoint(tmp_path_factory.mktemp("model"))
    runner = ScriptedRunner(delay=0.01)
    with serving(model, runner=runner, server={"access_log": False}) as made:
        yield made


@pytest.fixture(autouse=True)
def _beside_a_stream(one: Serving) -> Iterator[None]:
    """Each test runs beside a stream that must not notice, and ends with the quiet check."""
    with wire(one, COMPLETIONS, {"prompt": "x", "max_tokens": 40, "stream": True, "ignore_eos": True}) as other:
        other.read_until(b"data:")
        yield
        text = "".join(chunk["choices"][0]["text"] for chunk in events(other.answer())[:-1])
        assert text == "abcdefghij" * 4
    one.quiet()
    assert one.client.get("/health").status_code == 200


def send(one: Serving, path: str, raw: bytes | str, **headers: str) -> Any:
    return one.client.post(path, content=raw, headers={**JSON, **headers})


def is_refused(response: Any) -> str:
    assert 400 <= response.status_code < 500, response.text[:500]
    return refused(response, response.status_code)


# -- bodies that are none ---------------------------------------------------------------------------------------------

BODIES: dict[str, bytes] = {
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
    "deep field": b'{"prompt": "x", "tools": ' + b"[" * 190 + b"]" * 190 + b"}",
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


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("body", BODIES)
def test_bodies_that_are_no_request(one: Serving, path: str, body: str) -> None:
    is_refused(send(one, path, BODIES[body]))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("number", ["1e400", "-1e400", "9" * 4000, "9" * 5000, "NaN", "Infinity", "-Infinity"])
def test_numbers_that_nobody_can_count(one: Serving, path: str, number: str) -> None:
    for name, field in typing.get_type_hints(PATHS[path]).items():
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


@pytest.mark.parametrize("path", PATHS)
def test_each_field_refuses_other_types_and_is_named(one: Serving, path: str) -> None:
    tried = 0
    for name, kind in typing.get_type_hints(PATHS[path], include_extras=True).items():
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


@pytest.mark.parametrize("path", PATHS)
def test_null_is_the_default_and_unknown_fields_are_ignored(one: Serving, path: str) -> None:
    needed = {"prompt", "messages", "tokens"}
    nulls = {name: None for name in PATHS[path].model_fields if name not in needed}
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


@pytest.mark.parametrize("path", PATHS)
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


# -- HTTP -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_other_content_types_and_methods(one: Serving, path: str) -> None:
    raw = json.dumps(GOOD[path])
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "json"):
        refused(one.client.post(path, content=raw, headers={"Content-Type": kind}), 415)
    for kind in ("application/json; charset=utf-8", "Application/JSON"):
        assert one.client.post(path, content=raw, headers={"Content-Type": kind}).status_code == 200
    for method in ("GET", "PUT", "DELETE", "PATCH", "BREW"):
        response = one.client.request(method, path)
        refused(response, 405)
        assert "POST" in response.headers["allow"]


@pytest.mark.parametrize("path", ["/nope", "/v1", "/v1/completions/", "//", "/v1/%2e%2e/x", "/\ud83d".encode("utf-8", "replace").decode()])
def test_nothing_is_there(one: Serving, path: str) -> None:
    refused(one.client.get(path), 404)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
def test_ten_megabytes_are_refused_declared_or_not(one: Serving, path: str) -> None:
    big = b'{"prompt": "' + b"x" * (10 << 20) + b'"}'
    sentence = refused(send(one, path, big), 413, code="body_too_large")
    assert str(8 << 20) in sentence

    def pieces() -> Iterator[bytes]:
        for start in range(0, len(big), 1 << 16):
            yield big[start : start + (1 << 16)]

    refused(one.client.post(path, content=pieces(), headers=JSON), 413, code="body_too_large")


def test_a_large_body_that_is_allowed_does_not_hold_the_others_up(one: Serving) -> None:
    text = "x" * (7 << 20)
    refused(one.client.post(COMPLETIONS, json={"prompt": text}), 400, code="context_length_exceeded")
    refused(one.client.post(COMPLETIONS, json={"prompt": [5] * 2_000_000}), 400, code="context_length_exceeded")
    messages = [{"role": "user", "content": "x" * 1000}] * 3000
    refused(one.client.post(CHAT, json={"messages": messages}), 400, code="context_length_exceeded")


@pytest.mark.parametrize(
    "head",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n12345",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET " + b"/x" * 60_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\r\n" * 50,
    ],
)
def test_what_is_no_http_ends_that_connection_alone(one: Serving, head: bytes) -> None:
    host, port = one.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=1.0) as odd:
        odd.sendall(head)
        try:
            answer = odd.recv(65536)
        except (TimeoutError, ConnectionResetError):
            answer = b""
    assert not answer or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4"))


@pytest.mark.parametrize("label", ["", " ", "x" * 5000, "a b", "\xff\xfe", "{}", "ä"])
def test_odd_request_ids_are_no_more_than_labels(one: Serving, label: str) -> None:
    raw = json.dumps(GOOD[COMPLETIONS]).encode()
    response = one.client.post(
        COMPLETIONS, content=raw, headers={**JSON, "X-Request-Id": label.encode("latin-1")}  # type: ignore[dict-item]
    )
    assert response.status_code == 200
    assert len(response.headers["x-request-id"]) <= 128


def test_keys_are_not_needed_and_odd_ones_do_no_harm(one: Serving) -> None:
    for key in (b"Bearer", b"Bearer \xff", b"Basic eDp5", b"\x01"):
        response = one.client.get("/v1/models", headers={"Authorization": key})  # type: ignore[dict-item]
        assert response.status_code in (200, 400)


# -- generated --------------------------------------------------------------------------------------------------------

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.sampled_from(["", "\x00", "\ud800"])
)
VALUE = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=8
)


def bodies(model: type[BaseModel]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(sorted(model.model_fields)) | st.text(max_size=5), VALUE, max_size=5)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_parsing_gives_a_body_or_names_the_field(data: st.DataObject) -> None:
    model = data.draw(st.sampled_from(list(PATHS.values())))
    raw = data.draw(st.binary(max_size=60) | bodies(model).map(lambda body: json.dumps(body).encode()))
    try:
        assert isinstance(parse(model, raw), model)
    except ApiError as error:
        assert error.status == 400
        assert str(error).endswith(".")
        json.dumps(error.body()).encode()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_body_over_http(one: Serving, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(list(PATHS)))
    body = {**GOOD[path], **data.draw(bodies(PATHS[path]))}
    if not isinstance(body.get("max_tokens"), int) or body["max_tokens"] > 5:
        body["max_tokens"] = 2
    response = send(one, path, json.dumps(body))
    if response.status_code != 200:
        is_refused(response)
    elif body.get("stream") is True:
        assert events(response.text)[-1] == "[DONE]"


@pytest.mark.slow
@settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_body_over_http_for_long(one: Serving, data: st.DataObject) -> None:
    test_any_body_over_http.hypothesis.inner_test(one, data)  # type: ignore[attr-defined]


def test_a_client_may_say_goodbye_in_the_middle(one: Serving) -> None:
    for body in (GOOD[COMPLETIONS], {**GOOD[COMPLETIONS], "stream": True, "max_tokens": 100}):
        for _ in range(5):
            Wire(one, COMPLETIONS, body).close()
