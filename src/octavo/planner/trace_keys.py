"""Prefix identity of recorded requests: block keys made from a trace's hashes instead of from tokens."""

from __future__ import annotations

from octavo.kv.prefix import KeyChain
from octavo.planner.traces.api import TraceRequest

_OWN = 1 << 40  # blocks that one request may have of its own; ids of different requests lie that far apart


def covered(request: TraceRequest) -> int:
    """How many leading tokens (of prompt and answer) the request's hashes speak of. More ids than the prompt has
    blocks cover the answer as well; else the last one may stand for a part-filled block of the prompt."""
    length, block = len(request.hashes), request.hash_block
    if length * block >= request.prompt_tokens + block:
        return min(length * block, request.prompt_tokens + request.output_tokens)
    return min(length * block, request.prompt_tokens)


class TraceChain(KeyChain):
    """The chain of one recorded request. The key of a block is (id of the trace's block that holds the block's last
    token, offset of that token in it): as an id stands for everything before it too, equal keys mean equal prefixes,
    whatever the two block sizes are. Blocks that the hashes do not cover are the request's own."""

    __slots__ = ("_covered", "_hash_block", "_hashes", "_own")

    def __init__(self, tokens: list[int], block_size: int, request: TraceRequest, ordinal: int) -> None:
        self._tokens = tokens
        self.block_size = block_size
        self.identity = b""
        self._keys = []
        self._hashes = request.hashes
        self._hash_block = request.hash_block
        self._covered = covered(request) // block_size  # blocks
        self._own = -(ordinal + 1) * _OWN

    def _grow(self, want: int) -> None:
        keys = self._keys
        if self._covered and not keys:
            keys += self._shared()
        keys += range(self._own + len(keys), self._own + want)

    def _shared(self) -> list[int]:
        """The keys that the hashes cover."""
        size, block = self.block_size, self._hash_block
        if not block % size:  # nearly always, and then several times as fast
            whole = self._hashes[: -(-self._covered * size // block)]
            offsets = range(size - 1, block, size)
            return [hashed * block + offset for hashed in whole for offset in offsets][: self._covered]
        last = range(size - 1, self._covered * size, size)  # tokens of the blocks
        return [self._hashes[at // block] * block + at % block for at in last]
