"""The controller's process between a router and a rank that the test plays, over real ZeroMQ."""

from __future__ import annotations

import json
import logging
import re
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import get_args

import httpx
import numpy as np
import pytest
import zmq
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from forked_part import CONTROLLER, start_part
from medha.api.model_spec import ModelSource, ModelSpec
from medha.api.replica import LifecycleSpec, MedhaReplicaSpec, ParallelismSpec, SchedulingSpec
from medha.cost.cost_profile import Profile
from medha.scheduler.controller import ReplicaController
from medha.scheduler.replica_config import ReplicaConfig, derive
from medha.wire.frames import decode, encode, tokens_from_frame, tokens_to_frame
from medha.wire.messages import (
    BEATS,
    Announce,
    BundlePart,
    Cancel,
    ChunkProgress,
    DiskReport,
    Done,
    DraftCosts,
    Emit,
    Extent,
    Failed,
    FetchBundle,
    Heartbeat,
    HostTierFigures,
    KvAsk,
    KvDone,
    KvPart,
    KvTicket,
    Message,
    PeerFigures,
    ProgressReport,
    RankFault,
    RankHello,
    RankReady,
    Refused,
    Rendezvous,
    Sample,
    Sampling,
    Shutdown,
    StageFree,
    Step,
    StepProfile,
    Submit,
    Tokens,
    WatchProgress,
)
from medha_links.drops import Drops
from medha_links.key_files import KeyFiles, KeyPair, read_public_key, read_tokens
from medha_links.sockets import Authenticator, Opened, bind, connect
from medha_process.part_settings import ControllerSettings, RouterEndpoints
from medha_process.part_state import PartState
from medha_worker.checkpoints.read_bundle import read_bundle
from medha_worker.controller.joint_figures import slowest_rank
from medha_worker.controller.process import Controller
from medha_worker.epoch_file import write_epoch
from medha_worker.link import Link, Received

READY = RankReady(
    rank=0,
    block_size_tokens=16,
    kv_blocks=64,
    weights_bytes=1,
    activation_bytes=1,
    kv_bytes=1,
    profile=StepProfile(1e-3, 1e-6, 1e-9, 1e-5),
    device="cpu",
    max_model_len=512,
    vocab_size=100,
    linear_flops_per_token=1e6,
    attention_flops_per_pair=1e3,
)
IDS = np.arange(20, dtype=np.int32)
SPEC = MedhaReplicaSpec(model=ModelSpec(name="m", source=ModelSource(path="unused")))


ANY = get_args(Message)
DROPS = Drops(logging.getLogger())


class Router:
    """A link of a router to the one controller that there is."""

    def __init__(self, opened: Opened[zmq.Socket[bytes]]) -> None:
        self.socket = opened.socket
        self.connections = opened.connections
        self.close = opened.close
        self.peer = b""  # peer whose message was received last
        self.beating = b""  # peer whose heartbeat was received last

    def receive(self, timeout_seconds: float) -> Received | None:
        """Return the next message; None if a heartbeat comes before it, or nothing in time."""
        if not self.socket.poll(round(timeout_seconds * 1000)):
            return None
        peer, *frames = self.socket.recv_multipart()
        if peer.endswith(BEATS):
            assert decode(frames) == (Heartbeat(), None)
            self.beating = peer
            return None
        self.peer = peer
        return Received(self.peer, *decode(frames))

    def send(self, message: Message, payload: bytes | None = None) -> None:
        self.socket.send_multipart([self.peer, *encode(message, payload)])


