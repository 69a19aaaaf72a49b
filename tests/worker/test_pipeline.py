"""Chunks stream through stages: the first one waits for a drawn token only where it needs that token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from medha.messages import Admit, Extent, Sampling, Step, StepEntry, Tokens
from medha_worker.checkpoint import init_checkpoint
from medha_worker.executor import Executor
from medha_worker.model.config import ModelConfig
from medha_worker.model.transformer import Transformer
from medha_worker.model.weights import Shard


class FirstStage:
    """The other stages, as the first one sees them."""

    is_first_stage, is_last_stage, stages = True, False, 2

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.tokens: list[int] = []  # drawn, and not yet taken

    def send_hidden(self, hidden: torch.Tensor) -> None:
        self.sent.append(hidden)

    def receive_hidden(self, rows: int) -> torch.Tensor:
        raise AssertionError(f"nothing is before the first stage, which asks for {rows} rows")

    def send_tokens(self, ids: Sequence[int]) -> None:
        raise AssertionError(f"{ids} are drawn on the last stage")

    def receive_tokens(self, count: int) -> list[int]:
        assert len(self.tokens) >= count, "the first stage waits for a token that the last one has not drawn"
        taken, self.tokens = self.tokens[:count], self.tokens[count:]
        return taken


PROMPTS = {"long": 64, "short": 8}


@pytest.fixture
def stage(tmp_path: Path) -> tuple[Executor, FirstStage]:
    init_checkpoint(tmp_path / "tiny", preset="tiny", seed=1)
    config = ModelConfig.from_directory(tmp_path / "tiny", max_model_len=256)
    model = Transformer.load(tmp_path / "tiny", config, Shard(0, 1, 0, 1, config.num_layers))
    pipeline = FirstStage()
    executor = Executor(
        model,
        model.new_kv_cache(16, 16),
        vocab_size=config.vocab_size,
        eos_token_ids=(),
        clock=lambda: 0.0,
        pipeline=pipeline,
    )
    return executor, pipeline


def run(executor: Executor, number: int, *entries: StepEntry, admits: Sequence[str] = ()) -> None:
    for name in admits:
        ids = np.arange(10, 10 + PROMPTS[name], dtype=np.int32)
        executor.add_tokens(Tokens(prompt=name, offset=0, total=len(ids)), ids)
    step = Step(
        number,
        0,
        entries,
        admits=tuple(
            Admit(name, name, PROMPTS[name], PROMPTS[name], 1, Sampling(temperature=0.0), PROMPTS[name] + 16)
            for name in admits
        ),
    )
    executor.prepare(step)
    executor.execute(step)


def chunk(name: str, start: int, count: int) -> StepEntry:
    return StepEntry(name, 0, (Extent(start, count),), start + count >= PROMPTS[name])


def test_chunks_that_draw_nothing_wait_for_no_token(stage: tuple[Executor, FirstStage]) -> None:
    """The last stage has not even begun: a token of `short` is due, and the chunks of `long` pass all the same."""
    executor, pipeline = stage
    run(executor, 0, chunk("short", 0, 8), admits=["short", "long"])
    for number in range(1, 8):
        run(executor, number, chunk("long", 8 * (number - 1), 8))
    assert [len(hidden) for hidden in pipeline.sent] == [8] * 8
    with pytest.raises(AssertionError, match="has not drawn"):
        run(executor, 8, chunk("short", 8, 1))  # but its next token must be there


def test_a_decode_embeds_the_token_that_was_drawn_elsewhere(stage: tuple[Executor, FirstStage]) -> None:
    executor, pipeline = stage
    run(executor, 0, chunk("short", 0, 8), admits=["short", "long"])
    pipeline.tokens = [77]
    run(executor, 1, chunk("short", 8, 1), chunk("long", 0, 8))
    assert executor._sequences["short"].tokens(8, 9).tolist() == [77]
    assert [len(hidden) for hidden in pipeline.sent] == [8, 9]
