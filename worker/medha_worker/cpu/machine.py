"""The machine that kernels are compiled for, and the compiler."""

from __future__ import annotations

from dataclasses import dataclass

import llvmlite.binding as llvm
from llvmlite import ir


@dataclass(frozen=True, slots=True)
class Target:
    """How many values a vector register holds, and how products are blocked in registers."""

    lanes: int
    vectors: int  # of one row, kept in registers together
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
    """A module in machine code; its functions live as long as this object."""

    def __init__(self, module: ir.Module) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, jit=True
        )
        parsed = llvm.parse_assembly(str(module))
        parsed.verify()
        # Everything is in vectors already: LLVM shall keep it in registers and not unroll it further.
        options = llvm.create_pipeline_tuning_options(speed_level=2)
        options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
        passes = llvm.create_pass_builder(machine, options)
        passes.getModulePassManager().run(parsed, passes)
        self._engine = llvm.create_mcjit_compiler(parsed, machine)
        self._engine.finalize_object()

    def address(self, function: str) -> int:
        """Of an exported function."""
        return int(self._engine.get_function_address(function))
