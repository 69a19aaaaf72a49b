"""`guarded` on one server: which deadlines it meets, and which revised deadlines the other requests get and meet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.scheduler.guarded import Guarded, GuardedSettings, Plan
from medha.scheduler.policy import Columns
from medha_papers.single_server import Jobs, Schedule, edf_meets_all, most_on_time, serve

SHARE = 0.1


def jobs(*rows: tuple[float, float, float]) -> Jobs:
    """Of (arrival, work, deadline after arrival) each."""
    arrival, work, after = np.array(sorted(rows), dtype=np.float64).reshape(-1, 3).T
    return Jobs(arrival, arrival + after, work)


def on_time(schedule: Schedule, requests: Jobs) -> list[bool]:
    return (schedule.finish <= requests.deadline + 1e-6).tolist()


# --- paper B's example --------------------------------------------------------------------------------

PAPER = jobs((0, 10, 16), (5, 0.5, 1), (5, 0.5, 1))
PREEMPTED = [(0, 0, 5), (5, 1, 0.5), (5.5, 2, 0.5), (6, 0, 5)]


def merged(schedule: Schedule) -> list[tuple[float, int, float]]:
    """(start, job, seconds) with neighbouring quanta of one job joined."""
    runs: list[tuple[float, int, float]] = []
    for start, job, seconds in schedule.quanta:
        if runs and runs[-1][1] == job:
            start, _, before = runs.pop()
            seconds += before
        runs.append((start, job, seconds))
    return runs


@pytest.mark.parametrize(
    ("policy", "expected", "met"),
    [
        ("fcfs", [(0, 0, 10), (10, 1, 0.5), (10.5, 2, 0.5)], [True, False, False]),
        ("edf", PREEMPTED, [True, True, True]),
        ("lrs", PREEMPTED, [True, True, True]),
        ("srpt", PREEMPTED, [True, True, True]),
        ("lars", [(0, 0, 5.5), (5.5, 1, 0.5), (6, 2, 0.5), (6.5, 0, 4.5)], [True, True, False]),
        ("guarded", PREEMPTED, [True, True, True]),
    ],
)
def test_the_papers_example_runs_exactly_as_each_policy_orders(
    policy: str, expected: list[tuple[float, int, float]], met: list[bool]
) -> None:
    schedule = serve(PAPER, policy, quantum_seconds=0.5, record=True)
    assert merged(schedule) == expected
    assert on_time(schedule, PAPER) == met


@pytest.mark.parametrize(("denominator", "last_end"), [("work", 6.25), ("deadline", 6.15)])
def test_lars_in_small_quanta_misses_both_short_deadlines_of_the_paper(
    denominator: str, last_end: float
) -> None:
    schedule = serve(PAPER, "lars", quantum_seconds=0.05, lars_denominator=denominator)
    assert on_time(schedule, PAPER) == [True, False, False]
    assert schedule.finish[1:].max() == pytest.approx(last_end, abs=0.051)


# --- what can be met is met ---------------------------------------------------------------------------


QUARTERS = st.integers(0, 60).map(lambda quarters: quarters / 4)
SOME_QUARTERS = st.integers(1, 24).map(lambda quarters: quarters / 4)
ON_A_GRID = st.lists(st.tuples(QUARTERS, SOME_QUARTERS, SOME_QUARTERS), min_size=1, max_size=8).map(
    lambda rows: jobs(*((arrival, work, work + spare) for arrival, work, spare in rows))
)
SECONDS = st.floats(0.01, 10)
ANYWHERE = st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=8).map(
    lambda rows: jobs(*((arrival, work, work + spare) for arrival, work, spare in rows))
)


@given(ON_A_GRID)
@settings(max_examples=200)
def test_what_edf_serves_in_time_is_served_exactly_so_where_the_quantum_divides_all_times(
    requests: Jobs,
) -> None:
    everyone = tuple(range(len(requests.arrival)))
    schedule = serve(requests, "guarded", quantum_seconds=0.25, record=True)
    if edf_meets_all(requests, everyone):
        edf = serve(requests, "edf", quantum_seconds=0.25, record=True)
        assert merged(schedule) == merged(edf)
        assert all(on_time(schedule, requests))
    else:
        assert not all(on_time(schedule, requests))


@given(ANYWHERE, st.sampled_from([0.05, 0.3, 1.0]))
@settings(max_examples=200)
def test_what_fluid_edf_serves_in_time_is_at_most_one_quantum_late(requests: Jobs, quantum: float) -> None:
    schedule = serve(requests, "guarded", quantum_seconds=quantum)
    if edf_meets_all(requests, tuple(range(len(requests.arrival)))):
        assert not len(schedule.demoted)
        assert (schedule.finish <= requests.deadline + quantum + 1e-6).all()


def overloaded(generator: np.random.Generator, *, mixed: bool) -> Jobs:
    """Eight jobs on a grid of quarters, not all of which can be met: paper B's mix in small, or any works."""
    while True:
        if mixed:
            quarters = np.where(
                generator.random(8) < 0.3, generator.integers(12, 48, 8), generator.integers(1, 5, 8)
            )
            after = np.maximum(2, 3 * quarters)
        else:
            quarters = generator.integers(1, 24, 8)
            after = np.ceil(quarters * generator.choice([1.0, 1.5, 2.0, 3.0], 8))
        requests = jobs(*zip(generator.integers(0, 40, 8) / 4, quarters / 4, after / 4, strict=True))
        if not edf_meets_all(requests, tuple(range(8))):
            return requests


