"""For the PYTHONPATH of a test's `medha up`: files of the disk tier take as many seconds longer as a file says, while it is there.

The file is named by TEST_SLOW_DISK. Each read or write that waits appends its name to the file of the same name with the suffix
`.in` before it does, so that a test knows when one is under way. Without the file the disk is as fast as it is.

With HELD_POINTS, writes, reads and copies also wait at the points of `held_points.py`, while that folder has a file of such a
name; with a number in the file, only the process of this number waits. Each process that waits appends its number to the file of
the same name with the suffix `.in`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any


def slowed(kind: str, method: Any) -> Any:
    """Return the same method, which waits before it begins."""
    file = Path(os.environ["TEST_SLOW_DISK"])

    def wait_first(*arguments: Any, **named: Any) -> Any:
        if file.exists():
            with file.with_suffix(".in").open("a") as log:
                log.write(f"{kind}\n")
            end = time.monotonic() + float(file.read_text())
            while file.exists() and time.monotonic() < end:
                time.sleep(0.02)
        return method(*arguments, **named)

    return wait_first


def slow_files(module: Any) -> None:
    module.KvFiles.write = slowed("write", module.KvFiles.write)
    module.FileRead._read_first = slowed("read", module.FileRead._read_first)


def is_held(file: Path) -> bool:
    """Return whether this process has to wait at a point, which the file is named for."""
    try:
        return file.read_text() in ("", str(os.getpid()))
    except FileNotFoundError:
        return False


def hold(point: str) -> None:
    """Wait at a point for as long as it is held."""
    file = Path(os.environ["HELD_POINTS"]) / point
    if is_held(file):
        with file.with_suffix(".in").open("a") as told:
            told.write(f"{os.getpid()}\n")
        while file.exists():
            time.sleep(0.005)


def held(method: Any, *, before: str = "", behind: str = "") -> Any:
    """Return the same method, which waits at a point before it begins, or behind its end."""

    def wait_there(*arguments: Any, **named: Any) -> Any:
        if before:
            hold(before)
        found = method(*arguments, **named)
        if behind:
            hold(behind)
        return found

    return wait_there


def hold_files(module: Any) -> None:
    """Hold writes before their first byte, behind their first blocks, behind their header, and once the file has its name.

    Hold reads before the file is opened, and behind the first blocks.
    """
    write_all = module._write_all

    def held_write_all(descriptor: int, data: memoryview, at: int) -> int:
        hold("made")
        count: int = write_all(descriptor, data, at)
        hold("half" if at else "whole")
        return count

    module._write_all = held_write_all
    module.KvFiles.write = held(module.KvFiles.write, behind="renamed")
    module.FileRead._read_first = held(module.FileRead._read_first, before="begun")
    module._OpenFile.verified = held(module._OpenFile.verified, behind="read")


def hold_objects(module: Any) -> None:
    module.KvObjects.read = held(module.KvObjects.read, before="begun", behind="read")


def hold_placing(module: Any) -> None:
    module.place_rows = held(module.place_rows, behind="loaded")


def hold_host_blocks(module: Any) -> None:
    """Hold copies from and to host blocks behind their first half."""
    put_rows, copy = module.HostBlocks.put_rows, module.HostBlocks._copy

    def held_put_rows(self: Any, slot: int, rows: Any) -> None:
        half = (len(rows) + 1) // 2
        put_rows(self, slot, rows[:half])
        hold("put")
        if len(rows) > half:
            put_rows(self, slot + half, rows[half:])

    def held_copy(self: Any, there: Any, here: Any, *, is_fetch: bool) -> None:
        half = (len(there) + 1) // 2
        copy(self, there[:half], here[:half], is_fetch=is_fetch)
        hold("fetch" if is_fetch else "offload")
        if len(there) > half:
            copy(self, there[half:], here[half:], is_fetch=is_fetch)

    module.HostBlocks.put_rows, module.HostBlocks._copy = held_put_rows, held_copy


def hold_streaming(module: Any) -> None:
    read = module.SegmentReads.read

    def held_read(self: Any, layer: int, segment: Any) -> Any:
        if layer == 1:
            hold("stream")
        return read(self, layer, segment)

    module.SegmentReads.read = held_read


PATCHES: dict[str, list[Callable[[ModuleType], None]]] = {}
if "TEST_SLOW_DISK" in os.environ:
    PATCHES["medha_worker.model.kv_files"] = [slow_files]
if "HELD_POINTS" in os.environ:
    PATCHES.setdefault("medha_worker.model.kv_files", []).append(hold_files)
    PATCHES |= {
        "medha_worker.rank.kv_objects": [hold_objects],
        "medha_worker.model.disk_blocks": [hold_placing],
        "medha_worker.model.host_blocks": [hold_host_blocks],
        "medha_worker.model.streamed_blocks": [hold_streaming],
    }


class Patched(MetaPathFinder):
    """Finds these modules as usual, and changes them once they are loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in PATCHES else None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            for patch in PATCHES[name]:
                patch(module)

        loader.exec_module = exec_module
        return spec


if PATCHES:
    sys.meta_path.insert(0, Patched())
