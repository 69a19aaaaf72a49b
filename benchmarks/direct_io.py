"""Compare ways to read the files of the disk tier: around the page cache (O_DIRECT), as the tier does, and through it.

    python benchmarks/direct_io.py --quick
    python benchmarks/direct_io.py --json benchmarks/results/direct_io.json --folder /var/medha-kv

The tier (`medha_worker.model.kv_files`) reads the next piece of a file around the cache while the last one is verified. The other
way reads one piece after the other through the cache. A third one reads as the tier does, but into buffers of small pages; it
shows what the tier's huge pages gain (docs/kv-tiers.md). Each way writes files of 64 blocks that have the wished size together,
reads them all, and reads them once more; what was written is dropped from the cache. Smaller blocks are not measured: the tier
also reads up to 2 MiB through the cache. Nothing else should run.

For each size of a block, it prints the rates and the CPU time of the process, in user mode and in the kernel, checksums
included. What the device does is not measured: a virtual disk may have a cache of its own. A first read must not take longer than
through the cache or into small pages, and must not take more CPU time. A second read through the cache is a copy from memory, so there is no goal for it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median

import numpy as np
from harness import Row, claim, exit_with, in_turn, parser, ratio, report, table

from medha.kv.disk_tier import FILE_BLOCKS, file_name
from medha.kv.prefix_cache import HASH_CHARACTERS
from medha.wire.messages import DiskFile
from medha_worker.model.kv_files import (
    KvFiles,
    Rows,
    blocks_at_once,
    verify,
)

KIB, MIB, GIB = 2**10, 2**20, 2**30
BLOCKS_KIB = 128, 256, 2048
"""Sizes of a block of 16 tokens: of Llama-3-8B in bfloat16 on sixteen ranks, on eight and on one."""
IDENTITY, KEY = "a model on a grid", "ab" * 32
CACHED, SMALL, TIER = "page cache", "tier with small pages", "tier"
PASSES = "first read", "second read"
PR_SET_THP_DISABLE = 41  # linux/prctl.h


class CachedFiles(KvFiles):
    """Files of KV that are read through the page cache."""

    def __init__(self, directory: Path, identity: str, block_bytes: int) -> None:
        super().__init__(directory, identity, block_bytes)
        self._bytes = block_bytes

    def read(self, name: str, start: int, count: int) -> Iterator[Rows]:
        most = blocks_at_once(self._bytes)
        with self._open(name) as file:
            for first in range(start, start + count, most):
                blocks = min(most, start + count - first)
                rows = np.empty((blocks, self._bytes), dtype=np.uint8)
                read = os.preadv(file.descriptor, [rows.data], file.begin + first * self._bytes)
                assert read == rows.nbytes, "a read of a file in the page cache is short"
                verify(rows, file.checksums[first : first + blocks])
                yield rows


class SmallPageFiles(KvFiles):
    """Files of KV that are read around the page cache, into buffers of small pages."""

    def acquire(self) -> None:
        _allow_huge_pages(False)  # until the end, so that the kernel merges none meanwhile
        self._ahead.start()
        super().acquire()

    def release(self) -> None:
        super().release()
        _allow_huge_pages(True)


def _allow_huge_pages(allowed: bool) -> None:
    """Let the kernel give this process huge pages, or forbid it."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_THP_DISABLE, int(not allowed), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel cannot forbid huge pages to a process")


WAYS = {CACHED: CachedFiles, SMALL: SmallPageFiles, TIER: KvFiles}


@dataclass
class Taken:
    """Seconds of one pass over all files, and CPU seconds of the process meanwhile."""

    seconds: float
    cpu_seconds: float


