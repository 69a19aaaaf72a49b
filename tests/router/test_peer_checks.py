"""Which connection is a replica's: the newest one, unless it is of a former epoch and its successor lives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from medha.errors import WireInvalid
from medha.wire.messages import BEATS, Announce
from medha_router.peer_checks import Peers

CARD = Announce(
    replica="tests/grid", model="m", digest="d", epoch=8, ready=True, draining=False, max_model_len=8, vocab_size=8,
    kv_tokens_total=8, kv_tokens_free=8, running=0, waiting=0, pending_prefill_seconds=0.0, longest_request_tokens=8,
    waiting_limit=8, service_classes=(), prefill_points=(),
)  # fmt: skip
NEW, OLD = b"tests/grid/new", b"tests/grid/old"


@pytest.fixture
def peers() -> Peers:
    found = Peers()
    found.received_on_tokens(CARD.replica, NEW)
    found.received_on_control(CARD, NEW)
    return found


def test_a_controller_of_a_former_epoch_does_not_take_the_place_of_its_successor(peers: Peers) -> None:
    peers.received_on_tokens(CARD.replica, OLD)
    with pytest.raises(WireInvalid, match="later one"):
        peers.received_on_control(replace(CARD, epoch=7), OLD, is_alive=True)
    assert peers.identity(CARD.replica) == NEW
    assert peers.is_whole(CARD.replica), "the announcement of the other one on the token link changes nothing"
    assert peers.received_on_control(CARD, NEW, is_alive=True) is None


def test_it_does_once_nothing_is_heard_of_the_successor(peers: Peers) -> None:
    peers.received_on_tokens(CARD.replica, OLD)
    assert peers.received_on_control(replace(CARD, epoch=7), OLD, is_alive=False) == NEW
    assert peers.is_whole(CARD.replica)


def test_nothing_is_left_of_replicas_that_have_gone() -> None:
    peers = Peers()
    for index in range(5):
        card, identity = replace(CARD, replica=f"tests/{index}"), f"tests/{index}/one".encode()
        peers.received_on_tokens(card.replica, identity)
        peers.received_on_control(card, identity)
        peers.forget(identity)
        peers.forget(identity)
    assert (peers._control, peers._tokens, peers._cards) == ({}, {}, {})


def test_a_replica_that_is_back_is_not_forgotten_with_its_former_connection(peers: Peers) -> None:
    again = b"tests/grid/again"
    peers.received_on_tokens(CARD.replica, again)
    peers.forget(NEW)
    assert not peers.is_whole(CARD.replica)
    assert peers.received_on_control(CARD, again) is None
    assert peers.is_whole(CARD.replica), "its token link was heard before"
    peers.received_on_control(CARD, b"tests/grid/third")
    peers.forget(again)
    assert peers.identity(CARD.replica) == b"tests/grid/third"


def test_late_messages_of_a_connection_that_has_ended_do_not_displace_its_successor(peers: Peers) -> None:
    """A router that was stopped reads the new connection of a replica before what its old one has left."""
    again = b"tests/grid/again"
    peers.forget(NEW)
    peers.received_on_tokens(CARD.replica, again)
    assert peers.received_on_control(CARD, again) is None
    with pytest.raises(WireInvalid, match="replaced"):
        peers.received_on_control(CARD, NEW)
    with pytest.raises(WireInvalid, match="replaced"):
        peers.received_on_tokens(CARD.replica, NEW)
    assert peers.identity(CARD.replica) == again
    assert peers.is_whole(CARD.replica)


def test_heartbeats_count_for_the_present_connection_only(peers: Peers) -> None:
    assert peers.beating(NEW + BEATS) == CARD.replica
    assert peers.beating(NEW) is None, "a control link sends none"
    assert peers.beating(OLD + BEATS) is None
    peers.received_on_control(replace(CARD, epoch=9), b"tests/grid/again")
    assert peers.beating(NEW + BEATS) is None


@pytest.mark.parametrize("epoch", [8, 9])
def test_a_controller_that_connects_again_takes_its_own_place(peers: Peers, epoch: int) -> None:
    assert peers.received_on_control(replace(CARD, epoch=epoch), b"tests/grid/again", is_alive=True) == NEW
    assert not peers.is_whole(CARD.replica), "its token link was not heard yet"
    assert peers.received_on_tokens(CARD.replica, b"tests/grid/third") is None, "this is another connection"
    card = peers.received_on_tokens(CARD.replica, b"tests/grid/again")
    assert card == replace(CARD, epoch=epoch)
    assert peers.is_whole(CARD.replica)
    assert peers.received_on_tokens(CARD.replica, b"tests/grid/again") is None, "it was whole before"
