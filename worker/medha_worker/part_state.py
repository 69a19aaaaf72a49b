"""What a part of a replica is at, as it tells its supervisor: one line of sd_notify(3) beside `WATCHDOG=1`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

VARIABLE = b"X_MEDHA_STATE="
"""sd_notify(3) leaves variables that begin with `X_` to the programs."""

Phase = Literal["loading", "calling", "gathering", "meeting", "serving"]
"""Weights are read; the controller is called; others are awaited; groups form and warm up; an epoch runs."""


class PartState(BaseModel):
    """Of one process, at one moment."""

    model_config = ConfigDict(frozen=True)

    phase: Phase
    epoch: int | None = None
    """The epoch in which it meets or serves."""
    detail: str = Field(default="", max_length=500)
    """In words: what is awaited."""
    done: int = 0
    """How much of what it does now is done, of `total`; in one unit, which `detail` names."""
    total: int = 0
    """0 where nothing is counted."""
    unmet_epoch: int | None = None
    """The last epoch in which ranks that had been called together did not find each other."""
    unmet_reason: str = Field(default="", max_length=500)
    refused: str = Field(default="", max_length=500)
    """Why the controller does not let this process take part; empty if it does."""

    def line(self) -> bytes:
        return VARIABLE + self.model_dump_json(exclude_defaults=True).encode()


def read_state(datagram: bytes) -> PartState | None:
    """The state in a datagram, if there is one."""
    for line in datagram.split(b"\n"):
        if line.startswith(VARIABLE):
            try:
                return PartState.model_validate_json(line.removeprefix(VARIABLE))
            except ValidationError:
                return None  # of another version: as if it had said nothing
    return None
