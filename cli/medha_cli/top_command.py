"""`medha top`: lanes, stages, KV, steps and requests of a running replica, updated as they change."""

from __future__ import annotations

import io
import os
import re
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import get_args

import click
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from medha.scheduler.status_report import MOST_REQUESTS, Order
from medha_cli.options import Number, run_options
from medha_cli.replica_snapshot import NotAnswering, Snapshot, Target
from medha_cli.top_page import page

ORDERS: tuple[Order, ...] = get_args(Order)
SHORTEST_SECONDS = 0.1
PIPE_WIDTH = 160
"""Width in columns where the output is not a terminal."""
KEYS = "q quit   s order   p pause   up/down scroll   +/- interval"


@click.command("top")
@click.argument("name", required=False)
@click.option("--once", is_flag=True, help="Print one snapshot and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print each snapshot as one JSON object, on one line.")
@click.option(
    "--interval",
    type=Number(SHORTEST_SECONDS, 3600),
    default=1.0,
    show_default=True,
    help="Seconds between two snapshots.",
)
@click.option(
    "--sort",
    type=click.Choice(ORDERS),
    default=ORDERS[0],
    show_default=True,
    help="Order of the requests.",
)
@click.option(
    "--requests",
    type=click.IntRange(0, MOST_REQUESTS),
    default=50,
    show_default=True,
    help="Most requests that are shown.",
)
@run_options("watch")
def command(
    name: str | None,
    once: bool,
    as_json: bool,
    interval: float,
    sort: Order,
    requests: int,
    run_dir: Path | None,
    url: str | None,
) -> None:
    """Watch a running replica: lanes, stages, KV, steps in flight, queues, and every request's progress.

    Finds the replica that `medha up` serves on this machine; if several run, give the NAME of one. In a terminal, the page
    is redrawn at intervals, and keys change it; in a pipe, snapshots are printed one after the other. Requests appear by
    id, lengths and times, never with their text.

    \b
    Examples:
      medha top
      medha top --once
      medha top --once --json | jq .status.core.requests
      kubectl port-forward pod/grid-l0-0 9400 & medha top --url http://127.0.0.1:9400
    """
    target = Target(name, run_dir, url)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without the ellipsis character gets another one
    width = PIPE_WIDTH if "COLUMNS" not in os.environ and not sys.stdout.isatty() else None
    console = Console(highlight=False, width=width)
    try:
        if once:
            _print(console, target.snapshot(sort, requests), sort, as_json=as_json)
        elif as_json or not console.is_terminal or console.is_dumb_terminal or not sys.stdin.isatty():
            _print_on(console, target, interval, sort, requests, as_json=as_json)
        else:
            Screen(console, target, interval, sort, requests).run()
    except KeyboardInterrupt:
        pass  # the usual way to end it
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print(console: Console, snapshot: Snapshot, order: Order, *, as_json: bool) -> None:
    if as_json:
        click.echo(snapshot.model_dump_json())
        return
    console.print(page(snapshot, order))


def _print_on(
    console: Console, target: Target, interval: float, order: Order, most_requests: int, *, as_json: bool
) -> None:
    """Print one snapshot after another until interrupted; while nobody answers, say so on stderr and go on."""
    while True:
        try:
            _print(console, target.snapshot(order, most_requests), order, as_json=as_json)
            if not as_json:
                click.echo()
            sys.stdout.flush()
        except NotAnswering as error:
            click.echo(f"medha top: {error}", err=True)
        time.sleep(interval)


@dataclass(slots=True)
class _Shown:
    """The user's current choices."""

    order: Order
    interval: float
    paused: bool = False
    skip: int = 0
    ended: bool = False


