"""How long OpenMP threads spin at a barrier before they sleep; to be settled before torch is imported.

By default GNU OpenMP spins for milliseconds. A decode step has hundreds of short parallel regions, and if another
process takes one of the cores, every region waits for that process's time slice: measured on two cores with one busy
neighbour, a step of the demo model took 3,628 ms instead of 48. With a short spin it takes 157 ms beside the neighbour
and no longer than before alone (benchmarks/NOTES.md).
"""

from __future__ import annotations

import os
import sys

SPIN_COUNT = "5000"


def spin_shortly() -> None:
    """Make OpenMP threads sleep soon, unless the user has chosen otherwise or torch has read the setting already."""
    chosen = "OMP_WAIT_POLICY" in os.environ or "GOMP_SPINCOUNT" in os.environ
    if not chosen and "torch" not in sys.modules:
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
