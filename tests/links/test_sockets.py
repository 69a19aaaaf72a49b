"""Nobody gets in but who holds an admitted key, nothing but the server with the right key is spoken to."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from medha.errors import WireInvalid
from medha_links.drops import Drops
from medha_links.key_files import KeyPair
from medha_links.sockets import Authenticator, Connections, Opened, bind, connect, connection_of

SERVER, CLIENT, STRANGER = (KeyPair.new() for _ in range(3))
SECONDS = 5.0
ROOT = Path(__file__).parents[2]

Context = zmq.Context[zmq.Socket[bytes]]
Peer = Opened[zmq.Socket[bytes]]


@pytest.fixture(params=["ipc", "tcp"])
def endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/link" if request.param == "ipc" else "tcp://127.0.0.1:*"


@pytest.fixture
def context() -> Iterator[Context]:
    context = Context()
    yield context
    context.term()


@pytest.fixture
def server(context: Context, endpoint: str) -> Iterator[Peer]:
    authenticator = Authenticator(context, [CLIENT.public])
    opened = bind(context, endpoint, SERVER, largest_frame_bytes=1000)
    yield opened
    opened.close(0)
    authenticator.close()


@pytest.fixture
def dial(context: Context, server: Peer) -> Iterator[Callable[..., Peer]]:
    """Connects a client that says hello."""
    dialled: list[Peer] = []

    def dial(name: bytes = b"good", keys: KeyPair = CLIENT, key: bytes = SERVER.public) -> Peer:
        endpoint = server.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        dialled.append(connect(context, endpoint, name, keys, key))
        dialled[-1].socket.send(b"hello of " + name)
        return dialled[-1]

    yield dial
    for opened in dialled:
        opened.close(0)


def heard(peer: Peer) -> list[bytes]:
    assert peer.socket.poll(SECONDS * 1000)
    return peer.socket.recv_multipart()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def test_an_admitted_key_gets_in_and_is_answered(server: Peer, dial: Callable[..., Peer]) -> None:
    client = dial()
    assert heard(server) == [b"good", b"hello of good"]
    server.socket.send_multipart([b"good", b"welcome"])
    assert heard(client) == [b"welcome"]
    assert server.connections.refused() == 0


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"keys": STRANGER}, id="a key that is not admitted"),
        pytest.param({"key": STRANGER.public}, id="the key of another server"),
        pytest.param({"keys": KeyPair(CLIENT.public, STRANGER.secret)}, id="a public key alone"),
    ],
)
def test_a_wrong_key_gets_nowhere_is_counted_and_disturbs_nobody(
    server: Peer, dial: Callable[..., Peer], fields: dict[str, object]
) -> None:
    dial(b"bad", **fields)
    refused = 0

    def is_refused() -> bool:
        nonlocal refused
        refused += server.connections.refused()
        return refused > 0

    wait_for(is_refused)
    dial()
    assert heard(server) == [b"good", b"hello of good"]
    assert not server.socket.poll(50)


def test_plaintext_gets_nowhere_is_counted_and_disturbs_nobody(
    context: Context, server: Peer, dial: Callable[..., Peer]
) -> None:
    plain = context.socket(zmq.DEALER)
    plain.setsockopt(zmq.LINGER, 0)
    plain.connect(server.socket.getsockopt_string(zmq.LAST_ENDPOINT))
    plain.send(b"let me in")
    wait_for(lambda: server.connections.refused() > 0)
    plain.close()
    dial()
    assert heard(server) == [b"good", b"hello of good"]


def test_a_client_does_not_speak_to_a_server_without_encryption(context: Context, endpoint: str) -> None:
    plain = context.socket(zmq.ROUTER)
    plain.bind(endpoint)
    client = connect(context, plain.getsockopt_string(zmq.LAST_ENDPOINT), b"c", CLIENT, SERVER.public)
    client.socket.send(b"a prompt")
    wait_for(lambda: client.connections.refused() > 0)
    assert not plain.poll(50)
    client.close(0)
    plain.close()


def test_without_a_doorkeeper_nobody_gets_in(context: Context, endpoint: str) -> None:
    server = bind(context, endpoint, SERVER)
    client = connect(context, server.socket.getsockopt_string(zmq.LAST_ENDPOINT), b"c", CLIENT, SERVER.public)
    client.socket.send(b"hello")
    wait_for(lambda: server.connections.refused() > 0)
    assert not server.socket.poll(50)
    client.close(0)
    server.close(0)


def test_a_connection_that_ends_is_the_one_by_which_its_messages_came(
    server: Peer, dial: Callable[..., Peer]
) -> None:
    peers = {name: dial(name) for name in (b"goes", b"stays")}
    came_by = {}
    for _ in peers:
        assert server.socket.poll(SECONDS * 1000)
        name, _ = server.socket.recv_multipart(copy=False)
        came_by[name.bytes] = connection_of(name)
    assert came_by[b"goes"] != came_by[b"stays"]
    dial(b"bad", keys=STRANGER)
    peers[b"goes"].close(0)
    refused, ended = 0, set[int]()

    def both_are_seen() -> bool:
        nonlocal refused
        more, of_these = server.connections.refused_and_ended()
        refused += more
        ended.update(of_these)
        return refused > 0 and came_by[b"goes"] in ended

    wait_for(both_are_seen)
    assert came_by[b"stays"] not in ended


def test_a_frame_that_is_too_large_costs_its_sender_the_connection_and_nobody_else(
    server: Peer, dial: Callable[..., Peer]
) -> None:
    greedy = dial(b"greedy")
    good = dial()
    assert sorted([heard(server)[0], heard(server)[0]]) == [b"good", b"greedy"]
    server.connections.take()
    greedy.socket.send(b"x" * 2000)
    wait_for(lambda: zmq.Event.DISCONNECTED in server.connections.take())
    good.socket.send(b"still here")
    assert heard(server) == [b"good", b"still here"]


def test_a_server_that_is_gone_is_noticed_and_found_again(
    context: Context, endpoint: str, tmp_path: Path
) -> None:
    authenticator = Authenticator(context, [CLIENT.public])
    server = bind(context, endpoint, SERVER)
    where = server.socket.getsockopt_string(zmq.LAST_ENDPOINT)
    client = connect(context, where, b"c", CLIENT, SERVER.public)
    client.socket.send(b"one")
    heard(server)
    server.close(0)
    seen: list[zmq.Event] = []

    def has_seen(event: zmq.Event) -> bool:
        seen.extend(client.connections.take())
        return event in seen

    wait_for(lambda: has_seen(zmq.Event.DISCONNECTED))
    seen.clear()
    server = bind(context, where, SERVER)
    wait_for(lambda: has_seen(zmq.Event.HANDSHAKE_SUCCEEDED))
    client.socket.send(b"two")
    assert heard(server)[1] == b"two"
    client.close(0)
    server.close(0)
    authenticator.close()


def test_a_peer_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    counted: list[tuple[str, str]] = []
    drops = Drops(logging.getLogger("test"), lambda link, reason: counted.append((link, reason)))
    for _ in range(1000):
        drops.drop("control", WireInvalid("x" * 10_000, reason="type"))
    assert drops.counts == {("control", "type"): 1000}
    assert counted == [("control", "type")] * 1000
    assert len(caplog.records) == 10
    assert max(len(record.getMessage()) for record in caplog.records) < 500


def test_the_watch_of_a_socket_ends_with_it(context: Context, endpoint: str) -> None:
    socket = context.socket(zmq.ROUTER)
    connections = Connections(socket)
    assert connections.take() == []
    socket.close()
    connections.close()


def test_links_that_are_closed_as_their_server_goes_leave_the_others_of_the_process_alive(
    tmp_path: Path,
) -> None:
    """All of them share ZeroMQ's thread, which reports each lost connection: it must not wait for a listener that has ended."""
    staying, mine = Context(), Context()
    stays = Authenticator(staying, [CLIENT.public])
    stay = bind(staying, f"ipc://{tmp_path}/stay", SERVER)
    kept = connect(mine, f"ipc://{tmp_path}/stay", b"kept", CLIENT, SERVER.public)
    kept.socket.send(b"here")
    peer = stay.socket.recv_multipart()[0]
    is_alive = True
    for number in range(100):
        going = Context()
        goes = Authenticator(going, [CLIENT.public])
        leave = bind(going, f"ipc://{tmp_path}/leave-{number}", SERVER)
        lost = [
            connect(mine, f"ipc://{tmp_path}/leave-{number}", b"%d" % index, CLIENT, SERVER.public)
            for index in range(8)
        ]
        for link in lost:
            link.socket.send(b"here")
        for _ in lost:
            leave.socket.recv_multipart()
        leave.close(0)
        goes.close()
        going.term()
        end = time.monotonic() + SECONDS
        while zmq.Event.DISCONNECTED not in lost[0].connections.take():
            assert time.monotonic() < end, "the lost connection is not reported"
        for link in lost:
            link.close(0)
        stay.socket.send_multipart([peer, b"there?"])
        is_alive = bool(kept.socket.poll(round(SECONDS * 1000)))
        if not is_alive:
            break
        kept.socket.recv()
    assert is_alive, f"nothing is heard any more after {number + 1} servers have gone"
    kept.close(0)
    stay.close(0)
    stays.close()
    staying.term()
    mine.term()


def test_no_module_makes_a_socket_of_zeromq_but_the_one_that_gives_it_keys() -> None:
    kinds = r"zmq\.(?:DEALER|PAIR|PUB|PULL|PUSH|REP|REQ|ROUTER|STREAM|SUB|XPUB|XSUB)\b"
    folders = ("cli", "core", "operator", "router", "sim", "worker")
    making = {
        str(path.relative_to(ROOT)): re.findall(kinds, text)
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if re.search(kinds, text := path.read_text())
    }
    assert set(making) == {"core/medha_links/sockets.py"}
    assert set(making["core/medha_links/sockets.py"]) == {"zmq.ROUTER", "zmq.DEALER", "zmq.PAIR"}, (
        "bound and connected with CURVE; the pair reports connections, within a process"
    )
