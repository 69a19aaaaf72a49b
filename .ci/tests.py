"""`make tests`: every test, in four runs of pytest, two side by side; each goes on where one before it has failed.

Tests that start Kubernetes mostly wait for it. They come last, so that what they need can be built meanwhile. Those that
start ranks and servers run beside those that decide and compute alone; what the latter say follows behind the former.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

ENGINE = ("tests/serving", "tests/worker", "tests/pods", "tests/cli")
CLUSTERS = ("tests/cluster",)
CAMPAIGN = ("tests/campaign", "tests/chart")
ALL_OTHERS = tuple(f"--ignore={folder}" for folder in (*ENGINE, *CLUSTERS, *CAMPAIGN))
NEEDED = {"binaries": (), "images": ("--for-tests",)}  # by tests that start Kubernetes


def main() -> int:
    if sys.argv[1:] == ["beside"]:
        return int(in_turn(("decisions", ALL_OTHERS), ("campaign", CAMPAIGN)))
    with tempfile.TemporaryFile() as said:
        beside = subprocess.Popen([sys.executable, __file__, "beside"], stdout=said, stderr=said)
        try:
            failed = in_turn(("engine", ENGINE), ("clusters", CLUSTERS))
        finally:  # Ctrl-C reaches both
            failed_beside = beside.wait() != 0
            said.seek(0)
            sys.stdout.write(said.read().decode())
    return int(failed or failed_beside)


def in_turn(first: tuple[str, tuple[str, ...]], then: tuple[str, tuple[str, ...]]) -> bool:
    """Two runs of pytest, names and arguments, with what the second one needs made in between; whether any has failed."""
    failed = row(first[0], "-m", "pytest", *first[1])
    for needed, options in NEEDED.items():
        failed |= row(needed, f"tests/cluster/{needed}.py", *options)
    return failed | row(then[0], "-m", "pytest", *then[1])


def row(name: str, *argv: str) -> bool:
    """A row of CI's table (.ci/row) that runs a program in this interpreter; whether it failed."""
    return subprocess.run([".ci/row", name, sys.executable, *argv], check=False).returncode != 0


if __name__ == "__main__":
    sys.exit(main())
