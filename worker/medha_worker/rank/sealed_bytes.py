"""Bytes of KV that go from rank to rank over plain sockets, encrypted by AES-GCM (NIST SP 800-38D), which CPUs have instructions for.

CURVE encrypts some 400 MiB a second on one core, and AES-GCM thousands. So questions and answers go over CURVE, and an answer
brings the key of its bytes: a new one for each answer, which encrypts once. The bytes themselves come over a plain socket.
Without the key, nobody can read them, or replace them unnoticed. Bytes of another answer do not fit the key.

A rank that takes bytes connects to the plain socket under a random identity, and names it in its questions. While nobody has
connected under it, for example because a firewall admits nobody, bytes go with the answers.
"""

from __future__ import annotations

import secrets

import numpy as np
import zmq
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from medha_links.sockets import bind_plain, connect_plain
from medha_worker.model.kv_files import Rows

_KEY_BITS = 256
_TAG_BYTES = 16
_NONCE = bytes(12)  # a key encrypts once
_IDENTITY_BYTES = 16
_FREE_BYTES = 4096  # of a frame's largest size, beside the blocks


class NotSealed(Exception):
    """The received bytes are not those that the answer announced with their key."""


class SealedGiving:
    """The plain socket of the rank that gives. One thread uses it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        """Bind the endpoint.

        Raises:
            zmq.ZMQError: it cannot be bound.
        """
        self._opened = bind_plain(context, endpoint)
        self.endpoint = self._opened.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, identity: str, rows: Rows) -> str | None:
        """Send blocks to the peer of this `identity`, hexadecimal; return their key, or None if it is not connected."""
        if not identity:
            return None
        self._opened.connections.take()  # nobody else reads them
        key = AESGCM.generate_key(_KEY_BITS)
        sealed = np.empty(rows.nbytes + _TAG_BYTES, dtype=np.uint8)
        AESGCM(key).encrypt_into(_NONCE, rows.reshape(-1).data, None, sealed.data)
        try:
            self._opened.socket.send_multipart([bytes.fromhex(identity), sealed.data], copy=False)
        except (ValueError, zmq.ZMQError):
            return None
        return key.hex()

    def close(self) -> None:
        self._opened.close(0)


class SealedTaking:
    """The plain socket of one read by the rank that takes."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, most_bytes: int) -> None:
        """Begin to connect; a piece has at most `most_bytes` bytes.

        Raises:
            zmq.ZMQError: this is no endpoint.
        """
        identity = b"\1" + secrets.token_bytes(_IDENTITY_BYTES)  # ZeroMQ's own begin with 0
        self.identity = identity.hex()
        self._opened = connect_plain(
            context, endpoint, identity, largest_frame_bytes=most_bytes + _FREE_BYTES
        )
        self._plain = np.empty(most_bytes, dtype=np.uint8)

    def take(self, key: str, size_bytes: int, timeout_milliseconds: int) -> Rows | None:
        """Return the next bytes, decrypted and good until the next call; None if none have come in time.

        Raises:
            NotSealed: they are not what was encrypted with this key.
        """
        if not self._opened.socket.poll(timeout_milliseconds):
            return None
        sealed = self._opened.socket.recv(copy=False).buffer
        if len(sealed) != size_bytes + _TAG_BYTES or size_bytes > len(self._plain):
            raise NotSealed(
                f"{len(sealed)} bytes were received, and the answer announced {size_bytes + _TAG_BYTES}"
            )
        plain = self._plain[:size_bytes]
        try:
            AESGCM(bytes.fromhex(key)).decrypt_into(_NONCE, sealed, None, plain.data)
        except (InvalidTag, ValueError) as error:
            raise NotSealed("bytes do not fit the key of their answer") from error
        return plain

    def close(self) -> None:
        self._opened.close(0)
