"""The attention kernel for CPUs, compiled for the vector registers of this machine.

One kernel serves prefill chunks and decodes. A *task* computes a run of rows of one sequence and one KV head
(the query heads that share the head are rows) against a run of that sequence's keys. It goes through the keys
in tiles of 64:

1. K is transposed and V copied into first-level cache, by slot, so that paging costs nothing further;
2. for a few rows at a time, scores are computed in registers and turned into weights there (exp never touches
   memory), and the weights times V are added to the rows' sums.

Softmax does not change when a constant is subtracted from a row's scores, so no running maximum is kept: the
constant is 0 if the first tile's scores are small, else somewhat above their maximum. If a later score
exceeds it so far that the sum overflows, the task starts again with the true maximum. Exponentials are powers
of two: queries are scaled by log2 e.

A pool may hold FP8 (E4M3). Its numbers become floats as they are loaded: once for each tile of a chunk, and in registers
for a decode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llvmlite import ir

from medha_worker.kernels.cpu.host_compiler import Compiled, Target
from medha_worker.kernels.cpu.team_code import PART
from medha_worker.kernels.cpu.vector_code import (
    BOOL,
    BYTE,
    FLOAT,
    INT32,
    INT64,
    POINTER,
    VOID,
    Number,
    VectorBuilder,
)

TILE_KEYS = 64
# Largest head dimension at which a decode's products of one key are unrolled; beyond it they are too many.
_MOST_DIRECT_HEAD_DIM = 256
# Distance, in keys, at which a decode prefetches K and V. The processor's own prefetch ends with each page and
# knows no block table; a load alone waits for memory. Two tiles, 32 KiB of each at head dimension 64, are in flight
# while one is computed.
_KEYS_AHEAD = 2 * TILE_KEYS
_CACHE_LINE_BYTES = 64

# While a row's maximum over its first tile is within +-_SMALL (powers of two), it needs no constant.
# Otherwise the constant is _SMALL above that maximum. A weight below 2^-104 is raised to 2^-104, which is
# then 2^-47 of the maximum's weight, and a later weight may be 2^156 times as large as the maximum's. With
# less room, tasks of lanes whose part of a text begins with keys of low scores would often start again.
_SMALL = 57.0
_LARGE = 1e30

# Fields of a call, in order: int64 each, but the last is a float32.
CALL_FIELDS = (
    "next_task", "tasks", "task_rows", "q", "q_stride", "output", "output_stride", "log_sum_exp",
    "keys", "values", "head_stride", "group", "scratch", "scratch_stride", "scale",
)  # fmt: skip
# Fields of a task, int64 each, in order.
TASK_FIELDS = (
    "row", "tokens", "first_position", "position_stride", "head", "slots", "key_start", "key_stop", "output_row",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scratch:
    """Layout of a thread's scratch memory, in floats, for tasks of at most `rows` rows."""

    rows: int
    head_dim: int
    target: Target

    def offsets(self) -> dict[str, int]:
        """Return where each part starts, on a cache line; `end` is the total size."""
        rows = (-(-self.rows // self.target.rows)) * self.target.rows
        sizes = {
            "q": rows * self.head_dim,
            "sums": rows * self.head_dim,
            "totals": rows * self.target.lanes,  # one per lane
            "constants": rows,
            "keys": TILE_KEYS * self.head_dim,
            "values": TILE_KEYS * self.head_dim,
            "weights": self.target.rows * TILE_KEYS,
            "limits": self.target.rows,
        }
        offsets, at = {}, 0
        for name, size in sizes.items():
            offsets[name] = at
            at += -(-size // 16) * 16
        return offsets | {"end": at}


class CompiledAttention:
    """The kernel for one shape of heads, compiled for this machine.

    Attributes:
        compiled: Has the function `attend` of a call. Every part takes tasks until none is left.
        scratch: Layout of the memory that each thread needs.
    """

    def __init__(
        self,
        head_dim: int,
        group: int,
        task_rows: int,
        target: Target,
        *,
        invariant: bool = False,
        has_fp8_kv: bool = False,
    ) -> None:
        """Compile the kernel.

        Args:
            head_dim: Width of a head; a multiple of the vector length.
            group: Query heads that share a KV head: the rows of a decode.
            task_rows: Most rows of a task.
            target: Target to compile for.
            invariant: Compute a decode as a chunk of one row, and subtract every row's true maximum at once: a row
                then gets the same bits in every task. Otherwise a row whose scores overflow changes those beside it.
            has_fp8_kv: The pool holds FP8.
        """
        assert head_dim % target.lanes == 0
        self.scratch = Scratch(max(task_rows, group), head_dim, target)
        self.compiled = Compiled(_module(head_dim, group, target, self.scratch, invariant, has_fp8_kv))


def _module(
    head_dim: int, group: int, target: Target, scratch: Scratch, invariant: bool, has_fp8_kv: bool
) -> ir.Module:
    module = ir.Module("medha_cpu_attention")
    chunks = decodes = _Emitter(module, head_dim, target, scratch, has_fp8_kv)
    decode_rows = -(-group // -(-group // target.rows))  # block size that a decode's few rows fill evenly
    if not invariant and decode_rows < target.rows and head_dim <= _MOST_DIRECT_HEAD_DIM:
        decodes = _DecodeEmitter(module, head_dim, replace(target, rows=decode_rows), scratch, has_fp8_kv)
    _emit_attend(module, target, chunks, decodes, measures_first=invariant)
    return module


def _emit_attend(
    module: ir.Module, target: Target, chunks: _Emitter, decodes: _Emitter, *, measures_first: bool
) -> None:
    """Emit the function of a call, which takes the next task until none is left.

    The maximum of a row's scores is found first either in every task, or in those only that overflow without it.
    """
    function = ir.Function(module, PART, "attend")
    call, _, _, thread = function.args
    code = VectorBuilder(function, target.lanes)

    def field(name: str) -> ir.Value:
        return code.one(call, CALL_FIELDS.index(name), INT64)

    offset = code.times(thread, field("scratch_stride"))
    scratch = code.at(code.inttoptr(field("scratch"), POINTER), offset)
    tasks, count = code.inttoptr(field("tasks"), POINTER), field("task_rows")
    take, run, end = (function.append_basic_block(name) for name in ("take", "run", "end"))
    code.branch(take)
    code.position_at_end(take)
    number = code.atomic_rmw("add", call, code.number(1), "monotonic")
    code.cbranch(code.icmp_signed("<", number, count), run, end)
    code.position_at_end(run)
    task = code.at(tasks, code.times(number, len(TASK_FIELDS)), INT64)
    tokens = code.one(task, TASK_FIELDS.index("tokens"), INT64)
    with code.if_else(code.icmp_signed("==", tokens, code.number(1))) as branches:
        for branch, emitter in zip(branches, (decodes, chunks), strict=True):
            with branch:
                overflowed = code.call(
                    emitter.run_task, [call, task, scratch, ir.Constant(BOOL, measures_first)]
                )
                if measures_first:
                    continue
                with code.if_then(overflowed, likely=False):
                    code.call(emitter.run_task, [call, task, scratch, ir.Constant(BOOL, 1)])
    code.branch(take)
    code.position_at_end(end)
    code.ret_void()


@dataclass(frozen=True, slots=True)
class _Scored:
    """Pointers to which the functions that compute scores write their results."""

    constants: ir.Value
    limits: ir.Value
    weights: ir.Value
    totals: ir.Value


class _Emitter:
    """Emits the functions that work on blocks of `target.rows` rows."""

    def __init__(
        self, module: ir.Module, head_dim: int, target: Target, scratch: Scratch, has_fp8_kv: bool
    ) -> None:
        self.has_fp8_kv = has_fp8_kv
        assert TILE_KEYS % (target.lanes * target.vectors) == 0
        self.module, self.head_dim, self.target, self.scratch = module, head_dim, target, scratch
        self.weigh_all = self._scores("weigh_all", masked=False, only_maximum=False)
        self.weigh_visible = self._scores("weigh_visible", masked=True, only_maximum=False)
        self.measure_visible = self._scores("measure_visible", masked=True, only_maximum=True)
        self.add_values = self._add_values()
        self.pack: ir.Function | None = self._pack()
        self.run_task = self._run_task()

    @property
    def _pool_type(self) -> ir.Type:
        return BYTE if self.has_fp8_kv else FLOAT

    def _pooled(self, code: VectorBuilder, pool: ir.Value, index: Number) -> ir.Value:
        """Return consecutive numbers of the pool as floats."""
        return code.vector_of_float8(pool, index) if self.has_fp8_kv else code.vector(pool, index)

    def _function(self, name: str, result: ir.Type, *arguments: ir.Type) -> ir.Function:
        kind = ir.FunctionType(result, arguments)
        function = ir.Function(self.module, kind, f"{name}_{self.target.rows}")
        function.linkage = "internal"
        for argument in function.args:
            if argument.type == POINTER:
                argument.add_attribute("noalias")
        return function

    def _scores(self, name: str, *, masked: bool, only_maximum: bool) -> ir.Function:
        """Emit the scores of one block of rows against one tile of keys.

        `f(q, keys, constants, limits, weights, totals)`: q is [rows, head_dim], keys [head_dim, TILE_KEYS].
        Either weights [rows, TILE_KEYS] = 2^(score - constant) are stored and their sums added to totals
        [rows, lanes]; or, with `only_maximum`, constants are raised to the largest visible score. Row r sees
        keys j < limits[r].
        """
        rows, vectors, lanes = range(self.target.rows), range(self.target.vectors), self.target.lanes
        function = self._function(name, VOID, *[POINTER] * 6)
        q, keys, constants, limits, weights, totals = function.args
        code = VectorBuilder(function, lanes)
        for first in range(0, TILE_KEYS, lanes * len(vectors)):
            if only_maximum:
                starts = [code.same(0.0) for _ in rows]
            else:
                starts = [code.splat(code.fneg(code.one(constants, row))) for row in rows]
            with code.counting(0, self.head_dim, 1, [starts[row] for row in rows for _ in vectors]) as loop:
                line = code.times(loop.index, TILE_KEYS)
                columns = [code.vector(keys, code.plus(line, first + part * lanes)) for part in vectors]
                for row in rows:
                    value = code.splat(code.one(q, code.plus(loop.index, row * self.head_dim)))
                    for part in vectors:
                        at = row * len(vectors) + part
                        loop.following[at] = code.multiply_add(value, columns[part], loop.carried[at])
            scores = [loop.carried[row * len(vectors) :][: len(vectors)] for row in rows]
            out = _Scored(constants, limits, weights, totals)
            self._put_scores(code, scores, first, out, masked=masked, only_maximum=only_maximum)
        code.ret_void()
        return function

    def _put_scores(
        self,
        code: VectorBuilder,
        scores: Sequence[Sequence[ir.Value]],
        first: Number,
        out: _Scored,
        *,
        masked: bool,
        only_maximum: bool,
    ) -> None:
        """Emit weights or maxima of the scores [rows][vectors] of a tile's keys from `first` on."""
        lanes = self.target.lanes
        for row, found_scores in enumerate(scores):
            results = list(found_scores) if only_maximum else [code.exp2(score) for score in found_scores]
            if masked:
                limit = code.sub(code.one(out.limits, row, INT32), code.trunc(code.number(first), INT32))
                unseen = code.same(-math.inf if only_maximum else 0.0)
                for part in range(len(results)):
                    numbers = [part * lanes + lane for lane in range(lanes)]
                    visible = code.icmp_signed(
                        "<", ir.Constant(code.integers_type, numbers), code.splat(limit)
                    )
                    results[part] = code.select(visible, results[part], unseen)
            if only_maximum:
                largest = code.one(out.constants, row)
                for result in results:
                    found = code.maximum(result)
                    largest = code.select(code.fcmp_ordered(">", found, largest), found, largest)
                code.put_one(largest, out.constants, row)
                continue
            total = code.vector(out.totals, row * lanes)
            for part, result in enumerate(results):
                code.put(result, out.weights, code.plus(first, row * TILE_KEYS + part * lanes))
                total = code.fadd(total, result)
            code.put(total, out.totals, row * lanes)

    def _add_values(self) -> ir.Function:
        """Emit the weighted sum of values.

        `f(weights, values, sums)`: sums [rows, head_dim] += weights [rows, TILE_KEYS] @ values [TILE_KEYS,
        head_dim].
        """
        lanes, head_dim = self.target.lanes, self.head_dim
        function = self._function("add_values", VOID, *[POINTER] * 3)
        weights, values, sums = function.args
        code = VectorBuilder(function, lanes)
        width = lanes * self.target.vectors
        for first in range(0, head_dim, width):
            columns = range(first, min(first + width, head_dim), lanes)
            places = [(row, column) for row in range(self.target.rows) for column in columns]
            carried = [code.vector(sums, row * head_dim + column) for row, column in places]
            with code.counting(0, TILE_KEYS, 1, carried) as loop:
                line = code.times(loop.index, head_dim)
                tile = {column: code.vector(values, code.plus(line, column)) for column in columns}
                for row in range(self.target.rows):
                    weight = code.splat(code.one(weights, code.plus(loop.index, row * TILE_KEYS)))
                    for column in columns:
                        at = places.index((row, column))
                        loop.following[at] = code.multiply_add(weight, tile[column], loop.carried[at])
            for (row, column), value in zip(places, loop.carried, strict=True):
                code.put(value, sums, row * head_dim + column)
        code.ret_void()
        return function

    def _pack(self) -> ir.Function:
        """Emit the copy of one head's K and V from position `key` on into a tile.

        `f(pool_keys, pool_values, slots, key, key_stop, keys, values)`: keys is [head_dim, TILE_KEYS], values
        [TILE_KEYS, head_dim]. Positions from `key_stop` on repeat the last key: no row sees them, and their
        contents are finite.
        """
        lanes, head_dim = self.target.lanes, self.head_dim
        function = self._function("pack", VOID, POINTER, POINTER, POINTER, INT64, INT64, POINTER, POINTER)
        pool_keys, pool_values, slots, key, key_stop, keys, values = function.args
        code = VectorBuilder(function, lanes)
        last = code.plus(key_stop, -1)
        with code.counting(0, TILE_KEYS, lanes) as loop:
            sources = []
            for lane in range(lanes):
                position = code.smaller(code.plus(key, loop.index, lane), last)
                slot = code.sext(code.one(slots, position, INT32), INT64)
                sources.append(code.times(slot, head_dim))
            for first in range(0, head_dim, lanes):
                square = []
                for lane, source in enumerate(sources):
                    at = code.plus(source, first)
                    square.append(self._pooled(code, pool_keys, at))
                    target = code.plus(code.times(code.plus(loop.index, lane), head_dim), first)
                    code.put(self._pooled(code, pool_values, at), values, target)
                for lane, column in enumerate(code.transpose(square)):
                    code.put(column, keys, code.plus(loop.index, (first + lane) * TILE_KEYS))
        code.ret_void()
        return function

    def _run_task(self) -> ir.Function:
        """Emit `f(call, task, scratch, measure_all) -> overflowed`, which computes one whole task."""
        block_rows, head_dim, lanes = self.target.rows, self.head_dim, self.target.lanes
        function = self._function("run_task", BOOL, POINTER, POINTER, POINTER, BOOL)
        call_pointer, task_pointer, scratch, measure_all = function.args
        code = VectorBuilder(function, lanes)
        # `next_task` changes concurrently, and nothing here reads it.
        call = {name: code.one(call_pointer, at, INT64) for at, name in enumerate(CALL_FIELDS) if at > 0}
        task = {name: code.one(task_pointer, at, INT64) for at, name in enumerate(TASK_FIELDS)}
        part = {name: code.at(scratch, at) for name, at in self.scratch.offsets().items()}
        group, head, first_position = call["group"], task["head"], task["first_position"]
        position_stride = task["position_stride"]
        key_start, key_stop = task["key_start"], task["key_stop"]
        q, output, log_sum_exp = (
            code.inttoptr(call[name], POINTER) for name in ("q", "output", "log_sum_exp")
        )
        slots = code.inttoptr(task["slots"], POINTER)
        pool_keys, pool_values = (
            code.at(
                code.inttoptr(call[name], POINTER), code.times(head, call["head_stride"]), self._pool_type
            )
            for name in ("keys", "values")
        )
        rows = code.times(task["tokens"], group)
        padded = code.round_down(code.plus(rows, block_rows - 1), block_rows)

        def place(row: ir.Value, first_token: str, token_stride: ir.Value, head_stride: int) -> ir.Value:
            """Return the offset of a row in a tensor [tokens, query heads, ...].

            `first_token` names the task's field with its first token there.
            """
            token = code.plus(task[first_token], code.udiv(row, group))
            query_head = code.plus(code.times(head, group), code.urem(row, group))
            return code.plus(code.times(token, token_stride), code.times(query_head, head_stride))

        def pack(key: ir.Value) -> None:
            if self.pack is not None:
                tile = [part["keys"], part["values"]]
                code.call(self.pack, [pool_keys, pool_values, slots, key, key_stop, *tile])

        def set_limits(block: ir.Value, key: ir.Value) -> ir.Value:
            """Store how many keys of the tile at `key` each row of the block sees; return the first row's."""
            ends = []
            for row in range(block_rows):
                token = code.udiv(code.plus(block, row), group)
                position = code.plus(first_position, code.times(token, position_stride))
                end = code.sub(code.smaller(code.plus(position, 1), key_stop), key)
                code.put_one(code.trunc(end, INT32), part["limits"], row)
                ends.append(end)
            return ends[0]

        def arguments(block: ir.Value, key: ir.Value) -> list[ir.Value]:
            """Return the arguments of the functions that `_scores` emits."""
            keys = (
                [part["keys"]] if self.pack is not None else [pool_keys, slots, key, code.plus(key_stop, -1)]
            )
            return [
                code.at(part["q"], code.times(block, head_dim)), *keys, code.at(part["constants"], block),
                part["limits"], part["weights"], code.at(part["totals"], code.times(block, lanes)),
            ]  # fmt: skip

        # Scale the queries, clear sums and totals; rows past the last one repeat it.
        scale = code.splat(code.bitcast(code.trunc(call["scale"], INT32), FLOAT))
        with code.counting(0, padded) as loop:
            row, line = code.smaller(loop.index, code.plus(rows, -1)), code.times(loop.index, head_dim)
            source = place(row, "row", call["q_stride"], head_dim)
            for first in range(0, head_dim, lanes):
                scaled = code.fmul(code.vector(q, code.plus(source, first)), scale)
                code.put(scaled, part["q"], code.plus(line, first))
                code.put(code.same(0.0), part["sums"], code.plus(line, first))
            code.put(code.same(0.0), part["totals"], code.times(loop.index, lanes))
            code.put_one(ir.Constant(FLOAT, -math.inf), part["constants"], loop.index)

        # Choose the constants: from maxima over the first tile, or over all of them.
        measured = code.select(measure_all, key_stop, code.plus(key_start, 1))
        with code.counting(key_start, measured, TILE_KEYS) as tile:
            pack(tile.index)
            with code.counting(0, padded, block_rows) as block:
                set_limits(block.index, tile.index)
                code.call(self.measure_visible, arguments(block.index, tile.index))
        with code.counting(0, padded) as loop:
            largest = code.one(part["constants"], loop.index)
            above = code.fcmp_ordered(">", largest, ir.Constant(FLOAT, -_SMALL))
            small = code.and_(above, code.fcmp_ordered("<", largest, ir.Constant(FLOAT, _SMALL)))
            above_largest = code.fadd(largest, ir.Constant(FLOAT, _SMALL))
            chosen = code.select(small, ir.Constant(FLOAT, 0.0), above_largest)
            code.put_one(code.select(measure_all, largest, chosen), part["constants"], loop.index)

        # Go through all keys, tile by tile; blocks of rows before a tile see no part of it.
        with code.counting(key_start, key_stop, TILE_KEYS) as tile:
            pack(tile.index)
            ahead = code.larger(code.sub(tile.index, first_position), 0)
            before = code.times(code.udiv(ahead, position_stride), group)
            with code.counting(code.round_down(before, block_rows), padded, block_rows) as block:
                seen = set_limits(block.index, tile.index)
                with code.if_else(code.icmp_signed(">=", seen, code.number(TILE_KEYS))) as (whole, diagonal):
                    with whole:
                        code.call(self.weigh_all, arguments(block.index, tile.index))
                    with diagonal:
                        code.call(self.weigh_visible, arguments(block.index, tile.index))
                sums = code.at(part["sums"], code.times(block.index, head_dim))
                values = (
                    [part["values"]]
                    if self.pack is not None
                    else [pool_values, slots, tile.index, code.plus(key_stop, -1)]
                )
                code.call(self.add_values, [part["weights"], *values, sums])

        # Write sums / totals, and the natural logarithm of the sum of exponentials.
        query_heads = code.udiv(call["output_stride"], code.number(head_dim))
        with code.counting(0, rows, 1, [ir.Constant(BOOL, 0)]) as loop:
            row = loop.index
            total = code.total(code.vector(part["totals"], code.times(row, lanes)))
            is_finite = code.fcmp_ordered("<", total, ir.Constant(FLOAT, _LARGE))
            loop.following[0] = code.or_(loop.carried[0], code.not_(is_finite))
            inverse = code.splat(code.fdiv(ir.Constant(FLOAT, 1.0), total))
            target = place(row, "output_row", call["output_stride"], head_dim)
            for first in range(0, head_dim, lanes):
                sums = code.vector(part["sums"], code.plus(code.times(row, head_dim), first))
                code.put(code.fmul(sums, inverse), output, code.plus(target, first))
            powers_of_two = code.fadd(code.log2(total), code.one(part["constants"], row))
            natural = code.fmul(powers_of_two, ir.Constant(FLOAT, math.log(2)))
            code.put_one(natural, log_sum_exp, place(row, "output_row", query_heads, 1))
        code.ret(loop.carried[0])
        return function


class _DecodeEmitter(_Emitter):
    """Emits functions for few rows, as in decodes, that read K and V in place.

    For so few rows, copying K and V would take longer than computing with them. A score is a dot product
    along the head, of which every lane sums up a part. The partial sums of as many keys as there are lanes
    are folded into one vector.
    """

    def __init__(
        self, module: ir.Module, head_dim: int, target: Target, scratch: Scratch, has_fp8_kv: bool
    ) -> None:
        self.has_fp8_kv = has_fp8_kv
        self.module, self.head_dim, self.target, self.scratch = module, head_dim, target, scratch
        self.weigh_all = self._scores("weigh_all", masked=False, only_maximum=False)
        self.weigh_visible = self._scores("weigh_visible", masked=True, only_maximum=False)
        self.measure_visible = self._scores("measure_visible", masked=True, only_maximum=True)
        self.add_values = self._add_values()
        self.pack = None
        self.run_task = self._run_task()

    def _scores(self, name: str, *, masked: bool, only_maximum: bool) -> ir.Function:
        """Emit the base class's function, with (pool_keys, slots, key, last_key) for the tile of keys."""
        rows, lanes, head_dim = range(self.target.rows), self.target.lanes, self.head_dim
        function = self._function(name, VOID, *[POINTER] * 3, INT64, INT64, *[POINTER] * 4)
        q, pool_keys, slots, key, last_key, constants, limits, weights, totals = function.args
        code = VectorBuilder(function, lanes)
        with code.counting(0, TILE_KEYS, lanes) as group:

            def partial_sums(first: int, count: int) -> list[ir.Value]:
                """Return for each row the partial sums of `count` keys, folded together."""
                if count > 1:
                    half = count // 2
                    sums = zip(partial_sums(first, half), partial_sums(first + half, half), strict=True)
                    return [code.folded(a, b, half) for a, b in sums]
                at_key = code.plus(key, group.index, first)
                source = self._place(code, slots, at_key, last_key)
                if not only_maximum:
                    self._fetch_ahead(code, pool_keys, slots, at_key, last_key)
                products = [code.same(0.0) for _ in rows]
                for at in range(0, head_dim, lanes):
                    part = self._pooled(code, pool_keys, code.plus(source, at))
                    for row in rows:
                        query = code.vector(q, row * head_dim + at)
                        products[row] = (
                            code.fmul(query, part)
                            if at == 0
                            else code.multiply_add(query, part, products[row])
                        )
                return products

            scores = [[score] for score in partial_sums(0, lanes)]
            if not only_maximum:
                for row, (score,) in enumerate(scores):
                    scores[row] = [code.fsub(score, code.splat(code.one(constants, row)))]
            out = _Scored(constants, limits, weights, totals)
            self._put_scores(code, scores, group.index, out, masked=masked, only_maximum=only_maximum)
        code.ret_void()
        return function

    def _add_values(self) -> ir.Function:
        """Emit the base class's function, with (pool_values, slots, key, last_key) for the tile of values."""
        rows, lanes, head_dim = range(self.target.rows), self.target.lanes, self.head_dim
        function = self._function("add_values", VOID, *[POINTER] * 3, INT64, INT64, POINTER)
        weights, pool_values, slots, key, last_key, sums = function.args
        code = VectorBuilder(function, lanes)
        width = lanes * self.target.vectors
        for first in range(0, head_dim, width):
            columns = range(first, min(first + width, head_dim), lanes)
            places = [(row, column) for row in rows for column in columns]
            carried = [code.vector(sums, row * head_dim + column) for row, column in places]
            with code.counting(0, TILE_KEYS, 1, carried) as loop:
                at_key = code.plus(key, loop.index)
                source = self._place(code, slots, at_key, last_key)
                self._fetch_ahead(code, pool_values, slots, at_key, last_key)
                values = {
                    column: self._pooled(code, pool_values, code.plus(source, column)) for column in columns
                }
                for row in rows:
                    weight = code.splat(code.one(weights, code.plus(loop.index, row * TILE_KEYS)))
                    for column in columns:
                        at = places.index((row, column))
                        loop.following[at] = code.multiply_add(weight, values[column], loop.carried[at])
            for (row, column), value in zip(places, loop.carried, strict=True):
                code.put(value, sums, row * head_dim + column)
        code.ret_void()
        return function

    def _fetch_ahead(
        self, code: VectorBuilder, pool: ir.Value, slots: ir.Value, key: ir.Value, last_key: ir.Value
    ) -> None:
        """Prefetch the key `_KEYS_AHEAD` positions on into second-level cache, wherever its block lies."""
        source = self._place(code, slots, code.plus(key, _KEYS_AHEAD), last_key)
        for at in range(0, self.head_dim, _CACHE_LINE_BYTES // (1 if self.has_fp8_kv else 4)):
            code.prefetch(pool, code.plus(source, at), self._pool_type)

    def _place(self, code: VectorBuilder, slots: ir.Value, key: ir.Value, last_key: ir.Value) -> ir.Value:
        """Return the offset of a key in the pool; past the last key, which no row sees, the last key's."""
        slot = code.sext(code.one(slots, code.smaller(key, last_key), INT32), INT64)
        return code.times(slot, self.head_dim)
