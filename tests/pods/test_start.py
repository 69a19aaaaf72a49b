"""Pods that cannot start or do not meet the others end with a status and a termination message that say why."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from .grid import Replica, eventually

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def alone(checkpoint: Path, tmp_path: Path) -> Iterator[Replica]:
    """A replica of which each test starts one pod."""
    found = Replica(tmp_path, checkpoint, stages=1, lanes=2)
    yield found
    found.stop()


def test_a_pod_whose_leader_never_answers_asks_for_a_restart(alone: Replica) -> None:
    pod = alone.pods[1, 0]
    pod.start()
    calls = f"rank 1 calls the leader, {alone.leader.address} (the controller at "

    def is_calling() -> bool:
        return any(reason.startswith(calls) for reason in pod.ask("/started")[1].get("reasons", ()))

    eventually("the rank has its weights and calls", is_calling, 60)
    eventually("its log says so", lambda: "waiting for the leader since" in pod.log)
    assert pod.ask("/live")[0] == 200
    alone.write(lifecycle={"readySeconds": 0.5})  # a live field
    assert pod.wait() == 75
    assert pod.message.startswith("RendezvousFailed: there was no rendezvous of the ranks within 0.5 s")
    assert calls in pod.message


@pytest.mark.long
def test_a_pod_of_a_newer_revision_waits_until_its_own_leader_is_there(alone: Replica) -> None:
    """As when its predecessor has ended early, and the leader of the older revision still drains."""
    leader, other = alone.pods[0, 0], alone.pods[1, 0]
    leader.variables["MEDHA_REVISION"], other.variables["MEDHA_REVISION"] = "older", "newer"
    leader.start()
    other.start()
    reported = "rank 1 of revision newer waits for its controller"
    eventually("the leader knows it by its revision", lambda: reported in leader.log, 60)
    assert not leader.is_ready()
    leader.kill()
    shutil.rmtree(leader.folder)  # a new pod finds nothing of the old one's
    leader.variables["MEDHA_REVISION"] = "newer"
    leader.start()
    for pod in (leader, other):
        eventually("the pods of one revision meet", pod.is_ready, 60)
    assert other.log.count("starting rank 1") == 1  # it kept its weights


@pytest.mark.parametrize(
    "place", [pytest.param((0, 0), id="leader"), pytest.param((1, 0), id="other", marks=pytest.mark.long)]
)
def test_a_pod_that_asks_for_a_gpu_and_has_none_ends_and_does_not_compute_on_the_cpu(
    alone: Replica, place: tuple[int, int]
) -> None:
    pod = alone.pods[place]
    pod.variables["CUDA_VISIBLE_DEVICES"] = ""  # hides those of this machine, if it has any
    alone.write(resources={"accelerator": "nvidia.com/gpu"}, parallelism={"tensor": 2, "kv": 2})
    pod.start()
    assert pod.wait(60) == 69
    assert "exited with status 69 because: spec.resources.accelerator is nvidia.com/gpu, but " in pod.message
    assert pod.message in pod.log
    assert "before the replica was ready, rank" in pod.message
    assert "ready: " not in pod.log


@pytest.mark.parametrize(
    ("place", "variables", "options", "said"),
    [
        pytest.param((0, 0), {}, ["--model", "/nowhere"], "/nowhere", id="no model"),
        pytest.param((1, 0), {"MEDHA_STAGE": "3"}, [], "MEDHA_STAGE=3", id="no such place"),
        pytest.param((1, 0), {}, ["--replica", "/nowhere.json"], "/nowhere.json", id="no replica"),
    ],
)
def test_a_pod_that_cannot_start_says_why(
    alone: Replica, place: tuple[int, int], variables: dict[str, str], options: list[str], said: str
) -> None:
    pod = alone.pods[place]
    pod.argv += options  # the last one counts
    pod.variables |= variables
    pod.start()
    assert pod.wait() == 1
    assert said in pod.message
