"""Measure how long streams pause when a replica is lost or drains while another replica of another grid has room.

    python benchmarks/failover.py            # three of each kind of loss
    python benchmarks/failover.py --quick    # a killed replica and one that drains, shorter streams
    python benchmarks/failover.py --rounds 5 --only cut --json benchmarks/results/failover.json

A router serves two replicas of the same checkpoint, each with a supervisor of its own, and streams run on both. Then one
replica is lost: all of its processes are killed, as a pod's are that has gone (`kill`); only its controller is killed
(`kill controller`); all of its processes are stopped (`stop`), or only one of its ranks, which its supervisor then
replaces (`stop rank`); all packets between it and the router stay away (`cut`); or it drains and has no time for its
streams (`drain`). The streams that it had must continue on the other replica, and every text must be the one that it
has without a loss. As soon as they have moved, what was stopped or cut off comes back: nothing that it then sends may
reach a client.

Finally a controller receives, hashes and queues prompts of 27 MB of token ids. No gap between its heartbeats may come near the 2 s of
silence after which a router counts it as lost.

The result is the pause of each stream that was resumed: the longest wait for a token since the loss. The claims are that
all texts are the same, that each loss made streams move, and that no stream pauses for longer than 3 s.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread

import httpx
import numpy as np
import zmq
from client_stream import Stream
from fleet import START_SECONDS, Fleet, Replica
from harness import Row, claim, exit_with, parser, progress, report

from medha.api.model_spec import ModelSource, ModelSpec
from medha.api.replica import MedhaReplicaSpec
from medha.routing.routing_limits import RoutingLimits
from medha.wire.frames import TOKENS_PER_FRAME, TokenIds, decode, encode, tokens_to_frame
from medha.wire.messages import (
    HEARTBEAT_SECONDS,
    Announce,
    RankHello,
    RankReady,
    Rendezvous,
    Sampling,
    StepProfile,
    Submit,
    Tokens,
)
from medha_links.key_files import KeyFiles, KeyPair, read_public_key, read_tokens
from medha_links.sockets import Authenticator, bind, connect
from medha_process.launch import CONTROLLER
from medha_process.part_settings import ControllerSettings, RouterEndpoints
from medha_worker.checkpoints.presets import init_checkpoint

KINDS = ("kill", "kill controller", "stop", "stop rank", "cut", "drain")
QUICK = ("kill", "drain")
SILENCE_SECONDS = RoutingLimits().silence_seconds  # after which a router counts a replica as lost
# Most pause of a stream while another replica has room. It bounds waiting, and not speed: after a stop or a cut, the router
# waits for SILENCE_SECONDS, and the last heartbeat before that may come late. A second limit must not have to pass.
PAUSE_SECONDS = SILENCE_SECONDS + 2 * HEARTBEAT_SECONDS
FIRST_TOKENS = 10  # of each stream, before a replica is lost
STREAM_SECONDS = 120.0
STREAMS = 6
FORMS_OF_STREAMS = ("text", "text", "schema", "text", "text", "function")
PROMPT_MEGABYTES, PROMPTS = 27, 3  # token ids of the long prompts, and how many there are
GAP_SECONDS = (
    0.75 * SILENCE_SECONDS
)  # most between two heartbeats: a limit, so that no busy replica counts as lost


@dataclass
class Moved(Stream):
    """A stream whose replica is lost."""

    def run(self, url: str) -> None:
        try:
            self.ask(url, timeout_seconds=STREAM_SECONDS)
        except httpx.HTTPError as error:
            self.error = repr(error)


class Streams:
    """Streams that run at the same time; every second one is greedy."""

    def __init__(self, url: str, tokens: int, count: int = STREAMS) -> None:
        self.all = [
            Moved(
                prompt=f"stream {number}: " + "word " * (20 * number),
                seed=number,
                tokens=tokens,
                form=FORMS_OF_STREAMS[number % len(FORMS_OF_STREAMS)],
                temperature=number % 2,
            )
            for number in range(count)
        ]
        self._threads = [Thread(target=one.run, args=(url,), daemon=True) for one in self.all]
        for thread in self._threads:
            thread.start()

    def wait(self, done: Callable[[], bool]) -> None:
        """Wait for something that must happen before all streams have ended."""
        while not done():
            if not any(thread.is_alive() for thread in self._threads):
                raise RuntimeError(f"the streams were over before: {[one.error for one in self.all]}")
            time.sleep(0.02)

    def join(self) -> list[str]:
        """Return the texts, once all streams have ended."""
        for thread in self._threads:
            thread.join()
        return [one.text for one in self.all]


@dataclass
class Outcome:
    kind: str
    replica: str
    moved: int  # streams that were sent again
    same: int  # streams with the text of an undisturbed run
    pauses: list[float]  # of the streams that were sent again
    errors: list[str] = field(default_factory=list)


def lose(replica: Replica, kind: str) -> None:
    """Cause a loss; `stop` and `cut` are undone by `bring_back`."""
    match kind:
        case "kill":
            replica.signal(signal.SIGKILL)
        case "kill controller":
            replica.signal(signal.SIGKILL, f"{CONTROLLER}.json")
        case "stop":
            replica.signal(signal.SIGSTOP)
        case "stop rank":
            replica.signal(signal.SIGSTOP, "rank-0.json")
        case "cut":
            for wire in replica.wires:
                wire.hold()
        case "drain":
            replica.drain()


def bring_back(replica: Replica, kind: str) -> None:
    """End a loss: what was stopped continues, and what was held back arrives."""
    if kind == "stop":
        replica.signal(signal.SIGCONT)
    for wire in replica.wires:
        wire.release()


def measure(fleet: Fleet, kind: str, tokens: int, expected: Sequence[str]) -> Outcome:
    """Lose the busiest replica, wait for all texts, and bring or start it again."""
    fleet.wait_ready()
    fleet.wait_idle()
    before = fleet.moved()
    streams = Streams(fleet.router.url, tokens)
    streams.wait(lambda: min(len(one.times) for one in streams.all) >= FIRST_TOKENS)
    victim = max(fleet.replicas, key=fleet.running)
    lost_at = time.monotonic()
    lose(victim, kind)
    if kind in ("stop", "cut"):  # it comes back while others compute its streams
        streams.wait(lambda: fleet.moved() > before)
        bring_back(victim, kind)
    texts = streams.join()
    moved = fleet.moved() - before
    pauses = sorted(one.pause(lost_at) for one in streams.all)
    if kind in ("kill", "drain"):
        fleet.restart(victim)
    return Outcome(
        kind,
        victim.name,
        moved=moved,
        same=sum(one == other for one, other in zip(texts, expected, strict=True)),
        pauses=pauses[-moved:] if moved else [],  # the others had no reason to pause
        errors=[one.error for one in streams.all if one.error],
    )


class LoneController:
    """A controller whose router and rank are played by this script, which records when its messages arrive."""

    def __init__(self, folder: Path) -> None:
        checkpoint = folder / "checkpoint"
        init_checkpoint(checkpoint, preset="tiny", seed=0)
        names = ("router_control", "router_tokens", "rank_control", "rank_tokens")
        ends = {name: f"ipc://{folder}/{name}" for name in names}
        keys = KeyFiles.create(folder / "keys")
        ControllerSettings(
            replica="r0",
            spec=MedhaReplicaSpec(model=ModelSpec(name="m", source=ModelSource(path=str(checkpoint)))),
            model_directory=checkpoint,
            router_key_file=keys.router_public,
            enrolment_file=keys.enrolment,
            key_file=keys.controller,
            rank_keys_file=keys.ranks_public,
            routers=(RouterEndpoints(control=ends["router_control"], tokens=ends["router_tokens"]),),
            rank_control=ends["rank_control"],
            rank_tokens=ends["rank_tokens"],
        ).write(folder / "settings.json")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = Authenticator(
            self._context, [KeyPair.of_token(read_tokens(keys.enrolment)[0]).public]
        )
        router_keys, rank_keys = KeyPair.read(keys.router), KeyPair.read(keys.ranks)
        server = read_public_key(keys.controller_public)
        bound = [bind(self._context, ends[name], router_keys) for name in names[:2]]
        connected = [connect(self._context, ends[name], b"rank-0/0", rank_keys, server) for name in names[2:]]
        self._opened = [*bound, *connected]
        self._control, self._tokens, *self._rank = (one.socket for one in self._opened)
        self._identity = b""
        self.times: dict[str, list[float]] = {"Heartbeat": [], "Announce": []}
        command = [
            sys.executable,
            "-m",
            "medha_worker.controller",
            "--settings",
            str(folder / "settings.json"),
        ]
        self._process = subprocess.Popen(command)

    def begin(self, tokens: int) -> None:
        """Report a rank whose KV pool holds so many tokens, and wait until the replica serves."""
        ready = RankReady(
            rank=0, block_size_tokens=16, kv_blocks=tokens // 16, weights_bytes=1, activation_bytes=1, kv_bytes=1,
            profile=StepProfile(1e-3, 1e-6, 1e-12, 1e-5), device="cpu", max_model_len=tokens, vocab_size=1000,
            linear_flops_per_token=1e6, attention_flops_per_pair=1e3,
        )  # fmt: skip
        self.listen(lambda card: card.ready, ready)
        self._tokens.recv_multipart()  # its announcement: a ROUTER sends only to those it has heard

    def listen(self, until: Callable[[Announce], bool], ready: RankReady | None = None) -> None:
        """Record when messages arrive until an announcement is what the caller waits for; say meanwhile that the rank lives."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            for link in self._rank:
                link.send_multipart(encode(RankHello(0, "0")))
            while self._rank[0].poll(0):
                message, _ = decode(self._rank[0].recv_multipart())
                if isinstance(message, Rendezvous) and ready is not None:
                    self._rank[0].send_multipart(encode(replace(ready, epoch=message.epoch)))
            while self._control.poll(500):
                identity, *frames = self._control.recv_multipart()
                message, _ = decode(frames)
                self.times[type(message).__name__].append(time.monotonic())
                if isinstance(message, Announce):
                    self._identity = identity
                    if until(message):
                        return
        raise RuntimeError("the controller does not answer")

    def submit(self, name: str, ids: TokenIds) -> None:
        """Send a prompt (int32 [n]) and a request for it."""
        for offset in range(0, len(ids), TOKENS_PER_FRAME):
            part = tokens_to_frame(ids[offset : offset + TOKENS_PER_FRAME])
            self._tokens.send_multipart([self._identity, *encode(Tokens(name, offset, len(ids)), part)])
        request = Submit(name, name, len(ids), len(ids), seed=0, sampling=Sampling(max_tokens=9))
        self._control.send_multipart([self._identity, *encode(request)])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for one in self._opened:
            one.close(0)
        self._authenticator.close()
        self._context.term()


