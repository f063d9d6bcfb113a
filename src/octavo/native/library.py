"""Finds liboctavo.so, the compiled CPU kernels, and loads it once.

It is a plain C library taken in with ctypes: it needs no Python headers to build and serves every Python version. A
step of the engine is one call, so what ctypes costs does not show.

Its threads must come from the same OpenMP runtime as torch's: two pools would fight for the cores, each spinning while
the other works. Both ask for `libgomp.so.1`, and the first one loaded serves both, so torch is imported here before the
library is loaded; it brings its own.

    OCTAVO_NATIVE=/path/liboctavo.so   load this one (a development build)
    OCTAVO_NATIVE=off                  load none
    OCTAVO_ISA=avx2                    use a lower instruction set than the best that the CPU has
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import OctavoError

ABI = 2  # OCTAVO_ABI in src/octavo.h; both are raised when a struct or an exported function changes
ISAS = ("avx512_bf16", "avx512", "avx2", "portable")
BESIDE = Path(__file__).with_name("liboctavo.so")
REMEDY = 'run "make native" in a checkout or reinstall octavo'

_log = logging.getLogger(__name__)


class NativeError(OctavoError):
    """The library is there and cannot be used as asked: which one, why, what to do."""


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded library. `calls.py` declares the argument types of its functions on `handle`."""

    path: Path
    handle: ctypes.CDLL

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        name: bytes = self.handle.octavo_isa()
        return name.decode()

    def use_isa(self, name: str) -> None:
        """Use the kernels compiled for this instruction set from now on. Raises NativeError if that cannot be."""
        if self.handle.octavo_use_isa(name.encode()) != 0:
            raise NativeError(
                f"the instruction set {name} (OCTAVO_ISA) is not in {self.path} or not in this CPU; "
                f"unset it to use {self.isa}, or choose another of {', '.join(ISAS)}."
            )


@functools.cache
def load() -> Library | None:
    """The library, or None if it was not built or is switched off; being absent is said once.

    Raises NativeError if it is there and cannot be used, or an instruction set was asked for that it cannot give.
    """
    asked = os.environ.get("OCTAVO_NATIVE", "")
    if asked == "off":
        return None
    path = Path(asked).resolve() if asked else BESIDE
    if not asked and not path.is_file():
        _log.warning(
            "octavo was installed without its compiled kernels, so the slower reference backend is used; "
            "install g++ and reinstall octavo, or install a wheel, to get the fast one."
        )
        return None
    library = _open(path)
    if isa := os.environ.get("OCTAVO_ISA"):
        library.use_isa(isa)
    return library


def _open(path: Path) -> Library:
    _import_torch()
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"cannot load {path}: {error}; {REMEDY}, or set OCTAVO_NATIVE=off.") from error
    _check_abi(path, handle)
    handle.octavo_isa.argtypes, handle.octavo_isa.restype = [], ctypes.c_char_p
    handle.octavo_use_isa.argtypes, handle.octavo_use_isa.restype = [ctypes.c_char_p], ctypes.c_int
    return Library(path, handle)


def _import_torch() -> None:
    """Let torch bring the OpenMP runtime; without torch there is nothing to share it with."""
    if importlib.util.find_spec("torch") is not None:
        import torch  # noqa: F401


def _check_abi(path: Path, handle: ctypes.CDLL) -> None:
    """Refuse a library of another version: calling it with this version's arguments would corrupt memory."""
    if not hasattr(handle, "octavo_abi"):
        raise NativeError(f"{path} is no Octavo library (it has no octavo_abi); {REMEDY}.")
    handle.octavo_abi.argtypes, handle.octavo_abi.restype = [], ctypes.c_int
    if (found := handle.octavo_abi()) != ABI:
        raise NativeError(f"{path} has ABI version {found}, this Octavo needs {ABI}; {REMEDY}.")
