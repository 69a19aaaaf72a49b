"""`python -m medha_worker.controller`: the process that drives one ReplicaController in real time.

It only moves messages: frames from routers and ranks become events, and commands become frames. All
decisions are made in `medha.scheduler.controller`. It does not import torch.

Token ids never enter the ReplicaController. This process keeps them under their prompt's name and sends them
to the ranks on a separate socket, ahead of the step that admits a sequence of that prompt.
"""

from __future__ import annotations

import logging
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

import click
import zmq
from prometheus_client import CollectorRegistry
from pydantic_core import to_json

from medha.api.replica import MedhaReplicaSpec
from medha.cost.cost_profile import Profile
from medha.errors import ConfigInvalid, WireInvalid
from medha.kv.prefix_cache import PrefixHasher
from medha.scheduler.controller import Load, ReplicaController
from medha.scheduler.history import History
from medha.scheduler.replica_config import ReplicaConfig, derive
from medha.scheduler.request_progress import progress
from medha.topology import Topology
from medha.wire.frames import TOKENS_PER_FRAME, tokens_from_frame, tokens_to_frame
from medha.wire.messages import (
    Announce,
    BundlePart,
    Cancel,
    CompileGrammar,
    ControllerCommand,
    ControllerEvent,
    DiskBegin,
    DiskReport,
    Done,
    Drain,
    DropGrammar,
    Emit,
    Failed,
    FetchBundle,
    GrammarReady,
    KvAsk,
    KvDone,
    KvTicket,
    RankReady,
    RankReport,
    RankXid,
    Readiness,
    Refused,
    RouterUse,
    StageFree,
    Step,
    SteppedAside,
    StoreLookup,
    Submit,
    Tick,
    Tokens,
    TracePart,
    WatchProgress,
)
from medha_links.drops import Drops
from medha_links.key_files import (
    KeyPair,
    hash_key_of_token,
    read_public_key,
    read_public_keys,
    read_tokens,
)
from medha_links.sockets import Authenticator
from medha_process.part_process import (
    begin_part,
    collect_garbage_rarely,
    end_with_parent,
    log_failure,
    settings_option,
)
from medha_process.part_settings import ControllerSettings, RouterEndpoints
from medha_process.part_state import PartState, Phase
from medha_process.shared_files import write_whole
from medha_process.watchdog import Watchdog
from medha_worker.checkpoints.read_bundle import Bundle, read_bundle
from medha_worker.controller.controller_metrics import Observer
from medha_worker.controller.event_record import EventRecord
from medha_worker.controller.handover import Handover, KvMessage
from medha_worker.controller.inspection import Inspection
from medha_worker.controller.joint_figures import slowest_rank, without_hash_keys
from medha_worker.controller.live_settings import LiveFile
from medha_worker.controller.membership import differing_scales
from medha_worker.controller.prompts import PromptStore
from medha_worker.controller.rank_links import RankLinks
from medha_worker.controller.rank_metrics import RankMetrics
from medha_worker.controller.replica_card import replica_card
from medha_worker.controller.replica_traces import replica_traces
from medha_worker.controller.router_discovery import RouterDiscovery
from medha_worker.controller.router_fleet import RouterFleet
from medha_worker.controller.router_heartbeats import RouterHeartbeats
from medha_worker.controller.running_outputs import RunningOutputs
from medha_worker.controller.telemetry_server import serve
from medha_worker.link import RouterLinks
from medha_worker.nvml import xid_text

ANNOUNCE_SECONDS = 1.0  # longest interval between announcements, as a new router has heard none
POLL_MILLISECONDS = 250  # longest delay until a signal or a due announcement is handled
STUCK_SECONDS = 20.0  # watchdog limit for one iteration of the main loop
LIVE_SECONDS = 60.0  # longest wait for open requests to end before changed settings begin a new epoch
LOAD_SECONDS = 0.05  # shortest interval between announcements of a changed load
MOST_WATCH_SECONDS = 60.0  # longest time for which a router may ask for reports of progress at once
MOST_NAMED = 20  # missing ranks listed in the state reported to the supervisor

