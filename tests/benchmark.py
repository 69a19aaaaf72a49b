"""A script of `benchmarks/` as a module, for the tests of what it decides."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
SHARED = (
    "harness",
    "client_stream",
    "served",
    "serve_engines",
    "random_llama",
    "convoy_trace",
    "fleet",
    "chaos_accounts",
    "autoscale_page",
    "convoy_page",
    "gpu_page",
    "gpu_sources",
    "tier_rates",
)
"""Modules that the scripts import from their own folder. It is not on the path of tests, where a package is called `campaign`, too."""


def benchmark(name: str) -> ModuleType:
    """Execute `benchmarks/<name>.py` anew, and not under its own name: packages of ours are called so."""
    return _load(f"benchmark_{name}", name)


def _load(module_name: str, name: str) -> ModuleType:
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    for shared in SHARED:
        if f"\nfrom {shared} import " in text and shared not in sys.modules:
            _load(shared, shared)
    spec = importlib.util.spec_from_file_location(module_name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
