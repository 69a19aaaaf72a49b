"""The identity of a checkpoint, by which KV that was kept on a disk is recognised as that of other weights."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

_SAMPLES = 64
_SAMPLE_BYTES = 4096


def weights_identity(directory: Path) -> str:
    """Return a digest of a checkpoint's configuration and of its files of weights.

    Weights count by name, size, time of the last change, and samples of their content, because to read all of a large
    model would take minutes. A copy of the same checkpoint with other times therefore counts as another one.

    Raises:
        OSError: a file cannot be read.
    """
    digest = blake2b(digest_size=16)
    for path in sorted((*directory.glob("*.json"), *directory.glob("*.safetensors"))):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        if path.suffix == ".json":
            digest.update(path.read_bytes())
            continue
        digest.update(f"{path.stat().st_mtime_ns};".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(size * sample // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
