"""Generate CustomResourceDefinitions from the pydantic models.

`python -m medha_operator.crds crds` (`make gen`) runs it. A model's JSON schema is turned into a structural
schema of `apiextensions.k8s.io/v1`: references are inlined, an optional field may be left out but is never
null, and what Kubernetes spells differently is translated. Each field's description ends with how a change is
applied, as `kubectl explain` shows it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

import medha
from medha.api.deployment import MedhaDeploymentSpec
from medha.api.replica import MedhaReplicaSpec
from medha_operator.status_fields import DeploymentStatus, ReplicaStatus

Schema = dict[str, Any]

GROUP = "medha.dev"
VERSION = "v1alpha1"

NAME_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
LONGEST_REPLICA_NAME = 46
"""Longest name of a replica. StatefulSets append `-l255`, and pods are labelled with their names and a
hash of ten digits, with 63 characters at most."""
LONGEST_DEPLOYMENT_NAME = LONGEST_REPLICA_NAME - len("-9999")

APPLIED = {
    "live": "A change reaches the running replica.",
    "epoch": (
        "A change reaches the running replica by a new epoch, which begins once no request is open, or after a minute: "
        "requests that are open then are computed again, and cached prefixes are lost."
    ),
    "restart": "A change replaces the replica's pods.",
}
_KEPT = (
    "type", "enum", "default", "minimum", "maximum", "minLength", "maxLength", "pattern", "minItems", "maxItems",
    "format", "x-kubernetes-validations", "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
    "x-kubernetes-int-or-string",
)  # fmt: skip


def structural(model: type[BaseModel]) -> Schema:
    """Return the structural schema of `model`."""
    schema = model.model_json_schema(by_alias=True)
    return _node(schema, schema.get("$defs", {}))


def _node(node: Schema, definitions: dict[str, Schema]) -> Schema:
    node = _resolved(node, definitions)
    result: Schema = {}
    description = " ".join(node.get("description", "").split())
    applied = APPLIED.get(node.get("x-apply", ""), "")
    if description or applied:
        result["description"] = f"{description} {applied}".strip()
    for key in _KEPT:
        if key in node:
            result[key] = _without_nulls(node[key]) if key == "default" else node[key]
    if node.get("x-kubernetes-int-or-string"):
        return _int_or_string(node, result)
    if "const" in node:
        result["enum"] = [node["const"]]
    for limit, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if limit in node:
            result[bound], result[limit] = node[limit], True
    if node.get("type") == "number":
        _bound_by_rules(result)
    if node.get("type") == "integer":
        result["format"] = "int64" if node.get("maximum", 0) > 2**31 - 1 else "int32"
    if node.get("type") == "array":
        result["items"] = _node(node["items"], definitions)
    if node.get("type") == "object":
        result |= _members(node, definitions)
    return result


def _int_or_string(node: Schema, result: Schema) -> Schema:
    result.pop("type", None)
    for choice in node.get("anyOf", ()):  # patterns apply to strings alone, bounds to numbers alone
        result |= {key: choice[key] for key in ("pattern", "minimum", "maximum") if key in choice}
    if "pattern" in result:  # a bare number is valid, too
        result["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    return result


def _members(node: Schema, definitions: dict[str, Schema]) -> Schema:
    """Return what the schema of an object says of its fields."""
    if "properties" in node:
        fields = {name: _node(entry, definitions) for name, entry in node["properties"].items()}
        return {"properties": fields} | {key: node[key] for key in ("required",) if node.get(key)}
    if isinstance(node.get("additionalProperties"), dict):
        values = _node(node["additionalProperties"], definitions)
        return {"additionalProperties": values} | {
            key: node[key] for key in ("maxProperties",) if key in node
        }
    return {"x-kubernetes-preserve-unknown-fields": True}


def _bound_by_rules(result: Schema) -> None:
    """Express bounds that are not whole numbers as validation rules.

    The API server rounds such a bound towards 0 if the value is written as a whole number. With a maximum of
    0.98, its message about 1 would name 0 as the maximum; with a minimum of 0.01, it would accept 0.
    """
    for bound, exclusive, words, signs in (
        ("minimum", "exclusiveMinimum", ("at least", "more than"), (">=", ">")),
        ("maximum", "exclusiveMaximum", ("at most", "less than"), ("<=", "<")),
    ):
        limit = result.get(bound)
        if limit is not None and limit != int(limit):
            del result[bound]
            which = bool(result.pop(exclusive, False))
            rule = {"rule": f"self {signs[which]} {limit}", "message": f"must be {words[which]} {limit}"}
            result["x-kubernetes-validations"] = [*result.get("x-kubernetes-validations", ()), rule]


def _resolved(node: Schema, definitions: dict[str, Schema]) -> Schema:
    """Return `node` with its reference followed and "or null" removed; its own keys take precedence."""
    choices = [choice for choice in node.get("anyOf", []) if choice.get("type") != "null"]
    if len(choices) == 1:
        own = {key: value for key, value in node.items() if key not in ("anyOf", "default")}
        if node.get("default") is not None:
            own["default"] = node["default"]
        node = choices[0] | own
    if "$ref" in node:
        target = definitions[node["$ref"].rpartition("/")[2]]
        rules = [*target.get("x-kubernetes-validations", []), *node.get("x-kubernetes-validations", [])]
        node = target | {key: value for key, value in node.items() if key != "$ref"}
        if rules:
            node["x-kubernetes-validations"] = rules
    return node


def _without_nulls(value: Any) -> Any:
    """Return a default as Kubernetes represents it, without values that are not set."""
    if isinstance(value, dict):
        return {name: _without_nulls(entry) for name, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _changeable(node: Schema) -> Schema:
    """Remove the rules that forbid a change from `node`, and return it.

    To change a field that is fixed for a replica's life, a deployment replaces the replica.
    """
    for name, value in list(node.items()):
        if name == "x-kubernetes-validations":
            node[name] = [entry for entry in value if "oldSelf" not in entry["rule"]]
            if not node[name]:
                del node[name]
        elif isinstance(value, dict):
            _changeable(value)
    return node


def _column(name: str, path: str, kind: str = "string", *, wide: bool = False, description: str) -> Schema:
    column: Schema = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return column | ({"priority": 1} if wide else {})


_READY = _column(
    "Ready", '.status.conditions[?(@.type=="Ready")].status', description="Status of the condition Ready."
)
_REASON = _column(
    "Reason", '.status.conditions[?(@.type=="Ready")].reason', description="Reason of the condition Ready."
)
_AGE = _column("Age", ".metadata.creationTimestamp", "date", description="Time since the creation.")


def replica_crd() -> Schema:
    return _crd(
        kind="MedhaReplica",
        longest_name=LONGEST_REPLICA_NAME,
        plural="medhareplicas",
        short="mr",
        description="One model, served by one grid of ranks under one controller.",
        spec=structural(MedhaReplicaSpec),
        status=structural(ReplicaStatus),
        subresources={"status": {}},
        columns=[
            _READY,
            _column("Shape", ".status.shape", description="Tensor x stream x KV ranks."),
            _column(
                "GPUs", ".status.accelerators", "integer", description="Number of devices that it requests."
            ),
            _column("Pods", ".status.readyText", description="Ready pods, out of all pods."),
            _REASON,
            _column("Model", ".spec.model.name", wide=True, description="Name that clients request."),
            _column(
                "Revision",
                ".status.revision",
                wide=True,
                description="Revision: hash of the fields whose change replaces its pods.",
            ),
            _AGE,
        ],
    )


def deployment_crd() -> Schema:
    return _crd(
        kind="MedhaDeployment",
        longest_name=LONGEST_DEPLOYMENT_NAME,
        plural="medhadeployments",
        short="md",
        description="Identical replicas behind one router, changed by whole replicas.",
        spec=_changeable(structural(MedhaDeploymentSpec)),
        status=structural(DeploymentStatus),
        subresources={
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        columns=[
            _READY,
            _column("Desired", ".spec.replicas", "integer", description="Desired number of replicas."),
            _column(
                "Updated",
                ".status.updatedReplicas",
                "integer",
                description="Replicas at the newest revision.",
            ),
            _column(
                "Available",
                ".status.availableReplicas",
                "integer",
                description="Replicas that have been ready for minReadySeconds.",
            ),
            _REASON,
            _column(
                "Model",
                ".spec.template.spec.model.name",
                wide=True,
                description="Name of the model that they serve.",
            ),
            _AGE,
        ],
    )


def name_problem(longest: int) -> str:
    """Return the message about a name that pods and Services cannot have."""
    return (
        f"metadata.name must begin with a letter, end with a letter or digit, hold lower-case letters, digits and `-` "
        f"alone, and be no longer than {longest}: pods and a Service are called after it"
    )


def _crd(
    *,
    kind: str,
    plural: str,
    short: str,
    description: str,
    spec: Schema,
    status: Schema,
    subresources: Schema,
    columns: list[Schema],
    longest_name: int,
) -> Schema:
    rule = f"self.metadata.name.size() <= {longest_name} && self.metadata.name.matches('{NAME_PATTERN}')"
    schema = {
        "type": "object",
        "description": description,
        "x-kubernetes-validations": [{"rule": rule, "message": name_problem(longest_name)}],
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": status,
        },
    }
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": subresources,
        "additionalPrinterColumns": columns,
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{GROUP}",
            "labels": {
                "app.kubernetes.io/name": "medha",
                "app.kubernetes.io/part-of": "medha",
                "app.kubernetes.io/version": medha.__version__,
            },
        },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": [short],
                "categories": ["all", "medha"],
            },
            "versions": [version],
        },
    }


def files() -> dict[str, str]:
    """Return the expected content of each file in `crds/`, by file name."""
    head = "# Written by `make gen` from core/medha/api; change it there.\n"
    crds = (replica_crd(), deployment_crd())
    return {
        f"{crd['spec']['names']['plural']}.yaml": head + yaml.safe_dump(crd, sort_keys=False, width=118)
        for crd in crds
    }


if __name__ == "__main__":
    for file_name, text in files().items():
        target = Path(sys.argv[1]) / file_name
        target.write_text(text, encoding="utf-8")
        sys.stdout.write(f"wrote {target}\n")
