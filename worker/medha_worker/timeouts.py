"""How long a step may take before the processes that wait for it take it for lost."""

STALLED_SECONDS = 20.0
"""A rank that waits for another in vain in a short step knows it after 10 s, and says so; whoever is silent for longer
hangs."""
PATIENCE = 20.0
"""Steps may take so many times as long as was predicted: ranks may share their cores with anything."""


def bound_seconds(predicted_seconds: float) -> float:
    """How long a step may take before the epoch counts as lost."""
    return STALLED_SECONDS + PATIENCE * predicted_seconds
