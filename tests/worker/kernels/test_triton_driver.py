"""Triton's driver module is compiled without a GPU, and Triton takes it where there is no C compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from medha_worker.kernels.triton.driver_module import VARIABLE, compile_driver

LOAD = """
from medha_worker.kernels.triton.driver_module import use_compiled_driver
use_compiled_driver()
from triton.backends.nvidia.driver import CudaUtils
print(callable(CudaUtils().launch))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("driver") / "triton" / "cuda_utils.so"
    compile_driver(file)
    return file


@pytest.fixture(scope="module")
def driver(compiled: Path) -> Path:
    """A folder with a library that has the functions of a driver that the module calls."""
    listed = subprocess.check_output(["nm", "-D", "--undefined-only", str(compiled)], text=True)
    names = [line.split()[-1] for line in listed.splitlines() if line.split()[-1].startswith("cu")]
    assert "cuModuleLoadData" in names
    source = compiled.with_name("driver.c")
    source.write_text("".join(f"int {name}(void) {{ return 999; }}\n" for name in names))
    library = compiled.with_name("libcuda.so.1")
    shared = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)]
    subprocess.run(shared, check=True)
    return library.parent


def load(driver: Path, cache: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "LD_LIBRARY_PATH": str(driver),
        "TRITON_CACHE_DIR": str(cache),
        "PATH": "",
        **variables,
    }
    command = [sys.executable, "-c", LOAD]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_triton_takes_the_compiled_module_where_there_is_no_compiler(
    compiled: Path, driver: Path, tmp_path: Path
) -> None:
    assert "Failed to find C compiler" in load(driver, tmp_path / "none").stderr
    done = load(driver, tmp_path / "given", **{VARIABLE: str(compiled)})
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


def test_a_file_that_is_missing_is_named(driver: Path, tmp_path: Path) -> None:
    done = load(driver, tmp_path, **{VARIABLE: "/missing.so"})
    assert f"{VARIABLE}=/missing.so is no compiled cuda_utils" in done.stderr
