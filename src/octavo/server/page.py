"""Serves the page at `/`: static files of this package, with headers that keep every request on this server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib import resources

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.errors import ApiError

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS = {
    "Cache-Control": "no-cache",  # an upgraded server is never shown with the old page's scripts
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
START = "index.html"


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file as it is sent."""

    body: bytes
    media_type: str
    etag: str


def page_files() -> Mapping[str, PageFile]:
    """Every file of the page by name, read from the package."""
    found = {}
    for entry in resources.files("octavo.server").joinpath("page").iterdir():
        kind = entry.name.rpartition(".")[2]
        if kind in TYPES:
            body = entry.read_bytes()
            found[entry.name] = PageFile(body, TYPES[kind], f'"{sha256(body).hexdigest()[:20]}"')
    return found


def router() -> APIRouter:
    """`/` and `/page/{file}`; the files are read here, once."""
    routes, files = APIRouter(include_in_schema=False), page_files()

    @routes.api_route("/", methods=["GET", "HEAD"])
    async def start(request: Request) -> Response:
        return _answer(request, files[START])

    @routes.api_route("/page/{name}", methods=["GET", "HEAD"])
    async def part(request: Request, name: str) -> Response:
        if name not in files:
            raise ApiError(404, f"The page has no file {name!r}.", code="not_found")
        return _answer(request, files[name])

    return routes


def _answer(request: Request, file: PageFile) -> Response:
    headers = {**HEADERS, "ETag": file.etag}
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if file.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(file.body, media_type=file.media_type, headers=headers)
