"""A disk tier whose volume has less space than its size: decisions, threads and a real file system together."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest
import torch

from medha.kv.disk_tier import FILE_BLOCKS, DiskTier
from medha.kv.host_tier import Kept
from medha.kv.lane_replay import HostTierWork, ReadBlocks, WriteBlocks
from medha.kv.prefix_cache import hash_at, hash_count, hash_range
from medha.wire.messages import DiskReport
from medha_worker.device import host_device
from medha_worker.model.disk_blocks import DiskBlocks
from medha_worker.model.host_blocks import HostBlocks
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.kv_files import KvFiles, Rows
from small_disk import small_disk

VOLUME_BYTES, ASKED_BYTES, ASKED_BLOCKS = 4 * 2**20, 64 * 2**20, 10_000
PROMPT_BLOCKS = 2 * FILE_BLOCKS


class Prices:
    """Times by which everything is worth a file."""

    def load_seconds(self, blocks: int, files: int) -> float:
        return 1e-6 * blocks

    def fetch_seconds(self, blocks: int) -> float:
        return 1e-6 * blocks

    def compute_seconds(self, context: int, tokens: int) -> float:
        return float(tokens - context)


def hashes_of(prompt: int) -> str:
    return "".join(f"{1000 * prompt + block:032x}" for block in range(PROMPT_BLOCKS))


def waits(prompt: int, first: int, stop: int) -> Kept:
    """Return blocks `first .. stop` of a prompt, which lie in host memory from block 0 on."""
    before = hash_at(hashes_of(prompt), first - 1) if first else ""
    return Kept(prompt, hash_range(hashes_of(prompt), first, stop), before, first, first)


@dataclass
class Tier:
    """The disk tier of a rank, with its controller's part; one prompt at a time is in host memory."""

    folder: Path
    waiting: deque[Kept] = field(default_factory=deque)
    reports: deque[DiskReport] = field(default_factory=deque)

    def __post_init__(self) -> None:
        pool = KVCache(
            num_layers=2, kv_heads=1, head_dim=32, num_blocks=4, block_tokens=8, tensors=2, device=host_device(torch.float32)
        )  # fmt: skip
        self.host = HostBlocks(pool, 2 * PROMPT_BLOCKS)
        files = KvFiles(self.folder / "rank-0", "model", self.host.block_bytes)
        self.disk = DiskTier(ASKED_BLOCKS, [0], 8, Prices(), 4 * FILE_BLOCKS, self)
        self.rank = DiskBlocks(files, self.host, perf_counter, size_bytes=ASKED_BYTES)
        self.rank.begin_epoch(DiskReport(0), "ab" * 32, self.reports.append)
        self.settle()

    # As the host tier, which holds every prompt that waits.

    def take_unwritten(self, most_blocks: int) -> Kept | None:
        if not self.waiting:
            return None
        one = self.waiting.popleft()
        stop, cut = one.first + hash_count(one.hashes), one.first + most_blocks
        if cut < stop:
            self.waiting.appendleft(waits(one.extent, cut, stop))
        return waits(one.extent, one.first, min(cut, stop))

    def wait_again(self, kept: Kept) -> int:
        self.waiting.appendleft(kept)
        return 0

    def holds(self, extent: int, stop: int) -> bool:
        return True

    def content(self, prompt: int) -> Rows:
        shape = PROMPT_BLOCKS, self.host.block_bytes
        return np.random.default_rng(prompt).integers(0, 256, shape).astype(np.uint8)

    def write(self, prompt: int) -> None:
        """Let a prompt wait in host memory until the tier has done with it."""
        self.host.put_rows(0, self.content(prompt))
        self.waiting = deque([waits(prompt, 0, PROMPT_BLOCKS)])
        self.settle()

    def settle(self) -> None:
        """Take steps until nothing more comes of them."""
        for _ in range(1000):
            assert self.rank.drain(60)
            while self.reports:
                self.disk.report(self.reports.popleft())
                self.disk.check()
            if not (self.disk.has_changes or (self.disk.has_place and self.waiting)):
                return
            writes = [
                WriteBlocks(one.file, one.extent, one.first, ((one.first, hash_count(one.file.hashes)),))
                for one in self.disk.write(0)
            ]
            deletes = [one.file for one in self.disk.take_deletes(0)]
            self.rank.submit(HostTierWork(writes=tuple(writes), deletes=tuple(deletes)))
        raise AssertionError("it loops")

    def read(self, prompt: int) -> Rows:
        """Read what the tier holds of a prompt into host memory, and return it."""
        found, at = self.disk.match(hashes_of(prompt), 0, PROMPT_BLOCKS), PROMPT_BLOCKS
        for extent, one in enumerate(found):
            self.rank.submit(
                HostTierWork(reads=(ReadBlocks(one.file, one.start, extent, ((at, one.count),)),))
            )
            at += one.count
        assert self.rank.drain(60)
        assert sum(len(self.reports.popleft().loaded) for _ in found) == len(found)
        return self.host.rows(PROMPT_BLOCKS, at - PROMPT_BLOCKS)

    def has(self, prompt: int) -> int:
        return sum(one.count for one in self.disk.match(hashes_of(prompt), 0, PROMPT_BLOCKS))

    def bytes_in_files(self) -> int:
        return sum(path.stat().st_size for path in (self.folder / "rank-0").glob("*.kv"))


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "small", VOLUME_BYTES) as folder:
        yield folder


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