@pytest.mark.parametrize("mixed", [True, False], ids=["long and short", "any works"])
def test_in_overload_nine_tenths_of_the_offline_optimum_are_met_on_average(mixed: bool) -> None:
    generator = np.random.default_rng(7)
    ratios = []
    for _ in range(60):
        requests = overloaded(generator, mixed=mixed)
        schedule = serve(requests, "guarded", quantum_seconds=0.25)
        ratios.append(sum(on_time(schedule, requests)) / most_on_time(requests))
    assert np.mean(ratios) >= 0.9, f"mean {np.mean(ratios):.3f}, worst {min(ratios):.3f}"


# --- nobody is left behind ----------------------------------------------------------------------------

CROWD = st.lists(
    st.tuples(st.floats(0, 20), st.floats(0.01, 5), st.floats(0.01, 10)), min_size=2, max_size=30
).map(lambda rows: jobs(*rows))


@given(CROWD, st.sampled_from([0.05, 0.1, 0.5]), st.sampled_from([0.05, 0.5]))
@settings(max_examples=150)
def test_every_request_ends_by_its_deadline_or_by_its_first_revised_deadline(
    requests: Jobs, share: float, quantum: float
) -> None:
    """Nearly all of these are overloads, many deadlines are hopeless from the start."""
    schedule = serve(requests, "guarded", quantum_seconds=quantum, demoted_share=share)
    late = schedule.finish > requests.deadline + quantum + 1e-6
    assert set(np.flatnonzero(late)) <= set(schedule.demoted.tolist())
    demoted = schedule.demoted
    assert (schedule.finish[demoted] <= schedule.revised_deadline[demoted] + 1e-6).all()


@pytest.mark.parametrize(
    ("policy", "ends"), [("fcfs", True), ("edf", True), ("guarded", True), ("srpt", False)]
)
def test_a_flood_of_short_requests_starves_a_long_one_only_under_srpt(policy: str, ends: bool) -> None:
    """Shorts of half again what the server can do, for ten minutes."""
    flood = [(0.1 * number, 0.15, 2.0) for number in range(6000)]
    requests = jobs((0, 10, 30), *flood)
    long = int(np.argmax(requests.work_seconds))
    schedule = serve(requests, policy, quantum_seconds=0.15)
    assert (schedule.finish[long] <= 600) == ends


def test_a_short_request_that_is_hopeless_from_the_start_does_not_wait_behind_long_ones_demoted() -> None:
    """Its revised deadline is minutes away; but it goes first where that costs the others next to nothing."""
    requests = jobs((0, 20, 22), (0, 25, 27), (1, 0.05, 0.01))
    schedule = serve(requests, "guarded", quantum_seconds=0.1)
    assert schedule.revised_deadline[2] > 100
    assert schedule.finish[2] < 1.2
    assert schedule.finish[:2].max() == pytest.approx(45.05)


def test_predictions_that_are_wrong_by_half_starve_nobody_and_hardly_touch_the_shorts() -> None:
    generator = np.random.default_rng(3)
    rows = [(arrival, 0.02, 2.0) for arrival in generator.uniform(0, 300, 600)]
    rows += [(arrival, 20.0, 60.0) for arrival in generator.uniform(0, 300, 40)]
    requests = jobs(*rows)
    slowness = generator.uniform(0.7, 1.5, len(rows))
    schedule = serve(requests, "guarded", quantum_seconds=0.1, slowness=slowness)
    assert np.isfinite(schedule.finish).all()
    short = requests.work_seconds < 1
    assert (schedule.finish <= requests.deadline)[short].mean() > 0.99


