"""Calling the command line as a user does."""

from __future__ import annotations

import sys

import pytest

from octavo.cli import main


def octavo(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run the command line; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["octavo", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)
