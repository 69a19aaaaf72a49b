"""For all tests: seeds of the campaigns, signals as a terminal's, and where the time of a run went."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

# A run of CI draws the same examples every time; `make test-long` draws others, by seed.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("campaign", max_examples=1000, deadline=None, database=None)
settings.load_profile("ci")

# A shell that runs the tests in the background (`.ci/run &`) has SIGINT ignored, and nohup SIGHUP; what they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the seconds of each folder of tests, the slowest first."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[str(Path(report.nodeid.split("::")[0]).parent)] += report.duration
    terminalreporter.section("seconds by folder")
    for folder, spent in seconds.most_common():
        terminalreporter.write_line(f"{spent:8.1f}  {folder}")
