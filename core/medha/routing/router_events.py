"""The events that a router's core takes, and the commands that it returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from medha.api.declared import DeclaredModel
from medha.routing.prefix_memory import Prefix
from medha.wire.messages import (
    Announce,
    Cancel,
    Emit,
    Failed,
    FetchBundle,
    FinishReason,
    Heartbeat,
    PromptLogprobs,
    Refused,
    Sampling,
    Submit,
    Tick,
    TokenLogprob,
)

# --- events ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence to generate; the driver holds the token ids of `prompt`."""

    id: str
    prompt: str
    prompt_length: int
    seed: int
    sampling: Sampling = field(default_factory=Sampling)
    sample_index: int = 0
    prefix: Prefix = ()  # marks of the prompt (`prefix_memory`); empty: no replica is preferred for its cache


@dataclass(frozen=True, slots=True)
class Arrive:
    """The sequences of one client request (`n` samples of each of its prompts)."""

    model: str
    digest: str  # digest of the bundle that the prompts were tokenised with
    sequences: tuple[NewSequence, ...]
    service_class: str = "default"
    deadline_after_seconds: float | None = None
    tpot_target_seconds: float | None = None
    cache_salt: str = ""  # the prompts share KV only with prompts of the same salt
    owner: str = ""  # as in `Submit`

    @property
    def has_grammar(self) -> bool:
        """True if the outputs follow a grammar: the sequences differ in their prompts and seeds only."""
        return bool(self.sequences[0].sampling.grammar)


@dataclass(frozen=True, slots=True)
class Abandon:
    """The rest of this sequence is not needed: its client has gone, or a stop string was found."""

    id: str
    outcome: Literal["cancelled", "stop"] = "cancelled"


@dataclass(frozen=True, slots=True)
class Received:
    """A message from a replica."""

    replica: str
    message: Announce | Heartbeat | Refused | Emit | Failed


@dataclass(frozen=True, slots=True)
class BundleKnown:
    """The bundle of this digest is loaded, so its replicas can be used."""

    digest: str


@dataclass(frozen=True, slots=True)
class LinkLost:
    """A replica cannot be reached any more."""

    replica: str


@dataclass(frozen=True, slots=True)
class Declared:
    """The models that manifests name now; each list replaces the one before."""

    models: tuple[DeclaredModel, ...]


@dataclass(frozen=True, slots=True)
class ServedElsewhere:
    """Tokens of an owner at another router, since that router's last report."""

    owner: str
    tokens: int


RouterEvent = Arrive | Abandon | Received | BundleKnown | LinkLost | Declared | ServedElsewhere | Tick

# --- commands ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendPrompt:
    """Send the ids of the driver's prompt `source`, then `emitted`, to a replica under the name `prompt`."""

    replica: str
    prompt: str
    source: str
    emitted: tuple[int, ...] = ()
    sequences: int = 1  # number of `Submit`s that name it in the same pass
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Send:
    replica: str
    message: Submit | Cancel | FetchBundle
    ahead_seconds: float = 0.0
    """Prefill that is expected to go before a `Submit` there, by the policy of the replica, seconds per lane."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """Output tokens for the client, each exactly once and in order."""

    id: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    cached_tokens: int = 0  # as in `Emit`
    prompt_logprobs: PromptLogprobs | None = None  # as in `Emit`


FailureKind = Literal[
    "invalid",
    "too_long",
    "model_not_found",
    "overloaded",
    "unavailable",
    "out_of_memory",
    "grammar_late",
    "internal",
]


@dataclass(frozen=True, slots=True)
class Fail:
    """The sequence ends with an error; nothing follows."""

    id: str
    kind: FailureKind
    detail: str
    retry_after_seconds: int | None = None


@dataclass(frozen=True, slots=True)
class Reject:
    """A replica is not used; goes to the log."""

    replica: str
    reason: str


@dataclass(frozen=True, slots=True)
class DropBundle:
    """Nothing needs the bundle of this digest any more; a replica that announces it later sends it again."""

    digest: str


@dataclass(frozen=True, slots=True)
class Move:
    """A sequence leaves `replica`, which has computed its prompt, and goes on at another one; its `Submit` follows."""

    id: str
    replica: str


@dataclass(frozen=True, slots=True)
class Notice:
    """A change in who serves a model; goes to the log."""

    text: str
    is_warning: bool = True


RouterCommand = SendPrompt | Send | Deliver | Fail | Reject | DropBundle | Move | Notice
