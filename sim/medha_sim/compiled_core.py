"""Compile the controller and the simulator to machine code with mypyc, for long campaigns.

A simulation spends its time in the interpreter, on the controller's own code. mypyc compiles the typed Python
sources unchanged, and floats are the same to the last digit, so a compiled run makes the same decisions. The
compiled copy is in a folder of its own, named by the digest of the sources; the repository's files are not
touched.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp

from medha.errors import PartFailed

MODULES = (
    *(f"medha/{name}.py" for name in ("shards", "slo")),
    *(f"medha/cost/{name}.py" for name in ("attention_seconds", "correction", "predictor", "prefill_seconds")),
    *(f"medha/kv/{name}.py" for name in ("blocks", "lane_replay", "pools", "prefix_cache")),
    *(f"medha/scheduler/{name}.py" for name in ("admission", "controller", "guarded", "lanes", "owner_places", "packer", "policy", "prefill_order", "prefix_followers", "request", "request_table", "sharing", "step_builder", "validation")),
    *(f"medha_sim/{name}.py" for name in ("executor", "run_log", "simulation")),
    *(f"medha_sim/baselines/{name}.py" for name in ("baseline_costs", "distserve", "hrrn", "loongserve", "request_book", "sarathi", "single_prefill")),
)  # fmt: skip
"""Modules to compile: those that every event passes through.

Messages and profiles are left out, because pydantic makes them, and expects plain dataclasses.
"""
_PACKAGES = ("core/medha", "sim/medha_sim")


def compiled(root: Path, folder: Path) -> Path:
    """Return a folder to put first on Python's path, compiling the sources below `root` into it if missing.

    Compiling takes one to two minutes, once for each state of the sources.

    Raises:
        PartFailed: mypyc or a C compiler is missing, or refuses the sources.
    """
    target = folder / _digest(root)
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    making = Path(mkdtemp(dir=folder))
    for package in _PACKAGES:
        shutil.copytree(
            root / package, making / Path(package).name, ignore=shutil.ignore_patterns("__pycache__", "*.so")
        )
    command = [sys.executable, "-m", "mypyc", "--strict", "--ignore-missing-imports", *MODULES]
    done = subprocess.run(command, cwd=making, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PartFailed(
            f"{' '.join(command[1:3])} failed in {making}:\n{(done.stdout + done.stderr)[-2000:]}"
        )
    shutil.rmtree(making / "build")
    making.rename(target)  # last, so that a folder of this name is always complete
    return target


def _digest(root: Path) -> str:
    found = hashlib.sha256(f"{sys.version} {MODULES}".encode())
    for package in _PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            found.update(f"{file.relative_to(root)}\n".encode() + file.read_bytes())
    return found.hexdigest()[:12]
