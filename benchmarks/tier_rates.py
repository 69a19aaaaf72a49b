"""Rates of KV tiers without a server, for `tiers.py`: of fetches from host memory, and of reads from files and from a store in files."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from harness import Row, claim, in_turn, ratio

from medha.api.kv_cache_spec import StoreSpec
from medha.api.replica import SchedulingSpec, ServiceClass
from medha.kv.disk_tier import FILE_BLOCKS, file_name
from medha.kv.host_tier import TierCopy
from medha.kv.lane_replay import HostTierWork, ReadBlocks, StoreBlocks, WriteBlocks
from medha.kv.prefix_cache import HASH_CHARACTERS, PrefixHasher
from medha.kv.store_tier import object_blocks
from medha.scheduler.controller import ReplicaController
from medha.scheduler.replica_config import ReplicaConfig
from medha.topology import Topology
from medha.wire.frames import TokenIds
from medha.wire.messages import (
    ControllerEvent,
    DiskFile,
    DiskReport,
    HostTierFigures,
    Sampling,
    StageFree,
    Step,
    StepProfile,
    Submit,
    Tokens,
)
from medha_worker.device import host_device
from medha_worker.kernels.name_table import choose_kernels
from medha_worker.model.disk_blocks import DiskBlocks
from medha_worker.model.host_blocks import HostBlocks
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.kv_files import KvFiles
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.transformer import Transformer
from medha_worker.model.weights import Shard
from medha_worker.rank.executor import Executor
from medha_worker.rank.kv_objects import KvObjects
from medha_worker.rank.store_threads import StoreThreads

LEAST_RATE = 0.8
"""Least rate of a tier's reads, as a part of its own sequential rate."""
MOST_BESIDE = 1.1
"""Most that a decode step with a fetch beside it may take, as a multiple of one without."""
IDS = 10, 500  # of tokens that both presets have
BLOCK_TOKENS, ROOM_BLOCKS = 16, 200  # of the pool, beside a document
DECODING, DECODED_TOKENS, DECODING_PROMPT_TOKENS, PLAIN_STEPS = 4, 600, 64, 30
PROFILE = StepProfile(4e-3, 1e-4, 1e-8, 1e-5)  # to begin with; measured steps correct it
IDENTITY, KEY = "rates", "00" * 32
PIECE_BYTES = 4 * 2**20
READ_SECONDS = 300.0


# --- the host tier ---------------------------------------------------------------------------------


@dataclass
class Fetched:
    """Figures of fetches that a rank has measured."""

    alone_bytes_per_second: list[float] = field(default_factory=list)  # of each, while nothing else ran
    long_copy_bytes_per_second: list[float] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)  # of steps that decode and nothing else
    beside_seconds: list[float] = field(default_factory=list)  # of the same steps, with copies beside them
    pieces: int = 0


