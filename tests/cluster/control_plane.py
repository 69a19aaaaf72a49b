"""A control plane of real servers: etcd, kube-apiserver, and optionally controller-manager and scheduler.

Everything is in one folder, listens on one address, and ends with the process that started it.
"""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cluster.binaries import build
from cluster.keys import ADMIN, CONTROLLER_MANAGER, SCHEDULER, Keys

SERVICES = "10.96.0.0/16"
FIRST_SERVICE = "10.96.0.1"
_START_SECONDS = 60.0
_END_SECONDS = 10.0


class NotStarted(Exception):
    """A server did not become ready; holds the end of its log."""


class Server:
    """A running program of the cluster, and its log."""

    def __init__(
        self, folder: Path, program: Path, arguments: Sequence[str], inside: Sequence[str] = ()
    ) -> None:
        """`inside` is a command prefix that runs the program elsewhere, e.g. in namespaces."""
        self.name = program.name
        self.log = folder / f"{program.name}.log"
        with self.log.open("ab") as log:
            # `setpriv` kills it when this process dies, however it dies.
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", *inside, str(program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                start_new_session=True,
            )

    def wait_until(self, is_ready: Callable[[], bool], what: str) -> None:
        """Poll `is_ready` until it holds.

        Raises:
            NotStarted: the program ended, or the time limit has passed.
        """
        deadline = time.monotonic() + _START_SECONDS
        while not is_ready():
            ended = self.process.poll()
            if ended is not None or time.monotonic() > deadline:
                how = (
                    f"ended with {ended}" if ended is not None else f"has not {what} in {_START_SECONDS:g} s"
                )
                tail = self.log.read_text(encoding="utf-8", errors="replace")[-3000:]
                raise NotStarted(f"{self.name} {how}; the end of {self.log}:\n{tail}")
            time.sleep(0.05)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass
