"""Measure how fast the operator makes replicas of 8 pods, beside a compiled client that sends the same objects.

    python benchmarks/operator_scale.py --quick
    python benchmarks/operator_scale.py --json benchmarks/results/operator_scale.json

The API server is real (tests/cluster), and all processes are on this machine:

* writes: no controllers run. MedhaReplicas exist; the operator starts and makes all of their objects. Then a client in
  Go makes as many other replicas over 32 connections. It sends the objects that the operator's own plans name, and then
  the operator's other writes: statuses and events. Both take turns in one run. The ratio to both kinds of writes shows
  what is lost to anything but the API server. The ratio to the objects alone counts statuses and events against the
  operator only.
* pods: controllers and a scheduler run, and KWOK's nodes of 64 GPUs take the pods. The time from the first object until
  all pods are Ready is measured for MedhaReplicas and for the same StatefulSets, both by `kubectl create`. It is also
  measured for all objects that the operator would make, sent by the client in Go (100 replicas only): no operator could
  add less. Each is measured on a fresh control plane.
* lists: all objects exist, and an operator without the lease lists them again and again. Its memory is measured.
* alone: the same as *pods* for one replica at a time, in turn with its StatefulSets, on a control plane that has nothing
  else to do.

The exit status is 1 if a claim does not hold. The goals are set for the full run, with up to 1,000 replicas, so a quick run
only prints them. (A script called `operator.py` would hide Python's module of that name from all that it imports.)
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from harness import ROOT, Row, claim, exit_with, parser, progress, report, table
from prometheus_client.parser import text_string_to_metric_families

sys.path.append(str(ROOT / "tests"))  # for the cluster that tests start

from cluster.api import Api, condition
from cluster.binaries import build
from cluster.control_plane import ControlPlane, control_plane
from cluster.definitions import define
from cluster.keys import ADMIN
from cluster.kwok import with_kwok
from cluster.operator_process import Operator, operator
from medha_operator.key_secrets import replica_keys
from medha_operator.kube.kinds import CHILDREN, EVENT, KINDS, LEASE, MANAGER, REPLICA, SECRET
from medha_operator.operator_settings import OperatorSettings
from medha_operator.replica.actions import Apply, CreateKeys, RecordEvent, SetStatus
from medha_operator.replica.manifests import Owner
from medha_operator.replica.observed import Observed
from medha_operator.replica.plan import plan
from medha_operator.status_fields import ReplicaStatus

CONNECTIONS = 32
STAGES, LANES = 4, 2
PODS = STAGES * LANES
NODES, GPUS = 150, 64
LEASE_SECONDS = 15.0
LEAST_RATIO = 0.6
MOST_FURTHER_CALLS = 2
"""The most calls for a replica beyond one for each of its objects."""
MOST_ADDED_PERCENT = 10.0
LISTED_SECONDS = 10.0
"""The time between two lists of everything when their memory is measured."""
LISTS = 4
LEAST_MEASURED = 100
"""The number of replicas with which the client's objects alone are measured, too."""
_LIMIT_SECONDS = 400.0
_POLL_SECONDS = 0.05
TYPE = {"apiVersion": REPLICA.api_version, "kind": REPLICA.name}
_APPLY = "application/apply-patch+yaml"

Document = dict[str, Any]


# --- what is sent -----------------------------------------------------------------------------------------


def replicas(namespace: str, count: int) -> list[Document]:
    spec = {
        "model": {"name": "m", "source": {"hostPath": {"path": "/models/m"}}},
        "parallelism": {"tensor": 1, "stream": STAGES, "kv": LANES},
    }
    return [
        {**TYPE, "metadata": {"name": f"r{index}", "namespace": namespace}, "spec": spec}
        for index in range(count)
    ]


def creation(document: Document) -> Document:
    path = KINDS[document["kind"]].path(document["metadata"]["namespace"])
    return {"method": "POST", "path": path, "type": "application/json", "body": document}


