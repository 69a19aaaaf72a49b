"""Attention over several lanes, for requests whose K and V, or whose rows in a step, lie on several lanes.

K and V of a token are kept on the lane that the shard map names, whichever lane computes them. A *strategy*
defines how queries and keys come together; steps of one request may use different ones:

* **Direct** (owner-compute): one lane computes the rows. It sends their queries to every lane that holds a
  part of the context; each attends to what it holds and sends back its partial results.
* **Ring pass-KV** (paper C §3.5.2): several lanes compute rows. The KV that each lane holds goes around the
  ring of lanes, and each lane attends to it with its own rows; nothing is sent back.
* **Ring pass-Q** (paper C §3.5.3, and for decodes §3.6): the queries go around, each lane attends to what it
  holds, and all partial results are sent back to their lanes at once.

Partial results over disjoint keys are merged exactly by their log-sum-exp. Each layer has one exchange of new
K and V (with direct queries), then the rounds of the rings, each sent while the one before is computed, and
one exchange of partial results. Every lane derives the same order from the step, so that no cycle can arise
where A waits for B while B waits for A. All data between two lanes is one flat tensor per direction and
exchange.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from medha_worker.kernels.partial_results import add_sinks, merge_partials
from medha_worker.kernels.protocol import Kernels, KVWriter
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.latent_forms import HeadMatrices, LatentForms
from medha_worker.model.latent_tensors import LatentWeights
from medha_worker.model.partial_attention import Attending, Partial, Rows
from medha_worker.model.pool_attention import PoolAttention, PoolWrite, read_segments

_log = logging.getLogger("medha.model")


class LaneLinks(Protocol):
    """Links to the ranks of the same stage and tensor index in the other lanes."""

    lane: int  # this rank's own lane

    def start(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> Any:
        """Begin to send each lane of `outgoing` its tensor, and to fill those of `incoming` from their lanes.

        Tensors between two lanes keep their order, and may be in the memory of any device.
        """
        ...

    def finish(self, started: Any) -> None:
        """Wait for the transfers that `start` returned."""
        ...


@dataclass(frozen=True)
class Landing:
    """Destinations of the new tokens' K and V; rows and slots are int64, in the order of the step.

    Tensors of a `SpreadPlan` are in host memory, and are placed on the device once per step.
    """

    here: tuple[torch.Tensor, npt.NDArray[np.int64]]  # own rows that stay, and their slots
    to: Mapping[int, torch.Tensor]  # lane -> own rows
    of: Mapping[int, npt.NDArray[np.int64]]  # lane -> slots for what arrives from it


@dataclass(frozen=True)
class OwnPart:
    """Own rows for which other lanes attend to what they hold."""

    rows: slice
    helpers: Sequence[int]


@dataclass(frozen=True)
class RingQueries:
    """Pass-Q: the rows of each lane, in ring order, and their attention to what this lane holds."""

    lanes: Sequence[int]
    rows: torch.Tensor  # own rows, int64 rows of the batch
    of: Mapping[int, Rows]
    answers: Sequence[int]  # lanes that hold something for own rows


@dataclass(frozen=True)
class RingKeys:
    """Pass-KV: the KV that each lane holds, in ring order, and the attention of own rows to it.

    A lane sends the blocks of its requests one after the other; `of` counts blocks from the start of that
    message.
    """

    lanes: Sequence[int]
    rows: torch.Tensor  # own rows, int64 rows of the batch
    table: torch.Tensor  # int64, blocks of this lane's pool that go around
    blocks: Mapping[int, int]  # number of blocks that each lane sends
    of: Mapping[int, Rows]


@dataclass(frozen=True)
class SpreadPlan:
    """The work of this lane in a step of several lanes; parts are in the order of the step's entries.

    `local` is all attention of own rows to what this lane holds; `sequences` are the own rows of each
    sequence. `windowed` has the plans of layers with a window, by the number of its tokens. These plans land the same
    rows, but in other blocks if the layers free KV before their windows.
    """

    local: Rows
    landing: Landing
    own: Sequence[OwnPart]
    foreign: Sequence[tuple[int, Rows]]  # direct queries: the asking lane, and its rows
    queries: RingQueries | None = None
    keys: RingKeys | None = None
    sequences: Sequence[slice] = ()
    windowed: Mapping[int, "SpreadPlan"] = field(default_factory=dict)


class SpreadStep:
    """A step of a lane that shares requests with others, for every layer of a rank.

    Other lanes wait for every exchange. So if memory does not suffice for the attention of some rows, the exchange
    still takes place, and NaN is sent in place of their results.
    """

    def __init__(
        self,
        plan: SpreadPlan,
        links: LaneLinks,
        cache: KVCache,
        kernels: Kernels,
        ran_out: Callable[[], None] = lambda: None,
        windows: Sequence[int | None] | None = None,
        forms: LatentForms | None = None,
    ) -> None:
        """`windows` are the tokens that a row of each of the pool's layers sees; None: all of them.

        `forms` plan the attention of layers whose pool holds latents.
        """
        self.sequences, self._cache = plan.sequences, cache
        self._windows = windows or [None] * len(cache.keys)
        attending = Attending(kernels.attention, cache.block_tokens, cache.device, ran_out, forms)
        whole = _Placed(plan.landing, cache, kernels.writer)
        self._attention = {}
        for window in dict.fromkeys(self._windows):
            there = plan if window is None else plan.windowed[window]
            is_apart = window is not None and cache.window_blocks > 0
            placed = _Placed(there.landing, cache, kernels.writer) if is_apart else whole
            self._attention[window] = _SpreadAttention(there, placed, links, cache, attending)
        read_segments(cache, [self._attention[window].local for window in self._windows])

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None = None,
        latent: LatentWeights | None = None,
    ) -> torch.Tensor:
        """Attend as `StepAttention.attend` does, for own rows [rows, heads, head_dim]; `k` and `v` are theirs.

        `sinks`, [heads], are added to what was merged: each lane that helps would count them once more. With `latent`,
        queries and results are as wide as `LayerStep.attend` says: other lanes have the matrices of the same heads.
        """
        self._cache.await_layer(layer)
        attention, (k, v) = self._attention[self._windows[layer]], self._cache.rounded(layer, k, v)
        if latent is not None:
            return attention.attend(layer, q, k, v, HeadMatrices.of(latent, self._cache.scaled(layer)))[0]
        output, sums = attention.attend(layer, self._cache.queries(layer, q), k, v)
        if sinks is not None:
            output = add_sinks(output, sums, sinks)[0]
        return self._cache.results(layer, output)


class _SpreadAttention:
    """The exchanges and the attention of a step in all layers with the same window."""

    def __init__(
        self, plan: SpreadPlan, placed: "_Placed", links: LaneLinks, cache: KVCache, attending: Attending
    ) -> None:
        self._plan, self._placed, self._links, self._cache = plan, placed, links, cache
        spans, rows = list(plan.local.spans), plan.local.count
        self._foreign: list[tuple[int, slice]] = []
        for owner, asked in plan.foreign:
            spans += [replace(span, row_start=span.row_start + rows) for span in asked.spans]
            self._foreign.append((owner, slice(rows, rows + asked.count)))
            rows += asked.count
        self.local = PoolAttention(Rows(rows, spans), cache, attending, placed.written)
        self._passing: list[_Ring] = []
        if plan.keys is not None:
            self._passing.append(_KeysRing(plan.keys, links, cache, attending))
        self._queries: _QueriesRing | None = None
        if plan.queries is not None:
            self._queries = _QueriesRing(plan.queries, links, cache, attending)
            self._passing.append(self._queries)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        matrices: HeadMatrices | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and log-sum-exp of own rows, [rows, heads, head_dim] and float32 [rows, heads]."""
        all_q = self._share(layer, q, k, v)
        for ring in self._passing:
            ring.start(layer, q, matrices)
        output, sums = self.local.attend(layer, all_q, matrices)
        for turn in range(1, max((len(ring) for ring in self._passing), default=0)):
            for ring in self._passing:
                if turn < len(ring):
                    ring.turn(turn)
        return self._merge(output, sums)

    def _share(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Send new K and V to where they are kept, and direct queries to all lanes that help.

        Returns own queries, followed by those that other lanes have sent.
        """
        placed, (_, query_heads, query_dim), (_, kv_heads, head_dim) = self._placed, q.shape, k.shape
        placed.write.write(layer, k[placed.staying], v[placed.staying])
        outgoing: dict[int, list[torch.Tensor]] = {}
        tensors = self._cache.tensors
        for lane, rows in placed.leaving.items():
            # Numbers of a pool of FP8 are exact in the type of queries, beside which they travel.
            outgoing[lane] = [part[rows].reshape(-1).to(q.dtype) for part in (k, v)[:tensors]]
        for part in self._plan.own:
            for lane in part.helpers:
                outgoing.setdefault(lane, []).append(q[part.rows].reshape(-1))
        sizes = {lane: tensors * count * kv_heads * head_dim for lane, (count, _) in placed.arriving.items()}
        for lane, asked in self._plan.foreign:
            sizes[lane] = sizes.get(lane, 0) + asked.count * query_heads * query_dim
        readers = self._exchange(outgoing, sizes, q)
        for lane, (count, write) in placed.arriving.items():
            arrived = [readers[lane].take(count, kv_heads, head_dim).to(k.dtype) for _ in range(tensors)]
            write.write(layer, arrived[0], arrived[-1])
        requested_q = [
            readers[lane].take(asked.count, query_heads, query_dim) for lane, asked in self._plan.foreign
        ]
        return _joined([q, *requested_q])

    def _merge(self, output: torch.Tensor, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Send partial results back to their lanes, in float32; return merged output and log-sum-exp of own rows."""
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

        merged, merged_sums = output[: self._plan.local.count], sums[: self._plan.local.count]
        for own in self._plan.own:
            count = own.rows.stop - own.rows.start
            parts = [readers[lane].take_partial(count, heads, head_dim) for lane in own.helpers]
            outputs, part_sums = zip((output[own.rows], sums[own.rows]), *parts, strict=True)
            merged[own.rows], merged_sums[own.rows] = merge_partials(outputs, part_sums)
        if self._queries is not None and ring is not None and len(ring.rows) and ring.answers:
            mine = self._queries.rows
            parts = [readers[lane].take_partial(len(mine), heads, head_dim) for lane in ring.answers]
            outputs, part_sums = zip((output[mine], sums[mine]), *parts, strict=True)
            merged[mine], merged_sums[mine] = merge_partials(outputs, part_sums)
        for passed in self._passing:
            if isinstance(passed, _KeysRing) and passed.partials:
                mine = passed.rows
                outputs, part_sums = zip((output[mine], sums[mine]), *passed.partials, strict=True)
                merged[mine], merged_sums[mine] = merge_partials(outputs, part_sums)
        return merged, merged_sums

    def _exchange(
        self, outgoing: Mapping[int, Sequence[torch.Tensor]], sizes: Mapping[int, int], like: torch.Tensor
    ) -> dict[int, "_Reader"]:
        """Send each lane its pieces as one tensor; return readers of what arrives, of the given sizes."""
        incoming = {lane: like.new_empty(size) for lane, size in sizes.items()}
        if outgoing or incoming:
            joined = {lane: _joined(pieces) for lane, pieces in outgoing.items()}
            self._links.finish(self._links.start(joined, incoming))
        return {lane: _Reader(tensor) for lane, tensor in incoming.items()}


class _Placed:
    """A step's landing: the rows that stay, leave and arrive, on the device, and the writes to this pool."""

    def __init__(self, landing: Landing, cache: KVCache, writer: KVWriter) -> None:
        device, (rows, slots) = cache.device, landing.here
        self.staying = device.place(rows)
        self.write = PoolWrite(slots, cache, writer)
        self.leaving = {lane: device.place(rows) for lane, rows in landing.to.items()}
        self.arriving = {
            lane: (len(slots), PoolWrite(slots, cache, writer)) for lane, slots in landing.of.items()
        }
        self.written = self.write.written.union(*(write.written for _, write in self.arriving.values()))
        """Streamed blocks that get new K and V."""


class _Ring(Protocol):
    """Data that goes around the lanes.

    Turn 0 is this lane's own data, and is computed with everything else that it holds.
    """

    def __len__(self) -> int: ...

    def start(self, layer: int, q: torch.Tensor, matrices: HeadMatrices | None) -> None: ...

    def turn(self, turn: int) -> None: ...


class _KeysRing:
    """Pass-KV, Algorithm 2 of paper C. Messages are as long as what a lane holds, without padding."""

    def __init__(self, ring: RingKeys, links: LaneLinks, cache: KVCache, attending: Attending) -> None:
        self.rows, self._table = cache.device.place(ring.rows), cache.device.place(ring.table)
        self._ring, self._links, self._cache = ring, links, cache
        self._order = _from(ring.lanes, links.lane)
        self._attention = {other: Partial(part, attending) for other, part in ring.of.items()}
        self.partials: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __len__(self) -> int:
        return len(self._order)

    def start(self, layer: int, q: torch.Tensor, matrices: HeadMatrices | None) -> None:
        self.partials, self._matrices = [], matrices
        self._q = q[self.rows]
        self._message = self._own(layer)
        self._pass(1)

    def turn(self, turn: int) -> None:
        """Attend to the message that has arrived, while it is sent on to the next lane."""
        self._links.finish(self._hop)
        message, source = self._next, self._order[turn]
        self._message = message
        self._pass(turn + 1)
        if source in self._attention and len(self.rows):
            blocks = message.view(self._cache.dtype)
            attention = self._attention[source]
            self.partials.append(attention.attend(self._q, blocks[0], blocks[-1], self._matrices))

    def _own(self, layer: int) -> torch.Tensor:
        """Return this lane's blocks, [tensors of KV, kv_heads, tokens, head_dim]; FP8 as bytes, which links can send."""
        pools = (self._cache.keys[layer], self._cache.values[layer])[: self._cache.tensors]
        if self._cache.dtype.itemsize == 1:
            pools = tuple(pool.view(torch.uint8) for pool in pools)
        kv_heads, _, head_dim = pools[0].shape
        tokens = self._cache.block_tokens
        message = pools[0].new_empty(len(pools), kv_heads, len(self._table), tokens * head_dim)
        for pool, part in zip(pools, message, strict=True):
            torch.index_select(pool.view(kv_heads, -1, tokens * head_dim), 1, self._table, out=part)
        return message.view(len(pools), kv_heads, -1, head_dim)

    def _pass(self, turn: int) -> None:
        """Send the current message to the next lane, and receive the one of `turn` from the previous lane."""
        if turn == len(self._order):
            return
        tensors, kv_heads, _, head_dim = self._message.shape
        tokens = self._ring.blocks.get(self._order[turn], 0) * self._cache.block_tokens
        self._next = self._message.new_empty(tensors, kv_heads, tokens, head_dim)
        self._hop = _hop(self._links, self._order, self._message, self._next)


class _QueriesRing:
    """Pass-Q, Algorithms 3 and 4 of paper C."""

    def __init__(self, ring: RingQueries, links: LaneLinks, cache: KVCache, attending: Attending) -> None:
        self._ring, self._links, self._cache = ring, links, cache
        self.rows = cache.device.place(ring.rows)
        self._order = _from(ring.lanes, links.lane)
        self._attention = {other: Partial(rows, attending) for other, rows in ring.of.items() if rows.spans}
        self.partials: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # lane, output, log-sum-exp

    def __len__(self) -> int:
        return len(self._order)

    def start(self, layer: int, q: torch.Tensor, matrices: HeadMatrices | None) -> None:
        self.partials, self._matrices = [], matrices
        self._layer = layer
        self._message = q[self.rows]
        self._pass(1)

    def turn(self, turn: int) -> None:
        """Attend with the queries that have arrived, while they are sent on to the next lane."""
        self._links.finish(self._hop)
        self._message, source = self._next, self._order[turn]
        self._pass(turn + 1)
        if source in self._attention:
            pools = self._cache.keys[self._layer], self._cache.values[self._layer]
            attended = self._attention[source].attend(self._message, *pools, self._matrices)
            self.partials.append((source, *attended))

    def _pass(self, turn: int) -> None:
        if turn == len(self._order):
            return
        count = self._ring.of[self._order[turn]].count if self._order[turn] in self._ring.of else 0
        self._next = self._message.new_empty(count, *self._message.shape[1:])
        self._hop = _hop(self._links, self._order, self._message, self._next)


def _from(lanes: Sequence[int], lane: int) -> list[int]:
    """Return the lane whose data is at `lane` in each round: its own, then the previous lane's, and so on."""
    here = lanes.index(lane)
    return [lanes[(here - turn) % len(lanes)] for turn in range(len(lanes))]


def _hop(links: LaneLinks, order: Sequence[int], sent: torch.Tensor, received: torch.Tensor) -> Any:
    """Send to the next lane of a ring and receive from the previous one; empty messages are not sent."""
    following, before = order[-1], order[1]
    return links.start(
        {following: sent} if sent.numel() else {}, {before: received} if received.numel() else {}
    )


def _joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate along the first dimension; copies only if it has to."""
    filled = [piece for piece in pieces if len(piece)]
    return torch.cat(filled) if len(filled) > 1 else (filled or pieces)[0]


class _Reader:
    """Splits a flat tensor into the parts that it was joined from, in the same order."""

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
