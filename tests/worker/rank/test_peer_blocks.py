"""Reads of KV between ranks of two replicas: who gets which blocks, and how a read fails."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import zmq

from medha.api.kv_cache_spec import PeerPlane
from medha.kv.lane_replay import HostTierWork, ReadBlocks, ServeBlocks
from medha.wire.messages import DiskReport, PeerFigures
from medha_links.key_files import KeyPair
from medha_links.sockets import bind, connect
from medha_worker.model.host_blocks import HostBlocks
from medha_worker.model.kv_files import Rows
from medha_worker.rank import peer_reader
from medha_worker.rank.peer_reader import PeerReader
from medha_worker.rank.peer_server import PIECE_BYTES, PeerServer
from medha_worker.rank.sealed_bytes import SealedGiving

BLOCK_BYTES, BLOCKS = 64 * 1024, 400
IDENTITY, TICKET = "the same", "nobody guesses this"


class Memory:
    """Host blocks of a rank, as far as the exchange uses them."""

    block_bytes = BLOCK_BYTES

    def __init__(self, seed: int) -> None:
        self.bytes: Rows = np.random.default_rng(seed).integers(0, 256, (BLOCKS, BLOCK_BYTES), dtype=np.uint8)

    def rows(self, slot: int, count: int) -> Rows:
        return self.bytes[slot : slot + count].copy()

    def put_rows(self, slot: int, rows: Rows) -> None:
        self.bytes[slot : slot + len(rows)] = rows


class Pair:
    """A rank that gives, and one that takes."""

    def __init__(
        self, gives: PeerPlane = "sockets", takes: PeerPlane = "sockets", bytes_endpoint: str = ""
    ) -> None:
        self.source, self.target = Memory(1), Memory(2)
        self.server = PeerServer(
            "tcp://127.0.0.1:*", cast("HostBlocks", self.source), IDENTITY, gives, bytes_endpoint
        )
        self.reader = PeerReader(cast("HostBlocks", self.target), IDENTITY, time.monotonic, takes)
        self.reports: list[DiskReport] = []
        self.reader.begin_epoch(DiskReport(1, 0, 4), self.reports.append)

    def read(
        self, start: int, *slots: tuple[int, int], source: PeerFigures | None = None
    ) -> list[DiskReport]:
        """Read blocks of the ticket from `start` on; return what is reported."""
        self.reader.learn(TICKET, source or self.server.figures)
        before = len(self.reports)
        self.reader.submit(HostTierWork(reads=(ReadBlocks("", start, 9, slots, TICKET),)))
        assert self.reader.drain(60)
        return self.reports[before:]

    def close(self) -> None:
        self.reader.close()
        self.server.close()


@pytest.fixture(params=["", "tcp://127.0.0.1:*"], ids=["with answers", "sealed"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(peer_reader, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(peer_reader, "UNKNOWN_SECONDS", 0.5)
    pair = Pair(bytes_endpoint=request.param)
    yield pair
    pair.close()


def is_loaded(reports: list[DiskReport]) -> bool:
    (one,) = reports
    assert (one.rank, one.lane, one.epoch) == (1, 0, 4)
    assert bool(one.loaded) != bool(one.not_loaded)
    return bool(one.loaded)


def test_blocks_are_read_in_the_order_of_the_ticket_into_any_host_blocks(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_reader, "SILENT_SECONDS", 60.0)
    pair.server.serve([ServeBlocks(TICKET, ((100, 150), (3, 40), (300, 20)))])
    offered = [*range(100, 250), *range(3, 43), *range(300, 320)]
    before = pair.target.bytes.copy()
    assert is_loaded(pair.read(2, (200, 150), (0, 51)))
    taken = [*range(200, 350), *range(51)]
    assert len(taken) > 3 * PIECE_BYTES // BLOCK_BYTES, "several pieces are in flight"
    for there, here in zip(offered[2:], taken, strict=False):
        assert (pair.target.bytes[here] == pair.source.bytes[there]).all()
    for here in set(range(BLOCKS)) - set(taken):
        assert (pair.target.bytes[here] == before[here]).all()


def test_a_ticket_may_become_good_after_it_was_shown(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_reader, "UNKNOWN_SECONDS", 60.0)
    pair.reader.learn(TICKET, pair.server.figures)
    pair.reader.submit(HostTierWork(reads=(ReadBlocks("", 0, 9, ((5, 2),), TICKET),)))
    assert not pair.reader.drain(0.2)
    pair.server.serve([ServeBlocks(TICKET, ((7, 2),))])
    assert pair.reader.drain(60)
    assert is_loaded(pair.reports)
    assert (pair.target.bytes[5:7] == pair.source.bytes[7:9]).all()


@pytest.mark.parametrize("kind", ["never good", "void", "too short", "epoch over", "not said where"])
def test_who_has_no_good_ticket_gets_nothing(pair: Pair, kind: str) -> None:
    before = pair.target.bytes.copy()
    match kind:
        case "void":
            pair.server.serve([ServeBlocks(TICKET, ((0, 5),))])
            pair.server.void([TICKET])
        case "too short":
            pair.server.serve([ServeBlocks(TICKET, ((0, 4),))])
        case "epoch over":
            pair.server.serve([ServeBlocks(TICKET, ((0, 5),))])
            pair.server.end_epoch()
        case "not said where":
            pair.reader.submit(HostTierWork(reads=(ReadBlocks("", 0, 9, ((0, 5),), "another"),)))
            assert pair.reader.drain(60)
            assert not is_loaded(pair.reports)
            pair.reports.clear()
    assert not is_loaded(pair.read(0, (0, 5)))
    assert (pair.target.bytes == before).all()


@pytest.mark.parametrize("side", ["reader", "server"])
def test_blocks_of_another_model_or_grid_are_not_taken(pair: Pair, side: str) -> None:
    pair.server.serve([ServeBlocks(TICKET, ((0, 5),))])
    figures = pair.server.figures
    if side == "reader":
        figures = replace(figures, identity="another")
    else:
        pair.server._identity = "another"
    assert not is_loaded(pair.read(0, (0, 5), source=figures))


class Liar:
    """A rank that answers as it is told, with the keys of its own."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        keys = KeyPair.new()
        self._opened = bind(self._context, "tcp://127.0.0.1:*", keys, admits_all=True)
        self.socket = self._opened.socket
        endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.figures = PeerFigures(endpoint, keys.public.decode(), IDENTITY)

    def answer(self, header: bytes, payload: bytes) -> None:
        assert self.socket.poll(10_000)
        peer, _ = self.socket.recv_multipart()
        self.socket.send_multipart([peer, header, payload])

    def close(self) -> None:
        self._opened.close(0)
        self._context.term()


