"""`octavo serve` as a process: what it prints, how it answers, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from octavo.server.lifecycle import bind, listen
from tests.commands.calling import octavo

CALL = [sys.executable, "-m", "octavo.cli", "serve"]
LONG = {"prompt": [5, 6, 7], "max_tokens": 900, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.server.serving import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


class Server:
    """The process: its `url`, and everything it has said on stderr so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said = ""
        self.url = ""
        self._listening = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        assert self._listening.wait(120), self.said
        assert self.url, self.said

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line
            if found := re.match(r"serving (http://\S+)", line):
                self.url = found[1]
                self._listening.set()
        self._listening.set()

    def ends(self) -> int:
        return self.process.wait(60)


@contextmanager
def serving(checkpoint: Path, *flags: str, **variables: str) -> Iterator[Server]:
    environment = os.environ | {"OCTAVO_KV_MEMORY": "8MiB"} | variables
    command = [*CALL, str(checkpoint), "--port", "0", "--max-num-seqs", "8", *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield Server(process)
    finally:
        process.kill()
        process.wait()


def events(response: httpx.Response) -> Iterator[str]:
    """The data of a stream's events."""
    return (line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))


@pytest.mark.slow
def test_it_reports_answers_and_ends_with_its_last_answer(checkpoint: Path) -> None:
    flags = ("--api-key", "sk-test", "--implementation", "transformers")  # slow enough to be caught at it
    with serving(checkpoint, *flags, OCTAVO_ORDER="priority") as server:
        assert re.search(r"api_keys +1 key +--api-key", server.said)
        assert "OCTAVO_ORDER" in server.said
        assert "sk-test" not in server.said
        assert re.search(r"at 1,024 tokens: \d+ requests? together", server.said)
        assert "/v1/chat/completions" in server.said
        with httpx.Client(base_url=server.url, timeout=60, headers={"Authorization": "Bearer sk-test"}) as client:
            assert httpx.get(f"{server.url}/v1/models").status_code == 401
            assert client.get("/v1/models").json()["data"][0]["id"] == str(checkpoint)
            with client.stream("POST", "/v1/completions", json=LONG) as response:
                stream = events(response)
                next(stream)
                server.process.send_signal(signal.SIGTERM)
                refused = _refused(client)
                rest = list(stream)
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) > 0
        assert refused.json()["error"]["code"] == "draining"
        assert rest[-1] == "[DONE]"
        assert json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
        assert server.ends() == 0
        assert "all requests have ended" in server.said
        assert "Traceback" not in server.said


def _refused(client: httpx.Client) -> httpx.Response:
    """The first answer that is none, and `/ready` is red by then."""
    while (answer := client.post("/v1/completions", json={"prompt": [5], "max_tokens": 1})).is_success:
        pass
    assert client.get("/ready").status_code == 503
    assert client.get("/health").status_code == 200
    return answer


@pytest.mark.slow
def test_what_has_not_ended_in_time_is_aborted_with_a_reason(checkpoint: Path) -> None:
    with serving(checkpoint, "--drain-seconds", "0", "--implementation", "transformers") as server:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=60) as response:
            stream = events(response)
            next(stream)
            server.process.send_signal(signal.SIGINT)
            told = [json.loads(event) for event in stream if event != "[DONE]"]
        assert "drain_seconds" in told[-1]["error"]["message"]
        assert server.ends() == 0
        assert "were aborted" in server.said


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(checkpoint: Path) -> None:
    with (
        serving(checkpoint, "--drain-seconds", "600", "--implementation", "transformers") as server,
        httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=60) as response,
    ):
        next(events(response))
        server.process.send_signal(signal.SIGTERM)
        while "draining" not in server.said:
            assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.ends() == 128 + signal.SIGTERM


@pytest.mark.slow
def test_an_idle_server_ends_at_once(checkpoint: Path) -> None:
    """The idle connection of a client does not hold it up."""
    with serving(checkpoint, "--drain-seconds", "600") as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/health").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.ends() == 0


def told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> str:
    """What the command says when it cannot start: one sentence."""
    assert octavo(monkeypatch, "serve", *arguments) == 1
    said = capsys.readouterr().err
    assert said.startswith("octavo serve: ")
    assert said.count("\n") == 1
    return said


def test_bad_settings_are_told_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "model is not given" in told(capsys, monkeypatch)
    assert "--port is 'x'" in told(capsys, monkeypatch, "none", "--port", "x")
    assert "memory_utilization" in told(capsys, monkeypatch, "none", "--gpu-memory-utilization", "2")
    assert "which is no file" in told(capsys, monkeypatch, "none", "--chat-template", tmp_path / "none")
    assert "config is" in told(capsys, monkeypatch, "none", "--config", tmp_path / "none.yaml")
    assert "log cannot be written" in told(capsys, monkeypatch, "none", "--log", tmp_path)


def test_a_port_in_use_is_told_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = bind("127.0.0.1", 0)
    listen(bound)
    port = bound.getsockname()[1]
    assert f"cannot listen on 127.0.0.1 port {port}" in told(capsys, monkeypatch, "none", "--port", port)
    bound.close()


def test_without_the_extra_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib import util

    found = util.find_spec
    monkeypatch.setattr("octavo.commands.serve.find_spec", lambda name: None if name == "uvicorn" else found(name))
    assert "(uvicorn); run: pip install 'octavo[engine,serve]'" in told(capsys, monkeypatch, "none")


def test_every_setting_has_a_flag(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.server.settings import flag_of
    from octavo.server.values import all_settings

    monkeypatch.setenv("COLUMNS", "200")
    assert octavo(monkeypatch, "serve", "--help") == 0
    said = capsys.readouterr().out
    for name in all_settings():
        assert name == "model" or f"{flag_of(name)}" in said
    for flag in ("--kv-cache-dtype", "--gpu-memory-utilization", "--no-enable-prefix-caching", "--config", "--verbose"):
        assert flag in said


def test_flags_reach_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the command line, up to where loading would begin."""
    seen = []
    monkeypatch.setattr("octavo.commands.serve._serve", lambda settings, *rest: seen.append((settings, *rest)))
    monkeypatch.setenv("OCTAVO_MAX_QUEUE", "9")
    flags = "--port 0 --kv-cache-dtype int8 --no-enable-prefix-caching --api-key a --api-key b --served-model-name x"
    octavo(monkeypatch, "serve", "tiny", *flags.split(), "--verbose")
    settings, _, log, verbose = seen[0]
    assert settings.config.engine.model == "tiny"
    assert settings.config.engine.kv_dtype == "int8"
    assert settings.config.engine.enable_prefix_caching is False
    assert settings.config.engine.max_queue == 9
    assert [entry.key for entry in settings.config.api_keys] == ["a", "b"]
    assert settings.config.served_model_name == ("x",)
    assert settings.sources["enable_prefix_caching"] == "--no-enable-prefix-caching"
    assert (log, verbose) == (None, True)
