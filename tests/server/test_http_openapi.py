"""The server's own OpenAPI document, tried by schemathesis: no 5xx, and answers are what it says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import hypothesis
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.serving import ScriptedRunner, Serving, serving, write_checkpoint
from tests.server.talking import CHAT, COMPLETIONS, plain

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)
ENDLESS = "/kv/events"  # a stream without an end: tried by hand
OPERATIONS = {
    ("POST", COMPLETIONS),
    ("POST", CHAT),
    ("GET", "/v1/models"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/health"),
    ("GET", "/ready"),
    ("GET", "/version"),
    ("GET", "/metrics"),
}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    model = write_checkpoint(tmp_path_factory.mktemp("model"))
    with serving(model, runner=ScriptedRunner(), server={"access_log": False}, max_queue=64, max_model_len=64) as made:
        yield made


@pytest.fixture(scope="module")
def document(one: Serving) -> dict[str, Any]:
    response = one.client.get("/openapi.json")
    assert response.status_code == 200
    made: dict[str, Any] = response.json()
    return made


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def test_it_has_all_routes_and_describes_each(document: dict[str, Any]) -> None:
    found = {(method, path) for method, path, _ in operations(document)}
    assert found >= OPERATIONS
    for method, path, operation in operations(document):
        assert operation.get("description"), path
        assert "422" not in operation["responses"], f"{path}: our refusals are 400"
        assert operation["responses"]["200"]["content"], path
        assert (method == "POST" and path != "/reset_prefix_cache") == ("requestBody" in operation), path


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                yield value["$ref"]
            for inner in value.values():
                yield from references(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from references(inner)

    seen = set(references(document))
    assert seen
    for reference in seen:
        place: Any = document
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]


def try_out(one: Serving, document: dict[str, Any], examples: int) -> Counter[int]:
    """Call every operation with valid input, and those that take a body with invalid input too; returns how often each
    status was answered."""
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=one.url)
    statuses: Counter[int] = Counter()
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path == ENDLESS:
            continue
        modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE] if operation.body else [GenerationMode.POSITIVE]
        for mode in modes:

            @hypothesis.settings(
                max_examples=examples,
                deadline=None,
                database=None,
                derandomize=True,
                phases=(Phase.explicit, Phase.generate),
                suppress_health_check=list(HealthCheck),
            )
            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            def call(case: Any) -> None:
                response = case.call(timeout=30)
                case.validate_response(response, checks=list(CHECKS))
                statuses[response.status_code] += 1

            call()
    return statuses


def test_answers_are_what_the_document_says(one: Serving, document: dict[str, Any]) -> None:
    statuses = try_out(one, document, examples=8)
    assert statuses[200] > 15
    assert statuses[400] > 20
    one.quiet()
    assert plain(one, COMPLETIONS, {"prompt": "hi", "max_tokens": 2})


@pytest.mark.slow
def test_answers_are_what_the_document_says_for_long(one: Serving, document: dict[str, Any]) -> None:
    assert try_out(one, document, examples=200).total() > 1000
    one.quiet()


def test_the_bodies_that_clients_send_fit_the_document(document: dict[str, Any]) -> None:
    """Those of real clients, against the schema."""
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("CompletionBody", {"model": "m", "prompt": [[1, 2], [3]], "echo": True, "logprobs": 1, "max_tokens": 1}),
        ("CompletionBody", {"prompt": "x", "repetition_penalty": 1.0, "logprobs": None, "stop": None, "best_of": 1}),
        ("ChatBody", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "stop": ["a"]}),
        ("ChatBody", {"messages": [], "tools": [{}], "tool_choice": {"type": "function"}, "response_format": {}}),
    ]
    for name, body in bodies:
        schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        jsonschema_rs.validate(schema, body)
