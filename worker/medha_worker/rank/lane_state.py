"""The state that a rank has of its lane's sequences: prompts, tokens, block tables and progress.

Every rank replays every step, so all of them agree on lengths and block tables. State that disagrees with the
controller's cannot be recovered, and raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from medha.errors import PartFailed, WireInvalid
from medha.kv.blocks import BlockCopy, BlockLedger
from medha.kv.lane_replay import LaneReplay, admitted_map
from medha.kv.window_tables import WindowTable, WindowTables
from medha.shards import ShardMap
from medha.wire.frames import TokenIds
from medha.wire.messages import Admit, Step, StepEntry, Tokens
from medha_worker.model.sampler import SequenceSampler
from medha_worker.rank.kv_parallel_plan import LOCAL

_FIRST_OUTPUT_CAPACITY = 64

NewSampler = Callable[[Admit, TokenIds], SequenceSampler | str]
"""Returns the sampler of an admitted sequence with these ids, or the reason why it cannot be run."""


@dataclass(slots=True)
class _Prompt:
    ids: TokenIds
    received: int = 0

    @property
    def complete(self) -> bool:
        return self.received == len(self.ids)


@dataclass(slots=True)
class SequenceState:
    """Token history and progress of one admitted sequence; its prompt's ids are shared with its siblings."""

    prompt: TokenIds  # int32 [tokens]; output that an earlier epoch produced is its tail
    sampler: SequenceSampler | None
    fault: str | None  # reason why there is no sampler; every entry then fails with it
    table: npt.NDArray[np.int64]  # block table on this lane; empty if it holds nothing here
    computed: int  # tokens whose KV is in the pool once all planned steps have run, without drafted ones
    planned_outputs: int = 0  # tokens that those steps will have sampled, without drafted ones
    drafted: int = 0  # tokens of the last planned step, of which some may turn out to be the sampled ones
    _outputs: TokenIds = field(default_factory=lambda: np.empty(_FIRST_OUTPUT_CAPACITY, dtype=np.int32))
    _output_count: int = 0
    unknown: int = 0  # number of the last outputs that were sampled elsewhere and have not arrived yet
    window: WindowTable | None = None  # of the last planned step, if layers free KV before their windows
    alternatives: int | None = None  # for each prompt token; None: no log-probabilities are asked for

    @property
    def length(self) -> int:
        """Number of tokens in the sequence once all planned steps have run."""
        return len(self.prompt) + self.planned_outputs

    def advance(self, stop: int, *, samples: bool, drafted: int = 0) -> None:
        """Record that a planned step brings the sequence to `stop`, and perhaps samples its next token.

        The last `drafted` positions count only if the next step begins after them (`settle`).
        """
        self.computed = max(self.computed, stop - drafted)
        self.planned_outputs += samples
        self.drafted = drafted

    def settle(self, start: int) -> None:
        """Count the drafted tokens that were right: a later step begins at `start`, after them."""
        accepted = start - self.computed
        if 0 < accepted <= self.drafted:
            self.computed += accepted
            self.planned_outputs += accepted
        self.drafted = 0

    def append(self, token: int) -> None:
        if self._output_count == len(self._outputs):
            self._outputs = np.concatenate([self._outputs, np.empty_like(self._outputs)])
        self._outputs[self._output_count] = token
        self._output_count += 1

    def expect(self) -> None:
        """Append a zero as a placeholder for a token that another rank samples."""
        self.append(0)
        self.unknown += 1

    def learn(self, tokens: Sequence[int]) -> None:
        """Record the tokens of the oldest step that was expected to sample.

        Tokens after the first -1 do not count. If the first one is -1, none could be sampled, and the placeholder stays.
        Several tokens come only if no later step is expected to sample.
        """
        self._outputs[self._output_count - self.unknown] = max(tokens[0], 0)
        self.unknown -= 1
        for token in takewhile(lambda token: token >= 0, tokens[1:]):
            self.append(token)

    def fill(self, length: int) -> None:
        """Append zeros for tokens before `length` that could not be sampled.

        A step that relies on them may already be on its way.
        """
        while len(self.prompt) + self._output_count < length:
            self.append(0)

    def tokens(self, start: int, stop: int) -> TokenIds:
        """Return the ids at positions `start .. stop` (exclusive), which must lie inside the history."""
        border = len(self.prompt)
        outputs = self._outputs[max(start - border, 0) : max(stop - border, 0)]
        if start >= border:
            return outputs
        return np.concatenate([self.prompt[start:stop], outputs])


