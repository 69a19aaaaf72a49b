"""`medha simulate`: policies under a virtual clock, compared on one page."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from medha.api.speculation_spec import SpeculationSpec
from medha.cost.hardware import HARDWARE, MODELS
from medha.errors import ConfigInvalid, PartFailed
from medha.topology import Topology
from medha_cli.byte_option import Bytes
from medha_cli.manifest import read_manifest
from medha_cli.options import Number, given, page_option, refuse_unused
from medha_cli.result_files import figures_beside, require_writable, write_results

if TYPE_CHECKING:
    from medha_sim.scenario import Deployment
    from medha_sim.study import Observer, RunKey, StudyResult, WorkloadSpec
    from medha_sim.study_plots import Runs

QUICK_SECONDS = 120.0
DEFAULT_TOPOLOGY = "8x2x1"
MOST_LOAD = 10.0
MOST_WARNINGS = 5  # the page has more
INTERRUPTED_STATUS = 130  # as shells report SIGINT


@click.command("simulate")
@click.argument("manifest", type=click.Path(path_type=Path), required=False)
@click.option(
    "--policies",
    "-p",
    default="fcfs,edf,srpt,lars,guarded",
    show_default=True,
    help="Policies, and systems such as loongserve, sarathi-512, vllm-2048, separated by commas.",
)
@click.option("--model", default="Llama-3-8B", show_default=True, help=f"One of {', '.join(MODELS)}.")
@click.option("--hardware", default="A100-80G", show_default=True, help=f"One of {', '.join(HARDWARE)}.")
@click.option(
    "--topology", help="Tensor x stream x kv ranks (TP x SPP x KVP).  [default: 8x2x1, or the manifest's]"
)
@click.option(
    "--replicas",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="Replicas behind one router.",
)
@click.option(
    "--load",
    default="0.9",
    show_default=True,
    help="Arrival rates as multiples of the measured capacity, separated by commas.",
)
@click.option(
    "--rate",
    type=Number(0, min_open=True),
    help="Arrival rate in requests (or conversations) per second, in place of --load; a trace is scaled to it.",
)
@click.option(
    "--long", "long_share", type=Number(0, 1), default=0.05, show_default=True,
    help="Share of long requests (Medha-SWE-like, 100K-1M tokens) among ShareGPT-like ones.",
)  # fmt: skip
@click.option(
    "--long-scale",
    type=Number(0, 100, min_open=True),
    default=1.0,
    show_default=True,
    help="Factor by which long prompts are longer.",
)
@click.option(
    "--burstiness", type=Number(0, 20), default=1.0, show_default=True,
    help="Coefficient of variation of the gaps between arrivals: 1 is Poisson, more is bursty.",
)  # fmt: skip
@click.option(
    "--conversations",
    is_flag=True,
    help="Simulate conversations of several turns instead of single requests.",
)
@click.option(
    "--trace", type=click.Path(path_type=Path), help="CSV file whose requests are simulated instead."
)
@click.option(
    "--columns",
    default="arrived_at,num_prefill_tokens,num_decode_tokens",
    show_default=True,
    help="The trace's columns of arrival (seconds; `-` if there is none), prompt and output tokens, and, if there is "
    "a fourth, service class (one of the manifest's; an empty cell is its first).",
)
@click.option(
    "--duration", type=Number(1, 1e6), default=600.0, show_default=True,
    help="Simulated seconds of each run; requests still open then are counted as censored.",
)  # fmt: skip
@click.option(
    "--seeds", type=click.IntRange(1, 100), default=3, show_default=True,
    help="Runs of each setting, from seed 1 on; all policies see the same requests. A trace that has its own times "
    "is the same for every seed and run once, unless there is --noise.",
)  # fmt: skip
@click.option(
    "--band", type=Number(0, 0.5), default=0.1, show_default=True,
    help="Share by which capacity is lower and higher in further runs; 0 omits these.",
)  # fmt: skip
@click.option(
    "--bias", type=Number(0.1, 10), default=1.0, show_default=True,
    help="Factor by which steps take longer than the controllers' profile predicts.",
)  # fmt: skip
@click.option(
    "--noise", type=Number(0, 2), default=0.0, show_default=True,
    help="Standard deviation of each step's time, relative to it.",
)  # fmt: skip
@click.option(
    "--disk-bandwidth", "disk_bytes_per_second", type=Bytes(), default="1Gi", show_default=True,
    help="Bytes per second that each rank reads from the manifest's disk tier, and writes.",
)  # fmt: skip
@click.option(
    "--acceptance", type=Number(0, 1), default=0.5, show_default=True,
    help="Chance that a guessed token is right, if the manifest speculates. It is what controllers assume at first; give what "
    "your traffic has.",
)  # fmt: skip
@click.option(
    "--draft-model", "draft_name",
    help="The manifest's draft model: a preset as --model, a config.json, or the folder of a checkpoint.",
)  # fmt: skip
@click.option(
    "--prediction-head", "head", type=click.Path(path_type=Path),
    help="The manifest's EAGLE-3 head: its folder or its config.json.",
)  # fmt: skip
@click.option(
    "--open-ended", is_flag=True, help="Clients set no max_tokens, so KV is reserved by service class."
)
@click.option(
    "--quick",
    is_flag=True,
    help=f"One seed, no band, {QUICK_SECONDS:g} s: a first estimate in half a minute.",
)
@click.option(
    "--jobs",
    "-j",
    type=click.IntRange(1, 256),
    default=None,
    help="Number of processes; default: one for each core.",
)
@page_option("simulation.html", "HTML page to write; its figures are written as JSON beside it.")
@click.pass_context
def command(
    context: click.Context,
    manifest: Path | None,
    policies: str,
    model: str,
    hardware: str,
    topology: str | None,
    replicas: int,
    load: str,
    rate: float | None,
    long_share: float,
    long_scale: float,
    burstiness: float,
    conversations: bool,
    trace: Path | None,
    columns: str,
    duration: float,
    seeds: int,
    band: float,
    bias: float,
    noise: float,
    disk_bytes_per_second: int,
    acceptance: float,
    draft_name: str | None,
    head: Path | None,
    open_ended: bool,
    quick: bool,
    jobs: int | None,
    out: Path,
) -> None:
    """Run Medha's own controllers and router under a virtual clock, and compare policies on one HTML page.

    MANIFEST, if given, is a MedhaReplica: its parallelism, KV cache, scheduling (with speculation, and the profile, if it
    names one) and service classes are simulated, on the hardware and with the models that the options name. Without one, the
    options describe everything; the default is paper B's set-up, Llama-3 8B on 16 A100. After Ctrl-C, the page has the
    runs that were complete.

    \b
    Examples:
      medha simulate --quick
      medha simulate -p fcfs,lars,srpt --load 0.5,0.87,0.97 --seeds 5 --duration 3600
      medha simulate --model Llama-3-70B --hardware H100 --topology 8x4x2 --long-scale 2 --load 0.8
      medha simulate examples/tiny.yaml --trace traffic.csv --columns time,in,out -p lars
      medha simulate --conversations --rate 0.5 -p lars
      medha simulate -p guarded,loongserve,sarathi-512,hrrn --load 0.9
    """
    require_plotly()
    from medha_sim.scenario import Disturbance
    from medha_sim.study import StudySpec, measured_capacity, run_study
    from medha_sim.study_report import figures, of_study, page

    console = Console(highlight=False)
    workload = _workload(
        conversations=conversations,
        trace=trace,
        columns=columns,
        rate=rate,
        long_share=long_share,
        long_scale=long_scale,
        burstiness=burstiness,
        open_ended=open_ended,
    )
    guessing = _Guessing(draft_name, head, acceptance)
    deployment = _deployment(
        manifest, model, hardware, topology, replicas, long_scale, disk_bytes_per_second, guessing
    )
    unused = _unused(workload)
    if not deployment.guesses:
        unused["acceptance"] = (
            "there is no manifest that speculates (scheduling.speculation.method); leave it out"
        )
    if not deployment.disk_bytes:
        unused["disk_bytes_per_second"] = "the manifest has no disk tier (kvCache.tiers.disk); leave it out"
    if quick:
        unused |= dict.fromkeys(
            ("seeds", "band"), "--quick is one seed without a band; leave one of them out"
        )
        if duration > QUICK_SECONDS:
            unused["duration"] = f"--quick lasts {QUICK_SECONDS:g} s at most; leave one of them out"
    refuse_unused(context, unused)
    by_load = rate is None and workload.shape == "mix"
    spec = StudySpec(
        deployment=deployment,
        workload=workload,
        systems=policy_names(policies, baselines=True),
        seeds=(1,) if quick else tuple(range(1, seeds + 1)),
        duration_seconds=min(duration, QUICK_SECONDS) if quick else duration,
        loads=_loads(load) if by_load else (),
        band=0.0 if quick else band,
        disturbance=Disturbance(bias, noise),
    )
    if not spec.depends_on_seed:
        if given(context, "seeds") and seeds > 1:
            raise ConfigInvalid(
                f"--seeds is {seeds}, but a trace that has its own times gives the same run for each seed; leave "
                "--seeds out, or add --noise"
            )
        spec = replace(spec, seeds=spec.seeds[:1])
    require_page("--out", out, inputs=[path for path in (manifest, trace) if path is not None])
    spec.check()
    capacity_rate = None
    if spec.loads:
        try:
            with console.status("measuring the capacity"):
                capacity_rate = measured_capacity(spec.deployment, spec.workload)
        except KeyboardInterrupt:
            _nothing_done(console)
        if capacity_rate == 0:
            raise ConfigInvalid(
                "a load is a share of the capacity, and the deployment has none: it refuses every request of this workload. "
                "Give its KV pool more room, or choose a --rate to see why each is refused"
            )
    result = _with_progress(
        console,
        lambda observe: run_study(
            spec, capacity_rate, jobs=jobs or len(os.sched_getaffinity(0)), observe=observe
        ),
    )
    if not result.runs:
        _nothing_done(console)
    report = of_study(result)
    try:
        write_results("--out", out, figures(report), lambda: page(report))
    finally:
        print_tables(console, result.runs)
        for warning in report.warnings[:MOST_WARNINGS]:
            console.print(f"note: {warning}", markup=False, soft_wrap=True)
    console.print(f"page: {out}   figures: {figures_beside(out)}", markup=False, soft_wrap=True)
    if result.failure is not None:
        raise PartFailed(result.failure)
    if result.interrupted:
        sys.exit(INTERRUPTED_STATUS)


def _nothing_done(console: Console) -> NoReturn:
    console.print("interrupted before anything was done")
    sys.exit(INTERRUPTED_STATUS)


# --- from options to a study -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Guessing:
    """The options on speculation: what a manifest cannot say of it."""

    draft_name: str | None
    head: Path | None
    acceptance: float

    def settings(self, speculation: SpeculationSpec) -> dict[str, Any]:
        """Return the keyword arguments of `deployment_of`.

        Raises:
            MedhaError: the manifest's method needs another option; or a shape cannot be read.
        """
        for option, value, field, wanted in (
            ("--draft-model", self.draft_name, "draftModel", speculation.draft_model is not None),
            ("--prediction-head", self.head, "predictionHead.source", speculation.eagle3),
        ):
            where = f"scheduling.speculation.{field}"
            if wanted and value is None:
                raise ConfigInvalid(
                    f"{option} is missing: the manifest has {where}, whose shape is not part of a manifest; give the folder of "
                    "its checkpoint, or its config.json"
                )
            if value is not None and not wanted:
                raise ConfigInvalid(
                    f"{option} {value} changes nothing here: no manifest with {where} is given; leave it out"
                )
        draft_model = None
        if self.draft_name is not None:
            from medha_cli.model_shapes import model_shape  # imports the formats of checkpoints

            draft_model = model_shape("--draft-model", self.draft_name)
        return {"draft_model": draft_model, "eagle3": self.head, "acceptance": self.acceptance}


def _deployment(
    manifest: Path | None,
    model: str,
    hardware: str,
    topology: str | None,
    replicas: int,
    long_scale: float,
    disk_bytes_per_second: int,
    guessing: _Guessing,
) -> Deployment:
    from medha_sim.scenario import (
        MAX_MODEL_LEN_TOKENS,
        Deployment,
        deployment_of,
        named_hardware,
        named_model,
    )

    shape, machine = named_model(model), named_hardware(hardware)
    if manifest is None:
        guessing.settings(SpeculationSpec())
        grid = _topology(topology or DEFAULT_TOPOLOGY)
        longest = int(MAX_MODEL_LEN_TOKENS * max(1.0, long_scale))
        return Deployment(
            model=shape, hardware=machine, topology=grid, max_model_len=longest, replicas=replicas
        )
    if topology is not None:
        raise ConfigInvalid(f"--topology is {topology}, but {manifest} has its own; leave one of them out")
    spec = read_manifest(manifest).spec
    return deployment_of(
        spec,
        machine,
        shape,
        replicas,
        disk_bytes_per_second=disk_bytes_per_second,
        **guessing.settings(spec.scheduling.speculation),
    )


def _workload(
    *,
    conversations: bool,
    trace: Path | None,
    columns: str,
    rate: float | None,
    long_share: float,
    long_scale: float,
    burstiness: float,
    open_ended: bool,
) -> WorkloadSpec:
    from medha_sim.study import WorkloadSpec
    from medha_sim.workloads import TraceColumns

    if conversations and trace is not None:
        raise ConfigInvalid("--conversations and --trace are both given; simulate one of them at a time")
    if conversations and rate is None:
        raise ConfigInvalid("--conversations needs --rate: conversations that begin in a second")
    names = [name.strip() for name in columns.split(",")]
    if len(names) not in (3, 4) or not all(names):
        raise ConfigInvalid(
            f"--columns is {columns!r}; name three: arrival, prompt and output, e.g. arrived_at,prompt,output; or four: "
            "service class, too"
        )
    return WorkloadSpec(
        shape="conversations" if conversations else "trace" if trace is not None else "mix",
        long_share=long_share,
        long_scale=long_scale,
        burstiness=burstiness,
        rate=rate,
        trace=trace,
        columns=TraceColumns(None if names[0] == "-" else names[0], *names[1:]),
        names_max_tokens=not open_ended,
    )


def _unused(workload: WorkloadSpec) -> dict[str, str]:
    """Return the parameters that this workload does not depend on, and why."""
    match workload.shape:
        case "trace":
            mix = "the requests are those of --trace; leave it out"
            unused = {
                "load": "a trace has a rate of its own; leave it out, or give --rate",
                "long_share": mix,
                "long_scale": mix,
            }
            if workload.columns.arrived_at is not None:
                unused["burstiness"] = (
                    "the trace has times of its own; leave it out, or have arrivals sampled: --columns -,PROMPT,OUTPUT --rate R"
                )
            return unused
        case "conversations":
            why = "--conversations have their own lengths and times; leave it out"
            names = ("long_share", "long_scale", "burstiness", "open_ended", "columns")
            return dict.fromkeys(names, why) | {
                "load": "--rate says how many conversations begin; leave it out"
            }
        case _:
            unused = {"columns": "there is no --trace; leave it out, or name one"}
            if workload.rate is not None:
                unused["load"] = "--rate is given too; leave one of them out"
            return unused


def policy_names(text: str, *, baselines: bool = False) -> tuple[str, ...]:
    """Return the policies of an option, each once; other systems too, if `baselines`."""
    from medha_sim.study import POLICIES, SYSTEMS

    known = SYSTEMS if baselines else POLICIES
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise ConfigInvalid(f"--policies names {name!r}; there are {', '.join(known)}")
    if not names:
        raise ConfigInvalid(f"--policies is empty; choose among {', '.join(known)}")
    return tuple(dict.fromkeys(names))


def _topology(text: str) -> Topology:
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigInvalid(
            f"--topology is {text!r}; write tensor x stream x kv ranks, e.g. {DEFAULT_TOPOLOGY}"
        )
    return Topology(*map(int, parts))


def _loads(text: str) -> tuple[float, ...]:
    try:
        loads = [float(part) for part in text.split(",")]
    except ValueError:
        loads = []
    if not loads or not all(0 < load <= MOST_LOAD for load in loads):
        raise ConfigInvalid(
            f"--load is {text!r}; write shares of the capacity above 0, up to {MOST_LOAD:g}, e.g. 0.5,0.97"
        )
    return tuple(dict.fromkeys(loads))


def require_plotly() -> None:
    if importlib.util.find_spec("plotly") is None:
        raise ConfigInvalid(
            "the simulator's report needs plotly, which is not installed: pip install 'medha[sim]'"
        )


def require_page(option: str, out: Path, inputs: Sequence[Path]) -> None:
    """Check, before anything runs, that the page and its JSON can be written and overwrite none of `inputs`."""
    if not out.name or out.suffix == ".json":
        raise ConfigInvalid(f"{option} is {out}; it names the HTML page, the JSON is written beside it")
    require_writable(option, out, figures_beside(out), inputs=inputs)


# --- output on the terminal --------------------------------------------------------------------------


def _with_progress(console: Console, run: Callable[[Observer], StudyResult]) -> StudyResult:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("simulating")

        def observe(keys: Sequence[RunKey], fractions: Sequence[float]) -> None:
            share = sum(fractions) / len(fractions)
            under_way = [key for key, done in zip(keys, fractions, strict=True) if 0 < done < 1]
            names = "; ".join(map(str, under_way[:2]))
            progress.update(bar, completed=100 * share, description=f"simulating {names}")

        return run(observe)


def print_tables(console: Console, all_runs: Runs) -> None:
    """Print tables for each load, with figures as rows and systems as columns, and paired differences."""
    from medha_sim.study_report import comparable, difference_rows, table_rows

    runs = comparable(all_runs)
    for load in dict.fromkeys(key.load for key, _ in runs):
        title = "" if load is None else f"offered load {load:g}"
        at_load = [(key, summary) for key, summary in runs if key.load == load]
        _print_turned(console, title, *table_rows(at_load, band=False))
        head, rows = difference_rows(at_load)
        if rows:
            _print_turned(console, "paired by seed, each less the first", head, rows)


def _print_turned(console: Console, title: str, head: list[str], rows: list[list[str]]) -> None:
    """Print a table with a column for each of `rows`: there are more figures than systems."""
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    names, *lines = zip(head, *rows, strict=True)
    for index, name in enumerate(names):
        table.add_column(name if index else "", justify="right" if index else "left")
    for line in lines:
        table.add_row(*line)
    console.print(table)
