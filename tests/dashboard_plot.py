"""`dashboards/plot.py` as a module, for tests of what it asks and draws."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("dashboards_plot", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


plot = _load(Path(__file__).resolve().parents[1] / "dashboards" / "plot.py")
