"""Frames between the router and a process of its own: the lengths of some parts, and then the parts; no pickle."""

from __future__ import annotations

import os
import struct
import subprocess
from contextlib import suppress
from typing import IO

_LENGTH = struct.Struct("<Q")


def write_frame(pipe: IO[bytes], *parts: bytes | bytearray) -> None:
    """Write parts to an unbuffered pipe."""
    for part in (b"".join(_LENGTH.pack(len(part)) for part in parts), *parts):
        view = memoryview(part)
        while view:  # a write to an unbuffered pipe may be partial
            view = view[pipe.write(view) :]


def read_frame(pipe: IO[bytes], parts: int) -> list[bytearray]:
    """Return the parts of the next frame of an unbuffered pipe.

    Raises:
        EOFError: the other end has gone.
    """
    lengths = _LENGTH.iter_unpack(_read_exactly(pipe, parts * _LENGTH.size))
    return [_read_exactly(pipe, length) for (length,) in lengths]


def _read_exactly(pipe: IO[bytes], length: int) -> bytearray:
    content = bytearray(length)
    view = memoryview(content)
    while view:
        count = os.readv(pipe.fileno(), [view])
        if not count:
            raise EOFError("the pipe was closed")
        view = view[count:]
    return content


def end_child(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, and close its pipes."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    process.wait()
