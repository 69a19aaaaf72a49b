"""How an operator ends, and what holds while there are several, or none."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from campaign.faults import HeldEvents, HeldWrite
from campaign.oracle import wrong
from campaign.proxy import Call, Fault, FaultyProxy
from cluster.api import Api, PlayedKubelets, condition, eventually
from cluster.control_plane import ControlPlane
from cluster.operator_process import operator
from cluster.test_operator import ready, replica, scraped
from medha_operator.kube.kinds import LEASE, POD, REPLICA, ROUTER
from situations.recording import record

pytestmark = pytest.mark.timeout(240)  # the garbage collector looks for new kinds every 30 s


@pytest.fixture(scope="module")
def api(controlled: ControlPlane) -> Iterator[Api]:
    with Api(controlled) as client:
        yield client


@pytest.fixture
def home(api: Api, request: pytest.FixtureRequest) -> str:
    """A namespace of the test's own."""
    return api.namespace(f"t{abs(hash(request.node.name)) % 10**9}")


def test_a_replica_that_is_deleted_while_no_operator_runs_leaves_nothing(
    controlled: ControlPlane, api: Api, home: str, tmp_path: Path
) -> None:
    settings = {"namespaces": [home], "lease_namespace": home}
    with PlayedKubelets(api), operator(tmp_path, controlled.kubeconfig, "op", **settings) as process:
        api.apply(replica("r", home))
        ready(api, "r", home)
        assert process.stop() == 0
    api.delete(REPLICA, "r", home)
    # The garbage collector looks for new kinds, such as ours here, every 30 s.
    eventually(lambda: api.owned("r", home), lambda seen: not seen, seconds=90)


def test_a_second_operator_takes_over_at_once_when_the_first_ends_well(
    controlled: ControlPlane, api: Api, home: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"namespaces": [home], "lease_namespace": home, "lease_seconds": 60.0}

    def holder() -> str:
        lease = api.get(LEASE, "medha-operator", home)
        return "" if lease is None else str(lease["spec"]["holderIdentity"])

    with operator(tmp_path, controlled.kubeconfig, "first", **settings) as first:
        eventually(holder, lambda seen: seen == "default/first")
        with operator(tmp_path, controlled.kubeconfig, "second", **settings) as second:
            eventually(lambda: "waiting for the lease" in second.said())
            record("operator-follows", scraped(second))
            assert first.stop() == 0
            assert eventually(holder, lambda seen: seen == "default/second") == "default/second"


@pytest.mark.long
def test_what_a_stopped_holder_still_had_to_write_does_not_survive(
    controlled: ControlPlane, api: Api, home: str, tmp_path: Path
) -> None:
    """The first one is stopped with a write on its way, which comes late: when another acts for a changed spec."""
    settings: dict[str, Any] = {"namespaces": [home], "lease_namespace": home, "lease_seconds": 3.0}
    held = HeldWrite("configmaps")
    with FaultyProxy(controlled) as proxy, PlayedKubelets(api):
        proxy.begin(held)
        with operator(tmp_path, proxy.kubeconfig(tmp_path), "first", **settings) as first:
            api.apply(replica("r", home))
            assert held.has_finalizer.wait(30)
            first.signal(signal.SIGSTOP)
            api.apply(replica("r", home, scheduling={"policy": "edf"}, parallelism={"kv": 1}))
            with operator(tmp_path, controlled.kubeconfig, "second", **settings):
                after = ready(api, "r", home)
                held.let_go()
                assert held.has_passed.wait(10)
                first.signal(signal.SIGCONT)
                eventually(lambda: first.process.poll() is not None)  # it does not hold the lease any more
                eventually(
                    lambda: wrong(
                        api, home, replica("r", home, scheduling={"policy": "edf"}, parallelism={"kv": 1})
                    ),
                    lambda seen: not seen,
                )
                assert ready(api, "r", home)["status"]["revision"] == after["status"]["revision"]
        writes = [call for call in proxy.record.writes if not call.is_event]
        assert writes[-1] is held.call  # nothing was sent after it


