"""Attention over several lanes equals attention over one, wherever the shard map puts the tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.kv.blocks import BlockLedger
from medha.kv.context_parallel import OWNER
from medha.shards import Segment, ShardMap
from medha.wire.messages import Extent
from medha_worker.device import host_device
from medha_worker.kernels import torch_attention as attention
from medha_worker.kernels.name_table import torch_kernels
from medha_worker.kernels.protocol import AttentionBackend
from medha_worker.kernels.torch_attention import TorchAttention
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.partial_attention import Rows
from medha_worker.model.spread import Landing, SpreadPlan, SpreadStep
from medha_worker.rank.kv_parallel_plan import SpreadEntry, plan_spread, positions

from ..kernels.test_kernels_attention import compiled
from ..random_steps import STRATEGIES, Cut

BLOCK_TOKENS = 4
KV_HEADS, GROUP, HEAD_DIM = 2, 2, 16
HEADS = KV_HEADS * GROUP


@dataclass(frozen=True)
class Kind:
    """The attention that a model of this number format uses."""

    name: str
    backend: Callable[[], AttentionBackend]
    dtype: torch.dtype
    tolerance: float  # of outputs near 1; the formats round K, V and each partial result to 2^-8 and 2^-11


KINDS = (
    Kind("torch", partial(TorchAttention, host_device(torch.float32)), torch.float32, 3e-6),
    Kind("compiled", lambda: compiled(HEAD_DIM, GROUP), torch.float32, 3e-6),
    Kind("bfloat16", partial(TorchAttention, host_device(torch.bfloat16)), torch.bfloat16, 3e-2),
    Kind("float16", partial(TorchAttention, host_device(torch.float16)), torch.float16, 4e-3),
)


class Mailboxes:
    """Links between lanes that run as threads: a queue for each direction."""

    def __init__(self, lanes: int) -> None:
        self.queues = {(a, b): SimpleQueue[torch.Tensor]() for a in range(lanes) for b in range(lanes)}

    def of(self, lane: int) -> LaneMailbox:
        return LaneMailbox(self, lane)


class LaneMailbox:
    def __init__(self, boxes: Mailboxes, lane: int) -> None:
        self._queues, self.lane = boxes.queues, lane

    def start(
        self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]
    ) -> Mapping[int, torch.Tensor]:
        for lane, tensor in outgoing.items():
            self._queues[self.lane, lane].put(tensor.clone())
        return incoming

    def finish(self, started: Mapping[int, torch.Tensor]) -> None:
        for lane, tensor in started.items():
            sent = self._queues[lane, self.lane].get(timeout=5)
            assert sent.shape == tensor.shape
            tensor.copy_(sent)


def shard_maps(lanes: int) -> st.SearchStrategy[ShardMap]:
    """Return a strategy for maps: segments of whole blocks on any lanes, in any order, also in a row on one."""
    blocks = st.integers(1, MOST_SEGMENT_BLOCKS)
    sizes = st.lists(st.tuples(st.integers(0, lanes - 1), blocks), min_size=1, max_size=MOST_SEGMENTS)

    def build(parts: list[tuple[int, int]]) -> ShardMap:
        segments, start = [], 0
        for lane, blocks in parts:
            segments.append(Segment(lane, start, start + blocks * BLOCK_TOKENS))
            start = segments[-1].stop
        return ShardMap(tuple(segments))

    return sizes.map(build)


class Request:
    """One request's queries, keys and values at every position, and where they lie."""

    def __init__(
        self, name: str, shards: ShardMap, seed: int, ledgers: list[BlockLedger], dtype: torch.dtype
    ) -> None:
        self.shards = shards
        generator = torch.Generator().manual_seed(seed)
        self.q = torch.randn(shards.tokens, HEADS, HEAD_DIM, generator=generator).to(dtype)
        self.k, self.v = torch.randn(2, shards.tokens, KV_HEADS, HEAD_DIM, generator=generator).to(dtype)
        self.tables = {}
        for lane in shards.lanes:
            assert ledgers[lane].reserve(name, shards.tokens_on(lane))
            self.tables[lane] = ledgers[lane].table(name)

    def entries(
        self, name: str, strategy: str, cut: Cut, start: int, stop: int, lane: int
    ) -> list[SpreadEntry]:
        """Return what a step computes of the request, as `lane` sees it."""
        lanes = self.shards.lanes
        extents = {self.shards.owner: (Extent(start, stop - start),)}
        if strategy != OWNER:
            extents = dict(zip(lanes, cut(start, stop, len(lanes)), strict=True))
        table = self.tables.get(lane, np.empty(0, dtype=np.int64))
        return [
            SpreadEntry(self.shards, computing, runs, stop, table, strategy, name)
            for computing, runs in extents.items()
            if runs
        ]

    def spoil(self, caches: list[KVCache], stop: int) -> None:
        """Make the K and V of the positions before `stop` NaN: whatever reads one of them becomes NaN, too."""
        for lane, count in self.shards.local_lengths(stop).items():
            places = np.arange(count)
            slots = self.tables[lane][places // BLOCK_TOKENS] * BLOCK_TOKENS + places % BLOCK_TOKENS
            for pool in (caches[lane].keys[0], caches[lane].values[0]):
                pool[:, torch.from_numpy(slots)] = math.nan

    def wanted(
        self, start: int, stop: int, window_tokens: int | None, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the causal attention of positions `start .. stop`, in float64; each row sees its heads' sinks once."""
        k, v = (x[:stop].double().repeat_interleave(GROUP, 1).transpose(0, 1) for x in (self.k, self.v))
        scores = self.q[start:stop].double().transpose(0, 1) @ k.transpose(1, 2) / math.sqrt(HEAD_DIM)
        key, row = torch.arange(stop)[None], torch.arange(start, stop)[:, None]
        hidden = (key > row) | (key <= row - (window_tokens or stop))
        scores = scores.masked_fill(hidden, -math.inf)
        if sinks is not None:
            beside = sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
            return (torch.cat([scores, beside], -1).softmax(-1)[..., :-1] @ v).transpose(0, 1)
        return (scores.softmax(-1) @ v).transpose(0, 1)


@dataclass(frozen=True)
class Chunk:
    request: int
    start: int
    stop: int
    strategy: str
    cut: Cut


def run_step(
    backends: list[AttentionBackend],
    caches: list[KVCache],
    requests: list[Request],
    chunks: list[Chunk],
    window_tokens: int | None,
    sinks: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Run one step on all lanes at once; return the outputs of each chunk, in the order of positions."""
    lanes = len(backends)
    boxes = Mailboxes(lanes)
    dtype = caches[0].keys[0].dtype
    outputs = [
        torch.full((chunk.stop - chunk.start, HEADS, HEAD_DIM), math.nan, dtype=dtype) for chunk in chunks
    ]

    def run(lane: int) -> None:
        entries = [
            (index, entry)
            for index, chunk in enumerate(chunks)
            for entry in requests[chunk.request].entries(
                f"r{chunk.request}", chunk.strategy, chunk.cut, chunk.start, chunk.stop, lane
            )
        ]
        own = [(index, entry) for index, entry in entries if entry.lane == lane]
        foreign = [
            entry
            for _, entry in entries
            if entry.lane != lane and (entry.strategy != OWNER or lane in entry.holders)
        ]
        plan = plan_spread(lane, [entry for _, entry in own], foreign, BLOCK_TOKENS, (window_tokens,))
        at = [torch.from_numpy(positions(entry.extents)) for _, entry in own]
        empty = torch.empty(0, KV_HEADS, HEAD_DIM, dtype=dtype)
        q, k, v = (
            torch.cat([nothing, *(getattr(requests[chunks[index].request], name)[rows] for (index, _), rows in zip(own, at, strict=True))])
            for name, nothing in (("q", torch.empty(0, HEADS, HEAD_DIM, dtype=dtype)), ("k", empty), ("v", empty))
        )  # fmt: skip
        if plan is None:
            plan = local_plan(lane, [entry for _, entry in own], window_tokens)
        kernels = replace(torch_kernels(caches[lane].device), attention=backends[lane])
        step = SpreadStep(plan, boxes.of(lane), caches[lane], kernels, windows=(window_tokens,))
        result = step.attend(0, q, k, v, sinks)
        row = 0
        for (index, entry), rows in zip(own, at, strict=True):
            outputs[index][rows - chunks[index].start] = result[row : row + entry.count]
            row += entry.count

    with ThreadPoolExecutor(lanes) as pool:
        failures = [pool.submit(run, lane).exception for lane in range(lanes)]
        found = [error for failure in failures if (error := failure()) is not None]
    if found:  # report the first failure, not that of a lane that waited for it
        raise next((error for error in found if not isinstance(error, Empty)), found[0])
    return outputs


def local_plan(lane: int, entries: list[SpreadEntry], window_tokens: int | None) -> SpreadPlan:
    """Return the plan of a lane that shares nothing in this step."""
    spans, rows, slots, row = [], [], [], 0
    for entry in entries:
        spans += entry.spans_on(lane, row, window_tokens=window_tokens)
        ((kept, places),) = entry.kept_by().values()
        rows.append(torch.from_numpy(kept + row))
        slots.append(entry.slots(places, BLOCK_TOKENS))
        row += entry.count
    none = torch.empty(0, dtype=torch.int64)
    here = torch.cat([none, *rows]), np.concatenate([np.arange(0), *slots])
    plan = SpreadPlan(Rows(row, spans), Landing(here, {}, {}), [], [])
    return plan if window_tokens is None else replace(plan, windowed={window_tokens: plan})


LANES = 3
MOST_REQUESTS, MOST_SEGMENTS, MOST_SEGMENT_BLOCKS = 4, 7, 5
FREE_BLOCKS = MOST_REQUESTS * MOST_SEGMENTS * MOST_SEGMENT_BLOCKS


def fragmented(rng: np.random.Generator) -> BlockLedger:
    """Return a lane's ledger after churn: enough blocks for a test's requests are free, in runs of all lengths."""
    ledger = BlockLedger(FREE_BLOCKS * 5 // 2, BLOCK_TOKENS)
    held = []
    while ledger.reserve(f"held{len(held)}", int(rng.integers(1, 6)) * BLOCK_TOKENS):
        held.append(f"held{len(held)}")
    for name in rng.permutation(held).tolist():
        if ledger.free_blocks < FREE_BLOCKS:
            ledger.release(name)
    return ledger


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("examples", [12, pytest.param(1000, marks=pytest.mark.long)])
def test_any_requests_in_any_chunks_on_any_shard_maps_and_in_any_layout_are_exact(
    kind: Kind, examples: int
) -> None:
    """Lanes help each other in both directions at once, by several strategies in one step, which change between steps.

    Chunks cross the borders of shards and of runs of blocks. Some lanes have no own rows, and some hold nothing yet.
    With a window, K and V before it are NaN, so that a result would show it if they were read.
    """
    backends = [kind.backend() for _ in range(LANES)]

    @given(
        maps=st.lists(shard_maps(LANES), min_size=1, max_size=MOST_REQUESTS),
        strategies=st.lists(st.sampled_from(STRATEGIES), min_size=1, max_size=6),
        window_tokens=st.none() | st.integers(1, 60),
        has_sinks=st.booleans(),
        seed=st.integers(0, 1000),
    )
    @settings(max_examples=examples)
    def run(
        maps: list[ShardMap],
        strategies: list[tuple[str, Cut]],
        window_tokens: int | None,
        has_sinks: bool,
        seed: int,
    ) -> None:
        rng = np.random.default_rng(seed)
        sinks = torch.linspace(-2, 3, HEADS) if has_sinks else None
        ledgers = [fragmented(rng) for _ in range(LANES)]
        requests = [
            Request(f"r{index}", shards, index, ledgers, kind.dtype) for index, shards in enumerate(maps)
        ]
        caches = [
            KVCache(
                num_layers=1, kv_heads=KV_HEADS, head_dim=HEAD_DIM, num_blocks=ledger.blocks,
                block_tokens=BLOCK_TOKENS, device=host_device(kind.dtype),
            )
            for ledger in ledgers
        ]  # fmt: skip
        at = [0] * len(requests)
        turns = 0
        while any(position < request.shards.tokens for position, request in zip(at, requests, strict=True)):
            chunks = []
            for index, request in enumerate(requests):
                left = request.shards.tokens - at[index]
                size = int(rng.integers(0, min(left, int(rng.choice([17, 17, 60]))) + 1))
                if size:
                    if window_tokens is not None:
                        request.spoil(caches, at[index] + 1 - window_tokens)
                    strategy, cut = strategies[turns % len(strategies)]
                    turns += 1
                    chunks.append(Chunk(index, at[index], at[index] + size, strategy, cut))
                    at[index] += size
            if not chunks:
                continue
            results = run_step(backends, caches, requests, chunks, window_tokens, sinks)
            for chunk, found in zip(chunks, results, strict=True):
                wanted = requests[chunk.request].wanted(chunk.start, chunk.stop, window_tokens, sinks)
                torch.testing.assert_close(found.double(), wanted, rtol=kind.tolerance, atol=kind.tolerance)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_IN_PLACE_TOKENS", 2 * BLOCK_TOKENS)  # the pools are small
        patch.setattr(attention, "_GATHERED_TOKENS", 4 * BLOCK_TOKENS)
        run()


def test_lanes_join_only_when_the_context_reaches_them() -> None:
    shards = ShardMap((Segment(1, 0, 8), Segment(0, 8, 16), Segment(2, 16, 24)))

    def entry(start: int, stop: int) -> SpreadEntry:
        return SpreadEntry(shards, 1, (Extent(start, stop - start),), stop, np.arange(2))

    assert entry(0, 8).holders == (1,)
    assert entry(4, 9).holders == (1, 0)
    assert entry(16, 17).holders == (1, 0, 2)
    assert plan_spread(1, [entry(0, 8)], [], BLOCK_TOKENS) is None
