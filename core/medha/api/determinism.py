"""The guarantees that a replica can give about the numbers of a request."""

from typing import Literal

Determinism = Literal["bestEffort", "batchInvariant"]
"""`bestEffort`: equal requests may round differently in different steps. `batchInvariant`: they get equal logits."""
