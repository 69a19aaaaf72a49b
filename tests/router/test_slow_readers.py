"""Clients that do not read their output, or slowly: what waits for them is bounded, and they delay nobody else."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from medha.routing.router_core import Deliver, Fail
from medha.wire.messages import TokenLogprob
from medha_router.bodies import Bodies, BodyLimits
from medha_router.connections import Connection, Connections
from medha_router.outcome_queue import MOST_WAITING_TOKENS, Arrived, OutcomeQueue, Unread, merged
from medha_router.replica_link import in_turns
from medha_router.tokenizer_bundle import Bundle

from .conftest import MODEL, TEXT, Router, Script, ScriptedReplica, running_router, say, wait_for
from .test_connections import HEALTH, head, read_answer, read_to_end

LONG = "Z!" * 100_000
"""Each character is a token, and their ids are an answer of /tokenize that no buffer takes as a whole."""


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """A router that cuts clients off which take nothing for 0.3 s, or ask nothing for 0.5 s."""
    folder = tmp_path_factory.mktemp("impatient")
    with running_router(folder, output_seconds=0.3, idle_seconds=0.5) as router:
        yield router


@pytest.fixture(scope="module")
def its_replica(impatient: Router, bundle_files: dict[str, bytes]) -> Iterator[ScriptedReplica]:
    replica = ScriptedReplica(impatient, bundle_files)
    impatient.wait_ready()
    yield replica
    replica.stop()


def narrow_dial(router: Router) -> socket.socket:
    """A client whose kernel takes little."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 2**10)
    client.settimeout(30)
    client.connect(router.address)
    return client


def request(path: str, **body: object) -> bytes:
    content = json.dumps({"model": MODEL, **body}).encode()
    return head(path, len(content)) + content


# --- connections ------------------------------------------------------------------------------------------


def test_a_stream_that_is_not_read_ends_everywhere(
    impatient: Router, its_replica: ScriptedReplica, bundle: Bundle
) -> None:
    """The client is sent more than the buffers of both kernels hold, and the replica is not done."""
    its_replica.script = Script(tokens=say(bundle, TEXT) * 800, per_message=20, logprobs=True, hold=True)
    its_replica.submits.clear()
    cut = impatient.metric('medha_router_http_refusals_total{reason="unread"}')
    ended = 'medha_requests_total{endpoint="completions",model="tiny",outcome="cancelled"}'
    cancelled = impatient.metric(ended)
    with narrow_dial(impatient) as deaf:
        deaf.sendall(request("/v1/completions", prompt="x", stream=True, logprobs=3))
        its_replica.wait(lambda: bool(its_replica.submits))
        its_replica.wait(lambda: its_replica.submits[0].id in its_replica.cancels)
        wait_for(lambda: impatient.metric(ended) == cancelled + 1, "not counted")
        assert impatient.metric('medha_router_http_refusals_total{reason="unread"}') == cut + 1
        assert not read_to_end(deaf).endswith(b"0\r\n\r\n"), "cut off, so it must not look whole"
    wait_for(lambda: impatient.metric("medha_router_requests_open") == 0, "it is still open")


@pytest.mark.parametrize("rest", [b"", HEALTH], ids=["alone", "and asks for more"])
def test_a_connection_whose_answer_is_not_read_is_cut(
    impatient: Router, its_replica: ScriptedReplica, rest: bytes
) -> None:
    cut = impatient.metric('medha_router_http_refusals_total{reason="unread"}')
    with narrow_dial(impatient) as deaf:
        deaf.sendall(request("/tokenize", prompt=LONG) + rest)
        wait_for(lambda: impatient.metric('medha_router_http_refusals_total{reason="unread"}') > cut, "kept")
    wait_for(lambda: impatient.metric("medha_router_body_bytes") == 0, "the answer is kept")


