"""A file's name tells it from all others; the few that repeat on purpose are listed in `docs/structure.md`."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("core", "router", "worker", "operator", "sim", "cli", "papers", "release")
SPECIAL = {"__init__.py", "__main__.py"}


def repeated(names: list[str]) -> set[str]:
    """Return the names that occur more than once, without those that Python prescribes."""
    return {name for name, count in Counter(names).items() if count > 1} - SPECIAL


def listed() -> set[str]:
    page = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    section = page.partition("### File names\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `(\w+\.py)` \|", section, re.MULTILINE))


def names() -> list[str]:
    return [path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]


def test_the_names_that_repeat_are_those_that_are_listed() -> None:
    assert repeated(names()) == listed()


def test_a_name_that_repeats_is_noticed() -> None:
    assert repeated([*names(), "watchdog.py"]) - repeated(names()) == {"watchdog.py"}
