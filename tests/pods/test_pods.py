"""A replica made of pods: it serves, restarts what dies inside of a pod, asks for help where it cannot, and drains."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .grid import MODEL, Replica, eventually

pytestmark = pytest.mark.timeout(240)
PROMPT = "the quick brown fox jumps over the lazy dog and " * 40  # several chunks, and more than a lane takes
TOKENS = 24


@pytest.fixture(scope="module")
def greedy(checkpoint: Path) -> str:
    """What transformers answer."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    encoded = tokenizer(PROMPT, return_tensors="pt")
    out = model.generate(**encoded, max_new_tokens=TOKENS, do_sample=False)
    return str(tokenizer.decode(out[0, encoded.input_ids.shape[1] :], skip_special_tokens=True))


def test_four_pods_answer_as_transformers_do(replica: Replica, greedy: str) -> None:
    assert replica.complete(PROMPT, TOKENS) == greedy
    for pod in replica.pods.values():
        assert [pod.ask(path)[0] for path in ("/started", "/ready", "/live", "/else")] == [200, 200, 200, 404]


def test_the_parts_of_a_pod_show_signs_of_life_where_only_their_own_user_can(replica: Replica) -> None:
    for pod in replica.pods.values():
        socket = Path(pod.rank().environ()["NOTIFY_SOCKET"])
        assert socket.is_relative_to(pod.folder)
        assert socket.is_socket()
        assert stat.S_IMODE(socket.stat().st_mode) == 0o600


def test_a_rank_that_is_killed_is_mended_inside_its_pod(replica: Replica, greedy: str) -> None:
    supervisors = {place: pod.running.pid for place, pod in replica.pods.items()}
    survivors = {place: pod.rank().pid for place, pod in replica.pods.items() if place != (1, 0)}
    pod = replica.pods[1, 0]

    def says_why() -> bool:
        return any(reason.startswith("rank 2 ") for reason in pod.ask("/ready")[1].get("reasons", ()))

    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 600, "temperature": 0, "ignore_eos": True}
    with httpx.stream(
        "POST", f"{replica.url}/v1/completions", json=body | {"stream": True}, timeout=60
    ) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        next(lines)
        os.kill(pod.rank().pid, signal.SIGKILL)
        eventually("the pod says which rank is missing", says_why)
        last = [json.loads(line.removeprefix("data: ")) for line in lines][-1]
    assert last["choices"][0]["finish_reason"] == "length", "the router submits it to the next epoch"
    replica.wait_ready()
    assert replica.complete(PROMPT, TOKENS) == greedy
    assert {place: pod.running.pid for place, pod in replica.pods.items()} == supervisors
    assert {place: pod.rank().pid for place, pod in replica.pods.items() if place != (1, 0)} == survivors


def test_live_settings_reach_the_running_replica_and_those_of_a_newer_operator_harm_nobody(
    replica: Replica, greedy: str
) -> None:
    """The file stays so: the tests below start containers again that read it."""
    ranks = [pod.rank().pid for pod in replica.pods.values()]
    epoch = replica.epoch
    scheduling = {"maxChunkTokens": 128, "longThresholdTokens": 400, "policy": "edf", "lookahead": 2}
    replica.write(scheduling=scheduling, speculation={"tokens": 4})
    eventually("an epoch with the new policy begins", lambda: replica.epoch > epoch)
    assert replica.complete(PROMPT, TOKENS) == greedy
    assert [pod.rank().pid for pod in replica.pods.values()] == ranks


def test_a_router_that_is_started_again_finds_its_replica(replica: Replica, greedy: str) -> None:
    replica.kill_router()
    replica.start_router()
    replica.wait_ready()
    assert replica.complete(PROMPT, TOKENS) == greedy


@pytest.mark.long
def test_the_leaders_container_may_be_started_again_and_the_others_keep_their_weights(
    replica: Replica, greedy: str
) -> None:
    others = [pod for place, pod in replica.pods.items() if place != (0, 0)]
    ranks = [pod.rank().pid for pod in others]
    epoch = replica.epoch
    replica.leader.kill()
    eventually("the others notice", lambda: not any(pod.is_ready() for pod in others))
    replica.leader.start()
    replica.wait_ready()
    assert replica.complete(PROMPT, TOKENS) == greedy
    assert [pod.rank().pid for pod in others] == ranks
    assert replica.epoch > epoch


def test_sigterm_lets_the_leader_finish_what_is_open(replica: Replica) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 600, "temperature": 0, "ignore_eos": True}
    ends = []
    with httpx.stream(
        "POST", f"{replica.url}/v1/completions", json=body | {"stream": True}, timeout=60
    ) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        next(lines)
        for pod in replica.pods.values():
            pod.terminate()
        ends = [json.loads(line.removeprefix("data: "))["choices"][0]["finish_reason"] for line in lines]
    assert ends[-1] == "length"
    assert [pod.wait() for pod in replica.pods.values()] == [0, 0, 0, 0]
    assert [pod.message for pod in replica.pods.values()] == [""] * 4
    assert any("draining: the leader gets" in pod.log for pod in replica.pods.values())


@pytest.mark.long
def test_pods_of_a_former_set_are_refused_and_ask_to_be_replaced(replica: Replica, greedy: str) -> None:
    """As ranks of a node that was lost and comes back, after all pods were made anew elsewhere."""
    for pod in replica.pods.values():  # where this test runs alone
        pod.terminate()
        pod.wait()
    thawed = replica.pods[1, 1]
    for place, pod in replica.pods.items():
        if place != (1, 1):
            shutil.rmtree(pod.folder)  # a new pod finds nothing of the old one's
    for pod in replica.pods.values():
        pod.start()
    assert thawed.wait(60) == 75
    assert thawed.message.startswith("RendezvousFailed: rank 3 is not admitted: its last epoch is ")
    shutil.rmtree(thawed.folder)
    thawed.start()
    replica.wait_ready()
    assert replica.complete(PROMPT, TOKENS) == greedy
