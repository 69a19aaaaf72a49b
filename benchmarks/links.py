"""Measure the cost of encryption on a link: CURVE beside plaintext over the same sockets, in turn in one run.

    python benchmarks/links.py --quick
    python benchmarks/links.py --json benchmarks/results/links.json

A server and a client, each a process with its own ZeroMQ threads, over ipc (as `medha up`) and over TCP on the loopback:

* a step's round trip: a `Step` of 64 decodes to the client, a `Done` of 64 tokens back; the median of many.
* token ids in one direction: frames of 4 MB, a million ids each; bytes per second.

Encoding and decoding of messages are left out, because they are the same for both. The exit status is 1 if a claim
does not hold.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from functools import partial
from itertools import chain

import zmq
from harness import LOOPS, Loop, Row, claim, exit_with, in_turn, parser, report, table

from medha.wire.frames import encode
from medha.wire.messages import Done, Extent, Sample, Step, StepEntry
from medha_links.key_files import KeyPair
from medha_links.sockets import Authenticator, bind, connect

SEQUENCES = 64
FRAME_BYTES = 4_000_000
MOST_STEP_LOOPS = 0.1
"""The most that encryption may add to a step's round trip: a hundredth of a step of ten loops."""
LEAST_MEGABYTES = 0.1
"""The least that a link must pass in the time of a loop.

A prompt of a million tokens then takes 40 loops to pass, and thousands to prefill on any machine.
"""


def step_frames() -> tuple[bytes, bytes]:
    entries = tuple(
        StepEntry(f"cmpl-{index:032x}-0", 0, (Extent(100_000 + index, 1),), True)
        for index in range(SEQUENCES)
    )
    samples = tuple(Sample(entry.id, 12_345) for entry in entries)
    step, done = Step(1, 0, entries, predicted_seconds=0.01), Done(1, samples, compute_seconds=0.01)
    return bytes(encode(step)[0]), bytes(encode(done)[0])


def client(endpoint: str, keys: KeyPair | None, server: bytes) -> None:
    """Answer a step with its `Done`, and a token frame with nothing; an empty message ends the client."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    if keys is None:
        socket = plain(context, zmq.DEALER)
        socket.connect(endpoint)
    else:
        opened = connect(context, endpoint, b"rank-0", keys, server)
        socket = opened.socket
    _, done = step_frames()
    socket.send(done)
    while frame := socket.recv(copy=False).buffer:
        if len(frame) < FRAME_BYTES:
            socket.send(done)
    socket.close(0)


def plain(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """Return a socket like those of the links, but without keys and heartbeats."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    return socket


class Pair:
    """A server in this process and a client in another."""

    def __init__(self, endpoint: str, *, encrypted: bool) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        server, keys = KeyPair.new(), KeyPair.new()
        self._encrypted = encrypted
        if encrypted:
            self._authenticator = Authenticator(self._context, [keys.public])
            self._opened = bind(self._context, endpoint, server)
            self._socket = self._opened.socket
        else:
            self._socket = plain(self._context, zmq.ROUTER)
            self._socket.bind(endpoint)
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        arguments = (bound, keys if encrypted else None, server.public)
        self._process = multiprocessing.get_context("spawn").Process(target=client, args=arguments)
        self._process.start()
        self._peer, _ = self._socket.recv_multipart()
        self._step, _ = step_frames()

    def step_seconds(self, count: int) -> list[float]:
        taken = []
        for _ in range(count):
            started = time.perf_counter()
            self._socket.send_multipart([self._peer, self._step])
            self._socket.recv_multipart()
            taken.append(time.perf_counter() - started)
        return taken

    def bytes_per_second(self, frames: int) -> float:
        frame = bytes(FRAME_BYTES)
        started = time.perf_counter()
        for _ in range(frames):
            self._socket.send_multipart([self._peer, frame], copy=False)
        self._socket.send_multipart([self._peer, self._step])  # its answer shows that all have arrived
        self._socket.recv_multipart()
        return frames * FRAME_BYTES / (time.perf_counter() - started)

    def close(self) -> None:
        self._socket.send_multipart([self._peer, b""])
        self._process.join()
        if self._encrypted:
            self._authenticator.close()
        self._context.destroy(linger=0)


def measure(transport: str, rounds: int, steps: int, frames: int, loop: Loop) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        pairs = {
            name: Pair(
                f"ipc://{folder}/{name}" if transport == "ipc" else "tcp://127.0.0.1:*",
                encrypted=name == "curve",
            )
            for name in ("plain", "curve")
        }

        def once(pair: Pair) -> tuple[list[float], float]:
            loop.sample(5)
            return pair.step_seconds(steps), pair.bytes_per_second(frames)

        found = in_turn(rounds, {name: partial(once, pair) for name, pair in pairs.items()})
        for pair in pairs.values():
            pair.close()
    step, _ = step_frames()
    row: Row = {"transport": transport, "step_bytes": len(step)}
    for name, taken in found.items():
        row[f"{name}_step_us"] = round(1e6 * statistics.median(chain(*(seconds for seconds, _ in taken))), 1)
        row[f"{name}_mb_per_second"] = round(statistics.median(rate for _, rate in taken) / 1e6, 1)
    return row


def claims(rows: list[Row], loop: Loop) -> list[Row]:
    found: list[Row] = []
    for row in rows:
        transport, added = row["transport"], 1e-6 * (row["curve_step_us"] - row["plain_step_us"])
        name = f"{transport}: what encryption adds to a step of {SEQUENCES} decodes, both ways, p50"
        found.append(claim(name, loop.ratio(added), LOOPS, MOST_STEP_LOOPS, peer=loop.peer()))
        name = f"{transport}: token ids in frames of 4 MB, encrypted"
        rate = row["curve_mb_per_second"] / loop.ratio(1.0)
        found.append(claim(name, rate, "MB/loop", LEAST_MEGABYTES, "more", loop.peer()))
    return found


def main() -> int:
    arguments = parser(__doc__, quick="seconds instead of half a minute", rounds=15).parse_args()
    steps, frames = (200, 10) if arguments.quick else (500, 25)
    rounds = min(arguments.rounds, 3) if arguments.quick else arguments.rounds
    loop = Loop()
    rows = [measure(transport, rounds, steps, frames, loop) for transport in ("ipc", "tcp")]
    table(rows[0].keys(), [row.values() for row in rows])
    return report(claims(rows, loop), arguments.json, {"rows": rows}, strict=True)


if __name__ == "__main__":
    exit_with(main)