# --- decisions by hand --------------------------------------------------------------------------------


@dataclass
class Table:
    """Rows as the engine keeps them."""

    columns: Columns
    plan: Plan

    @staticmethod
    def of(*rows: tuple[float, float, float]) -> Table:
        """Rows of (arrival, remaining work, deadline)."""
        arrival, work, deadline = np.array(rows, dtype=np.float64).T
        columns = Columns(arrival, deadline, work, work.copy(), np.arange(len(rows)))
        by_due = np.argsort(deadline, kind="stable")
        return Table(columns, Plan(deadline.copy(), np.full(len(rows), np.inf), by_due))

    def revised_deadline(self, row: int, at: float) -> None:
        """Set the columns of `row` as a demotion with the revised deadline `at` (seconds) leaves them."""
        self.plan.due[row] = self.plan.revised_deadline[row] = at
        self.plan.by_due[:] = np.argsort(self.plan.due, kind="stable")

    def order(self, now: float, *, lanes: int = 1) -> list[int]:
        return self.order_by(Guarded(GuardedSettings(SHARE, grace_seconds=0.1, lanes=lanes)), now)

    def order_by(self, guarded: Guarded, now: float) -> list[int]:
        return list(guarded.order(self.columns, self.plan, now))

    @property
    def demoted(self) -> list[int]:
        return np.flatnonzero(self.plan.due > self.columns.deadline).tolist()


def test_without_overload_nobody_is_demoted_and_the_order_is_that_of_deadlines() -> None:
    table = Table.of((0, 5, 20), (0, 2, 8), (0, 1, 30))
    assert table.order(now=0) == [1, 0, 2]
    assert table.demoted == []


def test_the_one_with_most_remaining_work_among_those_that_are_too_many_is_demoted() -> None:
    """The largest of all is due later and does not stand in the way."""
    table = Table.of((0, 5, 10), (0, 6, 10), (0, 1, 10), (0, 30, 50))
    assert table.order(now=0) == [0, 2, 3, 1]
    assert table.demoted == [1]


def test_a_revised_deadline_is_the_work_demoted_so_far_over_the_share() -> None:
    table = Table.of((0, 8, 7), (0, 3, 2))
    table.order(now=0)
    assert table.plan.revised_deadline.tolist() == pytest.approx([(3 + 8) / SHARE, 3 / SHARE])
    table.order(now=20)
    assert table.plan.revised_deadline.tolist() == pytest.approx([(3 + 8) / SHARE, 3 / SHARE]), (
        "it does not move"
    )


def test_a_revised_deadline_binds_requests_that_are_not_demoted() -> None:
    """The demoted request needs nearly all the time until its revised deadline, so another that needs it, too, must be demoted."""
    table = Table.of((0, 5, 5), (94, 4, 99))
    table.revised_deadline(0, at=100)
    assert table.order(now=94) == [0, 1]
    assert table.demoted == [0, 1]
    assert table.plan.revised_deadline.tolist() == pytest.approx([100, 94 + (5 + 4) / SHARE])


def test_a_revised_deadline_demotes_no_request_that_is_small_beside_it() -> None:
    table = Table.of((0, 5, 5), (90.5, 0.05, 92.5))
    table.revised_deadline(0, at=100)
    assert table.order(now=90.5) == [1, 0]
    assert table.demoted == [0], "5.05 s fit before 100, and the margin is there for such"


def test_a_revised_deadline_that_cannot_be_met_even_alone_is_renewed_and_blocks_no_request() -> None:
    """Steps took longer than predicted; without a new revised deadline it would go before every short until it ends."""
    table = Table.of((0, 5, 5), (97, 0.05, 99))
    table.revised_deadline(0, at=98)
    assert table.order(now=97) == [1, 0]
    assert table.plan.revised_deadline[0] == pytest.approx(97 + 5 / SHARE)
    assert table.demoted == [0]


