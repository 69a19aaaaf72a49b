"""Random steps for real ranks: the ledgers of the replica are real, and the content of each step is random."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from medha.kv.context_parallel import OWNER, PASS_KV, PASS_Q, balanced, striped
from medha.kv.pools import KvPools, Placed, WindowPool
from medha.kv.prefix_cache import PrefixHasher
from medha.wire.messages import Admit, Extent, Grow, Sampling, Step, StepEntry

GREEDY = Sampling(temperature=0.0, ignore_eos=True, prompt_logprobs=2)

Cut = Callable[[int, int, int], list[tuple[Extent, ...]]]
STRATEGIES: tuple[tuple[str, Cut], ...] = (
    (OWNER, balanced),
    (PASS_KV, balanced),
    (PASS_Q, balanced),
    (PASS_KV, striped),
    (PASS_Q, striped),
)


@dataclass(frozen=True)
class Query:
    """A prompt, and the number of tokens that are sampled after it.

    Prompts of one family begin with the same tokens, and end with `own_tokens` that no other prompt has. A fork has
    another request's prompt, and shares all of its KV but that of the last `apart_tokens`.
    """

    prompt_tokens: int
    output_tokens: int
    family: int = 0
    fork: bool = False
    own_tokens: int = 0
    apart_tokens: int = 1


@dataclass
class Running:
    name: str
    asked: Query
    prompt: str
    computed: int
    strategies: list[tuple[str, Cut]]
    there: int = 0  # tokens that other requests have computed

    @property
    def length(self) -> int:
        """Number of positions that are computed until it ends; the last sampled token is not one of them."""
        return self.asked.prompt_tokens + self.asked.output_tokens - 1


@dataclass
class Planner:
    """Writes the steps of one replica."""

    lanes: int
    tokens_per_lane: int
    striped: bool
    rng: np.random.Generator
    kv_blocks: int
    block_tokens: int = 4
    vocab: int = 160
    chunks: tuple[
        int, ...
    ] = ()  # sizes of each prompt's chunks, one in each step; empty: random sizes in random steps
    prefix_caching: bool = True
    window_pool: WindowPool | None = None  # ranks free KV before windows: only prompts that just ended fork
    joined: int = 0  # number of grows that added a lane
    steps: list[Step] = field(default_factory=list)
    prompts: dict[str, npt.NDArray[np.int32]] = field(default_factory=dict)
    running: list[Running] = field(default_factory=list)
    crumbs: list[str] = field(default_factory=list)  # requests that hold blocks and never run
    _starved: bool = False  # whether an admission or a grow found no free KV

    def __post_init__(self) -> None:
        self.pools = KvPools(
            lanes=self.lanes,
            kv_blocks=self.kv_blocks,
            block_size_tokens=self.block_tokens,
            tokens_per_lane=self.tokens_per_lane,
            prefix_caching=self.prefix_caching,
            stripes_prompts=self.striped,
            window_pool=self.window_pool,
        )
        self.hasher = PrefixHasher(self.block_tokens, b"secret")

    def run(
        self, asked: Sequence[Query], strategies: list[tuple[str, Cut]], *, one_by_one: bool = False
    ) -> dict[str, Running]:
        """Write steps until all of these requests have ended; return each of them by name."""
        waiting = list(asked)
        everyone: dict[str, Running] = {}
        while waiting or self.running:
            grows, admits = self._grows(), []
            if waiting and (not self.running or (not one_by_one and self.rng.random() < 0.5)):
                admit = self._admit(waiting[0], strategies)
                if admit is not None:
                    waiting.pop(0)
                    admits.append(admit)
                    everyone[admit.id] = self.running[-1]
            self._step(admits, grows)
            self._make_room()
        self._tell()  # the last releases
        return everyone

    def crumble(self, run_blocks: Sequence[int]) -> None:
        """Fragment the pools as serving does: fill each lane with requests, and end many of them in random order.

        Each request holds one of the numbers `run_blocks` of blocks, and computes nothing. The blocks of some of them
        stay cached until they are evicted.
        """
        admits = []
        for lane in range(self.lanes):
            while True:
                tokens = int(self.rng.choice(run_blocks)) * self.block_tokens
                name = f"crumb{len(self.prompts)}"
                ids = self._own_ids(tokens)
                hashes = self.hasher.hashes(ids)
                placed = self.pools.admit(name, tokens, tokens, block_hashes=hashes, owners=[lane])
                if placed is None:
                    break
                self.prompts[name] = ids
                self.crumbs.append(name)
                admits.append(_admit_of(name, Query(tokens, 0), placed))
        self._tell(admits=admits)
        for name in self.rng.permutation(self.crumbs).tolist():
            fate = self.rng.random()
            if fate < 0.2:
                self.pools.computed(name, len(self.prompts[name]))
            if fate < 0.6:  # if fewer ended, the free blocks would lie in long runs
                self.crumbs.remove(name)
                self.pools.release(name)
        self._tell()

    def _make_room(self) -> None:
        """End one crumb if a request has found no free KV; the next step releases its blocks first."""
        if self._starved:
            assert self.crumbs or self.running, "the pools of this test are large enough"
            if self.crumbs:
                self.pools.release(self.crumbs.pop())
            self._starved = False

    def _own_ids(self, count: int) -> npt.NDArray[np.int32]:
        return self.rng.integers(0, self.vocab, count).astype(np.int32)

    def _admit(self, asked: Query, strategies: list[tuple[str, Cut]]) -> Admit | None:
        """Give a request its KV: shared with one of the same prompt, cached, or new; None if too little is free."""
        name = f"r{sum(not one.startswith('crumb') for one in self.prompts)}"
        parent = next((one for one in self.running if asked.fork and self._can_fork(one)), None)
        if parent is not None:
            asked = replace(
                asked, prompt_tokens=parent.asked.prompt_tokens, family=parent.asked.family, own_tokens=0,
                apart_tokens=1 if self.window_pool else asked.apart_tokens,
            )  # fmt: skip
            ids = self.prompts[parent.name]
        else:
            alike = np.random.default_rng(asked.family).integers(0, self.vocab, asked.prompt_tokens)
            own_tokens = min(asked.own_tokens, asked.prompt_tokens)
            ids = alike.astype(np.int32)
            ids[asked.prompt_tokens - own_tokens :] = self._own_ids(own_tokens)
        reserved = asked.prompt_tokens
        reserved += asked.output_tokens if self.rng.random() < 0.5 else 0  # otherwise it grows later
        placed: Placed | None
        shared = 0
        if parent is not None:
            shared = max(asked.prompt_tokens - asked.apart_tokens, 0)
            placed = self.pools.fork(parent.name, name, shared, reserved)
        else:
            hashes = self.hasher.hashes(ids)
            placed = self.pools.admit(name, asked.prompt_tokens, reserved, block_hashes=hashes)
        if placed is None:
            self._starved = True
            return None
        self.prompts[name] = ids
        there = shared or placed.cached_tokens
        self.running.append(Running(name, asked, name, there, strategies, there))
        return _admit_of(name, asked, placed, parent.name if parent else None, shared)

    def _can_fork(self, one: Running) -> bool:
        prompt_tokens = one.asked.prompt_tokens
        return one.computed == prompt_tokens if self.window_pool else one.computed >= prompt_tokens

    def _grows(self) -> list[Grow]:
        """Reserve KV for the next output of requests that have used up theirs; ranks replay this before admits."""
        grows = []
        for one in self.running:
            shards = self.pools.shards(one.name)
            if one.computed >= shards.tokens:
                grow = self.pools.grow(one.name, one.computed + 1 + int(self.rng.integers(6)))
                if grow is None:
                    self._starved = True
                    continue
                grows.append(grow)
                self.joined += self.pools.shards(one.name).lanes != shards.lanes
        return grows

    def _step(self, admits: list[Admit], grows: list[Grow]) -> None:
        """Write a step of some of the running requests, and remove those that it finishes."""
        entries: list[StepEntry] = []
        for one in self.running:
            if not self.chunks and self.rng.random() < 0.3:
                continue
            if one.computed >= self.pools.shards(one.name).tokens:
                continue  # no KV was free for it to grow
            left = one.asked.prompt_tokens - one.computed
            count = self._chunk(one, left) if left > 0 else 1
            entries += self._entries(one, count)
            one.computed += count
        lanes = {lane for entry in entries for lane in self._lanes(entry)}
        if self.rng.random() < 0.3:  # sometimes lanes take part that are not needed
            lanes = set(range(self.lanes))
        self._tell(entries, admits, grows, lanes)
        for one in self.running:
            self.pools.computed(one.name, min(one.computed, one.asked.prompt_tokens))
        for one in [one for one in self.running if one.computed == one.length]:
            self.running.remove(one)
            self.pools.release(one.name, one.computed)

    def _tell(
        self,
        entries: Sequence[StepEntry] = (),
        admits: Sequence[Admit] = (),
        grows: Sequence[Grow] = (),
        lanes: set[int] | None = None,
    ) -> None:
        self.steps.append(
            Step(
                step_id=len(self.steps), epoch=0, entries=tuple(entries), grows=tuple(grows), admits=tuple(admits),
                inserts=self.pools.take_inserts(), releases=self.pools.take_releases(), lanes=tuple(sorted(lanes or ())),
                state_hashes=self.pools.state_hashes(),
            )
        )  # fmt: skip
        self.pools.sent(self.steps[-1])

    def _chunk(self, one: Running, left: int) -> int:
        if not self.chunks:
            return min(left, int(self.rng.choice([1, 7, 16, 33, left])))
        ends = np.cumsum(self.chunks)
        return min(left, int(ends[ends.searchsorted(one.computed, side="right")]) - one.computed)

    def _entries(self, one: Running, count: int) -> list[StepEntry]:
        shards = self.pools.shards(one.name)
        start, stop = one.computed, one.computed + count
        samples = stop >= one.asked.prompt_tokens
        if len(shards.lanes) == 1:
            return [StepEntry(one.name, shards.owner, (Extent(start, count),), samples)]
        strategy, cut = one.strategies[int(self.rng.integers(len(one.strategies)))]
        extents: list[tuple[Extent, ...]] = [(Extent(start, count),)]
        if strategy != OWNER and stop <= one.asked.prompt_tokens:  # outputs are known to the owner alone
            extents = cut(start, stop, len(shards.lanes))
        return [
            StepEntry(one.name, lane, runs, samples and lane == shards.owner, strategy, shards.version)
            for lane, runs in zip(shards.lanes, extents, strict=False)
            if runs
        ]

    def _lanes(self, entry: StepEntry) -> set[int]:
        """Return the lanes that a step with this entry needs."""
        shards = self.pools.shards(entry.id)
        if entry.strategy in (PASS_KV, PASS_Q):
            return set(shards.lanes)
        return {entry.lane, *shards.participants(entry.extents[-1].start + entry.extents[-1].count)}


def _admit_of(
    name: str, asked: Query, placed: Placed, fork_of: str | None = None, shared_tokens: int = 0
) -> Admit:
    return Admit(
        id=name, prompt=name, tokens=asked.prompt_tokens, prompt_length=asked.prompt_tokens, seed=1, sampling=GREEDY,
        reserved_tokens=placed.shards.tokens, fork_of=fork_of, shared_tokens=shared_tokens, segments=placed.segments,
        stripings=placed.stripings, cached_tokens=placed.cached_tokens, prefixes=placed.prefixes, evictions=placed.evictions,
    )  # fmt: skip


def asked(most: int) -> st.SearchStrategy[Query]:
    """Return a strategy for requests with prompts of up to `most` tokens."""
    lengths = st.one_of(st.integers(1, 12), st.integers(13, most), st.sampled_from([16, 32, 48, 64]))
    own = st.sampled_from([0, 0, 3, 20])
    return st.builds(
        Query, lengths, st.integers(1, 5), st.integers(0, 1), st.booleans(), own, st.sampled_from([1, 1, 9])
    )
