"""The facts of a controller's events: what is prefill, what is a decode, and how requests arrive and end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from medha.api.replica import ServiceClass
from medha.scheduler import status_report
from medha.scheduler.controller import ReplicaController
from medha.scheduler.history import Facts, History
from medha.scheduler.replica_config import ReplicaConfig
from medha.wire.messages import Cancel, ControllerEvent, Done, Sample, Step, StepProfile, Submit


class Driven:
    """A controller with its history; steps in flight, oldest first."""

    def __init__(self, config: ReplicaConfig, profile: StepProfile) -> None:
        self.core, self.history = ReplicaController(config, profile), History()
        self.steps: list[Step] = []

    def take(self, event: ControllerEvent, now: float) -> Facts:
        commands = self.core.handle(event, now)
        self.steps += [command for command in commands if isinstance(command, Step)]
        return self.history.take(self.core, event, commands, now)

    def done(self, now: float, *samples: Sample) -> Facts:
        return self.take(Done(self.steps.pop(0).step_id, samples), now)


@pytest.fixture
def driven(config_of: Callable[..., ReplicaConfig], profile: StepProfile) -> Driven:
    return Driven(config_of(), profile)


@pytest.mark.parametrize("seed", range(4))
def test_an_entry_is_a_decode_exactly_if_its_request_has_a_first_token(random_run: Any, seed: int) -> None:
    replica = random_run(seed)
    again = Driven(replica.config, replica.profile)
    decodes = chunks = 0
    for now, event in replica.log:
        for launched in again.take(event, now).launched:
            entries = {entry.id for entry in launched.decodes} | set(launched.tokens_by_request)
            assert entries == {entry.id for entry in launched.step.entries}
            for entry in launched.decodes:
                request = again.core.find(entry.id)
                assert request is not None
                assert request.has_sampled
            for chunk in launched.chunks:
                request = again.core.find(chunk.request)
                assert request is not None
                assert not request.has_sampled
                assert chunk.start + chunk.tokens <= chunk.prompt_tokens
            decodes, chunks = decodes + len(launched.decodes), chunks + len(launched.chunks)
    assert decodes > 50
    assert chunks > 50


@pytest.mark.parametrize("seed", range(4))
def test_the_status_shows_requests_in_the_phases_of_the_history(random_run: Any, seed: int) -> None:
    replica = random_run(seed)
    again = Driven(replica.config, replica.profile)
    phases: dict[str, str | None] = {}
    compared: Counter[str] = Counter()
    for now, event in replica.log:
        phases |= {name: moved for name, moved, _ in again.take(event, now).moves}
        for request in again.core.requests():
            if not request.ended:
                assert status_report.phase(request) == phases[request.id]
                compared[status_report.phase(request)] += 1
    assert min(compared[name] for name in ("waiting", "prefill", "decode")) > 50


def test_the_prefill_of_a_prompt_of_one_token_is_no_decode_although_it_samples(
    driven: Driven, submit_of: Callable[..., Submit]
) -> None:
    (launched,) = driven.take(submit_of("a", 1, 5), 0.0).launched
    assert launched.step.entries[0].samples
    assert [(chunk.request, chunk.tokens) for chunk in launched.chunks] == [("a", 1)]
    assert launched.decodes == ()


def test_output_of_an_earlier_epoch_is_prefill(driven: Driven, submit_of: Callable[..., Submit]) -> None:
    (launched,) = driven.take(submit_of("a", 12, 50, prompt_length=4), 0.0).launched
    assert launched.prefill_tokens == 12
    launched, *_ = driven.done(1.0, Sample("a", 7)).launched
    assert [entry.id for entry in launched.decodes] == ["a"]


def test_a_cancellation_that_crosses_the_end_of_its_request_ends_nothing(
    driven: Driven, submit_of: Callable[..., Submit]
) -> None:
    driven.take(submit_of("a", 4, 5), 0.0)
    assert [ended.reason for ended in driven.done(1.0, Sample("a", 7, "stop")).ended] == ["stop"]
    assert driven.take(Cancel("a"), 1.1).ended == []
    driven.take(submit_of("b", 4, 5), 2.0)
    assert [ended.reason for ended in driven.take(Cancel("b"), 2.1).ended] == ["cancelled"]
    assert driven.take(Cancel("b"), 2.2).ended == []


def test_a_repeated_id_is_refused_and_its_request_goes_on_as_before(
    driven: Driven, submit_of: Callable[..., Submit]
) -> None:
    driven.take(submit_of("a", 4, 5), 0.0)
    driven.done(1.0, Sample("a", 7))
    again = driven.take(submit_of("a", 4, 5), 2.0)
    assert (again.refused, again.moves) == (["invalid"], [])
    assert (driven.history.open["a"].emitted, driven.history.open["a"].first_token_at) == (1, 1.0)


def test_a_repeated_id_of_a_request_that_has_just_been_cancelled_is_not_open(
    driven: Driven, submit_of: Callable[..., Submit]
) -> None:
    driven.take(submit_of("a", 4, 5), 0.0)
    driven.take(Cancel("a"), 0.1)  # its step is still in flight
    assert driven.take(submit_of("a", 4, 5), 0.2).refused == ["invalid"]
    assert driven.history.open == {}


def test_a_request_resumed_with_nothing_left_to_sample_ends_at_once(
    driven: Driven, submit_of: Callable[..., Submit]
) -> None:
    facts = driven.take(submit_of("a", 9, 5, prompt_length=4), 0.0)
    assert [(ended.reason, ended.request, ended.tpot_met) for ended in facts.ended] == [
        ("length", None, None)
    ]
    assert driven.history.open == {}


def test_a_class_that_is_not_named_is_the_first_of_the_replica(
    config_of: Callable[..., ReplicaConfig], profile: StepProfile, submit_of: Callable[..., Submit]
) -> None:
    config = replace(config_of(), service_classes={"chat": ServiceClass(name="chat")}, default_class="chat")
    driven = Driven(config, profile)
    (launched,) = driven.take(submit_of("a", 4, 5), 0.0).launched
    assert [name for name, _ in launched.slacks] == ["chat"]
    assert driven.history.open["a"].service_class == "chat"


def test_a_step_launched_ahead_takes_its_time_from_the_end_of_the_step_before(
    driven: Driven, submit_of: Callable[..., Submit]
) -> None:
    driven.take(submit_of("a", 4, 5), 0.0)
    launched = driven.done(1.0, Sample("a", 7)).launched
    assert len(launched) == 2, "the second goes ahead"
    first, second = driven.done(1.25, Sample("a", 7)).completed, driven.done(1.75, Sample("a", 7)).completed
    assert first is not None
    assert second is not None
    assert (first.observed_seconds, second.observed_seconds) == (0.25, 0.5)


def test_tokens_are_counted_once_and_the_first_apart(
    driven: Driven, submit_of: Callable[..., Submit]
) -> None:
    driven.take(submit_of("a", 4, 3, deadline_after_seconds=1.5, tpot_target_seconds=0.4), 0.0)
    first = driven.done(1.0, Sample("a", 7))
    assert ([one.ttft_met for one in first.first_tokens], first.later_tokens) == ([True], 0)
    second = driven.done(1.5, Sample("a", 7))
    assert (second.first_tokens, second.later_tokens) == ([], 1)
    last = driven.done(2.0, Sample("a", 7))
    (ended,) = last.ended
    assert ended.request is not None
    assert (ended.reason, ended.request.tpot_seconds) == ("length", 0.5)
    assert ended.tpot_met is False


def test_what_a_request_computes_again_after_it_stepped_aside_is_prefill(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of(kv_blocks=40, block_size_tokens=4, default_output_tokens=4, max_model_len=120)
    for index in range(4):
        replica.submit(submit_of(f"r{index}", 10))
    replica.run().check_empty()
    again = Driven(replica.config, replica.profile)
    aside: list[str] = []
    phases: dict[str, list[str | None]] = {}
    computed = Counter[str]()
    for now, event in replica.log:
        facts = again.take(event, now)
        aside += facts.stepped_aside
        for name, phase, _ in facts.moves:
            if phases.setdefault(name, [])[-1:] != [phase]:
                phases[name].append(phase)
        for launched in facts.launched:
            computed.update(launched.tokens_by_request)
    assert len(aside) == len(replica.asides) > 0
    once = ["waiting", "prefill", "decode"]
    for name, count in Counter(replica.asides).items():
        assert phases[name] == once * (count + 1) + [None]
        assert computed[name] > 10 * (count + 1), "its output, too"
    assert all(request.emitted == 0 for request in again.history.open.values())
