"""What the machine is and what it can do at this moment: read bandwidth, matrix products, and who else computes."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Protocol

import torch

from octavo import __version__
from octavo.benching.roofline import Limits
from octavo.comparing import processor
from octavo.native import calls
from octavo.native.model import read_bandwidth

SQUARE = 2048  # rows and columns of the matrices that are multiplied
ROUNDS = 3
MEGABYTES = 512  # read by torch where the native code is not there
PACKAGES = ("torch", "transformers", "numpy")


@dataclass(frozen=True, slots=True)
class Machine:
    """`isa`: instruction set of the native code; "" without it. `bandwidth_by`, `flops_by`: how `Limits` are found."""

    device: str
    cores: int
    threads: int
    isa: str
    memory_bytes: int
    system: str
    python: str
    packages: dict[str, str]
    bandwidth_by: str
    flops_by: str

    def to_json(self) -> dict[str, object]:
        return asdict(self)


class Probe(Protocol):
    """Asks the machine what it can do; takes about a second."""

    bandwidth_by: str
    flops_by: str

    def __call__(self) -> Limits: ...


class MachineProbe:
    """The real thing: all threads read memory, and torch multiplies two big squares."""

    def __init__(self, device: torch.device) -> None:
        """Finds out which matrix product is the fastest here, which also warms it up."""
        self._device = device
        kinds = (torch.bfloat16, torch.float32)
        self._kind = min(kinds, key=lambda kind: _best(_product(kind, device), device, 2))
        native = device.type == "cpu" and calls.kernels() is not None
        self._read: Callable[[], float] = read_bandwidth if native else self._read_by_torch
        self.bandwidth_by = f"all threads read {MEGABYTES} MiB once ({'native code' if native else 'torch sum'})"
        self.flops_by = f"torch {str(self._kind).removeprefix('torch.')} product of two {SQUARE} x {SQUARE} matrices"

    def __call__(self) -> Limits:
        seconds = _median(_product(self._kind, self._device), self._device)
        return Limits(self._read(), 2 * SQUARE**3 / seconds)

    def _read_by_torch(self) -> float:
        data = torch.ones(MEGABYTES << 18, device=self._device)
        return data.nbytes / _median(data.sum, self._device)


def _product(kind: torch.dtype, device: torch.device) -> Callable[[], object]:
    one = torch.ones(SQUARE, SQUARE, dtype=kind, device=device)
    return lambda: one @ one


def _times(work: Callable[[], object], device: torch.device, rounds: int) -> list[float]:
    out = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        out.append(time.perf_counter() - begin)
    return out


def _median(work: Callable[[], object], device: torch.device) -> float:
    return median(_times(work, device, ROUNDS))


def _best(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    return min(_times(work, device, rounds))


def machine(probe: Probe, device: torch.device) -> Machine:
    """A description of where this runs."""
    library = calls.kernels()
    return Machine(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        cores=os.cpu_count() or 0,
        threads=torch.get_num_threads(),
        isa="" if library is None else library.isa,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=platform.platform(),
        python=platform.python_version(),
        packages={"octavo": __version__} | {name: found for name in PACKAGES if (found := _version(name))},
        bandwidth_by=probe.bandwidth_by,
        flops_by=probe.flops_by,
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@dataclass(frozen=True, slots=True)
class CpuTime:
    """Seconds of all cores since the machine started, those in which they worked, and those of this process."""

    total: float
    busy: float
    own: float

    @classmethod
    def now(cls) -> CpuTime | None:
        """None where there is no /proc/stat."""
        try:
            line = Path("/proc/stat").read_text().split("\n", 1)[0]
        except OSError:
            return None
        ticks = os.sysconf("SC_CLK_TCK")
        values = [int(value) / ticks for value in line.split()[1:9]]  # guest time is a part of user time
        used = os.times()
        return cls(sum(values), sum(values) - values[3] - values[4], used.user + used.system)

    def foreign_share(self, later: CpuTime | None) -> float | None:
        """Share of the machine's CPU time that others took until `later`; None if it cannot be told."""
        if later is None or later.total <= self.total:
            return None
        others = later.busy - self.busy - (later.own - self.own)
        return min(1.0, max(0.0, others / (later.total - self.total)))
