"""`python -m medha_worker.rank`: the process of one rank.

The process loads its weights and sends hellos. When the controller asks, it joins the rendezvous with the other
ranks, which begins an epoch. In an epoch it only receives steps, runs them and answers; all decisions are the
controller's. When an epoch is lost because another rank is gone, this process keeps its weights and waits for the
next rendezvous; requests are only delayed.
"""

from __future__ import annotations

import logging
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import click
import torch
import zmq

from medha.errors import AcceleratorMissing, MedhaError, PartFailed, WireInvalid
from medha.wire.frames import tokens_from_frame
from medha.wire.messages import (
    CompileGrammar,
    DiskBegin,
    DiskReport,
    DropGrammar,
    GrammarReady,
    KvTicket,
    Message,
    RankFault,
    RankHello,
    RankOutOfMemory,
    Rendezvous,
    Shutdown,
    StageFree,
    Step,
    StoreLookup,
    Tokens,
    Trace,
)
from medha_links.drops import Drops
from medha_links.key_files import KeyPair, read_public_key
from medha_links.sockets import CONTROL_FRAME_BYTES, TOKENS_FRAME_BYTES, Opened, connect, crosses_network
from medha_process.part_process import begin_part, end_with_parent, log_failure, settings_option
from medha_process.part_settings import RankSettings
from medha_process.part_state import PartState
from medha_process.watchdog import Watchdog
from medha_worker.epoch_file import read_epoch, write_epoch
from medha_worker.link import Link, rank_identity
from medha_worker.nvml import open_probe
from medha_worker.rank.engine import RENDEZVOUS_SECONDS, Engine, Loaded, load
from medha_worker.rank.lane_plan import LanePlan
from medha_worker.rank.prefetch import StepPrefetcher, Urgent
from medha_worker.rank.rank_reports import RankReports
from medha_worker.rank.step_recorder import StepRecorder
from medha_worker.timeouts import bound_seconds

POLL_SECONDS = 0.25  # longest delay in noticing a signal while idle
HOUSEKEEPING_SECONDS = 0.1  # longest time in which steps follow each other directly
HELLO_SECONDS = 1.0  # interval between two hellos
STUCK_SECONDS = 20.0  # watchdog limit for one iteration of the idle loop
MOST_DETAIL = 500  # characters of a reason that are reported to the supervisor
TOKENS_TIMEOUT_SECONDS = 10.0  # bound of the wait for ids that a step needs: they were sent before it

_log = logging.getLogger("medha.rank")