class Passes:
    """The passes over the files of one way and one size of a block."""

    def __init__(self, folder: Path, way: str, block_bytes: int, total_bytes: int) -> None:
        self._folder, self._way, self._block_bytes = folder / way, way, block_bytes
        self._files = max(1, total_bytes // (FILE_BLOCKS * block_bytes))
        self.bytes = self._files * FILE_BLOCKS * block_bytes
        random = np.random.default_rng(0)
        self._rows = random.integers(0, 256, (FILE_BLOCKS, block_bytes), dtype=np.uint8)

    def run(self) -> dict[str, Taken]:
        """Write the files, read them two times, and delete them; the writes are not timed."""
        files = self._opened()
        try:
            contents = [self._content(number) for number in range(self._files)]
            for one in contents:
                files.write(one, self._pieces())
            found = {name: _timed(partial(self._read, files, contents)) for name in PASSES}
            for one in contents:
                files.delete(one.name)
        finally:
            files.release()
        return found

    def _opened(self) -> KvFiles:
        files = WAYS[self._way](self._folder, IDENTITY, self._block_bytes)
        files.acquire()
        files.keep_key(KEY)
        return files

    def _content(self, number: int) -> DiskFile:
        hashes = "".join(
            f"{number * FILE_BLOCKS + block:0{HASH_CHARACTERS}x}" for block in range(FILE_BLOCKS)
        )
        return DiskFile(file_name("", hashes), 0, hashes)

    def _pieces(self) -> Iterator[Rows]:
        most = blocks_at_once(self._block_bytes)
        return (self._rows[at : at + most] for at in range(0, FILE_BLOCKS, most))

    def _read(self, files: KvFiles, contents: list[DiskFile]) -> None:
        for one in contents:
            at = 0
            for rows in files.read(one.name, 0, FILE_BLOCKS):
                assert rows[0, 0] == self._rows[at, 0], "what is read is not what was written"
                at += len(rows)


def _timed(do: Callable[[], None]) -> Taken:
    started, cpu = time.perf_counter(), time.process_time()
    do()
    return Taken(time.perf_counter() - started, time.process_time() - cpu)


def row(kib: int, way: str, size_bytes: int, rounds: list[dict[str, Taken]]) -> Row:
    """Return the medians of the rounds."""
    found: Row = {"block_kib": kib, "way": way}
    for name in PASSES:
        each = [one[name] for one in rounds]
        key = name.replace(" ", "_")
        found[f"{key}_mib_per_second"] = size_bytes / MIB / median(one.seconds for one in each)
        found[f"{key}_cpu_seconds_per_gib"] = median(one.cpu_seconds for one in each) * GIB / size_bytes
    return found


def claims(found: dict[int, dict[str, list[dict[str, Taken]]]]) -> list[Row]:
    """Compare the tier with the other ways for each size of a block, and take the geometric mean over the sizes."""

    def compared(name: str, figure: str, other: str) -> Row:
        each = {
            kib: ratio(*([getattr(one[PASSES[0]], figure) for one in by_way[way]] for way in (TIER, other)))
            for kib, by_way in found.items()
        }
        peer = "; ".join(f"{kib} KiB: {value:.2f}" for kib, value in each.items())
        return claim(f"{name}, tier over {other}", geometric_mean(each.values()), "ratio", 1.0, "less", peer)

    return [
        compared("time of a first read", "seconds", CACHED),
        compared("CPU time of a first read", "cpu_seconds", CACHED),
        compared("time of a first read", "seconds", SMALL),
    ]


def main() -> int:
    options = parser(__doc__, quick="32 MiB for each size of a block, two rounds", rounds=5)
    options.add_argument(
        "--folder", type=_folder, default=".", help="on the disk to measure (default: this folder)"
    )
    arguments = options.parse_args()
    rounds, total_bytes = (2, 32 * MIB) if arguments.quick else (arguments.rounds, 256 * MIB)
    rows: list[Row] = []
    found: dict[int, dict[str, list[dict[str, Taken]]]] = {}
    with tempfile.TemporaryDirectory(prefix="direct-io-", dir=arguments.folder) as name:
        for kib in BLOCKS_KIB:
            passes = {way: Passes(Path(name), way, kib * KIB, total_bytes) for way in WAYS}
            each = in_turn(rounds, {f"{way}, {kib} KiB": one.run for way, one in passes.items()})
            found[kib] = dict(zip(WAYS, each.values(), strict=True))
            rows += [row(kib, way, passes[way].bytes, found[kib][way]) for way in WAYS]
    head = [f"{name} {unit}" for name in PASSES for unit in ("MiB/s", "CPU s/GiB")]
    table(("block KiB", "way", *head), [list(one.values()) for one in rows])
    return report(claims(found), arguments.json, {"total_mib": total_bytes // MIB, "rows": rows})


def _folder(text: str) -> Path:
    """Return a folder on a disk that can be read around the page cache."""
    folder = Path(text)
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {folder}; make it, or name another")
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            os.close(os.open(file.name, os.O_RDONLY | os.O_DIRECT))
            return folder
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{folder} cannot be read around the page cache ({error}); name one on a disk"
        ) from error


if __name__ == "__main__":
    exit_with(main)
