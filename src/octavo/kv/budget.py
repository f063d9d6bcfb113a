"""From device bytes to KV bytes, blocks, lengths and concurrency; and the exact way back.

    kv = utilization x device total - weights - activations - workspace - graphs

Everything is counted on one tensor-parallel rank, in whole bytes. What is not known is an interval (`Amount`):
the low end of the KV memory takes the high end of every cost. Blocks are counted per layer group, so a windowed
group holds at most the blocks of `window - 1 + chunk` tokens, where `chunk` is what one step may compute of a
sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from octavo.errors import OctavoError
from octavo.kv.spec import KVSpec, LayerGroup, LayerKind

GIB = 1 << 30


class BudgetError(OctavoError, ValueError):
    """A memory plan that cannot work: what is needed, what there is, the shortfall in bytes, the remedies."""


@dataclass(frozen=True, slots=True)
class Amount:
    """Bytes that lie between `low` and `high`, and where the numbers come from."""

    low: int
    high: int
    source: str

    @classmethod
    def exactly(cls, value: int, source: str) -> Amount:
        return cls(value, value, source)


@dataclass(frozen=True, slots=True)
class Pool:
    """The KV memory of one rank, and what fits into it.

    kv_bytes    bytes for KV and state
    block_size  tokens in a block
    chunk       most tokens of one sequence that a step computes (the step's token budget)
    """

    spec: KVSpec
    kv_bytes: int
    block_size: int = 16
    chunk: int = 512

    def __post_init__(self) -> None:
        for name in ("block_size", "chunk"):
            if getattr(self, name) < 1:
                raise BudgetError(f"{name} is {getattr(self, name)}; it must be at least 1 token.")

    def page_bytes(self, group: LayerGroup) -> int:
        """Bytes of one block of `group`."""
        return self.block_size * group.bytes_per_token

    def group_blocks(self, group: LayerGroup, tokens: int) -> int:
        """Most blocks a sequence that grows to `tokens` ever holds in `group`.

        A step that computes `chunk` tokens reads `window - 1` earlier ones; the run may start anywhere in a
        block.
        """
        if group.kind is LayerKind.STATE:
            return 0
        blocks = -(-tokens // self.block_size)
        if group.window is None:
            return blocks
        span = group.window - 1 + self.chunk
        return min(blocks, -(-(span - 1) // self.block_size) + 1)

    def sequence_bytes(self, tokens: int) -> int:
        """Most bytes a sequence that grows to `tokens` ever holds: whole blocks, and its state."""
        pages = sum(self.group_blocks(g, tokens) * self.page_bytes(g) for g in self.spec.groups)
        return pages + self.spec.fixed_bytes

    def users(self, tokens: int) -> int:
        """How many sequences of `tokens` run together."""
        return self.kv_bytes // self.sequence_bytes(tokens)

    def concurrency(self, tokens: int) -> float:
        """`users` before rounding down, as engines print it at start: whole blocks where all blocks are alike."""
        if self.blocks is not None:
            return self.blocks / self.group_blocks(self.spec.groups[0], tokens)
        return self.kv_bytes / self.sequence_bytes(tokens)

    def longest(self) -> int | None:
        """Longest sequence that fits alone, a multiple of the block; None when nothing stops its growth."""
        if not self.spec.growing:
            cap = max((self._cap_blocks(g) for g in self.spec.groups), default=0)
            if self.sequence_bytes(max(1, cap) * self.block_size) <= self.kv_bytes:
                return None
            most = cap
        else:
            most = self.kv_bytes // (self.spec.growing * self.block_size)
        least = 0
        while least < most:
            middle = (least + most + 1) // 2
            if self.sequence_bytes(middle * self.block_size) <= self.kv_bytes:
                least = middle
            else:
                most = middle - 1
        return least * self.block_size

    def _cap_blocks(self, group: LayerGroup) -> int:
        """Blocks at which a windowed group stops growing."""
        return 0 if group.window is None else -(-(group.window - 1 + self.chunk) // self.block_size) + 1

    @property
    def blocks(self) -> int | None:
        """Number of blocks, for a model with a single KV group and no state; None otherwise."""
        if len(self.spec.groups) != 1 or self.spec.fixed_bytes:
            return None
        return self.kv_bytes // self.page_bytes(self.spec.groups[0])

    @property
    def slots(self) -> int | None:
        """Token slots in `blocks`."""
        return None if self.blocks is None else self.blocks * self.block_size


def kv_bytes_for(spec: KVSpec, users: int, tokens: int, *, block_size: int = 16, chunk: int = 512) -> int:
    """The inverse of `Pool.users`: the least KV bytes in which `users` sequences of `tokens` run together."""
    for name, value in (("users", users), ("tokens", tokens)):
        if value < 1:
            raise BudgetError(f"{name} is {value}; it must be at least 1.")
    return users * Pool(spec, 0, block_size, chunk).sequence_bytes(tokens)


def require_length(pool: Pool, tokens: int) -> None:
    """Raise BudgetError, with the shortfall and both remedies, if one sequence of `tokens` does not fit."""
    needed = pool.sequence_bytes(tokens)
    if needed <= pool.kv_bytes:
        return
    longest = pool.longest()
    shorter = f"lower the maximum length to {longest}" if longest else "no length fits, not even one block"
    raise BudgetError(
        f"A sequence of {tokens} tokens needs {needed} bytes of KV memory, there are {pool.kv_bytes}: "
        f"{needed - pool.kv_bytes} bytes short. Remedies: {shorter}; or give {needed} bytes of KV memory (more "
        "memory or utilization, a smaller KV dtype or weight dtype, a larger tp)."
    )


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """One rank's memory. `utilization` is the share of the device the engine may use.

    graphs  CUDA graphs, as far as the engine counts them within its share
    logits  of the activations, the bytes of the sampler's logits (vocabulary x max_num_seqs)
    """

    total: Amount
    utilization: Fraction
    weights: Amount
    activations: Amount
    workspace: Amount
    graphs: Amount = Amount(0, 0, "none within the utilization")
    logits: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.utilization <= 1:
            raise BudgetError(f"utilization is {float(self.utilization):g}; it must be in (0, 1].")

    @property
    def costs(self) -> Sequence[Amount]:
        return (self.weights, self.activations, self.workspace, self.graphs)

    def kv(self) -> Amount:
        """What is left for KV. Raises BudgetError with the shortfall when nothing is."""
        usable = Amount(self._share(self.total.low), self._share(self.total.high), self.total.source)
        if self.weights.low > usable.high:
            short = self.weights.low - usable.high
            raise BudgetError(
                f"The weights need {self.weights.low} bytes ({self.weights.source}), the device gives "
                f"{usable.high} ({float(self.utilization):g} of {self.total.high}): {short} bytes short. "
                f"Remedies: a device of at least {self._device(self.weights.low)} bytes or more utilization; or a "
                "larger tp or a smaller weight dtype."
            )
        low = usable.low - sum(cost.high for cost in self.costs)
        high = usable.high - sum(cost.low for cost in self.costs)
        if high <= 0:
            needed = sum(cost.low for cost in self.costs)
            raise BudgetError(
                f"Weights, activations and workspace need at least {needed} bytes, the device gives {usable.high} "
                f"({float(self.utilization):g} of {self.total.high}): {1 - high} bytes short of a first byte of KV. "
                f"Remedies: a device of more than {self._device(needed)} bytes or more utilization; or a larger tp, a "
                "smaller weight dtype, or fewer sequences or tokens in a step."
            )
        return Amount(low, high, "utilization x total - weights - activations - workspace - graphs")

    def device_for(self, kv_bytes: int) -> Amount:
        """The inverse of `kv`: the smallest device total that leaves `kv_bytes`, at low and at high costs."""
        low = kv_bytes + sum(cost.low for cost in self.costs)
        high = kv_bytes + sum(cost.high for cost in self.costs)
        source = "(kv + weights + activations + workspace + graphs) / utilization"
        return Amount(self._device(low), self._device(high), source)

    def _share(self, total: int) -> int:
        return total * self.utilization.numerator // self.utilization.denominator

    def _device(self, needed: int) -> int:
        return -(-needed * self.utilization.denominator // self.utilization.numerator)


def activation_allowance(
    *, hidden: int, mlp_width: int, vocab: int, tp: int, max_batched_tokens: int, max_num_seqs: int
) -> Amount:
    """Peak of activations: an estimate, to be replaced by a measured profile.

    `max_batched_tokens x (3 x mlp_width / tp + 4 x hidden) x 2 B + max_num_seqs x vocab x 12 B`; the second
    part is the sampler's logits. The high end adds 0.7 GiB, the constant left by a fit to vLLM 0.19's measured peaks.
    """
    step = max_batched_tokens * (3 * -(-mlp_width // tp) + 4 * hidden) * 2
    logits = max_num_seqs * vocab * 12
    source = (
        f"estimate: {max_batched_tokens} tokens x (3 x {mlp_width}/{tp} + 4 x {hidden}) x 2 B + "
        f"{max_num_seqs} sequences x {vocab} logits x 12 B, up to 0.7 GiB more"
    )
    return Amount(step + logits, step + logits + 7 * GIB // 10, source)


def workspace_allowance(tp: int) -> Amount:
    """Memory outside the allocator (context, NCCL buffers) and CUDA graphs: an interval of what engines measured.

    vLLM 0.11 to 0.19 on H100: non-torch 0.13 to 0.27 GiB alone and 0.54 to 2.10 GiB with tensor parallelism;
    graphs up to 1.03 GiB, and none in eager mode.
    """
    low, high = (13, 27) if tp == 1 else (54, 210)
    source = "estimate: driver context, buffers and CUDA graphs (measured range of vLLM on H100)"
    return Amount(low * GIB // 100, (high + 103) * GIB // 100, source)