def test_one_demoted_gets_its_deadline_back_when_there_is_room_again() -> None:
    table = Table.of((0, 5, 10), (0, 6, 10))
    table.order(now=0)
    assert table.demoted == [1]
    table.columns.remaining_seconds[0] = 1  # as if it were nearly all cached
    assert table.order(now=0.5) == [0, 1]
    assert table.demoted == []
    assert np.isfinite(table.plan.revised_deadline[1]), (
        "the revised deadline stays, in case it is demoted again"
    )


def test_when_there_is_room_for_many_again_they_return_over_several_decisions() -> None:
    """Each return looks at all rows: thousands at once would hold up the step for a third of a second."""
    table = Table.of(*((0.0, 1.0, 30.0) for _ in range(100)))
    table.order(now=0)
    before = len(table.demoted)
    assert before > 60
    table.columns.remaining_seconds[:] = 0.1
    left = []
    while table.demoted:
        table.order(now=0)
        left.append(len(table.demoted))
    assert left == [*range(before - 16, 0, -16), 0]


@given(st.integers(0, 2**32), st.integers(1, 3))
@settings(max_examples=50)
def test_far_due_times_are_examined_in_some_decisions_and_near_ones_in_all(seed: int, lanes: int) -> None:
    generator = np.random.default_rng(seed)
    arrival, work = np.zeros(300), generator.choice([0.01, 0.2, 3.0], 300) * generator.random(300)
    table = Table.of(*zip(arrival, work, generator.uniform(1, 150, 300), strict=True))
    guarded = Guarded(
        GuardedSettings(SHARE, grace_seconds=0.1, lanes=lanes, near_rows=20, far_every_decisions=4)
    )
    for decision in range(12):
        table.columns.remaining_seconds[generator.integers(300)] = generator.uniform(
            0, 10
        )  # was foretold wrongly
        assert sorted(table.order_by(guarded, now=0.0)) == list(range(300))
        for _ in range(150):  # two of the far ones go with each decision, as long as some have to
            if not guarded._far_left:
                break
            table.order_by(guarded, now=0.0)
        assert not guarded._far_left
        due, by_due = table.plan.due, table.plan.by_due
        assert sorted(by_due.tolist()) == list(range(300))
        assert (np.diff(due[by_due]) >= 0).all()
        examined = by_due if decision % 4 == 3 else by_due[:15]  # a few that were near have left
        work = table.columns.remaining_seconds[examined]
        ends = np.maximum(work.cumsum() / lanes, work)
        kept = due[examined] == table.columns.deadline[examined]
        assert (ends[kept] <= due[examined][kept] + (0.1 if not table.demoted else 0) + 1e-6).all()


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_few_rows_examined_one_by_one_lead_to_the_same_plan_as_arrays_do(lanes: int) -> None:
    generator = np.random.default_rng(lanes)
    as_it_stood = {"nobody demoted": 0, "first by due": 0, "first of the demoted": 0}
    for _ in range(100):
        count = int(generator.integers(1, 12))
        work = generator.choice([0.0, 0.01, 0.2, 3.0], count) * generator.random(count)
        after = np.where(generator.random(count) < 0.4, work / 2, generator.uniform(0, 10, count))
        table = Table.of(*zip(np.zeros(count), work, after, strict=True))
        share = float(generator.choice([0.02, SHARE]))
        one_by_one = Guarded(GuardedSettings(share, grace_seconds=0.1, lanes=lanes))
        arrays = Guarded(GuardedSettings(share, grace_seconds=0.1, lanes=lanes, few_rows=0))
        now = 0.0
        for _ in range(20):
            plan = Plan(table.plan.due.copy(), table.plan.revised_deadline.copy(), table.plan.by_due.copy())
            factor = float(generator.choice([1.0, 0.9, 1.7]))
            is_unchanged, _ = one_by_one._if_unchanged(table.columns, table.plan, now, factor)
            first = one_by_one.first(table.columns, table.plan, now, factor)
            assert first == arrays.first(table.columns, plan, now, factor)
            for found, expected in zip(
                (table.plan.due, table.plan.revised_deadline, table.plan.by_due),
                (plan.due, plan.revised_deadline, plan.by_due),
                strict=True,
            ):
                assert found.tolist() == expected.tolist()
            if is_unchanged:
                demoted = "first by due" if first is None else "first of the demoted"
                as_it_stood[demoted if table.demoted else "nobody demoted"] += 1
            served = int(table.plan.by_due[0]) if first is None else first
            left = table.columns.remaining_seconds
            left[served] = max(left[served] - 0.1, 0.0)
            now += float(generator.choice([0.05, 0.1, 0.3]))
    assert all(times > 30 for times in as_it_stood.values()), as_it_stood


