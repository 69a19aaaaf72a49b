"""The compiler of FlashInfer's modules finds the parts of CUDA that packages bring, and says which one is missing."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from medha_worker.kernels.flashinfer import compiled_modules
from medha_worker.kernels.flashinfer.compiled_modules import (
    cuda_packages,
    declared_modules,
    described,
    main,
    make_cuda_home,
    modules_for,
)

PARTS = (
    "bin/nvcc",
    "nvvm/bin/cicc",
    "include/crt/host_defines.h",
    "include/cccl/cuda/version",
    "include/cuda_runtime.h",
    "lib/libcudart.so.13",
)


def packages(folder: Path, *paths: str) -> Path:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(path)
    return folder


def test_the_parts_of_several_environments_become_one_folder(tmp_path: Path) -> None:
    compiler = packages(tmp_path / "compiler", *PARTS[:4])
    runtime = packages(tmp_path / "runtime", *PARTS[4:], "include/crt/host_defines.h", "include/crt/other.h")
    home = tmp_path / "home"
    make_cuda_home(home, [compiler, runtime])
    assert all((home / path).read_text() == path for path in PARTS[:5])
    assert (home / "include/crt/host_defines.h").readlink() == compiler / "include/crt/host_defines.h"
    assert (home / "include/crt/other.h").readlink() == runtime / "include/crt/other.h"
    assert (home / "lib64/libcudart.so").readlink() == runtime / "lib/libcudart.so.13"
    ctypes.CDLL(str(home / "lib64/stubs/libcuda.so"))


def test_the_compiler_may_lie_in_an_environment_of_its_own(tmp_path: Path) -> None:
    here = cuda_packages()
    cuda = packages(tmp_path / "lib/python3.11/site-packages/nvidia/cu13", *PARTS)
    assert cuda_packages(tmp_path) == [*here, cuda]


@pytest.mark.parametrize(
    ("missing", "package"),
    [
        ("bin/nvcc", "nvidia-cuda-nvcc"),
        ("nvvm/bin/cicc", "nvidia-nvvm"),
        ("include/crt/host_defines.h", "nvidia-cuda-crt"),
        ("include/cccl/cuda/version", "nvidia-cuda-cccl"),
        ("lib/libcudart.so.13", "nvidia-cuda-runtime"),
    ],
)
def test_a_missing_part_is_named_with_its_package(missing: str, package: str, tmp_path: Path) -> None:
    some = packages(tmp_path / "some", *(path for path in PARTS if path != missing))
    with pytest.raises(FileNotFoundError, match=rf"the package {package} brings: install medha\[gpu,nvcc\]"):
        make_cuda_home(tmp_path / "home", [some])


@pytest.mark.parametrize(
    ("found", "error"),
    [
        ((), "no package brings CUDA here"),
        (("include/cuda_runtime.h",), "the package nvidia-cuda-nvcc brings"),
    ],
)
def test_the_command_says_what_to_install(
    found: tuple[str, ...],
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folders = [packages(tmp_path / "some", *found)] if found else []
    monkeypatch.setattr(compiled_modules, "cuda_packages", lambda _: folders)
    monkeypatch.setattr(compiled_modules, "version", lambda _: "1.0")
    assert main(["--out", str(tmp_path)]) == 1
    assert error in capsys.readouterr().err


def test_each_type_and_size_of_heads_has_a_module_with_and_without_a_window_and_fp8() -> None:
    names = list(declared_modules())
    assert names[:4] == ["merge", "silu", "rope", "norm"]
    assert len(names[4:]) == len(set(names[4:])) == 2 * 3 * 2 * 2 + 2
    assert "attention-float16-256-window" in names
    assert "attention-bfloat16-64" in names
    assert "attention-bfloat16-128-window-fp8" in names


def test_modules_for_wide_chunks_are_compiled_for_hopper_alone() -> None:
    wide = {"attention-bfloat16-128-wide", "attention-float16-128-wide"}
    assert set(modules_for("8.0 9.0a 10.0f")) - set(modules_for("8.0 10.0f")) == wide
    assert set(modules_for("9.0a")) == set(declared_modules())


def test_a_description_is_what_flashinfers_own_function_would_load_and_that_function_loads_it_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class JitSpec:
        def __init__(self, *given: object) -> None:
            self.given = given

        def build_and_load(self) -> str:
            return "loaded"

    @cache
    def get_module(*given: object) -> object:
        module = JitSpec(*given).build_and_load()
        return (
            module if isinstance(module, str) else module.function
        )  # as those that take functions of their module

    for name, content in {
        "flashinfer.jit.core": {"JitSpec": JitSpec},
        "flashinfer.part": {"get_module": get_module},
    }.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    assert described("part", "get_module", "silu").given == ("silu",)
    assert get_module("silu") == "loaded"
