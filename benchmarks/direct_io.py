"""Compare two ways to read and write the files of the disk tier: through the page cache, and around it (O_DIRECT).

    python benchmarks/direct_io.py --quick
    python benchmarks/direct_io.py --json benchmarks/results/direct_io.json --folder /var/medha-kv

The tier's own way (`medha_worker.model.kv_files`) goes through the page cache, and asks the kernel to drop what was written.
The other ways keep its format, checksums and synchronisation, and go around the cache: `direct` does one thing after the
other, and `direct, ahead` has a thread that reads the next piece, or writes the last one, while this one is verified. Each way
writes files of 64 blocks that have the wished size together, reads them all, and reads them once more. Nothing else should run.

For each size of a block, it prints the rates and the CPU time of the process, in user mode and in the kernel, checksums
included. What the device does is not measured: a virtual disk may have a cache of its own. For each pass, a claim compares the
tier's way with the better one of the direct ways, over all sizes: going around the cache must not save more than a tenth.
"""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import TypeVar
from zlib import crc32

import numpy as np
from harness import Row, claim, exit_with, in_turn, parser, ratio, report, table

from medha.kv.disk_tier import FILE_BLOCKS, file_name
from medha.kv.prefix_cache import HASH_CHARACTERS
from medha.wire.messages import DiskFile
from medha_worker.model.kv_files import (
    PAGE_BYTES,
    PREFIX,
    KvFiles,
    Rows,
    blocks_at_once,
    packed,
    verify,
    whole_pages,
)

KIB, MIB, GIB = 2**10, 2**20, 2**30
BLOCKS_KIB = 16, 256, 2048
"""Sizes of a block of 16 tokens: of a small model, and of Llama-3-8B in bfloat16 on eight ranks and on one."""
IDENTITY, KEY = "a model on a grid", "ab" * 32
WAYS = "page cache", "direct", "direct, ahead"
PASSES = "write", "first read", "second read"
Found = TypeVar("Found")


