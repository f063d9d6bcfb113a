"""A load generator's HTTP client: raw asyncio, little CPU (it shares the machine with the server), able to hang up.

One request at a time on a connection; connections are kept. What an answer says is looked at when it is complete, so
that a stream of tokens costs the client a few microseconds per packet.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

_END = b"0\r\n\r\n"  # of a chunked body; JSON has no line breaks, so no event looks like it


@dataclass(frozen=True, slots=True)
class Leave:
    """When to hang up: so many seconds after the request was sent, or once so many packets of the answer are there.
    `reset`: with a reset instead of an ordinary end of the connection."""

    seconds: float | None = None
    packets: int | None = None
    reset: bool = False


STAY = Leave()


@dataclass(slots=True)
class Answer:
    """What came back, and when (`perf_counter`). `status` None: nothing, as when the client has `left` before."""

    sent: float
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    first: float | None = None  # when the first bytes of the body came
    last: float = 0.0
    left: bool = False
    error: str | None = None
    packets: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        raw = b"".join(self.packets)
        return _joined(raw) if self.headers.get("transfer-encoding") == "chunked" else raw

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The data of a stream's events, without `[DONE]`."""
        lines = self.body.split(b"\n\n")
        return [json.loads(line[6:]) for line in lines if line.startswith(b"data: ") and line[6:] != b"[DONE]"]

    @property
    def complete(self) -> bool:
        return self.status is not None and not self.left and self.error is None


def _joined(raw: bytes) -> bytes:
    """The body of a chunked answer."""
    parts, at = [], 0
    while at < len(raw):
        line = raw.index(b"\r\n", at)
        size = int(raw[at:line], 16)
        parts.append(raw[line + 2 : line + 2 + size])
        at = line + 2 + size + 2
    return b"".join(parts)


class _Connection(asyncio.Protocol):
    """One connection, with at most one request on it."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.open = False
        self._answer: Answer | None = None
        self._done: asyncio.Future[None] | None = None
        self._head = b""
        self._length: int | None = None  # bytes of the body that are missing; None: it is chunked
        self._leave = Leave()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.open = transport, True

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        if self._answer is not None and not self._answer.left:
            self._answer.error = f"the server closed the connection: {error or 'end of data'}"
        self._finish()

    async def exchange(self, data: bytes, leave: Leave) -> Answer:
        answer = self._answer = Answer(perf_counter())
        self._done = asyncio.get_running_loop().create_future()
        self._head, self._leave = b"", leave
        self.transport.write(data)
        timer = None
        if leave.seconds is not None:
            timer = asyncio.get_running_loop().call_later(leave.seconds, self._go)
        try:
            await self._done
        finally:
            if timer is not None:
                timer.cancel()
        return answer

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            return
        answer.last = perf_counter()
        if answer.status is None:
            data = self._begin(answer, self._head + data)
            if answer.status is None:
                return
        if data:
            answer.first = answer.first or answer.last
            answer.packets.append(data)
        if self._ended(answer, data):
            self._finish()
        elif self._leave.packets is not None and len(answer.packets) >= self._leave.packets:
            self._go()

    def _begin(self, answer: Answer, data: bytes) -> bytes:
        """Read the head; returns what follows it."""
        head, found, rest = data.partition(b"\r\n\r\n")
        if not found:
            self._head = data
            return b""
        lines = head.decode("latin-1").split("\r\n")
        answer.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        length = answer.headers.get("content-length")
        self._length = None if length is None else int(length)
        answer.status = int(lines[0].split()[1])
        return rest

    def _ended(self, answer: Answer, data: bytes) -> bool:
        if self._length is not None:
            self._length -= len(data)
            return self._length <= 0
        if data.endswith(_END):
            return True
        return len(data) < len(_END) and b"".join(answer.packets[-5:]).endswith(_END)

    def _go(self) -> None:
        """Hang up."""
        if self._answer is None:
            return
        self._answer.left = True
        self.open = False
        if self._leave.reset:
            self.transport.abort()
        else:
            self.transport.close()
        self._finish()

    def _finish(self) -> None:
        self._answer = None
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class Client:
    """Sends requests to one server. Errors of the connection are in the answer, never raised."""

    def __init__(self, url: str, key: str | None = None) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._host, self._port = parts.hostname, parts.port or 80
        self._idle: list[_Connection] = []
        authorization = "" if key is None else f"authorization: Bearer {key}\r\n"
        self._head = f"host: {self._host}:{self._port}\r\n{authorization}"

    async def post(
        self, path: str, body: Mapping[str, Any] | bytes, leave: Leave = STAY, label: str | None = None
    ) -> Answer:
        """`label`: the request's X-Request-Id."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = "" if label is None else f"x-request-id: {label}\r\n"
        about = f"content-type: application/json\r\ncontent-length: {len(data)}\r\n"
        return await self._send(f"POST {path} HTTP/1.1\r\n{self._head}{named}{about}\r\n".encode() + data, leave)

    async def get(self, path: str) -> Answer:
        return await self._send(f"GET {path} HTTP/1.1\r\n{self._head}\r\n".encode(), STAY)

    async def _send(self, data: bytes, leave: Leave) -> Answer:
        connection = None
        while self._idle and (connection is None or not connection.open):
            connection = self._idle.pop()
        if connection is None or not connection.open:
            loop = asyncio.get_running_loop()
            try:
                _, connection = await loop.create_connection(_Connection, self._host, self._port)
            except OSError as error:
                return Answer(perf_counter(), error=f"cannot connect: {error}")
        answer = await connection.exchange(data, leave)
        if connection.open and answer.complete:
            self._idle.append(connection)
        return answer

    def close(self) -> None:
        for connection in self._idle:
            connection.transport.close()
        self._idle.clear()
