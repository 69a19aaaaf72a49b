"""`make tests`: every test, in six runs of pytest on two sides; a side goes on where a run before has failed.

Tests that start Kubernetes mostly wait for it. They are the last ones of the second side: what they need can be built
meanwhile, and the first side uses the processors that they leave idle. What the second side prints follows behind the first.

Both sides share the machine, so a test may fail because it judges before the program has had its turn. A few failed tests
therefore run again at the end, with nothing beside them. One that passes then is named in the table as a row `again`: its
cause is to be found and fixed, but it does not hide what the others have proved. One that fails twice has failed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ENGINE = ("tests/serving", "tests/worker")
COMMANDS = ("tests/cli", "tests/process", "tests/pods")
CAMPAIGN = ("tests/campaign", "tests/chart")
NODES = tuple(
    f"tests/cluster/test_{name}.py"
    for name in (
        "guide", "host_unchanged", "images", "kubelet_words", "lost_node", "nodes", "one_node", "two_nodes",
    )
)  # fmt: skip
"""Files whose clusters have nodes with containers."""
ELSEWHERE = tuple(f"--ignore={path}" for path in (*ENGINE, *COMMANDS, *CAMPAIGN, "tests/cluster"))
TESTS = {
    "engine": ENGINE,
    "commands": COMMANDS,
    "nodes": NODES,
    "decisions": ELSEWHERE,
    "campaign": CAMPAIGN,
    "servers": ("tests/cluster", *(f"--ignore={path}" for path in NODES)),
}
"""Rows of tests, with pytest's arguments. `decisions` has all that no other row names."""
TESTS_FAILED = 1
"""Pytest's exit status where tests failed, and nothing worse happened."""
CACHES = Path(".pytest_cache/rows")
"""The state of each row: pytest's cache with the names of failed tests, and beside it the exit status."""
MOST_AGAIN = 3
"""Failed tests of a row that run again. More of them have a cause in common, which is no matter of time."""


def main() -> int:
    if sys.argv[1:] == ["second"]:
        second_side()
        return 0
    shutil.rmtree(CACHES, ignore_errors=True)
    CACHES.mkdir(parents=True)
    with tempfile.TemporaryFile() as printed:
        second = subprocess.Popen([sys.executable, __file__, "second"], stdout=printed, stderr=printed)
        try:
            first_side()
        finally:  # Ctrl-C reaches both
            broken = second.wait() != 0
            printed.seek(0)
            sys.stdout.write(printed.read().decode())
            sys.stdout.flush()
    failed = [note.stem for note in sorted(CACHES.glob("*.status")) if int(note.read_text()) != 0]
    recovered = [passes_again(name) for name in failed]
    return int(broken or not all(recovered))


def first_side() -> None:
    """Run the tests of the engine, of commands and of pods."""
    tests("engine")
    tests("commands")


def second_side() -> None:
    """Run all other tests; those on an API server come last, and at the very end those on nodes."""
    tests("decisions")
    row("programs", "tests/cluster/binaries.py")
    tests("campaign")
    tests("servers")
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
    missing = [path for path in (*ENGINE, *COMMANDS, *CAMPAIGN, *NODES) if not Path(path).exists()]
    sys.exit(f"no such tests: {missing}" if missing else main())
