"""The judgement of a run by what was done in it; no cluster is needed."""

from __future__ import annotations

from collections import Counter

from campaign.proxy import Record
from campaign.runner import done_too_often


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


def test_a_pod_whose_set_goes_too_may_be_ended_by_the_operator_or_by_the_garbage_collector() -> None:
    usual = record({}, {"pods/r-l1-0": 1, "statefulsets/r-l1": 1, "statefulsets/r-l2": 1})
    assert done_too_often(record({}, {"pods/r-l1-0": 2, "pods/r-l2-0": 1}), usual) == []
    assert done_too_often(record({}, {"pods/r-l1-0": 3, "pods/r-l2-0": 2, "pods/r-l0-0": 1}), usual) == [
        "pods r-l1-0 was deleted 3 times instead of 2",
        "pods r-l2-0 was deleted 2 times instead of 1",
        "pods r-l0-0 was deleted 1 times instead of 0",
    ]
