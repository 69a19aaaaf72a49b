"""`medha profile`: measures the times of steps on this machine, and writes them down for the predictor."""

from __future__ import annotations

import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from medha.errors import ConfigInvalid
from medha_cli.options import FILE, Number, given
from medha_cli.result_files import require_writable, write_figures
from medha_process.launch import RANK_ENVIRONMENT

if TYPE_CHECKING:
    from medha.api.determinism import Determinism
    from medha.model.kv_dtype import KvDtype
    from medha_worker.profiling.profile_fit import HeldOut

_INTERRUPTED = 130  # as a shell reports a command that Ctrl-C ended


@click.command("profile")
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--output",
    "-o",
    type=FILE,
    default=Path("profile.json"),
    show_default=True,
    help="File to write; an earlier one is replaced at the end.",
)
@click.option("--quick", is_flag=True, help="A coarse grid and short contexts: a minute for a small model.")
@click.option(
    "--max-context",
    type=click.IntRange(0, 2**31 - 1),
    help="Longest context, tokens. Default: 16384, or 4096 if quick, within the model's limit.",
)
@click.option(
    "--max-chunk",
    type=click.IntRange(1, 2**20),
    help="Largest chunk, tokens. Default: the manifest's maxChunkTokens, else 2048; 512 if quick.",
)
@click.option(
    "--max-decodes",
    type=click.IntRange(2, 65536),
    help="Most decodes in a step. Default: 64, or 16 if quick.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1, 100),
    help="Times that each step is measured; medians count. Default: 5, or 3 if quick.",
)
@click.option(
    "--max-step-seconds",
    type=Number(min=0.001),
    default=2.0,
    show_default=True,
    help="Longest step that is measured; longer ones are extrapolated by the roofline.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    help="CPU threads. Default: the manifest's, else one for each core.",
)
@click.option(
    "--cpu-time",
    is_flag=True,
    help="Measure the CPU time of one thread instead of wall-clock time, on a busy machine.",
)
@click.pass_context
def command(
    context: click.Context,
    source: Path,
    output: Path,
    quick: bool,
    max_context: int | None,
    max_chunk: int | None,
    max_decodes: int | None,
    rounds: int | None,
    max_step_seconds: float,
    threads: int | None,
    cpu_time: bool,
) -> None:
    """Measure steps of the checkpoint SOURCE, a directory or a manifest that names one, on this machine.

    A step is a set of decodes, a prefill chunk, or both, after a context. The resulting profile predicts any such step.
    The command also tests the profile on context lengths that were left out, and prints the errors. Let no other
    program run meanwhile, or use --cpu-time.

    \b
    Examples:
      medha profile .medha/tiny --quick
      medha profile examples/tiny.yaml -o tiny-profile.json
      medha profile .medha/small --max-context 65536 --rounds 9 --threads 2
      medha profile .medha/small --cpu-time
    """
    rank = _measured_rank(source)
    max_chunk = max_chunk or rank.max_chunk
    threads = threads or rank.threads
    if cpu_time and (threads or 1) != 1:
        where = "--threads" if given(context, "threads") else "spec.threads"
        raise ConfigInvalid(
            f"--cpu-time measures one thread, but {where} is {threads}; add --threads 1, or leave --cpu-time out"
        )
    require_writable("--output", output, inputs=[source])
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        for name, value in RANK_ENVIRONMENT.items():  # read when torch is imported
            os.environ.setdefault(name, value)
        from medha_worker.profiling import step_timer as measuring
        from medha_worker.profiling.profile_fit import errors, fit_profile, held_out

        model = measuring.load(
            rank.directory,
            max_model_len=rank.max_model_len,
            dtype=rank.dtype,
            threads=1 if cpu_time else threads,
            determinism=rank.determinism,
            kv_dtype=rank.kv_dtype,
        )
        limit = model.config.max_model_len
        grid = measuring.grid(
            max_context=min(
                max_context if max_context is not None else (4096 if quick else 16384), limit - 1
            ),
            max_chunk=min(max_chunk or (512 if quick else 2048), limit),
            max_decodes=max_decodes or (16 if quick else 64),
            quick=quick,
        )
        shapes = grid.shapes()
        timer = measuring.StepTimer(
            model, grid.pool_tokens, time.process_time if cpu_time else time.perf_counter
        )
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(f"measuring {len(shapes)} steps", total=None)
            steps = measuring.measure(
                timer,
                shapes,
                rounds=rounds or (3 if quick else 5),
                max_step_seconds=max_step_seconds,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
        layers = model.config.num_layers
        window_tokens, window_share = model.window_tokens, model.window_share
        profile = fit_profile(
            steps,
            layers=layers,
            window_tokens=window_tokens,
            window_share=window_share,
            name=f"{rank.directory.resolve().name} on {_machine()}",
            source=f"medha profile: {len(steps)} steps, contexts up to {max(grid.contexts)} tokens",
        )
        write_figures("--output", output, profile.to_json())
    except KeyboardInterrupt:
        console.print(f"interrupted: {output} is not written")
        sys.exit(_INTERRUPTED)
    seen = errors(profile, steps)
    tests = held_out(steps, layers=layers, window_tokens=window_tokens, window_share=window_share)
    console.print(_table(tests))
    console.print(f"fitted to all {len(steps)} steps: {seen.mean():.1%} mean error, {seen.max():.1%} worst")
    click.echo(output)


@dataclass(frozen=True)
class _Rank:
    """The rank whose steps are measured, as its manifest describes it or by the defaults."""

    directory: Path
    dtype: str = "auto"
    max_model_len: int | None = None
    determinism: Determinism = "bestEffort"
    kv_dtype: KvDtype = "auto"
    max_chunk: int | None = None
    threads: int | None = None


def _measured_rank(source: Path) -> _Rank:
    from medha_cli.manifest import model_directory, read_manifest

    if not source.is_file():
        return _Rank(source)
    replica = read_manifest(source)
    spec = replica.spec
    if spec.parallelism.tensor > 1:
        raise ConfigInvalid(
            f"{source}: parallelism.tensor is {spec.parallelism.tensor}, but one process measures one whole rank; "
            "leave spec.scheduling.profile out, and each rank's warm-up measures its own part"
        )
    return _Rank(
        model_directory(replica),
        spec.model.dtype,
        spec.model.max_model_len,
        spec.determinism,
        spec.kv_cache.dtype,
        spec.scheduling.max_chunk_tokens,
        spec.threads,
    )


def _table(tests: list[HeldOut]) -> Table:
    table = Table("contexts not seen, tokens", "steps", "mean error", "worst error", title="Held-out test")
    for test in tests:
        table.add_row(
            f"{test.low}-{test.high}", str(test.steps), f"{test.mean_error:.1%}", f"{test.worst_error:.1%}"
        )
    return table


def _machine() -> str:
    return f"{platform.node()} ({platform.machine()}, {os.cpu_count()} cores)"
