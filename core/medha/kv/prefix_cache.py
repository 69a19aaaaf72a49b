"""Prefix caching: block hashes that identify equal prefixes, and a tree of the blocks that hold their KV.

**Hashes.** `PrefixHasher` gives each whole block of a prompt a 128-bit hash of *all* token ids up to its end,
so that equal hashes mean equal prefixes. It is a keyed universal hash: multilinear over the ids of a block,
then over the blocks (Lemire and Kaser, "Strongly universal string hashing is fast", 2014). The chain is
therefore one cumulative sum, which numpy computes in one pass. For anyone who does not know the key, two
different prefixes collide with a probability of about 2^-120. The key is secret, and leaves the process only
where KV does, so nobody can craft a prompt that is answered from another prompt's KV. A prompt with a *cache
salt* starts its sums at a point that the key and the salt determine. Equal prompts share a prefix under one
salt; under two salts they collide no more often than different prompts.

**Cache.** `PrefixCache` records, for one lane, which block holds the KV of which hash. It is a radix tree
whose nodes are spans of blocks, so its costs grow with the number of branches on a prompt's path and not with
the prompt's length. Sequences lock the path that they use or have inserted. Blocks that no sequence locks are
free but remembered, and are evicted when they are needed: the least recently used branch first, from its end.

A lane's tree holds only the blocks of that lane, and a hash stands for an absolute position in its prompt. A
shard map that cuts the prompt elsewhere therefore finds fewer blocks, but never a wrong one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import shake_256
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from medha.kv.blocks import Run, append_run, cut_runs

HASH_CHARACTERS = 32
"""Hexadecimal characters of one block's hash; the hashes of a prompt are one string, block after block."""

_ROWS = 4  # independent 32-bit hashes that make up the 128 bits
_FIRST_KEYS = 4096  # blocks for which keys are derived at first

TokenIds = npt.NDArray[np.int32]


class PrefixHasher:
    """Hashes prompts under one secret key. Only hashes of the same hasher can be compared."""

    def __init__(self, block_size_tokens: int, secret: bytes) -> None:
        self.block_size_tokens = block_size_tokens
        self._secret = secret
        self._token_keys = self._random_keys(b"tokens", block_size_tokens)  # uint64 [block size, rows]
        self._block_keys = self._random_keys(b"blocks", _FIRST_KEYS)  # uint64 [blocks, rows]

    def start(self, salt: str = "") -> PromptHash:
        """Return an empty prompt hash to be fed with ids; it equals only prompts of the same `salt`."""
        if not salt:
            return PromptHash(self)
        return PromptHash(self, _sums=self._random_keys(b"salt", 1, salt.encode())[0])

    def hashes(self, ids: TokenIds, salt: str = "") -> str:
        """Return the hashes of a whole prompt, int32 [n]: `n // block_size_tokens` of them."""
        prompt = self.start(salt)
        prompt.update(ids)
        return prompt.hashes

    def digest_blocks(
        self, ids: TokenIds, first_block: int, sums: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.uint64]:
        """Return the running sums, uint64 [blocks, rows], after each block of `ids`.

        `sums` are those of the `first_block` blocks before.
        """
        blocks = ids.astype(np.uint32).reshape(-1, self.block_size_tokens).astype(np.uint64)
        digests = (blocks @ self._token_keys) >> np.uint64(33)
        digests += np.uint64(1)  # never 0, so that a block of zeros changes the sums, too
        digests *= self._keys(first_block, first_block + len(blocks))
        digests[0] += sums
        return np.cumsum(digests, axis=0, dtype=np.uint64)

    def _keys(self, start: int, stop: int) -> npt.NDArray[np.uint64]:
        if stop > len(self._block_keys):
            self._block_keys = self._random_keys(b"blocks", max(stop, 2 * len(self._block_keys)))
        return self._block_keys[start:stop]

    def _random_keys(self, purpose: bytes, count: int, salt: bytes = b"") -> npt.NDArray[np.uint64]:
        """Derive keys, uint64 [count, rows]; a larger `count` gives the same keys first."""
        stream = shake_256(purpose + self._secret + salt).digest(8 * _ROWS * count)
        return np.frombuffer(stream, dtype="<u8").reshape(count, _ROWS)


