"""The number of guesses in a step follows from how often they are right, the load and the deadlines; texts never change."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from medha.api.speculation_spec import SpeculationSpec
from medha.kv.prefix_cache import PrefixHasher
from medha.scheduler.controller import ReplicaController
from medha.scheduler.history import History
from medha.scheduler.replica_config import ReplicaConfig
from medha.scheduler.speculation import PROBE_SHARE
from medha.topology import Topology
from medha.wire.messages import (
    ControllerEvent,
    Done,
    DraftCosts,
    Emit,
    Sampling,
    StageFree,
    Step,
    StepProfile,
    Submit,
)

from ..drafted import guessed, sampled

SPECULATES = {"speculation": {"method": "promptLookup", "max_draft_tokens": 4}}
DRAWS = {
    "speculation": {"method": "draftModel", "draft_model": {"path": "draft"}, "max_draft_tokens": 4},
    "draft_costs": DraftCosts(0.0005, 1e-5, 1e-6),
}
HEAD = {
    "speculation": {"method": "predictionHead", "prediction_head": {"kind": "mtp"}, "max_draft_tokens": 4},
    "draft_costs": DraftCosts(0.0005, 1e-5),
}
READS_WEIGHTS = StepProfile(0.01, 1e-6, 1e-9, 1e-6)
"""A device whose steps take as long with few tokens as with one."""
COMPUTES = StepProfile(1e-6, 0.001, 1e-9, 1e-6)
"""A device whose steps take as long as they have tokens."""


def drafted(replica: Any) -> list[int]:
    """The numbers of guesses in each step's entries."""
    return [len(entry.drafts) for step in replica.steps for entry in step.entries]


def followed(replica: Any) -> list[int]:
    """The numbers of tokens that the draft model is to compute before them."""
    return [entry.follows for step in replica.steps for entry in step.entries]


def proposed(replica: Any) -> list[int]:
    """The numbers of guesses that each step's entries ask for."""
    return [entry.proposes for step in replica.steps for entry in step.entries]


