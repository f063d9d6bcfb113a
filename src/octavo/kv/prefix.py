"""Identity of KV blocks: a typed, salted hash chain over tokens, the index from chain to block, and why a prompt
missed.

A key's digest is BLAKE2b-256 over (parent digest, tokens); the root's digest is over the request's identity
(salt, adapter, media ...). A hit also compares the tokens themselves along the chain, so that even a broken hash
function cannot return another prompt's KV.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

Digest = Callable[[bytes], bytes]


def blake2b_256(data: bytes) -> bytes:
    return blake2b(data, digest_size=32).digest()


class BlockKey:
    """Content of one full block and of everything before it. Compared by `same`, never by digest alone.

    A digest is 32 bytes where tokens are hashed; a trace without tokens brings its own ids, exact and hashed by nobody.
    """

    __slots__ = ("digest", "parent", "tokens")

    def __init__(self, digest: Hashable, tokens: tuple[int, ...], parent: BlockKey | None, /) -> None:
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
        data = text.encode("utf-8", "surrogatepass")
        parts.append(len(data).to_bytes(8, "little") + data)
    return len(fixed).to_bytes(8, "little") + b"".join(parts)


class KeyChain:
    """Keys of the full blocks of one growing token list; extended on demand, never recomputed."""

    __slots__ = ("_digest", "_keys", "_tokens", "block_size", "root")

    def __init__(self, tokens: list[int], block_size: int, identity: bytes, digest: Digest = blake2b_256) -> None:
        self._tokens = tokens
        self.block_size = block_size
        self._digest = digest
        self.root: BlockKey = RootKey(identity, digest)
        self._keys: list[BlockKey] = []

    def upto(self, tokens: int) -> Sequence[BlockKey]:
        """Keys of all full blocks within the first `tokens` tokens."""
        want = tokens // self.block_size
        while len(self._keys) < want:
            start = len(self._keys) * self.block_size
            content = tuple(self._tokens[start : start + self.block_size])
            parent = self._keys[-1] if self._keys else self.root
            assert isinstance(parent.digest, bytes)
            data = parent.digest + array("q", content).tobytes()
            self._keys.append(BlockKey(self._digest(data), content, parent))
        return self._keys if len(self._keys) == want else self._keys[:want]

    @property
    def length(self) -> int:
        """Tokens known so far."""
        return len(self._tokens)

    def parts(self) -> tuple[Sequence[BlockKey], tuple[int, ...]]:
        """Keys of all full blocks, and the tokens behind the last of them."""
        keys = self.upto(len(self._tokens))
        return keys, tuple(self._tokens[len(keys) * self.block_size :])

    def fork(self, tokens: list[int]) -> KeyChain:
        """A chain for a child that shares the tokens so far and grows on its own."""
        child = KeyChain.__new__(KeyChain)
        child._tokens = tokens
        child.block_size = self.block_size
        child._digest = self._digest
        child.root = self.root
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


#: Most digests stand for one block; only where several have the same is there a dict of them, in order of publication.
_Buckets = dict[Hashable, int | dict[int, None]]


def _put(buckets: _Buckets, digest: Hashable, block: int) -> None:
    there = buckets.get(digest)
    if there is None:
        buckets[digest] = block
    elif isinstance(there, int):
        buckets[digest] = {there: None, block: None}
    else:
        there[block] = None


def _drop(buckets: _Buckets, digest: Hashable, block: int) -> None:
    there = buckets[digest]
    if isinstance(there, int):
        del buckets[digest]
        return
    del there[block]
    if not there:
        del buckets[digest]


def _blocks(buckets: _Buckets, digest: Hashable) -> Iterable[int]:
    there = buckets.get(digest)
    if there is None:
        return ()
    return (there,) if isinstance(there, int) else there


class PrefixIndex:
    """From content to block, per layer group. Blocks of equal content may stand side by side (they were computed at
    the same time); each stays findable until it is evicted."""

    def __init__(self, groups: int) -> None:
        self._buckets: list[_Buckets] = [{} for _ in range(groups)]  # digest -> blocks
        self._entries: dict[int, tuple[int, BlockKey]] = {}  # block -> (group, key)
        self._children: _Buckets = {}  # parent digest -> blocks of group 0 that continue it

    def key(self, block: int) -> BlockKey | None:
        entry = self._entries.get(block)
        return entry[1] if entry else None

    def holds(self, block: int) -> bool:
        """Whether the block is findable."""
        return block in self._entries

    def add(self, group: int, pairs: Iterable[tuple[BlockKey, int]]) -> None:
        """Make blocks findable under their keys, except those that are already, and those below 0."""
        entries, buckets, children = self._entries, self._buckets[group], self._children
        for key, block in pairs:
            if block < 0 or block in entries:
                continue
            entries[block] = (group, key)
            if buckets.setdefault(key.digest, block) != block:
                _put(buckets, key.digest, block)
            if group == 0 and key.parent is not None and children.setdefault(key.parent.digest, block) != block:
                _put(children, key.parent.digest, block)

    def remove(self, blocks: Iterable[int]) -> None:
        """Forget what these blocks hold."""
        entries, children = self._entries, self._children
        for block in blocks:
            group, key = entries.pop(block)
            buckets = self._buckets[group]
            # Nearly always there is no other block of that digest, and then this is all.
            if buckets.get(key.digest) == block:
                del buckets[key.digest]
            else:
                _drop(buckets, key.digest, block)
            if group == 0 and key.parent is not None:
                parent = key.parent.digest
                if children.get(parent) == block:
                    del children[parent]
                else:
                    _drop(children, parent, block)

    def find(self, group: int, key: BlockKey, before: BlockKey | None) -> tuple[int | None, int]:
        """The block that holds `key`, and how many others had its digest and other content.

        `before`: the already verified key of the stored block in front of it, which spares walking the chain.
        """
        collisions = 0
        for block in _blocks(self._buckets[group], key.digest):
            stored = self._entries[block][1]
            if stored.tokens == key.tokens and ((before is not None and stored.parent is before) or stored.same(key)):
                return block, collisions
            collisions += 1
        return None, collisions

    def explain(self, chain: KeyChain, served: int, own: Collection[int] = ()) -> Miss:
        """Why no more than the first `served` blocks of the chain come from the cache. `own`: blocks that the asking
        sequence has computed itself since."""
        keys, tail = chain.parts()
        matched = served * chain.block_size
        wanted = keys[served].tokens if served < len(keys) else tail
        parent = keys[served - 1] if served else chain.root
        best = Miss(matched)
        for block in _blocks(self._children, parent.digest):
            other = self._entries[block][1]
            if block in own or other.parent is None or not other.parent.same(parent):
                continue
            same = common_prefix(wanted, other.tokens)
            if best.position is None or same > best.partial:
                here = wanted[same] if same < len(wanted) else None
                there = other.tokens[same] if same < len(other.tokens) else None
                best = Miss(matched, same, matched + same, here, there)
        return best

    def check(self) -> None:
        from octavo.kv.check import require

        listed = 0
        for group, buckets in enumerate(self._buckets):
            for digest in buckets:
                for block in _blocks(buckets, digest):
                    listed += 1
                    stored_group, key = self._entries[block]
                    require(stored_group == group and key.digest == digest, "index and identity agree", block=block)
        require(listed == len(self._entries), "every published block is findable exactly once")


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading elements that are equal."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