class Screen:
    """A terminal view that is redrawn at intervals, when a key is pressed, and when its size changes."""

    def __init__(
        self, console: Console, target: Target, interval: float, order: Order, most_requests: int
    ) -> None:
        self._console = console
        self._target = target
        self._most_requests = most_requests
        self._shown = _Shown(order, interval)
        self._snapshot: Snapshot | None = None
        self._problem = ""

    def run(self) -> None:
        """Run until the user ends it.

        Raises:
            PartFailed: the replica has ended.
        """
        with (
            _keys(self._console) as keys,
            Live(console=self._console, screen=True, auto_refresh=False) as live,
        ):
            refresh_at = time.monotonic()
            while not self._shown.ended:
                if time.monotonic() >= refresh_at and not self._shown.paused:
                    self._take_snapshot()
                    refresh_at = time.monotonic() + self._shown.interval
                live.update(self._page(), refresh=True)
                wait = refresh_at - time.monotonic() if not self._shown.paused else None
                before = self._shown.order
                for key in keys(wait):
                    press(self._shown, key)
                if self._shown.order != before:
                    refresh_at = time.monotonic()

    def _take_snapshot(self) -> None:
        try:
            self._snapshot = self._target.snapshot(self._shown.order, self._most_requests)
            self._problem = ""
        except NotAnswering as error:
            self._problem = str(error)

    def _page(self) -> Group:
        shown, height = self._shown, self._console.height
        footer = Text(f"{KEYS}   every {shown.interval:g} s", style="dim")
        if shown.paused:
            footer = Text("paused; p continues   ", style="bold yellow") + footer
        if self._problem:
            footer = Text(self._problem, style="bold red")
        footer.no_wrap, footer.overflow = True, "ellipsis"
        if self._snapshot is None:
            return Group(Text(self._target.name, style="bold"), footer)
        if self._snapshot.status.core is not None:
            shown.skip = max(0, min(shown.skip, len(self._snapshot.status.core.requests) - 1))
        body = page(self._snapshot, shown.order, height=height - 2, skip=shown.skip)
        return Group(footer, body)


def press(shown: _Shown, key: str) -> None:
    """Apply a key to the user's choices."""
    match key:
        case "q" | "Q" | "\x1b":
            shown.ended = True
        case "s":
            shown.order = ORDERS[(ORDERS.index(shown.order) + 1) % len(ORDERS)]
        case "p" | " ":
            shown.paused = not shown.paused
        case "j" | "\x1b[B" | "\x1bOB":
            shown.skip += 1
        case "k" | "\x1b[A" | "\x1bOA":
            shown.skip = max(0, shown.skip - 1)
        case "+":
            shown.interval = min(60.0, shown.interval * 2)
        case "-":
            shown.interval = max(SHORTEST_SECONDS, shown.interval / 2)


@contextmanager
def _keys(console: Console) -> Iterator[Keys]:
    """Read single keys while the context lasts; the terminal is restored, even when we are terminated or suspended."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    reading, writing = os.pipe()
    for descriptor in (reading, writing):
        os.set_blocking(descriptor, False)

    def wake(_signal: int, _frame: FrameType | None) -> None:
        """Do nothing: the wakeup descriptor ends the wait of `select`."""

    def end(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    def restored_terminal(_signal: int, _frame: FrameType | None) -> None:
        console.set_alt_screen(False)
        console.show_cursor(True)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
        os.kill(os.getpid(), signal.SIGSTOP)
        tty.setcbreak(terminal)
        console.set_alt_screen(True)
        console.show_cursor(False)

    handlers: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {
        signal.SIGWINCH: wake,
        signal.SIGTERM: end,
        signal.SIGHUP: end,
        signal.SIGTSTP: restored_terminal,
    }
    saved = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        tty.setcbreak(terminal)
        yield Keys(terminal, reading)
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
        signal.set_wakeup_fd(wakeup)
        for number, handler in saved.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)


_KEY = re.compile(r"\x1b[\[O][0-?]*[ -/]*[@-~]|.", re.DOTALL)
"""A key that terminals send as an escape sequence (ECMA-48), or as one character."""


class Keys:
    """Reads keys from the terminal."""

    def __init__(self, terminal: int, wakeup: int) -> None:
        self._terminal, self._wakeup = terminal, wakeup

    def __call__(self, wait_seconds: float | None) -> list[str]:
        """Return the keys pressed within `wait_seconds`; none after that time or a signal.

        If it is None, wait for a key or a signal.
        """
        ready, _, _ = select.select(
            [self._terminal, self._wakeup], [], [], None if wait_seconds is None else max(0.0, wait_seconds)
        )
        if self._wakeup in ready:
            os.read(self._wakeup, 4096)
        if self._terminal not in ready:
            return []
        pressed = os.read(self._terminal, 64).decode(errors="ignore")
        if not pressed:  # the terminal has gone
            return ["q"]
        return _KEY.findall(pressed)
