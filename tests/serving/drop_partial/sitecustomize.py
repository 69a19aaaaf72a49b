"""For the PYTHONPATH of a test's `medha up`: attention loses a lane's partial result while a file says which.

The file, named by TEST_DROPPED_PARTIAL, holds the number of a partial result in the order in which they are merged;
0 is the owner's own. Without the file nothing is lost.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE = "medha_worker.model.spread"


class Patched(MetaPathFinder):
    """Finds the module as usual, and replaces its `merge_partials` once it is loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == MODULE else None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            setattr(module, "merge_partials", dropping(module.merge_partials))  # noqa: B010 - mypy knows no such name

        loader.exec_module = exec_module
        return spec


def dropping(merge: Any) -> Any:
    """The same function, without one of what it merges."""
    file = Path(os.environ["TEST_DROPPED_PARTIAL"])

    def merge_the_others(outputs: Sequence[Any], log_sum_exps: Sequence[Any]) -> Any:
        dropped = int(file.read_text()) if file.exists() else None
        kept = [index for index in range(len(outputs)) if index != dropped]
        return merge([outputs[index] for index in kept], [log_sum_exps[index] for index in kept])

    return merge_the_others


if "TEST_DROPPED_PARTIAL" in os.environ:
    sys.meta_path.insert(0, Patched())