class Stage:
    """A controller process, and the two peers that the test plays."""

    def __init__(
        self,
        folder: Path,
        spec: MedhaReplicaSpec = SPEC,
        *,
        start: bool = True,
        others: tuple[RouterEndpoints, ...] = (),
    ) -> None:
        """`others` are endpoints of further routers."""
        tokenizer = Tokenizer(BPE())
        tokenizer.decoder = ByteLevel()
        tokenizer.save(str(folder / "tokenizer.json"))
        endpoints = {
            name: f"ipc://{folder}/{name}"
            for name in ("router_control", "router_tokens", "rank_control", "rank_tokens")
        }
        self.record = folder / "record.jsonl"
        self.ready_file = folder / "ready.json"
        keys = KeyFiles.create(folder / "keys")
        settings = ControllerSettings(
            replica="r0",
            spec=spec,
            model_directory=folder,
            ready_file=self.ready_file,
            record_file=self.record,
            router_key_file=keys.router_public,
            enrolment_file=keys.enrolment,
            key_file=keys.controller,
            rank_keys_file=keys.ranks_public,
            routers=(
                RouterEndpoints(control=endpoints["router_control"], tokens=endpoints["router_tokens"]),
                *others,
            ),
            rank_control=endpoints["rank_control"],
            rank_tokens=endpoints["rank_tokens"],
        )
        settings.write(folder / "settings.json")
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.endpoints, self.keys = endpoints, keys
        self.incarnation = "first"
        self.open_router()
        self.settings = folder / "settings.json"
        self.log: str | None = (
            ""  # of a controller that has not been started, or runs in the test's own process
        )
        if start:
            self.start()
        self.has_lost_rank = False
        self.rank, self.rank_tokens = self.connect_rank(b"rank-0")

    def connect_rank(self, identity: bytes) -> tuple[Link, Link]:
        """Return the two links of a rank's process."""
        rank_keys, server = KeyPair.read(self.keys.ranks), read_public_key(self.keys.controller_public)
        control, tokens = (
            Link(
                connect(self.context, self.endpoints[name], identity, rank_keys, server),
                name,
                DROPS,
                accepts=ANY,
            )
            for name in ("rank_control", "rank_tokens")
        )
        return control, tokens

    def lose_rank(self) -> None:
        """Let the rank disappear: it is not heard again."""
        self.has_lost_rank = True
        for link in (self.rank, self.rank_tokens):
            link.close()

    def start(self) -> None:
        self.log = None
        self.process = start_part(CONTROLLER, self.settings)

    def metrics_url(self) -> str:
        return str(json.loads(self.ready_file.read_text())["metrics_url"])

    def open_router(self) -> None:
        """Listen as a router does."""
        enrolled = KeyPair.of_token(read_tokens(self.keys.enrolment)[0]).public
        # A context of its own, as a process has: ending it frees the address at once, closing a socket only later.
        self.router_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.authenticator = Authenticator(self.router_context, [enrolled])
        self.router, self.router_tokens = (
            Router(bind(self.router_context, self.endpoints[name], KeyPair.read(self.keys.router)))
            for name in ("router_control", "router_tokens")
        )

    def close_router(self) -> None:
        """Disappear, as a router does that is killed."""
        for link in (self.router, self.router_tokens):
            link.close(0)
        self.authenticator.close()
        self.router_context.term()

    def hello(self, incarnation: str = "first") -> Rendezvous:
        """Send hellos, as ranks do, until the controller calls the rank to the rendezvous."""
        self.incarnation = incarnation
        for _ in range(20):
            self.send_hello()
            while (received := self.rank.receive(timeout_seconds=1)) is not None:
                if isinstance(received.message, Rendezvous):
                    return received.message
        raise AssertionError(f"not called; the controller says: {self.kill()}")

    def send_hello(self) -> None:
        for link in (self.rank, self.rank_tokens):
            link.send(RankHello(0, self.incarnation))

    def ready(self) -> None:
        self.rank.send(replace(READY, epoch=self.hello().epoch))
        for link in (self.router, self.router_tokens):
            assert isinstance(self._next(link, Announce).message, Announce)

    def wait_for_ready_file(self) -> None:
        end = time.monotonic() + 20
        while not self.ready_file.exists() and time.monotonic() < end:
            time.sleep(0.01)

    def from_controller(self, kind: type) -> object:
        """Return the next message of this kind that the router gets."""
        return self._next(self.router, kind).message

    def step(self) -> Step:
        received = self._next(self.rank, Step).message
        assert isinstance(received, Step)
        return received

    def finish(self, step: Step, *samples: Sample) -> None:
        self.rank.send(StageFree(step.step_id, 0))
        self.rank.send(Done(step.step_id, samples, compute_seconds=0.001))

    def submit(self, name: str, prompt: str = "p", **fields: object) -> None:
        message = Submit(id=name, prompt=prompt, tokens=20, prompt_length=20, seed=1, **fields)  # type: ignore[arg-type]
        self.router.send(message)

    def send_tokens(self, prompt: str = "p", sequences: int = 1) -> None:
        piece = Tokens(prompt, 0, len(IDS), sequences)
        self.router_tokens.send(piece, tokens_to_frame(IDS))

    def _next(self, link: Link | Router, kind: type) -> Received:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            received = link.receive(timeout_seconds=0.5)
            if received is None:
                if not self.has_lost_rank:
                    self.send_hello()  # as ranks do: a rank that is silent for five seconds counts as lost
            elif isinstance(received.message, kind):
                return received
        raise AssertionError(f"no {kind.__name__}; {self.links_say()}; the controller says: {self.kill()}")

    def links_say(self) -> str:
        """Return the events of the rank's connections and the controller's dropped messages, for a failed test."""
        events = {
            link.name: [event.name for event in link.connections.take()]
            for link in (self.rank, self.rank_tokens)
        }
        dropped: list[str] = []
        if self.ready_file.exists():
            with suppress(httpx.HTTPError):
                lines = httpx.get(self.metrics_url()).text.splitlines()
                dropped = [line for line in lines if line.startswith("medha_dropped_messages_total")]
        return f"connections {events}, dropped {dropped}"

    def kill(self) -> str:
        """End the controller, and return its output, which can be read once."""
        if self.log is None:
            self.process.kill()
            self.log = self.process.communicate()[1]
        return self.log

    def close(self) -> None:
        self.kill()
        self.close_router()
        for link in (self.rank, self.rank_tokens):
            link.close(0)
        self.context.term()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.close()


