"""`medha trace`: records what every rank of a running replica does for some seconds, in a file for Perfetto."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterable, Iterator
from http.client import HTTPException
from pathlib import Path

import click
from rich.console import Console

from medha.errors import PartFailed
from medha_cli.options import FILE, Number, run_options
from medha_cli.replica_snapshot import ANSWER_SECONDS, Target, reason
from medha_cli.result_files import require_writable, results_file

LONGEST_SECONDS = 600.0
_PIECE_BYTES = 65_536


@click.command("trace")
@click.argument("name", required=False)
@click.option(
    "--seconds",
    type=Number(0.1, LONGEST_SECONDS),
    default=5.0,
    show_default=True,
    help="Seconds to record.",
)
@click.option(
    "-o",
    "--output",
    type=FILE,
    default=Path("trace.json"),
    show_default=True,
    help="File to write.",
)
@run_options("record")
def command(name: str | None, seconds: float, output: Path, run_dir: Path | None, url: str | None) -> None:
    """Record the steps of every rank of a running replica, and what they wait for.

    One track per rank, arrows from stage to stage, counters of KV and queues, and each request's phases. Open the file
    in https://ui.perfetto.dev, which reads it in the browser, or in chrome://tracing. Ctrl-C ends the recording
    early. The file holds ids, lengths and times of requests, never their text. To record from the first step on, use
    medha up --trace FILE.

    \b
    Examples:
      medha trace
      medha trace --seconds 30 -o slow.json
    """
    target = Target(name, run_dir, url)
    address = f"{target.controller_url()}/trace?seconds={seconds:g}"
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    require_writable("--output", output)
    size, has_steps = 0, False
    try:
        with results_file("--output", output) as file:
            try:
                for lines in _recorded(address, f"recording {target.name} for {seconds:g} s", console):
                    size += file.write(lines)
                    has_steps = has_steps or b'"cat":"step"' in lines or b'"ph":"X"' in lines
            except KeyboardInterrupt:
                if not size:
                    raise
    except KeyboardInterrupt:  # before anything was recorded
        return
    if not has_steps:
        console.print(
            f"no step of {target.name} began or ended in this time, so {output} shows no rank at work; record again while "
            "requests run, or for longer (--seconds)"
        )
        return
    console.print(f"{output}: {size / 2**20:.1f} MiB; open it in https://ui.perfetto.dev")


def _recorded(address: str, doing: str, console: Console) -> Iterator[bytes]:
    """Yield the trace of a controller in pieces that each end with a whole event.

    Raises:
        PartFailed: nobody answers, or the answer is incomplete.
    """
    try:
        # The first piece is sent at once, the others as things happen or twice a second.
        with urllib.request.urlopen(address, timeout=ANSWER_SECONDS) as answer:  # noqa: S310 (http, as Target has seen)
            console.print(f"{doing}; Ctrl-C ends it now")
            yield from whole_events(iter(lambda: answer.read1(_PIECE_BYTES), b""))
    except OSError as error:
        raise PartFailed(f"{address.partition('?')[0]} does not answer: {reason(error)}") from error
    except HTTPException as error:
        raise PartFailed(f"{address.partition('?')[0]} does not answer to the end: {error!r}") from error


def whole_events(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a trace in pieces that end with a whole event, so that it is readable wherever it ends."""
    held = b""
    for piece in pieces:
        held += piece
        cut = held.rfind(b",\n")
        if cut > 0:
            yield held[:cut]
            held = held[cut:]
    yield held
