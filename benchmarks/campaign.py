"""`make campaign`: simulate what the papers claim and what `guarded` promises, and write docs/reproduction.md.

After each run `benchmarks/results/campaign-<mode>-<commit>.json` is written; runs that it holds are not simulated again,
so a campaign that was stopped goes on where it was. The commit is the last one that changed the simulated code; a
tree with uncommitted changes there is labelled `<commit>-dirty` and always starts anew.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from medha_sim.campaign import SCALES, Outcome, Run, run_all, runs
from medha_sim.reproduction import page, report

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "reproduction.md"
CODE = ("core/medha", "sim/medha_sim", "benchmarks/campaign.py")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mode", choices=list(SCALES), default="full")
    parser.add_argument(
        "--quick", action="store_const", const="quick", dest="mode", help="the same as --mode quick"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument(
        "--minutes", type=float, default=85.0, help="start no run behind this many minutes (default 85)"
    )
    parser.add_argument("--page-only", action="store_true", help="write the page from the file that is there")
    arguments = parser.parse_args()

    scale = SCALES[arguments.mode]
    commit, dirty = _commit()
    target = RESULTS / f"campaign-{scale.name}-{commit}.json"
    campaign: dict[str, Any] = {
        "mode": scale.name,
        "commit": commit,
        "file": str(target.relative_to(ROOT)),
        "python": platform.python_version(),
        "capacities": {},
        "runs": {},
    }
    if target.exists() and (arguments.page_only or not dirty):
        campaign |= json.loads(target.read_text(encoding="utf-8"))
    planned = runs(scale)
    if not arguments.page_only:
        _simulate(campaign, planned, target, arguments)
    campaign["report"] = report(campaign["runs"], campaign["capacities"], scale, len(planned))
    _write(target, json.dumps(campaign, indent=1) + "\n")
    _write(PAGE, page(campaign))
    shown = campaign["report"]
    print(f"{shown['done']} of {shown['planned']} runs; {target.relative_to(ROOT)}; {PAGE.relative_to(ROOT)}")
    return 1 if shown["errors"] else 0


def _simulate(
    campaign: dict[str, Any], planned: list[Run], target: Path, arguments: argparse.Namespace
) -> None:
    done: dict[str, Outcome] = campaign["runs"]
    for key in [key for key, outcome in done.items() if "error" in outcome]:
        del done[key]  # tried again
    print(f"{len(planned)} runs, {len(done)} done before; results in {campaign['file']}", flush=True)
    started = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the processes of the pool as Ctrl-C does

    def keep(run: Run, outcome: Outcome) -> None:
        done[run.key] = outcome
        _write(target, json.dumps(campaign, indent=1) + "\n")
        took = outcome.get("error") or f"{outcome['core_seconds']:.1f} s"
        print(
            f"[{len(done)}/{len(planned)}, {time.monotonic() - started:.0f} s] {run.key}: {took}", flush=True
        )

    try:
        run_all(
            planned,
            dict(done),
            campaign["capacities"],
            jobs=arguments.jobs,
            deadline_seconds=60 * arguments.minutes,
            keep=keep,
        )
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on from here")


def _write(target: Path, text: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.rename(target)


def _commit() -> tuple[str, bool]:
    """The last commit that changed simulated code, marked where the tree differs from it."""
    log = ["git", "log", "-1", "--format=%h", "--abbrev=12", "--", *CODE]
    commit = subprocess.run(log, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    changes = ["git", "status", "--porcelain", "--", *CODE]
    dirty = bool(subprocess.run(changes, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    return commit + ("-dirty" if dirty else ""), dirty


if __name__ == "__main__":
    sys.exit(main())