@pytest.mark.parametrize("pair", [""], indirect=True)
@pytest.mark.parametrize(
    "kind", ["damaged", "cut off", "another place", "no JSON", "no object", "silent", "gone"]
)
def test_a_rank_that_answers_wrongly_or_not_at_all_costs_time_only(pair: Pair, kind: str) -> None:
    rank = Liar()
    before = pair.target.bytes.copy()
    try:
        pair.reader.learn(TICKET, rank.figures)
        if kind == "gone":
            rank.close()
        pair.reader.submit(HostTierWork(reads=(ReadBlocks("", 0, 9, ((0, 1),), TICKET),)))
        good = json.dumps({"start": 0, "checksums": [0]}).encode()
        match kind:
            case "damaged":
                rank.answer(good, bytes(BLOCK_BYTES - 1) + b"1")
            case "cut off":
                rank.answer(good, bytes(BLOCK_BYTES - 1))
            case "another place":
                rank.answer(good.replace(b"0", b"1", 1), bytes(BLOCK_BYTES))
            case "no JSON":
                rank.answer(b"{", b"")
            case "no object":
                rank.answer(b"[]", b"")
        assert pair.reader.drain(60)
    finally:
        if kind != "gone":
            rank.close()
    assert not is_loaded(pair.reports)
    assert (pair.target.bytes == before).all()
    pair.reports.clear()
    pair.server.serve([ServeBlocks(TICKET, ((0, 5),))])
    assert is_loaded(pair.read(0, (0, 5))), "the next read is not disturbed"


