"""The filters compared with transformers, sampling with the exact distribution, and unusual rows."""

import math
import re
from weakref import ref

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from medha.wire.messages import Sampling
from medha_worker.device import host_device
from medha_worker.kernels.torch_race import SparseRace
from medha_worker.model import sampling_plan, token_sampler
from medha_worker.model.flat_columns import Columns
from medha_worker.model.penalty_tables import PenaltySlots, PenaltyTables
from medha_worker.model.sampler import NotSampled, SampledToken, SequenceSampler, TokenMask
from medha_worker.model.sampling_plan import plan_batch, plan_filters, plan_step
from medha_worker.model.token_sampler import TokenSampler

from ..sampling_cases import Allowing

VOCAB = 300


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def sampler(
    sampling: Sampling,
    *,
    prompt: tuple[int, ...] = (1, 2, 3),
    outputs: tuple[int, ...] = (),
    seed: int = 7,
    sample_index: int = 0,
    vocab: int = VOCAB,
    **more: object,
) -> SequenceSampler:
    return SequenceSampler(
        sampling,
        seed=seed,
        sample_index=sample_index,
        tokens=np.array([*prompt, *outputs], dtype=np.int32),
        prompt_length=len(prompt),
        vocab_size=vocab,
        **more,  # type: ignore[arg-type]
    )


def sample_tokens(logits: torch.Tensor, sequences: list[SequenceSampler]) -> list[SampledToken | NotSampled]:
    return TokenSampler(SparseRace(), host_device(torch.float32)).sample(logits, sequences)


def filter_logits(logits: torch.Tensor, parameters: list[Sampling]) -> torch.Tensor:
    columns = Columns()
    filters = plan_filters(parameters, logits.shape[1], columns)
    columns.stage(host_device(torch.float32))
    return token_sampler.filter_logits(logits, filters, widens=True)


def adjusted(logits: torch.Tensor, sequence: SequenceSampler) -> torch.Tensor:
    """Apply the penalties of a sequence to float32 [vocab]."""
    batch = plan_batch([sequence], len(logits), PenaltySlots())
    plan = plan_step(batch, [sequence])
    tables = PenaltyTables(logits.device)
    for columns in (batch.columns, plan.columns):
        columns.stage(host_device(torch.float32))
    if plan.penalties is not None:
        tables.update(plan.penalties, batch.vocab)
    return token_sampler.adjust_logits(logits[None], batch.blocks[0], plan.masks, tables)[0]


def sampled(logits: torch.Tensor, sequence: SequenceSampler) -> SampledToken:
    (result,) = sample_tokens(logits, [sequence])
    assert isinstance(result, SampledToken), result
    return result


# --- filters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7),
        Sampling(top_k=1),
        Sampling(top_k=17),
        Sampling(top_k=VOCAB + 50),
        Sampling(top_p=0.9),
        Sampling(top_p=1e-9),
        Sampling(top_p=0.999999),
        Sampling(min_p=0.1),
        Sampling(min_p=1.0),
        Sampling(temperature=1.7, top_k=40, top_p=0.8, min_p=0.02),
        Sampling(temperature=0.3, top_p=0.5),
    ],
    ids=str,
)
def test_filters_keep_what_the_warpers_of_transformers_keep(sampling: Sampling) -> None:
    logits = random_logits(6)
    expected = TemperatureLogitsWarper(float(sampling.temperature))(None, logits.double())
    if sampling.top_k:
        expected = TopKLogitsWarper(sampling.top_k)(None, expected)
    if sampling.top_p < 1:
        expected = TopPLogitsWarper(sampling.top_p)(None, expected)
    if sampling.min_p:
        expected = MinPLogitsWarper(sampling.min_p)(None, expected)
    result = filter_logits(logits, [sampling] * 6)
    torch.testing.assert_close(result.softmax(-1), expected.softmax(-1), rtol=1e-9, atol=1e-12)


def test_a_nucleus_wider_than_the_first_candidates_is_found() -> None:
    logits = random_logits(2, vocab=20_000) * 0.01  # nearly flat: the nucleus holds most of the vocabulary
    expected = TopPLogitsWarper(0.95)(None, logits.double())
    result = filter_logits(logits, [Sampling(top_p=0.95)] * 2)
    torch.testing.assert_close(result.softmax(-1), expected.softmax(-1), rtol=1e-9, atol=1e-15)


def test_each_row_is_filtered_by_its_own_parameters() -> None:
    logits = random_logits(3)
    parameters = [Sampling(top_k=5), Sampling(), Sampling(temperature=2.0, top_p=0.6)]
    together = filter_logits(logits, parameters)
    for row, sampling in enumerate(parameters):
        torch.testing.assert_close(together[row : row + 1], filter_logits(logits[row : row + 1], [sampling]))


