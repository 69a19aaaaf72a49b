"""`python -m medha_worker.pod`: the supervisor of one pod of a replica, which is one (lane, stage) of its grid.

It runs the pod's ranks and, in the first pod, the replica's controller. A part that dies is restarted here, and the
others keep their weights. If a part dies again and again, this process ends. The operator replaces all pods of the
replica when this process asks for it with exit status 75, and also when a pod is gone, was replaced or has ended for
good. On SIGTERM the leader's controller finishes the open requests; the other pods wait until it notifies them.
"""

from __future__ import annotations

import logging
import sys
import time
from datetime import datetime
from pathlib import Path

import click

from medha.api.replica import MedhaReplica
from medha.errors import MedhaError
from medha_process.host_resources import raise_file_limit
from medha_process.launch import CONTROLLER, settings_file
from medha_process.part_process import configure_logging
from medha_process.part_state import PartState
from medha_process.pod_contract import HEALTH_PORT
from medha_process.supervision.lifecycle import Abort, Lifecycle
from medha_process.supervision.progress_lines import ProgressLines
from medha_process.supervision.supervisor import StopRequests, supervise
from medha_process.supervision.supervisor_output import end_if_unread, iso_time, local_time
from medha_worker.controller.live_settings import LiveFile
from medha_worker.epoch_file import read_epoch, write_epoch
from medha_worker.pod.health import HealthServer
from medha_worker.pod.leader_name import LeaderName
from medha_worker.pod.pod_parts import (
    Place,
    controller_settings,
    read_replica,
    replica_name,
    write_parts,
)
from medha_worker.pod.pod_watch import PodWatch
from medha_worker.pod.termination_log import TERMINATION_LOG, leave_reason
from medha_worker.pod.tier_volumes import require_writable_tiers

_log = logging.getLogger("medha.pod")


class PodLog:
    """The supervisor's output: plain lines with time and part name, on stdout."""

    def __init__(self) -> None:
        self._progress = ProgressLines()

    def starting(self, parts: list[str]) -> None:
        self.log(f"starting {', '.join(parts)}", local_time())

    def line(self, part: str, text: str, at: datetime) -> None:
        print(f"{iso_time(at)} {part} | {text}", flush=True)

    def log(self, text: str, at: datetime) -> None:
        self.line("pod", text, at)

    def progress(self, part: str, state: PartState, at: datetime) -> None:
        line = self._progress.line(part, state, at)
        if line:
            self.log(line, at)

    def ready(self, process_ids: dict[str, int]) -> None:
        processes = ", ".join(f"{name} is process {pid}" for name, pid in process_ids.items())
        self.log(f"ready: {processes}", local_time())

    def close(self) -> None: ...


class Supervised(PodWatch):
    """A pod's watch that looks up the leader's name while a part calls it, and applies changed settings."""

    def __init__(self, place: Place, replica_file: Path, replica: MedhaReplica, parts: list[str]) -> None:
        lifecycle = replica.spec.lifecycle
        super().__init__(
            parts, time.monotonic(), lifecycle.ready_seconds, lifecycle.drain_seconds, place.leader
        )
        self._place = place
        self._live = LiveFile(replica_file, read_replica, _log)
        self._leader = None if place.is_leader else LeaderName(place.leader)

    def poll(self, now: float) -> Abort | None:
        if self._leader is not None:
            self._leader.look_up(self.is_calling())
        replica = self._live.changed(now)
        if replica is not None:
            self._change(replica)
        return super().poll(now)

    def _change(self, replica: MedhaReplica) -> None:
        _log.info("live settings have changed")
        lifecycle = replica.spec.lifecycle
        self.ready_seconds, self.drain_seconds = lifecycle.ready_seconds, lifecycle.drain_seconds
        if self._place.is_leader:
            run_directory = self._place.run_directory
            settings = controller_settings(self._place, replica, oldest_epoch(run_directory))
            settings.write(settings_file(CONTROLLER, run_directory))


def run(place: Place, replica_file: Path) -> Lifecycle:
    """Run the pod until it is asked to stop or cannot continue; call it in the main thread.

    Raises:
        ConfigInvalid: the pod's environment or its replica is invalid, or the volume of a KV tier cannot be written.
    """
    # Handles SIGTERM from here on, which process 1 of a container otherwise ignores.
    with StopRequests() as requests:
        return _run(place, replica_file, requests)


def _run(place: Place, replica_file: Path, requests: StopRequests) -> Lifecycle:
    replica = read_replica(replica_file)
    place.require_in(replica.spec)
    require_writable_tiers(replica)
    place.run_directory.mkdir(parents=True, exist_ok=True)
    groups = write_parts(place, replica, oldest_epoch(place.run_directory))
    watch = Supervised(place, replica_file, replica, [part.name for group in groups for part in group])
    health = HealthServer(watch, place.listens_at, HEALTH_PORT)
    who = "this pod" if place.is_leader else place.leader
    _log.info(
        "lane %d, stage %d of %s, at %s; the leader is %s",
        *(place.lane, place.stage, replica_name(replica), place.address, who),
    )
    try:
        return supervise(
            groups,
            run_directory=place.run_directory,
            is_ready=lambda: watch.has_started,
            display=PodLog(),
            ready_seconds=float("inf"),  # the watch has its own limit
            drain_seconds=watch.drain_seconds,
            awaits_notice=not place.is_leader,
            watch=watch,
            requests=requests,
        )
    finally:
        health.close()


def oldest_epoch(run_directory: Path) -> int:
    """Return the first epoch of this pod if it leads: later than any epoch of an earlier leader.

    No file outlives a pod, so this is the time of the pod's first start, in seconds. It relies on epochs that
    begin less often than once a second, and on clocks of nodes that differ by less than it takes to replace a
    pod.
    """
    path = run_directory / "oldest-epoch"
    found = read_epoch(path)
    if found is None:
        found = int(time.time())  # noqa: TID251 - it orders pods, and measures no duration
        write_epoch(path, found)
    return found


_FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command()
@click.option("--replica", "replica_file", type=click.Path(path_type=Path), required=True)
@click.option("--keys", type=_FOLDER, required=True)
@click.option("--enrolment", type=_FOLDER)
@click.option("--model", "model_directory", type=_FOLDER)
@click.option("--termination-log", type=click.Path(path_type=Path), default=TERMINATION_LOG)
@click.option("--lane", type=int, envvar="MEDHA_LANE", required=True)
@click.option("--stage", type=int, envvar="MEDHA_STAGE", required=True)
@click.option("--leader", envvar="MEDHA_LEADER", required=True)
@click.option("--address", envvar="MEDHA_POD_IP", required=True)
@click.option("--run-directory", type=_FOLDER, envvar="MEDHA_RUN_DIRECTORY", required=True)
@click.option("--router", envvar="MEDHA_ROUTER", default="")
@click.option("--revision", envvar="MEDHA_REVISION", default="")
def main(replica_file: Path, termination_log: Path, **place: object) -> None:
    """Run one pod of a replica; the operator sets the options, as arguments or in the pod's environment."""
    configure_logging("info")
    raise_file_limit()  # the parts inherit it
    try:
        state = run(Place(**place), replica_file)  # type: ignore[arg-type] # click has read each option's type
        reason, exit_status = state.failure, state.exit_status
    except MedhaError as error:
        reason, exit_status = f"{type(error).__name__}: {error}", error.exit_status
    if reason:
        leave_reason(termination_log, reason)
    end_if_unread(exit_status)
    if reason:
        _log.error("%s", reason)
    sys.exit(exit_status)
