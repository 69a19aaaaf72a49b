"""Two replicas of every kind of grid share a store: the second computes with KV that the first one has written.

Both are real controllers and real ranks; the store is a directory, or a real S3-compatible service.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cluster.binaries import CannotBuild
from medha.api.kv_cache_spec import StoreSpec
from medha.kv.prefix_cache import HASH_CHARACTERS
from medha.model.kv_dtype import KvDtype
from medha.scheduler.controller import ReplicaController
from medha.topology import Topology
from medha.wire.messages import ControllerEvent, DiskReport, Done, Sampling, Step
from medha_worker.model.host_blocks import HostBlocks
from medha_worker.rank.kv_objects import KvObjects
from medha_worker.rank.store_threads import StoreThreads
from object_store import ACCESS_KEY, BUCKET, SECRET_KEY, object_store

from ..model.test_model_transformer import save_reference
from ..ranks import Ranks
from .grids import STRIPED_GRID_ROWS, model_of
from .test_controlled import GREEDY, MODEL, VOCAB, Life
from .test_host_tier_on_grids import SAMPLED, Answers
from .test_peer_kv_on_grids import BLOCK_TOKENS, DOCUMENTS, HASHER, HOST_BLOCKS, PROFILE, config, submit

pytest.importorskip("obstore")
pytestmark = pytest.mark.timeout(1200)  # the first one may have to build the service

OBJECT_BLOCKS = 3
KEY = "11" * 32


@dataclass
class StoreLife(Life):
    """A life of a replica with a store, which its ranks use one after the other while the controller decides.

    What its ranks write is there at once, so that their own runs, which come later, find it there or write it.
    """

    there: set[str] = field(default_factory=set)
    seen: int = 0
    extents: dict[int, int] = field(default_factory=dict)  # by lane: how many there are
    loaded: int = 0
    written: int = 0
    texts: dict[str, npt.NDArray[np.int32]] = field(default_factory=dict)  # prompts and what follows them

    def outcome(self, step: Step) -> Done:
        """Return what ranks report of a step, with the hashes of the blocks that a text fills, if it is known."""
        done, filled = super().outcome(step), []
        for name in (one.id for one in done.samples if one.id in self.texts):
            request = self.controller.find(name)
            assert request is not None
            tokens = request.submit.tokens + self.sampled.get(name, 0) + 1
            if tokens % BLOCK_TOKENS == 0:
                filled.append((name, HASHER.hashes(self.texts[name][:tokens])[-HASH_CHARACTERS:]))
        return replace(done, block_hashes=tuple(filled))

    def handle(self, event: ControllerEvent) -> None:
        super().handle(event)
        reports: list[DiskReport] = []
        ranks_of = self.controller.config.topology.ranks_of_lane
        for look in self.lookups:
            count = 0
            while count < len(look.objects) and look.objects[count] in self.there:
                count += 1
            reports += [
                DiskReport(rank, look.lane, looked_up=((look.number, count),)) for rank in ranks_of(look.lane)
            ]
        self.lookups = []
        for step in self.steps[self.seen :]:
            for eviction in (one for source in (*step.grows, *step.admits) for one in source.evictions):
                self.extents[eviction.lane] = self.extents.get(eviction.lane, 0)
            for load in (load for load in step.loads if load.count):
                extent = self.extents.get(load.lane, 0)
                self.extents[load.lane] = extent + 1
                if load.is_stored:
                    assert load.file in self.there
                    self.loaded += load.count
                    reports += [
                        DiskReport(rank, load.lane, loaded=((extent, 1e-6),)) for rank in ranks_of(load.lane)
                    ]
            for source in (*step.grows, *step.admits):
                for eviction in source.evictions:
                    self.extents[eviction.lane] += len(eviction.offloads)
            for store in step.stores:
                self.there.add(store.object.name)
                self.written += OBJECT_BLOCKS
                reports += [
                    DiskReport(rank, store.lane, stored=(store.object.name,)) for rank in ranks_of(store.lane)
                ]
        self.seen = len(self.steps)
        for report in reports:
            self.handle(report)


@pytest.fixture(params=["files", pytest.param("S3", marks=pytest.mark.long)])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StoreSpec]:
    if request.param == "files":
        yield StoreSpec(url=f"file://{tmp_path}/shared/kv")
        return
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    try:
        with object_store(tmp_path / "s3", tmp_path / "s3.log") as service:
            yield StoreSpec(url=f"s3://{BUCKET}/some/prefix", endpoint=service.endpoint)
    except CannotBuild as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("shape", "architecture", "kv_dtype", "striped"),
    [
        pytest.param((1, 1, 1), "llama", "auto", False, id="one rank"),
        pytest.param((2, 1, 1), "llama-biased", "auto", False, id="TP2"),
        pytest.param((1, 2, 1), "mistral", "auto", False, id="SPP2"),
        pytest.param((1, 1, 2), "qwen3", "auto", True, id="KVP2, striped"),
        pytest.param((1, 1, 2), "qwen3", "auto", False, id="KVP2", marks=pytest.mark.long),
        pytest.param((1, 1, 1), "llama", "fp8", False, id="one rank, FP8", marks=pytest.mark.long),
    ],
)
def test_texts_are_those_without_a_store_and_less_is_computed(
    shape: tuple[int, int, int],
    architecture: str,
    kv_dtype: KvDtype,
    striped: bool,
    place: StoreSpec,
    tmp_path: Path,
) -> None:
    model = tmp_path / "model"
    save_reference(model, architecture, **MODEL | {"head_dim": 16})
    tolerance = 1e-4 if kv_dtype == "auto" else 0.05
    compare(Ranks(Topology(*shape), model, kv_dtype=kv_dtype), place, tolerance, striped=striped)


@pytest.mark.parametrize(("grid", "striped"), STRIPED_GRID_ROWS)
def test_texts_are_those_without_a_store_on_every_grid(grid: Topology, striped: bool, tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_reference(model, "llama", **model_of(grid))
    place = StoreSpec(url=f"file://{tmp_path}/shared/kv")
    compare(Ranks(grid, model), place, 1e-4, striped=striped)


def compare(ranks: Ranks, place: StoreSpec, tolerance: float, *, striped: bool) -> None:
    """Compare texts, logits and what is computed with those without a store."""
    rng = np.random.default_rng(5)
    documents = [rng.integers(0, VOCAB, 70 + 10 * number).astype(np.int32) for number in range(DOCUMENTS)]
    questions = {
        f"q{number}": np.concatenate([document, rng.integers(0, VOCAB, 9)]).astype(np.int32)
        for number, document in enumerate(documents)
    }
    reading = {f"d{number}": document for number, document in enumerate(documents)}
    try:
        for sampling in (GREEDY, SAMPLED):
            alone = life_of(ranks, striped=striped, with_store=False)
            texts, logits = lived(ranks, alone, questions, sampling, place)
            writer = life_of(ranks, striped=striped)
            lived(ranks, writer, reading, sampling, place)
            assert writer.written >= (DOCUMENTS * 60 if sampling is GREEDY else 0) // BLOCK_TOKENS // 2

            reader = life_of(ranks, striped=striped, there=writer.there)
            answers, computed = lived(ranks, reader, questions, sampling, place)
            assert reader.loaded > 0
            assert answers == texts
            for at in computed.keys() & logits.keys():
                assert float((computed[at] - logits[at]).abs().max()) <= tolerance, at
            assert computed.keys() < logits.keys(), "some prefill was avoided"
            counts = reader.controller.pools.store
            assert counts is not None
            assert counts.counts.hits == DOCUMENTS
            assert counts.counts.failed_loads == 0
    finally:
        ranks.close()


@pytest.mark.parametrize(
    ("shape", "architecture"),
    [
        pytest.param((1, 1, 1), "llama", id="one rank"),
        pytest.param((2, 1, 1), "llama-biased", id="TP2", marks=pytest.mark.long),
        pytest.param((1, 2, 1), "mistral", id="SPP2", marks=pytest.mark.long),
    ],
)
def test_a_replica_that_takes_over_reads_the_output_of_a_running_request(
    shape: tuple[int, int, int], architecture: str, tmp_path: Path
) -> None:
    model, place = tmp_path / "model", StoreSpec(url=f"file://{tmp_path}/shared")
    save_reference(model, architecture, **MODEL | {"head_dim": 16})
    ranks = Ranks(Topology(*shape), model)
    document = np.random.default_rng(5).integers(0, VOCAB, 50).astype(np.int32)
    object_tokens, output_tokens, lost_after = OBJECT_BLOCKS * BLOCK_TOKENS, 60, 45
    try:
        alone = life_of(ranks, striped=False, with_store=False)
        texts, logits = lived(ranks, alone, {"q": document}, GREEDY, place, output_tokens)
        whole = np.concatenate([document, texts["q"]]).astype(np.int32)

        writer = life_of(ranks, striped=False)
        writer.texts["q"] = whole
        lived(ranks, writer, {"q": document}, GREEDY, place, output_tokens)
        assert (
            writer.written // OBJECT_BLOCKS
            == (len(whole) - 1) // object_tokens
            > len(document) // object_tokens
        )

        resumed = whole[: len(document) + lost_after]
        reader = life_of(ranks, striped=False, there=writer.there)
        answers, computed = lived(ranks, reader, {"q": resumed}, GREEDY, place, output_tokens - lost_after)
        assert reader.loaded // OBJECT_BLOCKS == (len(resumed) - 1) // object_tokens
        assert answers["q"] == texts["q"][lost_after:]
        for at in computed.keys() & logits.keys():
            assert float((computed[at] - logits[at]).abs().max()) <= 1e-4, at
        assert min(position for _, position in computed) >= reader.loaded * BLOCK_TOKENS
    finally:
        ranks.close()


def life_of(
    ranks: Ranks, *, striped: bool, with_store: bool = True, there: set[str] | None = None
) -> StoreLife:
    base = replace(config(ranks, striped=striped), peer_block_seconds=None)
    if with_store:
        base = replace(base, store_block_seconds=1e-9, object_blocks=OBJECT_BLOCKS)
    return StoreLife(ReplicaController(base, PROFILE), Random(1), there=set(there or ()))


def lived(
    ranks: Ranks,
    life: StoreLife,
    prompts: dict[str, npt.NDArray[np.int32]],
    sampling: Sampling,
    place: StoreSpec,
    max_tokens: int = 4,
) -> tuple[Answers, dict[tuple[str, int], torch.Tensor]]:
    """Let a controller decide, then the ranks compute what it has decided."""
    for name, ids in prompts.items():
        one = submit(name, ids, sampling)
        life.handle(replace(one, sampling=replace(sampling, max_tokens=max_tokens)))
    while life.moving:
        life.move()
    assert set(life.ends.values()) == {"length"}
    reports: list[DiskReport] = []
    samples, logits = ranks.run(
        life.steps,
        prompts,
        kv_blocks=life.controller.config.kv_blocks,
        block_tokens=BLOCK_TOKENS,
        host_blocks=HOST_BLOCKS // ranks.topology.kv,
        store=None if life.controller.pools.store is None else threads_of(ranks, place, reports),
    )
    assert not [one for one in reports if one.not_loaded or one.not_stored or one.store_fault], reports
    for tier in life.controller.pools.tiers:
        tier.check()
    answers: Answers = {name: [] for name in prompts}
    for sample in samples:
        answers[sample.id].append(sample.token)
    return answers, logits


def threads_of(
    ranks: Ranks, place: StoreSpec, reports: list[DiskReport]
) -> Callable[[int, HostBlocks], StoreThreads]:
    """Return a function that makes the threads of a rank; lanes share what their equal ranks write."""

    def make(rank: int, host: HostBlocks) -> StoreThreads:
        at = ranks.topology.coordinates(rank)
        objects = KvObjects(place, f"stage {at.stream}, tensor {at.tensor}", host.block_bytes)
        assert objects.shared_key() == KvObjects(place, "another", 1).shared_key()
        threads = StoreThreads(objects, host, time.monotonic)
        threads.begin_epoch(DiskReport(rank, at.kv), KEY, reports.append)
        return threads

    return make
