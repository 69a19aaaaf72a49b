"""Ranks begin an epoch together, and lose it."""

from dataclasses import replace
from math import inf, nan

import pytest

from medha.topology import Topology
from medha.wire.messages import DraftCosts, RankHello, RankReady, Rendezvous, StepProfile
from medha_worker.controller.membership import (
    SILENT_SECONDS,
    Membership,
    differing_scales,
    implausible,
)

READY = RankReady(
    rank=0, block_size_tokens=16, kv_blocks=4, weights_bytes=1, activation_bytes=1, kv_bytes=1,
    profile=StepProfile(1e-3, 1e-6, 1e-9, 1e-5), device="cpu", max_model_len=64, vocab_size=9,
    linear_flops_per_token=1.0, attention_flops_per_pair=1.0,
)  # fmt: skip


def say(membership: Membership, rank: int, incarnation: str = "a") -> None:
    for link in ("control", "tokens"):
        hello = RankHello(rank, incarnation)
        if membership.replaces(hello):
            membership.lose()
        membership.hello(link, hello, now=0.0)  # type: ignore[arg-type]


def test_an_epoch_begins_when_every_rank_is_heard_on_both_links() -> None:
    membership = Membership(2)
    say(membership, 0)
    membership.hello("control", RankHello(1, "b"), now=0.0)
    assert not membership.complete
    membership.hello("tokens", RankHello(1, "b"), now=0.0)
    assert membership.complete
    assert membership.rendezvous("tcp://h:1") == Rendezvous(0, "tcp://h:1")


def test_it_is_ready_when_the_last_rank_is_and_counts_no_answer_to_an_earlier_call() -> None:
    membership = Membership(2, first_epoch=4)
    say(membership, 0)
    say(membership, 1)
    membership.rendezvous("")
    assert membership.missing == [0, 1]
    second = replace(READY, rank=1, epoch=4)
    assert membership.ready(second) is None
    assert membership.ready(replace(READY, epoch=3)) is None
    assert membership.missing == [0]
    assert membership.ready(replace(READY, epoch=4)) == [replace(READY, epoch=4), second]


def test_a_replaced_rank_loses_the_epoch_and_all_have_to_be_heard_again() -> None:
    membership = Membership(2)
    say(membership, 0)
    say(membership, 1)
    membership.rendezvous("")
    say(membership, 0)  # a further hello changes nothing
    assert membership.epoch == 0
    say(membership, 1, "b")
    assert membership.epoch is None
    assert not membership.complete
    say(membership, 0)
    assert membership.complete
    assert membership.rendezvous("").epoch == 1


def test_missing_is_who_was_not_heard_since_the_last_epoch_and_then_who_is_not_ready() -> None:
    membership = Membership(3)
    say(membership, 0)
    membership.hello("control", RankHello(1, "a"), now=0.0)
    assert membership.missing == [1, 2], "one link is not enough to be called"
    say(membership, 1)
    say(membership, 2)
    assert membership.missing == []
    membership.rendezvous("")
    assert membership.missing == [0, 1, 2]
    for rank in range(3):
        membership.ready(replace(READY, rank=rank, epoch=0))
    membership.lose()
    say(membership, 0)
    say(membership, 1)
    assert membership.missing == [2], "who survived and says hello is not to blame"


def test_a_rank_that_is_replaced_before_the_call_just_takes_the_place() -> None:
    membership = Membership(1)
    membership.hello("control", RankHello(0, "a"), now=0.0)
    membership.hello("tokens", RankHello(0, "b"), now=0.0)
    assert not membership.complete
    membership.hello("control", RankHello(0, "b"), now=0.0)
    assert membership.complete


def test_nobody_is_called_before_all_are_here() -> None:
    with pytest.raises(AssertionError):
        Membership(1).rendezvous("")


def test_a_process_that_was_replaced_is_refused_when_it_comes_back() -> None:
    membership = Membership(1)
    say(membership, 0, "stopped")
    membership.rendezvous("")
    say(membership, 0, "its successor")
    assert membership.rendezvous("").epoch == 1
    assert membership.refuses(RankHello(0, "stopped"))
    assert not membership.refuses(RankHello(0, "its successor"))


def test_an_idle_rank_that_is_not_heard_is_silent_and_a_busy_one_is_not() -> None:
    membership = Membership(2)
    say(membership, 0)
    say(membership, 1)
    membership.hello("control", RankHello(0, "a"), now=100.0)
    membership.hello("control", RankHello(1, "a"), now=100.0 + SILENT_SECONDS)
    now = 100.1 + SILENT_SECONDS
    assert membership.silent(now, idle_since=0.0) == [0]
    assert membership.silent(now, idle_since=now) == []


