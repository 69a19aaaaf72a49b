"""Shared parts of the benchmarks: arguments, rounds in turn, a calibrated loop, claims and files of results.

A goal in milliseconds would say as much about the machine as about the code. So a claim about time is a ratio: to a
peer that is measured in the same rounds, or to the calibrated loop of pure Python and numpy, which takes about a
millisecond.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
LOOPS = "loops"  # unit of a time as a multiple of the calibrated loop's
STUDENT_T = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 10: 2.262}  # two-sided, 95 %, by the number of values
STOPPED = 130  # exit status after Ctrl-C

Row = dict[str, Any]


def parser(
    doc: str | None, *, quick: str = "", rounds: int = 0, seed: bool = False, json: bool = True
) -> argparse.ArgumentParser:
    """Return a parser whose help is the script's docstring; `quick` describes the quick form."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if quick:
        found.add_argument("--quick", action="store_true", help=quick)
    if json:
        found.add_argument("--json", type=_target, metavar="FILE", help="write claims and figures there")
    if rounds:
        text = f"how often everything is measured, in turn (default {rounds})"
        found.add_argument("--rounds", type=int, default=rounds, metavar="N", help=text)
    if seed:
        found.add_argument("--seed", type=int, default=0, metavar="N", help="of all random choices")
    return found


def _target(text: str) -> Path:
    if not (folder := Path(text).parent).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {folder}; make it, or name another")
    return Path(text)


def exit_with(main: Callable[[], int | None]) -> None:
    """Call `main` and exit with its status; it may clean up after Ctrl-C and SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        progress("stopped")
        sys.exit(STOPPED)


def progress(text: str) -> None:
    """Print a line to stderr, so that stdout holds the figures alone."""
    print(text, file=sys.stderr, flush=True)


def in_turn(rounds: int, measured: Mapping[str, Callable[[], Any]]) -> dict[str, list[Any]]:
    """Call everything once in each round, so that a change of the machine's speed affects all alike."""
    found: dict[str, list[Any]] = {name: [] for name in measured}
    for number in range(1, rounds + 1):
        for name, call in measured.items():
            progress(f"  round {number} of {rounds}: {name}")
            found[name].append(call())
    return found


def in_processes(
    call: Callable[..., Any], runs: Sequence[tuple[Any, ...]], processes: int, *, every: int = 20
) -> list[Any]:
    """Return the results of `call` for the arguments of each run, in order.

    After Ctrl-C, return those of the first runs, as far as they are complete.
    """
    found: list[Any] = []
    with ProcessPoolExecutor(processes) as pool:
        try:
            for result in pool.map(call, *zip(*runs, strict=True)):
                found.append(result)
                if len(found) % every == 0:
                    progress(f"  {len(found)} of {len(runs)}")
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
    return found


def ratio(above: Iterable[float], below: Iterable[float]) -> float:
    """Return the median over the rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def mean_and_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % interval (Student's t); nan for a single value."""
    if len(values) < 2:
        return values[0], math.nan
    half = STUDENT_T[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), half


def calibrate() -> float:
    """Return the CPU seconds that a fixed loop of pure Python and numpy takes now.

    The loop stays in the processor's caches, so other load slows a decision down more than the loop: run nothing else.
    """
    started = time.thread_time()
    seen: dict[int, tuple[int, float]] = {}
    for number in range(3000):
        key = number * 7919 % 1009
        count, total = seen.get(key, (0, 0.0))
        seen[key] = (count + 1, total + number)
    values = np.arange(10_000, dtype=np.float64)
    for _ in range(18):
        values = np.where(values > 5000.0, values - 3.0, values + 2.0)
        np.cumsum(values)
    return time.thread_time() - started


class Loop:
    """The calibrated loop's times, taken between the measurements of one run."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.sample()  # warms up caches and the interpreter
        self.seconds.clear()

    def sample(self, count: int = 25) -> float:
        """Run the loop `count` times; return their median (seconds)."""
        taken = [calibrate() for _ in range(count)]
        self.seconds += taken
        return statistics.median(taken)

    def ratio(self, seconds: float) -> float:
        """Return a time as a multiple of the loop's median in this run."""
        return seconds / statistics.median(self.seconds)

    def peer(self) -> str:
        """Describe the loop as the peer of a claim."""
        low, middle, high = np.quantile(self.seconds, (0.05, 0.5, 0.95)) * 1e3
        return f"calibrated loop in the same run: {middle:.2f} ms (5 to 95 %: {low:.2f} to {high:.2f})"


def claim(name: str, value: float, unit: str, goal: float, better: str = "less", peer: str = "") -> Row:
    """Return a claim: `value` must be at most `goal`, or at least `goal` if `better` is `more`."""
    row = {"name": name, "value": round(value, 3), "unit": unit, "goal": goal}
    return row | {"better": better, "peer": peer}


def holds(claim: Row) -> bool:
    """Return True if a claim's value meets its goal."""
    value, goal = claim["value"], claim["goal"]
    return bool(value <= goal if claim["better"] == "less" else value >= goal)


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    """Print aligned columns, the first one to the left; floats have four significant digits."""
    cells = [[_shown(one) for one in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *others in cells:
        right = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        print("  ".join([first.ljust(widths[0]), *right]).rstrip())


def _shown(cell: Any) -> str:
    return f"{cell:.{'0f' if abs(cell) >= 1000 else '4g'}}" if isinstance(cell, float) else str(cell)


def report(claims: Sequence[Row], target: Path | None, figures: Row, *, strict: bool = False) -> int:
    """Print the claims and save them; return the exit status, which is 1 if `strict` and a claim does not hold."""
    print()
    for one in claims:
        goal = f"at {'most' if one['better'] == 'less' else 'least'} {_shown(one['goal'])} {one['unit']}"
        peer = f"; {one['peer']}" if one["peer"] else ""
        print(f"{'holds' if holds(one) else 'FAILS'}: {one['name']}: {_shown(one['value'])}, {goal}{peer}")
    save(claims, target, figures)
    return int(strict and not all(map(holds, claims)))


def save(claims: Sequence[Row], target: Path | None, figures: Row) -> None:
    """Write claims, figures, the commit, the command and the machine to `target`, if there is one."""
    if target is None:
        return
    words = ["FILE" if os.sep in word else word for word in sys.argv[1:] if word != "--inside"]
    machine = {"cores": len(os.sched_getaffinity(0)), "load_average": round(os.getloadavg()[0], 1)}
    machine |= {"python": platform.python_version(), "numpy": np.__version__}
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])
    facts = {"revision": revision(), "command": command, "machine": machine}
    write(target, {"claims": claims, **figures, **facts})


def write(target: Path, document: Row | str) -> None:
    """Write a text, or a document as JSON; a reader never sees a part of it."""
    text = document if isinstance(document, str) else json.dumps(document, indent=1) + "\n"
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.rename(target)


def revision() -> str:
    """Return the commit that is measured, with `-dirty` if files differ from it; `unknown` without git."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