@given(
    seed=st.integers(0, 100_000),
    guesses=st.integers(1, 9),
    chance=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    speculates=st.sampled_from([SPECULATES, DRAWS, HEAD]),
)
@example(seed=3, guesses=5, chance=0.9, speculates=SPECULATES)
@example(seed=3, guesses=5, chance=0.9, speculates=DRAWS)
def test_whatever_is_guessed_all_requests_end_with_the_tokens_that_they_would_have(
    replica_of: Any, submit_of: Any, seed: int, guesses: int, chance: float, speculates: dict[str, Any]
) -> None:
    """Prompts share prefixes, KV runs out, requests step aside and are cancelled; a fresh controller decides the same."""
    random = Random(seed)
    hasher = PrefixHasher(4, b"secret")
    replica = replica_of(
        random=Random(seed), stages=random.randint(1, 3), kv_blocks=random.choice([40, 400]), max_chunk_tokens=32,
        default_output_tokens=random.choice([2, 16]), stop_chance=random.choice([0.0, 0.05]),
        failure_chance=random.choice([0.0, 0.02]), max_running=random.choice([4, 256]), guesses=guesses,
        guess_chance=chance, hasher=hasher, long_threshold_tokens=50, **speculates,
    )  # fmt: skip
    limits: dict[str, int] = {}
    for index in range(30):
        choice = random.random()
        if choice < 0.35:
            name, length, most = f"r{index}", random.randint(1, 60), random.choice([3, 8, 20])
            ids = tuple(random.randint(0, 1) * (position // 8) for position in range(length))
            replica.prompt_ids[f"prompt of {name}"] = ids
            hashes = hasher.hashes(np.array(ids, dtype=np.int32))
            limits[name] = most
            replica.submit(submit_of(name, length, most, block_hashes=hashes))
        elif choice < 0.4 and limits:
            replica.cancel(random.choice(list(limits)))
        else:
            replica.advance()
        replica.controller.ledger.check()
    replica.run().check_empty()
    for name, most in limits.items():
        if replica.endings[name] == ["length"]:
            assert len(replica.emitted[name]) == most
    fresh = ReplicaController(replica.config, replica.profile)
    assert [fresh.handle(event, now) for now, event in replica.log] == replica.commands


def test_right_guesses_save_steps(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(profile=READS_WEIGHTS, guesses=5, guess_chance=1.0, random=Random(1), **SPECULATES)
    replica.submit(submit_of("a", 8, 60))
    replica.run().check_empty()
    assert replica.emitted["a"] == list(range(9, 69))
    assert len([step for step in replica.steps if step.entries]) < 30
    assert max(drafted(replica)) == 4
    assert sum(drafted(replica)) > 30


def test_a_sequence_whose_guesses_are_wrong_soon_has_none_verified(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(profile=READS_WEIGHTS, guesses=5, guess_chance=0.0, random=Random(1), **SPECULATES)
    replica.submit(submit_of("a", 8, 80))
    replica.run().check_empty()
    assert sum(drafted(replica)[:10]) > 0
    assert sum(drafted(replica)[30:]) == 0
    assert len(replica.emitted["a"]) == 80
    request_steps = [step for step in replica.steps if step.entries]
    assert len(request_steps) == 80, "decodes run ahead again, as without guesses"


def test_the_more_there_is_to_compute_the_fewer_guesses_are_verified(replica_of: Any, submit_of: Any) -> None:
    """A device that must compute each token gains nothing from guesses that are right half of the time."""

    def guesses_of(profile: StepProfile) -> float:
        replica = replica_of(
            profile=profile, guesses=5, guess_chance=0.5, random=Random(2), kv_blocks=400, **SPECULATES
        )
        for index in range(8):
            replica.submit(submit_of(f"r{index}", 4, 30))
        replica.run().check_empty()
        return float(np.mean(drafted(replica)))

    assert guesses_of(READS_WEIGHTS) > 0.5
    assert guesses_of(COMPUTES) < 0.1


def test_guesses_keep_a_step_within_the_tightest_tpot_target(replica_of: Any, submit_of: Any) -> None:
    """A step of one decode takes 1.2 ms here, and each guess 0.2 ms more; one target is 1.5 ms at first."""
    replica = replica_of(guesses=9, guess_chance=1.0, random=Random(1), **SPECULATES)
    service_class = replica.config.service_classes["default"]
    tight = service_class.model_copy(update={"tpot_floor_seconds": 0.001})
    replica.config.service_classes["default"] = tight
    replica.submit(submit_of("a", 8, 40, tpot_target_seconds=0.0015))
    replica.run().check_empty()
    decodes = [step for step in replica.steps if any(entry.drafts for entry in step.entries)]
    assert decodes
    assert all(step.predicted_seconds <= 0.0015 for step in decodes)
    assert max(drafted(replica)) < 4


def test_nothing_is_drafted_while_a_prompt_would_be_late(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(
        profile=READS_WEIGHTS, guesses=5, guess_chance=1.0, random=Random(1), kv_blocks=40, **SPECULATES
    )
    replica.submit(submit_of("a", 8, 100))
    replica.submit(submit_of("waits", 150, 1, age_seconds=100.0))  # longer than the KV that is left
    while replica.controller.find("waits") is not None and replica.controller.find("waits").waits:
        assert replica.advance()
    assert len(replica.steps) > 20
    assert sum(drafted(replica)) == 0
    replica.run().check_empty()


def test_decodes_run_ahead_unless_the_next_step_had_better_verify_guesses(
    replica_of: Any, submit_of: Any
) -> None:
    def most_in_flight(**keywords: Any) -> int:
        replica = replica_of(profile=READS_WEIGHTS, random=Random(1), **keywords)
        replica.submit(submit_of("a", 8, 40))
        most = 0
        while replica.advance():
            in_flight = replica.controller.steps_in_flight
            most = max(most, len(in_flight))
            assert len(in_flight) < 2 or not any(entry.drafts for step in in_flight for entry in step.entries)
        return most

    assert most_in_flight(guesses=0, **SPECULATES) == 2
    assert most_in_flight(guesses=5, guess_chance=0.9, **SPECULATES) == 2, "where there is no guess"


def test_guesses_change_nothing_while_speculation_is_off(replica_of: Any, submit_of: Any) -> None:
    plain, guessing = [replica_of(guesses=guesses, random=Random(1)) for guesses in (0, 5)]
    for replica in (plain, guessing):
        replica.submit(submit_of("a", 8, 40))
        replica.submit(submit_of("b", 3, 9))
        replica.run().check_empty()
    assert plain.steps == guessing.steps


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5, 6])
def test_no_token_is_sampled_behind_the_limit(replica_of: Any, submit_of: Any, max_tokens: int) -> None:
    replica = replica_of(profile=READS_WEIGHTS, guesses=9, guess_chance=1.0, random=Random(1), **SPECULATES)
    replica.submit(submit_of("a", 8, max_tokens))
    replica.run().check_empty()
    assert replica.emitted["a"] == list(range(9, 9 + max_tokens))


def test_the_facts_of_a_step_tell_how_many_guesses_were_verified_and_right(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of(profile=READS_WEIGHTS, guesses=5, guess_chance=0.7, random=Random(4), **SPECULATES)
    replica.submit(submit_of("a", 8, 60))
    replica.run().check_empty()
    history, fresh = History(), ReplicaController(replica.config, replica.profile)
    verified = right = tokens = steps = 0
    for (now, event), _ in zip(replica.log, replica.commands, strict=True):
        commands = fresh.handle(event, now)
        facts = history.take(fresh, event, commands, now)
        if facts.completed is not None:
            verified += facts.completed.drafted_tokens
            right += facts.completed.accepted_tokens
        tokens += facts.later_tokens + len(facts.first_tokens)
        steps += isinstance(event, Done) and bool(event.samples)
    assert verified == sum(drafted(replica)) > right > 0
    assert tokens == 60 == steps + right


# --- guesses of a draft model ---------------------------------------------------------------------------


def test_guesses_are_drawn_in_one_step_and_verified_in_the_next(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(profile=READS_WEIGHTS, guess_chance=1.0, random=Random(1), **DRAWS)
    replica.submit(submit_of("a", 8, 60))
    replica.run().check_empty()
    assert replica.emitted["a"] == list(range(9, 69))
    assert len([step for step in replica.steps if step.entries]) < 40
    assert max(drafted(replica)) == max(proposed(replica)) == 4
    before = 0
    for step in replica.steps:
        for entry in step.entries:
            assert len(entry.drafts) <= before
            before = entry.proposes
    assert proposed(replica)[0] == 0, "the first token is not kept waiting"


def test_nothing_is_drawn_if_no_rank_has_a_draft_model(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(profile=READS_WEIGHTS, **(DRAWS | {"draft_costs": None}))
    replica.submit(submit_of("a", 8, 30))
    replica.run().check_empty()
    assert sum(proposed(replica)) == 0


@pytest.mark.parametrize(
    "costs",
    [DraftCosts(0.02, 0.0), DraftCosts(0.0, 0.02), DraftCosts(0.0001, 0.0, 0.1)],
    ids=["rounds", "guesses", "tokens before"],
)
def test_a_draft_model_that_takes_longer_than_it_saves_does_nothing(
    replica_of: Any, submit_of: Any, costs: DraftCosts
) -> None:
    replica = replica_of(
        profile=READS_WEIGHTS, guess_chance=1.0, random=Random(1), **(DRAWS | {"draft_costs": costs})
    )
    replica.submit(submit_of("a", 8, 30))
    replica.run().check_empty()
    assert sum(proposed(replica)) == sum(followed(replica)) == 0


def test_time_for_guesses_is_part_of_a_step_and_of_what_its_targets_allow(
    replica_of: Any, submit_of: Any
) -> None:
    """A decode takes 1.2 ms here, a guess 0.1 ms to verify and 0.1 ms to propose; the target is 1.8 ms."""
    costs = {"draft_costs": DraftCosts(0.0, 0.0001)}
    replica = replica_of(guess_chance=1.0, random=Random(1), step_seconds=0.0012, **(DRAWS | costs))
    service_class = replica.config.service_classes["default"]
    tight = service_class.model_copy(update={"tpot_floor_seconds": 0.001})
    replica.config.service_classes["default"] = tight
    replica.submit(submit_of("a", 8, 60, tpot_target_seconds=0.0018))
    replica.run().check_empty()
    decodes = [step for step in replica.steps if any(entry.proposes for entry in step.entries)]
    assert decodes
    assert all(step.predicted_seconds <= 0.0018 for step in decodes)
    assert 0 < max(proposed(replica)) < 4


def test_a_draft_model_that_errs_is_asked_now_and_then_until_it_is_right(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of(profile=READS_WEIGHTS, guess_chance=0.0, random=Random(1), kv_blocks=400, **DRAWS)
    replica.submit(submit_of("a", 8, 1000))
    while len(replica.emitted.get("a", ())) < 400:
        assert replica.advance()
    errs = [entry.proposes for step in replica.steps[-200:] for entry in step.entries]
    assert max(errs) == 1
    assert 0 < sum(errs) * 0.00051 <= 1.1 * PROBE_SHARE * 200 * 0.01
    replica.guess_chance = 1.0
    while len(replica.emitted["a"]) < 950:
        assert replica.advance()
    assert max(proposed(replica)[-20:]) > 1
    replica.run().check_empty()


def test_nothing_is_drawn_for_a_grammar_or_while_a_prompt_would_be_late(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of(profile=READS_WEIGHTS, guess_chance=1.0, random=Random(1), kv_blocks=40, **DRAWS)
    grammar = Sampling(max_tokens=20, grammar="g")
    replica.submit(replace(submit_of("masked", 8, 20), sampling=grammar))
    replica.compile_next()
    replica.submit(submit_of("a", 8, 60))
    replica.submit(submit_of("waits", 150, 1, age_seconds=100.0))  # longer than the KV that is left
    while replica.controller.find("waits") is not None and replica.controller.find("waits").waits:
        assert replica.advance()
    assert sum(proposed(replica)) == 0
    replica.submit(submit_of("b", 8, 20))
    replica.run().check_empty()
    names = {entry.id for step in replica.steps for entry in step.entries if entry.proposes}
    assert "b" in names
    assert "masked" not in names


def test_decodes_wait_for_guesses_that_the_next_step_should_verify(replica_of: Any, submit_of: Any) -> None:
    def most_in_flight(chance: float) -> int:
        replica = replica_of(
            profile=READS_WEIGHTS, guess_chance=chance, random=Random(1), kv_blocks=400, **DRAWS
        )
        replica.submit(submit_of("a", 8, 200))
        while len(replica.emitted.get("a", ())) < 100:
            assert replica.advance()
        most = 0
        while replica.advance():
            most = max(most, len(replica.controller.steps_in_flight))
        return most

    assert most_in_flight(0.0) == 2
    assert most_in_flight(1.0) == 1


def test_steps_without_guesses_are_on_the_wire_as_before(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of()
    replica.submit(submit_of("a", 8, 3))
    replica.run()
    entries = [entry for step in replica.steps if isinstance(step, Step) for entry in step.entries]
    assert entries
    assert all(entry == replace(entry, drafts=(), proposes=0) for entry in entries)
    assert SpeculationSpec().method == "none"


# --- lanes with a draft model each ----------------------------------------------------------------------


def on_two_lanes(
    config: ReplicaConfig, submits: Sequence[Submit], costs: DraftCosts = DRAWS["draft_costs"]
) -> tuple[list[Step], dict[str, list[int]]]:
    """Serve requests on two lanes to their ends, with draft models that are always right; return all steps and texts."""
    config = replace(config, topology=Topology(kv=2), tokens_per_lane=40, draft_costs=costs)
    controller = ReplicaController(config, READS_WEIGHTS)
    steps: list[Step] = []
    texts: dict[str, list[int]] = {}
    running: deque[Step] = deque()
    now = 0.0

    def handle(event: ControllerEvent) -> None:
        for command in controller.handle(event, now):
            if isinstance(command, Step):
                steps.append(command)
                running.append(command)
            elif isinstance(command, Emit):
                texts.setdefault(command.id, []).extend(command.tokens)

    for submit in submits:
        handle(submit)
    while running:
        step = running.popleft()
        now += 0.01
        handle(StageFree(step.step_id, 0, step.lanes))
        samples, drafts = [], []
        for entry in step.entries:
            if entry.samples:
                found = sampled(entry, lambda: False)
                samples += found
                if entry.proposes:
                    guesses = guessed(Random(0), found[-1].token, entry.proposes, entry.proposes, 1.0)
                    drafts.append((entry.id, guesses))
        done = Done(
            step.step_id, tuple(samples), (), step.predicted_seconds, step.lanes, drafts=tuple(drafts)
        )
        handle(done)
    assert controller.idle
    return steps, texts


def test_each_lane_guesses_for_what_lies_on_it_alone_beside_a_spread_request(
    config_of: Any, submit_of: Any
) -> None:
    """The lanes propose at the same time, so the time of a step counts the guesses of one of them."""
    config = config_of(tpot_target_seconds=5.0, speculation=DRAWS["speculation"])
    submits = [submit_of("a", 8, 60), submit_of("b", 8, 60), submit_of("long", 60, 60)]
    steps, texts = on_two_lanes(config, submits, DraftCosts(0.0, 0.001))
    assert texts == {one.id: list(range(one.tokens + 1, one.tokens + 61)) for one in submits}
    proposing = [(step, [entry for entry in step.entries if entry.proposes]) for step in steps]
    assert {(entry.id, entry.strategy) for _, entries in proposing for entry in entries} == {
        ("a", "local"),
        ("b", "local"),
    }
    together = [
        (step.predicted_seconds, sum(entry.proposes for entry in entries))
        for step, entries in proposing
        if len({entry.lane for entry in entries}) == 2
        and any(entry.strategy == "owner" for entry in step.entries)
    ]
    assert max(proposes for _, proposes in together) == 8
    assert all(seconds < 0.01 + 0.001 * (proposes - 1) for seconds, proposes in together if proposes > 4)


def test_a_request_that_grows_over_lanes_is_guessed_for_until_then(config_of: Any, submit_of: Any) -> None:
    config = config_of(
        kv_blocks=16, default_output_tokens=4, tpot_target_seconds=5.0, speculation=DRAWS["speculation"]
    )
    steps, texts = on_two_lanes(config, [submit_of("a", 20, 90)])
    assert texts == {"a": list(range(21, 111))}
    entries = [entry for step in steps for entry in step.entries]
    spread = next(at for at, entry in enumerate(entries) if entry.strategy == "owner")
    assert sum(entry.proposes for entry in entries[:spread]) > 0
    assert sum(entry.proposes + entry.follows for entry in entries[spread:]) == 0


# --- guesses of a prediction head -----------------------------------------------------------------------


def test_a_head_draws_behind_long_prompts_and_short_outputs_at_once(replica_of: Any, submit_of: Any) -> None:
    """It has computed the prompt, so nothing is to be followed first."""
    replica = replica_of(profile=READS_WEIGHTS, guess_chance=1.0, random=Random(1), kv_blocks=20_000, **HEAD)
    replica.submit(submit_of("a", 1000, 20))
    replica.run().check_empty()
    assert replica.emitted["a"] == list(range(1001, 1021))
    assert sum(followed(replica)) == 0
    decodes = [entry.proposes for step in replica.steps for entry in step.entries if entry.samples]
    assert decodes[1] > 0, "with the first decode"
    assert max(decodes) == 4


def test_a_head_is_asked_less_the_more_it_errs(replica_of: Any, submit_of: Any) -> None:
    def asked(chance: float) -> float:
        replica = replica_of(
            profile=READS_WEIGHTS, guess_chance=chance, random=Random(1), kv_blocks=400, **HEAD
        )
        replica.submit(submit_of("a", 8, 200))
        replica.run().check_empty()
        return float(np.mean(proposed(replica)))

    assert asked(0.0) < 1 < asked(0.5) < 3 < asked(1.0)


# --- what a draft model costs, on a device whose times the controller does not know -----------------------


@dataclass(frozen=True)
class Device:
    """The true times of a device, in seconds; what is measured when ranks start is two thirds of them."""

    step: float = 0.01
    row: float = 1e-4  # of each token that the served model computes
    round: float = 0.002  # of the draft model
    guess: float = 1e-5
    token: float = 1e-5
    idle: float = 0.0005  # between two steps of which the second one waits

    def takes(self, step: Step) -> tuple[float, float]:
        """Return the seconds of a step, and those of its draft model."""
        rows = sum(entry.token_count for entry in step.entries)
        proposes = [entry.proposes for entry in step.entries]
        follows = sum(entry.follows for entry in step.entries)
        seconds = max(proposes, default=0) * self.round + sum(proposes) * self.guess + follows * self.token
        return self.step * bool(rows) + rows * self.row + seconds, seconds

    @property
    def profile(self) -> StepProfile:
        return StepProfile(self.step / 1.5, self.row / 1.5, 1e-9, 1e-6)

    @property
    def drafting(self) -> dict[str, Any]:
        costs = DraftCosts(self.round / 1.5, self.guess / 1.5, self.token / 1.5)
        return DRAWS | {"draft_costs": costs}


DEVICES = {
    "small draft": Device(),
    "draft of the same size": Device(round=0.01, guess=1e-4, token=1e-4),
    "slow draft": Device(round=0.02, guess=1e-3, token=1e-3),
    "computes each token": Device(step=0.001, row=0.001, round=0.0005, guess=3e-4, token=3e-4),
    "waits between steps": Device(step=0.004, idle=0.004),
}


def served_on(
    device: Device, replica_of: Any, submit_of: Any, *, streams: int, chance: float, tokens: int, **more: Any
) -> tuple[Any, list[float]]:
    """Serve streams with prompts of 40 tokens to their ends, twice, and return how long that took."""
    replica = replica_of(
        profile=device.profile, guess_chance=chance, random=Random(3), kv_blocks=20_000, takes=device.takes,
        idle_seconds=device.idle, default_output_tokens=tokens, **more,
    )  # fmt: skip
    took = []
    for turn in "ab":
        began = replica.now
        for index in range(streams):
            replica.submit(submit_of(f"{turn}{index}", 40, tokens, tpot_target_seconds=5.0))
        replica.run().check_empty()
        took.append(replica.now - began)
    return replica, took


@pytest.mark.parametrize("streams", [1, 8, 32])
@pytest.mark.parametrize("chance", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("name", DEVICES)
def test_a_draft_model_never_costs_more_than_it_gains(
    replica_of: Any, submit_of: Any, name: str, chance: float, streams: int
) -> None:
    """The first turn is where the controller learns how often guesses are right, and what the device takes."""
    device, tokens = DEVICES[name], 60 if streams > 8 else 150
    both = {"streams": streams, "chance": chance, "tokens": tokens}
    plain, plain_seconds = served_on(device, replica_of, submit_of, **both)
    found, seconds = served_on(device, replica_of, submit_of, **both, **device.drafting)
    assert found.emitted == plain.emitted
    first, second = (a / b for a, b in zip(plain_seconds, seconds, strict=True))
    assert first >= 0.95
    assert second >= 0.95
    if name == "small draft" and chance == 1.0:
        assert second > 1.3


@pytest.mark.parametrize("streams", [1, 32])
def test_a_draft_model_that_pays_only_if_it_is_mostly_right_is_found_in_the_first_text(
    replica_of: Any, submit_of: Any, streams: int
) -> None:
    """A guess takes half a step, so guesses with a chance of 0.5, as that of all sequences is at first, do not pay."""
    device = Device(row=1e-3 / streams, round=0.005)
    both = {"streams": streams, "chance": 1.0, "tokens": 150}
    _, plain_seconds = served_on(device, replica_of, submit_of, **both)
    found, seconds = served_on(device, replica_of, submit_of, **both, **device.drafting)
    first, second = (a / b for a, b in zip(plain_seconds, seconds, strict=True))
    assert first > 1.15
    assert second > 1.3
    assert max(proposed(found)) == 4


def test_the_first_guesses_are_of_several_sequences_at_once_and_few_if_they_are_wrong(
    replica_of: Any, submit_of: Any
) -> None:
    device = DEVICES["small draft"]
    found, _ = served_on(device, replica_of, submit_of, streams=32, chance=0.0, tokens=40, **device.drafting)
    asked = [sum(entry.proposes for entry in step.entries) for step in found.steps]
    assert max(asked) == 8
    assert sum(asked[:30]) <= 24


def test_the_draft_model_does_nothing_where_it_does_not_pay(replica_of: Any, submit_of: Any) -> None:
    device = DEVICES["slow draft"]
    found, _ = served_on(device, replica_of, submit_of, streams=8, chance=1.0, tokens=100, **device.drafting)
    assert sum(proposed(found)) == sum(followed(found)) == 0


def test_prompts_are_followed_once_guesses_are_drawn_in_pieces_that_at_most_double_a_step(
    replica_of: Any, submit_of: Any
) -> None:
    device = Device(token=1e-4)
    replica = replica_of(
        profile=READS_WEIGHTS, guess_chance=1.0, random=Random(3), kv_blocks=20_000, takes=device.takes,
        idle_seconds=device.idle, **(DRAWS | {"draft_costs": DraftCosts(0.002, 1e-5, 1e-4)}),
    )  # fmt: skip
    replica.submit(submit_of("a", 1000, 400, tpot_target_seconds=5.0))
    replica.run().check_empty()
    follows = [count for count in followed(replica) if count]
    assert 1000 <= sum(follows) < 1100
    assert max(follows) <= 150
    steps = [entry for step in replica.steps for entry in step.entries]
    assert all(entry.follows == 0 for entry in steps if not entry.samples), (
        "nothing is computed beside the prompt"
    )
    assert max(proposed(replica)) == 4


def test_a_prompt_is_not_followed_for_a_short_output(replica_of: Any, submit_of: Any) -> None:
    """The draft model would take 0.3 s for it, and 20 tokens take 0.2 s."""
    found = replica_of(
        profile=READS_WEIGHTS, guess_chance=1.0, random=Random(3), kv_blocks=20_000,
        **(DRAWS | {"draft_costs": DraftCosts(0.0001, 1e-5, 3e-4)}),
    )  # fmt: skip
    found.submit(submit_of("a", 1000, 20))
    found.submit(submit_of("b", 8, 20))
    found.run().check_empty()
    entries = [entry for step in found.steps for entry in step.entries]
    assert sum(entry.follows + entry.proposes for entry in entries if entry.id == "a") == 0
    assert sum(entry.proposes for entry in entries if entry.id == "b") > 0
