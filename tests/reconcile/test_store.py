"""A store never goes back to an older version, whatever comes late, and reports only changes that matter."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from medha_operator.index import Index
from medha_operator.kube.kinds import Key
from medha_operator.kube.store import Store, WentBack

REPLICA = Key("MedhaReplica", "default", "r")


def pod(
    version: int, *, phase: str = "Pending", node: str | None = None, name: str = "r-l0-0"
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "default",
            "uid": "u",
            "resourceVersion": str(version),
            "creationTimestamp": "2030-01-01T00:00:00Z",
            "labels": {"medha.dev/replica": "r", "medha.dev/lane": "0"},
        },
        "spec": {"nodeName": node} if node else {},
        "status": {"phase": phase},
    }


def relist(store: Store, documents: list[dict[str, Any]], version: str, namespace: str | None = None) -> None:
    """Take in a list of one page."""
    with store.listing(namespace) as listing:
        store.read_page(listing, documents, version)


@pytest.fixture
def delivered() -> list[Key]:
    return []


@pytest.fixture
def pods(delivered: list[Key]) -> Store:
    return Index(delivered.append).stores["Pod"]


def test_an_event_that_comes_late_changes_nothing(pods: Store, delivered: list[Key]) -> None:
    pods.offer(pod(7, phase="Failed"))
    pods.see("ADDED", pod(5))
    (entry,) = pods.of(REPLICA)
    assert (entry.version, entry.document.is_failed) == (7, True)
    assert delivered == [REPLICA]


def test_an_answer_does_not_bring_back_what_the_watch_has_reported_as_gone(pods: Store) -> None:
    pods.see("ADDED", pod(5))
    pods.see("DELETED", pod(9))
    pods.offer(pod(8))  # the answer to a write before the deletion, read after it
    assert pods.of(REPLICA) == []


def test_an_object_of_the_same_name_that_was_made_since_is_not_taken_for_the_deleted_one(pods: Store) -> None:
    pods.offer(pod(12))
    pods.see("DELETED", pod(9))
    assert [entry.version for entry in pods.of(REPLICA)] == [12]


def test_a_list_ends_what_is_not_in_it_and_keeps_what_was_written_after_it(pods: Store) -> None:
    pods.see("ADDED", pod(5, name="old"))
    pods.offer(pod(11, name="new"))
    relist(pods, [pod(6)], "10")
    assert sorted(entry.document.name for entry in pods.of(REPLICA)) == ["new", "r-l0-0"]


def test_events_that_come_after_a_list_that_knew_them_change_nothing(pods: Store) -> None:
    relist(pods, [], "10")  # the pod was made and deleted before
    pods.see("ADDED", pod(5))
    assert pods.of(REPLICA) == []


def test_what_is_deleted_while_a_list_is_read_stays_deleted(pods: Store) -> None:
    """The leader's first list is read while the watch runs, which may be ahead of the list."""
    pods.see("ADDED", pod(5))
    with pods.listing(None) as listing:
        pods.read_page(listing, [pod(5)], "10")
        pods.see("DELETED", pod(12))
    assert pods.of(REPLICA) == []
    pods.see("ADDED", pod(14))
    with pods.listing(None) as listing:
        pods.see("DELETED", pod(16))  # and made again before the list
        pods.read_page(listing, [pod(18)], "20")
    assert [entry.version for entry in pods.of(REPLICA)] == [18]


def test_a_list_is_taken_in_at_its_end_or_not_at_all(pods: Store, delivered: list[Key]) -> None:
    pods.see("ADDED", pod(5))
    with pods.listing(None) as listing:
        pods.read_page(listing, [pod(6, name="a")], "10")
        assert [entry.document.name for entry in pods.of(REPLICA)] == ["r-l0-0"]
        pods.read_page(listing, [pod(7, name="b")], "10")
    assert sorted(entry.document.name for entry in pods.of(REPLICA)) == ["a", "b"]
    with suppress(ZeroDivisionError), pods.listing(None) as listing:
        pods.read_page(listing, [], "20")
        raise ZeroDivisionError
    assert len(pods.of(REPLICA)) == 2


def test_a_list_that_ends_after_a_newer_one_brings_nothing_back(pods: Store) -> None:
    """The leader's first list may overlap with that of a reflector whose watch was refused."""
    relist(pods, [pod(5)], "10")
    with pods.listing(None) as older:
        pods.read_page(older, [pod(5)], "15")
        relist(pods, [], "20")  # it was deleted in between; the watch that follows begins at 20
    assert pods.of(REPLICA) == []


def test_an_unchanged_object_is_not_read_again(pods: Store) -> None:
    pods.see("ADDED", pod(5))
    (known,) = pods.of(REPLICA)
    relist(pods, [pod(5)], "10")
    assert pods.of(REPLICA)[0] is known


def test_a_list_of_one_namespace_changes_no_other(pods: Store) -> None:
    pods.see("ADDED", pod(5))
    relist(pods, [], "10", "elsewhere")
    assert len(pods.of(REPLICA)) == 1


def test_an_event_of_one_namespace_makes_no_answer_from_another_too_late(pods: Store) -> None:
    relist(pods, [], "20", "elsewhere")
    pods.see("BOOKMARK", {"metadata": {"resourceVersion": "21"}}, "elsewhere")
    relist(pods, [], "10", "default")
    pods.offer(pod(12))
    assert [entry.version for entry in pods.of(REPLICA)] == [12]
    pods.see("BOOKMARK", {"metadata": {"resourceVersion": "30"}}, "default")
    pods.offer(pod(15, phase="Failed"))
    assert [entry.version for entry in pods.of(REPLICA)] == [12]


