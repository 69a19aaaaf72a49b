"""Reads of whole pages: the bytes are those of the file, whatever its system of files can, and leave the page cache as it was."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha_worker.model import file_pages
from medha_worker.model.file_pages import PAGE_BYTES, Bytes, ReadAhead, go_around_cache, read_pages

PIECE_BYTES = 3 * PAGE_BYTES


@pytest.fixture
def ahead() -> Iterator[ReadAhead]:
    found = ReadAhead(PIECE_BYTES)
    yield found
    found.close()


def written(path: Path, size_bytes: int) -> bytes:
    content = np.random.default_rng(size_bytes).bytes(size_bytes)
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return content


def read(ahead: ReadAhead, path: Path, ranges: list[tuple[int, int]]) -> list[bytes]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        go_around_cache(descriptor)
        reads = [partial(read_pages, descriptor, at, size_bytes) for at, size_bytes in ranges]
        return [ahead.submit(each).result().tobytes() for each in reads]
    finally:
        os.close(descriptor)


def cached_pages(path: Path) -> int:
    """Return how many pages of a file the kernel has in memory, as `fincore` of util-linux counts them."""
    command = ["fincore", "--noheadings", "--output", "PAGES", str(path)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def goes_around(path: Path) -> bool:
    """Return whether the system of files that has this file can be read around the page cache."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


@given(st.data())
def test_pieces_are_the_bytes_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    size_bytes = data.draw(st.integers(1, 6 * PAGE_BYTES))
    places = st.integers(0, size_bytes - 1).flatmap(
        lambda at: st.tuples(st.just(at), st.integers(1, min(PIECE_BYTES, size_bytes - at)))
    )
    ranges = data.draw(st.lists(places, min_size=1, max_size=5))
    path = tmp_path_factory.mktemp("pages") / "file"
    content = written(path, size_bytes)
    ahead = ReadAhead(PIECE_BYTES)
    assert read(ahead, path, ranges) == [content[at : at + size] for at, size in ranges]
    ahead.close()


def test_nothing_of_the_file_stays_in_the_page_cache(tmp_path: Path, ahead: ReadAhead) -> None:
    path = tmp_path / "file"
    content = written(path, 8 * PAGE_BYTES)
    if not goes_around(path):
        pytest.skip(f"{tmp_path} is on a system of files that only reads through the page cache")
    assert read(ahead, path, [(0, PIECE_BYTES), (PIECE_BYTES, 100)]) == [
        content[:PIECE_BYTES],
        content[PIECE_BYTES:][:100],
    ]
    assert cached_pages(path) == 0
    path.read_bytes()
    assert cached_pages(path) == 8, "else nothing was measured"


@pytest.mark.parametrize("refused", ["flag", "read"])
def test_what_cannot_be_read_around_the_cache_is_read_through_it(
    tmp_path: Path, ahead: ReadAhead, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    path = tmp_path / "file"
    content = written(path, 4 * PAGE_BYTES)
    own_fcntl, own_preadv, calls = fcntl.fcntl, os.preadv, []

    def set_flags(descriptor: int, command: int, flags: int = 0) -> int:
        if refused == "flag" and flags & os.O_DIRECT:
            calls.append("flag")
            raise OSError(errno.EINVAL, "no such way")
        return own_fcntl(descriptor, command, flags)

    def read_into(descriptor: int, buffers: list[Bytes], at: int) -> int:
        if refused == "read" and own_fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            calls.append("read")
            raise OSError(errno.EINVAL, "another unit")
        return own_preadv(descriptor, buffers, at)

    monkeypatch.setattr(file_pages.fcntl, "fcntl", set_flags)
    monkeypatch.setattr(file_pages.os, "preadv", read_into)
    assert read(ahead, path, [(10, 5000), (5010, 100)]) == [content[10:5010], content[5010:5110]]
    assert calls == [refused]


@pytest.mark.parametrize("at_once", [1000, PAGE_BYTES, PAGE_BYTES + 1])
def test_a_read_may_return_less_than_it_was_asked_for(
    tmp_path: Path, ahead: ReadAhead, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    path = tmp_path / "file"
    content = written(path, 4 * PAGE_BYTES)
    own_preadv, sizes = os.preadv, []

    def read_some(descriptor: int, buffers: list[Bytes], at: int) -> int:
        if at % PAGE_BYTES:
            assert not fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        count = own_preadv(descriptor, buffers, at)
        sizes.append(min(count, at_once))
        return sizes[-1]

    monkeypatch.setattr(file_pages.os, "preadv", read_some)
    assert read(ahead, path, [(10, 9000), (9010, 100)]) == [content[10:9010], content[9010:9110]]
    assert len(sizes) > 2


def test_a_file_that_is_too_short_and_an_error_reach_the_reader(
    tmp_path: Path, ahead: ReadAhead, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    content = written(path, 2 * PAGE_BYTES + 100)
    with pytest.raises(EOFError):
        read(ahead, path, [(0, PAGE_BYTES), (PAGE_BYTES, PAGE_BYTES + 101)])
    with pytest.raises(EOFError):
        read(ahead, path, [(5 * PAGE_BYTES, 1)])
    with monkeypatch.context() as patch:

        def broken(*_: object) -> int:
            raise OSError(errno.EIO, "the disk is broken")

        patch.setattr(file_pages.os, "preadv", broken)
        with pytest.raises(OSError, match="the disk is broken"):
            read(ahead, path, [(0, 10), (10, 10)])
    assert read(ahead, path, [(0, 10), (10, 10)]) == [content[:10], content[10:20]]


def test_a_piece_stays_while_the_next_one_is_read(tmp_path: Path, ahead: ReadAhead) -> None:
    path = tmp_path / "file"
    content = written(path, 6 * PAGE_BYTES)
    descriptor = os.open(path, os.O_RDONLY)
    last = None
    for at in range(0, 6 * PAGE_BYTES, PAGE_BYTES):
        piece = ahead.submit(partial(read_pages, descriptor, at, PAGE_BYTES)).result()
        if last is not None:
            assert last.tobytes() == content[at - PAGE_BYTES : at]
        last = piece
    os.close(descriptor)


def test_the_thread_ends(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = written(path, 100)
    ahead = ReadAhead(PIECE_BYTES)
    for _ in range(2):  # it can be used again
        before = set(threading.enumerate())
        assert read(ahead, path, [(0, 50), (50, 50)]) == [content[:50], content[50:]]
        (thread,) = set(threading.enumerate()) - before
        ahead.close()
        thread.join(10)
        assert not thread.is_alive()
