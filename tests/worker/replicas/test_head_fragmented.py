"""A prediction head beside a controller and its rank: its KV is right wherever prefixes are cached, or fetched from the host."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from medha.wire.messages import Step
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.prediction_head import PredictionHead
from medha_worker.model.transformer import Transformer

from ..model.test_eagle3_head import headed, make
from ..models import load_head, load_model, run_step
from .test_fragmented import BLOCK_TOKENS, LATER, Ids, Replica, conversations


class Watched(Replica):
    """A replica with a head, which notes its KV of each sequence behind the last step of that."""

    def __init__(self, model: Transformer, host_blocks: int, head: PredictionHead) -> None:
        super().__init__(model, host_blocks, head)
        self.rows: dict[str, torch.Tensor] = {}  # [heads, positions, head_dim], by request

    def ran(self, step: Step) -> None:
        (pool,) = self.pool.last_layer().keys
        for entry in step.entries:
            stop = entry.extents[-1].last + 1
            blocks = torch.from_numpy(self.executor.ledger.table(entry.id))
            slots = (blocks[:, None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)).flatten()
            self.rows[entry.id] = pool[:, slots[:stop]].clone()


@torch.inference_mode()
def rows_alone(model: Transformer, head: PredictionHead, ids: Ids) -> torch.Tensor:
    """Return the head's keys of all tokens but the last, [heads, tokens - 1, head_dim], computed at once."""
    pool = model.new_kv_cache(-(-len(ids) // BLOCK_TOKENS), BLOCK_TOKENS, head=head)
    tokens, at = torch.from_numpy(ids.astype(np.int64)), torch.arange(len(ids))
    hidden = run_step(model, tokens, at, [SequenceSpan(0, len(ids), 0, range(pool.num_blocks))], pool)
    cache, known = pool.last_layer(), len(ids) - 1
    step = head.prepare(at[:known], [SequenceSpan(0, known, 0, range(pool.num_blocks))], cache)
    head.forward(tokens[1:], step, head.taken(model, hidden[:known]))
    return cache.keys[0][:, :known]


def mtp(folder: Path) -> tuple[Transformer, PredictionHead]:
    init_checkpoint(folder / "tiny", preset="tiny", seed=2, architecture="deepseek_v3", mtp_layers=1)
    config = ModelConfig.from_directory(folder / "tiny", max_model_len=1100)
    return load_model(folder / "tiny", config), load_head(folder / "tiny", config)


def eagle3(folder: Path) -> tuple[Transformer, PredictionHead]:
    one = headed(make(folder), max_model_len=1100)
    return one.model, one.head


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("kind", "host_blocks"),
    [
        pytest.param("mtp", 0, marks=pytest.mark.long),
        pytest.param("mtp", 100, marks=pytest.mark.long),
        pytest.param("eagle3", 0, marks=pytest.mark.long),
        ("eagle3", 100),
    ],
)
def test_the_heads_kv_is_that_of_the_same_texts_alone(tmp_path: Path, kind: str, host_blocks: int) -> None:
    model, head = (mtp if kind == "mtp" else eagle3)(tmp_path)
    replica = Watched(model, host_blocks, head)
    conversations(replica, 512)
    counts = replica.core.pools.tier_counts
    assert (counts.fetched_blocks > 0) == (counts.dropped_blocks > 0) == (host_blocks > 0)
    shared = ends = 0
    for name, one in replica.asked.items():
        found, wanted = replica.rows[name], rows_alone(model, head, one.text)
        assert found.shape == wanted.shape
        wrong = torch.nonzero((found - wanted).abs().amax(dim=(0, 2)) > 1e-3).flatten().tolist()
        shared += one.cached_tokens // BLOCK_TOKENS
        ends += len(wrong)
        # A shared block ends with the KV of the sequence that came first, whose next token may be another one.
        assert all(at % BLOCK_TOKENS == BLOCK_TOKENS - 1 for at in wrong), wrong
    assert shared > 5 * LATER
    assert ends < shared / 20
