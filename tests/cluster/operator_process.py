"""The operator as it is run in earnest, against the API server of a test."""

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

from cluster.control_plane import free_port


class Operator:
    """A `kopf run` process, its settings and its log."""

    def __init__(self, folder: Path, kubeconfig: Path, name: str, **settings: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.log = folder / f"{name}.log"
        self.metrics_port = free_port("127.0.0.1")
        settings = {
            "lease_namespace": "default",
            "lease_seconds": 6.0,
            "metrics_port": self.metrics_port,
        } | settings
        file = folder / f"{name}.json"
        file.write_text(json.dumps(settings), encoding="utf-8")
        self._environment = os.environ | {
            "KUBECONFIG": str(kubeconfig),
            "MEDHA_OPERATOR_SETTINGS": str(file),
            "MEDHA_POD_NAME": name,
            "MEDHA_POD_NAMESPACE": "default",
        }
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            # `setpriv` ends it when we die, however we die.
            return subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", sys.executable, "-m", "kopf", "run"]  # noqa: RUF005
                + ["--standalone", "--all-namespaces", "-m", "medha_operator"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )

    def restart(self) -> None:
        """Begin again, as the same pod would."""
        self.kill()
        self.process = self._start()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it as a lost machine does."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """End it as Kubernetes does; its exit status."""
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
    """Run one until the end of the block."""
    running = Operator(folder, kubeconfig, name, **settings)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.signal(signal.SIGCONT)
            running.kill()
