"""No two places of the packages share more than a dozen equal lines: what they share is written once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("core", "router", "worker", "operator", "sim", "cli", "papers", "release", "benchmarks")
MOST_EQUAL_LINES = 12
"""Blank lines and comments do not count, nor does indentation."""


def shared(texts: Mapping[str, str], lines: int) -> list[tuple[str, ...]]:
    """Return the places (file and number of the first line) that begin the same run of `lines` lines."""
    places: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, text in texts.items():
        stripped = enumerate(map(str.strip, text.splitlines()), start=1)
        counted = [(number, line) for number, line in stripped if line and not line.startswith("#")]
        for start in range(len(counted) - lines + 1):
            run = tuple(line for _, line in counted[start : start + lines])
            places[run].append(f"{name}:{counted[start][0]}")
    return [tuple(found) for found in places.values() if len(found) > 1]


def test_no_two_places_share_more_than_a_dozen_lines() -> None:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}
    assert shared(texts, MOST_EQUAL_LINES + 1) == []


def test_a_copy_of_a_block_is_noticed() -> None:
    block = "\n".join(f"step_{number}()" for number in range(3))
    texts = {"a.py": f"import os\n\n{block}\n", "b.py": f"def f():\n    # as in a\n    {block}\n"}
    assert shared(texts, 3) == [("a.py:3", "b.py:3")]
    assert shared(texts, 4) == []
