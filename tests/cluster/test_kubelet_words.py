"""What a real kubelet waits for is told with the field that names it: a router, a token, a folder that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cluster.api import Api, condition, eventually
from cluster.conftest import HELLO_IMAGE
from cluster.definitions import define
from cluster.nodes import Cluster
from cluster.operator_process import limited_kubeconfig, operator
from medha_operator.kube.kinds import REPLICA
from medha_operator.operator_settings import OperatorSettings

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

HUB = {"huggingFace": {"repository": "a/b", "tokenSecret": {"name": "hf-tokn"}}}
WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "router": ({"routerRef": {"name": "frnt"}}, "RouterNotFound", "correct spec.routerRef.name"),
    "token": (
        {"model": {"name": "m", "source": HUB}},
        "SecretNotFound",
        "Secret hf-tokn is not in namespace default: create it, or correct spec.model.source.huggingFace.tokenSecret.name",
    ),
    "runtime": (
        {"resources": {"accelerator": "none", "runtimeClassName": "nvdia"}},
        "RuntimeClassNotFound",
        'RuntimeClass "nvdia" not found: create it, or correct spec.resources.runtimeClassName',
    ),
    "folder": (
        {"model": {"name": "m", "source": {"hostPath": {"path": "/missing"}}}},
        "VolumeUnavailable",
        "/missing is not a directory: spec.model.source.hostPath.path must be a directory of node node-1",
    ),
}


@pytest.fixture(scope="module")
def api(node: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    define(node.plane)
    kubeconfig = limited_kubeconfig(node.plane, OperatorSettings(lease_namespace="default"))
    with operator(tmp_path_factory.mktemp("operator"), kubeconfig), Api(node.plane) as client:
        yield client


@pytest.mark.parametrize("name", WRONG)
def test_what_a_kubelet_misses_is_reported_with_the_field_that_names_it(api: Api, name: str) -> None:
    change, reason, words = WRONG[name]
    spec = {
        "model": {"name": "m", "source": {"path": "/"}},
        "resources": {"accelerator": "none"},
        "image": HELLO_IMAGE,
    }
    api.apply(
        {
            "apiVersion": "medha.dev/v1alpha1",
            "kind": "MedhaReplica",
            "metadata": {"name": name, "namespace": "default"},
            "spec": spec | change,
        }
    )
    found = eventually(
        lambda: api.get(REPLICA, name), lambda seen: condition(seen) == ("False", reason), seconds=90
    )
    assert found is not None
    (ready,) = (one for one in found["status"]["conditions"] if one["type"] == "Ready")
    assert words in ready["message"]
    assert condition(found, "Stalled")[0] == "False", "it recovers once that is there"
    api.delete(REPLICA, name)
