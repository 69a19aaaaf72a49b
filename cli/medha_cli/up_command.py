"""`medha up FILE`: runs router, controller and ranks of one replica as processes on this machine."""

from __future__ import annotations

import importlib.util
import os
import re
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

from medha.api.fields import ENDPOINT_PATTERN
from medha.api.replica import MedhaReplica
from medha.errors import ConfigInvalid, PartFailed
from medha_cli.keys_command import read_keys
from medha_cli.local_parts import RunFiles, write_parts
from medha_cli.manifest import draft_directory, model_directory, read_manifest
from medha_cli.options import FILE, FOLDER
from medha_cli.result_files import require_writable
from medha_cli.runs import KEYS, PREFIX, announced, remove_ended, removed_if_killed, require_unused
from medha_cli.summary import checkpoint_dtype, summary
from medha_cli.terminal_display import TerminalDisplay
from medha_process.host_resources import free_port, raise_file_limit
from medha_process.part_settings import LogLevel
from medha_process.supervision.supervisor import StopRequests, supervise
from medha_process.supervision.supervisor_output import end_if_unread
from medha_traces.switch import destination, require_installed
from medha_worker.checkpoints.preflight import require_possible
from medha_worker.host_memory import host_free_bytes

SOCKET_PATH_BYTES = 100  # Linux allows 107 for a socket's path; ours is the run directory and a name in it
LOG_LEVELS = ("debug", "info", "warning", "error")
_NEEDED = {"zmq": "worker", "torch": "worker", "fastapi": "router", "tokenizers": "router"}


@click.command("up")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--port", type=click.IntRange(0, 65535), help="HTTP port instead of the manifest's; 0 takes a free one."
)
@click.option(
    "--record",
    type=click.Path(path_type=Path),
    help="Write a record of the controller's (time, event) pairs to this file.",
)
@click.option(
    "--trace",
    type=FILE,
    help="Write what every rank does to this file, for ui.perfetto.dev; up to 256 MiB.",
)
@click.option(
    "--otlp",
    metavar="URL",
    help="Send traces of requests to this OpenTelemetry collector, such as http://127.0.0.1:4318 (docs/traces.md).",
)
@click.option(
    "--run-dir",
    type=FOLDER,
    help="Keep sockets and settings in this directory, and leave it there; by default it is temporary.",
)
@click.option(
    "--api-keys",
    type=FILE,
    help="File of API keys, as `medha keys` writes it. Without it, requests need no key.",
)
@click.option(
    "--tls-certificate",
    type=FILE,
    help="Certificate chain (PEM); clients are then served by TLS. Both files are read again when they change.",
)
@click.option(
    "--tls-key",
    type=FILE,
    help="Private key of --tls-certificate (PEM, without a password).",
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
    otlp: str | None,
    run_dir: Path | None,
    api_keys: Path | None,
    tls_certificate: Path | None,
    tls_key: Path | None,
    log_level: LogLevel,
) -> None:
    """Serve the MedhaReplica that FILE describes on this machine, until Ctrl-C.

    FILE may also be the directory of a checkpoint. It is then served under the directory's name, with the defaults of
    a manifest.

    Starts a router, a replica controller and the ranks, shows their logs, and prints the URL with examples once
    requests are answered. Ctrl-C lets open requests finish and stops everything; a second Ctrl-C kills.
    A part that dies is started again; a failed start, or the third death of a part within a minute (or the twentieth
    within an hour), stops all of them, and the exit status is 1.

    \b
    Examples:
      medha up examples/tiny.yaml
      medha up examples/tiny.yaml --port 0
      medha up ~/models/Qwen3-8B --port 8080
      medha up examples/tiny.yaml --record events.jsonl --log-level debug
      medha up examples/grid.yaml --trace trace.json
      medha up examples/tiny.yaml --otlp http://127.0.0.1:4318
      medha up examples/tiny.yaml --api-keys keys.yaml
    """
    replica = _with_traces(_with_ports(read_manifest(file), port), otlp)
    directory, draft = model_directory(replica), draft_directory(replica)
    _require_installed(replica)
    _require_free_port(replica)
    tls = _tls_files(tls_certificate, tls_key)
    if api_keys is not None:
        read_keys("--api-keys", api_keys)  # what is wrong is reported now, and not in the router's log
    require_possible(replica.spec, directory, host_free_bytes(1), draft)
    raise_file_limit()  # for the parts too, which inherit it
    console = Console(highlight=False)
    if api_keys is None:
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
            replica,
            directory,
            replica_files,
            record=record,
            trace=trace,
            api_keys=api_keys,
            tls=tls,
            log_level=log_level,
        )

        def ready_summary(process_ids: dict[str, int]) -> list[RenderableType]:
            dtype = checkpoint_dtype(directory, replica.spec.model.dtype)
            urls = (replica_files.url(), replica_files.metrics_url())
            return summary(
                replica,
                *urls,
                dtype,
                replica_files.readiness(),
                process_ids,
                needs_key=api_keys is not None,
            )

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


