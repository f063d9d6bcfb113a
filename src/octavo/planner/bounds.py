"""What no scheduler and no cache could beat: bounds on concurrency and on prefix hits, computed from the trace alone.

Concurrency. A request with prompt p and output o runs o steps (the prompt counted as one of them) and holds p + j - 1
token states in step j, of which those that an unlimited prefix cache knows are left out, as others may hold them, too.
Summed over its steps that is its area. No step holds more than the pool, so n steps hold at most n * pool, and the
mean number of running requests, sum(o) / n, is at most pool * sum(o) / sum(area): the pool over the *length-biased*
mean of what a request holds. It holds for every order, with or without knowledge of lengths, in which requests that
run advance by a token in every step and are not preempted; the mean is over steps. Chunked prompts (which hold less
than p for a while) and preemption are the two ways past it, and both are paid for in steps.

Hits. `ideal_hits` is an unlimited cache. `belady_hits` is Belady's MIN (Belady 1966: evict what is used again last)
with the whole pool as cache. What running requests hold is left out, a block may be evicted although later blocks of
its prefix stay, and blocks may bypass the cache: each only raises the figure, so it bounds every real cache of that
size. Memory: the ideal needs a number per distinct prefix id, MIN 12 to 24 bytes per id of every request.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Iterator

from octavo.planner.deployment import Resolved
from octavo.planner.outcome import Bounds
from octavo.planner.trace_keys import covered
from octavo.planner.traces.api import TraceRequest

NEVER = (1 << 62) - 1  # "asked for" then: no more


class BoundsMeter:
    """Takes a trace request by request, in order of arrival.

    slots    token states that one layer group's pages could hold if all pages were that group's (pages * block size)
    longest  requests above this many tokens, prompt and answer together, are refused by every scheduler
    windows  window of each layer group in tokens, None for full attention
    belady   whether to keep the reference string for MIN
    """

    def __init__(
        self,
        slots: int,
        max_num_seqs: int,
        block_size: int,
        *,
        longest: int | None = None,
        windows: tuple[int | None, ...] = (None,),
        sharing: bool = True,
        belady: bool = True,
    ) -> None:
        self._slots = slots
        self._most = max_num_seqs
        self._longest = longest
        self._windows = windows
        self._cache = PrefixReferences(block_size, keep=belady) if sharing else None
        self._block_size = block_size
        self._area = self._steps = self._requests = 0
        self._optimal: int | None = None
        self._small: list[int] = []  # the smallest prompts, negated: a heap with the largest of them first
        self._small_sum = 0

    @classmethod
    def of(cls, resolved: Resolved, *, belady: bool = True) -> BoundsMeter:
        """For the pool and the limits of a deployment."""
        deployment = resolved.deployment
        return cls(
            resolved.pages * deployment.block_size,
            resolved.scheduler.max_num_seqs,
            deployment.block_size,
            windows=resolved.windows,
            sharing=deployment.prefix_caching,
            belady=belady,
        )

    def add(self, request: TraceRequest) -> None:
        """Count one request."""
        prompt, steps = request.prompt_tokens, max(1, request.output_tokens)
        if self._longest is not None and prompt + steps > self._longest:
            return
        shared = self._cache.add(request) if self._cache is not None else 0
        self._optimal = None
        self._requests += 1
        self._steps += steps
        self._area += sum(_area(prompt, steps, shared, window) for window in self._windows)
        self._offer(sum(_area(prompt, 1, shared, window) for window in self._windows))

    def _offer(self, size: int) -> None:
        """Keep the most prompts that fit the pool together: the smallest ones."""
        heapq.heappush(self._small, -size)
        self._small_sum += size
        while self._small_sum > self._slots or len(self._small) > self._most:
            self._small_sum += heapq.heappop(self._small)

    def result(self, present: float | None = None) -> Bounds:
        """The bounds for what was added. `present`: mean number of requests running or waiting in a replay; with it the
        bound is for any scheduler that faces this queue (the mean of a minimum is at most the minimum of the means).
        """
        most = float(min(self._most, self._requests))
        mean = min(most, self._slots * self._steps / self._area) if self._area else most
        if present is not None:
            mean = min(mean, present)
        cache = self._cache
        if cache is None or not cache.hashed:
            return Bounds(mean, len(self._small))
        if cache.kept and self._optimal is None:
            self._optimal = cache.optimal(self._slots // self._block_size // len(self._windows))
        return Bounds(mean, len(self._small), cache.hits, self._optimal)


def bounds_of(requests: Iterable[TraceRequest], meter: BoundsMeter, present: float | None = None) -> Bounds:
    """The bounds of a whole trace."""
    for request in requests:
        meter.add(request)
    return meter.result(present)


def _area(prompt: int, steps: int, shared: int, window: int | None) -> int:
    """Token states held, summed over the steps: sum of min(prompt + j, window) - shared for j < steps, at least the one
    token that is computed."""
    growing = steps if window is None else min(steps, max(0, window - prompt))
    held = growing * prompt + growing * (growing - 1) // 2
    if window is not None:
        held += (steps - growing) * window
    return max(steps, held - steps * shared)


class PrefixReferences:
    """The block references of a trace: which full blocks of the engine's size each prompt could take from a cache.

    A trace id covers `hash_block` tokens; the blocks of the engine that *end* in it share its fate, whatever the two
    sizes are. Only the last of them may be asked for less often: a prompt that ends with it has to compute it for its
    first token. So each id stands for two units: its blocks but the last, and the last.
    """

    def __init__(self, block_size: int, *, keep: bool = True) -> None:
        self.hits = 0  # tokens
        self.hashed = False
        self.kept = keep
        self._block_size = block_size
        self._numbers: dict[int, int] = {}  # trace id -> dense number
        self._computed: list[int] = []  # number -> most blocks that ended in it
        self._units = array("i")  # the reference string: 2 * number, 2 * number + 1
        self._wanted = array("i")  # blocks of the unit that the prompt may take
        self._blocks = array("i")  # blocks of the unit that are there when the request has ended

    def add(self, request: TraceRequest) -> int:
        """Count a prompt; returns the tokens that an unlimited cache serves of it. One token is always computed."""
        if not request.hashes:
            return 0
        self.hashed = True
        served, intact = 0, True
        for key, wanted, ends in self._ends(request):
            number = self._numbers.setdefault(key, len(self._computed))
            if number == len(self._computed):
                self._computed.append(0)
            found = min(wanted, self._computed[number]) if intact else 0
            served += found
            intact = intact and found == wanted
            self._computed[number] = max(ends, self._computed[number])
            if self.kept:
                self._keep(2 * number, min(wanted, ends - 1), ends - 1)
                self._keep(2 * number + 1, wanted - min(wanted, ends - 1), min(ends, 1))
        self.hits += served * self._block_size
        return served * self._block_size

    def _ends(self, request: TraceRequest) -> Iterator[tuple[int, int, int]]:
        """Of each id: (id, blocks ending in it that the prompt may take, blocks ending in it)."""
        size, unit = self._block_size, request.hash_block
        takeable = (request.prompt_tokens - 1) // size
        full = covered(request) // size
        before = 0
        for n, key in enumerate(request.hashes, 1):
            end = min(full, n * unit // size)
            yield key, max(0, min(takeable, end) - before), end - before
            before = end

    def _keep(self, unit: int, wanted: int, blocks: int) -> None:
        if blocks > 0:
            self._units.append(unit)
            self._wanted.append(wanted)
            self._blocks.append(blocks)

    def optimal(self, capacity: int) -> int:
        """Tokens served by MIN with `capacity` blocks. Blocks of one unit are evicted one by one, so this is MIN over
        blocks of equal size."""
        following = self._next_uses()
        held: dict[int, int] = {}  # unit -> its blocks in the cache
        due: dict[int, int] = {}  # unit -> when it is asked for next
        farthest: list[tuple[int, int]] = []  # heap of (-due, unit); entries that are out of date are passed over
        used = served = 0
        for at, (unit, wanted, blocks) in enumerate(zip(self._units, self._wanted, self._blocks, strict=True)):
            have = held.get(unit, 0)
            served += min(wanted, have)
            held[unit] = max(have, blocks)
            used += held[unit] - have
            due[unit] = following[at]
            heapq.heappush(farthest, (-following[at], unit))
            while used > capacity:
                used -= _evict(farthest, held, due, used - capacity)
        return served * self._block_size

    def _next_uses(self) -> array[int]:
        """For each reference, when its unit is next *asked for* (being put in again is no use)."""
        following = array("q", bytes(8 * len(self._units)))
        upcoming: dict[int, int] = {}
        for at in range(len(following) - 1, -1, -1):
            following[at] = upcoming.get(self._units[at], NEVER)
            if self._wanted[at]:
                upcoming[self._units[at]] = at
        return following


def _evict(farthest: list[tuple[int, int]], held: dict[int, int], due: dict[int, int], excess: int) -> int:
    """Give up to `excess` blocks of the unit that is asked for last; returns how many."""
    when, unit = farthest[0]
    if due.get(unit) != -when:
        heapq.heappop(farthest)
        return 0
    gone = min(excess, held[unit])
    held[unit] -= gone
    if not held[unit]:
        heapq.heappop(farthest)
        del held[unit], due[unit]
    return gone
