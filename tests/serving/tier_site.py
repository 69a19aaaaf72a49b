"""A replica whose tiers can be made to fail, the requests of a test, and the texts that a replica without tiers answers."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from threading import Event
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from held_points import HeldPoints
from medha_worker.model.kv_files import PREFIX, packed
from medha_worker.model.model_config import ModelConfig
from object_store import ACCESS_KEY, SECRET_KEY

from .conftest import MODEL, Served, free_port, start, stop, write_manifest
from .test_failures import processes
from .test_host_tier_served import total
from .tier_leaks import header_of, remains_in_files, remains_in_store, status_of, wait_for, wait_released

DOCUMENT_TOKENS, DOCUMENTS, OUTPUT_TOKENS = 8000, 4, 12
"""So many that reading them is predicted to be faster than computing them on any machine."""
MET_SECONDS = 300.0
ONE_RANK: Mapping[str, int] = MappingProxyType({})
DAMAGES = ("truncated", "flipped", "foreign", "stale", "gone")


@dataclass
class Reference:
    """A replica without tiers, and the texts that it has answered."""

    served: Served
    texts: dict[str, str] = field(default_factory=dict)

    def text(self, body: dict[str, Any]) -> str:
        """Return the text that follows a prompt, computed alone."""
        key = json.dumps(body)
        if key not in self.texts:
            answer = httpx.post(self.served.url + "/v1/completions", json=body, timeout=300)
            self.texts[key] = str(answer.raise_for_status().json()["choices"][0]["text"])
        return self.texts[key]


@dataclass
class Site:
    """A replica with tiers, what is behind them, and the requests of one row."""

    served: Served
    reference: Reference
    seed: int
    slow_disk: Path
    files: Path
    exact: int = 0
    errors: int = 0

    def body(self, number: int) -> dict[str, Any]:
        """Return a question about a document; every second document is asked about with sampling."""
        dice = random.Random(f"{self.seed} {number}")
        return {
            "model": MODEL, "prompt": [dice.randrange(5, 96) for _ in range(DOCUMENT_TOKENS)], "max_tokens": OUTPUT_TOKENS,
            "ignore_eos": True, "seed": 1, "temperature": 0.9 * (number % 2),
        }  # fmt: skip

    def ask(self, number: int) -> None:
        """Ask about a document; the answer must be exact, or one clear error."""
        body = self.body(number)
        expected = self.reference.text(body)
        answer = httpx.post(self.served.url + "/v1/completions", json=body, timeout=300)
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] == expected, f"a wrong text for document {number}"
            self.exact += 1
        else:
            assert answer.status_code in (500, 503), answer.text
            assert answer.json()["error"]["message"]
            self.errors += 1

    def ask_all(self) -> None:
        for number in range(DOCUMENTS):
            self.ask(number)

    def ask_until(self, what: str, is_so: Callable[[], bool]) -> None:
        """Ask about old documents and new ones until something is so: whatever a machine predicts, some are read or written."""
        end = time.monotonic() + MET_SECONDS
        for number in itertools.count():
            if is_so():
                return
            assert time.monotonic() < end, f"in vain: {what}"
            self.ask(number % DOCUMENTS if number % 3 else 100 + number)

    @property
    def controller(self) -> str:
        return self.served.address("scheduling")

    def counted(self, name: str) -> float:
        return total(self.served.controller_page(), name)

    def store_has_failed(self, before: float = 0) -> bool:
        store = status_of(self.controller)["store"]
        return bool(store["fault"]) or store["failures"] > before

    def disk_tier(self) -> dict[str, Any]:
        found: dict[str, Any] = status_of(self.controller)["lanes"][0]["disk_tier"]
        return found

    def disk_failures(self) -> float:
        return self.counted("medha_disk_tier_failures_total")

    def kill(self, module: str, number: int = 0) -> None:
        """Kill the process of a part; `number` is that of a rank."""
        os.kill(self.process_id(module, number), signal.SIGKILL)

    def process_id(self, module: str, number: int = 0) -> int:
        settings = f"/rank-{number}.json" if module == "medha_worker.rank" else ""
        (found,) = [one.pid for one in processes(self.served, module) if one.cmdline()[-1].endswith(settings)]
        return found

    def kill_at(
        self, points: HeldPoints, point: str, part: str = "medha_worker.rank", number: int = 0
    ) -> None:
        """Ask until rank `number` waits at a point, and kill it or another part there. Other ranks pass the point.

        Requests are under way then, which must come back as all others do.
        """
        rank, has_come = self.process_id("medha_worker.rank", number), Event()
        self.reference.text(self.body(50))
        points.hold(point, rank)
        with ThreadPoolExecutor(2) as pool:
            asked = pool.submit(self.ask_until, f"the point {point}", has_come.is_set)
            try:
                points.wait(point, asked.done, rank)
                last = pool.submit(self.ask, 50)
                self.kill(part, number)
            finally:
                has_come.set()
                points.release(point)
            asked.result()
            last.result()

    def answers(self) -> bool:
        """Ask about a document, and return whether there is an answer: a part that was killed may still be starting."""
        before = self.exact
        self.ask(0)
        return self.exact > before

    def check(
        self,
        store: Path | None,
        *,
        are_files_gone: bool = False,
        damaged: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Ask about all documents again, and count what is left in each tier; the options are those of `remains_in_files`."""
        wait_for("an answer", self.answers)
        self.ask_all()
        self.served.wait_idle(60)
        wait_released(self.controller)
        if store is None:
            found = remains_in_files(
                self.files, status_of(self.controller), are_files_gone=are_files_gone, damaged=damaged
            )
            assert not found
        else:
            wait_for("whole objects only", lambda: not remains_in_store(store))
        assert self.exact > DOCUMENTS