def _with_ports(replica: MedhaReplica, port: int | None) -> MedhaReplica:
    """Return the replica with the requested port. For port 0, a free one is chosen here: a restarted part keeps it."""
    given, metrics = replica.spec.router, replica.spec.metrics
    port = given.port if port is None else port
    router = given.model_copy(
        update={
            "port": port or free_port(given.host),
            "metrics_port": given.metrics_port or free_port(given.metrics_host),
        }
    )
    metrics = metrics.model_copy(update={"port": metrics.port or free_port(metrics.host)})
    return replica.model_copy(
        update={"spec": replica.spec.model_copy(update={"router": router, "metrics": metrics})}
    )


def _with_traces(replica: MedhaReplica, endpoint: str | None) -> MedhaReplica:
    """Return the replica with another collector for its traces, if one is named."""
    if endpoint is None:
        return replica
    if re.fullmatch(ENDPOINT_PATTERN, endpoint) is None:
        raise ConfigInvalid(
            f"--otlp is {endpoint!r}; give the base URL of a collector, such as http://127.0.0.1:4318"
        )
    traces = replica.spec.traces.model_copy(update={"endpoint": endpoint})
    return replica.model_copy(update={"spec": replica.spec.model_copy(update={"traces": traces})})


def _tls_files(certificate: Path | None, key: Path | None) -> tuple[Path, Path] | None:
    """Return both files of TLS, None if neither is named."""
    if (certificate is None) != (key is None):
        raise ConfigInvalid("--tls-certificate and --tls-key belong together: give both, or neither")
    for option, path in (("--tls-certificate", certificate), ("--tls-key", key)):
        if path is not None and not path.is_file():
            raise ConfigInvalid(f"{option} is {path}, which is no file; name a file in PEM")
    return None if certificate is None or key is None else (certificate, key)


def _require_installed(replica: MedhaReplica) -> None:
    extras = {extra for module, extra in _NEEDED.items() if importlib.util.find_spec(module) is None}
    if extras:
        wanted = ",".join(sorted(extras))
        raise ConfigInvalid(f"parts of Medha are not installed; add them: pip install 'medha[{wanted}]'")
    traces = destination(replica.spec.traces.endpoint, os.environ)
    if traces is not None:
        require_installed(traces)


def _warn_of_strangers(console: Console, replica: MedhaReplica) -> None:
    """Warn, once and before anything starts, that a router on this address is open to other machines."""
    host, port = replica.spec.router.host, replica.spec.router.port
    addresses = {found[4][0] for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    if all(ip_address(address).is_loopback for address in addresses):
        return
    text = (
        f"warning: router.host is {host}: anybody who reaches port {port} of this machine can use the model, because "
        "the router asks for no key; set it to 127.0.0.1, or pass --api-keys"
    )
    console.print(text, style="yellow", markup=False, soft_wrap=True)


def _require_free_port(replica: MedhaReplica) -> None:
    """Report a taken port now, in words, rather than in the router's log later."""
    router = replica.spec.router
    _require_free("host", "port", router.host, router.port)
    _require_free("metricsHost", "metricsPort", router.metrics_host, router.metrics_port)


def _require_free(host_field: str, port_field: str, host: str, port: int) -> None:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise ConfigInvalid(
            f"spec.router: cannot listen on {host} port {port}: {error.strerror or error}; stop what uses it, or set "
            f"spec.router.{host_field} or spec.router.{port_field} (0 or --port 0: a free one)"
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
    """Provide a directory in which only this user can write.

    At the end, remove it if it is temporary, else only its keys.
    """
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
