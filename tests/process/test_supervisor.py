"""Real processes under the supervisor: however a run ends, its reason is reported and nothing is left."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import subprocess
import sys
import termios
import time
from array import array
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import IO

import psutil
import pytest

from medha_process.supervision.supervisor import StopRequests

FAKE_UP = Path(__file__).with_name("fake_up.py")


class Run:
    """A supervisor of fake parts, in a session of its own; `output` is what it has printed so far."""

    def __init__(self, folder: Path, parts: dict[str, str], ready_seconds: float) -> None:
        arguments = [f"{name}={behaviour}" for name, behaviour in parts.items()]
        self.process = subprocess.Popen(
            [sys.executable, str(FAKE_UP), str(folder), str(ready_seconds), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self.output = ""
        self.seen: dict[int, psutil.Process] = {}

    def until(self, text: str) -> None:
        """Read until `text` was printed; the test's own timeout bounds it."""
        if text not in self.output:
            self.until_next(text)

    def until_next(self, text: str) -> None:
        """Read until `text` is printed once more."""
        assert self.process.stdout is not None
        line = ""
        while text not in line:
            line = self.process.stdout.readline()
            assert line, f"ended without {text!r}:\n{self.output}"
            self.output += line
        for child in psutil.Process(self.process.pid).children(recursive=True):
            self.seen[child.pid] = child

    def end(self) -> int:
        """Read to the end, and return the exit status; fails if a process is left over."""
        assert self.process.stdout is not None
        self.output += self.process.stdout.read()
        status = self.process.wait(timeout=20)
        _, left = psutil.wait_procs(self.seen.values(), timeout=5)
        assert left == [], self.output
        return status

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def part(self, name: str) -> psutil.Process:
        """The process that printed its id behind the prefix of `name`."""
        self.until(f" {name:<10} | pid ")
        lines = [line for line in self.output.splitlines() if speaker(line) == name]
        return self.seen[int([line.split()[-1] for line in lines if "| pid " in line][-1])]


def speaker(line: str) -> str:
    """Whose line this is, behind its time."""
    return line.partition("|")[0].partition(" ")[2].strip()


class Start:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: list[Run] = []

    def __call__(self, *, ready_seconds: float = 30, **behaviours: str) -> Run:
        parts = {"router": "serve", "controller": "serve", "rank 0": "serve"}
        parts |= {name.replace("_", " "): behaviour for name, behaviour in behaviours.items()}
        run = Run(self.folder, parts, ready_seconds)
        self.runs.append(run)
        return run


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    starter = Start(tmp_path)
    yield starter
    for run in starter.runs:
        for process in [run.process, *run.seen.values()]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        run.process.wait(timeout=5)
        assert run.process.stdout is not None
        run.process.stdout.close()


def stop_order(output: str) -> list[str]:
    return [speaker(line) for line in output.splitlines() if "stopped in good order" in line]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_signal_stops_router_controller_and_ranks_in_this_order(
    start: Start, number: signal.Signals
) -> None:
    run = start()
    run.until("READY")
    run.process.send_signal(number)
    assert run.end() == 0
    assert stop_order(run.output) == ["router", "controller", "rank 0"]


def test_under_nohup_a_terminal_that_closes_ends_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequests() as requests:
            signal.raise_signal(signal.SIGHUP)
            assert requests.events.empty()
            signal.raise_signal(signal.SIGTERM)
            assert not requests.events.empty()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_every_line_carries_its_time_and_its_part_and_no_colours_outside_a_terminal(start: Start) -> None:
    run = start()
    run.until("READY")
    run.interrupt()
    run.end()
    assert f" controller | pid {run.part('controller').pid}\n" in run.output
    assert f" rank 0     | pid {run.part('rank 0').pid}\n" in run.output
    assert "\x1b" not in run.output
    *merged, _ = [line for line in run.output.splitlines() if not line.startswith("READY")]
    for line in merged:  # the last one is the test's own
        assert datetime.fromisoformat(line.partition(" ")[0]).tzinfo is not None
    times = [line.partition(" ")[0] for line in merged]
    assert sorted(times) == times


def test_a_part_that_fails_at_the_start_ends_the_run_and_is_named_with_its_last_line(start: Start) -> None:
    run = start(controller="crash")
    assert run.end() == 1
    assert (
        "failure: before the replica was ready, controller exited with status 3; its last line: the model is upside down"
        in run.output
    )
    assert "READY" not in run.output


