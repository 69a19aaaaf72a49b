"""Compiles FlashInfer's modules that the adapter runs, on any machine, so that no replica has to.

    python -m medha_worker.kernels.flashinfer.compiled_modules --out DIR --arch 9.0a

The list of these modules is here, and nowhere else. The compiler comes from PyPI, with the extra `nvcc`; the linker is the
machine's `c++`. Each module becomes `DIR/<name>/<name>.so`, where `name` is FlashInfer's, and `DIR/modules.json` says what each
one took. FlashInfer finds them, and needs no compiler, if DIR is its folder `data/aot`. It takes `norm` from there only if
`FLASHINFER_USE_CUDA_NORM=1` is in a replica's environment; otherwise it compiles another norm, without nvcc.

Decodes need no module of their own: on tensor cores, FlashInfer runs them in the module for chunks. K and V are written by
torch, so that its modules for pages and for decodes without tensor cores are not on the list.

The Dockerfile runs this file alone, so that other changes of the sources compile nothing again. It imports nothing of ours.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

HEAD_DIMS = (64, 128, 256)
"""Values of a head, for which the adapter has kernels."""
WIDE_HEAD_DIMS = (128,)
"""Values of a head, for which chunks of many rows have a module of their own on Hopper."""
WIDE_ARCHITECTURE = "9.0a"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types of queries and of the pool, for which the adapter has kernels."""
_WIDE = "wide"
ARCHITECTURES = "8.0 9.0a 10.0f"
"""GPUs that an image has modules for. Those for 8.0 also run on 8.6 and 8.9, and those for 10.0f on 10.3."""


def declared_modules() -> dict[str, Callable[[], Any]]:
    """Return a function for each module, by our name of it, that returns FlashInfer's description of how to build it."""
    modules: dict[str, Callable[[], Any]] = {
        "merge": partial(described, "cascade", "get_cascade_module"),
        "silu": partial(described, "activation", "get_act_and_mul_module", "silu"),
        "rope": partial(described, "rope", "get_rope_module"),
        "norm": partial(described, "norm", "get_norm_module"),
    }
    for dtype, head_dim, has_window, has_fp8_kv in product(DTYPES, HEAD_DIMS, (False, True), (False, True)):
        given = attention_arguments(DTYPES[dtype], head_dim, has_window, has_fp8_kv=has_fp8_kv)
        name = attention_name(dtype, head_dim, has_window, has_fp8_kv=has_fp8_kv)
        modules[name] = partial(described, "prefill", "get_batch_prefill_module", *given)
    for dtype, head_dim in product(DTYPES, WIDE_HEAD_DIMS):
        given = attention_arguments(DTYPES[dtype], head_dim, has_window=False, backend="fa3")
        name = f"attention-{dtype}-{head_dim}-{_WIDE}"
        modules[name] = partial(described, "prefill", "get_batch_prefill_module", *given)
    return modules


def modules_for(architectures: str) -> list[str]:
    """Return the declared modules that GPUs of these architectures run; those for wide chunks are for Hopper alone."""
    is_hopper = WIDE_ARCHITECTURE in architectures.split()
    return [name for name in declared_modules() if is_hopper or not name.endswith(_WIDE)]


def described(part: str, loader: str, *given: Any) -> Any:
    """Return FlashInfer's description of the module that its own function `loader`, of its part `part`, loads.

    FlashInfer has several modules for the same attention, whose names and sources change from one version to another.
    So the module that is compiled is the one that is loaded later. Nothing is compiled or loaded here.
    """
    found: list[Any] = []

    def load(description: Any) -> _Unloaded:
        found.append(description)
        return _Unloaded()

    function = getattr(import_module(f"flashinfer.{part}"), loader)
    with patch.object(import_module("flashinfer.jit.core").JitSpec, "build_and_load", load):
        function.__wrapped__(*given)  # behind its cache, which must not keep what computes nothing
    (description,) = found
    return description


class _Unloaded:
    """Stands for a module that is not loaded: it has functions of any name, which are never called."""

    def __getattr__(self, name: str) -> None:
        return None


def attention_arguments(
    dtype: torch.dtype, head_dim: int, has_window: bool, *, has_fp8_kv: bool = False, backend: str = "fa2"
) -> tuple[Any, ...]:
    """Return what FlashInfer's wrappers load their module with: types, sizes, positions, window, cap, sums in 16 bits."""
    no_positions = 0  # FlashInfer rotates nothing in its attention
    types = (dtype, torch.float8_e4m3fn if has_fp8_kv else dtype, dtype, torch.int32)
    return (backend, *types, head_dim, head_dim, no_positions, has_window, False, False)


