"""Plant a bug in the operator's source on import; a defective operator differs only there."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType


def plant(module: str, right: str, wrong: str) -> None:
    """Import the operator with `right` replaced by `wrong` in the source of `module`.

    Raises:
        AssertionError: `right` does not occur exactly once; the source has changed, and the defect must
        follow.
    """
    sys.meta_path.insert(0, _Planter(module, right, wrong))
    for name in [name for name in sys.modules if name.partition(".")[0] == "medha_operator"]:
        del sys.modules[name]  # modules of the real one that a spawned process has imported
    importlib.import_module("medha_operator")  # registers its handlers with kopf
    importlib.import_module(module)


class _Planter(importlib.abc.MetaPathFinder):
    def __init__(self, module: str, right: str, wrong: str) -> None:
        self._module, self._right, self._wrong = module, right, wrong

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _Loader(name, spec.origin, self._right, self._wrong)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, right: str, wrong: str) -> None:
        super().__init__(name, path)
        self._right, self._wrong = right, wrong

    def get_code(self, fullname: str) -> object:  # type: ignore[override]
        source = self.get_data(self.path).decode()
        found = source.count(self._right)
        assert found == 1, f"{self._right!r} stands {found} times in {self.path}; follow it with the defect"
        return self.source_to_code(source.replace(self._right, self._wrong).encode(), self.path)
