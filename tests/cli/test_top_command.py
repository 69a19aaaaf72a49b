"""What `medha top` shows of one look, however narrow or plain the terminal is, and what its keys do."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from rich.console import Console

from medha.scheduler.status_report import (
    AttainmentStatus,
    ChunkStatus,
    ClassStatus,
    CoreStatus,
    KvStatus,
    LaneStatus,
    ReplicaStatus,
    RequestStatus,
    StepStatus,
    StreamingStatus,
    SwapsStatus,
    TierRates,
    TierStatus,
)
from medha_cli.replica_snapshot import RouterStatus, Snapshot, router_status
from medha_cli.top_command import Keys, _Shown, press
from medha_cli.top_page import byte_size, page, short, span
from medha_cli.trace_command import whole_events

KV = KvStatus(blocks=1000, used=200, reserved=100, cached=50, free=650)
BOOK = RequestStatus(
    id="cmpl-0123456789abcdef0123456789abcdef-0",
    service_class="batch",
    phase="prefill",
    lane=0,
    lanes=(0, 1),
    is_long=True,
    prompt_tokens=10_000,
    cached_tokens=0,
    dispatched_tokens=5_000,
    computed_tokens=4_500,
    reserved_tokens=10_100,
    output_tokens=0,
    age_seconds=2.0,
    ttft_target_seconds=1.5,
    deadline_in_seconds=-0.5,
    demoted=True,
    revised_deadline_in_seconds=9.0,
    prefill_left_seconds=1.0,
    slack_seconds=-1.5,
    ttft_seconds=None,
    tpot_target_seconds=0.05,
    tpot_seconds=None,
)
CHAT = BOOK.model_copy(
    update={
        "id": "chat-1", "service_class": "default", "phase": "decode", "lanes": (0,), "prompt_tokens": 12,
        "dispatched_tokens": 20, "computed_tokens": 19, "output_tokens": 8, "demoted": False,
        "revised_deadline_in_seconds": None, "ttft_seconds": 0.0123, "tpot_seconds": 0.0456,
    }
)  # fmt: skip


def new_snapshot(requests: int = 1, *, router: bool = True, classes: int = 2) -> Snapshot:
    books = tuple(BOOK.model_copy(update={"id": f"book-{index}"}) for index in range(requests - 1))
    core = CoreStatus(
        epoch=3,
        draining=False,
        tensor=2,
        stream=2,
        kv=2,
        policy="guarded",
        block_size_tokens=16,
        decode_correction=1.25,
        prefill_correction=0.64,
        running=requests + 1,
        waiting=7,
        pending_prefill_seconds=1.5,
        lanes=tuple(
            LaneStatus(
                lane=lane, coupled_with=(0, 1), first_stage_free=False, steps_in_flight=2, decoding=1, prefilling=1, kv=KV
            )
            for lane in (0, 1)
        ),
        steps=(
            StepStatus(
                step=41, lanes=(0, 1), in_first_stage=False, since_seconds=0.05, predicted_seconds=0.02,
                chunks=(ChunkStatus(request=BOOK.id, lane=0, start=4_000, tokens=500, prompt_tokens=10_000),), decodes=1,
            ),
            StepStatus(
                step=42, lanes=(0, 1), in_first_stage=True, since_seconds=0.01, predicted_seconds=0.02,
                chunks=(ChunkStatus(request=BOOK.id, lane=0, start=4_500, tokens=500, prompt_tokens=10_000),), decodes=0,
            ),
        ),
        classes=tuple(
            ClassStatus(
                service_class=name, waiting=3, prefilling=1, decoding=1, waiting_tokens=300, demoted=1, late=1
            )
            for name in ("default", "batch")[:classes]
        ),
        requests=(BOOK, *books, CHAT),
    )  # fmt: skip
    attained = AttainmentStatus(service_class="default", ttft_met=3, ttft_missed=1, tpot_met=1, tpot_missed=1)
    status = ReplicaStatus(
        replica="grid",
        model="tiny",
        state="serving",
        missing_ranks=(),
        up_seconds=3725.0,
        window_seconds=10.0,
        prefill_tokens_per_second=1234.5,
        decode_tokens_per_second=99.0,
        steps_per_second=50.0,
        attainment=(attained,),
        core=core,
    )
    seen = RouterStatus(
        requests_open=9, sequences_waiting=2, ttft_met=197, ttft_missed=3, tpot_met=10, tpot_missed=0
    )
    return Snapshot(status=status, router=seen if router else None)


def render(snapshot: Snapshot, width: int = 160, *, encoding: str = "utf-8", **options: int) -> list[str]:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")
    Console(file=out, width=width, color_system=None).print(page(snapshot, "urgency", **options))  # type: ignore[arg-type]
    out.seek(0)
    return out.read().splitlines()


def row(lines: list[str], first: str) -> str:
    return next(line for line in lines if line.startswith(first))


def test_a_wide_terminal_shows_everything_that_is_known() -> None:
    text = "\n".join(render(new_snapshot()))
    for expected in (
        "grid (tiny)  serving for 1:02:05", "TP2 x SPP2 x KVP2", "policy guarded", "epoch 3",
        "2 running, 7 waiting, 2 in the router", "1,234 prefill, 99 decode", "TTFT in time 98.5 % of 200",
        "500 of cmpl-0123456789a..ef-0 from 4,500", "500 of cmpl-0123456789a..ef-0 from 4,000 + 1 decode",
        "4,500 of 10,000", "REVISED DUE",
    ):  # fmt: skip
        assert expected in text


def test_what_is_streamed_is_shown_where_there_is_streaming() -> None:
    snapshot = new_snapshot()
    assert not any("STREAMED" in line for line in render(snapshot))
    core = snapshot.status.core
    assert core is not None
    streaming = StreamingStatus(blocks=400, held=100)
    lanes = tuple(lane.model_copy(update={"streaming": streaming}) for lane in core.lanes)
    requests = (BOOK.model_copy(update={"streamed_tokens": 4_321}), CHAT)
    core = core.model_copy(update={"lanes": lanes, "requests": requests})
    status = snapshot.status.model_copy(update={"core": core})
    lines = render(Snapshot(status=status, router=None), 200)
    assert sum("STREAMED" in line for line in lines) == 2
    assert "25.0 %" in row(lines, "0 ")
    assert row(lines, short(BOOK.id)).split()[-1] == "4,321"


def with_tiers(requests: int = 1) -> Snapshot:
    """Return a snapshot of a replica with a host tier and a store that rests."""
    snapshot = new_snapshot(requests)
    core = snapshot.status.core
    assert core is not None
    host = TierStatus(
        tier="host", size_bytes=16 * 2**30, held_bytes=4 * 2**30, hits=1_234, read_bytes=3 * 2**30, written_bytes=5 * 2**29,
        avoided_prefill_seconds=754.0, failures=0, fault="", read_latency_seconds=0.0021, read_seconds_per_gib=0.0421,
    )  # fmt: skip
    store = TierStatus(
        tier="store", size_bytes=None, held_bytes=None, hits=3, read_bytes=2_048, written_bytes=100,
        avoided_prefill_seconds=0.25, failures=2, fault="no such bucket",
    )  # fmt: skip
    rates = (
        TierRates(tier="host", read_bytes_per_second=2.5 * 2**20, written_bytes_per_second=0.0),
        TierRates(tier="store", read_bytes_per_second=512.0, written_bytes_per_second=1_536.0),
    )
    swaps = SwapsStatus(waiting=1, out=3, back=2)
    core = core.model_copy(update={"tiers": (host, store), "swaps": swaps})
    status = snapshot.status.model_copy(update={"core": core, "tier_rates": rates})
    return snapshot.model_copy(update={"status": status})


def test_each_tier_shows_what_it_holds_what_is_copied_and_what_that_saves() -> None:
    lines = render(with_tiers(), 200)
    cells = [re.split(r"  +", row(lines, tier).strip()) for tier in ("TIER", "host", "store")]
    assert cells == [
        ["TIER", "FULL", "SIZE", "HITS", "READ", "READ/S", "WRITTEN", "WRITTEN/S", "AVOIDED", "LATENCY", "S PER GIB",
         "SWAPS", "FAILURES"],
        ["host", "25.0 %", "16.0 GiB", "1,234", "3.00 GiB", "2.50 MiB", "2.50 GiB", "0 B", "12:34", "2.1 ms", "0.0421",
         "3 out, 2 back, 1 wait", "0"],
        ["store", "-", "-", "3", "2.00 KiB", "512 B", "100 B", "1.50 KiB", "250.0 ms", "-", "-", "2"],
    ]  # fmt: skip
    assert "The tier store is not used: no such bucket" in lines
    assert not any("not used" in line or line.startswith("TIER") for line in render(new_snapshot(), 200))


def test_what_tiers_hold_and_save_is_shown_in_a_narrow_terminal_and_goes_before_requests_in_a_low_one() -> (
    None
):
    lines = render(with_tiers(), 80)
    assert max(map(len, lines)) <= 80
    assert {"FULL", "HITS", "READ/S", "AVOIDED"} <= set(row(lines, "TIER").split())
    low = render(with_tiers(40), height=14)
    assert not any(line.startswith("TIER") for line in low)
    assert "The tier store is not used: no such bucket" in low
    assert sum(line.startswith("book-") for line in low) >= 1


def test_the_role_of_a_replica_is_shown_unless_it_does_both() -> None:
    snapshot = new_snapshot()
    status = snapshot.status.model_copy(update={"role": "prefill"})
    assert "grid (tiny, prefill)  serving" in render(snapshot.model_copy(update={"status": status}))[0]


def test_each_lane_shows_the_steps_in_its_stages_and_its_kv() -> None:
    assert row(render(new_snapshot()), "0 ").split() == [
        "0", "#42", "#41", "\u2588" * 4 + "\u2593" * 2 + "\u2592" + "\u2591" * 13,
        "20.0", "%", "10.0", "%", "5.0", "%", "1", "1", "1",
    ]  # fmt: skip


def test_a_prefill_shows_its_progress_and_its_deadline_and_a_decode_its_tokens() -> None:
    lines = render(new_snapshot())
    bar = "\u2588" * 5 + "\u2593" + "\u2591" * 6  # 45 % computed, 50 % dispatched
    assert row(lines, "cmpl-").split()[:9] == [
        "cmpl-0123456789a..ef-0", "batch", "prefill", "0", "1", bar, "4,500", "of", "10,000",
    ]  # fmt: skip
    assert "-500.0 ms  -1.50 s" in row(lines, "cmpl-")
    assert row(lines, "chat-1").split()[5:] == ["12", "of", "12", "12.3", "ms", "8", "45.6", "ms"]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal_and_the_requests_stay(width: int) -> None:
    lines = render(new_snapshot(), width)
    assert max(map(len, lines)) <= width
    assert row(lines, "cmpl-0123456789a..ef-0")
    assert row(lines, "REQUEST")


def test_a_demoted_request_shows_its_revised_deadline_and_without_any_there_is_no_such_column() -> None:
    assert row(render(new_snapshot(), 118), "cmpl-").split()[-2:] == ["9.00", "s"]
    snapshot = new_snapshot()
    core = snapshot.status.core
    assert core is not None
    core = core.model_copy(update={"requests": (CHAT,)})
    kept = snapshot.model_copy(update={"status": snapshot.status.model_copy(update={"core": core})})
    assert "REVISED" not in row(render(kept, 118), "REQUEST")


def test_columns_that_matter_less_go_first() -> None:
    narrow = row(render(new_snapshot(), 80), "REQUEST").split()
    assert "PHASE" in narrow
    assert "CLASS" not in narrow
    assert "LANES" not in narrow


@pytest.mark.parametrize("height", [12, 16, 20, 30, 50])
def test_it_is_no_higher_than_the_terminal_and_shows_how_many_it_leaves_out(height: int) -> None:
    lines = render(new_snapshot(40), height=height)
    assert len(lines) <= height
    shown = sum(line.startswith(("book-", "cmpl-", "chat-")) for line in lines)
    assert lines[-1].strip() == f"and {41 + 7 - shown} more, by urgency"
    assert shown >= 1


def test_a_low_terminal_keeps_requests_rather_than_other_tables() -> None:
    for height, gone in ((20, ("CLASS",)), (16, ("CLASS", "STEP"))):
        lines = render(new_snapshot(40), height=height)
        assert not [line for line in lines if line.startswith(gone)]
        assert sum(line.startswith("book-") for line in lines) == 5


def test_scrolling_leaves_out_the_first_requests() -> None:
    lines = render(new_snapshot(5), skip=3)
    assert [line.split()[0] for line in lines if line.startswith(("cmpl", "book", "chat"))] == [
        "book-2", "book-3", "chat-1",
    ]  # fmt: skip


def test_a_terminal_without_unicode_gets_plain_signs() -> None:
    text = "\n".join(render(new_snapshot(), 100, encoding="ascii"))
    assert text.isascii()
    assert "[####==-.............]" in text


def test_without_a_router_the_controllers_own_count_of_deadlines_is_shown() -> None:
    text = "\n".join(render(new_snapshot(router=False)))
    assert "TTFT in time 75.0 % of 4" in text
    assert "in the router" not in text


def test_while_ranks_gather_it_names_those_that_are_missing() -> None:
    status = new_snapshot().status.model_copy(
        update={"state": "gathering", "core": None, "missing_ranks": (1, 3)}
    )
    lines = render(Snapshot(status=status, router=None))
    assert lines[0].startswith("grid (tiny)  gathering")
    assert "Waiting for ranks: 1, 3" in lines[1]


def test_what_a_router_counts_is_read_from_its_metrics() -> None:
    text = """\