def planned(resource: Document) -> tuple[list[Document], list[Document]]:
    """Return the objects that the operator makes of a new replica, and the calls that write its status and events."""
    metadata = resource["metadata"]
    name, namespace, uid = metadata["name"], metadata["namespace"], metadata["uid"]
    observed = Observed(
        name=name,
        namespace=namespace,
        uid=uid,
        generation=metadata["generation"],
        resource_version=metadata["resourceVersion"],
        spec=resource["spec"],
        status=ReplicaStatus(),
    )
    objects, further = [], []
    reference = TYPE | {key: metadata[key] for key in ("name", "namespace", "uid")}
    for action in plan(observed, datetime.now(UTC).timestamp(), OperatorSettings()).actions:
        match action:
            case CreateKeys(secret):
                objects.append(replica_keys(Owner(name, namespace, uid), secret))
            case Apply(manifest):
                objects.append(manifest)
            case SetStatus(written):
                head = {"name": name, "namespace": namespace, "resourceVersion": metadata["resourceVersion"]}
                status = written.model_dump(mode="json", by_alias=True, exclude_none=True)
                body = {**TYPE, "metadata": head, "status": status}
                path = REPLICA.path(namespace, name, "status")
                further.append({"method": "PUT", "path": path, "type": "application/json", "body": body})
            case RecordEvent(reason, message):
                event = {
                    "apiVersion": EVENT.api_version,
                    "kind": EVENT.name,
                    "metadata": {"name": f"{name}.{len(further)}", "namespace": namespace},
                    "involvedObject": reference,
                    "reason": reason,
                    "message": message,
                    "type": "Normal",
                }
                further.append(creation(event))
    return objects, further


def calls_for(resource: Document) -> tuple[list[Document], list[Document]]:
    """Return every write of a new replica as the operator sends it: those of its objects, and the others."""
    objects, further = planned(resource)
    calls: list[Document] = []
    for document in objects:
        if document["kind"] == SECRET.name:
            calls.append(creation(document))
        else:
            metadata = document["metadata"]
            path = KINDS[document["kind"]].path(metadata["namespace"], metadata["name"])
            query = f"?fieldManager={MANAGER}&force=true"
            calls.append({"method": "PATCH", "path": path + query, "type": _APPLY, "body": document})
    return calls, further


def send(plane: ControlPlane, calls: list[Document]) -> float:
    """Send calls over `CONNECTIONS` connections with the compiled client; return the seconds that it took."""
    certificate, key = plane.keys.client(*ADMIN)
    program = build(["send"])["send"]
    done = subprocess.run(
        [str(program), plane.url, str(plane.keys.authority), str(certificate), str(key), str(CONNECTIONS)],
        input="\n".join(json.dumps(call) for call in calls),
        capture_output=True,
        text=True,
        check=True,
    )
    result = json.loads(done.stdout)
    assert result["failed"] == 0, result["error"]
    return float(result["seconds"])


# --- what is seen -----------------------------------------------------------------------------------------


