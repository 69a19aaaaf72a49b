"""The decisions of `benchmarks/chaos.py`: its schedule, its accounts and claims, and the links and clocks that it disturbs."""

from __future__ import annotations

import json
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import openai
import pytest

from benchmark import benchmark

SOON_SECONDS = 10.0
NEVER_SECONDS = 0.2
"""Time that stands for an hour in which nothing must come."""


@pytest.fixture(scope="module")
def decided() -> ModuleType:
    return benchmark("chaos_accounts")


@pytest.fixture(scope="module")
def chaos() -> ModuleType:
    return benchmark("chaos")


# --- the schedule -----------------------------------------------------------------------------------------


def test_each_round_has_every_kind_once_and_a_longer_run_goes_on_from_a_shorter_one(
    decided: ModuleType,
) -> None:
    two, three = (decided.schedule(7, rounds, 4, decided.KINDS) for rounds in (2, 3))
    assert three[: len(two)] == two
    size = len(decided.KINDS) + 4
    for number in range(3):
        singles = [plan.row for plan in three[number * size : (number + 1) * size] if len(plan.faults) == 1]
        assert sorted(singles) == sorted(kind.name for kind in decided.KINDS)
    assert len({plan.key for plan in three}) == len(three)
    assert decided.schedule(8, 2, 4, decided.KINDS) != two


def test_a_pair_ends_or_stops_no_process_twice(decided: ModuleType) -> None:
    plans = [plan for plan in decided.schedule(0, 50, 6, decided.KINDS) if len(plan.faults) == 2]
    assert len(plans) == 300
    for plan in plans:
        first, second = plan.faults
        assert first.kind != second.kind
        if {first.kind.action, second.kind.action} <= {"kill", "freeze"}:
            assert first.victim != second.victim
    assert any(plan.faults[0].victim == plan.faults[1].victim for plan in plans), "a full disk and a kill"


# --- accounts ---------------------------------------------------------------------------------------------


def attempt(decided: ModuleType, **fields: Any) -> Any:
    return decided.Attempt(
        **({"router": 0, "question": 0, "began": 0.0, "text": "abc", "ended": 9.0, "finished": True} | fields)
    )


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        ({}, "exact"),
        ({"text": "abd"}, "wrong"),
        ({"text": "ab"}, "wrong"),
        ({"finished": False}, "wrong"),
        ({"text": "abcd"}, "wrong"),
        ({"text": "ab", "finished": False, "error": "broke"}, "error"),
        ({"text": "", "finished": False, "error": "503", "says_why": False}, "unclear"),
        ({"text": "ax", "finished": False, "error": "broke"}, "wrong"),
        ({"text": "ab", "ended": None, "finished": False}, "hang"),
        ({"text": "ab", "ended": None, "finished": False, "error": "timeout"}, "hang"),
    ],
)
def test_an_attempt_is_exact_one_clear_error_or_a_defect(
    decided: ModuleType, fields: dict[str, Any], outcome: str
) -> None:
    assert attempt(decided, **fields).outcome("abc") == outcome


def test_a_pause_counts_if_it_lasts_at_some_time_since_the_fault(decided: ModuleType) -> None:
    one = attempt(decided, times=[4.0, 5.0, 7.0, 7.5], ended=8.0)
    assert one.pause(since=1.0, until=99.0) == 4.0, "from its begin"
    assert one.pause(since=4.5, until=99.0) == 2.0
    assert one.pause(since=8.5, until=99.0) == 0.0
    assert attempt(decided, times=[4.0], ended=None).pause(since=1.0, until=99.0) == 95.0


def test_an_answer_that_comes_at_its_end_has_no_pauses(decided: ModuleType) -> None:
    assert attempt(decided, streams=False).pause(since=1.0, until=99.0) == 0.0


