"""Who is let in: the API key of a request decides whose it is, and what of others it may see."""

from __future__ import annotations

from starlette.requests import Request

from octavo.server.access import facts_of
from octavo.server.errors import ApiError
from octavo.server.state import state_of
from octavo.server.tenants import Tenant


async def authorized(request: Request) -> None:
    """A dependency of every route that needs a key. Raises ApiError 401."""
    state = state_of(request)
    _check_origin(request, state.config.cors_origins)
    tenant = state.tenants.identify(request.headers.get("authorization"))
    request.state.tenant = tenant
    if tenant.name:
        facts_of(request.scope)["tenant"] = tenant.name


def tenant_of(request: Request) -> Tenant:
    """Whose an authorized request is."""
    tenant: Tenant = request.state.tenant
    return tenant


async def operators_only(request: Request) -> None:
    """A dependency, behind `authorized`, of what shows or changes other tenants' things. Raises ApiError 403."""
    if not tenant_of(request).operator:
        raise ApiError(
            403,
            f"{request.url.path[:200]} is about all tenants; it needs an operator's key (operator: true in api_keys).",
            code="operators_only",
        )


def _check_origin(request: Request, allowed: tuple[str, ...]) -> None:
    """A page of another origin must not make a browser act here: some requests it may send without asking first."""
    origin = request.headers.get("origin")
    if origin is None or request.method in ("GET", "HEAD") or origin in allowed or "*" in allowed:
        return
    if origin.partition("://")[2] != request.headers.get("host"):
        raise ApiError(
            403, f"origin {origin[:80]!r} is not let in; add it to cors_origins if it should be.", code="origin_refused"
        )
