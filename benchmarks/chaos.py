"""Measure what clients of three routers get while processes, links, disks and clocks of a fleet fail, alone and in pairs.

    python benchmarks/chaos.py --quick
    python benchmarks/chaos.py --rounds 3 --seed 0 --json benchmarks/results/chaos.json
    python benchmarks/chaos.py --only "freeze a router" --rounds 5 --logs /tmp

Three routers serve three replicas of one checkpoint, which differ in their grids (TP2, SPP2 and KVP2). Each router has
clients that ask one question after the other through the `openai` package. A client that gets an error asks another
router at once, and that is a further attempt. In each episode, a fault hits one process, machine or link, or two faults
hit two of them at about the same time:

* `kill`    a router; all processes of a replica; its controller; one of its ranks (SIGKILL)
* `freeze`  a router, or all processes of a replica, for 6 s (SIGSTOP)
* `cut`     all packets between a router and all replicas, a replica and all routers, or one router and one replica, are
            held for 6 s
* `slow`    all links of a replica have 0.2 s of latency and 32 KB/s for 8 s
* `fill`    the disk of a router or a replica (its run and scratch directory, with its log) is full for 5 s: a tmpfs
* `jump`    the wall clock of all processes of a router or a replica jumps by an hour, forward or back, and 4 s later back:
            they preload a library that is built by gcc; without gcc, this fault is left out

Each replica keeps KV that the device evicts in host memory, in files on its own disk, and in a folder that all replicas
share. Its pool is too small for the KV of all questions, so some KV comes back from there. The library `obstore` is needed
for the folder; without it, it is left out.

The clients do not stop meanwhile. What was killed is replaced or restarts, and the next episode begins when all routers
have all replicas, and hold nothing.

Each attempt must come back exactly as without faults, or with one clear error: a connection that breaks, or a code and
a message. The claims are that this holds, that no attempt hangs, that no text is wrong, that routers that no fault hit
return no error, and that idle replicas hold nothing in a tier that nobody needs. The longest pause is a stream's longest
wait for output, also for the first, that lasted at some time since the fault. With --json, each episode is saved when it
ends, and the same command goes on from there after a stop. Mounts need a namespace of their own (`unshare`).
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
from chaos_accounts import (
    ANSWER_SECONDS,
    BY_NAME,
    KINDS,
    LEFT_IN_TIERS,
    QUICK,
    Attempt,
    Fault,
    Plan,
    account,
    claims,
    schedule,
    summary,
)
from fleet import Replica, Router, wait_for
from harness import ROOT, Row, exit_with, parser, progress, report, revision, save, table

sys.path.append(str(ROOT / "tests"))  # for the counts of what tiers hold, which tests use, too

from medha.api.declared import DeclaredModel, to_text
from medha_process.launch import CONTROLLER
from medha_worker.checkpoints.presets import init_checkpoint
from serving.tier_leaks import controller_of, held, remains_in_files, remains_in_store, status_of

GRIDS = ((2, 1, 1), (1, 2, 1), (1, 1, 2))  # tensor, stream, kv
ROUTERS = 3
CLIENTS = 6
MOST_ATTEMPTS = 12  # of a question
BEGIN_SECONDS = 300.0  # until each router streams, and until further attempts have ended after a fault
FIRST_TOKENS = 5  # of a stream on each router, before a fault
LEFT_SECONDS = 30.0  # until nothing is held any more
DISK_MEGABYTES = 64
KV_BYTES = {"pool": "4608Ki", "host": "3Mi", "disk": "12Mi"}
"""Sizes of the pool and the tiers of each rank: a replica has room for two of the longest questions, and little beside them."""
LARGE_BODY_BYTES = 4096  # a few questions are longer, so that processes tokenise them
SLOW_LATENCY_SECONDS, SLOW_BYTES_PER_SECOND = 0.2, 32_000.0
JUMP_SECONDS = 3600
QUESTIONS: tuple[dict[str, Any], ...] = tuple(
    {
        "model": "m", "prompt": f"question {number}: " + "word " * (15 * number if number % 4 < 3 else 1200),
        "seed": number, "temperature": number % 2, "max_tokens": 40 + 25 * number, "stream": number % 5 < 4,
        "extra_body": {"ignore_eos": True},
    }
    for number in range(10)
)  # fmt: skip


def ask(client: openai.OpenAI, question: dict[str, Any], attempt: Attempt) -> None:
    """Ask a question, and note in `attempt` what comes back; one that times out has no end."""
    try:
        if question["stream"]:
            with client.completions.create(**question) as events:
                for event in events:
                    for choice in event.choices:
                        attempt.text += choice.text
                        attempt.finished |= choice.finish_reason is not None
                    attempt.times.append(time.monotonic())
        else:
            (choice,) = client.completions.create(**question).choices
            attempt.text, attempt.finished = choice.text, choice.finish_reason is not None
    except (openai.APITimeoutError, httpx.ReadTimeout) as error:
        attempt.error = repr(error)
        return
    except openai.APIConnectionError as error:
        attempt.error = f"connection: {error.__cause__!r}"
    except httpx.TransportError as error:
        attempt.error = f"connection: {error!r}"
    except openai.APIError as error:  # a status, or an event of a stream
        status = getattr(error, "status_code", "stream")
        attempt.error = f"{status} {error.code}: {error.message}"
        attempt.says_why = isinstance(error.body, dict) and bool(error.code and error.message)
    attempt.ended = time.monotonic()


class Load:
    """Clients that ask one question after the other, each of a router of its own unless that returns errors."""

    def __init__(self, routers: Sequence[Router], seed: str, clients: int = CLIENTS) -> None:
        self._routers = routers
        self.attempts: list[Attempt] = []
        self.unanswered = 0
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number, random.Random(f"{seed} {number}")), daemon=True)
            for number in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int, dice: random.Random) -> None:
        clients = [
            openai.OpenAI(
                base_url=f"{router.url}/v1",
                api_key="none",
                max_retries=0,  # a retry would be an attempt that nobody counts
                timeout=ANSWER_SECONDS,
            )
            for router in self._routers
        ]
        while not self._ended.is_set():
            question = dice.randrange(len(QUESTIONS))
            for attempt in range(MOST_ATTEMPTS):
                place = (number + attempt) % len(clients)
                one = Attempt(place, question, time.monotonic(), QUESTIONS[question]["stream"])
                self.attempts.append(one)
                ask(clients[place], QUESTIONS[question], one)
                if not one.error:
                    break
                time.sleep(0.2 * attempt)
            else:
                self.unanswered += 1
        for client in clients:
            client.close()

    def ended(self) -> int:
        return sum(one.ended is not None for one in list(self.attempts))

    def has_streams(self) -> bool:
        """Return whether each router has a stream that is under way."""
        streaming = {
            one.router for one in list(self.attempts) if one.ended is None and len(one.times) >= FIRST_TOKENS
        }
        return len(streaming) == len(self._routers)

    def wait(self, done: Callable[[], bool], seconds: float) -> bool:
        """Return whether something happened in time."""
        end = time.monotonic() + seconds
        while not done():
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

    def join(self, since: float) -> list[Attempt]:
        """Ask no more, and return all attempts once each has ended, or hangs since the faults were over."""
        self._ended.set()
        while any(thread.is_alive() for thread in self._threads):
            now = time.monotonic()
            still = [one for one in list(self.attempts) if one.ended is None]
            if still and all(one.hangs(since, now) for one in still):
                break
            time.sleep(0.05)
        return list(self.attempts)


class Clocks:
    """Wall clocks that can be set apart, one for each name, if a C compiler is installed (`wall_clock.c`)."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._library = folder / "wall_clock.so"
        self.exist = shutil.which("gcc") is not None
        if self.exist:
            source = Path(__file__).with_name("wall_clock.c")
            command = [
                "gcc",
                "-O2",
                "-shared",
                "-fPIC",
                "-o",
                str(self._library),
                str(source),
                "-ldl",
                "-lpthread",
            ]
            subprocess.run(command, check=True)

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment of processes that share a clock."""
        if not self.exist:
            return {}
        file = self._folder / name
        file.write_bytes(struct.pack("q", 0))
        return {"LD_PRELOAD": str(self._library), "WALL_CLOCK_FILE": str(file)}

    def jump(self, name: str, seconds: int) -> None:
        """Set a clock ahead of the machine's (seconds), or behind it."""
        with (self._folder / name).open("r+b", buffering=0) as file:  # processes have mapped it
            file.write(struct.pack("q", seconds))


