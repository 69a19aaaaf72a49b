"""The record of pods, and how it describes pods that are too many; no cluster is needed."""

from __future__ import annotations

from campaign.history import History


def _event(kind: str, of: str, name: str, uid: str, version: int, owner: str = "") -> dict[str, object]:
    metadata = {
        "name": name,
        "uid": uid,
        "resourceVersion": str(version),
        "ownerReferences": [{"uid": owner}],
    }
    return {"type": kind, "object": {"kind": of, "metadata": metadata}}


def _history(*events: dict[str, object]) -> History:
    history = History()
    for event in events:
        history.take(event)
    return history


def test_each_pod_counts_once_whatever_becomes_of_it() -> None:
    history = _history(
        _event("ADDED", "StatefulSet", "r-l0", "set", 1),
        _event("ADDED", "Pod", "r-l0-0", "first", 2, "set"),
        _event("MODIFIED", "Pod", "r-l0-0", "first", 3, "set"),
        _event("DELETED", "Pod", "r-l0-0", "first", 4, "set"),
        _event("ADDED", "Pod", "r-l0-0", "second", 5, "set"),
    )
    assert history.times == {"r-l0-0": 2}
    assert history.late == []


def test_a_pod_of_a_set_that_had_gone_is_told_apart() -> None:
    before = _event("ADDED", "Pod", "r-l1-0", "first", 2, "set")
    gone = _event("DELETED", "StatefulSet", "r-l1", "set", 7)
    after = _event("ADDED", "Pod", "r-l1-0", "second", 8, "set")
    usual = _history(before, gone)
    assert usual.beyond(usual) == ""
    assert _history(before, gone, after).beyond(usual) == (
        "r-l1-0 2 times instead of 1, r-l1-0 when its StatefulSet had been deleted"
    )
    assert _history(after, before, gone).late == ["r-l1-0"]  # two watches: their events may come in any order
