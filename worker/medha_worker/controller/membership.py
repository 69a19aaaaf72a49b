"""Membership of the ranks of a replica, and the beginning and loss of their epochs. Decisions only, no I/O.

An epoch begins when every rank has been heard on both links. It is lost when a rank reports that it has lost it,
when a rank's connection ends, or when another process has replaced a rank. The next epoch begins as soon as all
ranks have been heard again. Ranks that survive keep their weights. A process that was only stopped or cut off, and
comes back after it was replaced, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from medha.cost.cost_profile import Profile
from medha.topology import Topology
from medha.wire.messages import RankHello, RankReady, Rendezvous
from medha_links.key_files import is_key

LinkName = Literal["control", "tokens"]

SILENT_SECONDS = 5.0
"""Longest silence of an idle rank before it counts as cut off; ranks send a hello every second."""

# Largest plausible values: far above any machine, and far below the limits of the controller's arithmetic.
MOST_BLOCKS = 2**27  # per lane; the controller's ledger takes some bytes for each
MOST_TOKENS = 2**31 - 1  # ids are int32
MOST_HEADS = 2**16
MOST_ELEMENT_BYTES = 16
MOST_BLOCK_BYTES = 2**40
MOST_FLOPS = 1e30
MOST_BYTES_PER_SECOND = 1e15
MOST_SECONDS = 86_400.0
_HASH_KEY = re.compile("([0-9a-f]{64})?")  # empty: none yet

_Bounded = tuple[str, float, float, float]
"""A value of a report: its name, the value, and its smallest and largest plausible value."""


@dataclass(slots=True)
class _Rank:
    incarnation: str
    last_seen_at: float
    seen_on: set[LinkName] = field(default_factory=set)
    ready: RankReady | None = None  # for the current epoch

    @property
    def is_here(self) -> bool:
        return self.seen_on == {"control", "tokens"}


class Membership:
    """The ranks of one replica, as known to its controller."""

    def __init__(
        self, ranks: int, first_epoch: int = 0, oldest_epoch: int = 0, *, revision: str = ""
    ) -> None:
        """Begin without ranks; `first_epoch` begins next.

        Ranks of epochs before `oldest_epoch` belong to pods that were replaced.
        """
        self.expected = ranks
        self._revision = revision
        self._oldest_epoch = oldest_epoch
        self._ranks: dict[int, _Rank] = {}
        self._replaced: set[tuple[int, str]] = set()  # rank, incarnation
        self._next_epoch = first_epoch
        self.epoch: int | None = None
        """The epoch of the current or last rendezvous; None while the ranks gather."""

    @property
    def complete(self) -> bool:
        """True if every rank was heard on both links; a ROUTER socket can only send to peers it has heard."""
        here = [rank for rank in self._ranks.values() if rank.is_here]
        return len(here) == self.expected

    @property
    def missing(self) -> list[int]:
        """Ranks that are awaited: to be heard again while the ranks gather, to become ready in an epoch."""
        here = [
            rank
            for rank, known in self._ranks.items()
            if (known.is_here if self.epoch is None else known.ready is not None)
        ]
        return [rank for rank in range(self.expected) if rank not in here]

    def replaces(self, hello: RankHello) -> bool:
        """Return whether the epoch is lost because the sender of `hello` has replaced the rank's process."""
        known = self._ranks.get(hello.rank)
        return self.epoch is not None and known is not None and known.incarnation != hello.incarnation

    def refuses(self, hello: RankHello) -> str:
        """Return why the sender of `hello` must not take part, because it was replaced; empty if it may."""
        if (hello.rank, hello.incarnation) in self._replaced:
            return f"another process is rank {hello.rank} now"
        if hello.last_epoch is not None and hello.last_epoch < self._oldest_epoch:
            return (
                f"its last epoch is {hello.last_epoch}, and this replica's pods begin with epoch {self._oldest_epoch}: "
                "all of them were replaced since"
            )
        return ""

    def is_of_other_revision(self, hello: RankHello) -> bool:
        """Return whether `hello` comes from another revision. Revisions never mix.

        Its sender waits for the controller of its own revision, which is to replace this one.
        """
        return bool(self._revision and hello.revision) and self._revision != hello.revision

    def hello(self, link: LinkName, hello: RankHello, now: float) -> None:
        """Record that a rank was heard on a link."""
        assert not self.replaces(hello), "the epoch goes first"
        assert not self.refuses(hello)
        assert not self.is_of_other_revision(hello)
        known = self._ranks.get(hello.rank)
        if known is None or known.incarnation != hello.incarnation:
            if known is not None:
                self._replaced.add((hello.rank, known.incarnation))
            known = self._ranks[hello.rank] = _Rank(hello.incarnation, now)
        known.last_seen_at = now
        known.seen_on.add(link)

    def silent(self, now: float, idle_since: float) -> list[int]:
        """Return the ranks that were not heard for more than SILENT_SECONDS although they were idle."""
        return [
            rank
            for rank, known in sorted(self._ranks.items())
            if now - max(known.last_seen_at, idle_since) > SILENT_SECONDS
        ]

    def lose(self) -> None:
        """End the epoch: no rank is ready, and each must be heard again, because some may have gone."""
        self.epoch = None
        for rank in self._ranks.values():
            rank.ready = None
            rank.seen_on.clear()

    def rendezvous(self, rendezvous: str) -> Rendezvous:
        """Begin the next epoch; all ranks must be here."""
        assert self.complete
        assert self.epoch is None
        self.epoch = self._next_epoch
        self._next_epoch += 1
        return Rendezvous(self.epoch, rendezvous)

    def ready(self, ready: RankReady) -> list[RankReady] | None:
        """Record that a rank is ready; return the reports of all ranks once the last one is ready.

        Reports of other epochs are ignored. The list is in the order of ranks.
        """
        if ready.epoch != self.epoch or ready.rank not in self._ranks:
            return None
        self._ranks[ready.rank].ready = ready
        found = [self._ranks[rank].ready for rank in sorted(self._ranks)]
        everyone = [one for one in found if one is not None]
        return everyone if len(everyone) == self.expected else None