@pytest.mark.parametrize("pair", [""], indirect=True)
def test_further_reads_of_a_ticket_that_has_failed_end_at_once(pair: Pair) -> None:
    rank = Liar()
    try:
        pair.reader.learn(TICKET, rank.figures)
        reads = tuple(ReadBlocks("", at, at, ((at, 1),), TICKET) for at in range(3))
        pair.reader.submit(HostTierWork(reads=reads))
        rank.answer(b"{", b"")
        assert pair.reader.drain(60)
        assert not rank.socket.poll(200), "nothing more is asked"
    finally:
        rank.close()
    assert [one.not_loaded for one in pair.reports] == [(0,), (1,), (2,)]


@pytest.mark.parametrize("pair", [""], indirect=True)
def test_a_read_is_called_off_with_its_epoch_and_reports_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_reader, "UNKNOWN_SECONDS", 60.0)
    pair.reader.learn(TICKET, pair.server.figures)
    pair.reader.submit(HostTierWork(reads=(ReadBlocks("", 0, 9, ((0, 5),), TICKET),)))
    assert not pair.reader.drain(0.1)
    pair.reader.end_epoch()
    assert pair.reader.drain(60)
    assert pair.reports == []


@pytest.mark.parametrize("pair", [""], indirect=True)
@pytest.mark.parametrize(
    "question",
    [
        b"{",
        b"[]",
        b"{}",
        json.dumps({"ticket": TICKET, "identity": IDENTITY, "start": -1, "count": 2}).encode(),
        json.dumps({"ticket": TICKET, "identity": IDENTITY, "start": 0, "count": 10**9}).encode(),
        json.dumps({"ticket": TICKET, "identity": IDENTITY, "start": 0, "count": 0}).encode(),
        json.dumps({"ticket": [], "identity": IDENTITY, "start": "x", "count": None}).encode(),
    ],
)
def test_what_is_no_question_gets_an_error_and_others_are_answered(pair: Pair, question: bytes) -> None:
    pair.server.serve([ServeBlocks(TICKET, ((0, 5),))])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    figures = pair.server.figures
    opened = connect(context, figures.endpoint, b"x", KeyPair.new(), figures.public_key.encode())
    try:
        opened.socket.send(question)
        assert opened.socket.poll(10_000)
        header, payload = opened.socket.recv_multipart()
        assert "error" in json.loads(header)
        assert payload == b""
    finally:
        opened.close(0)
        context.term()
    assert is_loaded(pair.read(0, (0, 5)))


def test_whoever_does_not_know_the_key_of_the_socket_is_not_answered(pair: Pair) -> None:
    pair.server.serve([ServeBlocks(TICKET, ((0, 5),))])
    stranger = replace(pair.server.figures, public_key=KeyPair.new().public.decode())
    assert not is_loaded(pair.read(0, (0, 5), source=stranger))


class SealedLiar:
    """A rank that answers a question with a key, and sends bytes as it is told."""

    def __init__(self, rank: Liar) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._rank, self._sealed = rank, SealedGiving(self._context, "tcp://127.0.0.1:*")
        self.figures = replace(rank.figures, bytes_endpoint=self._sealed.endpoint)

    def answer(self, kind: str) -> None:
        assert self._rank.socket.poll(10_000)
        peer, question = self._rank.socket.recv_multipart()
        identity = json.loads(question)["sealed_to"]
        rows = np.zeros((1, BLOCK_BYTES - (kind == "cut off")), dtype=np.uint8)
        until = time.monotonic() + 10
        while kind != "silent" and (key := self._sealed.send(identity, rows)) is None:
            assert time.monotonic() < until, "the reader connects to the plain socket"
        if kind in ("silent", "another key"):
            key = "00" * 32
        header = {"start": 0, "sealed": "none" if kind == "no key" else key}
        self._rank.socket.send_multipart([peer, json.dumps(header).encode(), b""])

    def close(self) -> None:
        self._sealed.close()
        self._context.term()


