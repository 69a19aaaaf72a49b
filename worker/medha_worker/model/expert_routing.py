"""The way in which a router chooses the experts of a token, read without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ExpertRouting:
    """The scores of experts, and the choice by them.

    Experts can be in `groups` of equal size and consecutive indexes. A token then chooses among the experts of its
    `kept_groups` best groups alone.

    Attributes:
        scores: `softmax` makes probabilities over all experts, and a group is as good as its best expert. `sigmoid` scores
            each expert by itself, and a group is as good as its two best experts together.
        is_corrected: Whether the choice, but not the weights, adds a correction of each expert to its score.
        groups, kept_groups: Numbers of groups; equal if experts are not in groups.
        scale: Factor on the weights of the chosen experts, after they are scaled to a sum of 1 if they are.
        is_float32: Whether the router's product is in float32, whatever the model runs in.
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    is_corrected: bool = False
    groups: int = 1
    kept_groups: int = 1
    scale: float = 1.0
    is_float32: bool = False