def test_for_far_dues_two_are_demoted_at_a_time_and_the_next_decisions_go_on() -> None:
    """Twenty of 5 s are due at 50, behind thirty that take no time: more than half of them have to go."""
    table = Table.of(*((0.0, 0.01, 1.0) for _ in range(30)), *((0.0, 5.0, 50.0) for _ in range(20)))
    guarded = Guarded(GuardedSettings(SHARE, near_rows=25, far_every_decisions=3))
    demoted = []
    for _ in range(11):
        table.order_by(guarded, now=0.0)
        demoted.append(len(table.demoted))
    assert demoted == [0, 0, 2, 4, 6, 8, 10, 13, 13, 13, 11], (
        "two too many were demoted for the first revised deadline, and come back"
    )


def test_who_would_be_on_time_by_the_share_alone_is_no_victim() -> None:
    """The 5 s of each are due at a revised deadline before 100; only a request that would miss its deadline makes room."""
    table = Table.of(*((0.0, 5.0, 100.0) for _ in range(21)))
    table.order(now=0)
    table.order(now=0)  # the three that would be are taken back
    assert len(table.demoted) == 1
    (row,) = table.demoted
    assert table.plan.revised_deadline[row] > 100


def test_two_lanes_do_twice_the_work_but_not_one_request_twice_as_fast() -> None:
    fits = Table.of((0, 10, 10), (0, 10, 10))
    fits.order(now=0, lanes=2)
    assert fits.demoted == []
    too_long = Table.of((0, 4, 10), (0, 12, 10))
    too_long.order(now=0, lanes=2)
    assert too_long.demoted == [1]
    assert too_long.plan.revised_deadline[1] == pytest.approx(12 / SHARE)


def test_no_rows_have_no_order() -> None:
    empty = np.empty(0)
    columns = Columns(empty, empty, empty, empty, np.empty(0, dtype=np.int64))
    plan = Plan(empty, empty, np.empty(0, dtype=np.int64))
    assert list(Guarded(GuardedSettings()).order(columns, plan, 0.0)) == []


ROWS = st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 20), st.floats(0, 60)), min_size=1, max_size=40)


@given(ROWS, st.randoms(use_true_random=False))
@settings(max_examples=150)
def test_the_order_has_every_row_once_and_does_not_depend_on_where_rows_stand(
    rows: list[tuple[float, float, float]], random: st.random
) -> None:
    table = Table.of(*rows)
    order = table.order(now=10)
    assert sorted(order) == list(range(len(rows)))
    shuffled = list(range(len(rows)))
    random.shuffle(shuffled)
    other = Table.of(*(rows[row] for row in shuffled))
    columns = Columns(
        other.columns.arrival,
        other.columns.deadline,
        other.columns.work_seconds,
        other.columns.remaining_seconds,
        tie=np.array(shuffled),
    )
    by_due = np.lexsort((columns.tie, other.plan.due))
    moved = Table(columns, Plan(other.plan.due, other.plan.revised_deadline, by_due))
    assert [shuffled[row] for row in moved.order(now=10)] == order
    revised_deadline = [moved.plan.revised_deadline[shuffled.index(row)] for row in range(len(rows))]
    assert revised_deadline == pytest.approx(table.plan.revised_deadline.tolist()), (
        "but for the order in which work is summed"
    )


@given(ROWS)
@settings(max_examples=150)
def test_deciding_again_at_the_same_time_only_takes_back_and_then_rests(
    rows: list[tuple[float, float, float]],
) -> None:
    table = Table.of(*rows)
    table.order(now=10)
    demoted = table.demoted
    order = table.order(now=10)
    assert set(table.demoted) <= set(demoted)
    due = table.plan.due.copy()
    assert table.order(now=10) == order
    assert table.plan.due.tolist() == due.tolist()


@given(ROWS)
@settings(max_examples=100)
def test_while_nobody_arrives_nobody_else_is_demoted(rows: list[tuple[float, float, float]]) -> None:
    """Serving what was decided keeps what was decided: the sets do not flip."""
    table = Table.of(*rows)
    now, demoted = 10.0, None
    for _ in range(60):
        row = table.order(now)[0]
        if demoted is not None:
            assert set(table.demoted) <= demoted
        demoted = set(table.demoted)
        seconds = min(0.5, float(table.columns.remaining_seconds[row]))
        table.columns.remaining_seconds[row] -= seconds
        now += seconds
        if (table.columns.remaining_seconds <= 1e-9).any():
            table = without(table, int(np.argmin(table.columns.remaining_seconds)))
            demoted = None if not len(table.plan.due) else shifted(demoted, row)
        if not len(table.plan.due):
            return


