"""`octavo explain`: what it prints and writes, and bad input in one sentence."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import main
from tests.planner.explained_logs import PROMPT, busy, recorded, slots

BUSY = dict(admission="prompt", max_num_batched_tokens=32, max_model_len=96)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    recorded(tmp_path / "log.jsonl", "paged", 30, BUSY, busy)
    return tmp_path / "log.jsonl"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["octavo", "explain", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> str:
    assert run(monkeypatch, *arguments) == 0
    return capsys.readouterr().out


def failing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> str:
    """The message of a call that fails: one sentence on stderr, nothing else."""
    assert run(monkeypatch, *arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert captured.err.startswith("octavo explain: ")
    return captured.err


def test_the_limit_comes_first_then_the_seconds_then_the_longest_waits(capsys, monkeypatch, log: Path) -> None:
    text = printed(capsys, monkeypatch, log)
    first, second, *_ = text.splitlines()
    assert " binds: it took " in first
    assert second.startswith("To change it: ")
    assert text.index("Second by second") < text.index("The longest waits")
    assert text.count(": arrived at ") == 5
    assert printed(capsys, monkeypatch, log, "--worst", 2).count(": arrived at ") == 2


def test_one_request_is_told_alone(capsys, monkeypatch, log: Path) -> None:
    text = printed(capsys, monkeypatch, log, "r3")
    assert text.startswith("r3: arrived at ")
    assert "Second by second" not in text


def test_json_has_a_schema_every_second_and_the_sentences(capsys, monkeypatch, log: Path) -> None:
    data: dict[str, Any] = json.loads(printed(capsys, monkeypatch, log, "--json", "--interval", 0.1))
    assert data["schema"] == "octavo.explain/1"
    assert data["verdict"]
    assert sum(data["limits"].values()) <= sum(data["waited"].values()) + 1e-9
    assert all(part["end"] - part["start"] <= 0.1 + 1e-9 for part in data["stretches"])
    assert data["stories"][0]["waited"]
    asked = json.loads(printed(capsys, monkeypatch, log, "r3", "--json"))["asked"]
    assert asked["id"] == "r3"


def test_a_window_looks_at_nothing_else(capsys, monkeypatch, log: Path) -> None:
    data = json.loads(printed(capsys, monkeypatch, log, "--from", 0.2, "--to", 0.5, "--json"))
    assert data["start"] >= 0.2
    assert data["end"] <= 0.5


def test_a_replays_report_is_explained_as_well(capsys, monkeypatch, tmp_path: Path) -> None:
    from octavo.report.replay_data import ReplayReport, write_json
    from tests.report.replaying import outcome

    path = tmp_path / "run.json"
    outcomes = (outcome("paged"), outcome("reserve-max"))
    write_json(path, ReplayReport("a title", "a command", "a trace", "m", "d", "paged", outcomes))
    text = printed(capsys, monkeypatch, path)
    assert "This is paged; --strategy tells about reserve-max." in text
    data = json.loads(printed(capsys, monkeypatch, path, "--json", "--strategy", "reserve-max"))
    assert (data["kind"], data["setup"]["strategy"]) == ("run", "reserve-max")
    assert data["waited"] == dict(outcomes[1].waited)
    assert "paged, reserve-max" in failing(capsys, monkeypatch, path, "--strategy", "magic")


def test_a_server_is_named_as_what_a_url_needs(capsys, monkeypatch) -> None:
    assert "cannot be asked" in failing(capsys, monkeypatch, "http://127.0.0.1:1")


def test_what_is_no_log_and_no_report_is_said(capsys, monkeypatch, tmp_path: Path) -> None:
    assert "does not exist" in failing(capsys, monkeypatch, tmp_path / "no.jsonl")
    path = tmp_path / "some.json"
    for text, words in (
        ("", "is empty"),
        ("nonsense\n", "line 1: not JSON"),
        ('{"event": "Planned"}\n', "is no Octavo log of version 4"),
        ('{"octavo_log": 1}\n', "is no Octavo log of version 4"),
        ('{"schema": "octavo.replay/9"}\n', "schema is 'octavo.replay/9'"),
        ('{"runs": [{"summary": {}}]}\n', "is the report of `octavo compare`"),
    ):
        path.write_text(text)
        assert words in failing(capsys, monkeypatch, path)


def test_a_record_that_is_no_event_is_named(capsys, monkeypatch, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    recorded(path, "paged", 64, PROMPT, slots)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:3], '{"event": "Settled"}\n', *lines[3:]]))
    assert "record 3 is no event" in failing(capsys, monkeypatch, path)


def test_numbers_that_mean_nothing_are_refused_by_name(capsys, monkeypatch, log: Path) -> None:
    for arguments, words in (
        (("--from", 3, "--to", 1), "from must come first"),
        (("--interval", 0), "interval is 0 seconds; it must be above 0"),
        (("--interval", "nan"), "interval is nan"),
        (("--to", "inf"), "to is inf"),
        (("--worst", -1), "worst is -1"),
    ):
        assert words in failing(capsys, monkeypatch, log, *arguments)


def test_an_unknown_request_is_an_error(capsys, monkeypatch, log: Path) -> None:
    assert "has no request 'r999'" in failing(capsys, monkeypatch, log, "r999")


def test_a_window_in_which_nothing_happened_is_an_error(capsys, monkeypatch, tmp_path: Path) -> None:
    from octavo.report.replay_data import ReplayReport, write_json
    from tests.report.replaying import outcome

    path = tmp_path / "run.json"
    write_json(path, ReplayReport("a title", "a command", "a trace", "m", "d", "paged", (outcome("paged"),)))
    assert "nothing from 1e+09 s to the end" in failing(capsys, monkeypatch, path, "--from", "1e9")
