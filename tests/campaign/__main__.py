"""The fault campaign: `make faults`, or `PYTHONPATH=tests python -m campaign [--quick] [--json FILE] [--seed N]`.

Every plan is one run on a real API server. With a file, plans that stand in it for the present code are not run again.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from campaign.proxy import Record
from campaign.results import Results
from campaign.runner import Plan, Stage, stage
from campaign.scenarios import SCENARIOS, Document, Scenario
from cluster.control_plane import control_plane
from cluster.definitions import define


def plans(
    scenario: Scenario, record: Record, seed: int, *, is_first_known: bool, seeds: int = 5
) -> list[Plan]:
    """Return the plans of a scenario: faults at each write of its reference run, kills at each event of its
    deletion, a stale view of each step but the last, and random faults.

    If the first step is also the first one of an earlier scenario, its writes are left to that one.
    """
    name = scenario.name
    found = []
    for number in range(1 + is_first_known * record.steps[0], len(record.writes) + 1):
        found += [Plan(name, "kill-before", number), Plan(name, "kill-after", number)]
    if scenario.deletes:
        found += [Plan(name, "kill-ending", number) for number in range(record.ending_events + 1)]
    found += [Plan(name, "stale", step) for step in range(len(scenario.steps) - 1)]
    for fault in ("events", "answers", "reads", "pods"):
        found += [Plan(name, fault, seed + number) for number in range(seeds)]
    return found


def all_plans(on: Stage, seed: int, scenarios: list[str], results: Results) -> list[Plan]:
    """Return the plans of all scenarios; one whose reference run fails has none, and counts as failed."""
    found: list[Plan] = []
    first_steps: list[Document] = []
    for name in scenarios:
        scenario = SCENARIOS[name]
        outcome, record, _ = on.reference(name)
        sys.stdout.write(f"{name}: {outcome.writes} writes, {outcome.pods} pods, {outcome.seconds:g} s\n")
        sys.stdout.flush()
        if outcome.wrong:
            results.add(outcome.plan, asdict(outcome))
            sys.stdout.write(f"{outcome.plan}: {outcome.verdict}\n")
            continue
        found += plans(scenario, record, seed, is_first_known=scenario.steps[0] in first_steps)
        first_steps.append(scenario.steps[0])
    return found


def sample(every: list[Plan], seed: int, count: int) -> list[Plan]:
    """Return a random sample of plans, balanced over faults; so is each prefix of it."""
    chance = random.Random(seed)
    by_fault: dict[str, list[Plan]] = {}
    for plan in every:
        by_fault.setdefault(plan.fault, []).append(plan)
    chosen: list[Plan] = []
    while len(chosen) < count:
        chosen += [group.pop(chance.randrange(len(group))) for group in by_fault.values() if group]
    return chosen[:count]


def main() -> int:
    parser = argparse.ArgumentParser(prog="campaign", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a sample of 24 plans")
    parser.add_argument("--json", type=Path, help="where outcomes are written, and read to go on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="default: all")
    parser.add_argument("--fault", default="", help="only those whose name begins so, e.g. kill")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no run after as long")
    parser.add_argument("--module", default="medha_operator", help="the operator: what `kopf run -m` runs")
    asked = parser.parse_args()
    results = Results(asked.json)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="medha-campaign-") as name:
        folder = Path(name)
        with (
            control_plane(folder / "plane", scheduler=False, before_controllers=define) as plane,
            stage(folder, plane, asked.module) as on,
        ):
            every = all_plans(on, asked.seed, asked.scenario or list(SCENARIOS), results)
            every = [plan for plan in every if plan.fault.startswith(asked.fault)]
            chosen = sample(every, asked.seed, len(every) if not asked.quick else min(24, len(every)))
            for plan in chosen:
                if results.is_done(plan.name) or time.monotonic() - began > 60 * asked.minutes:
                    continue
                outcome = on.run(plan)
                results.add(plan.name, asdict(outcome))
                sys.stdout.write(
                    f"{plan.name}: {outcome.verdict} ({outcome.seconds:g} s, {outcome.writes} writes)\n"
                )
                sys.stdout.flush()
                if outcome.wrong:
                    _keep_log(folder, plan.name)
    failed, skipped = results.failed, results.skipped
    kinds = Counter(name.split("/")[1] for name in results.rows.keys() - set(skipped))
    sys.stdout.write(
        f"{kinds.total()} plans of {len(every)} ({dict(kinds)}), {len(failed)} failed: {failed}\n"
        f"{len(skipped)} skipped, since their fault never happened: {skipped}\n"
    )
    return 1 if failed else 0


def _keep_log(folder: Path, plan: str) -> None:
    """Keep the operator's log of a failed run."""
    newest = max(folder.glob("run-*.log"), key=lambda path: path.stat().st_mtime)
    kept = Path(tempfile.gettempdir()) / f"medha-campaign-{plan.replace('/', '-')}.log"
    kept.write_bytes(newest.read_bytes())
    sys.stdout.write(f"  its log: {kept}\n")


if __name__ == "__main__":
    sys.exit(main())