def test_ties_with_the_last_kept_token_are_kept() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    for sampling in (Sampling(top_k=2), Sampling(top_p=0.6)):
        assert torch.isfinite(filter_logits(logits, [sampling])).tolist() == [[True, True, True, True, False]]


def test_repetition_penalty_equals_transformers_and_counts_the_prompt() -> None:
    logits = random_logits(1)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([[1, 2, 3, 9]]), logits.clone())
    result = adjusted(logits[0], sampler(Sampling(repetition_penalty=1.3), outputs=(9,)))
    torch.testing.assert_close(result, expected[0])


def test_presence_and_frequency_penalties_count_output_alone() -> None:
    logits = torch.zeros(VOCAB)
    sequence = sampler(Sampling(presence_penalty=0.5, frequency_penalty=0.25), outputs=(9, 9))
    sequence.append(4)
    result = adjusted(logits, sequence)
    expected = torch.zeros(VOCAB)
    expected[9], expected[4] = -1.0, -0.75
    torch.testing.assert_close(result, expected)


def test_an_adjusted_row_leaves_the_given_logits_alone() -> None:
    logits = random_logits(2)
    before = logits.clone()
    sample_tokens(
        logits, [sampler(Sampling(logit_bias={5: 100.0}, repetition_penalty=2.0)), sampler(Sampling())]
    )
    assert torch.equal(logits, before)


# --- sampling -----------------------------------------------------------------------------------------


def test_greedy_takes_the_largest_logit() -> None:
    logits = random_logits(5)
    results = sample_tokens(logits, [sampler(Sampling(temperature=0.0)) for _ in range(5)])
    assert [result.token for result in results if isinstance(result, SampledToken)] == logits.argmax(
        -1
    ).tolist()


@pytest.mark.parametrize("key", ["seed", "sample_index", "position"])
def test_samples_follow_the_distribution_along_each_part_of_the_key(key: str) -> None:
    """Pearson's chi-square over 20,000 samples is below the 99.99 % quantile of its 7 degrees of freedom."""
    draws, vocab = 20_000, 8
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(1))
    sequences = []
    for index in range(draws):
        sequence = sampler(Sampling(), vocab=vocab, seed=index if key == "seed" else 3)
        if key == "sample_index":
            sequence = sampler(Sampling(), vocab=vocab, sample_index=index)
        if key == "position":
            sequence.position = index
        sequences.append(sequence)
    results = sample_tokens(logits.expand(draws, vocab), sequences)
    observed = np.bincount(
        [result.token for result in results if isinstance(result, SampledToken)], minlength=vocab
    )
    expected = logits[0].softmax(-1).numpy() * draws
    assert observed.sum() == draws
    assert ((observed - expected) ** 2 / expected).sum() < 29.9


def test_neighbouring_positions_are_sampled_independently() -> None:
    """Chi-square over the nine outcomes of 10,000 disjoint pairs is below the 99.99 % quantile of 8 degrees."""
    draws = 20_000
    sequences = [sampler(Sampling(), vocab=3) for _ in range(draws)]
    for index, sequence in enumerate(sequences):
        sequence.position = index
    results = sample_tokens(torch.zeros(1, 3).expand(draws, 3), sequences)
    tokens = np.array([result.token for result in results if isinstance(result, SampledToken)])
    joint = np.bincount(tokens[0::2] * 3 + tokens[1::2], minlength=9)
    expected = draws / 2 / 9
    assert ((joint - expected) ** 2 / expected).sum() < 31.8


def test_a_sample_does_not_depend_on_the_batch() -> None:
    logits = random_logits(12, seed=3)
    kinds = [
        Sampling(),
        Sampling(top_k=9),
        Sampling(top_p=0.7),
        Sampling(temperature=0.0),
        Sampling(min_p=0.05),
    ]
    sequences = [sampler(kinds[row % 5], seed=row, outputs=(1,) * row) for row in range(12)]
    together = sample_tokens(logits, sequences)
    alone = [sample_tokens(logits[row : row + 1], [sequences[row]])[0] for row in range(12)]
    backwards = sample_tokens(logits.flip(0), sequences[::-1])[::-1]
    assert together == alone == backwards


def test_a_resumed_sequence_samples_the_same_tokens() -> None:
    logits = random_logits(30, seed=5)
    sampling = Sampling(temperature=1.3, frequency_penalty=0.4, repetition_penalty=1.2, presence_penalty=0.1)
    original = sampler(sampling)
    tokens = []
    for row in range(30):
        tokens.append(sampled(logits[row : row + 1], original).token)
        original.append(tokens[-1])
    resumed = sampler(sampling, outputs=tuple(tokens[:11]))
    again = []
    for row in range(11, 30):
        again.append(sampled(logits[row : row + 1], resumed).token)
        resumed.append(again[-1])
    assert again == tokens[11:]
    assert len(set(tokens)) > 10


