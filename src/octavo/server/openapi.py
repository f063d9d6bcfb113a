"""The server's own OpenAPI document: routes that read their body themselves say here what it is."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from octavo import __version__

ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_MEANINGS = {
    400: "A field is out of its limits; the message names it.",
    401: "The API key is missing or wrong.",
    403: "The key is not an operator's, or the page is of another origin.",
    404: "There is no such model or request.",
    408: "The client did not read its stream.",
    409: "Too little has been seen to answer.",
    413: "The body is too large.",
    415: "The body is not said to be JSON.",
    429: "Too many requests wait; see Retry-After.",
    500: "The engine failed at this request.",
    503: "Overloaded, draining or stopped; see Retry-After.",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route: these errors, in OpenAI's shape."""
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": _MEANINGS[status], "content": content} for status in statuses}


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route whose body is `model`."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI, bodies: list[type[BaseModel]]) -> None:
    """Make `app.openapi()` know `bodies` and the shape of errors."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title="Octavo", version=__version__, routes=app.routes)
            schemas = made.setdefault("components", {}).setdefault("schemas", {})
            _, found = models_json_schema(
                [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
            )
            schemas.update(found.get("$defs", {}))
            schemas["Error"] = ERROR
            for operation in (one for path in made["paths"].values() for one in path.values()):
                operation["responses"].pop("422", None)  # FastAPI's own refusal, which we answer with 400
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
