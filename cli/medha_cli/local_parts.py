"""The parts of a replica that runs on this machine: their settings, and the files of the run that they share."""

from __future__ import annotations

import http.client
import json
import shutil
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from medha.api.cluster import NO_ACCELERATOR, NVIDIA_GPU, ResourcesSpec
from medha.api.declared import DeclaredModel, to_text
from medha.api.fields import quantity_bytes
from medha.api.replica import MedhaReplica
from medha.wire.messages import Readiness
from medha_cli.manifest import draft_directory
from medha_cli.runs import KEYS
from medha_process.host_resources import has_nvidia_gpu
from medha_process.launch import controller_part, rank_part, router_part
from medha_process.part_settings import ControllerSettings, LogLevel, RankSettings, RouterEndpoints
from medha_process.router_settings import RouterSettings
from medha_process.supervision.supervisor import Part

if TYPE_CHECKING:
    from medha_links.key_files import KeyFiles

READY_TIMEOUT_SECONDS = 1.0  # of one poll of /ready; the next follows soon


class RunFiles:
    """The files of one run: sockets, keys, and the files that router and controller write when they are ready."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.router_ready = directory / "router-ready.json"
        self.ranks_ready = directory / "ranks-ready.json"

    def endpoint(self, name: str) -> str:
        """Return a ZeroMQ endpoint that only the directory's owner on this machine can reach."""
        return f"ipc://{self.directory / name}"

    def declare(self, replica: MedhaReplica) -> Path:
        """Return the folder that names the manifest's model to the router, even while no replica has joined it."""
        folder = self.directory / "models"
        folder.mkdir(exist_ok=True)
        classes = tuple(one.name for one in replica.spec.service_classes)
        named = replica.spec.model
        model = DeclaredModel(
            name=named.name,
            service_classes=classes,
            replicas=1,
            aliases=named.aliases,
            tool_call_format=named.tool_call_format,
            reasoning_format=named.reasoning_format,
        )
        (folder / "manifest.json").write_text(to_text([model]), encoding="utf-8")
        return folder

    def fresh_keys(self) -> KeyFiles:
        """Make the keys of the parts for this run: a restarted part finds its own, the next run makes new ones."""
        # Imported here, because it needs pyzmq, and a missing pyzmq is reported before.
        from medha_links.key_files import KeyFiles

        shutil.rmtree(self.directory / KEYS, ignore_errors=True)
        return KeyFiles.create(self.directory / KEYS)

    def url(self) -> str:
        """Return the router's address; call it only once the router listens."""
        return self._bound("url")

    def metrics_url(self) -> str:
        """Return the address of the router's metrics; call it only once the router listens."""
        return self._bound("metrics_url")

    def _bound(self, field: str) -> str:
        return str(json.loads(self.router_ready.read_text(encoding="utf-8"))[field])

    def readiness(self) -> Readiness:
        """Return the reports of controller and ranks; call it only once all are ready."""
        return TypeAdapter(Readiness).validate_json(self.ranks_ready.read_bytes())

    def is_ready(self) -> bool:
        """Return whether the router reports a replica that it can send requests to."""
        if not (self.router_ready.exists() and self.ranks_ready.exists()):
            return False
        try:
            url = self.metrics_url().removesuffix("/metrics") + "/ready"
            with urllib.request.urlopen(url, timeout=READY_TIMEOUT_SECONDS) as answer:  # noqa: S310 (our own URL)
                return bool(answer.status == 200)
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError):
            return False


