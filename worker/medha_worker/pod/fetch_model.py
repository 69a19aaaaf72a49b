"""`python -m medha_worker.pod.fetch_model`: the init container that fetches a model of the Hugging Face Hub for one stage.

A checkpoint of several files is fetched in part: configuration and tokenizer, and the files with a tensor that this
stage's ranks read. Everything comes from one commit, even if the branch moves meanwhile.

Pods may share the folder (`fetched_files`): each file is fetched once, and compared with the Hub's digest. If a commit is
asked for and all of it is there, the Hub is not asked.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import click

from medha.api.replica import MedhaReplicaSpec
from medha.errors import CheckpointInvalid, ConfigInvalid, MedhaError
from medha.wire.bundle_digest import BUNDLE_FILES
from medha_process.part_process import configure_logging
from medha_worker.checkpoints.head_checkpoint import head_config
from medha_worker.checkpoints.tokenizer_files import TOKENIZER_FILES
from medha_worker.model.model_config import MODELOPT_CONFIG, ModelConfig
from medha_worker.model.stage_split import (
    EMBEDDING,
    KV_SCALES,
    guessing_layers,
    split_layers,
    tensors_of_stage,
    text_names,
)
from medha_worker.pod.fetched_files import Digest, FetchedFiles, HubFile, Listing
from medha_worker.pod.pod_parts import read_replica
from medha_worker.pod.termination_log import TERMINATION_LOG, leave_reason

INDEX, _CONFIG, _SINGLE = "model.safetensors.index.json", "config.json", "model.safetensors"
SMALL_FILES = frozenset((_CONFIG, MODELOPT_CONFIG, INDEX, KV_SCALES, *BUNDLE_FILES, *TOKENIZER_FILES))
"""Files that are read beside the weights, if a repository has them: by ranks, the controller and routers, or to refuse it."""
_FIELD = "spec.model.source.huggingFace"
_AT_ONCE = 8
"""Files that a pod downloads at the same time: one connection rarely fills a network."""
_ATTEMPTS = 2
_SHOWN_PERCENT = 5
_SHOWN_BYTES = 2**20
"""Less than this is there at once, and needs no lines about progress."""

_log = logging.getLogger("medha.fetch")


def fetch(spec: MedhaReplicaSpec, stage: int, target: Path) -> list[str]:
    """Fetch what the ranks of a stage need into `target`; return the names of the files with weights.

    Raises:
        MedhaError: the repository cannot be fetched, the volume cannot hold it, or its model is not supported.
    """
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError  # takes a second

    source, stages = spec.model.source.hugging_face, spec.parallelism.stream
    if source is None:
        raise ConfigInvalid(
            f"{_FIELD} is not set, so that nothing can be fetched; set it, or remove this container"
        )
    if not 0 <= stage < stages:
        raise ConfigInvalid(
            f"MEDHA_STAGE={stage}: spec.parallelism.stream makes {stages} stages, counted from 0"
        )
    repository, revision = source.repository, source.revision
    faults: tuple[type[Exception], ...] = (*_no_answer(), OSError)
    files = FetchedFiles(target)
    try:
        files.prepare()
        listing = _listing(repository, revision, files)
        for name in sorted(SMALL_FILES - listing.files.keys()):
            files.remove(name)  # of an earlier commit of a branch
        _complete(repository, files, listing, sorted(SMALL_FILES & listing.files.keys()))
        config = ModelConfig.from_directory(target, spec.model.max_model_len, spec.model.rope_scaling)
        # An EAGLE-3 head on the last stage embeds tokens as the model does.
        embeds = spec.scheduling.speculation.eagle3 and stage == stages - 1
        names = needed_files(target, *layers_read(target, spec, stage, config), embeds=embeds)
        _log.info("stage %d of %d reads %d files with weights", stage, stages, len(names))
        _complete(repository, files, listing, names)
        _log.info("all of them are there, as the Hub has them")
    except (HfHubHTTPError, HFValidationError) as error:
        raise ConfigInvalid(
            f"{_FIELD}: {repository} at revision {revision} cannot be fetched ({error}); check both names, and "
            "tokenSecret if it is gated or private"
        ) from error
    except faults as error:
        raise ConfigInvalid(
            volume_fault(error, target)
            or f"{_FIELD}: {repository} at revision {revision} cannot be fetched, because the Hub does not give it "
            f"({error}); check the pods' network, and HF_ENDPOINT and HF_HUB_OFFLINE if they are set"
        ) from error
    return names


def layers_read(
    directory: Path, spec: MedhaReplicaSpec, stage: int, config: ModelConfig
) -> tuple[range, ModelConfig]:
    """Return the layers that the ranks of a stage read, with an MTP head if it is asked for; and the model with them.

    Raises:
        ConfigInvalid: the checkpoint lacks the head that the spec asks for.
    """
    stages = spec.parallelism.stream
    layers = split_layers(config, stages, spec.scheduling.max_chunk_tokens, guessing_layers(spec))[stage]
    head = spec.scheduling.speculation.prediction_head
    if head is None or head.kind != "mtp":
        return layers, config
    headed = head_config(directory, config)
    return range(layers.start, headed.num_layers) if stage == stages - 1 else layers, headed


def needed_files(directory: Path, layers: range, config: ModelConfig, *, embeds: bool = False) -> list[str]:
    """Return the names of the files with what the ranks of a stage with `layers` read, by the index in `directory`.

    `embeds` says that they read the embedding on any stage.

    Raises:
        CheckpointInvalid: the index cannot be read, names a layer without a number, or lacks the embedding.
    """
    index = directory / INDEX
    if not index.is_file():
        return [_SINGLE]
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        file_of = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointInvalid(
            f"{index}: has no readable weight_map ({error!r}); fetch it again, or choose another checkpoint"
        ) from error
    stored = text_names(file_of, config)
    names = tensors_of_stage(stored, config, layers)
    if embeds:
        if EMBEDDING not in stored:
            raise CheckpointInvalid(
                f"{index}: weight_map names no {EMBEDDING}, which a draft head needs; fetch it again, or choose another checkpoint"
            )
        names.add(EMBEDDING)
    return sorted({file_of[stored[name]] for name in names})


class Progress:
    """Counts the bytes that have arrived, and reports each `_SHOWN_PERCENT` of the whole once."""

    def __init__(self, total_bytes: int, report: Callable[[str], None]) -> None:
        self._total_bytes, self._report = total_bytes, report
        self._arrived_bytes = 0
        self._lock = Lock()  # files arrive in several threads

    def add(self, count_bytes: float) -> None:
        with self._lock:
            before = self._step()
            self._arrived_bytes += int(count_bytes)
            if self._step() > before:
                self._report(
                    f"fetched {self._step() * _SHOWN_PERCENT} %: {_mebibytes(self._arrived_bytes)} of "
                    f"{_mebibytes(self._total_bytes)}"
                )

    def _step(self) -> int:
        percent = 100 * self._arrived_bytes // self._total_bytes if self._total_bytes else 0
        return min(percent, 100) // _SHOWN_PERCENT


def _listing(repository: str, revision: str, files: FetchedFiles) -> Listing:
    """Return the files of a revision: as kept for a commit, which cannot change, and as the Hub has them for others.

    If the Hub does not answer, what the revision named before counts.
    """
    from huggingface_hub.errors import HfHubHTTPError

    kept = files.listing()
    if kept is not None and kept.commit == revision:
        return kept
    try:
        asked = _asked(repository, revision)
    except _no_answer() as error:
        if isinstance(error, HfHubHTTPError) or kept is None or kept.revision != revision:
            raise
        _log.warning(
            "the Hub does not answer (%s); going on with commit %s, which revision %s named before",
            error,
            kept.commit,
            revision,
        )
        return kept
    files.keep_listing(asked)
    return asked


def _no_answer() -> tuple[type[Exception], ...]:
    """Return the classes of errors that say that the Hub cannot be reached, or must not be asked."""
    from huggingface_hub import errors

    # The library imports it from the HTTP client that it uses; releases differ.
    return (errors.HTTPError, ConnectionError)  # type: ignore[attr-defined]


def _asked(repository: str, revision: str) -> Listing:
    """Ask the Hub for the commit of a revision, and its files."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(repository, revision=revision, files_metadata=True)
    assert info.sha is not None, "the Hub names a commit for every revision"

    def digest(file: Any) -> Digest | None:
        if file.lfs is not None:
            return Digest(kind="sha256", value=file.lfs.sha256)
        return Digest(kind="git-sha1", value=file.blob_id) if file.blob_id else None

    files = {
        file.rfilename: HubFile(size_bytes=file.size, digest=digest(file)) for file in info.siblings or ()
    }
    return Listing(revision=revision, commit=info.sha, files=files)


