"""How fast this machine is at this moment: read bandwidth (probe.cpp) and bf16 matrix products (torch, oneDNN).

On a virtual machine both move by a factor of two within minutes, so run.py takes a probe around every measurement.

    python probe.py LIBRARY      prints {"read_gb_s": ..., "gemm_gflop_s": ...}; LIBRARY is compiled if missing
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

BUFFER_BYTES = 1 << 28  # far beyond the last cache
SIDE = 1024


def compile_library(library: Path) -> None:
    source = Path(__file__).with_name("probe.cpp")
    if library.exists() and library.stat().st_mtime >= source.stat().st_mtime:
        return
    library.parent.mkdir(parents=True, exist_ok=True)
    flags = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, str(source), "-o", str(library)], check=True)


def seconds(call: Callable[[], object], repeats: int = 7) -> float:
    """Median of several calls after one that does not count."""
    call()
    times = []
    for _ in range(repeats):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return median(times)


def probe(library: Path) -> dict[str, float]:
    import torch  # before the library, so that both use one OpenMP runtime and one pool of threads

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    read_all = ctypes.CDLL(str(library)).read_all
    read_all.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    read_all.restype = ctypes.c_int64
    buffer = torch.ones(BUFFER_BYTES, dtype=torch.uint8)
    matrix = torch.randn(SIDE, SIDE, dtype=torch.bfloat16)
    return dict(
        read_gb_s=round(BUFFER_BYTES / seconds(lambda: read_all(buffer.data_ptr(), BUFFER_BYTES)) / 1e9, 1),
        gemm_gflop_s=round(2 * SIDE**3 / seconds(lambda: matrix @ matrix) / 1e9, 1),
    )


def main() -> None:
    library = Path(sys.argv[1])
    compile_library(library)
    print(json.dumps(probe(library)))


if __name__ == "__main__":
    main()
