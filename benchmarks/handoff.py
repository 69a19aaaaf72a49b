"""Measure how fast a replica reads KV of another one, and what clients see of requests that move between replicas.

    python benchmarks/handoff.py --quick
    python benchmarks/handoff.py --json benchmarks/results/handoff.json

First, a process reads KV blocks from another process, as a rank reads those of another replica: encrypted and authenticated,
over the loopback. In the same rounds, plain sockets pass as many bytes between the same two processes, and the blocks are
read without the plain socket for encrypted bytes, so that CURVE encrypts them. Where the package
`nixl` is installed, the blocks are also read over NIXL, which encrypts nothing.

Then, streams run on one of two replicas, which drains. If the replicas hand KV over, the stream moves and the other replica
reads its KV; otherwise the other replica computes it when the first one ends. The pause of the stream is its longest wait for a token
since the drain began. It is measured for several lengths of the prompt.

The same requests are also served in other ways, so that their TTFT and TPOT can be compared: `mixed` by two replicas that compute
prompts and decode, without a drain, and `split` by one that computes prompts and one that decodes; `moved` are the streams above whose KV
was read. They come one at a time, and then some in short intervals, so that some decode while prompts of others are computed.
The TPOT of a request that moves includes its pause.

The claims are that a read has a part of the rate of plain sockets and is faster than one over CURVE, that the pause of the longest prompt is at most half as
long if its KV is read, that all of these streams moved and had their KV read, that requests which move have about the TTFT and the
TPOT of the others, that split requests have no longer TPOT beside each other than mixed ones, and that all texts are the same.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread

import numpy as np
import torch
from client_stream import MODEL, Stream
from fleet import Fleet, wait_for
from harness import Row, claim, exit_with, in_turn, parser, ratio, report, table

from medha.api.kv_cache_spec import PeerPlane
from medha.kv.lane_replay import HostTierWork, ReadBlocks, ServeBlocks
from medha.wire.messages import DiskReport
from medha_worker.device import host_device
from medha_worker.model.host_blocks import HostBlocks
from medha_worker.model.kv_cache import KVCache
from medha_worker.rank.peer_reader import PeerReader
from medha_worker.rank.peer_server import PeerServer

IDENTITY, TICKET = "handoff", "handoff"
LOOPBACK = "tcp://127.0.0.1:*"
PRESET = "small"
ONE_RANK = (1, 1, 1)
LEAST_RATE = 0.1  # of plain sockets, which neither encrypt nor verify
LEAST_GAIN = 1.2  # of AES-GCM over CURVE
MOST_PAUSE = 0.5
FIRST_TOKENS = 32  # of a stream, before its replica drains
OUTPUT_TOKENS = 400
DRAIN_SECONDS = 1.5  # less than the output takes, so that the stream moves
MIXED, SPLIT, MOVED = "mixed", "split", "moved"
MOST_TTFT, MOST_TPOT, MOST_TPOT_BESIDE = 1.1, 1.25, 1.0
"""Most of TTFT and TPOT, as multiples of those of `mixed`: of one request at a time, and the TPOT of some beside each other."""
BESIDE, BESIDE_TOKENS, GAP_SECONDS = 4, 4096, 1.0
"""Requests beside each other, tokens of their prompts, and the time from one to the next."""
STREAM_SECONDS = 300.0
IDS = 10, 500  # of ordinary tokens


# --- reads -------------------------------------------------------------------------------------------------


def host_blocks(blocks: int) -> HostBlocks:
    """Return host blocks with random bytes, of the size of the preset's: 128 KiB each."""
    pool = KVCache(
        num_layers=8, kv_heads=2, head_dim=64, num_blocks=1, block_tokens=16, device=host_device(torch.float32)
    )  # fmt: skip
    host = HostBlocks(pool, blocks)
    rng = np.random.default_rng(0)
    for slot in range(blocks):
        host.put_rows(slot, rng.integers(0, 256, (1, host.block_bytes), dtype=np.uint8))
    return host


