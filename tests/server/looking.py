"""An engine that the test steps itself, with an inspector that looks on."""

from __future__ import annotations

from typing import Any

from octavo.server.inspector import Inspector
from octavo.server.snapshot import Head, Row, Snapshot, take, take_head
from octavo.types import SamplingParams
from tests.server.engines import simulated


class Looked:
    """`settings` are those of `simulated`."""

    def __init__(self, **settings: Any) -> None:
        self.inspector = Inspector()
        self.built = simulated(self.inspector.on_event, (self.inspector,), **settings)
        self.inspector.attach(self.built)
        self.labels = self.inspector.labels
        self.engine = self.built.engine
        self._added = 0

    def add(self, prompt: int | list[int], answer: int, **request: Any) -> str:
        """Queue a request with a prompt of its own, or with these tokens; returns its id."""
        self._added += 1
        tokens = [1000 * self._added + i for i in range(prompt)] if isinstance(prompt, int) else prompt
        params = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0, n=1)
        if samples := request.pop("n", None):
            params = SamplingParams(max_tokens=answer, ignore_eos=True, n=samples, seed=1)
        return self.engine.submit(tokens, params, **request)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.engine.step()

    def run(self) -> None:
        while self.engine.busy:
            self.engine.step()

    def head(self) -> Head:
        return take_head(self.built)

    def snapshot(self) -> Snapshot:
        return take(self.built, self.labels, self.inspector)

    def row(self, request_id: str) -> Row:
        return next(row for row in self.snapshot().rows if row.id == request_id)
