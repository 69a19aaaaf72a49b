"""The engine of one rank gives the text of transformers for a tiny model, shares prompts, and lets single sequences fail alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from medha.errors import PartFailed, WireInvalid
from medha.kv.blocks import BlockLedger
from medha.kv.lane_replay import LaneReplay
from medha.wire.messages import Admit, Done, EntryFailed, Extent, Grow, Sampling, Step, StepEntry, Tokens
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.prediction_head import PredictionHead
from medha_worker.model.transformer import Transformer
from medha_worker.rank.executor import Executor
from medha_worker.rank.head_drafter import HeadDrafter
from medha_worker.rank.lane_plan import LanePlan

from ..models import load_model
from ..sampling_cases import Allowing

VOCAB = 512
BLOCK_TOKENS = 16
GREEDY = Sampling(temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    init_checkpoint(directory, preset="tiny", seed=1)
    return directory


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Transformer:
    return load_model(checkpoint, ModelConfig.from_directory(checkpoint, max_model_len=1024))


@pytest.fixture(scope="module")
def greedy_text(checkpoint: Path) -> Callable[[np.ndarray, int], list[int]]:
    """Return a function that continues a prompt with transformers."""
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def text(ids: np.ndarray, count: int) -> list[int]:
        tokens = torch.from_numpy(ids.astype(np.int64))[None]
        with torch.inference_mode():
            for _ in range(count):
                best = reference(tokens).logits[0, -1].argmax()
                tokens = torch.cat([tokens, best[None, None]], dim=1)
        return tokens[0, len(ids) :].tolist()

    return text


class Engine:
    """An executor whose controller the test plays, with the step number and the controller's own ledger."""

    def __init__(self, model: Any, head: PredictionHead | None = None, **more: object) -> None:
        """`head` proposes the guesses that entries ask for."""
        kv_cache = model.new_kv_cache(64, BLOCK_TOKENS, head=head)
        if head is not None:
            more["drafter"] = HeadDrafter(head, kv_cache.last_layer(), model)
        self.executor = Executor(
            model,
            kv_cache,
            vocab_size=VOCAB,
            eos_token_ids=(1,),
            clock=lambda: 0.0,
            **more,  # type: ignore[arg-type]
        )
        self.double = LaneReplay(BlockLedger(64, BLOCK_TOKENS))
        self.steps = 0

    def give(self, name: str, ids: np.ndarray) -> None:
        self.executor.add_tokens(Tokens(prompt=name, offset=0, total=len(ids)), ids)

    def step(self, *entries: StepEntry, **changes: object) -> Done:
        done = self.executor.run(self.plan(*entries, **changes))
        assert done is not None
        return done

    def plan(self, *entries: StepEntry, **changes: object) -> LanePlan:
        step = Step(self.steps, 0, entries, **changes)  # type: ignore[arg-type]
        self.steps += 1
        for name in step.releases:
            self.double.release(name)
        for grow in step.grows:
            self.double.grow(grow)
        for admit in step.admits:
            self.double.admit(admit)
        step = replace(step, state_hash=self.double.state_hash())
        self.executor.prepare(step)
        assert self.executor.missing_prompts(step) == []
        return self.executor.plan(step)

    def start(self, name: str, ids: np.ndarray, sampling: Sampling = GREEDY, **more: object) -> Done:
        """Admit a sequence with a prompt of its own, and prefill it in one step."""
        self.give(f"prompt of {name}", ids)
        return self.step(entry(name, 0, len(ids)), admits=(admit(name, ids, sampling, **more),))

    def decode(self, lengths: dict[str, int], steps: int) -> dict[str, list[int]]:
        """Return the tokens of `steps` decode steps of all sequences; `lengths` has the known tokens of each."""
        sampled: dict[str, list[int]] = {name: [] for name in lengths}
        for step in range(steps):
            done = self.step(*(entry(name, length + step - 1, 1) for name, length in lengths.items()))
            assert done.failures == ()
            for sample in done.samples:
                sampled[sample.id].append(sample.token)
        return sampled


