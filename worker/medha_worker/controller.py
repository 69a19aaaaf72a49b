"""`python -m medha_worker.controller`: the process that drives one ReplicaController in real time.

It only moves messages: frames from the router and the ranks become events, commands become frames. Whatever
is decided is decided in `medha.engine`. It imports no torch.

Token ids never enter the controller. They are kept here under their prompt's name, and sent to the ranks on
their own socket ahead of the step that admits a sequence of that prompt.
"""

from __future__ import annotations

import json
import logging
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import click
import numpy as np
import zmq
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, ConfigDict
from pydantic_core import to_json

from medha.api import MedhaReplicaSpec, ServiceClass
from medha.config import ReplicaConfig, derive
from medha.engine import Load, ReplicaController
from medha.errors import ConfigInvalid, MedhaError, PartFailed
from medha.messages import (
    Announce,
    BundlePart,
    Cancel,
    ControllerCommand,
    ControllerEvent,
    Done,
    Drain,
    Emit,
    Failed,
    FetchBundle,
    Message,
    RankFault,
    RankReady,
    Readiness,
    Refused,
    ServiceClassTerms,
    Shutdown,
    StageFree,
    Step,
    StepProfile,
    Submit,
    Tokens,
)
from medha.prefix import PrefixHasher
from medha.profile import Profile
from medha.wire import TOKENS_PER_FRAME, digest, encode, tokens_from_frame, tokens_to_frame
from medha_worker.bundle import Bundle, read_bundle
from medha_worker.link import Link, rank_identity
from medha_worker.lock_step import LockStep
from medha_worker.observe import Observer, serve_metrics
from medha_worker.outputs import OutputHasher
from medha_worker.process import configure_logging, end_with_parent
from medha_worker.prompts import PromptStore

HEARTBEAT_SECONDS = 1.0  # routers forget a replica that is silent for several of these
POLL_MILLISECONDS = 250  # how late a signal or a heartbeat may be noticed
LOAD_SECONDS = 0.05  # a changed load is announced at most this often
PREFILL_POINTS = tuple(256 * 4**power for power in range(9))
"""Prompts, in tokens, whose predicted time alone is announced."""

_log = logging.getLogger("medha.controller")


class ControllerSettings(BaseModel):
    """What `medha up` (or a pod) tells the controller; one JSON file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    replica: str
    """Name of the replica, and its identity on the router's links."""
    spec: MedhaReplicaSpec
    model_directory: Path
    router_control: str
    """ZeroMQ endpoint of the router's control link; the controller connects."""
    router_tokens: str
    rank_control: str
    """ZeroMQ endpoint that the ranks connect to; the controller binds."""
    rank_tokens: str
    ready_file: Path | None = None
    """Written once, when all ranks are ready: a JSON `Readiness`."""
    record_file: Path | None = None
    """Every (time, event) of the controller and a digest of its commands, one JSON object a line (`medha replay`)."""
    log_level: str = "info"