def give(pipe: Connection, blocks: int, plane: PeerPlane, bytes_endpoint: str) -> None:
    """Be the replica that gives: with a ticket for all blocks, and with a plain socket for as many bytes, until told to end."""
    host = host_blocks(blocks)
    data = host.rows(0, blocks).tobytes()
    server = PeerServer(LOOPBACK, host, IDENTITY, plane, bytes_endpoint)
    server.serve([ServeBlocks(TICKET, ((0, blocks),))])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send((server.figures, listener.getsockname()))
        while pipe.recv():
            client, _ = listener.accept()
            with client:
                client.sendall(data)
    server.close()


class Taker:
    """The replica that takes, and the process that gives."""

    def __init__(self, blocks: int, plane: PeerPlane = "sockets", bytes_endpoint: str = LOOPBACK) -> None:
        self._blocks, self._host = blocks, host_blocks(blocks)
        self.bytes = blocks * self._host.block_bytes
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=give, args=(theirs, blocks, plane, bytes_endpoint))
        self._process.start()
        figures, self._address = self._pipe.recv()
        self._reader = PeerReader(self._host, IDENTITY, time.monotonic, plane)
        self._reports: list[DiskReport] = []
        self._reader.begin_epoch(DiskReport(1), self._reports.append)
        self._reader.learn(TICKET, figures)

    def read(self) -> float:
        """Return the bytes per second of a read of all blocks.

        Raises:
            RuntimeError: the read has failed.
        """
        started = time.perf_counter()
        self._reader.submit(HostTierWork(reads=(ReadBlocks("", 0, 0, ((0, self._blocks),), TICKET),)))
        if not (self._reader.drain(STREAM_SECONDS) and self._reports.pop().loaded):
            raise RuntimeError("the read has failed")
        return self.bytes / (time.perf_counter() - started)

    def receive(self) -> float:
        """Return the bytes per second of plain sockets."""
        self._pipe.send(True)
        started, left = time.perf_counter(), self.bytes
        with socket.create_connection(self._address) as client:
            piece = memoryview(bytearray(2**20))
            while left:
                received = client.recv_into(piece)
                if not received:
                    raise RuntimeError("the other process has gone")
                left -= received
        return self.bytes / (time.perf_counter() - started)

    def close(self) -> None:
        self._reader.close()
        self._pipe.send(False)
        self._process.join()


# --- pauses ------------------------------------------------------------------------------------------------


@dataclass
class IdStream(Stream):
    """A stream whose prompt are token ids; those of another salt share no KV with it."""

    ids: list[int] = field(default_factory=list)
    salt: str = ""
    asked_at: float = 0.0

    def ask(self, url: str, *, timeout_seconds: float) -> None:
        self.asked_at = time.monotonic()
        super().ask(url, timeout_seconds=timeout_seconds)

    def body(self) -> Row:
        return super().body() | {"prompt": self.ids, "cache_salt": self.salt}

    def answer(self) -> Answer:
        """Return what the client saw.

        Raises:
            RuntimeError: it has fewer than two pieces.
        """
        if len(self.times) < 2:
            raise RuntimeError(f"the stream has ended too early: {self.error or self.text!r}")
        first, last = self.times[0], self.times[-1]
        return Answer(
            first - self.asked_at,
            (last - first) / (self.tokens - 1),
            self.pause(first),
            self.text,
            self.error,
        )


def new_stream(number: int, length: int, salt: str, output_tokens: int = OUTPUT_TOKENS) -> IdStream:
    """Return a stream whose prompt and seed follow from its number and its length."""
    ids = np.random.default_rng((number, length)).integers(*IDS, length).tolist()
    return IdStream("", seed=number, tokens=output_tokens, temperature=number % 2, ids=ids, salt=salt)


@dataclass(frozen=True)
class Answer:
    """What a client saw of a request."""

    ttft_seconds: float
    tpot_seconds: float
    longest_wait_seconds: float  # for a token, but for the first one
    text: str
    error: str


@dataclass(frozen=True)
class Pause:
    """The pause that a client saw in a drain, and how many tokens the other replica did not have to compute."""

    seconds: float
    answer: Answer
    token_seconds: float  # median, before the drain
    resumed_tokens: int


