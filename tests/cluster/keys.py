"""Certificates and kubeconfigs of a cluster, from its own certificate authority."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path
from tempfile import NamedTemporaryFile

import trustme
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

ADMIN = ("admin", "system:masters")
CONTROLLER_MANAGER = ("system:kube-controller-manager", None)
SCHEDULER = ("system:kube-scheduler", None)
PROXY = ("system:kube-proxy", None)


class Keys:
    """A folder of keys; each file is written on first use."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._authority = trustme.CA()
        self.authority = folder / "ca.pem"
        self._authority.cert_pem.write_to_path(str(self.authority))

    def server(self, name: str, *identities: str) -> tuple[Path, Path]:
        """Return certificate and key of a server that is reached under `identities`."""
        return self._issue(name, identities, name, None)

    def client(self, user: str, group: str | None = None) -> tuple[Path, Path]:
        """Return certificate and key of a user (the common name) in a group (the organization)."""
        # Without an identity, trustme writes critical, empty alternative names, which Go refuses.
        return self._issue(user.replace(":", "-"), ("client.invalid",), user, group)

    def aggregator(self) -> tuple[Path, Path, Path]:
        """Return authority, certificate and key by which servers of further APIs know the API server that calls them."""
        authority, name = self._folder / "aggregator-ca.pem", "aggregator"
        if (
            not authority.exists()
        ):  # another authority: whoever has a certificate of it may speak for any user
            issuer = trustme.CA()
            issuer.cert_pem.write_to_path(str(authority))
            self._write(name, issuer.issue_cert("client.invalid", common_name=name))
        return authority, self._folder / f"{name}.pem", self._folder / f"{name}-key.pem"

    def service_accounts(self) -> Path:
        """Return the key that signs the tokens of service accounts."""
        path = self._folder / "service-accounts.pem"
        if not path.exists():
            key = ec.generate_private_key(ec.SECP256R1())
            path.write_bytes(
                key.private_bytes(
                    serialization.Encoding.PEM,
                    serialization.PrivateFormat.TraditionalOpenSSL,
                    serialization.NoEncryption(),
                )
            )
        return path

    def kubeconfig(self, server: str, user: str, group: str | None = None, *, name: str = "") -> Path:
        """Return a self-contained kubeconfig (JSON is YAML) for `user` at `server`; `name` is the file's."""
        certificate, key = self.client(user, group)
        path = self._folder / f"{name or user.replace(':', '-')}.kubeconfig"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "c",
                    "cluster": {"server": server, "certificate-authority-data": _data(self.authority)},
                }
            ],
            "users": [
                {
                    "name": "u",
                    "user": {"client-certificate-data": _data(certificate), "client-key-data": _data(key)},
                }
            ],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "default"}}],
            "current-context": "c",
        }
        _replace(path, json.dumps(config))
        return path

    def _issue(
        self, name: str, identities: tuple[str, ...], common_name: str, organization: str | None
    ) -> tuple[Path, Path]:
        certificate, key = self._folder / f"{name}.pem", self._folder / f"{name}-key.pem"
        if not certificate.exists():
            leaf = self._authority.issue_cert(
                *identities, common_name=common_name, organization_name=organization
            )
            self._write(name, leaf)
        return certificate, key

    def _write(self, name: str, leaf: trustme.LeafCert) -> None:
        chain = b"".join(blob.bytes() for blob in leaf.cert_chain_pems)
        (self._folder / f"{name}.pem").write_bytes(chain)
        leaf.private_key_pem.write_to_path(str(self._folder / f"{name}-key.pem"))


def _replace(path: Path, text: str) -> None:
    """Give a file this content, for its owner alone. Programs that read it meanwhile see the one content or the other."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    with NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as written:
        written.write(text)
    Path(written.name).replace(path)


def _data(path: Path) -> str:
    return b64encode(path.read_bytes()).decode()
