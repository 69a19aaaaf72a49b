"""The KV ledger against a model that is too simple to be wrong."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from medha.kv.blocks import BlockCopy, BlockLedger


class LedgerMachine(RuleBasedStateMachine):
    """Two ledgers take the same operations; the model knows how many blocks each sequence owns and shares."""

    @initialize(blocks=st.integers(0, 40), size=st.integers(1, 5))
    def start(self, blocks: int, size: int) -> None:
        self.blocks, self.size = blocks, size
        self.ledgers = [BlockLedger(blocks, size), BlockLedger(blocks, size)]
        self.tables: dict[str, list[int]] = {}
        self.names = 0

    # --- operations ---------------------------------------------------------------------------------

    @rule(tokens=st.integers(0, 60))
    def reserve(self, tokens: int) -> None:
        name, wanted = self._new_name(), -(-tokens // self.size)
        runs = self._free_runs()
        assert self.ledgers[0].fits(tokens) == (wanted <= sum(runs))
        results = [ledger.reserve(name, tokens) for ledger in self.ledgers]
        assert results == [wanted <= sum(runs)] * 2
        if not results[0]:
            return
        table = self.ledgers[0].table(name).tolist()
        assert len(table) == wanted
        if wanted and max(runs) >= wanted:
            assert table == list(range(table[0], table[0] + wanted)), "one run was large enough"
        self._now_holds(name, table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), tokens=st.integers(0, 80))
    def grow(self, data: st.DataObject, tokens: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.tables)))
        before = self.tables[name]
        wanted = max(0, -(-tokens // self.size) - len(before))
        free = self._free()
        continues = bool(before) and all(before[-1] + 1 + offset in free for offset in range(wanted))
        results = [ledger.grow(name, tokens) for ledger in self.ledgers]
        assert results == [wanted <= len(free)] * 2
        if not results[0]:
            return
        table = self.ledgers[0].table(name).tolist()
        assert table[: len(before)] == before, "what is written stays where it is"
        assert len(table) == len(before) + wanted
        if continues:
            assert table[len(before) :] == list(range(before[-1] + 1, before[-1] + 1 + wanted))
        self._now_holds(name, table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), more=st.integers(0, 20))
    def fork(self, data: st.DataObject, more: int) -> None:
        parent = data.draw(st.sampled_from(sorted(self.tables)))
        shared = data.draw(st.integers(0, len(self.tables[parent]) * self.size))
        whole, partial = divmod(shared, self.size)
        name, wanted = self._new_name(), -(-(shared + more) // self.size) - whole
        results = [ledger.fork(parent, name, shared, shared + more) for ledger in self.ledgers]
        assert results[0] == results[1]
        assert (results[0] is not None) == (wanted <= len(self._free()))
        if results[0] is None:
            return
        table = self.ledgers[0].table(name).tolist()
        assert table[:whole] == self.tables[parent][:whole]
        assert len(table) == whole + wanted
        copies = [BlockCopy(self.tables[parent][whole], table[whole])] if partial else []
        assert results[0] == copies
        self._now_holds(name, table, shared=whole)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tables)))
        del self.tables[name]
        for ledger in self.ledgers:
            ledger.release(name)
            assert name not in ledger

    # --- what always holds ----------------------------------------------------------------------------

    @invariant()
    def tables_are_those_of_the_model(self) -> None:
        for ledger in self.ledgers:
            assert len(ledger) == len(self.tables)
            for name, table in self.tables.items():
                assert name in ledger
                assert list(ledger.table(name)) == table
                assert ledger.reserved_tokens(name) == len(table) * self.size

    @invariant()
    def no_block_is_lost_and_none_is_free_and_held(self) -> None:
        free = self._free()
        for ledger in self.ledgers:
            assert ledger.free_blocks == len(free)
            assert ledger.held_blocks == self.blocks - len(free)
            assert ledger.free_tokens == len(free) * self.size
            listed = [block for first, length in ledger._free_runs for block in range(first, first + length)]
            assert listed == sorted(free), "the free runs, in order"
            ends = [first + length for first, length in ledger._free_runs]
            starts = [first for first, _ in ledger._free_runs]
            assert not set(ends) & set(starts), "neighbouring runs are joined"

    @invariant()
    def equal_ledgers_have_equal_hashes(self) -> None:
        first, second = (ledger.state_hash() for ledger in self.ledgers)
        assert first == second
        assert 0 <= first < 2**53

    # --- the model --------------------------------------------------------------------------------------

    def _new_name(self) -> str:
        self.names += 1
        return f"s{self.names}"

    def _free(self) -> set[int]:
        return set(range(self.blocks)) - {block for table in self.tables.values() for block in table}

    def _free_runs(self) -> list[int]:
        """Lengths of the maximal runs of free blocks."""
        free, runs = self._free(), Counter[int]()
        start = -1
        for block in sorted(free):
            if block - 1 not in free:
                start = block
            runs[start] += 1
        return list(runs.values())

    def _now_holds(self, name: str, table: list[int], shared: int = 0) -> None:
        own = table[shared:] if name not in self.tables else table[len(self.tables[name]) :]
        assert len(set(table)) == len(table)
        assert set(own) <= self._free(), "only free blocks are given out"
        self.tables[name] = table


LedgerMachine.TestCase.settings = settings(stateful_step_count=25)
TestLedger = LedgerMachine.TestCase


def test_a_request_takes_the_smallest_run_that_holds_it_whole() -> None:
    ledger = BlockLedger(10, 1)
    for name, tokens in (("a", 5), ("b", 1), ("c", 3), ("d", 1)):
        ledger.reserve(name, tokens)
    ledger.release("a")  # free: 0-4
    ledger.release("c")  # and 6-8
    ledger.reserve("e", 3)
    assert list(ledger.table("e")) == [6, 7, 8]


def test_a_request_that_no_run_holds_takes_the_longest_runs_first() -> None:
    ledger = BlockLedger(10, 1)
    for name, tokens in (("a", 2), ("b", 1), ("c", 4), ("d", 1), ("e", 2)):
        ledger.reserve(name, tokens)
    for name in "ace":
        ledger.release(name)
    ledger.reserve("f", 6)
    assert list(ledger.table("f")) == [3, 4, 5, 6, 0, 1]


def test_a_table_grows_into_the_run_behind_it_even_where_another_fits_better() -> None:
    ledger = BlockLedger(12, 1)
    for name, tokens in (("a", 2), ("b", 3), ("c", 1), ("d", 2), ("e", 4)):
        ledger.reserve(name, tokens)
    ledger.release("b")  # free: 2-4
    ledger.release("d")  # and 6-7
    ledger.grow("a", 4)
    assert list(ledger.table("a")) == [0, 1, 2, 3]
    ledger.grow("a", 6)
    assert list(ledger.table("a")) == [0, 1, 2, 3, 4, 6]


def test_the_blocks_of_a_parent_that_has_gone_stay_with_its_child() -> None:
    ledger = BlockLedger(4, 4)
    ledger.reserve("parent", 8)
    assert ledger.fork("parent", "child", 8, 8) == []
    ledger.release("parent")
    assert ledger.held_blocks == 2
    ledger.release("child")
    assert ledger.held_blocks == 0


def test_the_hash_tells_tables_apart_whatever_the_names() -> None:
    """Of names and block numbers written behind each other, `a1` at 2 and `a` at 12 would look the same."""
    hashes = set()
    for name, skipped in (("a", 12), ("a1", 2)):
        ledger = BlockLedger(20, 1)
        ledger.reserve("gap", skipped)
        ledger.reserve(name, 3)
        ledger.release("gap")
        hashes.add(ledger.state_hash())
    assert len(hashes) == 2


def test_sharing_more_than_the_parent_holds_is_our_own_bug() -> None:
    ledger = BlockLedger(10, 4)
    ledger.reserve("parent", 8)
    with pytest.raises(AssertionError):
        ledger.fork("parent", "child", 12, 16)
