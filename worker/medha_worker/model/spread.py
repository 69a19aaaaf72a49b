"""Attention over several lanes: the requests of a step whose K and V, or whose rows, lie on more than one lane.

K and V of a token are kept on the lane that the shard map names, whichever lane computes them. A *strategy* says how
queries and keys come together; steps of one request may use different ones:

* **Direct** (owner-compute): one lane computes the rows. It sends their queries to every lane that holds a part of the
  context; each attends to what it holds, and the partial results come back.
* **Ring pass-KV** (paper C §3.5.2): several lanes compute rows. What each lane holds goes around the ring of lanes, and
  each lane attends with its own rows to what passes; nothing comes back.
* **Ring pass-Q** (paper C §3.5.3, and for decodes §3.6): the queries go around, each lane attends to what it holds, and
  the partial results come back to their lanes at once.

Partial results over disjoint keys are merged exactly by their log-sum-exp. In each layer there is one exchange of new K
and V (with direct queries), the rounds of the rings, each sent while the one before is computed, and one exchange of
partial results. Every lane derives the same order from the step, so that no cycle can arise where A helps B while B
helps A. What travels between two lanes is one flat tensor per direction and exchange.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from medha_worker.model.attention import AttentionBackend, StepAttention, merge_partials
from medha_worker.model.batch import SequenceSpan
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.memory import ran_out

_log = logging.getLogger("medha.model")


class LaneLinks(Protocol):
    """The ranks at this place of the grid (stage and tensor index) in other lanes."""

    lane: int  # our own

    def start(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> Any:
        """Begin to send a tensor to each lane of `outgoing`, and to fill those of `incoming` from theirs.

        Tensors between two lanes keep their order.
        """
        ...

    def finish(self, started: Any) -> None:
        """Wait for what `start` has returned."""
        ...


@dataclass(frozen=True)
class Landing:
    """Where the K and V of the step's new tokens go; rows and slots are int64, in the order of the step."""

    here: tuple[torch.Tensor, torch.Tensor]  # own rows that stay, and their slots
    to: Mapping[int, torch.Tensor]  # lane -> own rows
    of: Mapping[int, torch.Tensor]  # lane -> slots of what comes from there


@dataclass(frozen=True)
class Rows:
    """Rows of one lane, and their attention to what one lane holds; rows of no span see nothing there."""

    count: int
    spans: Sequence[SequenceSpan]  # rows counted from 0


@dataclass(frozen=True)
class OwnPart:
    """Own rows that other lanes attend to with what they hold."""

    rows: slice
    helpers: Sequence[int]


@dataclass(frozen=True)
class RingQueries:
    """Pass-Q: the rows of each lane, in the order of the ring, and their attention to what is here."""

    lanes: Sequence[int]
    rows: torch.Tensor  # own ones, int64 rows of the batch
    of: Mapping[int, Rows]
    answers: Sequence[int]  # lanes that hold something for own rows


@dataclass(frozen=True)
class RingKeys:
    """Pass-KV: what each lane holds, in the order of the ring, and the attention of own rows to it.

    A lane sends the blocks of its requests one after the other; `of` counts blocks from the start of that.
    """

    lanes: Sequence[int]
    rows: torch.Tensor  # own ones, int64 rows of the batch
    table: torch.Tensor  # int64, blocks of this lane's pool that go around
    blocks: Mapping[int, int]  # that come from each lane
    of: Mapping[int, Rows]


@dataclass(frozen=True)
class SpreadPlan:
    """What this lane does in a step of several lanes; parts are in the order of the step's entries.

    `local` is all attention of own rows to what is here; `sequences` are the own rows of each sequence.
    """

    local: Rows
    landing: Landing
    own: Sequence[OwnPart]
    foreign: Sequence[tuple[int, Rows]]  # directly asked: the lane, and its rows
    queries: RingQueries | None = None
    keys: RingKeys | None = None
    sequences: Sequence[slice] = ()


@dataclass(frozen=True)
class Attending:
    """What every attention of a step needs. `ran_out` is called where rows take part as NaN for want of memory."""

    backend: AttentionBackend
    block_tokens: int
    ran_out: Callable[[], None] = lambda: None


