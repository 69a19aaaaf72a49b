"""The code by which threads share the parts of a call, compiled for this machine.

The caller publishes a *ticket*: the number of the call, and how many of its parts nobody has taken. Whoever lowers the
ticket by one has taken a part. The caller takes parts like its helpers, and at the end waits only for those that a
helper has begun. So a helper that is not running, because another process has its core, delays nothing.

A helper reads a call's fields after the ticket, and only then lowers it. The fields change only while the ticket has no
parts, and every ticket is another number, so the fields that it has read are those of the part that it takes.
"""

from __future__ import annotations

from functools import lru_cache

from llvmlite import ir

from medha_worker.kernels.cpu.host_compiler import Compiled
from medha_worker.kernels.cpu.vector_code import INT32, INT64, POINTER, VOID, VectorBuilder

# Fields of a team, int64 each, a cache line apart.
TEAM_FIELDS = ("ticket", "function", "call", "parts", "unfinished", "sleepers", "stopping", "semaphore")
LINE = 8
"""Int64 values of a cache line."""
SEMAPHORE_FUNCTIONS = ("sem_init", "sem_post", "sem_wait")
LIBRARY_FUNCTIONS = (*SEMAPHORE_FUNCTIONS, "sched_yield", "clock_gettime")
MOST_PARTS = 1 << 16

PART = ir.FunctionType(VOID, [POINTER, INT64, INT64, INT64])
"""`void (int64 *call, int64 part, int64 parts, int64 thread)`: computes one of equal parts of a call."""

_CLOCK_MONOTONIC = 1  # of Linux
_SPINS = 4000  # polls for a ticket before a helper sleeps
_SPINS_BEFORE_YIELD = 1000  # polls of the caller for the end of a part before it gives way to other processes


class _TeamBuilder(VectorBuilder):
    def __init__(self, function: ir.Function, team: ir.Value, *, pauses: bool) -> None:
        super().__init__(function, 4)
        self._team = team
        self._pauses = pauses
        self._time = self.alloca(INT64, 2)

    def field(self, name: str) -> ir.Value:
        return self.at(self._team, TEAM_FIELDS.index(name) * LINE, INT64)

    def read(self, name: str) -> ir.Value:
        return self.load_atomic(self.field(name), "acquire", 8, typ=INT64)

    def write(self, name: str, value: ir.Value) -> None:
        self.atomic_rmw("xchg", self.field(name), value, "seq_cst")

    def change(self, operation: str, name: str, value: int) -> ir.Value:
        return self.atomic_rmw(operation, self.field(name), self.number(value), "seq_cst")

    def pause(self) -> None:
        """Let the processor know that the loop waits."""
        if self._pauses:
            self.call(self._external("llvm.x86.sse2.pause", VOID), [])

    def nanoseconds(self) -> ir.Value:
        """Return the time of a clock that only goes forward."""
        self.library("clock_gettime", ir.Constant(INT32, _CLOCK_MONOTONIC), self._time)
        seconds, rest = (self.one(self._time, at, INT64) for at in (0, 1))
        return self.plus(self.times(seconds, 10**9), rest)

    def library(self, name: str, *arguments: ir.Value) -> ir.Value:
        kinds = [argument.type for argument in arguments]
        return self.call(self._external(name, INT32, *kinds), arguments)


def _emit_take(module: ir.Module, *, pauses: bool) -> ir.Function:
    """Emit `bool f(team, thread)`, which takes a part and computes it; false if there was none."""
    function = ir.Function(module, ir.FunctionType(INT64, [POINTER, INT64]), "take")
    function.linkage = "internal"
    team, thread = function.args
    code = _TeamBuilder(function, team, pauses=pauses)
    poll, some, taken, none = (code.append_basic_block(name) for name in ("poll", "some", "taken", "none"))
    code.branch(poll)
    code.position_at_end(poll)
    ticket = code.read("ticket")
    left = code.and_(ticket, code.number(MOST_PARTS - 1))
    code.cbranch(code.icmp_signed(">", left, code.number(0)), some, none)
    code.position_at_end(some)
    address, call, parts = (code.read(name) for name in ("function", "call", "parts"))
    lowered = code.cmpxchg(
        code.field("ticket"), ticket, code.sub(ticket, code.number(1)), "seq_cst", "seq_cst"
    )
    code.cbranch(code.extract_value(lowered, 1), taken, poll)
    code.position_at_end(taken)
    part = code.sub(parts, left)
    compute = code.inttoptr(address, PART.as_pointer())
    code.call(compute, [code.inttoptr(call, POINTER), part, parts, thread])
    code.change("sub", "unfinished", 1)
    code.ret(code.number(1))
    code.position_at_end(none)
    code.ret(code.number(0))
    return function


