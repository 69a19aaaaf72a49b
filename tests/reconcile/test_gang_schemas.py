"""What Kueue and Volcano are told fits schemas made from their documentation: everything required, nothing unknown.

Neither can be run here. The schemas hold what their users write and they read, so that a misspelt name is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from medha.api import MedhaReplicaSpec
from medha_operator.render import Owner, gang_object, pod_templates
from medha_operator.settings import OperatorSettings

OWNER = Owner("r", "default", "u")
SETTINGS = OperatorSettings(gang_apis=("core", "volcano"))

Name = Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
Count = Annotated[str, Field(pattern=r"^[1-9][0-9]*$")]


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel)


class KueueLabels(_Schema):
    """https://kueue.sigs.k8s.io/docs/reference/labels-and-annotations/: labels of plain pods that their users write."""

    queue: Name = Field(alias="kueue.x-k8s.io/queue-name")
    group: Name = Field(alias="kueue.x-k8s.io/pod-group-name")
    priority: Name = Field("unset", alias="kueue.x-k8s.io/priority-class")


class KueueAnnotations(_Schema):
    """The same page: annotations of plain pods that their users write."""

    count: Count = Field(alias="kueue.x-k8s.io/pod-group-total-count")
    serving: Literal["true"] = Field(alias="kueue.x-k8s.io/pod-group-serving")
    fast: Literal["true"] = Field("true", alias="kueue.x-k8s.io/pod-group-fast-admission")


class VolcanoSpec(_Schema):
    """https://volcano.sh/en/docs/podgroup/: the fields of a PodGroup's spec."""

    min_member: Annotated[int, Field(ge=1)]
    min_task_member: dict[str, int] = {}
    min_resources: dict[str, str] = {}
    queue: Name = "default"
    priority_class_name: Name = "unset"


class VolcanoPodGroup(_Schema):
    api_version: Literal["scheduling.volcano.sh/v1beta1"]
    kind: Literal["PodGroup"]
    metadata: dict[str, Any]
    spec: VolcanoSpec


class VolcanoAnnotations(_Schema):
    """The annotations by which Volcano's scheduler finds the PodGroup of a pod."""

    kubernetes: Name = Field(alias="scheduling.k8s.io/group-name")
    volcano: Name = Field(alias="scheduling.volcano.sh/group-name")


def spec(gang: str, **placement: Any) -> MedhaReplicaSpec:
    return MedhaReplicaSpec.model_validate(
        {
            "model": {"name": "m", "source": {"path": "x"}},
            "parallelism": {"tensor": 2, "stream": 2, "kv": 3},
            "placement": {"gang": gang} | placement,
        }
    )


def metadata(wanted: MedhaReplicaSpec) -> list[dict[str, Any]]:
    """Of the pods of each lane."""
    return [one["metadata"] for one in pod_templates(OWNER, wanted, "abc", SETTINGS)]


def of(provider: str, names: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in names.items() if provider in name.partition("/")[0]}


def test_kueue_is_told_what_its_documentation_asks_for_and_nothing_else() -> None:
    for one in metadata(spec("kueue", queue="research")):
        labels = KueueLabels.model_validate(of("kueue.x-k8s.io", one["labels"]))
        annotations = KueueAnnotations.model_validate(of("kueue.x-k8s.io", one["annotations"]))
        assert (labels.queue, labels.group, annotations.count) == ("research", "r-abc", "6")


@pytest.mark.parametrize("placement", [{}, {"queue": "research"}])
def test_volcano_is_told_what_its_documentation_asks_for_and_nothing_else(placement: dict[str, str]) -> None:
    wanted = spec("volcano", **placement)
    group = VolcanoPodGroup.model_validate(gang_object(OWNER, wanted, "abc"))
    assert group.spec.min_member == 6
    assert group.spec.queue == placement.get("queue", "default")
    for one in metadata(wanted):
        annotations = VolcanoAnnotations.model_validate(of("scheduling.", one["annotations"]))
        assert {annotations.kubernetes, annotations.volcano} == {group.metadata["name"]}


@pytest.mark.parametrize("misspelt", ["minMembers", "queueName"])
def test_a_field_that_volcano_does_not_know_is_refused(misspelt: str) -> None:
    with pytest.raises(ValidationError, match=misspelt):
        VolcanoSpec.model_validate({"minMember": 6, misspelt: 6})


def test_a_label_that_kueue_needs_must_be_there() -> None:
    (labels, *_) = (of("kueue.x-k8s.io", one["labels"]) for one in metadata(spec("kueue", queue="research")))
    del labels["kueue.x-k8s.io/pod-group-name"]
    with pytest.raises(ValidationError, match="pod-group-name"):
        KueueLabels.model_validate(labels)
