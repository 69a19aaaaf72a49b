"""A sample of campaign (f): a field that is changed and restored leaves no trace, and wrong values are refused."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from campaign.schema import SchemaCampaign, make_ground, trials, until
from cluster.api import Api, PlayedKubelets
from cluster.control_plane import ControlPlane
from cluster.operator_process import operator
from medha_operator.operator_settings import OperatorSettings

SAMPLE_SECONDS = 60.0


def test_every_field_has_valid_and_invalid_values() -> None:
    found = trials()
    assert len(found) > 80
    for mutation in found:
        only_one = mutation.path.endswith("predictionHead.kind")  # the other kind needs a source
        assert len(mutation.valid) >= (1 if only_one else 2), mutation.path
        assert mutation.invalid, mutation.path


@pytest.mark.long
@pytest.mark.timeout(300)
def test_fields_are_changed_and_put_back(controlled: ControlPlane, tmp_path: Path) -> None:
    with Api(controlled) as api:
        make_ground(api, "schema")
        with (
            operator(tmp_path, controlled.kubeconfig, lease_namespace="schema", namespaces=["schema"]),
            PlayedKubelets(api),
        ):
            campaign = SchemaCampaign(api, "schema", OperatorSettings())
            chosen = until(time.monotonic() + SAMPLE_SECONDS, trials(seed=6))
            found = {mutation.path: words for mutation, words in campaign.run(chosen) if words}
    assert found == {}
    assert campaign.changes >= 10
    assert campaign.refusals >= 5