def random_ids(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(7, VOCAB, count).astype(np.int32)


def entry(name: str, start: int, count: int, *, samples: bool = True) -> StepEntry:
    return StepEntry(name, 0, (Extent(start, count),), samples)


def admit(name: str, ids: np.ndarray, sampling: Sampling = GREEDY, **more: object) -> Admit:
    fields = {
        "prompt": f"prompt of {name}",
        "tokens": len(ids),
        "prompt_length": len(ids),
        "seed": 5,
        "reserved_tokens": len(ids) + 40,
        **more,
    }
    return Admit(id=name, sampling=sampling, **fields)  # type: ignore[arg-type]


# --- text ---------------------------------------------------------------------------------------------


def test_chunks_mixed_with_decodes_give_the_text_of_transformers(
    model: Transformer, greedy_text: Callable[[np.ndarray, int], list[int]]
) -> None:
    engine = Engine(model)
    short, long = random_ids(9, 1), random_ids(75, 2)
    first = engine.start("short", short).samples[0].token
    engine.give("prompt of long", long)
    texts: dict[str, list[int]] = {"short": [first], "long": []}
    chunks = [(0, 7), (7, 40), (47, 1), (48, 27)]
    for index, (start, count) in enumerate(chunks):
        done = engine.step(
            entry("short", 9 + index, 1),
            entry("long", start, count, samples=start + count == 75),
            admits=(admit("long", long),) if index == 0 else (),
        )
        for sample in done.samples:
            texts[sample.id].append(sample.token)
    for name, tokens in engine.decode({"short": 9 + 5, "long": 76}, 15).items():
        texts[name] += tokens
    assert texts["short"] == greedy_text(short, 20)
    assert texts["long"] == greedy_text(long, 16)


@pytest.mark.parametrize("prompt_tokens", [48, 49, 55])
def test_forks_share_the_prompt_and_sample_what_separate_sequences_sample(
    model: Transformer, prompt_tokens: int
) -> None:
    """The prompt ends at the end of a block, after the first token of one, or in the middle of one."""
    ids = random_ids(prompt_tokens, 3)
    sampling = Sampling(temperature=1.0, ignore_eos=True)

    forked = Engine(model)
    forked.start("s0", ids, sampling)
    held = forked.executor.ledger.held_blocks
    shared = prompt_tokens - 1
    forks = tuple(
        admit(
            f"s{index}",
            ids,
            sampling,
            prompt="prompt of s0",
            sample_index=index,
            fork_of="s0",
            shared_tokens=shared,
        )
        for index in (1, 2)
    )
    done = forked.step(*(entry(f"s{index}", shared, 1) for index in (1, 2)), admits=forks)
    firsts = {sample.id: sample.token for sample in done.samples}
    texts = forked.decode({f"s{index}": prompt_tokens + 1 for index in range(3)}, 12)
    own = forked.executor.ledger.blocks_for(prompt_tokens + 40) - shared // BLOCK_TOKENS
    assert forked.executor.ledger.held_blocks == held + 2 * own

    for index in range(3):
        separate = Engine(model)
        first = separate.start(f"s{index}", ids, sampling, sample_index=index).samples[0].token
        assert firsts.get(f"s{index}", first) == first
        assert separate.decode({f"s{index}": prompt_tokens + 1}, 12)[f"s{index}"] == texts[f"s{index}"]
    assert len({tuple(text) for text in texts.values()}) == 3


def test_a_resumed_sequence_goes_on_with_the_same_tokens(model: Transformer) -> None:
    ids = random_ids(20, 4)
    sampling = Sampling(temperature=1.2, frequency_penalty=0.5, ignore_eos=True, max_tokens=13)
    whole = Engine(model)
    tokens = [whole.start("a", ids, sampling).samples[0].token, *whole.decode({"a": 21}, 12)["a"]]
    resumed = Engine(model)
    longer = np.concatenate([ids, np.array(tokens[:6], dtype=np.int32)])
    first = resumed.start("b", longer, sampling, prompt_length=20).samples[0].token
    again = [first, *resumed.decode({"b": 27}, 5)["b"]]
    assert again == tokens[6:12]
    last = resumed.step(entry("b", 31, 1)).samples[0]
    assert (last.token, last.finish_reason) == (tokens[12], "length")


def test_text_goes_on_across_a_grown_reservation(
    model: Transformer, greedy_text: Callable[[np.ndarray, int], list[int]]
) -> None:
    ids = random_ids(14, 6)
    engine = Engine(model)
    first = engine.start("a", ids, reserved_tokens=16).samples[0].token
    sampled = [first, *engine.decode({"a": 15}, 2)["a"]]
    engine.step(grows=(Grow("a", 100),))
    assert sampled + engine.decode({"a": 17}, 70)["a"] == greedy_text(ids, 73)


# --- prompts and bookkeeping --------------------------------------------------------------------------


def test_a_step_waits_for_each_piece_of_the_prompts_that_it_admits(model: Transformer) -> None:
    executor = Engine(model).executor
    ids = random_ids(10, 7)
    step = Step(0, 0, (entry("a", 0, 10),), admits=(admit("a", ids),))
    name = "prompt of a"
    assert executor.missing_prompts(step) == [name]
    executor.add_tokens(Tokens(name, 0, 10), ids[:6])
    assert executor.missing_prompts(step) == [name]
    executor.add_tokens(Tokens(name, 6, 10), ids[6:])
    assert executor.missing_prompts(step) == []


@pytest.mark.parametrize(("offset", "count"), [(5, 1), (7, 1), (6, 5)])
def test_a_piece_that_does_not_continue_its_prompt_is_refused(
    model: Transformer, offset: int, count: int
) -> None:
    executor = Engine(model).executor
    executor.add_tokens(Tokens("p", 0, 10), random_ids(6, 1))
    with pytest.raises(WireInvalid, match=f"offset {offset}"):
        executor.add_tokens(Tokens("p", offset, 10), random_ids(count, 1))
    with pytest.raises(WireInvalid, match="offset 3"):
        executor.add_tokens(Tokens("unknown", 3, 10), random_ids(3, 1))


def test_nothing_is_left_of_released_sequences_and_forgotten_prompts(model: Transformer) -> None:
    engine = Engine(model)
    engine.start("a", random_ids(30, 1))
    engine.step(releases=("a",), forgets=("prompt of a", "never sent"))
    state = engine.executor._state
    assert (state.sequences, state.prompts, state.ledger.held_blocks) == ({}, {}, 0)


def test_a_prompt_may_be_forgotten_and_given_again_for_one_step(model: Transformer) -> None:
    engine = Engine(model)
    engine.start("a", random_ids(30, 1))
    ids = random_ids(12, 2)
    step = Step(1, 0, (), releases=("a",), forgets=("prompt of a",), admits=(admit("a", ids),))
    engine.executor.prepare(step)
    assert engine.executor.missing_prompts(step) == ["prompt of a"]
    engine.give("prompt of a", ids)
    engine.executor.execute(step)
    assert len(engine.executor._state.sequences) == 1


def test_the_stage_is_free_before_tokens_are_sampled(model: Transformer) -> None:
    order: list[str] = []

    class Watched:
        device, kernels = model.device, model.kernels
        new_kv_cache, prepare, windows = model.new_kv_cache, model.prepare, model.windows
        forward = staticmethod(lambda *arguments: (order.append("forward"), model.forward(*arguments))[1])
        logits = staticmethod(lambda hidden: (order.append("logits"), model.logits(hidden))[1])

    engine = Engine(Watched())
    ids = random_ids(5, 1)
    engine.give("prompt of a", ids)
    step = Step(0, 0, (entry("a", 0, 5),), admits=(admit("a", ids),))
    engine.executor.prepare(step)
    engine.executor.execute(step, lambda: order.append("free"))
    assert order == ["forward", "free", "logits"]


# --- state that has diverged --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "detail"),
    [
        (Step(1, 0, (), state_hash=1), "the ledgers differ"),
        (Step(1, 3, ()), "epoch 3"),
        (
            Step(1, 0, (replace(entry("a", 8, 1), strategy="owner", shard_map_version=1),)),
            "the step names shard map 1 of a, and 0 is here",
        ),
        (
            Step(1, 0, (StepEntry("a", 1, (Extent(8, 1),), True, "owner", 2),), lanes=(0, 1)),
            "the step names shard map 2 of a, and 0 is here",
        ),
        (Step(1, 0, (), releases=("b",)), "sequence b is not known"),
        (Step(1, 0, (), grows=(Grow("b", 5),)), "b is not known"),
        (Step(1, 0, (), grows=(Grow("a", 5000),)), "no KV is left to grow a to 5000"),
        (Step(1, 0, (), admits=(admit("a", random_ids(8, 1)),)), "a is admitted twice"),
        (Step(1, 0, (), admits=(admit("b", random_ids(8, 1)),)), "b is admitted ahead of its prompt"),
        (
            Step(
                1, 0, (), admits=(admit("b", random_ids(8, 1), prompt="prompt of a", reserved_tokens=5000),)
            ),
            "no KV is left to admit b",
        ),
        (
            Step(
                1,
                0,
                (),
                admits=(admit("b", random_ids(8, 1), prompt="prompt of a", fork_of="a", shared_tokens=9),),
            ),
            "b shares tokens that a has not computed",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fork_from_the_controllers_state_is_fatal(model: Transformer, step: Step, detail: str) -> None:
    engine = Engine(model)
    engine.start("a", random_ids(8, 1))

    def run() -> None:
        engine.executor.prepare(step)
        engine.executor.execute(step)

    with pytest.raises(PartFailed, match=detail):
        run()


# --- failures of single sequences----------------------------------------------------------------------


class Faulty:
    """A model that raises when a batch has a row for which `strikes` says so."""

    def __init__(self, model: Transformer, strikes: Callable[[torch.Tensor], Exception | None]) -> None:
        self.model = model
        self.strikes = strikes
        self.device, self.kernels = model.device, model.kernels
        self.new_kv_cache, self.prepare, self.windows = model.new_kv_cache, model.prepare, model.windows
        self.logits = model.logits

    def forward(self, tokens: torch.Tensor, *arguments: object) -> torch.Tensor:
        error = self.strikes(tokens)
        if error is not None:
            raise error
        return self.model.forward(tokens, *arguments)  # type: ignore[arg-type]


CPU_OUT_OF_MEMORY = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError(CPU_OUT_OF_MEMORY), "out_of_memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out_of_memory"),
        (MemoryError(), "out_of_memory"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "internal"),
    ],
    ids=repr,
)
def test_only_the_sequence_that_fails_alone_ends(
    model: Transformer,
    greedy_text: Callable[[np.ndarray, int], list[int]],
    error: Exception,
    reason: str,
) -> None:
    engine = Engine(Faulty(model, lambda tokens: error if len(tokens) >= 40 else None))
    small, large, other = random_ids(8, 1), random_ids(40, 2), random_ids(9, 3)
    prompts = {"small": small, "large": large, "other": other}
    for name, ids in prompts.items():
        engine.give(f"prompt of {name}", ids)
    done = engine.step(
        *(entry(name, 0, len(ids)) for name, ids in prompts.items()),
        admits=tuple(admit(name, ids) for name, ids in prompts.items()),
    )
    assert [(failure.id, failure.reason) for failure in done.failures] == [("large", reason)]
    assert {sample.id: [sample.token] for sample in done.samples} == {
        "small": greedy_text(small, 1),
        "other": greedy_text(other, 1),
    }
    engine.step(releases=("large",))
    tokens = engine.decode({"small": 9, "other": 10}, 4)
    assert tokens["small"] == greedy_text(small, 5)[1:]