@dataclass(slots=True)
class PromptHash:
    """Incremental hashes of a prompt whose ids arrive in pieces."""

    hasher: PrefixHasher
    blocks: int = 0
    _parts: list[str] = field(default_factory=list)
    _sums: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(_ROWS, dtype=np.uint64))
    # Ids of the incomplete block.
    _rest: TokenIds = field(default_factory=lambda: np.empty(0, dtype=np.int32))

    @property
    def hashes(self) -> str:
        """Hashes of the whole blocks since the start, the fork or the last `take`, `HASH_CHARACTERS` each."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    @property
    def missing_tokens(self) -> int:
        """Number of ids that complete the current block."""
        return self.hasher.block_size_tokens - len(self._rest)

    def fork(self) -> PromptHash:
        """Return an independent copy for a continuation; its `hashes` begin with the next block."""
        return PromptHash(self.hasher, self.blocks, [], self._sums, self._rest)

    def take(self) -> str:
        """Return the hashes so far and clear them; `hashes` continues with the next block."""
        taken, self._parts = self.hashes, []
        return taken

    def update(self, ids: TokenIds) -> None:
        """Append the next ids, int32 [n]."""
        ids = np.concatenate([self._rest, ids]) if len(self._rest) else ids
        whole = len(ids) // self.hasher.block_size_tokens
        used = whole * self.hasher.block_size_tokens
        self._rest = ids[used:].copy()
        if whole == 0:
            return
        sums = self.hasher.digest_blocks(ids[:used], self.blocks, self._sums)
        self._sums = sums[-1]
        self.blocks += whole
        self._parts.append((sums >> np.uint64(32)).astype(">u4").tobytes().hex())


def hash_count(hashes: str) -> int:
    """Return the number of blocks in `hashes`."""
    return len(hashes) // HASH_CHARACTERS


def hash_at(hashes: str, block: int) -> str:
    return hashes[block * HASH_CHARACTERS : (block + 1) * HASH_CHARACTERS]


def hash_range(hashes: str, start: int, stop: int) -> str:
    """Return the hashes of blocks `start .. stop` (exclusive)."""
    return hashes[start * HASH_CHARACTERS : stop * HASH_CHARACTERS]


def each_hash(hashes: str) -> list[str]:
    """Return the hash of each block."""
    return [hashes[at : at + HASH_CHARACTERS] for at in range(0, len(hashes), HASH_CHARACTERS)]


# --- the cache of one lane -----------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Node:
    """A span of remembered blocks that follows its parent's: hashes `start .. start + blocks` of `hashes`.

    `hashes` is the string of the prompt that inserted the node, shared and not copied.
    """

    parent: _Node | None
    hashes: str
    start: int
    blocks: int
    runs: list[Run]
    children: dict[str, _Node] = field(default_factory=dict)  # by their first hash
    locks: int = 0
    used_at: int = 0

    @property
    def first_hash(self) -> str:
        return hash_at(self.hashes, self.start)

    @property
    def last_block(self) -> int:
        """The last block of the span; -1 for the root."""
        if not self.runs:
            return -1
        first, length = self.runs[-1]
        return first + length - 1

    def common_blocks(self, hashes: str, position: int, stop: int) -> int:
        """Return how many blocks of this node match `hashes` in `position .. stop`; the first one must match.

        A hash covers everything before it, so equality at a block means equality up to it.
        """
        most = min(self.blocks, stop - position)
        low, high = 1, most  # equal up to low
        if self._equal(hashes, position, most - 1):
            return most
        while high - low > 1:
            middle = (low + high) // 2
            if self._equal(hashes, position, middle - 1):
                low = middle
            else:
                high = middle
        return low

    def _equal(self, hashes: str, position: int, offset: int) -> bool:
        return hash_at(self.hashes, self.start + offset) == hash_at(hashes, position + offset)


@dataclass(frozen=True, slots=True)
class Match:
    """A remembered prefix of a prompt: the blocks that hold it, and how many of them no sequence locks."""

    blocks: int
    runs: tuple[Run, ...]
    unlocked: int


@dataclass(frozen=True, slots=True)
class Branch:
    """Blocks that were evicted from one branch: hashes `start .. start + blocks` of `hashes`, in blocks `runs`."""

    hashes: str
    start: int
    blocks: int
    runs: list[Run]


@dataclass(frozen=True, slots=True)
class Evicted:
    """Evicted blocks: all last used before `used_before`, and `count` of one branch that end at `last`.

    `branches` are the same blocks. Of two on one path, the one that is farther from its beginning comes first.
    """

    branches: list[Branch]
    used_before: int = 0
    last: int = -1
    count: int = 0

    @property
    def runs(self) -> list[Run]:
        return [run for branch in self.branches for run in branch.runs]


class PrefixCache:
    """Maps prefixes to the blocks of a lane that hold their KV; the controller's part of prefix caching.

    It only names blocks: the caller has the ledgers `remember`, share and `evict` them accordingly. Cost per
    call: O(branches on the path), and O(log cached branches) per evicted branch.
    """

    def __init__(self) -> None:
        self._root = _Node(None, "", 0, 0, [])
        self._locked: dict[str, tuple[_Node, int]] = {}  # sequence -> deepest node, and blocks to its end
        self._leaves: list[tuple[int, int, _Node]] = []  # heap: used_at, tie, node; stale ones are skipped
        self._ties = 0
        self._nodes = 0
        self._clock = 0
        self.blocks = 0
        """Remembered blocks."""
        self.evictable_blocks = 0
        """Remembered blocks that no sequence locks."""

    def match(self, hashes: str, stop: int) -> Match:
        """Return the longest remembered prefix of the first `stop` of `hashes`."""
        position, unlocked, node = 0, 0, self._root
        runs: list[Run] = []
        while position < stop:
            child = node.children.get(hash_at(hashes, position))
            if child is None:
                break
            common = child.common_blocks(hashes, position, stop)
            for run in child.runs if common == child.blocks else cut_runs(child.runs, 0, common):
                append_run(runs, run)
            unlocked += common if child.locks == 0 else 0
            position += common
            if common < child.blocks:
                break
            node = child
        return Match(position, tuple(runs), unlocked)

    def lock(self, sequence: str, hashes: str, stop: int) -> None:
        """Lock the remembered part of the first `stop` of `hashes` while `sequence` runs."""
        assert sequence not in self._locked, f"{sequence} has locked a prefix already"
        if stop == 0:
            self._locked[sequence] = (self._root, 0)
            return
        node, blocks = self._walk(self._root, hashes, 0, stop)
        self._locked[sequence] = (node, blocks)
        self._add_lock(node, None)

    def end(self, sequence: str) -> tuple[int, int]:
        """Return the last block of the path that a sequence locks, and its length; -1 and 0 if empty."""
        node, blocks = self._locked[sequence]
        return (node.last_block if blocks else -1), blocks

    def insert(self, sequence: str, hashes: str, stop: int, runs: Sequence[Run]) -> tuple[int, int] | None:
        """Insert blocks that `sequence` has computed: `runs` are the blocks of the first `stop` of `hashes`.

        Blocks of the same hashes that another sequence has inserted stay in the cache. Return how many blocks at
        the end of `runs` are newly remembered, which the ledgers must keep, and the block that they follow (-1:
        none). Return None if the sequence has locked that many blocks already.
        """
        before, known = self._locked[sequence]
        if stop <= known:
            return None
        node, position = self._walk(before, hashes, known, stop)
        new, after = stop - position, node.last_block
        if new > 0:
            added = cut_runs(runs, position, stop)
            if node is before and node.locks == 1 and not node.children:
                self._lengthen(node, hashes, position, added, new)
            else:
                self._nodes += 1
                child = _Node(node, hashes, position, new, added)
                node.children[child.first_hash] = child
                self.evictable_blocks += new  # until it is locked, below
                node = child
            self.blocks += new
        if node is not before:
            self._add_lock(node, before)
        self._locked[sequence] = (node, stop)
        return new, after

    def unlock(self, sequence: str) -> None:
        """Unlock the path of a sequence that has ended: blocks that only it locked become evictable."""
        deepest, _ = self._locked.pop(sequence)
        self._clock += 1
        for node in _upwards(deepest):
            node.used_at = self._clock
            node.locks -= 1
            if node.locks == 0:
                self.evictable_blocks += node.blocks
                self._offer(node)

    def evict(self, blocks: int) -> Evicted:
        """Evict at least `blocks` blocks, the least recently used branch first and from its end.

        A branch no longer than `blocks` is evicted whole, because a rest of it would only fragment the pool.
        """
        assert blocks <= self.evictable_blocks
        evicted: list[Branch] = []
        missing = blocks
        # A sequence uses a branch with all that leads to it, so equally old nodes form one path, evicted from
        # its end.
        used_at, last, count_there = 0, -1, 0
        while missing > 0:
            if not _is_current(self._leaves[0]):
                heappop(self._leaves)  # locked, lengthened or used again meanwhile
                continue
            node = self._leaves[0][2]
            assert node.parent is not None
            count = node.blocks if node.blocks <= blocks else missing
            kept = node.blocks - count
            runs = cut_runs(node.runs, kept, node.blocks)
            evicted.append(Branch(node.hashes, node.start + kept, count, runs))
            if node.used_at > used_at:
                used_at, last, count_there = node.used_at, node.last_block, 0
            count_there += count
            missing -= count
            self.blocks -= count
            self.evictable_blocks -= count
            node.runs = cut_runs(node.runs, 0, kept)
            node.blocks = kept
            if node.blocks == 0:
                heappop(self._leaves)
                parent = node.parent
                del parent.children[node.first_hash]
                node.parent = None
                self._nodes -= 1
                self._offer(parent)
        return Evicted(evicted, used_at, last, count_there)

    def check(self) -> None:
        """Assert that the counters match the tree; O(nodes), for tests."""
        locks: dict[int, int] = {}
        for deepest, _ in self._locked.values():
            for node in _upwards(deepest):
                locks[id(node)] = locks.get(id(node), 0) + 1
        blocks = evictable = 0
        offered = {(id(node), used_at) for used_at, _, node in self._leaves}
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            assert node.locks == locks.get(id(node), 0)
            assert node.blocks == sum(length for _, length in node.runs) > 0
            assert all(child.parent is node for child in node.children.values())
            assert node.locks or node.children or (id(node), node.used_at) in offered
            blocks += node.blocks
            evictable += node.blocks if node.locks == 0 else 0
            stack += node.children.values()
        assert (blocks, evictable) == (self.blocks, self.evictable_blocks)

    def _walk(self, node: _Node, hashes: str, position: int, stop: int) -> tuple[_Node, int]:
        """Return the deepest node below `node` on the path of hashes `position .. stop`, and where it ends.

        A node that matches only in part is split there.
        """
        while position < stop:
            child = node.children.get(hash_at(hashes, position))
            if child is None:
                break
            common = child.common_blocks(hashes, position, stop)
            node = child if common == child.blocks else self._split(child, common)
            position += common
            if node is not child:
                break
        return node, position

    def _split(self, node: _Node, blocks: int) -> _Node:
        """Split a node after its first `blocks` blocks; return the new front node, with the same locks."""
        assert node.parent is not None
        self._nodes += 1
        front = _Node(node.parent, node.hashes, node.start, blocks, cut_runs(node.runs, 0, blocks))
        front.locks, front.used_at = node.locks, node.used_at
        node.parent.children[front.first_hash] = front
        node.runs = cut_runs(node.runs, blocks, node.blocks)
        node.start += blocks
        node.blocks -= blocks
        node.parent = front
        front.children[node.first_hash] = node
        return front

    def _lengthen(self, node: _Node, hashes: str, position: int, added: list[Run], new: int) -> None:
        """Extend a leaf that only the inserting sequence locks: a prompt of many chunks stays one node."""
        node.hashes, node.start = hashes, position - node.blocks
        node.blocks += new
        for run in added:
            append_run(node.runs, run)

    def _add_lock(self, deepest: _Node, above: _Node | None) -> None:
        """Lock the nodes from `deepest` up to, but not including, `above`."""
        for node in _upwards(deepest):
            if node is above:
                break
            if node.locks == 0:
                self.evictable_blocks -= node.blocks
            node.locks += 1

    def _offer(self, node: _Node) -> None:
        """Queue a node for eviction if it is a leaf that no sequence locks."""
        if node.parent is None or node.locks or node.children:
            return
        self._ties += 1
        heappush(self._leaves, (node.used_at, self._ties, node))
        if len(self._leaves) > 4 * self._nodes + 64:  # drop stale entries; at most one in four is current
            valid = {id(entry[2]): entry for entry in self._leaves if _is_current(entry)}
            self._leaves = sorted(valid.values())


def _upwards(node: _Node) -> Iterator[_Node]:
    """Yield the node and its ancestors, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def _is_current(entry: tuple[int, int, _Node]) -> bool:
    """Return whether a queued node is still an unlocked leaf that was not used since."""
    used_at, _, node = entry
    return node.parent is not None and not node.locks and not node.children and node.used_at == used_at