def test_an_attempt_hangs_once_nothing_has_come_for_long_since_the_fault_was_over(
    decided: ModuleType,
) -> None:
    one = attempt(decided, times=[4.0, 50.0], ended=None)
    assert not one.hangs(since=10.0, now=139.0)
    assert one.hangs(since=10.0, now=141.0)
    assert not one.hangs(since=60.0, now=141.0)
    assert not attempt(decided, times=[4.0]).hangs(since=10.0, now=999.0)
    whole = attempt(decided, ended=None, streams=False)
    assert not whole.hangs(since=10.0, now=600.0)
    assert whole.hangs(since=10.0, now=611.0)


def test_errors_of_routers_that_no_fault_hit_are_counted_apart(decided: ModuleType) -> None:
    attempts = [
        attempt(decided, times=[1.0, 8.5]),
        attempt(decided, router=1, error="refused", times=[2.0], ended=9.0),
        attempt(decided, router=1, error="refused"),
        attempt(decided, router=2, error="503", question=1, text="", times=[8.9]),
    ]
    found = decided.account(attempts, ["abc", "d"], hit=[1], since=0.0, until=9.0)
    assert {name: found[name] for name in ("sent", "exact", "error", "errors_elsewhere")} == {
        "sent": 4, "exact": 1, "error": 3, "errors_elsewhere": 1
    }  # fmt: skip
    assert (found["pause_seconds"], found["pause_elsewhere_seconds"]) == (9.0, 8.9)
    assert found["errors"] == {"router 1: refused": 2, "router 2: 503": 1}


def episode(decided: ModuleType, row: str = "kill a router", **fields: Any) -> dict[str, Any]:
    found = dict.fromkeys((*decided.SUMMED, *decided.MOST), 0)
    tiers = {"fetched_blocks": 5, "read_blocks": 4}
    return {"row": row, **found, **tiers, "sent": 10, "exact": 8, "error": 2, "pause_seconds": 3.0} | fields


@pytest.mark.parametrize(
    ("fields", "missed"),
    [
        ({}, []),
        ({"exact": 7}, ["attempts that are neither exact nor one clear error"]),
        ({"exact": 7, "unclear": 1}, ["attempts that are neither exact nor one clear error"]),
        (
            {"sent": 11, "hang": 1},
            ["attempts that are neither exact nor one clear error", "attempts that hang"],
        ),
        ({"exact": 7, "wrong": 1}, ["attempts that are neither exact nor one clear error", "wrong texts"]),
        ({"errors_elsewhere": 1}, ["errors at routers that no fault hit"]),
        ({"unanswered": 1}, ["questions without an answer in the end"]),
        ({"left_over": 1}, ["episodes after which KV or requests were held"]),
        ({"held_blocks": 1}, ["blocks that idle replicas held in tiers"]),
        ({"stray_in_files": 1}, ["unfinished, uncounted or partial files in disk tiers"]),
        ({"stray_objects": 1}, ["unfinished objects in the store"]),
    ],
)
def test_each_defect_of_an_episode_misses_a_goal(
    decided: ModuleType, fields: dict[str, Any], missed: list[str]
) -> None:
    found = decided.claims([episode(decided), episode(decided, **fields)])
    assert [claim["name"] for claim in found if not benchmark("harness").holds(claim)] == missed


def test_no_episode_is_no_success(decided: ModuleType) -> None:
    holds = benchmark("harness").holds
    assert [claim["name"] for claim in decided.claims([]) if not holds(claim)] == [
        "blocks that came from host tiers", "blocks that came from files or the store", "exact answers",
    ]  # fmt: skip


def test_rows_are_sums_for_each_kind_in_their_order_and_for_all(decided: ModuleType) -> None:
    rows = decided.summary(
        [episode(decided, "two of these at once"), episode(decided), episode(decided, pause_seconds=7.5)]
    )
    assert [row["fault"] for row in rows] == ["kill a router", "two of these at once", "all"]
    assert [(row["episodes"], row["sent"], row["exact"]) for row in rows] == [
        (2, 20, 16),
        (1, 10, 8),
        (3, 30, 24),
    ]
    assert [row["pause_seconds"] for row in rows] == [7.5, 3.0, 7.5]


