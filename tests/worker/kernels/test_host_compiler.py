"""Machine code is compiled only once, and a cached copy is run only if nobody else can have written it."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from llvmlite import ir

from medha_worker.kernels.cpu import host_compiler as machine
from medha_worker.kernels.cpu.host_compiler import Compiled, kernel_directory
from medha_worker.kernels.cpu.vector_code import INT32


def answering(number: int) -> ir.Module:
    """Return a module with one function, which returns the number."""
    module = ir.Module("answer")
    function = ir.Function(module, ir.FunctionType(INT32, []), "answer")
    ir.IRBuilder(function.append_basic_block()).ret(ir.Constant(INT32, number))
    return module


def answer(compiled: Compiled) -> int:
    return int(ctypes.CFUNCTYPE(ctypes.c_int32)(compiled.address("answer"))())


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that records each compilation."""
    found: list[str] = []
    plain = machine._compile

    def compile_(text: str, target: object) -> bytes:
        found.append(text)
        return plain(text, target)

    monkeypatch.setattr(machine, "_compile", compile_)
    return found


def test_code_is_compiled_once_and_read_from_then_on(tmp_path: Path, compilations: list[str]) -> None:
    directory = tmp_path / "caches" / "kernels"
    assert [answer(Compiled(answering(7), directory)) for _ in range(3)] == [7, 7, 7]
    assert answer(Compiled(answering(8), directory)) == 8
    assert len(compilations) == 2
    assert directory.stat().st_mode & 0o777 == 0o700


def test_half_a_file_is_compiled_anew(tmp_path: Path, compilations: list[str]) -> None:
    directory = tmp_path / "kernels"
    Compiled(answering(7), directory)
    (file,) = directory.iterdir()
    file.write_bytes(file.read_bytes()[:-10])
    assert answer(Compiled(answering(7), directory)) == 7
    assert answer(Compiled(answering(7), directory)) == 7
    assert len(compilations) == 2


def test_a_directory_that_others_can_write_is_neither_read_nor_written(
    tmp_path: Path, compilations: list[str]
) -> None:
    directory = tmp_path / "kernels"
    Compiled(answering(7), directory)
    directory.chmod(0o777)
    (file,) = directory.iterdir()
    file.write_bytes(b"evil")
    assert answer(Compiled(answering(7), directory)) == 7
    assert file.read_bytes() == b"evil"
    assert len(compilations) == 2


def test_where_nothing_can_be_kept_it_is_compiled_each_time(tmp_path: Path, compilations: list[str]) -> None:
    (tmp_path / "file").write_text("no directory")
    assert [answer(Compiled(answering(7), tmp_path / "file" / "kernels")) for _ in range(2)] == [7, 7]
    assert len(compilations) == 2


def test_the_directory_is_among_the_users_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel_directory() == tmp_path / "medha" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kernel_directory() == tmp_path / ".cache" / "medha" / "kernels"
