"""Discrete-event simulation of real controllers and a real router.

The virtual clock is a heap of (time, sequence number, receiver, event). There is no other clock and no
randomness here: the same arrivals and components give the same log. A replica's controller is anything with
`handle(event, now) -> commands` and `load()`: Medha's `ReplicaController`, or a baseline that emits the same
`Step`s. Without a router, the single replica gets each request as soon as it arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from heapq import heappop, heappush
from math import inf
from typing import Any, Protocol, TypeVar

from medha.errors import ConfigInvalid
from medha.kv.prefix_cache import HASH_CHARACTERS
from medha.routing.prefix_memory import MARK_BLOCK_TOKENS, Prefix, marks
from medha.routing.router_core import RouterCore
from medha.routing.router_events import (
    Arrive,
    BundleKnown,
    Deliver,
    Fail,
    LinkLost,
    NewSequence,
    Received,
    RouterCommand,
    RouterEvent,
    Send,
)
from medha.scheduler.controller import Load, ReplicaController
from medha.wire.messages import (
    Announce,
    Cancel,
    ControllerCommand,
    ControllerEvent,
    DiskReport,
    Done,
    Drain,
    Emit,
    Failed,
    FetchBundle,
    KvAsk,
    KvDone,
    KvTicket,
    Refused,
    Sampling,
    Step,
    SteppedAside,
    StoreLookup,
    Submit,
    Tick,
)
from medha_sim.executor import Executor, original_id
from medha_sim.files_and_objects import FilesAndObjects
from medha_sim.kv_reads import KvReads
from medha_sim.run_log import Ending, GuessCounts, RequestRecord, RunLog

LOAD_SECONDS = 0.05
"""Least time between announcements of a changed load, as in the real controller process."""
HEARTBEAT_SECONDS = 1.0
"""Interval at which a replica announces its load even if unchanged, and at which the router gets a `Tick`."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a workload."""

    id: str
    at_seconds: float
    prompt_tokens: int
    output_tokens: int  # the last of these is its stop token
    ttft_target_seconds: float
    tpot_target_seconds: float
    kind: str = "short"
    service_class: str = "default"
    max_tokens: int | None = None  # as set by the client; None if it sets none
    prompt: str = ""  # requests with the same prompt name share its KV; "" is a prompt of its own
    block_hashes: str = ""  # of the prompt, in the replica's block size, if a record has them
    conversation: str = ""  # turns of one conversation continue each other's prompts
    owner: str = ""  # as in `Submit`


@dataclass(frozen=True, slots=True)
class FollowUp:
    """The next turn of a conversation; it arrives `think_seconds` after the previous answer ends."""

    think_seconds: float
    arrival: Arrival  # its `at_seconds` is ignored


@dataclass(frozen=True, slots=True)
class Workload:
    """Arrivals in order of time, and their follow-up turns."""

    arrivals: Sequence[Arrival]
    follow_ups: Mapping[str, FollowUp] = field(default_factory=dict)  # id of a request -> the next turn

    def every(self) -> Iterator[Arrival]:
        yield from self.arrivals
        for follow_up in self.follow_ups.values():
            yield follow_up.arrival

    def ends_at(self) -> dict[str, int]:
        """Return, by request id, the length (prompt and output) at which it samples its stop token."""
        return {arrival.id: arrival.prompt_tokens + arrival.output_tokens for arrival in self.every()}


class Controller(Protocol):
    """The scheduler of one replica."""

    def handle(self, event: ControllerEvent, now: float) -> list[ControllerCommand]: ...

    def load(self) -> Load: ...


