"""Environments of clients use the torch of these tests, and cannot change it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

from .packages import link_torch


def test_an_environment_with_our_torch_needs_no_package_of_it_and_owns_every_folder(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    link_torch(tmp_path)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        tmp_path / "bin" / "python",
        "--disable-pip-version-check",
    ]
    ours = distribution("torch")
    wanted = f"torch=={ours.version}"
    asked = subprocess.run(
        [*pip, "install", "--dry-run", "--no-index", wanted], capture_output=True, text=True, check=False
    )
    assert asked.returncode == 0, asked.stderr
    assert "Would install" not in asked.stdout
    (linked,) = tmp_path.glob("lib/*/site-packages/torch/__init__.py")
    assert linked.samefile(str(ours.locate_file("torch/__init__.py")))
    assert not [path for path in linked.parents[1].rglob("*") if path.is_symlink() and path.is_dir()]
