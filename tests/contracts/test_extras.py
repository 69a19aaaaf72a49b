"""The operator's and the router's installs pull no torch: neither by what they require nor by what they import."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "triton", "nvidia-", "cuda-", "flashinfer")


def requirements(name: str, extras: frozenset[str]) -> set[str]:
    """Canonical names of everything that installing `name[extras]` brings on this platform."""
    found: set[str] = set()
    visited: set[tuple[str, frozenset[str]]] = set()
    waiting = [(name, extras)]
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in visited:
            continue
        visited.add((name, extras))
        found.add(name)
        try:
            lines = distribution(name).requires or []
        except PackageNotFoundError:
            continue  # an optional part that is not installed here; its name is judged all the same
        for requirement in map(Requirement, lines):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras | {""}):
                waiting.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return found


def heavy(names: set[str]) -> list[str]:
    return sorted(name for name in names if name.startswith(HEAVY))


@pytest.mark.parametrize("extra", ["operator", "router", "sim", "traces"])
def test_an_extra_without_a_model_requires_no_torch(extra: str) -> None:
    assert heavy(requirements("medha", frozenset({extra}))) == []


def test_the_search_for_torch_finds_it_where_it_is_required() -> None:
    assert "torch" in heavy(requirements("medha", frozenset({"worker"})))
    assert "torch" in heavy(requirements("medha", frozenset({"router", "dev"})))


@pytest.mark.parametrize(
    "package",
    [
        "router/medha_router",
        "operator/medha_operator",
        "sim/medha_sim",
        "core/medha",
        "core/medha_process",
        "core/medha_traces",
    ],
)
def test_importing_every_module_of_a_package_without_a_model_loads_no_torch(package: str) -> None:
    folder = ROOT / package
    names = [
        ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted(folder.rglob("*.py"))
        if path.stem != "__main__"
    ]
    assert names
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n    importlib.import_module(name)\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
