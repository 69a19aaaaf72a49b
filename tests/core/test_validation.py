"""Why a request is not taken."""

from dataclasses import replace

import pytest

from medha.scheduler.validation import malformed
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
