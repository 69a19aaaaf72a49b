"""The digest of the engine's sources that a run on a GPU proves."""

from __future__ import annotations

from hashlib import sha256

from harness import ROOT

PROVED = (
    "device.py",
    "cuda_device.py",
    "nvml.py",
    "kernels",
    "model",
    "rank/nccl_plane.py",
    "rank/loss_guard.py",
)
"""Files and folders of the worker whose digest a result names."""
_WORKER = ROOT / "worker" / "medha_worker"


def sources() -> str:
    """Return a digest of the engine's sources."""
    found = sha256()
    for name in PROVED:
        path = _WORKER / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            found.update(f"{file.relative_to(_WORKER)}\n".encode() + file.read_bytes())
    return found.hexdigest()[:12]
