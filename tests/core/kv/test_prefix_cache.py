"""Hashes of prefixes, and the cache of one lane against a model that remembers every block by its prefix."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from medha.kv.prefix_cache import HASH_CHARACTERS, PrefixCache, PrefixHasher, TokenIds, hash_at, hash_count

HASHER = PrefixHasher(4, b"a secret")


def ids_of(*ids: int) -> TokenIds:
    return np.array(ids, dtype=np.int32)


def hashes_of(hashes: str) -> list[str]:
    return [hash_at(hashes, block) for block in range(hash_count(hashes))]


# --- hashes --------------------------------------------------------------------------------------------


@given(ids=st.lists(st.integers(0, 200_000), max_size=60))
def test_there_is_one_hash_for_each_whole_block(ids: list[int]) -> None:
    hashes = HASHER.hashes(ids_of(*ids))
    assert len(hashes) == len(ids) // 4 * HASH_CHARACTERS
    assert set(hashes) <= set("0123456789abcdef")


@given(
    ids=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    at=st.integers(0, 59),
    other=st.integers(0, 200_000),
)
def test_prompts_have_equal_hashes_up_to_the_block_in_which_they_part(
    ids: list[int], at: int, other: int
) -> None:
    changed = list(ids)
    changed[at % len(ids)] = other
    one, two = hashes_of(HASHER.hashes(ids_of(*ids))), hashes_of(HASHER.hashes(ids_of(*changed)))
    for block, (first, second) in enumerate(zip(one, two, strict=True)):
        same = ids[: 4 * block + 4] == changed[: 4 * block + 4]
        assert (first == second) == same


@given(ids=st.lists(st.integers(0, 1), max_size=60), cuts=st.lists(st.integers(0, 60), max_size=4))
def test_ids_that_come_in_pieces_give_the_hashes_of_the_whole(ids: list[int], cuts: list[int]) -> None:
    prompt = HASHER.start()
    borders = [0, *sorted(cut for cut in cuts if cut <= len(ids)), len(ids)]
    for start, stop in pairwise(borders):
        prompt.update(ids_of(*ids[start:stop]))
    assert prompt.hashes == HASHER.hashes(ids_of(*ids))


@pytest.mark.parametrize("token", [0, 1, 7])
def test_every_length_of_one_repeated_token_has_a_hash_of_its_own(token: int) -> None:
    """A plain sum would not change where a block of zeros is added."""
    hashes = hashes_of(HASHER.hashes(ids_of(*[token] * 400)))
    assert len(set(hashes)) == 100


def test_prompts_beyond_the_keys_that_are_generated_at_first_keep_their_hashes() -> None:
    ids = np.arange(4 * 10_000, dtype=np.int32)
    fresh, used = PrefixHasher(4, b"a secret"), PrefixHasher(4, b"a secret")
    used.hashes(ids[:100])
    assert fresh.hashes(ids) == used.hashes(ids)
    assert HASHER.hashes(ids).startswith(HASHER.hashes(ids[:2000]))


@given(
    ids=st.lists(st.integers(0, 1), min_size=4, max_size=60),
    cut=st.integers(0, 60),
    salts=st.tuples(st.text(max_size=3), st.text(max_size=3)),
)
def test_a_prompt_has_the_same_hashes_under_one_salt_and_no_common_one_under_two(
    ids: list[int], cut: int, salts: tuple[str, str]
) -> None:
    one, two = (hashes_of(HASHER.hashes(ids_of(*ids), salt)) for salt in salts)
    prompt = HASHER.start(salts[0])
    prompt.update(ids_of(*ids[:cut]))
    answer = prompt.fork()
    answer.update(ids_of(*ids[cut:]))
    assert hashes_of(prompt.hashes + answer.hashes) == one
    assert (one == two) if salts[0] == salts[1] else not set(one) & set(two)


def test_another_secret_gives_other_hashes() -> None:
    ids = ids_of(*range(40))
    assert not set(hashes_of(HASHER.hashes(ids))) & set(hashes_of(PrefixHasher(4, b"another").hashes(ids)))


def test_five_thousand_blocks_have_as_many_hashes_in_each_of_the_four_parts() -> None:
    """Of 32 random bits three pairs in a thousand runs like this one are equal; of 20 bits, a dozen in each."""
    random = np.random.default_rng(0)
    hashes = [HASHER.hashes(random.integers(0, 2, 4).astype(np.int32) + 2 * index) for index in range(5000)]
    for part in range(0, HASH_CHARACTERS, 8):
        assert len({one[part : part + 8] for one in hashes}) >= 4998


def test_hashes_spread_like_random_numbers() -> None:
    """Half of the bits of neighbouring hashes differ, in every one of their four parts."""
    hashes = hashes_of(HASHER.hashes(np.arange(40_000, dtype=np.int32)))
    values = np.array([[int(one[i : i + 8], 16) for i in range(0, 32, 8)] for one in hashes], dtype=np.uint32)
    flipped = np.unpackbits((values[1:] ^ values[:-1]).view(np.uint8).reshape(len(values) - 1, 4, 4), axis=2)
    assert np.all(abs(flipped.mean(axis=(0, 2)) - 0.5) < 0.01)


# --- the cache -----------------------------------------------------------------------------------------


class CacheMachine(RuleBasedStateMachine):
    """Prompts over two letters; the model maps each remembered prefix to its block, and knows who locks it."""

    @initialize()
    def start(self) -> None:
        self.cache = PrefixCache()
        self.blocks: dict[str, int] = {}  # remembered prefix, as its last hash -> block
        self.locked: dict[str, list[str]] = {}  # sequence -> hashes that it locks, from the first one on
        self.used_at: dict[str, int] = {}
        self.prompts: dict[str, str] = {}
        self.tables: dict[str, list[int]] = {}
        self.next_block = 0
        self.clock = 0
        self.names = 0

    @rule(letters=st.text("ab", min_size=1, max_size=12), limit=st.integers(0, 12))
    def lock(self, letters: str, limit: int) -> None:
        self.names += 1
        name = f"s{self.names}"
        hashes = PrefixHasher(1, b"k").hashes(ids_of(*map(ord, letters)))
        chain, stop = hashes_of(hashes), min(limit, len(letters))
        known = 0
        while known < stop and chain[known] in self.blocks:
            known += 1
        match = self.cache.match(hashes, stop)
        table = [block for first, length in match.runs for block in range(first, first + length)]
        held = {one for path in self.locked.values() for one in path}
        assert table == [self.blocks[one] for one in chain[:known]]
        assert match.blocks == known
        assert match.unlocked == sum(one not in held for one in chain[:known])
        self.cache.lock(name, hashes, match.blocks)
        self.locked[name], self.prompts[name] = chain[:known], hashes
        own = [self.next_block + 2 * index for index in range(len(chain) - known)]
        self.next_block += 2 * len(own) + 1
        self.tables[name] = table + own

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.locked)))
        chain = hashes_of(self.prompts[name])
        stop = data.draw(st.integers(len(self.locked[name]), len(chain)))
        known = len(self.locked[name])
        inserted = self.cache.insert(
            name, self.prompts[name], stop, [(block, 1) for block in self.tables[name][:stop]]
        )
        fresh = [index for index in range(stop) if chain[index] not in self.blocks]
        assert (inserted is None) == (stop == known)
        assert inserted is None or inserted[0] == len(fresh)
        for index in fresh:
            self.blocks[chain[index]] = self.tables[name][index]
        self.locked[name] = chain[:stop]

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.locked)))
        self.clock += 1
        self.used_at |= dict.fromkeys(self.locked.pop(name), self.clock)
        self.cache.unlock(name)

    @rule(share=st.floats(0, 1))
    def evict(self, share: float) -> None:
        held = {one for path in self.locked.values() for one in path}
        free = {self.blocks[one]: one for one in self.blocks if one not in held}
        count = int(share * len(free))
        evicted = [
            block for first, length in self.cache.evict(count).runs for block in range(first, first + length)
        ]
        assert len(set(evicted)) == len(evicted)
        assert count <= len(evicted) <= 2 * count
        gone = [free[block] for block in evicted]
        newest_gone = max((self.used_at[one] for one in gone), default=0)
        for one in gone:
            del self.blocks[one]
        left = [one for one in free.values() if one in self.blocks]
        assert all(self.used_at[one] >= newest_gone for one in left), "the least recently used go first"

    @invariant()
    def counts_are_right(self) -> None:
        self.cache.check()
        held = {one for path in self.locked.values() for one in path}
        assert held <= set(self.blocks), "what is locked stays"
        assert self.cache.blocks == len(self.blocks)
        assert self.cache.evictable_blocks == len(set(self.blocks) - held)

    @invariant()
    def a_prefix_of_what_is_remembered_is_remembered(self) -> None:
        for name, hashes in self.prompts.items():
            chain = hashes_of(hashes)
            known = [one in self.blocks for one in chain]
            assert known == sorted(known, reverse=True), f"{name} has a gap"


CacheMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestCache = CacheMachine.TestCase


def test_a_prompt_of_many_chunks_stays_one_branch() -> None:
    cache = PrefixCache()
    hashes = HASHER.hashes(np.arange(4000, dtype=np.int32))
    cache.lock("a", hashes, 0)
    for stop in range(10, 1001, 10):
        assert cache.insert("a", hashes, stop, [(0, stop)]) == (10, stop - 11)
    assert cache.match(hashes, 1000).runs == ((0, 1000),)
    assert len(cache._root.children) == 1
    assert not next(iter(cache._root.children.values())).children


def test_names_for_eviction_do_not_pile_up_while_a_prefix_is_used_again_and_again() -> None:
    cache = PrefixCache()
    hashes = HASHER.hashes(np.arange(40, dtype=np.int32))
    cache.lock("first", hashes, 0)
    cache.insert("first", hashes, 10, [(0, 10)])
    cache.unlock("first")
    for index in range(1000):
        cache.lock(f"s{index}", hashes, 10)
        cache.unlock(f"s{index}")
    assert len(cache._leaves) < 100
    assert cache.evict(10).runs == [(0, 10)]


def test_a_prefix_that_was_used_again_outlives_one_that_was_not() -> None:
    cache = PrefixCache()
    first, second = (HASHER.hashes(np.arange(base, base + 40, dtype=np.int32)) for base in (0, 1000))
    for name, hashes, block in (("first", first, 0), ("second", second, 10)):
        cache.lock(name, hashes, 0)
        cache.insert(name, hashes, 10, [(block, 10)])
        cache.unlock(name)
    cache.lock("again", first, 10)
    cache.unlock("again")
    assert cache.evict(4).runs == [(16, 4)], "the end of the second"
    assert cache.evict(7).runs == [(10, 6), (9, 1)], "its rest, then the end of the first"
    assert cache.match(first, 10).runs == ((0, 9),)
    assert cache.evict(9).runs == [(0, 9)]


def test_a_branch_that_is_no_longer_than_what_is_asked_for_is_evicted_whole() -> None:
    """So requests of like sizes find whole runs of blocks, and do not crumble the pool."""
    cache = PrefixCache()
    for index in range(2):
        hashes = HASHER.hashes(np.arange(1000 * index, 1000 * index + 40, dtype=np.int32))
        cache.lock(f"s{index}", hashes, 0)
        cache.insert(f"s{index}", hashes, 10, [(10 * index, 10)])
        cache.unlock(f"s{index}")
    assert cache.evict(12).runs == [(0, 10), (10, 10)]
