"""Outputs of running requests are quoted by later ones of their salt, and by their own request after it has stepped aside."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from medha.kv.prefix_cache import PrefixHasher
from medha.scheduler import prompt_lookup
from medha.wire.messages import Done, Emit, Sample, SteppedAside, Tokens
from medha_worker.controller.prompts import PromptStore
from medha_worker.controller.running_outputs import RunningOutputs


class Requests:
    """Stands for a controller: it knows the prompt of each request, and none has emitted a token before its first sample."""

    def __init__(self, **prompts: str) -> None:
        self.prompts = prompts

    def find(self, request_id: str) -> Any:
        submit = SimpleNamespace(prompt=self.prompts[request_id])
        return SimpleNamespace(ended=False, emitted=0, submit=submit)


def prompts(**named: tuple[list[int], str]) -> PromptStore:
    """Return complete prompts, each with its ids and its salt."""
    store = PromptStore(10_000, 10_000, PrefixHasher(4, b"secret"))
    for name, (ids, salt) in named.items():
        store.receive(Tokens(name, 0, len(ids), cache_salt=salt), np.array(ids, dtype=np.int32))
    return store


def sampled(outputs: RunningOutputs, requests: Requests, **tokens: int) -> dict[str, tuple[int, ...]]:
    """Let a step sample a token of each of these requests; return the guesses at what comes next."""
    core: Any = requests
    samples = tuple(Sample(name, token) for name, token in tokens.items())
    found = outputs.completed(Done(1, samples), core)
    for name, token in tokens.items():
        outputs.emitted(Emit(name, (token,)))
    return dict(found.drafts)


def test_an_output_that_has_ended_is_quoted_under_its_salt_alone() -> None:
    store = prompts(p=([0], "tenant"), q=([0], "tenant"), r=([0], "another"))
    outputs, requests = RunningOutputs(store, 3), Requests(a="p", b="q", c="r")
    for token in range(1, 7):
        sampled(outputs, requests, a=token)
    outputs.emitted(Emit("a", (), "stop"))
    for token in (2, 3):
        sampled(outputs, requests, b=token, c=token)
    assert sampled(outputs, requests, b=4, c=4) == {"b": (5, 6)}


def test_a_request_that_stepped_aside_quotes_what_it_wrote_before_and_nobody_else_does() -> None:
    store = prompts(p=([0], ""), q=([0], ""))
    outputs, requests = RunningOutputs(store, 3), Requests(a="p", b="q")
    for token in (1, 2, 3, 4):
        sampled(outputs, requests, a=token)
    outputs.step_aside(SteppedAside("a", "longer", "p", 5))
    requests.prompts["a"] = "longer"
    for token in (1, 2):
        sampled(outputs, requests, a=token, b=token)
    assert sampled(outputs, requests, a=3, b=3) == {"a": (4, 1, 2, 3)}


def test_a_step_indexes_one_piece_however_many_long_prompts_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_lookup, "PIECE_TOKENS", 8)
    ids = list(range(100, 120))
    outputs, requests = RunningOutputs(prompts(p=(ids, ""), q=(ids, "")), 3), Requests(a="p", b="q")
    lookup = outputs._lookup
    assert lookup is not None
    found = []
    for token in range(5):
        sampled(outputs, requests, a=token, b=token)
        found.append([lookup._prompts[name].index.indexed for name in ("p", "q")])
    assert found == [[16, 8], [16, 16], [19, 16], [19, 19], [19, 19]]
