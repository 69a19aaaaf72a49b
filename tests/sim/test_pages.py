"""The pages of `medha simulate` and `medha plan`, opened by a real browser."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from medha_cli.main import main

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
IN_CI = bool(os.environ.get("CI"))  # where it fails without one
DRAWN = re.compile(r'<div class="[^"]*svg-container"')
needs_browser = pytest.mark.skipif(
    CHROMIUM is None and not IN_CI, reason="no chromium: apt-get install chromium"
)


def opened(page: Path, profile: Path) -> tuple[str, list[str]]:
    """The document as the browser has built it, and what its console said."""
    assert CHROMIUM is not None, "no chromium: apt-get install chromium"
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={profile}",
        "--window-size=1280,1000",
        "--virtual-time-budget=20000",
        "--enable-logging=stderr",
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, re.findall(r"CONSOLE.*", done.stderr)


@needs_browser
def test_the_page_of_simulate_draws_every_plot_without_a_word_in_the_console(tmp_path: Path) -> None:
    page = tmp_path / "simulate.html"
    asked = [
        "simulate",
        "-p",
        "fcfs,guarded",
        "--rate",
        "1",
        "--duration",
        "20",
        "--seeds",
        "1",
        "--band",
        "0",
    ]
    result = CliRunner().invoke(main, [*asked, "--jobs", "1", "-o", str(page)])
    assert result.exit_code == 0, result.output
    asked_for = page.read_text(encoding="utf-8").count('class="plotly-graph-div"')
    document, console = opened(page, tmp_path / "browser")
    assert console == []
    assert asked_for > 10
    assert len(DRAWN.findall(document)) == asked_for
    assert "Deadlines met" in document


@needs_browser
def test_the_page_of_plan_draws_its_plots_without_a_word_in_the_console(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    result = CliRunner().invoke(main, ["plan", "--context", "128K", "--max-gpus", "8", "--plot", str(page)])
    assert result.exit_code == 0, result.output
    document, console = opened(page, tmp_path / "browser")
    assert console == []
    assert len(DRAWN.findall(document)) == 1
    assert len(re.findall(r'class="trace scatter', document)) >= 5
