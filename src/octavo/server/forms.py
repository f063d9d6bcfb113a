"""What form an answer must have: `response_format` and vLLM's structured outputs as a `Structure` for the engine."""

from __future__ import annotations

import json
from typing import Any

from octavo.server.errors import ApiError
from octavo.server.protocol import Common
from octavo.types import Structure


def structure_of(body: Common) -> Structure | None:
    """The one form asked for. Raises ApiError if there are several, or one that nobody knows."""
    found = [form for form in (_response_format(body), *_structured(body), *_guided(body)) if form is not None]
    if len(found) > 1:
        raise ApiError(
            400,
            f"{len(found)} forms are asked for (response_format, structured_outputs, guided_*); give one.",
            param="response_format",
        )
    return found[0] if found else None


def _response_format(body: Common) -> Structure | None:
    form = body.response_format
    kind = None if form is None else form.get("type")
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return Structure("json_object", "")
    if kind == "json_schema":
        inner = form.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if not isinstance(schema, dict):
            raise ApiError(
                400,
                "response_format.json_schema.schema is missing or no object; give the JSON schema there.",
                param="response_format",
            )
        return _schema(schema)
    for name, field in (("regex", "pattern"), ("grammar", "grammar")):
        if kind == name:
            text = form.get(field, form.get(name))
            if not isinstance(text, str):
                raise ApiError(
                    400, f"response_format.{field} is missing or no text; give the {name}.", param="response_format"
                )
            return Structure(name, text)
    raise ApiError(
        400,
        f"response_format.type is {str(kind)[:40]!r}; it must be text, json_object, json_schema, regex or grammar.",
        param="response_format",
    )


def _structured(body: Common) -> list[Structure | None]:
    asked = body.structured_outputs
    if asked is None:
        return []
    return [
        None if asked.json_ is None else _schema(asked.json_),
        Structure("json_object", "") if asked.json_object else None,
        *_plain(asked.regex, asked.choice, asked.grammar),
    ]


def _guided(body: Common) -> list[Structure | None]:
    """The older names."""
    schema = None if body.guided_json is None else _schema(body.guided_json)
    return [schema, *_plain(body.guided_regex, body.guided_choice, body.guided_grammar)]


def _plain(regex: str | None, choice: list[str] | None, grammar: str | None) -> list[Structure | None]:
    return [
        None if regex is None else Structure("regex", regex),
        None if choice is None else Structure("choice", json.dumps(choice)),
        None if grammar is None else Structure("grammar", grammar),
    ]


def _schema(schema: dict[str, Any] | str) -> Structure:
    return Structure("json_schema", schema if isinstance(schema, str) else json.dumps(schema))
