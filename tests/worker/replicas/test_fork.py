"""A rank whose state diverges from the controller's is detected, by a real controller and a real executor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from medha.api.kv_cache_spec import KvCacheSpec
from medha.api.model_spec import ModelSource, ModelSpec
from medha.api.replica import MedhaReplicaSpec
from medha.errors import PartFailed
from medha.scheduler.controller import STATE_HASH_EVERY_STEPS, ReplicaController
from medha.scheduler.replica_config import derive
from medha.shards import Segment, ShardMap
from medha.wire.messages import Done, RankReady, Sampling, Step, StepProfile, Submit, Tokens
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.model.model_config import ModelConfig
from medha_worker.rank.executor import Executor

from ..models import load_model

BLOCK_TOKENS, KV_BLOCKS, VOCAB = 16, 64, 512
READY = RankReady(
    rank=0, block_size_tokens=BLOCK_TOKENS, kv_blocks=KV_BLOCKS, weights_bytes=1, activation_bytes=1, kv_bytes=1,
    profile=StepProfile(1e-3, 1e-6, 1e-9, 1e-5), device="cpu", max_model_len=512, vocab_size=VOCAB,
    linear_flops_per_token=1e6, attention_flops_per_pair=1e3,
)  # fmt: skip


def holds_a_block_too_many(executor: Executor) -> None:
    assert executor.ledger.reserve("of nobody", 1)


def has_another_version_of_a_map(executor: Executor) -> None:
    shards = executor._state.replica.shards("a")
    executor._state.replica._shards["a"] = ShardMap(shards.segments, shards.version + 1)


def has_a_map_of_another_length(executor: Executor) -> None:
    """Both maps have equally many blocks, so block tables show no difference."""
    tokens = executor._state.replica.shards("a").tokens
    assert executor.ledger.blocks_for(tokens - 1) == executor.ledger.blocks_for(tokens)
    executor._state.replica._shards["a"] = ShardMap((Segment(0, 0, tokens - 1),))


def knows_a_token_too_many(executor: Executor) -> None:
    executor._state.sequences["a"].planned_outputs += 1


def has_computed_a_position_less(executor: Executor) -> None:
    executor._state.sequences["a"].computed -= 1


@pytest.mark.parametrize(
    "part",
    [
        holds_a_block_too_many,
        has_another_version_of_a_map,
        has_a_map_of_another_length,
        knows_a_token_too_many,
        has_computed_a_position_less,
    ],
)
def test_a_fork_is_found_within_the_steps_between_two_hashes(
    tmp_path: Path, part: Callable[[Executor], None]
) -> None:
    init_checkpoint(tmp_path / "tiny", preset="tiny", seed=1)
    model = load_model(tmp_path / "tiny", ModelConfig.from_directory(tmp_path / "tiny", max_model_len=512))
    spec = MedhaReplicaSpec(
        model=ModelSpec(name="tiny", source=ModelSource(path="unused"), max_model_len=512),
        kv_cache=KvCacheSpec(prefix_caching=False),
    )
    core = ReplicaController(derive(spec, READY), READY.profile)
    executor = Executor(
        model, model.new_kv_cache(KV_BLOCKS, BLOCK_TOKENS), vocab_size=VOCAB, eos_token_ids=(),
        clock=lambda: 0.0,
    )  # fmt: skip
    ids = np.arange(7, 27, dtype=np.int32)
    sampling = Sampling(temperature=0.0, ignore_eos=True, max_tokens=300)
    event = Submit(id="a", prompt="p", tokens=len(ids), prompt_length=len(ids), seed=1, sampling=sampling)

    launched: deque[Step] = deque()

    def run_next(event: Submit | Done, now: float) -> Done:
        launched.extend(command for command in core.handle(event, now) if isinstance(command, Step))
        step = launched.popleft()
        executor.prepare(step)
        if executor.missing_prompts(step):
            executor.add_tokens(Tokens(prompt="p", offset=0, total=len(ids)), ids)
        done = executor.execute(step)
        assert done is not None
        return done

    def run(event: Submit | Done, steps: range) -> Done:
        for number in steps:
            event = run_next(event, float(number))
        assert isinstance(event, Done)
        return event

    agreed = 2 * STATE_HASH_EVERY_STEPS + 5
    done = run(event, range(agreed))
    part(executor)
    with pytest.raises(PartFailed, match=r"the ledgers differ, or the shard maps|tokens (are )?known"):
        run(done, range(agreed, agreed + STATE_HASH_EVERY_STEPS))
