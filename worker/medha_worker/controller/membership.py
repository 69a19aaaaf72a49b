"""Which ranks are here, and when they begin an epoch together: decisions only.

An epoch begins when every rank has been heard on both links. It is lost when a rank says so, when its connection ends,
or when it was replaced by another process; then the next one begins as soon as all are here again. Ranks that survive
keep their weights. A process that was replaced and comes back, because it was only stopped or cut off, is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from medha.cost.profile import Profile
from medha.wire.messages import Meet, RankHello, RankReady

LinkName = Literal["control", "tokens"]

SILENT_SECONDS = 5.0
"""A rank that has nothing to do and says nothing for longer is cut off: it says hello every second."""

# What is believed of a rank at most: far above any machine, and far below what the controller's arithmetic can bear.
MOST_BLOCKS = 2**27  # of a lane; the controller's ledger takes some bytes for each
MOST_TOKENS = 2**31 - 1  # ids are int32
MOST_HEADS = 2**16
MOST_ELEMENT_BYTES = 16
MOST_FLOPS = 1e30
MOST_BYTES_PER_SECOND = 1e15
MOST_SECONDS = 86_400.0


@dataclass(slots=True)
class _Rank:
    incarnation: str
    heard_at: float
    heard_on: set[LinkName] = field(default_factory=set)
    ready: RankReady | None = None  # for the current epoch

    @property
    def is_here(self) -> bool:
        return self.heard_on == {"control", "tokens"}


class Membership:
    """The ranks of one replica, as its controller knows them."""

    def __init__(
        self, ranks: int, first_epoch: int = 0, oldest_epoch: int = 0, *, revision: str = ""
    ) -> None:
        """`first_epoch` begins next; who was in an epoch before `oldest_epoch` belongs to pods that were replaced."""
        self.expected = ranks
        self._revision = revision
        self._oldest_epoch = oldest_epoch
        self._ranks: dict[int, _Rank] = {}
        self._replaced: set[tuple[int, str]] = set()  # rank, incarnation
        self._next_epoch = first_epoch
        self.epoch: int | None = None
        """The epoch in which the ranks meet or have met; None while they gather."""

    @property
    def complete(self) -> bool:
        """Whether every rank has been heard on both links: a ROUTER cannot send to who never spoke."""
        heard = [rank for rank in self._ranks.values() if rank.is_here]
        return len(heard) == self.expected

    @property
    def missing(self) -> list[int]:
        """Ranks that have not been heard since the last epoch, while they gather; in one, those that are not ready yet."""
        here = [
            rank
            for rank, known in self._ranks.items()
            if (known.is_here if self.epoch is None else known.ready is not None)
        ]
        return [rank for rank in range(self.expected) if rank not in here]

    def replaces(self, hello: RankHello) -> bool:
        """Whether the epoch is lost by who says hello, because it is not the process that was here before."""
        known = self._ranks.get(hello.rank)
        return self.epoch is not None and known is not None and known.incarnation != hello.incarnation

    def refuses(self, hello: RankHello) -> str:
        """Why who says hello must not take part, because another process has its place; empty if it may."""
        if (hello.rank, hello.incarnation) in self._replaced:
            return f"another process is rank {hello.rank} now"
        if hello.last_epoch is not None and hello.last_epoch < self._oldest_epoch:
            return (
                f"it was last in epoch {hello.last_epoch}, and this replica's pods begin with epoch {self._oldest_epoch}: "
                "all of them were replaced since"
            )
        return ""

    def is_of_other_revision(self, hello: RankHello) -> bool:
        """Whether who says hello waits for another controller, which is to replace this one: revisions never mix."""
        return bool(self._revision and hello.revision) and self._revision != hello.revision

    def hello(self, link: LinkName, hello: RankHello, now: float) -> None:
        """A rank was heard."""
        assert not self.replaces(hello), "the epoch goes first"
        assert not self.refuses(hello)
        assert not self.is_of_other_revision(hello)
        known = self._ranks.get(hello.rank)
        if known is None or known.incarnation != hello.incarnation:
            if known is not None:
                self._replaced.add((hello.rank, known.incarnation))
            known = self._ranks[hello.rank] = _Rank(hello.incarnation, now)
        known.heard_at = now
        known.heard_on.add(link)

    def silent(self, now: float, idle_since: float) -> list[int]:
        """Ranks that were not heard for too long, although they had nothing to do since then."""
        return [
            rank
            for rank, known in sorted(self._ranks.items())
            if now - max(known.heard_at, idle_since) > SILENT_SECONDS
        ]

    def lose(self) -> None:
        """The epoch is over: nobody is ready any more, and everybody has to be heard again, for one may have gone."""
        self.epoch = None
        for rank in self._ranks.values():
            rank.ready = None
            rank.heard_on.clear()

    def meet(self, rendezvous: str) -> Meet:
        """Begin the next epoch; all are here."""
        assert self.complete
        assert self.epoch is None
        self.epoch = self._next_epoch
        self._next_epoch += 1
        return Meet(self.epoch, rendezvous)

    def ready(self, ready: RankReady) -> list[RankReady] | None:
        """A rank is ready for an epoch; all of them in order once the last one is, for the current one."""
        if ready.epoch != self.epoch or ready.rank not in self._ranks:
            return None
        self._ranks[ready.rank].ready = ready
        found = [self._ranks[rank].ready for rank in sorted(self._ranks)]
        everyone = [one for one in found if one is not None]
        return everyone if len(everyone) == self.expected else None


def implausible(ready: RankReady) -> str | None:
    """What no rank can have measured of itself, and no replica can be made of."""
    profile = ready.profile
    numbers: list[tuple[str, float, float, float]] = [  # with the least and the most that is believed
        ("block_size_tokens", ready.block_size_tokens, 1, MOST_TOKENS),
        ("kv_blocks", ready.kv_blocks, 1, MOST_BLOCKS),
        ("max_model_len", ready.max_model_len, 1, MOST_TOKENS),
        ("vocab_size", ready.vocab_size, 1, MOST_TOKENS),
        ("query_heads", ready.query_heads, 0, MOST_HEADS),
        ("kv_heads", ready.kv_heads, 0, MOST_HEADS),
        ("element_bytes", ready.element_bytes, 1, MOST_ELEMENT_BYTES),
        ("linear_flops_per_token", ready.linear_flops_per_token, 0, MOST_FLOPS),
        ("attention_flops_per_pair", ready.attention_flops_per_pair, 0, MOST_FLOPS),
        ("link_bytes_per_second", ready.link_bytes_per_second, 0, MOST_BYTES_PER_SECOND),
        ("step_seconds", profile.step_seconds, 0, MOST_SECONDS),
        ("linear_seconds_per_token", profile.linear_seconds_per_token, 0, MOST_SECONDS),
        ("attention_seconds_per_pair", profile.attention_seconds_per_pair, 0, MOST_SECONDS),
        ("sequence_seconds", profile.sequence_seconds, 0, MOST_SECONDS),
    ]
    for name, points in (("token_points", profile.token_points), ("query_points", profile.query_points)):
        for tokens, seconds in points:
            numbers += [(name, tokens, 1, MOST_TOKENS), (name, seconds, 0, MOST_SECONDS)]
    for name, number, least, most in numbers:
        if not least <= number <= most:  # nor is it if it is no number
            return f"rank {ready.rank} says {name} {number}, expected {least:g} to {most:g}"
    try:
        Profile.of_warm_up(profile)
    except ValueError as error:
        return f"rank {ready.rank} has measured what is no profile: {error}"
    return None