def implausible(ready: RankReady) -> str | None:
    """Return which value of a rank's report is impossible or unusable for a replica, or None."""
    if ready.disk_tier is not None and not _HASH_KEY.fullmatch(ready.disk_tier.hash_key):
        return f"rank {ready.rank} reports an invalid hash_key of its files"
    if ready.store is not None and not _HASH_KEY.fullmatch(ready.store.hash_key):
        return f"rank {ready.rank} reports an invalid hash_key of the store"
    if ready.peer is not None:
        peer = ready.peer
        if not (peer.endpoint.startswith("tcp://") and is_key(peer.public_key.encode())):
            return f"rank {ready.rank} offers KV at {peer.endpoint:.80}, which is not tcp:// with a valid key"
    for name, number, least, most in (
        *_model_numbers(ready),
        *_profile_numbers(ready),
        *_tier_numbers(ready),
    ):
        if not least <= number <= most:  # also true for NaN
            return f"rank {ready.rank} reports {name} {number}, expected {least:g} to {most:g}"
    try:
        Profile.of_warm_up(ready.profile)
    except ValueError as error:
        return f"rank {ready.rank} reports an unusable profile: {error}"
    return None


def _model_numbers(ready: RankReady) -> Iterator[_Bounded]:
    yield "block_size_tokens", ready.block_size_tokens, 1, MOST_TOKENS
    yield "kv_blocks", ready.kv_blocks, 1, MOST_BLOCKS
    yield "window_blocks", ready.window_blocks, 0, MOST_BLOCKS
    yield "widest_window_tokens", ready.widest_window_tokens, min(ready.window_blocks, 1), MOST_TOKENS
    yield "max_model_len", ready.max_model_len, 1, MOST_TOKENS
    yield "vocab_size", ready.vocab_size, 1, MOST_TOKENS
    yield "query_heads", ready.query_heads, 0, MOST_HEADS
    yield "kv_heads", ready.kv_heads, 0, MOST_HEADS
    yield "kv_tensors", ready.kv_tensors, 1, 2
    yield "element_bytes", ready.element_bytes, 1, MOST_ELEMENT_BYTES
    yield "kv_element_bytes", ready.kv_element_bytes, 0, MOST_ELEMENT_BYTES
    yield "linear_flops_per_token", ready.linear_flops_per_token, 0, MOST_FLOPS
    yield "attention_flops_per_pair", ready.attention_flops_per_pair, 0, MOST_FLOPS
    yield "link_bytes_per_second", ready.link_bytes_per_second, 0, MOST_BYTES_PER_SECOND


