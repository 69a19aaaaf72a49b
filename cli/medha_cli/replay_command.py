"""`medha replay`: checks a record of `medha up --record`, and simulates other schedulings of it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from medha.errors import ConfigInvalid
from medha_cli.options import page_option, refuse_unused
from medha_cli.result_files import figures_beside, write_results
from medha_cli.simulate_command import policy_names, print_tables, require_page, require_plotly

if TYPE_CHECKING:
    from medha_sim.record_replay import Record

DIFFERS_STATUS = 1


@click.command("replay")
@click.argument("record", type=click.Path(path_type=Path))
@click.option(
    "--policies", "-p", help="Simulate the recorded requests under these policies, separated by commas."
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Simulate with another value of a scheduling field, e.g. --set maxChunkTokens=512; can be repeated.",
)
@click.option(
    "--seeds",
    type=click.IntRange(1, 100),
    default=5,
    show_default=True,
    help="Number of simulations of each scheduling. A seed decides when the machine is slow, equally for all schedulings.",
)
@page_option(
    "replay.html", "HTML page to write, with the comparison; its figures are written as JSON beside it."
)
@click.pass_context
def command(
    context: click.Context,
    record: Path,
    policies: str | None,
    settings: tuple[str, ...],
    seeds: int,
    out: Path,
) -> None:
    """Feed RECORD, written by `medha up --record`, to a fresh controller, and compare its commands with the recorded ones.

    With --policies or --set, the recorded requests are also simulated under that scheduling, and under the live one, which
    shows how far the simulator is from reality. Compare schedulings by their differences, which are paired by seed.
    The exit status is 1 if the replay differs from the record.

    \b
    Examples:
      medha up examples/tiny.yaml --record events.jsonl
      medha replay events.jsonl
      medha replay events.jsonl -p fcfs,lars --set maxChunkTokens=512 -o replay.html
    """
    from medha_sim.record_replay import read_record, verify

    console = Console(highlight=False, soft_wrap=True)
    compares = policies is not None or bool(settings)
    names = () if policies is None else policy_names(policies)
    changes = _changes(settings)
    if compares:
        require_plotly()
        require_page("--out", out, inputs=[record])
    else:
        nothing = "nothing is compared; add --policies or --set, or leave it out"
        refuse_unused(context, {"out": nothing, "seeds": nothing})
    recorded = read_record(record)
    found = verify(recorded)
    if recorded.cut_off:
        console.print("the last line of the record is not whole; all before it is used")
    if found.difference is not None:
        console.print(f"{record}:{found.difference.line}: {found.difference.detail}", markup=False)
        sys.exit(DIFFERS_STATUS)
    compared = (
        "the same commands" if found.compared else "steps and samples agree (the record holds no commands)"
    )
    console.print(f"{found.events} events, {found.steps} steps: {compared}")
    if compares:
        _compare(console, recorded, names, changes, seeds, out)


def _compare(
    console: Console,
    recorded: Record,
    policies: tuple[str, ...],
    changes: dict[str, Setting],
    seeds: int,
    out: Path,
) -> None:
    """Print and write what happened, what the simulator predicts for the same scheduling, and the alternatives."""
    from medha_sim.record_replay import changed_scheduling, read, what_if
    from medha_sim.run_summary import summarise
    from medha_sim.study import RunKey
    from medha_sim.study_report import Report, differences, figures, page

    live = recorded.spec.scheduling
    values = {name: setting.value for name, setting in changes.items()}
    schedulings = {f"{live.policy}, as live": live}
    for policy in policies or (live.policy,):
        scheduling = changed_scheduling(recorded, values | {"policy": policy})
        if scheduling != live:
            schedulings[", ".join((policy, *(setting.text for setting in changes.values())))] = scheduling
    reading = read(recorded)
    runs = [(RunKey("recorded", None, 0, 1.0), summarise(reading.log))]
    planned = [
        (RunKey(name, None, seed, 1.0), schedulings[name]) for seed in range(seeds) for name in schedulings
    ]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=len(planned))
        for key, scheduling in planned:
            bar.update(task, description=f"simulating {key}")
            runs.append((key, summarise(what_if(reading, scheduling, seed=key.seed))))
            bar.advance(task)
    report = Report(
        title=f"Replay of {recorded.path.name}",
        paragraphs=(
            f"“recorded” is what the replica of {recorded.spec.model.name} did; the others are simulations of the same "
            f"{len(reading.submits)} requests, whose steps take what live steps of about the same size took "
            f"(median {reading.ranks.factor:.2f} of what the profile says). Requests come when they came live, "
            f"whatever the answers. {seeds} {'seed' if seeds == 1 else 'seeds'}: with one seed, the machine is slow at the "
            "same times under every scheduling.",
        ),
        runs=runs,
        document={
            "record": str(recorded.path),
            "observed_over_predicted": reading.ranks.factor,
            "message_seconds": reading.ranks.message_seconds,
            "runs": [{"system": key.system, "seed": key.seed, "result": summary} for key, summary in runs],
            "differences": [one.as_json() for one in differences(runs)],
        },
    )
    try:
        write_results("--out", out, figures(report), lambda: page(report))
    finally:
        print_tables(console, runs)
    console.print(f"page: {out}   figures: {figures_beside(out)}", markup=False)


@dataclass(frozen=True, slots=True)
class Setting:
    """A value of a scheduling field, and the option's text."""

    text: str
    value: Any


def _changes(texts: tuple[str, ...]) -> dict[str, Setting]:
    """Return the values that `--set` asks for, by field."""
    changes: dict[str, Setting] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ConfigInvalid(f"--set is {text!r}; write FIELD=VALUE, e.g. --set maxChunkTokens=512")
        if name == "policy":
            raise ConfigInvalid(
                f"--set is {text!r}; name policies with --policies, e.g. -p {value or 'fcfs'}"
            )
        if name in changes:
            raise ConfigInvalid(
                f"--set is {text!r}, and {changes[name].text!r} before it; a field has one value, leave one out"
            )
        try:
            changes[name] = Setting(text, yaml.safe_load(value))
        except yaml.YAMLError as error:
            problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else error
            raise ConfigInvalid(
                f"--set is {text!r}, whose value is no YAML ({problem}); write FIELD=VALUE, e.g. --set maxChunkTokens=512"
            ) from error
    return changes
