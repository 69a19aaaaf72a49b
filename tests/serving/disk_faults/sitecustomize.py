"""For the PYTHONPATH of a test's `medha up`: files of the disk tier take as many seconds longer as a file says, while it is there.

The file is named by TEST_SLOW_DISK. Each read or write that waits appends its name to the file of the same name with the suffix
`.in` before it does, so that a test knows when one is under way. Without the file the disk is as fast as it is.

With HELD_POINTS, writes also wait at the points of `held_points.py`, while that folder has a file of such a name.
"""

from __future__ import annotations

import os
import sys
import time
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE = "medha_worker.model.kv_files"


class Patched(MetaPathFinder):
    """Finds the module as usual, and makes its files slow once it is loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == MODULE else None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            files: Any = module.KvFiles
            for kind in ("read", "write"):
                setattr(files, kind, slowed(kind, getattr(files, kind)))
            if "HELD_POINTS" in os.environ:
                hold_writes(module)

        loader.exec_module = exec_module
        return spec


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


def hold(point: str) -> None:
    """Wait at a point for as long as it is held."""
    file = Path(os.environ["HELD_POINTS"]) / point
    if file.exists():
        file.with_suffix(".in").touch()
        while file.exists():
            time.sleep(0.005)


def hold_writes(module: Any) -> None:
    """Hold writes before their first byte, behind their first blocks, behind their header, and once the file has its name."""
    write_all, write = module._write_all, module.KvFiles.write

    def held_write_all(descriptor: int, data: memoryview, at: int) -> int:
        hold("made")
        count: int = write_all(descriptor, data, at)
        hold("half" if at else "whole")
        return count

    def held_write(*arguments: Any) -> None:
        write(*arguments)
        hold("renamed")

    module._write_all, module.KvFiles.write = held_write_all, held_write


if "TEST_SLOW_DISK" in os.environ:
    sys.meta_path.insert(0, Patched())
