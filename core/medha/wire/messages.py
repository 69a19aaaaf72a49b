"""The messages between the processes of Medha, and the commands of the controllers.

Every message is a dataclass that nobody changes once it is made. A message is an *event* for its receiver and
a *command* for its sender, so there is one set of names, not two. `frames.py` turns messages into frames.
Most messages are frozen. Those of which a decision makes dozens are not, because a frozen one takes ten times
as long to make: `python benchmarks/scheduler.py` with 256 decodes shows the difference.

Rules for all of them:

* Only durations cross process borders (`age_seconds`, `deadline_after_seconds`), never clock readings. The one exception is
  `HostLoad.due`, which ranks only compare with each other.
* Token ids never travel inside a message. They travel as raw int32 frames after `Tokens`, on a socket of
  their own, under the name of a *prompt*; requests that sample the same prompt share that name.
* A step message carries ids and counts, so its size does not grow with the context.
* Fields are only ever added, with a default; a peer ignores fields that it does not know.

The life of a request, as messages::

    router                     controller                     ranks
      Tokens, Submit  ------->
                               Tokens, Step(admits, entries) --->
                               <--- StageFree, Done(samples)
      <------- Emit, Emit, Emit(finish_reason)
      Cancel  ------->         Step(releases, forgets) --->

A replica may have several routers. Each has its own requests there, and all hear the replica's announcements.
Routers open no connections to each other: replicas pass on what one has to say to the others (`RouterUse`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from medha.shards import Segment, Striping

HEARTBEAT_SECONDS = 0.5
"""Seconds between two heartbeats of a replica; a router counts it as lost after several without one."""

BEATS = b"/beats"
"""Suffix of a control link's identity in the identity of its heartbeats' connection."""

FinishReason = Literal["stop", "length"]
"""Reason why a replica ends a request: a stop token id was sampled, or a token limit was reached."""

RefusalReason = Literal["capacity", "too_long", "draining", "not_ready", "unknown_class", "invalid"]
"""Reason why a replica refuses a request. `capacity`, `draining` and `not_ready` may succeed elsewhere or later."""

FailureReason = Literal["out_of_memory", "not_finite", "rank_lost", "internal", "grammar", "grammar_late"]
"""Reason why a replica ends an accepted request. `not_finite`: the model's outputs are NaN or infinite. `grammar`: the
request's grammar takes too much time or memory to follow. `grammar_late`: it was not compiled in time, perhaps because of
other requests' grammars. All but `grammar` are through no fault of the client."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one sequence, and when it stops.

    Sampling is keyed by (seed, sample, position), so a sequence that is resumed elsewhere samples the same
    tokens. `max_tokens` and `min_tokens` count output tokens from the *original* prompt on (`prompt_length`),
    so they stay the same when a request is resumed. The router handles stop strings.
    """

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)  # token id -> added to its logit
    logprobs: int | None = None  # k: of the sampled token and the k most probable ones; None: of none
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's EOS ids
    ignore_eos: bool = False  # the model's EOS ids do not stop the sequence
    min_tokens: int = 0  # no stop token is sampled before
    max_tokens: int | None = None  # None: until EOS, maxModelLen or the end of the KV pool
    prompt_logprobs: int | None = None
    """None: none are returned; k: those of the prompt's tokens and of the k most probable ones. The whole prompt is then
    computed, whatever is cached of it, so such a sequence has a prompt of its own."""
    grammar: str = ""
    """Grammar of the output in the form that llguidance reads (docs/structured-output.md); empty: any text. In an `Admit`
    it is the name of a `CompileGrammar` that was sent before."""


# --- router -> replica -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids `offset .. offset + len(frame)` of `prompt`; a raw little-endian int32 frame follows."""

    prompt: str
    offset: int
    total: int  # number of token ids of the whole prompt
    sequences: int = 1  # requests that will name this prompt; it is kept until all of them have arrived
    epoch: int = 0  # from a controller to its ranks, which ignore ids of another epoch
    cache_salt: str = ""  # from a router, with the first ids: the prompt shares KV only under this salt


