"""Run tests in one process, and report each of them to a file as soon as it has ended; `long.py` starts this.

    python benchmarks/long_rows.py REPORTS TEST... -m long

Each line of the file is a JSON object: `test` is the test's name and `phase` is `start`, `setup`, `call` or `teardown`. All but
the first also have `outcome`, `seconds` and `output`, which is the text of a failure or the reason why a test was skipped.
"""

from __future__ import annotations

import json
import sys
from typing import IO, Any

import pytest

OUTPUT_CHARACTERS = 4000
"""Characters kept of the end of a failure, and as many of what the test has printed."""


class Reports:
    """A plugin of pytest that writes a line for each phase of a test."""

    def __init__(self, target: IO[str]) -> None:
        self._target = target

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Write that a test starts: if the process ends in it, `long.py` knows which test that was."""
        self._write({"test": nodeid, "phase": "start"})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write how a phase of a test has ended."""
        text = "" if report.outcome == "passed" else report.longreprtext[-OUTPUT_CHARACTERS:]
        if report.outcome == "failed":
            printed = "\n".join(f"--- {title}\n{content}" for title, content in report.sections)
            text = f"{text}\n{printed[-OUTPUT_CHARACTERS:]}"
        self._write(
            {
                "test": report.nodeid,
                "phase": report.when,
                "outcome": report.outcome,
                "seconds": report.duration,
                "output": text,
            }
        )

    def _write(self, line: dict[str, Any]) -> None:
        self._target.write(json.dumps(line) + "\n")
        self._target.flush()


def main(reports: str, *arguments: str) -> int:
    """Run pytest with these arguments; return its exit status."""
    with open(reports, "a", encoding="utf-8") as target:
        return int(pytest.main(["-q", *arguments], plugins=[Reports(target)]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