def _profile_numbers(ready: RankReady) -> Iterator[_Bounded]:
    profile = ready.profile
    yield "step_seconds", profile.step_seconds, 0, MOST_SECONDS
    yield "linear_seconds_per_token", profile.linear_seconds_per_token, 0, MOST_SECONDS
    yield "attention_seconds_per_pair", profile.attention_seconds_per_pair, 0, MOST_SECONDS
    yield "sequence_seconds", profile.sequence_seconds, 0, MOST_SECONDS
    yield "head_seconds_per_row", profile.head_seconds_per_row, 0, MOST_SECONDS
    yield "mask_seconds_per_row", profile.mask_seconds_per_row, 0, MOST_SECONDS
    yield "window_tokens", profile.window_tokens, 1, MOST_TOKENS
    yield "window_share", profile.window_share, 0, 1
    if ready.draft_costs is not None:
        for name, seconds in asdict(ready.draft_costs).items():
            yield f"draft_costs.{name}", seconds, 0, MOST_SECONDS
    for name, points in (("token_points", profile.token_points), ("query_points", profile.query_points)):
        for tokens, seconds in points:
            yield name, tokens, 1, MOST_TOKENS
            yield name, seconds, 0, MOST_SECONDS


def _tier_numbers(ready: RankReady) -> Iterator[_Bounded]:
    tier, streaming, disk = ready.host_tier, ready.streaming, ready.disk_tier
    if tier is not None:
        yield "host_tier.blocks", tier.blocks, 1, MOST_BLOCKS
        yield "host_tier.block_bytes", tier.block_bytes, 1, MOST_BLOCK_BYTES
        yield "host_tier.fetch_seconds_per_block", tier.fetch_seconds_per_block, 0, MOST_SECONDS
        yield "host_tier.offload_seconds_per_block", tier.offload_seconds_per_block, 0, MOST_SECONDS
    if streaming is not None:
        yield "streaming.blocks", streaming.blocks, 1, MOST_BLOCKS
        yield "streaming.block_bytes", streaming.block_bytes, 1, MOST_BLOCK_BYTES
        yield "streaming.read_seconds_per_block", streaming.read_seconds_per_block, 0, MOST_SECONDS
    if disk is not None:
        yield "disk_tier.blocks", disk.blocks, 1, MOST_BLOCKS
        yield "disk_tier.access_seconds", disk.access_seconds, 0, MOST_SECONDS
        yield "disk_tier.read_seconds_per_block", disk.read_seconds_per_block, 0, MOST_SECONDS


def differing_scales(ranks: Sequence[RankReady], topology: Topology) -> str | None:
    """Return which two ranks hold K and V of the same layers and heads with different scales, or None.

    `ranks` are in their order, and complete.
    """
    first_of: dict[tuple[int, int], RankReady] = {}
    for ready in ranks:
        here = topology.coordinates(ready.rank)
        # If tensor ranks outnumber KV heads, several hold the same one.
        first_head = here.tensor * max(ready.kv_heads, 1) // topology.tensor
        first = first_of.setdefault((here.stream, first_head), ready)
        if first.kv_scales != ready.kv_scales:
            return (
                f"ranks {first.rank} and {ready.rank} hold the same KV heads with different scales "
                f"({first.kv_scales or 'none'}, {ready.kv_scales or 'none'}), so that texts would depend on the rank; "
                "give all ranks the same checkpoint and release, or set spec.kvCache.dtype to auto"
            )
    return None