class Site:
    """Replicas of different grids, and the routers that all of them join, each with a disk and a clock of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self.clocks = Clocks(folder / "clocks")
        checkpoint = folder / "checkpoint"
        init_checkpoint(checkpoint, preset="tiny", seed=0)
        models = folder / "models"
        models.mkdir()
        (models / "m.json").write_text(to_text([DeclaredModel(name="m", replicas=len(GRIDS))]))
        self._settings: dict[str, Any] = {
            "models_directory": str(models), "large_body_bytes": LARGE_BODY_BYTES
        }  # fmt: skip
        self.gone: list[Path] = []  # logs of routers that were replaced
        self.routers: list[Router] = []
        for _ in range(ROUTERS):
            self.routers.append(self._router())
        self.store = folder / "store" if importlib.util.find_spec("obstore") else None
        self.replicas = []
        for number, grid in enumerate(GRIDS):
            name = f"replica{number}"
            self.replicas.append(
                Replica(
                    self._disk(name),
                    grid,
                    checkpoint,
                    self.routers,
                    self.clocks.environment(name),
                    spec={"kvCache": self._kv_cache()},
                )
            )

    def _kv_cache(self) -> Row:
        tiers: Row = {"host": {"size": KV_BYTES["host"]}, "disk": {"size": KV_BYTES["disk"]}}
        if self.store is not None:
            tiers["store"] = {"url": f"file://{self.store}", "bandwidth": "1Gi"}
        return {"size": KV_BYTES["pool"], "tiers": tiers}

    def _disk(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir()
        size = f"size={DISK_MEGABYTES}m"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)], check=True)
        return folder

    def _router(self) -> Router:
        name = f"router{next(self._numbers)}"
        keys = self.routers[0].keys if self.routers else None
        environment = self.clocks.environment(name)
        return Router(self._disk(name), keys, environment, **self._settings)

    def start(self) -> list[str]:
        """Start the replicas, and return the answers without faults."""
        for replica in self.replicas:
            replica.start()
        self.settle()
        found = []
        client = openai.OpenAI(base_url=f"{self.routers[0].url}/v1", api_key="none", max_retries=0)
        for number, question in enumerate(QUESTIONS):
            one = Attempt(0, number, time.monotonic())
            ask(client, question, one)
            if not one.finished:
                raise RuntimeError(f"no answer without a fault: {one.error}")
            found.append(one.text)
        assert len(set(found)) == len(found)
        return found

    def settle(self) -> None:
        """Wait until all routers have all replicas."""
        logs = [one.log for one in (*self.routers, *self.replicas)]
        for router in self.routers:
            wait_for(
                lambda router=router: (
                    router.is_accepting()  # type: ignore[misc]
                    and router.metric("medha_router_replicas", state="ready") == len(self.replicas)
                ),
                f"replicas at {router.name}",
                *logs,
            )

    def repair(self) -> None:
        """Replace what has ended, as Kubernetes does."""
        for number, router in enumerate(self.routers):
            if router.process.poll() is not None:
                self.gone.append(router.log)
                self.routers[number] = self._router()
        for replica in self.replicas:
            replica.join(self.routers)
            if not replica.is_alive:
                replica.stop()
                replica.start()

    def held(self) -> float:
        """Return what replicas and routers hold: sequences that run, wait or are open, and the share of KV that is used."""
        names = (
            "medha_replica_sequences_running",
            "medha_replica_sequences_waiting",
            "medha_router_sequences_open",
        )
        return sum(
            router.metric(name) for router in self.routers for name in (*names, "medha_replica_kv_used_ratio")
        )

    def left_in_tiers(self) -> Row:
        """Return what idle replicas have in their tiers although nobody needs it, by `LEFT_IN_TIERS`."""
        found = dict.fromkeys(LEFT_IN_TIERS, 0)
        for replica in self.replicas:
            status = status_of(controller_of(replica.folder))
            found["held_blocks"] += sum(held(status).values())
            found["stray_in_files"] += sum(
                remains_in_files(replica.folder / "run" / "kv-files", status).values()
            )
        if self.store is not None:
            found["stray_objects"] = len(remains_in_store(self.store))
        return found

    def has_nothing_left(self) -> bool:
        with suppress(FileNotFoundError):  # a file was deleted while it was counted
            return not any(self.left_in_tiers().values())
        return False

    def delete_remains(self) -> None:
        """Let a rank delete what killed ranks have left in the store, as a rank does with what is old when it starts."""
        left = [] if self.store is None else [path for path in self.store.rglob("*#*") if path.is_file()]
        for path in left:
            os.utime(path, (0, 0))
        if left:
            self.replicas[0].signal(signal.SIGKILL, "rank-0.json")
            wait_for(lambda: not any(path.exists() for path in left), "deletion", self.replicas[0].log)
            self.settle()

    def came_from_tiers(self) -> Row:
        """Return the blocks that came from tiers, in the epochs of the replicas that go on now."""
        found = {"fetched_blocks": 0, "read_blocks": 0}
        for replica in self.replicas:
            status = status_of(controller_of(replica.folder))
            for lane in status["lanes"]:
                found["fetched_blocks"] += lane["host_tier"]["fetched"]
                found["read_blocks"] += lane["disk_tier"]["loaded"]
            found["read_blocks"] += (status["store"] or {}).get("loaded", 0)
        return found

    def moved(self) -> dict[str, float]:
        """Return how often each router that answers has submitted a sequence again."""
        found = {}
        for router in self.routers:
            with suppress(httpx.HTTPError):
                found[router.name] = router.metric("medha_router_resubmissions_total")
        return found

    def close(self) -> None:
        for one in (*self.replicas, *self.routers):
            one.close()

    def copy_logs(self, target: Path) -> None:
        for log in (*self.gone, *(one.log for one in (*self.routers, *self.replicas))):
            shutil.copy(log, target / f"chaos-{log.parent.name}.log")


def inflict(site: Site, fault: Fault) -> None:
    """Begin a fault."""
    router, replica = site.routers[fault.router], site.replicas[fault.replica]
    match fault.kind.action, fault.kind.part:
        case "kill", "router":
            router.process.kill()
        case "kill", "replica":
            replica.signal(signal.SIGKILL)
        case "kill", "controller":
            replica.signal(signal.SIGKILL, f"{CONTROLLER}.json")
        case "kill", "rank":
            replica.signal(signal.SIGKILL, f"rank-{int(fault.forward)}.json")
        case "freeze", "router":
            router.process.send_signal(signal.SIGSTOP)
        case "freeze", "replica":
            replica.signal(signal.SIGSTOP)
        case "cut", _:
            for wire in wires(site, fault):
                wire.hold()
        case "slow", _:
            for wire in wires(site, fault):
                wire.slow(SLOW_LATENCY_SECONDS, SLOW_BYTES_PER_SECOND)
        case "fill", _:
            fill(folder_of(site, fault))
        case "jump", _:
            site.clocks.jump(folder_of(site, fault).name, JUMP_SECONDS if fault.forward else -JUMP_SECONDS)


def undo(site: Site, fault: Fault) -> None:
    """End a fault. What was killed stays so."""
    router, replica = site.routers[fault.router], site.replicas[fault.replica]
    match fault.kind.action, fault.kind.part:
        case "freeze", "router":
            router.process.send_signal(signal.SIGCONT)
        case "freeze", "replica":
            replica.signal(signal.SIGCONT)
        case (("cut" | "slow"), _):
            for wire in wires(site, fault):
                wire.release()
        case "fill", _:
            filling(folder_of(site, fault)).unlink()
        case "jump", _:
            site.clocks.jump(folder_of(site, fault).name, 0)


def wires(site: Site, fault: Fault) -> list[Any]:
    """Return the connections that a fault hits."""
    router, replica = site.routers[fault.router], site.replicas[fault.replica]
    match fault.kind.part:
        case "router":
            return [wire for one in site.replicas for wire in one.wires_to(router)]
        case "link":
            return replica.wires_to(router)
        case _:
            return replica.wires


def folder_of(site: Site, fault: Fault) -> Path:
    return (site.routers[fault.router] if fault.kind.hits_router else site.replicas[fault.replica]).folder


def filling(folder: Path) -> Path:
    return folder / "filling"


def fill(folder: Path) -> None:
    """Fill a disk to the last byte."""
    with filling(folder).open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 10, 1):
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass


def run_episode(site: Site, plan: Plan, expected: Sequence[str], seed: int) -> Row:
    """Let clients ask, cause the faults, end them, and wait until all is well again."""
    moved = site.moved()
    load = Load(site.routers, f"{seed} {plan.key}")
    if not load.wait(load.has_streams, BEGIN_SECONDS):
        raise RuntimeError(f"no streams on every router: {[one.error for one in load.attempts if one.error]}")
    since = time.monotonic()
    waiting: list[tuple[float, Callable[[Site, Fault], None], Fault]] = []
    for fault in plan.faults:
        waiting.append((fault.after_seconds, inflict, fault))
        waiting.append((fault.after_seconds + fault.kind.seconds, undo, fault))
    for after, act, fault in sorted(waiting, key=lambda one: one[0]):
        time.sleep(max(since + after - time.monotonic(), 0.0))
        act(site, fault)
    over = time.monotonic()
    ended = load.ended()
    load.wait(lambda: load.ended() >= ended + CLIENTS, BEGIN_SECONDS)
    attempts = load.join(over)
    hit = {fault.router for fault in plan.faults if fault.kind.hits_router}
    row: Row = {"row": plan.row, "faults": [str(fault) for fault in plan.faults]}
    row |= account(attempts, expected, hit, since, time.monotonic()) | {"unanswered": load.unanswered}
    row["moved"] = round(sum(now - moved.get(name, 0.0) for name, now in site.moved().items()))
    site.repair()
    site.settle()
    with suppress(httpx.TransportError):
        row["left_over"] = int(not load.wait(lambda: not site.held(), LEFT_SECONDS))
    row |= site.came_from_tiers()
    site.delete_remains()
    load.wait(site.has_nothing_left, LEFT_SECONDS)
    row |= site.left_in_tiers()
    return row | {"load_average": round(os.getloadavg()[0], 1), "revision": revision()}


def earlier(target: Path | None, settings: Row) -> dict[str, Row]:
    """Return the episodes of an earlier run with the same settings; exit if they are others."""
    if target is None or not target.exists():
        return {}
    kept: Row = json.loads(target.read_text(encoding="utf-8"))
    for name, value in settings.items():
        if kept.get(name) != value:
            raise SystemExit(
                f"{target} was measured with {name} {kept.get(name)}, not {value}; name another file"
            )
    found: dict[str, Row] = kept["episodes"]
    return found


HEAD = (
    "fault", "episodes", "sent", "exact", "error", "unclear", "wrong", "hang", "errors_elsewhere", "unanswered",
    "left_over", *LEFT_IN_TIERS, "pause_seconds", "pause_elsewhere_seconds",
)  # fmt: skip


def arguments_of() -> argparse.Namespace:
    options = parser(__doc__, quick=f"{len(QUICK)} kinds of fault, once each, no pairs", rounds=3, seed=True)
    options.add_argument(
        "--only",
        choices=list(BY_NAME),
        action="append",
        metavar="KIND",
        help="this kind of fault; may be repeated",
    )
    options.add_argument("--pairs", type=int, default=6, metavar="N", help="pairs in each round (default 6)")
    options.add_argument(
        "--logs", type=Path, metavar="FOLDER", help="copy the logs of all processes there at the end"
    )
    options.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return options.parse_args()


def main() -> int:
    arguments = arguments_of()
    if not arguments.inside:  # signals reach the same process as before
        command = ["unshare", "--map-root-user", "--mount", sys.executable, *sys.argv, "--inside"]
        os.execvp(command[0], command)  # noqa: S606 - it needs no shell
    names = arguments.only or (QUICK if arguments.quick else list(BY_NAME))
    rounds, pairs = (1, 0) if arguments.quick else (arguments.rounds, arguments.pairs)
    settings: Row = {
        "seed": arguments.seed,
        "grids": [list(grid) for grid in GRIDS],
        "clients": CLIENTS,
        "kv_bytes": KV_BYTES,
    }
    episodes = earlier(arguments.json, settings)
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
        site = Site(Path(folder))
        notes = ["clocks jump by a preloaded library (wall_clock.c)"]
        if site.store is None:
            notes += ["no store: there is no obstore; pip install 'medha[worker]'"]
        if not site.clocks.exist:
            notes = [*notes[1:], "no clock jumps: there is no gcc; apt-get install gcc"]
            names = [name for name in names if BY_NAME[name].action != "jump"]
        plans = schedule(arguments.seed, rounds, pairs, [kind for kind in KINDS if kind.name in names])
        try:
            expected = site.start()
            for number, plan in enumerate(plans, start=1):
                if plan.key in episodes:
                    continue
                row = episodes[plan.key] = run_episode(site, plan, expected, arguments.seed)
                shown = {name: row[name] for name in HEAD[2:] if row[name]}
                progress(
                    f"[{number}/{len(plans)}] {' and '.join(row['faults'])}: {shown} {row['errors'] or ''}"
                )
                figures = {
                    **settings,
                    "notes": notes,
                    "rows": summary(episodes.values()),
                    "episodes": episodes,
                }
                save(
                    claims(list(episodes.values()), are_many=not (arguments.quick or arguments.only)),
                    arguments.json,
                    figures,
                )
        finally:
            site.close()
            if arguments.logs:
                site.copy_logs(arguments.logs)
            unmount(Path(folder))
    rows = summary(episodes.values())
    table(HEAD, [[row[name] for name in HEAD] for row in rows])
    figures = {**settings, "notes": notes, "rows": rows, "episodes": episodes}
    return report(
        claims(list(episodes.values()), are_many=not (arguments.quick or arguments.only)),
        arguments.json,
        figures,
        strict=True,
    )


def unmount(folder: Path) -> None:
    """Unmount the disks, so that their folders can be removed."""
    for one in folder.iterdir():
        subprocess.run(["umount", "--lazy", str(one)], check=False, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    exit_with(main)