@pytest.mark.parametrize("pair", [""], indirect=True)
@pytest.mark.parametrize("kind", ["another key", "no key", "cut off", "silent"])
def test_bytes_that_do_not_fit_the_key_of_their_answer_are_not_taken(pair: Pair, kind: str) -> None:
    rank = Liar()
    sealed = SealedLiar(rank)
    before = pair.target.bytes.copy()
    try:
        pair.reader.learn(TICKET, sealed.figures)
        pair.reader.submit(HostTierWork(reads=(ReadBlocks("", 0, 9, ((0, 1),), TICKET),)))
        sealed.answer(kind)
        assert pair.reader.drain(60)
    finally:
        sealed.close()
        rank.close()
    assert not is_loaded(pair.reports)
    assert (pair.target.bytes == before).all()


@pytest.mark.parametrize("pair", ["tcp://127.0.0.1:*"], indirect=True)
@pytest.mark.parametrize("place", ["tcp://127.0.0.1:1", "no endpoint"])
def test_bytes_come_with_answers_if_nobody_is_reached_at_the_plain_socket(pair: Pair, place: str) -> None:
    pair.server.serve([ServeBlocks(TICKET, ((0, 5),))])
    assert is_loaded(pair.read(0, (7, 5), source=replace(pair.server.figures, bytes_endpoint=place)))
    assert (pair.target.bytes[7:12] == pair.source.bytes[:5]).all()


@pytest.mark.parametrize("pair", ["tcp://127.0.0.1:*"], indirect=True)
def test_a_rank_logs_once_for_each_peer_by_which_way_bytes_come(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "medha.peers")
    pair.server.serve([ServeBlocks(TICKET, ((0, 5),))])
    closed = replace(pair.server.figures, bytes_endpoint="tcp://127.0.0.1:1")
    for _ in range(50):  # a piece may be asked for before the plain socket is connected
        assert is_loaded(pair.read(0, (7, 5)))
        assert is_loaded(pair.read(0, (7, 5), source=closed))
    fast, slow = sorted(caplog.records, key=lambda one: one.levelno)
    open_endpoint = pair.server.figures.bytes_endpoint
    assert fast.message == f"KV of other replicas comes encrypted by AES-GCM from {open_endpoint}"
    assert slow.levelname == "WARNING"
    assert "over CURVE, more slowly" in slow.message
    assert "plain socket at tcp://127.0.0.1:1." in slow.message


def test_a_rank_logs_anew_when_a_port_is_opened(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "medha.peers")
    ways = peer_reader._WaysOfBytes()
    for is_plain in (False, True):
        for _ in range(3 * peer_reader._PIECES_WITH_ANSWERS):
            ways.note("tcp://peer:5611", is_plain=is_plain)
    assert [one.levelname for one in caplog.records] == ["WARNING", "INFO"]


def test_each_answer_has_a_key_of_its_own_and_its_bytes_are_not_readable_on_the_plain_socket() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    giving, plain = SealedGiving(context, "tcp://127.0.0.1:*"), context.socket(zmq.DEALER)
    plain.setsockopt(zmq.IDENTITY, b"me")
    plain.connect(giving.endpoint)
    rows = np.zeros((2, 1024), dtype=np.uint8)
    keys, sent = set(), set()
    try:
        until = time.monotonic() + 10
        while (key := giving.send(b"me".hex(), rows)) is None:
            assert time.monotonic() < until
        keys.add(key)
        keys.add(giving.send(b"me".hex(), rows))
        for _ in range(2):
            assert plain.poll(10_000)
            sent.add(plain.recv())
        assert giving.send(b"stranger".hex(), rows) is None
        assert giving.send("", rows) is None
        assert giving.send("no hexadecimal", rows) is None
    finally:
        plain.close(0)
        giving.close()
        context.term()
    assert len(keys) == len(sent) == 2
    assert not any(bytes(64) in one for one in sent)
