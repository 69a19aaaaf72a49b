"""Environments of their own for tests that need further packages than those that are installed here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]


def required_by(extra: str) -> list[str]:
    """Return what an extra adds to other extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [line for line in project["optional-dependencies"][extra] if Requirement(line).name != "medha"]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


class Environment:
    """A virtual environment with further packages, in which modules of this repository run."""

    def __init__(
        self,
        folder: Path,
        requirements: Sequence[str],
        pinned: Mapping[str, str],
        interpreter: str = sys.executable,
    ) -> None:
        """Make it in `folder`, and install `requirements` as `pinned`.

        Packages that are installed here are there too, unless the interpreter is another one.
        """
        constraints = folder / "constraints.txt"
        constraints.write_text("".join(f"{name}=={pin}\n" for name, pin in pinned.items()))
        subprocess.run([interpreter, "-m", "venv", str(folder / "environment")], check=True)
        self.python = str(folder / "environment" / "bin" / "python")
        site = subprocess.check_output(
            [self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        )
        self.site = Path(site.strip())
        if interpreter == sys.executable:
            (self.site / "installed_already.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        installing = [sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet"]
        installing += ["--disable-pip-version-check", "--constraint", str(constraints)]
        subprocess.run([*installing, *requirements], check=True)

    def finished(self, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a module to its end, with further environment variables."""
        here = os.pathsep.join(str(ROOT / folder) for folder in ("core", "worker"))
        return subprocess.run(
            [self.python, "-m", *argv],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": here, **variables},
            capture_output=True,
            text=True,
            check=False,
        )

    def run(self, *argv: str, **variables: str) -> str:
        """Run a module, and return what it prints; the test fails if it does."""
        done = self.finished(*argv, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def versions(self, *names: str) -> dict[str, str]:
        """Return the versions of packages that modules find here."""
        code = "import importlib.metadata, json, sys; print(json.dumps({name: importlib.metadata.version(name) for name in sys.argv[1:]}))"
        found: dict[str, str] = json.loads(
            subprocess.check_output([self.python, "-c", code, *names], text=True)
        )
        return found
