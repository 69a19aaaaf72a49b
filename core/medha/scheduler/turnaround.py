"""The time that passes between two steps of decodes on a lane, beyond their own: pure state, fed by events.

A step that *waits* is launched when the one before has ended: messages, sampling and the controller's decision keep the
ranks idle. A step that *runs ahead* was launched before that. The difference of the two times decides which is better, and
predictions of single steps do not contain it.
"""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHT = 0.05  # of one step: about 20 steps to follow a change; the first ones weigh more


@dataclass(slots=True)
class _Mean:
    seconds: float = 0.0
    seen: int = 0

    def add(self, seconds: float) -> None:
        self.seen += 1
        self.seconds += max(_WEIGHT, 1 / self.seen) * (seconds - self.seconds)


class Turnaround:
    """The mean times between steps of decodes that wait, and between those that run ahead."""

    def __init__(self) -> None:
        self._waiting, self._ahead = _Mean(), _Mean()

    @property
    def waiting_seconds(self) -> float:
        """The time before a step that is launched when the one before has ended."""
        return max(self._waiting.seconds, self.ahead_seconds)

    @property
    def ahead_seconds(self) -> float:
        """The time before a step that was launched ahead."""
        return max(self._ahead.seconds, 0.0)

    def observe(self, between_seconds: float, compute_seconds: float, *, ran_ahead: bool) -> None:
        """Learn from the time before a step; it counts as no longer than the step itself took.

        A longer time shows that the machine was busy with something else.
        """
        mean = self._ahead if ran_ahead else self._waiting
        mean.add(min(between_seconds, compute_seconds))