def test_who_takes_over_acts_on_what_the_one_before_has_seen(
    controlled: ControlPlane, api: Api, home: str, tmp_path: Path
) -> None:
    """The second one's watch has not told it that the replica was suspended: it must not start its pods again."""
    settings: dict[str, Any] = {"namespaces": [home], "lease_namespace": home, "lease_seconds": 3.0}
    with FaultyProxy(controlled) as proxy, PlayedKubelets(api):
        proxy.begin(HeldEvents())
        with operator(tmp_path, controlled.kubeconfig, "first", **settings) as first:
            api.apply(replica("r", home))
            ready(api, "r", home)
            with operator(tmp_path, proxy.kubeconfig(tmp_path), "second", **settings) as second:
                eventually(lambda: "waiting for the lease" in second.said())
                api.apply(replica("r", home, suspend=True))
                eventually(
                    lambda: api.get(REPLICA, "r", home),
                    lambda seen: condition(seen) == ("False", "Suspended"),
                )
                eventually(lambda: api.list(POD, home), lambda seen: not seen)
                first.kill()
                eventually(lambda: "holds the lease" in second.said())
                time.sleep(1.0)  # in which it would do harm
                assert api.list(POD, home) == []
                assert [call.path for call in proxy.record.writes if "/statefulsets/" in call.path] == []


class CountedLists(Fault):
    """Counts the lists of replicas, which come once in every resync."""

    count = 0

    def listed(self, call: Call, body: bytes) -> bytes:
        self.count += call.path.endswith("/medhareplicas")
        return body


@pytest.mark.long
def test_at_rest_a_resync_writes_nothing(
    controlled: ControlPlane, api: Api, home: str, tmp_path: Path
) -> None:
    """Neither for a Secret that was copied or may not be read, nor for what the API server writes in other words."""
    elsewhere = api.namespace(f"{home}-router")
    settings: dict[str, Any] = {
        "namespaces": [home],
        "lease_namespace": home,
        "resync_seconds": 2.0,
        "routers": [{"name": "front", "namespace": elsewhere}],
    }
    labels = {"app": "front"}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
    router = {"replicas": 0, "selector": {"matchLabels": labels}, "template": pod}
    api.call("POST", ROUTER.path(elsewhere), {"metadata": {"name": "front"}, "spec": router})
    here = {"routerRef": {"name": "front", "namespace": elsewhere}}
    cpu = {"resources": {"accelerator": "none", "requests": {"cpu": "1000m"}}}
    with FaultyProxy(controlled) as proxy, PlayedKubelets(api):
        proxy.begin(lists := CountedLists())
        with operator(tmp_path, proxy.kubeconfig(tmp_path), "op", **settings):
            api.apply(replica("r", home, **here, **cpu))
            api.apply(replica("still", home, suspend=True))
            ready(api, "r", home)
            eventually(
                lambda: api.get(REPLICA, "still", home),
                lambda seen: condition(seen) == ("False", "Suspended"),
            )
            eventually(lambda: (ready(api, "r", home)["status"]).get("newestMember"))
            settled = lists.count
            eventually(lambda: lists.count >= settled + 2)
            before = list(proxy.record.writes)
            eventually(lambda: lists.count >= settled + 5)
            assert proxy.record.writes == before
        names = {name for kind, name in proxy.record.created if kind == "secrets"}
        assert any(name.startswith("r-enrolment-") for name in names)
        assert any(name.startswith("still-keys-") for name in names)
    api.delete(REPLICA, "r", home)
    api.delete(REPLICA, "still", home)


def test_a_new_replica_costs_a_call_for_each_child_and_two_more(plane: ControlPlane, tmp_path: Path) -> None:
    """Without controllers there are no pods, whose every step is a status of its own."""
    settings: dict[str, Any] = {"namespaces": ["default"], "lease_namespace": "default"}
    with Api(plane) as api, FaultyProxy(plane) as proxy:
        with operator(tmp_path, proxy.kubeconfig(tmp_path), "op", **settings):
            api.apply(replica("cheap", "default"))
            eventually(lambda: api.get(REPLICA, "cheap"), lambda seen: seen is not None and "status" in seen)
            eventually(lambda: ("statefulsets", "cheap-l1") in proxy.record.created)  # the last of its writes
        children = sum(proxy.record.created.values())
        assert (
            children == 8
        )  # ControllerRevision, Secret, Service, NetworkPolicy, PDB, ConfigMap, two StatefulSets
        reads = [call.path for call in proxy.record.reads if call.path.endswith("/cheap")]
        assert len(reads) + len(proxy.record.writes) == children + 2, (  # whose Service is it, and the status
            reads
        )
        api.delete(REPLICA, "cheap")