@dataclass(frozen=True, slots=True)
class Submit:
    """A sequence to generate. The ids of its `tokens` tokens are sent ahead of it, as `Tokens` named `prompt`.

    `prompt_length` separates the user's prompt from output that an earlier epoch or another replica already
    produced: `tokens - prompt_length` output tokens are resumed, not generated again.
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
    block_hashes: str = ""  # of the prompt's whole blocks (`medha.kv.prefix_cache`); set by the replica only
    owner: str = ""  # opaque; requests of one owner compete as one (`medha.scheduler.owner_turns`)
    trace: str = ""  # W3C `traceparent` of this attempt, a space and `tracestate`; empty: it is not traced. No decision reads it
    contested_seconds: float = 0.0  # of the deadlines within this time, its router cannot meet all; 0: it can
    peer: str = ""  # another replica, which is thought to have the KV of the first `peer_tokens` tokens; empty: none is
    peer_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client has gone, or a stop string was found: end the request and free what it holds.

    If it `moves`, it goes on at another replica, which may ask for its KV. A replica that drains waits for that, until the
    same request is cancelled once more.
    """

    id: str
    moves: bool = False


@dataclass(frozen=True, slots=True)
class FetchBundle:
    """The router does not know the bundle (tokenizer, chat template, ...) of this digest and asks for it."""

    digest: str


@dataclass(frozen=True, slots=True)
class WatchProgress:
    """Somebody watches this router: report the progress of requests for `seconds` seconds."""

    seconds: float


# --- replica -> router -> another replica of its model ---------------------------------------------------
#
# Only these small messages go by way of a router. The KV itself goes from rank to rank.


@dataclass(frozen=True, slots=True)
class KvAsk:
    """A replica asks `source` for the KV of a prompt."""

    id: str  # of the request that waits for it
    source: str
    identity: str  # digest of all that the content of the asker's KV depends on
    tokens: int
    hashes: str  # of the prompt's whole blocks; replicas that hand KV over make them with the same key
    is_long: bool = False  # it may lie on several lanes
    asker: str = ""  # set by the router
    ticket: str = ""  # set by the source: the name of what it will offer, which nobody can guess


@dataclass(frozen=True, slots=True)
class KvPart:
    """The KV of blocks with these hashes, in order of the prompt.

    If a ticket has several parts on a lane, the lane's ranks give the blocks of all of them, one part after the other.
    """

    lane: int
    hashes: str


@dataclass(frozen=True, slots=True)
class KvTicket:
    """The answer to a `KvAsk`: ranks that show the ticket get the blocks of `parts` for a while.

    Without a ticket, nothing is offered, because of `reason`.
    """

    id: str
    asker: str
    ticket: str = ""
    parts: tuple[KvPart, ...] = ()
    ranks: tuple[PeerFigures, ...] = ()  # of the source, in order
    reason: str = ""
    source: str = ""  # set by the router


@dataclass(frozen=True, slots=True)
class KvDone:
    """The asker needs nothing more of what a ticket offers."""

    ticket: str
    source: str
    asker: str = ""  # set by the router


# --- router -> replica -> other routers --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeyUse:
    """The use of an API key by the clients of one router, since the router last knew the key to be idle.

    The levels are those of the key's buckets (`medha.routing.key_limits`), filled by the clients of all routers.
    """

    key: str
    begun: int  # number of the report in which the totals began
    requests: int
    tokens: int
    open_requests: int
    requests_level: float = 0.0
    tokens_level: float = 0.0


@dataclass(frozen=True, slots=True)
class RouterUse:
    """A router's report of every API key that is not idle; a replica passes it on to its other routers."""

    router: str  # differs between two processes
    number: int  # counts the router's reports, from 1; one may arrive several times, or after a later one
    keys: tuple[KeyUse, ...] = ()


@dataclass(frozen=True, slots=True)
class RouterLost:
    """A replica has lost its connection to a router, and with it the router's requests."""

    router: str


# --- replica -> router -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServiceClassTerms:
    """The terms of a service class that a router needs to apply it."""

    name: str
    ttft_floor_seconds: float
    ttft_factor: float
    tpot_target_seconds: float
    tpot_floor_seconds: float
    default_output_tokens: int
    max_wait_seconds: float | None = None  # longest predicted wait for the prefill to begin; None: any
    expected_output_tokens: int = 0
    """Output that the replica expects of a request, and reserves KV for; 0: it reserves all of `max_tokens`."""


@dataclass(frozen=True, slots=True)
class LaneLoad:
    """The load of one lane."""

    kv_tokens_free: int  # that a request which arrives could get: neither reserved nor held for growth
    pending_prefill_seconds: float  # prefills that hold KV, and steps in flight


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """The policy by which a replica orders prefills, for routers that order by the same one.

    The defaults are those of a replica of an earlier release, which announces none.
    """

    policy: str = "lrs"
    lars_denominator: str = "work"
    demoted_share: float = 0.1
    grace_seconds: float = 0.5  # longest step of a stage


