"""State that a part of a replica reports to its supervisor: one line of sd_notify(3) beside `WATCHDOG=1`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

VARIABLE = b"X_MEDHA_STATE="
"""Name of the variable; sd_notify(3) reserves names that begin with `X_` for applications."""

Phase = Literal["loading", "calling", "gathering", "rendezvous", "serving"]
"""Phases: read weights, call the controller, wait for other ranks, form groups and warm up, serve."""


class PartState(BaseModel):
    """The state of one process at one moment."""

    model_config = ConfigDict(frozen=True)

    phase: Phase
    epoch: int | None = None
    """Epoch of the rendezvous or of serving."""
    detail: str = Field(default="", max_length=500)
    """Text about what the part waits for or does."""
    done: int = 0
    """Completed part of `total`, in the unit that `detail` names."""
    total: int = 0
    """Amount of the current work; 0 if it is not counted."""
    failed_epoch: int | None = None
    """Last epoch whose rendezvous failed."""
    failed_reason: str = Field(default="", max_length=500)
    refused: str = Field(default="", max_length=500)
    """Reason why the controller does not let this process take part; empty if it does."""

    def line(self) -> bytes:
        return VARIABLE + self.model_dump_json(exclude_defaults=True).encode()


def read_state(datagram: bytes) -> PartState | None:
    """Return the state in a datagram; None if it has no valid one."""
    for line in datagram.split(b"\n"):
        if line.startswith(VARIABLE):
            try:
                return PartState.model_validate_json(line.removeprefix(VARIABLE))
            except ValidationError:
                return None  # from another version: ignored
    return None