def fleet(folder: Path, longest: int, *, hands_over: bool, roles: Sequence[str] = ()) -> Fleet:
    """Return two replicas for streams of so many tokens."""
    folder.mkdir()
    kv_cache: Row = {"size": "192Mi"}
    if hands_over:
        kv_cache["tiers"] = {"host": {"size": "192Mi"}, "peers": {"bandwidth": "256Mi"}}
    model = {"name": MODEL, "source": {"path": str(folder / "checkpoint")}, "maxModelLen": longest}
    spec = {"model": model, "kvCache": kv_cache}
    return Fleet(folder, (ONE_RANK, ONE_RANK), spec, roles, preset=PRESET, silence_seconds=10)


def pause(found: Fleet, drain_seconds: float, length: int, number: int) -> Pause:
    """Drain the replica that has a stream, and wait for its end; return what the client saw."""
    revive(found, drain_seconds)
    stream = new_stream(number, length, "drained")
    thread = begin(found, stream)
    while len(stream.times) < FIRST_TOKENS:
        if not thread.is_alive():
            raise RuntimeError(f"the stream has ended too early: {stream.error}")
        time.sleep(0.005)
    victim = max(found.replicas, key=found.running)
    (other,) = (one for one in found.replicas if one is not victim)
    before = other.metric("medha_peer_kv_resumed_tokens_total")
    since = time.monotonic()
    victim.drain()
    thread.join()
    steps = np.diff([at for at in stream.times if at < since])
    found.wait_idle()
    resumed = other.metric("medha_peer_kv_resumed_tokens_total") - before
    wait_for(lambda: not victim.is_alive, "end of the drain", victim.log)
    return Pause(stream.pause(since), stream.answer(), float(np.median(steps)), round(resumed))


def revive(found: Fleet, drain_seconds: float) -> None:
    """Start replicas again that have ended, and wait until none computes anything."""
    for replica in found.replicas:
        if not replica.is_alive:
            found.restart(replica, drain_seconds)
    found.wait_idle()


def begin(found: Fleet, stream: IdStream) -> Thread:
    thread = Thread(target=stream.ask, args=(found.router.url,), kwargs={"timeout_seconds": STREAM_SECONDS})
    thread.start()
    return thread


@dataclass(frozen=True)
class Round:
    """The requests of one round of a fleet, those that came one at a time by their length."""

    alone: list[Answer]
    beside: list[Answer]
    moves: int


def serve(found: Fleet, lengths: Sequence[int], number: int, beside_tokens: tuple[int, int]) -> Round:
    """Ask for the streams of `pause`, one at a time, and then for some in short intervals.

    `beside_tokens` are those of the prompts and the outputs of the latter.
    """
    revive(found, DRAIN_SECONDS)
    before = prefilled(found)
    alone: list[Answer] = []
    for length in lengths:
        stream = new_stream(number, length, "alone")
        begin(found, stream).join()
        found.wait_idle()
        alone.append(stream.answer())
    # Numbers of their own: their prompts are those of no other stream.
    length, output = beside_tokens
    streams = [new_stream(1000 + BESIDE * number + one, length, "beside", output) for one in range(BESIDE)]
    threads: list[Thread] = []
    for stream in streams:
        threads.append(begin(found, stream))
        time.sleep(GAP_SECONDS)
    for thread in threads:
        thread.join()
    found.wait_idle()
    return Round(alone, [stream.answer() for stream in streams], prefilled(found) - before)


def prefilled(found: Fleet) -> int:
    """Return how many requests have moved because their prompt was computed."""
    return round(found.router.metric("medha_router_resubmissions_total", reason="prefilled"))


def rows_of(lengths: Sequence[int], pauses: dict[str, list[list[Pause]]]) -> list[Row]:
    rows: list[Row] = []
    for index, length in enumerate(lengths):
        each = {name: [one[index] for one in found] for name, found in pauses.items()}
        row: Row = {"prompt_tokens": length}
        for name, found in each.items():
            row[f"{name}_pause_seconds"] = round(statistics.median(one.seconds for one in found), 3)
        row["token_seconds"] = round(statistics.median(one.token_seconds for one in each["read"]), 4)
        row["read_tokens"] = min(one.resumed_tokens for one in each["read"])
        rows.append(row)
    return rows


