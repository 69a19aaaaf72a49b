"""The parts of one pod of a replica: its ranks, the controller in the first pod, and the settings of each.

A pod is one place (lane, stage) of the grid. Nothing is started here: settings are written to the run directory, and
the parts are listed in the order in which they are asked to stop.
"""

from __future__ import annotations

import ipaddress
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from medha.api.replica import MedhaReplica, MedhaReplicaSpec
from medha.errors import ConfigInvalid
from medha.topology import Coordinates, Topology
from medha_links.cluster_keys import (
    CONTROLLER_KEY,
    CONTROLLER_PUBLIC,
    RANKS_KEY,
    RANKS_PUBLIC,
    ROUTER_PUBLIC,
    TOKEN,
)
from medha_process.host_resources import usable_cpus
from medha_process.launch import controller_part, rank_part
from medha_process.part_settings import ControllerSettings, RankSettings, RouterEndpoints, in_url
from medha_process.pod_contract import (
    CONTROL_PORT,
    DRAFT_DIRECTORY,
    KV_FILES_DIRECTORY,
    KV_STORE_DIRECTORY,
    METRICS_PORT,
    MODEL_DIRECTORY,
    PEERS_PORT,
    ROUTER_CONTROL_PORT,
    ROUTER_TOKENS_PORT,
    TOKENS_PORT,
)
from medha_process.supervision.supervisor import Part

_log = logging.getLogger("medha.pod")


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a pod in the grid and in the network, and its folders."""

    lane: int
    stage: int
    leader: str
    """Name or address of the pod that runs the controller."""
    address: str
    """This pod's own address; the data plane listens only there."""
    run_directory: Path
    """Folder that lasts as long as the pod: a restarted container finds it as it was."""
    keys: Path
    router: str = ""
    """Name or address of the routers; empty if the replica has none. The name has the addresses of all of them."""
    enrolment: Path | None = None
    """Folder with the routers' public key, and a token that it admits."""
    revision: str = ""
    """Revision of the pods that the operator has created for one spec; empty if it set none."""
    model_directory: Path | None = None
    """Folder of the checkpoint, if it differs from the replica's source."""

    @property
    def is_leader(self) -> bool:
        return self.lane == 0 and self.stage == 0

    @property
    def listens_at(self) -> str:
        """Address on which metrics and health are served.

        It is 0.0.0.0, which includes the loopback that `kubectl port-forward` connects to, unless the pod's
        address is a loopback address itself.

        Raises:
            ConfigInvalid: the pod's address is none.
        """
        try:
            address = ipaddress.ip_address(self.address)
        except ValueError as error:
            raise ConfigInvalid(
                f"--address (MEDHA_POD_IP) is {self.address!r}, which is no IP address; set it to the pod's own IPv4 address"
            ) from error
        return self.address if address.is_loopback else "0.0.0.0"

    def require_in(self, spec: MedhaReplicaSpec) -> None:
        """Check that the grid has this place.

        Raises:
            ConfigInvalid: it has not.
        """
        shape = spec.parallelism
        if not (0 <= self.lane < shape.kv and 0 <= self.stage < shape.stream):
            raise ConfigInvalid(
                f"MEDHA_LANE={self.lane}, MEDHA_STAGE={self.stage} is outside of a grid of {shape.kv} lanes and "
                f"{shape.stream} stages (spec.parallelism)"
            )


def read_replica(path: Path) -> MedhaReplica:
    """Read the replica that the operator has written for its pods.

    A pod may be older than its operator, which writes every field that it knows. Fields that this release
    does not know are left out, with a warning. Manifests of users are read elsewhere, and strictly.

    Raises:
        ConfigInvalid: there is no such file, or it is not a replica.
    """
    try:
        document = json.loads(path.read_bytes())
        try:
            return MedhaReplica.model_validate(document)
        except ValidationError as error:
            unknown = [entry["loc"] for entry in error.errors() if entry["type"] == "extra_forbidden"]
        for field in unknown:
            _remove(document, field)
        replica = MedhaReplica.model_validate(document)
    except OSError as error:
        raise ConfigInvalid(
            f"--replica {path} cannot be read: {error.strerror}; mount the ConfigMap there"
        ) from error
    except ValueError as error:  # of pydantic or of json
        raise ConfigInvalid(f"--replica {path} is not a MedhaReplica: {error}") from error
    names = ", ".join(sorted(".".join(str(part) for part in field) for field in unknown))
    _log.warning(
        "%s is from a newer operator; this release does not know these fields and ignores them: %s",
        path,
        names,
    )
    return replica


def _remove(document: Any, field: tuple[int | str, ...]) -> None:
    *above, name = field
    for part in above:
        document = document[part]
    del document[name]


