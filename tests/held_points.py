"""Processes that wait at named points until tests let them go on, so that they can be killed exactly there."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

WRITE_POINTS = ("made", "half", "whole", "renamed")
"""Points of the write of a file in a store: it was made; half of its bytes were written; all were; it has its own name."""
READ_POINTS = ("begun", "read", "put", "loaded")
"""Points of the read of a file or an object: nothing was read; all was read and verified, of a file its first piece; half of
that is in host memory; all is, but nobody knows."""
COPY_POINTS = ("offload", "fetch", "stream")
"""Half of a copy to host memory was made; half of one to the device; and a step reads streamed KV in its second layer."""
HAND_OVER_POINTS = ("ask", "ticket", "read", "done")
"""Points of a hand-over: before the question, the ticket, the answer to a read of blocks, and the end are sent."""
_POLL_SECONDS = 0.005
_MOST_SECONDS = 300.0  # on a machine that does much else


class HeldPoints:
    """Holds the processes that have its environment at points. A process that comes to one says so by a file."""

    def __init__(self, folder: Path, points: tuple[str, ...], **environment: str) -> None:
        """`folder` may exist."""
        folder.mkdir(exist_ok=True)
        self._folder, self._points = folder, points
        self.environment = {"HELD_POINTS": str(folder), **environment}

    def hold(self, point: str, process_id: int | None = None) -> None:
        """Let each process wait that comes to a point from now on; with `process_id`, only that one (not with `held_writes`)."""
        assert point in self._points
        prepared = self._folder / f"{point}.prepared"
        prepared.write_text("" if process_id is None else str(process_id))
        prepared.rename(self._folder / point)  # so that no process finds it half written

    def is_held(self, point: str) -> bool:
        """Return whether a process has come to a point that is held."""
        return (self._folder / f"{point}.in").exists()

    def holds(self, point: str, process_id: int) -> bool:
        """Return whether this process has come to a point that is held, if its processes say which they are."""
        told = self._folder / f"{point}.in"
        return told.exists() and str(process_id) in told.read_text().split()

    def wait(
        self, point: str, has_ended: Callable[[], bool] = lambda: False, process_id: int | None = None
    ) -> bool:
        """Wait until a process, or this one, has come to a point that is held; return False if what might do so `has_ended` before."""
        end = time.monotonic() + _MOST_SECONDS
        while not (self.is_held(point) if process_id is None else self.holds(point, process_id)):
            if has_ended():
                return False
            assert time.monotonic() < end, f"nobody has come to the point {point}"
            time.sleep(_POLL_SECONDS)
        return True

    def release(self, point: str) -> None:
        """Let processes go on."""
        (self._folder / point).unlink(missing_ok=True)
        (self._folder / f"{point}.in").unlink(missing_ok=True)


def held_writes(folder: Path) -> HeldPoints:
    """Return points of writes to a store of files; skip the test without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder.mkdir()
    library, source = folder / "held_writes.so", Path(__file__).with_name("held_writes.c")
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *flags, "-o", str(library), str(source), "-ldl"], check=True)
    return HeldPoints(folder, WRITE_POINTS, LD_PRELOAD=str(library))


def held_hand_overs(folder: Path) -> HeldPoints:
    """Return points of hand-overs between served replicas."""
    patches = Path(__file__).parent / "serving" / "hand_over_points"
    path = os.pathsep.join([str(patches), *filter(None, [os.environ.get("PYTHONPATH")])])
    return HeldPoints(folder, HAND_OVER_POINTS, PYTHONPATH=path)