@dataclass(frozen=True, slots=True)
class Announce:
    """A replica's identity and load, sent at start, on change, and at least every second (beside `Heartbeat`)."""

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
    # Prompt and output together: `max_model_len`, or less if KV for so many tokens has no place.
    longest_request_tokens: int
    waiting_limit: int  # requests the replica queues before it refuses with `capacity`
    service_classes: tuple[ServiceClassTerms, ...] = ()
    prefill_points: tuple[tuple[int, float], ...] = ()  # (prompt tokens, seconds of prefill alone), ascending
    lanes: tuple[LaneLoad, ...] = ()  # by lane; empty in an earlier release
    tokens_per_lane: int = 0  # prompt tokens of one request, before the next lane joins; 0: no limit
    order: PolicyTerms = PolicyTerms()
    work_ahead: tuple[tuple[float, float], ...] = ()
    """Points (key, seconds), ascending: the pending prefill seconds, of all lanes together, of requests whose
    key of the policy is at most that. Keys of `fcfs`, `edf` and `guarded` are relative to now."""
    reports_progress: bool = False  # it understands `WatchProgress`
    follows_grammars: bool = False  # it reads `Sampling.grammar`; an earlier release samples any text
    ends_texts: bool = True  # the model has a token that ends a text, without which it can follow no grammar
    kv_dtype: str = "auto"  # spec.kvCache.dtype; a request resumes where it is the same, if it can
    hands_kv_over: bool = False  # it gives KV to other replicas of its model, and takes theirs (`KvAsk`)
    kv_identity: str = ""  # digest of all that its KV depends on; no KV is handed over if it differs
    read_seconds: float = 0.0  # predicted for each read of another replica's KV, however small
    read_seconds_per_token: float = 0.0  # beyond that, until the tokens are on its device
    drain_seconds: float | None = None  # until it returns what has not ended; None: it gives no KV then
    role: str = "both"  # spec.role: `prefill`, `decode` or `both` (`medha.routing.roles`)
    kv_tokens_wanted: int = 0  # free KV that the waiting requests need, all together
    routers: int = 1  # those that it serves now, among which the clients of its model are divided


@dataclass(frozen=True, slots=True)
class ChunkProgress:
    """A chunk of a request's prompt that a step has computed; `is_first`: the step admitted the request."""

    id: str
    tokens: int
    lane: int
    is_first: bool = False


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """A report of what an event of a replica did to requests, of whatever router: a step's chunks, and steps aside.

    It is sent ahead of the output of the same event, to routers that watch (`WatchProgress`).
    """

    chunks: tuple[ChunkProgress, ...] = ()
    began_seconds: float = 0.0  # time since the step of `chunks` was launched
    stepped_aside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The controller lives. Sent on a connection of its own, whose identity is the control link's and `BEATS`."""


@dataclass(frozen=True, slots=True)
class BundlePart:
    """A file of a bundle; its bytes follow as a raw frame. `remaining` counts the parts still to come."""

    digest: str
    name: str
    remaining: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The request was not accepted; the router requeues it with its original age, or reports the reason."""

    id: str
    reason: RefusalReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one sampled token, and of the most probable ones at its position."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Natural-log probabilities of a prompt's tokens at the positions of `extents`, each given all tokens before it.

    One number for each position, in the order of the extents; the most probable tokens of a position follow those of the
    position before, and there are equally many of each.
    """

    extents: tuple[Extent, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]  # of the token among all tokens; 1 is the most probable one
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()

    @property
    def alternatives(self) -> int:
        """Number of most probable tokens at each position."""
        return len(self.top_ids) // len(self.logprobs) if self.logprobs else 0


@dataclass(slots=True, unsafe_hash=True)  # made often: benchmarks/scheduler.py
class Emit:
    """Output tokens of a request, in order. If a stop token id ended the request, it is the last of `tokens`."""

    id: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    cached_tokens: int = 0  # whose KV was cached or read; sent with its first output token here
    prompt_logprobs: PromptLogprobs | None = None  # of all positions but the first; sent with that token


@dataclass(frozen=True, slots=True)
class Failed:
    """The replica had to end an accepted request; what was emitted stays valid."""

    id: str
    reason: FailureReason
    detail: str = ""


# --- controller -> ranks -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """A chain of `count` cached blocks in a lane's pool, each inserted after the one before, ending with `last`."""

    last: int
    count: int
    lane: int = 0


@dataclass(frozen=True, slots=True)
class HostDrop:
    """The host tier of a lane forgets an extent, but for its first `keep` blocks."""

    extent: int
    keep: int = 0