_log = logging.getLogger("medha.controller")


class Controller:
    """The controller process of a replica: links to routers and ranks around a ReplicaController."""

    def __init__(self, settings: ControllerSettings, bundle: Bundle, settings_file: Path) -> None:
        self._settings = settings
        self._live = LiveFile(settings_file, ControllerSettings.read, _log)
        self._changed_at: float | None = None  # when the settings changed that need a new epoch
        self._bundle = bundle
        self._registry = CollectorRegistry()
        self._observer = Observer(self._registry)
        shape = settings.spec.parallelism
        topology = Topology(shape.tensor, shape.stream, shape.kv)
        self._rank_metrics = RankMetrics(topology, self._registry)
        context, drops = zmq.Context[zmq.Socket[bytes]](), Drops(_log, self._observer.dropped)
        keys, rank_keys = KeyPair.read(settings.key_file), read_public_keys(settings.rank_keys_file)
        self._authenticator = Authenticator(context, rank_keys)
        self._ranks = RankLinks(
            context,
            (settings.rank_control, settings.rank_tokens),
            keys,
            topology.ranks,
            drops,
            rendezvous_host=settings.rendezvous_host,
            epoch_file=settings.epoch_file,
            oldest_epoch=settings.oldest_epoch,
            revision=settings.revision,
            gather_seconds=settings.spec.lifecycle.ready_seconds,
            lost=self._end_epoch,
            dropped=self._observer.dropped,
        )
        self._drops = drops
        self._router_keys = _router_keys(settings)
        self._discovery = RouterDiscovery(settings.routers)
        self._routers = RouterFleet(self._open_links)
        self._beats = RouterHeartbeats()
        self._poller = zmq.Poller()
        for link in self._ranks.links:
            self._poller.register(link.socket, zmq.POLLIN)
            self._poller.register(link.connections.socket, zmq.POLLIN)
        self._router_sockets: set[zmq.Socket[bytes]] = set()
        self._context = context
        self._poll_routers()
        self._traces = replica_traces(settings, self._observer.spans_lost)
        self._inspection = Inspection(
            settings.replica, settings.spec.model.name, settings.trace_file, settings.spec.role
        )
        self._poller.register(self._inspection.questions.fileno(), zmq.POLLIN)
        self._core: ReplicaController | None = None  # of the current epoch
        self._config: ReplicaConfig | None = None  # of the current or the last epoch
        self._slowest: RankReady | None = None  # slowest rank of the current or the last epoch
        self._handover: Handover | None = None  # of the current epoch; None: no KV is handed over
        self._notified: ReplicaController | None = None  # the core last reported to the supervisor
        self._stopping = False
        self._drain_until: float | None = None
        self._record = EventRecord(settings.record_file, settings.replica)
        self._announced: Load | None = None
        self._card: Announce | None = None
        self._announced_at = float("-inf")  # announce in the first iteration that can

    # --- the main loop ------------------------------------------------------------------------------

    def run(self, watchdog: Watchdog) -> None:
        """Serve until SIGTERM, then drain.

        Raises:
            PartFailed: a rank failed before anything was served, ranks did not come back in time, or the thread that
                sends heartbeats to routers has ended.
        """
        while self._drain_until is None or not self._drained(self._drain_until):
            watchdog.allow(STUCK_SECONDS, "one iteration of its loop")
            self._beats.allow(self._routers.beats)
            self._poller.poll(self._longest_wait_milliseconds())
            self._process_link_events()
            self._ranks.poll()
            for event in self._events():
                self._step(event)
            if (
                self._core is not None
                and (due := self._core.next_due) is not None
                and time.monotonic() >= due
            ):
                self._step(Tick())
            self._answer_questions()
            self._apply_changed_settings()
            begins_drain = self._stopping and self._drain_until is None
            if begins_drain:
                self._drain_until = time.monotonic() + self._settings.spec.lifecycle.drain_seconds
                self._step(Drain())
            self._announce(force=begins_drain)
            if self._core is None or self._core is not self._notified:
                self._notified = self._core
                watchdog.report(self._state())
        if self._core is not None:
            self._return_requests(self._core, set())  # what has not ended continues on other replicas
        self._announce(force=True)
        self._ranks.shut_down()

    def _apply_changed_settings(self) -> None:
        """Read changed settings.

        Routers and the limits of `lifecycle` take effect at once. Changed scheduling or service classes take effect
        with a new epoch, which begins when no request is open, or after LIVE_SECONDS.
        """
        now = time.monotonic()
        changed = self._live.changed(now)
        if changed is not None:
            self._discovery.follow(changed.routers if self._router_keys is not None else ())
        if changed is not None and self._can_begin_with(changed.spec):
            before, spec = self._settings.spec, changed.spec
            self._settings = self._settings.model_copy(update={"spec": spec})
            self._ranks.gather_seconds = spec.lifecycle.ready_seconds
            if (before.scheduling, before.service_classes) != (spec.scheduling, spec.service_classes):
                self._changed_at = now
        if self._changed_at is None or self._core is None or self._stopping:
            return
        if self._core.idle or now - self._changed_at > LIVE_SECONDS:
            self._return_requests(self._core, set())  # there are no suspects
            self._ranks.end_epoch("settings have changed")

    def _can_begin_with(self, spec: MedhaReplicaSpec) -> bool:
        """Return whether ranks like those of the last epoch could serve with `spec`; log why not.

        An edit with which they could not serve is ignored, so that it does not end a serving replica.
        """
        if self._slowest is None:
            return True
        try:
            derive(spec, self._slowest)
            _profile(spec)
        except ConfigInvalid as error:
            _log.error("the new settings cannot be read; the previous ones stay in force: %s", error)
            return False
        return True

    def _answer_questions(self) -> None:
        """Answer the HTTP pages' questions, and make ranks begin or end a trace."""
        now = time.monotonic()
        self._inspection.answer(self._core, self._ranks.missing, now)
        trace = self._inspection.rank_trace_requests(now)
        if trace is not None and self._core is not None:
            self._ranks.send(trace)

    def _state(self) -> PartState:
        """Return the state to report to the supervisor."""
        if self._core is not None:
            return PartState(phase="serving", epoch=self._core.epoch)
        ranks = ", ".join(map(str, self._ranks.missing[:MOST_NAMED]))
        phase: Phase = "gathering" if self._ranks.epoch is None else "rendezvous"
        detail = f"waiting for rank {ranks}" if ranks else ""  # if no rank is missing, the rendezvous is next
        return PartState(phase=phase, epoch=self._ranks.epoch, detail=detail)

    def _drained(self, until: float) -> bool:
        return self._core is None or self._core.is_drained or time.monotonic() >= until

    def stop(self) -> None:
        """Ask the main loop to drain and end; safe in a signal handler."""
        self._stopping = True

    def close(self) -> None:
        """Close the links, with a short time for queued messages to be sent."""
        self._discovery.close()
        self._beats.close()
        self._routers.close()
        self._ranks.close()
        self._authenticator.close()
        self._context.term()
        self._inspection.close()
        if self._traces is not None:
            self._traces.close()
        self._record.close()

    def _step(self, event: ControllerEvent) -> None:
        core = self._core
        if core is None:
            return  # an earlier event has ended the epoch
        now = time.monotonic()
        commands = core.handle(event, now)
        handle_seconds = time.monotonic() - now
        self._record.add(event, commands, core, self._history, self._card, now)
        if self._routers.is_watched(now):
            report = progress(event, commands, self._history, now)
            if report is not None:
                self._routers.report_progress(report, now)
        if self._traces is not None:
            self._traces.take(event, commands, core, self._history, now)
        for command in commands:
            self._carry_out(command)
        if isinstance(event, Submit) and not core.knows_prompt(event.prompt):
            self._prompts.forgotten(event.prompt)
        facts = self._history.take(core, event, commands, now)
        self._observer.observe(facts, handle_seconds)
        self._inspection.observe(facts, core)

    # --- links --------------------------------------------------------------------------------------

    def _process_link_events(self) -> None:
        """Count refused connections, and detect that a rank has gone or that a router has come or gone."""
        for link, refused in self._ranks.process_connection_events().items():
            self._observer.refused(link, refused)
        self._poll_routers()

    def _poll_routers(self) -> None:
        """Find routers that have come or gone, and poll the current sockets of their links."""
        for event, links, identity in self._routers.poll(time.monotonic()):
            where = links.endpoints.control
            match event:
                case "came":
                    _log.info("the router at %s is connected", where)
                    self._announce(force=True)
                case "gone":
                    ended = self._end_requests_of(identity)
                    level = logging.WARNING if ended else logging.INFO
                    _log.log(
                        level,
                        "the connection to the router at %s has ended, and with it %d requests",
                        where,
                        ended,
                    )
                    self._routers.lost(identity, links)
                case "refused":
                    _log.error(
                        "the router at %s does not admit this replica: the token in %s is none of its enrolment tokens, or "
                        "it has another key than %s; trying again",
                        where,
                        self._settings.enrolment_file,
                        self._settings.router_key_file,
                    )
        self._routers.follow(self._discovery.found)
        sockets = self._routers.sockets
        for former in self._router_sockets - sockets:
            self._poller.unregister(former)
        for socket in sockets - self._router_sockets:
            self._poller.register(socket, zmq.POLLIN)
        self._router_sockets = sockets

    def _open_links(self, endpoints: RouterEndpoints) -> RouterLinks:
        assert self._router_keys is not None, "settings with routers have their keys"
        keys, server = self._router_keys
        return RouterLinks(self._context, endpoints, self._settings.replica, keys, server, self._drops)

    def _end_requests_of(self, identity: bytes) -> int:
        """End the requests of a router that has gone, and return their number; if it comes back, it submits them again."""
        ended = self._routers.abandon(identity)
        if self._core is None:
            return len(ended)
        for request_id in ended:
            self._outputs.end(request_id)
            if self._core is not None:
                self._step(Cancel(request_id))
        self._prompts.abandon(identity)  # only now: each end may let a later one of these requests begin
        return len(ended)

    # --- epochs -------------------------------------------------------------------------------------

    def _end_epoch(self, reason: str) -> None:
        """Hand all open requests back to their routers, because the epoch was lost.

        Requests in the steps in flight are reported as suspects.
        """
        self._rank_metrics.forget_states()
        self._inspection.lost(reason, time.monotonic())
        if self._core is not None:
            steps = self._core.steps_in_flight
            self._return_requests(self._core, {entry.id for step in steps for entry in step.entries})
        self._announce(force=True)

    def _return_requests(self, core: ReplicaController, suspects: set[str]) -> None:
        """Stop serving in this epoch, and hand all open requests back to their routers.

        `suspects` may have made the ranks fail: their routers get `Failed` for them and count the loss.
        All other open requests, begun or not, are refused as `not_ready`, without blame.
        """
        self._core = None
        if self._traces is not None:
            self._traces.end_all("rank_lost", time.monotonic())
        open_ids = [request.id for request in core.requests() if request.steps_aside or not request.ended]
        # Refusals first: the router learns that this replica is not ready before it sends a suspect anywhere.
        for request_id in [*self._prompts.held_ids, *(id_ for id_ in open_ids if id_ not in suspects)]:
            self._routers.answer(Refused(request_id, "not_ready", "the epoch has ended"))
        for request_id in open_ids:
            if request_id in suspects:
                self._routers.answer(Failed(request_id, "rank_lost", "a rank was lost while a step had it"))

    def _begin(self, ranks: list[RankReady]) -> None:
        """Begin to serve, now that all ranks are ready."""
        spec = self._settings.spec
        ranks, kept_key = without_hash_keys(ranks)
        hash_key = kept_key or secrets.token_hex(32)
        self._handover, enrolment = self._new_handover(ranks), self._settings.enrolment_file
        if self._handover is not None and enrolment is not None:
            # Replicas that hand KV over compare their hashes.
            hash_key = hash_key_of_token(read_tokens(enrolment)[0])
        slowest = slowest_rank(ranks)
        if self._handover is None:
            slowest = replace(slowest, peer=None)
        profile = _profile(spec)
        try:
            config = derive(spec, slowest)
            core = ReplicaController(config, profile or slowest.profile, slowest.epoch)
        except (ValueError, ArithmeticError) as error:  # plausible numbers that contradict each other
            self._ranks.end_epoch(f"the report of rank {slowest.rank} does not describe a replica: {error}")
            return
        differing = differing_scales(ranks, config.topology)
        if differing is not None:
            self._ranks.end_epoch(differing)
            return
        is_first, self._config, self._slowest = self._config is None, config, slowest
        self._changed_at = None
        self._vocab_size = slowest.vocab_size
        self._core = core
        hasher = None
        if spec.kv_cache.prefix_caching:
            # The key is secret: without it nobody can make two prompts share a hash. Ranks keep it with files of KV
            # that outlive this process, and a store keeps it for all replicas. Replicas that hand KV over derive it
            # from their enrolment token.
            hasher = PrefixHasher(config.block_size_tokens, bytes.fromhex(hash_key))
        self._prompts = PromptStore(config.max_model_len, self._vocab_size, hasher)
        speculation = config.scheduling.speculation
        looks_up = speculation.method == "promptLookup"
        self._outputs = RunningOutputs(self._prompts, speculation.max_draft_tokens if looks_up else None)
        self._routers.forget_requests()
        self._record.begin_epoch(spec, profile, slowest, time.monotonic())
        self._history = History()
        self._inspection.begin_epoch(core, self._history, time.monotonic())
        if is_first:
            self._metrics_url = serve(
                self._registry, self._inspection.questions, spec.metrics.host, spec.metrics.port
            )
            self._report_ready(config, ranks)
        if config.disk_tier is not None or config.store_block_seconds is not None:
            self._ranks.send(DiskBegin(slowest.epoch, hash_key))
        self._announce(force=True)

    def _new_handover(self, ranks: Sequence[RankReady]) -> Handover | None:
        """Return the hand-overs of a new epoch; None if the manifest or a rank does not hand KV over."""
        peers = [ready.peer for ready in ranks if ready.peer is not None]
        settings = self._settings
        if settings.spec.kv_cache.peers is None or settings.enrolment_file is None or len(peers) < len(ranks):
            return None
        return Handover(tuple(peers))

    def _report_ready(self, config: ReplicaConfig, ranks: list[RankReady]) -> None:
        _log.info(
            "serving: %d KV tokens, long from %d tokens", config.pool_tokens, config.long_threshold_tokens
        )
        if self._settings.ready_file is not None:
            write_whole(self._settings.ready_file, to_json(Readiness(tuple(ranks), self._metrics_url)))

    # --- events -------------------------------------------------------------------------------------

    def _events(self) -> Iterator[ControllerEvent]:
        """Yield the events of all messages that have arrived.

        Ranks come first: a finished step matters more than a new request.
        """
        for event in self._ranks.receive():
            match event:
                case Done() as done:
                    if self._core is not None:  # else an earlier event has ended the epoch
                        yield self._outputs.completed(done, self._core)
                case StageFree() | GrammarReady() | DiskReport() as event:
                    yield event
                case RankReport() as report:
                    self._rank_report(report)
                case RankXid() as error:
                    _log.error("the GPU of rank %d reports %s", error.rank, xid_text(error.xid))
                    self._rank_metrics.xid(error)
                case TracePart() as part:
                    self._inspection.add_part(part, time.monotonic())
                case list() as ranks:
                    self._begin(ranks)
        for links in self._routers:
            yield from self._events_of(links)

    def _events_of(self, links: RouterLinks) -> Iterator[ControllerEvent]:
        """Yield the events of a router's messages."""
        yield from self._released_by(links)
        while (received := links.control.receive()) is not None:
            match received.message:
                case Submit() as submit if self._core is None:
                    links.answer(Refused(submit.id, "not_ready", "the ranks are gathering"))
                case Cancel() if self._core is None:
                    pass
                case Submit() as submit:
                    yield from self._submitted(submit, links)
                case Cancel() as cancel:
                    if self._routers.cancel(cancel, links):
                        self._prompts.withdraw(cancel.id)
                        self._outputs.end(cancel.id)
                        yield cancel
                case KvAsk() | KvTicket() | KvDone() as about_kv:
                    yield from self._handed_over(about_kv, links)
                case FetchBundle() as fetch:
                    self._send_bundle(fetch, links)
                case RouterUse() as report:
                    self._routers.pass_on(report, links)
                case WatchProgress(seconds=seconds):
                    self._routers.watch(links, time.monotonic() + min(seconds, MOST_WATCH_SECONDS))

    def _released_by(self, links: RouterLinks) -> Iterator[Submit]:
        """Yield the requests whose prompts are complete with a router's token ids."""
        while (received := links.tokens.receive()) is not None:
            match received.message, received.payload:
                case Tokens(), _ if self._core is None:
                    pass  # the router sends them again with its next attempt
                case Tokens() as tokens, memoryview() as frame:
                    try:
                        released = self._prompts.receive(tokens, tokens_from_frame(frame), links.identity)
                    except WireInvalid as error:
                        links.tokens.drop(error)
                        continue
                    for submit in released:
                        self._prompts.pass_on(submit)
                        yield submit

    def _submitted(self, submit: Submit, links: RouterLinks) -> Iterator[Submit]:
        """Yield a request if its prompt is here already."""
        if submit.trace:  # removed from the event: neither decisions nor records depend on tracing
            if self._traces is not None:
                self._traces.announce(submit)
            submit = replace(submit, trace="")
        contradiction = self._prompts.contradicts(submit, links.identity)
        if contradiction is None and not self._routers.accept(submit.id, links):
            contradiction = f"request {submit.id:.80} is already here"
        if contradiction is not None:
            links.control.drop(WireInvalid(contradiction))
            links.answer(Refused(submit.id, "invalid", contradiction))
        elif not self._prompts.hold(submit, links.identity):
            yield self._prompts.hashed(submit)

    def _handed_over(self, message: KvMessage, links: RouterLinks) -> Iterator[ControllerEvent]:
        """Yield the event of another replica's message about KV; none if the message was answered here."""
        if self._handover is None or self._core is None:
            return
        event = self._handover.receive(message, links)
        if isinstance(event, KvTicket) and event.ticket:
            self._ranks.send(replace(event, parts=()))  # ahead of the step that reads
        if event is not None:
            yield event

    def _rank_report(self, report: RankReport) -> None:
        try:
            self._rank_metrics.report(report, is_serving=self._core is not None)
        except WireInvalid as error:
            self._ranks.links[0].drop(error)

    # --- commands -----------------------------------------------------------------------------------

    def _carry_out(self, command: ControllerCommand) -> None:
        match command:
            case Step() as step:
                self._send_prompts(step)
                if self._core is not None:  # else sending the ids has shown that a rank is gone
                    self._ranks.begin_step(step)
            case CompileGrammar() | DropGrammar() | StoreLookup() as message:
                if self._core is not None:
                    self._ranks.send(message)
            case KvAsk() | KvTicket() | KvDone() as about_kv:
                if self._handover is not None:
                    self._handover.send(about_kv, self._routers)
            case Emit() | Refused() | Failed() as answer:
                self._routers.answer(answer)
                if isinstance(answer, Failed):
                    _log.warning("request %s has failed: %s", answer.id, answer.reason)
                    self._outputs.end(answer.id)
                elif isinstance(answer, Emit):
                    self._outputs.emitted(answer)
            case SteppedAside() as aside:
                self._outputs.step_aside(aside)

    def _send_prompts(self, step: Step) -> None:
        """Send token ids ahead of the step that admits the first sequence of their prompt."""
        for name in step.forgets:
            self._prompts.forgotten(name)
        for admit in step.admits:
            ids = self._prompts.take_unsent(admit.prompt)
            if ids is None:
                continue
            for offset in range(0, len(ids), TOKENS_PER_FRAME):
                frame = tokens_to_frame(ids[offset : offset + TOKENS_PER_FRAME])
                piece = Tokens(prompt=admit.prompt, offset=offset, total=len(ids), epoch=step.epoch)
                self._ranks.send_tokens(piece, frame)

    def _send_bundle(self, fetch: FetchBundle, links: RouterLinks) -> None:
        if fetch.digest != self._bundle.digest:
            links.control.drop(WireInvalid(f"bundle {fetch.digest:.80} is not ours"))
            return
        remaining = len(self._bundle.files)
        for name, content in self._bundle.files.items():
            remaining -= 1
            links.control.send(BundlePart(self._bundle.digest, name, remaining), content)

    def _longest_wait_milliseconds(self) -> int:
        """Return the longest wait for an event; it is short after an announcement, as the load may have changed since."""
        until_next = 1000 * (self._announced_at + LOAD_SECONDS - time.monotonic())
        return ceil(until_next) if until_next > 0 else POLL_MILLISECONDS

    def _announce(self, *, force: bool = False) -> None:
        """Announce the load to all routers when it has changed, and at least every ANNOUNCE_SECONDS."""
        now = time.monotonic()
        silent_seconds = now - self._announced_at
        if not force and silent_seconds < LOAD_SECONDS:
            return
        card = self._card
        if self._core is not None and self._config is not None:
            load = self._core.load()
            if not force and load == self._announced and silent_seconds < ANNOUNCE_SECONDS:
                return
            self._announced = load
            self._observer.state(self._core)
            card = self._card = replica_card(
                self._settings,
                self._bundle,
                self._core,
                self._config,
                load,
                vocab_size=self._vocab_size,
                handover=self._handover,
                drain_until=self._drain_until,
                routers=self._routers.count,
                now=now,
            )
        elif card is None or (not force and silent_seconds < ANNOUNCE_SECONDS):
            return
        else:
            card = replace(card, ready=False)  # between two epochs
        self._announced_at = now
        self._routers.announce(card)


def _profile(spec: MedhaReplicaSpec) -> Profile | None:
    """Return the profile that the manifest names, or None.

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


def _router_keys(settings: ControllerSettings) -> tuple[KeyPair, bytes] | None:
    """Return the keys with which the replica enrols, and the routers' public key; None if it has no routers."""
    if settings.router_key_file is None or settings.enrolment_file is None:
        return None
    enrolment = KeyPair.of_token(read_tokens(settings.enrolment_file)[0])
    return enrolment, read_public_key(settings.router_key_file)


@click.command()
@settings_option
def main(settings_file: Path) -> None:
    """Drive one replica; the settings are a JSON file of `ControllerSettings`."""
    settings = begin_part(ControllerSettings, settings_file)
    end_with_parent()
    collect_garbage_rarely()
    with log_failure(_log):
        controller = Controller(settings, read_bundle(settings.model_directory), settings_file)
        signal.signal(signal.SIGTERM, lambda *_: controller.stop())
        try:
            controller.run(Watchdog())
        finally:
            controller.close()