def served_rows(
    lengths: Sequence[int], beside_tokens: int, rounds: dict[str, list[Round]], moved: list[list[Pause]]
) -> list[Row]:
    """Return TTFT and TPOT by the way in which requests were served; medians over the requests of all rounds."""
    rows: list[Row] = []
    for index, length in enumerate(lengths):
        for way, found in rounds.items():
            rows.append(served_row(way, 1, length, [one.alone[index] for one in found]))
        rows.append(served_row(MOVED, 1, length, [one[index].answer for one in moved]))
    for way, found in rounds.items():
        rows.append(
            served_row(way, BESIDE, beside_tokens, [answer for one in found for answer in one.beside])
        )
    return rows


def served_row(way: str, requests: int, length: int, answers: Sequence[Answer]) -> Row:
    return {
        "way": way,
        "requests_beside_each_other": requests,
        "prompt_tokens": length,
        "ttft_seconds": round(statistics.median(one.ttft_seconds for one in answers), 4),
        "tpot_seconds": round(statistics.median(one.tpot_seconds for one in answers), 5),
        "longest_wait_seconds": round(max(one.longest_wait_seconds for one in answers), 3),
        "requests": len(answers),
    }


def served_claims(
    lengths: Sequence[int], rows: Sequence[Row], rounds: dict[str, list[Round]], moved: list[list[Pause]]
) -> list[Row]:
    by = {(one["way"], one["requests_beside_each_other"], one["prompt_tokens"]): one for one in rows}

    def against_mixed(way: str, requests: int, length: int, name: str) -> float:
        return float(by[way, requests, length][name] / by[MIXED, requests, length][name])

    found: list[Row] = []
    for way in (SPLIT, MOVED):
        for name, word, most in (("ttft_seconds", "TTFT", MOST_TTFT), ("tpot_seconds", "TPOT", MOST_TPOT)):
            ratios = {length: against_mixed(way, 1, length, name) for length in lengths}
            worst = max(ratios, key=lambda length: ratios[length])
            peer = f"{worst} tokens, mixed: {1e3 * by[MIXED, 1, worst][name]:.1f} ms"
            found.append(
                claim(
                    f"{way}: {word} against mixed, the largest of all lengths",
                    ratios[worst],
                    "ratio",
                    most,
                    "less",
                    peer,
                )
            )
    (beside,) = {length for _, requests, length in by if requests == BESIDE}
    value = against_mixed(SPLIT, BESIDE, beside, "tpot_seconds")
    peer = f"mixed: {1e3 * by[MIXED, BESIDE, beside]['tpot_seconds']:.1f} ms"
    found.append(
        claim(
            f"{SPLIT}: TPOT against mixed, {BESIDE} requests beside each other",
            value,
            "ratio",
            MOST_TPOT_BESIDE,
            "less",
            peer,
        )
    )
    asked = sum(len(one.alone) + len(one.beside) for one in rounds[SPLIT])
    moves = sum(one.moves for one in rounds[SPLIT])
    found.append(
        claim(
            f"{SPLIT}: requests that moved to the replica that decodes", 100 * moves / asked, "%", 100, "more"
        )
    )
    pairs = [
        pair
        for mixed, split, drained in zip(rounds[MIXED], rounds[SPLIT], moved, strict=True)
        for pair in (
            *zip(mixed.alone, split.alone, strict=True),
            *zip(mixed.beside, split.beside, strict=True),
            *zip(mixed.alone, (one.answer for one in drained), strict=True),
        )
    ]
    same = sum(a.text == b.text and not (a.error or b.error) for a, b in pairs)
    found.append(
        claim("texts that are the same mixed, split and moved", 100 * same / len(pairs), "%", 100, "more")
    )
    return found  # fmt: skip