class DirectFiles(KvFiles):
    """Files of KV that are read and written around the page cache, in buffers of whole pages."""

    def __init__(self, directory: Path, identity: str, block_bytes: int, *, is_ahead: bool) -> None:
        super().__init__(directory, identity, block_bytes)
        self._bytes = block_bytes
        most = whole_pages(blocks_at_once(block_bytes) * block_bytes) + 2 * PAGE_BYTES
        self._buffers = [np.frombuffer(mmap.mmap(-1, most), dtype=np.uint8) for _ in range(2)]
        self._threads = ThreadPoolExecutor(1)
        self._is_ahead = is_ahead

    def release(self) -> None:
        self._threads.shutdown()
        super().release()

    def write(self, content: DiskFile, pieces: Iterable[Rows]) -> None:
        checksums: list[int] = []
        blocks = len(content.hashes) // HASH_CHARACTERS
        begin = whole_pages(PREFIX.size + len(self._header(content, [0] * blocks)))
        path = self._path(content.name)
        partial_path = path.with_suffix(".partial")
        with _direct(partial_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as descriptor:
            at, left = begin, np.empty(0, dtype=np.uint8)
            last: Future[None] | None = None
            for number, rows in enumerate(pieces):
                buffer, flat = self._buffers[number % 2], rows.reshape(-1)
                size = len(left) + len(flat)
                buffer[: len(left)], buffer[len(left) : size] = left, flat
                whole = size // PAGE_BYTES * PAGE_BYTES
                left = buffer[whole:size].copy()
                if last is not None:
                    last.result()
                last = self._begin(partial(_write_all, descriptor, buffer[:whole], at))
                checksums += [crc32(row.data) for row in rows]
                at += whole
            if last is not None:
                last.result()
            buffer = self._buffers[0]
            if len(left):
                buffer[: len(left)], buffer[len(left) : PAGE_BYTES] = left, 0
                _write_all(descriptor, buffer[:PAGE_BYTES], at)
                os.ftruncate(descriptor, begin + blocks * self._bytes)
            header = packed(self._header(content, checksums))
            buffer[: len(header)], buffer[len(header) : begin] = np.frombuffer(header, dtype=np.uint8), 0
            _write_all(descriptor, buffer[:begin], 0)
            os.fsync(descriptor)
        partial_path.replace(path)

    def read(self, name: str, start: int, count: int, piece_blocks: int) -> Iterator[Rows]:
        """Yield the blocks; those of one piece are good until the piece after the next one is asked for."""
        firsts = range(start, start + count, piece_blocks)
        with self._open(name) as file, _direct(self._path(name), os.O_RDONLY) as descriptor:

            def begun(number: int) -> Future[Rows]:
                blocks = min(piece_blocks, start + count - firsts[number])
                at = file.begin + firsts[number] * self._bytes
                buffer = self._buffers[number % 2]
                return self._begin(partial(_read, descriptor, buffer, at, blocks, self._bytes))

            coming = begun(0)
            for number, first in enumerate(firsts):
                rows = coming.result()
                if number + 1 < len(firsts):
                    coming = begun(number + 1)
                verify(rows, file.checksums[first : first + len(rows)])
                yield rows

    def _begin(self, do: Callable[[], Found]) -> Future[Found]:
        """Let the thread do something, or do it now."""
        if self._is_ahead:
            return self._threads.submit(do)
        found: Future[Found] = Future()
        found.set_result(do())
        return found


@contextmanager
def _direct(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_DIRECT, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, pages: Rows, at: int) -> None:
    written = 0
    while written < len(pages):
        written += os.pwrite(descriptor, pages[written:].data, at + written)


def _read(descriptor: int, buffer: Rows, at: int, blocks: int, block_bytes: int) -> Rows:
    """Read the pages of these blocks into a buffer, and return the blocks."""
    skipped = at % PAGE_BYTES
    size, count = skipped + blocks * block_bytes, 0
    while count < size:
        more = os.preadv(descriptor, [buffer[count : whole_pages(size)].data], at - skipped + count)
        if more == 0:
            raise OSError("the file ends before its blocks")
        count += more
    return buffer[skipped:size].reshape(blocks, block_bytes)


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
        """Write the files, read them two times, and delete them."""
        files = self._opened()
        try:
            contents = [self._content(number) for number in range(self._files)]
            do = self._write, self._read, self._read
            found = {
                name: _timed(partial(one, files, contents)) for name, one in zip(PASSES, do, strict=True)
            }
            for one in contents:
                files.delete(one.name)
        finally:
            files.release()
        return found

    def _opened(self) -> KvFiles:
        if self._way == WAYS[0]:
            files = KvFiles(self._folder, IDENTITY, self._block_bytes)
        else:
            files = DirectFiles(self._folder, IDENTITY, self._block_bytes, is_ahead=self._way == WAYS[2])
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

    def _write(self, files: KvFiles, contents: list[DiskFile]) -> None:
        for one in contents:
            files.write(one, self._pieces())

    def _read(self, files: KvFiles, contents: list[DiskFile]) -> None:
        for one in contents:
            at = 0
            for rows in files.read(one.name, 0, FILE_BLOCKS, blocks_at_once(self._block_bytes)):
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
    """Compare the page cache with the better direct way for each size of a block, and take the geometric mean over the sizes."""

    def compared(name: str, passes: Iterable[str], figure: str) -> Row:
        best = {}
        for kib, by_way in found.items():
            sums = {
                way: [sum(getattr(one[which], figure) for which in passes) for one in rounds]
                for way, rounds in by_way.items()
            }
            best[kib] = min(ratio(sums[way], sums[WAYS[0]]) for way in WAYS[1:])
        peer = "; ".join(f"{kib} KiB: {value:.2f}" for kib, value in best.items())
        return claim(
            f"{name}, direct over page cache", geometric_mean(best.values()), "ratio", 0.9, "more", peer
        )

    times = [compared(f"time of a {name}", (name,), "seconds") for name in PASSES]
    return [*times, compared("CPU time of all of these", PASSES, "cpu_seconds")]


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
    """Return a folder on a disk that can be read and written around the page cache."""
    folder = Path(text)
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {folder}; make it, or name another")
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file, _direct(Path(file.name), os.O_RDONLY):
            return folder
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"{folder} cannot be read around the page cache ({error}); name one on a disk"
        ) from error


if __name__ == "__main__":
    exit_with(main)
