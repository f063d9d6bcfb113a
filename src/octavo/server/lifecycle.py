"""How the server ends: it refuses new requests, lets running ones finish for a while, aborts the rest and exits."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import uvicorn

from octavo.errors import OctavoError
from octavo.server.errors import ApiError, from_code

CLOSING_SECONDS = 5  # for the last bytes of answers, once no request runs any more
_NICE = 3  # of the event loop's thread: 48 streams lose 3 % to HTTP instead of 12 (server_overhead.py --real)
_LOOK = 0.05  # seconds between two looks at whether requests still run
_KEEP_ALIVE = 75  # seconds that an idle connection is kept: longer than load generators' pools keep theirs


def give_way_to_steps() -> None:
    """Let the calling thread, the event loop's, and those it starts run after the threads that compute steps.

    On a CPU a step's threads wait for each other: one that is held up for a moment by HTTP holds up all of them. Linux
    knows priorities of single threads; elsewhere nothing is changed.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


class Live(Protocol):
    """What a drain has to know of the engine: `AsyncEngine`."""

    @property
    def live(self) -> int:
        """Requests that have not ended."""

    def fail_live(self, error: OctavoError) -> None:
        """End all of them with an error."""


class Drain:
    """Whether the server is ending. Routes that start work call `admit`; `/ready` looks at `draining`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.draining = False

    def begin(self) -> None:
        """From now on nothing new is taken. May be called from a signal handler."""
        self.draining = True

    def admit(self) -> None:
        """Raises ApiError 503 if nothing new is taken."""
        if self.draining:
            raise from_code("draining", "the server is shutting down and takes no new requests; try again later.")

    async def finish(self, engine: Live) -> bool:
        """Wait until no request runs; after `seconds`, end those that do. Returns whether all ended by themselves."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.seconds
        while engine.live and loop.time() < end:
            await asyncio.sleep(min(_LOOK, max(0.0, end - loop.time())))
        if not engine.live:
            return True
        engine.fail_live(
            ApiError(
                503,
                f"the server is shutting down and the request has not ended within {self.seconds:g} seconds "
                "(drain_seconds); it was aborted: send it again later.",
                code="draining",
                retry_after=CLOSING_SECONDS,
            )
        )
        return False


class DrainingServer(uvicorn.Server):
    """uvicorn, except that at the first signal it goes on answering until the drain is over, and exits at once at the
    second one. It then ends with exit code 0."""

    def __init__(self, app: Any, on_ready: Callable[[], None]) -> None:
        """`app.state.octavo` is the `ServerState` once the app has started. `on_ready` is called when it listens."""
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="on",
                ws="none",
                log_config=None,
                access_log=False,  # the app writes its own
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE,
                timeout_graceful_shutdown=CLOSING_SECONDS,
            )
        )
        self._app = app
        self._on_ready = on_ready
        self._signals = 0
        self._ending: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Of signals; runs on the main thread between two instructions of whatever runs there."""
        self._signals += 1
        state = getattr(self._app.state, "octavo", None)
        if self._signals > 1:
            _say("a second signal: the server ends at once.")
            os._exit(128 + sig)
        if not self.started or state is None:
            self.should_exit = True
            return
        state.drain.begin()
        _say(f"draining: {state.engine.live} requests may go on for {state.drain.seconds:g} s; again to end at once.")

    async def on_tick(self, counter: int) -> bool:
        """uvicorn asks ten times a second whether to stop serving."""
        if self._signals and self._ending is None and not self.should_exit:
            self._ending = asyncio.create_task(self._end())
        return await super().on_tick(counter)

    async def _end(self) -> None:
        state = self._app.state.octavo
        try:
            ended = await state.drain.finish(state.engine)
        finally:
            self.should_exit = True
        _say("all requests have ended." if ended else "requests that had not ended were aborted.")


def bind(host: str, port: int) -> socket.socket:
    """A socket that has the address, and does not listen yet. IPv4 where there is both.

    Raises OctavoError with what to do if the address cannot be had.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise OctavoError(f"host is {host!r}, which is no address of this machine: {error.strerror}.") from None
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] == socket.AF_INET6)
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _taken(host, port, error) from None
    return bound


def listen(bound: socket.socket) -> None:
    """Take connections from now on. Raises OctavoError if somebody else has begun to in the meantime."""
    try:
        bound.listen()
    except OSError as error:
        host, port = bound.getsockname()[:2]
        raise _taken(host, port, error) from None


def _taken(host: str, port: int, error: OSError) -> OctavoError:
    return OctavoError(
        f"cannot listen on {host} port {port}: {error.strerror}; choose another --port (0: any that is free) or --host."
    )


def address_of(bound: socket.socket) -> str:
    """The URL under which the server answers."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _say(sentence: str) -> None:
    """Straight to the file: in a signal handler, the stream may be in the middle of another sentence."""
    os.write(2, f"octavo serve: {sentence}\n".encode())
