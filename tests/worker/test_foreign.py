"""Whatever arrives on a link of the controller or of a rank, the process counts what it drops, and serves on."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from medha.wire.frames import encode, tokens_to_frame
from medha.wire.messages import (
    Cancel,
    DiskReport,
    Done,
    Emit,
    EntryFailed,
    FetchBundle,
    GrammarReady,
    KvAsk,
    KvDone,
    KvTicket,
    Message,
    RankFault,
    RankHello,
    RankOutOfMemory,
    RankReady,
    RankReport,
    RankXid,
    Refused,
    Rendezvous,
    RouterUse,
    Sample,
    Sampling,
    StageFree,
    Step,
    Submit,
    Tokens,
    TracePart,
    WatchProgress,
)
from medha_links.drops import MOST_MESSAGES
from medha_links.key_files import KeyPair, read_public_key
from medha_links.sockets import connect
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.link import Link

from ..frames import frames, is_dropped
from .controller.test_controller import IDS, READY, Stage
from .rank.test_rank import SPEC as RANK_SPEC
from .rank.test_rank import START_SECONDS
from .rank.test_rank import Stage as RankStage

ACCEPTS: dict[str, tuple[type[Message], ...]] = {
    "rank_control": (
        StageFree,
        Done,
        GrammarReady,
        DiskReport,
        RankHello,
        RankReady,
        RankFault,
        RankOutOfMemory,
        RankReport,
        RankXid,
        TracePart,
    ),
    "rank_tokens": (RankHello,),
    "router_control": (
        Submit,
        Cancel,
        FetchBundle,
        RouterUse,
        WatchProgress,
        KvAsk,
        KvTicket,
        KvDone,
    ),
    "router_tokens": (Tokens,),
}


class Watched(Stage):
    """A stage whose controller's counters are read."""

    def tend(self) -> None:
        """Act as a rank: finish all steps that have arrived, and send a hello."""
        while (received := self.rank.receive()) is not None:
            if isinstance(received.message, Step):
                drawing = {entry.id for entry in received.message.entries if entry.samples}
                self.finish(received.message, *(Sample(one, 7, "length") for one in drawing))
        for link in (self.rank, self.rank_tokens):
            link.send(RankHello(0, "first"))

    def dropped(self, link: str, reason: str = "[a-z]+") -> int:
        text = httpx.get(json.loads(self.ready_file.read_text())["metrics_url"]).text
        found = re.findall(
            rf'^medha_dropped_messages_total{{link="{link}",reason="{reason}"}} (\S+)$', text, re.MULTILINE
        )
        return round(sum(map(float, found)))

    def wait_dropped(self, link: str, count: int, reason: str = "[a-z]+") -> None:
        end = time.monotonic() + 20
        while self.dropped(link, reason) < count:
            assert self.process.poll() is None, self.kill()
            assert time.monotonic() < end, f"{self.dropped(link, reason)} of {count} are counted on {link}"
            time.sleep(0.01)

    def send_raw(self, link: str, raw: list[bytes]) -> None:
        if link.startswith("rank"):
            socket = self.rank.socket if link == "rank_control" else self.rank_tokens.socket
            socket.send_multipart(raw)
        else:
            router = self.router if link == "router_control" else self.router_tokens
            router.socket.send_multipart([router.peer, *raw])

    def begin(self, name: str) -> Step:
        """Submit a request of one token, and return the step that samples it."""
        self.tend()
        self.send_tokens(name)
        self.submit(name, prompt=name, sampling=Sampling(max_tokens=1))
        while True:
            step = self.step()
            if any(entry.id == name and entry.samples for entry in step.entries):
                return step
            self.finish(step)

    def end(self, name: str, step: Step) -> None:
        """Answer the step with a token, and wait until the router gets it."""
        self.finish(step, Sample(name, 7, finish_reason="length"))
        while not isinstance(emit := self.from_controller(Emit), Emit) or emit.id != name:
            pass
        assert (emit.tokens, emit.finish_reason) == ((7,), "length")

    def serves(self, name: str) -> None:
        self.end(name, self.begin(name))


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    stage = Watched(tmp_path_factory.mktemp("foreign"))
    stage.ready()
    stage.wait_for_ready_file()
    yield stage
    assert stage.process.poll() is None, stage.kill()
    stage.close()


