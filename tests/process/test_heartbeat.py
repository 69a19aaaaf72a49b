"""Which parts count as silent, and that a part's datagrams are its own."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import pytest

from medha.errors import ConfigInvalid
from medha_process.part_state import PartState
from medha_process.supervision.heartbeat import (
    AWAY_SECONDS,
    IMPORT_FACTOR,
    IMPORT_SECONDS,
    POLL_SECONDS,
    SILENT_SECONDS,
    SOCKET_NAME,
    STOPPED_SECONDS,
    Beats,
    Listener,
    is_stopped,
)
from medha_process.watchdog import BEAT_SECONDS


def watching(*process_ids: int) -> Beats:
    """Processes that were started and heard at 0 s."""
    beats = Beats()
    for process_id in process_ids:
        beats.started(process_id, 0.0)
        assert beats.seen(process_id, 0.0)
    return beats


def polled_often(beats: Beats, start: float, stop: float) -> list[int]:
    """Return the processes that are silent at `stop`, after polling as often as a supervisor does."""
    now = start
    while now < stop:
        beats.silent(now)
        now += POLL_SECONDS
    return list(beats.silent(stop))


def test_a_part_is_silent_that_was_heard_and_is_not_any_more() -> None:
    beats = watching(7, 8)
    assert polled_often(beats, 0.0, SILENT_SECONDS) == []
    beats.seen(8, SILENT_SECONDS)
    assert list(beats.silent(SILENT_SECONDS + 0.1)) == [7]
    beats.forget(7)
    assert beats.silent(SILENT_SECONDS + 0.2) == {}


def test_a_part_that_the_kernel_calls_stopped_counts_sooner_and_one_that_is_only_slow_does_not() -> None:
    beats = watching(7, 8)
    late = STOPPED_SECONDS + 0.5
    assert beats.silent(0.0, lambda _: True) == {}
    assert beats.silent(late, lambda process_id: process_id == 7) == {7: late}
    assert BEAT_SECONDS < STOPPED_SECONDS < SILENT_SECONDS


def test_a_part_that_was_started_has_longer_until_its_first_sign_of_life_unless_it_was_stopped() -> None:
    beats = Beats()
    beats.started(7, 0.0)
    beats.started(8, 0.0)
    assert polled_often(beats, 0.0, IMPORT_SECONDS) == []
    assert list(beats.silent(IMPORT_SECONDS, lambda process_id: process_id == 8)) == [8]
    beats.forget(7)
    beats.seen(8, IMPORT_SECONDS)
    assert polled_often(beats, IMPORT_SECONDS, IMPORT_SECONDS + SILENT_SECONDS) == []
    assert polled_often(beats, IMPORT_SECONDS, IMPORT_SECONDS + SILENT_SECONDS + 0.1) == [8]


@pytest.mark.parametrize(
    ("slowest", "limit"), [(IMPORT_SECONDS / 4, IMPORT_SECONDS), (90.0, IMPORT_FACTOR * 90.0)]
)
def test_a_replacement_may_import_as_slowly_as_the_slowest_part_before_it(
    slowest: float, limit: float
) -> None:
    beats = Beats()
    for part, seconds in ((7, slowest), (8, 1.0)):
        beats.started(part, 0.0)
        assert beats.seen(part, seconds)
        beats.forget(part)
    beats.started(9, 0.0)
    assert polled_often(beats, 0.0, limit) == []
    assert polled_often(beats, limit, limit + 0.1) == [9]


def test_the_kernel_knows_who_was_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        try:
            assert not is_stopped(process.pid)
            process.send_signal(signal.SIGSTOP)
            assert os.waitid(os.P_PID, process.pid, os.WSTOPPED) is not None
            assert is_stopped(process.pid)
        finally:
            process.kill()
    assert not is_stopped(process.pid)


def test_nobody_is_silent_because_the_supervisor_itself_stood_still() -> None:
    beats = watching(7)
    beats.silent(0.0)
    assert beats.silent(1000.0) == {}
    assert polled_often(beats, 1000.0 + POLL_SECONDS, 1000.1 + SILENT_SECONDS) == [7]
    assert AWAY_SECONDS < SILENT_SECONDS


def test_nobody_is_heard_who_was_not_started_or_has_ended() -> None:
    beats = watching(7)
    assert not beats.seen(8, 1.0)
    beats.forget(7)
    assert not beats.seen(7, 1.0)
    assert polled_often(beats, 0.0, 10 * SILENT_SECONDS) == []


@dataclass
class Heard:
    """A listener that watches this process and no other, and the reports it got."""

    listener: Listener
    reported: SimpleQueue[tuple[int, PartState]]

    def log(self, datagram: bytes) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(datagram, self.listener.address)

    def is_heard(self) -> bool:
        """Whether what this process says still arrives; whatever was said before it has been read then."""
        state = PartState(phase="serving", epoch=secrets.randbelow(10**9))
        self.log(b"WATCHDOG=1\n" + state.line())
        process_id, seen = self.reported.get(timeout=10)
        return (process_id, seen) == (os.getpid(), state)


@pytest.fixture
def seen(tmp_path: Path) -> Iterator[Heard]:
    beats, reported = Beats(), SimpleQueue[tuple[int, PartState]]()
    beats.started(os.getpid(), time.monotonic())
    listener = Listener(tmp_path, beats, lambda process_id, state: reported.put((process_id, state)))
    yield Heard(listener, reported)
    listener.close()


SEND = """
import os, socket, sys
if "as nobody" in sys.argv:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
    sender.sendto(sys.argv[2].encode(), sys.argv[1].replace("@", "\\0"))
