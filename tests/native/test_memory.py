"""The attention reads no byte outside the cache: the cache lies between forbidden pages, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.native.needs import needs_native, usable_isas

CASES = [
    ("float32", "float32", 16, 16, 0, 1),  # a head of half a panel, at the very end
    ("float32", "float32", 48, 16, 0, 2),
    ("float32", "float32", 80, 32, 0, 12),
    ("bfloat16", "bfloat16", 96, 16, 0, 2),
    ("bfloat16", "bfloat16", 32, 16, 0, 12),
    ("float32", "float32", 32, 8, 20, 1),  # blocks before the window are given back
    ("bfloat16", "bfloat16", 32, 4, 30, 2),
    ("bfloat16", "int8", 32, 24, 25, 2),
    ("float32", "fp8", 16, 8, 9, 12),
    ("float32", "float16", 48, 24, 0, 2),
    ("bfloat16", "float32", 64, 1, 10, 1),
]


@needs_native
@pytest.mark.parametrize("isa", usable_isas())
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_nothing_outside_the_cache_is_read(case: tuple[object, ...], isa: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.native.guarded", *map(str, case)],
        env=os.environ | {"OCTAVO_ISA": isa},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "done", f"exit status {done.returncode}: {done.stderr[-300:]}"