def test_a_part_that_logs_why_it_fails_is_quoted_once(start: Start) -> None:
    run = start(controller="last-words")
    assert run.end() == 1
    assert (
        "failure: before the replica was ready, controller exited with status 3 because: the model is"
        in run.output
    )
    assert run.output.count("upside down") == 1
    assert run.output.count("no words") == 1, "another line came behind it"


def test_not_becoming_ready_in_time_is_a_failure(start: Start) -> None:
    run = start(ready_seconds=0.5, rank_0="mute")
    assert run.end() == 1
    assert "failure: not ready after 0.5 s" in run.output


@pytest.mark.parametrize("name", ["router", "controller", "rank 0"])
def test_a_part_that_dies_is_started_again_and_the_others_do_not_notice(start: Start, name: str) -> None:
    run = start()
    run.until("READY")
    others = {part: run.part(part).pid for part in ("router", "controller", "rank 0") if part != name}
    killed = run.part(name).pid
    run.part(name).kill()
    run.until(f"{name} was killed by SIGKILL")
    while run.part(name).pid == killed:
        run.until_next(f"{name:<10} | pid")
    assert {part: run.part(part).pid for part in others} == others
    run.interrupt()
    assert run.end() == 0


def test_a_part_that_keeps_ending_stops_all_others(start: Start, tmp_path: Path) -> None:
    run = start(rank_0=f"crash-when:{tmp_path / 'now'}")
    run.until("READY")
    (tmp_path / "now").touch()
    assert run.end() == 1
    assert (
        "failure: rank 0 exited with status 4; its last line: out of luck; it ended 3 times in 60 s"
        in run.output
    )


def test_a_second_interrupt_kills_parts_that_do_not_listen(start: Start) -> None:
    run = start(router="stubborn")
    run.until("READY")
    run.interrupt()
    run.until("draining")
    run.interrupt()
    assert run.end() == 130


def test_an_interrupt_before_ready_stops_all_parts_at_once(start: Start) -> None:
    run = start(rank_0="mute")
    for name in ("router    ", "controller", "rank 0    "):
        run.until(f"{name} | pid")  # from there it heeds signals
    run.interrupt()
    run.until("stopping before the replica was ready")
    run.until("controller | stopped in good order")
    run.interrupt()  # rank 0 would be killed anyway when its grace is over
    assert run.end() == 130
    assert run.output.endswith("failure: \n")


def test_what_a_part_has_started_ends_with_it(start: Start) -> None:
    run = start(router="parent")
    run.until("READY")
    assert len(run.seen) == 4
    run.interrupt()
    assert run.end() == 0  # `end` has checked that the child is gone too


@pytest.mark.parametrize("is_closed", [False, True], ids=["nobody reads", "closed"])
def test_a_part_that_dies_is_started_again_although_nothing_can_be_shown(
    start: Start, is_closed: bool
) -> None:
    run = start(rank_0="chatty")
    run.until("READY")
    assert run.process.stdout is not None
    if is_closed:
        run.process.stdout.close()
    else:
        _fill(run.process.stdout)
    for _ in range(2):
        dead = _part_of(run, "rank 0")
        dead.kill()
        while _part_of(run, "rank 0").pid == dead.pid:  # the test's own timeout bounds it
            time.sleep(0.05)
    run.interrupt()
    if is_closed:
        assert run.process.wait(timeout=20) == 0
        _, left = psutil.wait_procs(run.seen.values(), timeout=5)
        assert left == []
    else:
        assert run.end() == 0
        assert run.output.count("rank 0 was killed by SIGKILL") == 2


def _fill(pipe: IO[str]) -> None:
    """Until the supervisor, of which a part prints without end, has to wait."""
    room = fcntl.fcntl(pipe.fileno(), fcntl.F_GETPIPE_SZ)
    held = array("i", [0])
    while held[0] < room - select.PIPE_BUF:
        fcntl.ioctl(pipe.fileno(), termios.FIONREAD, held)
        time.sleep(0.01)


def _part_of(run: Run, name: str) -> psutil.Process:
    """The process that plays this part now, whatever was printed."""
    while True:
        for child in psutil.Process(run.process.pid).children():
            with suppress(psutil.Error):
                if f"{name}.ready" in " ".join(child.cmdline()):
                    run.seen[child.pid] = child
                    return child


