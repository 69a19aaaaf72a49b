"""Strangers are refused, and messages of a replica that are out of place are dropped and counted."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread

import httpx
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from medha.wire.frames import encode
from medha.wire.messages import (
    BEATS,
    Announce,
    BundlePart,
    Cancel,
    Emit,
    Failed,
    Heartbeat,
    KeyUse,
    KvAsk,
    KvDone,
    KvPart,
    KvTicket,
    LaneLoad,
    Message,
    PeerFigures,
    PolicyTerms,
    ProgressReport,
    Refused,
    RouterLost,
    RouterUse,
    ServiceClassTerms,
    TokenLogprob,
)
from medha_links.key_files import KeyFiles, KeyPair, read_public_key, read_tokens
from medha_links.sockets import connect
from medha_router.tokenizer_bundle import Bundle

from ..frames import frames, is_dropped
from .conftest import MODEL, Router, Script, ScriptedReplica, say, start_router, stop_router, wait_for

BODY = {"model": MODEL, "prompt": "x"}
ACCEPTS: dict[str, tuple[type[Message], ...]] = {
    "control": (
        Announce,
        Heartbeat,
        Emit,
        Refused,
        Failed,
        BundlePart,
        ProgressReport,
        RouterUse,
        RouterLost,
        KvAsk,
        KvTicket,
        KvDone,
    ),
    "tokens": (Announce,),
}


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    router = start_router(tmp_path_factory.mktemp("attacked"), drain_seconds=1)
    yield router
    assert stop_router(router) == 0


@pytest.fixture(scope="module")
def speaker(attacked: Router, bundle_files: dict[str, bytes], bundle: Bundle) -> Iterator[ScriptedReplica]:
    replica = ScriptedReplica(attacked, bundle_files)
    replica.script = Script(tokens=say(bundle, "Hello"))
    attacked.wait_ready()
    yield replica
    replica.stop()


def dropped(router: Router, link: str, reason: str = "") -> float:
    named = f'medha_router_dropped_messages_total{{link="{link}"' + (
        f',reason="{reason}"}}' if reason else ""
    )
    return router.metric(named)


# --- anything at all --------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", list(ACCEPTS))
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(batch=st.lists(frames(without=(Announce,)), min_size=1, max_size=12))
def test_the_router_drops_and_counts_whatever_does_not_belong_on_a_link(
    attacked: Router, speaker: ScriptedReplica, link: str, batch: list[list[bytes]]
) -> None:
    before = dropped(attacked, link)
    batch = [raw or [b""] for raw in batch]  # of no frame at all ZeroMQ sends nothing
    for raw in batch:
        speaker.order("raw" if link == "control" else "raw tokens", raw)
    expected = before + sum(is_dropped(raw, ACCEPTS[link]) for raw in batch)
    wait_for(lambda: dropped(attacked, link) >= expected, f"fewer than {expected} are counted on {link}")


def test_after_all_that_the_router_serves(attacked: Router, speaker: ScriptedReplica) -> None:
    assert attacked.post("/v1/completions", BODY).json()["choices"][0]["text"] == "Hello"


def test_messages_about_kv_reach_the_replica_that_they_are_for_and_say_whose_they_are(
    tmp_path: Path, bundle_files: dict[str, bytes]
) -> None:
    router = start_router(tmp_path, drain_seconds=1)
    gives = {"hands_kv_over": True}
    replicas = [
        ScriptedReplica(router, bundle_files, name, fields=fields)
        for name, fields in (("r0", gives), ("r1", gives), ("r2", {}), ("r3", gives | {"model": "other"}))
    ]
    first, second, without, stranger = replicas
    try:
        wait_for(lambda: router.metric("medha_router_replicas{") == 4, "not all are ready")
        for name in ("r2", "r3", "r9"):  # it hands nothing over; has another model; is not there
            first.order("send", KvAsk("a", name, "i", 20, ""))
        ask, rank = KvAsk("a", "r1", "i", 20, "00" * 16), PeerFigures("tcp://127.0.0.1:1", "k", "i")
        first.order("send", replace(ask, asker="another"))
        second.wait(lambda: len(second.about_kv) == 1)
        assert second.about_kv == [replace(ask, asker="r0")]
        answer = KvTicket("a", "r0", "t", (KvPart(0, "00" * 16),), (rank,))
        second.order("send", answer)
        first.wait(lambda: len(first.about_kv) == 1)
        assert first.about_kv == [replace(answer, source="r1")]
        first.order("send", KvDone("t", "r1"))
        second.wait(lambda: len(second.about_kv) == 2)
        assert second.about_kv[1] == KvDone("t", "r1", asker="r0")
        assert without.about_kv == stranger.about_kv == []
    finally:
        for one in replicas:
            one.stop()
        assert stop_router(router) == 0


# --- of the right form, and out of place ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        pytest.param(Emit("x", (10**6,)), "state", id="a token that the model has not"),
        pytest.param(Emit("x", (-1,)), "state", id="a token below zero"),
        pytest.param(Emit("x", (1,), logprobs=(TokenLogprob(0.0),) * 2), "state", id="a logprob too many"),
        pytest.param(Emit("x", (1,), logprobs=(TokenLogprob(0.0, ((-1, 0.0),)),)), "state", id="of no token"),
        pytest.param(Emit("x", (1,), cached_tokens=-1), "state", id="fewer than none cached"),
        pytest.param(Emit("x", (1,), cached_tokens=10**400), "fields", id="more cached than a float holds"),
        pytest.param(BundlePart("00", "tokenizer.json", 0), "state", id="a bundle that was not announced"),
        pytest.param(
            RouterUse("b", 1, (KeyUse("k", 1, 1, -1, 0),)), "state", id="fewer than no tokens of a key"
        ),
        pytest.param(
            RouterUse("b", 1, (KeyUse("k", 1, 1, 1, 0, float("nan")),)),
            "state",
            id="a level that is no number",
        ),
        pytest.param(Cancel("a"), "unexpected", id="a message that only routers send to replicas"),
        pytest.param(KvAsk("a", "r1", "", 20, "00"), "state", id="a part of a hash"),
        pytest.param(KvAsk("a", "r1", "", 1, "00" * 32), "state", id="more blocks than tokens"),
        pytest.param(KvTicket("a", "r1", "t", (KvPart(0, "0"),)), "state", id="a part of an offered hash"),
        pytest.param(
            KvTicket("a", "r1", "t", (), (PeerFigures("ipc:///tmp/x", "", ""),)),
            "state",
            id="ranks in a file",
        ),
    ],
)
def test_impossible_messages_of_a_replica_are_dropped_and_counted(
    attacked: Router, speaker: ScriptedReplica, message: Message, reason: str
) -> None:
    before = dropped(attacked, "control", reason)
    payload = b"{}" if isinstance(message, BundlePart) else None
    speaker.order("raw", [bytes(frame) for frame in encode(message, payload)])
    wait_for(lambda: dropped(attacked, "control", reason) == before + 1, "it is not counted")


@pytest.mark.parametrize(
    "fields",
    [
        {"pending_prefill_seconds": float("nan")},
        {"kv_tokens_free": -1},
        {"vocab_size": 0},
        {"waiting_limit": -1},
        {"drain_seconds": -1.0},
        {"read_seconds": float("nan")},
        {"read_seconds_per_token": float("inf")},
        {"lanes": (LaneLoad(-1, 0.0),)},
        {"lanes": (LaneLoad(1, math.inf),)},
        {"work_ahead": ((1.0, 2.0), (2.0, 1.0))},
        {"work_ahead": ((math.nan, 2.0),)},
        {"order": PolicyTerms(demoted_share=0.0)},
        {"prefill_points": ((512, 1.0), (256, 2.0))},
        {"prefill_points": ((512, float("inf")),)},
        {"prefill_points": ((0, 1.0), (512, 2.0))},
        {"prefill_points": ((512, 0.0),)},
        {"service_classes": (ServiceClassTerms("default", 0.0, 3.0, 0.05, 0.01, 4096),)},
    ],
)
def test_a_card_with_impossible_numbers_is_dropped_and_the_one_before_holds(
    attacked: Router, speaker: ScriptedReplica, fields: dict[str, object]
) -> None:
    before = dropped(attacked, "control", "state")
    card = replace(speaker.card, **fields)  # type: ignore[arg-type]
    speaker.order("raw", [bytes(frame) for frame in encode(card)])
    wait_for(lambda: dropped(attacked, "control", "state") == before + 1, "it is not counted")
    assert attacked.post("/v1/completions", BODY).status_code == 200


def test_messages_for_another_replica_or_before_an_announcement_are_dropped(
    attacked: Router, speaker: ScriptedReplica
) -> None:
    """Another replica's token admits to the router, and not to the requests of this one."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    keys = KeyPair.of_token(read_tokens(attacked.keys.enrolment)[0])
    other = connect(context, attacked.control, b"other/1", keys, read_public_key(attacked.keys.router_public))
    before = dropped(attacked, "control", "peer")
    for message in (speaker.card, Emit("x", (1,)), Refused("x", "capacity"), Failed("x", "internal")):
        other.socket.send_multipart(encode(message))
    wait_for(lambda: dropped(attacked, "control", "peer") == before + 4, "they are not counted")
    other.close(0)
    context.term()
    assert attacked.post("/v1/completions", BODY).status_code == 200