class LoneRank:
    """A controller and one rank, joined without sockets; the pool holds one document and a bit more."""

    def __init__(self, folder: Path, document_tokens: int, threads: int) -> None:
        torch.set_num_threads(threads)
        device, config = host_device(torch.float32), ModelConfig.from_directory(folder)
        self._vocab = config.vocab_size
        shard = Shard.whole(config)
        kernels = choose_kernels(shard.kernel_sizes(config), device, "bestEffort")
        model = Transformer.load(folder, config, shard, device=device, kernels=kernels)
        self._document_blocks = document_tokens // BLOCK_TOKENS
        pool = model.new_kv_cache(self._document_blocks + ROOM_BLOCKS, BLOCK_TOKENS)
        self.host = HostBlocks(pool, 3 * self._document_blocks)
        touch(self.host, self._document_blocks)
        seconds = self.host.seconds_per_block(time.perf_counter)
        self._executor = Executor(
            model,
            pool,
            vocab_size=self._vocab,
            eos_token_ids=(),
            clock=time.perf_counter,
            host_blocks=[self.host],
        )
        replica = ReplicaConfig(
            topology=Topology(),
            scheduling=SchedulingSpec(),
            service_classes={"default": ServiceClass(name="default", tpot_target_seconds=1.0)},
            default_class="default",
            max_model_len=config.max_model_len,
            block_size_tokens=BLOCK_TOKENS,
            kv_blocks=pool.num_blocks,
            long_threshold_tokens=config.max_model_len,
            host_tier=HostTierFigures(self.host.blocks, self.host.block_bytes, *seconds),
        )
        self.core = ReplicaController(replica, PROFILE)
        self._hasher = PrefixHasher(BLOCK_TOKENS, b"benchmark")
        self._steps: list[Step] = []
        self._ids: dict[str, TokenIds] = {}
        self.timed: list[tuple[Step, float, float]] = []  # steps, their seconds, and those of their copies

    def long_copy_rate(self) -> float:
        """Return the bytes per second of a fetch of a whole document that is copied at once, while nothing runs."""
        return long_copy_rate(self.host, self._document_blocks)

    def ask(self, name: str, ids: TokenIds, output_tokens: int) -> None:
        self._ids[name] = ids
        sampling = Sampling(temperature=0.0, ignore_eos=True, max_tokens=output_tokens)
        hashes = self._hasher.hashes(ids)
        self._handle(Submit(name, name, len(ids), len(ids), seed=1, sampling=sampling, block_hashes=hashes))

    def run(self, most_steps: int | None = None) -> None:
        """Run steps until nothing is left, or so many."""
        while self._steps and most_steps != 0:
            most_steps = None if most_steps is None else most_steps - 1
            step = self._steps.pop(0)
            self._executor.prepare(step)
            for name in self._executor.missing_prompts(step):
                ids = self._ids[name]
                self._executor.add_tokens(Tokens(prompt=name, offset=0, total=len(ids)), ids)
            plan = self._executor.plan(step)
            started = time.perf_counter()
            done = self._executor.run(plan)
            assert done is not None
            self.timed.append((step, time.perf_counter() - started, done.copy_seconds))
            self._handle(StageFree(step.step_id, 0))
            self._handle(done)

    def _handle(self, event: ControllerEvent) -> None:
        self._steps += [one for one in self.core.handle(event, time.perf_counter()) if isinstance(one, Step)]


def touch(host: HostBlocks, blocks: int) -> None:
    """Copy so many blocks in both directions, so that all pages are there."""
    for is_fetch in (False, True, True):
        host.copy([TierCopy(is_fetch, 0, 0, blocks)])


def long_copy_rate(host: HostBlocks, blocks: int) -> float:
    """Return the bytes per second of a fetch of so many blocks at once."""
    started = time.perf_counter()
    host.copy([TierCopy(True, 0, 0, blocks)])
    return blocks * host.block_bytes / (time.perf_counter() - started)


def fetched(folder: Path, document_tokens: int, rounds: int) -> Fetched:
    """Let two documents come back in turn, alone and beside requests that decode."""
    rank, found, rng = LoneRank(folder, document_tokens, threads=1), Fetched(), np.random.default_rng(0)
    texts = [rng.integers(*IDS, document_tokens).astype(np.int32) for _ in range(2)]
    names = iter(f"r{number}" for number in range(10_000))
    for turn in range(2 * rounds + 2):
        if turn > 2:
            found.long_copy_bytes_per_second.append(rank.long_copy_rate())
        rank.timed.clear()
        rank.ask(next(names), texts[turn % 2], 1)
        rank.run()
        sizes = [_fetched_blocks(step) * rank.host.block_bytes for step, *_ in rank.timed]
        if turn > 2:
            found.alone_bytes_per_second.append(sum(sizes) / sum(copied for *_, copied in rank.timed))
    for _ in range(DECODING):
        rank.ask(next(names), rng.integers(*IDS, DECODING_PROMPT_TOKENS).astype(np.int32), DECODED_TOKENS)
    rank.run(2 * PLAIN_STEPS)
    for turn in range(2 * rounds):
        rank.timed.clear()
        rank.run(PLAIN_STEPS)
        rank.ask(next(names), texts[turn % 2], 1)
        while len(rank.timed) < 2 * PLAIN_STEPS or rank.core.load().running > DECODING:
            rank.run(1)
        for step, seconds, _ in rank.timed:
            if all(entry.samples and entry.token_count == 1 for entry in step.entries) and not step.admits:
                (found.beside_seconds if step.fetches else found.decode_seconds).append(seconds)
                found.pieces += bool(step.fetches)
    return found


