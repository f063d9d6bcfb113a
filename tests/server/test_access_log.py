"""Request ids are ours unless the client's is fit to print; every request leaves one line of JSON."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from octavo.server.access import AccessLog, facts_of


async def echo(request: Request) -> Response:
    body = await request.body()
    facts_of(request.scope).update(tenant="t", requests=["cmpl-1"], prompt_tokens=3, completion_tokens=5, ttft=0.25)
    return JSONResponse({"length": len(body), "id": request.state.request_id})


async def stream(request: Request) -> Response:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield b"12345"

    return StreamingResponse(pieces())


async def broken(request: Request) -> Response:
    raise ValueError("broken")


def server(enabled: bool = True) -> tuple[AccessLog, io.StringIO]:
    lines = io.StringIO()
    methods = ["GET", "POST"]
    app = Starlette(routes=[Route("/echo", echo, methods=methods), Route("/stream", stream), Route("/broken", broken)])
    return AccessLog(app, enabled=enabled, stream=lines), lines


def ask(app: AccessLog, method: str, path: str, **how: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
            return await client.request(method, path, **how)

    return asyncio.run(run())


def line(lines: io.StringIO) -> dict[str, Any]:
    text = lines.getvalue()
    assert text.count("\n") == 1
    return json.loads(text)


def test_a_request_leaves_one_line_with_what_routes_know_of_it() -> None:
    app, lines = server()
    answer = ask(app, "POST", "/echo?api_key=secret", content=b"my private words", headers={"X-Request-Id": "mine"})
    entry = line(lines)
    assert entry.pop("time").endswith("+00:00")
    assert entry.pop("duration") >= 0
    assert entry == {
        "id": "mine",
        "method": "POST",
        "path": "/echo",
        "status": 200,
        "bytes": len(answer.content),
        "client": "127.0.0.1",
        "tenant": "t",
        "requests": ["cmpl-1"],
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "ttft": 0.25,
    }
    assert "private" not in lines.getvalue()
    assert "secret" not in lines.getvalue()


@pytest.mark.parametrize("given", ["mine", "a b/c:d=é"[:7], "x" * 128])
def test_the_clients_id_is_sent_back(given: str) -> None:
    app, _ = server()
    answer = ask(app, "GET", "/echo", headers={"X-Request-Id": given})
    assert answer.headers.get_list("x-request-id") == [given]
    assert answer.json()["id"] == given


def test_a_long_id_is_cut() -> None:
    app, _ = server()
    assert ask(app, "GET", "/echo", headers={"X-Request-Id": "x" * 9000}).headers["x-request-id"] == "x" * 128


@pytest.mark.parametrize("given", [b"", b"   ", b"caf\xc3\xa9", b"a\x1b[31mred", b"\xff\xfe", b"a\x7f"])
def test_an_id_that_is_not_fit_to_print_is_replaced(given: bytes) -> None:
    app, lines = server()
    answer = ask(app, "GET", "/echo", headers=[(b"x-request-id", given)])
    made = answer.headers["x-request-id"]
    assert len(made) == 32
    assert made.isalnum()
    assert line(lines)["id"] == made


def test_ids_of_ours_differ() -> None:
    app, _ = server()
    assert len({ask(app, "GET", "/echo").headers["x-request-id"] for _ in range(20)}) == 20


def test_a_streamed_answer_counts_all_of_its_bytes() -> None:
    app, lines = server()
    assert ask(app, "GET", "/stream").content == b"12345" * 4
    entry = line(lines)
    assert (entry["status"], entry["bytes"]) == (200, 20)
    assert "disconnected" not in entry


def test_a_route_that_breaks_is_logged_as_500() -> None:
    app, lines = server()
    assert ask(app, "GET", "/broken").status_code == 500
    assert line(lines)["status"] == 500


@pytest.mark.parametrize(("sent", "phase"), [(0, "before the answer"), (2, "during the answer")])
def test_a_client_that_goes_away_is_told_with_the_phase(sent: int, phase: str) -> None:
    lines = io.StringIO()

    async def route(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        if sent:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x" * sent, "more_body": True})
        assert (await receive())["type"] == "http.disconnect"

    inbox = [{"type": "http.request", "body": b""}, {"type": "http.disconnect"}]

    async def receive() -> Any:
        return inbox.pop(0)

    async def send(message: Any) -> None:
        pass

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(AccessLog(route, stream=lines)(scope, receive, send))
    entry = line(lines)
    assert (entry["disconnected"], entry["phase"], entry["bytes"]) == (True, phase, sent)


def test_odd_paths_and_facts_stay_on_one_line() -> None:
    app, lines = server()
    ask(app, "GET", "/no%0Asuch%22path%00")
    entry = line(lines)
    assert (entry["path"], entry["status"]) == ('/no\nsuch"path\0', 404)


def test_without_a_log_there_are_still_ids() -> None:
    app, lines = server(enabled=False)
    assert ask(app, "GET", "/echo", headers={"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"
    assert lines.getvalue() == ""
