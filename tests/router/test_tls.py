"""TLS with real certificates, replaced while clients are connected."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import trustme

from medha.wire.messages import Emit
from medha_links.key_files import KeyFiles
from medha_router.tokenizer_bundle import Bundle

from .conftest import MODEL, Router, Script, ScriptedReplica, running_router, say, wait_for

VALID = 'medha_router_file_valid{file="TLS certificate"}'


class Mounted:
    """The folder of a Secret's volume of type `kubernetes.io/tls`, as a kubelet swaps its content."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._version = 0
        folder.mkdir()
        self.certificate, self.key = folder / "tls.crt", folder / "tls.key"
        for file in (self.certificate, self.key):
            file.symlink_to(f"..data/{file.name}")

    def swap(self, certificate: bytes, key: bytes) -> None:
        self._version += 1
        new = self._folder / f"..{self._version}"
        new.mkdir()
        (new / "tls.crt").write_bytes(certificate)
        (new / "tls.key").write_bytes(key)
        (self._folder / "..data_tmp").symlink_to(new.name)
        (self._folder / "..data_tmp").rename(self._folder / "..data")

    def issue(self, authority: trustme.CA) -> None:
        issued = authority.issue_cert("localhost", "127.0.0.1")
        chain = b"".join(pem.bytes() for pem in issued.cert_chain_pems)
        self.swap(chain, issued.private_key_pem.bytes())


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@dataclass
class Served:
    router: Router
    replica: ScriptedReplica
    mounted: Mounted
    authority: trustme.CA

    def client(self, authority: trustme.CA) -> openai.OpenAI:
        http = openai.DefaultHttpxClient(verify=trusting(authority))
        return openai.OpenAI(
            base_url=f"{self.router.url}/v1", api_key="none", max_retries=0, http_client=http
        )

    def serial(self) -> str:
        """Return what tells the certificate of a new connection apart from others."""
        return ssl.get_server_certificate(self.router.address)

    def replace(self, authority: trustme.CA) -> None:
        """Mount another certificate, and wait until new connections get it."""
        before = self.serial()
        self.mounted.issue(authority)
        wait_for(lambda: self.serial() != before, "the certificate is still the former one")


@pytest.fixture
def served(tmp_path: Path, bundle_files: dict[str, bytes], bundle: Bundle) -> Iterator[Served]:
    mounted, authority = Mounted(tmp_path / "tls"), trustme.CA()
    mounted.issue(authority)
    with running_router(
        tmp_path,
        tls_certificate_file=str(mounted.certificate),
        tls_key_file=str(mounted.key),
        head_seconds=2,
        max_connections=8,
    ) as router:
        replica = ScriptedReplica(router, bundle_files, script=Script(tokens=say(bundle, "one two")))
        wait_for(lambda: router.metrics_http.get("/ready").status_code == 200, "never ready")
        yield Served(router, replica, mounted, authority)
        replica.stop()


