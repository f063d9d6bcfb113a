"""The running sequences' lengths as arrays, so that a sum over all of them costs little."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.types import Sequence

Ints = NDArray[np.int64]

_KNOWN, _PROMPT, _CEILING, _LEAST, _SLOTS, _SINCE = range(6)
_NEVER = _ALL = 1 << 60


class Lengths(NamedTuple):
    """One entry per running sequence, in no order. `room`: tokens to its ceiling; `least`: how many of them it will use
    at least, all of them where it is larger."""

    known: Ints
    generated: Ints
    room: Ints
    least: Ints
    slots: Ints


class Roster:
    """One row per running sequence. Rows follow a sequence when `lengths` is asked for, or by themselves for those
    that gain one token in each step (`coasts`)."""

    def __init__(self) -> None:
        self._rows: list[int] = []  # row -> sequence id
        self._row: dict[int, int] = {}
        self._data = np.zeros((6, 64), dtype=np.int64)

    def add(self, seq: Sequence) -> None:
        row = len(self._rows)
        if row == self._data.shape[1]:
            self._data = np.concatenate([self._data, np.zeros_like(self._data)], axis=1)
        self._rows.append(seq.id)
        self._row[seq.id] = row
        least = _ALL if seq.request.params.ignore_eos else 0
        self._data[:, row] = (len(seq.tokens), len(seq.request.prompt), seq.ceiling, least, seq.slots, _NEVER)

    def remove(self, seq: Sequence) -> None:
        row, last = self._row.pop(seq.id), len(self._rows) - 1
        moved = self._rows.pop()
        if row != last:
            self._data[:, row] = self._data[:, last]
            self._rows[row] = moved
            self._row[moved] = row

    def coasts(self, seq: Sequence, step: int) -> None:
        """From `step` on the sequence gains one token in each step."""
        row = self._row[seq.id]
        self._data[_KNOWN, row], self._data[_SLOTS, row], self._data[_SINCE, row] = len(seq.tokens), seq.slots, step

    def extended(self, seqs: Iterable[Sequence]) -> None:
        """These coast, and have got more slots."""
        data, row = self._data, self._row
        for seq in seqs:
            data[_SLOTS, row[seq.id]] = seq.slots

    def wakes(self, seq: Sequence) -> None:
        """It does so no longer."""
        self._data[_SINCE, self._row[seq.id]] = _NEVER

    def lengths(self, awake: Iterable[Sequence], step: int) -> Lengths:
        """All lengths as of `step`; `awake`: the sequences that do not coast."""
        data, row = self._data, self._row
        for seq in awake:
            at = row[seq.id]
            data[_KNOWN, at] = len(seq.tokens)
            data[_SLOTS, at] = seq.slots
        data = data[:, : len(self._rows)]
        known = data[_KNOWN] + np.maximum(0, step - data[_SINCE])
        room = np.maximum(0, data[_CEILING] - known)
        return Lengths(known, known - data[_PROMPT], room, data[_LEAST].copy(), data[_SLOTS].copy())