# --- anything at all ------------------------------------------------------------------------------------


# By design these end an epoch, or the process if no epoch has begun: the controller must trust them.
ENDS = (RankHello, RankFault)


@pytest.mark.parametrize("link", list(ACCEPTS))
@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(batch=st.lists(frames(without=ENDS), min_size=1, max_size=12))
def test_the_controller_drops_and_counts_whatever_does_not_belong_on_a_link(
    watched: Watched, link: str, batch: list[list[bytes]]
) -> None:
    watched.tend()
    before = watched.dropped(link)
    batch = [raw or [b""] for raw in batch]  # ZeroMQ sends nothing for a message without frames
    for raw in batch:
        watched.send_raw(link, raw)
    expected = sum(is_dropped(raw, ACCEPTS[link]) for raw in batch)
    watched.wait_dropped(link, before + expected)


def test_after_all_that_the_controller_serves(watched: Watched) -> None:
    watched.serves("afterwards")


# --- of the right form, and out of place ------------------------------------------------------------------


def wire(message: Message, payload: bytes | None = None) -> list[bytes]:
    return [bytes(frame) for frame in encode(message, payload)]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        pytest.param(StageFree(10**6, 0), "state", id="a step that was never sent"),
        pytest.param(StageFree(-1, 0), "state", id="no step at all"),
        pytest.param(StageFree(0, 0, epoch=7), "state", id="an epoch to come"),
        pytest.param(Done(10**6), "state", id="the end of a step that was never sent"),
        pytest.param(READY, "state", id="ready for a second time"),
        pytest.param(replace(READY, epoch=1, kv_blocks=0), "state", id="ready with no memory"),
        pytest.param(replace(READY, epoch=1, rank=3), "peer", id="ready for another rank"),
        pytest.param(RankHello(3, "x"), "peer", id="here for another rank"),
        pytest.param(RankFault(3, "it is ill", lost_epoch=0), "peer", id="ill for another rank"),
        pytest.param(
            RankHello(0, "first", dropped=(("control", "type", -1),)), "state", id="dropped less than nothing"
        ),
        pytest.param(
            RankHello(0, "first", dropped=(("control", "type", MOST_MESSAGES + 1),)),
            "state",
            id="dropped more than a metric can hold",
        ),
        pytest.param(
            RankHello(0, "first", dropped=(("control", "type", 10**400),)),
            "fields",
            id="dropped more than a message can hold",
        ),
        pytest.param(Step(1, 0, ()), "unexpected", id="what only a controller says"),
        pytest.param(Cancel("a"), "unexpected", id="a message that only routers send"),
    ],
)
def test_impossible_messages_of_a_rank_are_dropped_and_counted(
    watched: Watched, message: Message, reason: str
) -> None:
    before = watched.dropped("rank_control", reason)
    watched.send_raw("rank_control", wire(message))
    watched.wait_dropped("rank_control", before + 1, reason)


@pytest.mark.parametrize(
    "report",
    [
        pytest.param(lambda step: StageFree(step, 0, lanes=(1,)), id="a lane that does not run it"),
        pytest.param(lambda step: StageFree(step, 0, lanes=()), id="no lane"),
        pytest.param(lambda step: StageFree(step, 1), id="a stage that is not the first"),
        pytest.param(lambda step: Done(step, lanes=(0, 1)), id="done on a lane too many"),
        pytest.param(lambda step: Done(step, (Sample("nobody", 7),)), id="a token for nobody"),
        pytest.param(lambda step: Done(step, (Sample("x", 100),)), id="a token that the model has not"),
        pytest.param(lambda step: Done(step, (Sample("x", 2**40),)), id="a token that is no int32"),
        pytest.param(lambda step: Done(step, (Sample("x", 1), Sample("x", 2))), id="two tokens"),
        pytest.param(lambda step: Done(step, (), (EntryFailed("y", "internal"),)), id="nobody failed"),
        pytest.param(lambda step: Done(step, compute_seconds=float("nan")), id="no time"),
        pytest.param(lambda step: Done(step, compute_seconds=-1.0), id="less than no time"),
        pytest.param(lambda step: Done(step, block_hashes=(("x", "00"),)), id="hashes of its own"),
    ],
)
def test_a_report_that_contradicts_the_step_in_flight_is_dropped_and_the_true_one_counts(
    watched: Watched, report: Callable[[int], StageFree | Done]
) -> None:
    name = f"request {time.monotonic_ns()}"
    step = watched.begin(name)
    message = report(step.step_id)
    if isinstance(message, Done):
        samples = tuple(replace(one, id=name) if one.id == "x" else one for one in message.samples)
        message = replace(message, samples=samples)
    before = watched.dropped("rank_control", "state")
    watched.send_raw("rank_control", wire(message))
    watched.wait_dropped("rank_control", before + 1, "state")
    watched.end(name, step)


