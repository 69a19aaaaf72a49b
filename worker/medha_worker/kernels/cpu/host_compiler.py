"""The machine that kernels are compiled for, and the compiler."""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import llvmlite.binding as llvm
from llvmlite import ir


@dataclass(frozen=True, slots=True)
class Target:
    """Number of values in a vector register, and the blocking of products in registers."""

    lanes: int
    vectors: int  # vectors of one row that are kept in registers together
    rows: int

    @classmethod
    def of_host(cls) -> Target:
        features = llvm.get_host_cpu_features()
        if features.get("avx512f"):
            return cls(lanes=16, vectors=4, rows=6)
        if features.get("avx2") and features.get("fma"):
            return cls(lanes=8, vectors=2, rows=6)
        return cls(lanes=4, vectors=4, rows=4)


class Compiled:
    """A module in machine code; its functions live as long as this object.

    Code that was compiled before for this machine is read from `kernel_directory`: a rank that restarts while
    others wait for it saves most of a second.
    """

    def __init__(self, module: ir.Module, directory: Path | None = None) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=cpu, features=features, opt=3, jit=True
        )
        text = str(module)
        described = "\n".join(
            (".".join(map(str, llvm.llvm_version_info)), machine.triple, cpu, features, text)
        )
        kept = _Kept(directory or kernel_directory(), hashlib.sha256(described.encode()).hexdigest())
        code = kept.read()
        if code is None:
            code = _compile(text, machine)
            kept.write(code)
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()

    def address(self, function: str) -> int:
        """Return the address of an exported function."""
        return int(self._engine.get_function_address(function))


def _compile(text: str, machine: llvm.TargetMachine) -> bytes:
    """Return the object file of a module in LLVM assembly."""
    parsed = llvm.parse_assembly(text)
    parsed.verify()
    # Everything is already in vectors: LLVM should keep it in registers and not unroll it further.
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(parsed, passes)
    return bytes(machine.emit_object(parsed))


def kernel_directory() -> Path | None:
    """Return where compiled kernels are cached between processes; None if this user has no such place."""
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no home
        return None
    return caches / "medha" / "kernels"


class _Kept:
    """A cached file of machine code. It is executed, so it is read only if nobody else can write it."""

    def __init__(self, directory: Path | None, name: str) -> None:
        self._directory = directory
        self._name = name

    def read(self) -> bytes | None:
        if self._directory is None or not self._is_ours(self._directory):
            return None
        try:
            content = (self._directory / self._name).read_bytes()
        except OSError:
            return None
        digest, code = content[:32], content[32:]
        return code if hashlib.sha256(code).digest() == digest else None  # else the file is incomplete

    def write(self, code: bytes) -> None:
        """Store the code for the next process, if there is a place."""
        if self._directory is None:
            return
        with suppress(OSError):
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._is_ours(self._directory):
                partial = self._directory / f"{self._name}.{secrets.token_hex(4)}"
                partial.write_bytes(hashlib.sha256(code).digest() + code)
                partial.rename(self._directory / self._name)

    @staticmethod
    def _is_ours(directory: Path) -> bool:
        try:
            found = directory.stat()
        except OSError:
            return False
        return found.st_uid == os.getuid() and not found.st_mode & 0o022
