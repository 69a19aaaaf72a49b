"""`medha up` with a store whose service fails in every way while requests use it: the texts are those without a store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from cluster.binaries import CannotBuild
from faulty_proxy import Fault, FaultyProxy, faulty_proxy
from medha_worker.model.model_config import ModelConfig
from object_store import ACCESS_KEY, BUCKET, SECRET_KEY, ObjectStore, object_store

from .conftest import MODEL, Served, free_port, start, stop, write_manifest
from .test_host_tier_served import total
from .test_store_served import DOCUMENT_TOKENS, answer

pytest.importorskip("obstore")
pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

FAULTS: list[Fault] = ["answers 500", "hangs", "resets", "cuts answers", "stalls answers"]


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    try:
        with object_store(tmp_path / "s3", tmp_path / "s3.log") as service:
            yield service
    except CannotBuild as error:
        pytest.skip(str(error))


@pytest.fixture
def proxy(service: ObjectStore) -> Iterator[FaultyProxy]:
    with faulty_proxy(service.endpoint, passed_bytes=100_000) as proxy:
        yield proxy


@pytest.fixture
def served(proxy: FaultyProxy, checkpoint: Path, tmp_path: Path) -> Iterator[Served]:
    """A replica whose device and host memory hold some two documents, so that others return from the store only."""
    config = ModelConfig.from_directory(checkpoint)
    token_bytes = 4 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    port = free_port()
    manifest = write_manifest(
        tmp_path / "store.yaml",
        checkpoint,
        port,
        model={"name": MODEL, "source": {"path": str(checkpoint)}, "maxModelLen": 10_000},
        kvCache={
            "size": str(3 * DOCUMENT_TOKENS * token_bytes // 2),
            "blockSizeTokens": 32,
            "tiers": {
                "host": {"size": str(2 * DOCUMENT_TOKENS * token_bytes)},
                "store": {"url": f"s3://{BUCKET}/kv", "endpoint": proxy.endpoint, "bandwidth": "4Gi"},
            },
        },
    )
    served = start(manifest, port, checkpoint)
    try:
        yield served
    finally:
        stop(served)


def wait_for(what: str, is_so: Callable[[], bool], timeout_seconds: float = 120) -> None:
    end = time.monotonic() + timeout_seconds
    while not is_so():
        assert time.monotonic() < end, f"in vain: {what}"
        time.sleep(0.1)


def test_no_fault_of_the_service_changes_a_text_or_keeps_memory(
    served: Served, proxy: FaultyProxy, service: ObjectStore
) -> None:
    def counted(name: str) -> float:
        return total(served.controller_page(), f"medha_store_tier_{name}")

    def faults() -> int:
        return "".join(served.lines).count("the store has failed, and is left alone for a while")

    def has_failed_since(before: int) -> bool:
        return faults() > before

    texts = [answer(served, number)[0] for number in range(4)]
    wait_for("a write", lambda: counted("written_bytes_total") > 0)
    for fault in FAULTS:
        before = counted("loaded_bytes_total")
        for _ in range(10):  # a busy machine may compute first
            if counted("loaded_bytes_total") > before:
                break
            for number in range(4):
                wait_for("the end of the rest", lambda: counted("rests") == 0, 400)
                assert answer(served, number)[0] == texts[number]
        assert counted("loaded_bytes_total") > before, "the store is used"
        failed = faults()
        proxy.fault = fault
        for number in (0, 1, 2, 3, 0):
            assert answer(served, number)[0] == texts[number], fault
        wait_for(f"the fault {fault}", partial(has_failed_since, failed))
        proxy.fault = ""
    served.wait_idle()
    files = {path for path in (service.directory / BUCKET).rglob("*") if path.is_file()}
    assert {path for path in files if path.name != "hash-key"} == set(service.objects)
    assert counted("failures_total") > 0
