"""Identity of KV blocks: a typed, salted hash chain over tokens, the index from chain to block, and why a prompt
missed.

A key's digest is BLAKE2b-256 over (parent digest, tokens); the root's digest is over the request's identity
(salt, adapter, media ...). A hit also compares the tokens themselves along the chain, so that even a broken hash
function cannot return another prompt's KV.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

Digest = Callable[[bytes], bytes]


def blake2b_256(data: bytes) -> bytes:
    return blake2b(data, digest_size=32).digest()


class BlockKey:
    """Content of one full block and of everything before it. Compared by `same`, never by digest alone."""

    __slots__ = ("digest", "parent", "tokens")

    def __init__(self, digest: bytes, tokens: tuple[int, ...], parent: BlockKey | None, /) -> None:
        self.digest = digest
        self.tokens = tokens
        self.parent = parent

    def same(self, other: BlockKey) -> bool:
        """Whether both stand for the same tokens under the same identity."""
        a: BlockKey | None = self
        b: BlockKey | None = other
        while a is not b:  # chains that share an ancestor stop at it
            if a is None or b is None or a.digest != b.digest or a.tokens != b.tokens:
                return False
            if a.parent is None or b.parent is None:
                return a.parent is b.parent and isinstance(a, RootKey) and a.same_identity(b)
            a, b = a.parent, b.parent
        return True


class RootKey(BlockKey):
    """Where a chain starts: the identity under which the tokens are computed."""

    __slots__ = ("identity",)

    def __init__(self, identity: bytes, digest: Digest) -> None:
        super().__init__(digest(identity), (), None)
        self.identity = identity

    def same_identity(self, other: BlockKey) -> bool:
        return isinstance(other, RootKey) and self.identity == other.identity


def encode_identity(pairs: Iterable[tuple[str, str]], *fixed: str) -> bytes:
    """Injective encoding: every string is length-prefixed, so no two identities meet.

    `fixed` holds what belongs to the engine and not to the request (KV dtype, model name).
    """
    parts: list[bytes] = []
    for text in (*fixed, *(part for pair in pairs for part in pair)):
        data = text.encode()
        parts.append(len(data).to_bytes(8, "little") + data)
    return len(fixed).to_bytes(8, "little") + b"".join(parts)


class KeyChain:
    """Keys of the full blocks of one growing token list; extended on demand, never recomputed."""

    __slots__ = ("_block", "_digest", "_keys", "_root", "_tokens")

    def __init__(self, tokens: list[int], block: int, identity: bytes, digest: Digest = blake2b_256) -> None:
        self._tokens = tokens
        self._block = block
        self._digest = digest
        self._root = RootKey(identity, digest)
        self._keys: list[BlockKey] = []

    def upto(self, tokens: int) -> Sequence[BlockKey]:
        """Keys of all full blocks within the first `tokens` tokens."""
        want = tokens // self._block
        while len(self._keys) < want:
            start = len(self._keys) * self._block
            content = tuple(self._tokens[start : start + self._block])
            parent = self._keys[-1] if self._keys else self._root
            data = parent.digest + array("q", content).tobytes()
            self._keys.append(BlockKey(self._digest(data), content, parent))
        return self._keys if len(self._keys) == want else self._keys[:want]

    def fork(self, tokens: list[int]) -> KeyChain:
        """A chain for a child that shares the tokens so far and grows on its own."""
        child = KeyChain.__new__(KeyChain)
        child._tokens = tokens
        child._block = self._block
        child._digest = self._digest
        child._root = self._root
        child._keys = list(self._keys)
        return child


@dataclass(frozen=True, slots=True)
class Miss:
    """Why the prefix cache did not serve more of a prompt.

    `matched` tokens were served as whole blocks. After them, the most similar cached continuation shares `partial`
    further tokens (less than a block) and then has `there` where this prompt has `here`, at `position`.
    `position` is None when nothing cached continues from there at all.
    """

    matched: int
    partial: int = 0
    position: int | None = None
    here: int | None = None
    there: int | None = None
