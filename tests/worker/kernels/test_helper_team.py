"""A team of threads computes every part of a call once, and never waits for a helper that has begun none."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from llvmlite import ir

from medha_worker.kernels.cpu.helper_team import HelperTeam
from medha_worker.kernels.cpu.host_compiler import Compiled
from medha_worker.kernels.cpu.team_code import PART
from medha_worker.kernels.cpu.vector_code import INT64, POINTER, VectorBuilder

MOST_PARTS = 40


def code_of(function: ir.Function) -> VectorBuilder:
    return VectorBuilder(function, 4)


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    """Compile functions of calls.

    `count`: adds 1 to the number of its part. `meet`: parts wait for each other at the first number, and write their threads.
    `linger`: the caller's parts end when a helper has begun one, which takes long.
    """
    module = ir.Module("test_helper_team")
    count = ir.Function(module, PART, "count")
    code = code_of(count)
    call, part, _, _ = count.args
    numbers = code.inttoptr(code.one(call, 0, INT64), POINTER)
    code.atomic_rmw("add", code.at(numbers, part, INT64), code.number(1), "monotonic")
    code.ret_void()

    meet = ir.Function(module, PART, "meet")
    code = code_of(meet)
    call, part, parts, thread = meet.args
    numbers = code.inttoptr(code.one(call, 0, INT64), POINTER)
    code.store(thread, code.at(numbers, code.plus(part, 1), INT64))
    code.atomic_rmw("add", numbers, code.number(1), "seq_cst")
    wait, end = code.append_basic_block("wait"), code.append_basic_block("end")
    code.branch(wait)
    code.position_at_end(wait)
    here = code.load_atomic(numbers, "seq_cst", 8, typ=INT64)
    code.cbranch(code.icmp_signed("<", here, parts), wait, end)
    code.position_at_end(end)
    code.ret_void()
    linger = ir.Function(module, PART, "linger")
    code = code_of(linger)
    call, _, _, thread = linger.args
    numbers = code.inttoptr(code.one(call, 0, INT64), POINTER)
    is_caller = code.icmp_signed("==", thread, code.number(0))
    own, wait, help_, end = (code.append_basic_block(name) for name in ("own", "wait", "help", "end"))
    code.cbranch(is_caller, own, help_)
    code.position_at_end(own)
    code.branch(wait)
    code.position_at_end(wait)
    begun = code.load_atomic(numbers, "seq_cst", 8, typ=INT64)
    code.cbranch(code.icmp_signed("==", begun, code.number(0)), wait, end)
    code.position_at_end(help_)
    code.atomic_rmw("add", numbers, code.number(1), "seq_cst")
    with code.counting(0, 1 << 20):
        code.atomic_rmw("add", code.at(numbers, 1, INT64), code.number(1), "seq_cst")
    code.branch(end)
    code.position_at_end(end)
    code.ret_void()
    return Compiled(module)


@pytest.fixture
def team() -> Iterator[HelperTeam]:
    """A team that always asks its helpers."""
    yield HelperTeam(alone_seconds=0.0)
    gc.collect()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_part_of_every_call_is_computed_once(
    team: HelperTeam, compiled: Compiled, threads: int
) -> None:
    assert team.grow(threads) == threads
    count, random = team.function(compiled, "count"), np.random.default_rng(0)
    for number in range(3000):
        parts = int(random.integers(0, MOST_PARTS))
        counts = np.zeros(MOST_PARTS, dtype=np.int64)
        count([counts.ctypes.data], parts)
        assert counts.tolist() == [1] * parts + [0] * (MOST_PARTS - parts), f"call {number} of {parts} parts"


def test_helpers_take_part_also_when_they_have_slept(team: HelperTeam, compiled: Compiled) -> None:
    team.grow(3)
    meet = team.function(compiled, "meet")
    for _ in range(20):
        numbers = np.zeros(4, dtype=np.int64)
        meet([numbers.ctypes.data], 3)  # it ends when three threads are in it
        assert sorted(numbers[1:].tolist()) == [0, 1, 2]
        threading.Event().wait(0.002)


def test_a_helper_that_does_not_run_delays_nothing(
    team: HelperTeam, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenMP's team would wait for it without end."""
    monkeypatch.setattr(threading.Thread, "start", lambda _: None)
    assert team.grow(2) == 2
    counts = np.zeros(MOST_PARTS, dtype=np.int64)
    for _ in range(10):
        team.function(compiled, "count")([counts.ctypes.data], 7)
    assert counts[:7].tolist() == [10] * 7


def test_a_caller_that_had_to_wait_for_a_helper_computes_alone_for_a_while(compiled: Compiled) -> None:
    now = 0.0
    team = HelperTeam(alone_seconds=1.0, clock=lambda: now)
    team.grow(2)
    linger, meet = team.function(compiled, "linger"), team.function(compiled, "meet")
    numbers = np.zeros(3, dtype=np.int64)
    for _ in range(100):  # a caller that is interrupted itself may not notice
        if not team.is_alone:
            numbers[:] = 0
            linger([numbers.ctypes.data], MOST_PARTS)
    assert team.is_alone
    numbers[:] = 1, 0, 0
    linger([numbers.ctypes.data], MOST_PARTS)
    assert numbers.tolist() == [1, 0, 0]
    now = 1.0
    assert not team.is_alone
    numbers[:] = 0
    meet([numbers.ctypes.data], 2)  # it ends when two threads are in it
    assert sorted(numbers[1:].tolist()) == [0, 1]


def test_the_helpers_of_a_team_that_is_not_used_any_more_end() -> None:
    team = HelperTeam()
    before = set(threading.enumerate())
    team.grow(4)
    helpers = set(threading.enumerate()) - before
    assert len(helpers) == 3
    del team
    gc.collect()
    for helper in helpers:
        helper.join(timeout=60)
        assert not helper.is_alive()
