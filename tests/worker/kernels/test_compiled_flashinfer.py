"""FlashInfer's modules compile without a GPU, and its own planner and launch code get from the adapter what they need.

The first run takes 1.8 GB of packages and ten minutes of a processor for the four modules that steps with heads of 64 values
need. They are kept in `~/.cache/medha`, until the packages or the list of modules change. What was compared is written to
`benchmarks/results/flashinfer_launches.json`.
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
from .flashinfer_launches import CASES
from .further_packages import Environment, pins, required_by
from .proved_results import write_proved

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]
ARCH = "9.0a"
COMPILED_FROM = ("flashinfer-python", "nvidia-cuda-", "nvidia-nvvm", "torch")
"""Beginnings of the names of packages that a module depends on."""
_FATBIN_HEADER_BYTES = 16
NEEDED = (
    "merge",
    "silu",
    *(compiled_modules.attention_name("bfloat16", HEAD_DIM, has_window) for has_window in (False, True)),
)


def test_modules_compile_and_their_launch_code_gets_from_the_adapter_what_each_step_needs(
    tmp_path: Path,
) -> None:
    """One test, because each would install the packages."""
    requirements = [*required_by("gpu"), *required_by("nvcc"), "cuda-bindings"]
    environment = Environment(tmp_path, requirements, pins())
    variables = {"FLASHINFER_CUDA_ARCH_LIST": ARCH, "FLASHINFER_WORKSPACE_BASE": str(tmp_path)}

    cuda_norm = {"FLASHINFER_USE_CUDA_NORM": "1"}
    found = json.loads(environment.run("tests.worker.kernels.flashinfer_asked", **variables, **cuda_norm))
    assert found["asked"] == found["declared"]
    assert len(found["asked"]) == len(compiled_modules.declared_modules())

    modules = compiled_folder(environment)
    for name, module in manifest(modules).items():
        library = modules / str(module["module"]) / f"{module['module']}.so"
        assert library.stat().st_size == module["bytes"] > 10_000, name
        assert architectures(library) == {90}, name
    (environment.site / "flashinfer" / "data" / "aot").symlink_to(modules)

    shim = tmp_path / "cudart.so"
    source = Path(__file__).with_name("cudart_shim.c")
    flags = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]
    subprocess.run(["cc", *flags, "-o", str(shim), str(source)], check=True)
    variables |= {"LD_PRELOAD": str(shim), "FLASHINFER_DISABLE_JIT": "1"}
    launches = "tests.worker.kernels.flashinfer_launches"
    equal = [json.loads(line) for line in environment.run(launches, **variables).splitlines()]
    assert len(equal) == len(CASES) + 1
    seen = json.loads(environment.run(launches, "--defects", **variables))
    assert seen == {defect.name: defect.found_in_launches for defect in DEFECTS if defect.file != ROWS}
    write_proved(
        "flashinfer_launches",
        __file__,
        packages=environment.versions("flashinfer-python", "torch"),
        arch=ARCH,
        modules=[{"name": name, "bytes": one["bytes"]} for name, one in manifest(modules).items()],
        equal=equal,
        defects_found_by=seen,
    )


def architectures(library: Path) -> set[int]:
    """Return the GPUs that a library has code for, 90 for sm_90, from the headers of its code."""
    content, found, at = library.read_bytes(), set(), 0
    magic = (0xBA55ED50).to_bytes(4, "little")

    def number(offset: int, size: int) -> int:
        return int.from_bytes(content[offset : offset + size], "little")

    while (at := content.find(magic, at)) >= 0:
        code, end = at + number(at + 6, 2), at + _FATBIN_HEADER_BYTES + number(at + 8, 8)
        while code < end:
            found.add(number(code + 28, 4))
            code += number(code + 4, 4) + number(code + 8, 8)
        at = end
    return found


def compiled_folder(environment: Environment) -> Path:
    """Return a folder with the modules that are needed, compiled now or by a run before."""
    declared = Path(compiled_modules.__file__).read_text(encoding="utf-8")
    read = [(name, pin) for name, pin in pins().items() if name.startswith(COMPILED_FROM)]
    key = hashlib.sha256(json.dumps([read, declared]).encode()).hexdigest()[:16]
    folder = Path.home() / ".cache" / "medha" / f"flashinfer-{key}"
    if set(NEEDED) - manifest(folder).keys():
        only = [argument for name in NEEDED for argument in ("--only", name)]
        environment.run(compiled_modules.__name__, "--out", str(folder), "--arch", ARCH, *only)
    assert set(NEEDED) <= manifest(folder).keys()
    return folder


def manifest(folder: Path) -> dict[str, dict[str, str | int]]:
    path = folder / "modules.json"
    modules: dict[str, dict[str, str | int]] = (
        json.loads(path.read_text())["modules"] if path.exists() else {}
    )
    return modules