class Watched:
    """An operator's process, its metrics and its use of CPU and memory."""

    def __init__(self, running: Operator) -> None:
        self._running = running
        self._process = psutil.Process(running.process.pid)

    def metrics(self) -> dict[str, float]:
        """Return sums over labels, each bucket of a histogram as `name_bucket le`; empty if there is no answer."""
        assert self._running.process.poll() is None, self._running.said()[-2000:]
        url = f"http://127.0.0.1:{self._running.metrics_port}/metrics"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                text = answer.read().decode()
        except OSError:
            return {}
        sums = {"medha_operator_writes_total": 0.0}  # it has no sample before the first write
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = f"{sample.name} {sample.labels['le']}" if "le" in sample.labels else sample.name
                sums[name] = sums.get(name, 0.0) + sample.value
        return sums

    def cpu_seconds(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def resident_bytes(self) -> int:
        return int(self._process.memory_info().rss)

    def most_resident_bytes(self) -> int:
        """Return the peak of its resident memory until now."""
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii")
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


def quantile_seconds(metrics: dict[str, float], name: str, share: float) -> float:
    """Return a quantile of a histogram, interpolated linearly within its bucket."""
    buckets = sorted(
        (float(key.split()[1]), value) for key, value in metrics.items() if key.startswith(f"{name}_bucket ")
    )
    wanted = share * buckets[-1][1]
    lower, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= wanted:
            return (
                lower
                if bound == float("inf")
                else lower + (bound - lower) * (wanted - below) / (count - below)
            )
        lower, below = bound, count
    raise AssertionError(buckets)


def wait_until(holds: Callable[[], bool], pause_seconds: float) -> float:
    """Wait until `holds` is true; return the time."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "nothing more happens"
        time.sleep(pause_seconds)
    return time.monotonic()


def all_written(watched: Watched, began: float, expected: int) -> float:
    """Wait until the operator has made so many writes; return the time.

    Each poll costs the operator CPU, so polls are rare before the end.
    """
    while (done := watched.metrics()["medha_operator_writes_total"]) < expected:
        elapsed = time.monotonic() - began
        assert elapsed < _LIMIT_SECONDS, "nothing more happens"
        left = (expected - done) * elapsed / max(done, 1.0)  # at the rate until now, which rises at first
        time.sleep(max(_POLL_SECONDS, min(left / 2, elapsed / 4)))
    return time.monotonic()


def count_of(api: Api, path: str) -> int:
    """Return the number of objects in a collection, as the API server counts them."""
    page = api.call("GET", path, limit="1")
    return len(page["items"] or []) + int(page["metadata"].get("remainingItemCount", 0))


def reads(api: Api) -> float:
    """Return the number of GETs that the API server got for replicas, and for objects of kinds that belong to them."""
    plurals = {REPLICA.plural, SECRET.plural, *(kind.plural for kind in CHILDREN)}
    return sum(
        sample.value
        for family in text_string_to_metric_families(api.text("/metrics"))
        for sample in family.samples
        if sample.name == "apiserver_request_total"
        and sample.labels["verb"] == "GET"
        and sample.labels["resource"] in plurals
    )


# --- writes -----------------------------------------------------------------------------------------------


def measure_writes(folder: Path, count: int, rounds: int) -> Row:
    """Measure the replicas a second of the operator, and of the client that sends the same."""
    with bare_plane(folder / f"writes-{count}") as plane, Api(plane) as api:
        turns = [one_turn(plane, api, folder, count, turn) for turn in range(rounds)]
    middle = {
        name: statistics.median(turn[name] for turn in turns)
        for name in ("operator", "client", "objects_alone")
    }
    last = turns[-1]

    def ratio(peer: str) -> float:
        return round(statistics.median(turn["operator"] / turn[peer] for turn in turns), 3)

    return {
        "replicas": count,
        "rounds": rounds,
        "objects_per_replica": last["objects"],
        "operator_replicas_per_second": round(middle["operator"], 1),
        "client_replicas_per_second": round(middle["client"], 1),
        "client_objects_alone_per_second": round(middle["objects_alone"], 1),
        "ratio": ratio("client"),
        "ratio_to_objects_alone": ratio("objects_alone"),
        "calls_per_replica": round(max(turn["calls"] for turn in turns), 2),
        "operator_cpu_ms_per_replica": round(statistics.median(turn["cpu_ms"] for turn in turns), 2),
        "operator_resident_mb": round(last["resident_mb"]),
    }


def one_turn(plane: ControlPlane, api: Api, folder: Path, count: int, turn: int) -> Row:
    mine, other = f"operator-{turn}", f"client-{turn}"
    for namespace in (mine, other):
        api.namespace(namespace)
    send(plane, [creation(document) for document in replicas(mine, count)])
    objects, further = planned(api.list(REPLICA, mine)[0])
    expected = count * (len(objects) + len(further))
    read_before = reads(api)
    with operator(folder, plane.kubeconfig, f"op-{count}-{turn}", lease_seconds=LEASE_SECONDS) as running:
        watched = Watched(running)
        wait_until(lambda: watched.metrics().get("medha_operator_leading") == 1.0, 0.01)
        began, cpu = time.monotonic(), watched.cpu_seconds()
        ended = all_written(watched, began, expected)
        used = watched.cpu_seconds() - cpu
        time.sleep(1.0)  # the time for its other writes
        writes, resident = watched.metrics()["medha_operator_writes_total"], watched.resident_bytes()
    calls = writes + reads(api) - read_before
    assert all("status" in one for one in api.list(REPLICA, mine))

    send(plane, [creation(document) for document in replicas(other, count)])
    both = [calls_for(resource) for resource in api.list(REPLICA, other)]
    alone, besides = (send(plane, [call for calls in both for call in calls[part]]) for part in range(2))
    for kind in {document["kind"] for document in objects}:
        assert count_of(api, KINDS[kind].path(mine)) == count_of(api, KINDS[kind].path(other)), kind
    for namespace in (mine, other):  # so that the next operator does not look at them
        api.call("DELETE", REPLICA.path(namespace))
    return {
        "objects": len(objects),
        "operator": count / (ended - began),
        "client": count / (alone + besides),
        "objects_alone": count / alone,
        "calls": calls / count,
        "cpu_ms": used / count * 1e3,
        "resident_mb": resident / 1e6,
    }


@contextmanager
def bare_plane(folder: Path) -> Iterator[ControlPlane]:
    with control_plane(folder, controllers=False, scheduler=False) as plane:
        define(plane)
        yield plane


# --- pods -------------------------------------------------------------------------------------------------


def measure_pods(folder: Path, count: int) -> Row:
    """Measure the seconds until all pods are Ready, by the operator and by kubectl, and the operator's costs."""
    theirs = ready_by_kubectl(folder / f"kubectl-{count}", count)
    least = ready_by_client(folder / f"client-{count}", count) if count == LEAST_MEASURED else None
    ours = ready_by_operator(folder / f"operator-{count}", count)
    added = 100 * (ours.pop("pods_seconds") / theirs - 1)
    return {
        "replicas": count,
        "pods": count * PODS,
        "kubectl_pods_seconds": round(theirs, 2),
        "operator_pods_seconds": round(theirs * (1 + added / 100), 2),
        "added_percent": round(added, 1),
        **({} if least is None else {"client_added_percent": round(100 * (least / theirs - 1), 1)}),
        **ours,
    }


def ready_by_kubectl(folder: Path, count: int) -> float:
    with plane_with_nodes(folder) as plane, Api(plane) as api:
        sets = stateful_sets(calls_of_nobody(count))
        began = time.monotonic()
        create(plane, folder, sets)
        return all_ready(api, count * PODS) - began


def ready_by_client(folder: Path, count: int) -> float:
    with plane_with_nodes(folder) as plane, Api(plane) as api:
        calls = calls_of_nobody(count)
        began = time.monotonic()
        send(plane, calls)
        return all_ready(api, count * PODS) - began


def calls_of_nobody(count: int, first: int = 0) -> list[Document]:
    """Return the calls that make the objects of replicas that do not exist themselves, numbered from `first` on."""
    calls: list[Document] = []
    for document in replicas("default", first + count)[first:]:
        document["metadata"] |= {"uid": "0", "generation": 1, "resourceVersion": "1"}
        calls += calls_for(document)[0]
    for call in calls:
        call["body"]["metadata"].pop("ownerReferences", None)
    return calls


def ready_by_operator(folder: Path, count: int) -> Row:
    with plane_with_operator(folder) as (plane, api, watched):
        cpu, resident = watched.cpu_seconds(), watched.resident_bytes()
        began = time.monotonic()
        create(plane, folder, replicas("default", count))
        pods_ready = all_ready(api, count * PODS)
        described = wait_until(lambda: are_ready(api, count), 0.2)
        metrics = watched.metrics()
        name = "medha_operator_reconcile_seconds"
        return {
            "pods_seconds": pods_ready - began,
            "status_seconds": round(described - began, 2),
            "reconcile_p50_ms": round(1e3 * quantile_seconds(metrics, name, 0.5), 1),
            "reconcile_p99_ms": round(1e3 * quantile_seconds(metrics, name, 0.99), 1),
            "writes_per_replica": round(metrics["medha_operator_writes_total"] / count, 2),
            "operator_cpu_ms_per_replica": round(1e3 * (watched.cpu_seconds() - cpu) / count, 1),
            "operator_kb_per_replica": round((watched.resident_bytes() - resident) / 1e3 / count, 1),
            "operator_resident_mb": round(watched.resident_bytes() / 1e6),
        }


@contextmanager
def plane_with_nodes(folder: Path) -> Iterator[ControlPlane]:
    with control_plane(folder) as plane, with_kwok(plane, NODES, GPUS):
        define(plane)
        yield plane


@contextmanager
def plane_with_operator(folder: Path) -> Iterator[tuple[ControlPlane, Api, Watched]]:
    """Provide a control plane with nodes, and an operator that leads."""
    with (
        plane_with_nodes(folder) as plane,
        Api(plane) as api,
        operator(folder, plane.kubeconfig, lease_seconds=LEASE_SECONDS) as running,
    ):
        watched = Watched(running)
        wait_until(lambda: watched.metrics().get("medha_operator_leading") == 1.0, 0.05)
        yield plane, api, watched


def create(plane: ControlPlane, folder: Path, documents: list[Document]) -> None:
    file = folder / "created.json"
    file.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": documents}))
    plane.kubectl("create", "--validate=false", "-f", str(file))


def stateful_sets(calls: list[Document]) -> list[Document]:
    return [call["body"] for call in calls if call["body"]["kind"] == "StatefulSet"]


def measure_alone(folder: Path, rounds: int) -> Row:
    """Measure the seconds until the pods of one replica are Ready, by the operator and by kubectl, in turn."""
    ours, theirs = [], []
    with plane_with_operator(folder) as (plane, api, _):
        for turn in range(2 * rounds):
            taken, created = (
                (ours, replicas("default", turn + 1)[-1:])
                if turn % 2
                else (theirs, stateful_sets(calls_of_nobody(1, turn)))
            )
            time.sleep(2.0)  # the time for what the previous turn has left to do
            began = time.monotonic()
            create(plane, folder, created)
            taken.append(all_ready(api, PODS, f"medha.dev/replica=r{turn}", 0.01) - began)
    return {
        "rounds": rounds,
        "kubectl_pods_seconds": round(statistics.median(theirs), 3),
        "operator_pods_seconds": round(statistics.median(ours), 3),
        "added_seconds": round(statistics.median(ours) - statistics.median(theirs), 3),
    }


def all_ready(api: Api, wanted: int, selector: str = "", pause_seconds: float = 0.1) -> float:
    """Wait until so many pods are Ready; return the time.

    Polls load the API server, so they become rarer the longer it takes.
    """
    began = time.monotonic()

    def ready() -> int:
        path = KINDS["StatefulSet"].path("default")
        sets = api.call("GET", path, resourceVersion="0", labelSelector=selector)["items"] or []
        return sum(one.get("status", {}).get("readyReplicas", 0) for one in sets)

    while ready() < wanted:
        assert time.monotonic() < began + _LIMIT_SECONDS, f"only {ready()} pods are Ready"
        time.sleep(max(pause_seconds, 0.02 * (time.monotonic() - began)))
    return time.monotonic()


def are_ready(api: Api, count: int) -> bool:
    found = api.call("GET", REPLICA.path("default"), resourceVersion="0")["items"] or []
    return sum(condition(one) == ("True", "Serving") for one in found) == count


# --- lists ------------------------------------------------------------------------------------------------


def measure_lists(folder: Path, count: int) -> Row:
    """Measure the memory of an operator that lists everything again and again while another holds the lease."""
    with bare_plane(folder / f"lists-{count}") as plane, Api(plane) as api:
        send(plane, [creation(document) for document in replicas("default", count)])
        calls = [call for one in api.list(REPLICA) for call in calls_for(one)[0]]
        send(plane, calls)
        account = {"metadata": {"name": "default"}}
        api.call("POST", "/api/v1/namespaces/default/serviceaccounts", account)
        send(plane, [creation(pod) for one in stateful_sets(calls) for pod in pods_of(one)])
        lease = {"holderIdentity": "another", "leaseDurationSeconds": 3600}
        head = {"apiVersion": LEASE.api_version, "kind": LEASE.name, "metadata": {"name": "medha-operator"}}
        api.call("POST", LEASE.path("default"), {**head, "spec": lease})
        with operator(folder, plane.kubeconfig, f"lists-{count}", resync_seconds=LISTED_SECONDS) as running:
            watched = Watched(running)
            wait_until(lambda: "waiting for the lease" in running.said(), 0.05)
            first = watched.most_resident_bytes()
            began, cpu = time.monotonic(), watched.cpu_seconds()
            time.sleep(LISTS * LISTED_SECONDS)
            elapsed, used = time.monotonic() - began, watched.cpu_seconds() - cpu
            return {
                "replicas": count,
                "pods": count * PODS,
                "first_list_peak_mb": round(first / 1e6),
                "later_lists_peak_mb": round(watched.most_resident_bytes() / 1e6),
                "resident_mb": round(watched.resident_bytes() / 1e6),
                "cpu_ms_per_list_and_replica": round(1e3 * used * LISTED_SECONDS / elapsed / count, 2),
            }


def pods_of(stateful_set: Document) -> Iterator[Document]:
    """Yield the pods of a StatefulSet, as its controller makes them; nothing runs them."""
    metadata, spec = stateful_set["metadata"], stateful_set["spec"]
    for ordinal in range(spec["replicas"]):
        template = spec["template"]
        named = {"name": f"{metadata['name']}-{ordinal}", "namespace": metadata["namespace"]}
        yield {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**template["metadata"], **named},
            "spec": template["spec"],
        }