class Controller:
    """One replica's process: links to the router and to the ranks around a ReplicaController."""

    def __init__(self, settings: ControllerSettings, bundle: Bundle) -> None:
        self._settings = settings
        self._bundle = bundle
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._rank_control = Link.bind(context, settings.rank_control)
        self._rank_tokens = Link.bind(context, settings.rank_tokens)
        identity = settings.replica.encode()
        self._router_control = Link.connect(context, settings.router_control, identity)
        self._router_tokens = Link.connect(context, settings.router_tokens, identity)
        self._poller = zmq.Poller()
        for link in (self._router_control, self._router_tokens, self._rank_control):
            self._poller.register(link.socket, zmq.POLLIN)
        self._context = context
        self._lock_step = LockStep()
        self._stopping = False
        self._record: TextIO | None = None

    # --- the main loop ------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until SIGTERM, then drain.

        Raises:
            PartFailed: a rank could not start, or failed.
        """
        ranks = self._await_ranks()
        slowest = max(ranks, key=lambda ready: chunk_seconds(ready.profile))
        self._start(derive(self._settings.spec, slowest), slowest)
        self._report_ready(ranks)
        drain_until: float | None = None
        while drain_until is None or (not self._core.idle and time.monotonic() < drain_until):
            self._poller.poll(POLL_MILLISECONDS)
            for event in self._events():
                self._step(event)
            if self._stopping and drain_until is None:
                drain_until = time.monotonic() + self._settings.spec.lifecycle.drain_seconds
                self._step(Drain())
            self._announce()
        self._announce(force=True)
        self._to_ranks(self._rank_control, Shutdown(reason="drained"))

    def stop(self) -> None:
        """Ask the loop to drain and end; safe in a signal handler."""
        self._stopping = True

    def close(self) -> None:
        """Close the links; messages still queued get a moment to leave."""
        for link in (self._router_control, self._router_tokens, self._rank_control, self._rank_tokens):
            link.close()
        self._context.term()
        if self._record is not None:
            self._record.close()

    def _step(self, event: ControllerEvent) -> None:
        now = time.monotonic()
        commands = self._core.handle(event, now)
        handle_seconds = time.monotonic() - now
        self._record_event(event, now, commands)
        for command in commands:
            self._carry_out(command)
        if isinstance(event, Submit) and not self._core.knows_prompt(event.prompt):
            self._prompts.forgotten(event.prompt)
        self._observer.observe(event, commands, self._core, now, handle_seconds)

    # --- start --------------------------------------------------------------------------------------

    def _await_ranks(self) -> list[RankReady]:
        """Until every rank has said on *both* links that it is ready: a ROUTER cannot send to who never spoke."""
        spec = self._settings.spec
        expected = spec.parallelism.tensor * spec.parallelism.stream * spec.parallelism.kv
        ready: dict[int, RankReady] = {}
        for link in (self._rank_control, self._rank_tokens):
            introduced: set[int] = set()
            while len(introduced) < expected:
                if self._stopping:
                    raise PartFailed("asked to stop before the ranks were ready")
                received = link.receive(timeout_seconds=POLL_MILLISECONDS / 1000)
                match received and received.message:
                    case RankReady() as message:
                        introduced.add(message.rank)
                        ready[message.rank] = message
                    case RankFault() as fault:
                        raise PartFailed(f"rank {fault.rank}: {fault.detail}")
        return [ready[rank] for rank in sorted(ready)]

    def _start(self, config: ReplicaConfig, ready: RankReady) -> None:
        self._config = config
        self._vocab_size = ready.vocab_size
        profile = _profile(self._settings.spec)
        self._core = ReplicaController(config, profile or ready.profile)
        hasher = None
        if self._settings.spec.kv_cache.prefix_caching:
            # A secret of this process: who cannot compute the hashes cannot make two prompts share one.
            hasher = PrefixHasher(config.block_size_tokens, secrets.token_bytes(32))
        self._prompts = PromptStore(config.max_model_len, hasher)
        self._outputs = OutputHasher()
        registry = CollectorRegistry()
        self._observer = Observer(registry, malformed=self._malformed)
        metrics = self._settings.spec.metrics
        self._metrics_url = serve_metrics(registry, metrics.host, metrics.port)
        if self._settings.record_file is not None:
            self._record = self._settings.record_file.open("w", encoding="utf-8", buffering=1)
            header = {"spec": self._settings.spec.model_dump(mode="json", by_alias=True)}
            if profile is not None:  # its file may be gone when the log is replayed
                header["profile"] = json.loads(profile.to_json())
            self._record.write(json.dumps(header) + "\n" + encode(ready)[0].decode() + "\n")  # type: ignore[union-attr]
        self._announced: Load | None = None
        self._announced_at = float("-inf")  # the first turn of the loop announces

    def _report_ready(self, ranks: list[RankReady]) -> None:
        _log.info(
            "serving: %d KV tokens, long from %d tokens",
            self._config.kv_tokens,
            self._config.long_threshold_tokens,
        )
        if self._settings.ready_file is not None:
            partial = self._settings.ready_file.with_suffix(".partial")
            partial.write_bytes(to_json(Readiness(tuple(ranks), self._metrics_url)))
            partial.rename(self._settings.ready_file)  # so that nobody reads half of it

    # --- events -------------------------------------------------------------------------------------

    def _events(self) -> Iterator[ControllerEvent]:
        """Everything that has arrived, ranks first: a finished step is worth more than a new request."""
        while (received := self._rank_control.receive()) is not None:
            match received.message:
                case StageFree() | Done() as part:
                    event = self._lock_step.join(part)
                    if event is not None:
                        yield self._with_hashes(event) if isinstance(event, Done) else event
                case RankFault() as fault:
                    raise PartFailed(f"rank {fault.rank}: {fault.detail}")
                case other:
                    _log.warning("unexpected %s from %r", type(other).__name__, received.peer)
        while (received := self._router_tokens.receive()) is not None:
            match received.message, received.payload:
                case Tokens() as tokens, memoryview() as frame:
                    yield from self._prompts.receive(tokens, tokens_from_frame(frame))
                case other, _:
                    _log.warning("unexpected %s on the token link", type(other).__name__)
        while (received := self._router_control.receive()) is not None:
            match received.message:
                case Submit() as submit:
                    if not self._prompts.hold(submit):
                        yield self._prompts.hashed(submit)
                case Cancel() as cancel:
                    self._prompts.withdraw(cancel.id)
                    self._outputs.end(cancel.id)
                    yield cancel
                case FetchBundle() as fetch:
                    self._send_bundle(fetch)
                case other:
                    _log.warning("unexpected %s from the router", type(other).__name__)

    def _with_hashes(self, done: Done) -> Done:
        """The step's end with the hashes of the blocks that its samples fill."""
        hashes = []
        for sample in done.samples:
            if sample.id not in self._outputs:
                request = self._core.find(sample.id)
                if request is None or request.ended or request.emitted:
                    continue  # its output was not followed from its first token on
                prompt = self._prompts.hash_of(request.submit.prompt)
                if prompt is None:
                    continue
                self._outputs.begin(sample.id, prompt)
            filled = self._outputs.add(sample.id, sample.token)
            if filled:
                hashes.append((sample.id, filled))
        return replace(done, block_hashes=tuple(hashes)) if hashes or done.block_hashes else done

    def _malformed(self) -> int:
        links = (self._rank_control, self._router_control, self._router_tokens)
        return sum(link.malformed for link in links)

    # --- commands -----------------------------------------------------------------------------------

    def _carry_out(self, command: ControllerCommand) -> None:
        match command:
            case Step() as step:
                self._lock_step.expect(step)
                self._send_prompts(step)
                self._to_ranks(self._rank_control, step)
            case Emit() | Refused() | Failed() as answer:
                self._router_control.send(answer)
                if isinstance(answer, Failed) or (isinstance(answer, Emit) and answer.finish_reason):
                    self._outputs.end(answer.id)

    def _send_prompts(self, step: Step) -> None:
        """Token ids go ahead of the step that admits the first sequence of their prompt."""
        for name in step.forgets:
            self._prompts.forgotten(name)
        for admit in step.admits:
            ids = self._prompts.take_unsent(admit.prompt)
            if ids is None:
                continue
            for offset in range(0, len(ids), TOKENS_PER_FRAME):
                frame = tokens_to_frame(ids[offset : offset + TOKENS_PER_FRAME])
                piece = Tokens(prompt=admit.prompt, offset=offset, total=len(ids))
                self._to_ranks(self._rank_tokens, piece, frame)

    def _to_ranks(self, link: Link, message: Message, payload: bytes | None = None) -> None:
        """Send one message to every rank.

        Raises:
            PartFailed: a rank is not connected any more.
        """
        for rank in range(self._config.topology.ranks):
            try:
                link.send(message, payload, peer=rank_identity(rank))
            except zmq.ZMQError as error:
                raise PartFailed(f"rank {rank} is gone ({error}); its own log says why") from error

    def _send_bundle(self, fetch: FetchBundle) -> None:
        if fetch.digest != self._bundle.digest:
            _log.warning("the router asks for bundle %s, which is not ours", fetch.digest)
            return
        remaining = len(self._bundle.files)
        for name, content in self._bundle.files.items():
            remaining -= 1
            self._router_control.send(BundlePart(self._bundle.digest, name, remaining), content)

    def _announce(self, *, force: bool = False) -> None:
        """Tell the router our load when it has changed, and at least every heartbeat."""
        now = time.monotonic()
        silent_seconds = now - self._announced_at
        if not force and silent_seconds < LOAD_SECONDS:
            return
        load = self._core.load()
        if not force and load == self._announced and silent_seconds < HEARTBEAT_SECONDS:
            return
        self._announced, self._announced_at = load, now
        self._observer.state(self._core)
        config = self._config
        lengths = np.array([tokens for tokens in PREFILL_POINTS if tokens <= config.max_model_len], np.int64)
        seconds = self._core.predictor.prefill_seconds_many(np.zeros_like(lengths), lengths)
        announce = Announce(
            replica=self._settings.replica,
            model=self._settings.spec.model.name,
            digest=self._bundle.digest,
            epoch=self._core.epoch,
            ready=True,
            draining=self._core.draining,
            max_model_len=config.max_model_len,
            vocab_size=self._vocab_size,
            kv_tokens_total=config.pool_tokens,
            kv_tokens_free=load.kv_tokens_free,
            running=load.running,
            waiting=load.waiting,
            pending_prefill_seconds=load.pending_prefill_seconds,
            longest_request_tokens=min(config.max_model_len, config.pool_tokens),
            waiting_limit=config.scheduling.max_waiting,
            service_classes=tuple(_terms(entry) for entry in config.service_classes.values()),
            prefill_points=tuple(zip(lengths.tolist(), seconds.tolist(), strict=True)),
        )
        # A ROUTER socket can only send to who spoke there, and a restarted router has heard nobody: both links.
        self._router_control.send(announce)
        self._router_tokens.send(announce)

    def _record_event(self, event: ControllerEvent, now: float, commands: list[ControllerCommand]) -> None:
        if self._record is not None:
            header = bytes(encode(event)[0]).decode() if not isinstance(event, Drain) else '{"type":"Drain"}'
            self._record.write(f'{{"now": {now!r}, "event": {header}, "commands": "{digest(commands)}"}}\n')


