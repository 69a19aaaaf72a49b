"""A sample of the fault campaign; `make faults` runs all of it.

Whatever goes wrong, the cluster comes to what the spec says, with no more objects made than without faults.
"""

from __future__ import annotations

import pytest

from campaign.runner import Plan, Stage

SAMPLE = (
    Plan("update", "kill-before", 2),  # the Secret
    Plan("update", "kill-after", 7),  # a StatefulSet
    Plan("update", "kill-after", 16),
    Plan("update", "kill-before", 24),  # among the ends of old pods
    Plan("update", "events", 1),
    Plan("scale", "stale", 0),
    Plan("scale", "kill-after", 21),
    Plan("scale", "answers", 1),
    Plan("scale", "reads", 1),
    Plan("scale", "pods", 1),
    Plan("delete", "kill-ending", 5),
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("plan", SAMPLE, ids=lambda plan: plan.name)
def test_the_cluster_comes_to_what_the_spec_says(on: Stage, plan: Plan) -> None:
    assert on.run(plan).verdict == "well"