@pytest.mark.long
def test_it_ends_although_nobody_ever_reads_what_it_shows(start: Start) -> None:
    run = start(rank_0="chatty")
    run.until("READY")
    assert run.process.stdout is not None
    _fill(run.process.stdout)
    run.interrupt()
    assert run.process.wait(timeout=50) == 0
    _, left = psutil.wait_procs(run.seen.values(), timeout=5)
    assert left == []


SEND = """
import os, socket, sys
if "as nobody" in sys.argv:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
sender.setblocking(False)
address = sys.argv[1].replace("@", "\\0")
sender.sendto(b"STOP", address)
print("sent", flush=True)
while True:
    try:
        sender.sendto(b"x", address)
    except BlockingIOError:
        pass
"""


def notify_socket(run: Run) -> str:
    return run.part("rank 0").environ()["NOTIFY_SOCKET"]


@pytest.mark.long
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_of_the_machine_can_neither_kill_nor_hold_up_anything(start: Start) -> None:
    run = start(rank_0="beat")
    run.until("READY")
    for folder in (start.folder, *start.folder.parents[:-2]):
        folder.chmod(0o755)
    command = [sys.executable, "-S", "-c", SEND, notify_socket(run), "as nobody"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as attacker:
        assert attacker.stdout is not None
        attacker.stdout.readline()
        for _ in range(8):  # about a second each: longer than a part may be silent
            run.until_next("still here")
        attacker.kill()
        _, said = attacker.communicate()
    assert "PermissionError" in said
    assert "no heartbeat" not in run.output
    run.interrupt()
    assert run.end() == 0


@pytest.mark.long
def test_a_flood_of_datagrams_kills_no_part_and_does_not_hold_up_the_end(start: Start) -> None:
    run = start(rank_0="beat")
    run.until("READY")
    command = [sys.executable, "-S", "-c", SEND, notify_socket(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as attacker:
        assert attacker.stdout is not None
        assert attacker.stdout.readline() == "sent\n"
        for _ in range(8):
            run.until_next("still here")
        run.interrupt()
        assert run.end() == 0
        attacker.kill()
    assert "no heartbeat" not in run.output
    assert not (start.folder / "notify").exists()


def test_a_supervisor_that_cannot_hear_its_parts_any_more_ends_and_blames_none(start: Start) -> None:
    run = start(rank_0="beat")
    run.until("READY")
    (start.folder / "notify").unlink()
    assert run.end() == 1
    assert re.search(
        r"failure: no part can be watched any more: \S+/notify, the socket .* was removed", run.output
    )
    assert "no heartbeat" not in run.output


def test_a_part_that_is_stopped_is_killed_and_started_again(start: Start) -> None:
    run = start(rank_0="beat")
    run.until("READY")
    victim = run.part("rank 0")
    victim.suspend()
    run.until("rank 0 has sent no heartbeat")
    run.until_next("| pid")
    assert not victim.is_running()
    run.interrupt()
    assert run.end() == 0


def test_a_part_that_is_stopped_while_requests_drain_is_killed_and_started_again(start: Start) -> None:
    run = start(router="stubborn", rank_0="beat")
    run.until("READY")
    run.interrupt()
    run.until("draining")
    run.part("rank 0").suspend()
    run.until("rank 0 has sent no heartbeat")
    run.until_next("rank 0     | pid")
    run.interrupt()  # the router would not end by itself
    assert run.end() == 130


def test_a_part_that_is_stopped_while_the_replica_starts_is_named(start: Start) -> None:
    run = start(router="mute", rank_0="beat")
    run.until("rank 0     | pid")
    run.part("rank 0").suspend()
    run.until("rank 0 has sent no heartbeat")
    run.interrupt()
    run.until("stopping before the replica was ready")
    run.interrupt()  # neither of the two listens
    assert run.end() == 130


def test_a_part_that_is_stopped_before_its_first_sign_of_life_is_killed_and_started_again(
    start: Start, tmp_path: Path
) -> None:
    mark = tmp_path / "stop"
    run = start(rank_0=f"stop-when:{mark}")
    run.until("READY")
    mark.touch()
    run.part("rank 0").kill()
    run.until("rank 0 has sent no heartbeat")
    run.until_next("rank 0     | pid")
    assert not mark.exists()
    run.interrupt()
    assert run.end() == 0
