"""The program `charts/generate.py`, as a module."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from chart.helm import ROOT


def chart_generator() -> Any:
    """Return `charts/generate.py`, loaded."""
    path = ROOT / "charts" / "generate.py"
    specification = importlib.util.spec_from_file_location("charts_generate", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module