@dataclass(frozen=True, slots=True)
class Offload:
    """Evicted blocks are copied to the host tier: the last `count` of the cached prefix that ends with `last`.

    They become the tier's next extent (`medha.kv.host_tier`).
    """

    last: int
    count: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Blocks `start .. start + count` of an extent in the host tier of a lane are copied to blocks of a sequence."""

    extent: int
    start: int
    count: int
    lane: int = 0


@dataclass(frozen=True, slots=True)
class KvFetch:
    """Blocks of host tiers are copied to a sequence: on each lane after its cached prefix and what was copied before.

    Its first entry comes in this step or a later one, once all of its blocks are copied.
    """

    id: str
    blocks: tuple[Fetch, ...]


@dataclass(frozen=True, slots=True)
class HostLoad:
    """`count` blocks become the next extent in the host tier of a lane, once it has carried out `drops`.

    They are read from block `start` of a file on, or from block `start` of what another replica offers with a `ticket`, or
    from block `start` of an object in the store.
    Nothing is fetched from such an extent before all ranks of the lane have reported that it is there. Or they are copied
    from the device: the cached prefix that ends with block `last`. A `count` of 0 stands for drops alone.
    """

    file: str
    start: int
    count: int
    lane: int = 0
    drops: tuple[HostDrop, ...] = ()
    ticket: str = ""
    last: int = -1  # -1: they do not come from the device
    is_stored: bool = False  # `file` is an object of the store that replicas share
    due: float = 0.0
    """Files and objects are read in the order of these times: seconds of the controller's clock."""


@dataclass(frozen=True, slots=True)
class KvServe:
    """Ranks of a lane give these blocks of their host tier, in order, to ranks of another replica that show the ticket."""

    ticket: str
    blocks: tuple[Fetch, ...]
    lane: int = 0


@dataclass(frozen=True, slots=True)
class DiskFile:
    """A file of the disk tier: blocks of one lane, the `start`-th of a prompt there and those after it.

    `name` follows from the hashes (`medha.kv.disk_tier.file_name`). `before` is the hash of the block before the first.
    """

    name: str
    start: int
    hashes: str
    before: str = ""


@dataclass(frozen=True, slots=True)
class DiskWrite:
    """Write blocks of an extent in the host tier to a file: as many as `file` has hashes, from block `first` on."""

    file: DiskFile
    extent: int
    first: int = 0
    lane: int = 0


@dataclass(frozen=True, slots=True)
class DiskDelete:
    """A file of a lane's disk tier is deleted, if it is there."""

    file: str
    lane: int = 0


@dataclass(frozen=True, slots=True)
class StoreWrite:
    """Write blocks of the host tier, in order, to an object of the store that replicas share, unless it is there."""

    object: DiskFile
    blocks: tuple[Fetch, ...]
    lane: int = 0


@dataclass(frozen=True, slots=True)
class Eviction:
    """Evict cached blocks of a lane: the least recently used of those that no running sequence uses.

    These are all blocks last used before `used_before`, counted in releases on the lane, plus the `count`
    blocks that end with `last`, of the branch that was last used at `used_before`. If the lane has a host tier, it
    carries out first `drops`, then `offloads`; each copy reads its blocks before anything writes them.
    """

    used_before: int
    last: int
    count: int
    lane: int = 0
    drops: tuple[HostDrop, ...] = ()
    offloads: tuple[Offload, ...] = ()


@dataclass(frozen=True, slots=True)
class Insert:
    """Blocks `start .. start + count` of a sequence's table on `lane` are inserted into the prefix cache.

    Their KV is computed. They follow the cached block `after`, which may be another sequence's block of the
    same tokens (-1: they begin a prompt). If `count` is 0, the sequence uses from now on the chain of `start`
    blocks that ends with `after`. Cached blocks stay when the sequence is released, until an admit or a grow
    evicts them.
    """

    id: str
    start: int
    count: int
    lane: int = 0
    after: int = -1