@dataclass(slots=True)
class SimulatedReplica:
    """A controller and the ranks that it drives. `card` is its announcement; the driver fills in the load."""

    controller: Controller
    executor: Executor
    card: Announce
    block_size_tokens: int = 0  # of its prefix cache; 0 if it has none
    work_ahead: Callable[[float], tuple[tuple[float, float], ...]] = lambda _now: ()  # as it announces it
    hashes_outputs: bool = False  # its answers can be found by their hashes, too
    # Time that its requests have once it drains; None: as long as they take, and none of them moves.
    drain_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies in each direction, in seconds."""

    client_seconds: float = 0.0  # between client and router
    replica_seconds: float = 0.0  # between router and replica


Answer = Emit | Refused | Failed | Announce
"""A message from a replica to its router."""

What = TypeVar("What")

Progress = Callable[[float], bool]
"""Callback that is called with the virtual time at every sample of the state. It returns True to stop the run."""


class Simulation:
    """A single run: create it, call `run` once, then read the log."""

    def __init__(
        self,
        replicas: Sequence[SimulatedReplica],
        workload: Workload,
        *,
        router: RouterCore | None = None,
        latencies: Latencies | None = None,
        sample_seconds: float = 1.0,
    ) -> None:
        """`router` may be None for a single replica, which then gets every request directly.

        Raises:
            ConfigInvalid: there is no router, and not exactly one replica.
        """
        if router is None and len(replicas) != 1:
            raise ConfigInvalid(f"{len(replicas)} replicas need a router; give one, or simulate one replica")
        guesses = any(replica.executor.guesses for replica in replicas)
        self.log = RunLog(guesses=GuessCounts() if guesses else None)
        self._heap: list[tuple[float, int, Callable[[Any, float], None], Any]] = []
        self._sequence = 0
        self._workload = workload
        self._arrivals = iter(workload.arrivals)
        self._conversations = {
            arrival.id: arrival.conversation for arrival in workload.every() if arrival.conversation
        }
        self._expected = len(workload.arrivals)  # requests still to come or to end
        self._sample_seconds = sample_seconds
        self._latencies = latencies or Latencies()
        self._progress: Progress | None = None
        self._stopped = False
        self._router = None if router is None else _Router(router, self)
        self.stored: set[str] = set()  # objects of the store that replicas share
        self._replicas = {replica.card.replica: _Replica(replica, self) for replica in replicas}
        self.kv_reads = KvReads(self._to_peer)
        self._kv_tokens = sum(replica.card.kv_tokens_total for replica in replicas)

    def run(self, until_seconds: float, progress: Progress | None = None) -> RunLog:
        """Simulate until no event is left or the clock passes `until_seconds`.

        Requests that are still open then are censored.
        """
        self._progress = progress
        if self._router is not None:
            self._router.start([replica.card for replica in self._replicas.values()])
        for replica in self._replicas.values():
            replica.start(0.0, announces=self._router is not None)
        self._next_arrival()
        self.at(0.0, self._sample, None)
        heap = self._heap
        now = 0.0
        while heap and not self._stopped:
            at, _, deliver, what = heappop(heap)
            if at > until_seconds:
                break
            now = at
            deliver(what, now)
        self.log.window_seconds = now if self._stopped else until_seconds
        self.log.interrupted = self._stopped
        return self.log

    # --- for whoever changes the number of replicas while it runs -------------------------------------

    def add_replica(self, replica: SimulatedReplica, now: float) -> None:
        """Let another replica serve from now on. The simulation must have a router."""
        assert self._router is not None
        self._kv_tokens += replica.card.kv_tokens_total
        added = self._replicas[replica.card.replica] = _Replica(replica, self)
        added.start(now, announces=True)

    def drain_replica(self, name: str, now: float) -> None:
        """Let a replica finish what it has, and take nothing more; at its limit, it returns what has not ended.

        The simulation must have a router, which may move requests to other replicas before that.
        """
        assert self._router is not None
        self._replicas[name].drain(now)

    def is_drained(self, name: str) -> bool:
        """Return whether a replica that drains has nothing left to do, for its requests or for readers of its KV."""
        return self._replicas[name].is_drained

    def remove_replica(self, name: str, now: float) -> None:
        """End a replica. Its router submits what it still has to others."""
        assert self._router is not None
        self._kv_tokens -= self._replicas.pop(name).end().kv_tokens_total
        self._router.take(LinkLost(name), now)

    def lose(self, name: str, now: float) -> None:
        """Let the router know that a replica has ended by itself."""
        assert self._router is not None
        self.at(now + self._latencies.replica_seconds, self._router.take, LinkLost(name))

    def load(self, name: str) -> Load:
        return self._replicas[name].load()

    def kv_share(self, name: str) -> float:
        """Return the share of its KV that a replica has reserved, 0 to 1."""
        replica = self._replicas[name]
        return 1 - replica.load().kv_tokens_free / replica.card.kv_tokens_total

    def busy_seconds(self, name: str) -> float:
        """Return the seconds that a replica has computed so far: the sum over its steps of the time of the slowest stage."""
        return self._replicas[name].busy_seconds

    @property
    def router(self) -> RouterCore | None:
        return None if self._router is None else self._router.core

    @property
    def guests(self) -> dict[str, int]:
        """Requests that wait for a first replica, by model."""
        found = self._router
        return {} if found is None or not found.guests else {found.model: len(found.guests)}

    # --- for the replicas and the router of a simulation ----------------------------------------------

    def at(self, time: float, deliver: Callable[[What, float], None], what: What) -> None:
        """Schedule `deliver(what, time)`; calls for the same time run in the order of scheduling."""
        self._sequence += 1
        heappush(self._heap, (time, self._sequence, deliver, what))

    def to_replica(self, name: str, event: Submit | Cancel, now: float) -> None:
        replica = self._replicas.get(name)
        if replica is None:  # it has ended while this was on its way
            return
        if isinstance(event, Submit) and replica.block_size_tokens:
            conversation = self._conversations.get(original_id(event.id))
            if conversation is not None:
                hashes = block_hashes(conversation, event.tokens, replica.block_size_tokens)
                event = replace(event, block_hashes=hashes)
        self.at(now + self._latencies.replica_seconds, replica.take, event)

    def _to_peer(self, name: str, event: ControllerEvent, at: float) -> None:
        replica = self._replicas.get(name)
        if replica is not None:
            self.at(at, replica.take, event)

    def pass_on(self, sender: str, message: KvAsk | KvTicket | KvDone, now: float) -> None:
        """Pass a replica's message on to another one."""
        self.kv_reads.send(sender, message, now + 2 * self._latencies.replica_seconds)

    def hashed(self, done: Done, block_size_tokens: int) -> Done:
        """Return a `Done` with the hashes of the blocks that its samples filled."""
        found = []
        for sample in done.samples:
            tokens = sample.token + 1  # a sample's token is its position
            conversation = self._conversations.get(original_id(sample.id))
            if conversation is not None and tokens % block_size_tokens == 0:
                found.append((sample.id, _block_hash(conversation, tokens // block_size_tokens - 1)))
        return replace(done, block_hashes=tuple(found)) if found else done

    def from_replica(self, name: str, answers: Sequence[Answer], now: float) -> None:
        """Pass on the messages that a replica sends at one time, in order."""
        if self._router is not None:
            received = [Received(name, answer) for answer in answers]
            self.at(now + self._latencies.replica_seconds, self._router.take_all, received)
            return
        for answer in answers:
            match answer:
                case Emit():
                    self.delivered(answer.id, len(answer.tokens), answer.finish_reason is not None, now)
                case Refused():
                    self._end(answer.id, "refused", now, f"{answer.reason}: {answer.detail}")
                case Failed():
                    self._end(answer.id, "failed", now, f"{answer.reason}: {answer.detail}")
                case Announce():
                    pass

    def delivered(self, id_: str, tokens: int, ended: bool, now: float) -> None:
        """Log output tokens on their way to the client."""
        at = now + self._latencies.client_seconds
        if tokens:
            self.log.emitted(id_, tokens, at)
        if ended:
            self._end(id_, "finished", at)

    def failed(self, fail: Fail, now: float) -> None:
        ending: Ending = "refused" if fail.kind in ("overloaded", "too_long", "invalid") else "failed"
        self._end(fail.id, ending, now, f"{fail.kind}: {fail.detail}")

    @property
    def idle(self) -> bool:
        """True once no request is still to arrive or to end."""
        return self._expected == 0

    # --- internals ----------------------------------------------------------------------------------

    def _next_arrival(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None:
            self.at(arrival.at_seconds, self._arrive_in_turn, arrival)

    def _arrive_in_turn(self, arrival: Arrival, now: float) -> None:
        self._next_arrival()
        self._arrive(arrival, now)

    def _arrive(self, arrival: Arrival, now: float) -> None:
        self.log.arrived(
            RequestRecord(
                id=arrival.id,
                kind=arrival.kind,
                service_class=arrival.service_class,
                prompt_tokens=arrival.prompt_tokens,
                output_tokens=arrival.output_tokens,
                arrived_at=now,
                ttft_target_seconds=arrival.ttft_target_seconds,
                tpot_target_seconds=arrival.tpot_target_seconds,
            )
        )
        sampling = Sampling(max_tokens=arrival.max_tokens)
        prompt = arrival.prompt or arrival.id
        if self._router is not None:
            router = self._router
            prefix: Prefix = ()
            if arrival.conversation:
                hashes = block_hashes(arrival.conversation, arrival.prompt_tokens, MARK_BLOCK_TOKENS)
                prefix = marks(hashes)
            new = NewSequence(arrival.id, prompt, arrival.prompt_tokens, 0, sampling, prefix=prefix)
            arrive = Arrive(
                model=router.model,
                digest=router.digest,
                sequences=(new,),
                service_class=arrival.service_class,
                deadline_after_seconds=arrival.ttft_target_seconds,
                tpot_target_seconds=arrival.tpot_target_seconds,
                owner=arrival.owner,
            )
            self.at(now + self._latencies.client_seconds, router.take, arrive)
            return
        submit = Submit(
            id=arrival.id,
            prompt=prompt,
            tokens=arrival.prompt_tokens,
            prompt_length=arrival.prompt_tokens,
            seed=0,
            deadline_after_seconds=arrival.ttft_target_seconds,
            tpot_target_seconds=arrival.tpot_target_seconds,
            service_class=arrival.service_class,
            sampling=sampling,
            owner=arrival.owner,
            block_hashes=arrival.block_hashes,
        )
        self.to_replica(next(iter(self._replicas)), submit, now + self._latencies.client_seconds)

    def _end(self, id_: str, ending: Ending, now: float, detail: str = "") -> None:
        self.log.ended(id_, ending, now, detail)
        self._expected -= 1
        follow_up = self._workload.follow_ups.get(id_)
        if follow_up is not None and ending == "finished":
            self._expected += 1
            self.at(now + follow_up.think_seconds, self._arrive, follow_up.arrival)

    def _sample(self, _: None, now: float) -> None:
        """Log the state and call `progress`, which may stop the run."""
        loads = [replica.load() for replica in self._replicas.values()]
        series = self.log.series
        series.at.append(now)
        series.running.append(sum(load.running for load in loads))
        queued = 0 if self._router is None else self._router.core.waiting
        series.waiting.append(queued + sum(load.waiting for load in loads))
        free = sum(load.kv_tokens_free for load in loads)
        series.kv_share.append(1 - free / self._kv_tokens if self._kv_tokens else 0.0)
        if self._progress is not None and self._progress(now):
            self._stopped = True
        if self._heap:
            self.at(now + self._sample_seconds, self._sample, None)


class _Replica:
    """A replica in a simulation."""

    def __init__(self, replica: SimulatedReplica, simulation: Simulation) -> None:
        self._controller = replica.controller
        self._executor = replica.executor
        self.card = replica.card
        self._work_ahead = replica.work_ahead
        self._simulation = simulation
        self._announced: Load | None = None
        self._announced_at = 0.0
        self._announces = False
        self._ended = False
        self._drain_seconds = replica.drain_seconds
        self._drain_until: float | None = None
        self._wakes_at = inf
        self.block_size_tokens = replica.block_size_tokens
        self._hashes_outputs = replica.hashes_outputs
        self.load = replica.controller.load
        self.busy_seconds = 0.0
        self._prompt_tokens: dict[str, int] = {}  # output from before a request stepped aside included
        self._files = FilesAndObjects.of(replica.controller, simulation.stored, simulation, self._reported)

    def start(self, now: float, *, announces: bool) -> None:
        self._announces = announces
        if self._files is not None:
            self._files.begin(now)
        if announces:
            self._announce(self.load(), now)
            self._simulation.at(now + HEARTBEAT_SECONDS, self._heartbeat, None)

    def drain(self, now: float) -> None:
        """Take nothing more, and return at the limit, if there is one, what has not ended."""
        self.card = replace(self.card, draining=True)
        if self._drain_seconds is not None:
            self._drain_until = now + self._drain_seconds
            self._simulation.at(self._drain_until, self._return_requests, None)
            self.take(Drain(), now)
        self._announce(self.load(), now)

    @property
    def is_drained(self) -> bool:
        load, core = self.load(), self._controller
        if load.running or load.waiting:
            return False
        if not isinstance(core, ReplicaController) or not self.card.hands_kv_over:
            return True
        return self._ended or core.is_drained

    def _return_requests(self, _: None, now: float) -> None:
        """End, and hand all open requests back to the router."""
        if self._ended:
            return
        core = self._controller
        requests = core.requests() if isinstance(core, ReplicaController) else ()
        left = [one.id for one in requests if one.steps_aside or not one.ended]
        answers = [Refused(one, "not_ready", "the replica has drained for as long as it may") for one in left]
        self._simulation.from_replica(self.card.replica, answers, now)
        self._simulation.lose(self.card.replica, now)
        self.end()
        kv_tokens = self.card.kv_tokens_total
        self.load = lambda: Load(running=0, waiting=0, kv_tokens_free=kv_tokens, pending_prefill_seconds=0.0)

    def end(self) -> Announce:
        """Compute and announce nothing any more; return the last announcement."""
        self._ended = True
        return self.card

    def take(self, event: ControllerEvent, now: float) -> None:
        if self._ended:
            return
        simulation = self._simulation
        answers: list[Answer] = []
        if self._hashes_outputs and isinstance(event, Done):
            event = simulation.hashed(event, self.block_size_tokens)
        if isinstance(event, Submit):
            self._prompt_tokens[event.id] = event.tokens
        for command in self._controller.handle(event, now):
            if isinstance(command, Step):
                launched = self._executor.launch(command, now)
                busy_seconds = max(launched.timing.stage_seconds)
                self.busy_seconds += busy_seconds
                if command.entries:
                    simulation.log.stepped(command, self._prompt_tokens.__getitem__, busy_seconds, now)
                if self._executor.guesses:
                    simulation.log.guessed(command, launched.right_guesses, launched.timing.draft_seconds)
                for at, follows in launched.events:
                    simulation.at(at, self.take, follows)
                if isinstance(self._controller, ReplicaController) and (command.serves or command.loads):
                    done_at = max(at for at, _ in launched.events)
                    simulation.kv_reads.launched(self.card.replica, self._controller, command, done_at)
                if self._files is not None:
                    self._files.launched(command, launched.begun_at)
            elif isinstance(command, SteppedAside):
                self._prompt_tokens[command.id] = command.tokens
            elif isinstance(command, StoreLookup) and self._files is not None:
                self._files.look_up(command, now)
            elif isinstance(command, KvAsk | KvTicket | KvDone):
                simulation.pass_on(self.card.replica, command, now)
            elif isinstance(command, Emit | Refused | Failed):  # its router does not notice the others
                answers.append(command)
        if answers:
            simulation.from_replica(self.card.replica, answers, now)
        self._wake()
        if self._announces and now - self._announced_at >= LOAD_SECONDS:
            load = self.load()
            if load != self._announced:
                self._announce(load, now)

    def _reported(self, report: DiskReport, now: float) -> None:
        self._simulation.at(now, self.take, report)

    def _read_line(self) -> tuple[float, float]:
        return self._controller.read_line if isinstance(self._controller, ReplicaController) else (0.0, 0.0)

    def _wake(self) -> None:
        """Schedule a `Tick` for the time at which the controller needs one, unless there is one before it."""
        due = self._controller.next_due if isinstance(self._controller, ReplicaController) else None
        if due is not None and due < self._wakes_at:
            self._wakes_at = due
            self._simulation.at(due, self._woken, None)

    def _woken(self, _: None, now: float) -> None:
        self._wakes_at = inf
        self.take(Tick(), now)

    def _heartbeat(self, _: None, now: float) -> None:
        if self._ended:
            return
        if now >= self._announced_at + HEARTBEAT_SECONDS:
            self._announce(self.load(), now)
        if not self._simulation.idle:
            self._simulation.at(self._announced_at + HEARTBEAT_SECONDS, self._heartbeat, None)

    def _announce(self, load: Load, now: float) -> None:
        self._announced, self._announced_at = load, now
        read_seconds, read_seconds_per_token = self._read_line()
        drain_seconds = None
        if self._drain_until is not None and self.card.hands_kv_over:
            drain_seconds = max(self._drain_until - now, 0.0)
        card = replace(
            self.card,
            drain_seconds=drain_seconds,
            read_seconds=read_seconds,
            read_seconds_per_token=read_seconds_per_token,
            kv_tokens_free=load.kv_tokens_free,
            running=load.running,
            waiting=load.waiting,
            pending_prefill_seconds=load.pending_prefill_seconds,
            lanes=load.lanes,
            kv_tokens_wanted=load.kv_tokens_wanted,
            work_ahead=self._work_ahead(now),
        )
        self._simulation.from_replica(self.card.replica, [card], now)


class _Router:
    """The router in a simulation."""

    def __init__(self, core: RouterCore, simulation: Simulation) -> None:
        self.core = core
        self.model = ""
        self.digest = ""
        self.guests: list[Arrive] = []
        """Requests that wait for a first replica, in the order of arrival."""
        self._simulation = simulation

    def start(self, cards: Sequence[Announce]) -> None:
        """Register all replicas before the first request arrives."""
        self.model, self.digest = cards[0].model, cards[0].digest
        for card in cards:
            self.take(BundleKnown(card.digest), 0.0)
            self.take(Received(card.replica, card), 0.0)
        self._tick(None, 0.0)

    def take(self, event: RouterEvent, now: float) -> None:
        if isinstance(event, Arrive) and not self.core.fleet.is_served(self.model):
            self.guests.append(event)
            return
        self._carry_out(self.core.handle(event, now), now)
        if self.guests and self.core.fleet.is_served(self.model):
            arrived, self.guests = self.guests, []
            for guest in arrived:
                self.take(guest, now)

    def take_all(self, events: Iterable[RouterEvent], now: float) -> None:
        for event in events:
            self.take(event, now)

    def _tick(self, _: None, now: float) -> None:
        self.take(Tick(), now)
        if now == 0.0 or not self._simulation.idle:
            self._simulation.at(now + HEARTBEAT_SECONDS, self._tick, None)

    def _carry_out(self, commands: Iterable[RouterCommand], now: float) -> None:
        simulation = self._simulation
        for command in commands:
            match command:
                case Deliver():
                    ended = command.finish_reason is not None
                    simulation.delivered(command.id, len(command.tokens), ended, now)
                case Send(message=Submit() | Cancel() as message):
                    simulation.to_replica(command.replica, message, now)
                case Send(message=FetchBundle(digest=digest)):  # bundles take no time here
                    self.take(BundleKnown(digest), now)
                case Fail():
                    simulation.failed(command, now)
                case _:  # prompts take no time here; rejections are only logged
                    pass


def block_hashes(conversation: str, tokens: int, block_size_tokens: int) -> str:
    """Return stand-ins for the block hashes of `medha.kv.prefix_cache`.

    Every turn of a conversation is a prefix of one stream of tokens, so its hashes are a prefix of the next
    turn's.
    """
    name = _hash_name(conversation)
    return "".join(f"{name}{block:0{HASH_CHARACTERS // 2}x}" for block in range(tokens // block_size_tokens))


def _block_hash(conversation: str, block: int) -> str:
    return f"{_hash_name(conversation)}{block:0{HASH_CHARACTERS // 2}x}"


def _hash_name(conversation: str) -> str:
    return blake2b(conversation.encode(), digest_size=HASH_CHARACTERS // 4).hexdigest()
