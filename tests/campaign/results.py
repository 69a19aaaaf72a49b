"""Results of a campaign, saved to a file after every run and valid only for the code that produced them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from medha_papers.source_digest import digest

ROOT = Path(__file__).resolve().parents[2]
_LOADED = """
import sys, medha_operator.handlers, campaign.__main__, campaign.fields
print(*(getattr(module, "__file__", None) for module in list(sys.modules.values())), sep="\\n")
"""
_TOLD_OF = ("operator", "core", "tests/campaign")
"""Folders whose modules the results depend on, as far as a campaign loads them."""


def code_digest() -> str:
    """Return the digest of the operator, of the parts of Medha that it imports (which generate the CRDs), and
    of the campaign."""
    return digest(sources())


def sources() -> list[Path]:
    """Return the files on which the results depend."""
    path = os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", _LOADED],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {Path(line) for line in done.stdout.splitlines()}
    return sorted(file for file in loaded if any(file.is_relative_to(ROOT / folder) for folder in _TOLD_OF))


class Results:
    """Rows by name. Rows of `file` that other code produced are dropped; without a file, nothing is saved."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._code = code_digest()
        self.rows: dict[str, dict[str, Any]] = {}
        if file is not None and file.exists():
            kept = json.loads(file.read_text(encoding="utf-8"))
            if kept.get("code") == self._code:
                self.rows = kept["rows"]
            else:
                sys.stdout.write(f"{file} tells of other code: all runs begin anew\n")

    def add(self, name: str, row: dict[str, Any]) -> None:
        """Add a row and save it at once."""
        self.rows[name] = row
        if self._file is not None:
            kept = {"code": self._code, "rows": dict(sorted(self.rows.items()))}
            fresh = self._file.with_suffix(".new")
            fresh.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            fresh.replace(self._file)

    def is_done(self, name: str) -> bool:
        """Return whether the plan has a result; skipped plans without a failure are tried again."""
        row = self.rows.get(name)
        return row is not None and (not row["is_skipped"] or bool(row["wrong"]))

    @property
    def skipped(self) -> list[str]:
        """Plans without a result, since their fault never happened."""
        return [name for name in self.rows if not self.is_done(name)]

    @property
    def failed(self) -> list[str]:
        return [name for name, row in self.rows.items() if row["wrong"]]
