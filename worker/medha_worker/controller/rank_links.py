"""The controller's links to its ranks, and the life cycle of their epochs.

Decisions about epochs are made in `membership`, those about a step in `lock_step`. This module reads the
messages and the clock: it detects silent ranks, steps that do not end, and gathering that takes too long.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import zmq

from medha.errors import PartFailed, WireInvalid
from medha.wire.messages import (
    DiskReport,
    Done,
    GrammarReady,
    Message,
    RankFault,
    RankHello,
    RankOutOfMemory,
    RankReady,
    RankReport,
    RankXid,
    Shutdown,
    StageFree,
    Step,
    TracePart,
)
from medha_links.drops import Drops, RankDrops
from medha_links.key_files import KeyPair
from medha_links.sockets import TOKENS_FRAME_BYTES, bind, crosses_network
from medha_process.host_resources import free_port
from medha_worker.controller.lock_step import LockStep
from medha_worker.controller.membership import LinkName, Membership, implausible
from medha_worker.epoch_file import following_epoch, read_epoch, write_epoch
from medha_worker.link import Context, Link, Received, rank_identity
from medha_worker.nvml import LatestXid, xid_text

AWAY_SECONDS = 2.0  # a longer gap between two iterations: this process stood still, not its ranks
LOG_SECONDS = 10.0  # interval between log lines about missing ranks

_log = logging.getLogger("medha.controller")

_LINK_LABELS = {"control": "at_rank_control", "tokens": "at_rank_tokens"}
"""Names of a rank's links in the controller's metrics."""

_LINK_NAMES: tuple[LinkName, LinkName] = ("control", "tokens")  # in the order of `RankLinks.links`

RankEvent = StageFree | Done | GrammarReady | DiskReport | TracePart | RankReport | RankXid | list[RankReady]
"""A message from the ranks; a list means that all ranks are ready and an epoch begins."""


class RankLinks:
    """The ranks of one replica, as their controller sees them."""

    def __init__(
        self,
        context: Context,
        endpoints: tuple[str, str],
        keys: KeyPair,
        ranks: int,
        drops: Drops,
        *,
        rendezvous_host: str,
        epoch_file: Path | None,
        gather_seconds: float,
        lost: Callable[[str], None],
        dropped: Callable[[str, str, int], None],
        oldest_epoch: int = 0,
        revision: str = "",
    ) -> None:
        """Bind both links.

        `endpoints` are those of the control and the token link. `lost` is called with the reason when a serving epoch
        has ended, `dropped` with the link, the reason and the number of messages when ranks have dropped some.
        """
        control, tokens = endpoints
        peers = [rank_identity(rank) for rank in range(ranks)]
        self._control = Link(
            bind(context, control, keys, heartbeats=crosses_network(control)),
            "rank_control",
            drops,
            accepts=(
                StageFree,
                Done,
                GrammarReady,
                DiskReport,
                RankHello,
                RankReady,
                RankFault,
                RankOutOfMemory,
                RankReport,
                RankXid,
                TracePart,
            ),
            peers=peers,
        )
        self._tokens = Link(
            bind(
                context,
                tokens,
                keys,
                largest_frame_bytes=TOKENS_FRAME_BYTES,
                heartbeats=crosses_network(tokens),
            ),
            "rank_tokens",
            drops,
            accepts=(RankHello,),
            peers=peers,
        )
        self.links = self._control, self._tokens
        self._membership = Membership(
            ranks, max(following_epoch(epoch_file), oldest_epoch), oldest_epoch, revision=revision
        )
        self._strangers: set[str] = set()  # incarnations of other revisions; each is logged once
        self._identities = {rank: rank_identity(rank) for rank in range(ranks)}  # of admitted processes
        # By link and rank: connection of the admitted process.
        self._connections: dict[tuple[str, int], int] = {}
        self._xids: dict[int, LatestXid] = {}  # of each rank's GPU
        self._gone: set[int] = set()  # ranks of this epoch whose connection has ended
        self._rendezvous_host = rendezvous_host
        self._epoch_file = epoch_file
        self.gather_seconds = gather_seconds
        self._on_lost = lost
        self._rank_drops = RankDrops(_LINK_LABELS)
        self._on_dropped = dropped
        self._lock_step: LockStep | None = None  # of the serving epoch
        self._vocab_size = 0
        # A restarted controller counts as one that has served, so that it does not wait for ranks for ever.
        self._has_served = read_epoch(epoch_file) is not None
        self._gathering_since = self._logged_at = self._turned_at = self._busy_at = time.monotonic()

    @property
    def missing(self) -> list[int]:
        """Ranks that the others wait for, because they were not heard yet or are not ready."""
        return self._membership.missing

    @property
    def epoch(self) -> int | None:
        """The epoch of the current or last rendezvous; None while the ranks gather."""
        return self._membership.epoch

    def close(self) -> None:
        """Close the links, with a short time for queued messages to be sent."""
        for link in self.links:
            link.close()

    # --- to the ranks -------------------------------------------------------------------------------

    def begin_step(self, step: Step) -> None:
        assert self._lock_step is not None
        self._lock_step.expect(step, time.monotonic())
        self.send(step)

    def send(self, message: Message) -> None:
        self._to_all(self._control, message)

    def send_tokens(self, message: Message, payload: bytes) -> None:
        self._to_all(self._tokens, message, payload)

    def shut_down(self) -> None:
        for rank in range(self._membership.expected):
            with suppress(zmq.ZMQError):  # the rank has gone already
                self._control.send(Shutdown(reason="drained"), peer=self._identities[rank])

    def _to_all(self, link: Link, message: Message, payload: bytes | None = None) -> None:
        """Send one message to every rank; end the epoch if a rank is no longer connected."""
        for rank in range(self._membership.expected):
            try:
                link.send(message, payload, peer=self._identities[rank])
            except zmq.ZMQError as error:
                self.end_epoch(f"rank {rank} is gone ({error}); its own log says why")
                return

    # --- from the ranks -----------------------------------------------------------------------------

    def process_connection_events(self) -> dict[str, int]:
        """Detect ranks that have gone, and return the number of refused peers by link.

        Call it before `receive`. Only the end of the connection of a rank's current process counts, not that
        of a predecessor's or a stranger's.
        """
        refused = {}
        for name, link in zip(_LINK_NAMES, self.links, strict=True):
            refused[link.name], ended = link.connections.refused_and_ended()
            for rank in range(self._membership.expected):
                if self._connections.get((name, rank)) in ended:
                    del self._connections[name, rank]  # its descriptor may become another connection's
                    if self._membership.epoch is not None:
                        self._gone.add(rank)
        return refused

    def poll(self) -> None:
        """Receive hellos on the token link, call the ranks together once all are here, check time limits.

        Raises:
            PartFailed: ranks did not come back in time; the supervisor restarts this process, or ends all.
        """
        while (received := self._tokens.receive()) is not None:
            if isinstance(received.message, RankHello) and self._is_of(received, self._tokens):
                self._hello("tokens", received.message, received)
        if self._membership.complete and self._membership.epoch is None:
            self._call_together()
        now = time.monotonic()
        self._watch_gathering(now)
        self._watch_ranks(now)

    def receive(self) -> Iterator[RankEvent]:
        """Yield the events of the control link; messages that concern only membership are handled here.

        Raises:
            PartFailed: a rank cannot continue, and no epoch has served yet.
        """
        while (received := self._control.receive()) is not None:
            if not self._is_of(received, self._control):
                continue
            match received.message:
                case StageFree() | Done() as part:
                    event = self._join(part)
                    if event is not None:
                        yield event
                case DiskReport() as report:
                    if self._lock_step is not None and report.epoch == self._membership.epoch:
                        yield report
                case GrammarReady() as ready:
                    if self._lock_step is not None and ready.epoch == self._membership.epoch:
                        yield ready
                case RankHello() as hello:
                    self._hello("control", hello, received)
                case RankReady() as ready:
                    everyone = self._ready(ready)
                    if everyone is not None:
                        yield everyone
                case RankFault() as fault:
                    self._fault(fault)
                case RankOutOfMemory(rank, step_id, epoch):
                    if self._lock_step is not None and epoch == self._membership.epoch:
                        self._lock_step.ran_out(step_id, rank)
                case RankXid() as error:
                    self._xids.setdefault(error.rank, LatestXid(time.monotonic)).hear(error.xid)
                    yield error
                case TracePart() | RankReport() as report:
                    yield report
        if self._gone:  # checked after the last messages, which may carry tokens or the reason
            self.end_epoch(
                f"rank {', '.join(map(str, sorted(self._gone)))} is gone: its connection has ended"
            )

    def _is_of(self, received: Received, link: Link) -> bool:
        """Return whether the message came from the rank that it names; drop it if not."""
        rank: int | None = getattr(received.message, "rank", None)
        if rank is None:
            is_own = received.peer in self._identities.values()
        elif isinstance(received.message, RankHello) or self._identities.get(rank) == rank_identity(rank):
            # Until a process is admitted, the rank in its identity is enough: a rank that cannot load reports
            # this before its first hello.
            is_own = received.peer.partition(b"/")[0] == rank_identity(rank)
        else:
            is_own = received.peer == self._identities.get(rank)
        if not is_own:
            link.drop(WireInvalid(f"{received.peer!r} sent a message as rank {rank}", reason="peer"))
        return is_own

    def _join(self, part: StageFree | Done) -> StageFree | Done | None:
        epoch = self._membership.epoch
        if self._lock_step is None or epoch is None or part.epoch < epoch:
            return None  # the report is of a lost epoch
        contradiction = self._lock_step.contradiction(part, epoch, self._vocab_size)
        if contradiction is not None:
            self._control.drop(WireInvalid(contradiction))
            return None
        unsampled = self._lock_step.unsampled(part) if isinstance(part, Done) else []
        if unsampled:  # no other report comes, so these requests would wait for ever
            self.end_epoch(f"step {part.step_id} ended without a token for {', '.join(unsampled[:8])}")
            return None
        return self._lock_step.join(part)

    def _ready(self, ready: RankReady) -> list[RankReady] | None:
        contradiction = implausible(ready)
        if contradiction is None and self._lock_step is not None and ready.epoch == self._membership.epoch:
            contradiction = f"rank {ready.rank} was ready already"
        if contradiction is not None:
            self._control.drop(WireInvalid(contradiction))
            return None
        everyone = self._membership.ready(ready)
        if everyone is not None:
            self._lock_step, self._vocab_size, self._has_served = LockStep(), ready.vocab_size, True
        return everyone

    # --- epochs -------------------------------------------------------------------------------------

    def _hello(self, name: LinkName, hello: RankHello, received: Received) -> None:
        peer = received.peer
        refusal = self._membership.refuses(hello)
        if refusal:
            if name == "control":
                _log.warning("%s is not admitted: %s", peer.decode(errors="replace"), refusal)
                with suppress(zmq.ZMQError):  # the peer has gone already
                    self._control.send(Shutdown(reason=refusal, refused=True), peer=peer)
            return
        # Such a rank continues to send hellos until its own controller is here.
        if self._membership.is_of_other_revision(hello):
            if hello.incarnation not in self._strangers:
                self._strangers.add(hello.incarnation)
                _log.info("rank %d of revision %s waits for its controller", hello.rank, hello.revision)
            return
        try:
            growth = self._rank_drops.growth(hello.rank, hello.incarnation, hello.dropped)
        except WireInvalid as error:
            (self._control if name == "control" else self._tokens).drop(error)
            return
        for (link, reason), messages in growth.items():
            self._on_dropped(_LINK_LABELS[link], reason, messages)
        if self._membership.replaces(hello):
            self.end_epoch(f"rank {hello.rank} was replaced")
        self._identities[hello.rank] = peer
        self._connections[name, hello.rank] = received.connection
        self._membership.hello(name, hello, time.monotonic())

    def _fault(self, fault: RankFault) -> None:
        """Handle the report of a rank that cannot continue.

        If no epoch has served yet, the manifest or the machine is to blame, and the process fails.
        """
        if fault.lost_epoch is None and not self._has_served:
            raise PartFailed(f"rank {fault.rank}: {fault.detail}")
        if fault.lost_epoch in (None, self._membership.epoch):
            self.end_epoch(f"rank {fault.rank}: {fault.detail}")

    def end_epoch(self, reason: str) -> None:
        """End the epoch, so that the next one begins; the router keeps the open requests, and submits them again."""
        reason += self._recent_xids(reason)
        if self._membership.epoch is not None:
            _log.warning("epoch %d has ended: %s; waiting for all ranks", self._membership.epoch, reason)
        self._membership.lose()
        self._gone.clear()
        if self._lock_step is not None:
            self._lock_step = None
            self._on_lost(reason)
        self._xids.clear()

    def _recent_xids(self, reason: str) -> str:
        """Return the recent GPU errors that `reason` does not name yet, as text to append to it."""
        heard = [(rank, latest.recent()) for rank, latest in sorted(self._xids.items())]
        return "".join(
            f"; the GPU of rank {rank} reported {xid_text(one[0])} {one[1]:.1f} s before"
            for rank, one in heard
            if one is not None and xid_text(one[0]) not in reason
        )

    def _call_together(self) -> None:
        is_alone = self._membership.expected == 1
        host = self._rendezvous_host
        rendezvous = self._membership.rendezvous("" if is_alone else f"tcp://{host}:{free_port(host)}")
        write_epoch(self._epoch_file, rendezvous.epoch)
        _log.info("epoch %d begins", rendezvous.epoch)
        self.send(rendezvous)

    def _watch_gathering(self, now: float) -> None:
        """Log which ranks are missing, and fail if a later gathering takes too long.

        The first gathering has no limit here, because the supervisor's limit applies to it.
        """
        if self._lock_step is not None:
            self._gathering_since = self._logged_at = now
            return
        missing, limit = self._membership.missing, self.gather_seconds
        named = ", ".join(map(str, missing))
        if self._has_served and now - self._gathering_since > limit:
            raise PartFailed(f"rank {named} did not come back in {limit:g} s (lifecycle.readySeconds)")
        # While all ranks load for the first time, no rank waits for another.
        if now - self._logged_at > LOG_SECONDS and (
            self._has_served or len(missing) < self._membership.expected
        ):
            self._logged_at = now
            _log.warning("waiting for rank %s since %.0f s", named, now - self._gathering_since)

    def _watch_ranks(self, now: float) -> None:
        """End the epoch if a step does not end, or if an idle rank is silent."""
        was_away, self._turned_at = now - self._turned_at > AWAY_SECONDS, now
        if self._lock_step is None:
            return
        if was_away or not self._lock_step.is_idle:
            self._busy_at = now
        overdue, silent = self._lock_step.overdue(now), self._membership.silent(now, self._busy_at)
        if overdue is not None and not was_away:
            self.end_epoch(f"step {overdue} does not end")
        elif silent:
            self.end_epoch(f"no heartbeat of rank {', '.join(map(str, silent))}")
