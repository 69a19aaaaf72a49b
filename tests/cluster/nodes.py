"""Clusters whose pods really run: a control plane, CoreDNS and one or two real nodes, on their own network.

```python
with one_node(tmp_path, images=[Path("worker.tar")]) as cluster:
    cluster.kubectl("apply", "-f", "pod.yaml")
```
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.binaries import CONTROL_PLANE, build
from cluster.control_plane import ControlPlane, Network, control_plane
from cluster.keys import ADMIN
from cluster.namespaces import Sandbox, check_machine, cluster_cgroup, forwarded
from cluster.node import PAUSE_IMAGE, Node
from cluster.tiny_image import write_image

PROGRAMS = (*CONTROL_PLANE, "kubelet", "kube-proxy", "coredns", "helm", "pause", "hello")
ADDRESS = "10.111.0.1"
"""Address of the API server and DNS."""
_PORT = 6443
_COREFILE = """\
.:53 {{
    bind {address}
    kubernetes cluster.local {{
        kubeconfig {kubeconfig}
        ttl 0
    }}
    errors
}}
"""


@dataclass
class Cluster:
    """A running cluster."""

    plane: ControlPlane
    sandbox: Sandbox
    """The cluster's network, with control plane and DNS; nodes are nested in it."""
    nodes: list[Node]

    @property
    def kubeconfig(self) -> Path:
        """Kubeconfig of a user with all rights, for programs on this machine."""
        return self.plane.kubeconfig

    @property
    def inner_kubeconfig(self) -> Path:
        """Kubeconfig of a user with all rights, for programs that `run` starts."""
        return self.plane.keys.kubeconfig(self.plane.inner_url, *ADMIN, name="inner")

    def kubectl(self, *arguments: str, check: bool = True, stdin: str | None = None) -> str:
        """Run `kubectl` and return its output, both streams.

        Raises:
            AssertionError: it failed and `check` is set.
        """
        return self.plane.kubectl(*arguments, check=check, stdin=stdin)

    def helm(self, *arguments: str, check: bool = True) -> str:
        """Run `helm` and return its output, both streams.

        Raises:
            AssertionError: it failed and `check` is set.
        """
        done = subprocess.run(
            [str(self.plane.programs["helm"]), "--kubeconfig", str(self.kubeconfig), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert not check or done.returncode == 0, done.stdout
        return done.stdout

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on the first node; it reaches pods and Services by address, not by name."""
        return self.nodes[0].run(command, **options)

    def forward(self, host: str, port: int) -> AbstractContextManager[int]:
        """Forward a port of this machine's loopback to a pod or a Service, for clients in this process."""
        assert self.nodes[0].sandbox is not None
        return forwarded(self.nodes[0].sandbox, host, port)


@contextmanager
def one_node(folder: Path, images: Sequence[Path] = (), **options: Any) -> Iterator[Cluster]:
    """Run a cluster of one node that has `images` (OCI archives); `options` are those of `control_plane`.

    Raises:
        CannotRun: the machine cannot run a node.
        CannotBuild: a program is missing.
        NotStarted: a server did not come up.
    """
    with _nodes(folder, 1, images, options) as cluster:
        yield cluster


@contextmanager
def two_nodes(folder: Path, images: Sequence[Path] = (), **options: Any) -> Iterator[Cluster]:
    """Run a cluster like that of `one_node` with two nodes, each of which can be frozen."""
    with _nodes(folder, 2, images, options) as cluster:
        yield cluster


@contextmanager
def _nodes(folder: Path, count: int, images: Sequence[Path], options: dict[str, Any]) -> Iterator[Cluster]:
    check_machine()
    programs = build(PROGRAMS)
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    pause = write_image(folder / "pause.tar", PAUSE_IMAGE, {"/pause": programs["pause"]}, ["/pause"])
    with cluster_cgroup([folder / "etcd"]) as cgroup:
        sandbox = Sandbox(cgroup, [str(programs["pause"])])
        try:
            sandbox.ip("link", "add", "cluster", "type", "bridge")
            sandbox.ip("address", "add", f"{ADDRESS}/24", "dev", "cluster")
            sandbox.ip("link", "set", "cluster", "up")
            with forwarded(sandbox, ADDRESS, _PORT) as port:
                inside = tuple(sandbox.inside("net", "pid"))
                network = Network(ADDRESS, _PORT, f"https://127.0.0.1:{port}", inside)
                with control_plane(folder, network=network, **options) as plane:
                    plane.programs.update(programs)
                    cluster = Cluster(plane, sandbox, [])
                    try:
                        _start_nodes(cluster, count, [pause, *images])
                        yield cluster
                    finally:
                        for node in cluster.nodes:
                            node.stop()
        finally:
            sandbox.stop()


def _start_nodes(cluster: Cluster, count: int, images: Sequence[Path]) -> None:
    plane = cluster.plane
    _start_dns(plane)
    for index in range(1, count + 1):
        node = Node(plane.folder, plane, index, f"10.111.0.{10 + index}", ADDRESS)
        cluster.nodes.append(node)
        node.start(cluster.sandbox.cgroup, cluster.sandbox)
    for node in cluster.nodes:
        for other in cluster.nodes:
            if other is not node:
                node.route_to(other)

    def fill(node: Node) -> None:
        for archive in images:
            node.import_image(archive)

    with ThreadPoolExecutor() as pool:
        list(pool.map(fill, cluster.nodes))
    for node in cluster.nodes:
        node.join()
    for node in cluster.nodes:
        node.wait_until_ready()


def _start_dns(plane: ControlPlane) -> None:
    kubeconfig = plane.keys.kubeconfig(plane.inner_url, "coredns", "system:masters")
    corefile = plane.folder / "Corefile"
    corefile.write_text(_COREFILE.format(address=ADDRESS, kubeconfig=kubeconfig))
    plane.start("coredns", "-conf", str(corefile))
