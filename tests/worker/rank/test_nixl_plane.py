"""Reads of KV between ranks by real agents of NIXL: the bytes, places in registered memory, and what fails."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any, cast

import numpy as np
import pytest

from medha.api.kv_cache_spec import PeerPlane
from medha.kv.lane_replay import ServeBlocks
from medha_worker.model.host_blocks import HostBlocks
from medha_worker.rank import nixl_plane, peer_plane
from medha_worker.rank.peer_plane import PlaneFailed, WithAnswers
from medha_worker.rank.peer_reader import peer_blocks

from .test_peer_blocks import BLOCK_BYTES, IDENTITY, TICKET, Memory, Pair, is_loaded


@pytest.fixture
def _nixl() -> None:
    pytest.importorskip("nixl", reason="the package nixl is not installed")


def offers_of(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return the list that notes of each further answer if its bytes were offered by the plane."""
    offers: list[bool] = []
    offer = pair.server._plane.offer

    def noted(rows: Any) -> Any:
        found = offer(rows)
        offers.append(found is not None)
        return found

    monkeypatch.setattr(pair.server._plane, "offer", noted)
    return offers


@pytest.fixture
def pair(_nixl: None) -> Iterator[Pair]:
    with closing(Pair("nixl", "nixl")) as pair:
        yield pair


def test_blocks_are_read_out_of_registered_memory_whose_places_are_used_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    offers = offers_of(pair, monkeypatch)
    pair.server.serve([ServeBlocks(TICKET, ((100, 150), (3, 40), (300, 20)))])
    before = pair.target.bytes.copy()
    for _ in range(6):
        pair.target.bytes[:] = before
        assert is_loaded(pair.read(2, (200, 150), (0, 51)))
        pair.reports.clear()
        offered = [*range(100, 250), *range(3, 43), *range(300, 320)]
        for there, here in zip(offered[2:], [*range(200, 350), *range(51)], strict=False):
            assert (pair.target.bytes[here] == pair.source.bytes[there]).all()
        assert (pair.target.bytes[60:190] == before[60:190]).all()
    assert len(offers) > 2 * nixl_plane._PLACES
    assert all(offers), "each place was free in time"


def test_answers_carry_their_bytes_while_no_place_is_free(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [pair.server._plane.offer(np.zeros((1, BLOCK_BYTES), dtype=np.uint8)) for _ in range(8)]
    assert all(held)
    offers = offers_of(pair, monkeypatch)
    pair.server.serve([ServeBlocks(TICKET, ((100, 100),))])
    assert is_loaded(pair.read(0, (200, 100)))
    assert (pair.target.bytes[200:300] == pair.source.bytes[100:200]).all()
    assert offers
    assert not any(offers)
    now = time.monotonic() + 11
    monkeypatch.setattr(nixl_plane.time, "monotonic", lambda: now)
    assert is_loaded(pair.read(0, (200, 100))[-1:])
    assert any(offers), "whoever has asked has gone"


@pytest.mark.parametrize(("gives", "takes"), [("nixl", "sockets"), ("sockets", "nixl")])
@pytest.mark.usefixtures("_nixl")
def test_ranks_of_different_planes_use_sockets(gives: PeerPlane, takes: PeerPlane) -> None:
    with closing(Pair(gives, takes)) as pair:
        pair.server.serve([ServeBlocks(TICKET, ((7, 5),))])
        assert is_loaded(pair.read(0, (0, 5)))
        assert (pair.target.bytes[:5] == pair.source.bytes[7:12]).all()


@pytest.mark.parametrize("what", ["overwritten", "nowhere", "no metadata"])
def test_bytes_that_do_not_come_reach_no_host_block_and_sockets_are_used_from_then_on(
    what: str, pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair.server.serve([ServeBlocks(TICKET, ((7, 5),))])
    offer = pair.server._plane.offer

    def spoilt(rows: Any) -> Any:
        found = offer(rows)
        assert found is not None
        offered, payload = found
        match what:
            case "overwritten":
                cast("nixl_plane.NixlGiving", pair.server._plane)._agent.memory[:] = 0
            case "nowhere":
                offered["at"] = 4096
            case "no metadata":
                offered["metadata"] = "00"
        return offered, payload

    monkeypatch.setattr(pair.server._plane, "offer", spoilt)
    before = pair.target.bytes.copy()
    with caplog.at_level(logging.WARNING):
        assert not is_loaded(pair.read(0, (0, 5)))
    assert (pair.target.bytes == before).all()
    assert "so it is computed" in caplog.text
    pair.reports.clear()
    monkeypatch.setattr(pair.server._plane, "offer", offer)
    assert is_loaded(pair.read(0, (0, 5)))
    assert (pair.target.bytes[:5] == pair.source.bytes[7:12]).all()
    assert pair.reader._plane.name == ("nixl" if what == "overwritten" else "")


@pytest.mark.parametrize("end", ["_nixl_taking", "_nixl_giving"])
def test_a_rank_that_cannot_open_an_end_uses_sockets_and_says_so(
    end: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(_: int) -> None:
        raise PlaneFailed("the library nixl is not installed")

    for each in ("_nixl_taking", "_nixl_giving"):
        monkeypatch.setattr(peer_plane, each, missing if each == end else lambda _: WithAnswers())
    caplog.set_level(logging.INFO)
    before = threading.active_count()
    with closing(peer_blocks("tcp://127.0.0.1:*", cast("HostBlocks", Memory(1)), IDENTITY, "nixl")) as blocks:
        assert (blocks.reader._plane.name, blocks.server._plane_name) == ("", "sockets")
        assert threading.active_count() == before + 2
    assert [record.getMessage() for record in caplog.records if record.name == "medha.peers"] == [
        "KV goes to and comes from other replicas over sockets, not over nixl: the library nixl is not installed"
    ]
