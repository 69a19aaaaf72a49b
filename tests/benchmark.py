"""A script of `benchmarks/` as a module, for the tests of what it decides."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


def benchmark(name: str) -> ModuleType:
    """`benchmarks/<name>.py`, executed anew, and not under its own name: packages of ours are called so."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", _FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
