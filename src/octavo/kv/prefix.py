"""Identity of KV blocks: a typed, salted hash chain over tokens, and why a prompt missed.

A key's digest is BLAKE2b-256 over (digest of the block before, tokens); before the first block stands the digest of the
request's identity (salt, adapter, media ...). A hit also compares the identity and the tokens themselves along the
chain, so that even a broken hash function cannot return another prompt's KV.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

Digest = Callable[[bytes], bytes]


def blake2b_256(data: bytes) -> bytes:
    return blake2b(data, digest_size=32).digest()


class BlockKey(NamedTuple):
    """Content of one full block, under a digest that stands for everything before it, too. `identity`: what the tokens
    are computed under, in the first block of a chain alone."""

    digest: bytes
    tokens: tuple[int, ...]
    identity: bytes = b""


#: A trace without tokens brings ids of its own, exact and hashed by nobody: equal ids mean equal prefixes.
Key = BlockKey | int


def digest_of(key: Key) -> Hashable:
    """What a block is looked up by; only the key itself tells whether it is the one."""
    return key.digest if isinstance(key, BlockKey) else key


def identity_of(key: Key) -> bytes:
    """What a chain with this first key is computed under."""
    return key.identity if isinstance(key, BlockKey) else b""


def tokens_of(key: Key) -> tuple[int, ...]:
    return key.tokens if isinstance(key, BlockKey) else ()


def encode_identity(pairs: Iterable[tuple[str, str]], *fixed: str) -> bytes:
    """Injective encoding: every string is length-prefixed, so no two identities meet.

    `fixed` holds what belongs to the engine and not to the request (KV dtype, model name).
    """
    parts: list[bytes] = []
    for text in (*fixed, *(part for pair in pairs for part in pair)):
        data = text.encode("utf-8", "surrogatepass")
        parts.append(len(data).to_bytes(8, "little") + data)
    return len(fixed).to_bytes(8, "little") + b"".join(parts)


class KeyChain:
    """Keys of the full blocks of one growing token list; extended on demand, never recomputed."""

    __slots__ = ("_digest", "_keys", "_tokens", "block_size", "identity")

    def __init__(self, tokens: list[int], block_size: int, identity: bytes, digest: Digest = blake2b_256) -> None:
        self._tokens = tokens
        self.block_size = block_size
        self.identity = identity
        self._digest = digest
        self._keys: list[Key] = []

    def upto(self, tokens: int) -> Sequence[Key]:
        """Keys of all full blocks within the first `tokens` tokens."""
        want = tokens // self.block_size
        keys = self._keys
        if len(keys) < want:
            self._grow(want)
        return keys if len(keys) == want else keys[:want]

    def between(self, start: int, end: int) -> Sequence[Key]:
        """Keys of the full blocks from token `start`, where one begins, to token `end`."""
        if len(self._keys) < end // self.block_size:
            self._grow(end // self.block_size)
        return self._keys[start // self.block_size : end // self.block_size]

    def _grow(self, want: int) -> None:
        """Make `_keys` so long."""
        keys, size = self._keys, self.block_size
        last = keys[-1] if keys else None
        before = last.digest if isinstance(last, BlockKey) else self._digest(self.identity)
        for at in range(len(keys), want):
            content = tuple(self._tokens[at * size : (at + 1) * size])
            before = self._digest(before + array("q", content).tobytes())
            keys.append(BlockKey(before, content, b"" if at else self.identity))

    @property
    def length(self) -> int:
        """Tokens known so far."""
        return len(self._tokens)

    def parts(self) -> tuple[Sequence[Key], tuple[int, ...]]:
        """Keys of all full blocks, and the tokens behind the last of them."""
        keys = self.upto(len(self._tokens))
        return keys, tuple(self._tokens[len(keys) * self.block_size :])

    def fork(self, tokens: list[int]) -> KeyChain:
        """A chain for a child that shares the tokens so far and grows on its own."""
        child = copy(self)
        child._tokens = tokens
        child._keys = list(self._keys)
        return child


@dataclass(frozen=True, slots=True)
class Miss:
    """Why the prefix cache did not serve more of a prompt.

    `matched` tokens were served as whole blocks. After them, the most similar one of the latest cached continuations
    shares `partial` further tokens (less than a block) and then has `there` where this prompt has `here`, at
    `position`, which is None when nothing cached continues from there at all.
    """

    matched: int
    partial: int = 0
    position: int | None = None
    here: int | None = None
    there: int | None = None


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading elements that are equal."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
