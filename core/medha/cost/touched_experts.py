"""The experts of a sparse layer that a step reads: those that at least one of its rows goes to.

Each row is assumed to choose uniformly, and independently of the others. Rows of one text resemble each other, so that
a real step reads somewhat fewer.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def touched_share(experts: int, per_row: int, rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the expected share of `experts` that each of `rows` rows go to, if each goes to `per_row` different ones."""
    return 1.0 - np.power(1.0 - per_row / experts, rows)
