"""Files of KV blocks on a disk: their format, and how they are written, found, read and deleted.

A file holds consecutive blocks of one rank's part of the KV. It begins with a page or more::

    8 bytes   magic and version of the format
    4 bytes   length of the header
    4 bytes   CRC-32 of the header
    header    JSON: identity of the KV, key of the hashes, hashes, size of a block, a CRC-32 of each block
    zeros     up to the next whole page; then come the blocks

A file is written under another name, synchronised and then renamed, so that a file with its own name is whole. What a
crash leaves behind has the other name, and is deleted at the next start. What was changed since does not match its
checksums. The identity names everything that the bytes depend on, so KV of another model, data type or grid is never read.

One thread may read files while another one writes and deletes others; nothing else here is thread-safe. All but small reads
go around the page cache: the host tier has what is likely to be read again, and memory is better spent on it.
Writes go through the cache and are then dropped from it; going around it saved no time (docs/kv-tiers.md).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32

from medha.kv.blocks import Run
from medha.kv.disk_tier import FILE_BLOCKS, file_name
from medha.kv.prefix_cache import HASH_CHARACTERS, hash_count
from medha.wire.messages import DiskFile
from medha_worker.model.file_pages import (
    PAGE_BYTES,
    Bytes,
    ReadAhead,
    go_around_cache,
    read_pages,
    whole_pages,
)

Rows = npt.NDArray[np.uint8]
"""Bytes of consecutive blocks, [blocks, bytes of a block]."""

_MAGIC = b"MEDHAKV1"
PREFIX = struct.Struct("<8sII")
"""Magic, length of the header, CRC-32 of the header."""
_MOST_HEADER_BYTES = 2**20
_SUFFIX, _PARTIAL = ".kv", ".partial"
_KEY_BYTES = 32
_NAME_CHARACTERS = 32
_PROBE_BYTES, _LEAST_PROBE_BLOCKS, _MOST_PROBE_FILES = 8 * 2**20, 3, 8
"""Total size of the files that measure a disk, the fewest blocks of each file, and the most files.

Such a file has as many blocks as any other, or enough for several pieces, so that it is read in the same way.
"""
_PIECE_BYTES = 4 * 2**20
"""Bytes that are copied at once. A step that drops host blocks may wait while so many are copied."""
_IN_USE = "another process uses it, or this one hangs in it since an earlier epoch; end that process, or restart the rank"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of the errors of a disk that has no space, or none for this user."""


class FileDamaged(Exception):
    """A file is not what was written."""


def blocks_within(size_bytes: int, block_bytes: int) -> int:
    """Return how many blocks fit into a size, even if each has a file of its own."""
    return size_bytes // (block_bytes + PAGE_BYTES)


