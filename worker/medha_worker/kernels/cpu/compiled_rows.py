"""Operators on rows of float32 on a CPU, each in one pass over memory, where torch takes several.

A part of a call is a share of the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from llvmlite import ir

from medha_worker.kernels.cpu.helper_team import HelperTeam, TeamFunction, float_bits
from medha_worker.kernels.cpu.host_compiler import Compiled, Target
from medha_worker.kernels.cpu.team_code import PART
from medha_worker.kernels.cpu.vector_code import FLOAT, INT32, INT64, POINTER, VectorBuilder

# Fewer values than this are not worth waking a thread for.
_VALUES_PER_THREAD = 1 << 15


class CompiledRows:
    """`RowOperators` for float32 rows whose sizes are multiples of the vector length."""

    def __init__(self, team: HelperTeam) -> None:
        self._team = team
        self._lanes = Target.of_host().lanes
        module = compiled_rows(self._lanes)
        names = ("rms_norm", "rotate", "silu_multiply", "gelu_multiply")
        self._rms_norm, self._rotate, self._silu_multiply, self._gelu_multiply = (
            team.function(module, name) for name in names
        )

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        assert x.stride(-1) == 1
        assert x.shape[-1] % self._lanes == 0
        output = torch.empty(x.shape)
        rows, size = x.shape[0], x.shape[-1]
        members, member_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
        fields = (
            rows, members, size, x.data_ptr(), x.stride(0), member_stride, weight.data_ptr(), output.data_ptr(),
            float_bits(eps),
        )  # fmt: skip
        self._rms_norm(fields, self._parts(rows * members * size))
        return output

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
        fields = rows, count, head_dim // 2, heads.stride(0), *addresses
        self._rotate(fields, self._parts(heads.numel()))

    def silu_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._gated(self._silu_multiply, gate_up)

    def gelu_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._gated(self._gelu_multiply, gate_up)

    def _gated(self, function: TeamFunction, gate_up: torch.Tensor) -> torch.Tensor:
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        assert gate_up.is_contiguous()
        assert size % self._lanes == 0
        output = torch.empty(rows, size)
        fields = rows, size, gate_up.data_ptr(), output.data_ptr()
        function(fields, self._parts(output.numel()))
        return output

    def _parts(self, values: int) -> int:
        return min(self._team.grow(torch.get_num_threads()), 1 + values // _VALUES_PER_THREAD)


@lru_cache
def compiled_rows(lanes: int) -> Compiled:
    """Return the operators, compiled once."""
    module = ir.Module("medha_cpu_rows")
    _emit_rms_norm(module, lanes)
    _emit_rotate(module, lanes)
    _emit_gated(module, lanes, "silu_multiply", _negative)
    _emit_gated(module, lanes, "gelu_multiply", _negative_of_gelu)
    return Compiled(module)


class _Rows(VectorBuilder):
    """Builder of an exported function, with its fields and its thread's share of rows (the first field)."""

    def __init__(self, module: ir.Module, name: str, lanes: int, fields: tuple[str, ...]) -> None:
        function = ir.Function(module, PART, name)
        super().__init__(function, lanes)
        self._call, part, parts, _ = function.args
        self._fields = ("rows", *fields)
        self.first = self.udiv(self.times(self.number_of("rows"), part), parts)
        self.stop = self.udiv(self.times(self.number_of("rows"), self.plus(part, 1)), parts)

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


def _emit_gated(
    module: ir.Module, lanes: int, name: str, exponent: Callable[[_Rows, ir.Value], ir.Value]
) -> None:
    """Emit output = gate / (1 + e^exponent(gate)) * up."""
    code = _Rows(module, name, lanes, ("size", "gate_up", "output"))
    size, gate_up, output = code.number_of("size"), code.pointer_of("gate_up"), code.pointer_of("output")
    with code.counting(code.first, code.stop) as row, code.counting(0, size, lanes) as column:
        source = code.plus(code.times(code.times(row.index, size), 2), column.index)
        gate, up = code.vector(gate_up, source), code.vector(gate_up, code.plus(source, size))
        power = code.exp2(code.fmul(exponent(code, gate), code.same(math.log2(math.e))))
        result = code.fmul(code.fdiv(gate, code.fadd(code.same(1.0), power)), up)
        code.put(result, output, code.plus(code.times(row.index, size), column.index))
    code.ret_void()


def _negative(code: _Rows, gate: ir.Value) -> ir.Value:
    return code.fmul(gate, code.same(-1.0))


def _negative_of_gelu(code: _Rows, gate: ir.Value) -> ir.Value:
    """Return -2 sqrt(2 / pi) (gate + 0.044715 gate^3): (1 + tanh(u)) / 2 is 1 / (1 + e^-2u)."""
    square = code.fmul(gate, gate)
    bent = code.multiply_add(square, code.same(0.044715), code.same(1.0))
    return code.fmul(code.fmul(gate, bent), code.same(-2.0 * math.sqrt(2.0 / math.pi)))
