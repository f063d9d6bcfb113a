"""The application: routes, who looks on, errors in one shape, and the engine's start and stop."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from octavo import __version__
from octavo.aio import AsyncEngine, EngineDead
from octavo.build import BuiltEngine, build_engine
from octavo.errors import OctavoError
from octavo.events import fan_out
from octavo.models.loader import LoadedModel
from octavo.server import explain, health, openai_routes, page
from octavo.server.access import AccessLog
from octavo.server.config import ServerConfig
from octavo.server.errors import ApiError, from_code, from_engine
from octavo.server.inspector import Inspector
from octavo.server.lifecycle import Drain, give_way_to_steps
from octavo.server.metrics import Metrics
from octavo.server.openapi import describe
from octavo.server.sse import GONE, json_bytes
from octavo.server.state import ServerState
from octavo.server.tenants import Tenants, engine_config

log = logging.getLogger("octavo.server")


@dataclass(frozen=True, slots=True)
class Built:
    """An engine, and those who look on; made before the server starts, so that a start-up report can be printed."""

    engine: BuiltEngine
    metrics: Metrics
    inspector: Inspector


def build(config: ServerConfig, loaded: LoadedModel | None = None, decision_log: Path | None = None) -> Built:
    """Load the model (unless given) and put the engine together. Raises OctavoError with the numbers."""
    metrics = Metrics(config.vllm_metrics, config.metrics_compat)
    inspector = Inspector()
    engine = build_engine(
        engine_config(config),
        loaded=loaded,
        sink=fan_out(metrics.on_event, inspector.on_event),
        watchers=(metrics, inspector),
        log=decision_log,
    )
    if config.chat_template is not None:
        _replace_template(engine, config.chat_template)
    metrics.attach(engine, names_of(config)[0])
    inspector.attach(engine)
    return Built(engine, metrics, inspector)


def names_of(config: ServerConfig) -> tuple[str, ...]:
    return config.served_model_name or (config.engine.model,)


def _replace_template(engine: BuiltEngine, path: str) -> None:
    tokenizer = engine.loaded.tokenizer
    if tokenizer is None:
        raise OctavoError("chat_template is given and the model has no tokenizer; leave it out.")
    try:
        tokenizer.use_chat_template(Path(path).read_text())
        tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
    except (OSError, UnicodeDecodeError, OctavoError) as error:
        raise OctavoError(f"chat_template is {path!r}, which cannot be used: {error}") from None


def create_app(config: ServerConfig, built: Built | None = None) -> FastAPI:
    """The server as an ASGI application; its engine runs from start-up to shut-down."""
    built = built or build(config)
    state = ServerState(
        config=config,
        built=built.engine,
        engine=AsyncEngine(built.engine.engine),
        metrics=built.metrics,
        inspector=built.inspector,
        tenants=Tenants(config),
        drain=Drain(config.drain_seconds),
        names=names_of(config),
        created=int(time.time()),
        labels=built.inspector.labels,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if built.engine.loaded.tokenizer is not None:
            built.engine.loaded.tokenizer.encode("a")  # made at first use: not while somebody waits
        state.engine.start()
        give_way_to_steps()
        yield
        await state.engine.stop()
        if built.engine.log is not None:
            built.engine.log.close()

    app = FastAPI(
        title="Octavo",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        separate_input_output_schemas=False,
    )
    app.state.octavo = state
    app.include_router(openai_routes.router())
    app.include_router(explain.router())
    app.include_router(health.router())
    if config.page:
        app.include_router(page.router())
    _handle_errors(app)
    _wrap(app, config)
    describe(app, openai_routes.BODIES)
    return app


def _wrap(app: FastAPI, config: ServerConfig) -> None:
    """Middleware; what is added last sees a request first."""
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id"],
            expose_headers=["x-request-id", "retry-after"],
        )
    if config.otlp_endpoint is not None:
        from octavo.server.tracing import add_tracing

        add_tracing(app, config.otlp_endpoint)
    app.add_middleware(AccessLog, enabled=config.access_log)


def _handle_errors(app: FastAPI) -> None:
    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, OctavoError)
        if isinstance(error, EngineDead):
            return _response(from_code("engine_dead", str(error)))
        return _response(from_engine(error))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        name = str(first["loc"][-1]) if first["loc"] else "body"
        text = f"{name} is {str(first.get('input'))[:80]!r}: {first['msg'][:1].lower()}{first['msg'][1:]}."
        return _response(ApiError(400, text, code="invalid_type", param=name))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        text = {
            404: f"there is nothing at {request.method} {request.url.path[:200]}.",
            405: f"{request.url.path[:200]} does not take {request.method}.",
        }.get(error.status_code, f"{error.detail}.")
        response = _response(ApiError(error.status_code, text))
        for name, value in (error.headers or {}).items():
            response.headers[name] = value
        return response

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=GONE)  # the client left before its body was complete

    async def broken(request: Request, error: Exception) -> Response:
        log.exception("error in %s %s", request.method, request.url.path, exc_info=error)
        return _response(ApiError(500, f"an error in the server: {type(error).__name__}; its log has the details."))

    app.add_exception_handler(OctavoError, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, broken)


def _response(error: ApiError) -> Response:
    return Response(json_bytes(error.body()), error.status, error.headers(), media_type="application/json")