def blocks_at_once(block_bytes: int) -> int:
    """Return how many blocks of this size are copied between files, or objects, and host memory at once."""
    return max(1, _PIECE_BYTES // block_bytes)


class KvFiles:
    """The files of one rank in a directory of its own."""

    def __init__(self, directory: Path, identity: str, block_bytes: int, *, piece_blocks: int = 0) -> None:
        """`identity` names everything that the content of blocks depends on.

        `piece_blocks` is the number of blocks that are read at once. With 0, it is that of `blocks_at_once`.
        """
        self.directory = directory
        self._identity = blake2b(identity.encode(), digest_size=16).hexdigest()
        self._block_bytes = block_bytes
        self._key_tag = ""
        self._lock: int | None = None  # descriptor of the file that keeps other processes out
        self._piece_blocks = piece_blocks or blocks_at_once(block_bytes)
        self._ahead = ReadAhead(self._piece_blocks * block_bytes)

    def acquire(self) -> None:
        """Make the directory, and keep other processes out of it.

        Raises:
            OSError: it cannot be made or written, or is in use.
        """
        if self._lock is not None:
            return
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise OSError(errno.EBUSY, _IN_USE, str(self.directory)) from error
        except OSError:
            os.close(lock)
            raise
        self._lock = lock

    def release(self) -> None:
        """Let other processes use the directory."""
        self._ahead.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # --- the key of hashes ----------------------------------------------------------------------------

    def kept_key(self) -> str:
        """Return the key of the hashes of the files, hexadecimal; empty if there is none."""
        try:
            key = (self.directory / "hash-key").read_text("ascii")
            return key if len(bytes.fromhex(key)) == _KEY_BYTES else ""
        except (OSError, ValueError):
            return ""

    def keep_key(self, key: str) -> None:
        """Keep the key of all hashes from now on; files of another one count as foreign.

        Raises:
            OSError: it cannot be written.
        """
        self._key_tag = key_tag(key)
        if self.kept_key() == key:
            return
        partial = self.directory / f"hash-key{_PARTIAL}"
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(key)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.directory / "hash-key")

    # --- files ----------------------------------------------------------------------------------------

    def scan(self, moved: Callable[[], None] = lambda: None) -> Iterator[DiskFile]:
        """Yield the files that can be used, the least recently written first; delete all others.

        Call `moved` for each entry of the directory and for each file that is read. A scan may take long, and these calls
        show that it makes progress.

        Raises:
            OSError: the directory cannot be read.
        """
        found: list[tuple[int, Path]] = []
        with os.scandir(self.directory) as entries:
            for entry in entries:
                moved()
                if entry.name.endswith((_SUFFIX, _PARTIAL)) and entry.is_file(follow_symlinks=False):
                    found.append((entry.stat(follow_symlinks=False).st_mtime_ns, Path(entry.path)))
        for _, path in sorted(found):
            moved()
            try:
                yield self._usable(path)
            except (FileDamaged, OSError):
                with suppress(OSError):
                    path.unlink()

    def _usable(self, path: Path) -> DiskFile:
        """Return what a file holds.

        Raises:
            FileDamaged: it is not a file of this rank, or is not whole.
            OSError: it cannot be read.
        """
        if path.suffix != _SUFFIX:
            raise FileDamaged("it was not finished")
        with self._open(path.stem) as file:
            return file.content

    def write(self, content: DiskFile, pieces: Iterable[Rows]) -> None:
        """Write a file of the blocks that `pieces` have together.

        Raises:
            OSError: it cannot be written.
        """
        blocks = hash_count(content.hashes)
        begin = whole_pages(PREFIX.size + len(self._header(content, [0] * blocks)))
        partial = self._path(content.name).with_suffix(_PARTIAL)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            checksums: list[int] = []
            at = begin
            for rows in pieces:
                checksums += [crc32(row.data) for row in rows]
                at += _write_all(descriptor, rows.reshape(-1).data, at)
            header = self._header(content, checksums)
            _write_all(descriptor, memoryview(packed(header)), 0)
            os.fsync(descriptor)
            with suppress(OSError):  # what was written is not read soon: other files may have the page cache
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            partial.replace(self._path(content.name))
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise
        finally:
            os.close(descriptor)

    def begin(self, name: str, start: int, count: int) -> FileRead:
        """Begin to read blocks `start .. start + count` of a file; close what is returned, used or not.

        One read may begin while the last piece of another one is used.
        """
        return FileRead(self._ahead, lambda: self._open(name), start, count, self._piece_blocks)

    def read(self, name: str, start: int, count: int) -> Iterator[Rows]:
        """Read blocks as `FileRead.rows` does, and close the file."""
        reading = self.begin(name, start, count)
        try:
            yield from reading.rows()
        finally:
            reading.close()

    def measured_seconds(self, clock: Callable[[], float]) -> tuple[float, float]:
        """Measure how long a read of a new file takes beside its blocks, and how long each block takes, in seconds.

        Both are 0 if the disk is full: the files that fill it can still be read, and their reads show how long they take.

        Raises:
            OSError: a file cannot be written or read.
        """
        blocks = min(max(_PROBE_BYTES // self._block_bytes, _LEAST_PROBE_BLOCKS), FILE_BLOCKS)
        files = min(max(_PROBE_BYTES // (blocks * self._block_bytes), 1), _MOST_PROBE_FILES)
        hashes = [os.urandom(blocks * HASH_CHARACTERS // 2).hex() for _ in range(files)]
        probes = [DiskFile(file_name("", each), 0, each) for each in hashes]
        rows = np.random.default_rng().integers(0, 256, (blocks, self._block_bytes), dtype=np.uint8)
        first_seconds = others_seconds = 0.0
        try:
            for probe in probes:
                self.write(probe, [rows])
            self._ahead.start()
            for probe in probes:
                started = clock()
                list(self.read(probe.name, 0, 1))
                first_at = clock()
                list(self.read(probe.name, 1, blocks - 1))
                first_seconds += first_at - started
                others_seconds += clock() - first_at
        except FileDamaged as error:
            raise OSError(
                errno.EIO, f"what was written is not what is read: {error}", str(self.directory)
            ) from error
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            return 0.0, 0.0
        finally:
            for probe in probes:
                with suppress(OSError):
                    self.delete(probe.name)
        block_seconds = others_seconds / (files * (blocks - 1))
        return max(first_seconds / files - block_seconds, 0.0), block_seconds

    def delete(self, name: str) -> None:
        """Delete a file, if it is there.

        Raises:
            OSError: it cannot be deleted.
        """
        self._path(name).unlink(missing_ok=True)

    def held_bytes(self) -> int:
        """Return the bytes of all files.

        Raises:
            OSError: the directory cannot be read.
        """
        with os.scandir(self.directory) as entries:
            return sum(
                entry.stat(follow_symlinks=False).st_size for entry in entries if entry.name.endswith(_SUFFIX)
            )

    def delete_ranks_from(self, ranks: int) -> None:
        """Delete the directories of ranks, beside this one, that a grid of so many ranks lacks."""
        with suppress(OSError):
            for beside in self.directory.parent.glob("rank-*"):
                number = beside.name.removeprefix("rank-")
                if number.isdecimal() and int(number) >= ranks:
                    other = KvFiles(beside, "", 1)
                    with suppress(OSError):  # another replica's process uses it
                        other.acquire()
                        shutil.rmtree(beside)
                    other.release()

    def _path(self, name: str) -> Path:
        """Return the path of a file.

        Raises:
            OSError: this is no name of a file.
        """
        if not name.isalnum() or len(name) != _NAME_CHARACTERS:
            raise OSError(errno.EINVAL, "this is no name of a file of KV", name[:80])
        return self.directory / f"{name}{_SUFFIX}"

    def _open(self, name: str) -> _OpenFile:
        return _OpenFile(self._path(name), name, self._identity, self._key_tag, self._block_bytes)

    def _header(self, content: DiskFile, checksums: list[int]) -> bytes:
        return header_text(self._identity, self._key_tag, self._block_bytes, content, checksums)


def key_tag(key: str) -> str:
    """Return a digest of a key of hashes, by which files of another key are distinguished."""
    return blake2b(key.encode(), digest_size=8, person=b"medha kv files").hexdigest()


def header_text(
    identity: str, tag: str, block_bytes: int, content: DiskFile, checksums: Sequence[int]
) -> bytes:
    """Return the header of a file of KV; `tag` is that of the key of its hashes."""
    return json.dumps(
        {
            "identity": identity,
            "key": tag,
            "block_bytes": block_bytes,
            "start": content.start,
            "before": content.before,
            "hashes": content.hashes,
            "checksums": "".join(f"{checksum:08x}" for checksum in checksums),
        }
    ).encode()


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a sound file: its content, a CRC-32 of each block, and the place of the first block in the file."""

    content: DiskFile
    checksums: list[int]
    begin: int


def prefix_length(prefix: bytes) -> int:
    """Return the length of the header that follows the first bytes of a file.

    Raises:
        FileDamaged: no file of KV begins with them.
    """
    if len(prefix) < PREFIX.size:
        raise FileDamaged("it is too short")
    magic, length, _ = PREFIX.unpack(prefix)
    if magic != _MAGIC or not 0 < length <= _MOST_HEADER_BYTES:
        raise FileDamaged("it has another format")
    return int(length)


def parsed_header(
    prefix: bytes, text: bytes, name: str, expected: Mapping[str, object], size_bytes: int
) -> Header:
    """Return the header of the file `name`, which has `size_bytes` bytes, if its fields have the `expected` values.

    Raises:
        FileDamaged: it is the header of another file, or the file is not whole.
    """
    if len(text) != prefix_length(prefix) or crc32(text) != PREFIX.unpack(prefix)[2]:
        raise FileDamaged("its header does not match its checksum")
    try:
        header = json.loads(text)
        for field, value in expected.items():
            if header.get(field) != value:
                raise FileDamaged(f"it is of another {field}")
        content = DiskFile(name, header["start"], header["hashes"], header["before"])
        sums: str = header["checksums"]
        checksums = [int(sums[at : at + 8], 16) for at in range(0, len(sums), 8)]
        begin = whole_pages(PREFIX.size + len(text))
        if name != file_name(content.before, content.hashes):
            raise FileDamaged("it has the name of another file")
        if len(checksums) != hash_count(content.hashes) or (
            size_bytes != begin + len(checksums) * header["block_bytes"]
        ):
            raise FileDamaged("it has another size")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileDamaged(f"its header has another form: {error!r}") from error
    return Header(content, checksums, begin)


def packed(header: bytes) -> bytes:
    """Return a header with what comes before it in a file."""
    return PREFIX.pack(_MAGIC, len(header), crc32(header)) + header


def verify(rows: Rows, checksums: Sequence[int]) -> None:
    """Compare blocks with their checksums.

    Raises:
        FileDamaged: one does not match.
    """
    for row, checksum in zip(rows, checksums, strict=True):
        if crc32(row.data) != checksum:
            raise FileDamaged("a block does not match its checksum")


class _OpenFile:
    """A file that is open for reading, with a sound header."""

    def __init__(self, path: Path, name: str, identity: str, tag: str, block_bytes: int) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            prefix = os.pread(self.descriptor, PREFIX.size, 0)
            text = os.pread(self.descriptor, prefix_length(prefix), PREFIX.size)
            expected = {"identity": identity, "key": tag, "block_bytes": block_bytes}
            size_bytes = os.fstat(self.descriptor).st_size
            header = parsed_header(prefix, text, name, expected, size_bytes)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.content, self.checksums, self.begin = header.content, header.checksums, header.begin
        self._block_bytes = block_bytes

    def __enter__(self) -> _OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def read_run(self, run: Run, buffer: Bytes) -> Bytes:
        """Read a run of blocks into the buffer.

        Raises:
            FileDamaged: the file is too short.
            OSError: it cannot be read.
        """
        first, blocks = run
        at, size_bytes = self.begin + first * self._block_bytes, blocks * self._block_bytes
        try:
            return read_pages(self.descriptor, at, size_bytes, buffer)
        except EOFError as error:
            raise FileDamaged(str(error)) from error

    def verified(self, run: Run, piece: Bytes) -> Rows:
        """Return the blocks that `read_run` has read.

        Raises:
            FileDamaged: one does not match its checksum.
        """
        first, blocks = run
        rows = piece.reshape(blocks, self._block_bytes)
        verify(rows, self.checksums[first : first + blocks])
        return rows


class FileRead:
    """A read of some blocks of a file, which has begun: another thread opens the file, and reads pieces ahead of their use."""

    def __init__(
        self, ahead: ReadAhead, opened: Callable[[], _OpenFile], start: int, count: int, piece_blocks: int
    ) -> None:
        """`opened` opens the file; `start` and `count` are in blocks, and a piece has at most `piece_blocks`."""
        self._ahead, self._opened = ahead, opened
        self._start, self._stop = start, start + count
        # Small reads take longer around the page cache: docs/kv-tiers.md.
        self._is_large = 2 * count > piece_blocks
        firsts = range(start, self._stop, piece_blocks)
        self._runs = [(first, min(piece_blocks, self._stop - first)) for first in firsts]
        self._file: _OpenFile | None = None
        self._coming = ahead.submit(self._read_first)

    def rows(self, on_last: Callable[[], None] = lambda: None) -> Iterator[Rows]:
        """Yield the blocks, a piece at a time, verified; the next piece is read while the last one is verified and used.

        Each piece is valid until the next one is asked for. When the last one is there, `on_last` is called, which may begin
        another read.

        Raises:
            FileDamaged: they are not what was written.
            OSError: the file is not there, or cannot be read.
        """
        self._coming.result()  # raises what the opening of the file has raised
        assert self._file is not None
        for run, following in zip(self._runs, [*self._runs[1:], None], strict=True):
            piece = self._coming.result()
            if following is None:
                on_last()
            else:
                self._coming = self._ahead.submit(partial(self._file.read_run, following))
            yield self._file.verified(run, piece)

    def close(self) -> None:
        """Wait until no part of the file is being read, and close it."""
        wait([self._coming])
        if self._file is not None:
            os.close(self._file.descriptor)
            self._file = None

    def _read_first(self, buffer: Bytes) -> Bytes:
        file = self._file = self._opened()
        if self._start < 0 or not self._runs or self._stop > len(file.checksums):
            asked = f"{self._start}+{self._stop - self._start}"
            raise FileDamaged(f"it has {len(file.checksums)} blocks, and {asked} are asked for")
        if self._is_large:
            go_around_cache(file.descriptor)
        return file.read_run(self._runs[0], buffer)


def _write_all(descriptor: int, data: memoryview, at: int) -> int:
    """Write all bytes from `at` on, and return how many there are."""
    left = data.cast("B") if data.nbytes else data
    while left:
        count = os.pwrite(descriptor, left, at)
        left, at = left[count:], at + count
    return data.nbytes