def test_the_end_of_an_answer_that_is_not_read_keeps_no_connection(
    impatient: Router, its_replica: ScriptedReplica
) -> None:
    """The ends of some of these answers wait in the router, but are too short to stop the task that writes them."""
    answered = impatient.metric('medha_router_tokenize_seconds_count{place="thread"}')
    with ExitStack() as stack:
        for number in range(18):
            deaf = stack.enter_context(narrow_dial(impatient))
            deaf.sendall(request("/tokenize", prompt=LONG[: 60_000 + 8_000 * number]))
        tokenised = 'medha_router_tokenize_seconds_count{place="thread"}'
        wait_for(lambda: impatient.metric(tokenised) == answered + 18, "not answered")
        impatient.http.close()
        wait_for(lambda: impatient.metric("medha_router_http_connections") == 0, "some are kept")


class _Wire(asyncio.Transport):
    """A transport whose buffer is as full as the test says."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.waiting_bytes = 0
        self.is_cut = False

    def write(self, data: object) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return self.waiting_bytes

    def is_closing(self) -> bool:
        return self.is_cut

    def abort(self) -> None:
        self.is_cut = True

    def close(self) -> None:
        pass


async def _ok(scope: object, receive: object, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize("asks_again", [True, False])
def test_output_of_the_next_answer_is_not_taken_for_that_of_the_last_one(asks_again: bool) -> None:
    """A client that has read everything may have more in its buffer at any later time."""

    async def run() -> bool:
        config = uvicorn.Config(_ok, lifespan="off", log_config=None)
        config.load()
        connections = Connections(8, 100.0, 0.02, lambda _: None)
        wire, connection = _Wire(), Connection(connections, config, ServerState(), {})
        connection.connection_made(wire)
        wire.waiting_bytes = 10
        connection.data_received(HEALTH)
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # its application has answered
        wire.waiting_bytes = 0
        if asks_again:
            connection.data_received(HEALTH[:20])
        wire.waiting_bytes = 20
        await asyncio.sleep(0.1)
        connection.connection_lost(None)
        return wire.is_cut

    assert asyncio.run(run()) is not asks_again


def test_an_answer_counts_as_long_as_it_is_written(router: Router) -> None:
    """The shared router waits for 30 s."""
    with narrow_dial(router) as slow:
        slow.sendall(request("/tokenize", prompt=LONG))
        wait_for(
            lambda: router.metric("medha_router_body_bytes") > 2 * len(LONG), "it is larger than its request"
        )
        status, _, body = read_answer(slow)
        assert (status, len(json.loads(body)["tokens"])) == (200, json.loads(body)["count"])
    wait_for(lambda: router.metric("medha_router_body_bytes") == 0, "the answer is kept")


def test_a_client_that_pauses_and_then_reads_gets_the_whole_stream(
    router: Router, replica: ScriptedReplica, bundle: Bundle
) -> None:
    replica.script = Script(tokens=say(bundle, TEXT) * 200)
    with narrow_dial(router) as late:
        late.sendall(request("/v1/completions", prompt="x", stream=True))
        tokens = 'medha_output_tokens_total{model="tiny"}'
        before, replica_done = router.metric(tokens), len(replica.script.tokens)
        replica.wait(lambda: bool(replica.submits))
        wait_for(lambda: router.metric(tokens) > before, "it has begun")
        answer = read_to_end_of_stream(late)
    text = "".join(event["choices"][0]["text"] for event in answer)
    assert text == TEXT * 200
    assert len(answer) <= replica_done


def test_a_stream_ends_when_too_much_output_waits_for_its_client(
    router: Router, replica: ScriptedReplica, bundle: Bundle
) -> None:
    """The shared router waits for 30 s, but not with more tokens than that."""
    replica.script = Script(
        tokens=say(bundle, TEXT)[:20] * (MOST_WAITING_TOKENS // 10), per_message=100, hold=True
    )
    with narrow_dial(router) as deaf:
        deaf.sendall(request("/v1/completions", prompt="x", stream=True, n=2))
        replica.wait(lambda: len({*replica.cancels}) == 2)
        last = read_to_end_of_stream(deaf)[-1]
    assert last["error"]["code"] == "client_too_slow"
    wait_for(
        lambda: (
            router.metric(
                'medha_requests_total{endpoint="completions",model="tiny",outcome="client_too_slow"}'
            )
            == 1
        ),
        "not counted",
    )


def read_to_end_of_stream(client: socket.socket) -> list[dict[str, Any]]:
    content = b""
    while not content.endswith(b"\r\n0\r\n\r\n"):
        content += client.recv(65536)
    lines = [line for line in content.splitlines() if line.startswith(b"data: {")]
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


# --- the queue of a request -------------------------------------------------------------------------------


def test_a_request_ends_when_too_much_output_waits_and_what_there_was_can_be_read() -> None:
    async def run() -> tuple[int, int]:
        queue, put = OutcomeQueue(), 0
        while queue.put(Deliver("a", (1, 2, 3)), float(put)):
            put += 1
        taken = 0

        async def take_all() -> None:
            nonlocal taken
            while True:
                outcome = (await queue.get()).outcome
                assert isinstance(outcome, Deliver)
                taken += len(outcome.tokens)

        with pytest.raises(Unread):
            await take_all()
        return put + 1, taken

    put, taken = asyncio.run(run())
    assert taken == 3 * put
    assert MOST_WAITING_TOKENS / 4 <= put <= MOST_WAITING_TOKENS / 4 + 1


def test_alternatives_of_tokens_count_as_they_take_memory() -> None:
    twenty = TokenLogprob(-1.0, tuple((token, -2.0) for token in range(20)))
    queue, put = OutcomeQueue(), 0
    while queue.put(Deliver("a", (1,), logprobs=(twenty,)), 0.0):
        put += 1
    assert put <= MOST_WAITING_TOKENS / 20


def test_what_is_taken_in_time_never_ends_a_request() -> None:
    async def run() -> None:
        queue = OutcomeQueue()
        for number in range(2 * MOST_WAITING_TOKENS):
            assert queue.put(Deliver("a", (number,)), 0.0)
            await queue.get()

    asyncio.run(run())


def test_a_client_that_reads_in_bursts_is_not_ended_however_long_its_stream_is() -> None:
    async def run() -> None:
        queue = OutcomeQueue()
        for _ in range(2 * MOST_WAITING_TOKENS // 300):
            for token in range(300):
                assert queue.put(Deliver("a", (token,)), 0.0)
            await queue.get()  # all of them, merged

    asyncio.run(run())


def test_merging_keeps_tokens_and_order_of_each_sequence_and_the_time_of_the_last() -> None:
    one, two = TokenLogprob(-1.0), TokenLogprob(-2.0)
    waiting = [
        Arrived(Deliver("a", (1,), logprobs=(one,), cached_tokens=7), 1.0),
        Arrived(Deliver("b", (5,)), 1.5),
        Arrived(Fail("c", "internal", "lost"), 1.7),
        Arrived(Deliver("a", (2, 3), "stop", (two, one)), 2.0),
    ]
    assert merged(waiting) == [
        Arrived(Deliver("a", (1, 2, 3), "stop", (one, two, one), 7), 2.0),
        Arrived(Deliver("b", (5,)), 1.5),
        Arrived(Fail("c", "internal", "lost"), 1.7),
    ]


def test_a_long_queue_is_merged_when_it_is_taken() -> None:
    async def run() -> list[int]:
        queue = OutcomeQueue()
        for number in range(2000):
            queue.put(Deliver(f"s{number % 4}", (number,)), 0.0)
        sizes = []
        for _ in range(4):
            outcome = (await queue.get()).outcome
            assert isinstance(outcome, Deliver)
            sizes.append(len(outcome.tokens))
        return sizes

    assert asyncio.run(run()) == [500] * 4


# --- the loop -----------------------------------------------------------------------------------------------


def test_other_tasks_run_while_messages_keep_coming() -> None:
    """A receive that returns at once never suspends its caller."""

    async def at_once() -> int:
        return 1

    async def run() -> Counter[str]:
        turns: Counter[str] = Counter()

        async def other() -> None:
            while True:
                turns["other"] += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        async for _ in in_turns(at_once, lambda: 1):
            turns["messages"] += 1
            if turns["messages"] == 1000:
                break
        task.cancel()
        return turns

    turns = asyncio.run(run())
    assert turns["other"] >= 1000 // 20


def test_a_share_of_the_room_is_free_again_after_release() -> None:
    bodies = Bodies(BodyLimits(1000, 10, 1.0), 8000)
    for _ in range(100):
        body = bodies.open("a")
        bodies.grow(body, 5000)
        body.release()
        body.release()
    assert bodies.held_bytes == 0
