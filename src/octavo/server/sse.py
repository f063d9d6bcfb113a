"""Server-sent events: the chunks of a stream, and the response that sends them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.errors import ApiError

DONE = b"data: [DONE]\n\n"
GONE = 499  # the client has closed the connection: nobody will see this status but the log
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def json_bytes(value: Any) -> bytes:
    """Compact JSON, in UTF-8; what is not finite becomes null."""
    return to_json(value, inf_nan_mode="null")


class Chunks:
    """Writes the chunks of one answer; what they share is written once."""

    def __init__(self, head: dict[str, Any], *, with_usage: bool) -> None:
        """`head`: fields of every chunk. `with_usage`: chunks have a field `usage`, which is null until it comes."""
        self._head = b"data: " + json_bytes(head)[:-1] + b',"choices":'
        self._null_usage = b',"usage":null}\n\n' if with_usage else b"}\n\n"

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        tail = self._null_usage if usage is None else b',"usage":' + json_bytes(usage) + b"}\n\n"
        return self._head + json_bytes(choices) + tail


def error_event(error: ApiError) -> bytes:
    return b"data: " + json_bytes(error.body()) + b"\n\n"


class EventStream(Response):
    """Sends events as they come. An error before the first one is an ordinary error response (see `started`); one after
    it is an event, and the stream ends."""

    def __init__(self, events: AsyncGenerator[bytes, None], first: bytes) -> None:
        super().__init__(media_type="text/event-stream", headers=HEADERS)
        del self.headers["content-length"]
        self._events, self._first = events, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            try:
                async for event in self._events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except ApiError as error:
                await send({"type": "http.response.body", "body": error_event(error) + DONE, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._events.aclose()


async def started(events: AsyncGenerator[bytes, None]) -> Response:
    """The response for a stream, once its first event is there. Raises ApiError if that is an error."""
    try:
        return EventStream(events, await anext(events))
    except StopAsyncIteration:
        return Response(status_code=GONE)
    except BaseException:
        await events.aclose()
        raise
