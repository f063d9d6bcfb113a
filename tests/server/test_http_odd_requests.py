"""Odd requests as HTTP: methods, content types, sizes, headers, and what is no HTTP at all."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from tests.server.serving import Serving
from tests.server.talking import BODIES, CHAT, COMPLETIONS, GOOD, JSON, Wire, refused, send

pytestmark = pytest.mark.usefixtures("stream_beside")


@pytest.mark.parametrize("path", BODIES)
def test_other_content_types_and_methods(one: Serving, path: str) -> None:
    raw = json.dumps(GOOD[path])
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "json"):
        refused(one.client.post(path, content=raw, headers={"Content-Type": kind}), 415)
    for kind in ("application/json; charset=utf-8", "Application/JSON"):
        assert one.client.post(path, content=raw, headers={"Content-Type": kind}).status_code == 200
    for method in ("GET", "PUT", "DELETE", "PATCH"):
        response = one.client.request(method, path)
        refused(response, 405)
        assert "POST" in response.headers["allow"]


@pytest.mark.parametrize("path", ["/nope", "/v1", "/v1/%2e%2e/x", "/%00", "/%ff%fe", "/page/%2e%2e/%2e%2e/app.py"])
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
    text = "x" * (1 << 20)
    refused(one.client.post(COMPLETIONS, json={"prompt": text}), 400, code="context_length_exceeded")
    refused(one.client.post(COMPLETIONS, json={"prompt": [5] * 1_000_000}), 400, code="context_length_exceeded")
    messages = [{"role": "user", "content": "x" * 1000}] * 500
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


@pytest.mark.parametrize("label", ["", "x" * 5000, "a b", "\xff\xfe", "{}", "ä"])
def test_odd_request_ids_are_no_more_than_labels(one: Serving, label: str) -> None:
    raw = json.dumps(GOOD[COMPLETIONS]).encode()
    response = one.client.post(
        COMPLETIONS,
        content=raw,
        headers={**JSON, "X-Request-Id": label.encode("latin-1")},  # type: ignore[dict-item]
    )
    assert response.status_code == 200
    assert len(response.headers["x-request-id"]) <= 128


def test_keys_are_not_needed_and_odd_ones_do_no_harm(one: Serving) -> None:
    for key in (b"Bearer", b"Bearer \xff", b"Basic eDp5", b"\x01"):
        response = one.client.get("/v1/models", headers={"Authorization": key})  # type: ignore[dict-item]
        assert response.status_code in (200, 400)


def test_a_client_may_say_goodbye_in_the_middle(one: Serving) -> None:
    for body in (GOOD[COMPLETIONS], {**GOOD[COMPLETIONS], "stream": True, "max_tokens": 100}):
        for _ in range(5):
            Wire(one, COMPLETIONS, body).close()
