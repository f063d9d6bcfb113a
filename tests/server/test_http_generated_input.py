"""Generated bodies: parsed or refused with the field's name, over HTTP answered or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from octavo.server.errors import ApiError
from octavo.server.protocol import parse
from octavo.server.sse import json_bytes
from tests.server.serving import Serving
from tests.server.talking import BODIES, GOOD, events, is_refused, send

pytestmark = pytest.mark.usefixtures("stream_beside")


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.sampled_from(["", "\x00", "\ud800"])
)
VALUE = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def bodies(model: type[BaseModel]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(sorted(model.model_fields)) | st.text(max_size=5), VALUE, max_size=5)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_parsing_gives_a_body_or_names_the_field(data: st.DataObject) -> None:
    model = data.draw(st.sampled_from(list(BODIES.values())))
    raw = data.draw(st.binary(max_size=60) | bodies(model).map(lambda body: json.dumps(body).encode()))
    try:
        body, error = parse(model, raw), None
    except ApiError as refusal:
        body, error = None, refusal
    assert isinstance(body, model) or (error is not None and error.status == 400)
    assert error is None or json_bytes(error.body()).endswith(b"}")


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_body_over_http(one: Serving, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(list(BODIES)))
    body = {**GOOD[path], **data.draw(bodies(BODIES[path]))}
    if not isinstance(body.get("max_tokens"), int) or body["max_tokens"] > 5:
        body["max_tokens"] = 2
    response = send(one, path, json.dumps(body))
    if response.status_code != 200:
        is_refused(response)
    elif body.get("stream") is True:
        assert events(response.text)[-1] == "[DONE]"


@pytest.mark.slow
@settings(max_examples=3000, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_body_over_http_for_long(one: Serving, data: st.DataObject) -> None:
    test_any_body_over_http.hypothesis.inner_test(one, data)  # type: ignore[attr-defined]
