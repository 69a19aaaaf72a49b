"""What the processes of Medha say to each other, and what the controllers decide.

Every message is a frozen dataclass. A message is an *event* for who receives it and a *command* for
who sends it, so there is one set of names, not two. `frames.py` turns messages into frames.

Rules that hold for all of them:

* Only durations cross process borders (`age_seconds`, `deadline_after_seconds`), never clock readings.
* Token ids never travel inside a message. They travel as raw int32 frames behind `Tokens`, on a socket
  of their own, under the name of a *prompt*; requests that sample the same prompt share that name.
* A step message carries ids and counts, so its size does not grow with the context.
* Fields are only ever added, with a default; a peer ignores the fields that it does not know.

The life of a request, as messages::

    router                     controller                     ranks
      Tokens, Submit  ------->
                               Tokens, Step(admits, entries) --->
                               <--- StageFree, Done(samples)
      <------- Emit, Emit, Emit(finish_reason)
      Cancel  ------->         Step(releases, forgets) --->
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from medha.shards import Deal, Segment

FinishReason = Literal["stop", "length"]
"""Why a replica ends a request: a stop token id was sampled, or a limit of tokens was reached."""

RefusalReason = Literal["capacity", "too_long", "draining", "not_ready", "unknown_class", "invalid"]
"""Why a replica does not take a request. `capacity`, `draining` and `not_ready` may succeed elsewhere or later."""

FailureReason = Literal["out_of_memory", "not_finite", "rank_lost", "internal"]
"""Why a replica ends a request that it had taken, without it being the client's doing. `not_finite`: the model's numbers
are no numbers any more."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the last stage draws tokens for one sequence, and when it stops.

    Sampling is keyed by (seed, sample, position), so a sequence resumed elsewhere draws the same tokens.
    `max_tokens` and `min_tokens` count output tokens from the *original* prompt on (`prompt_length`), so they
    stay the same when a request is resumed. Stop strings are the router's business (DESIGN §4).
    """

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)  # token id -> added to its logit
    logprobs: int | None = (
        None  # None: none are returned; k: the sampled token's and the k most probable ones'
    )
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's EOS ids
    ignore_eos: bool = False  # the model's EOS ids do not stop the sequence
    min_tokens: int = 0  # until then no stop token may be drawn
    max_tokens: int | None = None  # None: until EOS, maxModelLen or the end of unreserved KV


# --- router -> replica -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids `offset .. offset + len(frame)` of `prompt`; a raw little-endian int32 frame follows."""

    prompt: str
    offset: int
    total: int  # token ids that the whole prompt has
    sequences: int = 1  # requests that will name this prompt: it is kept until all of them have come
    epoch: int = 0  # from a controller to its ranks: those of another epoch are not for them
    cache_salt: str = ""  # from a router, with the first ids: the prompt shares KV under this salt only


@dataclass(frozen=True, slots=True)
class Submit:
    """One sequence to generate. The ids of its `tokens` tokens come ahead of it, as `Tokens` named `prompt`.

    `prompt_length` separates the user's prompt from output that an earlier epoch or another replica
    already produced: `tokens - prompt_length` output tokens are resumed, not generated again.
    """

    id: str
    prompt: str
    tokens: int
    prompt_length: int
    seed: int
    sample_index: int = 0
    age_seconds: float = 0.0  # since the request reached the router
    deadline_after_seconds: float | None = None  # TTFT target counted from arrival; None: by service class
    tpot_target_seconds: float | None = None  # None: by service class
    service_class: str = "default"
    sampling: Sampling = field(default_factory=Sampling)
    block_hashes: str = ""  # of the prompt's whole blocks (`medha.kv.prefix_cache`); the replica's own, whatever the router sends


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client has gone, or a stop string was found: end the request and free what it holds."""

    id: str


@dataclass(frozen=True, slots=True)
class FetchBundle:
    """The router does not know the bundle (tokenizer, chat template, ...) of this digest: send it."""

    digest: str


# --- replica -> router -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServiceClassTerms:
    """What a router must know of a service class to apply it (DESIGN §5)."""

    name: str
    ttft_floor_seconds: float
    ttft_factor: float
    tpot_target_seconds: float
    tpot_floor_seconds: float
    default_output_tokens: int


@dataclass(frozen=True, slots=True)
class Announce:
    """A replica's address card and load, sent at start, on change and as a heartbeat."""

    replica: str
    model: str
    digest: str  # of the bundle; replicas of one model name with different digests are never mixed
    epoch: int
    ready: bool
    draining: bool
    max_model_len: int
    vocab_size: int
    kv_tokens_total: int
    kv_tokens_free: int  # not reserved by any admitted request
    running: int
    waiting: int
    pending_prefill_seconds: float
    longest_request_tokens: int  # that the KV pool can hold
    waiting_limit: int  # requests the replica queues before it refuses with `capacity`
    service_classes: tuple[ServiceClassTerms, ...] = ()
    prefill_points: tuple[tuple[int, float], ...] = ()  # (tokens, seconds alone) of some prompts, ascending