def attention_name(dtype: str, head_dim: int, has_window: bool, *, has_fp8_kv: bool = False) -> str:
    """Return our name of a module for attention; layers with a window, and pools of FP8, need modules of their own."""
    return f"attention-{dtype}-{head_dim}{'-window' if has_window else ''}{'-fp8' if has_fp8_kv else ''}"


def make_cuda_home(home: Path, packages: Sequence[Path]) -> None:
    """Make a folder of links to the parts of CUDA that packages have brought, as its compiler and linker look for them.

    Args:
        home: The folder; it does not exist yet.
        packages: Folders `nvidia/cu13` of all environments in use. A file that two of them have is the first one's.

    Raises:
        FileNotFoundError: a part is missing.
    """

    def link(source: str, target: str) -> None:
        if not os.path.lexists(target):
            os.symlink(source, target)

    for part, package in product(("bin", "include", "nvvm"), packages):
        if (package / part).is_dir():
            shutil.copytree(package / part, home / part, copy_function=link, dirs_exist_ok=True)
    runtimes = [found for package in packages for found in sorted(package.glob("lib/libcudart.so.*"))]
    for part, found in {
        "nvidia-cuda-nvcc": home / "bin" / "nvcc",
        "nvidia-nvvm": home / "nvvm" / "bin" / "cicc",
        "nvidia-cuda-crt": home / "include" / "crt",
        "nvidia-cuda-cccl": home / "include" / "cccl",
        "nvidia-cuda-runtime": runtimes[0] if runtimes else home / "lib64" / "libcudart.so",
    }.items():
        if not found.exists():
            raise FileNotFoundError(
                f"{found} is missing, which the package {part} brings: install medha[gpu,nvcc]"
            )
    stubs = home / "lib64" / "stubs"
    stubs.mkdir(parents=True)
    (home / "lib64" / "libcudart.so").symlink_to(runtimes[0])
    # A driver is there only where modules run. To link one, a library with the driver's name is enough.
    linking = [
        "c++",
        "-shared",
        "-Wl,-soname,libcuda.so.1",
        "-x",
        "c",
        os.devnull,
        "-o",
        str(stubs / "libcuda.so"),
    ]
    subprocess.run(linking, check=True)


def cuda_packages(compiler: Path | None = None) -> list[Path]:
    """Return the folders in which packages from PyPI put their parts of CUDA, here and in the environment `compiler`."""
    spec = find_spec("nvidia")
    found = [] if spec is None else [Path(path) for path in spec.submodule_search_locations or ()]
    if compiler is not None:
        found += sorted(compiler.glob("lib/python3*/site-packages/nvidia"))
    return [
        folder for path in found for folder in sorted(path.glob("cu[0-9]*")) if (folder / "include").is_dir()
    ]


def compile_module(name: str, out: Path) -> dict[str, str | float]:
    """Compile a module into `out`; return FlashInfer's name of it, the seconds that it took, and its bytes."""
    start = time.monotonic()
    spec = declared_modules()[name]()
    spec.build(verbose=False)
    library = Path(spec.jit_library_path)
    folder = out / library.stem
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(library, folder / library.name)
    return {
        "module": library.stem,
        "seconds": round(time.monotonic() - start),
        "bytes": library.stat().st_size,
    }


def environment(work: Path, arch: str) -> Mapping[str, str]:
    """Return what FlashInfer reads from the environment: CUDA, a folder for its objects, GPUs to compile for, its tools."""
    return {
        "CUDA_HOME": str(work / "cuda"),
        "FLASHINFER_WORKSPACE_BASE": str(work),
        "FLASHINFER_CUDA_ARCH_LIST": arch,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # where its builder, ninja, is
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile the modules of FlashInfer that the adapter runs.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the modules")
    parser.add_argument(
        "--arch", default="", help=f"GPUs to compile for, such as '9.0a'; if empty, '{ARCHITECTURES}'"
    )
    parser.add_argument(
        "--only", action="append", choices=list(declared_modules()), help="these modules alone"
    )
    parser.add_argument("--nvcc", type=Path, help="the environment that holds nvcc, if it is not this one")
    options = parser.parse_args(argv)
    arch = options.arch or ARCHITECTURES
    if not (packages := cuda_packages(options.nvcc)):
        print("error: no package brings CUDA here: install medha[gpu,nvcc]", file=sys.stderr)
        return 1
    manifest: dict[str, Any] = {
        "flashinfer": version("flashinfer-python"),
        "arch": arch,
        "modules": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        try:
            make_cuda_home(work / "cuda", packages)
        except FileNotFoundError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        os.environ.update(environment(work, arch))
        for name in options.only or modules_for(arch):
            manifest["modules"][name] = made = compile_module(name, options.out)
            print(f"{name}: {made['seconds']} s, {made['bytes']} bytes", flush=True)
            (options.out / "modules.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
