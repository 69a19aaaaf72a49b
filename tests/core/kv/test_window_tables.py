"""Block tables of layers with a window: what rows see is here, nothing is lost, and the pool never runs out."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.errors import LedgerMismatch
from medha.kv.blocks import BlockCopy, BlockLedger, Run
from medha.kv.window_tables import WindowTable, WindowTables, frees_windows, usable_blocks, window_need


@pytest.mark.parametrize(
    ("windows", "has_tiers", "frees"),
    [
        ((None, 128), False, True),
        ((64, 64), False, True),
        ((None, None), False, False),
        ((None, 128), True, False),
    ],
)
def test_windows_are_freed_without_tiers(
    windows: tuple[int | None, ...], has_tiers: bool, frees: bool
) -> None:
    assert frees_windows(windows, has_tiers=has_tiers) is frees


class Tables(WindowTables):
    """Tables beside a ledger that has blocks for every sequence."""

    def __init__(self, blocks: int, size: int, window: int, most_tokens: int = 2000) -> None:
        self.ledger = BlockLedger(40 * -(-most_tokens // size), size)
        self.most_tokens = most_tokens
        super().__init__(self.ledger, blocks, window)

    def compute(self, sequence: str, start: int, stop: int, drafted: int = 0) -> WindowTable:
        if sequence not in self.ledger:
            assert self.ledger.reserve(sequence, self.most_tokens)
        window = self.window_tokens
        self.place(sequence, start - window + 1, start, stop, stop - drafted - window)
        return self.table(sequence)

    def share_prompt(self, parent: str, child: str, shared_tokens: int) -> list[BlockCopy]:
        self.ledger.fork(parent, child, shared_tokens, self.most_tokens)
        self.fork(parent, child, shared_tokens - self.window_tokens + 1, shared_tokens)
        return self.copy_forks()

    def end(self, sequence: str) -> None:
        self.release(sequence)
        held = self.ledger.runs(sequence)
        self.ledger.release(sequence)
        self.forget(self.ledger.free_runs(held))


def test_the_pool_of_gpt_oss_has_a_window_for_each_sequence_and_one_step() -> None:
    blocks = window_need(
        128, block_size_tokens=16, max_running=256, max_chunk_tokens=2048, max_model_len=131072
    ).of(256)
    assert blocks == (256 * 128 + 2048 + 512) // 16 + 512


def test_short_sequences_need_no_more_than_whole_tables() -> None:
    blocks = window_need(
        4096, block_size_tokens=16, max_running=8, max_chunk_tokens=2048, max_model_len=1000
    ).of(8)
    assert blocks == 8 * 63


@dataclass
class Replica:
    """Random steps of sequences, and the content that each block of the pool has: which position of which sequence."""

    window: int
    size: int
    max_running: int
    max_chunk: int
    max_len: int = 200
    content: dict[int, tuple[str, int]] = field(default_factory=dict)  # slot -> text and position
    texts: dict[str, str] = field(default_factory=dict)  # that of a sequence; its forks have the same prompt
    known: dict[str, int] = field(default_factory=dict)  # positions whose KV is certain
    drafted: dict[str, int] = field(default_factory=dict)
    prompts: dict[str, int] = field(default_factory=dict)
    names: int = 0

    def __post_init__(self) -> None:
        blocks = window_need(
            self.window,
            block_size_tokens=self.size,
            max_running=self.max_running,
            max_chunk_tokens=self.max_chunk,
            max_model_len=self.max_len,
        ).of(self.max_running)
        self.tables = Tables(blocks, self.size, self.window, self.max_len)

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
            table = self.tables.compute(name, start, start + count, drafts)
            rows.append((name, start, count, table))
            self.known[name], self.drafted[name] = start + count - drafts, drafts
        self.tables.check()
        for name, start, count, table in rows:  # every layer writes the rows of all sequences, then attends
            for position in range(start, start + count):
                text = self.texts[name] if position < self.prompts[name] else name
                self.content[self.slot(table, position)] = text, position
        for name, start, count, table in rows:
            for position in range(max(0, start - self.window + 1), start + count):
                text = self.texts[name] if position < self.prompts[name] else name
                assert self.content[self.slot(table, position)] == (text, position)

    def admit(self, draw: st.DataObject) -> None:
        name = f"s{self.names}"
        self.names += 1
        parents = [one for one, known in self.known.items() if 0 < known == self.prompts[one]]
        self.known[name], self.prompts[name] = 0, draw.draw(st.integers(1, self.max_len - 1))
        self.texts[name] = name
        if parents and draw.draw(st.booleans()):
            prompt = self.prompts[parents[0]]
            copies = self.tables.share_prompt(parents[0], name, prompt - 1)
            assert len(copies) <= 1
            self.content |= {
                one.target * self.size + offset: self.content[one.source * self.size + offset]
                for one in copies
                for offset in range(self.size)
                if one.source * self.size + offset in self.content
            }
            self.known[name], self.prompts[name] = prompt - 1, prompt
            self.texts[name] = self.texts[parents[0]]

    def end(self, name: str) -> None:
        if name in self.tables.ledger:
            self.tables.end(name)
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
    tables = Tables(100, 16, 128)
    start = 0
    for count in (512, 512, 100, *([1] * 40)):
        tables.begin_step()
        tables.compute("long", start, start + count)
        start += count
    tables.begin_step()
    assert tables.held_blocks == 128 // 16 + 1


def test_an_accepted_draft_keeps_its_place_and_a_rejected_one_gives_the_window_nothing() -> None:
    tables = Tables(40, 4, 8)
    tables.begin_step()
    tables.compute("a", 0, 30)
    tables.begin_step()
    before = tables.compute("a", 30, 35, drafted=4)
    tables.begin_step()
    after = tables.compute("a", 31, 32)
    kept = (after.first_token - before.first_token) // 4
    assert after.blocks.tolist() == before.blocks[kept:].tolist()
    assert after.first_token <= 31 - 8 + 1


def test_positions_whose_window_is_gone_get_no_blocks() -> None:
    tables = Tables(40, 4, 8)
    tables.compute("a", 0, 30)
    tables.begin_step()
    with pytest.raises(
        LedgerMismatch,
        match="a: positions 20 to 21 need the KV from 13 on, and only that of 20 to 32 is here",
    ):
        tables.compute("a", 20, 21)
    with pytest.raises(LedgerMismatch, match="a has freed the window that b is to share"):
        tables.share_prompt("a", "b", 20)
    with pytest.raises(LedgerMismatch, match="c: positions 5 to 6"):
        tables.compute("c", 5, 6)  # a new sequence begins with its first position


def test_a_pool_that_is_too_small_gives_nothing_and_keeps_its_state() -> None:
    tables = Tables(3, 4, 8)
    with pytest.raises(LedgerMismatch, match="a needs 4 blocks of layers with a window, and 0 of 3 are held"):
        tables.compute("a", 0, 13)
    tables.check()
    assert tables.held_blocks == 0
    tables.compute("a", 0, 12)
    with pytest.raises(LedgerMismatch, match="b needs 1 blocks"):
        tables.share_prompt("a", "b", 11)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_prompt_that_is_shorter_than_the_window_can_be_shared(size: int) -> None:
    tables = Tables(40, size, 8)
    tables.compute("a", 0, 5)
    tables.begin_step()
    tables.share_prompt("a", "b", 4)
    shared = tables.table("b").blocks.tolist()
    assert tables.compute("b", 4, 5).blocks.tolist()[: len(shared)] == shared
    assert shared[: 4 // size] == tables.table("a").blocks.tolist()[: 4 // size]
    tables.check()


def test_the_pool_holds_the_drafts_of_all_steps_in_a_pipeline() -> None:
    """Each of eight steps verifies as many drafts of its sequence as fit beside it in `max_running` rows."""
    stages = running = 8
    blocks = window_need(
        1, block_size_tokens=1, max_running=running, max_chunk_tokens=1, max_model_len=1000, stages=stages
    ).of(running)
    tables = Tables(blocks, 1, 1)
    known = 0
    for accepted in (0, 0, running - 1):
        for name in range(stages):
            tables.begin_step()
            start = known + accepted
            tables.compute(f"s{name}", start, start + running, drafted=running - 1)
        known += accepted + 1
    tables.check()


def usable(tables: Tables, keys: list[Run], blocks: int) -> int:
    """Return how many of the first `blocks` blocks of a prefix can be used."""
    return usable_blocks(tables.are_here(keys)[:blocks], tables.window_tokens, tables.block_size_tokens)


def cached(tables: Tables, name: str, tokens: int) -> None:
    """Compute a prompt in chunks of 16 tokens and end it, as a request does whose blocks the prefix cache remembers."""
    first_seen = tokens - tables.window_tokens + 1
    for start in range(0, tokens, 16):
        tables.begin_step()
        tables.compute(name, start, min(start + 16, tokens))
    tables.will_end(name, max(first_seen, 0), tokens)
    tables.ledger.remember(name, 0, tokens // tables.block_size_tokens)
    tables.begin_step()


def test_a_cached_prefix_can_be_used_up_to_any_window_that_is_here() -> None:
    tables = Tables(30, 4, 9)
    cached(tables, "a", 80)
    keys = tables.ledger.runs("a", 0, 20)
    tables.end("a")
    assert tables.cached_blocks == 20
    assert [usable(tables, keys, blocks) for blocks in (0, 1, 19, 20)] == [0, 1, 19, 20]
    tables.compute(
        "b", 0, 14 * 4
    )  # of its 14 blocks, ten are free: four of the oldest inside `a` are evicted
    tables.check()
    assert [usable(tables, keys, blocks) for blocks in (20, 6, 5, 4, 1)] == [20, 6, 0, 0, 0]
    tables.share("c", 20 * 4 - 8, keys)
    assert tables.table("c").first_token == 72
    with pytest.raises(LedgerMismatch, match="d shares 5 cached blocks"):
        tables.share("d", 5 * 4 - 8, [(keys[0][0], 5)])


def test_windows_inside_a_prompt_are_evicted_before_those_at_ends() -> None:
    """The last window is that of the prompt, for which a long output came after it."""
    tables = Tables(30, 4, 9)
    cached(tables, "a", 80)
    keys = tables.ledger.runs("a", 0, 20)
    for start in range(80, 100):  # the output passes the prompt's end
        tables.compute("a", start, start + 1)
        tables.begin_step()
    tables.end("a")
    tables.compute("b", 0, 27 * 4)
    assert usable(tables, keys, 20) == 20
    tables.begin_step()
    tables.end("b")
    tables.compute("c", 0, 30 * 4)
    assert usable(tables, keys, 20) == 0
    tables.check()


def test_what_is_kept_for_forgotten_blocks_is_free() -> None:
    tables = Tables(30, 4, 9)
    cached(tables, "a", 80)
    keys = tables.ledger.runs("a", 0, 20)
    tables.end("a")
    tables.ledger.evict(keys)
    tables.forget(keys)
    tables.check()
    assert (tables.free_blocks, tables.cached_blocks, usable(tables, keys, 20)) == (30, 0, 0)
