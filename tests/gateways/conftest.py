"""Routers with scripted replicas behind a real Envoy, which has the page's configuration."""

from __future__ import annotations

import json
import signal
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
import trustme

from gateways.envoy import Config, Envoy, block, on_loopback, running_envoy, with_files
from medha.api.api_keys import hash_of
from medha.wire.messages import Emit, Submit
from medha_process.host_resources import free_port
from medha_router.tokenizer_bundle import Bundle
from router.conftest import MODEL, Router, Script, ScriptedReplica, say, start_router, stop_router, wait_for
from router.conftest import bundle as bundle
from router.conftest import bundle_files as bundle_files

ROUTER_NAME = "medha-router.medha-system.svc"
"""The name in the certificate of routers."""
SAID = "one two three"
KEY, LIMITED_KEY = "sk-app", "sk-limited"
KEYS = {
    "keys": [
        {"name": "app", "sha256": hash_of(KEY)},
        {"name": "limited", "sha256": hash_of(LIMITED_KEY), "requestsPerMinute": 1},
    ]
}


@dataclass
class Certificates:
    """An authority, and the files of a certificate that it has issued."""

    authority: trustme.CA
    folder: Path

    def issue(self, name: str) -> dict[str, Path]:
        """Return the files of a certificate of `name`: `tls.crt` and `tls.key`."""
        issued = self.authority.issue_cert(name)
        folder = self.folder / name
        folder.mkdir(parents=True)
        issued.private_key_pem.write_to_path(folder / "tls.key")
        for pem in issued.cert_chain_pems:
            pem.write_to_path(folder / "tls.crt", append=True)
        return {file: folder / file for file in ("tls.crt", "tls.key")}

    def trusting(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return context


@dataclass
class Site:
    """Envoy, and the routers behind it by address."""

    envoy: Envoy
    routers: dict[str, Router]
    replicas: dict[str, ScriptedReplica]
    trust: ssl.SSLContext
    config: Config
    """The settings with which Envoy runs."""

    @property
    def url(self) -> str:
        return f"https://localhost:{self.envoy.port}"

    def client(self, key: str = KEY, **options: Any) -> openai.OpenAI:
        """Return a client; it retries nothing unless it is told to."""
        http = openai.DefaultHttpxClient(verify=self.trust)
        given = {"max_retries": 0, "timeout": 60.0, "http_client": http, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **given)

    def submitted(self) -> list[tuple[ScriptedReplica, Submit]]:
        """Return what routers have sent to their replicas."""
        return [(replica, submit) for replica in self.replicas.values() for submit in replica.submits]

    def say(self, script: Script) -> None:
        """Have all replicas answer so from now on, and forget what they have seen."""
        for replica in self.replicas.values():
            replica.script = script
            replica.submits.clear()
            replica.cancels.clear()

    def the_submit(self) -> tuple[ScriptedReplica, Submit]:
        """Wait for the one sequence that is sent; return it with its replica."""
        wait_for(lambda: bool(self.submitted()), "no router has sent it")
        (found,) = self.submitted()
        return found


@dataclass
class Silences:
    """An answer and a stream that begin with a long silence."""

    began_at: float
    sent: list[tuple[ScriptedReplica, Submit]]
    listeners: list[threading.Thread]
    received: dict[bool, list[str]]
    """Text of the answer, and lines of the stream, by whether it is a stream."""

    def end(self, tokens: tuple[int, ...]) -> None:
        """Have the replicas say something at last, and wait until all is received."""
        for server, submit in self.sent:
            server.order("send", Emit(submit.id, tokens, "length"))
        for listener in self.listeners:
            listener.join(60)


def _stop(router: Router) -> None:
    if router.process.poll() is None:
        router.process.send_signal(signal.SIGUSR1)  # without the time to leave
    stop_router(router)


def start_site(
    stack: ExitStack, folder: Path, files: dict[str, bytes], script: Script, *, encrypted: bool
) -> Site:
    """Start two routers and Envoy; with `encrypted`, links between them are TLS, as the page's second block shows."""
    certificates = Certificates(trustme.CA(), folder / "certificates")
    certificates.folder.mkdir(parents=True)
    (folder / "keys.yaml").write_text(json.dumps(KEYS), encoding="utf-8")
    addresses = ["127.0.0.2", "127.0.0.3"]
    port, metrics_port = free_port("127.0.0.2"), free_port("127.0.0.3")
    settings: dict[str, Any] = {
        "port": port,
        "metrics_port": metrics_port,
        "log_level": "info",
        "api_keys_file": str(folder / "keys.yaml"),
        "trusted_proxies": ["127.0.0.1"],
        "leave_seconds": 5,
        "join_seconds": 0,
    }
    if encrypted:
        issued = certificates.issue(ROUTER_NAME)
        settings |= {"tls_certificate_file": str(issued["tls.crt"]), "tls_key_file": str(issued["tls.key"])}
    routers, replicas = {}, {}
    for address in addresses:
        (folder / address).mkdir()
        router = start_router(folder / address, host=address, metrics_host=address, **settings)
        stack.callback(_stop, router)
        replicas[address] = ScriptedReplica(router, files, name=f"r-{address}", script=script)
        stack.callback(replicas[address].stop)
        routers[address] = router
    for router in routers.values():
        wait_for(partial(_is_ready, router), "never ready")
    config = page_config(certificates, encrypted=encrypted)
    on_loopback(config, addresses, port, metrics_port)
    envoy = stack.enter_context(running_envoy(folder / "envoy", config))
    envoy.wait(lambda: envoy.healthy() == set(addresses), "not all routers are healthy")
    return Site(envoy, routers, replicas, certificates.trusting(), config)


def _is_ready(router: Router) -> bool:
    return router.metrics_http.get("/ready").status_code == 200


def page_config(certificates: Certificates, *, encrypted: bool) -> Config:
    """Return the page's configuration, with the block for TLS up to the router laid over its cluster if wanted."""
    config = block("envoy.yaml")
    files = {f"/etc/envoy/tls/{name}": file for name, file in certificates.issue("localhost").items()}
    if encrypted:
        config["static_resources"]["clusters"][0] |= block("cluster-tls.yaml")
        files["/etc/envoy/ca/ca.crt"] = certificates.folder / "ca.crt"
        certificates.authority.cert_pem.write_to_path(files["/etc/envoy/ca/ca.crt"])
    return with_files(config, files)


@pytest.fixture(scope="session")
def script(bundle: Bundle) -> Script:
    return Script(tokens=say(bundle, SAID))


@pytest.fixture(scope="session")
def shared_site(
    tmp_path_factory: pytest.TempPathFactory, bundle_files: dict[str, bytes], script: Script
) -> Iterator[Site]:
    with ExitStack() as stack:
        yield start_site(stack, tmp_path_factory.mktemp("gateway"), bundle_files, script, encrypted=True)


@pytest.fixture(scope="session")
def silences(shared_site: Site, script: Script) -> Iterator[Silences]:
    """An answer and a stream that stay silent while other tests run, so that nobody waits for them."""
    shared_site.say(replace(script, tokens=(), hold=True))
    received: dict[bool, list[str]] = {True: [], False: []}

    def listen(stream: bool) -> None:
        with shared_site.client() as client:
            ask = client.completions
            if stream:
                with ask.with_streaming_response.create(model=MODEL, prompt="x", stream=True) as answer:
                    received[stream] += [line for line in answer.iter_lines() if line]
            else:
                received[stream].append(ask.create(model=MODEL, prompt="x").choices[0].text)

    listeners = [threading.Thread(target=listen, args=[stream], daemon=True) for stream in received]
    for listener in listeners:
        listener.start()
    wait_for(lambda: len(shared_site.submitted()) == len(received), "not both are sent")
    silences = Silences(time.monotonic(), shared_site.submitted(), listeners, received)
    yield silences
    silences.end(script.tokens)


@pytest.fixture
def site(shared_site: Site, silences: Silences, script: Script) -> Site:
    """Envoy with TLS on both sides; each replica answers `SAID`."""
    assert silences.sent, "they begin before the first test"
    shared_site.say(script)
    return shared_site


@pytest.fixture
def plain_site(tmp_path: Path, bundle_files: dict[str, bytes], script: Script) -> Iterator[Site]:
    """Envoy and routers of the test's own, without TLS between them."""
    with ExitStack() as stack:
        yield start_site(stack, tmp_path, bundle_files, script, encrypted=False)