class LaneState:
    """Prompts, sequences and the ledger of one lane in one epoch."""

    def __init__(
        self,
        ledger: BlockLedger,
        lane: int,
        epoch: int,
        new_sampler: NewSampler,
        window_tables: WindowTables | None = None,
        host_blocks: int = 0,
    ) -> None:
        """`window_tables` has the blocks of layers that free KV before their windows, if there are any.

        `host_blocks` is the size of the lane's host tier.
        """
        self.ledger = ledger
        self.lane = lane
        self.epoch = epoch
        self.prompts: dict[str, _Prompt] = {}
        self.sequences: dict[str, SequenceState] = {}
        self.replica = LaneReplay(ledger, lane, host_blocks, window_tables)
        self._new_sampler = new_sampler

    # --- prompts ------------------------------------------------------------------------------------

    def add_tokens(self, tokens: Tokens, ids: TokenIds) -> None:
        """Add the next piece of a prompt; `ids` is int32 [n].

        Raises:
            WireInvalid: the piece does not continue the ids received so far.
        """
        if tokens.offset == 0:
            self.prompts[tokens.prompt] = _Prompt(np.empty(tokens.total, dtype=np.int32))
        prompt = self.prompts.get(tokens.prompt)
        received = prompt.received if prompt is not None else 0
        end = received + len(ids)
        if prompt is None or tokens.offset != received or end > len(prompt.ids):
            raise WireInvalid(
                f"Tokens of prompt {tokens.prompt!r}: offset {tokens.offset} with {len(ids)} ids, "
                f"but {received} ids are here of {tokens.total}"
            )
        prompt.ids[received:end] = ids
        prompt.received = end

    def missing_prompts(self, step: Step) -> list[str]:
        """Return the prompts of the step's admits whose ids have not all arrived yet."""
        names = dict.fromkeys(admit.prompt for admit in step.admits)
        return [name for name in names if name not in self.prompts or not self.prompts[name].complete]

    # --- replay of steps ----------------------------------------------------------------------------

    def release(self, step: Step) -> None:
        """Apply the step's inserts, releases and forgets.

        Raises:
            PartFailed: the step does not match this state.
        """
        if step.epoch != self.epoch:
            raise PartFailed(f"step {step.step_id} is of epoch {step.epoch}; this rank is in {self.epoch}")
        if step.state_hash is not None or step.state_hashes:
            self.replica.note_windows()
        for insert in step.inserts:
            self.sequence(insert.id, step)
        self.replica.insert(step.inserts)
        for name in step.releases:
            self.sequence(name, step)
            self.replica.release(name)
            del self.sequences[name]
        for name in step.forgets:
            self.prompts.pop(name, None)  # absent if its requests were cancelled before admission

    def reserve(self, step: Step) -> tuple[BlockCopy, ...]:
        """Apply a step's changes to ledger and tiers; return the KV blocks to copy before it runs.

        The changes are its loads, serves, grows, admits, fetches, deletes, writes and stores.

        Drafts of earlier steps are settled first. If layers free KV before their windows, the step's entries get blocks there.

        Raises:
            PartFailed: this state and the controller's have diverged.
        """
        copies: list[BlockCopy] = []
        self.replica.begin_step()
        for entry in step.entries:
            if entry.lane == self.lane and entry.id in self.sequences and entry.extents:
                self.sequences[entry.id].settle(entry.extents[0].start)
        self.replica.load(step.loads)
        self.replica.serve(step.serves, step.unserves)
        for grow in step.grows:
            sequence = self.sequence(grow.id, step)
            if not self.replica.grow(grow):
                raise diverged(step, f"no KV is left to grow {grow.id} to {grow.reserved_tokens} tokens")
            sequence.table = self._table(grow.id)
        for admit in step.admits:
            copies += self._admit(admit, step)
        self.replica.fetch(step.fetches)
        self.replica.write(step.deletes, step.writes)
        self.replica.store(step.stores)
        state_hash = step.state_hashes[self.lane] if step.state_hashes else step.state_hash
        if state_hash is not None and state_hash != self.replica.state_hash():
            raise diverged(
                step,
                f"the ledgers differ, or the shard maps ({self.ledger.held_blocks} blocks are held here)",
            )
        copies += self.replica.place_windows(step.entries)
        windows = self.replica.windows
        if windows is not None:
            for entry in step.entries:
                if entry.extents and entry.id in self.ledger:
                    self.sequences[entry.id].window = windows.table(entry.id)
        return tuple(copies)

    def _admit(self, admit: Admit, step: Step) -> list[BlockCopy]:
        if admit.id in self.sequences:
            raise diverged(step, f"{admit.id} is admitted twice")
        prompt = self.prompts.get(admit.prompt)
        if prompt is None or not prompt.complete:
            raise diverged(step, f"{admit.id} is admitted ahead of its prompt's ids")
        parent = self.sequence(admit.fork_of, step) if admit.fork_of is not None else None
        is_ours = admitted_map(admit).owner == self.lane  # other lanes do not count its tokens
        if parent is not None and is_ours and parent.computed < admit.shared_tokens:
            raise diverged(step, f"{admit.id} shares tokens that {admit.fork_of} has not computed")
        copies = self.replica.admit(admit)
        if copies is None:
            raise diverged(step, f"no KV is left to admit {admit.id} with {admit.reserved_tokens} tokens")
        ids = prompt.ids[: admit.tokens]
        sampler = self._new_sampler(admit, ids)
        if is_ours and isinstance(sampler, SequenceSampler) and sampler.mask is not None:
            sampler.mask.ahead(sampler.outputs)  # computed beside its prompt, if its grammar is compiled
        self.sequences[admit.id] = SequenceState(
            prompt=ids,
            sampler=sampler if isinstance(sampler, SequenceSampler) else None,
            fault=sampler if isinstance(sampler, str) else None,
            table=self._table(admit.id),
            computed=admit.shared_tokens if admit.fork_of is not None else admit.cached_tokens,
            alternatives=admit.sampling.prompt_logprobs if admit.tokens == admit.prompt_length else None,
        )
        return copies

    # --- lookups ------------------------------------------------------------------------------------

    def sequence(self, name: str, step: Step) -> SequenceState:
        """Return the sequence that the step names.

        Raises:
            PartFailed: it is not known here.
        """
        try:
            return self.sequences[name]
        except KeyError:
            raise diverged(step, f"sequence {name} is not known here") from None

    def shards(self, entry: StepEntry, step: Step) -> ShardMap:
        """Return where the KV of the entry's sequence lies.

        Raises:
            PartFailed: the map is not the one that the step was planned with.
        """
        shards = self.replica.shards(entry.id)
        if entry.strategy != LOCAL and entry.shard_map_version != shards.version:
            raise diverged(
                step,
                f"the step names shard map {entry.shard_map_version} of {entry.id}, and {shards.version} is here",
            )
        return shards

    def _table(self, name: str) -> npt.NDArray[np.int64]:
        return self.ledger.table(name) if name in self.ledger else np.empty(0, dtype=np.int64)


def diverged(step: Step, detail: str) -> PartFailed:
    """Return the error for a step that does not fit this rank's state."""
    return PartFailed(f"step {step.step_id}: this rank and the controller disagree: {detail}")
