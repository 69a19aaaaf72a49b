"""A real rank process under a controller that the test plays, over real ZeroMQ."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import psutil
import pytest
import torch
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from medha.api.kv_cache_spec import HostTierSpec, KvCacheSpec, KvTiersSpec
from medha.api.model_spec import ModelSource, ModelSpec
from medha.api.replica import LifecycleSpec, MedhaReplicaSpec, SchedulingSpec
from medha.wire.frames import encode, tokens_to_frame
from medha.wire.messages import (
    Admit,
    CompileGrammar,
    Done,
    Extent,
    Message,
    RankFault,
    RankHello,
    RankReady,
    RankReport,
    Rendezvous,
    Sampling,
    Shutdown,
    StageFree,
    Step,
    StepEntry,
    Tokens,
    Trace,
)
from medha_links.drops import Drops
from medha_links.key_files import KeyFiles, KeyPair, read_public_keys
from medha_links.sockets import Authenticator, bind
from medha_process.part_settings import RankSettings
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.link import Link, rank_identity

from ...frames import frames

START_SECONDS = 60.0
ANSWER_SECONDS = 20.0
MODEL = ModelSpec(name="tiny", source=ModelSource(path="unused"), max_model_len=512)
SPEC = MedhaReplicaSpec(
    model=MODEL,
    kv_cache=KvCacheSpec(size="4Mi"),
    scheduling=SchedulingSpec(max_chunk_tokens=64, max_running=8),
    threads=1,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    init_checkpoint(directory, preset="tiny", seed=1)
    return directory


class Stage:
    """A rank process, and the controller that the test plays."""

    def __init__(
        self, folder: Path, checkpoint: Path, spec: MedhaReplicaSpec = SPEC, *, start: bool = True
    ) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        endpoints = {name: f"ipc://{folder}/{name}" for name in ("control", "tokens")}
        self.keys = keys = KeyFiles.create(folder / "keys")
        self.authenticator = Authenticator(self.context, read_public_keys(keys.ranks_public))
        self.control, self.tokens = (
            Link(
                bind(self.context, endpoint, KeyPair.read(keys.controller)),
                name,
                Drops(logging.getLogger()),
                accepts=get_args(Message),
                peers=[rank_identity(0)],
            )
            for name, endpoint in endpoints.items()
        )
        rank_settings = RankSettings(
            rank=0,
            spec=spec,
            model_directory=checkpoint,
            key_file=keys.ranks,
            controller_key_file=keys.controller_public,
            **endpoints,
        )
        self.settings = folder / "settings.json"
        rank_settings.write(self.settings)
        if start:
            self.start()
        self.steps = 0  # number of steps sent in this epoch
        self.peer = b""  # identity of the process whose message was received last

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, stderr=subprocess.PIPE, text=True)

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "medha_worker.rank", "--settings", str(self.settings)]

    def receive(self, timeout_seconds: float = ANSWER_SECONDS) -> Message:
        received = self.control.receive(timeout_seconds)
        assert received is not None, "the rank is silent"
        assert received.peer.partition(b"/")[0] == rank_identity(0)
        if isinstance(received.message, (RankHello, RankReport)):  # every second or two
            return self.receive(timeout_seconds)
        return received.message

    def ready(self, epoch: int = 0) -> RankReady:
        """Wait for the rank's hello, and begin an epoch."""
        self.rendezvous(epoch)
        message = self.receive(START_SECONDS)
        assert isinstance(message, RankReady), message
        assert message.epoch == epoch
        reported = self.control.receive(ANSWER_SECONDS)
        assert reported is not None
        assert isinstance(reported.message, RankReport), "a new process is counted from its first step on"
        return message

    def rendezvous(self, epoch: int = 0) -> None:
        """Wait for the rank's hello, and call it to the rendezvous."""
        for link in (self.control, self.tokens):
            received = link.receive(START_SECONDS)
            assert received is not None
            self.peer = received.peer
            match received.message:
                case RankHello(rank=0):
                    pass
                case other:
                    raise AssertionError(other)
        self.send(Rendezvous(epoch))
        self.steps = 0

    def send(self, message: Message) -> None:
        """Send a message; steps are numbered consecutively, as a controller numbers them."""
        if isinstance(message, Step):
            message = replace(message, step_id=self.steps)
            self.steps += 1
        self.control.send(message, peer=self.peer)

    def send_tokens(self, name: str, ids: np.ndarray, piece: int = 1000) -> None:
        for offset in range(0, len(ids), piece):
            frame = tokens_to_frame(ids[offset : offset + piece])
            self.tokens.send(Tokens(name, offset, len(ids)), frame, peer=self.peer)

    def run(self, step: Step) -> Done:
        self.send(step)
        return self.done()

    def done(self) -> Done:
        step_id = self.steps - 1
        assert self.receive() == StageFree(step_id, stage=0)
        message = self.receive()
        assert isinstance(message, Done), message
        assert message.step_id == step_id
        return message

    def ended(self) -> tuple[int, str]:
        """Wait until the process ends by itself; return its exit status and log."""
        _, log = self.process.communicate(timeout=ANSWER_SECONDS)
        return self.process.returncode, log

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.control.close()
        self.tokens.close()
        self.authenticator.close()
        self.context.term()


