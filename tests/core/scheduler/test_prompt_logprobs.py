"""Requests that ask for the log-probabilities of their prompt: what is computed for them, what it costs, what they get."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.cost.predictor import Predictor
from medha.kv.context_parallel import balanced, striped
from medha.kv.prefix_cache import PrefixHasher
from medha.scheduler.packer import Batch, PrefillCandidate
from medha.scheduler.prompt_logprobs import joined
from medha.wire.messages import Emit, Extent, PromptLogprobs, Refused, Sampling, StepProfile

HASHES = PrefixHasher(4, b"secret").hashes(np.arange(16, dtype=np.int32))
ASKS = Sampling(max_tokens=2, prompt_logprobs=0)


def scored(*extents: Extent, width: int = 0) -> PromptLogprobs:
    """Log-probabilities by which each position is recognised."""
    places = [place for extent in extents for place in range(extent.start, extent.last + 1, extent.stride)]
    tops = [(10 * place + rank, -place - rank / 10) for place in places for rank in range(width)]
    return PromptLogprobs(
        extents,
        tuple(-float(place) for place in places),
        tuple(places),
        tuple(token for token, _ in tops),
        tuple(number for _, number in tops),
    )


@given(
    chunks=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    lanes=st.integers(1, 4),
    cut=st.sampled_from([balanced, striped]),
    width=st.integers(0, 3),
    order=st.randoms(),
)
def test_parts_of_chunks_and_lanes_join_to_the_whole_prompt(
    chunks: list[int], lanes: int, cut: Any, width: int, order: Any
) -> None:
    parts, start = [], 1
    for count in chunks:
        shares = [extents for extents in cut(start, start + count, lanes) if extents]
        parts += [scored(*extents, width=width) for extents in shares]
        start += count
    order.shuffle(parts)
    assert joined(parts, start) == scored(Extent(1, start - 1), width=width)
    assert joined(parts, start + 1) is None


def test_a_prompt_of_one_token_has_none() -> None:
    assert joined([], 1) == PromptLogprobs((), (), ())


def emits(replica: Any, name: str) -> list[Emit]:
    found = [command for commands in replica.commands for command in commands]
    return [command for command in found if isinstance(command, Emit) and command.id == name]


def test_nothing_of_such_a_prompt_is_taken_from_the_cache_and_its_first_token_brings_all(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of(max_chunk_tokens=6, min_chunk_tokens=4)
    replica.prompt_ids |= {f"prompt of {name}": tuple(range(16)) for name in ("first", "asks")}
    replica.submit(submit_of("first", 16, 2, block_hashes=HASHES))
    replica.run()
    replica.submit(replace(submit_of("asks", 16, block_hashes=HASHES), sampling=ASKS))
    replica.run().check_empty()
    (admit,) = [admit for step in replica.steps for admit in step.admits if admit.id == "asks"]
    assert admit.cached_tokens == 0
    first, second = emits(replica, "asks")
    assert first.prompt_logprobs == PromptLogprobs(
        (Extent(1, 15),), tuple(-float(place) for place in range(1, 16)), tuple(range(1, 16))
    )
    assert second.prompt_logprobs is None


def test_one_that_is_resumed_with_output_uses_the_cache_and_brings_none(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of()
    replica.prompt_ids["prompt of resumed"] = tuple(range(16))
    replica.submit(replace(submit_of("resumed", 16), sampling=ASKS, prompt_length=15))
    replica.run().check_empty()
    assert [emit.prompt_logprobs for emit in emits(replica, "resumed")] == [None]


def test_one_whose_prompt_another_request_names_is_refused(replica_of: Any, submit_of: Any) -> None:
    """It could otherwise share the KV of that one, and never see the logits."""
    replica = replica_of()
    replica.submit(submit_of("first", 16, 2))
    commands = replica.controller.handle(
        replace(submit_of("asks", 16, prompt="prompt of first"), sampling=ASKS), 0.0
    )
    assert [type(command) for command in commands] == [Refused]


def test_every_row_of_its_chunks_counts_with_the_output_head() -> None:
    """A row costs 1 ms in the layers, and 1 ms in the head: 99 tokens fit 100 ms, and half as many with their logits."""
    profile = StepProfile(0.0, 0.001, 0.0, 0.001, head_seconds_per_row=0.001)
    batch = Batch(Predictor(profile))
    plain = PrefillCandidate("plain", 0, 1000, False, 1.0)
    asks = replace(plain, scores_prompt=True)
    assert batch.largest(plain, 1000, 0.1001) == 99
    assert batch.largest(asks, 1000, 0.1001) == 50
    for prefill, seconds in ((plain, 0.011), (asks, 0.020)):
        batch.add(prefill, 10)
        assert batch.seconds() == pytest.approx(seconds)
        batch.remove(prefill, 10)
        assert batch.seconds() == pytest.approx(0.0)
