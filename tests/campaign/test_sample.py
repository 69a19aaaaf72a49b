"""A sample of the fault campaign; `make faults` runs all of it.

Whatever goes wrong, the cluster comes to what the spec says, with no more objects made than without faults.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from campaign.runner import Plan, Stage

SAMPLE = (
    Plan("scale", "answers", 1),
    Plan("delete", "kill-ending", 5),
)
FURTHER = (
    Plan("update", "kill-after", 7),  # a StatefulSet
    Plan("update", "kill-before", 24),  # among the ends of old pods
    Plan("update", "events", 1),
    Plan("scale", "kill-after", 21),
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "plan",
    [*SAMPLE, *(pytest.param(one, marks=pytest.mark.long) for one in FURTHER)],
    ids=lambda plan: plan.name,
)
def test_the_cluster_comes_to_what_the_spec_asks_for(on: Stage, plan: Plan) -> None:
    assert on.run(plan).verdict == "well"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_campaign_fails_with_an_operator_whose_children_have_no_owner() -> None:
    tests = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    defective = ["--quick", "--scenario", "apply", "--module", "campaign.defective.lost_owner"]
    done = subprocess.run(
        [sys.executable, "-m", "campaign", *defective],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "apply/none/0: " in done.stdout
    assert "StatefulSet r-l0 is another" in done.stdout
