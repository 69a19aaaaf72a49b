"""A real node: containerd, kubelet and kube-proxy in their own namespaces; pods really run on it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster.control_plane import ControlPlane, Server
from cluster.keys import PROXY
from cluster.namespaces import Cgroup, Sandbox

PODS = "10.244.0.0/16"
PAUSE_IMAGE = "medha.test/pause:1"
_SOCKET = "/run/containerd/containerd.sock"
# Images and containers are in the node's own /var/lib, in memory: they vanish with its namespaces, and
# unpacking them does not delay etcd, which waits for the disk at every write.
_CONTAINERD = """\
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
oom_score = 0
[grpc]
  address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
"""


class Node:
    """A node `node-<index>` at `address` in the cluster's network; its pods are in 10.244.<index>.0/24."""

    def __init__(self, folder: Path, plane: ControlPlane, index: int, address: str, dns: str) -> None:
        self.name = f"node-{index}"
        self.address = address
        self.pods = f"10.244.{index}.0/24"
        self.folder = folder / self.name
        self.folder.mkdir()
        self._plane = plane
        self._dns = dns
        self.sandbox: Sandbox | None = None
        self._servers: dict[str, Server] = {}

    # --- lifecycle --------------------------------------------------------------------------------------

    def start(self, cgroup: Cgroup, within: Sandbox) -> None:
        """Create the namespaces, attach them to the cluster's bridge, and start containerd."""
        programs = self._plane.programs
        init = [str(programs["pause"]), self.name, str(self.folder)]
        self.sandbox = Sandbox(Cgroup(self.name, cgroup), init, within=within)
        within.ip(*f"link add {self.name} type veth peer name eth0 netns {self.sandbox.pid}".split())
        within.ip("link", "set", self.name, "master", "cluster", "up")
        within.ip("route", "add", self.pods, "via", self.address)
        self.sandbox.ip("address", "add", f"{self.address}/24", "dev", "eth0")
        self.sandbox.ip("link", "set", "eth0", "up")
        # Service addresses need a route, too, before kube-proxy's rules translate them.
        self.sandbox.ip("route", "add", "default", "via", self._dns)
        self._write_settings()
        self._start(Path("/usr/bin/containerd"), "--config", str(self.folder / "containerd.toml"))
        self._servers["containerd"].wait_until(
            lambda: self._ctr("version", check=False).returncode == 0, "answered"
        )

    def join(self) -> None:
        """Start kubelet and kube-proxy."""
        self.start_kubelet()
        proxy = self.folder / "kube-proxy.json"
        self._start(
            self._plane.programs["kube-proxy"], f"--config={proxy}", f"--hostname-override={self.name}"
        )

    def route_to(self, other: Node) -> None:
        """Add a route, so that this node's pods reach those of another."""
        assert self.sandbox is not None
        self.sandbox.ip("route", "add", other.pods, "via", other.address)

    def import_image(self, archive: Path) -> None:
        """Import an image under the name in its archive; pods use it with `imagePullPolicy: Never`."""
        self._ctr("-n", "k8s.io", "images", "import", str(archive.resolve()))

    def mount(self, source: Path, target: str) -> None:
        """Bind-mount a file or folder of this machine on the node, for as long as the node exists."""
        make = (
            f"mkdir -p {target}" if source.is_dir() else f"mkdir -p {Path(target).parent} && touch {target}"
        )
        self.run(["sh", "-ec", f"{make} && mount --bind {source.resolve()} {target}"])

    def server(self, name: str) -> Server:
        """Return the server `containerd`, `kubelet` or `kube-proxy`."""
        return self._servers[name]

    def images(self) -> list[str]:
        """Return the names of the images on this node."""
        return self._ctr("-n", "k8s.io", "images", "list", "-q").stdout.split()

    def stop(self) -> None:
        """End all processes of the node, frozen or not."""
        if self.sandbox is not None:
            self.sandbox.cgroup.set_frozen(False)
            self.sandbox.stop()
            for server in self._servers.values():
                server.stop()

    # --- actions of tests -------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Freeze every process: kubelet, containerd and all containers. Connections stay open, unanswered."""
        assert self.sandbox is not None
        self.sandbox.cgroup.set_frozen(True)

    def thaw(self, *, with_kubelet: bool = True) -> None:
        """Resume all processes as if no time had passed; without kubelet, no old container is stopped."""
        assert self.sandbox is not None
        if not with_kubelet:
            self._servers["kubelet"].process.kill()  # before it does anything else
        self.sandbox.cgroup.set_frozen(False)
        if not with_kubelet:
            self.stop_kubelet()

    def stop_kubelet(self) -> None:
        """Kill the kubelet; containers run on."""
        self._servers.pop("kubelet").stop()

    def start_kubelet(self) -> None:
        """Start the kubelet, which must not be running."""
        self._start(
            self._plane.programs["kubelet"],
            f"--config={self.folder / 'kubelet.json'}",
            f"--kubeconfig={self._kubeconfig(f'system:node:{self.name}', 'system:nodes')}",
            f"--hostname-override={self.name}",
            f"--node-ip={self.address}",
        )

    def restart_kubelet(self) -> None:
        """Kill the kubelet and start it anew; containers run on."""
        self.stop_kubelet()
        self.start_kubelet()

    def kill_container(self, container: str) -> None:
        """Kill the first process of a container, as only root on the node can, not a process in its pod."""
        self._ctr("-n", "k8s.io", "tasks", "kill", "--signal", "SIGKILL", container)

    def wait_until_ready(self) -> None:
        """Wait until this node is Ready for the API server.

        Raises:
            NotStarted: it does not become Ready in time.
        """
        path = '{.status.conditions[?(@.type=="Ready")].status}'
        self._servers["kubelet"].wait_until(
            lambda: (
                self._plane.kubectl("get", "node", self.name, "-o", f"jsonpath={path}", check=False) == "True"
            ),
            "made its node Ready",
        )

    def run(
        self, command: Sequence[str], *, check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the node, in all its namespaces; the output is text of both streams.

        Raises:
            AssertionError: it failed and `check` is set.
        """
        assert self.sandbox is not None
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | options
        done = subprocess.run([*self.sandbox.inside(), *command], check=False, **options)
        assert not check or done.returncode == 0, f"{command}: {done.stdout}"
        return done

    # --- internals --------------------------------------------------------------------------------------

    def _ctr(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run(["ctr", "--address", _SOCKET, *arguments], check=check)

    def _start(self, program: Path, *arguments: str) -> None:
        assert self.sandbox is not None
        self._servers[program.name] = Server(self.folder, program, arguments, self.sandbox.inside())

    def _kubeconfig(self, user: str, group: str | None = None) -> Path:
        return self._plane.keys.kubeconfig(self._plane.inner_url, user, group)

    def _write_settings(self) -> None:
        config = _CONTAINERD.format(folder=self.folder, socket=_SOCKET, pause=PAUSE_IMAGE)
        (self.folder / "containerd.toml").write_text(config)
        (self.folder / "cni").mkdir()
        self._write("cni/10-pods.conflist", _network(self.pods))
        self._write("kubelet.json", _kubelet(self.folder, self._plane, self._dns))
        self._write("kube-proxy.json", _kube_proxy(self._kubeconfig(*PROXY)))

    def _write(self, name: str, settings: dict[str, Any]) -> None:
        (self.folder / name).write_text(json.dumps(settings, indent=1))


def _network(pods: str) -> dict[str, Any]:
    bridge = {
        "type": "bridge",
        "bridge": "pods",
        "isGateway": True,
        "hairpinMode": True,
        "ipam": {"type": "host-local", "ranges": [[{"subnet": pods}]], "routes": [{"dst": "0.0.0.0/0"}]},
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge, ports]}


def _kubelet(folder: Path, plane: ControlPlane, dns: str) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": False},
            "x509": {"clientCAFile": str(plane.keys.authority)},
        },
        "authorization": {"mode": "AlwaysAllow"},  # anyone with a certificate of the authority
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        "clusterDNS": [dns],
        "clusterDomain": "cluster.local",
        "containerRuntimeEndpoint": f"unix://{_SOCKET}",
        "failSwapOn": False,
        "imageGCHighThresholdPercent": 100,  # a collected image could not be pulled again
        "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "oomScoreAdj": 0,
        "resolvConf": "",
        "volumePluginDir": str(folder / "volume-plugins"),
        "kubeAPIQPS": 100,
        "kubeAPIBurst": 200,
        "logging": {"verbosity": 2},
    }


def _kube_proxy(kubeconfig: Path) -> dict[str, Any]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "clusterCIDR": PODS,
        "mode": "iptables",
        # Zero leaves the kernel's settings alone.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "iptables": {"localhostNodePorts": False, "minSyncPeriod": "100ms", "syncPeriod": "30s"},
        "oomScoreAdj": 0,
    }
