"""Triton's driver module, compiled ahead, so that a process without a C compiler can run Triton's kernels.

    python -m medha_worker.kernels.triton.driver_module --out FILE

Triton has one module in C, which asks the driver to load and to launch. It compiles it before a process runs its first kernel.
An image has it compiled instead, and `MEDHA_TRITON_DRIVER` names the file. Kernels themselves need no C compiler.

The Dockerfile runs this file alone, so that other changes of the sources compile nothing again. It imports nothing of ours.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "MEDHA_TRITON_DRIVER"
NAME = "cuda_utils"
"""Triton's name of the module."""


def compile_driver(out: Path) -> None:
    """Compile the module of the installed Triton to the file `out`. It takes no GPU and no driver."""
    import triton.backends.nvidia.driver as driver

    source = Path(driver.__file__).with_name("driver.c")
    includes = [*driver.include_dirs, sysconfig.get_paths()["include"]]
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as stubs:
        # To link, a library with the driver's name is enough. It has no functions, so the linker would leave it out.
        shared = ["cc", "-shared", "-fPIC", "-O2"]
        stub = [
            "-Wl,-soname,libcuda.so.1",
            "-x",
            "c",
            os.devnull,
            "-o",
            str(Path(stubs, "libcuda.so.1")),
        ]
        subprocess.run([*shared, *stub], check=True)
        linked = [
            f"-L{stubs}",
            "-Wl,--no-as-needed",
            "-l:libcuda.so.1",
            *(f"-I{folder}" for folder in includes),
        ]
        subprocess.run([*shared, "-Wno-psabi", str(source), "-o", str(out), *linked], check=True)


def use_compiled_driver(environ: Mapping[str, str] = os.environ) -> None:
    """Let Triton take its module from the file that the environment names; without one, Triton compiles it."""
    file = environ.get(VARIABLE)
    if not file:
        return
    from triton import knobs

    def given(name: str, *_: object, **__: object) -> str:
        if name != NAME or not Path(file).is_file():
            raise RuntimeError(f"{VARIABLE}={file} is no compiled {name}")
        return file

    knobs.build.impl = given


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile Triton's driver module.")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    compile_driver(parser.parse_args().out)


if __name__ == "__main__":
    main()
