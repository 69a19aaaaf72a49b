"""TLS for clients: a certificate from files, which is replaced without breaking connections."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

from medha.errors import ConfigInvalid


def server_context(certificate_file: Path, key_file: Path) -> ssl.SSLContext:
    """Return the context of a certificate (chain, PEM) and its private key (PEM, without a password).

    Raises:
        ConfigInvalid: the files are no certificate and its key.
        OSError: a file cannot be read.
    """
    for path in (certificate_file, key_file):
        path.read_bytes()  # an SSLContext does not say which file it cannot read
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate_file, key_file, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        why = getattr(error, "reason", None) or str(error)
        raise ConfigInvalid(
            f"{certificate_file} and {key_file}: are not a certificate and its private key in PEM, without a password: {why}; "
            "mount or create both again"
        ) from error
    return context


def _no_password() -> str:
    raise ValueError("the key needs a password")


def following_context(current: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    """Return a context for a listener that hands each new connection to the context that is then the current one.

    Connections that are open keep theirs.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def choose(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = current()

    context.sni_callback = choose  # OpenSSL calls it for clients that name no server, too
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context
