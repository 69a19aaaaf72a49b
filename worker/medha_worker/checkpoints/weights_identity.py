"""The identity of a checkpoint, by which KV that was kept on a disk, or is another replica's, is recognised as that of
other weights."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO
from zipfile import BadZipFile, ZipFile

_TENSOR_SAMPLES = 5
_TENSOR_SAMPLE_BYTES = 512
_MOST_HEADER_BYTES = 2**28
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
    for path in _files(directory):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        if path.suffix == ".json":
            digest.update(path.read_bytes())
            continue
        digest.update(f"{path.stat().st_mtime_ns};".encode())
        with path.open("rb") as file:
            _add_samples(digest, file, size)
    return digest.hexdigest()


def content_identity(directory: Path) -> str:
    """Return a digest of a checkpoint's configuration and of samples of each of its tensors.

    It is the same for all copies of a checkpoint, whenever and wherever they were made.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file of weights has no header of its form.
    """
    digest = blake2b(digest_size=16)
    for path in _files(directory):
        digest.update(f"{path.name}:{path.stat().st_size};".encode())
        if path.suffix == ".json":
            digest.update(path.read_bytes())
            continue
        if path.suffix == ".bin":
            _add_records(digest, path)
            continue
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MOST_HEADER_BYTES:
                raise ValueError(f"{path} has a header of {length} bytes, which is none of safetensors")
            header = file.read(length)
            digest.update(header)
            for start, stop in _tensor_ranges(path, header):
                for sample in range(_TENSOR_SAMPLES):
                    digest.update(_sample(file, 8 + length, start, stop, sample))
    return digest.hexdigest()


def _files(directory: Path) -> list[Path]:
    """Return a checkpoint's JSON files and its files of weights; `pytorch_model.bin` counts only without safetensors."""
    weights = [*directory.glob("*.safetensors")] or [*directory.glob("pytorch_model.bin")]
    return sorted((*directory.glob("*.json"), *weights))


def _add_samples(digest: blake2b, file: BinaryIO, size: int) -> None:
    for sample in range(_SAMPLES):
        file.seek(size * sample // _SAMPLES)
        digest.update(file.read(_SAMPLE_BYTES))


def _add_records(digest: blake2b, path: Path) -> None:
    """Add samples of a file of `torch.save`, and the checksums that it stores of its tensors.

    Raises:
        OSError: the file cannot be read.
        ValueError: `torch.save` did not write it.
    """
    try:
        with ZipFile(path) as file:
            records = [(one.filename, one.file_size, one.CRC) for one in file.infolist()]
    except BadZipFile as error:
        raise ValueError(f"{path} is no file of torch.save: {error}") from error
    digest.update(repr(records).encode())
    with path.open("rb") as file:
        _add_samples(digest, file, path.stat().st_size)


def _tensor_ranges(path: Path, header: bytes) -> list[tuple[int, int]]:
    """Return where the tensors of a file begin and end, after its header."""
    try:
        tensors = [one for name, one in json.loads(header).items() if name != "__metadata__"]
        return sorted((int(one["data_offsets"][0]), int(one["data_offsets"][1])) for one in tensors)
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{path} has no header of safetensors: {error!r}") from error


def _sample(file: BinaryIO, begin: int, start: int, stop: int, sample: int) -> bytes:
    """Return a sample of the bytes `start .. stop` of a file, counted from `begin` on: the first and the last are among them."""
    count = min(_TENSOR_SAMPLE_BYTES, stop - start)
    file.seek(begin + start + (stop - start - count) * sample // (_TENSOR_SAMPLES - 1))
    return file.read(count)