@pytest.mark.parametrize("kind", ["plaintext", "no token", "the key of another router"])
def test_a_connection_without_enrolment_is_refused_and_counted(
    attacked: Router, speaker: ScriptedReplica, kind: str
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    before = attacked.metric("medha_router_refused_connections_total{")
    enrolled = KeyPair.of_token(read_tokens(attacked.keys.enrolment)[0])
    server = read_public_key(attacked.keys.router_public)
    if kind == "plaintext":
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(attacked.control)
        close: Callable[[], None] = socket.close
    else:
        keys = KeyPair.new() if kind == "no token" else enrolled
        key = KeyPair.new().public if kind == "the key of another router" else server
        opened = connect(context, attacked.control, b"r0/7", keys, key)
        socket, close = opened.socket, lambda: opened.close(0)
    socket.send_multipart(encode(speaker.card))
    wait_for(
        lambda: attacked.metric("medha_router_refused_connections_total{") > before, "nobody was refused"
    )
    close()
    context.term()
    assert attacked.post("/v1/completions", BODY).status_code == 200


# --- connections that are lost ------------------------------------------------------------------------------


def test_a_replica_that_connects_again_is_sent_what_it_may_have_lost(
    tmp_path: Path, bundle_files: dict[str, bytes], bundle: Bundle
) -> None:
    """Neither side knows what was on its way; the stream goes on where the client's text ends."""
    router = start_router(tmp_path, drain_seconds=1)
    replica = ScriptedReplica(router, bundle_files)
    try:
        router.wait_ready()
        text = "Hello there, dog."
        tokens = say(bundle, text)
        replica.script = Script(tokens=tokens[:3], hold=True)
        with router.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
            lines = (line for line in response.iter_lines() if line.startswith("data: {"))
            pieces = [json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"] for _ in range(2)]
            replica.script = Script(tokens=tokens)
            late = replica.submits[0]
            replica.order("reconnect")
            replica.order("send", Emit(late.id, (1, 2, 3)))  # of the attempt before: not the client's
            pieces += [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines]
        assert "".join(pieces) == text
        assert [submit.id for submit in replica.submits] == [late.id, f"{late.id}~1"]
        assert replica.submits[1].tokens == late.tokens + 3
    finally:
        replica.stop()
        assert stop_router(router) == 0


def test_a_replica_whose_connection_ends_is_lost_at_once_and_its_stream_continues_on_another(
    tmp_path: Path, bundle_files: dict[str, bytes], bundle: Bundle
) -> None:
    """Nobody waits for its silence, which counts after an hour here."""
    router = start_router(tmp_path, drain_seconds=1, silence_seconds=3600)
    tokens = say(bundle, "Hello there, dog.")
    replicas = [ScriptedReplica(router, bundle_files, name, Script(tokens[:3], hold=True)) for name in "ab"]
    try:
        wait_for(lambda: router.metric("medha_router_replicas{") == 2, "they are not ready")
        with router.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
            lines = (line for line in response.iter_lines() if line.startswith("data: {"))
            pieces = [json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"] for _ in range(2)]
            first, other = sorted(replicas, key=lambda one: not one.submits)
            other.script = Script(tokens)
            first.stop()
            pieces += [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines]
        assert "".join(pieces) == "Hello there, dog."
        (submit,) = other.submits
        assert submit.tokens == first.submits[0].tokens + 3
    finally:
        for replica in replicas:
            replica.stop()
        assert stop_router(router) == 0


def test_a_request_that_replicas_die_of_is_refused_by_name_before_it_gets_to_the_fourth(
    tmp_path: Path, bundle_files: dict[str, bytes], bundle: Bundle
) -> None:
    router = start_router(tmp_path, drain_seconds=1)
    fleet = [ScriptedReplica(router, bundle_files, name, Script(hold=True)) for name in "abcd"]
    answers: list[httpx.Response] = []
    client = Thread(target=lambda: answers.append(router.post("/v1/completions", BODY, timeout=60)))
    try:
        wait_for(lambda: router.metric("medha_router_replicas{") == 4, "they are not ready")
        client.start()

        def who_has_it() -> list[ScriptedReplica]:
            return [one for one in fleet if one.submits and one.is_alive()]

        for _ in range(3):
            wait_for(lambda: bool(who_has_it()), "it is not sent")
            who_has_it()[0].stop()
        client.join()
        (answer,) = answers
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (500, "internal_error")
        assert re.search(r"3 times in a row, a replica was lost that had request \S+, ", error["message"])
        assert len([one for one in fleet if one.submits]) == 3
        left = next(one for one in fleet if one.is_alive())
        left.script = Script(say(bundle, "Hello"))
        assert router.post("/v1/completions", BODY).json()["choices"][0]["text"] == "Hello"
    finally:
        for one in fleet:
            one.stop()
        assert stop_router(router) == 0


def test_heartbeats_keep_a_replica_that_announces_nothing_any_more(
    tmp_path: Path, bundle_files: dict[str, bytes]
) -> None:
    router = start_router(tmp_path, drain_seconds=1, silence_seconds=1)
    real = ScriptedReplica(router, bundle_files)  # whose bundle makes the router know the others
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    keys = KeyPair.of_token(read_tokens(router.keys.enrolment)[0])
    server = read_public_key(router.keys.router_public)
    opened = {
        name: [
            connect(context, endpoint, f"{name}/1{end}".encode(), keys, server)
            for endpoint, end in ((router.control, ""), (router.tokens, ""), (router.control, BEATS.decode()))
        ]
        for name in ("silent", "beating")
    }

    def is_heard(name: str) -> bool:
        return f'replica="{name}"' in router.metrics_http.get("/metrics").text

    def beats_until(done: Callable[[], bool], what: str) -> None:
        def beat_and_look() -> bool:
            opened["beating"][2].socket.send_multipart(encode(Heartbeat()))
            return done()

        wait_for(beat_and_look, what)

    try:
        router.wait_ready()
        for name, links in opened.items():
            for link in links[:2]:
                link.socket.send_multipart(encode(replace(real.card, replica=name, draining=True)))
        beats_until(lambda: is_heard("silent") and is_heard("beating"), "they are not heard")
        beats_until(lambda: not is_heard("silent"), "a silent replica is kept")
        assert is_heard("beating")
        wait_for(lambda: not is_heard("beating"), "a replica whose heartbeats have ended is kept")
    finally:
        for links in opened.values():
            for link in links:
                link.close(0)
        context.term()
        real.stop()
        assert stop_router(router) == 0


def test_a_card_of_a_replaced_connection_is_not_taken_for_one_of_the_new_connection(
    attacked: Router, speaker: ScriptedReplica
) -> None:
    """The first connection is heard on the control link only; the second one is heard on the token link first."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    keys = KeyPair.of_token(read_tokens(attacked.keys.enrolment)[0])
    server = read_public_key(attacked.keys.router_public)
    half = connect(context, attacked.control, b"twice/1", keys, server)
    control, tokens = (
        connect(context, endpoint, b"twice/2", keys, server)
        for endpoint in (attacked.control, attacked.tokens)
    )
    card = replace(speaker.card, replica="twice", draining=True)  # no request is sent to it
    running = 'medha_replica_sequences_running{model="tiny",replica="twice"}'

    def announce_on_tokens() -> None:
        """Announce, and wait until the router has handled it: it has if it dropped what follows."""
        before = dropped(attacked, "tokens", "unexpected")
        for message in (card, Cancel("a")):
            tokens.socket.send_multipart(encode(message))
        wait_for(lambda: dropped(attacked, "tokens", "unexpected") == before + 1, "it is not counted")

    try:
        before = dropped(attacked, "control", "unexpected")
        for message in (replace(card, running=11), Cancel("a")):
            half.socket.send_multipart(encode(message))
        wait_for(lambda: dropped(attacked, "control", "unexpected") == before + 1, "it is not counted")
        announce_on_tokens()
        assert attacked.metric(running) == 0, "no connection was heard on both links yet"
        control.socket.send_multipart(encode(replace(card, running=22)))
        wait_for(lambda: attacked.metric(running) == 22, "the new connection is not used")
        announce_on_tokens()
        assert attacked.metric(running) == 22
    finally:
        for opened in (half, control, tokens):
            opened.close(0)
        context.term()


@pytest.mark.parametrize("field", ["key_file", "enrolment_file"])
def test_a_key_file_that_is_missing_ends_the_start_and_is_named(tmp_path: Path, field: str) -> None:
    keys = KeyFiles.create(tmp_path / "keys")
    given = {"port": 0, "key_file": str(keys.router), "enrolment_file": str(keys.enrolment)}
    (tmp_path / "settings.json").write_text(json.dumps({**given, field: str(tmp_path / "nowhere")}))
    ended = subprocess.run(
        [sys.executable, "-m", "medha_router", "--settings", str(tmp_path / "settings.json")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 1
    assert f"{tmp_path}/nowhere: " in ended.stderr
    assert "Traceback" not in ended.stderr
