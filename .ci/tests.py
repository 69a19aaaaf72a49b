"""`make tests`: every test, in six runs of pytest on two sides; a side goes on where a run before has failed.

Tests that start Kubernetes mostly wait for it. They come last, so that what they need can be built meanwhile, and only one
side starts nodes. What the second side prints follows behind the first.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ENGINE = ("tests/serving", "tests/worker", "tests/pods", "tests/cli", "tests/process")
CAMPAIGN = ("tests/campaign", "tests/chart")
NODES = tuple(
    f"tests/cluster/test_{name}.py"
    for name in (
        "guide", "host_unchanged", "images", "kubelet_words", "lost_node", "nodes", "one_node", "two_nodes",
    )
)  # fmt: skip
"""Files whose clusters have nodes with containers."""
NEEDED = {"binaries": (), "images": ("--for-tests",)}
"""Programs that build what the tests of Kubernetes need, with their options."""


def main() -> int:
    if sys.argv[1:] == ["second"]:
        return int(second_side())
    with tempfile.TemporaryFile() as printed:
        second = subprocess.Popen([sys.executable, __file__, "second"], stdout=printed, stderr=printed)
        try:
            failed = first_side()
        finally:  # Ctrl-C reaches both
            failed_second = second.wait() != 0
            printed.seek(0)
            sys.stdout.write(printed.read().decode())
    return int(failed or failed_second)


def first_side() -> bool:
    """Run the engine's tests, then those on nodes; return whether any has failed."""
    failed = tests("engine", *ENGINE)
    for needed, options in NEEDED.items():
        failed |= row(needed, f"tests/cluster/{needed}.py", *options)
    return failed | tests("nodes", *NODES)


def second_side() -> bool:
    """Run all tests that need neither, then those on an API server alone; return whether any has failed."""
    elsewhere = [f"--ignore={path}" for path in (*ENGINE, *CAMPAIGN, "tests/cluster")]
    failed = tests("decisions", *elsewhere)
    failed |= row("programs", "tests/cluster/binaries.py")
    failed |= tests("campaign", *CAMPAIGN)
    return failed | tests("servers", "tests/cluster", *(f"--ignore={path}" for path in NODES))


def tests(name: str, *arguments: str) -> bool:
    """Run pytest as a row of CI's table; return whether it has failed."""
    return row(name, "-m", "pytest", *arguments)


def row(name: str, *argv: str) -> bool:
    """Run a program in this interpreter as a row of CI's table (.ci/row); return whether it has failed."""
    return subprocess.run([".ci/row", name, sys.executable, *argv], check=False).returncode != 0


if __name__ == "__main__":
    missing = [path for path in (*ENGINE, *CAMPAIGN, *NODES) if not Path(path).exists()]
    sys.exit(f"no such tests: {missing}" if missing else main())
