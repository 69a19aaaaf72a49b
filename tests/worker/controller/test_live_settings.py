"""A file that is replaced as a whole is read once after each change; content that cannot be used has no effect."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from medha.errors import ConfigInvalid
from medha_process.host_resources import usable_cpus
from medha_worker.controller.live_settings import POLL_SECONDS, LiveFile


def read(path: Path) -> int:
    text = path.read_text()
    if not text.isdigit():
        raise ConfigInvalid(f"{path}: {text!r} is no number")
    return int(text)


def mount(folder: Path, version: str, text: str) -> None:
    """Write a version as the kubelet does: into a new folder, to which a link is then moved."""
    (folder / version).mkdir()
    (folder / version / "number").write_text(text)
    (folder / "link").symlink_to(version)
    (folder / "link").rename(folder / "data")


@pytest.fixture
def number(tmp_path: Path) -> LiveFile[int]:
    mount(tmp_path, "v1", "1")
    (tmp_path / "number").symlink_to("data/number")
    return LiveFile(tmp_path / "number", read, logging.getLogger("medha.test"))


def test_a_change_is_seen_once(number: LiveFile[int], tmp_path: Path) -> None:
    assert number.changed(0.0) is None
    mount(tmp_path, "v2", "2")
    assert number.changed(POLL_SECONDS / 2) is None, "it was looked at just now"
    assert number.changed(POLL_SECONDS) == 2
    assert number.changed(2 * POLL_SECONDS) is None


def test_settings_that_cannot_be_used_are_reported_once_and_later_ones_are_read(
    number: LiveFile[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mount(tmp_path, "v2", "two")
    assert number.changed(0.0) is None
    assert number.changed(10.0) is None
    assert caplog.text.count("'two' is no number") == 1
    (tmp_path / "number").unlink()
    assert number.changed(20.0) is None
    (tmp_path / "number").symlink_to("data/number")
    mount(tmp_path, "v3", "3")
    assert number.changed(30.0) == 3


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 4),
        ({"cpu.max": "max 100000\n"}, 4),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "900000 100000\n"}, 4),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
    ],
)
def test_a_container_counts_the_cpus_of_its_quota(
    files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert usable_cpus(tmp_path) == expected
