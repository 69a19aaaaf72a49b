"""FlashInfer's modules compile without a GPU, and its own planner and launch code get from the adapter what they need.

The first run takes 1.8 GB of packages and ten minutes of a processor for the four modules that steps with heads of 64 values
need. They are kept in `~/.cache/medha`, until the packages or the list of modules change.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from medha_worker.kernels.flashinfer import compiled_modules

from .flashinfer_cases import HEAD_DIM
from .flashinfer_defects import DEFECTS, ROWS
from .flashinfer_environment import Environment, pins, required_by
from .flashinfer_launches import CASES

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]
ARCH = "9.0a"
COMPILED_FROM = ("flashinfer-python", "nvidia-cuda-", "nvidia-nvvm", "torch")
"""Beginnings of the names of packages that a module depends on."""
NEEDED = (
    "merge",
    "silu",
    *(compiled_modules.attention_name("bfloat16", HEAD_DIM, has_window) for has_window in (False, True)),
)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    requirements = [*required_by("gpu"), *required_by("gpu-build"), "cuda-bindings"]
    return Environment(tmp_path_factory.mktemp("flashinfer"), requirements, pins())


@pytest.fixture(scope="module")
def modules(environment: Environment) -> Path:
    """A folder with the modules that are needed, where FlashInfer finds them."""
    declared = Path(compiled_modules.__file__).read_text(encoding="utf-8")
    read = [(name, pin) for name, pin in pins().items() if name.startswith(COMPILED_FROM)]
    key = hashlib.sha256(json.dumps([read, declared]).encode()).hexdigest()[:16]
    folder = Path.home() / ".cache" / "medha" / f"flashinfer-{key}"
    if not (folder / "modules.json").exists() or set(NEEDED) - manifest(folder)["modules"].keys():
        only = [argument for name in NEEDED for argument in ("--only", name)]
        environment.run(compiled_modules.__name__, "--out", str(folder), "--arch", ARCH, *only)
    (environment.site / "flashinfer" / "data" / "aot").symlink_to(folder)
    return folder


def manifest(folder: Path) -> dict[str, dict[str, dict[str, str | int]]]:
    found: dict[str, dict[str, dict[str, str | int]]] = json.loads((folder / "modules.json").read_text())
    return found


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> str:
    built = tmp_path_factory.mktemp("shim") / "cudart.so"
    source = Path(__file__).with_name("cudart_shim.c")
    flags = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]
    subprocess.run(["cc", *flags, "-o", str(built), str(source)], check=True)
    return str(built)


def launches(environment: Environment, shim: str, *argv: str) -> str:
    variables = {"LD_PRELOAD": shim, "FLASHINFER_CUDA_ARCH_LIST": ARCH, "FLASHINFER_DISABLE_JIT": "1"}
    folder = str(environment.site.parent)
    return environment.run(
        "tests.worker.flashinfer_launches", *argv, FLASHINFER_WORKSPACE_BASE=folder, **variables
    )


def test_the_declared_modules_are_those_that_the_adapter_asks_for(
    environment: Environment, tmp_path: Path
) -> None:
    variables = {"FLASHINFER_CUDA_ARCH_LIST": ARCH, "FLASHINFER_USE_CUDA_NORM": "1"}
    printed = environment.run(
        "tests.worker.flashinfer_asked", FLASHINFER_WORKSPACE_BASE=str(tmp_path), **variables
    )
    found = json.loads(printed)
    assert found["asked"] == found["declared"]
    assert len(found["asked"]) == len(compiled_modules.declared_modules())


def test_each_module_lies_where_flashinfer_looks_for_it(modules: Path) -> None:
    made = manifest(modules)["modules"]
    assert set(NEEDED) <= set(made)
    for name, module in made.items():
        library = modules / str(module["module"]) / f"{module['module']}.so"
        assert library.stat().st_size == module["bytes"] > 10_000, name


@pytest.mark.usefixtures("modules")
def test_every_launch_is_what_the_step_needs(environment: Environment, shim: str) -> None:
    assert launches(environment, shim).count("launches as needed") == len(CASES) + 1


@pytest.mark.usefixtures("modules")
def test_what_the_launches_show_of_each_defect_is_known(environment: Environment, shim: str) -> None:
    found = json.loads(launches(environment, shim, "--defects"))
    assert found == {defect.name: defect.found_in_launches for defect in DEFECTS if defect.file != ROWS}
