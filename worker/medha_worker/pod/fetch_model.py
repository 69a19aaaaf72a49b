"""`python -m medha_worker.pod.fetch_model`: the init container that fetches a model of the Hugging Face Hub for one stage.

A checkpoint of several files is fetched in part: configuration and tokenizer, and the files with a tensor that this
stage's ranks read. Everything comes from one commit, even if the branch moves meanwhile.

Pods may share the folder. One of them fetches at a time; the others then find its files. Each file is compared with the
Hub's digest once, and with its size each time. If a commit is asked for and all of it is there, the Hub is not asked.
"""

from __future__ import annotations

import fcntl
import json
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path

import click
from pydantic import BaseModel, ValidationError

from medha.errors import CheckpointInvalid, ConfigInvalid, MedhaError
from medha_process.part_process import configure_logging
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.stage_split import split_layers, tensors_of_stage

INDEX = "model.safetensors.index.json"
_NOT_READ = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.gguf", ".git*")
"""Files that neither ranks nor routers read; many repositories hold the same weights in other formats."""
_WEIGHTS = "*.safetensors"
_RECORD = ".medha-fetched.json"
_LOCK = ".medha-fetching"
_FIELD = "spec.model.source.huggingFace"

_log = logging.getLogger("medha.fetch")


class HubFile(BaseModel):
    """A file of a repository."""

    size_bytes: int | None
    sha256: str | None
    """Digest of its content; small files have none."""


class Record(BaseModel):
    """The contents of a folder: the repository's files at one commit, and those that were fetched and compared."""

    commit: str
    files: dict[str, HubFile]
    fetched: list[str] = []


def fetch(
    repository: str, revision: str, target: Path, *, stage: int, stages: int, chunk_tokens: int
) -> list[str]:
    """Fetch what the ranks of a stage need into `target`; return the names of the files with weights.

    Raises:
        MedhaError: the repository cannot be fetched, or its model is not supported.
    """
    from httpx2 import HTTPError
    from huggingface_hub.errors import (  # takes a second
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
    )

    try:
        with _alone(target):
            record = _recorded(target)
            if record is None or record.commit != revision:  # a branch may have moved
                asked = _asked(repository, revision)
                record = record if record is not None and record.commit == asked.commit else asked
            small = [
                name for name in record.files if not any(fnmatch(name, one) for one in (*_NOT_READ, _WEIGHTS))
            ]
            _complete(repository, target, record, small)
            names = needed_files(target, stage=stage, stages=stages, chunk_tokens=chunk_tokens)
            _log.info("stage %d of %d reads %d files with weights", stage, stages, len(names))
            _complete(repository, target, record, names)
    except PermissionError as error:
        raise ConfigInvalid(
            f"{_FIELD}.cache: its volume cannot be written ({error}); make it writable for the group 65532, which the "
            "pods' fsGroup names"
        ) from error
    except (HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled) as error:
        raise ConfigInvalid(
            f"{_FIELD}: {repository} at revision {revision} cannot be fetched ({error}); check both names, that the Hub "
            "can be reached, and tokenSecret if the model is gated or private"
        ) from error
    return names


def needed_files(directory: Path, *, stage: int, stages: int, chunk_tokens: int) -> list[str]:
    """Return the names of the files that hold what the ranks of a stage read; all files' index is in `directory`.

    Raises:
        MedhaError: the configuration or the index is wrong, or the model is not supported.
    """
    config = ModelConfig.from_directory(directory)
    index = directory / INDEX
    if not index.is_file():
        return ["model.safetensors"]
    try:
        file_of = {
            str(name): str(file) for name, file in json.loads(index.read_bytes())["weight_map"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointInvalid(f"{index}: has no readable weight_map ({error!r})") from error
    layers = split_layers(config, stages, chunk_tokens)[stage]
    return sorted({file_of[name] for name in tensors_of_stage(file_of, config, layers)})


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Wait until no other container fetches into this folder."""
    target.mkdir(parents=True, exist_ok=True)
    with (target / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("another pod fetches into the same folder; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _recorded(target: Path) -> Record | None:
    """Return what the folder holds, if anything was fetched into it."""
    try:
        return Record.model_validate_json((target / _RECORD).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def _asked(repository: str, revision: str) -> Record:
    """Ask the Hub for the commit of a revision, and its files."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(repository, revision=revision, files_metadata=True)
    assert info.sha is not None, "the Hub names a commit for every revision"
    files = {
        file.rfilename: HubFile(size_bytes=file.size, sha256=file.lfs.sha256 if file.lfs else None)
        for file in info.siblings or ()
    }
    return Record(commit=info.sha, files=files)


def _complete(repository: str, target: Path, record: Record, names: Iterable[str]) -> None:
    """Fetch those of the named files that are not there, or differ from what was fetched, and compare them."""
    from huggingface_hub import snapshot_download

    missing = []
    for name in names:
        if name not in record.files:
            raise CheckpointInvalid(
                f"{repository} at {record.commit} has no file {name}, which its index names; choose another revision"
            )
        path, size_bytes = target / name, record.files[name].size_bytes
        if name in record.fetched and path.is_file() and size_bytes in (None, path.stat().st_size):
            continue
        if path.exists():
            _log.warning("%s is not what was fetched; fetching it again", name)
            path.unlink()
        missing.append(name)
    if not missing:
        return
    total = sum(record.files[name].size_bytes or 0 for name in missing)
    _log.info(
        "fetching %d files (%.1f MiB) of %s at %s", len(missing), total / 2**20, repository, record.commit
    )
    snapshot_download(repository, revision=record.commit, local_dir=target, allow_patterns=missing)
    for name in missing:
        _compare(target / name, record.files[name])
    record.fetched = sorted({*record.fetched, *missing})
    partial = target / f"{_RECORD}.partial"
    partial.write_text(record.model_dump_json(), encoding="utf-8")
    partial.rename(target / _RECORD)


def _compare(path: Path, wanted: HubFile) -> None:
    """Compare a file with the Hub's digest; remove it if it differs."""
    if wanted.sha256 is None:
        return
    found = sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 24):
            found.update(part)
    if found.hexdigest() != wanted.sha256:
        path.unlink()
        raise CheckpointInvalid(
            f"{path.name} was damaged on the way: its SHA-256 is {found.hexdigest()}, and the Hub's {wanted.sha256}; it "
            "is fetched again when the pod tries again"
        )


@click.command()
@click.option("--repository", required=True, help="Id of the repository, owner/name.")
@click.option("--revision", required=True, help="Branch, tag or commit.")
@click.option("--to", "target", type=click.Path(path_type=Path), required=True, help="Folder that is filled.")
@click.option("--stage", type=int, envvar="MEDHA_STAGE", required=True, help="Stage of this pod, from 0.")
@click.option("--stages", type=int, required=True, help="Stages of a lane: spec.parallelism.stream.")
@click.option("--chunk-tokens", type=int, required=True, help="spec.scheduling.maxChunkTokens.")
def main(repository: str, revision: str, target: Path, stage: int, stages: int, chunk_tokens: int) -> None:
    """Fetch the part of a model that one stage of a lane reads."""
    configure_logging("info")
    try:
        fetch(repository, revision, target, stage=stage, stages=stages, chunk_tokens=chunk_tokens)
    except MedhaError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
