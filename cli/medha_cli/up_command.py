"""`medha up FILE`: runs router, controller and ranks of one replica as processes on this machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path

import click
from rich.console import Console, RenderableType

from medha.api.replica import MedhaReplica
from medha.errors import ConfigInvalid, PartFailed
from medha_cli.local_parts import RunFiles, write_parts
from medha_cli.manifest import model_directory, read_manifest
from medha_cli.result_files import require_writable
from medha_cli.runs import KEYS, PREFIX, announced, remove_ended, removed_if_killed, require_unused
from medha_cli.summary import checkpoint_dtype, summary
from medha_cli.terminal_display import TerminalDisplay
from medha_process.host_resources import free_port, raise_file_limit
from medha_process.part_settings import LogLevel
from medha_process.supervision.supervisor import StopRequests, supervise
from medha_process.supervision.supervisor_output import end_if_unread
from medha_worker.checkpoints.preflight import require_possible
from medha_worker.host_memory import host_free_bytes

SOCKET_PATH_BYTES = 100  # Linux allows 107 for a socket's path; ours are the run directory and the name below
LOG_LEVELS = ("debug", "info", "warning", "error")
_NEEDED = {"zmq": "worker", "torch": "worker", "fastapi": "router", "tokenizers": "router"}


@click.command("up")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--port", type=click.IntRange(0, 65535), help="HTTP port instead of the manifest's; 0 takes a free one."
)
@click.option(
    "--record", type=click.Path(path_type=Path), help="Write the controller's (time, event) log to this file."
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write what every rank does to this file, for ui.perfetto.dev; up to 256 MiB.",
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep sockets and settings in this directory, and leave it there; by default it is temporary.",
)
@click.option(
    "--log-level",
    type=click.Choice(LOG_LEVELS),
    default="info",
    show_default=True,
    help="Least severe level that the parts log.",
)
def command(
    file: Path,
    port: int | None,
    record: Path | None,
    trace: Path | None,
    run_dir: Path | None,
    log_level: LogLevel,
) -> None:
    """Serve the MedhaReplica that FILE describes on this machine, until Ctrl-C.

    Starts a router, a replica controller and the ranks, shows their logs, and prints the URL with examples once
    requests are answered. Ctrl-C lets open requests finish and stops everything; a second Ctrl-C kills.
    A part that dies is started again; a failed start, or the third death of a part within a minute (or the twentieth
    within an hour), stops all of them, and the exit status is 1.

    \b
    Examples:
      medha up examples/tiny.yaml
      medha up examples/tiny.yaml --port 0
      medha up examples/tiny.yaml --record events.jsonl --log-level debug
      medha up examples/grid.yaml --trace trace.json
    """
    replica = _with_port(read_manifest(file), port)
    directory = model_directory(replica)
    _require_installed()
    _require_free_port(replica)
    require_possible(replica.spec, directory, host_free_bytes(1))
    raise_file_limit()  # for the parts too, which inherit it
    console = Console(highlight=False)
    _warn_of_strangers(console, replica)
    with (
        StopRequests() as requests,  # as long as anything is to be removed
        _run_directory(run_dir) as run,
        announced(run, replica.metadata.name, is_temporary=run_dir is None),
        removed_if_killed(run),
    ):
        for option, output in (("--record", record), ("--trace", trace)):
            if output is not None:
                require_writable(option, output, inputs=[file])
        replica_files = RunFiles(run)
        groups = write_parts(
            replica, directory, replica_files, record=record, trace=trace, log_level=log_level
        )

        def ready_summary(process_ids: dict[str, int]) -> list[RenderableType]:
            dtype = checkpoint_dtype(directory, replica.spec.model.dtype)
            return summary(replica, replica_files.url(), dtype, replica_files.readiness(), process_ids)

        state = supervise(
            groups,
            run_directory=run,
            is_ready=replica_files.is_ready,
            display=TerminalDisplay(console, replica.metadata.name, ready_summary),
            ready_seconds=replica.spec.lifecycle.ready_seconds,
            drain_seconds=replica.spec.lifecycle.drain_seconds,
            requests=requests,
        )
    end_if_unread(state.exit_status)
    if state.failure:
        raise PartFailed(state.failure)
    sys.exit(state.exit_status)


def _with_port(replica: MedhaReplica, port: int | None) -> MedhaReplica:
    """Return the replica with the requested port. A free one is chosen here, so that a restarted router keeps it."""
    port = replica.spec.router.port if port is None else port
    if port == 0:
        port = free_port(replica.spec.router.host)
    router = replica.spec.router.model_copy(update={"port": port})
    return replica.model_copy(update={"spec": replica.spec.model_copy(update={"router": router})})


def _require_installed() -> None:
    extras = {extra for module, extra in _NEEDED.items() if importlib.util.find_spec(module) is None}
    if extras:
        wanted = ",".join(sorted(extras))
        raise ConfigInvalid(f"parts of Medha are not installed; add them: pip install 'medha[{wanted}]'")


def _warn_of_strangers(console: Console, replica: MedhaReplica) -> None:
    """Warn, once and before anything starts, that a router on this address is open to other machines."""
    host, port = replica.spec.router.host, replica.spec.router.port
    addresses = {found[4][0] for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    if all(ip_address(address).is_loopback for address in addresses):
        return
    text = (
        f"warning: router.host is {host}: anybody who reaches port {port} of this machine can use the model and read /metrics, because "
        "the router asks for no key; set it to 127.0.0.1, or let only a proxy that asks for keys reach the port"
    )
    console.print(text, style="yellow", markup=False, soft_wrap=True)


def _require_free_port(replica: MedhaReplica) -> None:
    """Report a taken port now, in words, rather than in the router's log later."""
    host, port = replica.spec.router.host, replica.spec.router.port
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise ConfigInvalid(
            f"spec.router: cannot listen on {host} port {port}: {error.strerror or error}; stop what uses it, "
            "set spec.router.port, or pass --port 0 for a free one"
        ) from error


