"""Places for running sequences are shared between owners: nobody takes the last ones while others are here."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.scheduler.owner_places import REMEMBERED_SECONDS, OwnerPlaces

PLACES = 64
KV = 1000  # free blocks, more than enough


def submitted(replica: Any, submit_of: Any, owner: str, samples: int, max_tokens: int = 40) -> list[str]:
    """The ids of `samples` sequences of one prompt that an owner submits."""
    ids = [f"{owner or 'nobody'}-{len(replica.log)}-{index}" for index in range(samples)]
    for index, id_ in enumerate(ids):
        fields = {"prompt": f"prompt of {ids[0]}", "sample_index": index, "owner": owner}
        replica.submit(submit_of(id_, 8, max_tokens, **fields))
    return ids


def running(replica: Any) -> Counter[str]:
    """Return the number of sequences of each owner that hold KV."""
    return Counter(request.submit.owner for request in replica.controller.requests() if not request.waits)


def until(replica: Any, reached: Any, moves: int = 400) -> int:
    """Advance until `reached()`, and return how many moves that took."""
    for move in range(moves):
        if reached():
            return move
        replica.advance()
    raise AssertionError("it has not come to that")


def test_two_requests_of_many_samples_leave_places_to_one_that_comes_later(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of(max_running=PLACES, kv_blocks=20_000)
    first = submitted(replica, submit_of, "a", 32, max_tokens=200)
    second = submitted(replica, submit_of, "b", 96, max_tokens=200)
    until(replica, lambda: all(replica.emitted.get(id_) for id_ in first))
    for _ in range(20):
        replica.advance()
    held = running(replica)
    assert held["a"] == 32
    assert held["b"] == 29, "the first number that is 8 times the free places or more"
    (late,) = submitted(replica, submit_of, "c", 1)
    until(replica, lambda: late in replica.emitted, moves=5)
    assert not replica.endings, "it had to wait for others to end"
    replica.run().check_empty()
    assert all(id_ in replica.endings for id_ in (*first, *second, late))


def test_an_owner_that_took_all_places_while_alone_gets_none_back_while_others_wait(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of(max_running=PLACES, kv_blocks=20_000)
    mine = submitted(replica, submit_of, "a", 2 * PLACES)
    until(replica, lambda: running(replica)["a"] == PLACES)
    others = [id_ for owner in "bcdef" for id_ in submitted(replica, submit_of, owner, 1, max_tokens=400)]
    until(replica, lambda: any(id_ in replica.endings for id_ in mine))
    until(replica, lambda: all(id_ in replica.emitted for id_ in others), moves=10)
    replica.run().check_empty()


@settings(max_examples=8)
@given(sizes=st.lists(st.integers(1, 90), min_size=1, max_size=4))
def test_an_owner_that_is_alone_is_served_as_if_there_were_no_owners(
    replica_of: Any, submit_of: Any, sizes: list[int]
) -> None:
    commands = []
    for owner in ("", "a"):
        replica = replica_of(max_running=PLACES, kv_blocks=400)
        for index, size in enumerate(sizes):
            for number in range(size):
                submit = submit_of(f"{index}-{number}", 8, 20)
                replica.submit(replace(submit, prompt=f"prompt {index}", owner=owner))
            replica.advance()
        replica.run().check_empty()
        commands.append(replica.commands)
    assert commands[0] == commands[1]


@pytest.mark.long
def test_waiting_sequences_over_the_threshold_do_not_keep_decodes_from_running_ahead(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of(max_running=PLACES, kv_blocks=20_000)
    submitted(replica, submit_of, "a", 1, max_tokens=150)
    submitted(replica, submit_of, "b", 100, max_tokens=150)
    until(replica, lambda: running(replica)["b"] == 56)
    for _ in range(10):
        replica.advance()
    assert running(replica)["b"] == 56, "8 for each of the 7 free places"
    assert len(replica.controller.steps_in_flight) == 2
    replica.run().check_empty()


def test_a_late_sequence_over_the_threshold_claims_no_kv(replica_of: Any, submit_of: Any) -> None:
    """It gets no place, so its claim would keep KV from those that do."""
    replica = replica_of(max_running=18, kv_blocks=260)
    submitted(replica, submit_of, "a", 1)
    for index in range(16):
        replica.submit(submit_of(f"b{index}", 8, 40, owner="b"))
    until(replica, lambda: running(replica)["b"] == 16)
    replica.submit(submit_of("large", 200, 150, owner="b", age_seconds=1000.0))
    replica.advance()
    (other,) = submitted(replica, submit_of, "c", 1, max_tokens=80)
    until(replica, lambda: other in replica.emitted, moves=6)
    assert not replica.endings
    replica.run().check_empty()
    assert "large" in replica.emitted


def test_a_claim_ends_when_its_owner_comes_over_the_threshold(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(max_running=18, kv_blocks=260)
    submitted(replica, submit_of, "a", 1)
    for index in range(15):
        replica.submit(submit_of(f"b{index}", 8, 40, owner="b"))
    until(replica, lambda: running(replica)["b"] == 15)
    replica.submit(submit_of("large", 200, 150, owner="b", age_seconds=1000.0))
    until(replica, lambda: replica.controller._admission.claimant is not None)
    replica.submit(submit_of("last", 8, 4, owner="b"))
    until(replica, lambda: running(replica)["b"] == 16, moves=6)
    (other,) = submitted(replica, submit_of, "c", 1, max_tokens=80)
    until(replica, lambda: other in replica.emitted, moves=6)
    replica.run().check_empty()


def test_an_owner_over_the_threshold_gets_a_place_when_others_have_gone(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of(max_running=PLACES, kv_blocks=20_000)
    (one,) = submitted(replica, submit_of, "a", 1, max_tokens=150)
    submitted(replica, submit_of, "b", 100, max_tokens=150)
    until(replica, lambda: running(replica)["b"] == 56)
    replica.cancel(one)
    for _ in range(10):
        replica.advance()
    assert running(replica)["b"] == 57, "they may come again"
    replica.now += REMEMBERED_SECONDS
    until(replica, lambda: running(replica)["b"] == PLACES, moves=10)
    replica.run().check_empty()


# --- the counts by themselves -----------------------------------------------------------------------


def holding(**held: int) -> OwnerPlaces:
    """Owners that hold so many places."""
    places = OwnerPlaces()
    for name, count in held.items():
        for _ in range(count):
            places.arrive(name)
            places.place(name)
    return places


@pytest.mark.parametrize(
    ("held", "free", "over"),
    [
        ({"a": 100}, 1, ()),  # alone
        ({"a": 7, "b": 7}, 1, ()),
        ({"a": 8, "b": 7}, 1, (1,)),
        ({"a": 8, "b": 7}, 2, ()),
        ({"a": 16, "b": 40}, 2, (1, 2)),
    ],
)
def test_an_owner_may_hold_eight_places_for_each_free_one(
    held: dict[str, int], free: int, over: tuple[int, ...]
) -> None:
    places = holding(**held)
    names = list(held)
    assert tuple(names.index(name) + 1 for name in names if places.is_over(name, free, KV)) == over
    assert places.over(free, KV) == (), "none of them waits"
    for name in names:
        places.arrive(name)
    assert places.over(free, KV) == over


@given(
    steps=st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["arrive", "place", "leave"])), max_size=120
    ),
    free=st.integers(1, 4),
)
def test_it_counts_what_is_there(steps: list[tuple[str, str]], free: int) -> None:
    places = OwnerPlaces()
    waiting, held = Counter[str](), Counter[str]()
    there: set[str] = set()
    gone: list[str] = []
    for name, step in steps:
        if step == "arrive":
            places.arrive(name)
            waiting[name] += 1
        elif step == "place" and waiting[name]:
            places.place(name)
            waiting[name] -= 1
            held[name] += 1
        elif step == "leave" and (waiting[name] or held[name]):
            waited = bool(waiting[name])
            places.leave(name, waited=waited)
            (waiting if waited else held)[name] -= 1
        here = {one for one in "abc" if waiting[one] or held[one]}
        gone = [*(one for one in gone if one not in here), *(there - here)]
        there = here
        over = {one for one in here if len({*here, *gone[-2:]}) > 1 and held[one] >= 8 * free}
        assert {one for one in "abc" if places.is_over(one, free, KV)} == over
        assert len(places.over(free, KV)) == len({one for one in over if waiting[one]})
        assert places.any_may_take(free, KV) == any(waiting[one] for one in here - over)


@pytest.mark.parametrize(
    ("blocks", "free", "over"),
    [
        ({"a": 80}, 1, ()),  # alone
        ({"a": 80, "b": 0}, 10, ()),
        ({"a": 81, "b": 0}, 10, (1,)),
        ({"a": 81, "b": 90}, 10, (2,)),  # less than an equal share is never too much
        ({"a": 0, "b": 0}, -3, ()),  # growth has taken what was held for it
    ],
)
def test_an_owner_with_more_than_its_share_leaves_a_ninth_of_the_kv(
    blocks: dict[str, int], free: int, over: tuple[int, ...]
) -> None:
    places = OwnerPlaces()
    for name, held in blocks.items():
        places.arrive(name)
        places.hold(name, held)
    assert places.over(50, free) == over
    assert places.over_kv(free) == bool(over)
    names = list(blocks)
    assert tuple(names.index(name) + 1 for name in names if places.is_over(name, 50, free)) == over


def test_who_has_just_gone_counts_for_a_minute() -> None:
    places = OwnerPlaces()
    places.at(10.0)
    places.arrive("a")
    places.hold("a", 100)
    places.arrive("b")
    places.leave("b", waited=True)
    places.at(10.0 + REMEMBERED_SECONDS)
    assert places.is_over("a", 50, 1)
    places.at(10.1 + REMEMBERED_SECONDS)
    assert not places.is_over("a", 50, 1)


def test_a_key_that_fills_the_kv_leaves_some_to_one_that_comes_later(replica_of: Any, submit_of: Any) -> None:
    replica = replica_of(kv_blocks=400)
    replica.submit(submit_of("first", 8, 4, owner="b"))
    until(replica, lambda: replica.controller.idle)
    for index in range(60):
        replica.submit(submit_of(f"a{index}", 16, 40, owner="a"))
    for _ in range(20):
        replica.advance()
    assert not replica.endings.keys() - {"first"}
    (late,) = submitted(replica, submit_of, "b", 1)
    until(replica, lambda: late in replica.emitted, moves=5)
    assert not replica.endings.keys() - {"first"}, "it had to wait for others to end"
    replica.run().check_empty()


@given(
    steps=st.lists(
        st.tuples(st.sampled_from("abc"), st.booleans(), st.sampled_from(["arrive", "place", "leave"])),
        max_size=80,
    )
)
def test_who_has_more_than_its_share_lets_short_requests_of_others_claim_kv(
    steps: list[tuple[str, bool, str]],
) -> None:
    """Long ones that wait do not count: they may wait for hours."""
    places = OwnerPlaces()
    waiting, held = Counter[tuple[str, bool]](), Counter[tuple[str, bool]]()
    numbers: dict[str, int] = {}
    for name, is_long, step in steps:
        blocks = 0 if is_long else 5
        if step == "arrive":
            numbers[name] = places.arrive(name, is_long=is_long)
            waiting[name, is_long] += 1
        elif step == "place" and waiting[name, is_long]:
            places.place(name, is_long=is_long)
            places.hold(name, blocks)
            waiting[name, is_long] -= 1
            held[name, is_long] += 1
        elif step == "leave" and waiting[name, is_long]:
            places.leave(name, waited=True, is_long=is_long)
            waiting[name, is_long] -= 1
        elif step == "leave" and held[name, is_long]:
            places.hold(name, -blocks)
            places.leave(name, waited=False, is_long=is_long)
            held[name, is_long] -= 1
        here = {one for one in "abc" if any((waiting + held)[one, long] for long in (False, True))}
        wanting = {one for one in here if waiting[one, False]}
        shorts = sum(held[one, False] for one in here)
        above = {one for one in wanting if held[one, False] * len(here) > shorts}
        assert set(places.above_share()) == ({numbers[one] for one in above} if above != wanting else set())


def test_a_request_claims_kv_beside_long_ones_of_another_owner_that_wait(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of(policy="guarded", kv_blocks=400, max_chunk_tokens=64, long_threshold_tokens=390)
    random = Random(0)

    def advance() -> None:
        """There are always 25 small requests of one owner, and 3 long ones of another."""
        there = Counter(request.submit.owner for request in replica.controller.requests())
        for _ in range(3 - there["b"]):
            replica.submit(submit_of(f"b{len(replica.log)}", 400, 400, owner="b"))
        for _ in range(25 - there["a"]):
            replica.submit(submit_of(f"a{len(replica.log)}", 8, random.randint(16, 60), owner="a"))
        replica.advance()

    for _ in range(200):
        advance()
    replica.submit(submit_of("large", 200, 8, owner="a", age_seconds=1000.0))
    for _ in range(400):
        advance()
    assert "large" in replica.emitted
    replica.run().check_empty()


def test_a_request_of_an_owner_with_much_kv_claims_some_after_a_while_although_others_always_wait(
    replica_of: Any, submit_of: Any
) -> None:
    replica = replica_of(policy="edf", kv_blocks=200, max_chunk_tokens=64)
    random = Random(0)

    def advance() -> None:
        """There are always 25 small requests of one owner, and 16 of another."""
        there = Counter(request.submit.owner for request in replica.controller.requests())
        for _ in range(16 - there["b"]):
            replica.submit(submit_of(f"b{len(replica.log)}", 8, 4, owner="b"))
        for _ in range(25 - there["a"]):
            replica.submit(submit_of(f"a{len(replica.log)}", 8, random.randint(16, 60), owner="a"))
        replica.advance()

    for _ in range(100):
        advance()
    replica.submit(submit_of("large", 400, 8, owner="a", age_seconds=1000.0))
    replica.step_seconds = 1.0
    for _ in range(200):
        advance()
    assert "large" in replica.emitted
    replica.run().check_empty()
