"""Links over real sockets: what cannot be read is dropped and counted, nothing else is lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from medha.wire.frames import tokens_from_frame, tokens_to_frame
from medha.wire.messages import Shutdown, StageFree, Tokens
from medha_links import sockets
from medha_links.drops import Drops
from medha_links.key_files import KeyPair
from medha_links.sockets import Authenticator, bind
from medha_worker.link import Context, Link, rank_identity

SECONDS = 5.0
SERVER, CLIENT, STRANGER = (KeyPair.new() for _ in range(3))
Connect = Callable[..., Link]


@pytest.fixture
def context() -> Iterator[Context]:
    context = Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def drops() -> Drops:
    return Drops(logging.getLogger("test"))


@pytest.fixture
def bound(context: Context, tmp_path: Path, drops: Drops) -> Iterator[Link]:
    authenticator = Authenticator(context, [CLIENT.public])
    opened = bind(context, f"ipc://{tmp_path}/link", SERVER)
    peers = [rank_identity(0), rank_identity(1)]
    link = Link(opened, "bound", drops, accepts=(StageFree, Tokens), peers=peers)
    yield link
    link.close()
    authenticator.close()


@pytest.fixture
def connect(context: Context, tmp_path: Path, drops: Drops) -> Iterator[Connect]:
    links: list[Link] = []

    def connect(rank: int, keys: KeyPair = CLIENT, server: bytes = SERVER.public) -> Link:
        opened = sockets.connect(context, f"ipc://{tmp_path}/link", rank_identity(rank), keys, server)
        links.append(Link(opened, "connected", drops, accepts=(Shutdown,)))
        return links[-1]

    yield connect
    for link in links:
        link.close(0)


def test_messages_pass_both_ways_under_the_peers_identity(bound: Link, connect: Connect) -> None:
    peers = [connect(0), connect(1)]
    for index, peer in enumerate(peers):
        peer.send(StageFree(step_id=index, stage=0))
    heard = [bound.receive(SECONDS) for _ in peers]
    assert {received.peer: received.message for received in heard if received is not None} == {
        b"rank-0": StageFree(0, 0),
        b"rank-1": StageFree(1, 0),
    }
    bound.send(Shutdown("enough"), peer=b"rank-1")
    received = peers[1].receive(SECONDS)
    assert received is not None
    assert (received.peer, received.message) == (b"", Shutdown("enough"))
    assert peers[0].receive() is None


def test_token_ids_pass_as_a_raw_frame(bound: Link, connect: Connect) -> None:
    ids = np.arange(300_000, dtype=np.int32)
    connect(0).send(Tokens("p", 0, len(ids)), tokens_to_frame(ids))
    received = bound.receive(SECONDS)
    assert received is not None
    assert received.payload is not None
    np.testing.assert_array_equal(tokens_from_frame(received.payload), ids)


def test_malformed_messages_are_dropped_and_counted(
    bound: Link, connect: Connect, drops: Drops, caplog: pytest.LogCaptureFixture
) -> None:
    peer = connect(0)
    stranger = connect(7)
    stranger.send(StageFree(1, 0))
    pickled = b"\x80\x04\x8c\x05posix\x8c\x06system\x93."
    malformed = [
        [b""],
        [b"{"],
        [b"[]"],
        [pickled],
        [b'{"v":1,"type":"Nonsense","body":{}}'],
        [b'{"v":99,"type":"StageFree","body":{"step_id":1,"stage":0}}'],
        [b'{"v":1,"type":"StageFree","body":{"step_id":"one","stage":0}}'],
        [b'{"v":1,"type":"StageFree","body":{"step_id":1,"stage":0}}', b"one frame too many"],
        [b'{"v":1,"type":"Tokens","body":{"prompt":"p","offset":0,"total":1}}'],
        [b'{"v":1,"type":"Tokens","body":{"prompt":"p","offset":0,"total":1}}', b"123"],
        [b'{"v":1,"type":"Cancel","body":{"id":"a"}}'],
    ]
    while not drops.counts:  # the message of the unknown peer, on another connection
        assert bound.receive(0.01) is None
    for frames in malformed:
        peer.socket.send_multipart(frames)
    peer.send(StageFree(7, 0))
    with caplog.at_level(logging.WARNING):
        received = bound.receive(SECONDS)
    assert received is not None
    assert received.message == StageFree(7, 0)
    reasons = {reason: count for (_, reason), count in drops.counts.items()}
    assert reasons == {
        "peer": 1, "header": 4, "type": 1, "version": 1, "fields": 1, "frames": 2, "payload": 1, "unexpected": 1,
    }  # fmt: skip
    assert len(caplog.records) == 11, (
        "of each kind the first, second, fourth: the third of `header` is silent"
    )


def test_nothing_is_dropped_while_the_receiver_is_busy(bound: Link, connect: Connect) -> None:
    """These are more messages than ZeroMQ's own high-water mark of 1000 on each side."""
    peer = connect(0)
    for index in range(5000):
        peer.send(StageFree(index, 0))
    for index in range(5000):
        received = bound.receive(SECONDS)
        assert received is not None
        assert received.message == StageFree(index, 0)


def test_a_message_to_an_unknown_peer_is_an_error(bound: Link) -> None:
    with pytest.raises(zmq.ZMQError) as caught:
        bound.send(Shutdown(), peer=b"rank-1")
    assert caught.value.errno == zmq.EHOSTUNREACH


def test_a_restarted_peer_takes_its_identity_over(bound: Link, connect: Connect) -> None:
    """The former process may still count as connected, if nobody has read the link since it ended."""
    former = connect(0)
    former.send(StageFree(1, 0))
    assert bound.receive(SECONDS) is not None
    later = connect(0)
    later.send(StageFree(2, 0))
    received = bound.receive(SECONDS)
    assert received is not None
    assert received.message == StageFree(2, 0)
    bound.send(Shutdown(), peer=b"rank-0")
    assert later.receive(SECONDS) is not None


def test_receive_returns_none_when_nothing_comes(bound: Link) -> None:
    assert bound.receive(0.01) is None