def _fetched_blocks(step: Step) -> int:
    return sum(part.count for one in step.fetches for part in one.blocks)


def fetch_figures(folder: Path, document_tokens: int, rounds: int) -> Row:
    """Measure fetches of documents, and return the figures that `fetch_claims` reads."""
    found = fetched(folder, document_tokens, rounds)
    return {
        "document_tokens": document_tokens,
        "alone_bytes_per_second": round(float(np.median(found.alone_bytes_per_second))),
        "long_copy_bytes_per_second": round(float(np.median(found.long_copy_bytes_per_second))),
        "decode_step_seconds": float(np.median(found.decode_seconds)),
        # A short document may come with the step that admits it, so that there are none.
        "decode_step_beside_a_fetch_seconds": float(np.median(found.beside_seconds))
        if found.pieces
        else None,
        "pieces": found.pieces,
    }


def fetch_claims(figures: Row) -> list[Row]:
    alone, long_copy = figures["alone_bytes_per_second"], figures["long_copy_bytes_per_second"]
    beside, decode = figures["decode_step_beside_a_fetch_seconds"], figures["decode_step_seconds"]
    found = [
        claim(
            "rate of a fetch alone, against one long copy", alone / long_copy, "ratio", LEAST_RATE, "more",
            f"{long_copy / 1e9:.2f} GB/s",
        )
    ]  # fmt: skip
    if beside is not None:
        found.append(
            claim(
                "decode step with a fetch beside it, against one without", beside / decode, "ratio", MOST_BESIDE, "less",
                f"{1e3 * decode:.2f} ms; {figures['pieces']} pieces",
            )
        )  # fmt: skip
    return found


# --- files, and a store in files -------------------------------------------------------------------


