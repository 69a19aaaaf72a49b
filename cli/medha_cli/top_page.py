"""The page of `medha top`: pure functions from a snapshot to rich's tables, fitted to the size of the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.text import Text

from medha.scheduler.status_report import (
    ClassStatus,
    CoreStatus,
    KvStatus,
    LaneStatus,
    Order,
    ReplicaStatus,
    RequestStatus,
    StepStatus,
    TierRates,
)
from medha_cli.listing import Column, Listing, line
from medha_cli.replica_snapshot import RouterStatus, Snapshot

ID_WIDTH = 22
BAR_WIDTH = 20
MOST_STEPS = 12
FEWEST_REQUESTS = 5  # other tables are dropped before fewer are shown
_PHASES = {"waiting": "yellow", "prefill": "cyan", "decode": "green", "ending": "dim"}


class Bar:
    """A bar of shares that add up to at most 1, each with its own sign and colour; ASCII signs where needed."""

    def __init__(self, *shares: tuple[float, str, str, str], width: int = BAR_WIDTH) -> None:
        """Make a bar of shares, each (0 to 1, sign, sign in ASCII, style)."""
        self._shares = shares
        self._width = width

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text, filled, total = Text("[" if options.ascii_only else ""), 0, 0.0
        for share, sign, plain, style in self._shares:
            total += share
            cells = round(self._width * min(1.0, total)) - filled
            text.append((plain if options.ascii_only else sign) * cells, style)
            filled += cells
        text.append(("." if options.ascii_only else "\u2591") * (self._width - filled), "dim")
        yield text.append("]" if options.ascii_only else "")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        width = self._width + 2 * options.ascii_only
        return Measurement(width, width)


def page(snapshot: Snapshot, order: Order, *, height: int | None = None, skip: int = 0) -> Group:
    """Return the whole page, or `height` lines of it, with the requests from the `skip`-th on."""
    status, core = snapshot.status, snapshot.status.core
    parts: list[Text | Listing] = [*heading(snapshot)]
    if core is None:
        missing = ", ".join(map(str, status.missing_ranks)) or "none"
        return Group(*parts, line((f"Waiting for ranks: {missing}", "yellow")))
    tables = [lanes_listing(core)]
    if core.tiers:
        tables.append(tiers_listing(core, status.tier_rates))
    if core.steps:
        tables.append(steps_listing(core.steps[:MOST_STEPS]))
    if len(core.classes) > 1:
        tables.append(classes_listing(core.classes, status))
    lines = len(parts)
    wanted = min(FEWEST_REQUESTS, len(core.requests))
    while len(tables) > 1 and height is not None and _room(height, lines, tables) < wanted:
        tables.pop()
    room = None if height is None else max(1, _room(height, lines, tables))
    for table in tables:
        parts += [Text(), table]
    shown = core.requests[skip:] if room is None else core.requests[skip : skip + room]
    parts += [Text(), requests_listing(shown)]
    hidden = core.running + core.waiting - skip - len(shown)
    parts.append(line((f"and {hidden:,} more, by {order}" if hidden > 0 else f"by {order}", "dim")))
    return Group(*parts)


def _room(height: int, lines: int, tables: Sequence[Listing]) -> int:
    """Return the lines left for requests below a heading of so many and these tables, each with a gap and its own heading."""
    above = lines + sum(2 + len(table.rows) for table in tables)
    return height - above - 3  # the gap and the heading of their table, and the line with the order


def heading(snapshot: Snapshot) -> list[Text]:
    """Return the lines that say what the replica is and how it performs overall."""
    status, core, router = snapshot.status, snapshot.status.core, snapshot.router
    state = {"serving": "green", "draining": "yellow", "gathering": "red"}[status.state]
    what: list[str | tuple[str, str]] = [
        (status.replica, "bold"),
        f" ({status.model}{'' if status.role == 'both' else f', {status.role}'})  ",
        (status.state, state),
        f" for {span(status.up_seconds)}",
    ]
    if core is None:
        return [line(*what)]
    shape = f"TP{core.tensor} x SPP{core.stream} x KVP{core.kv}"
    elsewhere = f", {router.sequences_waiting:,} in the router" if router is not None else ""
    return [
        line(*what, f"   {shape}   policy {core.policy}   epoch {core.epoch}"),
        line(
            ("Requests ", "bold"), f"{core.running:,} running, {core.waiting:,} waiting{elsewhere}",
            ("   Prefill ahead ", "bold"), span(core.pending_prefill_seconds),
            ("   Decodes ", "bold"), f"{core.decode_correction:.2f}",
            ("   Prefills ", "bold"), f"{core.prefill_correction:.2f} x profile",
        ),
        line(
            ("Tokens/s ", "bold"), f"{status.prefill_tokens_per_second:,.0f} prefill, "
            f"{status.decode_tokens_per_second:,.0f} decode",
            ("   Steps/s ", "bold"), f"{status.steps_per_second:,.0f}",
            *attainment(status, router),
        ),
        *(line((f"The tier {tier.tier} is not used: {tier.fault}", "yellow")) for tier in core.tiers if tier.fault),
    ]  # fmt: skip


def attainment(status: ReplicaStatus, router: RouterStatus | None) -> list[tuple[str, str]]:
    """Return the share of requests within their targets, as seen by the router, else by the controller."""
    if router is not None:
        ttft, tpot = (router.ttft_met, router.ttft_missed), (router.tpot_met, router.tpot_missed)
    else:
        rows = status.attainment
        ttft = sum(row.ttft_met for row in rows), sum(row.ttft_missed for row in rows)
        tpot = sum(row.tpot_met for row in rows), sum(row.tpot_missed for row in rows)
    return [
        ("   TTFT in time ", "bold"),
        (share(*ttft), ""),
        ("   TPOT in time ", "bold"),
        (share(*tpot), ""),
    ]


def lanes_listing(core: CoreStatus) -> Listing:
    columns = [
        Column("LANE"), Column("FIRST STAGE", 5), Column("LATER STAGES", 4), Column("KV", 6),
        Column("USED", 8, right=True), Column("RESERVED", 7, right=True), Column("CACHED", 3, right=True),
        Column("PREFILL", 6, right=True), Column("DECODE", 6, right=True), Column("HOST TIER", 3, right=True, optional=True),
        Column("DISK TIER", 3, right=True, optional=True), Column("STREAMED", 3, right=True, optional=True),
        Column("LOCK STEP", 2, optional=True),
    ]  # fmt: skip
    rows: list[list[RenderableType]] = []
    for lane in core.lanes:
        kv, blocks = lane.kv, max(1, lane.kv.blocks)
        others = " ".join(str(other) for other in lane.coupled_with if other != lane.lane)
        rows.append([
            str(lane.lane), *_stages(core, lane), _kv_bar(kv),
            *(f"{100 * part / blocks:.1f} %" for part in (kv.used, kv.reserved, kv.cached)),
            f"{lane.prefilling:,}", f"{lane.decoding:,}",
            "" if (tier := lane.host_tier) is None else f"{100 * tier.held / max(1, tier.blocks):.1f} %",
            _disk_tier(lane),
            "" if (streaming := lane.streaming) is None else f"{100 * streaming.held / max(1, streaming.blocks):.1f} %",
            others,
        ])  # fmt: skip
    return Listing(columns, rows)


def tiers_listing(core: CoreStatus, rates: Sequence[TierRates]) -> Listing:
    """Return a row for each tier: what it holds, what came from it and went to it, and the prefill that it saved."""
    columns = [
        Column("TIER"), Column("FULL", 8, right=True), Column("SIZE", 6, right=True), Column("HITS", 8, right=True),
        Column("READ", 5, right=True), Column("READ/S", 8, right=True), Column("WRITTEN", 5, right=True),
        Column("WRITTEN/S", 7, right=True), Column("AVOIDED", 8, right=True), Column("LATENCY", 4, right=True),
        Column("S PER GIB", 4, right=True),
        Column("SWAPS", 3, optional=True), Column("FAILURES", 6, right=True),
    ]  # fmt: skip
    rate_of = {rate.tier: rate for rate in rates}
    rows: list[list[RenderableType]] = []
    for tier in core.tiers:
        rate, swaps = rate_of.get(tier.tier), core.swaps
        full = None if not tier.size_bytes or tier.held_bytes is None else tier.held_bytes / tier.size_bytes
        rows.append([
            tier.tier, "-" if full is None else f"{100 * full:.1f} %",
            "-" if tier.size_bytes is None else byte_size(tier.size_bytes),
            f"{tier.hits:,}",
            byte_size(tier.read_bytes), "-" if rate is None else byte_size(rate.read_bytes_per_second),
            byte_size(tier.written_bytes), "-" if rate is None else byte_size(rate.written_bytes_per_second),
            span(tier.avoided_prefill_seconds),
            "-" if tier.read_latency_seconds is None else span(tier.read_latency_seconds),
            "-" if tier.read_seconds_per_gib is None else f"{tier.read_seconds_per_gib:.3g}",
            "" if tier.tier != "host" or swaps is None or not swaps.out
            else f"{swaps.out:,} out, {swaps.back:,} back, {swaps.waiting:,} wait",
            f"{tier.failures:,}",
        ])  # fmt: skip
    return Listing(columns, rows)


def _disk_tier(lane: LaneStatus) -> str:
    """Return how full the disk tier of a lane is, or `off`; empty if there is none."""
    disk = lane.disk_tier
    if disk is None:
        return ""
    return "off" if disk.fault else f"{100 * disk.held / max(1, disk.blocks):.1f} %"


def _stages(core: CoreStatus, lane: LaneStatus) -> tuple[str, str]:
    """Return the steps in the first stage of a lane, and those in later stages; `-` if there are none."""
    here = [step for step in core.steps if lane.lane in step.lanes]
    first = " ".join(f"#{step.step}" for step in here if step.in_first_stage)
    later = " ".join(f"#{step.step}" for step in here if not step.in_first_stage)
    return first or "-", later or "-"


def _kv_bar(kv: KvStatus) -> Bar:
    blocks = max(1, kv.blocks)
    return Bar(
        (kv.used / blocks, "\u2588", "#", "green"),
        (kv.reserved / blocks, "\u2593", "=", "blue"),
        (kv.cached / blocks, "\u2592", "-", "magenta"),
    )


def steps_listing(steps: Sequence[StepStatus]) -> Listing:
    columns = [
        Column("STEP"), Column("LANES", 4), Column("STAGE", 6), Column("AGE", 6, right=True),
        Column("PREDICTED", 5, right=True), Column("CONTENT"),
    ]  # fmt: skip
    rows = []
    for step in steps:
        what = [f"{chunk.tokens:,} of {short(chunk.request)} from {chunk.start:,}" for chunk in step.chunks]
        if step.decodes:
            what.append(f"{step.decodes:,} decode{'s' * (step.decodes > 1)}")
        rows.append([
            f"#{step.step}", " ".join(map(str, step.lanes)), "first" if step.in_first_stage else "later",
            span(step.since_seconds), span(step.predicted_seconds),
            line(" + ".join(what)),
        ])  # fmt: skip
    return Listing(columns, rows)


def classes_listing(classes: Sequence[ClassStatus], status: ReplicaStatus) -> Listing:
    columns = [
        Column("CLASS"), Column("WAITING", 8, right=True), Column("TOKENS", 4, right=True),
        Column("PREFILL", 7, right=True), Column("DECODE", 7, right=True), Column("DEMOTED", 6, right=True),
        Column("LATE", 6, right=True), Column("TTFT IN TIME", 5, right=True), Column("TPOT IN TIME", 3, right=True),
    ]  # fmt: skip
    attained = {row.service_class: row for row in status.attainment}
    rows = []
    for one in classes:
        row = attained.get(one.service_class)
        counts = (one.waiting, one.waiting_tokens, one.prefilling, one.decoding, one.demoted, one.late)
        rows.append([
            one.service_class, *(f"{count:,}" for count in counts),
            share(row.ttft_met, row.ttft_missed) if row else "-",
            share(row.tpot_met, row.tpot_missed) if row else "-",
        ])  # fmt: skip
    return Listing(columns, rows)


def requests_listing(requests: Sequence[RequestStatus]) -> Listing:
    """Return a row for each request: prompt tokens while it prefills, output tokens once they are sampled."""
    columns = [
        Column("REQUEST"), Column("CLASS", 4), Column("PHASE", 8), Column("LANES", 3), Column("PREFILL", 5),
        Column("", 8, right=True), Column("DUE IN", 7, right=True), Column("SLACK", 6, right=True),
        Column("TTFT", 5, right=True), Column("OUTPUT", 8, right=True), Column("TPOT", 6, right=True),
        Column("REVISED DUE", 7, right=True, optional=True), Column("CACHED", 2, right=True, optional=True),
        Column("STREAMED", 3, right=True, optional=True),
    ]  # fmt: skip
    rows: list[list[RenderableType]] = []
    for request in requests:
        is_open = request.ttft_seconds is None and request.output_tokens == 0
        whole = max(1, request.prompt_tokens)
        computed = min(1.0, request.computed_tokens / whole)
        ahead = min(1.0, request.dispatched_tokens / whole) - computed  # in the pipeline
        rows.append([
            short(request.id), request.service_class, Text(request.phase, style=_PHASES[request.phase]),
            " ".join(map(str, request.lanes)),
            Bar((computed, "\u2588", "#", "cyan"), (ahead, "\u2593", "+", "blue"), width=12),
            f"{min(request.computed_tokens, request.prompt_tokens):,} of {request.prompt_tokens:,}",
            _signed(request.deadline_in_seconds) if is_open else "",
            _signed(request.slack_seconds) if is_open else "",
            _held(request.ttft_seconds, request.ttft_target_seconds),
            f"{request.output_tokens:,}" if request.output_tokens else "",
            _held(request.tpot_seconds, request.tpot_target_seconds),
            "" if request.revised_deadline_in_seconds is None else _signed(request.revised_deadline_in_seconds, "magenta"),
            f"{request.cached_tokens:,}" if request.cached_tokens else "",
            f"{request.streamed_tokens:,}" if request.streamed_tokens else "",
        ])  # fmt: skip
    return Listing(columns, rows)


def _held(seconds: float | None, target_seconds: float) -> Text:
    """Return a time, in red if it exceeds its target."""
    return Text("" if seconds is None else span(seconds), "red" if (seconds or 0) > target_seconds else "")


def _signed(seconds: float, style: str = "") -> Text:
    return Text(f"{'-' if seconds < 0 else ''}{span(abs(seconds))}", "red" if seconds < 0 else style)


def short(request: str) -> str:
    """Return a request's id, shortened so that it still differs from others."""
    return request if len(request) <= ID_WIDTH else f"{request[: ID_WIDTH - 6]}..{request[-4:]}"


def share(met: int, missed: int) -> str:
    """Return a text such as `98.5 % of 200`."""
    return f"{100 * met / (met + missed):.1f} % of {met + missed:,}" if met + missed else "-"


def span(seconds: float) -> str:
    """Return a duration in at most eight characters (below 100 hours): `250 us`, `12.3 ms`, `4.56 s`, `12:34`, `1:02:03`."""
    if seconds >= 3600:
        return f"{seconds // 3600:.0f}:{seconds % 3600 // 60:02.0f}:{int(seconds % 60):02d}"
    if seconds >= 60:
        return f"{int(seconds // 60)}:{int(seconds % 60):02d}"
    if seconds >= 1:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} us"


def byte_size(count: float) -> str:
    """Return a number of bytes in at most eight characters (below 1,000 TiB): `512 B`, `1.25 MiB`, `16.0 GiB`."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        count /= 1024
        if count < 999.5 or unit == "TiB":
            return (
                f"{count:.2f} {unit}"
                if count < 9.995
                else f"{count:.1f} {unit}"
                if count < 99.95
                else f"{count:.0f} {unit}"
            )
    raise AssertionError("the last unit takes all")
