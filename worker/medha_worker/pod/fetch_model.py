"""`python -m medha_worker.pod.fetch_model`: the init container that fetches a model of the Hugging Face Hub for one stage.

A checkpoint of several files is fetched in part: configuration and tokenizer, and the files with a tensor that this
stage's ranks read. Everything comes from one commit, even if the branch moves meanwhile.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import click

from medha.errors import CheckpointInvalid, ConfigInvalid, MedhaError
from medha_process.part_process import configure_logging
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.stage_split import split_layers, tensors_of_stage

INDEX = "model.safetensors.index.json"
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.gguf")
"""Formats that ranks do not read, which many repositories hold beside safetensors."""
_WEIGHTS = "*.safetensors"

_log = logging.getLogger("medha.fetch")


def fetch(
    repository: str, revision: str, target: Path, *, stage: int, stages: int, chunk_tokens: int
) -> list[str]:
    """Fetch what the ranks of a stage need into `target`; return the names of the files with weights.

    Raises:
        MedhaError: the repository cannot be fetched, or its model is not supported.
    """
    from huggingface_hub import HfApi, snapshot_download  # takes a second
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        commit = HfApi().model_info(repository, revision=revision).sha
        assert commit is not None
        place = f"{repository} at {commit}"
        _log.info("fetching configuration and tokenizer of %s", place)
        snapshot_download(
            repository, revision=commit, local_dir=target, ignore_patterns=[*_OTHER_WEIGHTS, _WEIGHTS]
        )
        names = needed_files(target, stage=stage, stages=stages, chunk_tokens=chunk_tokens)
        _log.info("stage %d of %d reads %d files with weights", stage, stages, len(names))
        snapshot_download(repository, revision=commit, local_dir=target, allow_patterns=names)
    except (HfHubHTTPError, HFValidationError) as error:
        raise ConfigInvalid(
            f"spec.model.source.huggingFace: {repository} at revision {revision} cannot be fetched ({error}); check both "
            "names, and tokenSecret if it is gated or private"
        ) from error
    missing = [name for name in names if not (target / name).is_file()]
    if missing:
        raise CheckpointInvalid(
            f"{place} has no file {missing[0]}, which {INDEX} names; choose another revision"
        )
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