@pytest.mark.parametrize("fails", ["forward", "sample"])
def test_a_step_that_is_planned_ahead_of_one_that_fails_computes_the_other(
    model: Transformer, greedy_text: Callable[[np.ndarray, int], list[int]], fails: str
) -> None:
    """No token was sampled for the failed sequence, and the other sequence's token must not take its place."""
    struck: list[int] = []
    batches: list[int] = []

    def strikes(tokens: torch.Tensor) -> Exception | None:
        batches.append(len(tokens))
        return MemoryError() if fails == "forward" and set(tokens.tolist()) & set(struck) else None

    def mask_for(admit: Admit) -> Any:
        def mask(outputs: Sequence[int]) -> torch.Tensor:
            if struck and fails == "sample":
                raise MemoryError
            return torch.ones(VOCAB, dtype=torch.bool)

        return Allowing(mask) if admit.id == "fails" else None

    engine = Engine(Faulty(model, strikes), mask_for=mask_for)
    prompts = {"fails": random_ids(12, 6), "goes on": random_ids(8, 1)}
    sampled = {name: [engine.start(name, ids).samples[0].token] for name, ids in prompts.items()}
    struck.append(sampled["fails"][0])
    text = greedy_text(prompts["goes on"], 4)
    assert struck[0] not in text
    planned = [
        engine.plan(*(entry(name, len(ids) + ahead, 1) for name, ids in prompts.items()))
        for ahead in range(3)
    ]
    for step in planned:
        done = engine.executor.run(step)
        assert done is not None
        assert step is not planned[0] or [failure.id for failure in done.failures] == ["fails"]
        for sample in done.samples:
            sampled[sample.id].append(sample.token)
    assert sampled["goes on"] == text
    assert batches[-2:] == [2, 2]