def write_parts(place: Place, replica: MedhaReplica, oldest_epoch: int) -> tuple[tuple[Part, ...], ...]:
    """Write each part's settings, and return the parts in the order in which they are asked to stop.

    `oldest_epoch` is the first epoch that the leader's controller may begin.
    """
    spec = _for_this_pod(replica.spec)
    shape = spec.parallelism
    topology = Topology(shape.tensor, shape.stream, shape.kv)
    host = in_url(place.address if place.is_leader else place.leader)
    ranks = []
    for tensor in range(shape.tensor):
        rank = topology.rank(Coordinates(place.lane, place.stage, tensor))
        settings = RankSettings(
            rank=rank,
            spec=spec,
            model_directory=_model_directory(place, spec),
            draft_directory=_draft_directory(spec),
            disk_directory=disk_directory(replica),
            peer_endpoint=_peer_endpoint(place, spec, tensor),
            peer_bytes_endpoint=_peer_endpoint(place, spec, spec.parallelism.tensor + tensor),
            control=f"tcp://{host}:{CONTROL_PORT}",
            tokens=f"tcp://{host}:{TOKENS_PORT}",
            address=place.address,
            ranks_on_host=shape.tensor,
            accelerator=spec.resources.accelerator,
            revision=place.revision,
            epoch_file=place.run_directory / f"rank-{rank}.epoch",
            key_file=place.keys / RANKS_KEY,
            controller_key_file=place.keys / CONTROLLER_PUBLIC,
        )
        ranks.append(rank_part(settings, place.run_directory))
    if not place.is_leader:
        return (tuple(ranks),)
    controller = controller_settings(place, replica, oldest_epoch)
    return (controller_part(controller, place.run_directory),), tuple(ranks)


def _peer_endpoint(place: Place, spec: MedhaReplicaSpec, number: int) -> str:
    """Return the endpoint of this number at which this pod gives KV to other replicas; empty if it gives none.

    The first ones, as many as ranks, are for questions; the others are for bytes.
    """
    if spec.kv_cache.peers is None or spec.router_ref is None:
        return ""
    return f"tcp://{in_url(place.address)}:{PEERS_PORT + number}"


def disk_directory(replica: MedhaReplica) -> Path | None:
    """Return where the ranks of a replica keep the files of their disk tiers; replicas may share a volume."""
    if replica.spec.kv_cache.disk is None:
        return None
    return Path(KV_FILES_DIRECTORY) / f"{replica.metadata.namespace}.{replica.metadata.name}"


def controller_settings(place: Place, replica: MedhaReplica, oldest_epoch: int) -> ControllerSettings:
    """Return the settings of the leader's controller."""
    spec = _for_this_pod(replica.spec)
    host = in_url(place.address)
    metrics = spec.metrics.model_copy(update={"host": place.listens_at, "port": METRICS_PORT})
    routers: tuple[RouterEndpoints, ...] = ()
    enrolment = place.enrolment
    if place.router and enrolment is not None:
        router = in_url(place.router)
        control, tokens = f"tcp://{router}:{ROUTER_CONTROL_PORT}", f"tcp://{router}:{ROUTER_TOKENS_PORT}"
        routers = (RouterEndpoints(control=control, tokens=tokens),)
    return ControllerSettings(
        replica=replica_name(replica),
        spec=spec.model_copy(update={"metrics": metrics}),
        model_directory=_model_directory(place, spec),
        routers=routers,
        router_key_file=None if enrolment is None else enrolment / ROUTER_PUBLIC,
        enrolment_file=None if enrolment is None else enrolment / TOKEN,
        rank_control=f"tcp://{host}:{CONTROL_PORT}",
        rank_tokens=f"tcp://{host}:{TOKENS_PORT}",
        rendezvous_host=place.address,
        key_file=place.keys / CONTROLLER_KEY,
        rank_keys_file=place.keys / RANKS_PUBLIC,
        epoch_file=place.run_directory / "epoch",
        oldest_epoch=oldest_epoch,
        revision=place.revision,
    )


def replica_name(replica: MedhaReplica) -> str:
    """Return the replica's name at routers. It has the namespace, because several namespaces may share a router."""
    namespace = replica.metadata.namespace
    return f"{namespace}/{replica.metadata.name}" if namespace else replica.metadata.name


def _for_this_pod(spec: MedhaReplicaSpec) -> MedhaReplicaSpec:
    """Return the spec with what this container has: its threads per rank, unless the spec sets them, and its store of files."""
    spec = _with_mounted_store(spec)
    if spec.threads is not None:
        return spec
    return spec.model_copy(update={"threads": max(1, usable_cpus() // spec.parallelism.tensor)})


def _with_mounted_store(spec: MedhaReplicaSpec) -> MedhaReplicaSpec:
    """Return the spec with the place where a store of files is mounted, whatever its path is on the node."""
    tiers = spec.kv_cache.tiers
    if tiers is None or tiers.store is None or not tiers.store.is_files:
        return spec
    store = tiers.store.model_copy(update={"url": f"file://{KV_STORE_DIRECTORY}"})
    tiers = tiers.model_copy(update={"store": store})
    return spec.model_copy(update={"kv_cache": spec.kv_cache.model_copy(update={"tiers": tiers})})


def _model_directory(place: Place, spec: MedhaReplicaSpec) -> Path:
    if place.model_directory is not None:
        return place.model_directory
    return Path(MODEL_DIRECTORY if spec.model.source.path is None else spec.model.source.path)


def _draft_directory(spec: MedhaReplicaSpec) -> Path | None:
    source = spec.scheduling.speculation.source
    if source is None:
        return None
    return Path(DRAFT_DIRECTORY if source.path is None else source.path)