@dataclass(frozen=True, slots=True)
class BundlePart:
    """One file of a bundle; its bytes follow as a raw frame. `remaining` counts the parts still to come."""

    digest: str
    name: str
    remaining: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The request was not taken; the router requeues it with its original age, or tells the client why."""

    id: str
    reason: RefusalReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one sampled token, and of the most probable ones at its position."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Emit:
    """Output tokens of a request, in order. A stop token id, if one ended it, is the last of `tokens`."""

    id: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    cached_tokens: int = 0  # prompt tokens whose KV was there already; told with the first output token


@dataclass(frozen=True, slots=True)
class Failed:
    """The replica had to end a request that it had taken; what was emitted stays valid."""

    id: str
    reason: FailureReason
    detail: str = ""


# --- controller -> ranks -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """`count` remembered blocks of a lane's pool, of which `last` is the last: each was published behind the one before."""

    last: int
    count: int
    lane: int = 0


@dataclass(frozen=True, slots=True)
class Eviction:
    """Remembered blocks of a lane are given up: the least recently used of those that no running sequence uses.

    They are all that were last used before `used_before`, counted in releases on the lane, and of the branch that was
    last used then the `count` blocks that end with `last`.
    """

    used_before: int
    last: int
    count: int
    lane: int = 0


@dataclass(frozen=True, slots=True)
class Publish:
    """Blocks `start .. start + count` of a sequence's table on `lane` are remembered as a cached prefix.

    Their KV is computed. They follow the remembered block `after`, which may be another sequence's of the same tokens
    (-1: they begin a prompt). None: the sequence uses from now on what leads to `after`, `start` blocks in all. They stay
    when it is released, until an admit or a grow evicts them.
    """

    id: str
    start: int
    count: int
    lane: int = 0
    after: int = -1


@dataclass(frozen=True, slots=True)
class Admit:
    """A sequence starts to hold KV: every rank reserves `reserved_tokens` for it in the same order.

    `fork_of` names a running sequence of the same prompt: its first `shared_tokens` tokens of KV are shared,
    whole blocks by reference and the rest of the last block by copy. `segments` or, if these were many, `deals` say
    which lane holds what (neither: all on lane 0); `evictions` are remembered blocks to be given up first, and `prefixes`
    those that begin the table of each lane: together the KV of the first `cached_tokens` tokens. Of a fork they are what
    of the shared tokens is cached.
    """

    id: str
    prompt: str
    tokens: int
    prompt_length: int
    seed: int
    sampling: Sampling
    reserved_tokens: int
    sample_index: int = 0
    fork_of: str | None = None
    shared_tokens: int = 0
    segments: tuple[Segment, ...] = ()
    cached_tokens: int = 0
    prefixes: tuple[CachedPrefix, ...] = ()
    evictions: tuple[Eviction, ...] = ()
    deals: tuple[Deal, ...] = ()


