"""`medha up` whose store and disk fail in every way while requests use them: the texts are those of a replica without tiers.

Each row starts a replica whose device and host memory hold some two documents, so that others come back from files or from
the store. It lets the fault happen, asks until the fault was met, and takes it away. Behind it, all documents are asked
for again, and what each tier still holds is counted: nothing may be left for anybody.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from cluster.binaries import CannotBuild
from faulty_proxy import Fault, FaultyProxy, faulty_proxy
from held_points import WRITE_POINTS, HeldPoints, held_writes
from medha_worker.model.kv_files import PREFIX, packed
from medha_worker.model.model_config import ModelConfig
from object_store import ACCESS_KEY, BUCKET, SECRET_KEY, ObjectStore, object_store
from small_disk import small_disk

from .conftest import MODEL, Served, free_port, start, stop, write_manifest
from .test_failures import processes
from .test_host_tier_served import total
from .tier_leaks import (
    blocks_in,
    header_of,
    remains_in_files,
    remains_in_store,
    status_of,
    wait_for,
    wait_released,
)

pytest.importorskip("obstore")
pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

SEEDS = (1, 2)
DOCUMENT_TOKENS, DOCUMENTS, OUTPUT_TOKENS = 8000, 4, 12
"""So many that reading them is predicted to be faster than computing them on any machine."""
MET_SECONDS = 300.0
SERVICE_FAULTS: tuple[Fault, ...] = (
    "answers 500",
    "hangs",
    "resets",
    "vanishes",
    "cuts answers",
    "stalls answers",
)
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

    def kill(self, module: str) -> None:
        os.kill(processes(self.served, module)[0].pid, signal.SIGKILL)

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
            assert not remains_in_files(
                self.files, status_of(self.controller), are_files_gone=are_files_gone, damaged=damaged
            )
        else:
            wait_for("whole objects only", lambda: not remains_in_store(store))
        assert self.exact > DOCUMENTS


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    folder = tmp_path_factory.mktemp("s3")
    try:
        with object_store(folder / "s3", folder / "s3.log") as service:
            yield service
    except CannotBuild as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def reference(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    port = free_port()
    manifest = write_manifest(
        tmp_path_factory.mktemp("reference") / "plain.yaml",
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

    def site(self, seed: int, files: Path | None = None, **tiers: object) -> Site:
        """Start a replica; `files` is where its disk tier is, if that has to be somewhere else."""
        config = ModelConfig.from_directory(self.checkpoint)
        token_bytes = 4 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
        port = free_port()
        manifest = write_manifest(
            self.folder / "tiers.yaml",
            self.checkpoint,
            port,
            model={"name": MODEL, "source": {"path": str(self.checkpoint)}, "maxModelLen": 10_000},
            kvCache={
                "size": str(3 * DOCUMENT_TOKENS * token_bytes // 2),
                "blockSizeTokens": 32,
                "tiers": {"host": {"size": str(2 * DOCUMENT_TOKENS * token_bytes)}, **tiers},
            },
        )
        served = start(manifest, port, self.checkpoint)
        self.stack.callback(stop, served)
        return Site(served, self.reference, seed, self.folder / "slow", files or self.folder / "files")


@pytest.fixture
def maker(
    checkpoint: Path, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Maker]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("TEST_SLOW_DISK", str(tmp_path / "slow"))
    faults = str(Path(__file__).parent / "disk_faults")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([faults, *filter(None, [os.environ.get("PYTHONPATH")])]))
    with ExitStack() as stack:
        yield Maker(checkpoint, tmp_path, reference, stack)


@pytest.fixture
def proxy(service: ObjectStore) -> Iterator[FaultyProxy]:
    with faulty_proxy(service.endpoint, passed_bytes=100_000) as proxy:
        yield proxy


def with_store(maker: Maker, seed: int, proxy: FaultyProxy, service: ObjectStore) -> tuple[Site, Path]:
    """Return a replica whose store has its documents, and where that store keeps them."""
    prefix = maker.folder.name
    url = f"s3://{BUCKET}/{prefix}"
    site = maker.site(seed, store={"url": url, "endpoint": proxy.endpoint, "bandwidth": "4Gi"})
    site.ask_all()
    store = service.directory / BUCKET / prefix
    wait_for("objects in the store", lambda: any(store.rglob("*.kv")))
    wait_released(site.controller)
    return site, store


def with_files(maker: Maker, seed: int, files: Path) -> Site:
    """Return a replica whose disk tier has its documents in `files`."""
    files.mkdir(exist_ok=True)
    site = maker.site(seed, files, disk={"size": "256Mi", "hostPath": str(files)})
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


@pytest.mark.parametrize("fault", SERVICE_FAULTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_store_that_fails_costs_time_only(
    seed: int, fault: Fault, maker: Maker, proxy: FaultyProxy, service: ObjectStore
) -> None:
    site, store = with_store(maker, seed, proxy, service)
    before = status_of(site.controller)["store"]["failures"]
    proxy.fault = fault
    site.ask_until(f"the fault {fault}", lambda: site.store_has_failed(before))
    site.ask_all()
    proxy.fault = ""
    site.check(store)
    wait_for("the end of the rest", lambda: not status_of(site.controller)["store"]["rests"], 400)
    site.ask_until("an answer of the store", lambda: not status_of(site.controller)["store"]["fault"])
    assert site.errors == 0


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_objects_are_never_used(
    seed: int, how: str, maker: Maker, proxy: FaultyProxy, service: ObjectStore
) -> None:
    site, store = with_store(maker, seed, proxy, service)

    def has_met() -> bool:
        """Whether an object was missed: one that is gone is found missing by a lookup, or by a load."""
        if how != "gone":
            return bool(status_of(site.controller)["store"]["failures"] > before)
        return site.counted("medha_store_tier_lookups_total") > looked

    before = status_of(site.controller)["store"]["failures"]
    looked = site.counted("medha_store_tier_lookups_total")
    damage(sorted(store.rglob("*.kv")), how)
    site.ask_until(f"{how} objects", has_met)
    site.check(store)
    assert site.errors == 0


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_files_are_never_used(seed: int, how: str, maker: Maker, tmp_path: Path) -> None:
    site = with_files(maker, seed, tmp_path / "files")
    wait_written(site)
    before = site.disk_failures()
    files = sorted(site.files.rglob("*.kv"))
    blocks = {path.name: blocks_in(path) for path in files}
    damage(files, how)
    site.ask_until(f"{how} files", lambda: site.disk_failures() > before)
    site.check(None, are_files_gone=how == "gone", damaged=blocks)
    assert site.errors == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_full_disk_costs_time_only(seed: int, maker: Maker, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 3 * 2**20) as folder:
        site = with_files(maker, seed, folder / "files")
        site.ask_until("a full disk", lambda: site.disk_failures() > 0)
        site.check(None)
        tier = site.disk_tier()
        assert (tier["fault"], tier["held"] > 0) == ("", True)
        block_bytes = site.counted("medha_disk_tier_bytes") / tier["held"]
        assert tier["blocks"] * block_bytes <= 3 * 2**20, "it has shrunk to what fits"
        assert site.errors == 0
        stop(site.served)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_disk_costs_time_only(seed: int, maker: Maker, tmp_path: Path) -> None:
    site = with_files(maker, seed, tmp_path / "files")
    wait_written(site)
    site.slow_disk.write_text("1.5")
    log = site.slow_disk.with_suffix(".in")
    site.ask_until("a slow read", lambda: log.exists() and "read" in log.read_text())
    site.ask_all()
    site.slow_disk.unlink()
    site.check(None)
    assert site.errors == 0


@pytest.mark.parametrize("part", ["medha_worker.rank", "medha_worker.controller"])
@pytest.mark.parametrize("when", ["write", "read"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_part_that_is_killed_while_the_store_is_used_changes_no_text(
    seed: int, when: str, part: str, maker: Maker, proxy: FaultyProxy, service: ObjectStore
) -> None:
    site, store = with_store(maker, seed, proxy, service)
    proxy.fault = "stalls questions" if when == "write" else "stalls answers"
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            site.ask_until, f"a {when} that is under way", lambda: proxy.stopped.acquire(blocking=False)
        )
        asked.result()
        last = pool.submit(site.ask, 50)  # it is under way as the part dies
        site.kill(part)
        proxy.fault = ""
        last.result()
    site.check(store)


@pytest.mark.parametrize("part", ["medha_worker.rank", "medha_worker.controller"])
@pytest.mark.parametrize("when", ["write", "read"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_part_that_is_killed_while_files_are_used_changes_no_text(
    seed: int, when: str, part: str, maker: Maker, tmp_path: Path
) -> None:
    site = with_files(maker, seed, tmp_path / "files")
    wait_written(site)
    site.slow_disk.write_text("3")
    log = site.slow_disk.with_suffix(".in")
    site.ask_until(f"a {when} that is under way", lambda: log.exists() and when in log.read_text())
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(site.ask, 50)
        site.kill(part)
        site.slow_disk.unlink()
        last.result()
    site.check(None)


@pytest.mark.parametrize("point", WRITE_POINTS)
def test_a_rank_that_is_killed_at_a_point_of_the_write_of_a_file_changes_no_text(
    point: str, maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = HeldPoints(tmp_path / "points", WRITE_POINTS)
    set_all(monkeypatch, points.environment)
    site = with_files(maker, SEEDS[0], tmp_path / "files")
    wait_written(site)
    points.hold(point)
    site.ask_until(f"a write at the point {point}", lambda: points.is_held(point))
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(site.ask, 50)
        site.kill("medha_worker.rank")
        points.release(point)
        last.result()
    site.check(None)


@pytest.mark.parametrize("part", ["medha_worker.rank", "medha_worker.controller"])
@pytest.mark.parametrize("point", WRITE_POINTS)
def test_a_part_that_is_killed_at_a_point_of_a_write_to_a_folder_changes_no_text_and_nothing_stays(
    point: str, part: str, maker: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a killed rank leaves is deleted by the next one. Here it looks as old as it has to be for that."""
    points, folder = held_writes(tmp_path / "points"), tmp_path / "shared"
    set_all(monkeypatch, points.environment)
    site = maker.site(SEEDS[0], store={"url": f"file://{folder}", "bandwidth": "4Gi"})
    site.ask_all()
    wait_for("objects in the store", lambda: any(folder.rglob("*.kv")))
    wait_released(site.controller)
    points.hold(point)
    site.ask_until(f"a write at the point {point}", lambda: points.is_held(point))
    assert bool(remains_in_store(folder)) == (point != "renamed")
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(site.ask, 50)
        for path in folder.rglob("*#*"):
            os.utime(path, (0, 0))
        site.kill(part)
        points.release(point)
        last.result()
    site.check(folder)


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
