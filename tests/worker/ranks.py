"""All ranks of a replica in one process: threads that are connected by gloo and run the steps of a test."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from medha.api.determinism import Determinism
from medha.model.kv_dtype import KvDtype
from medha.topology import Topology, stage_layers
from medha.wire.messages import DiskReport, PromptLogprobs, Sample, Step, Tokens
from medha_worker.checkpoints.head_checkpoint import eagle3_config
from medha_worker.device import host_device
from medha_worker.kernels.protocol import Kernels
from medha_worker.model.disk_blocks import DiskBlocks
from medha_worker.model.host_blocks import HostBlocks
from medha_worker.model.kv_files import KvFiles
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.prediction_head import PredictionHead
from medha_worker.model.streamed_blocks import StreamedBlocks
from medha_worker.model.tensor_group import TensorGroup, in_rank_order
from medha_worker.model.transformer import Transformer
from medha_worker.model.weights import Shard
from medha_worker.rank.data_plane import NewPlane
from medha_worker.rank.drafter import Drafter
from medha_worker.rank.executor import Executor
from medha_worker.rank.head_drafter import HeadDrafter
from medha_worker.rank.kv_parallel_plan import positions
from medha_worker.rank.lane_plan import LanePlan
from medha_worker.rank.mesh import Mesh
from medha_worker.rank.peer_reader import PeerBlocks
from medha_worker.rank.plane_choice import choose_plane
from medha_worker.rank.store_threads import StoreThreads

from .models import kernels_of_a_rank, load_eagle3, load_head, load_model

Result = TypeVar("Result")


def free_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


class Recording:
    """A rank's model, which also computes the logits of every row of its last stage."""

    def __init__(self, model: Transformer) -> None:
        self._model = model
        self.device, self.kernels, self.prepare = model.device, model.kernels, model.prepare
        self.windows = model.windows
        self.rows: list[
            torch.Tensor
        ] = []  # [rows, vocab] of each step with rows, on the rank that gathers them

    def forward(self, *arguments: Any) -> torch.Tensor:
        hidden = self._model.forward(*arguments)
        if self._model.shard.is_last_stage and len(hidden):
            logits = self._model.logits(hidden)
            if logits is not None:
                self.rows.append(logits)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return self._model.logits(hidden)


