"""What all routes share: the engine, who may use it, and who looks on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.requests import Request

if TYPE_CHECKING:
    from octavo.aio import AsyncEngine
    from octavo.build import BuiltEngine
    from octavo.server.config import ServerConfig
    from octavo.server.inspector import Inspector
    from octavo.server.lifecycle import Drain
    from octavo.server.metrics import Metrics
    from octavo.server.tenants import Tenants


@dataclass(slots=True)
class ServerState:
    """One server. `labels`: what the client calls a live request (X-Request-Id), by the engine's own id."""

    config: ServerConfig
    built: BuiltEngine
    engine: AsyncEngine
    metrics: Metrics
    inspector: Inspector
    tenants: Tenants
    drain: Drain
    names: tuple[str, ...]  # the model's, as clients may give it; the first is what answers say
    created: int  # seconds since 1970
    labels: dict[str, str] = field(default_factory=dict)


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.octavo
    return state
