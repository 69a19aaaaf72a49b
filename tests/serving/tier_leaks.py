"""Counts what an idle replica still holds in each of its KV tiers although nobody needs it: all of it must be zero."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from medha.kv.prefix_cache import hash_count
from medha_worker.model.kv_files import PREFIX, prefix_length

SUFFIX = ".kv"
_HELD = {
    "kv": ("used", "reserved"),
    "host_tier": ("swapped", "loading", "fetching", "offered"),
    "disk_tier": ("writing", "waiting"),
}


def status_of(controller: str, timeout_seconds: float = 120) -> dict[str, Any]:
    """Return the status of the core of the controller at this host and port; wait while it starts again, or gathers its ranks."""
    end = time.monotonic() + timeout_seconds
    while True:
        with suppress(httpx.TransportError):
            found: dict[str, Any] = (
                httpx.get(f"http://{controller}/status", timeout=30).raise_for_status().json()
            )
            if found["core"] is not None:
                return dict(found["core"])
        assert time.monotonic() < end, "the controller has no epoch"
        time.sleep(0.1)


def controller_of(folder: Path) -> str:
    """Return the host and port of the controller of a replica of a `Fleet`, whose files are in `folder`."""
    url = json.loads((folder / "run" / "ranks-ready.json").read_text())["metrics_url"]
    return str(url).removeprefix("http://").removesuffix("/metrics")


def held(status: dict[str, Any]) -> dict[str, int]:
    """Return the blocks that a replica holds for requests, copies and hand-offs, by tier and state; no zeros."""
    found: dict[str, int] = {}
    for lane in status["lanes"]:
        for tier, states in _HELD.items():
            here = lane.get(tier) or {}
            for state in states:
                name = f"{tier} {state}"
                found[name] = found.get(name, 0) + here.get(state, 0)
    for state in ("busy", "waiting"):
        found[f"store {state}"] = (status.get("store") or {}).get(state, 0)
    return {name: blocks for name, blocks in found.items() if blocks}


def wait_released(controller: str, timeout_seconds: float = 60) -> None:
    """Wait until a replica holds nothing for anybody; fail if that does not come.

    The longest wait is for a ticket whose reader has died, so a test of that gives more time.
    """
    end = time.monotonic() + timeout_seconds
    while found := held(status_of(controller)):
        assert time.monotonic() < end, f"an idle replica still holds blocks: {found}"
        time.sleep(0.1)


def remains_in_files(
    directory: Path,
    status: dict[str, Any],
    *,
    are_files_gone: bool = False,
    damaged: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, int]:
    """Return the files of a disk tier that are no whole files, and the blocks of whole ones that its replica does not count.

    Of the files of a lane, each of its ranks must have the same ones.

    A replica counts the blocks of a file that somebody has removed until it reads that file, so `are_files_gone` allows them.
    `damaged` has the blocks that files had before somebody exchanged their contents, by name.
    """
    files = [path for path in directory.rglob("*") if path.is_file()]
    unfinished = [path for path in files if path.suffix not in (SUFFIX, "") or path.name.startswith("probe")]
    lanes = [lane["disk_tier"] for lane in status["lanes"]]
    ranks = sorted(directory.rglob("rank-*"), key=lambda path: int(path.name.removeprefix("rank-")))
    beside = of_some = 0
    for lane, tier in enumerate(lanes):
        if tier["fault"]:
            continue  # its files stay until the ranks restart
        of_lane = ranks[lane * len(ranks) // len(lanes) : (lane + 1) * len(ranks) // len(lanes)]
        names = [{path.name for path in rank.glob(f"*{SUFFIX}")} for rank in of_lane]
        for rank, there in zip(of_lane, names, strict=True):
            blocks = sum(damaged[name] if name in damaged else blocks_in(rank / name) for name in there)
            excess = blocks - tier["held"]
            beside += max(excess, 0) if are_files_gone else abs(excess)
        of_some += 0 if are_files_gone else len(set.union(*names) - set.intersection(*names))
    found = {
        "unfinished files": len(unfinished),
        "blocks that nobody counts": beside,
        "files of some ranks only": of_some,
    }
    return {name: count for name, count in found.items() if count}


def remains_in_store(directory: Path) -> list[str]:
    """Return the names of what is in a store beside whole objects and the key of hashes."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return [path.name for path in files if path.suffix != SUFFIX and path.name != "hash-key"]


def blocks_in(path: Path) -> int:
    """Return how many blocks a file of KV has, as its header says."""
    return hash_count(str(header_of(path)["hashes"]))


def header_of(path: Path) -> dict[str, Any]:
    """Return the header of a file of KV."""
    with path.open("rb") as file:
        length = prefix_length(file.read(PREFIX.size))
        found: dict[str, Any] = json.loads(file.read(length))
        return found


def wait_for(what: str, is_so: Callable[[], bool], timeout_seconds: float = 120) -> None:
    """Wait until something is so; fail if that does not come."""
    end = time.monotonic() + timeout_seconds
    while not is_so():
        assert time.monotonic() < end, f"in vain: {what}"
        time.sleep(0.05)
