"""Options and fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from octavo.openmp import spin_shortly

spin_shortly()  # before any test imports torch
REPO = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shared",
        default=os.environ.get("OCTAVO_SHARED", str(REPO.parent / "shared")),
        help="folder with facts and traces",
    )


@pytest.fixture(scope="session")
def shared(request: pytest.FixtureRequest) -> Path:
    """The folder with facts and traces; tests that need it are skipped, saying so, when it is absent."""
    path = Path(request.config.getoption("--shared"))
    if not path.is_dir():
        pytest.skip(f"no facts and traces at {path}; name their folder with --shared")
    return path
