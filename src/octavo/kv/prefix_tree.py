"""What is cached, by content: for each identity a tree of runs of blocks in which every path from the root is a prefix.

A run stands for consecutive blocks that nothing branches off from, so that looking up, publishing and evicting a prefix
costs what its few runs cost and not what its blocks cost (a radix tree, as in SGLang's RadixAttention, over blocks).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from octavo.kv.check import require
from octavo.kv.prefix import Key, KeyChain, Miss, common_prefix, digest_of, identity_of, tokens_of

_COMPARED = 256  # cached continuations that an explanation looks at, the latest ones: thousands may begin alike


class Run:
    """`keys` of the blocks from block `start` of a chain on, and what holds them: `blocks[g]` in layer group g, -1
    where nothing does. `children` continue it, by the digest of their first key."""

    __slots__ = ("blocks", "children", "keys", "parent", "start")

    def __init__(self, parent: Run | None, start: int, keys: list[Key], blocks: list[list[int]]) -> None:
        self.parent = parent
        self.start = start
        self.keys = keys
        self.blocks = blocks
        self.children: dict[Hashable, Run] = {}

    @property
    def end(self) -> int:
        return self.start + len(self.keys)


@dataclass(frozen=True, slots=True)
class Path:
    """The cached part of a chain: `blocks[g]` of its first `length` blocks (-1: gone), the run that it ends in, if any,
    and whether a cached block had the digest of the next one and other content (0 or 1)."""

    length: int
    blocks: list[list[int]]
    run: Run | None
    collisions: int


class PrefixTree:
    """From content to blocks. Equal content that several have computed at the same time is there once: the other blocks
    are its twins, one of which takes its place should it be evicted while they are in use."""

    def __init__(self, capacity: int, groups: int) -> None:
        self._groups = groups
        self._roots: dict[bytes, Run] = {}  # by identity; each has a child
        self.run_of: list[Run | None] = [None] * capacity  # for each block; None: not findable
        self._depth = [0] * capacity  # which block of its chain a findable block is
        self._twins: dict[int, list[int]] = {}  # findable block -> others with its content
        self._twin_of: dict[int, int] = {}  # the other way round

    # -- finding ------------------------------------------------------------------------------------------------------

    def follow(self, keys: Sequence[Key]) -> Path:
        """The longest cached prefix of a chain."""
        length = collisions = 0
        out: list[list[int]] = [[] for _ in range(self._groups)]
        run = self._roots.get(identity_of(keys[0])) if keys else None
        while run is not None and length < len(keys):
            child = run.children.get(digest_of(keys[length]))
            if child is None:
                break
            same = _alike(child.keys, 0, keys, length)
            if same:
                run = child
                length += same
                for blocks, there in zip(out, run.blocks, strict=True):
                    blocks += there if same == len(there) else there[:same]
            if same < len(child.keys):
                collisions = int(length < len(keys) and digest_of(child.keys[same]) == digest_of(keys[length]))
                break
        return Path(length, out, run, collisions)

    def explain(self, chain: KeyChain, served: int, own: Collection[int] = ()) -> Miss:
        """Why no more than the first `served` blocks of the chain come from the cache. `own`: blocks that the asking
        sequence has computed itself since."""
        keys, tail = chain.parts()
        matched = served * chain.block_size
        wanted = tokens_of(keys[served]) if served < len(keys) else tail
        best = Miss(matched)
        for key, block in self._continuations(chain.identity, keys[:served]):
            if block in own:
                continue
            there = tokens_of(key)
            same = common_prefix(wanted, there)
            if best.position is None or same > best.partial:
                at = wanted[same] if same < len(wanted) else None
                best = Miss(matched, same, matched + same, at, there[same] if same < len(there) else None)
        return best

    def _continuations(self, identity: bytes, keys: Sequence[Key]) -> list[tuple[Key, int]]:
        """What is cached behind these blocks: each next key and the first group's block of it."""
        path = self.follow(keys)
        run = path.run if keys else self._roots.get(identity)
        if run is None or path.length < len(keys):
            return []
        at = path.length - run.start
        if at < len(run.keys):
            found = [(run.keys[at], run.blocks[0][at])]
        else:
            latest = list(islice(reversed(run.children.values()), _COMPARED))[::-1]
            found = [(child.keys[0], child.blocks[0][0]) for child in latest]
        return [(key, block) for key, block in found if block >= 0]

    # -- publishing ---------------------------------------------------------------------------------------------------

    def run_of_any(self, blocks: Iterable[int]) -> Run | None:
        """The run of the first of these blocks of one position (-1: none) that is in the tree or has a twin there."""
        for block in blocks:
            if block >= 0:
                run = self.run_of[self._twin_of.get(block, block)]
                if run is not None:
                    return run
        return None

    def publish(self, run: Run | None, depth: int, keys: Sequence[Key], tables: Sequence[Sequence[int]]) -> None:
        """Make blocks findable under `keys`, the chain's from block `depth` on.

        `run`: that of block `depth` - 1, None at the beginning of a chain; `tables[g]`: a block for each key, -1 where
        group g has none, though not in every group for the last one. What has the digest of other content cannot be
        looked up and is left out, with all behind it.
        """
        run = run or self._roots.setdefault(identity_of(keys[0]), Run(None, 0, [], [[] for _ in tables]))
        done = 0
        while done < len(keys):
            at = depth + done - run.start
            if at == len(run.keys):
                child = run.children.get(digest_of(keys[done]))
                if child is None:
                    self._append(run, keys[done:], [table[done:] for table in tables])
                    return
                run, at = child, 0
            same = _alike(run.keys, at, keys, done)
            self._fill(run, at, [table[done : done + same] for table in tables])
            done += same
            at += same
            if done < len(keys) and at < len(run.keys):
                if digest_of(run.keys[at]) == digest_of(keys[done]):
                    return
                run = self._split(run, at)

    def extend(self, last: int, key: Key, blocks: Sequence[int]) -> bool:
        """`publish` of one block in each group behind block `last` of the first group. Nearly always in an answer, it
        goes to the end of a run; False: nothing was done, it is not that simple."""
        run = self.run_of[last]
        if run is None or run.children or self._depth[last] != run.end - 1:
            return False
        run.keys.append(key)
        depth = run.end - 1
        for there, block in zip(run.blocks, blocks, strict=True):
            there.append(block)
            self._set(block, run, depth)
        return True

    def _append(self, run: Run, keys: Sequence[Key], tables: Sequence[Sequence[int]]) -> None:
        if run.parent is None or run.children:
            parent, run = run, Run(run, run.end, [], [[] for _ in tables])
            parent.children[digest_of(keys[0])] = run
        run_of, depths, end = self.run_of, self._depth, run.end
        for there, blocks in zip(run.blocks, tables, strict=True):
            there += blocks
            for depth, block in enumerate(blocks, end):
                if block >= 0:
                    run_of[block] = run
                    depths[block] = depth
        run.keys += keys

    def _fill(self, run: Run, at: int, tables: Sequence[Sequence[int]]) -> None:
        """Content that is known already, from block `at` of the run on: take blocks where there are none."""
        for there, blocks in zip(run.blocks, tables, strict=True):
            for i, block in enumerate(blocks, at):
                first = there[i]
                if block < 0 or first == block or block in self._twin_of:
                    continue
                if first < 0:
                    there[i] = block
                    self._set(block, run, run.start + i)
                else:
                    self._twins.setdefault(first, []).append(block)
                    self._twin_of[block] = first

    def _set(self, block: int, run: Run, depth: int) -> None:
        self.run_of[block] = run
        self._depth[block] = depth

    def _split(self, run: Run, at: int) -> Run:
        """Cut a run in two before its block `at`; returns the first part, which is a new one: who was at the end of the
        run still is."""
        assert run.parent is not None
        head = Run(run.parent, run.start, run.keys[:at], [there[:at] for there in run.blocks])
        run.parent.children[digest_of(head.keys[0])] = head
        run.parent = head
        run.start += at
        del run.keys[:at]
        for there in run.blocks:
            del there[:at]
        head.children[digest_of(run.keys[0])] = run
        for there in head.blocks:
            for block in there:
                if block >= 0:
                    self.run_of[block] = head
        return head

    # -- forgetting ---------------------------------------------------------------------------------------------------

    def remove(self, blocks: Sequence[int]) -> None:
        """Forget what these blocks hold."""
        at = 0
        alone = self._twins.keys().isdisjoint(blocks)
        while at < len(blocks):
            cut = self._cut(blocks, at) if alone else 0
            if not cut:
                self._vacate(blocks[at])
            at += cut or 1

    def _cut(self, blocks: Sequence[int], at: int) -> int:
        """As many of `blocks` from `at` on as are the end of a run, the last one first, as they nearly always are."""
        run = self.run_of[blocks[at]]
        assert run is not None
        if run.children or len(run.blocks) > 1:
            return 0
        there = run.blocks[0]
        count = min(len(there), len(blocks) - at)
        if there[: -count - 1 : -1] != blocks[at : at + count]:
            count = common_prefix(there[::-1], blocks[at : at + count])
        if count:
            for block in there[-count:]:
                self.run_of[block] = None
            self._prune(run, len(there) - count)
        return count

    def _vacate(self, block: int) -> None:
        run = self.run_of[block]
        assert run is not None
        at = self._depth[block] - run.start
        there = next(there for there in run.blocks if there[at] == block)
        there[at] = -1
        self.run_of[block] = None
        heirs = self._twins.pop(block, None)
        if heirs is None:
            self._prune(run, len(run.keys))
            return
        heir, *others = heirs
        del self._twin_of[heir]
        there[at] = heir
        self._set(heir, run, run.start + at)
        if others:
            self._twins[heir] = others
            self._twin_of.update(dict.fromkeys(others, heir))

    def part(self, blocks: Sequence[int]) -> list[int]:
        """Nobody uses these blocks any longer, which are not findable: they are nobody's twins. Returns whose they
        were."""
        if not self._twin_of:
            return []
        firsts = [self._twin_of.pop(block) for block in blocks if block in self._twin_of]
        for first in dict.fromkeys(firsts):
            self._twins[first] = [twin for twin in self._twins[first] if twin in self._twin_of]
            if not self._twins[first]:
                del self._twins[first]
        return firsts

    def _prune(self, run: Run, keep: int) -> None:
        """Keep `keep` blocks of a run, less those at its end that nobody holds, unless something continues it; if none
        is left, the same for its parent."""
        while (parent := run.parent) is not None and not run.children:
            while keep and all(there[keep - 1] < 0 for there in run.blocks):
                keep -= 1
            if keep == len(run.keys):
                return
            first = run.keys[0]
            del run.keys[keep:]
            for there in run.blocks:
                del there[keep:]
            if keep:
                return
            del parent.children[digest_of(first)]
            if parent.parent is None and not parent.children:
                del self._roots[identity_of(first)]
            run, keep = parent, len(parent.keys)

    # -- looking ------------------------------------------------------------------------------------------------------

    def _runs(self) -> Iterator[Run]:
        left = [run for root in self._roots.values() for run in root.children.values()]
        while left:
            run = left.pop()
            left += run.children.values()
            yield run

    def check(self) -> None:
        found: list[int] = []
        require(all(root.children for root in self._roots.values()), "no identity without anything cached")
        for run in self._runs():
            parent = run.parent
            require(parent is not None and parent.end == run.start, "a run begins where its parent ends")
            require(parent is not None and parent.children.get(digest_of(run.keys[0])) is run, "a run can be looked up")
            held = any(there[-1] >= 0 for there in run.blocks)
            require(held or bool(run.children), "no run ends in what nobody holds")
            for there in run.blocks:
                require(len(there) == len(run.keys), "every key of a run has an entry in each group")
                for depth, block in enumerate(there, run.start):
                    if block >= 0:
                        found.append(block)
                        agree = self.run_of[block] is run and self._depth[block] == depth
                        require(agree, "tree and identity agree", block=block)
        findable = [block for block, run in enumerate(self.run_of) if run is not None]
        require(sorted(found) == findable, "every published block is findable exactly once")
        twins = {twin: first for first, others in self._twins.items() for twin in others}
        require(twins == self._twin_of, "twins know each other")
        for twin, first in twins.items():
            require(self.run_of[twin] is None, "a twin is not findable itself", block=twin)
            require(self.run_of[first] is not None, "whose twin it is, is findable", block=first)


def _alike(a: Sequence[Key], a_from: int, b: Sequence[Key], b_from: int) -> int:
    """How many keys are equal, from there on."""
    count = min(len(a) - a_from, len(b) - b_from)
    x, y = a[a_from : a_from + count], b[b_from : b_from + count]
    if x == y:
        return count
    return next((at for at, (one, other) in enumerate(zip(x, y, strict=True)) if one != other), count)
