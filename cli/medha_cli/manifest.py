"""Reads the `MedhaReplica` of a YAML file, with errors that name the file and the line."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable
from pathlib import Path

import yaml

from medha.api.replica import API_VERSION, KIND, MedhaReplica, parse_replica
from medha.cost.cost_profile import Profile
from medha.errors import ConfigInvalid


class _StrictLoader(yaml.SafeLoader):
    """A safe loader that refuses duplicate keys, of which YAML parsers would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                problem = f"{key.value!r} is given twice in one mapping; keep one"
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_manifest(path: Path) -> MedhaReplica:
    """Return the replica of `path`; relative paths of checkpoints and profile are resolved from the manifest's folder.

    The directory of a checkpoint stands for a manifest that names it and nothing else.

    Raises:
        ConfigInvalid: the file cannot be read, is not YAML, does not hold exactly one document, or is not a valid
            `MedhaReplica`, or names an invalid profile. The text starts with the file, and with the line where YAML
            knows it.
    """
    if (path / "config.json").is_file():
        return replica_of_checkpoint(path)
    documents = read_documents(path)
    if len(documents) != 1:
        raise ConfigInvalid(
            f"{path}: holds {len(documents)} documents, expected one {KIND}; put each replica into its own file"
        )
    try:
        replica = parse_replica(documents[0])
    except ConfigInvalid as error:
        raise ConfigInvalid(f"{path}: {str(error).replace(chr(10), f'{chr(10)}{path}: ')}") from error
    replica = _with_absolute_paths(replica, path.resolve().parent)
    _require_readable_profile(replica)
    return replica


def read_documents(path: Path) -> list[object]:
    """Return every document of a YAML file that is not empty.

    Raises:
        ConfigInvalid: the file cannot be read or is not YAML; the text starts with the file, and with the line where
            YAML knows it.
    """
    if path.is_dir():
        raise ConfigInvalid(
            f"{path} is a directory without config.json; name a file that describes a {KIND} (for the smallest one, see "
            "examples/tiny.yaml), or the directory of a checkpoint"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"{path}: cannot be read: {error}") from error
    try:
        return [document for document in yaml.load_all(text, _StrictLoader) if document is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ConfigInvalid(f"{path}{line}: is not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError) as error:  # a control character; an invalid date
        raise ConfigInvalid(f"{path}: is not YAML: {error}") from error


def replica_of_checkpoint(directory: Path) -> MedhaReplica:
    """Return a replica that serves a checkpoint directory, named as the directory is, with the defaults of a manifest."""
    model = Path(os.path.abspath(directory))
    name = re.sub(r"[^a-z0-9]+", "-", model.name.lower()).strip("-") or "model"
    document = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": name[:253].rstrip("-")},
        "spec": {"model": {"name": model.name or name, "source": {"path": str(model)}}},
    }
    return parse_replica(document)


def model_directory(replica: MedhaReplica) -> Path:
    """Return the directory of the replica's checkpoint.

    Raises:
        ConfigInvalid: there is no checkpoint.
    """
    advice = "correct the path, or make a small random one: medha model init {} --preset tiny"
    return _checkpoint(replica.spec.model.source.path, "spec.model.source", advice)


def draft_directory(replica: MedhaReplica) -> Path | None:
    """Return the directory of the checkpoint of the replica's draft model or prediction head; None if it has none.

    Raises:
        ConfigInvalid: there is no checkpoint.
    """
    speculation, field = replica.spec.scheduling.speculation, "spec.scheduling.speculation"
    field += ".draftModel" if speculation.prediction_head is None else ".predictionHead.source"
    source = speculation.source
    if source is None:
        return None
    return _checkpoint(source.path, field, "correct the path")


def _checkpoint(path: str | None, field: str, advice: str) -> Path:
    if path is None:
        raise ConfigInvalid(
            f"{field}: only a cluster's pods can use this kind of source; here, set `path` to the directory of a "
            "checkpoint on this machine"
        )
    directory = Path(path)
    if not (directory / "config.json").is_file():
        raise ConfigInvalid(
            f"{field}.path: {directory} has no config.json, so it is no checkpoint; {advice.format(directory)}"
        )
    return directory


def _with_absolute_paths(replica: MedhaReplica, folder: Path) -> MedhaReplica:
    model, scheduling = replica.spec.model, replica.spec.scheduling
    source = model.source.model_copy(update={"path": _absolute(model.source.path, folder)})
    speculation, head = scheduling.speculation, scheduling.speculation.prediction_head
    if speculation.source is not None:
        path = _absolute(speculation.source.path, folder)
        draft = speculation.source.model_copy(update={"path": path})
        if head is None:
            speculation = speculation.model_copy(update={"draft_model": draft})
        else:
            head = head.model_copy(update={"source": draft})
            speculation = speculation.model_copy(update={"prediction_head": head})
    absolute = {"profile": _absolute(scheduling.profile, folder), "speculation": speculation}
    spec = replica.spec.model_copy(
        update={
            "model": model.model_copy(update={"source": source}),
            "scheduling": scheduling.model_copy(update=absolute),
        }
    )
    return replica.model_copy(update={"spec": spec})


def _absolute(path: str | None, folder: Path) -> str | None:
    return None if path is None else str((folder / Path(path).expanduser()).resolve())


def _require_readable_profile(replica: MedhaReplica) -> None:
    """Check the profile before any process is started, not after the weights are loaded."""
    path = replica.spec.scheduling.profile
    if path is None:
        return
    try:
        Profile.from_json(Path(path).read_bytes(), f"spec.scheduling.profile: {path}")
    except OSError as error:
        raise ConfigInvalid(
            f"spec.scheduling.profile: {path} cannot be read ({error.strerror}); measure one with `medha profile`, or "
            "leave the field out"
        ) from error