def _complete(repository: str, files: FetchedFiles, listing: Listing, names: Sequence[str]) -> None:
    """Fetch the named files that are missing, or are other than those of the Hub."""
    for name in names:
        if Path(name).name != name or name in ("", ".."):
            raise CheckpointInvalid(
                f"{repository} at {listing.commit}: weights must be in the repository's own folder, but its index names "
                f"{name}; choose another repository or revision"
            )
        if name not in listing.files:
            whose = "whose index names it" if name != _SINGLE else "and no index of several files"
            raise CheckpointInvalid(
                f"{repository} at {listing.commit} has no file {name}, {whose}; choose a repository or a revision with "
                "complete safetensors files"
            )
    missing = [name for name in names if not files.is_proven(name, listing.files[name])]
    if not missing:
        return
    total_bytes = sum(listing.files[name].size_bytes or 0 for name in missing)
    _require_space(files, total_bytes)
    _log.info(
        "fetching %d files (%s) of %s at %s: %s",
        len(missing),
        _mebibytes(total_bytes),
        repository,
        listing.commit,
        ", ".join(missing),
    )
    progress = Progress(total_bytes, _log.info if total_bytes >= _SHOWN_BYTES else _log.debug)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        futures = [pool.submit(_complete_one, repository, files, listing, name, progress) for name in missing]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _complete_one(
    repository: str, files: FetchedFiles, listing: Listing, name: str, progress: Progress
) -> None:
    """Fetch a file, unless another pod has done so by now, and compare it."""
    from huggingface_hub import hf_hub_download

    wanted, difference = listing.files[name], None
    with files.held(name):
        if files.has(name, wanted):
            return
        for _ in range(_ATTEMPTS):
            try:
                hf_hub_download(
                    repository,
                    name,
                    revision=listing.commit,
                    local_dir=files.folder,
                    tqdm_class=_bar_of(progress),
                )
            except RuntimeError as error:  # hf_xet has no class of its own for most faults
                raise OSError(f"{name}: {error}") from error
            difference = files.compare(name, wanted)
            if difference is None:
                return
            _log.warning("%s was damaged on the way: %s", name, difference)
    raise CheckpointInvalid(
        f"{name} was damaged on the way {_ATTEMPTS} times: {difference}; it is fetched again when the pod tries again. "
        "Check the network, and the proxy or mirror if there is one"
    )


