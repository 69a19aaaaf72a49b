"""The limits of a router, in sequences and seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoutingLimits:
    """Limits that a router's core applies."""

    max_waiting: int = 4096
    """Most sequences that wait here; more are answered `overloaded`."""
    lookahead_seconds: float = 1.0
    """Work that goes before a sequence in a replica, per lane, below which it is sent there.

    It must outlast the time between two announcements, so that no lane waits for work. More would only be
    queued there, where it could not go to another replica.
    """
    silence_seconds: float = 2.0
    """Seconds without a message of a replica after which it counts as lost. Its heartbeats come every 0.5 s."""
    late_seconds: float = 0.5
    """Longest part of the time between two ticks that counts as a replica's silence; the router was late itself."""
    stopped_seconds: float = 2.0
    """Least time between two ticks after which the router counts as having been stopped.

    Replicas that are lost by then, or as long after, count against no sequence: they end the connection of a router that
    does not answer for 4 s.
    """
    unserved_seconds: float = 60.0
    """Seconds that an accepted sequence waits for a replica to come back, before it ends as `unavailable`."""
    recovery_seconds: float = 3600.0
    """The same while a replica of its model announces that it is not ready: it is restarting and loads its weights.

    The manifest says how long that may take, and the controller enforces it; this is the upper bound in any
    case.
    """
    name_seconds: float = 180.0
    """Seconds after a replica's last announcement for which requests wait for its model although no manifest names it.

    Kubelets may take two minutes to bring a new model's name to routers, and its first replica may be gone before that.
    """
    fetch_seconds: float = 10.0
    """Seconds after which a bundle that has not arrived is requested again."""
    bundle_seconds: float = 600.0
    """Seconds for which a bundle is kept that no replica announces and no open sequence needs.

    A replica that restarts within this time need not send it again.
    """
    max_losses: int = 2
    """Losses in a row after which a sequence is taken for the cause of its replicas' failures, and fails.

    A loss is a failure of the replica during a step that contained the sequence, before it sampled a token
    for it. From the first loss on the sequence is a suspect. A replica gets one suspect at a time, so that
    the second loss has no other suspect. The third death of a process within a minute ends the replica.
    If a whole replica is lost, nobody knows what its steps contained: of such losses in a row, the first one
    counts only for a sequence that is a suspect already.
    """
    trial_seconds: float = 30.0
    """Seconds after which a sequence is no longer suspected of killing the replica that it was sent to.

    If that replica is lost later, the loss counts as the sequence's first. A process that needs longer to die
    cannot die three times in a minute.
    """
    max_attempts: int = 8
    """Attempts in a row that may end with their replicas for any reason.

    An attempt that samples a token and lasts for `trial_seconds` ends the row. A sequence that has lost half of
    these attempts is a suspect, too, whatever it has sampled: it may kill replicas after its first token.
    """
