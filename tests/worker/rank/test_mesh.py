"""The data plane between ranks. The ranks are threads here, because gloo's groups need no processes of their own."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined] # not declared

from medha.errors import PartFailed
from medha.topology import Topology
from medha_worker.device import host_device
from medha_worker.rank.data_plane import MOST_WAIT_SECONDS
from medha_worker.rank.mesh import WAIT_SECONDS, Mesh

HOST_DEVICE = host_device(torch.float32)
FAR_BEYOND_THE_BOUND_SECONDS = 8.0  # of one second


def free_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def rendezvous(topology: Topology, rank: int, endpoint: str, epoch: int, seconds: float = 20.0) -> Mesh:
    return Mesh(
        topology, rank, endpoint, address="127.0.0.1", epoch=epoch, hidden_size=3, device=HOST_DEVICE, rendezvous_seconds=seconds,
        wait_seconds=min(seconds, WAIT_SECONDS),
    )  # fmt: skip


def together(topology: Topology, epoch: int = 0, seconds: float = 20.0) -> list[Mesh]:
    endpoint = free_endpoint()
    with ThreadPoolExecutor(topology.ranks) as pool:
        return list(
            pool.map(lambda rank: rendezvous(topology, rank, endpoint, epoch, seconds), range(topology.ranks))
        )


Result = TypeVar("Result")


def on_all(grids: list[Mesh], work: Callable[[Mesh], Result]) -> list[Result]:
    with ThreadPoolExecutor(len(grids)) as pool:
        return list(pool.map(work, grids))


def test_hidden_states_and_tokens_find_their_way_and_nothing_that_was_sent_is_kept() -> None:
    grids = together(Topology(tensor=2, stream=2))

    def step(grid: Mesh, number: int) -> tuple[list[float], list[int]]:
        hidden, tokens = torch.full((2, 3), float(number)), []
        if grid.is_first_stage:
            grid.send_hidden(hidden + grid.here.tensor)
        else:
            grid.expect_hidden(2)
            hidden = grid.receive_hidden()
        if grid.rank == grid.sampling_rank:
            grid.send_tokens([number, -1])
        elif grid.is_first_stage:
            tokens = grid.receive_tokens(2)
        return hidden[0].tolist(), tokens

    for number in range(40):
        found = on_all(grids, lambda grid, number=number: step(grid, number))  # type: ignore[misc]
        assert [tokens for _, tokens in found] == [[number, -1], [number, -1], [], []]
        assert found[2][0] == [float(number)] * 3
        assert found[3][0] == [float(number + 1)] * 3
    assert all(len(grid.plane._sent) <= 4 for grid in grids)
    assert all(len(grid._sent_tokens) <= 12 for grid in grids)
    on_all(grids, Mesh.close)


def test_tensor_ranks_add_up_and_gather_slices_of_unequal_width() -> None:
    grids = together(Topology(tensor=3))

    def work(grid: Mesh) -> tuple[list[float], torch.Tensor | None]:
        x = torch.tensor([1.0, 2.0]) * (grid.rank + 1)
        grid.tensor_group.all_reduce(x)
        widths = [3, 3, 1]
        part = torch.full((2, widths[grid.rank]), float(grid.rank))
        return x.tolist(), grid.tensor_group.gather_last_dim(part, widths)

    found = on_all(grids, work)
    assert [total for total, _ in found] == [[6.0, 12.0]] * 3
    assert found[0][1] is not None
    assert found[0][1].tolist() == [[0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0]] * 2
    assert (found[1][1], found[2][1]) == (None, None)
    assert on_all(grids, lambda grid: grid.smallest(7 - grid.rank)) == [5, 5, 5]
    on_all(grids, Mesh.close)


def test_ranks_that_have_failed_to_meet_meet_later_also_with_one_that_is_new() -> None:
    """The names under which ranks form groups must not depend on the groups that a rank has formed before."""
    topology = Topology(stream=2)
    for epoch in range(2):
        with pytest.raises(PartFailed, match=r"rank 0 did not reach rank 1 of everyone within 0\.5 s"):
            rendezvous(topology, 0, free_endpoint(), epoch, seconds=0.5)
    grids = together(topology, epoch=2)
    on_all(grids, Mesh.close)
    grids = together(topology, epoch=3)
    assert on_all(grids, lambda grid: grid.smallest(grid.rank)) == [0, 0]
    on_all(grids, Mesh.close)


def test_each_rank_names_the_one_that_does_not_come() -> None:
    endpoint = free_endpoint()

    def problem(rank: int) -> str:
        with pytest.raises(PartFailed) as raised:
            rendezvous(Topology(tensor=2, stream=2), rank, endpoint, 0, seconds=1)
        return str(raised.value)

    here = (0, 1, 3)
    with ThreadPoolExecutor(len(here)) as pool:
        for rank, found in zip(here, pool.map(problem, here), strict=True):
            assert found.startswith(f"rank {rank} did not reach rank 2 of everyone within 1 s")


def test_ranks_listen_at_their_own_address_alone() -> None:
    grids = together(Topology(tensor=2))
    listening = {
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    on_all(grids, Mesh.close)
    assert listening == {"127.0.0.1"}


def test_waiting_for_a_rank_that_has_left_ends_at_once() -> None:
    first, second = together(Topology(stream=2))
    first.close()
    with pytest.raises(PartFailed, match="rank 1 waits for hidden states of rank 0, and lost it"):
        second.expect_hidden(1)
    second.close()


def test_a_wait_for_a_rank_ends_at_once_when_that_rank_leaves() -> None:
    first, second = together(Topology(stream=2))
    second.expect_hidden(1)
    first.close()
    with pytest.raises(
        PartFailed, match=r"rank 1 waits for hidden states of rank 0, and lost it: (?!.*imed out)"
    ):
        second.receive_hidden()
    second.close()


def test_hidden_states_come_while_nobody_waits_for_them() -> None:
    first, second = together(Topology(stream=2))
    sent = torch.arange(3.0 * 2**16).reshape(-1, 3)  # more than the kernel's buffers hold
    second.expect_hidden(len(sent))
    first.send_hidden(sent)
    first.plane._sent._works[0][0].wait(timedelta(seconds=5))  # they have arrived
    assert torch.equal(second.receive_hidden(), sent)
    on_all([first, second], Mesh.close)


def test_who_leaves_is_missed_at_once_also_if_it_still_expects_something() -> None:
    first, second = together(Topology(stream=2))
    second.expect_hidden(1)
    second.close()
    with pytest.raises(
        PartFailed, match=r"rank 0 waits for sampled tokens of rank 1, and lost it: (?!.*imed out)"
    ):
        first.receive_tokens(1)
    first.close()


@pytest.mark.skipif(
    os.sched_getscheduler(0) != os.SCHED_OTHER, reason="somebody has chosen how this process runs"
)
def test_the_thread_that_waits_for_the_network_interrupts_nobody_who_computes() -> None:
    """On a core that both share, it would spin on the lock that the interrupted thread holds."""
    before = {thread.id for thread in psutil.Process().threads()}
    grids = together(Topology(stream=2))
    policies: dict[str, set[int]] = {}
    for thread in psutil.Process().threads():
        with suppress(FileNotFoundError, ProcessLookupError):  # threads of the rendezvous end meanwhile
            if thread.id not in before:
                name = Path(f"/proc/self/task/{thread.id}/comm").read_text().strip()
                policies.setdefault(name, set()).add(os.sched_getscheduler(thread.id))
    assert policies.pop("gloo_tcp_loop") == {os.SCHED_BATCH}
    assert set().union(*policies.values()) <= {os.SCHED_OTHER}
    on_all(grids, Mesh.close)


@pytest.mark.parametrize("refused", [errno.EPERM, errno.EINVAL, errno.ENOSYS])
@pytest.mark.parametrize("call", ["sched_getscheduler", "sched_setscheduler"])
def test_ranks_meet_where_a_sandbox_refuses_to_say_how_threads_run(
    call: str, refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(refused, os.strerror(refused))

    monkeypatch.setattr(os, call, refuse)
    grids = together(Topology(kv=2))
    assert on_all(grids, lambda grid: grid.smallest(3 + grid.rank)) == [3, 3]
    on_all(grids, Mesh.close)


def test_a_port_that_is_taken_and_an_address_that_is_not_ours_are_named() -> None:
    topology = Topology(stream=2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(
            PartFailed, match=rf"rank 0 cannot listen at {endpoint} .*: .*Address already in use"
        ):
            rendezvous(topology, 0, endpoint, epoch=0)
    with pytest.raises(PartFailed, match=r"rank 0 cannot listen at tcp://203\.0\.113\.7:4000 .*: .*assign"):
        rendezvous(topology, 0, "tcp://203.0.113.7:4000", epoch=0)
    with pytest.raises(PartFailed, match=r"rank 0 cannot listen at its own address, 203\.0\.113\.7: "):
        Mesh(
            topology, 0, free_endpoint(), address="203.0.113.7", epoch=0, hidden_size=3, device=HOST_DEVICE, rendezvous_seconds=1.0
        )  # fmt: skip
    nobody = free_endpoint()
    with pytest.raises(
        PartFailed, match=rf"rank 1 did not find rank 0 at {nobody} within 0\.5 s: it does not listen"
    ):
        rendezvous(topology, 1, nobody, epoch=0, seconds=0.5)


def test_who_is_lost_between_two_groups_is_missed_within_the_bound_of_one() -> None:
    endpoint = free_endpoint()

    def half_rendezvous() -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined] # as `Mesh` does
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        ProcessGroupGloo(PrefixStore("0/everyone", store), 1, 2, options)  # then this rank leaves at once

    with ThreadPoolExecutor(2) as pool:
        gone = pool.submit(half_rendezvous)
        rendezvous_epoch = pool.submit(rendezvous, Topology(stream=2), 0, endpoint, epoch=0, seconds=1.0)
        gone.result()
        with pytest.raises(PartFailed, match=r"rank 1 of gathering within 1 s: .* its own log says why"):
            rendezvous_epoch.result(timeout=FAR_BEYOND_THE_BOUND_SECONDS)


def test_ranks_wait_for_one_that_warms_up_and_not_for_one_that_is_silent() -> None:
    waiting, warming = together(Topology(stream=2), seconds=1.0)

    def warm_up_for_long() -> int:
        with warming.warming_up():
            time.sleep(2.0)  # twice the time limit of a silent rank
        return warming.smallest(4)

    with ThreadPoolExecutor(1) as pool:
        warm = pool.submit(warm_up_for_long)
        assert waiting.smallest(7) == 4
        assert warm.result() == 4
        in_vain = pool.submit(waiting.smallest, 7)
        with pytest.raises(PartFailed, match="rank 0 lost another rank while all of them gathered"):
            in_vain.result(timeout=FAR_BEYOND_THE_BOUND_SECONDS)
    waiting.close()
    warming.close()


def test_a_warm_up_during_which_another_rank_was_lost_ends_with_that() -> None:
    gone, warming = together(Topology(stream=2), seconds=1.0)

    def warm_up() -> None:
        with warming.warming_up():
            gone.close()
            time.sleep(0.3)  # the next round is earlier

    with pytest.raises(PartFailed, match="rank 1 lost another rank while all of them gathered"):
        warm_up()
    warming.close()


@pytest.mark.parametrize("shape", [{"stream": 2}, {"tensor": 2}, {"kv": 2}], ids=str)
def test_who_waits_gives_a_step_as_much_time_as_it_was_predicted_to_take_many_times_over(
    shape: dict[str, int],
) -> None:
    grids = together(Topology(**shape), seconds=0.5)

    def rendezvous_in_step(grid: Mesh, late_seconds: float) -> None:
        time.sleep(late_seconds if grid is grids[0] else 0.0)
        one = torch.ones(1, 3)
        if "tensor" in shape:
            grid.tensor_group.all_reduce(one)
        elif "kv" in shape:
            other = 1 - grid.lane
            grid.plane.finish(grid.plane.start({other: one}, {other: torch.empty(1, 3)}))
        elif grid.is_first_stage:
            grid.send_hidden(one)
        else:
            grid.expect_hidden(1)
            grid.receive_hidden()

    on_all(grids, lambda grid: grid.begin_step(0.3))
    on_all(grids, lambda grid: rendezvous_in_step(grid, 1.2))
    for _ in range(4):  # two lanes run two steps each: earlier ones may not have ended
        on_all(grids, lambda grid: grid.begin_step(0.01))
    with pytest.raises((PartFailed, RuntimeError), match=r"[Tt]imed out waiting 500ms"):
        rendezvous_in_step(grids[1], 0.0)
    on_all(grids, Mesh.close)


def test_a_short_step_behind_a_long_one_may_have_to_wait_for_that() -> None:
    grids = together(Topology(stream=2))
    found = [[grid.begin_step(seconds) for seconds in (30.0, 0.01, 0.02)] for grid in grids]
    assert found == [[30.0, 30.0, 0.02]] * 2
    on_all(grids, Mesh.close)


def test_no_step_is_waited_for_without_end() -> None:
    grids = together(Topology(tensor=2))
    grids[0].begin_step(float("inf"))
    assert grids[0]._wait.total_seconds() == MOST_WAIT_SECONDS
    on_all(grids, Mesh.close)
