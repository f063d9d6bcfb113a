"""Request ids, and one JSON line in the access log per HTTP request."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from time import perf_counter
from typing import Any, TextIO

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOGGER = "octavo.access"
_LONGEST_ID = 128
_encode = json.JSONEncoder(default=str).encode


class AccessLog:
    """ASGI middleware, the outermost one. Gives each request an id (`scope["state"]["request_id"]`; the client's own
    X-Request-Id is a label, also under `label`, and nothing more), sends it back, and writes a line when the answer is
    complete.

    What routes put into `facts_of(scope)` stands in the line as it is: tenant, requests (the engine's ids),
    prompt_tokens, completion_tokens, finish, ttft. `disconnected` and `phase` are found out here, unless a route knows
    better. Bodies, headers and query strings are never kept: they may hold keys and other people's words.
    """

    def __init__(self, app: ASGIApp, *, enabled: bool = True, stream: TextIO | None = None) -> None:
        """`enabled` False: ids only. `stream`: where lines go; None: stderr, or the handlers the logger has already."""
        self._app = app
        self._logger = access_logger(stream) if enabled else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        label = _client_id(scope)
        request_id = label or os.urandom(16).hex()
        scope.setdefault("state", {}).update(request_id=request_id, label=label)
        exchange = _Exchange(request_id, receive, send)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except BaseException:
            exchange.status = exchange.status or 500  # what the server behind us will answer
            raise
        finally:
            if self._logger is not None and self._logger.isEnabledFor(logging.INFO):
                # Not `info`: it looks up who calls, which is always us and takes longer than all the rest.
                line = exchange.line(scope)
                self._logger.handle(logging.LogRecord(LOGGER, logging.INFO, __file__, 0, line, None, None))


class _Exchange:
    """One request and its answer, as they pass by."""

    __slots__ = ("_id", "_receive", "_send", "_start", "bytes", "complete", "disconnected", "status")

    def __init__(self, request_id: str, receive: Receive, send: Send) -> None:
        self._id = request_id
        self._receive = receive
        self._send = send
        self._start = perf_counter()
        self.status: int | None = None  # None: no answer has begun
        self.bytes = 0
        self.complete = False
        self.disconnected: str | None = None  # in which phase the client went away

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self.complete and self.disconnected is None:
            self.disconnected = "before the answer" if self.status is None else "during the answer"
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self.bytes += len(message.get("body", b""))
            self.complete = not message.get("more_body", False)
        elif message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self._id.encode("ascii"))]
            message = {**message, "headers": headers}
        await self._send(message)

    def line(self, scope: Scope) -> str:
        entry: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": self._id,
            "method": scope["method"],
            "path": scope["path"],
            "status": self.status,
            "duration": round(perf_counter() - self._start, 6),
            "bytes": self.bytes,
        }
        if client := scope.get("client"):
            entry["client"] = client[0]
        if self.disconnected is not None:
            entry |= {"disconnected": True, "phase": self.disconnected}
        return _encode(entry | facts_of(scope))


def facts_of(scope: Scope) -> dict[str, Any]:
    """What the access log is to say of this request besides; for routes to fill."""
    facts: dict[str, Any] = scope.setdefault("state", {}).setdefault("octavo_log", {})
    return facts


def _client_id(scope: Scope) -> str | None:
    """The client's X-Request-Id, cut to a length; None if there is none or it has other than printable ASCII."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            label: str = value[:_LONGEST_ID].decode("latin-1").strip()
            return label if label and label.isascii() and label.isprintable() else None
    return None


class _Lines(logging.Handler):
    """Messages as they are, a line each; to stderr as it is at that time if no stream was given."""

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        try:
            stream = self._stream or sys.stderr
            stream.write(record.getMessage() + "\n")
            stream.flush()
        except Exception:
            self.handleError(record)


def access_logger(stream: TextIO | None = None) -> logging.Logger:
    """The logger of the access log. Handlers that somebody else has given it are left as they are."""
    logger = logging.getLogger(LOGGER)
    logger.setLevel(logging.INFO)
    if stream is not None or not logger.handlers:
        logger.handlers = [_Lines(stream)]
        logger.propagate = False
    return logger
