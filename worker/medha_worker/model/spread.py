"""Attention over several lanes (KVP): the requests of a step whose K and V lie on more than one lane.

The *owner* lane of a request computes its queries, keys and values. In every layer it sends the queries to the lanes
that hold a part of the context, and new keys and values to the lane where their positions lie; each lane attends to
what it holds, for its own and for foreign queries in one call; the partial results come back and are merged exactly
by their log-sum-exp. So there are two exchanges per layer, and all lanes of a step take both, in an order that each
derives from the step: no cycle can arise even where A helps B while B helps A.

What travels between two lanes is one flat tensor per direction and exchange.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from medha_worker.model.attention import AttentionBackend, StepAttention, merge_partials
from medha_worker.model.batch import SequenceSpan
from medha_worker.model.kv_cache import KVCache


class LaneLinks(Protocol):
    """The ranks at this place of the grid (stage and tensor index) in other lanes."""

    def exchange(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
        """Send a tensor to each lane of `outgoing`, and fill those of `incoming` from theirs."""
        ...


@dataclass(frozen=True)
class Written:
    """New tokens of one request whose K and V this lane keeps: rows of the batch they come in, and their slots."""

    rows: slice
    slots: torch.Tensor  # int64 [tokens]


@dataclass(frozen=True)
class ForeignPart:
    """What another lane's request asks of this lane: attention of its rows to what is here."""

    owner: int
    row_count: int
    spans: Sequence[SequenceSpan]  # over the request's rows, counted from 0; rows of no span see nothing here
    written: Sequence[Written]  # rows likewise


@dataclass(frozen=True)
class OwnPart:
    """A request of this lane that others help with."""

    rows: slice
    helpers: Sequence[int]
    kept_by: Mapping[int, Sequence[slice]]  # rows of the batch whose K and V go to another lane


@dataclass(frozen=True)
class SpreadPlan:
    """What this lane does in a step beside its local requests; parts are in the order of the step's entries.

    `spans` are all attention of own rows to what is here, `written` the own tokens whose K and V stay here.
    """

    rows: int
    spans: Sequence[SequenceSpan]
    written: Sequence[Written]
    own: Sequence[OwnPart]
    foreign: Sequence[ForeignPart]


class SpreadStep:
    """One step of one lane that shares requests with others, for every layer of a rank."""

    def __init__(self, plan: SpreadPlan, links: LaneLinks, cache: KVCache, backend: AttentionBackend) -> None:
        self._plan, self._links, self._cache = plan, links, cache
        spans, row = list(plan.spans), plan.rows
        self._foreign_rows: list[tuple[ForeignPart, slice]] = []
        for part in plan.foreign:
            spans += [
                SequenceSpan(row + s.row_start, s.row_count, s.context_length, s.blocks, s.is_causal)
                for s in part.spans
            ]
            self._foreign_rows.append((part, slice(row, row + part.row_count)))
            row += part.row_count
        self._rows = row
        self._attention: StepAttention | None = backend.plan(spans, cache.block_tokens) if spans else None
        blind = torch.ones(row, dtype=torch.bool)
        for span in spans:
            blind[span.rows] = False
        self._blind = blind.nonzero().flatten()

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """As `StepAttention.attend`, of own rows, [rows, heads, head_dim]; `k` and `v` are their own."""
        all_q = self._share(layer, q, k, v)
        if self._attention is None:
            output, sums = torch.empty_like(all_q), all_q.new_empty(all_q.shape[:-1])
        else:
            output, sums = self._attention.attend(all_q, self._cache.keys[layer], self._cache.values[layer])
        output[self._blind], sums[self._blind] = 0.0, float("-inf")
        return self._merge(output, sums.float())

    def _share(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Queries to all who help, K and V to where they are kept; own and foreign queries, own first."""
        _, query_heads, head_dim = q.shape
        kv_heads = k.shape[1]
        for written in self._plan.written:
            self._write(layer, written, k, v)
        outgoing: dict[int, list[torch.Tensor]] = {}
        for part in self._plan.own:
            for lane in part.helpers:
                pieces = outgoing.setdefault(lane, [])
                pieces.append(q[part.rows].reshape(-1))
                for rows in part.kept_by.get(lane, ()):
                    pieces += [k[rows].reshape(-1), v[rows].reshape(-1)]
        sizes: dict[int, int] = {}
        for foreign in self._plan.foreign:
            kept = sum(w.rows.stop - w.rows.start for w in foreign.written)
            values = foreign.row_count * query_heads + 2 * kept * kv_heads
            sizes[foreign.owner] = sizes.get(foreign.owner, 0) + values * head_dim
        incoming = {lane: q.new_empty(size) for lane, size in sizes.items()}
        self._links.exchange({lane: torch.cat(pieces) for lane, pieces in outgoing.items()}, incoming)

        readers = {lane: _Reader(tensor) for lane, tensor in incoming.items()}
        queries = [q]
        for foreign in self._plan.foreign:
            reader = readers[foreign.owner]
            queries.append(reader.take(foreign.row_count, query_heads, head_dim))
            for written in foreign.written:
                tokens = written.rows.stop - written.rows.start
                new_k, new_v = (reader.take(tokens, kv_heads, head_dim) for _ in range(2))
                self._put(layer, written.slots, new_k, new_v)
        return torch.cat(queries)

    def _merge(self, output: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
        """Partial results back to their owners, in float32; the merged output of own rows."""
        _, heads, head_dim = output.shape
        outgoing: dict[int, list[torch.Tensor]] = {}
        for part, rows in self._foreign_rows:
            outgoing.setdefault(part.owner, []).extend(
                [output[rows].float().reshape(-1), sums[rows].reshape(-1)]
            )
        sizes: dict[int, int] = {}
        for own in self._plan.own:
            for lane in own.helpers:
                rows_count = own.rows.stop - own.rows.start
                sizes[lane] = sizes.get(lane, 0) + rows_count * heads * (head_dim + 1)
        incoming = {lane: sums.new_empty(size) for lane, size in sizes.items()}
        self._links.exchange({lane: torch.cat(pieces) for lane, pieces in outgoing.items()}, incoming)

        readers = {lane: _Reader(tensor) for lane, tensor in incoming.items()}
        merged = output[: self._plan.rows]
        for own in self._plan.own:
            count = own.rows.stop - own.rows.start
            outputs, parts = [output[own.rows]], [sums[own.rows]]
            for lane in own.helpers:
                outputs.append(readers[lane].take(count, heads, head_dim))
                parts.append(readers[lane].take(count, heads))
            merged[own.rows] = merge_partials(outputs, parts)[0]
        return merged

    def _write(self, layer: int, written: Written, k: torch.Tensor, v: torch.Tensor) -> None:
        self._put(layer, written.slots, k[written.rows], v[written.rows])

    def _put(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self._cache.keys[layer].index_copy_(1, slots, k.transpose(0, 1))
        self._cache.values[layer].index_copy_(1, slots, v.transpose(0, 1))


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
