"""The data plane over NCCL, without NCCL: over gloo with whole models, and over recording groups on fake GPUs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread, current_thread
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import Backend, ErrorType, Work
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import (  # type: ignore[attr-defined] # not declared
    AllreduceOptions,
    GatherOptions,
    HashStore,
    ProcessGroupNCCL,
)

from medha.errors import PartFailed
from medha.topology import Topology
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.device import Device, InOrder, Mark, host_device
from medha_worker.host_memory import HostMemory
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.partial_attention import Rows
from medha_worker.model.spread import Landing, RingKeys, SpreadPlan
from medha_worker.model.tensor_group import Alone
from medha_worker.model.weights import Shard
from medha_worker.rank import nccl_plane as module
from medha_worker.rank import plane_choice
from medha_worker.rank.data_plane import DataPlane, PlaneSite, neighbours
from medha_worker.rank.engine import Engine
from medha_worker.rank.gloo_plane import GlooPlane
from medha_worker.rank.loss_guard import LossGuard
from medha_worker.rank.mesh import Mesh
from medha_worker.rank.nccl_plane import TORCH_OPTIONS, NcclPlane, nccl_groups

from ..device_watch import GPU, fake_gpu
from ..model.test_device import BLOCK_TOKENS, ROWS, on_a_fake_device, shared_with_two_lanes, spans
from ..model.test_model_transformer import save_reference
from ..models import run_step
from ..random_steps import STRATEGIES, Query
from ..ranks import Ranks, free_endpoint
from ..replicas.test_exactness import SIZES, check, new_planner
from .nccl_double import Entry, OnStream, OverGloo, RecordedWork, Recording, over_gloo, recording

HIDDEN = 128  # size of the preset's hidden states

# --- over gloo ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    directory = tmp_path_factory.mktemp("llama")
    return directory, save_reference(directory, "llama", **SIZES, head_dim=16)


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 1, 4), (1, 4, 1), (2, 1, 2)], ids=str)
def test_groups_that_run_in_order_carry_every_step_of_a_grid(
    llama: tuple[Path, torch.nn.Module], shape: tuple[int, int, int]
) -> None:
    """A pair of ranks that waited for each other, or a peer that is counted wrongly, would end in a timeout."""
    directory, reference = llama
    topology = Topology(*shape)
    ranks = Ranks(topology, directory, over_gloo)
    planner = new_planner(topology.kv, 24, True, seed=3)
    queries = [Query(prompt, 4) for prompt in (130, 7, 90, 33)]
    strategies = [strategy for strategy in STRATEGIES for _ in range(2)]
    check(ranks, reference, planner, queries, strategies, 1)
    ranks.close()


# --- on fake GPUs, over groups that record what they are asked -----------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    init_checkpoint(directory, preset="tiny", seed=0)
    return directory


@contextmanager
def nccl(topology: Topology, rank: int, device: Device, log: list[Entry]) -> Iterator[NcclPlane]:
    plane = NcclPlane(neighbours(topology, rank), device, HIDDEN, recording(log))
    yield plane
    plane.close()


@contextmanager
def gloo(topology: Topology, rank: int, device: Device, log: list[Entry]) -> Iterator[GlooPlane]:
    form, everyone = recording(log), range(topology.ranks)
    near, wait = neighbours(topology, rank), timedelta(seconds=1)
    site = PlaneSite(
        near, device, HIDDEN, topology.stream, wait, form("everyone", everyone), form, HashStore()
    )
    yield GlooPlane(site)


def run_once(plane: DataPlane, model: Any, shard: Shard, plan: SpreadPlan | None) -> None:
    """Run a step from its input to its result, as the executor does."""
    model = model.in_grid(plane.tensor_group, plane)
    cache = model.new_kv_cache(16, BLOCK_TOKENS)
    entering = torch.zeros(ROWS, dtype=torch.int64)
    if not shard.is_first_stage:
        plane.expect_hidden(ROWS)
        entering = plane.receive_hidden()
    hidden = run_step(model, entering, torch.arange(ROWS), () if plan else spans(), cache, plan)
    if shard.is_last_stage:
        model.logits(hidden[:2])
    else:
        plane.send_hidden(hidden)


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("lanes", [1, 3])
def test_a_step_over_nccl_sends_what_it_sends_over_gloo_and_touches_no_host_memory(
    checkpoint: Path, lanes: int, rank: int
) -> None:
    topology = Topology(tensor=2, stream=2, kv=lanes)
    here = topology.coordinates(rank)
    layers = ModelConfig.from_directory(checkpoint).num_layers
    first, last = (0, 1) if here.stream == 0 else (1, layers)
    shard = Shard(here.tensor, 2, first, last, layers)
    messages: dict[str, list[Entry]] = {}
    for name, new_plane in {"nccl": nccl, "gloo": gloo}.items():
        log: list[Entry] = []
        with on_a_fake_device(checkpoint, shard, torch.bfloat16) as (model, watch):
            with new_plane(topology, rank, model.device, log) as plane:
                assert model.config.hidden_size == HIDDEN
                run_once(plane, model, shard, shared_with_two_lanes() if lanes > 1 else None)
            assert (watch.found == []) == (name == "nccl")
        sent = [entry for entry in log if len(entry) == 5]
        assert {entry[-1] for entry in sent} == {"cuda" if name == "nccl" else "cpu"}
        assert ("host waits" in {entry[0] for entry in log}) == (name == "gloo")
        messages[name] = [entry[:-1] for entry in sent]
    assert messages["nccl"] == messages["gloo"]
    kinds = {entry[0] for entry in messages["nccl"]}
    assert kinds >= {"allreduce", "send" if here.stream == 0 else "gather"}
    peers = {entry[1] for entry in messages["nccl"] if entry[0] in ("send", "recv")}
    others = {other for other in neighbours(topology, rank).lanes if other != rank}
    assert peers == others | {rank + 2 if here.stream == 0 else rank - 2}


class Streams(InOrder):
    """The runtime of a GPU that is not there, which records on which stream it is given work."""

    def __init__(self, log: list[Entry]) -> None:
        super().__init__(GPU)
        self._log = log

    @contextmanager
    def ahead(self) -> Iterator[None]:
        self._log.append(("ahead",))
        yield
        self._log.append(("back",))

    def mark(self) -> Mark:
        self._log.append(("mark",))
        return super().mark()

    def synchronise(self) -> None:
        self._log.append(("host waits", "device"))


def with_streams(log: list[Entry]) -> Device:
    return Device(GPU, torch.bfloat16, HostMemory(), Streams(log))


def kinds(log: list[Entry]) -> list[str]:
    return [entry[1] if entry[0] == "stream waits" else entry[0] for entry in log]


def test_hidden_states_arrive_beside_the_running_step_and_the_host_waits_for_nothing() -> None:
    log: list[Entry] = []
    with FakeTensorMode(), nccl(Topology(stream=3), 1, with_streams(log), log) as plane:
        plane.expect_hidden(5)
        plane.expect_hidden(0)
        assert [entry[0] for entry in log] == ["ahead", "recv", "back", "ahead", "back"]
        assert plane.receive_hidden().shape == (5, HIDDEN)
        assert plane.receive_hidden().shape == (0, HIDDEN)
        # The first stay until the device has passed what reads them: their memory belongs to another stream.
        assert log[5:] == [("stream waits", "recv"), ("mark",)]


def test_over_gloo_the_host_waits_for_the_device_before_it_sends_what_that_has_made() -> None:
    log: list[Entry] = []
    with FakeTensorMode(), gloo(Topology(tensor=2, stream=3, kv=2), 2, with_streams(log), log) as plane:
        x = torch.empty(2, 4, device=GPU)
        plane.tensor_group.all_reduce(x)
        gathered = plane.tensor_group.gather_last_dim(x, [4, 4])
        plane.send_hidden(x)
        plane.finish(plane.start({1: x}, {1: x}))
        assert gathered is not None
        assert gathered.device == GPU
    waits, device = "host waits", ("host waits", "device")
    assert [entry if entry == device else entry[0] for entry in log] == [
        device, "allreduce", waits, device, "gather", waits, device, "send", device, "recv", "send", waits, waits,
    ]  # fmt: skip


def test_a_step_begins_behind_the_send_of_two_steps_before_whose_memory_it_overwrites() -> None:
    log: list[Entry] = []
    with FakeTensorMode(), nccl(Topology(stream=2), 0, with_streams(log), log) as plane:
        hidden = torch.empty(4, HIDDEN, dtype=torch.bfloat16, device=GPU)
        for _ in range(3):
            plane.send_hidden(hidden)
    assert [entry[0] for entry in log] == ["send", "send", "stream waits", "send", "stream waits"]


def test_what_lanes_exchange_is_one_operation_and_empty_exchanges_are_none() -> None:
    log: list[Entry] = []
    with FakeTensorMode(), nccl(Topology(kv=3), 1, with_streams(log), log) as plane:
        tensor = torch.empty(4, device=GPU)
        started = plane.start({2: tensor, 0: tensor}, {2: tensor})
        assert [entry[:2] for entry in log] == [
            ("begin",),
            ("recv", 2),
            ("send", 0),
            ("send", 2),
            ("end",),
        ]
        plane.finish(started)
        assert log[5:] == [("stream waits", "exchange")]
        plane.finish(plane.start({}, {}))
        assert len(log) == 6


def test_an_exchange_that_fails_is_ended_all_the_same() -> None:
    """Otherwise no later operation of the thread would begin, also of groups of the next epoch."""
    log: list[Entry] = []
    with FakeTensorMode(), nccl(Topology(kv=2), 0, with_streams(log), log) as plane:

        def fail(*_: Any) -> None:
            raise RuntimeError("NCCL error")

        plane._lanes.recv = fail
        with pytest.raises(PartFailed, match="rank 0 lost another lane in a shared step: NCCL error"):
            plane.start({}, {1: torch.empty(1, device=GPU)})
        assert kinds(log) == ["begin", "end"]


def test_each_hop_of_a_ring_is_under_way_while_the_one_before_is_computed(checkpoint: Path) -> None:
    whole = Shard.whole(ModelConfig.from_directory(checkpoint))
    log: list[Entry] = []

    class Noted:
        """Attention that is noted where it is given to the device."""

        def __init__(self, backend: Any) -> None:
            self._backend = backend

        def plan(self, *arguments: Any) -> Any:
            step = self._backend.plan(*arguments)

            class Step:
                def attend(self, *arguments: Any) -> Any:
                    log.append(("attend",))
                    return step.attend(*arguments)

            return Step()

    with on_a_fake_device(checkpoint, whole, torch.bfloat16) as (model, _):
        model = model.with_kernels(replace(model.kernels, attention=Noted(model.kernels.attention)))
        with nccl(Topology(kv=3), 0, model.device, log) as plane:
            near = [SequenceSpan(0, ROWS, 8, np.arange(6))]
            seen = Rows(ROWS, [SequenceSpan(0, ROWS, 30, np.arange(2), is_causal=False)])
            plan = SpreadPlan(
                local=Rows(ROWS, near),
                landing=Landing((torch.arange(ROWS), np.arange(ROWS)), {}, {}),
                own=(),
                foreign=(),
                keys=RingKeys(
                    (0, 1, 2), torch.arange(ROWS), torch.arange(2), {0: 2, 1: 2, 2: 2}, {1: seen, 2: seen}
                ),
                sequences=[slice(0, ROWS)],
            )
            run_once(plane, model, whole, plan)
    hop = ["begin", "recv", "send", "end"]
    layer = [*hop, "attend", "exchange", *hop, "attend", "exchange", "attend"]
    assert kinds(log) == layer * model.config.num_layers


# --- loss of a rank -----------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def guarded(clock: Clock | None = None) -> tuple[LossGuard, list[Recording]]:
    groups = [Recording([], [0, 1]) for _ in range(2)]
    guard = LossGuard(3, {"pod 2": groups[0], "lanes": groups[1]}, clock or Clock(), poll_seconds=0.01)
    return guard, groups


ABORT_SECONDS = 5.0  # limit of a wait for a thread, far above what it takes


def test_a_step_that_ends_in_time_is_followed_by_any_pause() -> None:
    clock = Clock()
    guard, groups = guarded(clock)
    guard.bound(timedelta(seconds=10))
    clock.now += 9
    guard.poll()
    guard.end()
    clock.now += 1000
    guard.poll()
    guard.check()
    assert not any(group.aborted.is_set() for group in groups)
    guard.close()


def test_a_step_that_hangs_aborts_all_groups_though_none_returns_from_that() -> None:
    clock = Clock()
    guard, groups = guarded(clock)
    for group in groups:
        group.let_go.clear()  # a captured step exists, and the hanging thread has it
    guard.bound(timedelta(seconds=10))
    clock.now += 11
    assert all(group.aborted.wait(ABORT_SECONDS) for group in groups)  # by the guard's own thread
    with pytest.raises(PartFailed, match="rank 3 lost another rank: a step had not ended after 10 s"):
        guard.end()
    guard.close()  # does not wait either
    for group in groups:
        group.let_go.set()


def test_an_error_of_one_group_aborts_the_others_and_voids_the_step_at_once() -> None:
    guard, groups = guarded()
    groups[1].error = ErrorType.COMM_ERROR
    with pytest.raises(
        PartFailed, match="rank 3 lost another rank: NCCL reports COMM_ERROR among the ranks of lanes"
    ):
        guard.end()
    assert all(group.aborted.wait(ABORT_SECONDS) for group in groups)
    guard.close()


def test_an_abort_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    guard, groups = guarded()
    logged = groups[1].aborted

    def fail() -> None:
        raise RuntimeError("no answer\nstack")

    groups[0].abort = fail  # type: ignore[method-assign]
    guard.close()
    assert logged.wait(ABORT_SECONDS)
    found = "the group of pod 2 could not be aborted: no answer"
    assert any(found == record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    "call",
    [
        lambda plane, x: plane.tensor_group.all_reduce(x),
        lambda plane, x: plane.tensor_group.gather_last_dim(x, [4, 4]),
        lambda plane, x: plane.start({1: x}, {1: x}),
        lambda plane, x: plane.send_hidden(x),
        lambda plane, _: plane.expect_hidden(2),
        lambda plane, _: plane.receive_hidden(),
        lambda plane, _: plane.check(),
    ],
    ids=["all_reduce", "gather", "start", "send", "expect", "receive", "check"],
)
def test_after_a_loss_no_group_is_asked_for_anything(call: Callable[[NcclPlane, torch.Tensor], None]) -> None:
    """It would wait inside of the group, for captured steps that only the calling thread can let go of."""
    log: list[Entry] = []
    topology = Topology(tensor=2, stream=3, kv=2)
    with FakeTensorMode(), nccl(topology, 2, with_streams(log), log) as plane:
        plane.abort("rank 1 left")
        with pytest.raises(PartFailed, match="rank 2 lost another rank: rank 1 left"):
            call(plane, torch.empty(2, 4, device=GPU))
    assert log == []


def test_a_rank_that_leaves_aborts_all_its_groups() -> None:
    made: list[Recording] = []

    def form(name: str, members: Any) -> Recording:
        made.append(Recording([], members))
        return made[-1]

    plane = NcclPlane(
        neighbours(Topology(tensor=2, stream=3, kv=2), 2), host_device(torch.float32), HIDDEN, form
    )
    plane.close()
    assert [group._members for group in made] == [[2, 3], [0, 2], [2, 4], [2, 8]]
    assert all(group.aborted.wait(ABORT_SECONDS) for group in made)


def test_groups_that_were_formed_before_one_that_was_not_are_aborted() -> None:
    made: list[Recording] = []

    def form(name: str, members: Any) -> Recording:
        if made:
            raise PartFailed("rank 8 did not come")
        made.append(Recording([], members))
        return made[-1]

    with pytest.raises(PartFailed, match="rank 8 did not come"):
        NcclPlane(neighbours(Topology(tensor=2, kv=2), 0), host_device(torch.float32), HIDDEN, form)
    assert made[0].aborted.wait(ABORT_SECONDS)


def test_a_rank_that_is_lost_in_a_warm_up_ends_what_the_others_wait_for_on_the_device() -> None:
    """Nothing bounds a step of the warm-up but the rounds in which all ranks report."""
    aborted: list[str] = []
    has_aborted = Event()

    def abort(reason: str) -> None:
        aborted.append(reason)
        has_aborted.set()

    def new_plane(site: PlaneSite) -> DataPlane:
        plane = over_gloo(site)
        plane.abort = abort  # type: ignore[method-assign]
        return plane

    endpoint = free_endpoint()

    def rendezvous(rank: int) -> Mesh:
        return Mesh(
            Topology(tensor=2), rank, endpoint, address="127.0.0.1", epoch=0, hidden_size=3, device=host_device(torch.float32),
            rendezvous_seconds=20.0, wait_seconds=1.0, new_plane=new_plane,
        )  # fmt: skip

    with ThreadPoolExecutor(2) as pool:
        gone, warming = pool.map(rendezvous, range(2))
    gone.close()

    def warm_up() -> None:
        with warming.warming_up():
            assert has_aborted.wait(ABORT_SECONDS)

    with pytest.raises(PartFailed, match="rank 1 lost another rank while all of them gathered"):
        warm_up()
    assert len(aborted) == 1
    assert aborted[0].startswith("rank 1 lost another rank while all of them gathered")
    warming.close()


def test_a_count_over_the_pod_is_void_after_a_loss() -> None:
    mesh = object.__new__(Mesh)
    mesh._device, mesh._wait = host_device(torch.float32), timedelta(seconds=10)
    with nccl(Topology(tensor=2), 1, mesh._device, []) as plane:
        mesh.plane, mesh.tensor_group = plane, plane.tensor_group
        assert mesh.total_in_pod(3) == 3  # the recording group adds nothing
        plane._guard._groups["pod 0"].error = ErrorType.COMM_ERROR
        with pytest.raises(PartFailed, match="NCCL reports COMM_ERROR among the ranks of pod 0"):
            mesh.total_in_pod(3)


def test_captured_steps_are_gone_before_their_groups() -> None:
    """NCCL would wait for them before it returns from an abort, and so would whoever waits for that."""
    left: list[str] = []
    model, grid = Mock(), Mock()
    model.forget_captured.side_effect = lambda: left.append("captured steps")
    grid.close.side_effect = lambda: left.append("groups")
    Engine(Mock(), grid, Mock(), model, grammars=None).leave()
    Engine(Mock(), None, Mock(), model, grammars=None).leave()
    assert left == ["captured steps", "groups", "captured steps"]


def test_tokens_that_were_sampled_after_a_loss_are_not_sent() -> None:
    log: list[Entry] = []
    mesh = object.__new__(Mesh)
    with nccl(Topology(stream=2), 1, host_device(torch.float32), log) as plane:
        mesh.plane = plane
        plane.abort("rank 0 left")
        with pytest.raises(PartFailed, match="rank 1 lost another rank: rank 0 left"):
            mesh.send_tokens([1, 2])


def test_a_step_that_ended_after_a_loss_is_void() -> None:
    mesh = object.__new__(Mesh)
    with nccl(Topology(stream=2), 1, host_device(torch.float32), []) as plane:
        mesh.plane = plane
        mesh.end_step()
        plane.abort("rank 0 left")
        with pytest.raises(PartFailed, match="rank 1 lost another rank: rank 0 left"):
            mesh.end_step()


def test_a_step_has_its_whole_time_again_once_it_has_its_tokens() -> None:
    """It may have waited for them as long as the last stage may compute."""
    mesh, clock = object.__new__(Mesh), Clock()
    mesh.rank, mesh.sampling_rank, mesh._wait, mesh._everyone = 0, 1, timedelta(seconds=10), Mock()
    near = neighbours(Topology(stream=2), 0)
    mesh.plane = plane = NcclPlane(near, host_device(torch.float32), HIDDEN, recording([]), clock)
    plane.bound(mesh._wait)
    clock.now += 9
    mesh.receive_tokens(1)
    clock.now += 9
    plane._guard.poll()
    mesh.end_step()
    plane.close()


# --- the pinned torch ---------------------------------------------------------------------------------

HEADERS = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"


def parameters(method: Any) -> list[list[str]]:
    """Return the names of the parameters of each overload of a method that pybind made."""
    found = re.findall(r"^(?:\d+\. )?\w+\(self[^,)]*,? ?(.*)\) -> ", method.__doc__, re.MULTILINE)
    return [re.findall(r"(\w+): ", arguments) for arguments in found]


def test_torchs_groups_have_the_methods_that_the_doubles_have() -> None:
    wanted = {
        "allreduce": ["tensors", "opts"],
        "gather": ["output_tensors", "input_tensors", "opts"],
        "send": ["tensors", "dstRank", "tag"],
        "recv": ["tensors", "srcRank", "tag"],
        "_start_coalescing": [],
        "_end_coalescing": [],
        "abort": [],
        "get_error": [],
    }
    for name, names in wanted.items():
        assert names in parameters(getattr(ProcessGroupNCCL, name)), name
        assert hasattr(Recording, name)
        assert hasattr(OverGloo, name)
    assert hasattr(ProcessGroupNCCL, "eager_connect_single_device")
    for double in (RecordedWork, OnStream):
        assert all(hasattr(Work, name) for name in vars(double) if not name.startswith("_"))
    assert issubclass(ProcessGroupNCCL, Backend)
    assert (AllreduceOptions().asyncOp, GatherOptions().asyncOp, GatherOptions().rootRank) == (True, True, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and the group would wait for others")
def test_a_group_is_made_up_to_the_point_at_which_torch_looks_for_a_gpu() -> None:
    with pytest.raises(ValueError, match="only supported with GPUs, no GPUs found"):
        nccl_groups(HashStore(), 1, GPU)("pod 0", [0, 1])


class Forming:
    """Stands for `ProcessGroupNCCL`: notes on which thread it connects, and waits for the other ranks if it is to."""

    Options = SimpleNamespace
    threads: ClassVar[list[Thread]] = []
    others_are_there: ClassVar[Event] = Event()

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.place = rank, size

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.threads.append(current_thread())
        assert self.others_are_there.wait(ABORT_SECONDS)


def test_each_group_is_formed_on_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch counts open groups of operations by thread, and forms no group on a thread where one has failed to end."""
    monkeypatch.setattr(module, "ProcessGroupNCCL", Forming)
    monkeypatch.setattr(Forming, "threads", [])
    Forming.others_are_there.set()
    form = nccl_groups(HashStore(), 3, GPU)
    assert [form(name, [1, 3]).place for name in ("pod 1", "lanes from 1")] == [(1, 2)] * 2
    assert len({*Forming.threads, current_thread()}) == 3


