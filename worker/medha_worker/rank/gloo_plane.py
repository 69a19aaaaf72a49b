"""The data plane over gloo, which sends and receives tensors in host memory.

On a CPU, tensors are there already. Tensors on a GPU are copied through pinned host memory, and the host waits for the
GPU each time. That works on any GPU, but nothing overlaps, and no step is captured.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any  # for gloo's groups, whose methods torch does not declare

import torch
from torch.distributed import GatherOptions, Work

from medha_worker.device import HOST, Device
from medha_worker.model.tensor_group import Alone, TensorGroup
from medha_worker.rank.data_plane import TAG, PlaneSite, sharing_a_step, waiting_for
from medha_worker.rank.gloo_groups import Sent


class GlooPlane:
    """`DataPlane` over the group of all ranks, and one of the pod."""

    def __init__(self, site: PlaneSite) -> None:
        """Form the groups; `PartFailed` if another rank does not come."""
        near = site.neighbours
        self.lane = near.lane
        self._near, self._everyone, self._wait = near, site.everyone, site.wait
        self._device, self._hidden_size = site.device, site.hidden_size
        self._pod: _GlooPod | None = None
        if len(near.pod) > 1:
            group = site.host_group(f"pod {near.pod[0]}", near.pod)
            self._pod = _GlooPod(group, near.tensor, len(near.pod), site.device)
        self.tensor_group: TensorGroup = self._pod or Alone()
        self._expected = deque[tuple[Work | None, torch.Tensor]]()  # hidden states that were not taken yet
        self._sent = Sent(2 * site.stages)

    def bound(self, wait: timedelta) -> None:
        self._wait = wait
        if self._pod is not None:
            self._pod.wait_at_most(wait)

    def check(self) -> None:
        """Do nothing: a call that waited for a lost rank has raised already."""

    def abort(self, reason: str) -> None:
        """Do nothing: gloo's waits end by themselves."""

    def send_hidden(self, hidden: torch.Tensor) -> None:
        assert self._near.following is not None, "the last stage sends no hidden states"
        sent = _on_host(self._device, hidden.contiguous())
        work = self._everyone.send([sent], self._near.following, TAG)
        self._sent.keep(work, sent, self._wait)

    def expect_hidden(self, rows: int) -> None:
        """Post the receive; gloo sends nothing before that."""
        assert self._near.previous is not None, "the first stage receives no hidden states"
        hidden = self._device.runtime.host_empty((rows, self._hidden_size), self._device.dtype)
        with waiting_for(self._near.rank, self._near.previous, "hidden states"):
            expected = self._everyone.recv([hidden], self._near.previous, TAG) if rows else None
        self._expected.append((expected, hidden))

    def receive_hidden(self) -> torch.Tensor:
        expected, hidden = self._expected.popleft()
        if expected is not None:
            assert self._near.previous is not None
            with waiting_for(self._near.rank, self._near.previous, "hidden states"):
                expected.wait(self._wait)
        return hidden

    def start(self, outgoing: Mapping[int, torch.Tensor], incoming: Mapping[int, torch.Tensor]) -> _Transfers:
        os.sched_yield()  # let gloo's thread finish before we take the lock that it may want
        device, ranks = self._device, self._near.lanes
        received = {lane: _like_on_host(device, tensor) for lane, tensor in incoming.items()}
        sent = {lane: _on_host(device, tensor) for lane, tensor in outgoing.items()}
        works = [
            *(self._everyone.recv([received[lane]], ranks[lane], TAG) for lane in sorted(incoming)),
            *(self._everyone.send([sent[lane]], ranks[lane], TAG) for lane in sorted(outgoing)),
        ]
        landings = [
            (tensor, incoming[lane]) for lane, tensor in received.items() if tensor is not incoming[lane]
        ]
        return _Transfers(works, landings, sent)

    def finish(self, started: _Transfers) -> None:
        with sharing_a_step(self._near.rank):
            for work in started.works:
                work.wait(self._wait)
        for received, target in started.landings:
            target.copy_(received, non_blocking=True)

    def close(self) -> None:
        """Close the connections, by which ranks that wait for this one notice at once that it has left."""
        self._expected.clear()
        self._sent.forget()
        if self._pod is not None:
            self._pod.close()
        self._everyone = None


@dataclass(frozen=True, slots=True)
class _Transfers:
    """Transfers between lanes that have begun."""

    works: Sequence[Work]
    landings: Sequence[tuple[torch.Tensor, torch.Tensor]]  # received in host memory, and where it belongs
    sent: Mapping[int, torch.Tensor]  # gloo reads them until they are received


class _GlooPod:
    """The tensor ranks of a pod of several, as the model's `TensorGroup`."""

    captures = False

    def __init__(self, group: Any, index: int, size: int, device: Device) -> None:
        self._group: Any = group
        self._index, self._size, self._device = index, size, device

    def wait_at_most(self, wait: timedelta) -> None:
        """Bound the wait of every collective that is begun from here on."""
        self._group.set_timeout(wait)

    def all_reduce(self, x: torch.Tensor) -> None:
        summed = _on_host(self._device, x)
        self._group.allreduce([summed]).wait()
        if summed is not x:
            x.copy_(summed, non_blocking=True)

    def gather_last_dim(self, x: torch.Tensor, widths: list[int]) -> torch.Tensor | None:
        # Gather takes only equal shapes: pad to the widest.
        padded = torch.zeros(x.shape[0], max(widths), dtype=x.dtype, device=HOST)
        padded[:, : x.shape[1]] = _on_host(self._device, x)
        parts = [torch.empty_like(padded) for _ in widths] if self._index == 0 else []
        self._group.gather([parts] if parts else [], [padded], GatherOptions()).wait()
        if not parts:
            return None
        gathered = torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)
        return self._device.place(gathered)

    def close(self) -> None:
        self._group = None


def _on_host(device: Device, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in host memory, once the device has made it: itself if it is there."""
    if tensor.device == HOST:
        return tensor
    copied = device.runtime.host_empty(tensor.shape, tensor.dtype)
    copied.copy_(tensor, non_blocking=True)
    device.synchronise()
    return copied


def _like_on_host(device: Device, tensor: torch.Tensor) -> torch.Tensor:
    """Return memory of the host for what a tensor receives: the tensor itself if it is there."""
    return tensor if tensor.device == HOST else device.runtime.host_empty(tensor.shape, tensor.dtype)
