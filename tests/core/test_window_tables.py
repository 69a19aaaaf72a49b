"""Block tables of layers with a window: what rows see is here, nothing is lost, and the pool never runs out."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.kv.window_tables import WindowTable, WindowTables, frees_windows, window_blocks


@pytest.mark.parametrize(
    ("windows", "lanes", "prefix_caching", "frees"),
    [
        ((None, 128), 1, False, True),
        ((64, 64), 1, False, True),
        ((None, None), 1, False, False),
        ((None, 128), 2, False, False),
        ((None, 128), 1, True, False),
    ],
)
def test_windows_are_freed_on_one_lane_without_cached_prefixes(
    windows: tuple[int | None, ...], lanes: int, prefix_caching: bool, frees: bool
) -> None:
    assert frees_windows(windows, lanes=lanes, prefix_caching=prefix_caching) is frees


def test_the_pool_of_gpt_oss_has_a_window_for_each_sequence_and_one_step() -> None:
    blocks = window_blocks(
        128, block_size_tokens=16, max_running=256, max_chunk_tokens=2048, max_model_len=131072
    )
    assert blocks == (256 * 128 + 2048 + 512) // 16 + 512


def test_short_sequences_need_no_more_than_whole_tables() -> None:
    blocks = window_blocks(
        4096, block_size_tokens=16, max_running=8, max_chunk_tokens=2048, max_model_len=1000
    )
    assert blocks == 8 * 63


@dataclass
class Replica:
    """Random steps of sequences, and the content that each block of the pool has: which position of which sequence."""

    window: int
    size: int
    max_running: int
    max_chunk: int
    max_len: int = 200
    content: dict[int, tuple[str, int]] = field(default_factory=dict)  # slot -> sequence and position
    known: dict[str, int] = field(default_factory=dict)  # positions whose KV is certain
    drafted: dict[str, int] = field(default_factory=dict)
    prompts: dict[str, int] = field(default_factory=dict)
    names: int = 0

    def __post_init__(self) -> None:
        blocks = window_blocks(
            self.window,
            block_size_tokens=self.size,
            max_running=self.max_running,
            max_chunk_tokens=self.max_chunk,
            max_model_len=self.max_len,
        )
        self.tables = WindowTables(blocks, self.size, self.window)

    def slot(self, table: WindowTable, position: int) -> int:
        block, offset = divmod(position - table.first_token, self.size)
        assert position >= table.first_token
        return int(table.blocks[block]) * self.size + offset

    def step(self, draw: st.DataObject) -> None:
        for name in [name for name in self.known if draw.draw(st.integers(0, 9)) == 0]:
            self.end(name)
        self.tables.begin_step()
        while len(self.known) < self.max_running and draw.draw(st.booleans()):
            self.admit(draw)
        rows = []
        left, drafts_left = self.max_chunk, self.max_running - len(self.known)
        for name, known in list(self.known.items()):
            if draw.draw(st.integers(0, 3)) == 0:
                continue
            start = known + draw.draw(st.integers(0, self.drafted.pop(name, 0)))
            prompt = self.prompts[name]
            if start < prompt:
                count, drafts = min(draw.draw(st.integers(0, left)), prompt - start), 0
                left -= count
            else:
                drafts = draw.draw(st.integers(0, min(drafts_left, 4)))
                count = 1 + drafts
                drafts_left -= drafts
            if count == 0 or start + count > self.max_len:
                self.known[name] = start
                continue
            table = self.tables.place(name, start, start + count, drafts)
            assert table is not None, "the pool has run out, or the window is not here"
            rows.append((name, start, count, table))
            self.known[name], self.drafted[name] = start + count - drafts, drafts
        self.tables.check()
        for name, start, count, table in rows:  # every layer writes the rows of all sequences, then attends
            for position in range(start, start + count):
                self.content[self.slot(table, position)] = name, position
        for name, start, count, table in rows:
            for position in range(max(0, start - self.window + 1), start + count):
                assert self.content[self.slot(table, position)] == (name, position)

    def admit(self, draw: st.DataObject) -> None:
        name = f"s{self.names}"
        self.names += 1
        parents = [one for one, known in self.known.items() if 0 < known == self.prompts[one]]
        self.known[name], self.prompts[name] = 0, draw.draw(st.integers(1, self.max_len - 1))
        if parents and draw.draw(st.booleans()):
            prompt = self.prompts[parents[0]]
            copies = self.tables.fork(parents[0], name, prompt - 1)
            assert copies is not None
            moved = {
                one.target * self.size + offset: self.content.get(one.source * self.size + offset)
                for one in copies
                for offset in range(self.size)
            }
            self.content |= {
                slot: (name, found[1]) for slot, found in moved.items() if found and found[0] == parents[0]
            }
            self.known[name], self.prompts[name] = prompt - 1, prompt

    def end(self, name: str) -> None:
        self.tables.release(name)
        self.drafted.pop(name, None)
        del self.known[name]


@given(
    window=st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16, 33, 150]),
    size=st.sampled_from([1, 2, 4, 8, 16]),
    max_running=st.integers(1, 6),
    max_chunk=st.sampled_from([1, 3, 16, 64, 200]),
    draw=st.data(),
)
@settings(max_examples=60)
def test_every_row_finds_its_window_and_the_pool_never_runs_out(
    window: int, size: int, max_running: int, max_chunk: int, draw: st.DataObject
) -> None:
    """Sequences end at random, drafts are rejected or accepted, and prompts that have just ended are forked."""
    replica = Replica(window, size, max_running, max_chunk)
    for _ in range(draw.draw(st.integers(5, 25))):
        replica.step(draw)
    for name in list(replica.known):
        replica.end(name)
    replica.tables.check()
    assert replica.tables.held_blocks == 0


def test_a_long_sequence_keeps_a_window_and_no_more() -> None:
    tables = WindowTables(100, 16, 128)
    start = 0
    for count in (512, 512, 100, *([1] * 40)):
        tables.begin_step()
        assert tables.place("long", start, start + count) is not None
        start += count
    tables.begin_step()
    assert tables.held_blocks == 128 // 16 + 1


def test_an_accepted_draft_keeps_its_place_and_a_rejected_one_gives_the_window_nothing() -> None:
    tables = WindowTables(40, 4, 8)
    tables.begin_step()
    tables.place("a", 0, 30)
    tables.begin_step()
    before = tables.place("a", 30, 35, drafted=4)
    tables.begin_step()
    after = tables.place("a", 31, 32)
    assert before is not None
    assert after is not None
    kept = (after.first_token - before.first_token) // 4
    assert after.blocks.tolist() == before.blocks[kept:].tolist()
    assert after.first_token <= 31 - 8 + 1


def test_positions_whose_window_is_gone_get_no_blocks() -> None:
    tables = WindowTables(40, 4, 8)
    tables.place("a", 0, 30)
    tables.begin_step()
    assert tables.place("a", 20, 21) is None
    assert tables.fork("a", "b", 20) is None
    assert tables.place("b", 5, 6) is None  # a new sequence begins with its first position


def test_a_pool_that_is_too_small_gives_nothing_and_keeps_its_state() -> None:
    tables = WindowTables(3, 4, 8)
    assert tables.place("a", 0, 13) is None
    tables.check()
    assert tables.held_blocks == 0
    assert tables.place("a", 0, 12) is not None
    assert tables.fork("a", "b", 11) is None
    tables.check()


def test_the_pool_holds_the_drafts_of_all_steps_in_a_pipeline() -> None:
    """Each of eight steps verifies as many drafts of its sequence as fit beside it in `max_running` rows."""
    stages = running = 8
    blocks = window_blocks(
        1, block_size_tokens=1, max_running=running, max_chunk_tokens=1, max_model_len=1000, stages=stages
    )
    tables = WindowTables(blocks, 1, 1)
    known = 0
    for accepted in (0, 0, running - 1):
        for name in range(stages):
            tables.begin_step()
            start = known + accepted
            assert tables.place(f"s{name}", start, start + running, drafted=running - 1) is not None
        known += accepted + 1
    tables.check()