class Rank:
    """A rank, between its controller and its executor."""

    def __init__(self, settings: RankSettings) -> None:
        self._settings = settings
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        incarnation, self._drops = secrets.token_hex(8), Drops(_log)
        identity = rank_identity(settings.rank, incarnation)
        keys, server = KeyPair.read(settings.key_file), read_public_key(settings.controller_key_file)

        def opened(endpoint: str, largest_frame_bytes: int) -> Opened[zmq.Socket[bytes]]:
            return connect(
                self._context,
                endpoint,
                identity,
                keys,
                server,
                largest_frame_bytes=largest_frame_bytes,
                heartbeats=crosses_network(endpoint),
            )

        control = opened(settings.control, CONTROL_FRAME_BYTES)
        tokens = opened(settings.tokens, TOKENS_FRAME_BYTES)
        accepts = (
            Rendezvous,
            Step,
            CompileGrammar,
            DropGrammar,
            DiskBegin,
            StoreLookup,
            KvTicket,
            Trace,
            Shutdown,
        )
        self._control = Link(control, "control", self._drops, accepts=accepts)
        self._tokens = Link(tokens, "tokens", self._drops, accepts=(Tokens,))
        self._hello = RankHello(
            settings.rank, incarnation, read_epoch(settings.epoch_file), settings.revision
        )
        self._refused = ""  # reason why the controller does not let this process take part
        self._hello_at = float("-inf")
        self._housekeeping_due = float("-inf")
        self._engine: Engine | None = None
        self._loaded: Loaded | None = None  # once it is
        self._recorder = StepRecorder(settings.rank)
        self._prefetcher = StepPrefetcher(self._control, at_once=self._handle_urgent)
        self._reports = RankReports(settings.rank, incarnation, self._recorder, self._prefetcher.send)
        self._next_step = 0  # id of the next step to plan
        self._begun: Step | None = None  # step whose ids have not all arrived yet
        self._running_step = -1
        self._admitted: set[str] = set()  # names of links on which the controller has admitted this rank
        # The last epoch that could not begin, and why.
        self._failed_rendezvous: tuple[int | None, str] = (None, "")
        self._reported: object = None  # key of the state last reported to the supervisor
        self._watchdog = Watchdog()
        self._stopping = False
        self._loading = True

    def run(self) -> None:
        """Load the weights, then run the steps of one epoch after the other until stopped.

        Raises:
            MedhaError: the model cannot be served as the manifest asks, or a rank that is alone cannot
                continue.
        """
        self._watchdog.report(PartState(phase="loading"))
        # A file system that hangs would keep the other ranks waiting forever.
        self._watchdog.allow(self._settings.spec.lifecycle.ready_seconds, "loading")
        loaded = load(self._settings, self._recorder, self._progress_reporter(PartState(phase="loading")))
        device = loaded.device
        self._reports.begin(device, loaded.shape, open_probe(device.uuid) if device.uuid else None)
        self._loading, self._loaded = False, loaded
        while not self._stopping:
            self._watchdog.allow(STUCK_SECONDS, "one iteration of its loop")
            match self._next_message():
                case Rendezvous() as rendezvous:
                    with self._surviving(rendezvous.epoch):
                        self._rendezvous(loaded, rendezvous)
                case Step() as step if self._engine is not None and step.epoch == self._engine.executor.epoch:
                    with self._surviving(step.epoch):
                        self._run_step(self._engine, step)
                case DiskBegin() as begin if self._engine is not None:
                    self._begin_disk(self._engine, begin)
                case KvTicket() as ticket if self._engine is not None:
                    self._learn_ticket(self._engine, ticket)
                case Trace(seconds=seconds):
                    self._recorder.record(seconds)
                case Shutdown(reason, refused=True):
                    self._stop_replaced(reason)
                case Shutdown() as shutdown:
                    _log.info("stopping: %s", shutdown.reason)
                    return

    def _next_message(self) -> Message | None:
        """Send what is due, then return the next message; None if none comes for a while.

        For at most HOUSEKEEPING_SECONDS, a step that was read while the last one ran goes before all this.
        """
        if time.monotonic() < self._housekeeping_due:
            step = self._prefetcher.take_step()
            if step is not None:
                return step
        self._process_link_events()
        self._send_hello()
        self._report_state()
        self._send_trace()
        self._reports.send_due(is_serving=self._engine is not None)
        self._housekeeping_due = time.monotonic() + HOUSEKEEPING_SECONDS
        received = self._prefetcher.receive(POLL_SECONDS)
        return None if received is None else received.message

    def stop(self) -> None:
        """Stop after the running step, or at once while loading; called by a signal handler."""
        self._stopping = True
        if self._loading:
            raise SystemExit(0)

    def report(self, error: BaseException) -> None:
        """Report to the controller why this rank ends."""
        detail = f"{type(error).__name__}: {error}{self._reports.recent_xid()}"
        self._prefetcher.send(RankFault(self._settings.rank, detail))

    def close(self) -> None:
        """Close the links; the last message gets a moment to be sent."""
        self._leave()
        if self._loaded is not None:
            self._loaded.close()
        self._reports.close()
        self._prefetcher.close()
        self._control.close()
        self._tokens.close()
        self._context.term()

    def _report_state(self, rendezvous_epoch: int | None = None) -> None:
        """Report this rank's state to the supervisor, if it has changed."""
        at = rendezvous_epoch, self._engine, len(self._admitted), self._failed_rendezvous, self._refused
        if at == self._reported:
            return
        self._reported = at
        epoch, failed_reason = self._failed_rendezvous
        change: dict[str, object]
        state = PartState(
            phase="calling",
            failed_epoch=epoch,
            failed_reason=failed_reason[:MOST_DETAIL],
            refused=self._refused[:MOST_DETAIL],
        )
        if rendezvous_epoch is not None:
            change = {
                "phase": "rendezvous",
                "epoch": rendezvous_epoch,
                "detail": "groups form, then the warm-up runs",
            }
        elif self._engine is not None:
            change = {"phase": "serving", "epoch": self._engine.executor.epoch}
        elif len(self._admitted) == 2:
            change = {"phase": "gathering", "detail": "the controller waits for all ranks"}
        else:
            change = {"detail": f"the controller at {self._settings.control} does not answer"}
        self._watchdog.report(state.model_copy(update=change))

    def _progress_reporter(self, state: PartState) -> Callable[[str, int, int], None]:
        """Return a callback that reports the progress of a long operation to the supervisor."""

        def report(text: str, done: int, total: int) -> None:
            more = {"detail": text[:MOST_DETAIL], "done": done, "total": total}
            self._watchdog.report(state.model_copy(update=more))

        return report

    def _stop_replaced(self, reason: str) -> None:
        """Stop taking part, because another process has this rank's place; the supervisor decides what follows."""
        if not self._refused:
            _log.error("the controller does not let this rank in: %s", reason)
        self._refused = reason
        self._leave()

    def _send_hello(self) -> None:
        now = time.monotonic()
        if self._refused:
            return
        if now - self._hello_at >= HELLO_SECONDS:
            self._hello_at = now
            self._prefetcher.send(replace(self._hello, dropped=self._drops.totals()))
            self._tokens.send(self._hello)

    def _process_link_events(self) -> None:
        """End the epoch if messages from or to the controller may have been lost.

        Raises:
            PartFailed: the controller does not admit this rank, and ZeroMQ does not try again.
        """
        events = []
        for link in (self._control, self._tokens):
            for event in link.connections.take():
                events.append(event)
                if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                    self._admitted.add(link.name)
                elif event == zmq.Event.DISCONNECTED:
                    self._admitted.discard(link.name)
        if zmq.Event.HANDSHAKE_FAILED_AUTH in events:
            raise PartFailed(
                f"the controller does not admit this rank: the public half of {self._settings.key_file} is not in its "
                "rank_keys_file"
            )
        if zmq.Event.DISCONNECTED in events and self._engine is not None:
            self._lose(self._engine.executor.epoch, "the connection to the controller was broken")

    def _send_trace(self) -> None:
        part = self._recorder.take(self._engine.executor.epoch) if self._engine is not None else None
        if part is not None:
            self._prefetcher.send(part)

    @contextmanager
    def _surviving(self, epoch: int) -> Iterator[None]:
        """Guard work that needs the other ranks: if it fails, the epoch is lost but not this process.

        An error in a step may be due to a single request, which must not end the process. During the rendezvous
        there are no requests. Errors that show that the replica cannot be served as configured always end it.
        """
        try:
            yield
        except Exception as error:
            is_known = isinstance(error, (RuntimeError, MemoryError, PartFailed, WireInvalid))
            may_be_of_a_request = self._engine is not None and not isinstance(error, MedhaError)
            if self._settings.topology.ranks == 1 or not (is_known or may_be_of_a_request):
                raise
            if not is_known:
                _log.exception("a step of epoch %d has failed", epoch)
            if self._engine is None:
                self._failed_rendezvous = epoch, str(error)
            self._lose(epoch, f"{type(error).__name__}: {error}")

    def _lose(self, epoch: int, reason: str) -> None:
        reason += self._reports.recent_xid()
        _log.warning("epoch %d is lost: %s", epoch, reason)
        self._leave()
        self._prefetcher.send(RankFault(self._settings.rank, reason, lost_epoch=epoch))

    def _leave(self) -> None:
        if self._engine is not None:
            self._engine.leave()
        self._engine = None

    def _rendezvous(self, loaded: Loaded, rendezvous: Rendezvous) -> None:
        self._leave()
        self._report_state(rendezvous_epoch=rendezvous.epoch)
        self._watchdog.allow(RENDEZVOUS_SECONDS + self._settings.spec.lifecycle.ready_seconds, "rendezvous")
        # The rendezvous waits outside of Python, where no handler runs: until it is over, SIGTERM ends the
        # process by default.
        handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            progress = self._progress_reporter(PartState(phase="rendezvous", epoch=rendezvous.epoch))
            self._engine = loaded.rendezvous(rendezvous, self._memory_ran_out, progress)
        finally:
            signal.signal(signal.SIGTERM, handler)
        executor, peers = self._engine.executor, self._engine.peers
        if peers is not None:
            report = DiskReport(self._settings.rank, executor.lane, executor.epoch)
            peers.reader.begin_epoch(report, self._prefetcher.send)
        self._next_step, self._begun = 0, None
        self._hello = replace(self._hello, last_epoch=rendezvous.epoch)
        write_epoch(self._settings.epoch_file, rendezvous.epoch)
        self._prefetcher.send(self._engine.ready)
        self._reports.send_due(is_serving=True, at_once=True)

    def _begin_disk(self, engine: Engine, begin: DiskBegin) -> None:
        """Let the store begin, and the disk tier of this rank report what it has, once for each epoch."""
        executor = engine.executor
        if begin.epoch != executor.epoch:
            return
        report = DiskReport(self._settings.rank, executor.lane, executor.epoch)
        if engine.store is not None:
            engine.store.begin_epoch(report, begin.hash_key, self._prefetcher.send)
        if engine.disk is not None:
            engine.disk.begin_epoch(report, begin.hash_key, self._prefetcher.send)

    def _learn_ticket(self, engine: Engine, ticket: KvTicket) -> None:
        """Record the address of the other replica's same rank, where this rank reads what the ticket offers."""
        rank = self._settings.rank
        if engine.peers is not None and rank < len(ticket.ranks):
            engine.peers.reader.learn(ticket.ticket, ticket.ranks[rank])

    def _handle_urgent(self, message: Urgent) -> None:
        """Check which objects are in the store, or handle a grammar; called on any thread."""
        engine = self._engine
        if not isinstance(message, StoreLookup):
            self._handle_grammar(message)
        elif engine is not None and engine.store is not None:
            engine.store.look_up(message)

    def _handle_grammar(self, message: CompileGrammar | DropGrammar) -> None:
        """Compile or drop a grammar if this rank samples; called on any thread."""
        engine = self._engine
        if engine is None or engine.grammars is None or message.epoch != engine.executor.epoch:
            return
        match message:
            case CompileGrammar(name, grammar):
                lane, epoch = engine.executor.lane, message.epoch
                send = self._prefetcher.send
                engine.grammars.compile(
                    name, grammar, lambda fault: send(GrammarReady(name, lane, fault, epoch))
                )
            case DropGrammar(name):
                engine.grammars.drop(name)

    def _memory_ran_out(self) -> None:
        """Report to the controller at once that memory ran out, because NaN alone does not show why a request ends."""
        if self._engine is not None:
            epoch = self._engine.executor.epoch
            self._prefetcher.send(RankOutOfMemory(self._settings.rank, self._running_step, epoch))

    def _run_step(self, engine: Engine, step: Step) -> None:
        executor, grid = engine.executor, engine.grid
        predicted_seconds = (
            step.predicted_seconds if grid is None else grid.begin_step(step.predicted_seconds)
        )
        self._watchdog.allow(bound_seconds(predicted_seconds), f"step {step.step_id}")
        prepared = self._prefetcher.take(step)
        self._running_step = step.step_id
        self._recorder.begin(step.step_id)
        planned: LanePlan | Exception | None
        if prepared is None:
            planned = self._plan(engine, step, TOKENS_TIMEOUT_SECONDS)
        else:
            self._recorder.prepared(prepared.since, prepared.until)
            planned = prepared.planned
        if planned is None:
            missing = ", ".join(executor.missing_prompts(step))
            raise PartFailed(f"step {step.step_id} needs the ids of {missing}, which did not come")
        if isinstance(planned, Exception):
            raise planned

        def stage_is_free() -> None:
            self._recorder.forward_done()
            if grid is None or (grid.is_first_stage and grid.here.tensor == 0):
                lane = grid.here.kv if grid is not None else 0
                self._prefetcher.send(StageFree(step.step_id, stage=0, lanes=(lane,), epoch=step.epoch))

        self._recorder.planned()
        with self._prefetcher.busy(lambda following: self._plan(engine, following)):
            done = executor.run(planned, stage_is_free)
        if grid is not None:
            grid.end_step()
        if done is not None and (grid is None or grid.rank == grid.sampling_rank):
            self._prefetcher.send(done)
        self._recorder.end(ran=done is not None)
        if done is not None:
            self._reports.add(planned.work)

    def _plan(self, engine: Engine, step: Step, wait_seconds: float = 0.0) -> LanePlan | None:
        """Do a step's bookkeeping, possibly while another step runs; None if its ids do not arrive in time.

        Raises:
            PartFailed: a message was lost, or the state of this rank and the controller's have diverged.
        """
        executor = engine.executor
        if step is not self._begun:
            if step.step_id != self._next_step:
                raise PartFailed(f"step {step.step_id} came instead of {self._next_step}: messages were lost")
            self._next_step += 1
            self._begun = step
            executor.prepare(step)
        while executor.missing_prompts(step):
            received = self._tokens.receive(timeout_seconds=wait_seconds)
            if received is None:
                return None
            match received.message, received.payload:
                case Tokens() as tokens, memoryview() as frame if tokens.epoch == executor.epoch:
                    try:
                        if not 0 < tokens.total <= engine.ready.max_model_len:
                            raise WireInvalid(f"prompt {tokens.prompt:.80} of {tokens.total} tokens")
                        executor.add_tokens(tokens, tokens_from_frame(frame))
                    except WireInvalid as error:
                        self._tokens.drop(error)
        return executor.plan(step)


@click.command()
@settings_option
def main(settings_file: Path) -> None:
    """Run one rank; the settings are a JSON file of `RankSettings`."""
    settings = begin_part(RankSettings, settings_file)
    end_with_parent()
    # A CPU takes many times as long for subnormal numbers. Threads that start from now on round them to 0 as well.
    torch.set_flush_denormal(True)
    with log_failure(_log):
        rank = Rank(settings)
        signal.signal(signal.SIGTERM, lambda *_: rank.stop())
        try:
            rank.run()
        except AcceleratorMissing:
            # Unreported: the controller would end, too, and hide the exit status that shows this reason.
            raise
        except MedhaError as error:
            rank.report(error)
            raise
        except Exception as error:  # noqa: BLE001 - a bug of ours must reach the controller before we end
            _log.exception("this rank cannot go on")
            rank.report(error)
            sys.exit(1)
        finally:
            rank.close()
