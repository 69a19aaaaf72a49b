"""The state of a rank: weights that outlive epochs, and the engine that is built from them for each epoch.

A rendezvous with the other ranks begins an epoch. It has its own connections, an empty ledger, and the KV pool of the
epoch before. A rank that was replaced warms up together with the tensor ranks of its pod.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import torch
import zmq

from medha import __version__
from medha.api.cluster import NO_ACCELERATOR
from medha.api.fields import quantity_bytes
from medha.cost.hardware import ModelShape
from medha.errors import OutOfMemory
from medha.kv.window_tables import frees_windows, widest_window, window_need
from medha.model.kv_dtype import kv_element_bytes
from medha.topology import Topology
from medha.wire.messages import (
    Admit,
    DiskTierFigures,
    DraftCosts,
    HostTierFigures,
    PeerFigures,
    RankReady,
    Rendezvous,
    StoreFigures,
    StreamingFigures,
)
from medha_process.part_settings import RankSettings
from medha_worker.checkpoints.draft_checkpoint import draft_config
from medha_worker.checkpoints.end_of_text import eos_token_ids
from medha_worker.checkpoints.head_checkpoint import eagle3_config, head_config
from medha_worker.checkpoints.weights_identity import content_identity, weights_identity
from medha_worker.cuda_device import cuda_device
from medha_worker.device import Device, host_device
from medha_worker.device_choice import choose_gpu, cuda_facts
from medha_worker.host_memory import HostMemory, keep_freed_memory
from medha_worker.kernels.name_table import choose_kernels
from medha_worker.model.decode_graphs import captured_sizes, copies_of_each
from medha_worker.model.disk_blocks import DiskBlocks
from medha_worker.model.eagle3_config import Eagle3Config
from medha_worker.model.eagle3_head import Eagle3Head
from medha_worker.model.file_pages import PAGE_BYTES
from medha_worker.model.host_blocks import HostBlocks
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.kv_files import KvFiles, blocks_within
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.mtp_head import MtpHead
from medha_worker.model.prediction_head import PredictionHead
from medha_worker.model.sampler import TokenMask
from medha_worker.model.stage_split import guessing_layers, split_layers
from medha_worker.model.streamed_blocks import SEGMENT_TOKENS, StreamedBlocks
from medha_worker.model.tensor_group import TensorGroup, in_rank_order
from medha_worker.model.transformer import Transformer
from medha_worker.model.weights import DTYPES, Shard, load_embedding
from medha_worker.model.weights import Progress as ReadProgress
from medha_worker.rank.draft_warmup import DraftWarmUp, warm_up_draft, with_head
from medha_worker.rank.drafter import Drafter
from medha_worker.rank.executor import Executor
from medha_worker.rank.grammar_masks import GrammarMasks, masks_of
from medha_worker.rank.head_drafter import HeadDrafter
from medha_worker.rank.kv_objects import KvObjects, StoreFailed
from medha_worker.rank.kv_pool_size import MIB, PoolRequest, exchange_bytes, keeps_windows_alone, pool_sizes
from medha_worker.rank.mesh import Mesh
from medha_worker.rank.peer_reader import PeerBlocks, peer_blocks
from medha_worker.rank.rank_reports import shape_of
from medha_worker.rank.step_recorder import StepRecorder
from medha_worker.rank.store_threads import StoreThreads, opened_within
from medha_worker.rank.warmup import Progress, WarmUp, times, typical, warm_up

RENDEZVOUS_SECONDS = 10.0  # bound of the rendezvous of ranks that have their weights
PROGRESS_SECONDS = 2.0

# Names in a trace for the time spent in these methods of the grid and of the tensor group.
STAGE_SPANS = {
    "receive_hidden": "receive",
    "receive_tokens": "receive tokens",
    "send_hidden": "send",
    "send_tokens": "send tokens",
}
GROUP_WAITS = {"all_reduce": "all_reduce", "gather_last_dim": "gather"}
LANE_WAITS = {"finish": "exchange"}

_log = logging.getLogger("medha.rank")


@dataclass(frozen=True)
class Engine:
    """The state of one epoch."""

    executor: Executor
    grid: Mesh | None
    ready: RankReady
    model: Transformer
    grammars: GrammarMasks | None  # None on a rank that does not sample
    disk: DiskBlocks | None = None
    peers: PeerBlocks | None = None
    store: StoreThreads | None = None

    def leave(self) -> None:
        """Call off the epoch's work of the disk tier, of peers and of the store; release captured steps and groups.

        The captured steps are released before the groups with which they were captured.
        """
        if self.disk is not None:
            self.disk.end_epoch()
        if self.peers is not None:
            self.peers.end_epoch()
        if self.store is not None:
            self.store.end_epoch()
        self.model.forget_captured()
        if self.grid is not None:
            self.grid.close()


class Loaded:
    """The state that outlives epochs: weights, measurements of the warm-up, and the memory of the KV pool."""

    def __init__(
        self,
        settings: RankSettings,
        config: ModelConfig,
        model: Transformer,
        recorder: StepRecorder,
        load_seconds: float,
        draft: Transformer | None = None,
        weights: str = "",
        content: str = "",
    ) -> None:
        """`draft` is the draft model or the prediction head, if this rank has one.

        `weights` identifies the checkpoint that was read, and `content` identifies all copies of it. If `weights` is
        empty, the disk tier is off. If `content` is empty, no KV is handed over, and no store is used.
        """
        self._weights, self._content = weights, content
        self._settings, self._config, self._model, self._draft = settings, config, model, draft
        self._recorder = recorder
        self._load_seconds = load_seconds
        self._warm: WarmUp | None = None
        self._draft_costs: DraftCosts | None = None
        self._kv_cache: KVCache | None = None
        self._draft_cache: KVCache | None = None  # of a draft model: it has the same blocks
        self._host_blocks: list[HostBlocks] = []  # the host tier of both, if the manifest asks for one
        self._disk: DiskBlocks | None = None  # the disk tier, if the manifest asks for one
        self._disk_seconds = (0.0, 0.0)  # measured: of an access, and of a block
        self._peers: PeerBlocks | None = None  # KV of other replicas, if the manifest asks for it
        self._store: StoreThreads | None = None  # the store, if the manifest asks for one and it has answered
        self._store_key = ""  # of its hashes
        self._eos_token_ids = eos_token_ids(settings.model_directory)
        self._masks = self._grammar_masks()

    def _block_bytes(self) -> int:
        """Return the memory of a block in all this rank's layers, those of a draft model or head included."""
        block_tokens = self._settings.spec.kv_cache.block_size_tokens
        models = (self._model,) if self._draft is None else (self._model, self._draft)
        return sum(
            _block_bytes(one.config, one, block_tokens, one.shard.last_layer - one.shard.first_layer)
            for one in models
        )

    @property
    def _weights_bytes(self) -> int:
        return self._model.weights_bytes + (0 if self._draft is None else self._draft.weights_bytes)

    @property
    def device(self) -> Device:
        """The device that the rank computes on."""
        return self._model.device

    @property
    def shape(self) -> ModelShape:
        """Sizes of the rank's part of the model."""
        return shape_of(self._model.shard, self._config, self._model.dtype.itemsize)

    def rendezvous(
        self,
        rendezvous: Rendezvous,
        ran_out: Callable[[], None] = lambda: None,
        progress: Progress = lambda _text, _done, _total: None,
    ) -> Engine:
        """Rendezvous with the other ranks, and begin an epoch with an empty ledger.

        `ran_out` is called when memory does not suffice for some rows of a step, `progress` while the rank
        warms up.

        Raises:
            PartFailed: not all ranks arrived.
            OutOfMemory: the largest step, the KV pool or a tier does not fit.
        """
        settings = self._settings
        topology = settings.topology
        grid = None
        if topology.ranks > 1:
            grid = Mesh(
                topology,
                settings.rank,
                rendezvous.address,
                address=settings.address,
                epoch=rendezvous.epoch,
                hidden_size=self._model.entering_size,
                device=self._model.device,
                rendezvous_seconds=RENDEZVOUS_SECONDS,
            )
        try:
            # Nothing that outlives the epoch may hold the grid: its connections close when it is freed.
            self._warm_up_together(grid, progress)
            model = self._model if grid is None else self._in_grid(grid, ran_out)
            return self._begin(model, rendezvous.epoch, grid)
        except BaseException:
            if grid is not None:
                grid.close()
            raise

    def _in_grid(self, grid: Mesh, ran_out: Callable[[], None]) -> Transformer:
        settings = self._settings
        group: TensorGroup = self._recorder.watch(grid.tensor_group, waits=GROUP_WAITS)
        if settings.spec.determinism == "batchInvariant":
            tensor = settings.topology.coordinates(settings.rank).tensor
            group = in_rank_order(group, tensor, settings.topology.tensor)
        return self._model.in_grid(group, self._recorder.watch(grid.plane, waits=LANE_WAITS), ran_out)

    def _begin(self, model: Transformer, epoch: int, grid: Mesh | None) -> Engine:
        settings, config = self._settings, self._config
        assert self._warm is not None
        kv_cache = self._pool(self._warm, grid)
        host_tier = self._host_tier(kv_cache, grid)
        streaming = self._streaming(kv_cache, grid)
        disk_tier = self._disk_tier(model, grid)
        peer = self._peer_blocks(model)
        store = self._store_figures(model)
        self._capture(model, kv_cache, grid)
        ready = RankReady(
            rank=settings.rank,
            block_size_tokens=kv_cache.block_tokens,
            kv_blocks=kv_cache.num_blocks,
            weights_bytes=self._weights_bytes,
            activation_bytes=self._warm.activation_bytes,
            kv_bytes=kv_cache.bytes + (0 if self._draft_cache is None else self._draft_cache.bytes),
            profile=self._warm.profile,
            device=str(model.device)
            if model.device.is_host
            else f"{model.device}, {model.kernels.name} kernels",
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            linear_flops_per_token=config.linear_flops_per_token,
            attention_flops_per_pair=config.attention_flops_per_pair,
            load_seconds=self._load_seconds,
            epoch=epoch,
            query_heads=config.num_query_heads,
            kv_heads=config.num_kv_heads,
            kv_tensors=config.kv_tensors,
            element_bytes=model.dtype.itemsize,
            kv_element_bytes=kv_cache.dtype.itemsize,
            kv_scales=model.kv_scales_digest,
            link_bytes_per_second=self._link_rate(grid),
            draft_costs=self._draft_costs,
            window_blocks=kv_cache.window_blocks,
            widest_window_tokens=widest_window(config.windows) if kv_cache.window_blocks else 0,
            host_tier=host_tier,
            disk_tier=disk_tier,
            peer=peer,
            store=store,
            streaming=streaming,
        )
        executor = self._executor(model, epoch, grid, kv_cache)
        if self._masks is not None:
            self._masks.begin_epoch()
        return Engine(executor, grid, ready, model, self._masks, self._disk, self._peers, self._store)

    def _executor(self, model: Transformer, epoch: int, grid: Mesh | None, kv_cache: KVCache) -> Executor:
        return Executor(
            model,
            kv_cache,
            vocab_size=self._config.vocab_size,
            eos_token_ids=self._eos_token_ids,
            clock=time.perf_counter,
            epoch=epoch,
            lane=self._settings.topology.coordinates(self._settings.rank).kv,
            pipeline=None if grid is None else self._recorder.watch(grid, spans=STAGE_SPANS),
            drafter=self._drafter(model, kv_cache),
            mask_for=self._mask_for,
            begin_masks=self._masks.begin if self._masks is not None else lambda: None,
            host_blocks=self._host_blocks,
            disk=self._disk,
            peers=self._peers,
            store=self._store,
        )

    def _drafter(self, model: Transformer, kv_cache: KVCache) -> Drafter | HeadDrafter | None:
        if isinstance(self._draft, PredictionHead):
            return HeadDrafter(self._draft, kv_cache.last_layer(), model)
        if self._draft is None or self._draft_cache is None:
            return None
        host_blocks = self._host_blocks[0].blocks if self._host_blocks else 0
        return Drafter(self._draft, self._draft_cache, self._config.vocab_size, host_blocks=host_blocks)

    def _grammar_masks(self) -> GrammarMasks | None:
        """Return the maker of masks if this rank samples; it reads the vocabulary while the weights warm up."""
        if not _samples(self._settings):
            return None
        return masks_of(self._settings.model_directory, self._config.vocab_size, self._eos_token_ids)

    def _mask_for(self, admit: Admit) -> TokenMask | None:
        return None if self._masks is None else self._masks.mask_for(admit)

    def _capture(self, model: Transformer, kv_cache: KVCache, grid: Mesh | None) -> None:
        """Capture steps of decodes, in lock-step with the tensor ranks of this pod."""
        sizes = captured_sizes(self._settings.spec.scheduling.max_running)
        copies = copies_of_each(self._settings.topology.stream)
        if grid is None or not model.can_capture:
            model.capture_decodes(kv_cache, sizes, copies)
            return
        with grid.warming_up():
            model.capture_decodes(kv_cache, sizes, copies)
        grid.smallest(0)  # waits for all ranks; those that still capture report that they are alive

    def _link_rate(self, grid: Mesh | None) -> float:
        """Measure bytes per second between lanes; 0 unless the prefill strategy depends on it (`auto`)."""
        if grid is None or self._settings.spec.scheduling.prefill_strategy != "auto":
            return 0.0
        return grid.lane_bytes_per_second(time.perf_counter)

    def _warm_up_together(self, grid: Mesh | None, progress: Progress) -> None:
        """Warm up in lock-step with the tensor ranks of this pod, unless all of them are warm already.

        Other pods need not warm up at the same time.

        Raises:
            OutOfMemory: the largest chunk or batch does not fit on one of them.
        """
        if grid is None:
            self._warm = self._warm or self._warm_up(self._model, lambda: False, progress)
            return
        all_warm = grid.total_in_pod(int(self._warm is not None)) == self._settings.topology.tensor
        if not all_warm:
            short: list[None] = []
            model = self._in_grid(grid, lambda: short.append(None))
            with grid.warming_up():
                self._warm = self._warm_up(model, lambda: grid.total_in_pod(len(short)) > 0, progress)

    def _warm_up(self, model: Transformer, ran_out: Callable[[], bool], progress: Progress) -> WarmUp:
        scheduling = self._settings.spec.scheduling
        started = time.monotonic()
        warm = warm_up(
            model,
            max_chunk_tokens=scheduling.max_chunk_tokens,
            max_running=scheduling.max_running,
            max_model_len=self._config.max_model_len,
            stages=self._settings.topology.stream,
            clock=time.perf_counter,
            ran_out=ran_out,
            progress=progress,
        )
        _log.info("warmed up in %.1f s; steps: %s", time.monotonic() - started, times(typical(warm.steps)))
        _log.debug("all steps of the warm-up: %s", times(warm.steps))
        activation_bytes = warm.activation_bytes + self._exchange_bytes(model)
        activation_bytes += model.made_heads_bytes(self._config.max_model_len)
        profile = warm.profile
        if self._draft is not None:
            drafted = self._warm_up_draft(self._draft, warm)
            rows = scheduling.max_chunk_tokens + scheduling.max_running
            is_head = isinstance(self._draft, PredictionHead)
            # A head joins hidden states of a step beside them, and then norms or reduces them.
            copies = 3 if is_head else 1
            hidden_bytes = copies * rows * self._model.leaving_size * self._draft.dtype.itemsize
            activation_bytes = max(activation_bytes, drafted.activation_bytes + hidden_bytes)
            if is_head:
                profile = with_head(warm, drafted)
        return replace(warm, activation_bytes=activation_bytes, profile=profile)

    def _warm_up_draft(self, draft: Transformer, served: WarmUp) -> DraftWarmUp:
        """Measure the time of guesses, and the memory that the draft model takes beside a step's hidden states.

        `served` is the warm-up of the served model: a head is also timed on its steps.
        """
        scheduling, config = self._settings.spec.scheduling, self._config
        is_head = isinstance(draft, PredictionHead)
        warm = warm_up_draft(
            draft,
            max_chunk_tokens=scheduling.max_chunk_tokens,
            max_running=scheduling.max_running,
            max_model_len=config.max_model_len,
            clock=time.perf_counter,
            followed_steps=[one.works for one in served.steps] if is_head else (),
        )
        # A head computes the tokens before its guesses along with the served model's steps.
        self._draft_costs = replace(warm.costs, token_seconds=0.0) if is_head else warm.costs
        _log.info(
            "a guess of the %s takes %.3g ms, %.3g ms for each further sequence, and %.3g ms for each token before",
            "prediction head" if is_head else "draft model",
            1e3 * (warm.costs.round_seconds + warm.costs.row_seconds),
            1e3 * warm.costs.row_seconds,
            1e3 * warm.costs.token_seconds,
        )
        return warm

    def _exchange_bytes(self, model: Transformer) -> int:
        spec, config = self._settings.spec, self._config
        lanes, block_tokens = spec.parallelism.kv, spec.kv_cache.block_size_tokens
        return exchange_bytes(
            lanes=lanes,
            passes_keys=spec.scheduling.prefill_strategy in ("passKv", "striped", "auto"),
            chunk_tokens=spec.scheduling.max_chunk_tokens,
            shard_tokens=-(-config.max_model_len // (lanes * block_tokens)) * block_tokens,
            query_heads=model.shard.query_heads(config),
            kv_heads=model.shard.kv_heads(config),
            head_dim=config.head_dim,
            query_dim=config.query_dim,
            result_dim=config.result_dim,
            kv_tensors=config.kv_tensors,
            element_bytes=model.dtype.itemsize,
            kv_element_bytes=kv_element_bytes(config.kv_dtype, model.dtype.itemsize),
        )

    def _pool(self, warm: WarmUp, grid: Mesh | None) -> KVCache:
        """Return the KV pool, of the smallest size that any rank can make, because all ranks replay one ledger.

        A rank that was replaced takes the size that the others have, because its free memory now may differ.
        """
        smallest: Callable[[int], int] = (lambda number: number) if grid is None else grid.smallest
        held = self._kv_cache
        blocks = smallest(_NO_POOL if held is None else held.num_blocks)
        windows = smallest(_NO_POOL if held is None else held.window_blocks)
        if blocks == _NO_POOL:
            request = self._pool_request(warm)
            free_bytes = self._free_bytes()
            sizes = pool_sizes(request, free_bytes)
            whole, beside_windows = smallest(sizes.whole), smallest(sizes.beside_windows)
            beside = smallest(sizes.windows)
            frees = keeps_windows_alone(whole, beside_windows)
            blocks, windows = (beside_windows, beside) if frees else (whole, 0)
            if blocks == 0:
                raise OutOfMemory("no size of the KV pool fits all ranks; lower model.maxModelLen")
            if request.windows is not None:
                _log.info(
                    "layers %s KV before their windows: a pool of %d blocks if they keep it; if they do not, of %d, and "
                    "of %d in layers with a window, for at least %d sequences at a time",
                    "free" if frees else "keep", whole, beside_windows, beside,
                    min(max(request.windows.places(beside), 0), request.max_running),
                )  # fmt: skip
        if held is None or (held.num_blocks, held.window_blocks) != (blocks, windows):
            size_tokens = self._settings.spec.kv_cache.block_size_tokens
            head = self._draft if isinstance(self._draft, PredictionHead) else None
            self._kv_cache = held = self._model.new_kv_cache(blocks, size_tokens, windows, head)
            if self._draft is not None and head is None:
                self._draft_cache = self._draft.new_kv_cache(blocks, size_tokens)
        return held

    def _host_tier(self, kv_cache: KVCache, grid: Mesh | None) -> HostTierFigures | None:
        """Make the host tier, with equally many blocks on all ranks, and measure its copies; None if none is wanted."""
        size_bytes, block_bytes = self._settings.spec.kv_cache.host_bytes, self._block_bytes()
        if size_bytes == 0:
            return None
        blocks = _blocks_of("kvCache.tiers.host.size", size_bytes, block_bytes, kv_cache, grid)
        pools = [kv_cache] if self._draft_cache is None else [kv_cache, self._draft_cache]
        if [one.kv_cache for one in self._host_blocks] != pools:
            self._host_blocks = [HostBlocks(pool, blocks) for pool in pools]
        rates = [one.seconds_per_block(time.perf_counter) for one in self._host_blocks]
        fetch_seconds, offload_seconds = (sum(each) for each in zip(*rates, strict=True))
        _log.info(
            "the host tier holds %d tokens, in blocks of %d; a block of %.1f KiB is fetched in %.3g ms and offloaded in %.3g ms",
            blocks * kv_cache.block_tokens, kv_cache.block_tokens, block_bytes / 1024, 1e3 * fetch_seconds, 1e3 * offload_seconds,
        )  # fmt: skip
        return HostTierFigures(blocks, block_bytes, fetch_seconds, offload_seconds)

    def _streaming(self, kv_cache: KVCache, grid: Mesh | None) -> StreamingFigures | None:
        """Take the memory from which KV is streamed, and measure its reads; None if none is wanted.

        It has the same number of blocks on all ranks.
        """
        size_bytes, block_bytes = self._settings.spec.kv_cache.streaming_bytes, self._block_bytes()
        if size_bytes == 0:
            return None
        blocks = _blocks_of("kvCache.streaming.size", size_bytes, block_bytes, kv_cache, grid)
        if kv_cache.streamed is None or kv_cache.streamed.blocks != blocks:
            kv_cache.streamed = StreamedBlocks(kv_cache, blocks)
        seconds = kv_cache.streamed.read_seconds_per_block(time.perf_counter)
        _log.info(
            "%d tokens of requests that are larger than the KV pool can be streamed from host memory, in blocks of %d, %s",
            blocks * kv_cache.block_tokens, kv_cache.block_tokens,
            f"each in {1e3 * seconds:.3g} ms" if seconds else "which are read in place",
        )  # fmt: skip
        return StreamingFigures(blocks, block_bytes, seconds)

    def _disk_tier(self, model: Transformer, grid: Mesh | None) -> DiskTierFigures | None:
        """Begin the disk tier, with equally many blocks on all ranks, and measure its reads; None if none is wanted."""
        settings = self._settings
        size_bytes, directory = settings.spec.kv_cache.disk_bytes, settings.disk_directory
        if size_bytes == 0 or directory is None or not self._host_blocks:
            return None
        host = self._host_blocks[0]
        blocks = blocks_within(size_bytes, host.block_bytes)
        if grid is not None:
            blocks = grid.smallest(blocks)  # before the error, so that no rank waits for one that has ended
        if blocks == 0:
            raise OutOfMemory(
                f"kvCache.tiers.disk.size is {size_bytes} bytes, less than a block of {host.kv_cache.block_tokens} tokens takes "
                f"in a file of a rank ({host.block_bytes + PAGE_BYTES} bytes on this one); raise it, best to several times "
                "kvCache.tiers.host.size"
            )
        place = directory / f"rank-{settings.rank}"
        if self._disk is None or self._disk.host is not host:
            if self._disk is not None:
                self._disk.close()
            files = KvFiles(place, self._kv_identity(model, host, self._weights), host.block_bytes)
            fault = ""
            try:
                if not self._weights:
                    raise OSError(
                        f"the checkpoint in {settings.model_directory} cannot be distinguished from others"
                    )
                files.acquire()
                files.delete_ranks_from(settings.topology.ranks)
                self._disk_seconds = files.measured_seconds(time.perf_counter)
            except OSError as error:
                fault = f"{place} cannot be used: {error}"
                _log.warning("the disk tier is off: %s", fault)
            self._disk = DiskBlocks(files, host, time.perf_counter, fault, size_bytes=size_bytes)
        access_seconds, block_seconds = self._disk_seconds
        if not self._disk.fault:
            _log.info(
                "the disk tier in %s holds %d tokens, in blocks of %d; a read takes %.3g ms, and %.3g ms for each block",
                place, blocks * host.kv_cache.block_tokens, host.kv_cache.block_tokens, 1e3 * access_seconds, 1e3 * block_seconds,
            )  # fmt: skip
        return DiskTierFigures(blocks, access_seconds, block_seconds, self._disk.kept_key())

    def _peer_blocks(self, model: Transformer) -> PeerFigures | None:
        """Begin to hand KV over; return where other replicas find this rank, or None if it hands none over."""
        settings, spec = self._settings, self._settings.spec.kv_cache.peers
        if spec is None or not settings.peer_endpoint or not self._host_blocks:
            return None
        host = self._host_blocks[0]
        if self._peers is not None and self._peers.reader.host is not host:
            self._peers.close()
            self._peers = None
        if self._peers is None:
            identity = self._kv_identity(model, host, self._content)
            digest = blake2b(identity.encode(), digest_size=16).hexdigest()
            try:
                if not self._content:
                    raise OSError(
                        f"the checkpoint in {settings.model_directory} cannot be distinguished from others"
                    )
                self._peers = peer_blocks(
                    settings.peer_endpoint, host, digest, spec.plane, settings.peer_bytes_endpoint
                )
            except (OSError, zmq.ZMQError) as error:
                _log.warning("no KV is handed over to other replicas, nor taken from them: %s", error)
                return None
            _log.info("other replicas may read KV at %s", self._peers.server.figures.endpoint)
        return self._peers.server.figures

    def _store_figures(self, model: Transformer) -> StoreFigures | None:
        """Begin to use the store; return the key of its hashes or why it cannot be used, or None if there is to be none."""
        settings = self._settings
        spec = settings.spec.kv_cache.store
        if spec is None or not self._host_blocks:
            return None
        host = self._host_blocks[0]
        if self._store is not None and self._store.host is not host:
            self._store.close()
            self._store = None
        if self._store is None:
            identity = self._kv_identity(model, host, self._content, is_of_any_lane=True)
            try:
                if not self._content:
                    raise StoreFailed(
                        f"the checkpoint in {settings.model_directory} cannot be distinguished from others"
                    )
                objects, self._store_key = opened_within(
                    lambda: KvObjects(spec, identity, host.block_bytes), _STORE_SECONDS
                )
            except StoreFailed as error:
                _log.warning("the store %s is not used in this epoch: %s", spec.url, error)
                return StoreFigures(fault=f"{spec.url}: {error}"[:500])
            self._store = StoreThreads(objects, host, time.perf_counter)
            _log.info("KV is shared with other replicas in %s", spec.url)
        return StoreFigures(self._store_key)

    def _kv_identity(
        self, model: Transformer, host: HostBlocks, weights: str, *, is_of_any_lane: bool = False
    ) -> str:
        """Return a text of all that the bytes of a block on this rank depend on; `weights` identifies the checkpoint.

        With `is_of_any_lane`, it is the same on all lanes, which hold the same layers and heads.
        """
        settings, cache, spec = self._settings, host.kv_cache, self._settings.spec.model
        at = settings.topology.coordinates(settings.rank)
        return repr(
            (
                __version__,  # other versions may compute other KV, or store it in another layout
                weights,
                spec.source,
                settings.spec.determinism,
                model.kernels.name,
                spec.rope_scaling,
                spec.max_model_len,
                spec.architecture,
                str(model.dtype),
                str(cache.dtype),
                model.kv_scales_digest,
                cache.block_tokens,
                str(settings.topology),
                (0 if is_of_any_lane else at.kv, at.stream, at.tensor),
                (model.shard.first_layer, model.shard.last_layer),
                [tuple(pool.shape[::2]) for pool in cache.pools()],
            )
        )

    def close(self) -> None:
        """End the threads of the disk tier, of peers and of the store, and compile no further grammars."""
        if self._masks is not None:
            self._masks.close()
        if self._disk is not None:
            self._disk.close()
        if self._peers is not None:
            self._peers.close()
        if self._store is not None:
            self._store.close()

    def _free_bytes(self) -> int:
        """Return the memory that this rank may still take for its KV pool.

        Raises:
            OutOfMemory: the host tier and the memory for streamed KV do not fit beside what is in host memory already.
        """
        device, neighbours = self._model.device, self._settings.neighbours
        free_bytes = device.memory.free_bytes(neighbours)
        cache = self._settings.spec.kv_cache
        size_bytes = cache.host_bytes + cache.streaming_bytes
        if size_bytes == 0:
            return free_bytes
        host_free_bytes = free_bytes if device.is_host else HostMemory().free_bytes(neighbours)
        if size_bytes > host_free_bytes:
            fields = {"tiers.host.size": cache.host_bytes, "streaming.size": cache.streaming_bytes}
            asked = [f"kvCache.{name} is {size / MIB:.0f} MiB" for name, size in fields.items() if size]
            raise OutOfMemory(
                f"{', '.join(asked)}, and {host_free_bytes / MIB:.0f} MiB of host memory are free for this rank; lower it, or "
                "give the pods more memory"
            )
        return free_bytes - size_bytes if device.is_host else free_bytes

    def _segment_bytes(self) -> int:
        """Return the device memory for segments of streamed KV: two, of one layer each; 0 if the device is the CPU."""
        cache, shard = self._settings.spec.kv_cache, self._model.shard
        if cache.streaming_bytes == 0 or self.device.is_host:
            return 0
        layers = shard.last_layer - shard.first_layer
        return 2 * SEGMENT_TOKENS * self._block_bytes() // (cache.block_size_tokens * layers)

    def _pool_request(self, warm: WarmUp) -> PoolRequest:
        spec, config, model = self._settings.spec, self._config, self._model
        cache, scheduling = spec.kv_cache, spec.scheduling
        windows = None
        keeps_all = cache.host_bytes > 0 or cache.streaming_bytes > 0
        if frees_windows(config.windows, has_tiers=keeps_all):
            windows = window_need(
                widest_window(config.windows),
                block_size_tokens=cache.block_size_tokens,
                max_running=scheduling.max_running,
                max_chunk_tokens=scheduling.max_chunk_tokens,
                max_model_len=config.max_model_len,
                stages=spec.parallelism.stream,
                lanes=spec.parallelism.kv,
            )
        return PoolRequest(
            block_bytes=self._block_bytes(),
            block_size_tokens=cache.block_size_tokens,
            max_model_len=-(-config.max_model_len // spec.parallelism.kv),  # lanes share it
            max_running=scheduling.max_running,
            size_bytes=None if cache.size is None else quantity_bytes(cache.size),
            memory_fraction=cache.memory_fraction,
            weights_bytes=self._weights_bytes,
            activation_bytes=warm.activation_bytes + self._segment_bytes(),
            streamed_blocks=cache.streaming_bytes // self._block_bytes(),
            streamed_share=1 - scheduling.short_headroom,
            windows=windows,
            caches_windows=cache.prefix_caching,
            window_block_bytes=_block_bytes(config, model, cache.block_size_tokens, len(model.window_layers)),
        )


def load(settings: RankSettings, recorder: StepRecorder, progress: Progress) -> Loaded:
    """Read this rank's weights; `progress` is called every few seconds with a text, the bytes read, and their total.

    Raises:
        MedhaError: the model cannot be served as the manifest asks.
    """
    spec, topology = settings.spec, settings.topology
    started = time.monotonic()
    keep_freed_memory()
    torch.set_num_threads(spec.threads or max(1, len(os.sched_getaffinity(0)) // settings.neighbours))
    config = ModelConfig.from_directory(
        settings.model_directory, spec.model.max_model_len, spec.model.rope_scaling, spec.kv_cache.dtype
    )
    drafted = _draft_config(settings, config)  # early, so that its errors come before minutes of reading
    headed = _head_config(settings, config)
    eagle = _eagle3_config(settings, config)
    device = _device(settings, DTYPES[config.dtype if spec.model.dtype == "auto" else spec.model.dtype])
    _log.info("loading %s from %s as %s", config.architecture, settings.model_directory, device.dtype)
    shard = _shard(config, topology, settings.rank, spec.scheduling.max_chunk_tokens, guessing_layers(spec))
    weights = _weights_of(settings)
    draft: Transformer | None = None
    if headed is not None:  # before the model, so that errors in its tensors are reported at once
        draft = _load_head(settings.model_directory, headed, device, progress)
    model = Transformer.load(
        settings.model_directory,
        config,
        shard,
        device=device,
        kernels=choose_kernels(shard.kernel_sizes(config), device, spec.determinism),
        progress=_every_few_seconds(progress),
        # Only tensor rank 0 of each stage, because the rank that samples is one of these.
        collected=() if eagle is None or shard.tensor_rank else eagle.collected,
    )
    if drafted is not None:
        draft = _load_draft(*drafted, device, progress)
    if eagle is not None and _samples(settings):
        draft = _load_eagle3(settings, eagle, config, model)
    content = _content_of(settings) if weights else ""
    if weights != _weights_of(settings):
        _log.warning("the checkpoint in %s has changed while it was read", settings.model_directory)
        weights = content = ""  # it is unknown what was read, so its KV must not count as that of either
    return Loaded(settings, config, model, recorder, time.monotonic() - started, draft, weights, content)


def _kv_directories(settings: RankSettings) -> list[Path]:
    """Return the checkpoints whose KV a block holds: the model's, and that of an EAGLE-3 head."""
    head = settings.draft_directory if settings.spec.scheduling.speculation.eagle3 else None
    return [settings.model_directory, *([] if head is None else [head])]


def _content_of(settings: RankSettings) -> str:
    """Return the identity of all copies of the checkpoint, if replicas share KV; empty if not, or if it cannot be read."""
    if not settings.peer_endpoint and settings.spec.kv_cache.store is None:
        return ""
    try:
        return " ".join(map(content_identity, _kv_directories(settings)))
    except (OSError, ValueError) as error:
        _log.warning("the checkpoint has no identity: %s", error)
        return ""


def _weights_of(settings: RankSettings) -> str:
    """Return the identity of the checkpoint, if a tier or peers need it; empty if not, or if it cannot be read."""
    has_store = settings.spec.kv_cache.store is not None
    if settings.disk_directory is None and not settings.peer_endpoint and not has_store:
        return ""
    try:
        return " ".join(map(weights_identity, _kv_directories(settings)))
    except OSError as error:
        _log.warning("the checkpoint has no identity: %s", error)
        return ""


def _draft_config(settings: RankSettings, config: ModelConfig) -> tuple[Path, ModelConfig] | None:
    """Return the draft model's directory and configuration on a rank that samples; None without one, and on other ranks.

    Raises:
        MedhaError: it cannot be served, or does not fit the model of `config`; the text names its field.
    """
    directory = settings.draft_directory
    if directory is None or settings.spec.scheduling.speculation.eagle3 or not _samples(settings):
        return None
    return directory, draft_config(directory, settings.model_directory, config)


def _head_config(settings: RankSettings, config: ModelConfig) -> ModelConfig | None:
    """Return the configuration of the model with its MTP head on a rank that samples, if it is asked for.

    Raises:
        ConfigInvalid: the checkpoint has none.
    """
    head = settings.spec.scheduling.speculation.prediction_head
    if head is None or head.kind != "mtp":
        return None
    found = head_config(settings.model_directory, config)
    return found if _samples(settings) else None


def _eagle3_config(settings: RankSettings, config: ModelConfig) -> Eagle3Config | None:
    """Return the configuration of an EAGLE-3 head, if the manifest has one; all stages collect hidden states for it.

    Raises:
        MedhaError: there is none, or it does not fit the model; the text names the field.
    """
    directory = settings.draft_directory
    if directory is None or not settings.spec.scheduling.speculation.eagle3:
        return None
    return eagle3_config(directory, config)


def _load_draft(directory: Path, config: ModelConfig, device: Device, progress: Progress) -> Transformer:
    """Read all weights of the draft model.

    Raises:
        MedhaError: they are incomplete.
    """
    shard = Shard.whole(config)
    _log.info("loading the draft model %s from %s", config.architecture, directory)
    return Transformer.load(
        directory,
        config,
        shard,
        device=device,
        kernels=choose_kernels(shard.kernel_sizes(config), device, "bestEffort"),
        progress=_every_few_seconds(progress),
    )


def _load_eagle3(
    settings: RankSettings, head: Eagle3Config, config: ModelConfig, model: Transformer
) -> Eagle3Head:
    """Read the EAGLE-3 head of `model`, whose configuration is `config`."""
    directory = settings.draft_directory
    assert directory is not None
    _log.info("loading the prediction head of %s", directory)
    sizes = Shard.whole(head.layer).kernel_sizes(head.layer)
    embedding = model.whole_embedding

    def embed() -> torch.Tensor:
        return load_embedding(settings.model_directory, config, device=model.device)

    return Eagle3Head.read(
        directory,
        head,
        device=model.device,
        kernels=choose_kernels(sizes, model.device, "bestEffort"),
        embedding=embed if embedding is None else embedding,
    )


def _load_head(directory: Path, config: ModelConfig, device: Device, progress: Progress) -> MtpHead:
    """Read the MTP head of the model of `config`.

    Raises:
        MedhaError: its tensors are incomplete.
    """
    _log.info("loading the prediction head of %s", directory)
    return MtpHead.read(
        directory,
        config,
        device=device,
        kernels=choose_kernels(Shard.whole(config).kernel_sizes(config), device, "bestEffort"),
        progress=_every_few_seconds(progress),
    )


def _samples(settings: RankSettings) -> bool:
    """Return whether a rank samples the tokens of its lane."""
    topology = settings.topology
    here = topology.coordinates(settings.rank)
    return here.stream == topology.stream - 1 and here.tensor == 0


def _device(settings: RankSettings, dtype: torch.dtype) -> Device:
    """Return the device of a rank; it is the CPU only if the pod or manifest asks for no accelerator.

    Raises:
        AcceleratorMissing: the accelerator that it asks for cannot be used.
    """
    if settings.accelerator == NO_ACCELERATOR:
        return host_device(dtype)
    here = settings.place_on_host
    chosen = choose_gpu(
        settings.accelerator, here, settings.neighbours, settings.topology.ranks, cuda_facts(here)
    )
    return cuda_device(chosen, dtype)


_STORE_SECONDS = 20.0
"""Time for which a rank waits at the start of an epoch for a store that does not answer."""
_NO_POOL = 2**62


def _shard(config: ModelConfig, topology: Topology, rank: int, chunk_tokens: int, guessing: int = 0) -> Shard:
    """Return the layers and slices of a rank; `guessing` is the time of a prediction head, in layers."""
    here = topology.coordinates(rank)
    layers = split_layers(config, topology.stream, chunk_tokens, guessing)[here.stream]
    return Shard(here.tensor, topology.tensor, layers.start, layers.stop, config.num_layers)


def _block_bytes(config: ModelConfig, model: Transformer, block_tokens: int, layers: int) -> int:
    return KVCache.bytes_per_block(
        num_layers=layers,
        kv_heads=model.shard.kv_heads(config),
        head_dim=config.head_dim,
        block_tokens=block_tokens,
        element_bytes=kv_element_bytes(config.kv_dtype, model.dtype.itemsize),
        tensors=config.kv_tensors,
    )


def _every_few_seconds(progress: Progress) -> ReadProgress:
    """Return a callback that logs and reports every few seconds how much of the weights has been read."""
    reported_at = time.monotonic()

    def read(done_bytes: int, total_bytes: int) -> None:
        nonlocal reported_at
        if time.monotonic() - reported_at >= PROGRESS_SECONDS:
            reported_at = time.monotonic()
            share, size = 100 * done_bytes / max(total_bytes, 1), total_bytes / 2**20
            _log.info("read %.0f %% of %.0f MiB of weights", share, size)
            progress(f"reads its weights: {share:.0f} % of {size:.0f} MiB", done_bytes, total_bytes)

    return read


def _blocks_of(field: str, size_bytes: int, block_bytes: int, kv_cache: KVCache, grid: Mesh | None) -> int:
    """Return how many blocks of KV fit into a memory of the spec, on every rank of the grid.

    Raises:
        OutOfMemory: not a single one fits.
    """
    blocks = size_bytes // block_bytes
    if grid is not None:
        blocks = grid.smallest(blocks)  # before the error, so that no rank waits for one that has ended
    if blocks == 0:
        raise OutOfMemory(
            f"{field} is {size_bytes} bytes, less than a block of {kv_cache.block_tokens} tokens takes on a rank "
            f"({block_bytes} bytes on this one); raise it, best to several times kvCache.size"
        )
    return blocks
