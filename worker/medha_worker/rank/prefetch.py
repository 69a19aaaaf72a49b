"""Receives messages while a rank runs a step, and prepares the next step on another thread.

The next step often arrives while a rank still computes: in later stages, on the tensor ranks and lanes that finish
a step last, and when decodes run ahead. Reading and planning it (`Executor.plan`) needs no result of the running
step, and torch lets other threads run while it computes.

Some messages are handled as soon as they are read, on either thread: grammars are compiled while steps run.

Only one thread at a time may use a ZeroMQ socket: the one that holds the lock. No thread holds it while it waits for
a message, so any thread can send at once.
"""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Lock, RLock, Thread
from time import monotonic

import zmq

from medha.wire.messages import CompileGrammar, DropGrammar, Message, Step, StoreLookup
from medha_worker.link import Link, Received
from medha_worker.rank.lane_plan import LanePlan

Prepare = Callable[[Step], LanePlan | None]
"""Function that plans a step, or returns None if planning has to wait."""

Urgent = CompileGrammar | DropGrammar | StoreLookup
"""A message that does not wait until the running step has ended."""

_POLL_SECONDS = 0.1  # longest time for which the thread continues to wait once nothing runs


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step that was read ahead: the result of planning it, and when it was planned."""

    step: Step
    planned: LanePlan | Exception
    since: float  # seconds of the monotonic clock
    until: float


class StepPrefetcher:
    """Reads one link in the main thread or, while that is `busy`, on a thread that prepares the steps."""

    def __init__(
        self,
        link: Link,
        at_once: Callable[[Urgent], None] = lambda _: None,
    ) -> None:
        """`at_once` handles an urgent message; it is called on any thread, for one message at a time, in order."""
        self._link = link
        self._at_once = at_once
        self._urgent: deque[Urgent] = deque()
        self._handling = RLock()  # handling a message may send one, which may receive the next one
        self._lock = Lock()  # guards the link's socket and the received messages
        self._planning = Lock()
        self._prepare: Prepare | None = None
        self._received: deque[Received] = deque()
        self._prepared: list[Prepared] = []
        self._is_busy = Event()
        self._ended = False
        # Each pair: a descriptor that is readable when messages may have arrived since the socket was last read, and one
        # by which another thread reports that it has found some. The first pair is for the thread that reads ahead, the
        # second one for the main thread.
        arrived = int(link.socket.getsockopt(zmq.FD))
        self._descriptors = arrived, os.eventfd(0, os.EFD_NONBLOCK)
        self._main_descriptors = arrived, os.eventfd(0, os.EFD_NONBLOCK)
        self._main_waits = False
        self._thread = Thread(target=self._read_ahead, daemon=True, name="ahead")
        self._thread.start()

    def send(self, message: Message) -> None:
        """Send a message; any thread may call this at any time."""
        with self._lock:
            self._link.send(message)
        if self._is_busy.is_set() or self._main_waits:
            self._wake_if_received()  # sending may have consumed the notification that a message has arrived

    def receive(self, timeout_seconds: float) -> Received | None:
        """Return the next message that is not urgent; called from the main thread while it is not busy."""
        until = monotonic() + timeout_seconds
        self._main_waits = True  # before the socket is read: a thread that sends after that reads it again
        try:
            while True:
                with self._lock:
                    if not self._received:
                        self._drain()
                    received = self._received.popleft() if self._received else None
                self._handle_urgent()
                left_seconds = until - monotonic()
                if received is not None or left_seconds <= 0:
                    return received
                readable, _, _ = select.select(self._main_descriptors, [], [], left_seconds)
                if self._main_descriptors[1] in readable:
                    os.eventfd_read(self._main_descriptors[1])
        finally:
            self._main_waits = False

    def take_step(self) -> Step | None:
        """Return the next message if it is a step that was read ahead; called from the main thread while it is not busy."""
        with self._lock:
            match self._received[0].message if self._received else None:
                case Step() as step:
                    self._received.popleft()
                    return step
        return None

    def take(self, step: Step) -> Prepared | None:
        """Return the result of preparing a received step, or None; results of earlier steps are dropped."""
        with self._planning:
            found = next((one for one in self._prepared if one.step is step), None)
            with self._lock:
                received_ids = {id(received.message) for received in self._received}
            self._prepared = [one for one in self._prepared if id(one.step) in received_ids]
        return found

    @contextmanager
    def busy(self, prepare: Prepare) -> Iterator[None]:
        """Prepare the steps that arrive, in order, for as long as the context lasts."""
        self._prepare = prepare
        self._is_busy.set()
        self._wake_if_received()
        try:
            yield
        finally:
            self._is_busy.clear()
            with self._planning:  # a plan that was begun is finished, and no other begins
                self._prepare = None

    def close(self) -> None:
        """Stop the thread; must be called before the link is closed."""
        self._ended = True
        self._is_busy.set()
        os.eventfd_write(self._descriptors[1], 1)
        self._thread.join()
        os.close(self._descriptors[1])
        os.close(self._main_descriptors[1])

    def _wake_if_received(self) -> None:
        """Receive the messages that have already arrived, and notify the thread that waits for some."""
        with self._lock:
            self._drain()
            has_received = bool(self._received)
        self._handle_urgent()
        if has_received:
            waiting = self._main_descriptors if self._main_waits else self._descriptors
            os.eventfd_write(waiting[1], 1)

    def _read_ahead(self) -> None:
        while not self._ended:
            self._is_busy.wait()
            readable, _, _ = select.select(self._descriptors, [], [], _POLL_SECONDS)
            if self._descriptors[1] in readable:
                os.eventfd_read(self._descriptors[1])
            if self._is_busy.is_set() and not self._ended:
                with self._lock:
                    self._drain()
                self._handle_urgent()
                self._plan_all()

    def _drain(self) -> None:
        while (received := self._link.receive()) is not None:
            if isinstance(received.message, Urgent):
                self._urgent.append(received.message)
            else:
                self._received.append(received)

    def _handle_urgent(self) -> None:
        with self._handling:
            while self._urgent:
                self._at_once(self._urgent.popleft())

    def _plan_all(self) -> None:
        """Plan the received steps in order, up to one that cannot be planned yet."""
        with self._planning:
            if self._prepare is None:
                return
            with self._lock:
                steps = [
                    received.message for received in self._received if isinstance(received.message, Step)
                ]
            done = {id(one.step) for one in self._prepared}
            for step in (one for one in steps if id(one) not in done):
                if self._prepared and isinstance(self._prepared[-1].planned, Exception):
                    return
                since = monotonic()
                planned: LanePlan | Exception | None
                try:
                    planned = self._prepare(step)
                except Exception as error:  # noqa: BLE001 - raised again where the step is run
                    planned = error
                if planned is None:
                    return
                self._prepared.append(Prepared(step, planned, since, monotonic()))
