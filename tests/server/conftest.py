"""Fixtures of the tests that send a server what it should refuse."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.serving import ScriptedRunner, Serving, serving, write_checkpoint
from tests.server.talking import beside_a_stream


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server for the whole file; files that need another one have their own."""
    model = write_checkpoint(tmp_path_factory.mktemp("model"))
    runner = ScriptedRunner(delay=0.002)
    with serving(model, runner=runner, server={"access_log": False}) as made:
        yield made


@pytest.fixture
def stream_beside(one: Serving) -> Iterator[None]:
    """A stream that runs while the test does, and must not notice."""
    with beside_a_stream(one):
        yield
