"""A server in a process of its own for the benchmarks, and what the kernel says of that process: CPU time, memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import yaml

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class ServerFailed(Exception):
    """It did not start, or has ended."""


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A running server. `log`: what it has written, access log and all."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def rss(self) -> int:
        """Bytes of memory that the process holds."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * _PAGE

    def cpu(self) -> float:
        """CPU seconds so far, of all its threads."""
        return _seconds(Path(f"/proc/{self.pid}/stat"))

    def threads(self) -> dict[int, float]:
        """CPU seconds by thread id; the main thread's, the event loop, has the process's id."""
        return {int(task.name): _seconds(task / "stat") for task in Path(f"/proc/{self.pid}/task").iterdir()}

    def access_log(self) -> list[dict[str, Any]]:
        """The lines of the access log so far."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [json.loads(line) for line in lines if line.startswith('{"time"')]

    def others(self) -> list[str]:
        """What it wrote beside the access log and the start-up report."""
        lines = self.log.read_text(errors="replace").splitlines()
        start = next((i for i, line in enumerate(lines) if line.startswith("serving ")), 0)
        return [line for line in lines[start + 1 :] if not line.startswith('{"time"')]


def _seconds(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def octavo_serve(model: str, settings: Mapping[str, Any], folder: Path) -> list[str]:
    """The command that serves `model` with these settings, on a free port."""
    file = folder / "settings.yaml"
    file.write_text(yaml.safe_dump({**settings, "port": 0}))
    return [sys.executable, "-m", "octavo.cli", "serve", model, "--config", str(file)]


@contextmanager
def running(command: Sequence[str], folder: Path, patience: float = 180.0) -> Iterator[ServerProcess]:
    """Start a server that says `serving URL` when it listens; SIGTERM at the end, which it has to obey."""
    log = folder / "server.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            yield ServerProcess(_wait_for_url(process, log, patience), process, log)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    raise ServerFailed(f"the server did not end within 60 s of SIGTERM; its log: {log}") from None


def _wait_for_url(process: subprocess.Popen[bytes], log: Path, patience: float) -> str:
    end = time.monotonic() + patience
    while time.monotonic() < end:
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith("serving http"):
                return line.split()[1]
        if process.poll() is not None:
            raise ServerFailed(
                f"the server ended with {process.returncode}:\n{log.read_text(errors='replace')[-2000:]}"
            )
        time.sleep(0.1)
    raise ServerFailed(f"the server does not listen after {patience:g} s; its log: {log}")


def work_folder(given: Path | None) -> Path:
    """Where logs and settings go."""
    folder = given or Path(mkdtemp(prefix="octavo-benchmark-"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def parse_metrics(text: str) -> dict[str, dict[str, float]]:
    """Name -> labels as written -> value, of Prometheus' text format."""
    found: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name, brace, labels = series.partition("{")
            found.setdefault(name, {})[labels.rstrip("}") if brace else ""] = float(value)
    return found


def by_label(metrics: Mapping[str, Mapping[str, float]], name: str, label: str) -> Counter[str]:
    """The values of a family by one of its labels."""
    found: Counter[str] = Counter()
    for labels, value in metrics.get(name, {}).items():
        given = dict(pair.partition("=")[::2] for pair in labels.split(",") if "=" in pair)
        found[given.get(label, "").strip('"')] += int(value)
    return found


def total(metrics: Mapping[str, Mapping[str, float]], name: str) -> float:
    """The sum of a family."""
    return sum(metrics[name].values())