# TYPE medha_router_requests_open gauge
medha_router_requests_open 4.0
# TYPE medha_router_sequences_waiting gauge
medha_router_sequences_waiting 3.0
# TYPE medha_request_ttft_attainment counter
medha_request_ttft_attainment_total{met="true",model="m",prompt_tokens="le_128",service_class="a"} 5.0
medha_request_ttft_attainment_total{met="true",model="m",prompt_tokens="more",service_class="b"} 2.0
medha_request_ttft_attainment_total{met="false",model="m",prompt_tokens="more",service_class="b"} 1.0
"""
    assert router_status(text) == RouterStatus(
        requests_open=4, sequences_waiting=3, ttft_met=7, ttft_missed=1, tpot_met=0, tpot_missed=0
    )


def test_keys_change_what_is_shown() -> None:
    shown = _Shown("urgency", 1.0)
    for key in ("s", "p", "j", "\x1b[B", "k", "+", "+", "-"):
        press(shown, key)
    assert (shown.order, shown.paused, shown.skip, shown.interval) == ("age", True, 1, 2.0)
    press(shown, "x")
    assert not shown.ended
    press(shown, "q")
    assert shown.ended


@pytest.mark.parametrize(
    ("sent", "keys"),
    [
        (b"s\x1b[B", ["s", "\x1b[B"]),
        (b"\x1b[B\x1b[Bq", ["\x1b[B", "\x1b[B", "q"]),
        (b"\x1bOA\x1b[1;5B", ["\x1bOA", "\x1b[1;5B"]),
        (b"\x1b", ["\x1b"]),
        (b"p\n ", ["p", "\n", " "]),
    ],
)
def test_keys_that_arrive_together_are_told_apart(sent: bytes, keys: list[str]) -> None:
    ends = [os.pipe(), os.pipe()]
    os.write(ends[0][1], sent)
    assert Keys(ends[0][0], ends[1][0])(5.0) == keys
    for end in (end for pair in ends for end in pair):
        os.close(end)


def test_the_orders_come_round_again() -> None:
    shown = _Shown("urgency", 1.0)
    seen = []
    for _ in range(5):
        press(shown, "s")
        seen.append(shown.order)
    assert seen == ["age", "prompt", "kv", "output", "urgency"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"), (0.00025, "250 us"), (0.0123, "12.3 ms"), (4.56, "4.56 s"), (45.67, "45.7 s"),
        (754.0, "12:34"), (3723.0, "1:02:03"),
    ],
)  # fmt: skip
def test_durations_are_short(seconds: float, text: str) -> None:
    assert span(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (1_023, "1023 B"), (1_024, "1.00 KiB"), (10 * 2**20, "10.0 MiB"), (1_000 * 2**20, "0.98 GiB"),
        (16 * 2**30, "16.0 GiB"), (5_000 * 2**40, "5000 TiB"),
    ],
)  # fmt: skip
def test_sizes_are_short(count: int, text: str) -> None:
    assert byte_size(count) == text


def test_long_ids_keep_their_beginning_and_end() -> None:
    assert short("chat-1") == "chat-1"
    assert short(BOOK.id) == "cmpl-0123456789a..ef-0"


def medha(
    *arguments: str, folder: Path, largest_file_bytes: int | None = None
) -> subprocess.CompletedProcess[str]:
    limited = [] if largest_file_bytes is None else ["prlimit", f"--fsize={largest_file_bytes}"]
    return subprocess.run(
        [*limited, sys.executable, "-m", "medha_cli.main", *arguments],
        env={
            "TMPDIR": str(folder),
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": ":".join(sys.path),
            "COLUMNS": "200",
        },
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("command", ["top", "trace"])
def test_without_a_replica_the_error_names_the_way_to_get_one(command: str, tmp_path: Path) -> None:
    done = medha(command, folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no running medha up" in done.stderr
    assert "medha up FILE" in done.stderr


@pytest.mark.parametrize("command", [("top", "--once"), ("trace", "-o", "never.json")])
def test_an_address_where_nobody_answers_is_named(command: tuple[str, ...], tmp_path: Path) -> None:
    done = medha(*command, "--url", "127.0.0.1:1", folder=tmp_path)
    assert done.returncode == 1
    assert "http://127.0.0.1:1" in done.stderr
    assert "Connection refused" in done.stderr
    assert not Path("never.json").exists()


def test_a_trace_that_nobody_sends_leaves_the_file_of_that_name_alone(tmp_path: Path) -> None:
    kept, link = tmp_path / "kept.json", tmp_path / "link.json"
    kept.write_text("precious")
    link.symlink_to(kept)
    for output in (kept, link):
        done = medha("trace", "--url", "127.0.0.1:1", "-o", str(output), folder=tmp_path)
        assert (done.returncode, "Connection refused" in done.stderr) == (1, True)
    assert {path.name: path.read_text() for path in tmp_path.glob("*json*")} == {
        "kept.json": "precious",
        "link.json": "precious",
    }
    assert link.is_symlink()


class Tracer(BaseHTTPRequestHandler):
    """A controller that sends a trace of 200 KB."""

    def do_GET(self) -> None:
        text = b"[\n" + b",\n".join(b'{"a":1}' for _ in range(20_000)) + b"\n]\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def tracer() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Tracer)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_trace_for_which_there_is_no_room_is_an_error_and_the_former_one_is_kept(
    tracer: str, tmp_path: Path
) -> None:
    output = tmp_path / "trace.json"
    whole = medha("trace", "--url", tracer, "-o", str(output), folder=tmp_path)
    assert whole.returncode == 0, whole.stderr
    former = output.read_bytes()
    assert len(json.loads(former)) == 20_000
    full = medha("trace", "--url", tracer, "-o", str(output), folder=tmp_path, largest_file_bytes=100_000)
    assert full.returncode == 1
    assert f"--output: {output} cannot be written (File too large); make room" in full.stderr
    assert "Traceback" not in full.stderr
    assert output.read_bytes() == former
    assert [path.name for path in tmp_path.glob("*json*")] == ["trace.json"]


def test_a_trace_that_comes_in_pieces_ends_behind_a_whole_event_wherever_it_is_cut() -> None:
    text = b'[\n{"a":1},\n{"b":",x"},\n{"c":3}\n]\n'
    for size in range(1, len(text)):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        found = list(whole_events(pieces))
        assert b"".join(found) == text
        for stop in range(len(found) - 1):
            written = b"".join(found[: stop + 1])
            assert written.endswith(b"}")