"""


def send(address: str, datagram: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Send from another process; with `as nobody`, from another user's."""
    command = [sys.executable, "-S", "-c", SEND, address, datagram, *options]
    return subprocess.run(command, capture_output=True, text=True)


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def test_no_datagram_stops_the_listener_whoever_sends_it(seen: Heard) -> None:
    for datagram in (b"STOP", b"", b"WATCHDOG=1", b"WATCHDOG=1\nX_MEDHA_STATE={", b"\xff" * 100_000):
        seen.log(datagram)
    assert seen.is_heard()
    assert seen.listener.problem() == ""


@needs_root
def test_another_user_cannot_send_to_the_listener(seen: Heard, tmp_path: Path) -> None:
    path = Path(seen.listener.address)
    assert path.parent == tmp_path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(0o755)  # so that the socket's own mode is what keeps others out
    ended = send(seen.listener.address, "STOP", "as nobody")
    assert "PermissionError" in ended.stderr
    assert seen.is_heard()


@needs_root
def test_the_beats_of_another_user_and_of_other_processes_do_not_count(seen: Heard) -> None:
    path = Path(seen.listener.address)
    for folder in path.parents[:-2]:
        folder.chmod(0o755)
    path.chmod(0o666)
    state = PartState(phase="loading", detail="of a stranger")
    said = f"WATCHDOG=1\n{state.line().decode()}"
    for options in ([], ["as nobody"]):
        sent = send(str(path), said, *options)
        assert sent.returncode == 0, sent.stderr
    assert seen.is_heard()  # and the first that is reported to it


def test_a_flood_of_datagrams_hides_no_beat(seen: Heard) -> None:
    flood = """
import os, socket, sys
sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
sender.setblocking(False)
print("floods", flush=True)
while True:
    try:
        sender.sendto(b"x", sys.argv[1])
    except BlockingIOError:
        pass
"""
    command = [sys.executable, "-S", "-c", flood, seen.listener.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "floods\n"
            beats = subprocess.Popen(
                [sys.executable, "-c", "from medha_process.watchdog import Watchdog\nWatchdog()\ninput()"],
                stdin=subprocess.PIPE,
                env={**os.environ, "NOTIFY_SOCKET": seen.listener.address},
            )
            with beats:
                seen.listener._beats.started(beats.pid, 0.0)
                while (
                    seen.listener._beats._last_seen_at[beats.pid] == 0.0
                ):  # the test's own timeout bounds it
                    time.sleep(0.05)
                beats.communicate(b"\n")
        finally:
            process.kill()
    assert seen.is_heard()


def test_a_listener_that_has_died_or_whose_file_was_removed_reports_it(seen: Heard, tmp_path: Path) -> None:
    path = Path(seen.listener.address)
    path.rename(tmp_path / "elsewhere")
    assert "was removed" in seen.listener.problem()
    (tmp_path / "elsewhere").rename(path)
    assert seen.listener.problem() == ""

    def fails(_process_id: int, _state: PartState) -> None:
        raise MemoryError("no room")

    seen.listener._on_state = fails
    seen.log(b"WATCHDOG=1\n" + PartState(phase="serving").line())
    seen.listener._thread.join(timeout=10)
    assert "has ended (MemoryError: no room)" in seen.listener.problem()


def test_closing_ends_although_the_queue_is_full_and_removes_the_file(tmp_path: Path) -> None:
    release, beats = threading.Event(), Beats()
    beats.started(os.getpid(), time.monotonic())
    listener = Listener(tmp_path, beats, lambda *_: release.wait() and None)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(b"WATCHDOG=1\n" + PartState(phase="serving").line(), listener.address)
        with suppress(BlockingIOError):
            while True:
                sender.sendto(b"x", listener.address)
    release.set()
    listener.close()
    assert not listener._thread.is_alive()
    assert list(tmp_path.iterdir()) == []


def test_a_socket_that_a_killed_supervisor_has_left_is_replaced(tmp_path: Path) -> None:
    left = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    left.bind(str(tmp_path / SOCKET_NAME))
    left.close()
    listener = Listener(tmp_path, Beats(), lambda *_: None)
    assert listener.problem() == ""
    listener.close()
    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_whose_path_is_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    with pytest.raises(
        ConfigInvalid, match=r"d/notify: cannot be used as a socket .*path of at most 100 bytes"
    ):
        Listener(deep, Beats(), lambda *_: None)
