"""Operators on rows of float32 on a CPU, each in one pass over memory, where torch takes several.

Every function is `void (int64 *call)` and is run by every thread of a team; a thread takes its share of the
rows.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from llvmlite import ir

from medha_worker.kernels.cpu.host_compiler import Compiled, Target
from medha_worker.kernels.cpu.openmp import OpenMP
from medha_worker.kernels.cpu.vector_code import FLOAT, INT32, INT64, POINTER, VOID, VectorBuilder

# Fewer values than this are not worth waking a thread for.
_VALUES_PER_THREAD = 1 << 15


class CompiledRows:
    """`RowOperators` for float32 rows whose sizes are multiples of the vector length."""

    def __init__(self, openmp: OpenMP) -> None:
        self._openmp = openmp
        self._lanes = Target.of_host().lanes
        self._module = compiled_rows(self._lanes)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        assert x.stride(-1) == 1
        assert x.shape[-1] % self._lanes == 0
        rows = x if x.dim() == 3 else x[:, None]
        output = torch.empty(rows.shape)
        self._run(
            "rms_norm",
            rows.shape[0] * rows.shape[1] * rows.shape[2],
            *(rows.shape[0], rows.shape[1], rows.shape[2]),
            *(rows.data_ptr(), rows.stride(0), rows.stride(1)),
            *(weight.data_ptr(), output.data_ptr(), _bits(eps)),
        )
        return output.view(x.shape)

    def add_rms_norm(
        self, hidden: torch.Tensor, part: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> None: ...

    def rotate(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        rows, count, head_dim = heads.shape
        assert heads.stride()[1:] == (head_dim, 1)
        assert head_dim % (2 * self._lanes) == 0
        assert cos.is_contiguous()
        assert sin.is_contiguous()
        addresses = heads.data_ptr(), cos.data_ptr(), sin.data_ptr()
        self._run("rotate", heads.numel(), rows, count, head_dim // 2, heads.stride(0), *addresses)

    def silu_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        assert gate_up.is_contiguous()
        assert size % self._lanes == 0
        output = torch.empty(rows, size)
        self._run("silu_multiply", output.numel(), rows, size, gate_up.data_ptr(), output.data_ptr())
        return output

    def _run(self, name: str, values: int, *fields: int) -> None:
        threads = min(torch.get_num_threads(), 1 + values // _VALUES_PER_THREAD)
        self._openmp.run(self._module.address(name), np.array(fields, dtype=np.int64), threads)


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


@lru_cache
def compiled_rows(lanes: int) -> Compiled:
    """Return the operators, compiled once."""
    module = ir.Module("medha_cpu_rows")
    _emit_rms_norm(module, lanes)
    _emit_rotate(module, lanes)
    _emit_silu_multiply(module, lanes)
    return Compiled(module)


class _Rows(VectorBuilder):
    """Builder of an exported function, with its fields and its thread's share of rows (the first field)."""

    def __init__(self, module: ir.Module, name: str, lanes: int, fields: tuple[str, ...]) -> None:
        function = ir.Function(module, ir.FunctionType(VOID, [POINTER]), name)
        super().__init__(function, lanes)
        self._call = function.args[0]
        self._fields = ("rows", *fields)
        thread, threads = self.external_number("medha_thread"), self.external_number("medha_threads")
        self.first = self.udiv(self.times(self.number_of("rows"), thread), threads)
        self.stop = self.udiv(self.times(self.number_of("rows"), self.plus(thread, 1)), threads)

    def number_of(self, field: str) -> ir.Value:
        return self.one(self._call, self._fields.index(field), INT64)

    def pointer_of(self, field: str) -> ir.Value:
        return self.inttoptr(self.number_of(field), POINTER)

    def float_of(self, field: str) -> ir.Value:
        return self.bitcast(self.trunc(self.number_of(field), INT32), FLOAT)


def _emit_rms_norm(module: ir.Module, lanes: int) -> None:
    """Emit output = x / sqrt(mean(x^2) + eps) * weight, for [rows, members, size]."""
    code = _Rows(
        module, "rms_norm", lanes,
        ("members", "size", "x", "row_stride", "member_stride", "weight", "output", "eps"),
    )  # fmt: skip
    members, size = code.number_of("members"), code.number_of("size")
    x, weight, output = (code.pointer_of(name) for name in ("x", "weight", "output"))
    row_stride, member_stride = code.number_of("row_stride"), code.number_of("member_stride")
    eps = code.float_of("eps")
    with code.counting(code.first, code.stop) as row, code.counting(0, members) as member:
        source = code.plus(code.times(row.index, row_stride), code.times(member.index, member_stride))
        target = code.times(code.plus(code.times(row.index, members), member.index), size)
        with code.counting(0, size, lanes, [code.same(0.0)]) as column:
            value = code.vector(x, code.plus(source, column.index))
            column.following[0] = code.multiply_add(value, value, column.carried[0])
        mean = code.fdiv(code.total(column.carried[0]), code.sitofp(size, FLOAT))
        root = code.sqrt(code.fadd(mean, eps))
        factor = code.splat(code.fdiv(ir.Constant(FLOAT, 1.0), root))
        with code.counting(0, size, lanes) as column:
            value = code.fmul(code.vector(x, code.plus(source, column.index)), factor)
            scaled = code.fmul(value, code.vector(weight, column.index))
            code.put(scaled, output, code.plus(target, column.index))
    code.ret_void()


def _emit_rotate(module: ir.Module, lanes: int) -> None:
    """Emit (a, b) = (a cos - b sin, b cos + a sin) for the halves of every head, in place."""
    code = _Rows(module, "rotate", lanes, ("heads", "half", "row_stride", "x", "cos", "sin"))
    heads, half, row_stride = (code.number_of(name) for name in ("heads", "half", "row_stride"))
    x, cos, sin = (code.pointer_of(name) for name in ("x", "cos", "sin"))
    with code.counting(code.first, code.stop) as row, code.counting(0, half, lanes) as column:
        angle = code.plus(code.times(row.index, half), column.index)
        cosine, sine = code.vector(cos, angle), code.vector(sin, angle)
        with code.counting(0, heads) as head:
            start = code.plus(code.times(row.index, row_stride), code.times(code.times(head.index, half), 2))
            first = code.plus(start, column.index)
            second = code.plus(first, half)
            a, b = code.vector(x, first), code.vector(x, second)
            code.put(code.fsub(code.fmul(a, cosine), code.fmul(b, sine)), x, first)
            code.put(code.multiply_add(a, sine, code.fmul(b, cosine)), x, second)
    code.ret_void()


def _emit_silu_multiply(module: ir.Module, lanes: int) -> None:
    """Emit output = gate / (1 + e^-gate) * up."""
    code = _Rows(module, "silu_multiply", lanes, ("size", "gate_up", "output"))
    size, gate_up, output = code.number_of("size"), code.pointer_of("gate_up"), code.pointer_of("output")
    with code.counting(code.first, code.stop) as row, code.counting(0, size, lanes) as column:
        source = code.plus(code.times(code.times(row.index, size), 2), column.index)
        gate, up = code.vector(gate_up, source), code.vector(gate_up, code.plus(source, size))
        power = code.exp2(code.fmul(gate, code.same(-math.log2(math.e))))
        result = code.fmul(code.fdiv(gate, code.fadd(code.same(1.0), power)), up)
        code.put(result, output, code.plus(code.times(row.index, size), column.index))
    code.ret_void()