def test_a_list_from_before_what_was_known_when_it_was_asked_for_is_no_view_to_go_on_with(
    pods: Store,
) -> None:
    relist(pods, [pod(6)], "10")
    pods.see("BOOKMARK", {"metadata": {"resourceVersion": "40"}})
    with pytest.raises(WentBack, match=r"version 39, older than the known version 40.*backup"):
        relist(pods, [], "39")
    pods = Index(lambda _: None).stores["Pod"]
    with pods.listing(None) as listing:
        pods.see("BOOKMARK", {"metadata": {"resourceVersion": "40"}})
        pods.read_page(listing, [pod(6)], "39")  # asked for before the watch told more
    assert len(pods.of(REPLICA)) == 1


def test_an_object_that_was_read_corrects_what_the_watch_has_not_reported(
    pods: Store, delivered: list[Key]
) -> None:
    pods.see("ADDED", pod(5))
    pods.see("ADDED", pod(9, name="other"))
    delivered.clear()
    pods.correct("default", "r-l0-0", pods.entry("default", "r-l0-0"), pod(7, phase="Failed"))
    assert pods.facts("default", "r-l0-0").is_failed
    pods.correct("default", "r-l0-0", pods.entry("default", "r-l0-0"), None)
    assert pods.entry("default", "r-l0-0") is None
    assert delivered == [REPLICA, REPLICA]


def test_a_correction_that_comes_after_the_watch_changes_nothing(pods: Store) -> None:
    pods.see("ADDED", pod(5))
    seen = pods.entry("default", "r-l0-0")
    pods.see("DELETED", pod(9))
    pods.correct("default", "r-l0-0", seen, pod(8))  # asked for before, answered after
    assert pods.of(REPLICA) == []
    pods.see("ADDED", pod(12))
    pods.correct("default", "r-l0-0", None, None)
    pods.correct("default", "r-l0-0", seen, None)
    assert [entry.version for entry in pods.of(REPLICA)] == [12]


def test_a_change_that_matters_to_no_plan_asks_for_no_reconcile(pods: Store, delivered: list[Key]) -> None:
    pods.see("ADDED", pod(5))
    delivered.clear()
    pods.see("MODIFIED", pod(6))  # say, an annotation
    assert delivered == []
    assert pods.of(REPLICA)[0].document.resource_version == "6"  # which a deletion must name
    pods.see("MODIFIED", pod(7, phase="Failed"))
    assert delivered == [REPLICA]


def test_a_node_that_changes_asks_to_reconcile_the_replicas_that_are_on_it(delivered: list[Key]) -> None:
    index = Index(delivered.append)
    index.stores["Pod"].see("ADDED", pod(5, node="a"))
    delivered.clear()
    node: dict[str, Any] = {"kind": "Node", "metadata": {"name": "a", "uid": "n", "resourceVersion": "6"}}
    index.stores["Node"].see("ADDED", node | {"spec": {}})
    index.stores["Node"].see("MODIFIED", node | {"metadata": node["metadata"] | {"resourceVersion": "7"}})
    assert delivered == [REPLICA]  # of the first sight; a heartbeat is no change
    node["metadata"] |= {"resourceVersion": "8"}
    index.stores["Node"].see("MODIFIED", node | {"spec": {"unschedulable": True}})
    assert delivered == [REPLICA, REPLICA]


def test_the_status_of_a_statefulset_matters_only_until_its_controller_knows_of_a_change(
    delivered: list[Key],
) -> None:
    store = Index(delivered.append).stores["StatefulSet"]

    def tell(version: int, generation: int, **status: int) -> int:
        """Return the number of reconciles that it requests."""
        delivered.clear()
        metadata = {
            "name": "r-l0",
            "namespace": "default",
            "uid": "s",
            "labels": {"medha.dev/replica": "r"},
            "resourceVersion": str(version),
            "generation": generation,
        }
        store.see("MODIFIED", {"kind": "StatefulSet", "metadata": metadata, "spec": {}, "status": status})
        return len(delivered)

    assert tell(5, 1) == 1
    assert tell(6, 1, observedGeneration=1, readyReplicas=1) == 0
    assert tell(7, 2, observedGeneration=1, readyReplicas=1) == 1
    assert tell(8, 2, observedGeneration=2, readyReplicas=1) == 1
    assert tell(9, 2, observedGeneration=2, readyReplicas=0) == 0


def test_an_object_that_makes_no_sense_is_passed_over_and_reported_once(
    pods: Store, caplog: pytest.LogCaptureFixture
) -> None:
    spoilt = pod(6, name="spoilt")
    spoilt["metadata"]["creationTimestamp"] = "yesterday"
    relist(pods, [spoilt, pod(5)], "10")
    pods.see("MODIFIED", spoilt | {"metadata": spoilt["metadata"] | {"resourceVersion": "11"}})
    assert [entry.document.name for entry in pods.of(REPLICA)] == ["r-l0-0"]
    assert [record.getMessage() for record in caplog.records] == [
        "Pod default/spoilt cannot be read and is passed over"
    ]


@pytest.mark.parametrize("lane", ["x", "", "-1", "\u0662", "1.0"])
def test_a_lane_that_is_no_number_is_no_lane(pods: Store, lane: str) -> None:
    document = pod(5)
    document["metadata"]["labels"]["medha.dev/lane"] = lane
    pods.see("ADDED", document)
    assert [entry.document.lane for entry in pods.of(REPLICA)] == [-1]
