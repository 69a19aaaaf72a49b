"""`medha replay`: a recorded log of `medha up --record`, checked and asked what would have been."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml
from rich.console import Console

from medha.errors import ConfigInvalid
from medha_cli.simulate import policy_names, print_tables, require_plotly, require_writable

if TYPE_CHECKING:
    from medha_sim.replay import Record

DIFFERS_STATUS = 1


@click.command("replay")
@click.argument("record", type=click.Path(path_type=Path))
@click.option(
    "--policies", "-p", help="Simulate the log's requests under these policies, separated by commas."
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Simulate with another value of a scheduling field, e.g. --set maxChunkTokens=512; can be repeated.",
)
@click.option(
    "--out",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("replay.html"),
    show_default=True,
    help="The page that compares; its figures are written as JSON beside it.",
)
def command(record: Path, policies: str | None, settings: tuple[str, ...], out: Path) -> None:
    """Feed RECORD, a log of `medha up --record`, to a fresh controller, and compare what it commands.

    With --policies or --set, the log's requests are then simulated under that scheduling, and under the live one,
    so that you see how far the simulator is from what happened. Exit status 1: the replay differs from the log.

    \b
    Examples:
      medha up examples/tiny.yaml --record events.jsonl
      medha replay events.jsonl
      medha replay events.jsonl -p fcfs,lars --set maxChunkTokens=512 -o replay.html
    """
    from medha_sim.replay import read_record, verify

    console = Console(highlight=False, soft_wrap=True)
    log = read_record(record)
    found = verify(log)
    if log.cut_off:
        console.print("the last line of the log is not whole; all before it is used")
    if found.difference is not None:
        console.print(f"{record}:{found.difference.line}: {found.difference.detail}", markup=False)
        sys.exit(DIFFERS_STATUS)
    compared = (
        "the same commands" if found.compared else "steps and samples agree (the log holds no commands)"
    )
    console.print(f"{found.events} events, {found.steps} steps: {compared}")
    if policies is not None or settings:
        require_plotly()
        require_writable(out)
        _compare(console, log, None if policies is None else policy_names(policies), settings, out)


def _compare(
    console: Console, log: Record, policies: tuple[str, ...] | None, settings: tuple[str, ...], out: Path
) -> None:
    """What happened, what the simulator makes of it, and what would have been."""
    from medha_sim.metrics import summarise
    from medha_sim.replay import changed_scheduling, read, what_if
    from medha_sim.report import Report, write_report
    from medha_sim.study import RunKey

    live = log.spec.scheduling
    changes = dict(map(_setting, settings))
    schedulings = {f"{live.policy}, as live": live}
    for policy in policies or (live.policy,):
        scheduling = changed_scheduling(log, changes | {"policy": policy})
        if scheduling != live:
            schedulings[", ".join((policy, *settings))] = scheduling
    reading = read(log)
    runs = [(RunKey("recorded", None, 0, 1.0), summarise(reading.log))]
    for name, scheduling in schedulings.items():
        with console.status(f"simulating {name}"):
            runs.append((RunKey(name, None, 0, 1.0), summarise(what_if(reading, scheduling))))
    print_tables(console, runs)
    report = Report(
        title=f"Replay of {log.path.name}",
        paragraphs=(
            f"“recorded” is what the replica of {log.spec.model.name} did; the others are simulations of the same "
            f"{len(reading.submits)} requests, whose steps take what live steps of about the same size took "
            f"(median {reading.ranks.factor:.2f} of what the profile says). Requests come when they came live, "
            "whatever the answers.",
        ),
        runs=runs,
        document={
            "record": str(log.path),
            "observed_over_predicted": reading.ranks.factor,
            "message_seconds": reading.ranks.message_seconds,
            "runs": [{"system": key.system, "result": summary} for key, summary in runs],
        },
    )
    beside = write_report(report, out)
    console.print(f"page: {out}   figures: {beside}")


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ConfigInvalid(f"--set is {text!r}; write FIELD=VALUE, e.g. --set maxChunkTokens=512")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigInvalid(f"--set {text}: the value is no YAML: {error}") from error
