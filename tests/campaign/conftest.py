"""The stage for the campaign's sample, with its own control plane, since faults hit everything on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from campaign.runner import Stage, stage
from cluster.conftest import controlled as controlled
from cluster.control_plane import ControlPlane


@pytest.fixture(scope="session")
def on(controlled: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with pytest.MonkeyPatch.context() as kept:
        kept.setenv("KUBECONFIG", "")  # restored afterwards
        with stage(tmp_path_factory.mktemp("stage"), controlled) as made:
            yield made