def without(table: Table, row: int) -> Table:
    columns, plan = table.columns, table.plan
    by_due = plan.by_due[plan.by_due != row]
    return Table(
        Columns(
            *(
                np.delete(column, row)
                for column in (
                    columns.arrival,
                    columns.deadline,
                    columns.work_seconds,
                    columns.remaining_seconds,
                    columns.tie,
                )
            )
        ),
        Plan(np.delete(plan.due, row), np.delete(plan.revised_deadline, row), by_due - (by_due > row)),
    )


def shifted(rows: set[int], removed: int) -> set[int]:
    return {row - (row > removed) for row in rows if row != removed}


@given(st.integers(0, 2**32), st.integers(1, 3))
@settings(max_examples=25)
def test_whatever_comes_and_goes_the_plan_stays_sorted_and_no_revised_deadline_moves_earlier(
    seed: int, lanes: int
) -> None:
    """Floods, cancels, no work, hopeless deadlines, slow steps: the arrays that the engine relies on agree."""
    generator = np.random.default_rng(seed)
    rows: list[dict[str, float]] = []  # arrival, deadline, work, remaining, due, revised deadline
    now = 1e6
    for number in range(80):
        for _ in range(40 if number % 30 == 29 else generator.poisson(0.6)):
            work = float(generator.choice([0.0, 0.001, 0.2, 1.0, generator.uniform(0, 20)]))
            deadline = now + float(generator.choice([-5, work / 2, 2, 3 * work]))
            rows.append({"a": now, "d": deadline, "w": work, "r": work, "due": deadline, "revised": np.inf})
        if rows and generator.random() < 0.1:
            rows.pop(int(generator.integers(len(rows))))
        if rows:
            column = {name: np.array([row[name] for row in rows]) for name in rows[0]}
            columns = Columns(column["a"], column["d"], column["w"], column["r"], np.arange(len(rows)))
            by_due = np.argsort(column["due"], kind="stable")
            table = Table(columns, Plan(column["due"], column["revised"].copy(), by_due))
            order = table.order(now, lanes=lanes)
            assert sorted(order) == list(range(len(rows)))
            due, revised_deadline = table.plan.due, table.plan.revised_deadline
            demoted = due > columns.deadline
            assert (np.diff(due[table.plan.by_due]) >= 0).all()
            assert (due == np.where(demoted, revised_deadline, columns.deadline)).all()
            revised = np.isfinite(column["revised"])
            assert (revised_deadline[revised] >= column["revised"][revised]).all()
            for row, due_then, revised_then in zip(
                rows, due.tolist(), revised_deadline.tolist(), strict=True
            ):
                row["due"], row["revised"] = due_then, revised_then
            for served in order[:lanes]:
                rows[served]["r"] -= min(0.5, rows[served]["r"])
            rows = [row for row in rows if row["r"] > 1e-9]
        now += float(generator.choice([0.3, 0.5, 0.8]))


def test_a_lone_long_prefill_is_served_as_under_fcfs() -> None:
    lone = jobs((0, 30, 1))
    assert serve(lone, "guarded", quantum_seconds=0.5, record=True).quanta == [
        (0.5 * number, 0, 0.5) for number in range(60)
    ]
    assert serve(lone, "fcfs", quantum_seconds=0.5).finish.tolist() == [30]


def test_the_same_requests_are_served_the_same_way_again() -> None:
    requests = overloaded(np.random.default_rng(1), mixed=True)
    first, second = (serve(requests, "guarded", quantum_seconds=0.1, record=True) for _ in range(2))
    assert first.quanta == second.quanta


def test_requests_with_targets_of_their_own_are_kept_by_them() -> None:
    """The second asks for an end by 3: it goes first, and the others are still in time."""
    requests = jobs((0, 4, 12), (0.5, 2, 2.5), (0.5, 2, 9))
    schedule = serve(requests, "guarded", quantum_seconds=0.5)
    assert schedule.finish.tolist() == [8.0, 2.5, 4.5]
