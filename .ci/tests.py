"""`make tests`: every test, in seven runs of pytest on three sides; a side goes on where a run before has failed.

Many tests wait, for Kubernetes or for a process to begin or to be missed, so that three sides are faster than two even on
two cores. Those that start Kubernetes come last, so that what they need can be built meanwhile, and only one side starts
nodes. What the other sides print follows behind the first.

All sides share the machine, so a test may fail because it judges before the program has had its turn. A few failed tests
therefore run again at the end, with nothing beside them. One that passes then is named in the table as a row `again`: its
cause is to be found and fixed, but it does not hide what the others have proved. One that fails twice has failed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

ENGINE = ("tests/serving", "tests/worker")
CAMPAIGN = ("tests/campaign", "tests/chart")
ROUTER = ("tests/router", "tests/gateways")
PODS = ("tests/pods",)
NODES = tuple(
    f"tests/cluster/test_{name}.py"
    for name in (
        "guide", "host_unchanged", "images", "kubelet_words", "lost_node", "nodes", "one_node", "two_nodes",
    )
)  # fmt: skip
"""Files whose clusters have nodes with containers."""
ELSEWHERE = tuple(f"--ignore={path}" for path in (*ENGINE, *CAMPAIGN, *ROUTER, *PODS, "tests/cluster"))
TESTS = {
    "engine": ENGINE,
    "router": ROUTER,
    "pods": PODS,
    "nodes": NODES,
    "decisions": ELSEWHERE,
    "campaign": CAMPAIGN,
    "servers": ("tests/cluster", *(f"--ignore={path}" for path in NODES)),
}
"""Rows of tests, with pytest's arguments; `decisions` has all folders that no other row names."""
TESTS_FAILED = 1
"""Pytest's exit status where tests failed, and nothing worse happened."""
CACHES = Path(".pytest_cache/rows")
"""The state of each row: pytest's cache with the names of failed tests, and beside it the exit status."""
MOST_AGAIN = 3
"""Failed tests of a row that run again. More of them have a cause in common, which is no matter of time."""


def main() -> int:
    others = {"second": second_side, "third": third_side}
    if sys.argv[1:]:
        others[sys.argv[1]]()
        return 0
    shutil.rmtree(CACHES, ignore_errors=True)
    CACHES.mkdir(parents=True)
    is_broken = False
    with ExitStack() as stack:
        started = []
        for side in others:
            printed = stack.enter_context(tempfile.TemporaryFile())
            command = [sys.executable, __file__, side]
            started.append((subprocess.Popen(command, stdout=printed, stderr=printed), printed))
        try:
            first_side()
        finally:  # Ctrl-C reaches all of them
            for process, printed in started:
                is_broken |= process.wait() != 0
                printed.seek(0)
                sys.stdout.write(printed.read().decode())
                sys.stdout.flush()
    failed = [note.stem for note in sorted(CACHES.glob("*.status")) if int(note.read_text()) != 0]
    recovered = [passes_again(name) for name in failed]
    return int(is_broken or not all(recovered))


def first_side() -> None:
    """Run the tests of the engine, which computes most of the time."""
    tests("engine")


def second_side() -> None:
    """Run the tests of decisions, then those on an API server alone."""
    tests("decisions")
    row("programs", "tests/cluster/binaries.py")
    tests("campaign")
    tests("servers")


def third_side() -> None:
    """Run the tests of routers and of pods without a cluster, then those on nodes; a build of programs comes before all."""
    row("binaries", "tests/cluster/binaries.py")
    tests("router")
    tests("pods")
    row("images", "tests/cluster/images.py", "--for-tests")
    tests("nodes")


def tests(name: str, *options: str) -> int:
    """Run the tests of a row; return pytest's exit status."""
    return row(name, "-m", "pytest", "-o", f"cache_dir={CACHES / name}", *options, *TESTS[name])


def passes_again(name: str) -> bool:
    """Run a row's failed tests once more, alone; return whether they pass, and whether they are few enough to ask."""
    if int((CACHES / f"{name}.status").read_text()) != TESTS_FAILED:
        return False
    failed = json.loads((CACHES / name / "v/cache/lastfailed").read_text())
    return len(failed) <= MOST_AGAIN and tests(name, "--last-failed", "--last-failed-no-failures=none") == 0


def row(name: str, *argv: str) -> int:
    """Run a program in this interpreter as a row of CI's table (.ci/row); note and return its exit status."""
    note = CACHES / f"{name}.status"
    title = f"{name} again" if note.exists() else name
    status = subprocess.run([".ci/row", title, sys.executable, *argv], check=False).returncode
    note.write_text(str(status))
    return status


if __name__ == "__main__":
    missing = [path for path in (*ENGINE, *CAMPAIGN, *ROUTER, *PODS, *NODES) if not Path(path).exists()]
    sys.exit(f"no such tests: {missing}" if missing else main())
