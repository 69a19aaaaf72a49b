"""A request whose grammar is not compiled is kept out of the step that would sample for it, and holds up nobody else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from medha.scheduler.grammars import COMPILE_SECONDS, KEPT_GRAMMARS
from medha.wire.messages import (
    CompileGrammar,
    DropGrammar,
    Failed,
    Sampling,
    StageFree,
    StepProfile,
    Submit,
    Tick,
)


@pytest.fixture
def guided(submit_of: Any) -> Any:
    """Makes a request with a grammar: id, tokens, max_tokens, grammar, and any field of Submit."""

    def make(
        id_: str, tokens: int, max_tokens: int = 3, grammar: str = "a schema", **fields: object
    ) -> Submit:
        sampling = Sampling(max_tokens=max_tokens, grammar=grammar)
        return replace(submit_of(id_, tokens, **fields), sampling=sampling)

    return make


def computed(replica: Any, id_: str) -> list[tuple[int, int]]:
    """Return the first position and the token count of each chunk of a request."""
    entries = [entry for step in replica.steps for entry in step.entries if entry.id == id_]
    return [(entry.extents[0].start, entry.token_count) for entry in entries]


@pytest.mark.parametrize("stages", [1, 2])
def test_a_prompt_is_computed_up_to_its_last_position_while_its_grammar_is_compiled(
    replica_of: Any, guided: Any, submit_of: Any, stages: int
) -> None:
    replica = replica_of(stages=stages, max_chunk_tokens=16, min_chunk_tokens=4)
    replica.submit(submit_of("plain", 8, 40))
    replica.submit(guided("guided", 40))
    for _ in range(30 * stages):
        replica.advance()
    assert sum(count for _, count in computed(replica, "guided")) == 39
    assert "guided" not in replica.emitted
    assert len(replica.emitted["plain"]) >= 20
    replica.compile_next()
    replica.run().check_empty()
    assert (39, 1) in computed(replica, "guided")
    assert len(replica.emitted["guided"]) == 3


def test_decodes_run_ahead_while_a_grammar_is_compiled(replica_of: Any, guided: Any, submit_of: Any) -> None:
    replica = replica_of()
    replica.submit(submit_of("plain", 8, 40))
    replica.submit(guided("guided", 12))
    for _ in range(4):
        replica.advance()
    replica.handle(StageFree(replica.controller.steps_in_flight[0].step_id, 0))
    assert len(replica.controller.steps_in_flight) == 2
    replica.compile_next()
    replica.run().check_empty()


def test_a_request_whose_grammar_is_compiled_needs_no_step_of_its_own(replica_of: Any, guided: Any) -> None:
    replica = replica_of()
    replica.submit(guided("first", 8))
    replica.compile_next()
    replica.run()
    replica.submit(guided("second", 8))
    replica.run().check_empty()
    assert computed(replica, "second")[0] == (0, 8)
    assert not replica.compiling


def test_the_samples_of_a_request_wait_for_one_grammar(replica_of: Any, guided: Any) -> None:
    replica = replica_of()
    for index in range(3):
        replica.submit(guided(f"r{index}", 8, prompt="shared", sample_index=index))
    replica.run()
    assert len(replica.compiling) == 1
    assert not replica.emitted
    replica.compile_next()
    replica.run().check_empty()
    assert {len(output) for output in replica.emitted.values()} == {3}
    forks = [admit.fork_of for step in replica.steps for admit in step.admits]
    assert forks == [None, "r0", "r0"], "the prompt is computed once"


def test_a_request_ends_with_its_own_reason_when_its_grammar_is_not_compiled_in_time(
    replica_of: Any, guided: Any, submit_of: Any
) -> None:
    """Also while nothing else happens: then a tick brings the end."""
    replica = replica_of()
    replica.submit(guided("late", 8))
    replica.run()
    due = replica.controller.next_due
    assert due == COMPILE_SECONDS
    replica.now = due - 0.001
    assert replica.handle(Tick()) == []
    replica.now = due
    failed, *_, dropped = replica.handle(Tick())
    assert isinstance(failed, Failed)
    assert (failed.id, failed.reason) == ("late", "grammar_late")
    assert "not compiled within 6 s" in failed.detail
    assert isinstance(dropped, DropGrammar)
    assert replica.controller.next_due is None
    replica.run().check_empty()


def test_what_waits_for_kv_ends_in_time_too(replica_of: Any, guided: Any, submit_of: Any) -> None:
    replica = replica_of(kv_blocks=4)
    replica.submit(submit_of("large", 12, 4))
    replica.submit(guided("late", 12))
    replica.now = COMPILE_SECONDS
    replica.run().check_empty()
    assert replica.endings["late"] == ["failed grammar_late"]
    assert replica.endings["large"] == ["length"]


def test_a_grammar_that_nobody_waits_for_any_more_is_dropped(replica_of: Any, guided: Any) -> None:
    replica = replica_of()
    for id_ in ("one", "two"):
        replica.submit(guided(id_, 8))
    replica.run()
    replica.cancel("one")
    assert len(replica.compiling) == 1
    replica.cancel("two")
    assert not replica.compiling
    replica.run().check_empty()


def test_a_fault_ends_the_requests_of_a_grammar_and_no_other(replica_of: Any, guided: Any) -> None:
    replica = replica_of()
    for id_, grammar in (("a", "x"), ("b", "x"), ("c", "y")):
        replica.submit(guided(id_, 8, grammar=grammar))
    replica.compile_next(fault="no token ends a text")
    replica.compile_next()
    replica.run().check_empty()
    assert replica.endings == {"a": ["failed grammar"], "b": ["failed grammar"], "c": ["length"]}


def test_so_many_grammars_stay_compiled_without_a_request(replica_of: Any, guided: Any) -> None:
    replica = replica_of()
    for number in [*range(KEPT_GRAMMARS + 2), 3]:
        replica.submit(guided(f"r{len(replica.endings)}", 4, grammar=f"g{number}"))
        if replica.compiling:
            replica.compile_next()
        replica.run()
        assert len(replica.compiled) <= KEPT_GRAMMARS
    replica.submit(guided("again", 4, grammar="g1"))  # dropped: the last of them used "g3" again
    assert len(replica.compiling) == 1


def test_a_request_that_steps_aside_keeps_its_compiled_grammar(
    replica_of: Any, guided: Any, submit_of: Any
) -> None:
    replica = replica_of(kv_blocks=12, default_output_tokens=2, max_chunk_tokens=16)
    for index in range(3):
        replica.submit(guided(f"r{index}", 4, 30))
    replica.compile_next()
    replica.run().check_empty()
    assert replica.asides
    assert not replica.compiling
    assert {len(output) for output in replica.emitted.values()} == {30}


def test_a_request_that_steps_aside_while_its_grammar_is_compiled_still_gets_it(
    replica_of: Any, guided: Any, submit_of: Any
) -> None:
    """Ranks go on to compile it: they are told neither to drop it nor to compile it again."""
    replica = replica_of(kv_blocks=12, default_output_tokens=2, max_chunk_tokens=16)
    replica.submit(submit_of("plain", 4, 30))
    replica.submit(guided("guided", 16, 30))
    while not replica.asides:
        assert replica.advance()
    assert replica.asides == ["guided"]
    sent = [type(command) for commands in replica.commands for command in commands]
    assert (sent.count(CompileGrammar), sent.count(DropGrammar)) == (1, 0)
    replica.compile_next()
    replica.run().check_empty()
    assert replica.endings == {"plain": ["length"], "guided": ["length"]}


def test_what_masks_cost_is_part_of_a_steps_prediction(replica_of: Any, guided: Any, submit_of: Any) -> None:
    profile = StepProfile(0.001, 0.0001, 0.0, 0.0001, mask_seconds_per_row=0.0003)
    seconds = {}
    for name, requests in (
        ("plain", [submit_of("a", 8, 4), submit_of("b", 8, 4)]),
        ("guided", [submit_of("a", 8, 4), guided("b", 8, 4)]),
    ):
        replica = replica_of(profile=profile)
        for request in requests:
            replica.submit(request)
        if replica.compiling:
            replica.compile_next()
        replica.run()
        seconds[name] = next(
            step.predicted_seconds
            for step in replica.steps
            if [entry.extents[0].start >= 8 for entry in step.entries] == [True, True]
        )
    assert seconds["guided"] - seconds["plain"] == pytest.approx(profile.mask_seconds_per_row)
