"""The operator as a real process, run against the API server of a test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.control_plane import ControlPlane, free_port
from medha_operator.operator_settings import OperatorSettings
from medha_operator.rbac_rules import cluster_rules, lease_rules, namespaced_rules, router_rules

_TESTS = Path(__file__).resolve().parents[1]
_SHOWN_CHARACTERS = 4000


class Operator:
    """A `kopf run` process, its settings and its log."""

    def __init__(
        self,
        folder: Path,
        kubeconfig: Path,
        name: str,
        *,
        module: str = "medha_operator",
        checkout: Path | None = None,
        watched: tuple[str, ...] = (),
        **settings: Any,
    ) -> None:
        """Start it; `checkout` holds the sources, by default these, and `watched` are kopf's namespaces, by default all."""
        folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self._arguments = [
            *("--standalone", "-m", module),
            *([f"--namespace={one}" for one in watched] or ["--all-namespaces"]),
        ]
        self.log = folder / f"{name}.log"
        self.metrics_port = free_port("127.0.0.1")
        self.health_port = free_port("127.0.0.1")
        settings = {
            "lease_namespace": "default",
            "lease_seconds": 6.0,
            "metrics_port": self.metrics_port,
        } | settings
        file = folder / f"{name}.json"
        file.write_text(json.dumps(settings), encoding="utf-8")
        sources = [] if checkout is None else [checkout / "core", checkout / "operator"]
        paths = [*map(str, sources), str(_TESTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        self._environment = os.environ | {
            "KUBECONFIG": str(kubeconfig),
            "MEDHA_OPERATOR_SETTINGS": str(file),
            "MEDHA_POD_NAME": name,
            "MEDHA_POD_NAMESPACE": "default",
            "PYTHONPATH": os.pathsep.join(paths),
        }
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            # `setpriv` kills it when this process dies, however it dies.
            return subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", sys.executable, "-m", "kopf", "run"]  # noqa: RUF005
                + self._arguments
                + [f"--liveness=http://127.0.0.1:{self.health_port}/healthz"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )

    def restart(self) -> None:
        """Kill and restart it, as a container restarts in the same pod."""
        self.kill()
        self.process = self._start()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill it without warning, as the loss of its machine would."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Stop it as Kubernetes does, and return its exit status."""
        self.process.terminate()
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


@contextmanager
def operator(folder: Path, kubeconfig: Path, name: str = "op", **settings: Any) -> Iterator[Operator]:
    """Run an operator until the end of the block; if that fails, print its state and the end of its log."""
    running = Operator(folder, kubeconfig, name, **settings)
    try:
        yield running
    except BaseException:
        ended = running.process.poll()
        state = "runs" if ended is None else f"has ended with {ended}"
        print(f"operator {name} {state}; the end of its log:\n{running.said()[-_SHOWN_CHARACTERS:]}")
        raise
    finally:
        if running.process.poll() is None:
            running.signal(signal.SIGCONT)
            running.kill()


def limited_kubeconfig(plane: ControlPlane, settings: OperatorSettings) -> Path:
    """Return the kubeconfig of a service account with exactly the rights of `medha_operator.rbac_rules`."""
    bound = {"": [*namespaced_rules(), *cluster_rules()], settings.lease_namespace: lease_rules(settings)}
    documents: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "op", "namespace": "default"}}
    ]
    for router in settings.routers:
        bound[router.namespace] = bound.get(router.namespace, []) + router_rules(router)
    for namespace, rules in bound.items():
        kind = "Role" if namespace else "ClusterRole"
        metadata = {"name": "op"} | ({"namespace": namespace} if namespace else {})
        head = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": metadata}
        subject = {"kind": "ServiceAccount", "name": "op", "namespace": "default"}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": "op"}
        documents.append(head | {"kind": kind, "rules": rules})
        documents.append(head | {"kind": f"{kind}Binding", "subjects": [subject], "roleRef": role})
    plane.kubectl(
        "apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": documents})
    )
    token = plane.kubectl("create", "token", "op", "-n", "default", "--duration=3h").strip()
    config = json.loads(plane.kubeconfig.read_text(encoding="utf-8"))
    config["users"] = [{"name": "u", "user": {"token": token}}]
    path = plane.folder / "op.kubeconfig"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path
