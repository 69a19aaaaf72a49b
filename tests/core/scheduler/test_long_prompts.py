"""No decision takes long because a prompt is long: these tests count executed instructions, not seconds.

What is done once for a prompt may grow with it. What is done in each step, or for each report, may not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from medha.kv.disk_tier import FILE_BLOCKS, DiskTier, file_name
from medha.kv.host_tier import HostLedger, HostTier
from medha.kv.pools import KvPools
from medha.kv.prefix_cache import Branch, hash_range
from medha.kv.rank_loads import Loaded
from medha.scheduler.load_waits import LoadWaits
from medha.scheduler.peer_kv import PeerKv, _Taken
from medha.wire.messages import DiskFile, DiskReport, KvPart

from ..kv.test_disk_tier import Fixed, chain, tier, write

SIZE = 16
LANES = 4


def instructions(run: Callable[[], object]) -> int:
    """Return how many instructions of the interpreter a call executes; those of built-in functions count as one."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def pools(blocks: int, *, lanes: int = 1, striped: bool = False) -> KvPools:
    """Return pools with all tiers, of so many blocks on each lane."""
    found = KvPools(
        lanes=lanes,
        kv_blocks=blocks,
        block_size_tokens=SIZE,
        tokens_per_lane=blocks * SIZE,
        stripes_prompts=striped,
        host_blocks=blocks,
        prices=Fixed(),
        disk_blocks=2 * blocks,
        lane_ranks=[[lane] for lane in range(lanes)],
        has_peers=True,
    )
    for lane in range(lanes):
        found.disk_report(DiskReport(lane, found_all=True, lane=lane))
    return found


def read_from_peer(found: KvPools, hashes: str, parts: int) -> list[tuple[int, int]]:
    """Begin to read a prompt from another replica as so many tickets; return the extents, each with its lane."""
    extents: list[tuple[int, int]] = []
    for part in range(parts):
        stop = len(hashes) * (part + 1) // parts
        _, read = found.begin_peer_loads(f"ticket-{part}", [KvPart(0, hashes[:stop])])
        extents += read
    return extents


