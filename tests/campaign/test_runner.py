"""Plans, their faults, and how a run is judged by its record; no cluster is needed."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest

from campaign.__main__ import plans
from campaign.faults import KilledWhileEnding, UnsureReads
from campaign.proxy import Call, Record
from campaign.runner import Outcome, done_too_often
from campaign.scenarios import SCENARIOS


def record(created: dict[str, int], deleted: dict[str, int]) -> Record:
    return Record(created=_counted(created), deleted=_counted(deleted))


def _counted(counts: dict[str, int]) -> Counter[tuple[str, str]]:
    return Counter({(name.split("/")[0], name.split("/")[1]): count for name, count in counts.items()})


def test_what_is_made_or_ended_once_more_than_usual_is_wrong_but_for_secrets() -> None:
    usual = record({"services/r": 1, "secrets/r": 1}, {"pods/r-l0-0": 1})
    seen = record({"services/r": 2, "secrets/r": 2}, {"pods/r-l0-0": 2})
    assert done_too_often(usual, usual) == []
    assert done_too_often(seen, usual) == [
        "services r was created 2 times instead of 1",
        "pods r-l0-0 was deleted 2 times instead of 1",
    ]


def test_of_an_operator_that_saw_the_past_only_what_starts_pods_is_judged() -> None:
    usual = record({"services/r": 1, "statefulsets/r-l0": 1}, {})
    seen = record({"services/r": 2, "statefulsets/r-l0": 2}, {"services/r": 1})
    assert done_too_often(seen, usual, {"statefulsets"}) == [
        "statefulsets r-l0 was created 2 times instead of 1",
        "services r was deleted 1 times instead of 0",
    ]


def test_a_pod_whose_set_goes_too_may_be_ended_by_the_operator_or_by_the_garbage_collector() -> None:
    usual = record({}, {"pods/r-l1-0": 1, "statefulsets/r-l1": 1, "statefulsets/r-l2": 1})
    assert done_too_often(record({}, {"pods/r-l1-0": 2, "pods/r-l2-0": 1}), usual) == []
    assert done_too_often(record({}, {"pods/r-l1-0": 3, "pods/r-l2-0": 2, "pods/r-l0-0": 1}), usual) == [
        "pods r-l1-0 was deleted 3 times instead of 2",
        "pods r-l2-0 was deleted 2 times instead of 1",
        "pods r-l0-0 was deleted 1 times instead of 0",
    ]


def test_a_run_whose_fault_never_happened_is_not_well() -> None:
    assert Outcome("apply/kill-before/99").verdict == "well"
    assert Outcome("apply/kill-before/99", is_skipped=True).verdict != "well"
    assert Outcome("apply/kill-before/99", is_skipped=True, wrong=["an orphan"]).verdict == "an orphan"


def test_a_resource_that_is_deleted_is_disturbed_while_it_goes_and_no_first_step_twice() -> None:
    writes = [Call(number, "PATCH", "/x", "") for number in range(1, 4)]
    seen = Record(writes=writes, steps=[2], ending_events=2)
    first = plans(SCENARIOS["delete"], seen, 0, is_first_known=False, seeds=1)
    again = plans(SCENARIOS["delete"], seen, 0, is_first_known=True, seeds=1)
    assert {plan.number for plan in first if plan.fault == "kill-before"} == {1, 2, 3}
    assert {plan.number for plan in again if plan.fault == "kill-before"} == {3}
    assert [plan.number for plan in again if plan.fault == "kill-ending"] == [0, 1, 2]
    assert not [
        plan for plan in plans(SCENARIOS["apply"], seen, 0, is_first_known=False) if "ending" in plan.fault
    ]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_kill_while_it_ends_comes_at_news_of_objects_after_the_deletion_alone(number: int) -> None:
    seen: list[str] = []
    fault = KilledWhileEnding(number, lambda: seen.append("killed"))
    call = Call(0, "GET", "/api/v1/namespaces/n/pods", "watch=1")

    def tell(kind: str) -> None:
        seen.append(kind)
        asyncio.run(fault.notice(call, json.dumps({"type": kind}).encode()))

    tell("ADDED")
    fault.begin()
    for kind in ("BOOKMARK", "MODIFIED", "BOOKMARK", "DELETED", "DELETED"):
        tell(kind)
    assert seen.index("killed") == [1, 3, 5][number]
    assert (seen.count("killed"), fault.times) == (1, 1)


def test_reads_are_refused_or_cut_until_that_is_over_and_it_is_counted() -> None:
    fault = UnsureReads(3)
    call = Call(0, "GET", "/api/v1/namespaces/n/pods", "")
    refused = [answer for _ in range(100) if (answer := asyncio.run(fault.before_read(call))) is not None]
    cut = [kept for _ in range(100) if (kept := fault.cut(call, b"12345678")) is not None]
    assert {status for status, _ in refused} == {429, 500, 503, 504}
    assert cut
    assert max(cut) < 8
    assert fault.times == len(refused) + len(cut)
    fault.is_over = True
    assert all(asyncio.run(fault.before_read(call)) is None for _ in range(100))
    assert all(fault.cut(call, b"12345678") is None for _ in range(100))