def test_a_batch_that_is_too_large_together_runs_one_by_one(model: Transformer) -> None:
    engine = Engine(Faulty(model, lambda tokens: MemoryError() if len(tokens) > 10 else None))
    prompts = {f"s{index}": random_ids(8, index) for index in range(3)}
    for name, ids in prompts.items():
        engine.give(f"prompt of {name}", ids)
    done = engine.step(
        *(entry(name, 0, 8) for name in prompts),
        admits=tuple(admit(name, ids) for name, ids in prompts.items()),
    )
    assert done.failures == ()
    assert [sample.id for sample in done.samples] == list(prompts)


def test_a_mask_hook_that_raises_ends_its_own_sequence(model: Transformer) -> None:
    def broken(_: object) -> torch.Tensor:
        raise KeyError("no such state")

    engine = Engine(model, mask_for=lambda admitted: Allowing(broken) if admitted.id == "masked" else None)
    first = engine.start("plain", random_ids(8, 1)).samples[0].token
    ids = random_ids(8, 2)
    engine.give("prompt of masked", ids)
    done = engine.step(entry("plain", 8, 1), entry("masked", 0, 8), admits=(admit("masked", ids),))
    assert [sample.id for sample in done.samples] == ["plain"]
    assert [(failure.id, failure.reason) for failure in done.failures] == [("masked", "internal")]
    assert first >= 0


