"""Who is let in: the API key of a request decides whose it is."""

from __future__ import annotations

from starlette.requests import Request

from octavo.server.access import facts_of
from octavo.server.state import state_of


async def authorized(request: Request) -> None:
    """A dependency of every route that needs a key. Raises ApiError 401."""
    tenant = state_of(request).tenants.identify(request.headers.get("authorization"))
    request.state.tenant = tenant
    if tenant.name:
        facts_of(request.scope)["tenant"] = tenant.name