@pytest.mark.parametrize("name", ["fetched_blocks", "read_blocks"])
def test_many_episodes_in_which_no_kv_came_back_from_a_tier_miss_a_goal(
    decided: ModuleType, name: str
) -> None:
    holds = benchmark("harness").holds
    found = [episode(decided, **{name: 0})]
    assert len([claim for claim in decided.claims(found) if not holds(claim)]) == 1
    assert all(map(holds, decided.claims(found, are_many=False)))


# --- the client -------------------------------------------------------------------------------------------


class Events(httpx.SyncByteStream):
    """A body that breaks off with an error, if one is given."""

    def __init__(self, text: str, error: Exception | None = None) -> None:
        self._text, self._error = text, error

    def __iter__(self) -> Iterator[bytes]:
        yield self._text.encode()
        if self._error is not None:
            raise self._error


def event(text: str, reason: str | None = None) -> str:
    choice = {"index": 0, "text": text, "finish_reason": reason, "logprobs": None}
    return f"data: {json.dumps({'id': 'a', 'object': 'text_completion', 'created': 1, 'model': 'm', 'choices': [choice]})}\n\n"


DONE = "data: [DONE]\n\n"
ERROR = {"message": "the replica is lost", "type": "server_error", "code": "internal_error", "param": None}


@pytest.mark.parametrize(
    ("answer", "outcome", "error"),
    [
        (Events(event("a") + event("bc", "length") + DONE), "exact", ""),
        (Events(event("a") + event("bc") + DONE), "wrong", ""),
        (Events(event("a") + f"data: {json.dumps({'error': ERROR})}\n\n"), "error", "the replica is lost"),
        (Events(event("a"), httpx.RemoteProtocolError("cut")), "error", "cut"),
        (Events(event("a"), httpx.ReadTimeout("late")), "hang", "timed out"),
        (httpx.Response(503, json={"error": ERROR}), "error", "503 internal_error"),
        (httpx.Response(500, text="Internal Server Error"), "unclear", "500"),
        (httpx.Response(500, json={"error": {"message": "no code"}}), "unclear", "500"),
        (httpx.ConnectError("refused"), "error", "refused"),
    ],
)
def test_what_a_client_sees_becomes_an_outcome(
    chaos: ModuleType, decided: ModuleType, answer: Any, outcome: str, error: str
) -> None:
    def handle(_: httpx.Request) -> httpx.Response:
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, httpx.Response):
            return answer
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=answer)

    http = httpx.Client(transport=httpx.MockTransport(handle))
    client = openai.OpenAI(base_url="http://router/v1", api_key="none", max_retries=0, http_client=http)
    one = decided.Attempt(0, 0, 0.0)
    chaos.ask(client, chaos.QUESTIONS[0], one)
    assert one.outcome("abc") == outcome
    assert error in one.error


def test_an_answer_that_is_no_stream_counts_as_a_whole(chaos: ModuleType, decided: ModuleType) -> None:
    (question, *_) = [one for one in chaos.QUESTIONS if not one["stream"]]
    body = event("abc", "length").removeprefix("data: ")
    http = httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200, json=json.loads(body))))
    client = openai.OpenAI(base_url="http://router/v1", api_key="none", max_retries=0, http_client=http)
    one = decided.Attempt(0, 0, 0.0)
    chaos.ask(client, question, one)
    assert one.outcome("abc") == "exact"


def test_a_run_goes_on_from_its_file_and_refuses_that_of_another_seed(
    chaos: ModuleType, tmp_path: Path
) -> None:
    target = tmp_path / "chaos.json"
    assert chaos.earlier(target, {"seed": 0}) == {}
    target.write_text(
        json.dumps({"seed": 0, "episodes": {"round 0: kill a rank": {"sent": 1}}, "claims": []})
    )
    assert chaos.earlier(target, {"seed": 0}) == {"round 0: kill a rank": {"sent": 1}}
    with pytest.raises(SystemExit, match="measured with seed 0, not 1"):
        chaos.earlier(target, {"seed": 1})


