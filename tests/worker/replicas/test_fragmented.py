"""A controller and its rank serve requests with common prefixes from a small pool: all logits are the model's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from medha.api.kv_cache_spec import KvCacheSpec
from medha.api.model_spec import ModelSource, ModelSpec
from medha.api.replica import MedhaReplicaSpec, SchedulingSpec
from medha.kv.prefix_cache import PrefixHasher
from medha.scheduler.controller import ReplicaController
from medha.scheduler.replica_config import derive
from medha.wire.messages import (
    ControllerEvent,
    Emit,
    Failed,
    HostTierFigures,
    RankReady,
    Refused,
    Sampling,
    Step,
    StepProfile,
    Submit,
    Tokens,
)
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.controller.output_hashes import OutputHasher
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.kernels.torch_attention import TorchAttention
from medha_worker.model.host_blocks import HostBlocks
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.prediction_head import PredictionHead
from medha_worker.model.transformer import Transformer
from medha_worker.rank.executor import Executor
from medha_worker.rank.head_drafter import HeadDrafter
from medha_worker.rank.kv_parallel_plan import positions

from ..model.test_model_transformer import save_reference
from ..models import kernels_of_a_rank, load_model, run_step
from ..ranks import Recording

BLOCK_TOKENS, KV_BLOCKS = 16, 160
LONGEST = 1000
AT_ONCE = 4
MOST_CHUNK_TOKENS = 256
ROUNDS, LATER = 6, 16
PROFILE = StepProfile(1e-3, 1e-5, 1e-8, 1e-5)

Ids = npt.NDArray[np.int32]


@dataclass(eq=False)
class Query:
    ids: Ids
    output_tokens: int
    sampled: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    logits: dict[int, torch.Tensor] = field(default_factory=dict)  # by position, for those that were computed

    @property
    def text(self) -> Ids:
        return np.concatenate([self.ids, np.array(self.sampled, dtype=np.int32)])


class Replica:
    """A controller and one rank, joined without sockets: steps run in the order in which they are launched."""

    def __init__(self, model: Transformer, host_blocks: int = 0, head: PredictionHead | None = None) -> None:
        """`host_blocks` is the size of the host tier, from which KV is fetched in no time; `head` computes every step, too."""
        ready = RankReady(
            rank=0, block_size_tokens=BLOCK_TOKENS, kv_blocks=KV_BLOCKS, weights_bytes=1, activation_bytes=1, kv_bytes=1,
            profile=PROFILE, device="cpu", max_model_len=model.config.max_model_len, vocab_size=model.config.vocab_size,
            linear_flops_per_token=1e6, attention_flops_per_pair=1e3,
            host_tier=HostTierFigures(host_blocks, 1, 0.0, 0.0) if host_blocks else None,
        )  # fmt: skip
        spec = MedhaReplicaSpec(
            model=ModelSpec(name="m", source=ModelSource(path="unused"), max_model_len=ready.max_model_len),
            kv_cache=KvCacheSpec(prefix_caching=True),
            scheduling=SchedulingSpec(max_chunk_tokens=MOST_CHUNK_TOKENS),
        )
        self.core = ReplicaController(derive(spec, ready), PROFILE)
        self._model = Recording(model)
        pool = self.pool = model.new_kv_cache(KV_BLOCKS, BLOCK_TOKENS, head=head)
        self.executor = Executor(
            self._model, pool, vocab_size=model.config.vocab_size, eos_token_ids=(), clock=lambda: 0.0,
            drafter=None if head is None else HeadDrafter(head, pool.last_layer(), model),
            host_blocks=[HostBlocks(pool, host_blocks)] if host_blocks else (),
        )  # fmt: skip
        self._hasher, self._outputs = PrefixHasher(BLOCK_TOKENS, b"secret"), OutputHasher()
        self._launched: deque[Step] = deque()
        self.asked: dict[str, Query] = {}
        self._open: set[str] = set()
        self._now = 0.0

    def serve(self, asked: list[Query]) -> None:
        """Serve these requests to the end, a few at a time, in this order."""
        waiting = deque(asked)
        while waiting or self._open:
            while waiting and len(self._open) < AT_ONCE:
                self._submit(waiting.popleft())
            self._run_next()

    def _submit(self, one: Query) -> None:
        name = f"r{len(self.asked)}"
        self.asked[name] = one
        self._open.add(name)
        sampling = Sampling(temperature=0.0, ignore_eos=True, max_tokens=one.output_tokens)
        hashes = self._hasher.hashes(one.ids)
        self._handle(
            Submit(name, name, len(one.ids), len(one.ids), seed=1, sampling=sampling, block_hashes=hashes)
        )

    def _run_next(self) -> None:
        step = self._launched.popleft()
        self.executor.prepare(step)
        for name in self.executor.missing_prompts(step):
            ids = self.asked[name].ids
            self.executor.add_tokens(Tokens(prompt=name, offset=0, total=len(ids)), ids)
        self._model.rows.clear()
        done = self.executor.execute(step)
        self.ran(step)
        assert done is not None
        assert done.failures == ()
        rows = iter([row for logits in self._model.rows for row in logits])
        for entry in step.entries:
            for position in positions(entry.extents).tolist():
                self.asked[entry.id].logits[position] = next(rows)
        hashes = []
        for sample in done.samples:
            if sample.id not in self._outputs:
                prompt = self._hasher.start()
                prompt.update(self.asked[sample.id].ids)
                self._outputs.begin(sample.id, prompt)
            filled = self._outputs.add(sample.id, sample.token)
            if filled:
                hashes.append((sample.id, filled))
        self._now += 0.01
        self._handle(replace(done, block_hashes=tuple(hashes)))

    def ran(self, step: Step) -> None:
        """Look at what a step has left; its sequences are still there."""

    def _handle(self, event: ControllerEvent) -> None:
        for command in self.core.handle(event, self._now):
            match command:
                case Step():
                    self._launched.append(command)
                case Emit():
                    one = self.asked[command.id]
                    one.sampled += command.tokens
                    one.cached_tokens = max(one.cached_tokens, command.cached_tokens)
                    if command.finish_reason is not None:
                        self._open.remove(command.id)
                        self._outputs.end(command.id)
                case Refused() | Failed():
                    raise AssertionError(command)


def conversations(replica: Replica, vocab: int) -> tuple[list[Query], list[Query]]:
    """Let a replica serve prompts of all lengths; return them, and later ones that repeat its last texts.

    The prompts are new texts, beginnings of documents, and beginnings of texts that the replica has written.
    """
    rng = np.random.default_rng(0)
    documents = [rng.integers(7, vocab, LONGEST).astype(np.int32) for _ in range(3)]
    served: list[Query] = []
    for _ in range(ROUNDS):
        asked = []
        for _ in range(2 * AT_ONCE):
            own = rng.integers(7, vocab, int(LONGEST // 2 * rng.random() ** 2) + 1).astype(np.int32)
            kind = rng.random()
            if kind < 0.3:
                beginning = documents[int(rng.integers(3))][: int(rng.integers(LONGEST // 2))]
            elif kind < 0.6 and served:
                beginning = served[int(rng.integers(len(served)))].text[: LONGEST // 2]
            else:
                beginning = own[:0]
            asked.append(Query(np.concatenate([beginning, own]), int(rng.integers(1, 40))))
        replica.serve(asked)
        served += asked
    later = [Query(one.text[:LONGEST], 2) for one in served[: -LATER - 1 : -1]]
    replica.serve(later)
    return served, later


def check(
    served: list[Query], later: list[Query], wanted: Callable[[Ids], torch.Tensor], tolerance: float
) -> None:
    """Check every computed logit of the first requests, and of later ones that found some of their KV cached."""
    wrong: dict[str, list[float]] = {"served": [], "later": []}
    for one in (*served, *later):
        assert len(one.sampled) == one.output_tokens
        at = sorted(one.logits)
        assert at == list(range(one.cached_tokens, len(one.text) - 1))
        found = torch.stack([one.logits[position] for position in at])
        error = float((found - wanted(one.text[:-1])[at]).abs().max())
        if error > tolerance:
            wrong["later" if one in later else "served"].append(error)
    assert sum(one.cached_tokens > 0 for one in later) >= LATER // 2
    assert wrong == {"served": [], "later": []}


@pytest.mark.parametrize("host_blocks", [0, 100, 2000])
def test_float32_logits_are_those_of_transformers(tmp_path: Path, host_blocks: int) -> None:
    """Heads of 10 values fill the vector registers of no machine, so plain torch computes their attention."""
    sizes = {"vocab_size": 512, "hidden_size": 40, "max_position_embeddings": 4096}
    reference = save_reference(tmp_path, "qwen2", **sizes)
    config = ModelConfig.from_directory(tmp_path, max_model_len=2048)
    kernels = kernels_of_a_rank(config)
    assert isinstance(kernels.attention, TorchAttention)
    replica = Replica(load_model(tmp_path, config, kernels=kernels), host_blocks)
    served, later = conversations(replica, 512)
    counts = replica.core.pools.tier_counts
    assert (counts.fetched_blocks > 0) == (host_blocks > 0)
    assert (counts.dropped_blocks > 0) == (host_blocks == 100)

    @torch.inference_mode()
    def wanted(ids: Ids) -> torch.Tensor:
        logits: torch.Tensor = reference(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
        return logits

    check(served, later, wanted, 1e-4)


@pytest.mark.long
def test_bfloat16_logits_are_those_of_the_same_model_with_a_pool_in_order(tmp_path: Path) -> None:
    """Two layouts round differently: logits of a standard deviation of 3 lie up to 0.13 apart, wrong ones more than 3."""
    init_checkpoint(tmp_path / "tiny", preset="tiny", seed=1, dtype="bfloat16")
    config = ModelConfig.from_directory(tmp_path / "tiny", max_model_len=2048)
    model = load_model(tmp_path / "tiny", config)
    served, later = conversations(Replica(model), 512)

    def alone(ids: Ids) -> torch.Tensor:
        cache = model.new_kv_cache(-(-len(ids) // BLOCK_TOKENS), BLOCK_TOKENS)
        span = SequenceSpan(0, len(ids), 0, range(cache.num_blocks))
        hidden = run_step(
            model, torch.from_numpy(ids.astype(np.int64)), torch.arange(len(ids)), [span], cache
        )
        logits = model.logits(hidden)
        assert logits is not None
        return logits

    check(served, later, alone, 0.5)
