"""The attention reads no byte outside the cache and the few spare ones behind it, not even one whose weight is 0."""

from __future__ import annotations

import sys

import pytest

from tests.native.needs import needs_native, python, usable_isas


@needs_native
@pytest.mark.skipif(sys.platform != "linux", reason="forbids pages with Linux's mprotect")
@pytest.mark.parametrize("isa", usable_isas())
def test_nothing_outside_the_cache_is_read(isa: str) -> None:
    assert python("import runpy; runpy.run_module('tests.native.guarded', run_name='__main__')", OCTAVO_ISA=isa) == ""
