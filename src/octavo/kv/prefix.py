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

    `matched` tokens were served as whole blocks. After them, the most similar one of the latest cached continuations
    shares `partial` further tokens (less than a block) and then has `there` where this prompt has `here`, at
    `position`, which is None when nothing cached continues from there at all.
    """

    matched: int
    partial: int = 0
    position: int | None = None
    here: int | None = None
    there: int | None = None


#: Most digests stand for one block; only where several have the same is there a dict of them, in order of publication.
_Buckets = dict[Hashable, int | dict[int, None]]


def _put_all(buckets: _Buckets, digests: Sequence[Hashable], blocks: Sequence[int]) -> None:
    if len(digests) > 4 and buckets.keys().isdisjoint(digests) and len(set(digests)) == len(digests):
        buckets.update(zip(digests, blocks, strict=True))  # most are; this takes half the time
        return
    for digest, block in zip(digests, blocks, strict=True):
        there = buckets.setdefault(digest, block)
        if isinstance(there, dict):
            there[block] = None
        elif there != block:
            buckets[digest] = {there: None, block: None}


def _drop_all(buckets: _Buckets, digests: Sequence[Hashable], blocks: Sequence[int]) -> None:
    if list(map(buckets.get, digests)) == blocks:  # each digest stands for its block alone, as nearly always
        for digest in digests:
            del buckets[digest]
        return
    for block, digest, there in zip(blocks, digests, map(buckets.pop, digests), strict=True):
        if isinstance(there, dict):
            del there[block]
            if there:
                buckets[digest] = there


def _blocks(buckets: _Buckets, digest: Hashable) -> Iterable[int]:
    there = buckets.get(digest)
    if there is None:
        return ()
    return (there,) if isinstance(there, int) else there


_COMPARED = 256  # cached continuations that an explanation looks at, the latest ones: thousands may begin alike


class PrefixIndex:
    """From content to block, per layer group. Blocks of equal content may stand side by side (they were computed at
    the same time); each stays findable until it is evicted."""

    def __init__(self, groups: int) -> None:
        self._buckets: list[_Buckets] = [{} for _ in range(groups)]  # digest -> blocks
        self._keys: dict[int, BlockKey] = {}  # block -> key
        self._group: dict[int, int] = {}  # block -> group, if there are several
        self._children: _Buckets | None = None  # parent digest -> blocks of group 0 that continue it, once asked for
        self.holds: Callable[[int], bool] = self._keys.__contains__  # whether a block is findable; asked for each

    def key(self, block: int) -> BlockKey | None:
        return self._keys.get(block)

    def add(self, group: int, keys: Sequence[BlockKey], blocks: Sequence[int]) -> None:
        """Make blocks findable under their keys, except those that are already, and those below 0."""
        if -1 in blocks or not self._keys.keys().isdisjoint(blocks):
            fresh = [i for i, block in enumerate(blocks) if block >= 0 and block not in self._keys]
            keys, blocks = [keys[i] for i in fresh], [blocks[i] for i in fresh]
        self._keys.update(zip(blocks, keys, strict=True))
        if len(self._buckets) > 1:
            self._group.update(dict.fromkeys(blocks, group))
        _put_all(self._buckets[group], [key.digest for key in keys], blocks)
        if group == 0 and self._children is not None:
            _put_all(self._children, [key.parent.digest for key in keys if key.parent], blocks)

    def remove(self, blocks: Sequence[int]) -> None:
        """Forget what these blocks hold."""
        if len(self._buckets) == 1:
            self._remove(0, blocks)
            return
        groups = [self._group.pop(block) for block in blocks]
        for group in set(groups):
            self._remove(group, [block for block, of in zip(blocks, groups, strict=True) if of == group])

    def _remove(self, group: int, blocks: Sequence[int]) -> None:
        keys = list(map(self._keys.pop, blocks))
        _drop_all(self._buckets[group], [key.digest for key in keys], blocks)
        if group == 0 and self._children is not None:
            _drop_all(self._children, [key.parent.digest for key in keys if key.parent], blocks)

    def find(self, group: int, key: BlockKey, before: BlockKey | None) -> tuple[int | None, int]:
        """The block that holds `key`, and how many others had its digest and other content.

        `before`: the already verified key of the stored block in front of it, which spares walking the chain.
        """
        collisions = 0
        for block in _blocks(self._buckets[group], key.digest):
            stored = self._keys[block]
            if stored.tokens == key.tokens and ((before is not None and stored.parent is before) or stored.same(key)):
                return block, collisions
            collisions += 1
        return None, collisions

    def follow(self, group: int, keys: Sequence[BlockKey]) -> tuple[list[int], int]:
        """The blocks that hold the longest prefix of a chain, and how many others had their digests and other
        content."""
        buckets, stored = self._buckets[group], self._keys
        out: list[int] = []
        before: BlockKey | None = None
        collisions = 0
        for key in keys:
            there = buckets.get(key.digest)
            if isinstance(there, int) and (found := stored[there]).parent is before and found.tokens == key.tokens:
                out.append(there)  # nearly always: what `find` would say, without asking
                before = found
                continue
            block, seen = self.find(group, key, before)
            collisions += seen
            if block is None:
                break
            out.append(block)
            before = stored[block]
        return out, collisions

    def explain(self, chain: KeyChain, served: int, own: Collection[int] = ()) -> Miss:
        """Why no more than the first `served` blocks of the chain come from the cache. `own`: blocks that the asking
        sequence has computed itself since."""
        keys, tail = chain.parts()
        matched = served * chain.block_size
        wanted = keys[served].tokens if served < len(keys) else tail
        parent = keys[served - 1] if served else chain.root
        best = Miss(matched)
        continuations = tuple(_blocks(self._continuations(), parent.digest))[-_COMPARED:]
        for block in continuations:
            other = self._keys[block]
            if block in own or other.parent is None or not other.parent.same(parent):
                continue
            same = common_prefix(wanted, other.tokens)
            if best.position is None or same > best.partial:
                here = wanted[same] if same < len(wanted) else None
                there = other.tokens[same] if same < len(other.tokens) else None
                best = Miss(matched, same, matched + same, here, there)
        return best

    def _continuations(self) -> _Buckets:
        """`_children`. Nobody may ever ask for them, as in most replays, and they take a third of the index's time."""
        if self._children is None:
            blocks = [block for block in self._keys if self._group.get(block, 0) == 0]
            keys = [self._keys[block] for block in blocks]
            self._children = {}
            _put_all(self._children, [key.parent.digest for key in keys if key.parent], blocks)
        return self._children

    def check(self) -> None:
        from octavo.kv.check import require

        listed = 0
        for group, buckets in enumerate(self._buckets):
            for digest in buckets:
                for block in _blocks(buckets, digest):
                    listed += 1
                    key = self._keys.get(block)
                    agree = key is not None and key.digest == digest and self._group.get(block, 0) == group
                    require(agree, "index and identity agree", block=block)
        require(listed == len(self._keys), "every published block is findable exactly once")
        if self._children is not None:
            ends = [(digest, b) for digest in self._children for b in _blocks(self._children, digest)]
            continuing = [b for b, key in self._keys.items() if self._group.get(b, 0) == 0 and key.parent is not None]
            require(sorted(b for _, b in ends) == sorted(continuing), "every continuation is listed exactly once")
            for digest, block in ends:
                parent = self._keys[block].parent
                require(parent is not None and parent.digest == digest, "continuations follow on", block=block)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading elements that are equal."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
