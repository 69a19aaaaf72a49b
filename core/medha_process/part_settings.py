"""Settings of a part: one JSON file, written by what launches the part (`launch`) and read by the part."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from medha.api.cluster import NO_ACCELERATOR
from medha.api.replica import MedhaReplicaSpec
from medha.errors import ConfigInvalid
from medha.topology import Topology
from medha_process.shared_files import write_whole

LogLevel = Literal["critical", "error", "warning", "info", "debug"]


class PartSettings(BaseModel):
    """Settings that every part has."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    log_level: LogLevel = "info"

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the settings from a file.

        Raises:
            ConfigInvalid: the file cannot be read, or does not contain valid settings.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise ConfigInvalid(f"{path}: {error}") from error

    def write(self, path: Path) -> None:
        """Replace the file as a whole: a part that polls it never reads a half."""
        write_whole(path, self.model_dump_json(by_alias=True))


class ReplicaPartSettings(PartSettings):
    """Settings that the controller and the ranks of a replica have."""

    spec: MedhaReplicaSpec
    model_directory: Path
    key_file: Path
    """The part's secret key (docs/security.md): the controller's, or the one that the replica's ranks share."""
    epoch_file: Path | None = None
    """File that keeps the last epoch, beyond the life of one process."""
    revision: str = ""
    """Revision of the replica's pods; the controller and ranks of another one do not work together. Empty:
    there is only one."""


class RankSettings(ReplicaPartSettings):
    """Settings of a rank: `python -m medha_worker.rank`."""

    rank: int
    control: str
    """ZeroMQ endpoint of the controller's control link for ranks."""
    tokens: str
    """ZeroMQ endpoint of the controller's token link."""
    address: str = "127.0.0.1"
    """Address at which this rank listens for the others' tensors: one of its pod, or the loopback."""
    ranks_on_host: int | None = None
    """Number of ranks sharing this one's memory and CPUs. Default: the replica's; in a pod, the pod's."""
    accelerator: str = NO_ACCELERATOR
    """Device resource that this rank has one of, e.g. `nvidia.com/gpu`: it computes there or not at all. `none`: it
    computes on the CPU. `spec.resources.accelerator` does not decide that: it has a default, for pods."""
    draft_directory: Path | None = None
    """Directory of the checkpoint of a draft model or head, which the rank that samples loads, too; None: there is none."""
    disk_directory: Path | None = None
    """Directory in which each rank of the replica keeps the files of its disk tier; None: there is none."""
    peer_endpoint: str = ""
    """ZeroMQ endpoint at which this rank gives KV to ranks of other replicas; empty: it gives none, and takes none."""
    peer_bytes_endpoint: str = ""
    """ZeroMQ endpoint from which this KV goes encrypted over a plain socket; empty: all of it goes with the answers."""
    controller_key_file: Path
    """File of the controller's public key."""

    @property
    def topology(self) -> Topology:
        shape = self.spec.parallelism
        return Topology(shape.tensor, shape.stream, shape.kv)

    @property
    def neighbours(self) -> int:
        """Number of ranks on this host, this one included."""
        return self.ranks_on_host or self.topology.ranks

    @property
    def place_on_host(self) -> int:
        """Place of this rank among those of this host, from 0: a host has ranks with successive numbers."""
        return self.rank % self.neighbours


class RouterEndpoints(BaseModel):
    """ZeroMQ endpoints that a router binds and controllers connect to.

    A host name stands for all of its addresses: for one router at each of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    control: str
    tokens: str

    @property
    def host(self) -> str:
        """The host of the control link, without brackets; empty if the endpoint is none of a network."""
        return _host(self.control)

    def at(self, address: str) -> RouterEndpoints:
        """Return the endpoints with an IP address in place of their host."""
        host = in_url(address)

        def located(endpoint: str) -> str:
            source, separator, target = endpoint.removeprefix("tcp://").rpartition(";")
            return f"tcp://{source}{separator}{host}:{target.rpartition(':')[2]}"

        control, tokens = located(self.control), located(self.tokens)
        return RouterEndpoints(control=control, tokens=tokens)

    @model_validator(mode="after")
    def _one_host(self) -> RouterEndpoints:
        if _host(self.control) != _host(self.tokens):
            raise ValueError(
                f"control is {self.control} and tokens is {self.tokens}; give both links the same host"
            )
        return self


def in_url(host: str) -> str:
    """Return a host as URLs and endpoints have it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def _host(endpoint: str) -> str:
    scheme, _, rest = endpoint.partition("://")
    target = rest.rpartition(";")[2]  # after the address that the connection comes from, if one is given
    return target.rpartition(":")[0].strip("[]") if scheme == "tcp" else ""


class ControllerSettings(ReplicaPartSettings):
    """Settings of a replica's controller: `python -m medha_worker.controller`, which polls the file for changes."""

    replica: str
    """Name under which routers know the replica."""
    routers: tuple[RouterEndpoints, ...] = ()
    """Routers that the replica joins, all with the same keys; changes take effect while it serves."""
    router_key_file: Path | None = None
    """The routers' public key; needed if there are routers."""
    enrolment_file: Path | None = None
    """File with the token that admits replicas to the routers; needed if there are routers."""
    rank_control: str
    """ZeroMQ endpoint that the ranks connect to; the controller binds."""
    rank_tokens: str
    rank_keys_file: Path
    """Public keys of the ranks; no other peer is admitted."""
    ready_file: Path | None = None
    """File for a JSON `Readiness`, written once, when all ranks are ready for the first time."""
    rendezvous_host: str = "127.0.0.1"
    """Address of rank 0's machine, which is this one, for the rendezvous of the ranks' data plane."""
    oldest_epoch: int = 0
    """First epoch that may begin; ranks of earlier ones belong to pods that have been replaced."""
    record_file: Path | None = None
    """File for `medha replay`: every event, its time and a digest of its commands, one JSON object per line."""
    trace_file: Path | None = None
    """File for a trace of all ranks (Trace Event JSON) from the first epoch on; a restarted controller
    inserts `.epochN` into its name."""

    @model_validator(mode="after")
    def _keys_for_routers(self) -> ControllerSettings:
        if self.routers and (self.router_key_file is None or self.enrolment_file is None):
            raise ValueError(
                f"routers are named, router_key_file is {self.router_key_file} and enrolment_file is "
                f"{self.enrolment_file}; give both files"
            )
        return self
