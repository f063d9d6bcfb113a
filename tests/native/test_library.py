"""Finding and loading the compiled kernels: what is loaded, what is said without them, what is refused."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from octavo.native import library
from octavo.native.library import NativeError

OBJECTS = Path(__file__).parents[2] / "build" / "CMakeFiles"
SAY_ISA = "from octavo.native.library import load; print(load().isa)"
SAY_RUNTIMES = """
from octavo.native.library import load
import torch
assert load() is not None
torch.randn(512, 512) @ torch.randn(512, 512)
print(*{line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line or "libomp" in line}, sep="\\n")
"""

needs_library = pytest.mark.skipif(not library.BESIDE.is_file(), reason=f"{library.BESIDE} was not built")
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to make a wrong library with")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test loads anew and from the package; afterwards the other tests do, too."""
    monkeypatch.delenv("OCTAVO_NATIVE", raising=False)
    monkeypatch.delenv("OCTAVO_ISA", raising=False)
    library.load.cache_clear()
    yield
    library.load.cache_clear()


def _python(code: str, **environment: str) -> str:
    """What a fresh interpreter prints: a process keeps every library it has loaded, and its instruction set."""
    env = os.environ | environment
    done = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _compile(source: str, folder: Path) -> Path:
    made = folder / "liboctavo.so"
    (folder / "other.c").write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(made), str(folder / "other.c")], check=True)
    return made


@needs_library
def test_the_packages_library_is_loaded_once() -> None:
    loaded = library.load()
    assert loaded is not None
    assert loaded.path == library.BESIDE
    assert loaded.isa in library.ISAS
    assert library.load() is loaded


@needs_library
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="loaded libraries are read from /proc")
def test_torch_and_the_library_share_one_openmp_runtime() -> None:
    assert len(_python(SAY_RUNTIMES).splitlines()) == 1


@needs_library
def test_the_environment_can_ask_for_less_than_the_cpu_has() -> None:
    assert _python(SAY_ISA, OCTAVO_ISA="portable") == "portable"


@needs_library
@pytest.mark.parametrize("isa", library.ISAS)
def test_every_instruction_set_of_the_cpu_can_be_chosen(isa: str) -> None:
    loaded = library.load()
    assert loaded is not None
    best = loaded.isa
    try:
        loaded.use_isa(isa)
        assert loaded.isa == isa
    except NativeError:
        pytest.skip(f"this CPU or compiler has no {isa}")
    finally:
        loaded.use_isa(best)


@needs_library
def test_an_instruction_set_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_ISA", "avx9")
    with pytest.raises(NativeError, match=r"avx9 .* choose another of .*portable"):
        library.load()


def test_without_the_library_one_sentence_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "BESIDE", tmp_path / "liboctavo.so")
    with caplog.at_level(logging.WARNING):
        assert library.load() is None
        assert library.load() is None
    [message] = caplog.messages
    assert "reference backend" in message
    assert "install g++" in message


def test_switched_off_it_says_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OCTAVO_NATIVE", "off")
    assert library.load() is None
    assert not caplog.messages


def test_a_path_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OCTAVO_NATIVE", str(tmp_path / "none.so"))
    with pytest.raises(NativeError, match=r"cannot load .*none\.so"):
        library.load()


@needs_compiler
def test_another_abi_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = _compile("int octavo_abi(void) { return 999; }", tmp_path)
    monkeypatch.setenv("OCTAVO_NATIVE", str(other))
    with pytest.raises(NativeError, match=rf"ABI version 999, this Octavo needs {library.ABI}; .*make native"):
        library.load()


@needs_compiler
def test_a_library_of_someone_else_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OCTAVO_NATIVE", str(_compile("int other;", tmp_path)))
    with pytest.raises(NativeError, match="no Octavo library"):
        library.load()


def _weak_functions(folder: Path) -> set[str]:
    """Functions of a variant's objects that the linker keeps one copy of, whichever object it comes from."""
    objects = [str(path) for path in folder.rglob("*.o")]
    if not objects:
        return set()
    lines = subprocess.run(["nm", *objects], check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.split()[-1] for line in lines if " W " in line}


@pytest.mark.skipif(not OBJECTS.is_dir() or not shutil.which("nm"), reason="needs the objects of `make native` and nm")
def test_no_function_is_shared_between_instruction_sets() -> None:
    """An inline function outside the variant's namespace is linked once: perhaps the AVX-512 copy, for any CPU."""
    functions = [_weak_functions(OBJECTS / f"octavo_{isa}.dir") for isa in library.ISAS]
    repeated = [name for name, times in Counter(chain.from_iterable(functions)).items() if times > 1]
    assert repeated == []