def _emit_run(module: ir.Module, take: ir.Function, *, pauses: bool) -> None:
    """Emit `run(team, function, call, parts)`: the caller's side of a call.

    It returns by how many nanoseconds the caller waited longer than two parts of its own took: more than nothing if a helper
    was interrupted. If the caller got no part, it returns 0.
    """
    function = ir.Function(module, ir.FunctionType(INT64, [POINTER, INT64, INT64, INT64]), "run")
    team, address, call, parts = function.args
    code = _TeamBuilder(function, team, pauses=pauses)
    for name, value in (("function", address), ("call", call), ("parts", parts), ("unfinished", parts)):
        code.write(name, value)
    before = code.read("ticket")
    following = code.add(code.and_(before, code.number(-MOST_PARTS)), code.number(MOST_PARTS))
    code.write("ticket", code.add(following, parts))
    sleepers = code.change("xchg", "sleepers", 0)
    with code.counting(0, sleepers):
        code.library("sem_post", code.field("semaphore"))
    own, wait, again, waits, yields, end = (
        code.append_basic_block(name) for name in ("own", "wait", "again", "waits", "yields", "end")
    )
    began = code.nanoseconds()
    before_own = code.block
    code.branch(own)
    code.position_at_end(own)
    taken = code.phi(INT64)
    taken.add_incoming(code.number(0), before_own)
    took = code.call(take, [team, code.number(0)])
    taken.add_incoming(code.plus(taken, 1), own)
    code.cbranch(code.icmp_signed("==", took, code.number(1)), own, wait)
    code.position_at_end(wait)
    finished = code.nanoseconds()
    code.branch(again)
    code.position_at_end(again)
    polls = code.phi(INT64)
    polls.add_incoming(code.number(0), wait)
    code.cbranch(code.icmp_signed("==", code.read("unfinished"), code.number(0)), end, waits)
    code.position_at_end(waits)
    code.pause()
    more = code.plus(polls, 1)
    polls.add_incoming(more, waits)
    code.cbranch(code.icmp_signed("<", more, code.number(_SPINS_BEFORE_YIELD)), again, yields)
    code.position_at_end(yields)
    code.library("sched_yield")
    polls.add_incoming(more, yields)
    code.branch(again)
    code.position_at_end(end)
    each = code.sdiv(code.sub(finished, began), code.larger(taken, 1))
    late = code.sub(code.sub(code.nanoseconds(), finished), code.times(each, 2))
    has_own = code.icmp_signed(">", taken, code.number(0))
    code.ret(code.select(has_own, late, code.number(0)))


def _emit_help(module: ir.Module, take: ir.Function, *, pauses: bool) -> None:
    """Emit `help(team, thread)`, which takes parts until the team stops."""
    function = ir.Function(module, ir.FunctionType(VOID, [POINTER, INT64]), "help")
    team, thread = function.args
    code = _TeamBuilder(function, team, pauses=pauses)
    awake, poll, idle, doze, sleep, stop = (
        code.append_basic_block(name) for name in ("awake", "poll", "idle", "doze", "sleep", "stop")
    )
    code.branch(awake)
    code.position_at_end(awake)
    code.branch(poll)
    code.position_at_end(poll)
    polls = code.phi(INT64)
    polls.add_incoming(code.number(0), awake)
    took = code.call(take, [team, thread])
    code.cbranch(code.icmp_signed("==", took, code.number(1)), awake, idle)
    code.position_at_end(idle)
    code.pause()
    more = code.plus(polls, 1)
    polls.add_incoming(more, idle)
    code.cbranch(code.icmp_signed("<", more, code.number(_SPINS)), poll, doze)
    code.position_at_end(doze)
    # A ticket that is published after this wakes this thread; one that was published before is seen here.
    code.change("add", "sleepers", 1)
    is_stopping = code.icmp_signed("!=", code.read("stopping"), code.number(0))
    left = code.and_(code.read("ticket"), code.number(MOST_PARTS - 1))
    has_parts = code.icmp_signed(">", left, code.number(0))
    choose = code.append_basic_block("choose")
    code.cbranch(is_stopping, stop, choose)
    code.position_at_end(choose)
    code.cbranch(has_parts, awake, sleep)
    code.position_at_end(sleep)
    code.library("sem_wait", code.field("semaphore"))
    code.branch(awake)
    code.position_at_end(stop)
    code.ret_void()


@lru_cache
def compiled_team(machine: str) -> Compiled:
    """Return the functions `run` and `help`, compiled once; `machine` is the processor's architecture."""
    module = ir.Module("medha_cpu_team")
    pauses = machine == "x86_64"
    take = _emit_take(module, pauses=pauses)
    _emit_run(module, take, pauses=pauses)
    _emit_help(module, take, pauses=pauses)
    return Compiled(module)
