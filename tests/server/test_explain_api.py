"""The explain API over HTTP: numbers that fit the allocator's, reasons for every wait, and a stalled engine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo import events as ev
from octavo.server import explain
from octavo.server.inspector import RING
from tests.server.serving import ScriptedRunner, Serving, ids_of, serving, write_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def runner() -> ScriptedRunner:
    return ScriptedRunner(delay=0.005)


SETTINGS = {"access_log": False, "stall_seconds": 1.0}


@pytest.fixture(scope="module")
def shared(model: Path, runner: ScriptedRunner) -> Iterator[Serving]:
    """One server for the tests: one request at a time."""
    with serving(model, runner=runner, server=SETTINGS, max_num_seqs=1, max_model_len=512) as one:
        yield one


@pytest.fixture
def one(shared: Serving, runner: ScriptedRunner) -> Iterator[Serving]:
    yield shared
    runner.gate.set()
    shared.quiet()


class Streaming:
    """A completion that is being read; `close` disconnects. Its label is `name`."""

    def __init__(self, one: Serving, name: str, prompt: str = "hello", tokens: int = 400) -> None:
        self._client = httpx.Client(base_url=one.url, timeout=30)
        body = {"model": one.state.names[0], "prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
        headers = {"x-request-id": name}
        self._stop = threading.Event()

        def read() -> None:
            try:
                with self._client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
                    for _ in answer.iter_lines():
                        if self._stop.is_set():
                            return
            except httpx.HTTPError:
                return

        self._thread = threading.Thread(target=read)
        self._thread.start()
        one.until(lambda: name in one.state.labels.values())

    def join(self) -> None:
        self._thread.join(30)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(30)


def get(one: Serving, path: str) -> Any:
    answer = one.client.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_ledger_sums_to_the_budget_while_requests_run(one: Serving) -> None:
    running = Streaming(one, "a")
    for _ in range(20):
        found = get(one, "/kv/ledger")
        assert sum(found["lines"].values()) == found["budget"]
        pool = found["pool"]
        assert pool["pinned"] + pool["cached"] + pool["free"] == pool["blocks"]
    assert (found["strategy"], found["block_size"], found["max_num_seqs"]) == ("paged", 16, 1)
    running.close()


def test_a_waiting_request_is_told_why_under_the_name_its_client_gave_it(one: Serving) -> None:
    holder, waiter = Streaming(one, "holder"), Streaming(one, "waiter")
    rows = one.until(lambda: [row for row in get(one, "/kv/requests")["requests"] if row["wait"]])
    assert [row["label"] for row in rows] == ["waiter"]
    found = get(one, "/kv/requests/waiter")
    assert (found["state"], found["phase"]) == ("waiting", "queued")
    wait = found["wait"]
    assert (wait["cause"], wait["need"], wait["have"], wait["short"], wait["unit"]) == ("slots", 1, 0, 1, "slots")
    assert wait["holders"] == [{"request": get(one, "/kv/requests/holder")["id"], "amount": 1}]
    assert "1 of the 1 sequences" in wait["unblocks"]
    ledger = get(one, "/kv/ledger")
    assert ledger["limiting"]["resource"] == "slots"
    assert (ledger["running"], ledger["waiting"], ledger["waiting_by_cause"]) == (1, 1, {"slots": 1})
    holder.close()
    one.until(lambda: get(one, "/kv/requests/waiter")["state"] == "running")
    waiter.close()


def test_a_running_request_has_its_block_table_and_the_map_agrees(one: Serving) -> None:
    running = Streaming(one, "a", prompt="x" * 40)
    one.until(lambda: get(one, "/kv/requests/a")["generated_tokens"] > 3)
    one.runner.gate.clear()
    found = one.until(lambda: get(one, "/kv/requests/a"))
    assert len(found["block_table"]) == 1
    assert len(found["block_table"][0]) == found["blocks"] >= 3
    blocks = get(one, "/kv/blocks")
    assert sum(length for length, *_ in blocks["runs"]) == blocks["pages"]
    assert blocks["owners"] == [found["id"]]
    assert sum(length for length, _, owner in blocks["runs"] if owner == 0) == found["blocks"]
    one.runner.gate.set()
    running.close()


def test_an_ended_request_is_remembered_with_its_history_and_the_phase_of_its_abort(one: Serving) -> None:
    gone = Streaming(one, "gone")
    one.until(lambda: get(one, "/kv/requests/gone")["generated_tokens"] > 2)
    name = get(one, "/kv/requests/gone")["id"]
    gone.close()
    one.until(lambda: get(one, f"/kv/requests/{name}")["state"] == "finished")
    found = get(one, f"/kv/requests/{name}")
    assert (found["state"], found["phase"], found["finish_reason"]) == ("finished", "ended", "abort")
    assert [moment["event"] for moment in found["history"]][:1] == ["Submitted"]
    assert "ended from outside (abort) while in decode" in " ".join(moment["text"] for moment in found["history"])


def test_a_miss_is_explained_with_the_texts_of_the_two_tokens(one: Serving) -> None:
    """C8c."""
    beginning = "the same beginning of sixteen and more "
    for end in ("<think> and more text", "thing and more text"):
        answer = one.client.post(
            "/v1/completions", json={"model": one.state.names[0], "prompt": beginning + end, "max_tokens": 2}
        )
        assert answer.status_code == 200
    name = answer.json()["id"]
    miss = get(one, f"/kv/requests/{name}")["miss"]
    assert miss["matched"] == 32
    assert (miss["here_text"], miss["there_text"]) == ("t", "<")
    assert miss["position"] == len(beginning)
    assert f"at position {len(beginning)}" in miss["sentence"]
    assert miss["here"] == ids_of("t")[0]


def test_an_unknown_request_is_an_error_in_openais_shape(one: Serving) -> None:
    for name in ("nobody", "a/b", "%00", "x" * 3000):
        answer = one.client.get(f"/kv/requests/{name}")
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert error["code"] == "request_not_found"
        assert set(error) == {"message", "type", "param", "code"}


def test_the_timeline_has_the_ledger_of_each_second(one: Serving) -> None:
    Streaming(one, "a", tokens=20).join()
    found = get(one, "/kv/timeline")
    assert found["interval_s"] == 1.0
    sample = found["samples"][-1]
    assert sum(sample["lines"].values()) == get(one, "/kv/ledger")["budget"]
    assert any(sample["tokens_per_s"] for sample in found["samples"])
    assert any(sample["itl_p99"] for sample in found["samples"])


def test_the_timeline_gives_only_what_is_new_when_asked_since_a_time(one: Serving) -> None:
    samples = one.until(lambda: get(one, "/kv/timeline")["samples"])
    last = samples[-1]["at"]
    assert all(sample["at"] > last for sample in get(one, f"/kv/timeline?since={last}")["samples"])
    assert get(one, f"/kv/timeline?since={last - 0.5}")["samples"][0]["at"] == last
    for wrong in ("soon", "nan"):
        answer = one.client.get(f"/kv/timeline?since={wrong}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "since")


# -- events -----------------------------------------------------------------------------------------------------------


def events_of(one: Serving, until: str, headers: dict[str, str] | None = None) -> list[tuple[int, str, dict[str, Any]]]:
    found: list[tuple[int, str, dict[str, Any]]] = []
    number, name = -1, ""
    with httpx.stream("GET", f"{one.url}/kv/events", headers=headers, timeout=30) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("id: "):
                number = int(line[4:])
            elif line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                found.append((number, name, json.loads(line[6:])))
                if name == until:
                    return found
    return found


def test_decisions_are_streamed_and_a_reader_can_go_on_where_it_was(one: Serving) -> None:
    before = one.state.inspector.decided
    Streaming(one, "a", tokens=20).join()
    one.until(lambda: not one.state.engine.live)
    found = events_of(one, "Finished", {"Last-Event-ID": str(before - 1)})
    assert [number for number, *_ in found] == list(range(before, before + len(found)))
    names = [name for _, name, _ in found]
    assert names[:3] == ["Submitted", "Granted", "Admitted"]
    admitted = found[2][2]
    assert admitted["reused"] in (0, 16)
    assert admitted["request"] == found[0][2]["request"]
    assert admitted["at"] > 0


def test_a_reader_who_lost_events_is_told_how_many(one: Serving) -> None:
    for _ in range(RING + 50):
        one.state.inspector.on_event(ev.CacheReset(0, 0))
    found = events_of(one, "lost", {"Last-Event-ID": str(one.state.inspector.decided - RING - 11)})
    assert found == [(-1, "lost", {"count": 10})]


def test_a_bad_event_id_is_refused(one: Serving) -> None:
    answer = one.client.get("/kv/events", headers={"Last-Event-ID": "abc"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "Last-Event-ID"


# -- a stopped scheduler ----------------------------------------------------------------------------------------------


def test_while_a_long_step_runs_the_reasons_of_its_plan_still_hold(
    one: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explain, "WAIT", 0.1)
    holder, waiter = Streaming(one, "holder"), Streaming(one, "waiter")
    one.until(lambda: get(one, "/kv/requests/waiter")["wait"])
    one.runner.gate.clear()
    one.until(lambda: one.state.engine.health().stalled > 0.2)
    wait = get(one, "/kv/requests")["requests"][1]["wait"]
    if one.state.engine.health().stalled < 1.0:  # on a busy machine the look may have taken longer
        assert wait["cause"] == "slots"
        assert "needs 1 slot, 0 available" in wait["sentence"]
        assert "the step now running began" in wait["sentence"]
        assert get(one, "/kv/ledger")["limiting"]["resource"] in ("slots", "none")
    one.runner.gate.set()
    holder.close()
    waiter.close()


def test_when_the_engine_stands_still_the_missing_step_is_everybodys_reason(
    one: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M2: a hook that stops the scheduler."""
    monkeypatch.setattr(explain, "WAIT", 0.3)
    holder, waiter = Streaming(one, "holder"), Streaming(one, "waiter")
    one.until(lambda: get(one, "/kv/requests/waiter")["wait"])
    one.runner.gate.clear()
    one.until(lambda: one.state.engine.health().stalled > 1.1)
    began = time.monotonic()
    rows = get(one, "/kv/requests")["requests"]
    assert time.monotonic() - began < 2.0
    assert [(row["label"], row["state"]) for row in rows] == [("holder", "running"), ("waiter", "waiting")]
    assert rows[1]["wait"]["cause"] == "no step"
    assert rows[1]["wait"]["sentence"].startswith("no step for 1 s")
    found = get(one, "/kv/requests/waiter")
    assert found["wait"]["cause"] == "no step"
    ledger = get(one, "/kv/ledger")
    assert ledger["waiting_by_cause"] == {"no step": 1}
    assert sum(ledger["lines"].values()) == ledger["budget"]
    assert get(one, "/kv/blocks")["owners"] == [rows[0]["id"]]
    assert get(one, "/kv/timeline")["samples"]
    one.runner.gate.set()
    one.until(lambda: get(one, "/kv/requests/waiter")["wait"]["cause"] == "slots")
    holder.close()
    waiter.close()


# -- keys -------------------------------------------------------------------------------------------------------------


def test_a_server_with_keys_tells_nothing_without_one(model: Path) -> None:
    from octavo.server.config import TenantConfig

    with serving(model, runner=ScriptedRunner(), server={"api_keys": (TenantConfig("secret", "t"),)}) as one:
        for path in ("ledger", "requests", "requests/a", "blocks", "timeline", "events"):
            assert one.client.get(f"/kv/{path}").status_code == 401
        assert one.client.post("/kv/what-if", json={}).status_code == 401
        one.client.headers["authorization"] = "Bearer secret"
        assert get(one, "/kv/ledger")["running"] == 0
