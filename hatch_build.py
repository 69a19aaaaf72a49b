"""Wheels whose core is compiled: `HATCH_BUILD_HOOK_ENABLE_CUSTOM=true pip wheel --no-deps .`

The sources ride along, and are what runs where the compiled modules do not fit the interpreter. Without the variable, and
in editable installations, a wheel is pure Python.
"""

import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface[Any]):
    """Adds what `medha_sim.compiled_core` makes of the sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":  # edited sources must be what runs
            return
        root = Path(self.root)
        sys.path[:0] = [str(root / "core"), str(root / "sim")]
        from medha_sim.compiled_core import compiled

        folder = compiled(root, Path(mkdtemp(prefix="medha-compiled-")))
        libraries = {str(file): str(file.relative_to(folder)) for file in folder.rglob("*.so")}
        build_data["force_include"] |= libraries
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