class ControlPlane:
    """A running control plane."""

    folder: Path
    url: str
    """URL of the API server for this process."""
    inner_url: str
    """URL of the API server within the cluster."""
    keys: Keys
    programs: dict[str, Path]
    inside: tuple[str, ...] = ()
    """Command prefix that runs a program where the servers are."""
    servers: dict[str, Server] = field(default_factory=dict)

    @property
    def kubeconfig(self) -> Path:
        """Kubeconfig of a user with all rights."""
        return self.keys.kubeconfig(self.url, *ADMIN)

    def start(self, program: str, *arguments: str) -> Server:
        """Run another server where the others are; it ends with them."""
        server = Server(self.folder, self.programs[program], arguments, self.inside)
        self.servers[program] = server
        return server

    def kubectl(self, *arguments: str, check: bool = True, stdin: str | None = None) -> str:
        """Run `kubectl` and return its output, both streams.

        Raises:
            AssertionError: it failed and `check` is set.
        """
        done = subprocess.run(
            [str(self.programs["kubectl"]), "--kubeconfig", str(self.kubeconfig), *arguments],
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert not check or done.returncode == 0, done.stdout
        return done.stdout


@dataclass(frozen=True)
class Network:
    """The network in which the servers of a control plane run, if it is not this process's own."""

    address: str
    """Address in that network on which the servers listen."""
    port: int
    """Port of the API server in that network."""
    url: str = ""
    """URL of the API server for this process, if it differs."""
    inside: tuple[str, ...] = ()
    """Command prefix that runs a program in that network."""


@contextmanager
def control_plane(
    folder: Path,
    *,
    network: Network | None = None,
    controllers: bool = True,
    scheduler: bool = True,
    gates: Sequence[str] = (),
    runtime_config: Sequence[str] = (),
    controller_flags: Sequence[str] = (),
    before_controllers: Callable[[ControlPlane], None] | None = None,
) -> Iterator[ControlPlane]:
    """Start the servers, yield once the `default` ServiceAccount exists, and stop them afterwards.

    Without `controllers`, it yields once the API server answers. Without `network`, the servers listen on
    this machine's loopback. `before_controllers` is called in between: the garbage collector knows kinds that are
    defined then from its start, and finds later ones within 30 s.

    Raises:
        CannotBuild: a program is missing.
        NotStarted: a server did not come up.
    """
    names = ["etcd", "kube-apiserver", "kubectl"]
    names += ["kube-controller-manager"] if controllers else []
    names += ["kube-scheduler"] if scheduler else []
    programs = build(names)
    folder.mkdir(parents=True, exist_ok=True)
    keys = Keys(folder / "keys")
    network = network or Network("127.0.0.1", free_port("127.0.0.1"))
    inner_url = f"https://{network.address}:{network.port}"
    plane = ControlPlane(folder, network.url or inner_url, inner_url, keys, programs, network.inside)
    feature_gates = [f"--feature-gates={','.join(gates)}"] if gates else []
    try:
        etcd_url = _start_etcd(plane)
        _start_api_server(plane, network, etcd_url, [*feature_gates, *_runtime(runtime_config)])
        if before_controllers is not None:
            before_controllers(plane)
        if controllers:
            _start_controllers(plane, [*feature_gates, *controller_flags])
        if scheduler:
            _start_scheduler(plane, feature_gates)
        if controllers:
            plane.servers["kube-controller-manager"].wait_until(
                lambda: "default" in plane.kubectl("get", "serviceaccount", "-o", "name", check=False),
                "made the `default` ServiceAccount",
            )
        yield plane
    finally:
        for server in reversed(plane.servers.values()):
            server.stop()
        shutil.rmtree(folder / "etcd", ignore_errors=True)


def free_port(address: str) -> int:
    """Return a port that is currently unused on `address`."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _runtime(entries: Sequence[str]) -> list[str]:
    return [f"--runtime-config={','.join(entries)}"] if entries else []


def _start_etcd(plane: ControlPlane) -> str:
    client, peer = (f"http://127.0.0.1:{free_port('127.0.0.1')}" for _ in range(2))
    server = plane.start(
        "etcd",
        f"--data-dir={plane.folder / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
    )
    # Its port may be in another network, so the log is checked instead.
    server.wait_until(lambda: b"ready to serve client requests" in server.log.read_bytes(), "begun to serve")
    return client


def _start_api_server(plane: ControlPlane, network: Network, etcd_url: str, more: Sequence[str]) -> None:
    keys, address = plane.keys, network.address
    certificate, key = keys.server("kube-apiserver", address, FIRST_SERVICE, "localhost", "127.0.0.1")
    kubelet_certificate, kubelet_key = keys.client("kube-apiserver-kubelet-client", "system:masters")
    accounts = keys.service_accounts()
    aggregator, aggregator_certificate, aggregator_key = keys.aggregator()
    server = plane.start(
        "kube-apiserver",
        f"--etcd-servers={etcd_url}",
        f"--bind-address={address}",
        f"--secure-port={network.port}",
        # Only published, not used; a loopback address would be refused.
        f"--advertise-address={address if not address.startswith('127.') else '192.0.2.1'}",
        f"--tls-cert-file={certificate}",
        f"--tls-private-key-file={key}",
        f"--client-ca-file={keys.authority}",
        f"--kubelet-client-certificate={kubelet_certificate}",
        f"--kubelet-client-key={kubelet_key}",
        "--kubelet-preferred-address-types=InternalIP",
        f"--requestheader-client-ca-file={aggregator}",
        f"--proxy-client-cert-file={aggregator_certificate}",
        f"--proxy-client-key-file={aggregator_key}",
        "--requestheader-allowed-names=aggregator",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--enable-aggregator-routing=true",  # no kube-proxy serves it: it calls pods, not Services
        f"--service-account-key-file={accounts}",
        f"--service-account-signing-key-file={accounts}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-cluster-ip-range={SERVICES}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        *more,
    )
    context = ssl.create_default_context(cafile=str(keys.authority))
    context.load_cert_chain(*keys.client(*ADMIN))
    server.wait_until(lambda: _answers(f"{plane.url}/readyz", context), "answered /readyz")


def _start_controllers(plane: ControlPlane, more: Sequence[str]) -> None:
    plane.start(
        "kube-controller-manager",
        *_serving(plane, CONTROLLER_MANAGER),
        f"--root-ca-file={plane.keys.authority}",
        f"--service-account-private-key-file={plane.keys.service_accounts()}",
        "--use-service-account-credentials=true",
        f"--flex-volume-plugin-dir={plane.folder / 'flex'}",
        "--concurrent-statefulset-syncs=20",
        *more,
    )


def _start_scheduler(plane: ControlPlane, more: Sequence[str]) -> None:
    plane.start("kube-scheduler", *_serving(plane, SCHEDULER), *more)


def _serving(plane: ControlPlane, user: tuple[str, str | None]) -> list[str]:
    """Return the flags that controller-manager and scheduler have in common."""
    kubeconfig = plane.keys.kubeconfig(plane.inner_url, *user)
    return [
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--kube-api-qps=500",  # the defaults throttle a test
        "--kube-api-burst=1000",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        f"--secure-port={free_port('127.0.0.1')}",
    ]


def _answers(url: str, context: ssl.SSLContext | None = None) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1, context=context) as response:  # noqa: S310 - our own server
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
