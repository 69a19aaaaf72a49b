"""Every defect of a step in the list can be planted, and makes its tests fail."""

from __future__ import annotations

import pytest

from .step_defects import STEP_DEFECTS, StepDefect, is_found, planted


@pytest.mark.parametrize("defect", STEP_DEFECTS, ids=lambda defect: defect.name)
def test_the_defect_can_be_planted(defect: StepDefect) -> None:
    assert defect.wrong in planted(defect)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_defect_is_found() -> None:
    missed = [defect.name for defect in STEP_DEFECTS if not is_found(defect)]
    assert missed == []
