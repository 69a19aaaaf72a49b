"""What a campaign has found, kept in a file after every run, for the code that it was found with."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_KEPT_WITH = ("crds", "tests/campaign")
"""Folders beside the operator's own modules of which a result tells something."""


def code() -> str:
    """A digest of the operator's modules, of what they import of Medha, of the definitions and of the campaign."""
    told = hashlib.sha256()
    for file in read():
        told.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return told.hexdigest()[:12]


def read() -> list[Path]:
    """The files on which the results depend."""
    loaded = "import sys, medha_operator.handlers; print(*(getattr(one, '__file__', None) for one in sys.modules.values()), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    files = {file for line in done.stdout.splitlines() if (file := Path(line)).is_relative_to(ROOT)}
    for folder in _KEPT_WITH:
        found = (ROOT / folder).rglob("*")
        files |= {
            file for file in found if file.suffix in (".py", ".yaml") and not file.name.startswith("test_")
        }
    return sorted(file for file in files if ".venv" not in file.parts)


class Results:
    """Rows by name. Those of `file` that were found with other code are left behind; None keeps nothing."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._code = code()
        self.rows: dict[str, dict[str, Any]] = {}
        if file is not None and file.exists():
            kept = json.loads(file.read_text(encoding="utf-8"))
            if kept.get("code") == self._code:
                self.rows = kept["rows"]
            else:
                sys.stdout.write(f"{file} tells of other code: all runs begin anew\n")

    def add(self, name: str, row: dict[str, Any]) -> None:
        """Keep a row, at once."""
        self.rows[name] = row
        if self._file is not None:
            kept = {"code": self._code, "rows": dict(sorted(self.rows.items()))}
            fresh = self._file.with_suffix(".new")
            fresh.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            fresh.replace(self._file)

    @property
    def failed(self) -> list[str]:
        return [name for name, row in self.rows.items() if row["wrong"]]
