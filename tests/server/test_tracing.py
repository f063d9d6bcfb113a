"""One span per HTTP request, with what the engine did as events; nothing of it unless it is configured."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from octavo.aio import AsyncEngine, Submission
from octavo.server.access import AccessLog, facts_of
from octavo.server.inspector import Inspector
from octavo.server.tracing import TraceRequests, add_tracing, make_provider, traces_url
from octavo.types import SamplingParams
from tests.server.engines import simulated

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Traced:
    """A small server around a simulated engine whose pool is too small for three requests: one is preempted."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        inspector = Inspector()
        self.built = simulated(inspector.on_event, (inspector,), pages=14, admission="prompt")
        inspector.attach(self.built)
        self.engine = AsyncEngine(self.built.engine)
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/models", lambda request: JSONResponse({})),
                Route("/health", lambda request: JSONResponse({})),
                Route("/broken", self.broken),
            ]
        )
        self.app.state.octavo = SimpleNamespace(inspector=inspector, built=self.built, names=("m",))
        self.app.add_middleware(TraceRequests, provider=make_provider(SimpleSpanProcessor(self.exporter)))
        self.app.add_middleware(AccessLog, enabled=False)

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        ids = body["ids"]
        facts = facts_of(request.scope)
        facts["requests"] = ids
        streams = await self.engine.submit([Submission(name, [i] * 9, params) for i, name in enumerate(ids)])
        for stream in streams:
            await stream.end()
        facts |= {"prompt_tokens": 9, "completion_tokens": 24, "finish": "length", "ttft": 0.1, "tenant": "t"}
        return JSONResponse({"id": ids[0]})

    def broken(self, request: Request) -> Response:
        raise ValueError("broken")

    def serve(self, story: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> list[ReadableSpan]:
        async def run() -> None:
            self.engine.start()
            transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
                await story(client)
            await self.engine.stop()

        asyncio.run(run())
        return list(self.exporter.get_finished_spans())


def test_a_request_is_a_child_of_the_callers_span_with_the_attributes_of_a_generation() -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    (span,) = Traced().serve(lambda client: client.post("/v1/completions", json={"ids": ["a"]}, headers=headers))
    assert format(span.context.trace_id, "032x") == TRACE
    assert span.parent is not None
    assert format(span.parent.span_id, "016x") == PARENT
    assert dict(span.attributes or {}) == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "url.path": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m",
        "gen_ai.response.id": "a",
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 24,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.response.time_to_first_chunk": 0.1,
        "octavo.tenant": "t",
    }
    assert span.name == "POST /v1/completions"
    assert span.resource.attributes["service.name"] == "octavo"


def test_what_the_engine_did_is_told_in_order() -> None:
    (span,) = Traced().serve(lambda client: client.post("/v1/completions", json={"ids": ["a", "b", "c"]}))
    of: dict[str, list[str]] = {}
    for event in span.events:
        of.setdefault(str((event.attributes or {})["octavo.request"]), []).append(event.name)
    assert set(of) == {"a", "b", "c"}
    for names in of.values():
        shown = [name for name in names if name != "waiting"]
        assert shown[:3] == ["queued", "admitted", "first token"]
        assert shown[-1] == "finished"
    again = next(names for names in of.values() if "preempted" in names)
    assert "admitted" in again[again.index("preempted") :]
    times = [event.timestamp for event in span.events if (event.attributes or {})["octavo.request"] == "a"]
    assert times == sorted(times)


def test_a_failing_route_is_an_error_and_probes_leave_no_span() -> None:
    async def story(client: httpx.AsyncClient) -> None:
        for path in ("/health", "/v1/models", "/broken"):
            await client.get(path)

    models, broken = Traced().serve(story)
    assert (models.attributes or {})["http.response.status_code"] == 200
    assert models.parent is None
    assert broken.status.status_code is StatusCode.ERROR
    assert [event.name for event in broken.events] == ["exception"]


def test_spans_reach_a_collector_at_the_latest_when_the_server_stops() -> None:
    came: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            came.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing to say."""

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    app = Starlette(routes=[Route("/v1/models", lambda request: JSONResponse({}))])
    app.state.octavo = SimpleNamespace()
    add_tracing(app, f"http://127.0.0.1:{collector.server_port}")
    with TestClient(app) as client:
        client.get("/v1/models")
    collector.shutdown()
    collector.server_close()
    ((path, body),) = came
    assert path == "/v1/traces"
    assert b"GET /v1/models" in body


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("http://localhost:4318/", "http://localhost:4318/v1/traces"),
        ("https://x.example/otlp/v1/traces", "https://x.example/otlp/v1/traces"),
    ],
)
def test_a_collectors_address_means_its_standard_path(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


def test_without_configuration_no_tracing_is_imported() -> None:
    """FastAPI imports OpenTelemetry's API by itself if it is there; what records and sends is never loaded."""
    code = """if True:
        import sys, octavo.server.app
        print([name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))])
        print("octavo.server.tracing" in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\nFalse\n"
