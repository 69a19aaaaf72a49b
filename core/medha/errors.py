"""The error classes of Medha. Each class says who can fix what it reports.

An error's text names the field, the value and the fix, because its reader rarely wrote the code. `assert` is
for our own bugs; everything that a user, an operator or a file can get wrong raises one of these.
"""

from typing import ClassVar


class MedhaError(Exception):
    """Base class of all errors; never raised itself."""

    exit_status: ClassVar[int] = 1
    """Exit status of a process that ends because of it."""


class ConfigInvalid(MedhaError):
    """A manifest, a flag or a setting is wrong. Fixed by its author."""


class ModelUnsupported(MedhaError):
    """A checkpoint needs something that is not implemented. Fixed by choosing another model or setting."""


class CheckpointInvalid(MedhaError):
    """A checkpoint directory is incomplete or contradicts itself. Fixed by fetching it again."""


class RequestInvalid(MedhaError):
    """A request asks for something impossible. Fixed by the client.

    `param` names the offending field as OpenAI's error object does, `code` is its machine-readable reason.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


DROP_REASONS = {
    "header": "no frame, or one that is no JSON object",
    "version": "of a version that is not read here",
    "type": "of an unknown type",
    "frames": "with a frame too many or too few",
    "fields": "with a field that is missing, of the wrong type or out of range",
    "size": "with a frame that is too large",
    "payload": "with a raw frame that ends within a token id",
    "unexpected": "of a type that does not belong on this link",
    "peer": "from a peer that may not send it",
    "state": "of the right form, but contradicting what is known",
}
"""Reasons why messages are dropped, and their meaning in the metrics."""


class WireInvalid(MedhaError):
    """A peer sent a message that is unreadable or out of place. It is dropped and counted; the peer has to be fixed.

    `reason` is the label that it is counted under (`DROP_REASONS`).
    """

    def __init__(self, message: str, *, reason: str = "state") -> None:
        super().__init__(message)
        self.reason = reason


class OutOfMemory(MedhaError):
    """Weights, activations and KV do not fit. Fixed by a smaller model, a shorter maxModelLen or more memory."""


class AcceleratorMissing(MedhaError):
    """The accelerator that a replica asks for is not there, or this build cannot use it. Fixed on the node, in the
    image, or in spec.resources.accelerator.

    Its exit status marks it from a rank's process up to the pod's container, where the operator reads it.
    """

    exit_status = 69  # EX_UNAVAILABLE of sysexits.h


class PartFailed(MedhaError):
    """A process of the replica failed or never became ready. Its log, which the text quotes, says why."""


class LedgerMismatch(PartFailed):
    """A rank cannot carry out a decision of the controller on its ledger, so the two have diverged."""
