"""`octavo top URL` and `octavo explain URL`: what a running server says, in the terminal."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from octavo.server.lives import Life
from tests.commands.calling import octavo
from tests.server.looking import Looked

Answers = dict[str, Any]


@pytest.fixture
def serve() -> Iterator[Callable[[Answers], str]]:
    """Serves these answers by path, those of `/locked/...` only with a key; returns the URL."""
    servers: list[ThreadingHTTPServer] = []

    def start(answers: Answers) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = answers.get(self.path)
                status = 404 if found is None else 200
                if answers.get("key") and self.headers["authorization"] != f"Bearer {answers['key']}":
                    status, found = 401, {"error": {"message": "the API key is not one of this server's."}}
                found = found or {"error": {"message": "there is no such request."}}
                body = found if isinstance(found, bytes) else json.dumps(found).encode()
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                """Not a word."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def answers_of(one: Looked) -> Answers:
    """What the explain API says of an engine."""
    samples = one.inspector.timeline.samples(one.built, one.engine.clock.now())
    answers: Answers = {
        "/kv/ledger": one.head().json(),
        "/kv/requests": one.snapshot().json(),
        "/kv/timeline": {"interval_s": 1.0, "samples": [sample.json() for sample in samples]},
    }
    for row in one.snapshot().rows:
        life: Life | None = one.inspector.lives.find(row.id, {})
        assert life is not None
        answers[f"/kv/requests/{row.id}"] = {**row.json(), "block_table": [], **life.detail()}
    return answers


@pytest.fixture
def crowded() -> tuple[Looked, str, str]:
    """One request runs and two wait for its slot; with the ids of the first two."""
    one = Looked(max_num_seqs=1)
    running, waiter = one.add(9, 40), one.add(8, 4)
    one.labels[waiter] = "what the client calls it"
    one.add(8, 4)
    one.step(5)
    return one, running, waiter


def test_one_frame_shows_memory_requests_and_reasons(
    serve: Callable[[Answers], str],
    crowded: tuple[Looked, str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    one, running, _ = crowded
    assert octavo(monkeypatch, "top", serve(answers_of(one)), "--once") == 0
    shown = capsys.readouterr().out
    assert "Sequences at once (max_num_seqs): 2 of 2 waiting requests want more of it" in shown
    assert "1 running, 2 waiting" in shown
    assert "tokens/s" in shown
    assert "ITL p50 5." in shown
    assert "what the client calls it" in shown
    assert running in shown
    assert "slots: needs 1 slot, 0 available, 1 short" in shown


def test_explain_prints_the_verdict_the_ledger_and_who_waits_for_what(
    serve: Callable[[Answers], str],
    crowded: tuple[Looked, str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    one, _, waiter = crowded
    assert octavo(monkeypatch, "explain", serve(answers_of(one))) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Sequences at once (max_num_seqs)")
    assert "weights" in shown
    assert "100.0%" in shown
    assert "slots: 2 waiting" in shown
    assert f"{waiter} (what the client calls it): slots: needs 1 slot" in shown
    assert "Unblocks it: 1 of the 1 sequences that run must end" in shown


def test_explain_tells_one_request_in_full(
    serve: Callable[[Answers], str],
    crowded: tuple[Looked, str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    one, running, waiter = crowded
    url = serve(answers_of(one))
    assert octavo(monkeypatch, "explain", url, waiter) == 0
    shown = capsys.readouterr().out
    assert "Waits: slots: needs 1" in shown
    assert f"Held by, in slots: {running} (1)" in shown
    assert "submitted: 8 prompt tokens" in shown
    assert octavo(monkeypatch, "explain", url, "nobody") == 1
    assert "answers 404: there is no such request" in capsys.readouterr().err


def test_explain_prints_json_on_demand(
    serve: Callable[[Answers], str],
    crowded: tuple[Looked, str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers = answers_of(crowded[0])
    assert octavo(monkeypatch, "explain", serve(answers), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "ledger": json.loads(json.dumps(answers["/kv/ledger"])),
        "requests": json.loads(json.dumps(answers["/kv/requests"]["requests"])),
    }


def test_a_key_is_sent_from_the_option_or_the_environment(
    serve: Callable[[Answers], str],
    crowded: tuple[Looked, str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = serve({**answers_of(crowded[0]), "key": "secret"})
    monkeypatch.delenv("OCTAVO_API_KEY", raising=False)
    assert octavo(monkeypatch, "top", url, "--once") == 1
    assert "answers 401: the API key" in capsys.readouterr().err
    assert octavo(monkeypatch, "top", url, "--once", "--api-key", "secret") == 0
    monkeypatch.setenv("OCTAVO_API_KEY", "secret")
    assert octavo(monkeypatch, "explain", url) == 0


@pytest.mark.parametrize("command", ["top", "explain"])
@pytest.mark.parametrize(
    ("url", "said"),
    [("http://127.0.0.1:1", "cannot be asked"), ("http://", "it must be a URL"), ("http://[", "it must be a URL")],
)
def test_a_server_that_is_not_there_is_one_sentence(
    command: str, url: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert octavo(monkeypatch, command, url) == 1
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_what_is_no_octavo_server_is_said(
    serve: Callable[[Answers], str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert octavo(monkeypatch, "top", serve({"/kv/ledger": b"<html>"}), "--once") == 1
    assert "Is it an Octavo server" in capsys.readouterr().err


def test_options_for_logs_are_refused_for_a_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert octavo(monkeypatch, "explain", "http://127.0.0.1:1", "--from", "3") == 1
    assert "--from is for logs" in capsys.readouterr().err


def test_a_label_cannot_steer_the_terminal(
    serve: Callable[[Answers], str],
    crowded: tuple[Looked, str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, _, waiter = crowded
    one.labels[waiter] = "\x1b[2J[red]gone\n"
    assert octavo(monkeypatch, "top", serve(answers_of(one)), "--once") == 0
    shown = capsys.readouterr().out
    assert "\x1b[2J" not in shown
    assert "?[2J[red]gone?" in shown
