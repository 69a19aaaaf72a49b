"""The threads of one rank's store over small host blocks, with what they have reported."""

from __future__ import annotations

import time

import numpy as np
import torch

from medha.api.kv_cache_spec import StoreSpec
from medha.kv.disk_tier import file_name
from medha.kv.lane_replay import HostTierWork, ReadBlocks, StoreBlocks
from medha.wire.messages import DiskFile, DiskReport, StoreLookup
from medha_worker.device import host_device
from medha_worker.model.host_blocks import HostBlocks
from medha_worker.model.kv_cache import KVCache
from medha_worker.rank.kv_objects import KvObjects
from medha_worker.rank.store_threads import StoreThreads

BLOCKS, KEY, IDENTITY = 4, "22" * 32, "a model on a grid"
SLOTS = ((0, 2), (4, 2))


def content_of(number: int) -> DiskFile:
    hashes = "".join(f"{number * BLOCKS + block:032x}" for block in range(BLOCKS))
    return DiskFile(file_name("", hashes), 0, hashes)


def small_host() -> HostBlocks:
    cache = KVCache(
        num_layers=2, kv_heads=2, head_dim=8, num_blocks=8, block_tokens=4, device=host_device(torch.float32)
    )
    return HostBlocks(cache, 32)


def opened(place: StoreSpec, host: HostBlocks, identity: str = IDENTITY, key: str = KEY) -> KvObjects:
    objects = KvObjects(place, identity, host.block_bytes)
    objects.use_key(key)
    return objects


class Rank:
    """The threads of a rank, and what they have reported."""

    def __init__(self, objects: KvObjects, host: HostBlocks, **limits: float) -> None:
        self.reports: list[DiskReport] = []
        self.threads = StoreThreads(objects, host, time.monotonic, **limits)
        self.threads.begin_epoch(DiskReport(0, 0, 1), KEY, self.reports.append)

    def close(self) -> None:
        self.threads.close()

    def write(self, number: int, slots: tuple[tuple[int, int], ...] = SLOTS) -> None:
        one = StoreBlocks(content_of(number), ((number, BLOCKS),), slots)
        self.threads.submit(HostTierWork(stores=(one,)))

    def read(self, number: int, slots: tuple[tuple[int, int], ...], start: int = 0) -> None:
        one = ReadBlocks(content_of(number).name, start, 100 + number, slots, is_stored=True)
        self.threads.submit(HostTierWork(reads=(one,)))

    def look_up(self, *numbers: int) -> None:
        self.threads.look_up(StoreLookup(7, tuple(content_of(number).name for number in numbers), 0, 1))

    def told(self) -> list[DiskReport]:
        """Wait until all is done; return the reports since the last call."""
        assert self.threads.drain(60)
        told = list(self.reports)
        del self.reports[: len(told)]
        return told


def fill(host: HostBlocks, seed: int = 0) -> None:
    rows = np.random.default_rng(seed).integers(0, 256, (32, host.block_bytes), dtype=np.uint8)
    host.put_rows(0, rows)
