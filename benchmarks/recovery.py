"""Measure what clients see when processes of a replica are killed, stopped or cut off under load, and for how long.

    python benchmarks/recovery.py                          # one of each, on 8 ranks
    python benchmarks/recovery.py --quick                  # two ranks, killed only
    python benchmarks/recovery.py --failures 50 --seed 0   # at random
    python benchmarks/recovery.py --shape 1,2,1 --json benchmarks/results/recovery.json

A replica runs in namespaces of its own (`unshare`). Each process has its own loopback address, so it can be cut off
like a machine whose cable was pulled: for some seconds, every packet from and to it is dropped. While streams are open,
a process is killed (SIGKILL), stopped (SIGSTOP, and never continued by this script) or cut off. One stream follows a
schema, and one is a function call. Every stream must end with exactly the text that it has without a failure. If a router fails, its clients ask again; no other clients do.

The result is the time from the failure to the next token of each stream that it interrupts. After a cut, this time
begins when the network is back; the time since it went is reported, too. A stream that had ended by then was not
interrupted, and is not counted. For comparison, all ranks are killed at once (a full reload). Another result is the time
from a router's failure until neither a request nor a block of KV is held for its clients.

The claims are that every stream is complete and has the same text, that what a router held is free within 10 s, that
every process has ended, and that no shared memory is left. With 8 ranks, the time (p99) to the next token when a rank,
their leader (rank 0) or the controller fails, in whatever way, is compared with that of the full reload. The time after
which a stopped process is killed is subtracted first, as no machine shortens it. A failure without any effect must not count
as a success. So two more claims are that each way to fail kept streams waiting, and that each failure of a rank or a
controller began a new epoch, except for networks that were back before anybody could notice. The exit status is 1 unless
every claim holds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import numpy as np
import psutil
import yaml
from client_stream import Stream
from harness import Row, claim, exit_with, parser, progress, report
from rich.console import Console

from medha_cli.local_parts import RunFiles, write_parts
from medha_cli.manifest import model_directory, read_manifest
from medha_cli.terminal_display import TerminalDisplay
from medha_process.supervision.heartbeat import POLL_SECONDS, STOPPED_SECONDS
from medha_process.supervision.lifecycle import (
    DEATHS_SECONDS,
    MOST_DEATHS,
    MOST_DEATHS_SLOW,
    SLOW_DEATHS_SECONDS,
)
from medha_process.supervision.supervisor import StopRequests, supervise
from medha_worker.checkpoints.presets import init_checkpoint

PORT = 8000  # the namespace is our own
START_SECONDS = 120.0
# Most time from a router's failure until nothing is held for it. It bounds waiting, and not speed: a stopped router is
# killed after 2.5 s, and one that is cut off counts as lost after 4 s. No further limit may have to pass.
FREE_SECONDS = 10.0
NOTICED_SECONDS = 6.0  # a network that is away for this long certainly ends an epoch
MOST_OF_RELOAD = (
    1.5  # of the p99 with GRID_RANKS ranks; if each rank has a core, one starts no faster than all together
)
LIMIT_SECONDS = {
    "stop": STOPPED_SECONDS + POLL_SECONDS
}  # longest wait until the supervisor kills a process, by kind
GRID_RANKS = 8  # size of the grid for which that is the goal
# The goal is for these; after a failure of a router, its clients ask again.
BOUND_PARTS = ("rank", "leader", "controller")
STREAM_SECONDS = 180.0
ROUTER, CONTROLLER, FIRST_RANK = 1, 2, 10  # the last number of each process's address
LOAD = (
    (3, "text"),
    (40, "schema"),
    (200, "function"),
    (500, "text"),
)  # words of each prompt, form of the output
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (only looked at)
TOKENS = 160  # of a stream
LONG_TOKENS = 4000  # of a stream that lasts longer than it takes to notice a failure

SECONDS = ("p50_seconds", "p99_seconds", "most_seconds")  # fields of a row


@dataclass(frozen=True)
class Failure:
    """A failure: `kind` is kill, stop or cut; a cut network is restored after `seconds`."""

    kind: str
    parts: tuple[str, ...]
    after_tokens: int
    seconds: float = 0.0

    @property
    def part(self) -> str:
        """The kind of process that fails; the leader is the rank at which all ranks rendezvous."""
        if len(self.parts) > 1:
            return "all ranks"
        return "leader" if self.parts[0] == "rank 0" else self.parts[0].split()[0]

    def __str__(self) -> str:
        who = self.part if len(self.parts) > 1 else self.parts[0]
        return f"{self.kind} {who}" + (f" for {self.seconds:.0f} s" if self.seconds else "")


@dataclass
class Asked(Stream):
    """A stream of a client that may ask again."""

    tokens: int = TOKENS

    def run(self, url: str, *, asks_again: bool = False) -> None:
        """Ask for the answer; if `asks_again`, until it is complete, because a router's failure breaks connections."""
        end = time.monotonic() + STREAM_SECONDS
        while time.monotonic() < end:
            try:
                self.ask(url, timeout_seconds=60)
            except httpx.HTTPError as error:  # also 503, as long as a new router knows no replica
                if not asks_again:
                    self.error = f"lost: {error!r}"
                    return
                time.sleep(0.1)
            else:
                return
        self.error = self.error or "never answered"

    def interruption(self, failed_at: float, back_at: float) -> float | None:
        """Return the seconds from `back_at` to the end of the longest wait for a token since `failed_at`.

        It is 0 if that token came before `back_at`, and None if no token came after `back_at`, because the stream was over.
        """
        if not self.times or self.times[-1] < back_at:
            return None
        times = [failed_at, *(at for at in self.times if at >= failed_at)]
        waits = [(after - before, after) for before, after in itertools.pairwise(times)]
        return max(max(waits)[1] - back_at, 0.0)


