"""What the operator writes for its pods is read by pods that are older than the operator; what users write is not."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from medha.api.replica import MedhaReplicaSpec, parse_replica
from medha.errors import ConfigInvalid
from medha_operator.replica.manifests import Owner, config_map, peer_ports
from medha_process.launch import settings_file
from medha_process.part_settings import RankSettings
from medha_worker.pod.pod_parts import Place, read_replica, write_parts

SPEC = MedhaReplicaSpec.model_validate(
    {
        "model": {"name": "m", "source": {"hostPath": {"path": "/models/m"}}},
        "serviceClasses": [{"name": "chat"}, {"name": "batch"}],
        "template": {"spec": {"priorityClassName": "high"}},
    }
)


def rendered() -> dict[str, Any]:
    manifest = config_map(Owner("r", "default", "u"), SPEC, "0123456789")
    document: dict[str, Any] = json.loads(manifest["data"]["replica.json"])
    return document


@pytest.fixture
def newer() -> dict[str, Any]:
    """As an operator of a later release would write it, with fields at several depths that this one does not know."""
    document = rendered()
    spec = document["spec"]
    document["audit"] = {"level": 1}
    spec["speculation"] = {"tokens": 4}
    spec["scheduling"]["lookahead"] = 2
    spec["lifecycle"]["restart"]["jitter"] = 0.1
    spec["model"]["source"]["hostPath"]["kind"] = "Directory"
    spec["serviceClasses"][1]["weight"] = 3
    return document


def test_fields_of_a_newer_operator_are_left_out_and_named_in_one_warning(
    newer: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "replica.json"
    path.write_text(json.dumps(newer))
    with caplog.at_level(logging.WARNING):
        assert read_replica(path).spec == SPEC
    (warning,) = caplog.messages
    assert warning.endswith(
        "ignores them: audit, spec.lifecycle.restart.jitter, spec.model.source.hostPath.kind, "
        "spec.scheduling.lookahead, spec.serviceClasses.1.weight, spec.speculation"
    )


def test_what_a_user_writes_is_read_strictly(newer: dict[str, Any]) -> None:
    with pytest.raises(ConfigInvalid, match=r"spec\.scheduling\.lookahead: is no field of MedhaReplica"):
        parse_replica(newer)


@pytest.mark.parametrize("text", ["", "[]", '"text"', '{"spec": {"audit": 1}}'])
def test_what_is_no_replica_is_refused_all_the_same(tmp_path: Path, text: str) -> None:
    path = tmp_path / "replica.json"
    path.write_text(text)
    with pytest.raises(ConfigInvalid, match="is not a MedhaReplica"):
        read_replica(path)


def test_a_known_field_that_is_wrong_is_refused_beside_an_unknown_one(
    newer: dict[str, Any], tmp_path: Path
) -> None:
    newer["spec"]["parallelism"]["tensor"] = 0
    path = tmp_path / "replica.json"
    path.write_text(json.dumps(newer))
    with pytest.raises(ConfigInvalid, match=r"spec\.parallelism\.tensor"):
        read_replica(path)


def test_the_ranks_of_a_pod_give_kv_at_all_of_the_ports_that_the_operator_opens(tmp_path: Path) -> None:
    """Each rank has a port for questions and one for bytes; those of two ranks are never the same."""
    fields = {
        "parallelism": {"tensor": 2, "stream": 2},
        "routerRef": {"name": "front"},
        "kvCache": {"tiers": {"host": {"size": "1Gi"}, "peers": {}}},
    }
    document = rendered()
    document["spec"] |= fields
    replica = parse_replica(document)
    place = Place(0, 1, "leader", "10.0.0.9", tmp_path, tmp_path)
    write_parts(place, replica, 0)
    ports = []
    for rank in (2, 3):
        settings = RankSettings.read(settings_file(f"rank {rank}", tmp_path))
        for endpoint in (settings.peer_endpoint, settings.peer_bytes_endpoint):
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            assert host == "10.0.0.9", "peers are named by the pod's own address: no Service is between them"
            ports.append(int(port))
    assert sorted(ports) == list(peer_ports(replica.spec))


@pytest.mark.parametrize(("address", "listens_at"), [("10.0.0.9", "0.0.0.0"), ("127.0.0.3", "127.0.0.3")])
def test_a_pod_serves_metrics_on_all_addresses_unless_its_own_is_a_loopback(
    address: str, listens_at: str, tmp_path: Path
) -> None:
    assert Place(0, 0, "leader", address, tmp_path, tmp_path).listens_at == listens_at


@pytest.mark.parametrize("address", ["", "my-host", "10.0.0"])
def test_an_address_that_is_none_is_refused(address: str, tmp_path: Path) -> None:
    place = Place(0, 0, "leader", address, tmp_path, tmp_path)
    with pytest.raises(
        ConfigInvalid, match=rf"--address \(MEDHA_POD_IP\) is '{address}', which is no IP address; set"
    ):
        _ = place.listens_at