def fetch_a_part(blocks: int) -> int:
    found, hashes = pools(blocks), chain(1, blocks)
    extents = [extent for _, extent in read_from_peer(found, hashes, blocks // 4)]
    found.disk_report(DiskReport(0, loaded=tuple((extent, 0.1) for extent in extents)))
    assert found.admit("a", SIZE * blocks, SIZE * blocks, block_hashes=hashes) is not None
    assert found.unfetched_blocks("a") == blocks - 1
    return instructions(lambda: (found.fetch("a", 10), found.unfetched_blocks("a")))


def test_a_step_that_fetches_a_part_looks_at_that_part_only() -> None:
    assert fetch_a_part(400) == fetch_a_part(100)


def end_reads(blocks: int) -> int:
    found = pools(blocks)
    extents = [extent for _, extent in read_from_peer(found, chain(1, blocks), blocks)]
    report = DiskReport(0, loaded=tuple((extent, 0.1) for extent in extents))
    return instructions(lambda: found.disk_report(report))


def test_a_report_of_ended_reads_looks_at_each_once() -> None:
    assert end_reads(400) < 4.5 * end_reads(100)


def end_a_read(tickets: int) -> int:
    peers = PeerKv(pools(4), LoadWaits())
    for ticket in range(tickets):
        peers._taken[f"{ticket}"] = _Taken("peer", {(0, ticket)})
        peers._ticket_of[0, ticket] = f"{ticket}"
    return instructions(lambda: peers.loaded(0, [Loaded(tickets - 1, 1, 0.1, is_there=True)], 1.0))


def test_the_end_of_a_read_looks_at_no_other_ticket() -> None:
    assert end_a_read(100) == end_a_read(10)


def compute_a_chunk(stripes: int) -> int:
    blocks = stripes * 2048 // SIZE
    found = pools(blocks // LANES, lanes=LANES, striped=True)
    tokens = SIZE * blocks
    assert found.admit("a", tokens, tokens, block_hashes=chain(1, blocks)) is not None
    found.computed("a", tokens - 2048)
    return instructions(lambda: found.computed("a", tokens - 1024))


def test_a_chunk_of_a_striped_prompt_looks_at_no_stripe_before_it() -> None:
    assert compute_a_chunk(64) < compute_a_chunk(16) + 100


@pytest.mark.parametrize("keep", [0, 1])
def test_the_digest_of_a_host_ledger_encodes_only_what_has_changed(keep: int) -> None:
    def encode(extents: int) -> int:
        ledger = HostLedger(2 * extents)
        for _ in range(extents):
            ledger.store(2)
        ledger.digest()

        def change() -> None:
            ledger.drop(0, keep)
            ledger.digest()

        return instructions(change)

    assert encode(400) == encode(100)


def host_tier(extents: int, *, served: bool = False) -> tuple[HostTier, str]:
    """Return a full tier with two prompts in so many extents of four blocks; tickets may keep all of the first one."""
    host, hashes = HostTier(8 * extents, SIZE, Fixed()), chain(10, 4 * extents)
    for name in (10, 20):
        for extent in range(extents):
            made = host.begin_load(chain(name, 4 * extents), 4 * extent, 4, "disk", due=0.0)
            assert made is not None
            host.end_load(made[0], is_there=True)
    if served:
        for ticket in range(20):
            host.serve(f"{ticket}", host.match(hashes, 0, 4 * extents))
    return host, hashes


@pytest.mark.parametrize("served", [False, True])
def test_what_makes_room_is_found_without_a_look_at_all_that_is_held(served: bool) -> None:
    def drop(extents: int) -> int:
        host, _ = host_tier(extents, served=served)
        for name in (30, 40):  # for these, anything makes room that nothing keeps
            host.begin_swap(chain(name, 8))
        host.offload([Branch(chain(30, 8), 0, 8, [(0, 8)])])  # what tickets keep is passed over once
        new = Branch(chain(40, 8), 0, 8, [(0, 8)])
        found = instructions(lambda: host.offload([new]))
        assert host.counts.dropped_blocks == 16
        host.check()
        return found

    assert drop(400) < drop(100) + 100


def test_a_prefix_is_dropped_from_its_end_with_one_look_at_each_extent() -> None:
    def drop_all(extents: int) -> int:
        host, _ = host_tier(extents)
        new = Branch(chain(30, 8 * extents), 0, 8 * extents, [(0, 8 * extents)])
        host.begin_swap(new.hashes)
        found = instructions(lambda: host.offload([new]))
        assert host.counts.dropped_blocks == 8 * extents
        host.check()
        return found

    assert drop_all(400) < 4.5 * drop_all(100)


def test_one_more_ticket_or_one_less_looks_at_no_other_ticket() -> None:
    def offer(tickets: int) -> int:
        host, hashes = host_tier(20)
        held = host.match(hashes, 0, 80)
        for ticket in range(tickets):
            host.serve(f"{ticket}", held)

        def give_and_take() -> None:
            assert host.served_of(held) == host.served_blocks == 80
            host.serve("new", held)
            host.unserve("new")
            host.unpin()

        found = instructions(give_and_take)
        for ticket in range(tickets):
            host.unserve(f"{ticket}")
        assert host.served_blocks == 0
        assert not host._kept
        host.check()
        return found

    assert offer(100) == offer(10)


def disk_tier(files: int, blocks: int) -> tuple[DiskTier, str]:
    """Return a tier of so many blocks, with a prompt that was written file by file."""
    disk, hashes = tier(blocks, ranks=1, most_writing=10 * FILE_BLOCKS), chain(10, files * FILE_BLOCKS)
    for file in range(files):
        write_part(disk, hashes, file)
    return disk, hashes


def write_part(disk: DiskTier, hashes: str, file: int) -> None:
    start = file * FILE_BLOCKS
    before = hash_range(hashes, start - 1, start) if file else ""
    writes = write(disk, hash_range(hashes, start, start + FILE_BLOCKS), start, before=before)
    disk.report(DiskReport(0, written=tuple(one.file.name for one in writes)))


@pytest.mark.parametrize("is_full", [False, True])
def test_one_more_file_of_a_prompt_is_written_without_a_look_at_those_before(is_full: bool) -> None:
    def write_one_more(files: int) -> int:
        disk, other = disk_tier(files, 2 * files * FILE_BLOCKS)
        long = chain(200, (files + 1) * FILE_BLOCKS)
        for file in range(files - 1 + is_full):
            write_part(disk, long, file)
        if is_full:  # the first file without room puts all in order
            write_part(disk, chain(100, FILE_BLOCKS), 0)
            disk.use(disk.match(long, 0, len(long)))
        deleted = len(disk.take_deletes(0))
        found = instructions(lambda: write_part(disk, long, files - 1 + is_full))
        assert len(disk.match(long, 0, len(long))) == files + is_full
        assert len(disk.take_deletes(0)) == deleted == is_full
        assert len(disk.match(other, 0, len(other))) == files - 2 * is_full
        disk.check()
        return found

    assert write_one_more(40) < write_one_more(10) + 100


def test_a_question_about_a_long_prompt_is_asked_again_at_no_cost_until_the_tier_changes() -> None:
    def ask_again(extents: int) -> int:
        host, hashes = host_tier(extents)
        first = host.match(hashes, 0, 4 * extents)
        found = instructions(lambda: host.match(hashes, 0, 4 * extents))
        assert host.match(hashes, 0, 4 * extents) == first
        assert len(host.match(hashes, 0, 4 * extents - 4)) == extents - 1
        assert host.match(hashes, 0, 6) == [first[0], replace(first[1], count=2)]
        host.begin_swap(chain(30, 8))
        host.offload([Branch(chain(30, 8), 0, 8, [(0, 8)])])
        assert len(host.match(hashes, 0, 4 * extents)) == extents - 2
        return found

    assert ask_again(400) == ask_again(100)


def test_lanes_that_lack_the_beginning_of_a_striped_prompt_are_not_searched_for_the_rest() -> None:
    def look(stripes: int) -> int:
        blocks = stripes * 2048 // SIZE
        found, hashes = pools(blocks // LANES, lanes=LANES, striped=True), chain(10, blocks)
        return instructions(lambda: found.expected(SIZE * blocks, hashes, is_long=True))

    assert look(64) == look(16)


def test_nothing_is_searched_behind_what_files_hold_of_a_prompt() -> None:
    def look(blocks: int) -> int:
        found, hashes = pools(blocks), chain(10, blocks)
        file = DiskFile(file_name("", hashes[:32]), 0, hashes[:32])
        found.disk_report(DiskReport(0, found=(file,)))
        return instructions(lambda: found.begin_loads(SIZE * blocks, hashes, due=0.0))

    assert look(400) == look(100)


def test_a_striped_prompt_is_cut_into_its_lanes_parts_once() -> None:
    def look_again(stripes: int) -> int:
        blocks = stripes * 2048 // SIZE
        found, hashes = pools(blocks // LANES, lanes=LANES, striped=True), chain(10, blocks)
        tokens = SIZE * blocks
        assert found.admit("a", tokens, tokens, block_hashes=hashes) is not None
        found.computed("a", tokens)
        before = found.expected(tokens, hashes, is_long=True)
        again = instructions(lambda: found.expected(tokens, hashes, is_long=True))
        assert found.expected(tokens, hashes, is_long=True) == before == (tokens - SIZE, blocks - 1)
        return again

    assert look_again(64) < look_again(16) + 100
