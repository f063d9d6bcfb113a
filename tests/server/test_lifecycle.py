"""How the server ends: nothing new, running requests for a while, then none; and addresses that cannot be had."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from octavo.errors import OctavoError
from octavo.server.errors import ApiError
from octavo.server.lifecycle import Drain, DrainingServer, address_of, bind, listen


class Engine:
    """As many requests as the test says; `ending` of them end at each look."""

    def __init__(self, live: int, ending: int = 0) -> None:
        self._live, self._ending = live, ending
        self.failure: OctavoError | None = None

    @property
    def live(self) -> int:
        self._live -= min(self._live, self._ending)
        return self._live

    def fail_live(self, error: OctavoError) -> None:
        self.failure, self._live = error, 0


def test_nothing_new_is_taken_once_the_drain_has_begun() -> None:
    drain = Drain(1.0)
    drain.admit()
    drain.begin()
    with pytest.raises(ApiError) as caught:
        drain.admit()
    assert (caught.value.status, caught.value.code) == (503, "draining")
    assert int(caught.value.headers()["Retry-After"]) > 0


def test_running_requests_end_by_themselves() -> None:
    engine = Engine(3, ending=1)
    assert asyncio.run(Drain(60.0).finish(engine)) is True
    assert engine.failure is None


@pytest.mark.parametrize("seconds", [0.0, 0.1])
def test_those_that_do_not_end_are_told_why_they_were_aborted(seconds: float) -> None:
    engine = Engine(3)
    assert asyncio.run(Drain(seconds).finish(engine)) is False
    assert isinstance(engine.failure, ApiError)
    assert engine.failure.status == 503
    assert f"not ended within {seconds:g} seconds (drain_seconds)" in str(engine.failure)


@pytest.fixture
def bound() -> Iterator[socket.socket]:
    made = bind("127.0.0.1", 0)
    yield made
    made.close()


def test_port_0_is_one_that_is_free(bound: socket.socket) -> None:
    port = bound.getsockname()[1]
    assert port > 0
    assert address_of(bound) == f"http://127.0.0.1:{port}"


def test_nobody_can_connect_before_the_server_listens(bound: socket.socket) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(bound.getsockname(), timeout=5)
    listen(bound)
    socket.create_connection(bound.getsockname(), timeout=5).close()


def test_a_port_in_use_is_told_in_a_sentence(bound: socket.socket) -> None:
    listen(bound)
    port = bound.getsockname()[1]
    with pytest.raises(OctavoError, match=rf"cannot listen on 127.0.0.1 port {port}: .*in use; choose another --port"):
        bind("127.0.0.1", port)


def test_a_port_that_another_took_in_the_meantime_is_told_in_a_sentence(bound: socket.socket) -> None:
    second = bind(*bound.getsockname())
    listen(bound)
    with pytest.raises(OctavoError, match="in use; choose another --port"):
        listen(second)
    second.close()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_an_address_of_another_machine_is_told_in_a_sentence(host: str) -> None:
    with pytest.raises(OctavoError, match=host):
        bind(host, 0)


def test_an_address_of_the_new_kind_is_shown_in_brackets() -> None:
    try:
        made = bind("::1", 0)
    except OctavoError:
        pytest.skip("this machine has no IPv6")
    assert address_of(made) == f"http://[::1]:{made.getsockname()[1]}"
    made.close()


def test_the_server_answers_until_the_drain_is_over(bound: socket.socket, capfd: pytest.CaptureFixture[str]) -> None:
    async def say(request: Request) -> PlainTextResponse:
        return PlainTextResponse("draining" if request.app.state.octavo.drain.draining else "serving")

    engine, drain, listening = Engine(1), Drain(60.0), threading.Event()
    app = Starlette(routes=[Route("/", say)])
    app.state.octavo = SimpleNamespace(engine=engine, drain=drain)
    listen(bound)
    server = DrainingServer(app, listening.set)
    thread = threading.Thread(target=server.run, args=([bound],))
    thread.start()
    assert listening.wait(20)
    url = address_of(bound)
    assert httpx.get(url).text == "serving"
    server.handle_exit(signal.SIGTERM, None)
    for _ in range(3):
        assert httpx.get(url).text == "draining"
    engine.fail_live(OctavoError("ended"))
    thread.join(20)
    assert not thread.is_alive()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)
    assert "draining: 1 requests may go on for 60 s" in capfd.readouterr().err
