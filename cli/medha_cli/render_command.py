"""`medha render FILE`: prints the objects that the operator would apply for a manifest, by the operator's own plan."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import yaml
from pydantic import BaseModel, ValidationError

from medha.api.deployment import parse_deployment
from medha.api.replica import parse_replica
from medha.errors import ConfigInvalid
from medha_cli.manifest import read_documents
from medha_operator.crds import (
    LONGEST_DEPLOYMENT_NAME,
    LONGEST_REPLICA_NAME,
    NAME_PATTERN,
    name_problem,
)
from medha_operator.deployment.observed_deployment import ObservedDeployment
from medha_operator.deployment.plan_deployment import plan_deployment
from medha_operator.kube.kinds import Manifest
from medha_operator.operator_settings import OperatorSettings
from medha_operator.replica.actions import Action, Apply, SetStatus
from medha_operator.replica.observed import Observed
from medha_operator.replica.plan import plan
from medha_operator.status_fields import DeploymentStatus, ReplicaStatus

_NO_UID = "00000000-0000-0000-0000-000000000000"
_NAMESPACE_PATTERN = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"


@click.command("render")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(["yaml", "json"]), default="yaml", show_default=True)
@click.option(
    "-n", "--namespace", help="Namespace of manifests that name none.", default="default", show_default=True
)
@click.option("--uid", default=_NO_UID, help="UID of the resource, which the cluster assigns.", metavar="UID")
@click.option(
    "--settings",
    "settings_file",
    type=click.Path(path_type=Path),
    help="File of the operator's settings (images, gang schedulers), as in its ConfigMap. Default: those of this release.",
)
def command(file: Path, form: str, namespace: str, uid: str, settings_file: Path | None) -> None:
    """Print the Kubernetes objects that a manifest becomes.

    FILE holds one or more MedhaReplicas and MedhaDeployments. The output is what the operator applies to an empty
    namespace, in that order; for a deployment it includes the objects of its replicas. The Secret of a replica's keys is
    omitted, because it is made once, from random bytes.

    \b
    Example:
      medha render examples/tiny-replica.yaml | kubectl diff -f -
    """
    settings = _settings(settings_file)
    documents = read_documents(file)
    if not documents:
        raise ConfigInvalid(f"{file}: holds no document, expected a MedhaReplica or a MedhaDeployment")
    manifests = []
    for document in documents:
        try:
            manifests += list(rendered(document, namespace, uid, settings))
        except ConfigInvalid as error:
            raise ConfigInvalid(f"{file}: {str(error).replace(chr(10), f'{chr(10)}{file}: ')}") from error
    if form == "json":
        listed = {"apiVersion": "v1", "kind": "List", "items": manifests}
        sys.stdout.write(json.dumps(listed, indent=1) + "\n")
    else:
        yaml.dump_all(manifests, sys.stdout, Dumper=_Dumper, sort_keys=False, width=118, explicit_start=True)


def rendered(document: object, namespace: str, uid: str, settings: OperatorSettings) -> Iterator[Manifest]:
    """Yield what the operator applies for one manifest, in its order.

    Raises:
        ConfigInvalid: the manifest is not one of ours, or names something that cannot be served.
    """
    if not isinstance(document, dict):
        raise ConfigInvalid(
            f"expected a mapping with a kind, MedhaReplica or MedhaDeployment, found {type(document).__name__}"
        )
    kind = document.get("kind")
    if kind == "MedhaReplica":
        spec = parse_replica(document).spec
        created = _created(document, spec, namespace, uid, LONGEST_REPLICA_NAME)
        yield from _replica_objects(created, settings)
    elif kind == "MedhaDeployment":
        wanted = parse_deployment(document).spec
        created = _created(document, wanted, namespace, uid, LONGEST_DEPLOYMENT_NAME)
        observed = ObservedDeployment(**created, status=DeploymentStatus())
        for manifest in _applied(plan_deployment(observed, 0.0, settings).actions):
            yield manifest
            if manifest["kind"] == "MedhaReplica":
                # Its own UID is unknown, too.
                child = created | {"name": manifest["metadata"]["name"], "spec": manifest["spec"]}
                yield from _replica_objects(child, settings)
    else:
        raise ConfigInvalid(
            f"kind: {kind!r} is neither MedhaReplica nor MedhaDeployment; remove that document"
        )


def _created(document: Any, spec: BaseModel, namespace: str, uid: str, longest: int) -> dict[str, Any]:
    """Return the observed fields, except the status, of a resource that was just created, with every default."""
    metadata = document["metadata"]
    name = metadata["name"]
    if len(name) > longest or re.fullmatch(NAME_PATTERN, name) is None:
        raise ConfigInvalid(f"{name_problem(longest)} (found {name!r})")
    named = metadata.get("namespace", namespace)
    if len(named) > 63 or re.fullmatch(_NAMESPACE_PATTERN, named) is None:
        where = "metadata.namespace" if "namespace" in metadata else "--namespace"
        raise ConfigInvalid(
            f"{where} is {named!r}; it must hold lower-case letters, digits and `-` alone, begin and end with a letter or "
            "digit, and be no longer than 63"
        )
    return {
        "name": name,
        "namespace": named,
        "uid": uid,
        "generation": 1,
        "resource_version": "1",
        "spec": spec.model_dump(mode="json", by_alias=True, exclude_none=True),
    }


def _replica_objects(created: dict[str, Any], settings: OperatorSettings) -> Iterator[Manifest]:
    return _applied(plan(Observed(**created, status=ReplicaStatus()), 0.0, settings).actions)


def _applied(actions: tuple[Action, ...]) -> Iterator[Manifest]:
    for action in actions:
        if isinstance(action, Apply):
            yield action.manifest
        elif isinstance(action, SetStatus):
            for condition in action.status.conditions:
                if condition.type == "Accepted" and condition.status == "False":
                    raise ConfigInvalid(f"{condition.reason}: {condition.message}")


def _settings(file: Path | None) -> OperatorSettings:
    if file is None:
        return OperatorSettings()
    try:
        return OperatorSettings.model_validate_json(file.read_bytes())
    except OSError as error:
        raise ConfigInvalid(f"--settings: {file} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        wrong = (
            f"--settings: {file}: {'.'.join(map(str, one['loc'])) or 'the file'}: {one['msg']}"
            for one in error.errors()
        )
        raise ConfigInvalid("\n".join(wrong)) from error


class _Dumper(yaml.SafeDumper):
    """Writes multi-line texts as blocks, and no references between documents."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 (the library's signature)
        return True

    def represent_text(self, text: str) -> yaml.Node:
        style = "|" if "\n" in text else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)