def claims(
    rates: dict[str, list[float]], lengths: Sequence[int], pauses: dict[str, list[list[Pause]]]
) -> list[Row]:
    plain = statistics.median(rates["plain"]) / 2**20
    longest = [[one[-1].seconds for one in pauses[name]] for name in ("read", "computed")]
    pairs = [
        (read, computed)
        for reads, others in zip(pauses["read"], pauses["computed"], strict=True)
        for read, computed in zip(reads, others, strict=True)
    ]
    same = sum(a.answer.text == b.answer.text and not (a.answer.error or b.answer.error) for a, b in pairs)
    moved = sum(
        one.resumed_tokens >= length
        for found in pauses["read"]
        for length, one in zip(lengths, found, strict=True)
    )
    name = f"pause of a stream of {lengths[-1]} tokens: KV read against computed"
    computed = f"computed: {statistics.median(longest[1]):.2f} s"
    return [
        claim("rate of a read against plain sockets", ratio(rates["read"], rates["plain"]), "ratio", LEAST_RATE, "more", f"plain sockets: {plain:.0f} MiB/s"),
        claim("rate of a read against one whose bytes go over CURVE", ratio(rates["read"], rates["curve"]), "ratio", LEAST_GAIN, "more"),
        claim(name, ratio(*longest), "ratio", MOST_PAUSE, "less", computed),
        claim("streams whose KV was read", 100 * moved / len(pairs), "%", 100, "more"),
        claim("texts that are the same with KV read and computed", 100 * same / len(pairs), "%", 100, "more"),
    ]  # fmt: skip


def main() -> int:
    arguments = parser(__doc__, quick="one round, prompts of 1,024 tokens", rounds=3).parse_args()
    lengths: Sequence[int] = (1024, 4096, 16_384)
    rounds, blocks, beside_tokens = arguments.rounds, 2048, (BESIDE_TOKENS, OUTPUT_TOKENS)
    if arguments.quick:
        lengths, rounds, blocks, beside_tokens = (1024,), 1, 256, (1024, 100)
    takers = {"read": Taker(blocks), "curve": Taker(blocks, bytes_endpoint="")}
    if find_spec("nixl"):
        takers["nixl"] = Taker(blocks, "nixl")
    try:
        calls = {"plain": takers["read"].receive} | {name: taker.read for name, taker in takers.items()}
        in_turn(1, calls)  # touches all memory
        rates = in_turn(max(rounds, 3), calls)
    finally:
        for taker in takers.values():
            taker.close()
    table(("transfer", "MiB/s"), [(name, statistics.median(each) / 2**20) for name, each in rates.items()])
    with tempfile.TemporaryDirectory(prefix="handoff-") as folder:
        longest = lengths[-1] + OUTPUT_TOKENS
        drains = {"computed": 0.0, "read": DRAIN_SECONDS}
        fleets = {
            name: fleet(Path(folder) / name, longest, hands_over=seconds > 0)
            for name, seconds in drains.items()
        }
        split = fleet(Path(folder) / SPLIT, longest, hands_over=True, roles=("prefill", "decode"))
        numbers = {name: iter(range(rounds)) for name in (*fleets, MIXED, SPLIT)}

        def drained(name: str) -> list[Pause]:
            number = next(numbers[name])
            return [pause(fleets[name], drains[name], length, number) for length in lengths]

        def answered(way: str) -> Round:
            found = split if way == SPLIT else fleets["read"]
            return serve(found, lengths, next(numbers[way]), beside_tokens)

        # Drains come last: each ends a replica, which has to start again before anything else is measured.
        calls: dict[str, Callable[[], list[Pause] | Round]] = {
            way: partial(answered, way) for way in (MIXED, SPLIT)
        }
        calls |= {name: partial(drained, name) for name in fleets}
        every = [*fleets.items(), (SPLIT, split)]
        try:
            for name, one in every:
                for replica in one.replicas:
                    replica.start(drains.get(name, DRAIN_SECONDS))
            for _, one in every:
                one.wait_ready()
            results = in_turn(rounds, calls)
        finally:
            for _, one in every:
                one.close()
    pauses = {name: results[name] for name in fleets}
    ways = {way: results[way] for way in (MIXED, SPLIT)}
    rows = rows_of(lengths, pauses)
    table(rows[0], [row.values() for row in rows])
    requests = served_rows(lengths, beside_tokens[0], ways, pauses["read"])
    print()
    table(requests[0], [row.values() for row in requests])
    figures: Row = {
        "model": PRESET, "output_tokens": OUTPUT_TOKENS, "rows": rows, "requests": requests,
        "mib_per_second": {name: round(statistics.median(each) / 2**20, 1) for name, each in rates.items()},
    }  # fmt: skip
    found = claims(rates, lengths, pauses) + served_claims(lengths, requests, ways, pauses["read"])
    return report(found, arguments.json, figures)


if __name__ == "__main__":
    exit_with(main)
