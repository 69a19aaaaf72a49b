"""Attention over several lanes equals attention over one, wherever the shard map puts the tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from queue import SimpleQueue
from threading import Thread

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.shards import Segment, ShardMap
from medha_worker.model.attention import TorchAttention
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.spread import SpreadPlan, SpreadStep
from medha_worker.spread import SpreadEntry, plan_spread

BLOCK_TOKENS = 4
KV_HEADS, GROUP, HEAD_DIM = 2, 2, 8
HEADS = KV_HEADS * GROUP


class Mailboxes:
    """Links between lanes that run as threads: a queue for each direction."""

    def __init__(self, lanes: int) -> None:
        self.queues = {(a, b): SimpleQueue[torch.Tensor]() for a in range(lanes) for b in range(lanes)}

    def of(self, lane: int) -> LaneMailbox:
        return LaneMailbox(self, lane)


class LaneMailbox:
    def __init__(self, boxes: Mailboxes, lane: int) -> None:
        self._queues, self._lane = boxes.queues, lane

    def exchange(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> None:
        for lane, tensor in outgoing.items():
            self._queues[self._lane, lane].put(tensor.clone())
        for lane, tensor in incoming.items():
            tensor.copy_(self._queues[lane, self._lane].get(timeout=10))  # sizes are checked by copy_


def shard_maps(lanes: int) -> st.SearchStrategy[ShardMap]:
    """Segments of whole blocks on any lanes, in any order; neighbours on one lane are allowed."""
    sizes = st.lists(st.tuples(st.integers(0, lanes - 1), st.integers(1, 5)), min_size=1, max_size=7)

    def build(parts: list[tuple[int, int]]) -> ShardMap:
        segments, start = [], 0
        for lane, blocks in parts:
            segments.append(Segment(lane, start, start + blocks * BLOCK_TOKENS))
            start = segments[-1].stop
        return ShardMap(tuple(segments))

    return sizes.map(build)


class Request:
    """One request's queries, keys and values at every position, and where they lie."""

    def __init__(self, shards: ShardMap, seed: int, first_blocks: dict[int, int]) -> None:
        self.shards = shards
        generator = torch.Generator().manual_seed(seed)
        self.q = torch.randn(shards.tokens, HEADS, HEAD_DIM, generator=generator)
        self.k, self.v = torch.randn(2, shards.tokens, KV_HEADS, HEAD_DIM, generator=generator)
        self.tables = {}
        for lane in shards.lanes:
            blocks = -(-shards.tokens_on(lane) // BLOCK_TOKENS)
            self.tables[lane] = np.arange(first_blocks[lane], first_blocks[lane] + blocks)
            first_blocks[lane] += blocks

    def entry(self, lane: int, start: int, stop: int) -> SpreadEntry:
        return SpreadEntry(self.shards, start, stop, self.tables.get(lane, np.empty(0, dtype=np.int64)))

    def wanted(self, start: int, stop: int) -> torch.Tensor:
        """Causal attention of positions `start .. stop`, in float64."""
        k, v = (x[:stop].double().repeat_interleave(GROUP, 1).transpose(0, 1) for x in (self.k, self.v))
        scores = self.q[start:stop].double().transpose(0, 1) @ k.transpose(1, 2) / math.sqrt(HEAD_DIM)
        future = torch.arange(stop)[None] > torch.arange(start, stop)[:, None]
        return (scores.masked_fill(future, -math.inf).softmax(-1) @ v).transpose(0, 1)


def run_step(
    lanes: int, caches: list[KVCache], requests: list[Request], chunks: list[tuple[int, int, int]]
) -> list[torch.Tensor]:
    """One step on all lanes at once; chunks are (request, start, stop). The outputs, chunk by chunk."""
    boxes = Mailboxes(lanes)
    results: dict[int, torch.Tensor | BaseException] = {}

    def run(lane: int) -> None:
        own = [chunk for chunk in chunks if requests[chunk[0]].shards.owner == lane]
        foreign = [
            entry
            for index, start, stop in chunks
            if requests[index].shards.owner != lane
            and lane in (entry := requests[index].entry(lane, start, stop)).lanes
        ]
        entries = [requests[index].entry(lane, start, stop) for index, start, stop in own]
        plan = plan_spread(lane, entries, foreign, BLOCK_TOKENS) or local_plan(lane, entries)
        empty = torch.empty(0, KV_HEADS, HEAD_DIM)
        q, k, v = (
            torch.cat([start_value, *(getattr(requests[i], name)[start:stop] for i, start, stop in own)])
            for name, start_value in (("q", torch.empty(0, HEADS, HEAD_DIM)), ("k", empty), ("v", empty))
        )
        try:
            step = SpreadStep(plan, boxes.of(lane), caches[lane], TorchAttention())
            results[lane] = step.attend(0, q, k, v)
        except BaseException as error:  # noqa: BLE001 - it belongs to the test's thread
            results[lane] = error

    threads = [Thread(target=run, args=(lane,)) for lane in range(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    rows = dict.fromkeys(range(lanes), 0)
    outputs = []
    for index, start, stop in chunks:
        lane = requests[index].shards.owner
        outputs.append(results[lane][rows[lane] : rows[lane] + stop - start])  # type: ignore[index]
        rows[lane] += stop - start
    return outputs


def local_plan(lane: int, entries: list[SpreadEntry]) -> SpreadPlan:
    """The plan of a lane that shares nothing in this step."""
    spans, written, row = [], [], 0
    for entry in entries:
        found, kept = entry.on(lane, row, BLOCK_TOKENS)
        spans += found
        written += kept
        row += entry.stop - entry.start
    return SpreadPlan(row, spans, written, [], [])


LANES = 3


@given(maps=st.lists(shard_maps(LANES), min_size=1, max_size=4), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_any_requests_in_any_chunks_on_any_shard_maps_are_exact(maps: list[ShardMap], seed: int) -> None:
    """Lanes help each other both ways at once, chunks straddle shards, and some lanes have no rows of their own."""
    rng = np.random.default_rng(seed)
    first_blocks = dict.fromkeys(range(LANES), 0)
    requests = [Request(shards, index, first_blocks) for index, shards in enumerate(maps)]
    caches = [
        KVCache(
            num_layers=1, kv_heads=KV_HEADS, head_dim=HEAD_DIM, num_blocks=max(first_blocks[lane], 1),
            block_tokens=BLOCK_TOKENS, dtype=torch.float32,
        )
        for lane in range(LANES)
    ]  # fmt: skip
    at = [0] * len(requests)
    while any(position < request.shards.tokens for position, request in zip(at, requests, strict=True)):
        chunks = []
        for index, request in enumerate(requests):
            left = request.shards.tokens - at[index]
            size = int(rng.integers(0, min(left, 17) + 1))
            if size:
                chunks.append((index, at[index], at[index] + size))
                at[index] += size
        if not chunks:
            continue
        for (index, start, stop), found in zip(
            chunks, run_step(LANES, caches, requests, chunks), strict=True
        ):
            wanted = requests[index].wanted(start, stop)
            torch.testing.assert_close(found.double(), wanted, rtol=3e-6, atol=3e-6)


def test_lanes_join_only_when_the_context_reaches_them() -> None:
    shards = ShardMap((Segment(1, 0, 8), Segment(0, 8, 16), Segment(2, 16, 24)))
    assert SpreadEntry(shards, 0, 8, np.arange(2)).lanes == (1,)
    assert SpreadEntry(shards, 4, 9, np.arange(2)).lanes == (1, 0)
    assert SpreadEntry(shards, 16, 17, np.arange(2)).lanes == (1, 0, 2)
    assert plan_spread(1, [SpreadEntry(shards, 0, 8, np.arange(2))], [], BLOCK_TOKENS) is None
