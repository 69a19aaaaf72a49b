"""For the PYTHONPATH of a replica: its processes wait at named points of a hand-over of KV, while a file of that name is there.

The folder HELD_POINTS has these files (`held_points.py`). A process writes `<point>.in` there before it waits. The points `ask`,
`ticket` and `done` come in the controller before it sends this message, and `read` in a rank before it sends blocks.
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

POINT_OF = {"KvAsk": "ask", "KvTicket": "ticket", "KvDone": "done"}


def hold(point: str) -> None:
    """Wait at a point for as long as it is held."""
    file = Path(os.environ["HELD_POINTS"]) / point
    if file.exists():
        file.with_suffix(".in").touch()
        while file.exists():
            time.sleep(0.005)


def hold_messages(module: ModuleType) -> None:
    """Hold the messages of a controller; an answer without a ticket hands nothing over."""
    handover: Any = module
    send = handover.Handover.send

    def held(self: Any, message: Any, routers: Any) -> None:
        if getattr(message, "ticket", "") or type(message).__name__ == "KvAsk":
            hold(POINT_OF[type(message).__name__])
        send(self, message, routers)

    handover.Handover.send = held


def hold_blocks(module: ModuleType) -> None:
    """Hold the blocks that a rank sends."""
    server: Any = module
    answer = server.PeerServer._answer

    def held(self: Any, frames: Any) -> Any:
        found = answer(self, frames)
        if "error" not in found[0]:
            hold("read")
        return found

    server.PeerServer._answer = held


PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "medha_worker.controller.handover": hold_messages,
    "medha_worker.rank.peer_server": hold_blocks,
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
            PATCHES[name](module)

        loader.exec_module = exec_module
        return spec


if "HELD_POINTS" in os.environ:
    sys.meta_path.insert(0, Patched())