def test_the_client_of_openai_trusts_it_and_streams(served: Served) -> None:
    assert served.router.url.startswith("https://")
    with served.client(served.authority) as client:
        for _ in range(3):
            assert client.completions.create(model=MODEL, prompt="x").choices[0].text == "one two"
        stream = client.completions.create(model=MODEL, prompt="x" * 1000, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "one two"
    with served.client(trustme.CA()) as client, pytest.raises(openai.APIConnectionError):
        client.models.list()


def test_a_new_certificate_is_served_to_new_connections_and_breaks_no_stream(
    served: Served, bundle: Bundle
) -> None:
    served.replica.script = Script(tokens=say(bundle, "one"), hold=True)
    new = trustme.CA()
    with (
        served.client(served.authority) as client,
        httpx.Client(base_url=served.router.url, verify=trusting(served.authority)) as idle,
    ):
        assert idle.get("/health").status_code == 200
        stream = client.completions.create(model=MODEL, prompt="x", stream=True)
        text = next(stream).choices[0].text
        served.replace(new)
        served.replica.order("send", Emit(served.replica.submits[0].id, say(bundle, " two"), "length"))
        text += "".join(chunk.choices[0].text for chunk in stream)
        assert text == "one two"
        assert idle.get("/health").status_code == 200, (
            "on the connection that was open: a new one is not trusted"
        )
    served.replica.script = Script(tokens=say(bundle, "three"))
    with served.client(new) as client:
        assert client.completions.create(model=MODEL, prompt="x").choices[0].text == "three"


def test_a_certificate_that_cannot_be_used_leaves_the_former_one_in_force(served: Served) -> None:
    assert served.router.metric(VALID) == 1
    other = trustme.CA().issue_cert("localhost").private_key_pem.bytes()
    key = served.mounted.key.read_bytes()
    for certificate, its_key in ((served.mounted.certificate.read_bytes(), other), (b"none", key)):
        served.mounted.swap(certificate, its_key)
        wait_for(lambda: served.router.metric(VALID) == 0, "it should be seen to be wrong")
        with served.client(served.authority) as client:
            assert client.completions.create(model=MODEL, prompt="x").choices[0].text == "one two"
        served.replace(served.authority)
        assert served.router.metric(VALID) == 1
    log = served.router.log.read_text()
    assert log.count("TLS certificate: the new content cannot be used, so the former stays in force") == 2
    assert "PRIVATE KEY" not in log


def test_what_is_no_handshake_or_never_ends_one_is_closed(served: Served) -> None:
    with socket.create_connection(served.router.address, timeout=20) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"HTTP" not in plain.recv(100), "no request is answered in plaintext"
    with (
        socket.create_connection(served.router.address, timeout=20) as silent,
        suppress(ConnectionResetError),
    ):
        assert silent.recv(1) == b""
    with served.client(served.authority) as client:
        assert client.models.list().data
    assert served.router.log.read_text() == "", "nobody can fill the log"


def test_connections_that_begin_no_handshake_count_as_connections(served: Served) -> None:
    """Eight connections may be open, six of them from one address."""
    with ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(socket.create_connection(served.router.address, timeout=20))
        wait_for(lambda: served.router.metric("medha_router_http_connections") == 6, "they do not count")
        with (
            socket.create_connection(served.router.address, timeout=20) as seventh,
            suppress(ConnectionResetError),
        ):
            assert seventh.recv(1) == b"", "at once: the others have 2 s"
        assert served.router.metric('medha_router_http_refusals_total{reason="too_many"}') == 1
    wait_for(lambda: served.router.metric("medha_router_http_connections") == 0, "they count after their end")
    with served.client(served.authority) as client:
        assert client.models.list().data
        assert served.router.metric("medha_router_http_connections") == 1


def test_a_request_right_behind_the_handshake_is_not_lost(served: Served) -> None:
    """The client sends its request in the same packet as its end of the handshake, without waiting for the server's."""
    context = trusting(served.authority)
    for _ in range(20):
        into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = context.wrap_bio(into, out, server_hostname="localhost")
        with socket.create_connection(served.router.address, timeout=20) as connection:
            while True:
                try:
                    client.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    connection.sendall(out.read())
                    into.write(connection.recv(65536))
            client.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            connection.sendall(out.read())  # the handshake's last message, and the request
            answer = b""
            while b"ok" not in answer:
                try:
                    answer += client.read()
                except ssl.SSLWantReadError:
                    into.write(connection.recv(65536))
            assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_versions_before_1_2_are_refused(served: Served, version: ssl.TLSVersion) -> None:
    context = trusting(served.authority)
    context.minimum_version = context.maximum_version = version
    with socket.create_connection(served.router.address, timeout=20) as connection:
        if version is ssl.TLSVersion.TLSv1_1:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                context.wrap_socket(connection, server_hostname="localhost")
        else:
            with context.wrap_socket(connection, server_hostname="localhost") as secure:
                assert secure.version() == version.name.replace("_", ".")


@pytest.mark.parametrize("files", ["none", "no key", "a password"])
def test_a_router_does_not_start_in_plaintext_when_its_certificate_cannot_be_used(
    tmp_path: Path, files: str
) -> None:
    links, mounted = KeyFiles.create(tmp_path / "links"), Mounted(tmp_path / "tls")
    if files == "a password":
        mounted.issue(trustme.CA())
        encrypt = [
            "openssl",
            "rsa",
            "-aes256",
            "-passout",
            "pass:x",
            "-in",
            str(mounted.key),
            "-out",
            str(tmp_path / "k"),
        ]
        if b"EC" in mounted.key.read_bytes():
            encrypt[1] = "ec"
        subprocess.run(encrypt, check=True, capture_output=True)
        mounted.swap(mounted.certificate.read_bytes(), (tmp_path / "k").read_bytes())
    key = "null" if files == "no key" else f'"{mounted.key}"'
    (tmp_path / "settings.json").write_text(
        f'{{"port": 0, "key_file": "{links.router}", "enrolment_file": "{links.enrolment}", '
        f'"tls_certificate_file": "{mounted.certificate}", "tls_key_file": {key}}}'
    )
    ended = subprocess.run(
        [sys.executable, "-m", "medha_router", "--settings", str(tmp_path / "settings.json")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env=os.environ,
    )
    assert ended.returncode == 1
    named = {
        "none": "No such file",
        "no key": "give both, or neither",
        "a password": "the key needs a password",
    }
    assert named[files] in ended.stderr
    assert "Traceback" not in ended.stderr
