"""Matrix products of float32 for CPUs, compiled for the vector registers of this machine.

A thread goes through *panels*. A panel has as many columns of the weight as fill the vector registers of one row. The
thread copies a block of a panel into first-level cache, and multiplies a few rows at a time by it in registers. If it needs
the block only once or twice, it reads it in place. Meanwhile it prefetches the next block, so that products of few rows wait
only for the weight. A single row is multiplied along the lines of the weight instead, which the processor prefetches by itself.

A *packed* weight has its panels one behind the other, so that a thread reads memory in one run and copies nothing. One or
two rows are multiplied by several panels at once: memory then has several requests to answer at a time.

Every element is added up in one order, which depends on the length of the sum alone: over the values of a block one by
one, then over the blocks, then to what was there. So a row gets the same bits beside any other rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

from llvmlite import ir

from medha_worker.kernels.cpu.host_compiler import Compiled, Target
from medha_worker.kernels.cpu.team_code import PART
from medha_worker.kernels.cpu.vector_code import INT64, POINTER, VOID, Number, VectorBuilder

CHUNK_ROWS = 192
"""Most rows that are multiplied by one copy of a block: they stay in second-level cache."""
_BLOCK_FLOATS = 8192  # 32 KiB, most of first-level cache
_LINES = 8  # of the weight that are read at once for a row that is alone
_LINE_FLOATS = 2048  # most of a line that is read before the next ones: its sums stay in first-level cache
_CACHE_LINE_FLOATS = 16
_PAGE_FLOATS = 1024

# Fields of a call, in order, int64 each. Strides are in floats; that of a packed weight is between panels. What is
# added to the products begins at `base`: its element is `base_row_step` floats further for each row, and
# `base_column_step` floats further for each column.
CALL_FIELDS = (
    "rows", "inner", "columns", "x", "x_stride", "weight", "weight_stride", "base", "base_row_step",
    "base_column_step", "out", "out_stride", "scratch", "scratch_stride",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ProductSizes:
    """The blocking of products for a target."""

    target: Target

    @property
    def panel_columns(self) -> int:
        return self.target.lanes * self.target.vectors

    @property
    def block_inner(self) -> int:
        """Values of the sum in a block."""
        return _BLOCK_FLOATS // self.panel_columns

    @property
    def panel_lines(self) -> int:
        """Cache lines of a row of a panel."""
        return self.panel_columns // _CACHE_LINE_FLOATS

    @property
    def fetched_lines(self) -> tuple[int, ...]:
        """Cache lines that may be prefetched for each value of the sum: all of a row, a half, and so on, or none."""
        return (*(self.panel_lines >> halved for halved in range(self.panel_lines.bit_length())), 0)

    @property
    def tile_floats(self) -> int:
        """Floats of the largest result that is computed in registers."""
        return self.target.rows * self.panel_columns

    @property
    def wide(self) -> dict[int, int]:
        """Numbers of panels of a packed weight that few rows are multiplied by at once, by the number of rows."""
        most = 2 * self.target.rows // 3  # the sums leave registers for weights and rows
        return {rows: 1 << (most // rows).bit_length() - 1 for rows in range(1, most // 2 + 1)}

    @property
    def zeros(self) -> int:
        """Zeros that stand for what is added to a product if there is nothing: those of the most columns at once."""
        return self.panel_columns * max(self.wide.values())

    @property
    def scratch_floats(self) -> int:
        """Floats of a thread's memory, which is zero at first: a block, a tile, and zeros; threads are a page apart."""
        return _BLOCK_FLOATS + self.tile_floats + self.panel_columns + _PAGE_FLOATS


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A part of a matrix of float32: its first element, and the floats between rows and between columns."""

    start: ir.Value
    row_step: Number
    column_step: Number

    def place(self, code: VectorBuilder, row: Number, column: Number) -> ir.Value:
        """Return the offset of an element."""
        return code.plus(code.times(row, self.row_step), code.times(column, self.column_step))

    def part(self, code: VectorBuilder, row: Number, column: Number) -> _Matrix:
        """Return the part that begins at an element."""
        return _Matrix(code.at(self.start, self.place(code, row, column)), self.row_step, self.column_step)

    def one(self, code: VectorBuilder, row: Number, column: Number) -> ir.Value:
        return code.one(self.start, self.place(code, row, column))

    def put_one(self, code: VectorBuilder, value: ir.Value, row: Number, column: Number) -> None:
        code.put_one(value, self.start, self.place(code, row, column))


def _chosen(code: VectorBuilder, condition: ir.Value, a: _Matrix, b: _Matrix) -> _Matrix:
    """Return `a` where the condition holds, else `b`."""
    pairs = ((a.start, b.start), (a.row_step, b.row_step), (a.column_step, b.column_step))
    start, *steps = (
        code.select(condition, *(one if isinstance(one, ir.Value) else code.number(one) for one in pair))
        for pair in pairs
    )
    return _Matrix(start, *steps)


class _Emitter:
    """Emits `product`, for weights whose columns are adjacent in memory, `product_transposed`, for adjacent rows, and two more.

    `row_product` is `product` of one row, for a number of columns that fills vectors. `packed_product` is for packed weights.
    """

    def __init__(self, module: ir.Module, target: Target) -> None:
        self.module, self.target, self.sizes = module, target, ProductSizes(target)
        self.multiply = {
            (rows, lines): self._multiply(rows, lines)
            for rows in range(1, target.rows + 1)
            for lines in self.sizes.fetched_lines
        }
        self._emit("product", self._copy_rows(), is_transposed=False)
        self._emit("product_transposed", self._copy_transposed(), is_transposed=True)
        self._emit_row()
        self._emit_packed()

    def _function(self, name: str, *arguments: ir.Type) -> ir.Function:
        function = ir.Function(self.module, ir.FunctionType(VOID, arguments), name)
        function.linkage = "internal"
        return function

    def _multiply(self, rows: int, fetched_lines: int) -> ir.Function:
        """Emit the product of a few rows and a block.

        `f(x, x_stride, block, block_stride, inner, base, base_stride, out, out_stride, ahead, ahead_stride)`: out
        [rows, panel columns] = base + x [rows, inner] @ block [inner, panel columns]. So many cache lines are prefetched for
        each value of the sum, from `ahead` on. `base` may be `out`.
        """
        lanes, columns = self.target.lanes, range(0, self.sizes.panel_columns, self.target.lanes)
        strided = (POINTER, INT64)
        name = f"multiply_{rows}_{fetched_lines}"
        function = self._function(name, *strided * 2, INT64, *strided * 3)
        x, x_stride, block, block_stride, inner, base, base_stride, out, out_stride, ahead, ahead_stride = (
            function.args
        )
        code = VectorBuilder(function, lanes)
        places = [(row, column) for row in range(rows) for column in columns]
        sources = [code.at(x, code.times(x_stride, row)) for row in range(rows)]
        with code.counting(0, inner, 1, [code.same(0.0) for _ in places]) as loop:
            first = code.times(loop.index, block_stride)
            weights = {column: code.vector(block, code.plus(first, column)) for column in columns}
            if fetched_lines:
                parts = self.sizes.panel_lines // fetched_lines  # of a row, one in each iteration
                fetched = code.times(code.udiv(loop.index, code.number(parts)), ahead_stride)
                first_line = code.times(code.urem(loop.index, code.number(parts)), fetched_lines)
                fetched = code.plus(fetched, code.times(first_line, _CACHE_LINE_FLOATS))
                for line in range(fetched_lines):
                    code.prefetch(ahead, code.plus(fetched, line * _CACHE_LINE_FLOATS))
            for row, source in enumerate(sources):
                value = code.splat(code.one(source, loop.index))
                for column in columns:
                    at = places.index((row, column))
                    loop.following[at] = code.multiply_add(value, weights[column], loop.carried[at])
        for (row, column), total in zip(places, loop.carried, strict=True):
            before = code.vector(base, code.plus(code.times(base_stride, row), column))
            code.put(code.fadd(before, total), out, code.plus(code.times(out_stride, row), column))
        code.ret_void()
        return function

    def _copy_rows(self) -> ir.Function:
        """Emit `f(weight, weight_stride, inner, block)`: block [inner, panel columns] = weight, whose columns are adjacent."""
        function = self._function("copy_rows", POINTER, INT64, INT64, POINTER)
        weight, stride, inner, block = function.args
        code = VectorBuilder(function, self.target.lanes)
        with code.counting(0, inner) as loop:
            source = code.times(loop.index, stride)
            target = code.times(loop.index, self.sizes.panel_columns)
            for column in range(0, self.sizes.panel_columns, code.lanes):
                code.put(code.vector(weight, code.plus(source, column)), block, code.plus(target, column))
        code.ret_void()
        return function

    def _copy_transposed(self) -> ir.Function:
        """Emit the same for a weight whose rows are adjacent; its columns are `weight_stride` apart."""
        function = self._function("copy_transposed", POINTER, INT64, INT64, POINTER)
        weight, stride, inner, block = function.args
        code = VectorBuilder(function, self.target.lanes)
        lanes, width = self.target.lanes, self.sizes.panel_columns
        squares = code.round_down(inner, lanes)
        for first in range(0, width, lanes):
            sources = [code.at(weight, code.times(stride, first + lane)) for lane in range(lanes)]
            with code.counting(0, squares, lanes) as loop:
                square = code.transpose([code.vector(source, loop.index) for source in sources])
                for lane, line in enumerate(square):
                    code.put(line, block, code.plus(code.times(code.plus(loop.index, lane), width), first))
            with code.counting(squares, inner) as loop:
                for lane, source in enumerate(sources):
                    target = code.plus(code.times(loop.index, width), first + lane)
                    code.put_one(code.one(source, loop.index), block, target)
        code.ret_void()
        return function

    def _emit(self, name: str, copy: ir.Function, *, is_transposed: bool) -> None:
        """Emit the function of a call: a part is a share of the panels, for a chunk of rows each."""
        function = ir.Function(self.module, PART, name)
        pointer, number, parts, thread = function.args
        code = VectorBuilder(function, self.target.lanes)
        call = {field: code.one(pointer, at, INT64) for at, field in enumerate(CALL_FIELDS)}
        rows, inner, columns, stride = (
            call[field] for field in ("rows", "inner", "columns", "weight_stride")
        )
        width = self.sizes.panel_columns

        def matrix(field: str, row_step: Number, column_step: Number = 1) -> _Matrix:
            return _Matrix(code.inttoptr(call[field], POINTER), row_step, column_step)

        x, out = matrix("x", call["x_stride"]), matrix("out", call["out_stride"])
        base = matrix("base", call["base_row_step"], call["base_column_step"])
        weight = matrix("weight", 1, stride) if is_transposed else matrix("weight", stride)
        scratch = code.at(code.inttoptr(call["scratch"], POINTER), code.times(thread, call["scratch_stride"]))
        block = _Matrix(scratch, width, 1)
        tile = _Matrix(code.at(scratch, _BLOCK_FLOATS), width, 1)
        zeros = _Matrix(code.at(tile.start, self.sizes.tile_floats), 0, 1)

        panels, chunks = _ceiling(code, columns, width), _ceiling(code, rows, CHUNK_ROWS)
        tasks = code.times(panels, chunks)
        with code.counting(*_share(code, tasks, number, parts)) as task:
            chunk, column = code.udiv(task.index, panels), code.times(code.urem(task.index, panels), width)
            first_row, last_row = _share(code, rows, chunk, chunks)
            held = code.smaller(code.sub(columns, column), width)
            is_whole = code.icmp_signed("==", held, code.number(width))
            groups = _ceiling(code, code.sub(last_row, first_row), self.target.rows)
            # A matrix that is read once or twice is multiplied where it lies: a copy would take longer.
            is_short = code.icmp_signed("<=", groups, code.number(0 if is_transposed else 2))
            is_direct = code.and_(is_whole, is_short)
            lines = self._fetched_by_each(code, groups)
            with code.counting(0, inner, self.sizes.block_inner) as part:
                depth = code.smaller(code.sub(inner, part.index), self.sizes.block_inner)
                source = weight.part(code, part.index, column)
                with code.if_else(is_whole) as (whole, some):
                    with whole, code.if_then(code.not_(is_direct)):
                        code.call(copy, [source.start, stride, depth, block.start])
                    with some, code.counting(0, depth) as row, code.counting(0, held) as at:
                        value = source.one(code, row.index, at.index)
                        block.put_one(code, value, row.index, at.index)
                # The next block is below this one, or at the top of the next panel.
                stop = code.plus(part.index, depth)
                is_last = code.icmp_signed("==", stop, inner)
                below, beside = (
                    weight.part(code, stop, column),
                    weight.part(code, 0, code.plus(column, width)),
                )
                following = code.select(is_last, beside.start, below.start)
                is_first = code.icmp_signed("==", part.index, code.number(0))
                before = _chosen(code, is_first, base, out)
                read_block = code.select(is_direct, source.start, block.start)
                block_step = code.select(is_direct, stride, code.number(width))
                with code.counting(0, groups) as group:
                    start, end = _share(code, code.sub(last_row, first_row), group.index, groups)
                    row, count = code.plus(first_row, start), code.sub(end, start)
                    old, new = before.part(code, row, column), out.part(code, row, column)
                    # The last panel may have columns that the result lacks: these must not be written.
                    read, written = _chosen(code, is_whole, old, zeros), _chosen(code, is_whole, new, tile)
                    fetched = self._fetched_before(code, group.index, lines)
                    has_more = code.icmp_signed("<", fetched, code.number(self.sizes.block_inner))
                    ahead = code.at(following, code.times(fetched, stride))
                    arguments = [
                        x.part(code, row, part.index).start, call["x_stride"], read_block, block_step, depth,
                        read.start, read.row_step, written.start, written.row_step, ahead, stride,
                    ]  # fmt: skip
                    self._call_for(code, count, code.select(has_more, lines, code.number(0)), arguments)
                    with (
                        code.if_then(code.not_(is_whole)),
                        code.counting(0, count) as at_row,
                        code.counting(0, held) as at,
                    ):
                        total = tile.one(code, at_row.index, at.index)
                        total = code.fadd(old.one(code, at_row.index, at.index), total)
                        new.put_one(code, total, at_row.index, at.index)
        code.ret_void()

    def _emit_row(self) -> None:
        """Emit the function of a call with one row: a part is a share of its columns."""
        function = ir.Function(self.module, PART, "row_product")
        pointer, number, parts, thread = function.args
        lanes = self.target.lanes
        code = VectorBuilder(function, lanes)
        call = {field: code.one(pointer, at, INT64) for at, field in enumerate(CALL_FIELDS)}
        inner, stride = call["inner"], call["weight_stride"]
        x, weight, base, out, scratch = (
            code.inttoptr(call[field], POINTER) for field in ("x", "weight", "base", "out", "scratch")
        )
        sums = code.at(scratch, code.times(thread, call["scratch_stride"]))

        def add_lines(first: ir.Value, lines: int, column: ir.Value, held: ir.Value) -> None:
            """Add the products with so many lines of the weight to the sums, one after the other."""
            values = [code.splat(code.one(x, code.plus(first, line))) for line in range(lines)]
            places = [code.plus(code.times(code.plus(first, line), stride), column) for line in range(lines)]
            sources = [code.at(weight, place) for place in places]
            with code.counting(0, held, lanes) as at:
                total = code.vector(sums, at.index)
                for value, source in zip(values, sources, strict=True):
                    total = code.multiply_add(value, code.vector(source, at.index), total)
                code.put(total, sums, at.index)

        start, stop = _share(code, code.udiv(call["columns"], code.number(lanes)), number, parts)
        stop = code.times(stop, lanes)
        with code.counting(code.times(start, lanes), stop, _LINE_FLOATS) as piece:
            column, held = piece.index, code.smaller(code.sub(stop, piece.index), _LINE_FLOATS)
            with code.counting(0, inner, self.sizes.block_inner) as block:
                end = code.smaller(inner, code.plus(block.index, self.sizes.block_inner))
                with code.counting(0, held, lanes) as at:
                    code.put(code.same(0.0), sums, at.index)
                whole = code.plus(block.index, code.round_down(code.sub(end, block.index), _LINES))
                with code.counting(block.index, whole, _LINES) as line:
                    add_lines(line.index, _LINES, column, held)
                with code.counting(whole, end) as line:
                    add_lines(line.index, 1, column, held)
                is_first = code.icmp_signed("==", block.index, code.number(0))
                step = code.select(is_first, call["base_column_step"], code.number(1))
                before = code.at(code.select(is_first, base, out), code.times(step, column))
                with code.counting(0, held, lanes) as at:
                    total = code.fadd(
                        code.vector(before, code.times(step, at.index)), code.vector(sums, at.index)
                    )
                    code.put(total, out, code.plus(column, at.index))
        code.ret_void()

    def _multiply_wide(self, rows: int, panels: int) -> ir.Function:
        """Emit the product of so many rows and a block of each of so many panels of a packed weight.

        `f(x, x_stride, block, panel_step, inner, base, base_stride, out, out_stride, ahead)` is as `_multiply`; all lines of
        the blocks from `ahead` on are prefetched, which are `panel_step` apart like those from `block` on.
        """
        width, lanes = self.sizes.panel_columns, self.target.lanes
        strided = (POINTER, INT64)
        function = self._function(f"multiply_{rows}_wide", *strided * 2, INT64, *strided * 2, POINTER)
        x, x_stride, block, panel_step, inner, base, base_stride, out, out_stride, ahead = function.args
        code = VectorBuilder(function, lanes)
        places = [(row, column) for row in range(rows) for column in range(0, panels * width, lanes)]
        sources = [code.at(x, code.times(x_stride, row)) for row in range(rows)]
        starts = [code.times(panel_step, panel) for panel in range(panels)]
        blocks, following = ([code.at(whole, start) for start in starts] for whole in (block, ahead))
        with code.counting(0, inner, 1, [code.same(0.0) for _ in places]) as loop:
            first = code.times(loop.index, width)
            values = [code.splat(code.one(source, loop.index)) for source in sources]
            for panel, (own, fetched) in enumerate(zip(blocks, following, strict=True)):
                for line in range(0, width, _CACHE_LINE_FLOATS):
                    code.prefetch(fetched, code.plus(first, line))
                for column in range(0, width, lanes):
                    weight = code.vector(own, code.plus(first, column))
                    for row, value in enumerate(values):
                        at = places.index((row, panel * width + column))
                        loop.following[at] = code.multiply_add(value, weight, loop.carried[at])
        for (row, column), total in zip(places, loop.carried, strict=True):
            before = code.vector(base, code.plus(code.times(base_stride, row), column))
            code.put(code.fadd(before, total), out, code.plus(code.times(out_stride, row), column))
        code.ret_void()
        return function

    def _emit_packed(self) -> None:
        """Emit the function of a call with a packed weight: a part is a share of the panels, for a chunk of rows each."""
        wide = {rows: (panels, self._multiply_wide(rows, panels)) for rows, panels in self.sizes.wide.items()}
        function = ir.Function(self.module, PART, "packed_product")
        pointer, number, parts, _ = function.args
        code = VectorBuilder(function, self.target.lanes)
        call = {field: code.one(pointer, at, INT64) for at, field in enumerate(CALL_FIELDS)}
        rows, inner, panel_step = (call[field] for field in ("rows", "inner", "weight_stride"))
        width, depth_of_all = self.sizes.panel_columns, self.sizes.block_inner
        weight, x_start, base_start, out_start = (
            code.inttoptr(call[field], POINTER) for field in ("weight", "x", "base", "out")
        )
        x, out = _Matrix(x_start, call["x_stride"], 1), _Matrix(out_start, call["out_stride"], 1)
        base = _Matrix(base_start, call["base_row_step"], call["base_column_step"])
        panels, chunks = code.udiv(call["columns"], code.number(width)), _ceiling(code, rows, CHUNK_ROWS)
        start, stop = _share(code, code.times(panels, chunks), number, parts)

        @contextmanager
        def blocks(panel: ir.Value) -> Iterator[tuple[ir.Value, ir.Value, ir.Value, _Matrix, _Matrix]]:
            """Emit the loop over a panel's blocks: first value of the sum, number of values, block, and where to add."""
            column = code.times(panel, width)
            with code.counting(0, inner, depth_of_all) as part:
                place = code.plus(code.times(panel, panel_step), code.times(part.index, width))
                depth = code.smaller(code.sub(inner, part.index), depth_of_all)
                is_first = code.icmp_signed("==", part.index, code.number(0))
                before = _chosen(code, is_first, base.part(code, 0, column), out.part(code, 0, column))
                yield part.index, depth, code.at(weight, place), before, out.part(code, 0, column)

        done = code.append_basic_block("done")
        for few, (together, multiply) in wide.items():
            this, others = (code.append_basic_block(f"{name}_{few}") for name in ("rows", "more_than"))
            code.cbranch(code.icmp_signed("==", rows, code.number(few)), this, others)
            code.position_at_end(this)
            whole = code.plus(start, code.round_down(code.sub(stop, start), together))
            for first, end, step in ((start, whole, together), (whole, stop, 1)):
                with code.counting(first, end, step) as panel, blocks(panel.index) as one:
                    at, depth, block, before, after = one
                    read = (x.part(code, 0, at).start, call["x_stride"], block)
                    added = (before.start, before.row_step, after.start, after.row_step)
                    if step == 1:
                        ahead = (code.at(block, code.times(depth, width)), code.number(width))
                        each = self.multiply[few, self.sizes.panel_lines]
                        code.call(each, [*read, code.number(width), depth, *added, *ahead])
                        continue
                    is_last = code.icmp_signed("==", code.plus(at, depth), inner)
                    to_next = code.sub(code.times(panel_step, together), code.times(at, width))
                    ahead_step = code.select(is_last, to_next, code.times(depth, width))
                    code.call(multiply, [*read, panel_step, depth, *added, code.at(block, ahead_step)])
            code.branch(done)
            code.position_at_end(others)
        with code.counting(start, stop) as task:
            chunk, panel_index = code.udiv(task.index, panels), code.urem(task.index, panels)
            first_row, last_row = _share(code, rows, chunk, chunks)
            count_of_all = code.sub(last_row, first_row)
            groups = _ceiling(code, count_of_all, self.target.rows)
            lines = self._fetched_by_each(code, groups)
            with blocks(panel_index) as one, code.counting(0, groups) as group:
                at, depth, block, before, after = one
                from_row, to_row = _share(code, count_of_all, group.index, groups)
                row = code.plus(first_row, from_row)
                old, new = before.part(code, row, 0), after.part(code, row, 0)
                fetched = self._fetched_before(code, group.index, lines)
                has_more = code.icmp_signed("<", fetched, code.number(depth_of_all))
                ahead = code.at(block, code.times(code.plus(depth, fetched), width))
                arguments = [
                    x.part(code, row, at).start, call["x_stride"], block, code.number(width), depth,
                    old.start, old.row_step, new.start, new.row_step, ahead, code.number(width),
                ]  # fmt: skip
                count = code.sub(to_row, from_row)
                self._call_for(code, count, code.select(has_more, lines, code.number(0)), arguments)
        code.branch(done)
        code.position_at_end(done)
        code.ret_void()

    def _fetched_before(self, code: VectorBuilder, group: ir.Value, lines: ir.Value) -> ir.Value:
        """Return how many rows of the next block the groups before this one prefetch."""
        return code.times(group, code.times(lines, self.sizes.block_inner // self.sizes.panel_lines))

    def _fetched_by_each(self, code: VectorBuilder, groups: ir.Value) -> ir.Value:
        """Return how many cache lines each group of rows prefetches for a value of the sum, so that all share the next block.

        A line that is prefetched twice would take the place of one that is still to come.
        """
        lines = code.number(self.sizes.panel_lines)
        for some in self.sizes.fetched_lines[1:-1]:
            is_enough = code.icmp_signed("<=", code.number(self.sizes.panel_lines // some), groups)
            lines = code.select(is_enough, code.number(some), lines)
        return lines

    def _call_for(
        self, code: VectorBuilder, count: ir.Value, lines: ir.Value, arguments: list[ir.Value]
    ) -> None:
        """Emit the call of `multiply` for so many rows and prefetched lines."""
        done = code.append_basic_block("multiplied")
        most = max(self.sizes.fetched_lines) + 1
        switch = code.switch(code.plus(code.times(count, most), lines), done)
        for (rows, fetched), multiply in self.multiply.items():
            case = code.append_basic_block(f"of_{rows}_{fetched}")
            switch.add_case(code.number(rows * most + fetched), case)
            code.position_at_end(case)
            code.call(multiply, arguments)
            code.branch(done)
        code.position_at_end(done)


def _ceiling(code: VectorBuilder, value: ir.Value, step: int) -> ir.Value:
    """Return the number of parts of at most `step`."""
    return code.udiv(code.plus(value, step - 1), code.number(step))


def _share(
    code: VectorBuilder, whole: ir.Value, number: ir.Value, parts: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Return the start and stop of one of equal parts."""
    start, stop = (code.udiv(code.times(whole, edge), parts) for edge in (number, code.plus(number, 1)))
    return start, stop


@lru_cache
def compiled_products(target: Target) -> Compiled:
    """Return the functions, compiled once."""
    module = ir.Module("medha_cpu_products")
    _Emitter(module, target)
    return Compiled(module)
