"""State of one sequence inside the controller.

Three counts of token positions say where it stands::

    0 ......... computed ......... dispatched ......... length
      KV is there    in the pipeline       known, not yet dispatched

`length` counts the tokens whose ids exist: the prompt, output resumed from elsewhere, and output drawn
here. The step that dispatches the last known position also draws the next token, so a decoding sequence has
`length - dispatched` equal to 1 when it may run, and 0 while its token is in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

from medha.messages import Submit
from medha.policy import PrefillState
from medha.slo import Targets


@dataclass(slots=True)
class Request:
    submit: Submit
    arrival: float  # on the controller's clock, age already taken off
    targets: Targets
    work_seconds: float  # predicted prefill, alone
    is_long: bool
    length: int
    limit_tokens: int  # prompt plus output may not pass it
    dispatched: int = 0
    computed: int = 0
    emitted: int = 0  # tokens drawn here
    steps_in_flight: int = 0
    ended: bool = False  # no more steps; KV waits in quarantine for those in flight

    @property
    def id(self) -> str:
        return self.submit.id

    @property
    def is_decoding(self) -> bool:
        """Its prefill is over: every further step computes one token."""
        return self.emitted > 0

    @property
    def runnable_tokens(self) -> int:
        """Positions that a step may take now."""
        return 0 if self.ended else self.length - self.dispatched

    def prefill_state(self, remaining_seconds: float) -> PrefillState:
        return PrefillState(self.arrival, self.targets.ttft_seconds, self.work_seconds, remaining_seconds)