class Ranks:
    """Every rank of a grid with its part of a model."""

    def __init__(
        self,
        topology: Topology,
        directory: Path,
        new_plane: NewPlane = choose_plane,
        *,
        determinism: Determinism = "bestEffort",
        kv_dtype: KvDtype = "auto",
        draft: Path | None = None,
        has_head: bool = False,
        eagle3: Path | None = None,
    ) -> None:
        """`draft` is the checkpoint of a draft model, for the ranks that sample; `has_head` gives them the model's own head.

        `eagle3` is the checkpoint of an EAGLE-3 head in its place.
        """
        self.topology, self._new_plane, self._determinism = topology, new_plane, determinism
        self._config = config = ModelConfig.from_directory(directory, kv_dtype=kv_dtype)
        self._pool = ThreadPoolExecutor(topology.ranks, initializer=torch.set_num_threads, initargs=(1,))
        stages = stage_layers(config.num_layers, topology.stream)

        def shard_of(rank: int) -> Shard:
            here = topology.coordinates(rank)
            layers = stages[here.stream]
            return Shard(here.tensor, topology.tensor, layers.start, layers.stop, config.num_layers)

        def load(rank: int) -> Transformer:
            shard = shard_of(rank)
            kernels = kernels_of_a_rank(config, shard, determinism)
            collects = eagle3 is not None and shard.tensor_rank == 0
            collected = eagle3_config(eagle3, config).collected if eagle3 and collects else ()
            return load_model(directory, config, shard, kernels=kernels, collected=collected)

        kernels_of_a_rank(config, shard_of(0), determinism)  # compiled once, not on each thread

        self._models = self.on_all(load)
        # A draft model or head for each lane, because the lanes' threads run at the same time.
        self._drafts: list[Transformer] = []
        self._heads: list[PredictionHead] = []
        for _ in range(topology.kv):
            if draft is not None:
                self._drafts.append(load_model(draft, ModelConfig.from_directory(draft)))
            if has_head:
                self._heads.append(load_head(directory, config))
            elif eagle3 is not None:
                self._heads.append(load_eagle3(eagle3, config, directory))
        self.drafts: list[tuple[str, tuple[int, ...]]] = []
        """Guesses of draft models or heads that ranks have reported in the last run."""
        self._grids: list[Mesh] = []
        self.disk_reports: list[DiskReport] = []
        self.block_bytes: dict[int, int] = {}  # of the files of each rank
        self.scored: dict[int, list[tuple[str, PromptLogprobs]]] = {}
        """Log-probabilities of prompts that each rank has reported in the last run."""

    def slide(self, windows: Sequence[int | None]) -> None:
        """Give each layer of the model this window, in tokens; None: its rows see their whole context."""
        self._config = replace(self._config, windows=tuple(windows))
        self._models = [
            Transformer(self._config, model.shard, model._weights, kernels=model.kernels)
            for model in self._models
        ]

    @property
    def windows(self) -> Sequence[int | None]:
        """The windows of the model's layers."""
        return self._config.windows

    def _rendezvous(self) -> None:
        endpoint = free_endpoint()

        def rendezvous(rank: int) -> Mesh:
            # Threads may wait for their turn on a busy machine; a rank that fails ends the waits of others.
            return Mesh(
                self.topology,
                rank,
                endpoint,
                address="127.0.0.1",
                epoch=0,
                hidden_size=self._models[rank].entering_size,
                device=host_device(torch.float32),
                rendezvous_seconds=60.0,
                wait_seconds=60.0,
                new_plane=self._new_plane,
            )

        self._grids = self.on_all(rendezvous)

    def on_all(self, work: Callable[[int], Result]) -> list[Result]:
        """Call `work(rank)` on the threads of all ranks at once; if one fails, a new rendezvous is needed."""
        failed: list[tuple[float, BaseException]] = []

        def guarded(rank: int) -> Result:
            try:
                return work(rank)
            except BaseException as error:
                failed.append((time.monotonic(), error))
                if self._grids:
                    self._grids[rank].close()  # so that ranks that wait for it stop at once
                raise

        running = [self._pool.submit(guarded, rank) for rank in range(self.topology.ranks)]
        wait(running)
        if failed:
            self._grids = []
            raise min(failed, key=lambda one: one[0])[1]  # the others have failed because of it
        return [one.result() for one in running]

    def run(
        self,
        steps: Sequence[Step],
        prompts: dict[str, npt.NDArray[np.int32]],
        *,
        kv_blocks: int,
        block_tokens: int,
        steps_ahead: int = 1,
        kernels: Kernels | None = None,
        window_blocks: int = 0,
        host_blocks: int = 0,
        disk: Path | None = None,
        peers: Callable[[int, HostBlocks], PeerBlocks] | None = None,
        store: Callable[[int, HostBlocks], StoreThreads] | None = None,
        streamed_blocks: int = 0,
        streams_in_place: bool = True,
    ) -> tuple[list[Sample], dict[tuple[str, int], torch.Tensor]]:
        """Run all steps on new KV pools; return the samples, and the logits of every position, by request and position.

        Each rank runs the steps one after the other, as far ahead of other ranks as its inputs allow. Before it runs a
        step, it plans the next `steps_ahead` ones, as `Rank` does with steps that arrive while it is busy. `kernels`
        replaces those that a rank chooses on this machine. With `window_blocks`, KV before windows is freed, and none
        of these blocks may be held once all requests have been released. `host_blocks` is the size of the host tier,
        and `disk` the directory of the files behind it: all that a step asks of them is done before the next one.
        `peers` returns what hands KV over, by rank; that outlives the run, and the caller closes it. `store` returns what
        reads and writes the store, by rank; the run closes it. `streamed_blocks` are those in host memory; unless they are
        read in place, small segments of them are copied, as for a GPU.
        """

        if not self._grids:
            self._rendezvous()

        def work(rank: int) -> tuple[list[Sample], list[torch.Tensor]]:
            grid = self._grids[rank]
            model = self._models[rank]
            group: TensorGroup = grid.tensor_group
            if self._determinism == "batchInvariant":
                group = in_rank_order(group, self.topology.coordinates(rank).tensor, self.topology.tensor)
            model = (model.with_kernels(kernels) if kernels else model).in_grid(group, grid.plane)
            samples_here = rank == grid.sampling_rank
            head = self._heads[grid.lane] if samples_here and self._heads else None
            recording, pool = (
                Recording(model),
                model.new_kv_cache(kv_blocks, block_tokens, window_blocks, head),
            )
            if streamed_blocks:
                pool.streamed = StreamedBlocks(
                    pool, streamed_blocks, in_place=streams_in_place, segment_tokens=3 * block_tokens
                )
            drafter: Drafter | HeadDrafter | None = None
            if head is not None:
                drafter = HeadDrafter(head, pool.last_layer(), model)
            elif samples_here and self._drafts:
                draft = self._drafts[grid.lane]
                drafter = Drafter(draft, draft.new_kv_cache(kv_blocks, block_tokens), self._config.vocab_size)
            host = [HostBlocks(pool, host_blocks)] if host_blocks else []
            files = None
            if disk is not None:
                directory = disk / f"rank-{rank}"
                self.block_bytes[rank] = host[0].block_bytes
                files = DiskBlocks(
                    KvFiles(directory, f"rank {rank}", host[0].block_bytes),
                    host[0],
                    lambda: 0.0,
                    size_bytes=2**30,
                )
                files.begin_epoch(DiskReport(rank, grid.lane), "00" * 32, self.disk_reports.append)
                assert files.drain(60)
            handed = None if peers is None else peers(rank, host[0])
            shared = None if store is None else store(rank, host[0])
            executor = Executor(
                recording,
                pool,
                vocab_size=self._config.vocab_size,
                eos_token_ids=(),
                clock=lambda: 0.0,
                lane=grid.lane,
                pipeline=grid if self.topology.ranks > 1 else None,
                drafter=drafter,
                host_blocks=host,
                disk=files,
                peers=handed,
                store=shared,
            )
            samples: list[Sample] = []
            self.scored[rank] = []
            planned: deque[LanePlan] = deque()
            to_plan = iter(steps)
            for _ in steps:
                for step in islice(to_plan, 1 + steps_ahead - len(planned)):
                    executor.prepare(step)
                    for name in executor.missing_prompts(step):
                        ids = prompts[name]
                        executor.add_tokens(Tokens(prompt=name, offset=0, total=len(ids)), ids)
                    planned.append(executor.plan(step))
                done = executor.run(planned.popleft())
                assert files is None or files.drain(60)
                assert handed is None or handed.reader.drain(60)
                assert shared is None or shared.drain(60)
                if done is not None:
                    assert done.failures == (), done.failures
                    samples += done.samples if rank == grid.sampling_rank else ()
                    self.scored[rank] += done.prompt_logprobs
                    self.drafts += done.drafts
            if files is not None:
                files.close()
            if shared is not None:
                shared.close()
            executor.learn_all()  # tokens of the last steps are still on their way
            if executor.window_tables is not None:
                executor.window_tables.check()
                assert executor.window_tables.held_blocks == 0
            if streamed_blocks:
                executor.ledger.check()
                assert executor.ledger.free_streamed_blocks == streamed_blocks
            return samples, recording.rows

        samples: list[Sample] = []
        logits: dict[tuple[str, int], torch.Tensor] = {}
        self.drafts = []
        self.disk_reports = []
        for rank, (sampled, recorded) in enumerate(self.on_all(work)):
            grid = self._grids[rank]
            if rank != grid.sampling_rank:
                continue
            samples += sampled
            own = [[entry for entry in step.entries if entry.lane == grid.lane] for step in steps]
            for entries, rows in zip(filter(None, own), recorded, strict=True):
                at = [(entry.id, int(place)) for entry in entries for place in positions(entry.extents)]
                logits |= dict(zip(at, rows, strict=True))
        return samples, logits

    def run_once(self, *arguments: Any, **options: Any) -> dict[str, list[int]]:
        """Run some steps as `run` does, and close; return the sampled tokens by sequence."""
        try:
            samples, _ = self.run(*arguments, **options)
        finally:
            self.close()
        found: dict[str, list[int]] = {}
        for sample in samples:
            found.setdefault(sample.id, []).append(sample.token)
        return found

    def close(self) -> None:
        for grid in self._grids:
            grid.close()
        self._pool.shutdown()