def test_a_request_reaches_the_ranks_with_its_ids_first_and_its_tokens_come_back(stage: Stage) -> None:
    stage.ready()
    stage.router.send(WatchProgress(60.0))
    stage.submit("a", sampling=Sampling(max_tokens=2))  # before its ids: it must wait for them
    stage.send_tokens()
    step = stage.step()
    assert [admit.id for admit in step.admits] == ["a"]
    received = stage.rank_tokens.receive(timeout_seconds=5)
    assert received is not None
    assert received.message == Tokens("p", 0, 20)
    assert received.payload is not None
    assert tokens_from_frame(received.payload).tolist() == IDS.tolist()
    stage.finish(step, Sample("a", 7))
    report = stage.from_controller(
        ProgressReport
    )  # before the output, and the only one: a decode is no chunk
    assert isinstance(report, ProgressReport)
    assert report.chunks == (ChunkProgress("a", 20, 0, is_first=True),)
    assert stage.from_controller(Emit) == Emit("a", (7,))
    stage.finish(stage.step(), Sample("a", 8, finish_reason="length"))
    assert stage.from_controller(Emit) == Emit("a", (8,), finish_reason="length")
    bookkeeping = stage.step()
    assert (bookkeeping.releases, bookkeeping.forgets) == (("a",), ("p",))


def test_a_rank_that_was_replaced_begins_the_next_epoch_with_the_requests_left_to_the_router(
    stage: Stage,
) -> None:
    stage.ready()
    stage.submit("a", sampling=Sampling(max_tokens=2))
    stage.send_tokens()
    lost = stage.step()
    rendezvous = stage.hello("second")
    assert rendezvous.epoch == 1
    card = stage.from_controller(Announce)
    while card.ready:  # type: ignore[attr-defined] # sent before the loss was noticed
        card = stage.from_controller(Announce)
    stage.submit("b")
    assert stage.from_controller(Refused) == Refused("b", "not_ready", "the ranks are gathering")
    stage.rank.send(replace(READY, epoch=rendezvous.epoch))
    stage.finish(lost, Sample("a", 7))  # too late: it is of the lost epoch
    while not (card := stage.from_controller(Announce)).ready:  # type: ignore[attr-defined]
        pass
    assert card.epoch == 1  # type: ignore[attr-defined]
    stage.send_tokens("again")
    stage.submit("c", "again")
    step = stage.step()
    assert (step.epoch, step.step_id, [admit.id for admit in step.admits]) == (1, 0, ["c"])


def test_a_controller_sends_heartbeats_beside_its_control_link_also_to_the_next_router(stage: Stage) -> None:
    stage.ready()
    while not stage.router.beating:
        stage.from_controller(Announce)  # one comes every second, and fails the test if it does not
    former = stage.router.peer
    assert stage.router.beating == former + BEATS
    stage.close_router()
    stage.open_router()
    while not stage.router.beating:
        stage.from_controller(Announce)
    assert stage.router.beating == stage.router.peer + BEATS != former + BEATS


def reports_of_requests(stage: Stage) -> list[object]:
    """Return what the router receives about requests until their epoch is over."""
    reports: list[object] = []
    while True:
        message = stage.from_controller(object)
        if not isinstance(message, Announce):
            reports.append(message)
        elif not message.ready:
            return reports


def test_the_router_learns_which_requests_were_computed_when_a_rank_was_lost_and_which_only_waited(
    stage: Stage,
) -> None:
    stage.ready()
    stage.send_tokens()
    stage.submit("computed")
    assert [admit.id for admit in stage.step().admits] == ["computed"]
    stage.submit("without ids", prompt="q")
    stage.send_tokens("r")
    stage.submit("waits", prompt="r")
    while stage.from_controller(Announce).waiting == 0:  # type: ignore[attr-defined]
        pass
    stage.hello("second")
    assert reports_of_requests(stage) == [
        Refused("without ids", "not_ready", "the epoch has ended"),
        Refused("waits", "not_ready", "the epoch has ended"),
        Failed("computed", "rank_lost", "a rank was lost while a step had it"),
    ]