# --- links, disks and clocks ------------------------------------------------------------------------------


@pytest.fixture
def link() -> Iterator[tuple[Any, socket.socket, socket.socket]]:
    """A wire, and both ends of a connection over it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        wire = benchmark("fleet").Wire(server.getsockname())
        host, _, port = wire.endpoint.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port))) as near:
            server.settimeout(SOON_SECONDS)
            far, _ = server.accept()
            with far:
                yield wire, near, far
        wire.close()


def received(end: socket.socket, size: int, seconds: float = SOON_SECONDS) -> bytes:
    """Return what arrives, up to so many bytes."""
    end.settimeout(seconds)
    found = b""
    try:
        while len(found) < size and (data := end.recv(size - len(found))):
            found += data
    except TimeoutError:
        pass
    return found


@pytest.mark.parametrize("way", ["there", "back"])
@pytest.mark.parametrize(
    "disturb",
    [
        pytest.param(lambda wire: wire.hold(), id="cut"),
        pytest.param(lambda wire: wire.slow(3600.0, 1e9), id="latency"),
        pytest.param(lambda wire: wire.slow(1e-3, 2.0), id="little bandwidth"),
    ],
)
def test_a_link_that_is_disturbed_keeps_bytes_back_and_loses_none(
    link: tuple[Any, socket.socket, socket.socket], disturb: Any, way: str
) -> None:
    wire, *ends = link
    near, far = ends if way == "there" else reversed(ends)
    near.sendall(b"before")
    assert received(far, 6) == b"before"
    data = bytes(range(256)) * 28  # an hour at two bytes a second
    disturb(wire)
    near.sendall(data)
    assert received(far, 1, NEVER_SECONDS) == b""
    wire.release()
    assert received(far, len(data)) == data


def test_a_slow_link_passes_on_everything_in_order_and_the_end_too(
    link: tuple[Any, socket.socket, socket.socket],
) -> None:
    wire, near, far = link
    wire.slow(1e-3, 1e7)
    data = bytes(range(256)) * 2000  # more than the link holds at once
    near.sendall(data)
    near.shutdown(socket.SHUT_WR)
    assert received(far, len(data)) == data
    assert received(far, 1) == b""


def test_a_disk_is_filled_to_the_last_byte(
    chaos: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    left = 3 * 2**20 + 5 * 2**10 + 7

    class File:
        def __enter__(self) -> File:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def write(self, data: bytes) -> int:
            nonlocal left
            if not left:
                raise OSError(28, "No space left on device")
            done = min(len(data), left)
            left -= done
            return done

    monkeypatch.setattr(Path, "open", lambda *_, **__: File())
    chaos.fill(tmp_path)
    assert left == 0


@pytest.mark.skipif(shutil.which("gcc") is None, reason="the clock is built by gcc")
def test_the_wall_clock_of_a_running_process_jumps_and_no_other_clock(
    chaos: ModuleType, tmp_path: Path
) -> None:
    clocks = chaos.Clocks(tmp_path / "clocks")
    show = "import sys, time\nfor _ in sys.stdin: print(time.time(), time.monotonic(), flush=True)"
    command = [sys.executable, "-c", show]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=clocks.environment("a"), **pipes) as process:  # type: ignore[call-overload]

        def clock() -> tuple[float, float]:
            process.stdin.write("\n")
            process.stdin.flush()
            wall, monotonic = map(float, process.stdout.readline().split())
            return wall, monotonic

        before = clock()
        clocks.jump("a", 3600)
        ahead = clock()
        clocks.jump("a", -3600)
        behind = clock()
        process.stdin.close()
    drift = [(wall - before[0]) - (monotonic - before[1]) for wall, monotonic in (ahead, behind)]
    assert drift == pytest.approx([3600, -3600], abs=60)
    assert behind[1] - before[1] < 600, "no time went by"
    assert (tmp_path / "clocks" / "a").read_bytes() == struct.pack("q", -3600)