@dataclass(frozen=True, slots=True)
class Grow:
    """A sequence's reservation grows to `reserved_tokens`, once the remembered blocks of `evictions` are given up.

    `segments`, or `deals` if these were many, replace those of its shard map from the first one's start on (neither: it
    stays on one lane).
    """

    id: str
    reserved_tokens: int
    segments: tuple[Segment, ...] = ()
    evictions: tuple[Eviction, ...] = ()
    deals: tuple[Deal, ...] = ()


@dataclass(frozen=True, slots=True)
class Extent:
    """`count` token positions `start, start + stride, ...` of a sequence."""

    start: int
    count: int
    stride: int = 1


@dataclass(frozen=True, slots=True)
class StepEntry:
    """The part of one sequence in a step: which positions it computes, where, and whether it then samples.

    `strategy` names how attention over several lanes is computed; `local` is one lane's own KV.
    `shard_map_version` says which shard map of the sequence the step was planned with, unless it is `local`: a rank that
    has another one ends the epoch.
    """

    id: str
    lane: int
    extents: tuple[Extent, ...]
    samples: bool
    strategy: str = "local"
    shard_map_version: int = 0

    @property
    def token_count(self) -> int:
        return sum(extent.count for extent in self.extents)


@dataclass(frozen=True, slots=True)
class Step:
    """One batch. Ranks apply, in this order: publishes, releases, forgets, grows, admits; then they run the entries.

    The controller applies the same operations to its own ledgers in the same order, so that the ledgers agree. For
    that, every rank is sent every step and applies what concerns its lane; the entries are run by `lanes` alone.
    """

    step_id: int
    epoch: int
    entries: tuple[StepEntry, ...]
    releases: tuple[str, ...] = ()  # sequences whose KV is free from here on
    forgets: tuple[str, ...] = ()  # prompts whose token ids are needed no more
    grows: tuple[Grow, ...] = ()
    admits: tuple[Admit, ...] = ()
    predicted_seconds: float = 0.0
    state_hash: int | None = None  # of ledger and shard maps once all of these are applied; None: unchecked
    lanes: tuple[int, ...] = (0,)  # that run the entries in lock-step, because they share requests
    publishes: tuple[Publish, ...] = ()  # computed blocks that are remembered from here on
    state_hashes: tuple[int, ...] = ()  # instead of `state_hash` if there are several lanes


@dataclass(frozen=True, slots=True)
class Meet:
    """A new epoch begins: every rank drops what it was doing, and all requests, and meets the others.

    `rendezvous` is where ranks meet for the data plane, `tcp://host:port`; empty where there is one rank.
    """

    epoch: int
    rendezvous: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """For the next `seconds` seconds, say in `TracePart`s what every step took; 0 ends it. Sent anew in each epoch."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Finish the step that runs and exit with status 0; `refused`: another process has taken this rank's place."""

    reason: str = ""
    refused: bool = False


# --- ranks -> controller -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepProfile:
    """What the warm-up steps of a rank took (seconds): constants, and curves that stand for them where measured."""

    step_seconds: float  # any step, however small
    linear_seconds_per_token: float
    attention_seconds_per_pair: float  # one query token against one KV token
    sequence_seconds: float  # each sequence of a step, for its own attention call and sampling
    token_points: tuple[tuple[int, float], ...] = ()  # (tokens of a step, seconds of all linear layers)
    query_points: tuple[tuple[int, float], ...] = ()  # (queries of a sequence, seconds for each of its keys)


@dataclass(frozen=True, slots=True)
class RankHello:
    """A rank is here and has its weights; said again every second, unless it runs a step or meets the others.

    Another `incarnation` under the same number means that the process was replaced.
    """

    rank: int
    incarnation: str
    last_epoch: int | None = None
    """The last epoch in which this place of the grid took part, as its pod remembers; None in a new pod."""
    revision: str = ""
    """Which pods of its replica it belongs to; empty: not told, as by an earlier release or outside of a cluster."""
    dropped: tuple[tuple[str, str, int], ...] = ()
    """(link, reason, messages) that this process has dropped since it began; on the link `control` alone."""


