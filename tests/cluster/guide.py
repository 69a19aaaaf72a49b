"""Extract the commands that a page shows, so that programs and tests run the same commands as readers."""

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
    text = page.read_text(encoding="utf-8")
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"{page}: has no heading {heading!r}")
    return [_commands(page, block) for block in re.findall(r"```console\n(.*?)```", found[1], re.DOTALL)]


def _commands(page: Path, block: str) -> list[str]:
    first, *commands = re.split(r"^\$ ", block, flags=re.MULTILINE)
    if first or not commands:
        raise ValueError(f"{page}: a console block begins with {block[:20]!r} and not with a command")
    return [command.rstrip("\n") for command in commands]
