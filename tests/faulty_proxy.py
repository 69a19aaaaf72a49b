"""A TCP proxy before an HTTP service, for tests: it answers 500, hangs, resets connections or cuts what passes it."""

from __future__ import annotations

import re
import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal
from urllib.parse import urlsplit

Fault = Literal[
    "", "answers 500", "hangs", "resets", "vanishes", "cuts answers", "stalls answers", "stalls questions"
]
_PIECE_BYTES = 1 << 16
_POLL_SECONDS = 0.02
_RESET = struct.pack("ii", 1, 0)
_ANSWER_500 = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class FaultyProxy:
    """Passes connections on to a service, until a `fault` is set; a fault holds for all that comes after it.

    An answer is cut or stalled behind its first `passed_bytes`, and a question, too: with its headers that may be before its
    end. Headers alone, as those of an answer to HEAD, have fewer.
    """

    def __init__(self, endpoint: str, *, passed_bytes: int = 2000) -> None:
        """`endpoint` is the `http://` address of the service."""
        target = urlsplit(endpoint)
        self._target = (str(target.hostname), int(target.port or 80))
        self._passed_bytes = passed_bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.fault: Fault = ""
        self.asked = threading.Semaphore(0)
        """Is released for each part of a question that arrives while there is a fault."""
        self.stopped = threading.Semaphore(0)
        """Is released for each connection on which a fault has kept something back."""
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """End all connections."""
        self._closing.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            if select.select([self._listener], [], [], _POLL_SECONDS)[0]:
                client, _ = self._listener.accept()
                if self.fault == "vanishes":  # nobody listens any more
                    client.close()
                    self.asked.release()
                    self.stopped.release()
                    continue
                thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError), socket.create_connection(self._target) as service:
            passed = {client: 0, service: 0}
            while not self._closing.is_set():
                for source in select.select([client, service], [], [], _POLL_SECONDS)[0]:
                    data = source.recv(_PIECE_BYTES)
                    if not data:
                        return
                    other = service if source is client else client
                    passed[source] += len(data)
                    passed[other] = 0
                    if not self._pass(data, passed[source], other, is_question=source is client):
                        self.stopped.release()
                        if self.fault == "answers 500":
                            self._answer_500(client, data)
                        elif self.fault == "resets":
                            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                        elif self.fault not in ("cuts answers", "vanishes"):
                            self._hang(client)
                        return

    def _pass(self, data: bytes, passed_bytes: int, target: socket.socket, *, is_question: bool) -> bool:
        """Pass data on, if no fault forbids it; return whether the connection goes on."""
        if is_question and self.fault:
            self.asked.release()
        limits = {
            "": (True, True), "cuts answers": (True, False), "stalls answers": (True, False), "stalls questions": (False, True)
        }  # fmt: skip
        question, answer = limits.get(self.fault, (False, True))
        if question if is_question else answer:
            target.sendall(data)
            return True
        if self.fault in ("answers 500", "hangs", "resets", "vanishes"):
            return False
        left = self._passed_bytes - (passed_bytes - len(data))
        if len(data) <= left:
            target.sendall(data)
            return True
        target.sendall(data[: max(left, 0)])
        return False

    def _answer_500(self, client: socket.socket, question: bytes) -> None:
        """Read the whole question, so that the answer arrives."""
        while b"\r\n\r\n" not in question:
            question += client.recv(_PIECE_BYTES)
        head, _, body = question.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        left = int(length[1]) - len(body) if length else 0
        while left > 0 and (more := client.recv(_PIECE_BYTES)):
            left -= len(more)
        client.sendall(_ANSWER_500)

    def _hang(self, client: socket.socket) -> None:
        """Read and answer nothing until the client goes away."""
        while not self._closing.is_set():
            if select.select([client], [], [], _POLL_SECONDS)[0] and not client.recv(_PIECE_BYTES):
                return


@contextmanager
def faulty_proxy(endpoint: str, *, passed_bytes: int = 2000) -> Iterator[FaultyProxy]:
    """Run a proxy before a service until the context ends."""
    proxy = FaultyProxy(endpoint, passed_bytes=passed_bytes)
    try:
        yield proxy
    finally:
        proxy.close()