@pytest.mark.parametrize(
    ("piece", "ids"),
    [
        pytest.param(Tokens("fresh", 20, 40), IDS, id="the rest of a prompt whose beginning went elsewhere"),
        pytest.param(Tokens("fresh", 0, 10), IDS, id="more than there are"),
        pytest.param(Tokens("fresh", 0, 10**9), IDS, id="longer than any request"),
        pytest.param(Tokens("fresh", 0, 20), IDS + 1000, id="ids that the model has not"),
        pytest.param(Tokens("fresh", 0, 20), -IDS, id="ids below zero"),
    ],
)
def test_ids_that_fit_no_prompt_are_dropped_and_leave_nothing(
    watched: Watched, piece: Tokens, ids: np.ndarray
) -> None:
    before = watched.dropped("router_tokens", "state")
    watched.send_raw("router_tokens", wire(piece, tokens_to_frame(ids)))
    watched.wait_dropped("router_tokens", before + 1, "state")
    watched.serves(f"request {time.monotonic_ns()}")


def test_a_request_that_contradicts_its_prompt_is_refused_and_counted(watched: Watched) -> None:
    before = watched.dropped("router_control", "state")
    watched.send_tokens("of twenty")
    watched.router.send(Submit(id="of ten", prompt="of twenty", tokens=10, prompt_length=10, seed=1))
    # The two links have no common order: ids that arrive later would find a prompt of ten tokens, and be dropped.
    while not isinstance(refused := watched.from_controller(Refused), Refused):
        pass
    assert (refused.id, refused.reason) == ("of ten", "invalid")
    assert watched.dropped("router_control", "state") == before + 1


def test_a_bundle_that_is_not_ours_is_not_sent(watched: Watched) -> None:
    before = watched.dropped("router_control", "state")
    watched.router.send(FetchBundle("00"))
    watched.wait_dropped("router_control", before + 1, "state")


def test_messages_that_a_rank_dropped_are_counted_once_however_often_it_reports_them(
    watched: Watched,
) -> None:
    before = watched.dropped("at_rank_tokens", "payload"), watched.dropped("rank_control")
    for messages in (2, 2, 5, 5):
        dropped = (
            ("tokens", "payload", messages),
            ("elsewhere", "type", 1),
            ("control", "of a later release", 1),
        )
        watched.rank.send(RankHello(0, "first", dropped=dropped))
    watched.wait_dropped("at_rank_tokens", before[0] + 5, "payload")
    watched.serves("after what was dropped")
    assert watched.dropped("at_rank_tokens", "payload") == before[0] + 5
    assert watched.dropped("rank_control") == before[1]
    assert watched.dropped("elsewhere") == 0


