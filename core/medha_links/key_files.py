"""Key files: 40 characters of Z85 (ZeroMQ RFC 32), one key a line, and the tokens by which replicas enrol at a router.

A server (router, controller) has its own key pair, and its clients know the public half. A controller admits
the public keys that a file lists, those of its ranks. A router admits holders of its enrolment tokens. A
token is the seed of the key pair that a replica connects with, so it never crosses the wire. A peer without
one fails in the handshake, before any of its messages is read.
"""

from __future__ import annotations

import os
import secrets
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import zmq
from zmq.utils import z85

from medha.errors import ConfigInvalid

SHORTEST_TOKEN = 32  # characters: 192 bits as `secrets.token_urlsafe` writes them
KEY_BYTES = 32
_REMAKE = "make both files of the pair again (docs/security.md)"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A long-term X25519 pair, both halves in Z85."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> KeyPair:
        return cls(*zmq.curve_keypair())

    @classmethod
    def of_token(cls, token: str) -> KeyPair:
        """Return the pair of the holder of an enrolment token."""
        seed = blake2b(token.encode(), digest_size=32, person=b"medha enrolment").digest()
        return cls.of_secret(z85.encode(seed))

    @classmethod
    def of_secret(cls, secret: bytes) -> KeyPair:
        """Return the pair of a secret key in Z85."""
        return cls(zmq.curve_public(secret), secret)

    @classmethod
    def read(cls, path: Path) -> KeyPair:
        """Return the pair of a secret key file, which only its owner (and group) may read.

        Raises:
            ConfigInvalid: the file does not exist, does not hold one key, or anybody may read it.
        """
        lines = _lines(path, "a secret key")
        _require_private(path)
        if len(lines) != 1:
            raise ConfigInvalid(f"{path}: has {len(lines)} lines, expected one secret key; {_REMAKE}")
        _require_key(path, 1, lines[0])
        return cls.of_secret(lines[0])


def hash_key_of_token(token: str) -> str:
    """Return the key of block hashes that the holders of an enrolment token share, hexadecimal.

    Replicas that hand KV over compare their hashes, so they need the same key, and nobody else may know it.
    """
    return blake2b(token.encode(), digest_size=32, person=b"medha kv hashes").hexdigest()


def read_public_keys(path: Path) -> frozenset[bytes]:
    """Return the public keys of a file, one a line.

    Raises:
        ConfigInvalid: the file does not exist, is empty, or has a line that is not a key.
    """
    lines = _lines(path, "public keys")
    for number, line in enumerate(lines, start=1):
        _require_key(path, number, line)
    return frozenset(lines)


def read_public_key(path: Path) -> bytes:
    """Return the public key of a file that holds one.

    Raises:
        ConfigInvalid: the file does not exist, or does not hold one key.
    """
    keys = read_public_keys(path)
    if len(keys) != 1:
        raise ConfigInvalid(f"{path}: has {len(keys)} keys, expected the server's one; {_REMAKE}")
    return next(iter(keys))


def read_tokens(path: Path) -> tuple[str, ...]:
    """Return the enrolment tokens of a file, one a line: a router admits all of them, a replica enrols with the first.

    Raises:
        ConfigInvalid: the file does not exist, is empty, has a token that is too short, or anybody may read it.
    """
    lines = _lines(path, "enrolment tokens")
    _require_private(path)
    for number, line in enumerate(lines, start=1):
        if len(line) < SHORTEST_TOKEN or not line.isascii():
            raise ConfigInvalid(
                f"{path}: line {number} is not an enrolment token: it needs at least {SHORTEST_TOKEN} ASCII characters; make one "
                "with python -c 'import secrets; print(secrets.token_urlsafe(32))'"
            )
    return tuple(line.decode("ascii") for line in lines)


@dataclass(frozen=True, slots=True)
class KeyFiles:
    """The key files of one router and one replica, as `medha up` makes them and as Secrets are mounted."""

    directory: Path

    @property
    def router(self) -> Path:
        """File of the router's secret key; replicas know `router_public`."""
        return self.directory / "router.secret"

    @property
    def router_public(self) -> Path:
        return self.directory / "router.public"

    @property
    def enrolment(self) -> Path:
        """File of the tokens that the router admits; a replica holds one of them."""
        return self.directory / "enrolment.tokens"

    @property
    def controller(self) -> Path:
        """File of the secret key of a replica's controller; its ranks know `controller_public`."""
        return self.directory / "controller.secret"

    @property
    def controller_public(self) -> Path:
        return self.directory / "controller.public"

    @property
    def ranks(self) -> Path:
        """File of the secret key that the ranks of a replica share; its controller admits `ranks_public`."""
        return self.directory / "ranks.secret"

    @property
    def ranks_public(self) -> Path:
        return self.directory / "ranks.public"

    @classmethod
    def create(cls, directory: Path) -> KeyFiles:
        """Make fresh keys in a new directory (0700); only its owner may read the files (0600)."""
        directory.mkdir(mode=0o700)
        files = cls(directory)
        for path, content in files.fresh().items():
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(content + b"\n")
        return files

    def fresh(self) -> Mapping[Path, bytes]:
        """Return new content for each file."""
        router, controller, ranks = KeyPair.new(), KeyPair.new(), KeyPair.new()
        return {
            self.router: router.secret,
            self.router_public: router.public,
            self.enrolment: secrets.token_urlsafe(SHORTEST_TOKEN).encode(),
            self.controller: controller.secret,
            self.controller_public: controller.public,
            self.ranks: ranks.secret,
            self.ranks_public: ranks.public,
        }


def _lines(path: Path, what: str) -> list[bytes]:
    try:
        lines = [line.strip() for line in path.read_bytes().splitlines()]
    except OSError as error:
        raise ConfigInvalid(
            f"{path}: {what} cannot be read: {error.strerror}; mount or create the file (docs/security.md)"
        ) from error
    found = [line for line in lines if line]
    if not found:
        raise ConfigInvalid(f"{path}: is empty, expected {what}; {_REMAKE}")
    return found


def _require_private(path: Path) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & stat.S_IRWXO:
        raise ConfigInvalid(
            f"{path}: has mode {mode:04o}, so anybody can read it; run chmod 600, or set defaultMode 0440 on a Secret's volume"
        )


def _require_key(path: Path, number: int, line: bytes) -> None:
    if not is_key(line):  # a secret must not end up in a log: name the line, do not show it
        raise ConfigInvalid(f"{path}: line {number} is not a key: expected 40 characters of Z85; {_REMAKE}")


def is_key(line: bytes) -> bool:
    """Return whether this is a key in Z85."""
    try:
        return len(z85.decode(line)) == KEY_BYTES
    except (KeyError, ValueError, struct.error):  # a bad character, length, or value of five characters
        return False
