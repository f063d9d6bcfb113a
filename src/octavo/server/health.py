"""Whether the server lives, moves and takes requests; its version, load and metrics. No key is needed."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from octavo import __version__
from octavo.server.openapi import errors
from octavo.server.state import ServerState, state_of


def router() -> APIRouter:
    routes = APIRouter(tags=["operating"])
    routes.add_api_route("/health", health, methods=["GET"], responses=errors(503))
    routes.add_api_route("/ready", ready, methods=["GET"], responses=errors(503))
    routes.add_api_route("/ping", health, methods=["GET"], responses=errors(503))
    routes.add_api_route("/version", version, methods=["GET"])
    routes.add_api_route("/load", load, methods=["GET"])
    routes.add_api_route("/metrics", metrics, methods=["GET"], response_class=PlainTextResponse)
    for path, route in (("/health", health), ("/ready", ready), ("/ping", health), ("/metrics", metrics)):
        routes.add_api_route(path, route, methods=["HEAD"], include_in_schema=False)  # what uptime checks send
    return routes


def trouble(state: ServerState) -> str | None:
    """What is wrong with the engine; None if it makes progress or has nothing to do."""
    health = state.engine.health()
    if not health.alive:
        return f"the engine has stopped: {health.error or 'its thread has ended'}"
    if health.stalled > state.config.stall_seconds:
        return (
            f"no step for {health.stalled:.1f} s with work waiting; the limit is {state.config.stall_seconds:g} s "
            "(stall_seconds)"
        )
    return None


async def health(request: Request) -> Response:
    """Alive, and making progress whenever there is work."""
    state = state_of(request)
    return _answer(state, trouble(state), "healthy")


async def ready(request: Request) -> Response:
    """Whether new requests should be sent here."""
    state = state_of(request)
    why = trouble(state)
    if why is None and state.drain.draining:
        why = "the server is shutting down"
    return _answer(state, why, "ready")


def _answer(state: ServerState, why: str | None, good: str) -> Response:
    now = state.engine.health()
    body: dict[str, Any] = {"status": good, "steps": now.steps, "busy": now.busy}
    if why is None:
        return JSONResponse(body)
    error = {"message": f"{why}.", "type": "overloaded_error", "param": None, "code": "unhealthy"}
    return JSONResponse({"error": error}, 503, headers={"Retry-After": "5"})


async def version(request: Request) -> Response:
    """Octavo's version."""
    return JSONResponse({"version": __version__})


async def load(request: Request) -> Response:
    """Requests that have not ended, as vLLM's clients ask for it."""
    return JSONResponse({"server_load": state_of(request).engine.live})


async def metrics(request: Request) -> Response:
    """Prometheus metrics, all of one moment between two steps."""
    state = state_of(request)
    return Response(await state.metrics.scrape(state.engine), media_type="text/plain; version=0.0.4; charset=utf-8")
