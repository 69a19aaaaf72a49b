"""Placement of a request's KV: which lane holds which token positions.

A short request lies on one lane. A long one is cut into shards: lanes are taken in the order of their free
KV, each holds at most `tokens_per_lane` of the prompt, or an equal part of it if that is more, and the next lane
joins only when the one before is full.
The reservation for the output is striped: each stripe goes to the lane that holds the fewest tokens, so
that no shard fills first and the attention of a decode takes equally long everywhere
(docs/design.md#placement-of-kv).

All of it is decided at admission, for all lanes at once or not at all. A waiting request holds nothing, so
two long requests can never each hold what the other needs (lane-by-lane growth deadlocks in exactly that
way).

On a lane, the tokens of a request lie densely, in the order of their positions: the *local* position of a
token is the number of earlier tokens on the same lane. Segments begin at multiples of the block size, so a
block of a lane always holds a whole block of the sequence, and an entry that is cached by the content of a
block is valid in any map.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

STRIPE_TOKENS = 256
"""Output tokens in a stripe; at least one block."""
PROMPT_STRIPE_TOKENS = 2048
"""Tokens in a stripe of a prompt that several lanes compute together."""
MAX_STRIPES = 128
"""Largest number of stripes of an output. Longer outputs get wider stripes, so that a map fits into a step message."""
MAX_SEGMENTS_SENT = 8
"""Most segments that a step message lists. More are sent as stripings, of which a map has few however long it is."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Token positions `start .. stop` (exclusive) lie on `lane`."""

    lane: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Striping:
    """Token positions `start .. stop` (exclusive), striped over `lanes` round-robin; the last stripe may be shorter."""

    lanes: tuple[int, ...]
    start: int
    stop: int
    stripe_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a range of positions that lies on one lane, at local positions from `local_start` on."""

    lane: int
    start: int
    stop: int
    local_start: int


@dataclass(slots=True)  # not frozen, for speed: every admission makes one
class ShardMap:
    """A partition of the positions `0 .. tokens` of one request into segments, in ascending order. Immutable.

    `version` rises by one with each growth, which makes a new map; what is already placed never moves.
    """

    segments: tuple[Segment, ...]
    version: int = 0
    _starts: list[int] = field(init=False, repr=False, compare=False)
    _local_starts: list[int] = field(init=False, repr=False, compare=False)
    _tokens_on: dict[int, int] = field(init=False, repr=False, compare=False)
    _segments_on: dict[int, list[int]] = field(init=False, repr=False, compare=False)  # indices, ascending
    _encoded: bytes = field(default=b"", init=False, repr=False, compare=False)  # cache of `encoded`

    def __post_init__(self) -> None:
        if len(self.segments) == 1:  # nearly always
            segment = self.segments[0]
            assert segment.start == 0 < segment.stop, f"{segment} begins nowhere"
            self._starts, self._local_starts, self._tokens_on = [0], [0], {segment.lane: segment.stop}
            self._segments_on = {segment.lane: [0]}
            return
        self._starts, self._local_starts, self._tokens_on, self._segments_on = [], [], {}, {}
        position = 0
        for index, segment in enumerate(self.segments):
            assert segment.start == position < segment.stop, f"{self.segments} is no partition"
            position = segment.stop
            held = self._tokens_on.get(segment.lane, 0)
            self._starts.append(segment.start)
            self._local_starts.append(held)
            self._tokens_on[segment.lane] = held + segment.stop - segment.start
            self._segments_on.setdefault(segment.lane, []).append(index)

    @property
    def tokens(self) -> int:
        """Number of positions that have a place."""
        return self.segments[-1].stop if self.segments else 0

    @property
    def owner(self) -> int:
        """The lane that runs the linear layers; it holds position 0."""
        return self.segments[0].lane

    @property
    def lanes(self) -> tuple[int, ...]:
        """Every lane that holds a part, in the order in which they join."""
        return tuple(self._tokens_on)

    @property
    def encoded(self) -> bytes:
        """The version and every segment, in a form that differs for any two maps; `digest_of` reads it."""
        if not self._encoded:
            runs = "".join([f"{one.lane},{one.start},{one.stop};" for one in self.segments])
            self._encoded = f"{self.version}:{runs}|".encode()
        return self._encoded

    def tokens_on(self, lane: int) -> int:
        """Return the tokens to reserve on a lane; 0 if the request has nothing there."""
        return self._tokens_on.get(lane, 0)

    def locate(self, position: int) -> tuple[int, int]:
        """Return the lane and the local position of a token."""
        assert 0 <= position < self.tokens, f"position {position} of {self.tokens}"
        index = bisect_right(self._starts, position) - 1
        return self.segments[index].lane, self._local_starts[index] + position - self._starts[index]

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """Yield the range `start .. stop` (exclusive) cut at the borders of lanes, in ascending order."""
        assert 0 <= start <= stop <= self.tokens, f"positions {start} to {stop} of {self.tokens}"
        index = max(bisect_right(self._starts, start) - 1, 0)
        while start < stop:
            segment = self.segments[index]
            end = min(stop, segment.stop)
            yield Piece(segment.lane, start, end, self._local_starts[index] + start - segment.start)
            start = end
            index += 1

    def local_lengths(self, computed: int) -> dict[int, int]:
        """Return the KV tokens on each lane that holds any, once positions `0 .. computed` have KV.

        Each decode of a striped prompt calls it, so it takes O(lanes log segments).
        """
        if computed <= 0:
            return {}
        last = bisect_right(self._starts, computed - 1) - 1  # the segment of the last position
        lengths: dict[int, int] = {}
        for lane, indices in self._segments_on.items():
            before = bisect_right(indices, last)
            if before:
                index = indices[before - 1]
                stop = min(self.segments[index].stop, computed)
                lengths[lane] = self._local_starts[index] + stop - self._starts[index]
        return lengths

    def participants(self, computed: int) -> tuple[int, ...]:
        """Return the lanes that take part in attention once `computed` tokens have KV, the owner first.

        Lanes join progressively: a lane that holds only later positions does nothing yet.
        """
        lanes = dict.fromkeys([self.owner])
        for segment in self.segments:
            if segment.start >= computed or len(lanes) == len(self._tokens_on):
                break
            lanes[segment.lane] = None
        return tuple(lanes)

    def cut(
        self, shared_tokens: int, tokens: int, free_by_lane: Sequence[int], *, block_size_tokens: int
    ) -> ShardMap | None:
        """Return a map of `tokens` positions that equals this one for `shared_tokens`; None if KV is short.

        `free_by_lane` (tokens) includes the KV of the shared positions.
        """
        segments = [Segment(p.lane, p.start, p.stop) for p in self.pieces(0, max(shared_tokens, 1))]
        capacity_by_lane = {
            lane: _whole_blocks(free, block_size_tokens) for lane, free in enumerate(free_by_lane)
        }
        for segment in segments:
            capacity_by_lane[segment.lane] -= _up_to_blocks(segment.stop - segment.start, block_size_tokens)
        if min(capacity_by_lane.values()) < 0:
            return None
        if not _append_stripes(segments, tokens, capacity_by_lane, self.lanes, block_size_tokens):
            return None
        return ShardMap(tuple(segments))

    def grown(self, tokens: int, free_by_lane: Sequence[int], *, block_size_tokens: int) -> ShardMap | None:
        """Return this map with places for `tokens` positions, or None if the lanes have too little free KV (tokens).

        The empty part of the last block is used first, then the lanes that already take part, so that a
        growing output does not couple more lanes than necessary.
        """
        if tokens <= self.tokens:
            return self
        capacity_by_lane = {
            lane: _whole_blocks(free, block_size_tokens) for lane, free in enumerate(free_by_lane)
        }
        segments = list(self.segments)
        if not _append_stripes(segments, tokens, capacity_by_lane, self.lanes, block_size_tokens):
            return None
        return ShardMap(tuple(segments), self.version + 1)


def stripings_of(segments: Sequence[Segment]) -> tuple[Striping, ...]:
    """Return the same placement as stripings: their number grows with the lanes, not with the length of the prompt.

    When a lane is full, a new striping over the other lanes begins. The stripes of the output, which are
    shorter, also begin a new striping.
    """
    stripings: list[Striping] = []
    index = 0
    while index < len(segments):
        first = segments[index]
        stripe = first.stop - first.start
        lanes = [first.lane]
        end = index + 1
        while end < len(segments) and segments[end - 1].stop - segments[end - 1].start == stripe:
            lane, tokens = segments[end].lane, segments[end].stop - segments[end].start
            if end - index == len(lanes) and lane not in lanes:
                lanes.append(lane)
            elif lane != lanes[(end - index) % len(lanes)]:
                break
            if tokens > stripe:
                lanes = lanes[: end - index]
                break
            end += 1
        stripings.append(Striping(tuple(lanes), first.start, segments[end - 1].stop, stripe))
        index = end
    return tuple(stripings)


def segments_of(stripings: Sequence[Striping]) -> tuple[Segment, ...]:
    """Return the segments that `stripings_of` has encoded."""
    return tuple(
        Segment(
            striping.lanes[turn % len(striping.lanes)],
            start,
            min(start + striping.stripe_tokens, striping.stop),
        )
        for striping in stripings
        for turn, start in enumerate(range(striping.start, striping.stop, striping.stripe_tokens))
    )


def digest_of(maps: Mapping[str, ShardMap]) -> bytes:
    """Return an eight-byte digest of the maps of these sequences, including their order, versions and lengths.

    Ledgers that have applied the same operations in the same order have the same digest.
    """
    # The names are quoted, so that different lists never give the same text.
    digest = blake2b(repr(list(maps)).encode(), digest_size=8)
    digest.update(b"".join([shards.encoded for shards in maps.values()]))
    return digest.digest()


def spreads(
    prompt_tokens: int, reserved_tokens: int, *, lanes: int, tokens_per_lane: int, lane_tokens: int
) -> bool:
    """Return whether a request is cut over lanes: its prompt exceeds one lane's share, or its reservation a whole lane."""
    fair_share = -(-prompt_tokens // lanes)  # the smallest limit per lane that leaves room for the prompt
    return prompt_tokens > max(tokens_per_lane, fair_share) or reserved_tokens > lane_tokens


def shard_tokens(prompt_tokens: int, *, lanes: int, tokens_per_lane: int, block_size_tokens: int) -> int:
    """Return the most tokens of a long prompt on one lane, in whole blocks."""
    fair_share = -(-prompt_tokens // lanes)
    return max(
        _whole_blocks(tokens_per_lane, block_size_tokens), _up_to_blocks(fair_share, block_size_tokens)
    )


def place(
    prompt_tokens: int,
    reserved_tokens: int,
    free_by_lane: Sequence[int],
    *,
    block_size_tokens: int,
    tokens_per_lane: int,
    lane_tokens: int,
    pending_seconds: Sequence[float] | None = None,
    preferred: Sequence[int] = (),
) -> ShardMap | None:
    """Return places for a request of `prompt_tokens` that reserves `reserved_tokens` in all, or None if it must wait.

    A request whose prompt fits one shard goes to the lane with the least `pending_seconds` of prefill among
    those with enough free KV (ties: most free KV). A longer one takes lanes in the order of free KV.
    `preferred` lanes hold a cached prefix of the request; those with enough free KV come first, in the given
    order.

    Args:
        free_by_lane: free KV of each lane, tokens.
        tokens_per_lane: most prompt tokens of one request on a lane, unless an equal split over all lanes needs more.
        lane_tokens: KV tokens of a whole lane; a request that is larger is cut even below `tokens_per_lane`.
    """
    assert 0 < prompt_tokens <= reserved_tokens
    size = block_size_tokens
    lanes = len(free_by_lane)
    capacity_by_lane = {lane: _whole_blocks(free, size) for lane, free in enumerate(free_by_lane)}
    rank = {lane: index for index, lane in enumerate(preferred)}
    if not spreads(
        prompt_tokens,
        reserved_tokens,
        lanes=lanes,
        tokens_per_lane=tokens_per_lane,
        lane_tokens=lane_tokens,
    ):
        seconds = pending_seconds or [0.0] * len(capacity_by_lane)
        with_room = [lane for lane, room in capacity_by_lane.items() if room >= reserved_tokens]
        if not with_room:
            return None
        lane = min(
            with_room,
            key=lambda lane: (rank.get(lane, len(rank)), seconds[lane], -capacity_by_lane[lane], lane),
        )
        return ShardMap((Segment(lane, 0, reserved_tokens),))

    cap = shard_tokens(prompt_tokens, lanes=lanes, tokens_per_lane=tokens_per_lane, block_size_tokens=size)
    segments: list[Segment] = []
    order = sorted(
        capacity_by_lane, key=lambda lane: (rank.get(lane, len(rank)), -capacity_by_lane[lane], lane)
    )
    position = 0
    for lane in order:
        if position == prompt_tokens:
            break
        stop = min(position + min(cap, capacity_by_lane[lane]), prompt_tokens)
        if stop > position:
            segments.append(Segment(lane, position, stop))
            capacity_by_lane[lane] -= _up_to_blocks(stop - position, size)
            position = stop
    if position < prompt_tokens:
        return None
    joined = tuple(segment.lane for segment in segments)
    if not _append_stripes(segments, reserved_tokens, capacity_by_lane, (*joined, *order), size):
        return None
    return ShardMap(tuple(segments))


def striped_map(
    prompt_tokens: int,
    reserved_tokens: int,
    free_by_lane: Sequence[int],
    lanes: Sequence[int],
    *,
    stripe_tokens: int,
    block_size_tokens: int,
) -> ShardMap | None:
    """Return a map whose prompt is striped over `lanes` round-robin, for context parallelism; None if KV is short.

    At any point of the prefill each lane holds an equal part. `stripe_tokens` are whole blocks. A full lane
    is skipped, and the map is then no longer regular (`is_striped`).
    """
    capacity_by_lane = {
        lane: _whole_blocks(free, block_size_tokens) for lane, free in enumerate(free_by_lane)
    }
    segments: list[Segment] = []
    position = turn = 0
    while position < prompt_tokens:
        if not any(capacity_by_lane[lane] for lane in lanes):
            return None
        lane = lanes[turn % len(lanes)]
        turn += 1
        stop = min(position + min(stripe_tokens, capacity_by_lane[lane]), prompt_tokens)
        if stop == position:
            continue
        capacity_by_lane[lane] -= _up_to_blocks(stop - position, block_size_tokens)
        if segments and segments[-1].lane == lane:
            segments[-1] = Segment(lane, segments[-1].start, stop)
        else:
            segments.append(Segment(lane, position, stop))
        position = stop
    if not _append_stripes(segments, reserved_tokens, capacity_by_lane, lanes, block_size_tokens):
        return None
    return ShardMap(tuple(segments))


def is_striped(shards: ShardMap, tokens: int, lanes: int, stripe_tokens: int) -> bool:
    """Return whether the first `tokens` positions lie in equal stripes on `lanes` consecutive lanes, round-robin."""
    pieces = list(shards.pieces(0, tokens))
    return all(
        piece.start == index * stripe_tokens
        and piece.lane == (pieces[0].lane + index) % lanes
        and (piece.stop - piece.start == stripe_tokens or piece.stop == tokens)
        for index, piece in enumerate(pieces)
    )


def _append_stripes(
    segments: list[Segment],
    tokens: int,
    capacity_by_lane: dict[int, int],
    lanes: Sequence[int],
    block_size_tokens: int,
) -> bool:
    """Append stripes up to position `tokens`, each to the lane with the fewest tokens; return False if KV is short.

    `capacity_by_lane` (tokens, in whole blocks) excludes the blocks that `segments` touch. A lane that holds
    nothing yet is used only when the lanes in use have no free KV left.
    """
    position = segments[-1].stop
    size = block_size_tokens
    inside_block = min(-position % size, tokens - position)
    if inside_block:
        last = segments[-1]
        segments[-1] = Segment(last.lane, last.start, position := last.stop + inside_block)
    held: dict[int, int] = {}
    for segment in segments:
        held[segment.lane] = held.get(segment.lane, 0) + segment.stop - segment.start
    stripe = _up_to_blocks(max(STRIPE_TOKENS, (tokens - position) // MAX_STRIPES, 1), size)
    turn = {lane: index for index, lane in enumerate(dict.fromkeys(lanes))}
    while position < tokens:
        open_lanes = [lane for lane in held if capacity_by_lane[lane] > 0]
        if not open_lanes:
            fresh = [
                lane for lane in (*turn, *capacity_by_lane) if capacity_by_lane[lane] > 0 and lane not in held
            ]
            if not fresh:
                return False
            held[fresh[0]] = 0
            continue
        lane = min(open_lanes, key=lambda lane: (held[lane], turn.get(lane, len(turn) + lane)))
        stop = min(position + min(stripe, capacity_by_lane[lane]), tokens)
        last = segments[-1]
        if last.lane == lane:
            segments[-1] = Segment(lane, last.start, stop)
        else:
            segments.append(Segment(lane, position, stop))
        capacity_by_lane[lane] -= _up_to_blocks(stop - position, size)
        held[lane] += stop - position
        position = stop
    return True


def _whole_blocks(tokens: int, block_size_tokens: int) -> int:
    return tokens // block_size_tokens * block_size_tokens


def _up_to_blocks(tokens: int, block_size_tokens: int) -> int:
    return -(-tokens // block_size_tokens) * block_size_tokens
