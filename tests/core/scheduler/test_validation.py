"""Why a request is not taken."""

from dataclasses import replace

import pytest

from medha.api.replica import SchedulingSpec, ServiceClass
from medha.scheduler.replica_config import ReplicaConfig
from medha.scheduler.validation import malformed, unservable
from medha.topology import Topology
from medha.wire.messages import Sampling, Submit

SUBMIT = Submit("a", "p", tokens=10, prompt_length=10, seed=1)


@pytest.mark.parametrize("logprobs", [None, 0, 5])
def test_the_number_of_logprobs_is_none_or_a_count(logprobs: int | None) -> None:
    assert malformed(replace(SUBMIT, sampling=Sampling(logprobs=logprobs)), known_tokens=None) is None


def test_fewer_than_no_logprobs_are_refused_by_name_value_and_fix() -> None:
    problem = malformed(replace(SUBMIT, sampling=Sampling(logprobs=-1)), known_tokens=None)
    assert problem is not None
    assert "sampling.logprobs is -1" in problem
    assert "0 or more" in problem


def test_a_resumed_request_is_refused_by_the_length_of_its_prompt_without_its_output() -> None:
    config = ReplicaConfig(
        topology=Topology(),
        scheduling=SchedulingSpec(),
        service_classes={"default": ServiceClass(name="default")},
        default_class="default",
        max_model_len=100,
        block_size_tokens=4,
        kv_blocks=100,
        long_threshold_tokens=1000,
    )
    resumed = replace(SUBMIT, tokens=120, prompt_length=100)
    text = "the prompt has 100 tokens, and maxModelLen is 100; shorten the prompt"
    assert unservable(config, resumed) == ("too_long", text)
