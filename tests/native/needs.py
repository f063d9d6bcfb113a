"""Marks and helpers of tests that need the compiled library; without it they are skipped and say so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from octavo.native import calls
from octavo.native.library import ISAS, Library, NativeError

needs_native = pytest.mark.skipif(calls.kernels() is None, reason="liboctavo.so was not built or is switched off")


def library() -> Library:
    found = calls.kernels()
    assert found is not None
    return found


def usable_isas() -> list[str]:
    """The instruction sets that library and CPU both have, the best first."""
    found = calls.kernels()
    if found is None:
        return []
    best, names = found.isa, []
    for name in ISAS:
        try:
            found.use_isa(name)
            names.append(name)
        except NativeError:
            pass
    found.use_isa(best)
    return names


def python(code: str, **environment: str) -> str:
    """What a fresh interpreter prints: a process keeps its library and instruction set."""
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