class Between:
    """Relays messages between a real rank and a real controller, with the keys of both, and can insert messages."""

    def __init__(self, rank: RankStage, controller: Watched) -> None:
        self.to_rank = rank.control, rank.tokens
        heard = [
            link.receive(START_SECONDS) for link in self.to_rank
        ]  # a ROUTER cannot send to a peer that has sent nothing
        assert heard[0] is not None
        self.peer = heard[0].peer
        keys, server = KeyPair.read(controller.keys.ranks), read_public_key(controller.keys.controller_public)
        self.to_controller = [
            connect(controller.context, controller.endpoints[name], self.peer, keys, server)
            for name in ("rank_control", "rank_tokens")
        ]

    def pass_on(self) -> None:
        """Relay what has arrived, in both directions."""
        for link, opened in zip(self.to_rank, self.to_controller, strict=True):
            while link.socket.poll(10):
                opened.socket.send_multipart(link.socket.recv_multipart()[1:])
            while opened.socket.poll(10):
                link.socket.send_multipart([self.peer, *opened.socket.recv_multipart()])

    def put_in(self, link: Link, *messages: list[bytes]) -> None:
        for raw in messages:
            link.socket.send_multipart([self.peer, *raw])

    def close(self) -> None:
        for opened in self.to_controller:
            opened.close(0)


@pytest.mark.long
def test_what_a_real_rank_drops_is_among_the_metrics_of_its_controller(tmp_path: Path) -> None:
    for name in ("rank", "controller"):
        (tmp_path / name).mkdir()
    init_checkpoint(tmp_path / "tiny", preset="tiny", seed=1)
    with ExitStack() as stack:
        controller = Watched(tmp_path / "controller", RANK_SPEC)
        stack.callback(controller.close)
        rank = RankStage(tmp_path / "rank", tmp_path / "tiny")
        stack.callback(rank.close)
        between = Between(rank, controller)
        stack.callback(between.close)

        def pass_on_until(done: Callable[[], bool], what: str) -> None:
            end = time.monotonic() + START_SECONDS
            while not done():
                assert controller.process.poll() is None, controller.kill()
                assert time.monotonic() < end, what
                between.pass_on()

        pass_on_until(controller.ready_file.exists, "the rank is not ready")
        between.put_in(rank.control, [b"not json"], [b"{"], wire(Cancel("a")))
        between.put_in(rank.tokens, wire(Tokens("p", 0, 1), b"123"), wire(Rendezvous(0)))
        for link in (controller.router, controller.router_tokens):
            pass_on_until(
                lambda link=link: bool(link.receive(1.0)), "the controller does not join its router"
            )
        controller.send_tokens()  # a rank reads its link for ids when a step needs some
        controller.submit("one token", sampling=Sampling(max_tokens=1))
        expected = {
            ("at_rank_control", "header"): 2,
            ("at_rank_control", "unexpected"): 1,
            ("at_rank_tokens", "payload"): 1,
            ("at_rank_tokens", "unexpected"): 1,
        }
        pass_on_until(
            lambda: all(controller.dropped(*where) == messages for where, messages in expected.items()),
            "not all that the rank has dropped is counted",
        )
        emit = controller.from_controller(Emit)
        assert isinstance(emit, Emit)
        assert emit.finish_reason == "length"
        assert sum(controller.dropped(link) for link in ("at_rank_control", "at_rank_tokens")) == 5


def test_a_rank_that_there_is_not_is_not_heard(watched: Watched) -> None:
    """The peer has the key of the replica's ranks, and the number of no rank."""
    before = watched.dropped("rank_control", "peer")
    keys, server = KeyPair.read(watched.keys.ranks), read_public_key(watched.keys.controller_public)
    opened = connect(watched.context, watched.endpoints["rank_control"], b"rank-1", keys, server)
    opened.socket.send_multipart(wire(RankHello(1, "x")))
    watched.wait_dropped("rank_control", before + 1, "peer")
    opened.close(0)


def test_who_has_no_key_of_a_rank_is_refused_and_counted(watched: Watched) -> None:
    def refused() -> float:
        text = httpx.get(json.loads(watched.ready_file.read_text())["metrics_url"]).text
        found = re.search(r'^medha_refused_connections_total{link="rank_control"} (\S+)$', text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    before = refused()
    server = read_public_key(watched.keys.controller_public)
    opened = connect(watched.context, watched.endpoints["rank_control"], b"rank-0", KeyPair.new(), server)
    opened.socket.send_multipart(wire(RankFault(0, "all is lost", lost_epoch=0)))
    end = time.monotonic() + 20
    while refused() == before:
        assert time.monotonic() < end, "nobody was refused"
        time.sleep(0.01)
    opened.close(0)
    watched.serves("in spite of the stranger")
