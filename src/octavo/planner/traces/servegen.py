"""ServeGen's client profiles: a measured generator rather than a log; requests are drawn from it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.planner.traces.api import BadLine, TraceError
from octavo.planner.traces.fields import MOST_TOKENS, FieldError, cell_seconds
from octavo.planner.traces.file_trace import Format
from octavo.planner.traces.lines import Head, Row, Rows, cells, numbered, opened, read_document

WINDOW = 600  # seconds of a row of chunk-*-trace.csv
SIDES = ("input_tokens", "output_tokens")
ENDINGS = ("-trace.csv", "-trace.csv.gz")


def read_profiles(path: Path, start: float = 0.0, end: float = 0.0, seed: int = 0) -> Rows:
    """Requests drawn from the clients of a folder (chunk-N-trace.csv and chunk-N-dataset.json, perhaps .gz), or from
    the one client whose trace file is named: those from `start` to `end` seconds, one hour if no end is given.

    A window of 600 s gives, per client, a rate, a family of inter-arrival times (Gamma, Weibull) and its parameters.
    The fitted mean often does not fit the rate (Weibull: mean times rate 0.69 to 2.2), so exactly rate x 600 requests
    are drawn, their gaps from the family by shape and stretched to fill the window. Lengths are drawn from the
    histogram of the 21,600 s that hold the window, prompt and answer apart; from the nearest that is not empty.
    Time is that of the profile, the same for all clients. In memory are one window's requests.
    """
    end = end or start + 3600
    if not 0 <= start < end:
        raise TraceError(f"start {start:g} and end {end:g} make no time of the profile; give 0 <= start < end.")
    clients = _clients(path)
    for client in clients:
        yield from client.bad
    first, last = int(start // WINDOW), int(-(-end // WINDOW))
    for index in range(first, last):
        drawn: list[Row] = []
        for client in clients:
            for row in client.draw(index, np.random.default_rng([seed, client.number, index])):
                if isinstance(row, BadLine):
                    yield row
                elif start <= row.seconds < end:
                    drawn.append(row)
        drawn.sort(key=lambda row: row.seconds)
        yield from drawn


class _Window(NamedTuple):
    """What a row says: the line it stands in, requests in all, and the family of gaps with its shape."""

    line: int
    requests: int
    family: str
    shape: float


@dataclass
class _Client:
    number: int
    path: Path
    windows: dict[int, _Window] = field(default_factory=dict)
    bad: list[BadLine] = field(default_factory=list)
    lengths: _Lengths | None = None

    def draw(self, index: int, rng: np.random.Generator) -> Iterator[Row | BadLine]:
        """The requests of window `index`, in order, with times on the profile's clock."""
        window = self.windows.get(index)
        if window is None or window.requests == 0:
            return
        if self.lengths is None:
            self.lengths = _Lengths(_dataset_of(self.path))
        gaps = rng.gamma(window.shape, size=window.requests + 1) if window.family == "Gamma" else None
        gaps = rng.weibull(window.shape, window.requests + 1) if gaps is None else gaps
        times = index * WINDOW + WINDOW * np.cumsum(gaps)[:-1] / gaps.sum()
        try:
            prompts, outputs = (self.lengths.draw(side, index * WINDOW, window.requests, rng) for side in SIDES)
        except FieldError as error:
            yield BadLine(window.line, f"{self.path.name}: {error}")
            return
        name = f"client-{self.number}"
        for place, (time, prompt, output) in enumerate(
            zip(times.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
        ):
            yield Row(time, prompt, output, f"{name}/{index}/{place}", session=name)


def _clients(path: Path) -> list[_Client]:
    """The clients in order of number. Raises TraceError."""
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.name.endswith(ENDINGS)]
    clients = []
    for file in files:
        number = file.name.removeprefix("chunk-").partition("-")[0]
        if not number.isdecimal():
            raise TraceError(f"{file} is not named chunk-N-trace.csv, so its client is unknown; rename it.")
        client = _Client(int(number), file)
        with opened(file) as lines:
            for line, content in numbered(lines):
                try:
                    start, window = _window(content, line)
                    client.windows[start // WINDOW] = window
                except FieldError as error:
                    client.bad.append(BadLine(line, f"{file.name}: {error}"))
        clients.append(client)
    return sorted(clients, key=lambda client: client.number)


def _window(content: str, line: int) -> tuple[int, _Window]:
    row = cells(content)
    if len(row) != 6:
        raise FieldError(f"{len(row)} cells; a window has 6: start, rate, CV, family, shape, scale.")
    start, rate, shape = (cell_seconds(row[place], name) for place, name in ((0, "start"), (1, "rate"), (4, "shape")))
    if start % WINDOW:
        raise FieldError(f"start is {row[0]}; windows begin at multiples of {WINDOW} s.")
    count, family = round(rate * WINDOW), row[3].strip()
    if count and (family not in ("Gamma", "Weibull") or not shape):
        raise FieldError(f"the family is {family!r} with shape {row[4]}; give Gamma or Weibull, and one above 0.")
    if count > 10**7:
        raise FieldError(f"rate is {row[1]}; it must be below {10**7 // WINDOW:,} requests per second.")
    return int(start), _Window(line, count, family, shape)


def _dataset_of(path: Path) -> Path:
    stem = path.name.rpartition("-trace.csv")[0] + "-dataset.json"
    for name in (stem, stem + ".gz"):
        if path.with_name(name).exists():
            return path.with_name(name)
    raise TraceError(f"{path} has no {stem} beside it; its requests have no lengths without.")


class _Lengths:
    """Histograms of one client, parsed when they are wanted: one at a time, for they are long."""

    def __init__(self, path: Path) -> None:
        self._raw: dict[int, Any] = {int(key): value for key, value in read_document(path).items() if key.isdecimal()}
        self._parsed: dict[str, tuple[int, NDArray[np.int64], NDArray[np.float64]]] = {}

    def draw(self, side: str, time: int, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """`count` lengths for a window that begins at `time`. Raises FieldError where no histogram has any."""
        held = max((key for key in self._raw if key <= time), default=0)
        for key in sorted(self._raw, key=lambda key: (abs(key - held), key)):
            if side not in self._parsed or self._parsed[side][0] != key:
                found = _histogram(self._raw[key], side)
                if found is None:
                    continue
                self._parsed[side] = (key, *found)
            _, values, shares = self._parsed[side]
            drawn: NDArray[np.int64] = values[np.searchsorted(shares, rng.random(count) * shares[-1], side="right")]
            return drawn
        raise FieldError(f"no window has a histogram of {side}.")


def _histogram(window: Any, side: str) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
    """Lengths and their cumulated shares; None where there is no data. Raises FieldError."""
    try:
        found = ast.literal_eval(window[side])  # a Python dict in a string; never eval
        values, shares = np.array(list(found), np.int64), np.array(list(found.values()), np.float64)
    except (KeyError, ValueError, TypeError, SyntaxError, AttributeError, RecursionError, OverflowError) as error:
        raise FieldError(f"the histogram of {side} cannot be read ({type(error).__name__}).") from error
    if not len(values):
        return None
    total = shares.sum()
    if values.min() < 1 or values.max() > MOST_TOKENS or shares.min() < 0 or not 0 < total < np.inf:
        raise FieldError(f"the histogram of {side} holds lengths below 1, or shares that are no probabilities.")
    return values, np.cumsum(shares)


def _is_profile(head: Head) -> bool:
    return head.name.startswith("chunk-") and head.name.endswith(ENDINGS)


FORMATS = (
    Format(
        "servegen",
        "ServeGen client profiles, a folder or one chunk-N-trace.csv",
        _is_profile,
        read_profiles,
        options={"start": float, "end": float, "seed": int},
        folder=True,
    ),
)
