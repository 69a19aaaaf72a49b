"""Lives of a controller with random requests and tiers, whose steps real ranks then run; the reference is `transformers`.

Ranks report their reads and writes late and one by one. The reference computes each text alone and as a whole, and samples it with
the engine's own sampler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import torch

from medha.api.kv_cache_spec import StoreSpec
from medha.kv.prefix_cache import HASH_CHARACTERS, PrefixHasher
from medha.scheduler.replica_config import ReplicaConfig
from medha.wire.messages import Cancel, ControllerEvent, DiskReport, Done, Sampling, Step, StepProfile, Submit
from medha_worker.device import host_device
from medha_worker.kernels.torch_race import SparseRace
from medha_worker.model.host_blocks import HostBlocks
from medha_worker.model.sampler import SampledToken, SequenceSampler
from medha_worker.model.token_sampler import TokenSampler
from medha_worker.rank.peer_reader import PeerBlocks

from ..ranks import Ranks
from .test_controlled import MOST_EVENTS, VOCAB, Life
from .test_store_on_grids import threads_of

BLOCK_TOKENS = 4
MODEL_TOKENS = 150
TOLERANCE = 1e-4
SAMPLED = Sampling(temperature=0.8, top_p=0.95, ignore_eos=True)
PROFILE = StepProfile(0.001, 0.01, 1e-7, 0.0001)
"""Times by which KV is read faster than it is computed."""
MODEL = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.1,
}  # fmt: skip
HASHER = PrefixHasher(BLOCK_TOKENS, b"secret")


@dataclass(frozen=True)
class Tiers:
    """The tiers of a replica; sizes are blocks of all lanes together, and 0 where there is none."""

    host_blocks: int
    disk_blocks: int
    has_store: bool
    streamed_blocks: int


@dataclass(frozen=True)
class Query:
    """A request, and the reference's text for it: prompt and output."""

    name: str
    tokens: int
    max_tokens: int | None
    text: npt.NDArray[np.int32]


