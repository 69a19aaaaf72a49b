"""The campaign's own test: the operator keeps its promises, and each of ten defective ones breaks one and is caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from campaign.promises import BROKEN_BY, PROMISES, Ground, is_kept
from campaign.proxy import FaultyProxy
from cluster.api import Api, PlayedKubelets
from cluster.control_plane import ControlPlane

pytestmark = pytest.mark.timeout(240)

ALWAYS = ("lost_owner",)
"""The defect that each run plants, to see that one is caught at all; `make test-long` has the others."""
ELSEWHERE = ("an_upgrade_touches_no_pod", "a_rollout_keeps_what_must_serve")
"""Promises that tests of `tests/cluster` show in each run."""
Grounds = Callable[[str, str], Ground]


@pytest.fixture(scope="module")
def grounds(controlled: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grounds]:
    """Makes the ground on which an operator, by its module, is tried in a namespace."""
    with Api(controlled) as api, PlayedKubelets(api) as kubelets, FaultyProxy(controlled) as proxy:

        def make(namespace: str, module: str) -> Ground:
            folder: Path = tmp_path_factory.mktemp(namespace)
            return Ground(api, proxy, kubelets, folder, api.namespace(namespace), module)

        yield make


@pytest.mark.parametrize(
    "promise",
    [
        pytest.param(one, marks=pytest.mark.long if one.__name__ in ELSEWHERE else (), id=one.__name__)
        for one in PROMISES
    ],
)
def test_the_operator_keeps_the_promise(grounds: Grounds, promise: Callable[[Ground], None]) -> None:
    ground = grounds(f"kept-{PROMISES.index(promise)}", "medha_operator")
    assert is_kept(promise, ground) == ""


@pytest.mark.parametrize(
    "defect",
    [pytest.param(one, marks=() if one in ALWAYS else pytest.mark.long) for one in BROKEN_BY],
)
def test_a_defective_operator_is_caught(grounds: Grounds, defect: str) -> None:
    ground = grounds(f"broken-{defect.replace('_', '-')}", f"campaign.defective.{defect}")
    broken = is_kept(BROKEN_BY[defect], ground)
    assert broken
    log = "".join(file.read_text(encoding="utf-8") for file in ground.folder.glob("*.log"))
    assert "follow it with the defect" not in log, "the defect was not planted"
    assert "the reconcile failed" not in log, (
        "the defect raises an unexpected exception, which proves nothing"
    )
