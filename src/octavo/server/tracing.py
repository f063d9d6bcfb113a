"""OpenTelemetry: one span per HTTP request, with what happened to it in the engine as events. Imported only when traces
are wanted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo import __version__
from octavo.errors import OctavoError
from octavo.server.access import facts_of

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise OctavoError(
        f"otlp_endpoint is set and OpenTelemetry is not installed ({error.name}); run: pip install 'octavo[otel]', "
        "or leave otlp_endpoint out."
    ) from error

if TYPE_CHECKING:
    from octavo.server.state import ServerState

#: Asked every few seconds by those who watch the server: a span of each would bury all others.
UNTRACED = frozenset({"/health", "/ready", "/ping", "/load", "/metrics"})
_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
#: What decisions of the engine are called in a trace; others are left out.
_EVENTS = {
    "Submitted": "queued",
    "Blocked": "waiting",
    "Admitted": "admitted",
    "Preempted": "preempted",
    "Failed": "failed",
    "Finished": "finished",
}
_PATIENCE = 5  # seconds for a batch, tries included: a collector that is gone must not hold up the server's end
_PROPAGATOR = TraceContextTextMapPropagator()


def add_tracing(app: Starlette, endpoint: str) -> None:
    """Send a span of each request that `app` answers to an OTLP collector, over HTTP."""
    exporter = OTLPSpanExporter(endpoint=traces_url(endpoint), timeout=_PATIENCE)
    app.add_middleware(TraceRequests, provider=make_provider(BatchSpanProcessor(exporter)))


def make_provider(processor: Any) -> TracerProvider:
    """Spans of this server, handed to `processor`."""
    provider = TracerProvider(resource=Resource.create({"service.name": "octavo", "service.version": __version__}))
    provider.add_span_processor(processor)
    return provider


def traces_url(endpoint: str) -> str:
    """Where spans go: a collector's address without a path means its standard one."""
    return endpoint.rstrip("/") + "/v1/traces" if urlsplit(endpoint).path in ("", "/") else endpoint


class TraceRequests:
    """ASGI middleware, inside the access log. The span is a child of the caller's, if it sends `traceparent`."""

    def __init__(self, app: ASGIApp, *, provider: TracerProvider) -> None:
        self._app = app
        self._provider = provider
        self._tracer = provider.get_tracer("octavo", __version__)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            await asyncio.to_thread(self._provider.shutdown)  # sends what is left
        elif scope["type"] != "http" or scope["path"] in UNTRACED:
            await self._app(scope, receive, send)
        else:
            await self._traced(scope, receive, send)

    async def _traced(self, scope: Scope, receive: Receive, send: Send) -> None:
        status: list[int] = []

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                status.append(message["status"])
            await send(message)

        parent = _PROPAGATOR.extract(
            {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        )
        span = self._tracer.start_span(scope["method"], context=parent, kind=SpanKind.SERVER)
        try:
            await self._app(scope, receive, noting)
        except Exception as error:
            span.record_exception(error)
            raise
        finally:
            if span.is_recording():
                _describe(span, scope, status[0] if status else 500)
            span.end()


def _describe(span: Span, scope: Scope, status: int) -> None:
    """What is known at the end of the request."""
    facts = facts_of(scope)
    if route := getattr(scope.get("route"), "path", None):  # never the path itself: it may hold ids
        span.update_name(f"{scope['method']} {route}")
        span.set_attribute("http.route", route)
    span.set_attributes(
        {"http.request.method": scope["method"], "url.path": scope["path"], "http.response.status_code": status}
    )
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR))
    if facts.get("disconnected"):
        span.set_attribute("octavo.client_disconnected", True)
    state: ServerState = scope["app"].state.octavo
    if operation := _OPERATIONS.get(scope["path"]):
        span.set_attributes(_generation(state, facts, operation))
    for request_id in facts.get("requests", ()):
        for one in _happened(state, request_id):
            span.add_event(one.name, {"octavo.request": request_id, "octavo.text": one.text}, one.at)


def _generation(state: ServerState, facts: Mapping[str, Any], operation: str) -> dict[str, Any]:
    """The attributes that OpenTelemetry's conventions for generative models name, as far as the routes told."""
    known = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "octavo",
        "gen_ai.request.model": state.names[0],
        "gen_ai.response.model": state.names[0],
        "gen_ai.response.id": next(iter(facts.get("requests", ())), None),
        "gen_ai.usage.input_tokens": facts.get("prompt_tokens"),
        "gen_ai.usage.output_tokens": facts.get("completion_tokens"),
        "gen_ai.response.finish_reasons": tuple(finish.split(",")) if (finish := facts.get("finish")) else None,
        "gen_ai.response.time_to_first_chunk": facts.get("ttft"),
        "octavo.tenant": facts.get("tenant") or None,
    }
    return {name: value for name, value in known.items() if value is not None}


class _Happened(NamedTuple):
    """`at`: nanoseconds since 1970."""

    at: int
    name: str
    text: str


def _happened(state: ServerState, request_id: str) -> Iterator[_Happened]:
    """What the engine did with a request, in order."""
    life = state.inspector.lives.find(request_id, {})
    if life is None:
        return
    began = time.time_ns() - int(state.built.engine.clock.now() * 1e9)  # when the engine's clock stood at 0
    events = [(one.at, _EVENTS[one.event], one.text) for one in life.history() if one.event in _EVENTS]
    if life.recorded.ttft is not None:
        events.append((life.first.at + life.recorded.ttft, "first token", "the first token came"))
    for at, name, text in sorted(events, key=lambda event: event[0]):
        yield _Happened(began + int(at * 1e9), name, text)