def _require_private(directory: Path) -> None:
    """Check that only the user can write to a directory; others could replace keys, settings and sockets there.

    Raises:
        ConfigInvalid: others may write there, or it belongs to somebody else.
    """
    found = directory.stat()
    if found.st_uid != os.geteuid():
        raise ConfigInvalid(
            f"--run-dir {directory} belongs to user {found.st_uid} and you are {os.geteuid()}; name a directory of your own"
        )
    if found.st_mode & 0o022:
        raise ConfigInvalid(
            f"--run-dir {directory} has mode {found.st_mode & 0o777:04o}, so others can write there; chmod 700 it, or name a "
            "new directory"
        )


@contextmanager
def _run_directory(wanted: Path | None) -> Iterator[Path]:
    """Provide a directory of mode 0700. At the end, remove it if it is temporary, else only its keys."""
    remove_ended()
    if wanted is None:
        run = Path(tempfile.mkdtemp(prefix=PREFIX))
    else:
        run = wanted.absolute()
        try:
            run.mkdir(mode=0o700, parents=True, exist_ok=True)
            _require_private(run)
            require_unused(run)  # before anything of another run is removed
            for stale in ("router-ready.json", "ranks-ready.json"):
                (run / stale).unlink(missing_ok=True)
        except OSError as error:
            raise ConfigInvalid(
                f"--run-dir {run}: {error.strerror}; name a directory that can be written"
            ) from error
    if len(os.fsencode(run / "router-control")) > SOCKET_PATH_BYTES:
        raise ConfigInvalid(f"{run} is too long for the path of a socket; name a shorter one with --run-dir")
    try:
        yield run
    finally:
        if wanted is None:
            shutil.rmtree(run, ignore_errors=True)
        else:
            shutil.rmtree(run / KEYS, ignore_errors=True)