def _bar_of(progress: Progress) -> type[Any]:
    """Return a class in the place of the library's progress bars, which counts for `progress` and draws nothing."""

    class Bar:
        def __init__(self, *_: Any, initial: int = 0, **__: Any) -> None:
            progress.add(initial)  # it may have arrived in part

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            """Keep what was counted."""

        def close(self) -> None:
            """Keep what was counted."""

        def update(self, count_bytes: float | None = 1) -> None:
            progress.add(count_bytes or 0)

        def update_transfer(self, _count_bytes: float | None = 1) -> None:
            """Count no compressed bytes, since the same ones are counted when they are written."""

        def set_postfix_str(self, *_: object, **__: object) -> None:
            """Show no rate."""

        set_transfer_postfix_str = set_postfix_str

    return Bar


def _require_space(files: FetchedFiles, wanted_bytes: int) -> None:
    """Raise an error if the volume has too little space for what is missing, before hours of fetching."""
    # Files that arrive at other pods are among those that are missing here.
    free_bytes = shutil.disk_usage(files.folder).free + files.arriving_bytes()
    if wanted_bytes > free_bytes:
        raise OSError(
            errno.ENOSPC, f"{_mebibytes(wanted_bytes)} are missing, and {_mebibytes(free_bytes)} are free"
        )


def volume_fault(error: Exception, target: Path) -> str | None:
    """Say what is wrong with the volume of `target`, and who can fix it; None if it is something else."""
    code = error.errno if isinstance(error, OSError) else None
    if code in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"{_FIELD}: the volume of {target} is full ({error}); give it more space: the volume of huggingFace.cache, or "
            "without a cache the node's disk"
        )
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return (
            f"{_FIELD}.cache: {target} cannot be written by uid {os.geteuid()} ({error}); make the volume writable for "
            "it: a claim by the pods' fsGroup, a directory of nodes by `chown -R`"
        )
    if code in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
        return (
            f"{_FIELD}.cache: the volume of {target} has no file locks ({error}), which pods need to share it; choose "
            "another volume"
        )
    named = getattr(error, "filename", None)
    is_there = isinstance(named, str | Path) and Path(named).is_relative_to(target)
    if is_there or code in (errno.EIO, errno.ESTALE):
        return f"{_FIELD}: the volume of {target} does not answer as expected ({error}); check it, and who else changes it"
    return None


def _mebibytes(count_bytes: int) -> str:
    return f"{count_bytes / 2**20:.1f} MiB"


@click.command()
@click.option("--replica", "document", type=click.Path(path_type=Path), required=True, help="replica.json.")
@click.option("--to", "target", type=click.Path(path_type=Path), required=True, help="Folder that is filled.")
@click.option("--stage", type=int, envvar="MEDHA_STAGE", required=True, help="Stage of this pod, from 0.")
@click.option("--termination-log", type=click.Path(path_type=Path), default=TERMINATION_LOG)
def main(document: Path, target: Path, stage: int, termination_log: Path) -> None:
    """Fetch the part of a model that one stage of a lane reads."""
    configure_logging("warning")  # of libraries, of which one logs each request
    _log.setLevel(logging.INFO)
    try:
        fetch(read_replica(document).spec, stage, target)
    except MedhaError as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"  # the library's errors have several lines
        leave_reason(termination_log, reason)
        _log.error("%s", reason)
        sys.exit(error.exit_status)


if __name__ == "__main__":
    main()
