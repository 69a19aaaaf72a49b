"""The deadline ledger: its order is that of the policy, owners take turns under overload, and no row is lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.routing.deadline_ledger import FEW_ROWS, REORDER_SECONDS, DeadlineLedger, Facts, Opening
from medha.scheduler.attained_service import AttainedService
from medha.scheduler.guarded import Guarded, GuardedSettings, Plan
from medha.scheduler.policy import POLICIES, Columns, keys
from medha.scheduler.request import NOWHERE
from medha.wire.messages import PolicyTerms


@dataclass(eq=False)
class Element:
    name: str
    facts: Facts
    owner: str = ""
    row: int = NOWHERE


@dataclass
class Book:
    """A ledger, and what was put into it."""

    terms: PolicyTerms = field(default_factory=PolicyTerms)
    lanes: int = 1
    ties: Iterator[int] = field(default_factory=lambda: iter(range(1, 1_000_000)))

    def __post_init__(self) -> None:
        self.attained = AttainedService()
        self.ledger: DeadlineLedger[Element] = DeadlineLedger()
        self.ledger.follow(self.terms, self.lanes)

    def add(
        self,
        name: str,
        now: float = 0.0,
        *,
        target: float = 2.0,
        work: float = 1.0,
        left: float | None = None,
        owner: str = "",
        tokens: int = 100,
    ) -> Element:
        turn = self.attained.turn(owner)
        self.attained.charge(owner, tokens, now)
        remaining = work if left is None else left
        facts = Facts(now, now + target, work, remaining, next(self.ties), turn, tokens, tokens)
        element = Element(name, facts, owner)
        self.ledger.add(element, facts)
        return element

    def names(self, now: float = 0.0) -> list[str]:
        return [element.name for element, _ in self.ledger.urgent_first(now, most=None)]


ROWS = st.lists(
    st.tuples(
        st.floats(0, 5),
        st.sampled_from([0.5, 2.0, 60.0]),
        st.floats(0.001, 30),
        st.floats(0, 1),
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=40,
)


@given(
    st.sampled_from(sorted(POLICIES - {"guarded"})),
    st.sampled_from(["work", "deadline"]),
    ROWS,
    st.floats(0, 90),
)
def test_the_order_is_that_of_the_policys_keys_on_the_same_state_at_any_time(
    policy: str, denominator: str, rows: list[tuple[float, float, float, float, int]], now: float
) -> None:
    book = Book(PolicyTerms(policy, denominator))
    elements: list[Element] = []
    for index, (arrival, target, work, cached, leaves) in enumerate(rows):
        elements.append(book.add(str(index), arrival, target=target, work=work, left=work * (1 - cached)))
        if leaves == 0:
            book.ledger.remove(elements.pop(0), served=True)
            book.names(now / 2)
    facts = [element.facts for element in elements]
    columns = Columns(
        np.array([one.arrival for one in facts]),
        np.array([one.deadline for one in facts]),
        np.array([one.work_seconds for one in facts]),
        np.array([one.remaining_seconds for one in facts]),
        np.array([one.tie for one in facts]),
    )
    order = np.lexsort((columns.tie, keys(policy, columns, now, denominator))) if facts else []
    assert book.names(now) == [elements[place].name for place in order]


@given(ROWS, st.integers(1, 3), st.lists(st.floats(0, 20), min_size=1, max_size=4))
def test_guarded_demotes_here_whom_it_demotes_on_the_same_state(
    rows: list[tuple[float, float, float, float, int]], lanes: int, times: list[float]
) -> None:
    book = Book(PolicyTerms("guarded"), lanes)
    for index, (arrival, target, work, _, _) in enumerate(rows):
        book.add(str(index), arrival, target=target, work=work)
    elements = list(book.ledger)
    deadline = np.array([one.facts.deadline for one in elements])
    work = np.array([one.facts.work_seconds for one in elements])
    tie = np.array([one.facts.tie for one in elements])
    columns = Columns(np.zeros(len(elements)), deadline, work, work, tie)
    plan = Plan(deadline.copy(), np.full(len(elements), np.inf), np.lexsort((tie, deadline)))
    guarded = Guarded(GuardedSettings(0.1, 0.5, lanes))
    for now in sorted(times):
        plan.by_due[:] = np.lexsort((tie, plan.due))
        guarded.first(columns, plan, now)
        expected = [elements[row].name for row in plan.by_due]
        assert book.names(now) == expected


@given(st.data())
def test_whatever_comes_and_goes_each_element_is_there_once_until_it_leaves(data: st.DataObject) -> None:
    book = Book(PolicyTerms(data.draw(st.sampled_from(sorted(POLICIES)))))
    there: dict[str, Element] = {}
    now = 0.0
    for index in range(data.draw(st.integers(1, 60))):
        now += data.draw(st.sampled_from([0.0, 0.001, 1.0]))
        if there and data.draw(st.booleans()):
            element = there.pop(data.draw(st.sampled_from(sorted(there))))
            book.ledger.remove(element, served=data.draw(st.booleans()))
            assert element.row == NOWHERE
        else:
            work = data.draw(st.floats(0.01, 9))
            there[str(index)] = book.add(str(index), now, work=work, owner=data.draw(st.sampled_from("abc")))
        if data.draw(st.booleans()):
            assert sorted(book.names(now)) == sorted(there)
        if data.draw(st.integers(0, 9)) == 0:
            book.ledger.follow(PolicyTerms(data.draw(st.sampled_from(sorted(POLICIES)))), 1)
    assert sorted(book.names(now)) == sorted(element.name for element in book.ledger) == sorted(there)
    assert book.ledger.owners == len({element.owner for element in there.values()})


def test_many_rows_keep_their_order_for_a_moment_and_newcomers_come_last_meanwhile() -> None:
    book = Book(PolicyTerms("edf"))
    elements = [book.add(str(index), target=100.0 + index) for index in range(FEW_ROWS + 10)]
    first = book.names(0.0)
    assert first == [element.name for element in elements]
    book.ledger.remove(elements[5], served=True)
    book.ledger.remove(elements[-1], served=False)
    book.add("urgent", 0.0, target=1.0)
    expected = [name for name in first if name not in ("5", elements[-1].name)]
    assert book.names(REORDER_SECONDS / 2) == [*expected, "urgent"]
    assert book.names(2 * REORDER_SECONDS) == ["urgent", *expected]


def test_what_no_replica_could_begin_is_not_read_and_hides_nothing_behind_it() -> None:
    book = Book(PolicyTerms("edf"))
    for index in range(2000):
        book.add(f"long {index}", target=1.0, tokens=1000)
    book.add("short", target=50.0, tokens=10)
    later = book.add("later", target=90.0, tokens=10)
    found = book.ledger.urgent_first(0.0, [Opening(below_tokens=1000)])
    assert [element.name for element, _ in found] == ["short", "later"]
    found = book.ledger.urgent_first(0.0, [Opening(1000, until_key=50.0)])
    assert [element.name for element, _ in found] == ["short"]
    assert book.ledger.urgent_first(0.0, [Opening(1000, kv_tokens=9)]) == []
    found = book.ledger.urgent_first(89.5, [Opening(1000, kv_tokens=9)])
    assert [element.name for element, _ in found] == ["short", "later"], (
        "late ones may claim KV in the replica"
    )
    book.ledger.update(later, 0.1)
    found = book.ledger.urgent_first(89.5, [Opening(1000, kv_tokens=9)])
    assert [element.name for element, _ in found] == ["short"], "most of it is cached now, so it has slack"


# --- owners ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_while_all_can_be_on_time_owners_do_not_matter(policy: str) -> None:
    alone, shared = Book(PolicyTerms(policy)), Book(PolicyTerms(policy))
    for book, owners in ((alone, "a"), (shared, "ab")):
        book.attained.charge("a", 100_000, 0.0)
        for index in range(10):
            owner = owners[index % len(owners)]
            book.add(str(index), 0.001 * index, target=10.0 + index, work=0.5 + 0.01 * index, owner=owner)
    assert alone.names() == shared.names()
    assert not shared.ledger.is_contested


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_under_overload_the_least_served_owner_goes_first_and_its_own_keep_the_policys_order(
    policy: str,
) -> None:
    book = Book(PolicyTerms(policy))
    for index in range(100):
        book.add(f"flood {index}", target=2.0, work=1.0 + 0.001 * index, owner="flood", tokens=1000)
    book.add("b", target=3.0, work=1.5, owner="light")
    book.add("c", target=2.5, work=1.5, owner="light")
    names = book.names()
    assert book.ledger.is_contested
    assert {"b", "c"} <= set(names[:4]), "the flood's first two have attained as little"
    of_light = Book(PolicyTerms(policy))
    of_light.add("b", target=3.0, work=1.5)
    of_light.add("c", target=2.5, work=1.5)
    assert [name for name in names if name in "bc"] == of_light.names()


def test_of_equal_slack_the_owner_that_attained_least_goes_first() -> None:
    book = Book(PolicyTerms("lrs"))
    book.attained.charge("busy", 5000, 0.0)
    for index, owner in enumerate(("busy", "idle", "busy")):
        book.add(f"{owner} {index}", target=100.0, owner=owner)
    assert not book.ledger.is_contested
    assert book.names() == ["idle 1", "busy 0", "busy 2"] or book.names(1.0)[0] == "idle 1"


def test_many_samples_of_one_owner_count_as_many() -> None:
    """Ten owners ask for one sample after one asked for 20: only its first goes before theirs."""
    book = Book(PolicyTerms("fcfs"))
    for index in range(20):
        book.add(f"many {index}", 0.0, owner="many", tokens=1100)
    for index in range(10):
        book.add(f"one {index}", 0.1, owner=f"one {index}", tokens=1100)
    names = book.names(5.0)
    assert max(names.index(f"one {index}") for index in range(10)) <= 11


def test_a_late_sequence_of_a_served_owner_is_not_passed_for_ever_by_newcomers() -> None:
    book = Book(PolicyTerms("edf"))
    for index in range(3):
        book.add(f"many {index}", owner="many", tokens=4000)
    left, now = 3, 0.0
    while left:
        now += 1.0
        for index in range(2):  # two newcomers come for one that leaves
            book.add(f"{now} {index}", now, owner=f"{now} {index}")
        (element, _), *_ = book.ledger.urgent_first(now)
        assert book.ledger.is_contested
        book.ledger.remove(element, served=True)
        left -= element.owner == "many"
        assert now < 500.0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 5000), st.floats(0, 300)), max_size=40))
def test_what_was_attained_halves_in_a_half_life_and_turns_grow_with_it(
    charges: list[tuple[str, int, float]],
) -> None:
    attained = AttainedService()
    now = 0.0
    expected = dict.fromkeys("abcd", 0.0)
    for owner, tokens, gap in charges:
        now += gap
        expected = {name: sum_ * 0.5 ** (gap / 60.0) for name, sum_ in expected.items()}
        attained.charge(owner, tokens, now)
        expected[owner] += tokens
        assert attained.tokens(owner, now) == pytest.approx(expected[owner])
    by_turn = sorted("abcd", key=lambda owner: (attained.turn(owner), owner))
    for first, second in pairwise(by_turn):
        assert expected[first] <= expected[second] * (1 + 1e-9) + 1e-9


def test_owners_are_forgotten_when_they_are_too_many_the_least_served_first() -> None:
    attained = AttainedService(remembered=10)
    for index in range(1000):
        attained.charge(f"small {index}", 1, 1e6)
        attained.charge("large", 10, 1e6)
        assert len(attained) <= 20
    assert attained.tokens("large", 1e6) == 10_000
    attained.charge("large", -10_000, 1e6)
    assert attained.tokens("large", 1e6) == 0.0
    assert attained.turn("large") < attained.turn("small 999")