class Reference:
    """The texts and logits of `transformers`, for one request at a time."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._sampler = TokenSampler(SparseRace(), host_device(torch.float32))

    def text(
        self, ids: npt.NDArray[np.int32], sampling: Sampling, sample_index: int, max_tokens: int
    ) -> npt.NDArray[np.int32]:
        """Return a prompt, and `max_tokens` tokens that are sampled after it."""
        sequence = SequenceSampler(
            sampling, seed=1, sample_index=sample_index, tokens=ids, prompt_length=len(ids), vocab_size=VOCAB
        )
        text, new, cache = ids.tolist(), ids.tolist(), None
        with torch.inference_mode():
            for _ in range(max_tokens):
                found = self._model(torch.tensor([new]), past_key_values=cache, use_cache=True)
                cache = found.past_key_values
                (token,) = self._sampler.sample(found.logits[0, -1:], [sequence])
                assert isinstance(token, SampledToken)
                sequence.append(token.token)
                new = [token.token]
                text += new
        return np.array(text, dtype=np.int32)

    def logits(self, text: npt.NDArray[np.int32]) -> torch.Tensor:
        """Return the logits after each token of a text: [tokens, vocabulary]."""
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor(text.astype(np.int64))[None]).logits[0]
        return logits


@dataclass
class TierLife(Life):
    """A life whose ranks report what steps and lookups ask of files and store, late and one by one."""

    texts: dict[str, npt.NDArray[np.int32]] = field(default_factory=dict)  # by request
    prompts: dict[str, npt.NDArray[np.int32]] = field(default_factory=dict)
    there: list[set[str]] = field(default_factory=list)
    """Objects of the store that each lane's ranks find: they run ahead of other lanes, whose objects of this life may be later."""
    reports: list[DiskReport] = field(default_factory=list)
    seen: int = 0
    extents: dict[int, int] = field(default_factory=dict)  # by lane: how many there have been

    @property
    def is_busy(self) -> bool:
        return bool(self.moving or self.reports)

    def submit(self, query: Query, sampling: Sampling, *, peer: str = "", sampled: int = 0) -> None:
        """Let a request arrive, of whose output another replica has `sampled` so many tokens."""
        tokens = query.tokens + sampled
        name, _, sample = query.name.partition(".")
        prompt = f"{query.name} goes on" if sampled else name
        self.texts[query.name], self.prompts[prompt] = query.text, query.text[:tokens]
        self.handle(
            Submit(
                query.name, prompt, tokens, query.tokens, seed=1, sample_index=int(sample),
                sampling=replace(sampling, max_tokens=query.max_tokens),
                block_hashes=HASHER.hashes(query.text[:tokens]), age_seconds=self.random.choice([0.0, 5.0]),
                peer=peer, peer_tokens=tokens if peer else 0,
            )
        )  # fmt: skip

    def handle(self, event: ControllerEvent) -> None:
        super().handle(event)
        for look in self.lookups:
            count = 0
            while count < len(look.objects) and look.objects[count] in self.there[look.lane]:
                count += 1
            self._report(look.lane, DiskReport(0, looked_up=((look.number, count),)))
        self.lookups = []
        for step in self.steps[self.seen :]:
            self._carry_out(step)
        self.seen = len(self.steps)

    def _carry_out(self, step: Step) -> None:
        """Report what a step reads and writes, in the order in which ranks apply it."""
        for load in (load for load in step.loads if load.count):
            extent = self._next_extent(load.lane)
            if load.file or load.ticket:
                self._report(load.lane, DiskReport(0, loaded=((extent, 1e-6),)))
        for source in (*step.grows, *step.admits):
            for eviction in source.evictions:
                for _ in eviction.offloads:
                    self._next_extent(eviction.lane)
        for write in step.writes:
            self._report(write.lane, DiskReport(0, written=(write.file.name,)))
        for store in step.stores:
            self.there[store.lane].add(store.object.name)
            self._report(store.lane, DiskReport(0, stored=(store.object.name,)))

    def _next_extent(self, lane: int) -> int:
        number = self.extents.get(lane, 0)
        self.extents[lane] = number + 1
        return number

    def _report(self, lane: int, report: DiskReport) -> None:
        ranks = self.controller.config.topology.ranks_of_lane(lane)
        self.reports += [replace(report, rank=rank, lane=lane) for rank in ranks]

    def move(self) -> None:
        if self.reports and (not self.moving or self.random.random() < 0.5):
            self.now += 0.001
            self.handle(self.reports.pop(0))
            return
        super().move()

    def outcome(self, step: Step) -> Done:
        """Return what ranks report of a step, with the hashes of the blocks that it fills with output."""
        hashes = []
        for entry in step.entries:
            last = entry.extents[-1]
            known = last.start + (last.count - 1) * last.stride + 2  # with the token that it samples
            if entry.samples and known % BLOCK_TOKENS == 0:
                hashes.append((entry.id, HASHER.hashes(self.texts[entry.id][:known])[-HASH_CHARACTERS:]))
        return replace(super().outcome(step), block_hashes=tuple(hashes))