def write_parts(
    replica: MedhaReplica,
    model: Path,
    files: RunFiles,
    *,
    record: Path | None,
    log_level: LogLevel,
    trace: Path | None = None,
    api_keys: Path | None = None,
    tls: tuple[Path, Path] | None = None,
) -> tuple[tuple[Part, ...], ...]:
    """Write each part's settings, and return the parts in the order in which they are asked to stop.

    `tls` names the files of a certificate and its key.
    """
    keys = files.fresh_keys()
    router = _router_settings(replica, files, keys, log_level, api_keys, tls)
    controller = ControllerSettings(
        replica=replica.metadata.name,
        spec=replica.spec,
        model_directory=model,
        routers=(RouterEndpoints(control=router.control_endpoint, tokens=router.tokens_endpoint),),
        router_key_file=keys.router_public,
        enrolment_file=keys.enrolment,
        rank_control=files.endpoint("rank-control"),
        rank_tokens=files.endpoint("rank-tokens"),
        key_file=keys.controller,
        rank_keys_file=keys.ranks_public,
        ready_file=files.ranks_ready,
        epoch_file=files.directory / "epoch",
        record_file=record.absolute() if record else None,
        trace_file=trace.absolute() if trace else None,
        log_level=log_level,
    )
    ranks = _rank_settings(replica, model, files, keys, log_level)
    return (
        (router_part(router, files.directory),),
        (controller_part(controller, files.directory),),
        tuple(rank_part(rank, files.directory) for rank in ranks),
    )


def _router_settings(
    replica: MedhaReplica,
    files: RunFiles,
    keys: KeyFiles,
    log_level: LogLevel,
    api_keys: Path | None,
    tls: tuple[Path, Path] | None,
) -> RouterSettings:
    spec = replica.spec
    return RouterSettings(
        host=spec.router.host,
        port=spec.router.port,
        metrics_host=spec.router.metrics_host,
        metrics_port=spec.router.metrics_port,
        control_endpoint=files.endpoint("router-control"),
        tokens_endpoint=files.endpoint("router-tokens"),
        key_file=keys.router,
        enrolment_file=keys.enrolment,
        ready_file=str(files.router_ready),
        scratch_directory=str(files.directory),
        models_directory=str(files.declare(replica)),
        api_keys_file=None if api_keys is None else api_keys.absolute(),
        tls_certificate_file=None if tls is None else tls[0].absolute(),
        tls_key_file=None if tls is None else tls[1].absolute(),
        max_body_bytes=quantity_bytes(spec.router.max_body_bytes),
        max_waiting=spec.router.max_waiting,
        allowed_hosts=spec.router.allowed_hosts,
        allowed_origins=spec.router.allowed_origins,
        traces_endpoint=spec.traces.endpoint,
        traces_ratio=spec.router.trace_ratio,
        drain_seconds=spec.lifecycle.drain_seconds,
        log_level=log_level,
    )


def _rank_settings(
    replica: MedhaReplica, model: Path, files: RunFiles, keys: KeyFiles, log_level: LogLevel
) -> list[RankSettings]:
    spec, shape = replica.spec, replica.spec.parallelism
    peer_endpoint = "" if spec.kv_cache.peers is None else "tcp://127.0.0.1:*"
    return [
        RankSettings(
            rank=rank,
            spec=spec,
            model_directory=model,
            draft_directory=draft_directory(replica),
            disk_directory=_disk_directory(replica, files),
            peer_endpoint=peer_endpoint,
            peer_bytes_endpoint=peer_endpoint,
            accelerator=_accelerator(spec.resources),
            control=files.endpoint("rank-control"),
            tokens=files.endpoint("rank-tokens"),
            key_file=keys.ranks,
            controller_key_file=keys.controller_public,
            log_level=log_level,
        )
        for rank in range(shape.tensor * shape.stream * shape.kv)
    ]


def _disk_directory(replica: MedhaReplica, files: RunFiles) -> Path | None:
    """Return where ranks keep the files of their disk tiers: below the manifest's path, else in the run's directory."""
    disk = replica.spec.kv_cache.disk
    if disk is None:
        return None
    return (
        files.directory / "kv-files"
        if disk.host_path is None
        else Path(disk.host_path) / replica.metadata.name
    )


def _accelerator(resources: ResourcesSpec) -> str:
    """Return the accelerator that ranks on this machine compute on: the one that the manifest names, or else its NVIDIA GPU, if any.

    The manifest's default is for pods.
    """
    if "accelerator" in resources.model_fields_set:
        return resources.accelerator
    return NVIDIA_GPU if has_nvidia_gpu() else NO_ACCELERATOR
