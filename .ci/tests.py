"""`make tests`: every test, in three runs of pytest, which go on where one before them has failed.

Tests that start Kubernetes mostly wait for it. They come last, so that what they need can be built meanwhile, and in two
halves side by side: what the second one says follows behind the first. All others have the machine to themselves,
since some of them compute on every core.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from typing import IO

HALVES = {"clusters": ("tests/cluster",), "campaign": ("tests/campaign", "tests/chart")}


def main() -> int:
    elsewhere = [f"--ignore={folder}" for folders in HALVES.values() for folder in folders]
    failed = row("tests", "-m", "pytest", *elsewhere).wait() != 0
    for needed in ("binaries", "images"):
        failed |= row(needed, f"tests/cluster/{needed}.py").wait() != 0
    here, beside = HALVES
    with tempfile.TemporaryFile() as said:
        background = row(beside, "-m", "pytest", *HALVES[beside], output=said)
        try:
            failed |= row(here, "-m", "pytest", *HALVES[here]).wait() != 0
        finally:  # Ctrl-C reaches both
            failed |= background.wait() != 0
            said.seek(0)
            sys.stdout.write(said.read().decode())
    return int(failed)


def row(name: str, *argv: str, output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """A row of CI's table (.ci/row) that runs a program in this interpreter."""
    return subprocess.Popen([".ci/row", name, sys.executable, *argv], stdout=output, stderr=output)


if __name__ == "__main__":
    sys.exit(main())