def test_seeds_and_samples_of_one_prompt_give_different_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    assert len({sampled(logits, sampler(Sampling(), seed=seed)).token for seed in range(40)}) > 20
    assert len({sampled(logits, sampler(Sampling(), sample_index=index)).token for index in range(40)}) > 20
    for seed in (-1, 2**63, 2**64 - 1):
        sampled(logits, sampler(Sampling(), seed=seed))


def test_noise_in_the_logits_hardly_ever_changes_the_token() -> None:
    logits = random_logits(2000, seed=9) / 3
    sequences = [sampler(Sampling(), seed=row) for row in range(2000)]
    noise = 1e-6 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    changed = sum(
        a != b
        for a, b in zip(
            sample_tokens(logits, sequences), sample_tokens(logits + noise, sequences), strict=True
        )
    )
    assert changed <= 1


# --- masks, stops and log-probabilities ---------------------------------------------------------------


def test_bias_forces_and_forbids() -> None:
    logits = random_logits(1)
    best = int(logits.argmax())
    greedy_without = sampler(Sampling(temperature=0.0, logit_bias={best: -100.0}))
    assert sampled(logits, greedy_without).token == int(logits[0].topk(2).indices[1])
    for seed in range(50):
        assert sampled(logits, sampler(Sampling(logit_bias={11: 100.0}), seed=seed)).token == 11
        assert sampled(logits, sampler(Sampling(logit_bias={best: -100.0}), seed=seed)).token != best


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_bias_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(ValueError, match=f"token {token}; the vocabulary has {VOCAB}"):
        sampler(Sampling(logit_bias={token: 1.0}))


def test_no_stop_token_is_sampled_before_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 5], logits[0, 6] = 50.0, 40.0
    sequence = sampler(Sampling(temperature=0.0, min_tokens=2, stop_token_ids=(6,)), eos_token_ids=(5,))
    reasons = []
    for _ in range(3):
        token = sampled(logits, sequence).token
        reasons.append((token, sequence.append(token)))
    assert [token for token, _ in reasons[:2]] == [0, 0]
    assert reasons == [(0, None), (0, None), (5, "stop")]


@pytest.mark.parametrize(
    ("sampling", "token", "reason"),
    [
        (Sampling(), 5, "stop"),
        (Sampling(ignore_eos=True), 5, None),
        (Sampling(ignore_eos=True, stop_token_ids=(5,)), 5, "stop"),
        (Sampling(stop_token_ids=(6,)), 6, "stop"),
        (Sampling(max_tokens=3), 9, "length"),
        (Sampling(max_tokens=3), 5, "stop"),
        (Sampling(max_tokens=4), 9, None),
    ],
    ids=str,
)
def test_how_a_sequence_ends(sampling: Sampling, token: int, reason: str | None) -> None:
    """The token is the third of the output; max_tokens counts from the original prompt, resumed output included."""
    assert sampler(sampling, outputs=(8, 8), eos_token_ids=(5,)).append(token) == reason


def test_the_mask_hook_receives_the_output_and_only_tokens_that_it_allows_are_sampled() -> None:
    seen = []

    def only_even(outputs: object) -> torch.Tensor:
        seen.append(list(outputs))  # type: ignore[call-overload]
        return torch.arange(VOCAB) % 2 == 0

    logits = random_logits(1)
    sequence = sampler(Sampling(), outputs=(4, 8), mask=Allowing(only_even))
    for _ in range(20):
        token = sampled(logits, sequence).token
        assert token % 2 == 0
        sequence.append(token)
    assert seen[0] == [4, 8]
    assert len(seen[-1]) == 21


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    logits = random_logits(2)
    sampling = Sampling(temperature=0.2, top_k=3, logit_bias={7: 100.0}, logprobs=4)
    results = sample_tokens(logits, [sampler(sampling), sampler(Sampling(logprobs=0))])
    raw = logits.log_softmax(-1)
    first, second = results
    assert isinstance(first, SampledToken)
    assert isinstance(second, SampledToken)
    assert first.token == 7
    assert first.logprob is not None
    assert second.logprob is not None
    assert first.logprob.logprob == pytest.approx(float(raw[0, 7]), abs=1e-6)
    top = raw[0].topk(4)
    assert [token for token, _ in first.logprob.top] == top.indices.tolist()
    assert [value for _, value in first.logprob.top] == pytest.approx(top.values.tolist())
    assert second.logprob.top == ()
    assert second.logprob.logprob == pytest.approx(float(raw[1, second.token]), abs=1e-6)