def test_a_rank_goes_on_without_a_group_whose_ranks_do_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL would wait without a limit; the rank would be ended for that, and read its weights again."""
    monkeypatch.setattr(module, "ProcessGroupNCCL", Forming)
    Forming.others_are_there.clear()
    with pytest.raises(
        PartFailed, match=r"rank 3 could not form pod 1 over NCCL within 0.01 s: one of its ranks hangs"
    ):
        nccl_groups(HashStore(), 3, GPU, form_seconds=0.01)("pod 1", [1, 3])
    Forming.others_are_there.set()


def test_every_second_pair_of_stages_forms_its_group_at_once() -> None:
    """One pair after the other, the last stage of a deep pipeline would keep all others waiting."""
    topology = Topology(stream=8)
    orders: dict[int, list[tuple[int, ...]]] = {}
    for rank in range(topology.ranks):
        formed = orders[rank] = []

        def form(_name: str, members: Any, formed: list[tuple[int, ...]] = formed) -> Recording:
            formed.append(tuple(members))
            return Recording([], members)

        NcclPlane(neighbours(topology, rank), host_device(torch.float32), HIDDEN, form).close()
    rounds = 0
    while any(orders.values()):
        rounds += 1
        wanted = [order[0] for order in orders.values() if order]
        ready = {members for members in wanted if wanted.count(members) == 2}
        assert ready, "all wait for each other"
        for order in orders.values():
            if order and order[0] in ready:
                order.pop(0)
    assert rounds == 2


def test_a_rank_that_forms_its_groups_reports_to_those_that_have_theirs() -> None:
    """A round of theirs would end for the time that NCCL takes."""
    endpoint, may_end = free_endpoint(), Event()

    def new_plane(site: PlaneSite) -> DataPlane:
        if site.neighbours.rank == 1:
            may_end.wait(10 * ABORT_SECONDS)
        return NcclPlane(site.neighbours, site.device, site.hidden_size, recording([]))

    def rendezvous(rank: int) -> Mesh:
        return Mesh(
            Topology(kv=2), rank, endpoint, address="127.0.0.1", epoch=0, hidden_size=3, device=host_device(torch.float32),
            rendezvous_seconds=20.0, wait_seconds=2.0, new_plane=new_plane,
        )  # fmt: skip

    with ThreadPoolExecutor(2) as pool:
        meshes = [pool.submit(rendezvous, rank) for rank in range(2)]
        done, _ = wait(meshes, timeout=3.0)
        assert not done, "a rank is there before all are"
        may_end.set()
        for mesh in meshes:
            mesh.result().close()


def test_a_plane_is_closed_if_another_rank_is_lost_before_all_have_theirs() -> None:
    mesh, plane = object.__new__(Mesh), Mock()
    mesh._wait_seconds = 60.0

    def lost(_: int) -> int:
        raise PartFailed("rank 1 left")

    mesh.smallest = lost  # type: ignore[method-assign]
    with pytest.raises(PartFailed, match="rank 1 left"):
        mesh._formed(lambda _: plane, Mock())
    plane.close.assert_called_once_with()


def test_torch_knows_every_option_that_keeps_its_watchdog_from_ending_a_rank() -> None:
    header = (HEADERS / "ProcessGroupNCCL.hpp").read_text()
    recorder = (HEADERS / "FlightRecorder.hpp").read_text()
    assert {name for name in TORCH_OPTIONS if f'"{name}"' not in header + recorder} == set()
    assert re.search(r"NoHandling = 0,", header)
    # The first name wins.
    sizes = re.search(r"max_entries_ = getCvarInt\(\s*\{(.*?)\}", recorder, re.DOTALL)
    assert sizes is not None
    assert set(re.findall(r'"(\w+)"', sizes[1])) <= set(TORCH_OPTIONS)


def test_the_plane_follows_from_the_device(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log: list[Entry] = []
    chosen: list[tuple[str, str]] = []

    def site(device: Device) -> PlaneSite:
        form = recording(log)
        near = neighbours(Topology(tensor=2), 0)
        return PlaneSite(
            near, device, HIDDEN, 1, timedelta(seconds=1), form("everyone", (0, 1)), form, HashStore()
        )

    def formed(_store: Any, rank: int, device: torch.device) -> Any:
        chosen.append((str(device), os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]))
        return recording(log)

    monkeypatch.setattr(module, "nccl_groups", formed)
    for name in TORCH_OPTIONS:
        monkeypatch.setenv(name, "3")
    host = plane_choice.choose_plane(site(host_device(torch.float32)))
    assert (type(host), host.tensor_group.captures, chosen) == (GlooPlane, False, [])
    gpu = plane_choice.choose_plane(site(fake_gpu(torch.bfloat16)))
    assert (type(gpu), gpu.tensor_group.captures, chosen) == (NcclPlane, True, [("cuda:0", "0")])
    gpu.close()
    monkeypatch.setattr(plane_choice, "is_nccl_available", lambda: False)
    assert type(plane_choice.choose_plane(site(fake_gpu(torch.bfloat16)))) is GlooPlane
    assert "torch is built without NCCL" in caplog.text
    alone = NcclPlane(neighbours(Topology(kv=2), 0), fake_gpu(torch.bfloat16), HIDDEN, recording(log))
    assert type(alone.tensor_group) is Alone
    alone.close()
