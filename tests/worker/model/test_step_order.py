"""On a device that runs work later, a step begins behind its tables, and tables change behind the step that reads them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from medha_worker.device import HOST, Device, InOrder
from medha_worker.host_memory import HostMemory
from medha_worker.kernels.name_table import torch_kernels
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.transformer import Transformer
from medha_worker.model.weights import Shard

from .test_decode_graphs import Replanning, decodes, filled
from .test_decode_graphs import checkpoint as checkpoint  # a fixture

MAIN, AHEAD = "main", "ahead"


@dataclass(frozen=True, eq=False)
class NotedMark:
    runtime: TwoStreams
    stream: str

    def wait(self) -> None:
        self.runtime.events.append(("wait", self.runtime.stream, self))

    def is_done(self) -> bool:
        return self.runtime.all_is_done


class TwoStreams(InOrder):
    """A runtime that notes what is given to which stream; the device has done it when the test says so."""

    captures = True

    def __init__(self) -> None:
        super().__init__(HOST)
        self.stream, self.all_is_done = MAIN, False
        self.events: list[tuple[str, str, NotedMark | None]] = []

    @contextmanager
    def ahead(self) -> Iterator[None]:
        self.stream = AHEAD
        yield
        self.stream = MAIN

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        self.events.append(("copy", self.stream, None))
        return tensor

    def mark(self) -> NotedMark:
        mark = NotedMark(self, self.stream)
        self.events.append(("mark", self.stream, mark))
        return mark

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()

        def replay() -> None:
            self.events.append(("replay", self.stream, None))
            run()

        return replay


@pytest.fixture
def runtime() -> TwoStreams:
    return TwoStreams()


@pytest.fixture
def model(checkpoint: Path, runtime: TwoStreams) -> Transformer:
    device = Device(HOST, torch.float32, HostMemory(), runtime)
    config = ModelConfig.from_directory(checkpoint)
    kernels = torch_kernels(device)
    kernels = replace(kernels, attention=Replanning(kernels.attention))
    return Transformer.load(checkpoint, config, Shard.whole(config), device=device, kernels=kernels)


def test_a_step_begins_behind_the_copies_of_its_tables(model: Transformer, runtime: TwoStreams) -> None:
    tokens, positions, spans = decodes([20, 3])
    cache = filled(model)
    runtime.events.clear()
    prepared = model.prepare(positions, spans, cache)
    *copies, (last, stream, ready) = runtime.events
    assert {(kind, stream) for kind, stream, _ in copies} == {("copy", AHEAD)}
    assert (last, stream) == ("mark", AHEAD)
    runtime.events.clear()
    model.forward(tokens, prepared)
    assert runtime.events[0] == ("wait", MAIN, ready)


def test_tables_of_a_captured_step_change_behind_its_last_replay(
    model: Transformer, runtime: TwoStreams
) -> None:
    cache = filled(model)
    model.capture_decodes(cache, [2])
    used = []
    for step in range(4):
        tokens, positions, spans = decodes([20 + step, 3 + step])
        runtime.events.clear()
        prepared = model.prepare(positions, spans, cache)
        kind, stream, mark = runtime.events[0]
        assert (kind, stream) == ("wait", AHEAD)
        if step >= 2:  # each of two copies is used again
            assert mark is used[step - 2]
        model.forward(tokens, prepared)
        replayed = runtime.events.index(("replay", MAIN, None))
        kind, stream, mark = runtime.events[replayed + 1]
        assert (kind, stream) == ("mark", MAIN)
        used.append(mark)


@pytest.mark.parametrize("fails", [False, True])
def test_tables_are_kept_until_the_device_has_done_the_step(
    fails: bool, model: Transformer, runtime: TwoStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = filled(model)

    def run_a_step() -> weakref.ref[torch.Tensor]:
        tokens, positions, spans = decodes([20, 3])
        prepared = model.prepare(positions, spans, cache)
        assert prepared.rotations is not None
        ((cos, _),) = prepared.rotations.values()
        with suppress(MemoryError):
            model.forward(tokens, prepared)
        return weakref.ref(cos)

    def failing(*_: object) -> torch.Tensor:
        raise MemoryError

    with monkeypatch.context() as patched:
        if fails:
            patched.setattr(model, "_layer", failing)
        tables = run_a_step()
    assert tables() is not None
    runtime.all_is_done = True
    run_a_step()
    assert tables() is None