def test_a_tier_shrinks_to_its_volume_and_later_prompts_replace_earlier_ones(
    volume: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = Tier(volume)
    try:
        most = VOLUME_BYTES // (PROMPT_BLOCKS * tier.host.block_bytes)  # prompts that fit, at most
        assert most >= 3
        for prompt in range(4 * most):
            tier.write(prompt)
            assert np.array_equal(tier.read(prompt), tier.content(prompt)), (
                f"prompt {prompt} is there as a whole"
            )
        assert tier.disk.blocks <= VOLUME_BYTES // tier.host.block_bytes < ASKED_BLOCKS
        assert tier.disk.blocks >= (most - 1) * PROMPT_BLOCKS, "it does not shrink further than it has to"
        there = [prompt for prompt in range(4 * most) if tier.has(prompt) == PROMPT_BLOCKS]
        assert there == list(range(4 * most - len(there), 4 * most)), "the latest ones are there"
        assert len(there) >= most - 1
        assert tier.disk.fault == ""
        assert 0 < tier.disk.counts.failed_writes < 8
        assert tier.bytes_in_files() >= tier.disk.held_blocks * tier.host.block_bytes
        (warning,) = warnings(caplog)
        for part in (str(volume / "rank-0"), str(ASKED_BYTES), "volume larger"):
            assert part in warning
    finally:
        tier.rank.close()


def test_a_volume_that_is_full_of_other_data_leaves_an_empty_tier_and_one_warning(
    volume: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = Tier(volume)
    try:
        (volume / "other").write_bytes(bytes(VOLUME_BYTES - 64 * 1024))
        for prompt in range(20):
            tier.write(prompt)
        assert (tier.disk.blocks, tier.disk.held_blocks, tier.disk.is_used) == (0, 0, False)
        assert tier.disk.counts.failed_writes <= 4, "it does not try for ever"
        assert tier.disk.fault == ""
        assert tier.bytes_in_files() == 0
        assert len(warnings(caplog)) == 1
        assert "files of 0 bytes" in warnings(caplog)[0]
    finally:
        tier.rank.close()


def test_other_data_that_comes_later_lets_a_tier_shrink_further(
    volume: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = Tier(volume)
    try:
        for prompt in range(2):
            tier.write(prompt)
        assert tier.disk.blocks == ASKED_BLOCKS
        (volume / "other").write_bytes(bytes(VOLUME_BYTES - tier.bytes_in_files() - 64 * 1024))
        for prompt in range(2, 10):
            tier.write(prompt)
            assert np.array_equal(tier.read(prompt), tier.content(prompt))
        assert PROMPT_BLOCKS <= tier.disk.blocks <= 2 * PROMPT_BLOCKS
        assert len(warnings(caplog)) == 1
    finally:
        tier.rank.close()