@dataclass(slots=True, unsafe_hash=True)  # made often: benchmarks/scheduler.py
class Admit:
    """A sequence starts to hold KV: every rank reserves `reserved_tokens` for it in the same order.

    `fork_of` names a running sequence of the same prompt: its first `shared_tokens` tokens of KV are shared,
    whole blocks by reference and the rest of the last block by copy. `segments`, or `stripings` if there are
    many, give the lane of each position (neither: all on lane 0). `evictions` are cached blocks to evict
    first. `prefixes` are the cached blocks that begin the table of each lane. With what is fetched into the blocks after
    them (`KvFetch`), they hold the KV of the first `cached_tokens` tokens. For a fork, `prefixes` are the cached part of the
    shared tokens. If `device_blocks` is above 0, at most so many blocks on each lane are of its pool, the last ones of its
    table; those before are streamed from host memory.
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
    stripings: tuple[Striping, ...] = ()
    device_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Grow:
    """A sequence's reservation grows to `reserved_tokens`, once the cached blocks of `evictions` are evicted.

    `segments`, or `stripings` if there are many, replace those of its shard map from the first one's start on
    (neither: it stays on one lane).
    """

    id: str
    reserved_tokens: int
    segments: tuple[Segment, ...] = ()
    evictions: tuple[Eviction, ...] = ()
    stripings: tuple[Striping, ...] = ()


@dataclass(slots=True, unsafe_hash=True)  # made often: benchmarks/scheduler.py
class Extent:
    """A sequence's `count` token positions `start, start + stride, ...`."""

    start: int
    count: int
    stride: int = 1

    @property
    def last(self) -> int:
        return self.start + (self.count - 1) * self.stride


@dataclass(slots=True, unsafe_hash=True)  # made often: benchmarks/scheduler.py
class StepEntry:
    """The part of a sequence in a step: the positions it computes, the lane, and whether it then samples.

    `strategy` names how attention over several lanes is computed; `local` is one lane's own KV. Unless it is
    `local`, `shard_map_version` is the version of the sequence's shard map that the step was planned with; a
    rank with another version ends the epoch.

    The last positions of an entry with `drafts` hold these guesses at the tokens that come next. The rank samples a token
    for each guess, up to the first guess that differs from its token. If all guesses are right, it samples one token more.

    The rank that samples has the draft model. That first catches up: of the tokens before the entry's positions, it computes
    up to `follows` that it has not computed yet, in order. Once none is left, it proposes up to `proposes` guesses at the tokens
    after those that are sampled, and the rank reports them in `Done.drafts`.
    """

    id: str
    lane: int
    extents: tuple[Extent, ...]
    samples: bool
    strategy: str = "local"
    shard_map_version: int = 0
    drafts: tuple[int, ...] = ()
    proposes: int = 0
    follows: int = 0

    @property
    def token_count(self) -> int:
        return sum(extent.count for extent in self.extents)