@contextmanager
def reference_replica(checkpoint: Path, folder: Path) -> Iterator[Reference]:
    """Serve a replica without tiers until the context ends."""
    port = free_port()
    manifest = write_manifest(
        folder / "plain.yaml",
        checkpoint,
        port,
        model={"name": MODEL, "source": {"path": str(checkpoint)}, "maxModelLen": 10_000},
        kvCache={"size": "64Mi", "blockSizeTokens": 32, "prefixCaching": False},
    )
    served = start(manifest, port, checkpoint)
    try:
        yield Reference(served)
    finally:
        stop(served)


@dataclass
class Maker:
    """Starts the replica of a row, and stops it."""

    checkpoint: Path
    folder: Path
    reference: Reference
    stack: ExitStack

    def site(
        self, seed: int, files: Path | None = None, *, grid: Mapping[str, int] = ONE_RANK, **tiers: object
    ) -> Site:
        """Start a replica; `files` is where its disk tier is, if that has to be somewhere else.

        However many ranks its `grid` has, together they have the same memory.
        """
        config = ModelConfig.from_directory(self.checkpoint)
        token_bytes = 4 * 2 * config.num_layers * config.num_kv_heads * config.head_dim // prod(grid.values())
        port = free_port()
        manifest = write_manifest(
            self.folder / "tiers.yaml",
            self.checkpoint,
            port,
            model={"name": MODEL, "source": {"path": str(self.checkpoint)}, "maxModelLen": 10_000},
            parallelism=dict(grid),
            kvCache={
                "size": str(3 * DOCUMENT_TOKENS * token_bytes // 2),
                "blockSizeTokens": 32,
                "tiers": {"host": {"size": str(2 * DOCUMENT_TOKENS * token_bytes)}, **tiers},
            },
        )
        served = start(manifest, port, self.checkpoint)
        self.stack.callback(stop, served)
        return Site(served, self.reference, seed, self.folder / "slow", files or self.folder / "files")


@contextmanager
def made_sites(
    checkpoint: Path, folder: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Maker]:
    """Let a test make replicas that fail as files in `folder` say; stop them when the context ends."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("TEST_SLOW_DISK", str(folder / "slow"))
    faults = str(Path(__file__).parent / "disk_faults")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([faults, *filter(None, [os.environ.get("PYTHONPATH")])]))
    with ExitStack() as stack:
        yield Maker(checkpoint, folder, reference, stack)


def with_files(maker: Maker, seed: int, files: Path, grid: Mapping[str, int] = ONE_RANK) -> Site:
    """Return a replica whose disk tier has its documents in `files`."""
    files.mkdir(exist_ok=True)
    site = maker.site(seed, files, grid=grid, disk={"size": "256Mi", "hostPath": str(files)})
    site.ask_all()
    return site


def wait_written(site: Site) -> None:
    wait_for("files", lambda: any(site.files.rglob("*.kv")))

    def has_written() -> bool:
        tiers = [lane["disk_tier"] for lane in status_of(site.controller)["lanes"]]
        return not any(tier["writing"] or tier["waiting"] for tier in tiers)

    wait_for("the end of the writes", has_written)


def damage(paths: list[Path], how: str) -> None:
    """Damage files of KV as they lie in a directory."""
    contents = [path.read_bytes() for path in paths]
    for number, (path, content) in enumerate(zip(paths, contents, strict=True)):
        if how == "truncated":
            path.write_bytes(content[: len(content) // 2])
        elif how == "flipped":
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        elif how == "foreign":
            path.write_bytes(contents[(number + 1) % len(contents)])
        elif how == "stale":  # whole, but of another key of hashes
            header = json.dumps(header_of(path) | {"key": "0" * 16}).encode()
            _, length, _ = PREFIX.unpack(content[: PREFIX.size])
            assert len(header) == length
            path.write_bytes(packed(header) + content[PREFIX.size + length :])
        else:
            path.unlink()


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
