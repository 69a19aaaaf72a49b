"""For all tests: seeds of the campaigns, signals as a terminal's, and where the time of a run went."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

from medha_release.checkout import export, version_before
from medha_release.refusal import Refusal

ROOT = Path(__file__).parents[1]

# A run of CI draws the same examples every time; `make test-long` draws others, by seed.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("campaign", max_examples=1000, deadline=None, database=None)
settings.load_profile("ci")

# A shell that runs the tests in the background (`.ci/run &`) has SIGINT ignored, and nohup SIGHUP; what they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the version before. A shallow clone does not have them: then its tests are skipped, but in CI they fail."""
    try:
        return export(ROOT, version_before(ROOT), tmp_path_factory.mktemp("before"))
    except Refusal as refusal:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(refusal))


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