class TierReads:
    """The threads of a disk tier or of a store, and a document that they have written and read back; nothing else runs."""

    def __init__(self, folder: Path, host: HostBlocks, *, is_store: bool) -> None:
        """Write all of `host` into a new folder."""
        folder.mkdir()
        self._folder, self._host, self._is_store = folder, host, is_store
        self._reports: list[DiskReport] = []
        self._threads: DiskBlocks | StoreThreads
        most_blocks = object_blocks(host.block_bytes) if is_store else FILE_BLOCKS
        if is_store:
            objects = KvObjects(StoreSpec(url=f"file://{folder}"), IDENTITY, host.block_bytes)
            self._threads = StoreThreads(objects, host, time.perf_counter)
        else:
            size_bytes = 2 * host.blocks * host.block_bytes
            files = KvFiles(folder, IDENTITY, host.block_bytes)
            self._threads = DiskBlocks(files, host, time.perf_counter, size_bytes=size_bytes)
        self._threads.begin_epoch(DiskReport(0), KEY, self._reports.append)
        hashes = os.urandom(host.blocks * HASH_CHARACTERS // 2).hex()
        self._files = [
            _file(hashes, start, min(most_blocks, host.blocks - start))
            for start in range(0, host.blocks, most_blocks)
        ]
        self._run(HostTierWork(stores=self._stores()) if is_store else HostTierWork(writes=self._writes()))
        written = sum(len(one.stored if is_store else one.written) for one in self._reports)
        if written < len(self._files):
            raise RuntimeError(f"only {written} of {len(self._files)} files were written: {self._reports}")

    def _slots(self, file: DiskFile) -> tuple[tuple[int, int], ...]:
        return ((file.start, len(file.hashes) // HASH_CHARACTERS),)

    def _stores(self) -> tuple[StoreBlocks, ...]:
        return tuple(StoreBlocks(file, (), self._slots(file)) for file in self._files)

    def _writes(self) -> tuple[WriteBlocks, ...]:
        return tuple(WriteBlocks(file, n, 0, self._slots(file)) for n, file in enumerate(self._files))

    def rate(self) -> float:
        """Return the bytes per second at which all of it comes back into host memory.

        Raises:
            RuntimeError: some of it was not read.
        """
        forget(self._folder)
        self._reports.clear()
        reads = tuple(
            ReadBlocks(file.name, 0, number, self._slots(file), is_stored=self._is_store)
            for number, file in enumerate(self._files)
        )
        started = time.perf_counter()
        self._run(HostTierWork(reads=reads))
        seconds = time.perf_counter() - started
        loaded = sum(len(one.loaded) for one in self._reports)
        if loaded < len(self._files):
            raise RuntimeError(f"only {loaded} of {len(self._files)} files were read: {self._reports}")
        return self._host.blocks * self._host.block_bytes / seconds

    def _run(self, work: HostTierWork) -> None:
        self._threads.submit(work)
        if not self._threads.drain(READ_SECONDS):
            raise RuntimeError(f"files in {self._folder} took longer than {READ_SECONDS:g} s")

    def close(self) -> None:
        self._threads.close()


def _file(hashes: str, start: int, blocks: int) -> DiskFile:
    first = start * HASH_CHARACTERS
    own = hashes[first : first + blocks * HASH_CHARACTERS]
    before = hashes[max(first - HASH_CHARACTERS, 0) : first]
    return DiskFile(file_name(before, own), start, own, before)


class LongFile:
    """As many bytes in one file, which is read from its beginning to its end: the sequential rate of the disk."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        folder.mkdir()
        self._path, self._bytes = folder / "long", size_bytes
        piece = os.urandom(PIECE_BYTES)
        with self._path.open("wb") as file:
            for left in range(size_bytes, 0, -PIECE_BYTES):
                file.write(piece[:left])

    def rate(self) -> float:
        """Return the bytes per second of a read that neither verifies nor copies anything."""
        forget(self._path.parent)
        piece = bytearray(PIECE_BYTES)
        started = time.perf_counter()
        with self._path.open("rb", buffering=0) as file:
            while file.readinto(piece):
                pass
        return self._bytes / (time.perf_counter() - started)


def forget(folder: Path) -> None:
    """Let the kernel forget what it has in memory of a folder's files, so that they are read from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with suppress(OSError), path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def tier_rates(checkpoint: Path, folder: Path, size_bytes: int, rounds: int) -> Row:
    """Measure one long copy, one long read of the disk, and reads of as many bytes by the threads of a disk tier and of a store.

    `folder` is new; the kernel keeps nothing of its files in memory. Return the figures that `rate_claims` reads.
    """
    config = ModelConfig.from_directory(checkpoint)
    host = _host_blocks(config, size_bytes)
    folder.mkdir()
    long_file = LongFile(folder / "long", size_bytes)
    tiers = {name: TierReads(folder / name, host, is_store=name == "store") for name in ("disk", "store")}
    touch(host, host.blocks)
    calls = {"long_copy": lambda: long_copy_rate(host, host.blocks), "sequential": long_file.rate}
    try:
        found = in_turn(rounds, calls | {name: one.rate for name, one in tiers.items()})
    finally:
        for one in tiers.values():
            one.close()
        shutil.rmtree(folder)
    rates = {f"{name}_bytes_per_second": round(float(np.median(each))) for name, each in found.items()}
    return rates | {f"{name}_ratio": ratio(found[name], found["sequential"]) for name in tiers}


def _host_blocks(config: ModelConfig, size_bytes: int) -> HostBlocks:
    """Return host blocks of a checkpoint that take so many bytes, and have random content."""
    block_bytes = (
        4 * config.kv_tensors * config.num_layers * config.num_kv_heads * config.head_dim * BLOCK_TOKENS
    )
    blocks = size_bytes // block_bytes
    pool = KVCache(
        num_layers=config.num_layers, kv_heads=config.num_kv_heads, head_dim=config.head_dim, num_blocks=blocks,
        block_tokens=BLOCK_TOKENS, device=host_device(torch.float32),
    )  # fmt: skip
    host = HostBlocks(pool, blocks)
    rng = np.random.default_rng(0)
    for slot in range(blocks):
        host.put_rows(slot, rng.integers(0, 256, (1, host.block_bytes), dtype=np.uint8))
    return host


def rate_claims(preset: str, rates: Row) -> list[Row]:
    sequential = f"one long read: {rates['sequential_bytes_per_second'] / 1e9:.2f} GB/s"
    return [
        claim(
            f"{preset}: rate of reads from {what}, against one long read of the disk", rates[f"{name}_ratio"], "ratio",
            LEAST_RATE, "more", sequential,
        )
        for name, what in (("disk", "files"), ("store", "a store in files"))
    ]  # fmt: skip