class Replica:
    """`medha up` in a process below this one, with an address for each of its own processes."""

    def __init__(self, folder: Path, shape: tuple[int, int, int], preset: str) -> None:
        self.folder, self.shape = folder, shape
        self.url = f"http://127.0.0.1:{PORT}"
        checkpoint = folder / "checkpoint"
        init_checkpoint(checkpoint, preset=preset, seed=0)
        tensor, stream, kv = shape
        manifest = {
            "apiVersion": "medha.dev/v1alpha1",
            "kind": "MedhaReplica",
            "metadata": {"name": "recovery"},
            "spec": {
                "model": {"name": "m", "source": {"path": str(checkpoint)}, "maxModelLen": 4096},
                "router": {"port": PORT},
                "threads": 1,
                "parallelism": {"tensor": tensor, "stream": stream, "kv": kv},
                "scheduling": {"maxChunkTokens": 128, "longThresholdTokens": 400},
                "kvCache": {"size": "64Mi", "tokensPerLane": 400},
            },
        }
        (folder / "manifest.yaml").write_text(yaml.safe_dump(manifest))
        self.log = folder / "log"
        self.ranks = [f"rank {rank}" for rank in range(tensor * stream * kv)]
        self._seen: dict[int, psutil.Process] = {}

    def start(self) -> None:
        with self.log.open("w") as log:
            command = [sys.executable, __file__, "--serve", str(self.folder)]
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self.wait_ready()

    def wait_ready(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if httpx.get(self.url + "/ready", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        sys.exit(f"the replica is not ready:\n{self.log.read_text()[-4000:]}")

    def part(self, name: str) -> psutil.Process:
        """Return the process that runs a part now."""
        file = f"{name.replace(' ', '-')}.json"
        while True:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self._seen[process.pid] = process  # all of them, also those that parts have started
                try:
                    if process.cmdline()[-1].endswith(f"/{file}"):
                        return process
                except (psutil.Error, IndexError):
                    continue  # it has just ended, or is about to begin
            time.sleep(0.05)

    def is_idle(self) -> bool:
        """Return whether the controller answers, knows no request, and holds no KV."""
        found = self._metrics("medha_sequences_running", "medha_sequences_waiting", "medha_kv_used_ratio")
        return len(found) == 3 and not any(found)

    def epoch(self) -> float:
        """Return the controller's epoch as soon as it answers."""
        while not (found := self._metrics("medha_epoch")):
            time.sleep(0.05)
        return found[0]

    def _metrics(self, *names: str) -> list[float]:
        """Return metrics from the controller's own port, with or without a router; empty if it does not answer."""
        ready = json.loads((self.folder / "run" / "ranks-ready.json").read_text())
        try:
            metrics = httpx.get(ready["metrics_url"]).text
        except httpx.TransportError:  # it has ended, or is stopped
            return []
        return [
            float(value) for value in re.findall(rf"^(?:{'|'.join(names)}) (\S+)$", metrics, re.MULTILINE)
        ]

    def stop(self) -> list[str]:
        """End the replica as Ctrl-C does; return the processes that are left over."""
        for part in ("router", "controller", *self.ranks):
            self.part(part)
        self.process.send_signal(signal.SIGINT)
        self.process.wait(timeout=60)
        _, left = psutil.wait_procs(self._seen.values(), timeout=5)
        return [str(process) for process in left]


class Network:
    """The namespace's loopback, on which a process can be cut off."""

    def __init__(self) -> None:
        _ip("link set lo up")
        _ip("rule add pref 100 lookup local")  # after our own rules
        _ip("rule del pref 0")
        self._rules: list[str] = []

    def cut(self, part: str, process: psutil.Process) -> None:
        """Drop packets to and from the process's address, and those of its connections from other addresses."""
        address = address_of(part)
        self._rules += [f"to {address}", f"from {address}"]
        connections = process.net_connections("tcp")
        connected = [one for one in connections if one.status == psutil.CONN_ESTABLISHED]
        elsewhere = {one.laddr.port for one in connected if one.laddr.ip != address} - {PORT}
        for port in elsewhere:
            self._rules += [f"ipproto tcp sport {port}", f"ipproto tcp dport {port}"]
        for rule in self._rules:
            _ip(f"rule add pref 10 {rule} blackhole")

    def restore(self) -> None:
        for _ in self._rules:
            _ip("rule del pref 10")
        self._rules = []


def _ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True)


def address_of(part: str) -> str:
    number = {"router": ROUTER, "controller": CONTROLLER}.get(part)
    return f"127.0.1.{FIRST_RANK + int(part.split()[1]) if number is None else number}"


def serve(folder: Path) -> int:
    """Run the replica's parts on TCP, each from its own address."""
    replica = read_manifest(folder / "manifest.yaml")
    files = RunFiles(folder / "run")
    files.directory.mkdir()
    groups = write_parts(replica, model_directory(replica), files, record=None, log_level="info")
    ports = {"router-control": 7001, "router-tokens": 7002, "rank-control": 7003, "rank-tokens": 7004}
    for settings in files.directory.glob("*.json"):
        part = settings.stem.replace("rank-", "rank ")

        def reached(value: Any, part: str = part) -> Any:
            """Return settings with the addresses of `part`'s links in place of their local endpoints."""
            if isinstance(value, dict):
                return {key: reached(one) for key, one in value.items()}
            if isinstance(value, list):
                return [reached(one) for one in value]
            name = str(value).rpartition("/")[2]
            if name not in ports:
                return value
            server = "router" if name.startswith("router") else "controller"
            source = "" if server == part else f"{address_of(part)}:0;"
            return f"tcp://{source}{address_of(server)}:{ports[name]}"

        own = reached(json.loads(settings.read_text()))
        if part.startswith("rank "):
            own["address"] = address_of(part)
        if part == "controller":
            own["rendezvous_host"] = address_of("rank 0")
        settings.write_text(json.dumps(own))
    lifecycle = replica.spec.lifecycle
    with StopRequests() as requests:
        state = supervise(
            groups,
            run_directory=files.directory,
            is_ready=files.is_ready,
            display=TerminalDisplay(Console(width=200), "recovery", lambda _: []),
            ready_seconds=lifecycle.ready_seconds,
            drain_seconds=1.0,
            requests=requests,
        )
    print(state.failure)
    return state.exit_status


def load() -> list[Asked]:
    """Return the streams of a run, always the same: two free texts, one that follows a schema, and a function call."""
    random_words = random.Random(0)
    words = ["red", "green", "blue", "white", "tower", "river", "seven", "nine", "over", "under"]
    return [
        Asked(" ".join(random_words.choices(words, k=count)), seed, form=form)
        for seed, (count, form) in enumerate(LOAD)
    ]


@contextmanager
def running(streams: Sequence[Asked], url: str, *, ask_again: bool = False) -> Iterator[None]:
    threads = [Thread(target=stream.run, args=(url,), kwargs={"asks_again": ask_again}) for stream in streams]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join()


@dataclass
class Outcome:
    failure: Failure
    complete: int
    same: int
    seconds: list[float]  # of each stream that was interrupted, until its next token
    epochs: int  # that began since the failure
    errors: list[str] = field(default_factory=list)

    @property
    def went_unnoticed(self) -> bool:
        """True if no epoch began although a rank or a controller was gone for long enough."""
        known = self.failure.kind != "cut" or self.failure.seconds >= NOTICED_SECONDS
        return known and self.failure.part != "router" and self.epochs == 0


def fail(replica: Replica, network: Network, failure: Failure, expected: Sequence[str]) -> Outcome:
    """Cause a failure under load, and wait until every stream is complete."""
    streams, epoch = load(), replica.epoch()
    if "router" in failure.parts:  # so that it has processes of its own, which share memory with it
        httpx.post(
            replica.url + "/v1/completions", json={"model": "m", "prompt": "word " * 100_000}, timeout=60
        )
    with running(streams, replica.url, ask_again="router" in failure.parts):
        # What the router has not taken yet may be refused while there is no replica, and is not lost.
        while not any(stream.error for stream in streams) and (
            not all(stream.taken for stream in streams)
            or sum(len(stream.times) for stream in streams) < failure.after_tokens
        ):
            time.sleep(0.005)
        failed_at = back_at = time.monotonic()
        for part in failure.parts:
            process = replica.part(part)
            if failure.kind == "cut":
                network.cut(part, process)
            else:
                os.kill(process.pid, signal.SIGKILL if failure.kind == "kill" else signal.SIGSTOP)
        if failure.kind == "cut":
            time.sleep(failure.seconds)
            network.restore()
            back_at = time.monotonic()
    if not all(stream.times for stream in streams):
        sys.exit(f"{failure}: {[stream.error for stream in streams]}\n{replica.log.read_text()[-8000:]}")
    interruptions = [stream.interruption(failed_at, back_at) for stream in streams]
    rest(replica)
    return Outcome(
        failure,
        complete=sum(not stream.error for stream in streams),
        same=sum(stream.text == text for stream, text in zip(streams, expected, strict=True)),
        seconds=[seconds for seconds in interruptions if seconds is not None],
        epochs=round(replica.epoch() - epoch),
        errors=[stream.error for stream in streams if stream.error],
    )


def rest(replica: Replica) -> None:
    """Wait until the replica serves again and nothing is open."""
    replica.wait_ready()
    end = time.monotonic() + STREAM_SECONDS
    while not replica.is_idle():
        if time.monotonic() > end:
            sys.exit(f"requests or KV are still held:\n{replica.log.read_text()[-4000:]}")
        time.sleep(0.1)


def freed_after_router(replica: Replica, network: Network, kind: str) -> float:
    """Return the seconds from a router's failure until nothing is held for its clients, who do not return."""
    streams = [Asked("red tower", seed, LONG_TOKENS) for seed in range(len(LOAD))]
    for stream in streams:
        Thread(target=stream.run, args=(replica.url,), daemon=True).start()
    while sum(len(stream.times) for stream in streams) < 50:
        time.sleep(0.005)
    router = replica.part("router")
    if kind == "cut":
        network.cut("router", router)
    else:
        os.kill(router.pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    failed_at = time.monotonic()
    while not replica.is_idle() and time.monotonic() < failed_at + STREAM_SECONDS:
        time.sleep(0.05)
    seconds = time.monotonic() - failed_at
    if any(len(stream.times) == LONG_TOKENS for stream in streams):
        sys.exit("streams were over before the router failed, so that nothing was left to be freed")
    network.restore()
    replica.wait_ready()
    return seconds


def one_of_each(ranks: Sequence[str], random_: random.Random) -> list[Failure]:
    """Return each kind of failure of each kind of process; all ranks rendezvous at rank 0."""
    parts = ["router", "controller", ranks[0], *([ranks[-1]] if len(ranks) > 1 else [])]
    return [_failure(kind, part, random_) for kind in ("kill", "stop", "cut") for part in parts]


def at_random(ranks: Sequence[str], count: int, random_: random.Random) -> list[Failure]:
    chosen = []
    for _ in range(count):
        part = random_.choice(["router", "controller", ranks[0], random_.choice(ranks[1:] or ranks)])
        chosen.append(_failure(random_.choice(["kill", "stop", "cut"]), part, random_))
    return chosen


def _failure(kind: str, part: str, random_: random.Random) -> Failure:
    seconds = random_.uniform(2.0, 14.0) if kind == "cut" else 0.0
    return Failure(kind, (part,), random_.randint(1, len(LOAD) * TOKENS // 2), seconds)


def measured(outcomes: Sequence[Outcome]) -> list[Row]:
    """Return a row for each way in which each kind of process has failed."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for one in outcomes:
        groups.setdefault((one.failure.part, one.failure.kind), []).append(one)
    rows = []
    for (part, kind), found in sorted(groups.items()):
        row: Row = {"part": part, "kind": kind, "failures": len(found)}
        seconds = [second for one in found for second in one.seconds if second > 0]
        row["interrupted_streams"] = len(seconds)
        if seconds:
            figures = (*np.percentile(seconds, (50, 99)), max(seconds))
            row |= {name: round(float(value), 2) for name, value in zip(SECONDS, figures, strict=True)}
        if kind == "cut" and seconds:
            since = [one.failure.seconds + second for one in found for second in one.seconds if second > 0]
            row["p99_seconds_since_it_went"] = round(float(np.percentile(since, 99)), 2)
        rows.append(row)
    return rows


def line(row: Row) -> str:
    """Return a row of `measured` in words."""
    count = f"{row['interrupted_streams']:>3} streams of {row['failures']:>2} failures"
    figures = "no stream was interrupted, so that nothing is claimed of its time"
    if row["interrupted_streams"]:
        figures = ", ".join(f"{name.removesuffix('_seconds')} {row[name]:5.1f} s" for name in SECONDS)
    return f"{row['kind'] + ' ' + row['part']:<18}{count}: {figures}"


def claims(
    outcomes: Sequence[Outcome], reloads: Sequence[Outcome], freed: dict[str, float], ranks: int, left: int
) -> list[Row]:
    """Return the claims; `left` counts processes and shared memory that nobody has removed."""
    claims: list[Row] = []

    every = [*outcomes, *reloads]
    if every:
        streams = len(every) * len(LOAD)
        complete, same = sum(one.complete for one in every), sum(one.same for one in every)
        unfelt = sum(row["interrupted_streams"] == 0 for row in measured(every))
        claims += [
            claim("streams complete", 100 * complete / streams, "%", 100, "more"),
            claim("streams with the same text", 100 * same / streams, "%", 100, "more"),
            claim("ways to fail that kept no stream waiting", unfelt, "", 0),
            claim("failures that began no epoch", sum(one.went_unnoticed for one in every), "", 0),
        ]
    reload = [second for one in reloads for second in one.seconds]
    for part in BOUND_PARTS if ranks == GRID_RANKS and reload else ():
        rows = [row for row in measured(outcomes) if row["part"] == part and "p99_seconds" in row]
        if rows:
            worst = max(row["p99_seconds"] - LIMIT_SECONDS.get(row["kind"], 0.0) for row in rows)
            kinds = ", ".join(row["kind"] for row in rows)
            name = (
                f"{part} of {ranks} ranks, to the next token, p99 of the worst of {kinds}, over a full reload"
            )
            peer = f"full reload in the same run: {max(reload):.1f} s"
            claims.append(claim(name, worst / max(reload), "ratio", MOST_OF_RELOAD, peer=peer))
    for kind, value in freed.items():
        claims.append(claim(f"{kind} router, until its KV is free", value, "s", FREE_SECONDS))
    claims.append(claim("processes and shared memory left", left, "", 0))
    return claims


def main() -> int:
    options = parser(__doc__, quick="two ranks; without --only: killed only", seed=True)
    options.add_argument("--failures", type=int, default=0, help="so many at random, instead of one of each")
    options.add_argument(
        "--only",
        action="append",
        help="of one of each and of `free after kill`, `stop`, `cut` (of the router), those whose name contains this; "
        "may be repeated",
    )
    options.add_argument("--cut-seconds", type=float, help="of every cut (default: 2 to 14, at random)")
    options.add_argument("--shape", default="2,2,2", help="tensor, stream, kv (default 2,2,2)")
    options.add_argument("--preset", default="tiny")
    options.add_argument("--log", type=Path, metavar="FILE", help="keep there what the replica has printed")
    options.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.serve is not None:
        return serve(arguments.serve)
    if not arguments.inside:
        inside = [sys.executable, *sys.argv, "--inside"]
        return subprocess.run(
            ["unshare", "--map-root-user", "--net", "--mount", *inside], check=False
        ).returncode
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", SHARED_MEMORY], check=True)  # used by nobody else
    shape = "1,2,1" if arguments.quick else arguments.shape
    only = arguments.only or (["kill"] if arguments.quick and not arguments.failures else None)
    tensor, stream, kv = map(int, shape.split(","))
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        replica, network = Replica(Path(folder), (tensor, stream, kv), arguments.preset), Network()
        replica.start()
        undisturbed = load()
        with running(undisturbed, replica.url):
            pass
        expected = [stream.text for stream in undisturbed]
        random_ = random.Random(arguments.seed)
        failures = (
            at_random(replica.ranks, arguments.failures, random_)
            if arguments.failures
            else one_of_each(replica.ranks, random_)
        )
        if only:
            failures = [one for one in failures if any(name in str(one) for name in only)]
        if arguments.cut_seconds is not None:
            failures = [
                replace(one, seconds=arguments.cut_seconds if one.kind == "cut" else 0.0) for one in failures
            ]
        outcomes, reloads = [], []
        deaths: dict[str, list[float]] = {}
        for number, failure in enumerate(failures, start=1):
            _keep_apart(failure, deaths)
            outcomes.append(fail(replica, network, failure, expected))
            _print(f"[{number}/{len(failures)}]", outcomes[-1])
        if not arguments.quick and not only:
            whole = Failure("kill", tuple(replica.ranks), 100)
            _keep_apart(whole, deaths)
            reloads.append(fail(replica, network, whole, expected))
            _print("", reloads[-1])
        freed = {}
        for kind in ("kill", "stop", "cut"):
            if not only or any(name in f"free after {kind}" for name in only):
                _keep_apart(Failure(kind, ("router",), 0), deaths)
                freed[kind] = freed_after_router(replica, network, kind)
        left = replica.stop()
        if arguments.log:
            arguments.log.write_text(replica.log.read_text())
        if arguments.json and any(one.same < len(expected) for one in outcomes):
            print(replica.log.read_text()[-20000:])
    shared = list(SHARED_MEMORY.iterdir())
    rows = measured([*outcomes, *reloads])
    print(*map(line, rows), sep="\n")
    claimed = claims(outcomes, reloads, freed, len(replica.ranks), len(left) + len(shared))
    return report(claimed, arguments.json, {"rows": rows}, strict=True)


def _keep_apart(failure: Failure, deaths: dict[str, list[float]]) -> None:
    """Wait until enough deaths of a part are long ago.

    Too many within a minute, or within an hour, would end the replica.
    """
    if failure.kind == "cut":
        return
    for part in failure.parts:
        before = deaths.setdefault(part, [])
        for most, seconds in ((MOST_DEATHS, DEATHS_SECONDS), (MOST_DEATHS_SLOW, SLOW_DEATHS_SECONDS)):
            if len(before) >= most - 1:
                time.sleep(max(before[1 - most] + seconds + 10.0 - time.monotonic(), 0.0))
        before.append(time.monotonic())


def _print(number: str, outcome: Outcome) -> None:
    seconds = " ".join(f"{second:5.1f}" for second in outcome.seconds)
    progress(
        f"{number} {outcome.failure!s:<28} next token after {seconds} s; {outcome.complete} complete, "
        f"{outcome.same} the same {' '.join(outcome.errors)}"
    )


if __name__ == "__main__":
    exit_with(main)
