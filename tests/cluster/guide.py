"""Extract the commands and files that a page shows, so that programs and tests use the same ones as readers."""

from __future__ import annotations

import re
from pathlib import Path

from cluster.images import ROOT

README = ROOT / "README.md"
INSTALL = ROOT / "docs" / "install.md"


def shown(page: Path, heading: str) -> list[list[str]]:
    """Return the commands of each `console` block below a heading of a page; a command may span lines.

    Raises:
        ValueError: the page has no such heading, or a block does not begin with a command.
    """
    return [_commands(page, block) for block in blocks(page, heading, "console")]


def blocks(page: Path, heading: str, language: str) -> list[str]:
    """Return the blocks of a language below a heading of a page.

    Raises:
        ValueError: the page has no such heading.
    """
    text = page.read_text(encoding="utf-8")
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"{page}: has no heading {heading!r}")
    return re.findall(rf"```{language}\n(.*?)```", found[1], re.DOTALL)


def _commands(page: Path, block: str) -> list[str]:
    first, *commands = re.split(r"^\$ ", block, flags=re.MULTILINE)
    if first or not commands:
        raise ValueError(f"{page}: a console block begins with {block[:20]!r} and not with a command")
    return [command.rstrip("\n") for command in commands]
