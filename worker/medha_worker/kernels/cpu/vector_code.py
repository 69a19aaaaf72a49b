"""An LLVM IR builder for vectors of float32, with which the kernels are written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from llvmlite import ir

BOOL, BYTE, INT32, INT64, FLOAT = ir.IntType(1), ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
POINTER, VOID = ir.PointerType(), ir.VoidType()

# Numbers of the kernel (indices, offsets) are int64 values, or integers known when it is emitted.
Number: TypeAlias = ir.Value | int

# Minimax polynomial of 2^f on [-1/2, 1/2]; lowest power first.
_EXP2 = (1.0000000, 0.69314718, 0.24022650, 0.05550410, 0.00961813, 0.00133336)
_ROUND = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in a float's low bits
# Exponents of normal numbers. The lower bound leaves room for products with values, as subnormal sums take
# ten times as long.
_LOWEST, _HIGHEST = -104.0, 126.0


class VectorBuilder(ir.IRBuilder):  # type: ignore[misc] # llvmlite has no types
    """Appends code to a new function; vectors have `lanes` values."""

    def __init__(self, function: ir.Function, lanes: int) -> None:
        super().__init__(function.append_basic_block("entry"))
        self.lanes = lanes
        self.vector_type = ir.VectorType(FLOAT, lanes)
        self.integers_type = ir.VectorType(INT32, lanes)

    # --- numbers ------------------------------------------------------------------------------------

    def number(self, value: Number) -> ir.Value:
        return ir.Constant(INT64, value) if isinstance(value, int) else value

    def plus(self, *terms: Number) -> ir.Value:
        total = self.number(terms[0])
        for term in terms[1:]:
            total = self.add(total, self.number(term))
        return total

    def times(self, a: Number, b: Number) -> ir.Value:
        return self.mul(self.number(a), self.number(b))

    def round_down(self, value: ir.Value, step: int) -> ir.Value:
        """Return the largest multiple of `step` that is not above `value`, which is >= 0."""
        return self.times(self.udiv(value, self.number(step)), step)

    def smaller(self, a: ir.Value, b: Number) -> ir.Value:
        return self.select(self.icmp_signed("<", a, self.number(b)), a, self.number(b))

    def larger(self, a: ir.Value, b: Number) -> ir.Value:
        return self.select(self.icmp_signed(">", a, self.number(b)), a, self.number(b))

    # --- memory -------------------------------------------------------------------------------------

    def at(self, pointer: ir.Value, index: Number, kind: ir.Type = FLOAT) -> ir.Value:
        """Return the address of an element."""
        return self.gep(pointer, [self.number(index)], source_etype=kind)

    def one(self, pointer: ir.Value, index: Number, kind: ir.Type = FLOAT) -> ir.Value:
        return self.load(self.at(pointer, index, kind), typ=kind)

    def put_one(self, value: ir.Value, pointer: ir.Value, index: Number) -> None:
        self.store(value, self.at(pointer, index, value.type))

    def vector(self, pointer: ir.Value, index: Number) -> ir.Value:
        """Load consecutive floats, aligned or not."""
        return self.load(self.at(pointer, index), typ=self.vector_type, align=4)

    def vector_of_float8(self, pointer: ir.Value, index: Number) -> ir.Value:
        """Load consecutive numbers of FP8 (E4M3) as floats."""
        bytes_type = ir.VectorType(BYTE, self.lanes)
        stored = self.load(self.at(pointer, index, BYTE), typ=bytes_type, align=1)
        bits = self.zext(stored, self.integers_type)

        def integers(value: int) -> ir.Constant:
            return ir.Constant(self.integers_type, [value] * self.lanes)

        size = self.and_(bits, integers(0x7F))
        # Exponent and mantissa go to their places in a float, whose exponent counts from another number.
        moved = self.add(self.shl(size, integers(20)), integers((127 - 7) << 23))
        # Numbers below 2^-6 have no leading 1; a subnormal float that is multiplied instead would take long.
        small = self.fmul(self.sitofp(size, self.vector_type), self.same(2.0**-9))
        is_small = self.icmp_signed("<", size, integers(8))
        number = self.select(is_small, self.bitcast(small, self.integers_type), moved)
        number = self.select(self.icmp_signed("==", size, integers(0x7F)), integers(0x7FC00000), number)
        sign = self.shl(self.and_(bits, integers(0x80)), integers(24))
        return self.bitcast(self.or_(number, sign), self.vector_type)

    def put(self, value: ir.Value, pointer: ir.Value, index: Number) -> None:
        self.store(value, self.at(pointer, index), align=4)

    def prefetch(self, pointer: ir.Value, index: Number, kind: ir.Type = FLOAT) -> None:
        """Prefetch the cache line of an element for reading, into second-level cache."""
        function = self._external("llvm.prefetch.p0", VOID, POINTER, INT32, INT32, INT32)
        to_read, locality, data = (ir.Constant(INT32, value) for value in (0, 2, 1))
        self.call(function, [self.at(pointer, index, kind), to_read, locality, data])

    # --- vectors ------------------------------------------------------------------------------------

    def same(self, value: float) -> ir.Constant:
        """Return a vector of one constant."""
        return ir.Constant(self.vector_type, [value] * self.lanes)

    def splat(self, value: ir.Value) -> ir.Value:
        """Return a vector with one value in all lanes."""
        kind = ir.VectorType(value.type, self.lanes)
        nothing = ir.Constant(kind, ir.Undefined)
        first = self.insert_element(nothing, value, ir.Constant(INT32, 0))
        return self.shuffle_vector(first, nothing, ir.Constant(self.integers_type, [0] * self.lanes))

    def multiply_add(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """Return a * b + c."""
        kinds = [self.vector_type] * 3
        return self.call(self._external(f"llvm.fma.v{self.lanes}f32", self.vector_type, *kinds), [a, b, c])

    def total(self, vector: ir.Value) -> ir.Value:
        """Return the sum over the lanes."""
        name = f"llvm.vector.reduce.fadd.v{self.lanes}f32"
        return self.call(
            self._external(name, FLOAT, FLOAT, self.vector_type), [ir.Constant(FLOAT, 0.0), vector]
        )

    def maximum(self, vector: ir.Value) -> ir.Value:
        """Return the largest lane."""
        name = f"llvm.vector.reduce.fmax.v{self.lanes}f32"
        return self.call(self._external(name, FLOAT, self.vector_type), [vector])

    def sqrt(self, value: ir.Value) -> ir.Value:
        return self.call(self._external("llvm.sqrt.f32", FLOAT, FLOAT), [value])

    def log2(self, value: ir.Value) -> ir.Value:
        return self.call(self._external("llvm.log2.f32", FLOAT, FLOAT), [value])

    def exp2(self, x: ir.Value) -> ir.Value:
        """Return 2^x in each lane, relative error 2e-7; x is clamped to -104 .. 126, in normal numbers."""
        for bound, beyond in ((_LOWEST, "<"), (_HIGHEST, ">")):
            x = self.select(self.fcmp_ordered(beyond, x, self.same(bound)), self.same(bound), x)
        rounded = self.fadd(x, self.same(_ROUND))
        fraction = self.fsub(x, self.fsub(rounded, self.same(_ROUND)))
        power = self.same(_EXP2[-1])
        for coefficient in reversed(_EXP2[:-1]):
            power = self.multiply_add(power, fraction, self.same(coefficient))
        places = ir.Constant(self.integers_type, [23] * self.lanes)  # to a float's exponent
        exponent = self.shl(self.bitcast(rounded, self.integers_type), places)
        bits = self.add(self.bitcast(power, self.integers_type), exponent)
        return self.bitcast(bits, self.vector_type)

    def transpose(self, square: Sequence[ir.Value]) -> list[ir.Value]:
        """Transpose `lanes` vectors: neighbours swap lanes, then pairs, then fours, and so on."""
        square = list(square)
        everyone = range(self.lanes)
        distance = 1
        while distance < self.lanes:
            upper = [i if i & distance == 0 else self.lanes + i - distance for i in everyone]
            lower = [i + distance if i & distance == 0 else self.lanes + i for i in everyone]
            for i in everyone:
                if i & distance == 0:
                    a, b = square[i], square[i + distance]
                    square[i] = self.shuffle_vector(a, b, ir.Constant(self.integers_type, upper))
                    square[i + distance] = self.shuffle_vector(a, b, ir.Constant(self.integers_type, lower))
            distance *= 2
        return square

    def folded(self, a: ir.Value, b: ir.Value, distance: int) -> ir.Value:
        """Fold two vectors of partial sums, `distance` lanes apart, into one: first `a`'s, then `b`'s."""
        everyone = range(self.lanes)
        near = [i if i & distance == 0 else self.lanes + i - distance for i in everyone]
        far = [i + distance if i & distance == 0 else self.lanes + i for i in everyone]
        halves = [self.shuffle_vector(a, b, ir.Constant(self.integers_type, part)) for part in (near, far)]
        return self.fadd(*halves)

    def _external(self, name: str, result: ir.Type, *arguments: ir.Type) -> ir.Function:
        declared = self.module.globals.get(name)
        return declared or ir.Function(self.module, ir.FunctionType(result, arguments), name)

    # --- loops --------------------------------------------------------------------------------------

    @contextmanager
    def counting(
        self, start: Number, stop: Number, step: int = 1, carried: Sequence[ir.Value] = ()
    ) -> Iterator[Loop]:
        """Emit `for index in range(start, stop, step)`; `carried` values pass from iteration to iteration."""
        loop = Loop(self, self.number(start), self.number(stop), step, carried)
        yield loop
        loop.close()


class Loop:
    """A counted loop; the builder is positioned in its body until `close`.

    Attributes:
        index: The counter, int64.
        carried: In the body, the values at the start of the iteration; after the loop, the last iteration's
            results.
        following: Values for the start of the next iteration; the body replaces them.
    """

    def __init__(
        self, builder: VectorBuilder, start: ir.Value, stop: ir.Value, step: int, carried: Sequence[ir.Value]
    ) -> None:
        self._builder, self._step = builder, step
        before = builder.block
        head, body, self._after = (builder.append_basic_block(name) for name in ("head", "body", "after"))
        builder.branch(head)
        builder.position_at_end(head)
        self._head = head
        self.index = builder.phi(INT64)
        self.index.add_incoming(start, before)
        self.carried = [builder.phi(value.type) for value in carried]
        for phi, value in zip(self.carried, carried, strict=True):
            phi.add_incoming(value, before)
        builder.cbranch(builder.icmp_signed("<", self.index, stop), body, self._after)
        builder.position_at_end(body)
        self.following: list[ir.Value] = list(self.carried)

    def close(self) -> None:
        builder = self._builder
        self.index.add_incoming(builder.plus(self.index, self._step), builder.block)
        for phi, value in zip(self.carried, self.following, strict=True):
            phi.add_incoming(value, builder.block)
        builder.branch(self._head)
        builder.position_at_end(self._after)
