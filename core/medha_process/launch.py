"""Launch of a part: the variables that its process needs."""

from __future__ import annotations

from types import MappingProxyType

# OpenMP threads spin while they wait for each other. Router and controller share the cores with them, and a
# thread that spins while it waits for a preempted one makes a step take ten times as long. Threads that sleep
# at once (OMP_WAIT_POLICY=PASSIVE) cost prefill a third of its rate. Spinning for a few microseconds avoids
# both (measured).
RANK_ENVIRONMENT = MappingProxyType({"GOMP_SPINCOUNT": "3000"})