@pytest.fixture(scope="module")
def served(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stage, RankReady]]:
    """Start one rank for all tests that leave its state unchanged."""
    stage = Stage(tmp_path_factory.mktemp("rank"), checkpoint)
    try:
        yield stage, stage.ready()
    finally:
        stage.close()


@pytest.fixture
def start(checkpoint: Path, tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    """Return a function that starts a rank for one test."""
    started: list[Stage] = []

    def start(spec: MedhaReplicaSpec = SPEC, directory: Path = checkpoint) -> Stage:
        started.append(Stage(tmp_path, directory, spec))
        return started[-1]

    yield start
    for stage in started:
        stage.close()


def greedy_admit(name: str, tokens: int, **more: object) -> Admit:
    fields = {
        "prompt": "p",
        "tokens": tokens,
        "prompt_length": tokens,
        "seed": 0,
        "sampling": Sampling(temperature=0.0, ignore_eos=True),
        "reserved_tokens": tokens + 64,
        **more,
    }
    return Admit(id=name, **fields)  # type: ignore[arg-type]


def entry(name: str, start: int, count: int, *, samples: bool = True) -> StepEntry:
    return StepEntry(name, 0, (Extent(start, count),), samples)


# --- serving ------------------------------------------------------------------------------------------


def test_a_rank_reports_what_it_holds(served: tuple[Stage, RankReady], checkpoint: Path) -> None:
    _, ready = served
    weights = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    assert (ready.rank, ready.block_size_tokens, ready.max_model_len, ready.vocab_size) == (0, 16, 512, 512)
    block_bytes = 2 * 2 * 2 * 32 * 16 * 4  # K and V, layers, KV heads, head dim, tokens, float32
    assert ready.kv_blocks == 4 * 2**20 // block_bytes
    assert ready.kv_bytes == ready.kv_blocks * block_bytes
    assert 0.9 < ready.weights_bytes / weights < 1.1
    assert ready.activation_bytes > 0
    assert ready.profile.step_seconds + ready.profile.linear_seconds_per_token > 0
    assert ready.load_seconds > 0


def test_a_rank_samples_the_tokens_of_transformers(served: tuple[Stage, RankReady], checkpoint: Path) -> None:
    """The prompt arrives in pieces and runs in chunks; it and a fork of it get 20 tokens each."""
    stage, _ = served
    ids = np.random.default_rng(0).integers(7, 512, 70).astype(np.int32)
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    expected = reference.generate(
        torch.from_numpy(ids.astype(np.int64))[None],
        attention_mask=torch.ones(1, 70, dtype=torch.int64),
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
    )[0, 70:].tolist()

    stage.send_tokens("p", ids, piece=32)
    texts: dict[str, list[int]] = {"a": [], "b": []}
    steps = [
        Step(0, 0, (entry("a", 0, 33, samples=False),), admits=(greedy_admit("a", 70),)),
        Step(1, 0, (entry("a", 33, 37),)),
        Step(
            2,
            0,
            (entry("a", 70, 1), entry("b", 69, 1)),
            admits=(greedy_admit("b", 70, fork_of="a", shared_tokens=69, sample_index=1),),
        ),
        *(Step(index, 0, (entry("a", 68 + index, 1), entry("b", 67 + index, 1))) for index in range(3, 22)),
    ]
    for step in steps:
        done = stage.run(step)
        assert done.failures == ()
        assert done.compute_seconds > 0
        for sample in done.samples:
            texts[sample.id].append(sample.token)
    stage.run(Step(99, 0, (), releases=("a", "b"), forgets=("p",)))
    assert texts["a"][:20] == expected
    assert texts["b"] == expected


def test_token_ids_may_come_after_the_step_that_needs_them(served: tuple[Stage, RankReady]) -> None:
    stage, _ = served
    ids = np.arange(7, 47, dtype=np.int32)
    stage.send(Step(0, 0, (entry("a", 0, 40),), admits=(greedy_admit("a", 40),)))
    assert stage.control.receive(0.3) is None
    stage.send_tokens("p", ids)
    assert [sample.id for sample in stage.done().samples] == ["a"]
    stage.run(Step(1, 0, (), releases=("a",), forgets=("p",)))


def test_malformed_messages_are_dropped(served: tuple[Stage, RankReady]) -> None:
    stage, _ = served
    for raw in ([b"not json"], [b"{}"], [b""], [b'{"v":1,"type":"Step","body":{"step_id":"x"}}']):
        stage.control.socket.send_multipart([stage.peer, *raw])
    header, frame = encode(Tokens("p", 0, 2), b"\x01\x00\x00\x00\x02\x00\x00\x00")
    stage.control.socket.send_multipart([stage.peer, header, frame, b"one too many"])
    done = stage.run(Step(7, 0, ()))
    assert (done.samples, done.failures) == ((), ())


OBEYED = (Rendezvous, Step, CompileGrammar, Shutdown, Trace)  # valid messages of these types are obeyed


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(batch=st.lists(frames(without=OBEYED), min_size=1, max_size=12), on_tokens=st.booleans())
def test_whatever_else_comes_over_a_link_a_rank_goes_on(
    served: tuple[Stage, RankReady], batch: list[list[bytes]], on_tokens: bool
) -> None:
    stage, _ = served
    link = stage.tokens if on_tokens else stage.control
    for raw in batch:
        link.socket.send_multipart([stage.peer, *(raw or [b""])])
    stage.send_tokens("p", np.arange(7, 47, dtype=np.int32))
    done = stage.run(Step(0, 0, (entry("a", 0, 40),), admits=(greedy_admit("a", 40),)))
    assert [sample.id for sample in done.samples] == ["a"]
    stage.run(Step(0, 0, (), releases=("a",), forgets=("p",)))


def test_a_rank_that_its_controller_does_not_admit_ends_and_logs_why(
    tmp_path: Path, checkpoint: Path
) -> None:
    stage = Stage(tmp_path, checkpoint, start=False)
    try:
        stage.settings.write_text(
            stage.settings.read_text().replace(str(stage.keys.ranks), str(stage.keys.router))
        )
        stage.start()
        _, log = stage.process.communicate(timeout=START_SECONDS)
        assert stage.process.returncode == 1, log
        assert "does not admit this rank" in log
        assert str(stage.keys.router) in log
    finally:
        stage.close()


# --- ends ---------------------------------------------------------------------------------------------


def test_shutdown_and_signals_end_a_rank_cleanly(start: Callable[..., Stage]) -> None:
    """Ctrl-C is ignored, because the supervisor turns it into a drain; Shutdown and SIGTERM end with status 0."""
    stage = start()
    stage.ready()
    stage.process.send_signal(signal.SIGINT)
    stage.run(Step(0, 0, ()))
    stage.send(Shutdown("the test is over"))
    status, log = stage.ended()
    assert status == 0
    assert "the test is over" in log
    assert "Traceback" not in log


def test_sigterm_lets_the_step_that_runs_finish(start: Callable[..., Stage]) -> None:
    stage = start()
    stage.ready()
    stage.send(Step(0, 0, (entry("a", 0, 40),), admits=(greedy_admit("a", 40),)))
    assert stage.control.receive(0.3) is None  # it waits for ids, in the middle of the step
    stage.process.terminate()
    stage.send_tokens("p", np.arange(7, 47, dtype=np.int32))
    assert [sample.id for sample in stage.done().samples] == ["a"]
    assert stage.ended()[0] == 0


@pytest.mark.long
def test_sigterm_ends_a_rank_that_still_loads(start: Callable[..., Stage]) -> None:
    stage = start()
    assert stage.process.stderr is not None
    assert "loading" in stage.process.stderr.readline()
    stage.process.terminate()
    assert stage.ended()[0] == 0


@pytest.mark.parametrize("moment", ["while it imports", "when it is ready"])
def test_a_rank_does_not_outlive_its_parent(start: Callable[..., Stage], moment: str) -> None:
    stage = start()
    stage.process.kill()  # a rank that a child of this process starts takes its place
    program = (
        "import os, subprocess, sys, time\n"
        "os.environ['MEDHA_PARENT_PID'] = str(os.getpid())\n"
        f"child = subprocess.Popen({stage.command!r}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        try:
            if moment == "when it is ready":
                stage.ready()
        finally:
            parent.kill()
    try:
        child.wait(timeout=ANSWER_SECONDS)
    finally:
        if child.is_running():
            child.kill()


# --- faults -------------------------------------------------------------------------------------------


def fault_of(stage: Stage) -> str:
    message = stage.receive(START_SECONDS)
    assert isinstance(message, RankFault), message
    status, log = stage.ended()
    assert status == 1
    assert "Traceback" not in log
    return message.detail


@pytest.mark.long
def test_a_pool_that_cannot_hold_the_longest_request_is_an_error_that_names_the_fix(
    start: Callable[..., Stage],
) -> None:
    spec = SPEC.model_copy(update={"kv_cache": KvCacheSpec(size="100Ki")})
    stage = start(spec)
    stage.rendezvous()
    detail = fault_of(stage)
    assert "maxModelLen 512" in detail
    assert "raise kvCache.size" in detail


@pytest.mark.long
def test_a_host_tier_smaller_than_a_block_is_an_error_that_names_the_fix(start: Callable[..., Stage]) -> None:
    kv_cache = KvCacheSpec(size="4Mi", tiers=KvTiersSpec(host=HostTierSpec(size="100")))
    stage = start(SPEC.model_copy(update={"kv_cache": kv_cache}))
    stage.rendezvous()
    detail = fault_of(stage)
    assert "kvCache.tiers.host.size is 100 bytes" in detail
    assert "raise it" in detail


@pytest.mark.long
def test_a_checkpoint_that_is_not_there_is_a_fault(start: Callable[..., Stage], tmp_path: Path) -> None:
    assert "config.json" in fault_of(start(SPEC, tmp_path / "nowhere"))


def test_a_rank_that_hangs_while_it_loads_ends_itself_when_its_time_is_over(
    start: Callable[..., Stage], tmp_path: Path
) -> None:
    """A FIFO acts as a network file system that hangs: opening it waits until somebody writes."""
    hangs = tmp_path / "hangs"
    hangs.mkdir()
    os.mkfifo(hangs / "config.json")
    stage = start(SPEC.model_copy(update={"lifecycle": LifecycleSpec(ready_seconds=0.5)}), hangs)
    status, log = stage.ended()
    assert status == -signal.SIGKILL
    assert "stuck in loading" in log


def test_a_parted_state_is_a_fault(start: Callable[..., Stage]) -> None:
    stage = start()
    stage.ready()
    stage.send(Step(0, 0, (), state_hash=12345))
    assert "the ledgers differ" in fault_of(stage)


def test_a_step_that_is_not_the_next_one_is_a_fault_for_messages_were_lost(
    start: Callable[..., Stage],
) -> None:
    stage = start()
    stage.ready()
    stage.run(Step(0, 0, ()))
    stage.steps = 2
    stage.send(Step(2, 0, ()))
    assert "step 2 came instead of 1" in fault_of(stage)