@pytest.mark.parametrize(
    ("ids", "sampling", "detail"),
    [
        ([5, VOCAB, 7], GREEDY, "outside the vocabulary of 512"),
        ([5, -1, 7], GREEDY, "outside the vocabulary of 512"),
        ([5, 6, 7], Sampling(logit_bias={VOCAB: 1.0}), "logit_bias names token 512"),
        ([5, 6, 7], Sampling(logit_bias=dict.fromkeys(range(VOCAB), float("-inf"))), "every token is masked"),
        ([5, 6, 7], Sampling(logit_bias={3: float("nan")}), "NaN"),
    ],
)
def test_wrong_ids_and_biases_end_their_sequence_alone(
    model: Transformer, ids: list[int], sampling: Sampling, detail: str
) -> None:
    engine = Engine(model)
    engine.start("good", random_ids(8, 1))
    bad = np.array(ids, dtype=np.int32)
    engine.give("prompt of bad", bad)
    done = engine.step(entry("good", 8, 1), entry("bad", 0, 3), admits=(admit("bad", bad, sampling),))
    assert [sample.id for sample in done.samples] == ["good"]
    (failure,) = done.failures
    assert (failure.id, failure.reason) == ("bad", "not_finite" if detail == "NaN" else "internal")
    assert detail in failure.detail


@pytest.mark.parametrize(
    ("wrong", "detail"),
    [
        (StepEntry("a", 0, (), True), "no position"),
        (StepEntry("a", 0, (Extent(0, 2, 2),), False), "is not one run"),
        (StepEntry("a", 0, (Extent(0, 2), Extent(4, 2)), False), "not one run"),
        (replace(entry("a", 8, 1), strategy="ring"), "strategy 'ring'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_entry_that_cannot_be_computed_fails_alone(
    model: Transformer, wrong: StepEntry, detail: str
) -> None:
    engine = Engine(model)
    engine.start("a", random_ids(8, 1))
    engine.start("b", random_ids(8, 2))
    done = engine.step(wrong, entry("b", 8, 1))
    assert [sample.id for sample in done.samples] == ["b"]
    (failure,) = done.failures
    assert isinstance(failure, EntryFailed)
    assert detail in failure.detail


def test_an_entry_of_another_lane_that_names_no_position_is_that_lanes_to_fail(model: Transformer) -> None:
    engine = Engine(model)
    engine.start("a", random_ids(8, 1))
    engine.start("b", random_ids(8, 2))
    done = engine.step(StepEntry("a", 1, (), True, "owner"), entry("b", 8, 1), lanes=(0, 1))
    assert [sample.id for sample in done.samples] == ["b"]
    assert done.failures == ()


@pytest.mark.parametrize(
    ("wrong", "detail"),
    [
        (entry("a", 10, 1), "positions 10 to 11: 8 are computed"),
        (entry("a", 8, 2), "9 tokens known"),
        (entry("a", 0, 4), "a token is sampled after position 3"),
        (entry("full", 16, 1), "16 reserved"),
        (entry("unknown", 0, 1), "unknown is not known here"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_controller_that_counts_otherwise_is_refused_whole(
    model: Transformer, wrong: StepEntry, detail: str
) -> None:
    """Otherwise, ranks of one request would continue with different batches, and wait for each other for ever."""
    engine = Engine(model)
    engine.start("a", random_ids(8, 1))
    engine.start("full", random_ids(16, 2), reserved_tokens=16)
    with pytest.raises(PartFailed, match=detail):
        engine.step(wrong)
