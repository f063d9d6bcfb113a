"""What tests of the HTTP side talk with: a bare socket to cut off at will, an ASGI call under control, a runner that
makes a step when it is told to, and readers of server-sent events."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from octavo.runner.api import StepPlan, StepResult
from octavo.server.protocol import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from octavo.types import Sequence
from tests.server.serving import ScriptedRunner, Serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, type[Body]] = {
    COMPLETIONS: CompletionBody,
    CHAT: ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi", "max_tokens": 2},
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
}
ASK: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hi. ABC"},
    CHAT: {"messages": [{"role": "user", "content": "Hi. ABC"}]},
}
JSON = {"Content-Type": "application/json"}
PAGE = 2 * 2 * 16 * 2 * 4 * 16  # bytes of a block of the tiny model: layers, heads, head_dim, K and V, float32, tokens


class Stepping(ScriptedRunner):
    """Makes a step only when it is allowed one; opening the gate lets it run freely. `plan`: the step that waits."""

    def __init__(self, say: Callable[[Sequence], int] | None = None) -> None:
        super().__init__(say)
        self.gate.clear()
        self.plan: StepPlan | None = None
        self._permits = threading.Semaphore(0)

    def allow(self, steps: int = 1) -> None:
        self._permits.release(steps)

    def run(self, plan: StepPlan) -> StepResult:
        self.plan = plan
        while not self.gate.is_set() and not self._permits.acquire(timeout=0.005):
            continue
        self.plan = None
        return self._say(plan)

    def _say(self, plan: StepPlan) -> StepResult:
        self.fault(plan)
        self.steps += 1
        return StepResult(tuple(tuple(self.say(seq) for seq in work.samples) for work in plan.work))

    def to_step(self, one: Serving, number: int) -> None:
        """Make steps until `number` have been made and the next one waits."""
        one.until(lambda: self.plan is not None)
        while self.steps < number:
            made = self.steps
            self.allow()
            one.until(lambda made=made: self.steps > made and self.plan is not None)


class Wire:
    """One HTTP request on a socket of its own."""

    def __init__(
        self,
        one: Serving,
        path: str,
        body: Any,
        *,
        label: str | None = None,
        announced: int | None = None,
    ) -> None:
        """`announced`: the length that the body is said to have."""
        host, port = one.url.removeprefix("http://").split(":")
        self.socket = socket.socket()
        self.socket.settimeout(30)
        self.socket.connect((host, int(port)))
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        size = len(raw) if announced is None else announced
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n"
        head += f"X-Request-Id: {label}\r\n" if label is not None else ""
        self.seen = b""
        self.socket.sendall(head.encode() + b"\r\n" + raw)

    def read_until(self, wanted: bytes) -> bytes:
        """Everything so far; returns once `wanted` is in it or the server has closed."""
        while wanted not in self.seen:
            if not (got := self.socket.recv(65536)):
                break
            self.seen += got
        return self.seen

    def answer(self) -> str:
        """The whole body of a stream, without the marks of its transfer."""
        _, _, body = self.read_until(b"[DONE]\n\n").partition(b"\r\n\r\n")
        pieces = body.split(b"\r\n")  # a length, its piece, a length ...
        return b"".join(pieces[1::2]).decode()

    def close(self) -> None:
        self.socket.close()


@contextmanager
def wire(one: Serving, path: str, body: Any, **options: Any) -> Iterator[Wire]:
    made = Wire(one, path, body, **options)
    try:
        yield made
    finally:
        made.close()


def events(text: str) -> list[Any]:
    """The data of each event of a stream; `[DONE]` stays a text. Fails for anything else between events."""
    assert text.endswith("\n\n"), text[-200:]
    found = []
    for event in text[:-2].split("\n\n"):
        assert event.startswith("data: "), event
        assert "\n" not in event, event
        data = event.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def stream(one: Serving, path: str, body: dict[str, Any]) -> list[Any]:
    """The chunks of a stream that ends well, without its `[DONE]`."""
    response = one.client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(response.text)
    assert last == "[DONE]"
    assert all("error" not in chunk for chunk in chunks), chunks[-1]
    return chunks


def plain(one: Serving, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = one.client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def text_of(choice: dict[str, Any]) -> str:
    """Of a choice or of a chunk's choice."""
    if "text" in choice:
        return str(choice["text"])
    return str(choice.get("message", choice.get("delta", {})).get("content") or "")