class Unwatched:
    """Stands for the watchdog of a controller that runs in this process."""

    def allow(self, seconds: float, doing: str) -> None:
        """Set no limit."""

    def report(self, state: PartState) -> None:
        """Report to nobody."""


@contextmanager
def in_this_process(stage: Stage) -> Iterator[None]:
    """Run the controller of `stage` in a thread, so that its constants can be others."""
    controller = Controller(
        ControllerSettings.read(stage.settings), read_bundle(stage.settings.parent), stage.settings
    )
    thread = Thread(target=controller.run, args=(Unwatched(),))
    thread.start()
    try:
        yield
    finally:
        controller.stop()
        thread.join()
        controller.close()


def change(stage: Stage, **scheduling: object) -> None:
    """Replace the settings, as a pod's supervisor does."""
    settings = ControllerSettings.read(stage.settings)
    spec = settings.spec.model_copy(
        update={"scheduling": settings.spec.scheduling.model_copy(update=scheduling)}
    )
    settings.model_copy(update={"spec": spec}).write(stage.settings)


def test_ranks_missing_at_the_first_start_are_logged_once_others_are_present(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("medha_worker.controller.rank_links.LOG_SECONDS", 0.0)
    spec = SPEC.model_copy(update={"parallelism": ParallelismSpec(stream=2)})
    stage = Stage(tmp_path, spec, start=False)
    with closing(stage), in_this_process(stage):
        end = time.monotonic() + 10
        while "waiting for rank 1 since" not in caplog.text and time.monotonic() < end:
            stage.send_hello()
            stage.router.receive(timeout_seconds=0.1)
    assert "waiting for rank 1 since" in caplog.text
    assert "waiting for rank 0, 1" not in caplog.text, "nobody waits while all of them load"


def test_settings_that_change_are_the_fault_of_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medha_worker.controller.process.LIVE_SECONDS", 0.0)
    stage = Stage(tmp_path, start=False)
    with closing(stage), in_this_process(stage):
        stage.ready()
        stage.send_tokens()
        stage.submit("computed")
        stage.step()
        change(stage, policy="srpt")
        assert reports_of_requests(stage) == [Refused("computed", "not_ready", "the epoch has ended")]
        assert stage.hello().epoch == 1


@pytest.mark.parametrize(
    "edit", [{"min_chunk_tokens": 4096}, {"policy": "srpt"}], ids=["invalid", "no profile"]
)
def test_settings_that_no_epoch_could_begin_with_are_logged_and_the_replica_continues_to_serve(
    tmp_path: Path, edit: dict[str, object]
) -> None:
    path = tmp_path / "p.json"
    path.write_text(Profile(name="measured", source="test", layers=2, launch_seconds=0.25).to_json())
    spec = SPEC.model_copy(update={"scheduling": SchedulingSpec(profile=str(path))})
    with closing(Stage(tmp_path, spec)) as stage:
        stage.ready()
        path.unlink()
        change(stage, **edit)
        assert stage.process.stderr is not None
        logged = next(line for line in stage.process.stderr if "the new settings" in line)
        assert "the previous ones stay in force" in logged
        stage.send_tokens()
        stage.submit("a")
        assert stage.step().epoch == 0


def test_an_epoch_that_a_rank_has_lost_begins_again_once_all_are_heard(stage: Stage) -> None:
    stage.ready()
    stage.rank.send(RankFault(0, "lost rank 1", lost_epoch=5))  # of another epoch: it has no effect
    stage.rank.send(RankFault(0, "lost rank 1", lost_epoch=0))
    assert stage.hello("first").epoch == 1
    assert stage.process.poll() is None


def test_numbers_that_no_replica_can_be_made_of_end_the_epoch_and_name_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def derive_from(spec: MedhaReplicaSpec, ready: RankReady) -> ReplicaConfig:
        if ready.epoch == 0:
            raise ValueError("cannot convert float NaN to integer")
        return derive(spec, ready)

    monkeypatch.setattr("medha_worker.controller.process.derive", derive_from)
    stage = Stage(tmp_path, start=False)
    with closing(stage), in_this_process(stage):
        stage.rank.send(replace(READY, epoch=stage.hello().epoch))
        stage.ready()
        card = stage.from_controller(Announce)
        assert (card.ready, card.epoch) == (True, 1)  # type: ignore[attr-defined]
    assert (
        "the report of rank 0 does not describe a replica: cannot convert float NaN to integer" in caplog.text
    )


def test_a_rank_whose_connection_ends_costs_the_epoch_although_nothing_is_sent_to_it(stage: Stage) -> None:
    """A killed rank ends like this. The router gets the report before the step's time limit is over."""
    stage.ready()
    stage.send_tokens()
    stage.submit("a")
    stage.step()
    stage.rank.close(0)
    stage.rank_tokens.close(0)
    message, end = None, time.monotonic() + 10
    while not isinstance(message, Failed) and time.monotonic() < end:
        received = stage.router.receive(timeout_seconds=1)
        message = received and received.message
    assert message == Failed("a", "rank_lost", "a rank was lost while a step had it")
    assert "rank 0 is gone" in stage.kill()


def test_the_last_message_of_a_rank_counts_although_its_connection_has_ended(stage: Stage) -> None:
    stage.ready()
    stage.send_tokens()
    stage.submit("a")
    step = stage.step()
    # It is stopped, so that it sees the end of the connection together with the last messages.
    stage.process.send_signal(signal.SIGSTOP)
    stage.finish(step, Sample("a", 7, finish_reason="length"))
    stage.rank.close()
    stage.rank_tokens.close()
    time.sleep(0.2)  # the messages are in transit, and this process cannot see when they arrive
    stage.process.send_signal(signal.SIGCONT)
    end = time.monotonic() + 10
    message: object = None
    while not isinstance(message, (Emit, Failed)) and time.monotonic() < end:
        received = stage.router.receive(timeout_seconds=1)
        message = received and received.message
    assert message == Emit("a", (7,), finish_reason="length")


def test_connections_of_a_former_process_and_of_a_stranger_may_end_without_an_epoch(stage: Stage) -> None:
    stage.ready()
    former = stage.rank, stage.rank_tokens
    stage.rank, stage.rank_tokens = stage.connect_rank(b"rank-0/second")
    epoch = stage.hello("second").epoch
    stage.rank.send(replace(READY, epoch=epoch))
    while stage.from_controller(Announce).epoch != epoch:  # type: ignore[attr-defined]
        pass
    stranger = stage.connect_rank(b"rank-7/who")
    for link in stranger:
        link.send(RankHello(7, "who"))
    for link in (*former, *stranger):
        link.close()
    for _ in range(3):  # one announcement a second: in that time the ended connections were noticed
        assert stage.from_controller(Announce).epoch == epoch  # type: ignore[attr-defined]
        stage.send_hello()
    stage.send_tokens()
    stage.submit("a")
    assert stage.step().epoch == epoch


def test_a_step_that_ends_without_a_token_it_was_to_sample_ends_the_epoch(stage: Stage) -> None:
    stage.ready()
    stage.send_tokens()
    stage.submit("a")
    stage.finish(stage.step())
    assert reports_of_requests(stage) == [Failed("a", "rank_lost", "a rank was lost while a step had it")]
    assert stage.hello("first").epoch == 1


def test_a_cancel_frees_what_the_request_held(stage: Stage) -> None:
    stage.ready()
    stage.send_tokens()
    stage.submit("a")
    step = stage.step()
    stage.router.send(Cancel("a"))
    # The cancel and the rank's answers come on different links, in no fixed order, so steps may run in between.
    while step.releases != ("a",):
        stage.finish(step, *(Sample(entry.id, 7) for entry in step.entries))
        step = stage.step()
    assert step.forgets == ("p",)
    stage.finish(step)
    while (announce := stage.from_controller(Announce)) is not None:
        assert isinstance(announce, Announce)
        if announce.kv_tokens_free == announce.kv_tokens_total and announce.running == 0:
            break


def test_the_bundle_is_sent_to_who_asks_by_its_digest(stage: Stage) -> None:
    stage.ready()
    announce = stage.from_controller(Announce)
    assert isinstance(announce, Announce)
    stage.router.send(FetchBundle(announce.digest))
    assert stage.from_controller(BundlePart) == BundlePart(announce.digest, "tokenizer.json", 1)
    assert stage.from_controller(BundlePart) == BundlePart(announce.digest, "special_tokens_map.json", 0)


def test_prefill_times_are_announced_up_to_the_longest_prompt(stage: Stage) -> None:
    stage.ready()
    announce = stage.from_controller(Announce)
    assert isinstance(announce, Announce)
    (short, short_seconds), (longest, longest_seconds) = announce.prefill_points
    assert (short, longest) == (256, announce.max_model_len)
    assert 0 < short_seconds < longest_seconds


def test_sigterm_drains_then_ends_the_ranks_and_the_process(stage: Stage) -> None:
    stage.ready()
    stage.send_tokens()
    stage.submit("a", sampling=Sampling(max_tokens=1))
    step = stage.step()
    stage.process.send_signal(signal.SIGTERM)
    while True:
        announce = stage.from_controller(Announce)
        assert isinstance(announce, Announce)
        if announce.draining:
            break
    stage.send_tokens("q")
    stage.submit("late", prompt="q")
    assert stage.from_controller(Refused) == Refused("late", "draining", "the replica is stopping")
    stage.finish(step, Sample("a", 7, finish_reason="length"))
    assert stage.from_controller(Emit) == Emit("a", (7,), finish_reason="length")
    stage.finish(stage.step())
    assert isinstance(stage._next(stage.rank, Shutdown).message, Shutdown)
    assert stage.process.wait(timeout=10) == 0


def test_a_replica_that_drains_stays_until_its_router_says_that_a_request_goes_on_elsewhere(
    stage: Stage,
) -> None:
    stage.ready()
    stage.send_tokens()
    stage.submit("a")
    stage.finish(stage.step(), Sample("a", 7))
    step = stage.step()
    stage.process.send_signal(signal.SIGTERM)
    while not stage.from_controller(Announce).draining:  # type: ignore[attr-defined]
        pass
    stage.router.send(Cancel("a", moves=True))
    stage.finish(step, Sample("a", 8))
    while (step := stage.step()).entries:  # it runs ahead
        stage.finish(step, Sample("a", 9))
    assert step.releases == ("a",)
    stage.finish(step)
    for _ in range(3):
        announce = stage.from_controller(Announce)
        assert isinstance(announce, Announce)
        assert (announce.ready, announce.draining, announce.running) == (True, True, 0)
    stage.router.send(Cancel("a"))
    assert isinstance(stage._next(stage.rank, Shutdown).message, Shutdown)
    assert stage.process.wait(timeout=10) == 0


def test_what_has_not_ended_when_the_drain_does_is_returned_to_the_router(tmp_path: Path) -> None:
    """It continues on other replicas at once; no loss is counted against it."""
    spec = SPEC.model_copy(update={"lifecycle": LifecycleSpec(drain_seconds=0.0)})
    with closing(Stage(tmp_path, spec)) as stage:
        stage.ready()
        stage.send_tokens()
        stage.submit("runs")
        stage.submit("held", "unheard")
        stage.finish(stage.step(), Sample("runs", 7))
        assert stage.from_controller(Emit) == Emit("runs", (7,))
        stage.process.send_signal(signal.SIGTERM)
        returned = {stage.from_controller(Refused) for _ in range(2)}
        assert returned == {Refused(name, "not_ready", "the epoch has ended") for name in ("runs", "held")}
        while stage.from_controller(Announce).ready:  # type: ignore[attr-defined]
            pass
        assert stage.process.wait(timeout=10) == 0


def test_a_rank_that_fails_ends_the_controller_with_its_reason(stage: Stage) -> None:
    stage.rank.send(RankFault(0, "weights are missing"))
    assert stage.process.wait(timeout=20) == 1
    assert stage.process.stderr is not None
    assert "weights are missing" in stage.process.stderr.read()


def test_a_controller_that_was_replaced_waits_for_its_ranks_no_longer_than_the_one_before_it(
    tmp_path: Path,
) -> None:
    spec = SPEC.model_copy(update={"lifecycle": LifecycleSpec(ready_seconds=0.5)})
    with closing(Stage(tmp_path, spec, start=False)) as stage:
        epoch_file = tmp_path / "epoch"
        write_epoch(epoch_file, 3)
        settings = ControllerSettings.read(stage.settings).model_copy(update={"epoch_file": epoch_file})
        settings.write(stage.settings)
        stage.start()
        assert stage.process.wait(timeout=20) == 1
        assert "rank 0 did not come back in 0.5 s" in stage.kill()


def test_malformed_frames_are_dropped_and_the_controller_serves_on(stage: Stage) -> None:
    stage.ready()
    for frames in ([b"garbage"], [b'{"v":1,"type":"Submit","body":{}}'], []):
        for link in (stage.router, stage.router_tokens):
            link.socket.send_multipart([link.peer, *frames])
    stage.send_tokens()
    stage.submit("a")
    assert [admit.id for admit in stage.step().admits] == ["a"]


def test_the_record_replays_to_the_same_steps(stage: Stage) -> None:
    stage.ready()
    stage.wait_for_ready_file()
    assert json.loads(stage.ready_file.read_text())["ranks"][0]["kv_blocks"] == 64
    steps = []
    stage.send_tokens(sequences=2)
    stage.submit("a", sampling=Sampling(max_tokens=3))
    stage.submit("b", sample_index=1, sampling=Sampling(max_tokens=3))
    for _ in range(12):
        received = stage.rank.receive(timeout_seconds=1)
        if received is None:
            break
        assert isinstance(received.message, Step)
        steps.append(received.message)
        samples = [Sample(entry.id, 5) for entry in received.message.entries if entry.samples]
        stage.finish(received.message, *samples)
    assert len(steps) >= 4
    stage.process.send_signal(signal.SIGTERM)
    stage.process.wait(timeout=10)

    lines = stage.record.read_text().splitlines()
    ready, _ = decode([lines[1].encode()])
    assert isinstance(ready, RankReady)
    core = ReplicaController(derive(SPEC, ready), ready.profile)
    replayed = []
    output: dict[str, int] = {}
    for line in lines[2:]:
        entry = json.loads(line)
        for bar in entry.get("bars", ()):  # which the page `/ui` shows
            kinds = [segment[0] for segment in bar["segments"]]
            if "decode" in kinds:
                output[bar["id"]] = bar["segments"][kinds.index("decode")][3]
        if entry["event"]["type"] == "Drain":
            continue
        event, _ = decode([json.dumps(entry["event"]).encode()])
        replayed += [one for one in core.handle(event, entry["now"]) if isinstance(one, Step)]  # type: ignore[arg-type]
    assert replayed == steps
    assert output == {"a": 3, "b": 3}
    assert any(json.loads(line).get("replica", {}).get("kv_total") == 64 * 16 for line in lines[2:])


def test_a_record_for_which_there_is_no_room_ends_without_the_replica(stage: Stage) -> None:
    stage.ready()
    stage.wait_for_ready_file()
    budget_bytes = stage.record.stat().st_size + 10
    resource.prlimit(stage.process.pid, resource.RLIMIT_FSIZE, (budget_bytes, budget_bytes))
    stage.send_tokens()
    stage.submit("a", sampling=Sampling(max_tokens=1))
    stage.finish(stage.step(), Sample("a", 7, finish_reason="length"))
    assert stage.from_controller(Emit) == Emit("a", (7,), finish_reason="length")
    stage.rank.send(replace(READY, epoch=stage.hello("second").epoch))
    while not (card := stage.from_controller(Announce)).ready or card.epoch < 1:  # type: ignore[attr-defined]
        pass
    stage.send_tokens("later")
    stage.submit("b", prompt="later")
    assert stage.step().epoch == 1
    assert stage.kill().count("the recording ends here: [Errno 27] File too large") == 1
    assert [path.name for path in stage.record.parent.glob("record*")] == ["record.jsonl"]


def test_the_slowest_rank_is_of_a_stage_whose_attention_grows_with_the_context() -> None:
    """The last stage takes longer for a short context, as it has the head, but its layers have windows."""
    first = replace(READY, profile=replace(READY.profile, window_share=0.25))
    last = replace(
        READY,
        rank=1,
        profile=replace(
            READY.profile,
            step_seconds=1.0,
            window_share=1.0,
            head_seconds_per_row=1e-6,
            mask_seconds_per_row=2e-6,
        ),
    )
    found = slowest_rank([first, last])
    assert found.rank == 0
    assert found.profile == replace(first.profile, head_seconds_per_row=1e-6, mask_seconds_per_row=2e-6)
    alike = replace(first, profile=replace(first.profile, window_share=1.0))
    assert slowest_rank([alike, last]) == last


def test_guesses_cost_what_they_do_on_the_slowest_lane() -> None:
    """Ranks that do not sample have no draft model."""
    ranks = [
        replace(READY, rank=rank, draft_costs=costs)
        for rank, costs in enumerate([None, DraftCosts(1.0, 0.5, 0.0), None, DraftCosts(0.5, 1.0, 2.0)])
    ]
    assert slowest_rank(ranks).draft_costs == DraftCosts(1.0, 1.0, 2.0)
    assert slowest_rank([READY]).draft_costs is None


def test_a_named_profile_takes_the_place_of_the_ranks_own(tmp_path: Path) -> None:
    profile = Profile(name="measured", source="test", layers=2, launch_seconds=0.25)
    path = tmp_path / "p.json"
    path.write_text(profile.to_json())
    spec = SPEC.model_copy(update={"scheduling": SchedulingSpec(profile=str(path))})
    stage = Stage(tmp_path, spec)
    try:
        stage.ready()
        stage.send_tokens()
        stage.submit("a")
        assert stage.step().predicted_seconds == 0.25
        header = json.loads(stage.record.read_text().splitlines()[0])
        assert Profile.from_json(json.dumps(header["profile"])) == profile
    finally:
        stage.close()


def test_what_is_cached_of_a_prompt_is_not_computed_again_and_counted(stage: Stage) -> None:
    stage.ready()
    stage.wait_for_ready_file()
    for name in ("first", "second"):
        stage.send_tokens(name)
        stage.submit(name, prompt=name, sampling=Sampling(max_tokens=1))
        while not (step := stage.step()).admits:
            stage.finish(step)
        (admit,), (entry,) = step.admits, step.entries
        stage.finish(step, Sample(name, 7))
        emit = stage.from_controller(Emit)
        assert isinstance(emit, Emit)
        found = 0 if name == "first" else 16
        assert (admit.cached_tokens, emit.cached_tokens) == (found, found)
        assert entry.extents == (Extent(found, 20 - found),), "only the rest, 20 tokens in all, is computed"
        stage.finish(stage.step())
    assert [(prefix.last, prefix.count) for prefix in admit.prefixes] == [(0, 1)]
    missing = {
        "medha_prefix_cache_hit_tokens_total 16.0",
        "medha_prefix_cache_queried_tokens_total 40.0",
        'medha_kv_blocks{lane="0",state="cached"} 1.0',  # once the second request has released it
    }
    end = time.monotonic() + 20
    while missing and time.monotonic() < end:
        text = httpx.get(json.loads(stage.ready_file.read_text())["metrics_url"], timeout=20).text
        missing = {line for line in missing if line not in text}
    assert not missing


def test_a_controller_takes_kv_of_another_replica_and_gives_its_own(tmp_path: Path) -> None:
    place = PeerFigures("tcp://127.0.0.1:1", KeyPair.new().public.decode(), "all that KV depends on")
    tiers = {"host": {"size": "1Mi"}, "peers": {"bandwidth": "1Gi"}}
    spec = MedhaReplicaSpec.model_validate(SPEC.model_dump() | {"kv_cache": {"tiers": tiers}})
    stage = Stage(tmp_path, spec)
    try:
        ready = replace(
            READY,
            epoch=stage.hello().epoch,
            profile=StepProfile(1e-3, 1.0, 1e-9, 1e-5),  # computing a block takes far longer than reading it
            host_tier=HostTierFigures(100, 1, 1e-9, 1e-9),
            peer=place,
        )
        stage.rank.send(ready)
        card = stage.from_controller(Announce)
        assert isinstance(card, Announce)
        assert card.hands_kv_over
        assert isinstance(stage._next(stage.router_tokens, Announce).message, Announce)

        stage.send_tokens()
        stage.submit("a", sampling=Sampling(max_tokens=1), peer="r1", peer_tokens=20)
        ask = stage.from_controller(KvAsk)
        assert isinstance(ask, KvAsk)
        assert (ask.id, ask.source, ask.tokens, len(ask.hashes)) == ("a", "r1", 20, 32)
        offer = KvTicket("a", "r0", "secret", (KvPart(0, ask.hashes),), (place,), source="r1")
        stage.router.send(offer)
        told = stage._next(stage.rank, KvTicket).message
        assert told == replace(offer, parts=()), "ranks learn where to read before the step that says what"
        (load,) = stage.step().loads
        assert (load.ticket, load.count) == ("secret", 1)
        stage.rank.send(StageFree(0, 0))
        stage.rank.send(Done(0))
        stage.rank.send(DiskReport(0, 0, ready.epoch, loaded=((0, 0.01),)))
        assert stage.from_controller(KvDone) == KvDone("secret", "r1")
        step = stage.step()
        assert [(one.id, one.cached_tokens) for one in step.admits] == [("a", 16)]
        stage.finish(step, Sample("a", 7, finish_reason="length"))
        assert isinstance(stage.from_controller(Emit), Emit)

        stage.router.send(replace(ask, asker="r1", identity="of another grid"))
        refused = stage.from_controller(KvTicket)
        assert isinstance(refused, KvTicket)
        assert (refused.ticket, refused.parts, refused.ranks) == ("", (), ())
        assert refused.reason
        stage.router.send(replace(ask, asker="r1", ticket="chosen by the asker"))
        given = stage.from_controller(KvTicket)
        assert isinstance(given, KvTicket)
        assert (given.asker, given.parts, given.ranks) == ("r1", (KvPart(0, ask.hashes),), (place,))
        assert re.fullmatch("[0-9a-f]{32}", given.ticket), "the source draws it"
        while not (step := stage.step()).serves:
            stage.finish(step)
        assert [one.ticket for one in step.serves] == [given.ticket]
    finally:
        stage.close()
