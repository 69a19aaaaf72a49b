"""Time limit of a step, after which the processes that wait for it treat it as lost."""

STALLED_SECONDS = 20.0
"""Part of the limit that does not depend on the step. A rank that waits in vain for another one in a short
step reports that after 10 s, so a rank that is silent for longer hangs."""
PATIENCE = 20.0
"""Multiple of its predicted time that a step may take, because ranks may share their cores with anything."""


def bound_seconds(predicted_seconds: float) -> float:
    """Return the time that a step may take before the epoch counts as lost."""
    return STALLED_SECONDS + PATIENCE * predicted_seconds