def random_queries(
    random: Random, config: ReplicaConfig, reference: Reference, sampling: Sampling, earlier: list[Query]
) -> list[Query]:
    """Return requests, many of which continue a text of `earlier` ones or share a prefix; some exceed the pools."""
    most = min(config.longest_tokens, MODEL_TOKENS) - 20
    beginnings = [np.random.default_rng(number).integers(0, VOCAB, most) for number in range(2)]
    beginnings += [one.text for one in earlier]
    queries: list[Query] = []
    for number in range(random.randint(3, 8)):
        tokens = random.choice(
            [1, BLOCK_TOKENS, random.randint(1, 40), random.randint(40, most), most, most // 2]
        )
        ids = np.random.default_rng(50 + number).integers(0, VOCAB, tokens)
        shared = random.choice(beginnings)[: max(tokens - random.choice([0, 1, 7, tokens // 2]), 0)]
        ids[: len(shared)] = shared
        max_tokens = random.choice([None, 1, 2, 5, 12, 20])
        for sample in range(random.choice([1, 1, 1, 2])):
            length = MODEL_TOKENS - tokens if max_tokens is None else max_tokens
            text = reference.text(ids.astype(np.int32), sampling, sample, length)
            queries.append(Query(f"r{number}.{sample}", tokens, max_tokens, text))
    return queries


def serve(life: TierLife, queries: list[Query], sampling: Sampling) -> None:
    """Let a controller serve requests to the end; some are cancelled."""
    random, left = life.random, list(queries)
    cancels = random.random() < 0.5
    for _ in range(MOST_EVENTS):
        if not left and not life.is_busy:
            break
        chance = random.random()
        running = [one.name for one in queries if one not in left and one.name not in life.ends]
        if left and (chance < 0.15 or not life.is_busy):
            life.submit(left.pop(0), sampling)
        elif cancels and running and chance < 0.17:
            name = random.choice(running)
            life.end(name, "cancelled")
            life.handle(Cancel(name))
        else:
            life.move()
    assert set(life.ends) == {one.name for one in queries}, "not all have ended"
    check_nothing_is_left(life)


def check_nothing_is_left(life: TierLife) -> None:
    """Check that requests have ended as they should, and hold nothing in any tier."""
    assert set(life.ends.values()) <= {"length", "cancelled", "moved"}
    pools = life.controller.pools
    assert life.controller.idle
    assert pools.held_blocks == 0
    for tier in pools.tiers:
        tier.check()
        assert tier.served_blocks == 0
    for disk in pools.disks:
        disk.check()
    for lane in range(life.controller.config.topology.kv):
        ledger = pools.ledger(lane)
        ledger.check()
        assert ledger.free_streamed_blocks == ledger.streamed_blocks


def check_on_ranks(
    ranks: Ranks,
    life: TierLife,
    reference: Reference,
    tiers: Tiers,
    place: Path,
    *,
    steps_ahead: int = 1,
    peers: Callable[[int, HostBlocks], PeerBlocks] | None = None,
) -> None:
    """Run a life's steps on ranks, and compare every sampled token and all logits with the reference.

    Files and objects are in `place`; `peers` returns what hands KV over, by rank.
    """
    config, lanes = life.controller.config, ranks.topology.kv
    prompts = life.prompts | {
        aside.prompt: life.texts[aside.id][: aside.tokens] for aside in life.asides.values()
    }
    reports: list[DiskReport] = []
    store = StoreSpec(url=f"file://{place}/shared")
    samples, logits = ranks.run(
        life.steps,
        prompts,
        kv_blocks=config.kv_blocks,
        block_tokens=BLOCK_TOKENS,
        steps_ahead=steps_ahead,
        host_blocks=tiers.host_blocks // lanes,
        disk=place / "kv" if tiers.disk_blocks else None,
        store=threads_of(ranks, store, reports) if tiers.has_store else None,
        streamed_blocks=tiers.streamed_blocks // lanes,
        peers=peers,
        streams_in_place=life.random.random() < 0.5,
    )
    for report in (*ranks.disk_reports, *reports):
        missed = report.not_loaded, report.not_written, report.not_stored, report.damaged
        assert not any(missed), report
        assert (report.fault, report.store_fault) == ("", "")
    places = [  # samples come lane after lane
        (entry.id, entry.extents[-1].last + 1)
        for lane in range(lanes)
        for step in life.steps
        for entry in step.entries
        if entry.samples and entry.lane == lane
    ]
    for sample, (name, at) in zip(samples, places, strict=True):
        assert (sample.id, sample.token) == (name, int(life.texts[name][at])), at
    for name in {name for name, _ in logits}:
        computed = sorted(at for other, at in logits if other == name)
        found = torch.stack([logits[name, at] for at in computed])
        wanted = reference.logits(life.texts[name])[computed]
        assert float((found - wanted).abs().max()) <= TOLERANCE, name