class Joined:
    """A stream put together: per choice its text, tokens, logprobs and end."""

    def __init__(self, chunks: list[Any]) -> None:
        self.usage = chunks[-1].get("usage")
        self.texts: dict[int, str] = defaultdict(str)
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.logprobs: dict[int, list[Any]] = defaultdict(list)
        self.ends: dict[int, list[tuple[str, Any]]] = defaultdict(list)
        for chunk in chunks:
            for choice in chunk["choices"]:
                i = choice["index"]
                self.texts[i] += text_of(choice)
                self.tokens[i] += choice.get("token_ids") or []
                if choice["logprobs"] is not None:
                    self.logprobs[i] += choice["logprobs"].get("content") or choice["logprobs"].get("tokens") or []
                if choice["finish_reason"] is not None:
                    self.ends[i].append((choice["finish_reason"], choice["stop_reason"]))


def same(one: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The plain answer, after the stream has said the same: text, tokens, ends, usage."""
    answer = plain(one, path, {**body, "return_token_ids": True})
    chunks = stream(one, path, {**body, "return_token_ids": True, "stream_options": {"include_usage": True}})
    assert chunks[-1]["choices"] == []
    joined = Joined(chunks)
    for choice in answer["choices"]:
        i = choice["index"]
        assert joined.texts[i] == text_of(choice)
        assert joined.tokens[i] == choice["token_ids"]
        assert joined.ends[i] == [(choice["finish_reason"], choice["stop_reason"])]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert joined.usage[name] == answer["usage"][name]
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        first = choice.get("delta", {}).get("role") == "assistant"
        assert text_of(choice) or choice["finish_reason"] or first, "a chunk without text"
    return answer


def refused(response: Any, status: int, *, code: str | None = None, param: str | None = None) -> str:
    """The sentence of a refusal, whose shape is checked."""
    assert response.status_code == status, response.text[:500]
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert code is None or error["code"] == code, error
    assert param is None or error["param"] == param, error
    message: str = error["message"]
    assert message.endswith(".")
    return message


def is_refused(response: Any) -> str:
    """The sentence of a refusal that is the client's fault."""
    assert 400 <= response.status_code < 500, response.text[:500]
    return refused(response, response.status_code)


@contextmanager
def beside_a_stream(one: Serving) -> Iterator[None]:
    """A stream runs meanwhile, which must not notice; ends with the quiet check. For a `ScriptedRunner`."""
    with wire(one, COMPLETIONS, {"prompt": "x", "max_tokens": 200, "stream": True, "ignore_eos": True}) as other:
        other.read_until(b"data:")
        yield
        text = "".join(chunk["choices"][0]["text"] for chunk in events(other.answer())[:-1])
        assert text == "abcdefghij" * 20
    one.quiet()
    assert one.client.get("/health").status_code == 200


def send(one: Serving, path: str, raw: bytes | str) -> Any:
    """A body as it is."""
    return one.client.post(path, content=raw, headers=JSON)


def metric(one: Serving, name: str, **labels: str) -> float:
    """A figure of /metrics, summed over all labels that are not given."""
    total = 0.0
    for line in one.client.get("/metrics").text.splitlines():
        left, _, value = line.rpartition(" ")
        found, _, rest = left.partition("{")
        if found == name and all(f'{key}="{text}"' in rest for key, text in labels.items()):
            total += float(value)
    return total


class Call:
    """One call of an ASGI application on this event loop, whose client goes away when it is told to."""

    def __init__(self, app: Any, path: str, body: bytes, *, label: str | None = None, pieces: int = 1) -> None:
        self.sent: list[dict[str, Any]] = []
        self._gone = asyncio.Event()
        size = -(-len(body) // pieces)
        self._parts = [body[i * size : (i + 1) * size] for i in range(pieces)]
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if label is not None:
            headers.append((b"x-request-id", label.encode()))
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": {},
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._gone.is_set():
            return {"type": "http.disconnect"}
        if self._parts:
            part = self._parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(self._parts)}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if not self._gone.is_set():
            self.sent.append(message)

    def hang_up(self) -> None:
        self._gone.set()

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


@asynccontextmanager
async def started(app: Any) -> AsyncIterator[Any]:
    """The application between start-up and shut-down, on this event loop; yields its state."""
    async with app.router.lifespan_context(app):
        yield app.state.octavo


async def at_rest(state: Any) -> None:
    """Wait until every request has ended, and do the quiet check."""
    engine = state.built.engine
    for _ in range(2000):
        if not engine.busy and not state.engine.live:
            break
        await asyncio.sleep(0.005)
    engine.scheduler.check()
    kv = engine.scheduler.kv
    assert not engine.busy
    assert not state.engine.live
    assert not engine.scheduler.requests
    assert not state.labels
    assert kv.free + kv.evictable == kv.capacity