def heartbeat_gaps(folder: Path) -> Row:
    """Return the longest gaps (seconds) between messages of a controller that gets long prompts."""
    ids = np.arange(PROMPT_MEGABYTES * 2**20 // 4, dtype=np.int32) % 1000
    controller = LoneController(folder)
    try:
        controller.begin(2 * PROMPTS * len(ids))
        for times in controller.times.values():
            times.clear()
        for number in range(1, PROMPTS + 1):
            controller.submit(f"prompt {number}", ids)
            controller.listen(lambda card, known=number: card.running + card.waiting == known)  # type: ignore[misc]
        end = time.monotonic() + 2 * GAP_SECONDS  # what was late arrives, and the gap that it ends counts
        controller.listen(lambda _: time.monotonic() > end)
        gaps = {kind: np.diff(times).max() for kind, times in controller.times.items()}
        return {kind: round(float(gap), 3) for kind, gap in gaps.items()}
    finally:
        controller.close()


def summary(outcomes: Sequence[Outcome]) -> list[Row]:
    rows = []
    for kind in dict.fromkeys(one.kind for one in outcomes):
        found = [one for one in outcomes if one.kind == kind]
        pauses = [pause for one in found for pause in one.pauses]
        row: Row = {"kind": kind, "losses": len(found), "streams_moved": sum(one.moved for one in found)}
        if pauses:
            row |= {"p50_seconds": round(float(np.median(pauses)), 2), "most_seconds": round(max(pauses), 2)}
        rows.append(row)
    return rows


def claims(outcomes: Sequence[Outcome], streams: int = STREAMS) -> list[Row]:
    same = sum(one.same for one in outcomes)
    found = [
        claim("streams with the same text", 100 * same / (streams * len(outcomes)), "%", 100, "more"),
        claim("losses that moved no stream", sum(not one.pauses for one in outcomes), "", 0),
    ]
    for row in summary(outcomes):
        if "most_seconds" in row:
            name = f"{row['kind']}: longest pause of a stream that moves"
            found.append(claim(name, row["most_seconds"], "s", PAUSE_SECONDS))
    return found


def main() -> int:
    options = parser(__doc__, quick="a killed replica and one that drains, shorter streams", rounds=3)
    options.add_argument("--only", choices=KINDS, action="append", help="this kind of loss; may be repeated")
    arguments = options.parse_args()
    rounds, tokens = (1, 150) if arguments.quick else (arguments.rounds, 600)
    kinds = arguments.only or (QUICK if arguments.quick else KINDS)
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="failover-") as folder:
        fleet = Fleet(Path(folder))
        try:
            fleet.start()
            expected = Streams(fleet.router.url, tokens).join()
            for _ in range(rounds):
                for kind in kinds:
                    outcomes.append(one := measure(fleet, kind, tokens, expected))
                    pauses = " ".join(f"{pause:.2f}" for pause in one.pauses)
                    what = f"{kind} of {one.replica}: {one.moved} moved, {one.same} the same"
                    progress(f"{what}; {pauses} s {' '.join(one.errors)}")
        finally:
            fleet.close()
    with tempfile.TemporaryDirectory(prefix="heartbeats-") as folder:
        gaps = heartbeat_gaps(Path(folder))
    rows = summary(outcomes)
    for row in rows:
        print(row)
    print(f"longest gaps (s) while {PROMPTS} prompts of {PROMPT_MEGABYTES} MB of ids arrive: {gaps}")
    load = {
        "heartbeat_gap_seconds": gaps,
        "load_average": os.getloadavg()[0],
        "streams": STREAMS,
        "tokens": tokens,
    }
    name = f"longest gap between heartbeats while prompts of {PROMPT_MEGABYTES} MB of ids arrive"
    gap = claim(
        name, gaps["Heartbeat"], "s", GAP_SECONDS, peer=f"between announcements: {gaps['Announce']} s"
    )
    return report([*claims(outcomes), gap], arguments.json, {"rows": rows, **load}, strict=True)


if __name__ == "__main__":
    exit_with(main)