@dataclass(slots=True, unsafe_hash=True)  # made often: benchmarks/scheduler.py
class Step:
    """A batch. Ranks apply, in this order: inserts, releases, forgets, loads, serves, grows, admits, fetches,
    deletes, writes, stores; then they run the entries.

    The controller applies the same operations to its own ledgers in the same order, so that the ledgers
    agree. Every rank is therefore sent every step and applies what concerns its lane; only `lanes` run the
    entries.
    """

    step_id: int
    epoch: int
    entries: tuple[StepEntry, ...]
    releases: tuple[str, ...] = ()  # sequences whose KV is free from here on
    forgets: tuple[str, ...] = ()  # prompts whose token ids are no longer needed
    grows: tuple[Grow, ...] = ()
    admits: tuple[Admit, ...] = ()
    predicted_seconds: float = 0.0
    state_hash: int | None = None  # hash of ledger and shard maps after all of these; None: unchecked
    lanes: tuple[int, ...] = (0,)  # lanes that run the entries in lock step, because they share requests
    inserts: tuple[Insert, ...] = ()  # computed blocks that are remembered from here on
    state_hashes: tuple[int, ...] = ()  # instead of `state_hash` if there are several lanes
    loads: tuple[HostLoad, ...] = ()  # reading and writing of files takes place beside steps
    deletes: tuple[DiskDelete, ...] = ()
    writes: tuple[DiskWrite, ...] = ()
    serves: tuple[KvServe, ...] = ()
    unserves: tuple[str, ...] = ()  # tickets that are void: their blocks may get other owners from here on
    stores: tuple[StoreWrite, ...] = ()
    fetches: tuple[KvFetch, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreLookup:
    """Ranks of a lane report how many of these objects, from the first on, the store has, and repeat the `number`.

    This is handled as soon as it arrives, also while a step runs.
    """

    number: int
    objects: tuple[str, ...]
    lane: int = 0
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class CompileGrammar:
    """Ranks that sample compile a grammar, report it, and keep it until `DropGrammar`.

    This and `DropGrammar` are handled as soon as they arrive, also while a step runs.
    """

    name: str
    grammar: str  # in the form that llguidance reads
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class DropGrammar:
    """Only sequences that are already admitted still need a grammar."""

    name: str
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A new epoch begins: every rank drops its work and all requests, and joins the rendezvous.

    `address` is that of the data plane, `tcp://host:port`; empty if there is one rank.
    """

    epoch: int
    address: str = ""


@dataclass(frozen=True, slots=True)
class DiskBegin:
    """The epoch's hashes are made with `hash_key` (hexadecimal): ranks delete files of another key, and report the rest.

    Ranks keep the key with their files, so that the next controller can use it.
    """

    epoch: int
    hash_key: str


@dataclass(frozen=True, slots=True)
class Trace:
    """Report the times of every step in `TracePart`s for `seconds` seconds; 0 ends it. Sent again in each epoch."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Finish the running step and exit with status 0; `refused`: another process has taken this rank's place."""

    reason: str = ""
    refused: bool = False


# --- ranks -> controller -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Durations of a rank's warm-up steps, in seconds: constants, and measured curves that replace some of them."""

    step_seconds: float  # any step, however small
    linear_seconds_per_token: float
    attention_seconds_per_pair: float  # one query token against one KV token
    sequence_seconds: float  # each sequence of a step, for its own attention call and sampling
    token_points: tuple[tuple[int, float], ...] = ()  # (tokens of a step, seconds of all linear layers)
    query_points: tuple[tuple[int, float], ...] = ()  # (queries of a sequence, seconds for each of its keys)
    head_seconds_per_row: float = 0.0  # of `sequence_seconds`, the part of the output head among many rows
    mask_seconds_per_row: float = 0.0  # what a sequence that follows a grammar costs beyond that
    window_tokens: int = 1  # keys that a query sees in a layer with a window
    window_share: float = 0.0  # share of the layers that have a window


@dataclass(frozen=True, slots=True)
class RankHello:
    """A rank is running and has its weights. Sent every second, unless the rank runs a step or is in a rendezvous.

    Another `incarnation` under the same number means that the process was replaced.
    """

    rank: int
    incarnation: str
    last_epoch: int | None = None
    """Last epoch in which this grid position took part, as its pod remembers; None in a new pod."""
    revision: str = ""
    """Revision of the replica's pods that the rank belongs to; empty if unknown (earlier release, no cluster)."""
    dropped: tuple[tuple[str, str, int], ...] = ()
    """Numbers of messages that this process has dropped since it began, as (link, reason, messages); sent on the link
    `control` only."""


@dataclass(frozen=True, slots=True)
class DraftCosts:
    """Measured times of a draft model's work, in seconds. It proposes guesses in rounds, one of each sequence in a round."""

    round_seconds: float  # of a round, however few guesses it proposes
    row_seconds: float  # that each guess adds to its round
    token_seconds: float = 0.0  # of each token of a sequence that it computes before


@dataclass(frozen=True, slots=True)
class HostTierFigures:
    """The host tier of a rank: its size, and measured times of copies between it and the KV pool, in seconds."""

    blocks: int
    block_bytes: int  # of one block, of all of this rank's layers
    fetch_seconds_per_block: float
    offload_seconds_per_block: float


@dataclass(frozen=True, slots=True)
class StreamingFigures:
    """The host memory from which a rank streams KV that its pool has no place for."""

    blocks: int
    block_bytes: int  # of one block, of all of this rank's layers
    read_seconds_per_block: float  # measured; 0 where attention reads host memory in place


@dataclass(frozen=True, slots=True)
class DiskTierFigures:
    """The disk tier of a rank: its size, and measured times of reading, in seconds."""

    blocks: int
    access_seconds: float  # of a read, however small
    read_seconds_per_block: float
    hash_key: str = ""
    """Key of the hashes of its files, hexadecimal; empty: it has none. The controller removes it from what it records."""


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """The store that a rank shares with other replicas."""

    hash_key: str = ""
    """Key of the hashes of its objects, hexadecimal. The controller removes it from what it records."""
    fault: str = ""
    """Reason why this epoch does not use the store; empty: it does."""


@dataclass(frozen=True, slots=True)
class PeerFigures:
    """Place at which a rank gives KV to the same rank of another replica."""

    endpoint: str
    public_key: str  # of the socket there, Z85
    identity: str  # digest of all that the content of its blocks depends on
    bytes_endpoint: str = ""  # of a plain socket for bytes that are encrypted already; empty: there is none


@dataclass(frozen=True, slots=True)
class RankReady:
    """A rank has completed the rendezvous, has its KV pool, and has run its warm-up steps."""

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
    query_heads: int = 0  # of the whole model; 0: not reported
    kv_heads: int = 0
    element_bytes: int = 4  # of a number of activations
    link_bytes_per_second: float = 0.0  # between this rank and the same rank of another lane; 0: not measured
    kv_tensors: int = 2  # of a layer: K and V, or 1 where latents are both
    kv_element_bytes: int = 0
    """Bytes of one number of a key or value in memory; 0: as `element_bytes` (earlier release)."""
    kv_scales: str = ""  # digest of the scales of K and V; empty: they have none
    draft_costs: DraftCosts | None = None  # of the rank that proposes guesses; None: it has no draft model
    window_blocks: int = 0
    """Blocks of the pool of layers that free KV before their window; 0: all layers keep the whole context."""
    widest_window_tokens: int = 0  # of these layers
    host_tier: HostTierFigures | None = None  # None: evicted KV is forgotten
    disk_tier: DiskTierFigures | None = None  # None: the host tier's KV ends with the epoch
    peer: PeerFigures | None = None  # None: it gives no KV to other replicas, and takes none
    store: StoreFigures | None = None  # None: it shares no store with them
    streaming: StreamingFigures | None = None  # None: all KV of a request lies in the pools


@dataclass(slots=True, unsafe_hash=True)  # made often: benchmarks/scheduler.py
class StageFree:
    """A stage has finished its part of a step and can take the next one, on every lane of the step."""

    step_id: int
    stage: int
    lanes: tuple[int, ...] = (0,)
    epoch: int = 0


@dataclass(slots=True, unsafe_hash=True)  # made often: benchmarks/scheduler.py
class Sample:
    """A token that the last stage sampled for one sequence; those of an entry with drafts follow each other."""

    id: str
    token: int
    finish_reason: FinishReason | None = None
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class EntryFailed:
    """An entry of a step could not be computed; the others were."""

    id: str
    reason: FailureReason
    detail: str = ""


@dataclass(slots=True, unsafe_hash=True)  # made often: benchmarks/scheduler.py
class Done:
    """The last stage has finished a step, on every lane of the step."""

    step_id: int
    samples: tuple[Sample, ...] = ()
    failures: tuple[EntryFailed, ...] = ()
    compute_seconds: float = 0.0
    lanes: tuple[int, ...] = (0,)
    epoch: int = 0
    # (request, hash) of blocks that samples filled; set by the controller's process, not by ranks.
    block_hashes: tuple[tuple[str, str], ...] = ()
    prompt_logprobs: tuple[tuple[str, PromptLogprobs], ...] = ()  # by request, of the positions of this step
    # (request, guesses at the tokens after its samples); from ranks only what the step's entries ask for.
    drafts: tuple[tuple[str, tuple[int, ...]], ...] = ()
    copy_seconds: float = 0.0  # of copies to and from the host tier; not part of `compute_seconds`
    draft_seconds: float = 0.0  # the part of `compute_seconds` in which a draft model computed
    # (request, tokens of its prompt that the draft model had computed already); only after a first entry.
    followed: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class GrammarReady:
    """The rank that samples for a lane has compiled a grammar, or cannot: `fault` says why."""

    name: str
    lane: int = 0
    fault: str = ""
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class DiskReport:
    """A rank's report of its part of a lane's disk tier.

    `found` are files that were there when the epoch began; `found_all` says that no more follow. Blocks of an extent that
    are `loaded` are in the host tier. A file that is `damaged` was deleted, or could not be read.
    """

    rank: int
    lane: int = 0
    epoch: int = 0
    found: tuple[DiskFile, ...] = ()
    found_all: bool = False
    written: tuple[str, ...] = ()  # files
    not_written: tuple[str, ...] = ()
    no_space: tuple[str, ...] = ()
    """Files of `not_written` for which the rank's disk had no space."""
    loaded: tuple[tuple[int, float], ...] = ()  # (extent, seconds that reading took)
    not_loaded: tuple[int, ...] = ()  # extents
    damaged: tuple[str, ...] = ()
    fault: str = ""
    """Reason why the rank's process has stopped using its disk; empty: it uses it."""
    looked_up: tuple[tuple[int, int], ...] = ()
    """Answers to `StoreLookup`: number, and how many objects the store has."""
    stored: tuple[str, ...] = ()  # objects that are in the store
    found_stored: tuple[str, ...] = ()
    """Objects of `stored` that were there before, so that the rank sent nothing."""
    not_stored: tuple[str, ...] = ()
    store_fault: str = ""
    """Error of the store because of which something of this report was not done; empty: none."""


@dataclass(frozen=True, slots=True)
class RankFault:
    """A rank cannot continue: its process ends after this message, or it has lost others and waits for `Rendezvous`."""

    rank: int
    detail: str
    lost_epoch: int | None = None  # the epoch that it cannot continue; None: its process ends


@dataclass(frozen=True, slots=True)
class RankOutOfMemory:
    """A rank lacks memory for some rows of a step; they take part in it as NaN. Sent before the step can end."""

    rank: int
    step_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """Figures that the management library of a GPU reports; what a device does not report is None or left out."""

    clock_hertz: tuple[tuple[str, float], ...] = ()  # by clock: sm, memory
    throttled: tuple[str, ...] | None = None  # reasons why its clocks are lower than they could be
    temperature_celsius: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    utilisation: tuple[tuple[str, float], ...] = ()  # 0 to 1, by unit: compute, memory


@dataclass(frozen=True, slots=True)
class RankReport:
    """Totals of a rank's steps since its process began, and figures of its device.

    Sent at the beginning of an epoch and then every few seconds, between two steps.
    """

    rank: int
    incarnation: str
    steps: int = 0
    part_seconds: tuple[tuple[str, float], ...] = ()  # of those steps, by part
    ahead_seconds: float = 0.0  # in which steps were prepared while others ran
    flops: float = 0.0  # estimated
    read_bytes: float = 0.0  # estimated
    pod: str = ""  # name of the rank's host, in Kubernetes its pod
    device: str = ""  # model of the device
    uuid: str = ""  # of the device; empty if it has none
    peak_flops_per_second: float = 0.0  # of the device; 0: unknown
    peak_bytes_per_second: float = 0.0
    memory_bytes: tuple[tuple[str, int], ...] = ()  # of the device, by state: total, used, free
    gpu: GpuFigures | None = None  # None: nothing reports them


@dataclass(frozen=True, slots=True)
class RankXid:
    """A rank's GPU has reported an error, whose number is an Xid of NVIDIA's. Sent at once, also while a step runs."""

    rank: int
    xid: int


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of one rank in one step, in seconds since its machine was started."""

    step_id: int
    started: float
    ended: float
    # (activity, start, end), in order: receive, send, forward, ...
    spans: tuple[tuple[str, float, float], ...] = ()
    waits: tuple[tuple[str, float], ...] = ()  # (cause, total seconds): too many waits to list each


@dataclass(frozen=True, slots=True)
class TracePart:
    """Steps that a rank was asked to trace.

    `clock_seconds` is the time at which it was sent, on the clock of `steps`: since `machine` was started. A
    receiver on the same machine has the same clock (Linux: CLOCK_MONOTONIC); others estimate the difference
    from the arrival times of parts.
    """

    rank: int
    epoch: int
    machine: str
    clock_seconds: float
    steps: tuple[StepTimes, ...] = ()
    left_out: int = 0  # steps that were not kept, because there were too many


@dataclass(frozen=True, slots=True)
class Readiness:
    """The content of a controller's ready file, written once all ranks are ready and it serves."""

    ranks: tuple[RankReady, ...]
    metrics_url: str


# --- inside a controller ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: expiries and time-outs are checked."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Accept no new request; finish the running ones."""


@dataclass(frozen=True, slots=True)
class SteppedAside:
    """A running sequence has given its KV back, and waits to compute it again.

    Its next `Admit` names `prompt`, whose ids are the `tokens` known ones: those of the prompt `source`, and the
    output tokens emitted since it was admitted with that. Without such output, `prompt` is `source`.
    """

    id: str
    prompt: str
    source: str
    tokens: int


ControllerEvent = (
    Submit | Cancel | StageFree | Done | GrammarReady | DiskReport | KvAsk | KvTicket | KvDone | Tick | Drain
)
ControllerCommand = (
    Step
    | Emit
    | Refused
    | Failed
    | SteppedAside
    | CompileGrammar
    | DropGrammar
    | StoreLookup
    | KvAsk
    | KvTicket
    | KvDone
)

Message = (
    Tokens | Submit | Cancel | FetchBundle | WatchProgress | RouterUse | RouterLost | Announce | ProgressReport | Heartbeat | BundlePart | Refused
    | Emit | Failed | Rendezvous | Step | CompileGrammar | DropGrammar | DiskBegin | StoreLookup | Trace | Shutdown | RankHello | RankReady | StageFree | Done
    | GrammarReady | DiskReport | KvAsk | KvTicket | KvDone | RankFault | RankOutOfMemory | RankReport | RankXid | TracePart
)  # fmt: skip
"""Every message that crosses a process border."""
