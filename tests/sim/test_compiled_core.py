"""The list of modules that `medha_sim.compiled_core` compiles names files that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from medha_sim.compiled_core import MODULES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", MODULES)
def test_a_module_to_compile_exists_under_its_present_name(module: str) -> None:
    """A renamed one would make mypyc fail, and campaigns run interpreted, which takes twice as long."""
    package = "core" if module.startswith("medha/") else "sim"
    assert (ROOT / package / module).is_file()


def test_no_module_is_compiled_twice() -> None:
    assert len(set(MODULES)) == len(MODULES)