@dataclass(frozen=True, slots=True)
class RankReady:
    """A rank has met the others, has its KV pool, and has run its warm-up steps."""

    rank: int
    block_size_tokens: int
    kv_blocks: int
    weights_bytes: int
    activation_bytes: int
    kv_bytes: int
    profile: StepProfile
    device: str
    max_model_len: int
    vocab_size: int
    linear_flops_per_token: float  # of the whole model: 2 * parameters that a token passes
    attention_flops_per_pair: float  # of the whole model: 4 * layers * heads * head dim
    load_seconds: float = 0.0
    epoch: int = 0
    query_heads: int = 0  # of the whole model; 0: not told
    kv_heads: int = 0
    element_bytes: int = 4  # of a key or value in memory
    link_bytes_per_second: float = 0.0  # between this rank and its like in another lane; 0: not measured


@dataclass(frozen=True, slots=True)
class StageFree:
    """A stage has finished its part of a step and can take the next one, on every lane of the step."""

    step_id: int
    stage: int
    lanes: tuple[int, ...] = (0,)
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """The token that the last stage drew for one sequence."""

    id: str
    token: int
    finish_reason: FinishReason | None = None
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class EntryFailed:
    """One entry of a step could not be computed; the others were."""

    id: str
    reason: FailureReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Done:
    """The last stage has finished a step, on every lane of the step."""

    step_id: int
    samples: tuple[Sample, ...] = ()
    failures: tuple[EntryFailed, ...] = ()
    compute_seconds: float = 0.0
    lanes: tuple[int, ...] = (0,)
    epoch: int = 0
    block_hashes: tuple[
        tuple[str, str], ...
    ] = ()  # (request, hash) of blocks that samples filled; by the controller's process, not by ranks


@dataclass(frozen=True, slots=True)
class RankFault:
    """A rank cannot go on: its process ends after this message, or it has lost others and waits for `Meet`."""

    rank: int
    detail: str
    lost_epoch: int | None = None  # the epoch that it cannot go on with; None: its process ends


@dataclass(frozen=True, slots=True)
class MemoryRanOut:
    """A rank has too little memory for some rows of a step; they take part in it as NaN. Sent before the step can end."""

    rank: int
    step_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What one rank did in one step: times in seconds since its machine was started."""

    step_id: int
    started: float
    ended: float
    spans: tuple[
        tuple[str, float, float], ...
    ] = ()  # (what, from, until), in order: receive, send, forward, ...
    waits: tuple[tuple[str, float], ...] = ()  # (for what, seconds altogether): too many to name each


@dataclass(frozen=True, slots=True)
class TracePart:
    """Steps that a rank was asked to trace.

    `clock_seconds` is the time at which it was sent, as those in `steps`: since `machine` was started. For who is on
    the same machine that is the same clock (Linux: CLOCK_MONOTONIC); others estimate the difference from when parts
    come.
    """

    rank: int
    epoch: int
    machine: str
    clock_seconds: float
    steps: tuple[StepTimes, ...] = ()
    left_out: int = 0  # steps that were not kept, because there were too many


@dataclass(frozen=True, slots=True)
class Readiness:
    """What a controller writes into its ready file, once all ranks are ready and it serves."""

    ranks: tuple[RankReady, ...]
    metrics_url: str


# --- inside a controller ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed, and nothing else: expiry and time-outs are looked at."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no new request; end the running ones."""


ControllerEvent = Submit | Cancel | StageFree | Done | Drain
ControllerCommand = Step | Emit | Refused | Failed

Message = (
    Tokens | Submit | Cancel | FetchBundle | Announce | BundlePart | Refused | Emit | Failed
    | Meet | Step | Trace | Shutdown | RankHello | RankReady | StageFree | Done | RankFault | MemoryRanOut
    | TracePart
)  # fmt: skip
"""Everything that crosses a process border."""
