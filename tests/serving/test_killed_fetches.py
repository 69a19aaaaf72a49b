"""`medha up` whose rank or controller is killed while KV comes back: at each point of a read, and in the midst of a copy.

All ranks begin a new epoch then. The requests continue with the texts that they have without a failure, and nothing is left in a
tier.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from held_points import COPY_POINTS, READ_POINTS, HeldPoints
from medha_worker.model.model_config import ModelConfig

from .conftest import MODEL, Served, free_port, start, stop, write_manifest
from .test_failures import processes
from .test_host_tier_served import total
from .tier_leaks import status_of, wait_for, wait_released
from .tier_site import (
    ONE_RANK,
    Maker,
    Reference,
    made_sites,
    reference_replica,
    set_all,
    wait_written,
    with_files,
)

pytest.importorskip("obstore")
pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

PARTS = ("medha_worker.rank", "medha_worker.controller")
SEED = 3
Grid = Mapping[str, int]
GRIDS = [
    pytest.param(ONE_RANK, id="one rank"),
    pytest.param({"tensor": 2}, id="TP2"),
    pytest.param({"kv": 2}, id="KVP2"),
]
PROMPT_TOKENS, POOL_TOKENS = 400, 128
ROUNDS = 8
"""Most groups of requests that are sent: which of them steps aside, and what is left to copy then, depends on the machine."""
LONG_TOKENS, LONG_OUTPUT_TOKENS, ROOM_TOKENS, STREAMS = 4000, 1100, 1800, 3
"""Of requests whose prompts and expected outputs a pool holds, but not all of their outputs; one of them has to step aside."""


@pytest.fixture(scope="module")
def reference(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    with reference_replica(checkpoint, tmp_path_factory.mktemp("reference")) as reference:
        yield reference


@pytest.fixture
def maker(
    checkpoint: Path, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Maker]:
    with made_sites(checkpoint, tmp_path, reference, monkeypatch) as maker:
        yield maker


@pytest.fixture
def points(maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HeldPoints:
    """Return points of the replicas that `maker` starts, or a test that has it."""
    points = HeldPoints(tmp_path / "points", (*READ_POINTS, *COPY_POINTS))
    set_all(monkeypatch, points.environment)
    return points


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("point", READ_POINTS)
def test_a_part_that_is_killed_at_a_point_of_the_read_of_a_file_changes_no_text(
    point: str, part: str, maker: Maker, points: HeldPoints, tmp_path: Path
) -> None:
    site = with_files(maker, SEED, tmp_path / "files")
    wait_written(site)
    site.kill_at(points, point, part)
    site.check(None)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("point", READ_POINTS)
def test_a_part_that_is_killed_at_a_point_of_the_read_of_an_object_changes_no_text(
    point: str, part: str, maker: Maker, points: HeldPoints, tmp_path: Path
) -> None:
    folder = tmp_path / "shared"
    site = maker.site(SEED, store={"url": f"file://{folder}", "bandwidth": "4Gi"})
    site.ask_all()
    wait_for("objects in the store", lambda: any(folder.rglob("*.kv")))
    wait_released(site.controller)
    site.kill_at(points, point, part)
    site.check(folder)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("point", ["offload", "fetch"])
def test_a_part_that_is_killed_in_the_midst_of_a_copy_changes_no_text(
    point: str, part: str, grid: Grid, maker: Maker, points: HeldPoints, tmp_path: Path
) -> None:
    """The copy is one to host memory, or one to the device beside a step."""
    site = with_files(maker, SEED, tmp_path / "files", grid)
    wait_written(site)
    site.kill_at(points, point, part, number=grid.get("tensor", 1) - 1)  # the first lane copies most
    site.check(None)


class Streams:
    """A small replica, and requests that run at the same time."""

    def __init__(self, served: Served, bodies: list[dict[str, Any]]) -> None:
        self.served, self._bodies = served, bodies

    def answer(self, number: int) -> str:
        """Return the text of a request; if it ends with a clear error, as it may once, ask again."""
        body = {"model": MODEL, "ignore_eos": True, "seed": number, "temperature": 0.9 * (number % 2)}
        url = self.served.url + "/v1/completions"
        answer = httpx.post(url, json=body | self._bodies[number], timeout=300)
        if answer.status_code != 200:
            assert answer.status_code in (500, 503), answer.text
            assert answer.json()["error"]["message"]
            answer = httpx.post(url, json=body | self._bodies[number], timeout=300)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def killed(
        self, points: HeldPoints, point: str, part: str, is_so: Callable[[], bool] = lambda: True
    ) -> list[str] | None:
        """Return the texts of all; a part is killed once a rank waits at a point where something is so.

        Return None if all have ended before.
        """
        with ThreadPoolExecutor(len(self._bodies)) as pool:
            points.hold(point)
            running = [pool.submit(self.answer, number) for number in range(len(self._bodies))]
            try:
                while points.wait(point, partial(all_done, running)):
                    if is_so():
                        os.kill(processes(self.served, part)[0].pid, signal.SIGKILL)
                        break
                    points.release(point)
                    time.sleep(0.1)  # so that the rank goes on before the point is held again
                    points.hold(point)
                else:
                    return None
            finally:
                points.release(point)
            return [one.result() for one in running]

    def alone(self) -> list[str]:
        return [self.answer(number) for number in range(len(self._bodies))]

    def counted(self, name: str) -> float:
        return total(self.served.controller_page(), name)


def all_done(running: list[Any]) -> bool:
    return all(one.done() for one in running)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("point", ["offload", "fetch"])
def test_a_part_that_is_killed_in_the_midst_of_a_swap_changes_no_text(
    point: str, part: str, checkpoint: Path, tmp_path: Path, maker: Maker, points: HeldPoints
) -> None:
    """The outputs outgrow the pool, which has room for all prompts. No prompt comes twice, so only swaps are copied back."""
    config = ModelConfig.from_directory(checkpoint)
    token_bytes = 4 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    port = free_port()
    manifest = write_manifest(
        tmp_path / "swaps.yaml", checkpoint, port,
        model={"name": MODEL, "source": {"path": str(checkpoint)}, "maxModelLen": 8192},
        kvCache={
            "size": str((STREAMS * LONG_TOKENS + ROOM_TOKENS) * token_bytes),
            "tiers": {"host": {"size": str(STREAMS * LONG_TOKENS * token_bytes)}},
        },
        serviceClasses=[{"name": "default", "defaultOutputTokens": 64}],
    )  # fmt: skip
    served = start(manifest, port, checkpoint)
    maker.stack.callback(stop, served)
    counted = 0

    def is_a_swap() -> bool:
        """Return whether the controller has decided on such a copy of a swap since the last question."""
        nonlocal counted
        (lane,) = status_of(served.address("scheduling"))["lanes"]
        before, counted = counted, lane["host_tier"]["swapped_out" if point == "offload" else "hits"]
        return counted > before

    for number in range(ROUNDS):
        dice = random.Random(number)
        prompts = [[dice.randrange(5, 96) for _ in range(LONG_TOKENS)] for _ in range(STREAMS)]
        streams = Streams(
            served, [{"prompt": prompt, "max_tokens": LONG_OUTPUT_TOKENS} for prompt in prompts]
        )
        texts = streams.killed(points, point, part, is_a_swap)
        if texts is not None:
            break
    assert texts is not None, "nothing was swapped"
    assert texts == streams.alone()
    served.wait_idle(60)
    wait_released(served.address("scheduling"))


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_is_killed_while_a_step_reads_streamed_kv_changes_no_text(
    part: str, checkpoint: Path, tmp_path: Path, maker: Maker, points: HeldPoints
) -> None:
    config = ModelConfig.from_directory(checkpoint)
    token_bytes = 4 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    port = free_port()
    manifest = write_manifest(
        tmp_path / "streaming.yaml", checkpoint, port,
        model={"name": MODEL, "source": {"path": str(checkpoint)}, "maxModelLen": 512},
        kvCache={"size": str(POOL_TOKENS * token_bytes), "streaming": {"size": str(512 * token_bytes)}},
    )  # fmt: skip
    served = start(manifest, port, checkpoint)
    maker.stack.callback(stop, served)
    prompts = [[5 + (at * at + number) % 91 for at in range(PROMPT_TOKENS)] for number in range(2)]
    streams = Streams(served, [{"prompt": prompt, "max_tokens": 12} for prompt in prompts])
    texts = streams.killed(points, "stream", part)
    assert texts == streams.alone()
    served.wait_idle(60)
    assert streams.counted("medha_streamed_sequences_total") >= len(prompts)
    assert streams.counted("medha_streaming_bytes") == 0, "all host memory is free again"
    assert status_of(served.address("scheduling"))
    wait_released(served.address("scheduling"))