def _profile(spec: MedhaReplicaSpec) -> Profile | None:
    """The profile that the manifest names, if it does.

    Raises:
        ConfigInvalid: it cannot be read.
    """
    if spec.scheduling.profile is None:
        return None
    path = Path(spec.scheduling.profile)
    try:
        return Profile.from_json(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigInvalid(f"scheduling.profile: {path} cannot be read: {error.strerror}") from error


def chunk_seconds(profile: StepProfile) -> float:
    """What a chunk of 512 tokens behind as many takes: ranks of other stages wait for the one where it is longest."""
    pairs = 512 * (512 + 513 / 2)
    linear, attention = profile.linear_seconds_per_token, profile.attention_seconds_per_pair
    return profile.step_seconds + profile.sequence_seconds + 512 * linear + pairs * attention


def _terms(service_class: ServiceClass) -> ServiceClassTerms:
    return ServiceClassTerms(
        name=service_class.name,
        ttft_floor_seconds=service_class.ttft_floor_seconds,
        ttft_factor=service_class.ttft_factor,
        tpot_target_seconds=service_class.tpot_target_seconds,
        tpot_floor_seconds=service_class.tpot_floor_seconds,
        default_output_tokens=service_class.default_output_tokens,
    )


@click.command()
@click.option("--settings", "settings_file", type=click.Path(exists=True, path_type=Path), required=True)
def main(settings_file: Path) -> None:
    """Drive one replica; the settings are a JSON file of `ControllerSettings`."""
    settings = ControllerSettings.model_validate_json(settings_file.read_bytes())
    configure_logging(settings.log_level)
    end_with_parent()
    try:
        controller = Controller(settings, read_bundle(settings.model_directory))
    except MedhaError as error:
        _log.error("%s", error)
        sys.exit(1)
    signal.signal(signal.SIGTERM, lambda *_: controller.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's: it drains us by SIGTERM
    try:
        controller.run()
    except MedhaError as error:
        _log.error("%s", error)
        sys.exit(1)
    finally:
        controller.close()


if __name__ == "__main__":
    main()