# --- unusual rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1e6, 1e300, math.inf])
def test_any_temperature_samples_a_token(temperature: float) -> None:
    logits = random_logits(1)
    logits[0, 3] = -math.inf
    tokens = {
        sampled(logits, sampler(Sampling(temperature=temperature), seed=seed)).token for seed in range(60)
    }
    assert 3 not in tokens
    if temperature < 1:
        assert tokens == {int(logits.argmax())}
    else:
        assert len(tokens) > 30


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("row", "detail"),
    [
        ([0.0, math.nan, 1.0], "NaN"),
        ([0.0, math.inf, 1.0], r"\+inf"),
        ([-math.inf] * 3, "every token is masked"),
    ],
)
def test_a_row_that_cannot_be_sampled_fails_alone(row: list[float], detail: str, temperature: float) -> None:
    logits = torch.tensor([[0.0, 9.0, 0.0], row, [0.0, 0.0, 90.0]])
    sampling = Sampling(temperature=temperature, top_p=0.9, logprobs=2)
    first, middle, last = sample_tokens(logits, [sampler(sampling, vocab=3) for _ in range(3)])
    assert isinstance(first, SampledToken)
    assert isinstance(middle, NotSampled)
    assert isinstance(last, SampledToken)
    assert last.token == 2
    assert re.search(detail, middle.detail)


def test_an_all_masking_hook_fails_the_row() -> None:
    (result,) = sample_tokens(
        random_logits(1), [sampler(Sampling(), mask=Allowing(lambda _: torch.zeros(VOCAB, dtype=torch.bool)))]
    )
    assert result == NotSampled("every token is masked, so none can be sampled")


def test_no_rows_give_no_tokens() -> None:
    assert sample_tokens(torch.empty(0, VOCAB), []) == []


# --- one sampler over many steps ----------------------------------------------------------------------


def penalised(seed: int, prompt: tuple[int, ...]) -> SequenceSampler:
    options = (
        Sampling(temperature=0.0, repetition_penalty=1.5),
        Sampling(temperature=0.0, frequency_penalty=0.9),
        Sampling(repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=0.4),
        Sampling(min_tokens=3, stop_token_ids=(1, 2), presence_penalty=0.4),
        Sampling(temperature=0.5, top_k=4),
    )
    return sampler(options[seed % len(options)], prompt=prompt, seed=seed)


def test_sequences_that_come_and_go_sample_what_they_sample_alone() -> None:
    """Batches change, return in another order, and new sequences take over rows of the tables of those that ended."""
    chance = np.random.default_rng(5)
    together = TokenSampler(SparseRace(), host_device(torch.float32))
    alive: list[SequenceSampler] = []
    for step in range(120):
        if len(alive) < 6 and chance.random() < 0.4:
            alive.append(penalised(step, tuple(chance.integers(0, VOCAB, 4).tolist())))
        if alive and chance.random() < 0.2:
            alive.pop(int(chance.integers(len(alive))))
        if chance.random() < 0.2:
            alive = [alive[row] for row in chance.permutation(len(alive))]
        logits = random_logits(len(alive), seed=step)
        results = together.sample(logits, alive)
        alone = [
            result for row, one in enumerate(alive) for result in sample_tokens(logits[row, None], [one])
        ]
        assert results == alone
        for one, result in zip(alive, results, strict=True):
            assert isinstance(result, SampledToken)
            one.append(result.token)


def test_blocks_of_rows_sample_what_all_rows_sample_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def allowing(kept: int) -> TokenMask:
        return Allowing(lambda _: torch.arange(VOCAB) % 5 == kept)

    sequences = [penalised(row, (row, 2)) for row in range(5)]
    sequences += [sampler(Sampling(logprobs=2), seed=row, mask=allowing(row)) for row in range(5)]
    logits = random_logits(len(sequences))
    together = sample_tokens(logits, sequences)
    monkeypatch.setattr(sampling_plan, "ELEMENTS_AT_ONCE", 3 * VOCAB)
    assert sample_tokens(logits, sequences) == together


def test_a_batch_is_planned_once_and_again_when_it_changes() -> None:
    together = TokenSampler(SparseRace(), host_device(torch.float32))
    first, second = penalised(3, (1, 2)), penalised(2, (3, 4))

    def batch(*sequences: SequenceSampler) -> object:
        return together.plan(list(sequences), VOCAB).batch

    both = batch(first, second)
    first.append(9)
    assert batch(first, second) is both
    assert batch(second, first) is not both
    assert batch(first) is not both
    assert batch(first, second) is both  # batches that take turns
    first.append(9)
    first.append(9)  # from here on it may stop
    assert batch(first, second) is not both


def test_a_sampler_keeps_no_sequence_that_has_ended() -> None:
    together = TokenSampler(SparseRace(), host_device(torch.float32))
    sequence = penalised(2, (1, 2))
    together.sample(random_logits(1), [sequence])
    gone = ref(sequence)
    del sequence
    assert gone() is None