@pytest.mark.parametrize(
    ("own", "reported", "is_stranger"),
    [("new", "old", True), ("new", "new", False), ("new", "", False), ("", "old", False)],
)
def test_a_rank_of_another_revision_is_a_stranger_and_one_without_a_revision_is_not(
    own: str, reported: str, is_stranger: bool
) -> None:
    membership = Membership(2, revision=own)
    assert membership.is_of_other_revision(RankHello(0, "a", revision=reported)) is is_stranger


def test_a_rank_of_pods_that_were_replaced_is_refused_by_its_last_epoch() -> None:
    membership = Membership(2, first_epoch=100, oldest_epoch=100)
    assert "its last epoch is 99" in membership.refuses(RankHello(0, "thawed", last_epoch=99))
    assert not membership.refuses(RankHello(0, "new"))
    assert not membership.refuses(RankHello(0, "started again in its pod", last_epoch=100))


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_blocks": 0}, {"kv_blocks": 2**40}, {"block_size_tokens": 2**62}, {"max_model_len": 2**62},
        {"vocab_size": 2**40}, {"query_heads": -4}, {"kv_heads": -1}, {"kv_tensors": 0}, {"element_bytes": 0},
        {"linear_flops_per_token": inf}, {"linear_flops_per_token": 1e305, "attention_flops_per_pair": 0.0},
        {"attention_flops_per_pair": nan}, {"link_bytes_per_second": nan},
    ],
    ids=str,
)  # fmt: skip
def test_a_rank_that_reports_what_no_rank_can_have_is_named(fields: dict[str, float]) -> None:
    assert implausible(READY) is None
    found = implausible(replace(READY, rank=3, **fields))  # type: ignore[arg-type]
    assert found is not None
    assert found.startswith(f"rank 3 reports {next(iter(fields))} ")


@pytest.mark.parametrize("name", ["token_seconds", "round_seconds", "row_seconds"])
@pytest.mark.parametrize("seconds", [nan, inf, -0.1])
def test_times_of_guesses_that_nobody_can_have_measured_are_named(name: str, seconds: float) -> None:
    costs = DraftCosts(0.1, 0.2, 0.3)
    assert implausible(replace(READY, draft_costs=costs)) is None
    found = implausible(replace(READY, rank=3, draft_costs=replace(costs, **{name: seconds})))
    assert found is not None
    assert found.startswith(f"rank 3 reports draft_costs.{name} {seconds}")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"step_seconds": 1e300}, "reports step_seconds 1e+300"),
        ({"sequence_seconds": -1.0}, "reports sequence_seconds -1.0"),
        ({"token_points": ((1, nan), (2, 0.1))}, "reports token_points nan"),
        ({"token_points": ((0, 0.1),)}, "reports token_points 0"),
        ({"token_points": ((5, 0.1), (2, 0.1))}, "linear_points must ascend"),
        ({"query_points": ((1, -5.0), (2, 0.1))}, "reports query_points -5.0"),
        ({"query_points": ((2, 0.1),)}, "points must begin with one query"),
        ({"window_tokens": 0}, "reports window_tokens 0"),
        ({"window_share": 1.5}, "reports window_share 1.5"),
    ],
)
def test_times_that_nobody_can_have_measured_are_named_with_their_rank(
    fields: dict[str, object], said: str
) -> None:
    profile = replace(READY.profile, token_points=((1, 0.1), (2, 0.1)), query_points=((1, 0.0), (8, 0.1)))
    assert implausible(replace(READY, profile=profile)) is None
    found = implausible(replace(READY, rank=3, profile=replace(profile, **fields)))  # type: ignore[arg-type]
    assert found is not None
    assert found.startswith("rank 3 ")
    assert said in found


def test_ranks_that_hold_the_same_heads_must_have_the_same_scales() -> None:
    """Four tensor ranks share two KV heads, in two stages of two lanes."""
    topology = Topology(tensor=4, stream=2, kv=2)

    def report(rank: int, scales: str | None = None) -> RankReady:
        here = topology.coordinates(rank)
        own = f"stage {here.stream}, head {here.tensor // 2}" if scales is None else scales
        return replace(READY, rank=rank, kv_heads=2, kv_scales=own)

    everyone = [report(rank) for rank in range(topology.ranks)]
    assert differing_scales(everyone, topology) is None
    for rank in range(topology.ranks):
        found = differing_scales([*everyone[:rank], report(rank, ""), *everyone[rank + 1 :]], topology)
        assert found is not None
        assert f"{rank}" in found
        assert "none" in found
        assert "spec.kvCache.dtype" in found
