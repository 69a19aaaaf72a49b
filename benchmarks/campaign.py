"""Simulate the papers' claims and the guarantees of `guarded`, and write docs/reproduction.md (`make simulations`).

The file `benchmarks/results/campaign-<mode>-<sources>.json` is written after each run, and runs that it holds are not
simulated again. So a campaign that was stopped, by Ctrl-C too, resumes where it was. `<sources>` is a digest of the
code that a simulation loads. Results stay valid after every other change, of comments too.

    python benchmarks/campaign.py                 all of it, about 75 minutes on two cores
    python benchmarks/campaign.py --quick         every kind of run once, two minutes
    python benchmarks/campaign.py --list          list the runs that are left, in order, and how long they may take
    python benchmarks/campaign.py --page-only     write the page again from the existing results
    python benchmarks/campaign.py --adopt FILE    take over the results of other code, if a sample of them is the same
    python benchmarks/campaign.py --adopt FILE --except 70B-3D
                                                  the same without a deployment, or a system such as medha-guarded,
                                                  that the change was meant to affect; then run the first command,
                                                  which simulates what is missing
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness import ROOT, STOPPED, exit_with, parser, progress, write
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from medha.errors import PartFailed
from medha_papers.campaign_adopt import Differs, check_again, sample
from medha_papers.campaign_plan import SCALES, runs
from medha_papers.campaign_pool import Stopwatch, run_all
from medha_papers.campaign_run import Outcome, Run
from medha_papers.reproduction_page import page, report
from medha_papers.roles_section import ROLES_FILE
from medha_papers.source_digest import digest, loaded_files
from medha_sim.compiled_core import compiled

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "reproduction.md"


def main() -> int:
    options = parser(__doc__, json=False)
    options.add_argument("--mode", choices=list(SCALES), default="full")
    options.add_argument(
        "--quick", action="store_const", const="quick", dest="mode", help="the same as --mode quick"
    )
    options.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    options.add_argument(
        "--minutes", type=float, default=88.0, help="start no run behind this many minutes (default 88)"
    )
    options.add_argument("--interpreted", action="store_true", help="do not compile the simulator first")
    options.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    options.add_argument("--page", type=Path, default=PAGE, help="the page to write")
    options.add_argument("--list", action="store_true", help="say what is left to run, and run nothing")
    options.add_argument(
        "--page-only", action="store_true", help="write the page from the results that there are"
    )
    options.add_argument(
        "--adopt",
        type=Path,
        metavar="FILE",
        help="take over its results if a sample of them comes out the same",
    )
    options.add_argument(
        "--sample", type=int, default=36, metavar="N", help="runs that --adopt simulates again (default 36)"
    )
    options.add_argument(
        "--except",
        action="append",
        default=[],
        metavar="NAME",
        dest="left_out",
        help="a deployment or a system of which --adopt takes nothing over; may be repeated",
    )
    arguments = options.parse_args()

    scale = SCALES[arguments.mode]
    planned = runs(scale)
    names = {name for run in planned for name in (run.deployment, run.system)}
    if unknown := [name for name in arguments.left_out if name not in names]:
        options.error(f"--except {unknown[0]}: no run has this name; use one of {', '.join(sorted(names))}")
    files = loaded_files()
    sources = digest(files)
    older = _newest_first(arguments.results, scale.name)
    target = arguments.results / f"campaign-{scale.name}-{sources}.json"
    if arguments.page_only and not target.exists():
        if not older:
            sys.exit(f"{arguments.results} has no results of mode {scale.name}; run the campaign first")
        target = older[0]
        print(f"no results of the present code ({sources}); the page is that of {target.name}")
    campaign: dict[str, Any] = {
        "mode": scale.name,
        "commit": _commit(files),
        "sources": sources,
        "file": _name(target),
        "python": platform.python_version(),
        "capacities": {},
        "runs": {},
    }
    if arguments.adopt:
        if target.exists():
            sys.exit(f"{_name(target)} holds results of the present code; remove it to adopt others")
        try:
            campaign |= _adopted(arguments, planned, sources)
        except Differs as difference:
            sys.exit(f"not adopted: {difference}")
    if target.exists():
        campaign |= json.loads(target.read_text(encoding="utf-8"))
    done: dict[str, Outcome] = campaign["runs"]
    for key in [key for key, outcome in done.items() if "error" in outcome]:
        if not arguments.page_only:
            del done[key]  # tried again
    if not arguments.page_only and not arguments.adopt:
        known = [item for file in older[:1] for item in _outcomes(file)]
        stopwatch = Stopwatch([*known, *done.items()])
        if arguments.list:
            return _list([run for run in planned if run.key not in done], stopwatch, arguments.jobs)
        finished = _simulate(campaign, planned, target, stopwatch, arguments)
    else:
        finished = True
    campaign["report"] = report(done, campaign["capacities"], scale, [run.key for run in planned])
    write(target, campaign)
    write(arguments.page, page(campaign, json.loads((ROOT / ROLES_FILE).read_text(encoding="utf-8"))))
    shown = campaign["report"]
    print(f"{shown['done']} of {shown['planned']} runs; {_name(target)}; {_name(arguments.page)}")
    if not finished:
        progress("stopped; the same command goes on from here")
        return STOPPED
    return 1 if shown["errors"] else 0


def _simulate(
    campaign: dict[str, Any],
    planned: list[Run],
    target: Path,
    stopwatch: Stopwatch,
    arguments: argparse.Namespace,
) -> bool:
    """Run what is missing; return False if it was interrupted."""
    done: dict[str, Outcome] = campaign["runs"]
    left = {run.key: run for run in planned if run.key not in done}
    ran = 0
    console = Console()
    console.print(
        f"{len(planned)} runs, {len(planned) - len(left)} done before; results in {campaign['file']}"
    )
    started = time.monotonic()
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(planned), completed=len(planned) - len(left))

        def remaining() -> str:
            seconds = stopwatch.left_seconds(left.values(), arguments.jobs)
            if seconds is None:
                return "time left: not known yet"
            limit = 60 * arguments.minutes - (time.monotonic() - started)
            about = f"about {min(seconds, limit) / 60:.0f} min left"
            return (
                about if seconds <= limit else f"{about}, too few for all: {seconds / 60:.0f} min are missing"
            )

        def keep(run: Run, outcome: Outcome) -> None:
            nonlocal ran
            ran += "error" not in outcome
            done[run.key] = outcome
            left.pop(run.key, None)
            stopwatch.learn(run.key, outcome)
            write(target, campaign)
            took = outcome.get("error") or f"{outcome['core_seconds']:.1f} s"
            bar.update(task, advance=1)
            if bar.disable:
                at = f"{len(planned) - len(left)}/{len(planned)}, {time.monotonic() - started:.0f} s"
                print(f"[{at}, {remaining()}] {run.key}: {took}", flush=True)
            elif "error" in outcome:
                bar.console.print(f"{run.key}: {took}")

        if left:
            bar.update(task, description="compiling the simulator")
            _compile(arguments)
        try:
            run_all(
                planned,
                dict(done),
                campaign["capacities"],
                jobs=arguments.jobs,
                deadline_seconds=60 * arguments.minutes,
                keep=keep,
                tick=lambda: bar.update(task, description=remaining()),
            )
        except KeyboardInterrupt:
            return False
        finally:
            if ran:
                minutes = round((time.monotonic() - started) / 60, 1)
                took = {"runs": ran, "minutes": minutes, "processes": arguments.jobs}
                campaign.setdefault("took", []).append(took)
    return True


def _compile(arguments: argparse.Namespace) -> None:
    """Let the processes of the pool find compiled code, which gives the same figures."""
    if arguments.interpreted or arguments.mode != "full":  # compiling takes as long as quick
        return
    try:
        sys.path.insert(0, str(compiled(ROOT, ROOT / ".medha" / "compiled")))
    except PartFailed as error:
        print(f"runs are interpreted, and take twice as long: {error}")


def _adopted(arguments: argparse.Namespace, planned: list[Run], sources: str) -> dict[str, Any]:
    """Return the parts of a campaign that a file of other code gives; they name the code that simulated them."""
    earlier = json.loads(arguments.adopt.read_text(encoding="utf-8"))
    if earlier["mode"] != arguments.mode:
        sys.exit(f"{arguments.adopt} is of mode {earlier['mode']}, not {arguments.mode}")
    known: dict[str, Outcome] = {
        run.key: earlier["runs"][run.key]
        for run in planned
        if not {run.deployment, run.system} & {*arguments.left_out}
        and "error" not in earlier["runs"].get(run.key, {"error": "not run"})
    }
    chosen = sample(
        [run for run in planned if run.key in known], arguments.sample, f"{earlier['sources']} {sources}"
    )
    if not chosen:
        sys.exit(f"{arguments.adopt} has no run that could be simulated again")
    print(f"{len(chosen)} of {len(known)} runs are simulated again")
    _compile(arguments)
    check_again(chosen, known, earlier["capacities"], jobs=arguments.jobs)
    adoption = {
        "sources": earlier["sources"],
        "commit": earlier["commit"],
        "again": [run.key for run in chosen],
        "except": arguments.left_out,
    }
    return {
        "capacities": earlier["capacities"],
        "runs": known,
        "adopted": [*earlier.get("adopted", []), adoption],
    }


def _list(left: list[Run], stopwatch: Stopwatch, jobs: int) -> int:
    total = 0.0
    for run in left:
        seconds = stopwatch.seconds(run)
        total += seconds or 0.0
        print(f"{total / jobs / 60:6.1f} min  {run.key}{'' if seconds is not None else ' (time not known)'}")
    print(
        f"{len(left)} runs, about {total / jobs / 60:.0f} minutes on {jobs} processes, as far as times are known"
    )
    return 0


def _newest_first(folder: Path, mode: str) -> list[Path]:
    files = folder.glob(f"campaign-{mode}-*.json")
    return sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)


def _outcomes(file: Path) -> list[tuple[str, Outcome]]:
    return list(json.loads(file.read_text(encoding="utf-8"))["runs"].items())


def _name(file: Path) -> str:
    """Return a file's path below the repository's root, or its name if it is elsewhere."""
    file = file.resolve()
    return str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else file.name


def _commit(files: list[Path]) -> str:
    """Return the last commit that changed a simulated source, with `-dirty` if the sources differ from it."""
    names = [str(file) for file in files]
    log = ["git", "log", "-1", "--format=%h", "--abbrev=12", "--", *names]
    commit = subprocess.run(log, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    status = ["git", "status", "--porcelain", "--", *names]
    changed = subprocess.run(status, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return commit + ("-dirty" if changed else "")


if __name__ == "__main__":
    exit_with(main)
