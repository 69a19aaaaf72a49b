"""`python -m medha_worker.controller`: the process that drives one ReplicaController in real time.

It only moves messages: frames from routers and ranks become events, and commands become frames. All
decisions are made in `medha.scheduler.controller`. It does not import torch.

Token ids never enter the ReplicaController. This process keeps them under their prompt's name and sends them
to the ranks on a separate socket, ahead of the step that admits a sequence of that prompt.
"""

from __future__ import annotations

import json
import logging
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import TextIO

import click
import numpy as np
import zmq
from prometheus_client import CollectorRegistry
from pydantic_core import to_json

from medha.api.replica import MedhaReplicaSpec, ServiceClass
from medha.cost.cost_profile import Profile
from medha.errors import ConfigInvalid, WireInvalid
from medha.kv.prefix_cache import PrefixHasher
from medha.replica_figures import replica_figures
from medha.scheduler.controller import Load, ReplicaController
from medha.scheduler.history import History
from medha.scheduler.prompt_lookup import PromptLookup
from medha.scheduler.replica_config import ReplicaConfig, derive
from medha.scheduler.request_progress import happenings, progress
from medha.timeline import Timeline
from medha.topology import Topology
from medha.wire.frames import TOKENS_PER_FRAME, digest, encode, tokens_from_frame, tokens_to_frame
from medha.wire.messages import (
    Announce,
    BundlePart,
    Cancel,
    CompileGrammar,
    ControllerCommand,
    ControllerEvent,
    DiskBegin,
    DiskReport,
    DiskTierFigures,
    Done,
    Drain,
    DropGrammar,
    Emit,
    Failed,
    FetchBundle,
    GrammarReady,
    HostTierFigures,
    KvAsk,
    KvDone,
    KvTicket,
    RankReady,
    RankReport,
    RankXid,
    Readiness,
    Refused,
    RouterUse,
    ServiceClassTerms,
    StageFree,
    Step,
    SteppedAside,
    StepProfile,
    StoreFigures,
    StoreLook,
    StreamingFigures,
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
from medha_worker.controller.handover import Handover, KvMessage
from medha_worker.controller.inspection import Inspection
from medha_worker.controller.live_settings import LiveFile
from medha_worker.controller.membership import differing_scales
from medha_worker.controller.output_hashes import OutputHasher
from medha_worker.controller.output_ids import OutputIds
from medha_worker.controller.prompts import PromptStore
from medha_worker.controller.rank_links import RankLinks
from medha_worker.controller.rank_metrics import RankMetrics
from medha_worker.controller.replica_traces import replica_traces
from medha_worker.controller.router_discovery import RouterDiscovery
from medha_worker.controller.router_fleet import RouterFleet
from medha_worker.controller.router_heartbeats import RouterHeartbeats
from medha_worker.controller.telemetry_server import serve
from medha_worker.link import RouterLinks
from medha_worker.nvml import xid_text

ANNOUNCE_SECONDS = 1.0  # longest interval between announcements, as a new router has heard none
POLL_MILLISECONDS = 250  # longest delay until a signal or a due announcement is handled
STUCK_SECONDS = 20.0  # watchdog limit for one iteration of the main loop
LIVE_SECONDS = 60.0  # longest wait for open requests to end before changed settings begin a new epoch
LOAD_SECONDS = 0.05  # shortest interval between announcements of a changed load
BARS_SECONDS = 0.25  # shortest interval between the bars in a record, while requests are open
MOST_WATCH_SECONDS = 60.0  # longest time for which a router may ask for reports of progress at once
MOST_NAMED = 20  # missing ranks listed in the state reported to the supervisor
PREFILL_POINTS = tuple(256 * 4**power for power in range(9))
"""Prompt lengths, in tokens, whose predicted prefill times are announced."""

_log = logging.getLogger("medha.controller")


class Controller:
    """The controller process of a replica: links to routers and ranks around a ReplicaController."""

    def __init__(self, settings: ControllerSettings, bundle: Bundle, settings_file: Path) -> None:
        self._settings = settings
        self._live = LiveFile(settings_file, ControllerSettings.read, _log)
        self._changed_at: float | None = None  # when settings changed that take effect with the next epoch
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
        self._record_file = settings.record_file  # None after a failed write
        self._record: TextIO | None = None
        self._lookup: PromptLookup | None = None  # of the current epoch, if it looks guesses up
        self._announced: Load | None = None
        self._card: Announce | None = None
        self._timeline = Timeline(0.0)  # of the record of the current epoch
        self._bars_recorded = 0  # number of the timeline's last change that was written
        self._bars_recorded_at = float("-inf")
        self._recorded_card: Announce | None = None
        self._announced_at = float("-inf")  # announce in the first iteration that can

    # --- the main loop ------------------------------------------------------------------------------

    def run(self, watchdog: Watchdog) -> None:
        """Serve until SIGTERM, then drain.

        Raises:
            PartFailed: a rank failed before anything was served, or ranks did not come back in time.
        """
        while self._drain_until is None or not self._drained(self._drain_until):
            watchdog.allow(STUCK_SECONDS, "a turn of its loop")
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
            self._be_inspected()
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
        """Read changed settings; they take effect with a new epoch.

        It begins when no request is open, or after LIVE_SECONDS.
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
            self._return_requests(self._core, set())  # no request is to blame
            self._ranks.end_epoch("settings have changed")

    def _can_begin_with(self, spec: MedhaReplicaSpec) -> bool:
        """Return whether ranks like those of the last epoch could serve with `spec`.

        An edit that they could not serve with is refused, so that it does not end a serving replica.
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

    def _be_inspected(self) -> None:
        """Answer questions that came over HTTP, and make ranks begin or end a trace."""
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
        if self._record is not None:
            self._record.close()

    def _step(self, event: ControllerEvent) -> None:
        core = self._core
        if core is None:
            return  # an earlier event has ended the epoch
        now = time.monotonic()
        commands = core.handle(event, now)
        handle_seconds = time.monotonic() - now
        self._record_event(event, now, commands)
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
            self._end_output(request_id)
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
        Requests that only waited are refused as `not_ready`, without blame.
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
        except (ValueError, ArithmeticError) as error:  # each number is plausible, together they are not
            self._ranks.end_epoch(f"no replica can be made of what rank {slowest.rank} reports: {error}")
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
            # The key is a secret of this process: without it nobody can make two prompts share a hash.
            # Ranks keep it with files of KV that outlive this process, if there is a disk tier.
            hasher = PrefixHasher(config.block_size_tokens, bytes.fromhex(hash_key))
        self._prompts = PromptStore(config.max_model_len, self._vocab_size, hasher)
        self._outputs, self._output_ids = OutputHasher(), OutputIds()
        speculation = config.scheduling.speculation
        self._lookup = None
        if speculation.method == "promptLookup":
            self._lookup = PromptLookup(1 + speculation.max_draft_tokens)  # its first token may be under way
        self._routers.forget_requests()
        self._open_record(profile, slowest)
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
        """Return the hand-overs of a new epoch; None if the manifest or a rank has none."""
        peers = [ready.peer for ready in ranks if ready.peer is not None]
        settings = self._settings
        if settings.spec.kv_cache.peers is None or settings.enrolment_file is None or len(peers) < len(ranks):
            return None
        return Handover(tuple(peers))

    def _open_record(self, profile: Profile | None, ready: RankReady) -> None:
        """Open the record of this epoch: each epoch has its own, because it begins with a fresh state."""
        path = self._record_file
        if path is None:
            return
        if ready.epoch > 0:
            path = path.with_name(f"{path.name}.epoch{ready.epoch}")
        self._timeline, self._bars_recorded = Timeline(time.monotonic()), 0
        spec = self._settings.spec.model_dump(mode="json", by_alias=True)
        header = {"spec": spec, "origin": self._timeline.origin}  # the times of bars count from there
        if profile is not None:  # its file may be gone when the record is replayed
            header["profile"] = json.loads(profile.to_json())
        try:
            if self._record is not None:
                self._record.close()
            self._record = path.open("w", encoding="utf-8", buffering=1)
            self._record.write(json.dumps(header) + "\n" + encode(ready)[0].decode() + "\n")  # type: ignore[union-attr]
        except OSError as error:
            self._stop_recording(error)

    def _stop_recording(self, error: OSError) -> None:
        """Stop recording for good after an I/O error, and continue to serve; what was written stays."""
        _log.error("the recording ends here: %s", error)
        if self._record is not None:
            with suppress(OSError):  # closing tries once more to write the buffer
                self._record.close()
        self._record = self._record_file = None

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
                    yield self._with_drafts(self._with_hashes(done))
                case StageFree() | GrammarReady() | DiskReport() as event:
                    yield event
                case RankReport() as report:
                    self._rank_report(report)
                case RankXid() as error:
                    _log.error("the GPU of rank %d reports %s", error.rank, xid_text(error.xid))
                    self._rank_metrics.xid(error)
                case TracePart() as part:
                    self._inspection.part(part, time.monotonic())
                case list() as ranks:
                    self._begin(ranks)
        for links in self._routers:
            yield from self._events_of(links)

    def _events_of(self, links: RouterLinks) -> Iterator[ControllerEvent]:
        """Yield the events of a router's messages."""
        sender = links.identity
        while (received := links.tokens.receive()) is not None:
            match received.message, received.payload:
                case Tokens(), _ if self._core is None:
                    pass  # the router sends them again with its next attempt
                case Tokens() as tokens, memoryview() as frame:
                    try:
                        released = self._prompts.receive(tokens, tokens_from_frame(frame), sender)
                    except WireInvalid as error:
                        links.tokens.drop(error)
                        continue
                    for submit in released:
                        self._prompts.pass_on(submit)
                        yield submit
        while (received := links.control.receive()) is not None:
            match received.message:
                case Submit() as submit if self._core is None:
                    links.answer(Refused(submit.id, "not_ready", "the ranks are gathering"))
                case Cancel() if self._core is None:
                    pass
                case Submit() as submit:
                    if (
                        submit.trace
                    ):  # it stays here: no decision and no record depends on whether somebody traces
                        if self._traces is not None:
                            self._traces.announce(submit)
                        submit = replace(submit, trace="")
                    contradiction = self._prompts.contradicts(submit, sender)
                    if contradiction is None and not self._routers.accept(submit.id, links):
                        contradiction = f"request {submit.id:.80} is already here"
                    if contradiction is not None:
                        links.control.drop(WireInvalid(contradiction))
                        links.answer(Refused(submit.id, "invalid", contradiction))
                    elif not self._prompts.hold(submit, sender):
                        yield self._prompts.hashed(submit)
                case Cancel() as cancel:
                    if self._routers.cancel(cancel, links):
                        self._prompts.withdraw(cancel.id)
                        self._end_output(cancel.id)
                        yield cancel
                case KvAsk() | KvTicket() | KvDone() as about_kv:
                    yield from self._handed_over(about_kv, links)
                case FetchBundle() as fetch:
                    self._send_bundle(fetch, links)
                case RouterUse() as report:
                    self._routers.pass_on(report, links)
                case WatchProgress(seconds=seconds):
                    self._routers.watch(links, time.monotonic() + min(seconds, MOST_WATCH_SECONDS))

    def _handed_over(self, message: KvMessage, links: RouterLinks) -> Iterator[ControllerEvent]:
        """Yield the event that another replica's message about KV is, if it is one."""
        if self._handover is None or self._core is None:
            return
        event = self._handover.receive(message, links)
        if isinstance(event, KvTicket) and event.ticket:
            self._ranks.send(replace(event, parts=()))  # ahead of the step that reads
        if event is not None:
            yield event

    def _rank_report(self, report: RankReport) -> None:
        try:
            self._rank_metrics.report(report)
        except WireInvalid as error:
            self._ranks.links[0].drop(error)

    def _with_hashes(self, done: Done) -> Done:
        """Return `done` with the hashes of the blocks that its samples fill."""
        hashes = []
        for sample in done.samples:
            if sample.id not in self._outputs:
                request = self._core.find(sample.id) if self._core is not None else None
                if request is None or request.ended or request.emitted:
                    continue  # its output was not hashed from the first token on
                prompt = self._prompts.hash_of(request.submit.prompt)
                if prompt is None:
                    continue
                self._outputs.begin(sample.id, prompt)
            filled = self._outputs.add(sample.id, sample.token)
            if filled:
                hashes.append((sample.id, filled))
        return replace(done, block_hashes=tuple(hashes)) if hashes or done.block_hashes else done

    def _with_drafts(self, done: Done) -> Done:
        """Return `done` with guesses at the tokens that come behind its samples, if they are looked up."""
        lookup, core = self._lookup, self._core
        if lookup is None or core is None:
            return done
        for sample in done.samples:
            if sample.id not in lookup:
                request = core.find(sample.id)
                if request is None or request.ended or request.emitted:
                    continue
                ids = self._prompts.ids_of(request.submit.prompt)
                if ids is None:
                    continue
                lookup.begin(sample.id, request.submit.prompt, ids)
            lookup.add(sample.id, sample.token)
        following = {sample.id: sample.finish_reason is None for sample in done.samples}
        drafts = [
            (name, lookup.draft(name)) for name, goes_on in following.items() if goes_on and name in lookup
        ]
        return replace(done, drafts=tuple(one for one in drafts if one[1]))

    # --- commands -----------------------------------------------------------------------------------

    def _carry_out(self, command: ControllerCommand) -> None:
        match command:
            case Step() as step:
                self._send_prompts(step)
                if self._core is not None:  # else sending the ids has shown that a rank is gone
                    self._ranks.begin_step(step)
            case CompileGrammar() | DropGrammar() | StoreLook() as message:
                if self._core is not None:
                    self._ranks.send(message)
            case KvAsk() | KvTicket() | KvDone() as about_kv:
                if self._handover is not None:
                    self._handover.send(about_kv, self._routers)
            case Emit() | Refused() | Failed() as answer:
                self._routers.answer(answer)
                if isinstance(answer, Failed):
                    _log.warning("request %s has failed: %s", answer.id, answer.reason)
                if isinstance(answer, Failed) or (isinstance(answer, Emit) and answer.finish_reason):
                    self._end_output(answer.id)
                elif isinstance(answer, Emit):
                    self._output_ids.add(answer.id, answer.tokens)
            case SteppedAside() as aside:
                output = self._output_ids.take(aside.id)
                if aside.prompt != aside.source:
                    self._prompts.extend(aside.source, aside.prompt, output)
                self._outputs.end(aside.id)  # it goes on with the hash of the new prompt
                if self._lookup is not None:
                    self._lookup.end(aside.id)

    def _end_output(self, request_id: str) -> None:
        """Forget the output of a request that has ended."""
        self._outputs.end(request_id)
        self._output_ids.end(request_id)
        if self._lookup is not None:
            self._lookup.end(request_id)

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
        """Return how long the main loop may wait for an event: if it has just announced, the load may have changed since."""
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
            card = self._card = self._new_card(self._core, self._config, load, now)
        elif card is None or (not force and silent_seconds < ANNOUNCE_SECONDS):
            return
        else:
            card = replace(card, ready=False)  # between two epochs
        self._announced_at = now
        self._routers.announce(card)

    def _new_card(self, core: ReplicaController, config: ReplicaConfig, load: Load, now: float) -> Announce:
        longest = config.max_model_len  # as the last point, so that routers never extrapolate
        lengths = np.array([*(tokens for tokens in PREFILL_POINTS if tokens < longest), longest], np.int64)
        seconds = core.predictor.prefill_seconds_many(np.zeros_like(lengths), lengths)
        read_seconds, read_seconds_per_token = core.read_line
        drain_seconds = None
        if self._drain_until is not None and self._handover is not None:
            drain_seconds = max(self._drain_until - now, 0.0)
        return Announce(
            replica=self._settings.replica,
            model=self._settings.spec.model.name,
            digest=self._bundle.digest,
            epoch=core.epoch,
            ready=True,
            draining=core.draining,
            max_model_len=config.max_model_len,
            vocab_size=self._vocab_size,
            kv_tokens_total=config.pool_tokens,
            kv_tokens_free=load.kv_tokens_free,
            running=load.running,
            waiting=load.waiting,
            pending_prefill_seconds=load.pending_prefill_seconds,
            longest_request_tokens=min(config.max_model_len, config.longest_tokens),
            waiting_limit=config.scheduling.max_waiting,
            service_classes=tuple(
                _terms(entry, core.expected_output_tokens(entry.name))
                for entry in config.service_classes.values()
            ),
            prefill_points=tuple(zip(lengths.tolist(), seconds.tolist(), strict=True)),
            lanes=load.lanes,
            tokens_per_lane=config.tokens_per_lane if config.topology.kv > 1 else 0,
            order=core.policy_terms,
            work_ahead=core.work_ahead(now),
            reports_progress=True,
            follows_grammars=True,
            ends_texts=any(one < self._vocab_size for one in self._bundle.eos_token_ids),
            kv_dtype=self._settings.spec.kv_cache.dtype,
            hands_kv_over=self._handover is not None,
            kv_identity="" if self._handover is None else self._handover.identity,
            read_seconds=read_seconds,
            read_seconds_per_token=read_seconds_per_token,
            drain_seconds=drain_seconds,
            role=self._settings.spec.role,
            kv_tokens_wanted=load.kv_tokens_wanted,
            routers=self._routers.count,
        )

    def _record_event(self, event: ControllerEvent, now: float, commands: list[ControllerCommand]) -> None:
        if self._record is not None:
            header = _recorded(event)
            try:
                self._record.write(
                    f'{{"now": {now!r}, "event": {header}, "commands": "{digest(commands)}"{self._recorded_bars(event, now, commands)}}}\n'
                )
            except OSError as error:
                self._stop_recording(error)

    def _recorded_bars(self, event: ControllerEvent, now: float, commands: list[ControllerCommand]) -> str:
        """Return the fields of a record's line for the page `/ui`: bars that changed, and the last announcement.

        They are empty in most lines: bars hold their own times, so it does not matter when they are written.
        """
        assert self._core is not None
        timeline, replica = self._timeline, self._settings.replica
        for happening, at in happenings(event, commands, self._core, self._history, replica, now):
            timeline.take(happening, at)
        if timeline.open and now - self._bars_recorded_at < BARS_SECONDS:
            return ""
        self._bars_recorded_at = now
        bars = timeline.changes(self._bars_recorded)
        self._bars_recorded = timeline.change
        fields = f', "bars": {to_json(bars).decode()}' if bars else ""
        if self._card is not None and self._card is not self._recorded_card:
            self._recorded_card = self._card
            fields += f', "replica": {to_json(replica_figures(self._card)).decode()}'
        return fields


def _recorded(event: ControllerEvent) -> str:
    """Return an event as JSON for a record."""
    if isinstance(event, Drain | Tick):  # no messages
        return f'{{"type":"{type(event).__name__}"}}'
    return bytes(encode(event)[0]).decode()


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


def slowest_rank(ranks: Sequence[RankReady]) -> RankReady:
    """Return the report of the slowest rank, with the costs of the last stage, which has the head, samples and drafts.

    Its host tier has the longest times of all.

    Where stages differ in how many of their layers have a window, it is of a stage with the fewest: its attention grows
    most with the context.
    """
    profiles = [ready.profile for ready in ranks]
    fewest = min(one.window_share for one in profiles)
    slowest = max(
        (ready for ready in ranks if ready.profile.window_share == fewest),
        key=lambda ready: chunk_seconds(ready.profile),
    )
    measured = replace(
        slowest.profile,
        head_seconds_per_row=max(one.head_seconds_per_row for one in profiles),
        mask_seconds_per_row=max(one.mask_seconds_per_row for one in profiles),
    )
    costs = next((ready.draft_costs for ready in ranks if ready.draft_costs is not None), None)
    tier = _slowest_tier([ready.host_tier for ready in ranks if ready.host_tier is not None])
    disk = _slowest_disk([ready.disk_tier for ready in ranks if ready.disk_tier is not None])
    streaming = _slowest_streaming([ready.streaming for ready in ranks if ready.streaming is not None])
    return replace(
        slowest, profile=measured, draft_costs=costs, host_tier=tier, disk_tier=disk, streaming=streaming
    )


def _slowest_streaming(figures: Sequence[StreamingFigures]) -> StreamingFigures | None:
    """Return the largest figures of streaming, of the fewest blocks; None if there are none."""
    if not figures:
        return None
    return StreamingFigures(
        min(one.blocks for one in figures),
        max(one.block_bytes for one in figures),
        max(one.read_seconds_per_block for one in figures),
    )


def _slowest_disk(tiers: Sequence[DiskTierFigures]) -> DiskTierFigures | None:
    """Return the largest figures of disk tiers; None if there are none."""
    if not tiers:
        return None
    return DiskTierFigures(
        min(one.blocks for one in tiers),
        max(one.access_seconds for one in tiers),
        max(one.read_seconds_per_block for one in tiers),
    )


def without_hash_keys(ranks: Sequence[RankReady]) -> tuple[list[RankReady], str]:
    """Return the reports without the secret keys of hashes, and the key to use: that of the store, else of the ranks' files.

    If the ranks do not all have the store, or found different keys there, all reports say why it is not used.
    """
    in_files = [ready.disk_tier.hash_key for ready in ranks if ready.disk_tier is not None]
    stores = [ready.store for ready in ranks if ready.store is not None]
    in_store = {store.hash_key for store in stores if not store.fault}
    fault = next((store.fault for store in stores if store.fault), "")
    if not fault and len(in_store) > 1:
        fault = "ranks have found different keys of hashes in the store"
    without = [
        replace(
            ready,
            disk_tier=None if ready.disk_tier is None else replace(ready.disk_tier, hash_key=""),
            store=StoreFigures(fault=fault) if len(stores) == len(ranks) else None,
        )
        for ready in ranks
    ]
    keys = [*in_files, ""] if fault or len(stores) < len(ranks) else [*in_store, *in_files, ""]
    return without, next((key for key in keys if key), "")


def _slowest_tier(tiers: Sequence[HostTierFigures]) -> HostTierFigures | None:
    """Return the largest figures of host tiers, which all have the same number of blocks; None if there are none."""
    if not tiers:
        return None
    return HostTierFigures(
        min(one.blocks for one in tiers),
        max(one.block_bytes for one in tiers),
        max(one.fetch_seconds_per_block for one in tiers),
        max(one.demote_seconds_per_block for one in tiers),
    )


def chunk_seconds(profile: StepProfile) -> float:
    """Return the time of a chunk of 512 tokens after 512 tokens of context.

    The rank where it is longest is the slowest, and ranks of other stages wait for it.
    """
    pairs = 512 * (512 + 513 / 2)
    linear, attention = profile.linear_seconds_per_token, profile.attention_seconds_per_pair
    return profile.step_seconds + profile.sequence_seconds + 512 * linear + pairs * attention


def _terms(service_class: ServiceClass, expected_output_tokens: int) -> ServiceClassTerms:
    return ServiceClassTerms(
        name=service_class.name,
        ttft_floor_seconds=service_class.ttft_floor_seconds,
        ttft_factor=service_class.ttft_factor,
        tpot_target_seconds=service_class.tpot_target_seconds,
        tpot_floor_seconds=service_class.tpot_floor_seconds,
        default_output_tokens=service_class.default_output_tokens,
        max_wait_seconds=service_class.max_wait_seconds,
        expected_output_tokens=expected_output_tokens,
    )


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