# --- claims -----------------------------------------------------------------------------------------------


def claims(writes: list[Row], pods: list[Row]) -> list[Row]:
    """Return a claim for each thing that must hold."""
    most = writes[-1]
    peer = f"net/http in Go, {CONNECTIONS} connections"
    found = [
        claim(
            f"replicas a second of the operator over those of a compiled client that sends {sent}, "
            f"{most['replicas']} replicas",
            most[ratio],
            "ratio",
            LEAST_RATIO,
            "more",
            peer,
        )
        for sent, ratio in (("the same writes", "ratio"), ("the objects alone", "ratio_to_objects_alone"))
    ]
    further = max(row["calls_per_replica"] - row["objects_per_replica"] for row in writes)
    name = "calls for a replica, reads too, beyond one for each of its objects"
    found.append(claim(name, further, "calls", MOST_FURTHER_CALLS))
    for row in pods[-1:]:
        name = f"what the operator adds to the time until {row['pods']} pods are Ready"
        peer = "the same StatefulSets by kubectl create"
        found.append(claim(name, row["added_percent"], "%", MOST_ADDED_PERCENT, peer=peer))
    return found


def main() -> int:
    arguments = parser(__doc__, quick="100 replicas, once, and no pods").parse_args()
    rounds = {100: 1} if arguments.quick else {100: 3, 300: 1, 1000: 1}
    writes, pods, lists, alone = [], [], None, None
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="medha-scale-") as folder:
        for count, turns in rounds.items():
            progress(f"writes of {count} replicas")
            writes.append(measure_writes(Path(folder), count, turns))
        for count in () if arguments.quick else rounds:
            progress(f"pods of {count} replicas")
            pods.append(measure_pods(Path(folder), count))
        if not arguments.quick:
            progress(f"lists of {max(rounds)} replicas")
            lists = measure_lists(Path(folder), max(rounds))
            progress("one replica at a time")
            alone = measure_alone(Path(folder) / "alone", 5)
    for rows in (writes, pods, [lists] if lists else [], [alone] if alone else []):
        for row in rows:
            print()
            table(("", "value"), row.items())
    minutes = (time.monotonic() - began) / 60
    figures = {"writes": writes, "pods": pods, "lists": lists, "alone": alone, "cores": psutil.cpu_count()}
    figures["minutes"] = round(
        minutes, 1
    )  # nothing is claimed of it, because most of it is the API server's and KWOK's
    return report(claims(writes, pods), arguments.json, figures, strict=not arguments.quick)


if __name__ == "__main__":
    exit_with(main)
