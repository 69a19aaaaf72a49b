"""Which parts count as silent, and that a part's datagrams are its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

from medha_worker.supervision.heartbeat import (
    AWAY_SECONDS,
    IMPORT_SECONDS,
    LOOK_SECONDS,
    SILENT_SECONDS,
    STOPPED_SECONDS,
    Beats,
    Listener,
    is_stopped,
)
from medha_worker.watchdog import BEAT_SECONDS


def looked_at_often(beats: Beats, start: float, stop: float) -> list[int]:
    """What is silent at `stop`, after looking as often as a supervisor does."""
    now = start
    while now < stop:
        beats.silent(now)
        now += LOOK_SECONDS
    return list(beats.silent(stop))


def test_a_part_is_silent_that_was_heard_and_is_not_any_more() -> None:
    beats = Beats()
    beats.heard(7, 0.0)
    beats.heard(8, 0.0)
    assert looked_at_often(beats, 0.0, SILENT_SECONDS) == []
    beats.heard(8, SILENT_SECONDS)
    assert list(beats.silent(SILENT_SECONDS + 0.1)) == [7]
    beats.forget(7)
    assert beats.silent(SILENT_SECONDS + 0.2) == {}


def test_a_part_that_the_kernel_calls_stopped_counts_sooner_and_one_that_is_only_slow_does_not() -> None:
    beats = Beats()
    beats.heard(7, 0.0)
    beats.heard(8, 0.0)
    late = STOPPED_SECONDS + 0.5
    assert beats.silent(0.0, lambda _: True) == {}
    assert beats.silent(late, lambda process_id: process_id == 7) == {7: late}
    assert BEAT_SECONDS < STOPPED_SECONDS < SILENT_SECONDS


def test_a_part_that_was_started_has_longer_until_its_first_sign_of_life_unless_it_was_stopped() -> None:
    beats = Beats()
    beats.started(7, 0.0)
    beats.started(8, 0.0)
    assert looked_at_often(beats, 0.0, IMPORT_SECONDS) == []
    assert list(beats.silent(IMPORT_SECONDS, lambda process_id: process_id == 8)) == [8]
    beats.heard(8, IMPORT_SECONDS)
    beats.started(8, IMPORT_SECONDS)  # it was heard before it could be said that it was started
    assert looked_at_often(beats, IMPORT_SECONDS, IMPORT_SECONDS + 0.1) == [7]
    beats.forget(7)
    assert looked_at_often(beats, IMPORT_SECONDS, IMPORT_SECONDS + SILENT_SECONDS + 0.1) == [8]


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
    beats = Beats()
    beats.heard(7, 0.0)
    beats.silent(0.0)
    assert beats.silent(1000.0) == {}
    assert looked_at_often(beats, 1000.0 + LOOK_SECONDS, 1000.1 + SILENT_SECONDS) == [7]
    assert AWAY_SECONDS < SILENT_SECONDS


def test_the_kernel_says_whose_beat_it_is_and_anything_else_is_no_beat() -> None:
    beats = Beats()
    listener = Listener(beats, lambda *_: None)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            address = listener.address.replace("@", "\0", 1)
            sender.sendto(b"READY=1", address)
            sender.sendto(b"WATCHDOG=1", address)
    finally:
        listener.close()  # it reads what came before
    assert list(beats._heard_at) == [os.getpid()]
