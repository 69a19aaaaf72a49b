"""Whole pages of files, and a thread that reads them ahead of their use, around the kernel's page cache.

While a disk hangs, nobody can end this thread. So it is a daemon thread, unlike those of `concurrent.futures`.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

PAGE_BYTES = 4096
"""Reads around the page cache begin and end at multiples of it. It is a multiple of nearly every disk's own unit."""
_HUGE_PAGE_BYTES = 2 * 2**20

Bytes = npt.NDArray[np.uint8]
"""Bytes in a row, [bytes]."""


class ReadAhead:
    """A thread that reads pieces of files ahead of their use, in order, into two buffers in turn."""

    def __init__(self, piece_bytes: int) -> None:
        """`piece_bytes` is the size of the largest piece."""
        self._room = whole_pages(piece_bytes) + PAGE_BYTES  # a piece may begin and end amid pages
        self._buffers: list[Bytes] = []
        self._turn = 0
        self._asked: SimpleQueue[tuple[Future[Bytes], Callable[[Bytes], Bytes], Bytes] | None] = SimpleQueue()

    def start(self) -> None:
        """Start the thread and allocate the buffers, unless they are there. If nobody calls this, the first read does."""
        if self._buffers:
            return
        # Buffers are used again, because new memory for each piece costs as much as a copy.
        buffers = [_huge_pages(self._room) for _ in range(2)]
        threading.Thread(target=self._run, name="medha-disk-ahead", daemon=True).start()
        self._buffers = buffers

    def submit(self, read: Callable[[Bytes], Bytes]) -> Future[Bytes]:
        """Let the thread call `read` with one of the two buffers, and return a future of what it returns.

        This is the buffer of the piece before the last one, so the caller must no longer use that piece.
        """
        self.start()
        coming: Future[Bytes] = Future()
        self._turn = 1 - self._turn
        self._asked.put((coming, read, self._buffers[self._turn]))
        return coming

    def close(self) -> None:
        """End the thread, as soon as it has nothing to read."""
        if self._buffers:
            self._asked.put(None)
            self._buffers = []

    def _run(self) -> None:
        while asked := self._asked.get():
            coming, read, buffer = asked
            try:
                coming.set_result(read(buffer))
            except Exception as error:  # noqa: BLE001 - whoever waits for the piece gets it
                coming.set_exception(error)


def _huge_pages(size_bytes: int) -> Bytes:
    """Return zeroed memory of this size, in huge pages of 2 MiB if the kernel has them.

    A read around the page cache goes to a disk as a list of pages. Small pages make that list long, and some virtual disks
    then read at a quarter of their rate (benchmarks/direct_io.py).
    """
    room = mmap.mmap(-1, size_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # this kernel has none
        room.madvise(mmap.MADV_HUGEPAGE)
    found = np.frombuffer(room, dtype=np.uint8)
    begin = -found.ctypes.data % _HUGE_PAGE_BYTES
    found = found[begin : begin + size_bytes]
    found.fill(0)
    return found


def whole_pages(size_bytes: int) -> int:
    """Round a size up to whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def go_around_cache(descriptor: int) -> None:
    """Let reads of an open file go around the page cache, if its file system can do that."""
    with suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_DIRECT)


def read_pages(descriptor: int, at: int, size_bytes: int, buffer: Bytes) -> Bytes:
    """Read the pages that have these bytes of a file, and return the bytes, which lie in the buffer.

    Raises:
        EOFError: the file is too short.
        OSError: it cannot be read.
    """
    skipped = at % PAGE_BYTES
    end, filled = skipped + size_bytes, 0
    while filled < end:
        try:
            count = os.preadv(descriptor, [buffer[filled : whole_pages(end)].data], at - skipped + filled)
        except OSError as error:
            if error.errno != errno.EINVAL or not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
                raise
            # The disk has a larger unit than a page, or its driver has no such reads: go through the cache.
            fcntl.fcntl(descriptor, fcntl.F_SETFL, 0)
            continue
        if not count:
            raise EOFError("the file is too short")
        filled += count
        if filled < end and filled % PAGE_BYTES:
            # File systems in user space may return less than was asked for. Amid a page, only the cache can be read.
            fcntl.fcntl(descriptor, fcntl.F_SETFL, 0)
    return buffer[skipped:end]