class SpreadStep:
    """One step of one lane that shares requests with others, for every layer of a rank.

    Whatever happens here, every exchange takes place: other lanes wait for it. Where memory does not suffice to
    compute something, NaN travels instead.
    """

    def __init__(
        self,
        plan: SpreadPlan,
        links: LaneLinks,
        cache: KVCache,
        backend: AttentionBackend,
        ran_out: Callable[[], None] = lambda: None,
    ) -> None:
        self._plan, self._links, self._cache = plan, links, cache
        self.sequences = plan.sequences
        attending = Attending(backend, cache.block_tokens, ran_out)
        spans, rows = list(plan.local.spans), plan.local.count
        self._foreign: list[tuple[int, slice]] = []
        for owner, asked in plan.foreign:
            spans += [_shifted(span, rows) for span in asked.spans]
            self._foreign.append((owner, slice(rows, rows + asked.count)))
            rows += asked.count
        self._local = _Partial(Rows(rows, spans), attending)
        self._passing: list[_Ring] = []
        if plan.keys is not None:
            self._passing.append(_KeysRing(plan.keys, links, cache, attending))
        self._queries: _QueriesRing | None = None
        if plan.queries is not None:
            self._queries = _QueriesRing(plan.queries, links, cache, attending)
            self._passing.append(self._queries)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """As `StepAttention.attend`, of own rows, [rows, heads, head_dim]; `k` and `v` are their own."""
        all_q = self._share(layer, q, k, v)
        for ring in self._passing:
            ring.start(layer, q)
        output, sums = self._local.attend(all_q, self._cache.keys[layer], self._cache.values[layer])
        for turn in range(1, max((len(ring) for ring in self._passing), default=0)):
            for ring in self._passing:
                if turn < len(ring):
                    ring.turn(turn)
        return self._merge(output, sums)

    def _share(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """New K and V to where they are kept, direct queries to all who help; own and asked queries, own first."""
        landing, (_, query_heads, head_dim), kv_heads = self._plan.landing, q.shape, k.shape[1]
        staying, slots = landing.here
        if len(slots):
            self._put(layer, slots, k[staying], v[staying])
        outgoing: dict[int, list[torch.Tensor]] = {}
        for lane, rows in landing.to.items():
            outgoing[lane] = [k[rows].reshape(-1), v[rows].reshape(-1)]
        for part in self._plan.own:
            for lane in part.helpers:
                outgoing.setdefault(lane, []).append(q[part.rows].reshape(-1))
        sizes = {lane: 2 * len(slots) * kv_heads for lane, slots in landing.of.items()}
        for lane, asked in self._plan.foreign:
            sizes[lane] = sizes.get(lane, 0) + asked.count * query_heads
        readers = self._exchange(outgoing, {lane: size * head_dim for lane, size in sizes.items()}, q)
        for lane, slots in landing.of.items():
            new_k, new_v = (readers[lane].take(len(slots), kv_heads, head_dim) for _ in range(2))
            self._put(layer, slots, new_k, new_v)
        asked_q = [
            readers[lane].take(asked.count, query_heads, head_dim) for lane, asked in self._plan.foreign
        ]
        return _joined([q, *asked_q])

    def _merge(self, output: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        """Partial results back to their lanes, in float32; the merged output of own rows."""
        _, heads, head_dim = output.shape
        outgoing: dict[int, list[torch.Tensor]] = {}
        for lane, rows in self._foreign:
            outgoing.setdefault(lane, []).extend([output[rows].float().reshape(-1), sums[rows].reshape(-1)])
        sizes: dict[int, int] = {}
        for own in self._plan.own:
            for lane in own.helpers:
                sizes[lane] = sizes.get(lane, 0) + own.rows.stop - own.rows.start
        ring = self._plan.queries
        if self._queries is not None and ring is not None:
            for lane, partial, partial_sums in self._queries.partials:
                outgoing.setdefault(lane, []).extend([partial.float().reshape(-1), partial_sums.reshape(-1)])
            for lane in ring.answers:
                sizes[lane] = sizes.get(lane, 0) + len(ring.rows)
        readers = self._exchange(
            outgoing, {lane: size * heads * (head_dim + 1) for lane, size in sizes.items()}, sums
        )

        merged = output[: self._plan.local.count]
        for own in self._plan.own:
            count = own.rows.stop - own.rows.start
            parts = [readers[lane].take_partial(count, heads, head_dim) for lane in own.helpers]
            outputs, part_sums = zip((output[own.rows], sums[own.rows]), *parts, strict=True)
            merged[own.rows] = merge_partials(outputs, part_sums)[0]
        if ring is not None and len(ring.rows) and ring.answers:
            parts = [readers[lane].take_partial(len(ring.rows), heads, head_dim) for lane in ring.answers]
            outputs, part_sums = zip((output[ring.rows], sums[ring.rows]), *parts, strict=True)
            merged[ring.rows] = merge_partials(outputs, part_sums)[0]
        for passed in self._passing:
            if isinstance(passed, _KeysRing) and passed.partials:
                mine = passed.rows
                outputs, part_sums = zip((output[mine], sums[mine]), *passed.partials, strict=True)
                merged[mine] = merge_partials(outputs, part_sums)[0]
        return merged

    def _exchange(
        self, outgoing: Mapping[int, Sequence[torch.Tensor]], sizes: Mapping[int, int], like: torch.Tensor
    ) -> dict[int, "_Reader"]:
        """Send each lane its pieces as one tensor; what comes back, of these sizes."""
        incoming = {lane: like.new_empty(size) for lane, size in sizes.items()}
        if outgoing or incoming:
            joined = {lane: _joined(pieces) for lane, pieces in outgoing.items()}
            self._links.finish(self._links.start(joined, incoming))
        return {lane: _Reader(tensor) for lane, tensor in incoming.items()}

    def _put(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self._cache.keys[layer].index_copy_(1, slots, k.transpose(0, 1))
        self._cache.values[layer].index_copy_(1, slots, v.transpose(0, 1))


class _Ring(Protocol):
    """Something goes around the lanes; turn 0 is what is here, and computed with all else that is."""

    def __len__(self) -> int: ...

    def start(self, layer: int, q: torch.Tensor) -> None: ...

    def turn(self, turn: int) -> None: ...


class _KeysRing:
    """Pass-KV, Algorithm 2 of paper C. Messages are as long as what a lane holds: nothing needs padding here."""

    def __init__(self, ring: RingKeys, links: LaneLinks, cache: KVCache, attending: Attending) -> None:
        self.rows = ring.rows
        self._ring, self._links, self._cache = ring, links, cache
        self._order = _from(ring.lanes, links.lane)
        self._attention = {other: _Partial(part, attending) for other, part in ring.of.items()}
        self.partials: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __len__(self) -> int:
        return len(self._order)

    def start(self, layer: int, q: torch.Tensor) -> None:
        self.partials = []
        self._q = q[self.rows]
        self._message = self._own(layer)
        self._pass(1)

    def turn(self, turn: int) -> None:
        """Attend to what has come, while it goes on to the next lane."""
        self._links.finish(self._hop)
        message, source = self._next, self._order[turn]
        self._message = message
        self._pass(turn + 1)
        if source in self._attention and len(self.rows):
            keys, values = message
            self.partials.append(self._attention[source].attend(self._q, keys, values))

    def _own(self, layer: int) -> torch.Tensor:
        """Blocks of this lane, [2, kv_heads, tokens, head_dim]."""
        pools = self._cache.keys[layer], self._cache.values[layer]
        kv_heads, _, head_dim = pools[0].shape
        tokens = self._cache.block_tokens
        message = pools[0].new_empty(2, kv_heads, len(self._ring.table), tokens * head_dim)
        for pool, part in zip(pools, message, strict=True):
            torch.index_select(pool.view(kv_heads, -1, tokens * head_dim), 1, self._ring.table, out=part)
        return message.view(2, kv_heads, -1, head_dim)

    def _pass(self, turn: int) -> None:
        """Send what is here to the next lane, and take what belongs to `turn` from the one before."""
        if turn == len(self._order):
            return
        _, kv_heads, _, head_dim = self._message.shape
        tokens = self._ring.blocks.get(self._order[turn], 0) * self._cache.block_tokens
        self._next = self._message.new_empty(2, kv_heads, tokens, head_dim)
        self._hop = _hop(self._links, self._order, self._message, self._next)


class _QueriesRing:
    """Pass-Q, Algorithms 3 and 4 of paper C."""

    def __init__(self, ring: RingQueries, links: LaneLinks, cache: KVCache, attending: Attending) -> None:
        self._ring, self._links, self._cache = ring, links, cache
        self._order = _from(ring.lanes, links.lane)
        self._attention = {other: _Partial(rows, attending) for other, rows in ring.of.items() if rows.spans}
        self.partials: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # lane, output, log-sum-exp

    def __len__(self) -> int:
        return len(self._order)

    def start(self, layer: int, q: torch.Tensor) -> None:
        self.partials = []
        self._layer = layer
        self._message = q[self._ring.rows]
        self._pass(1)

    def turn(self, turn: int) -> None:
        """Attend with the queries that have come, while they go on to the next lane."""
        self._links.finish(self._hop)
        self._message, source = self._next, self._order[turn]
        self._pass(turn + 1)
        if source in self._attention:
            pools = self._cache.keys[self._layer], self._cache.values[self._layer]
            self.partials.append((source, *self._attention[source].attend(self._message, *pools)))

    def _pass(self, turn: int) -> None:
        if turn == len(self._order):
            return
        count = self._ring.of[self._order[turn]].count if self._order[turn] in self._ring.of else 0
        self._next = self._message.new_empty(count, *self._message.shape[1:])
        self._hop = _hop(self._links, self._order, self._message, self._next)


def _from(lanes: Sequence[int], lane: int) -> list[int]:
    """Whose turn it is at `lane` in each round: its own, then that of the lane before, and so on."""
    here = lanes.index(lane)
    return [lanes[(here - turn) % len(lanes)] for turn in range(len(lanes))]


def _hop(links: LaneLinks, order: Sequence[int], sent: torch.Tensor, received: torch.Tensor) -> Any:
    """Send to the next lane of a ring and receive from the one before; nothing travels where there is nothing."""
    following, before = order[-1], order[1]
    return links.start(
        {following: sent} if sent.numel() else {}, {before: received} if received.numel() else {}
    )


class _Partial:
    """Attention of some rows to what one lane holds of their context: nothing for those that see nothing there."""

    def __init__(self, rows: Rows, attending: Attending) -> None:
        self._rows, self._attending = rows.count, attending
        self._spans = rows.spans
        self._planned = max((span.rows.stop for span in rows.spans), default=0)
        self._attention: StepAttention | None = None
        if rows.spans:
            self._attention = attending.backend.plan(rows.spans, attending.block_tokens)
        blind = torch.ones(rows.count, dtype=torch.bool)
        for span in rows.spans:
            blind[span.rows] = False
        self._blind = blind.nonzero().flatten()

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [rows, heads, head_dim] and log-sum-exp, float32 [rows, heads]; -inf where a row sees nothing."""
        if self._attention is None:
            return q.new_zeros(q.shape), q.new_full(q.shape[:-1], float("-inf"), dtype=torch.float32)
        try:
            output, sums = self._attention.attend(q[: self._planned], keys, values)
        except (MemoryError, RuntimeError) as error:
            if not ran_out(error):
                raise
            _log.warning("memory ran out for the attention of %d rows; each sequence runs alone", self._rows)
            attended = None
        else:
            attended = output, sums
        # Outside the handler: there the traceback would keep the failed attempt's tensors alive.
        output, sums = attended or self._one_by_one(q, keys, values)
        if self._planned < self._rows:
            output = torch.cat([output, output.new_empty(self._rows - self._planned, *output.shape[1:])])
            sums = torch.cat([sums, sums.new_empty(self._rows - self._planned, *sums.shape[1:])])
        if len(self._blind):
            output[self._blind], sums[self._blind] = 0.0, float("-inf")
        return output, sums.float()

    def _one_by_one(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `StepAttention.attend`, with less memory at a time; NaN where that does not suffice."""
        output = q.new_empty(self._planned, *q.shape[1:])
        sums = q.new_empty(self._planned, q.shape[1], dtype=torch.float32)
        for span in self._spans:
            rows = span.rows
            try:
                alone = self._attending.backend.plan(
                    [replace(span, row_start=0)], self._attending.block_tokens
                )
                output[rows], sums[rows] = alone.attend(q[rows], keys, values)
            except (MemoryError, RuntimeError) as error:
                if not ran_out(error):
                    raise
                _log.warning("memory ran out for the attention of %d rows alone: %s", span.row_count, error)
                output[rows], sums[rows] = torch.nan, torch.nan
                self._attending.ran_out()
        return output, sums


def _joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """One behind the other along the first dimension; a copy only where it takes one."""
    filled = [piece for piece in pieces if len(piece)]
    return torch.cat(filled) if len(filled) > 1 else (filled or pieces)[0]


def _shifted(span: SequenceSpan, rows: int) -> SequenceSpan:
    return replace(span, row_start=span.row_start + rows)


class _Reader:
    """Takes a flat tensor apart again, in the order in which it was put together."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat, self._at = flat, 0

    def take(self, *shape: int) -> torch.Tensor:
        size = 1
        for length in shape:
            size *= length
        taken = self._flat[self._at : self._at + size].view(shape)
        self._at += size
        return taken

    def take_partial(self, rows: int, heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.take(rows, heads, head_dim), self.take(rows, heads)
