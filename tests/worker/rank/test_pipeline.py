"""Chunks stream through stages: the first stage waits for a sampled token only where it needs that token."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from medha.errors import PartFailed
from medha.wire.messages import Admit, Extent, Sampling, Step, StepEntry, Tokens
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.weights import Shard
from medha_worker.rank.executor import Executor, Pipeline
from medha_worker.rank.lane_plan import LanePlan

from ..models import load_model


class FirstStage:
    """The other stages, as the first one sees them."""

    is_first_stage, is_last_stage, samples, stages = True, False, False, 2

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.tokens: list[
            int
        ] = []  # sampled and not yet received; the digest follows the tokens of each step

    def send_hidden(self, hidden: torch.Tensor) -> None:
        self.sent.append(hidden)

    def expect_hidden(self, rows: int) -> None:
        raise AssertionError(f"nothing is before the first stage, which asks for {rows} rows")

    def receive_hidden(self) -> torch.Tensor:
        raise AssertionError("nothing is before the first stage")

    def send_tokens(self, ids: Sequence[int]) -> None:
        raise AssertionError(f"{ids} are sampled on the last stage")

    def receive_tokens(self, count: int) -> list[int]:
        assert len(self.tokens) >= count, (
            "the first stage waits for a token that the last one has not sampled"
        )
        taken, self.tokens = self.tokens[:count], self.tokens[count:]
        return taken


class LastStage:
    """The first stage, as the last one of two sees it."""

    is_first_stage, is_last_stage, samples, stages = False, True, True, 2

    def __init__(self, hidden_size: int) -> None:
        self._hidden_size = hidden_size
        self.expected: list[int] = []
        self.sent: list[Sequence[int]] = []

    def send_hidden(self, hidden: torch.Tensor) -> None:
        raise AssertionError(f"nothing is behind the last stage, which sends {len(hidden)} rows")

    def expect_hidden(self, rows: int) -> None:
        self.expected.append(rows)

    def receive_hidden(self) -> torch.Tensor:
        return torch.ones(self.expected.pop(0), self._hidden_size)

    def send_tokens(self, ids: Sequence[int]) -> None:
        self.sent.append(ids)

    def receive_tokens(self, count: int) -> list[int]:
        raise AssertionError(f"{count} tokens are sampled here")


PROMPTS = {"long": 64, "short": 8}


@pytest.fixture
def stage(tmp_path: Path) -> tuple[Executor, FirstStage]:
    pipeline = FirstStage()
    return stage_of(tmp_path, 0, 1, lambda _: pipeline), pipeline


def stage_of(
    folder: Path, first_layer: int, last_layer: int | None, pipeline_of: Callable[[ModelConfig], Pipeline]
) -> Executor:
    init_checkpoint(folder / "tiny", preset="tiny", seed=1)
    config = ModelConfig.from_directory(folder / "tiny", max_model_len=256)
    layers = config.num_layers
    model = load_model(folder / "tiny", config, Shard(0, 1, first_layer, last_layer or layers, layers))
    return Executor(
        model,
        model.new_kv_cache(16, 16),
        vocab_size=config.vocab_size,
        eos_token_ids=(),
        clock=lambda: 0.0,
        pipeline=pipeline_of(config),
    )


def run(executor: Executor, number: int, *entries: StepEntry, admits: Sequence[str] = ()) -> None:
    executor.run(plan(executor, number, *entries, admits=admits))


def plan(executor: Executor, number: int, *entries: StepEntry, admits: Sequence[str] = ()) -> LanePlan:
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
    return executor.plan(step)


def chunk(name: str, start: int, count: int) -> StepEntry:
    return StepEntry(name, 0, (Extent(start, count),), start + count >= PROMPTS[name])


def test_chunks_that_sample_nothing_wait_for_no_token(stage: tuple[Executor, FirstStage]) -> None:
    """The last stage has not begun, so the token of `short` is missing; the chunks of `long` pass nevertheless."""
    executor, pipeline = stage
    run(executor, 0, chunk("short", 0, 8), admits=["short", "long"])
    for number in range(1, 8):
        run(executor, number, chunk("long", 8 * (number - 1), 8))
    assert [len(hidden) for hidden in pipeline.sent] == [8] * 8
    with pytest.raises(AssertionError, match="has not sampled"):
        run(executor, 8, chunk("short", 8, 1))  # this step needs the token


def test_a_decode_embeds_the_token_that_was_sampled_elsewhere(stage: tuple[Executor, FirstStage]) -> None:
    executor, pipeline = stage
    planned = plan(executor, 0, chunk("short", 0, 8), admits=["short", "long"])
    executor.run(planned)
    (waiting,) = executor._tokens._expected
    assert waiting[0] is planned.entries[0], "hidden states would keep those of the whole step"
    pipeline.tokens = [77, digest(0, ["short"], [77])]
    run(executor, 1, chunk("short", 8, 1), chunk("long", 0, 8))
    assert executor._state.sequences["short"].tokens(8, 9).tolist() == [77]
    assert [len(hidden) for hidden in pipeline.sent] == [8, 9]


def digest(before: int, names: Sequence[str], tokens: Sequence[int]) -> int:
    """Return the digest of `tokens` sampled for `names`, after a step with the digest `before`."""
    ids = b"".join(token.to_bytes(8, "little", signed=True) for token in tokens)
    return zlib.crc32("\0".join(names).encode() + ids, before)


@pytest.mark.parametrize(
    "tokens",
    [
        pytest.param([78, digest(0, ["short"], [77])], id="another token"),
        pytest.param([77, digest(0, ["long"], [77])], id="another sequence's token"),
        pytest.param([77, digest(digest(0, ["short"], [76]), ["short"], [77])], id="one step too late"),
    ],
)
def test_a_rank_stops_if_it_receives_tokens_that_were_not_sampled_for_it(
    stage: tuple[Executor, FirstStage], tokens: list[int]
) -> None:
    executor, pipeline = stage
    run(executor, 0, chunk("short", 0, 8), admits=["short"])
    pipeline.tokens = tokens
    with pytest.raises(PartFailed, match="the tokens that came for short are not those that were sampled"):
        run(executor, 1, chunk("short", 8, 1))


def test_hidden_states_are_expected_as_soon_as_a_step_is_planned(tmp_path: Path) -> None:
    """So they arrive while the step before is computed; gloo sends nothing until they are expected."""
    pipelines: list[LastStage] = []

    def pipeline_of(config: ModelConfig) -> Pipeline:
        pipelines.append(LastStage(config.hidden_size))
        return pipelines[-1]

    executor = stage_of(tmp_path, 1, None, pipeline_of)
    (pipeline,) = pipelines
    first = plan(executor, 0, chunk("long", 0, 48), admits=["long"])
    second = plan(executor, 1, chunk("long", 48, 16))
    assert pipeline.expected == [48, 16]
    executor.run(first)
    executor.run(second)
    assert pipeline.expected == []
    ((token, sent),) = pipeline.sent
    assert sent == digest(0, ["long"], [token])
