"""How many prompt tokens a step may hold so that running streams get their next token in time.

The time of a step is modelled as a + b × prompt tokens + c × decode tokens, fitted to the latest steps again and again:
it follows a device that slows down and prompts that grow. A step that took unusually long (a page fault, another
process) hardly counts: the fit weighs each step by how near it is to the others.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

STEPS = 64  # what the fit looks at
OFTEN = 4  # a full window is fitted anew every so many steps
ROUNDS = 3  # of weighing outliers down
AIM = 0.95  # of the target
USUAL = 0.95  # share of recent steps whose excess over the fit is kept free as a margin


class Pacer:
    """Give it every step that ran; ask it before each."""

    def __init__(self, target: float) -> None:
        """`target`: seconds that a step with decodes may take, which is what their streams wait between two tokens."""
        self.target = target
        self._counts = np.zeros((STEPS, 3))  # 1, prompt tokens, decode tokens
        self._seconds = np.zeros(STEPS)
        self._learned = 0
        self._fitted = 0
        self._terms = (0.0, 0.0, 0.0)
        self._margin = 0.0

    def learn(self, prompt: int, decode: int, seconds: float) -> None:
        """A step computed so many tokens in so many seconds."""
        at = self._learned % STEPS
        self._counts[at] = 1, prompt, decode
        self._seconds[at] = seconds
        self._learned += 1

    def budget(self, decode: int) -> int | None:
        """Most prompt tokens beside `decode` tokens of running streams; None as long as nothing is known."""
        if not self._learned:
            return None
        if self._learned - self._fitted >= (1 if self._learned < STEPS else OFTEN):
            known = min(self._learned, STEPS)
            self._terms, self._margin = _fit(self._counts[:known], self._seconds[:known])
            self._fitted = self._learned
        a, b, c = self._terms
        left = AIM * self.target - self._margin - a - c * decode
        return max(0, int(min(left / b, 1e9))) if b > 0 else 0


def _fit(counts: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[tuple[float, float, float], float]:
    """(a, b, c), none of them negative, and by how much usual steps exceed the fit."""
    weights = np.ones(len(seconds))
    for _ in range(ROUNDS):
        terms = _least_squares(counts, seconds, weights)
        excess = seconds - counts @ terms
        scale = 3 * float(np.sort(np.abs(excess))[len(excess) // 2]) + 1e-6
        weights = 1 / np.maximum(1, np.abs(excess) / scale)
    usual = np.sort(excess[np.abs(excess) <= 3 * scale])  # beyond it is no noise that a margin could cover
    margin = float(usual[int(USUAL * (len(usual) - 1))]) if len(usual) else 0.0
    a, b, c = terms.tolist()
    return (a, b, c), max(0.0, margin)


def _least_squares(
    counts: NDArray[np.float64], seconds: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Terms that would be negative are left out, the most negative one first. What the steps cannot tell apart goes to
    the largest count, which the touch of ridge sees to."""
    weighted = counts * weights[:, None]
    square, product = weighted.T @ counts, weighted.T @ seconds
    square.flat[::4] += 1e-9 * square.trace()
    used = [0, 1, 2]
    terms = np.zeros(3)
    while used:
        found = np.linalg.solve(square[np.ix_(used, used)], product[used])
        if found.min() >= 0:
            terms[used] = found
            break
        del used[int(found.argmin())]
    return terms
