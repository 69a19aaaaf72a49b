"""Prompts of one request, their samples and other requests are sampled independently."""

from itertools import combinations

import numpy as np
import numpy.typing as npt
import openai
import pytest
import torch

from medha.wire.messages import Submit
from medha_router.tokenizer_bundle import Bundle
from medha_worker.device import host_device
from medha_worker.kernels.torch_race import SparseRace
from medha_worker.model.sampler import SampledToken, SequenceSampler
from medha_worker.model.token_sampler import TokenSampler

from .conftest import MODEL, Router, Script, ScriptedReplica, say

TOKENS = 1000
VOCABULARY = 8
Draws = npt.NDArray[np.int64]


@pytest.fixture
def client(router: Router) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0)


def keys(replica: ScriptedReplica) -> list[tuple[int, int]]:
    return [(submit.seed, submit.sample_index) for submit in replica.submits]


def sampled_from_equal_logits(submits: list[Submit]) -> Draws:
    """What the worker's sampler draws for each where all tokens are equally likely, int64 [submits, TOKENS]."""
    sequences = [
        SequenceSampler(
            submit.sampling,
            seed=submit.seed,
            sample_index=submit.sample_index,
            tokens=np.zeros(submit.tokens, dtype=np.int32),
            prompt_length=submit.prompt_length,
            vocab_size=VOCABULARY,
        )
        for submit in submits
    ]
    logits = torch.zeros(len(submits), VOCABULARY)
    draws = np.empty((len(submits), TOKENS), dtype=np.int64)
    for position in range(TOKENS):
        for row, result in enumerate(
            TokenSampler(SparseRace(), host_device(torch.float32)).sample(logits, sequences)
        ):
            assert isinstance(result, SampledToken)
            draws[row, position] = result.token
            sequences[row].append(result.token)
    return draws


def dependence(one: Draws, other: Draws) -> float:
    """Pearson's chi-square of the table of both: 49 on average if independent, TOKENS * 7 if equal."""
    table = np.zeros((VOCABULARY, VOCABULARY))
    np.add.at(table, (one, other), 1)
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / TOKENS
    return float(((table - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("seeds", [(None, None), (7, 8)], ids=["random", "given"])
def test_prompts_samples_and_requests_are_sampled_independently(
    client: openai.OpenAI, replica: ScriptedReplica, seeds: tuple[int | None, int | None]
) -> None:
    for seed in seeds:
        client.completions.create(
            model=MODEL, prompt=["one two"] * 3, n=2, seed=seed, temperature=1.0, extra_body={"top_k": -1}
        )
    streams = sampled_from_equal_logits(replica.submits)
    assert len(streams) == 12
    # Above 200 lies less than one in 10^19 of what is independent.
    assert max(dependence(one, other) for one, other in combinations(streams, 2)) < 200


def test_a_seed_gives_each_prompt_of_a_request_a_stream_of_its_own_and_the_same_one_again(
    client: openai.OpenAI, replica: ScriptedReplica
) -> None:
    def ask(prompt: list[str], n: int = 1) -> list[tuple[int, int]]:
        replica.submits.clear()
        client.completions.create(model=MODEL, prompt=prompt, n=n, seed=11)
        return keys(replica)

    several = ask(["one", "one", "two"], n=2)
    assert len(set(several)) == 6
    assert ask(["one", "one", "two"], n=2) == several
    # More samples, or prompts behind it, change nothing for a prompt; the first draws as it does alone.
    assert ask(["one", "one"]) == several[0:4:2]
    assert ask(["one"]) == several[:1] == [(11, 0)]


def test_a_replica_that_goes_on_with_several_prompts_gets_the_seed_of_each_again(
    router: Router, replica: ScriptedReplica, bundle: Bundle
) -> None:
    replica.script = Script(tokens=say(bundle, "Hello, "), hold=True)
    body = {"model": MODEL, "prompt": ["one", "two"], "n": 2, "stream": True, "seed": 11}
    with router.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        commas = 0
        while commas < 4:  # all four have said all that they were to say
            commas += "," in next(lines).partition('"text":"')[2].partition('"')[0]
        emitted = replica.script.tokens
        replica.script = Script(tokens=(*emitted, *say(bundle, "world")), finish="length")
        replica.order("announce", {"epoch": replica.card.epoch + 1})
        rest = "".join(lines)
    assert rest.count('"finish_reason":"length"') == 4
    before, after = replica.submits[:4], replica.submits[4:]
    assert len({(submit.seed, submit.sample_index) for submit in before}) == 4
    assert [(submit.seed, submit.sample_index) for submit in after] == [
        (submit.seed, submit.sample_index) for submit in before
    ]
    assert all(submit.tokens > submit.prompt_length for submit in after)
