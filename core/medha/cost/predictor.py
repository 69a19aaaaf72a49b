"""Predicted time of a whole step, and of a whole prefill, on one lane.

The cost of a step's linear layers depends on its tokens, that of its attention is a sum over its sequences,
and that of its output head depends on the number of sequences, and on how many of them follow a grammar;
`medha.cost.cost_profile` holds the numbers.
A step is cheaper than the sum of its parts: two chunks share the reading of the weights. A second prefill can
therefore be nearly free (paper B §4.2), and the packer asks for the time of whole batches. `Tally` answers
that question in constant time.

Factors for decodes, prefills and verified guesses correct the predictions by the measured step times
(`medha.cost.correction`), because an over-prediction silently shrinks chunks and an under-prediction breaks TPOT.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from medha.cost.correction import Correction, PartedSeconds
from medha.cost.cost_profile import Profile
from medha.cost.prefill_seconds import Alone, Chunking, Counts, PrefillTable, Seconds
from medha.errors import ConfigInvalid
from medha.topology import Topology
from medha.wire.messages import StepProfile

TOKENS_PER_LANE = 512 * 1024
"""KV tokens of one request that a lane holds before the next lane joins."""


# Not frozen: each decision makes dozens, and frozen dataclasses are slower to create.
@dataclass(slots=True, unsafe_hash=True)
class Work:
    """The part of one sequence in a step on one lane: `count` query tokens after `context` tokens of KV.

    `attention_only`: a helper lane's share, `count` queries of another lane over its whole shard of `context`
    tokens. Every query sees all of it, and no linear layer runs for them here.
    """

    context: int
    count: int
    attention_only: bool = False
    head_rows: int = 1  # rows that pass the output head: all, if the prompt's log-probabilities are wanted

    @property
    def pairs(self) -> float:
        """Number of (query, key) pairs: causally, each query sees the context, itself and its predecessors."""
        keys = self.context if self.attention_only else self.context + (self.count + 1) / 2
        return self.count * keys


@dataclass(frozen=True, slots=True)
class StepTerms:
    """The terms of a prediction (seconds, after correction)."""

    launch: float = 0.0  # fixed costs of a step, and of each layer's attention
    linear: float = 0.0  # linear and elementwise operations of the layers
    attention: float = 0.0
    collectives: float = 0.0  # all-reduces of tensor parallelism
    head: float = 0.0  # output head and sampling
    hops: float = 0.0  # from stage to stage; only in a latency
    exchange: float = 0.0  # queries and partials between coupled lanes

    @property
    def total(self) -> float:
        in_layers = self.linear + self.attention + self.collectives + self.exchange
        return self.launch + in_layers + self.head + self.hops


class Tally:
    """A step under construction. Predicts its time, also with one more part.

    Decodes are corrected otherwise than chunks of prefills, so they are also summed by themselves. Every
    operation takes the same short time, however many sequences the step has. Sums are of plain floats, so
    removing a part may leave a rounding error in the last digits.
    """

    __slots__ = (
        "_attention",
        "_decode_attention",
        "_decode_seconds",
        "_decodes",
        "_guess_attention",
        "_guesses",
        "_masked",
        "_masked_guesses",
        "_predictor",
        "_queried",
        "_works",
        "sequences",
        "tokens",
    )

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self.tokens = 0  # tokens that pass the linear layers
        self.sequences = 0  # sequences that may be sampled, and further rows that pass the output head
        self._works = 0
        self._attention = 0.0  # of one layer, before correction
        self._decodes = 0  # decodes that pass the linear layers, one token each
        self._masked = 0  # those of them that follow a grammar; a prefill does for one row at its end
        self._decode_attention = 0.0  # the decodes' part of `_attention`
        self._guesses = 0  # tokens that the decodes verify, each of which takes a row
        self._masked_guesses = 0  # guesses of sequences that follow a grammar
        self._guess_attention = 0.0  # the guesses' part of `_attention`
        # Seconds of the decodes alone, before correction; 0: there are none; negative: to be computed.
        self._decode_seconds = 0.0
        self._queried = (0, 0, 0.0)  # the last chunk of `seconds_with`, and its attention

    def add(self, work: Work) -> None:
        """Add a part of a prefill to the step."""
        self._count(work, 1)

    def add_decode(self, work: Work, *, is_masked: bool = False) -> None:
        """Add a decode, or the share of one in a helper lane; `is_masked`: it follows a grammar."""
        before = self._attention
        self._count(work, 1)
        self._decodes += not work.attention_only
        self._masked += is_masked and not work.attention_only
        self._decode_attention += self._attention - before
        self._decode_seconds = -1.0

    def add_chunk(self, context: int, count: int, head_rows: int = 1) -> None:
        """Add `count` query tokens of a sequence after `context` tokens of KV."""
        queried_context, queried_count, seconds = self._queried
        if queried_context != context or queried_count != count:  # else `seconds_with` has just computed it
            seconds = self._predictor._attention.of(context, count, False)
        self._works += 1
        self.tokens += count
        self.sequences += head_rows
        self._attention += seconds

    def remove(self, work: Work) -> None:
        """Remove a part of a prefill that was added."""
        self._count(work, -1)

    def add_decodes(self, contexts_sum: int, count: int, masked: int = 0) -> None:
        """Add `count` sequences of one query token each, after `contexts_sum` tokens of KV in total.

        `masked` of them follow a grammar.
        """
        self._works += count
        self.tokens += count
        self.sequences += count
        own = count * self._predictor._sequence_seconds
        keys: float = contexts_sum + count
        if count and self._predictor.profile.attention.window_share:
            # Each counts as if its context had the mean length: the sum may be too high, but never too low.
            keys = count * self._predictor._attention.seen(keys / count)
        reading = keys * self._predictor._decode_seconds_per_token
        self._attention += own
        self._attention += reading
        self._decodes += count
        self._masked += masked
        self._decode_attention += own
        self._decode_attention += reading
        self._decode_seconds = -1.0

    def draft(self, work: Work, sign: int, *, is_masked: bool = False) -> None:
        """Let a decode verify the last one of `work.count` drafted tokens (`sign` 1), or no longer (-1).

        `work` has the decode's context, or a helper lane's share of it.
        """
        of, context, foreign = self._predictor._attention.of, work.context, work.attention_only
        seconds = sign * (of(context, work.count + 1, foreign) - of(context, work.count, foreign))
        self._guess_attention += seconds
        if not foreign:
            self._guesses += sign
            self._masked_guesses += sign * is_masked

    def seconds(self) -> float:
        """Return `Predictor.stage_seconds` of the step."""
        return self._predictor.correction.seconds(self.parted_seconds())

    def parted_seconds(self) -> PartedSeconds:
        """Return the predicted time before correction, in its parts."""
        if self._works == 0:  # sums may keep a rounding error
            return PartedSeconds()
        whole = self._predictor._stage(self.tokens, self.sequences, self._attention, self._masked)
        if not self._guesses:
            return PartedSeconds(whole, self._of_decodes())
        guesses = self._guesses
        verifying = self._predictor._stage(
            self.tokens + guesses,
            self.sequences + guesses,
            self._attention + self._guess_attention,
            self._masked + self._masked_guesses,
        )
        return PartedSeconds(verifying, self._of_decodes(), verifying - whole)

    def _of_decodes(self) -> float:
        """Return the seconds of the step's decodes alone, before correction."""
        if self._decode_seconds < 0:
            decodes = self._decodes
            self._decode_seconds = self._predictor._stage(
                decodes, decodes, self._decode_attention, self._masked
            )
        return self._decode_seconds

    def seconds_with(self, context: int, count: int, head_rows: int = 1) -> float:
        """Return `seconds` of the step with `count` more query tokens of a sequence, after `context` tokens of its KV."""
        predictor = self._predictor
        seconds = predictor._attention.of(context, count, False)
        self._queried = (context, count, seconds)
        whole = predictor._stage(
            self.tokens + count, self.sequences + head_rows, self._attention + seconds, self._masked
        )
        decodes = self._decode_seconds
        return predictor.correction.of(whole, decodes if decodes >= 0 else self._of_decodes())

    def largest(self, context: int, most: int, budget_seconds: float) -> int:
        """Return the largest count up to `most` after `context` with which the step ends within the budget, or 0."""
        if most <= 0 or self.seconds_with(context, most) <= budget_seconds:
            return max(most, 0)
        low, high = 0, most  # low fits (an empty chunk), high does not
        while high - low > 1:
            middle = (low + high) // 2
            if self.seconds_with(context, middle) <= budget_seconds:
                low = middle
            else:
                high = middle
        return low

    def _count(self, work: Work, sign: int) -> None:
        self._works += sign
        if not work.attention_only:
            self.tokens += sign * work.count
            self.sequences += sign * work.head_rows
        seconds = self._predictor._attention.of(work.context, work.count, work.attention_only)
        self._attention += sign * seconds


class Predictor:
    """Predicts the times of one lane of a replica from a profile; `observe` updates the correction."""

    def __init__(
        self,
        profile: StepProfile | Profile,
        topology: Topology | None = None,
        chunking: Chunking | None = None,
        tokens_per_lane: int = TOKENS_PER_LANE,
    ) -> None:
        """Make a predictor from a profile.

        Args:
            chunking: how a lone prefill is cut, for `prefill_seconds`.
            tokens_per_lane: KV tokens of a lone prefill after which the next lane joins.

        Raises:
            ConfigInvalid: the profile was made for another degree of tensor parallelism.
        """
        self.topology = topology or Topology()
        stages, tensor = self.topology.stream, self.topology.tensor
        if isinstance(profile, StepProfile):
            profile = Profile.of_warm_up(profile, stages, tensor)
        if topology is not None and profile.tensor != tensor:
            raise ConfigInvalid(
                f"profile {profile.name!r} is of tensor parallelism {profile.tensor}, but parallelism.tensor is "
                f"{tensor}; leave scheduling.profile out, or change the manifest"
            )
        self.profile = profile
        self.correction = Correction()
        self.tokens_per_lane = tokens_per_lane
        self._most_layers = -(-self.profile.layers // stages)
        self._last_layers = self.profile.layers // stages  # the last stage also has the head
        self._launch = self.profile.launch_seconds
        self._mask_seconds = self.profile.mask_seconds_per_row
        self._attention = self.profile.attention.one()
        self._sequence_seconds = self.profile.attention.sequence_seconds
        self._attention_launch = self.profile.attention.launch_seconds
        self._decode_seconds_per_token = self.profile.attention.decode_seconds_per_token
        self._per_layer_array: Seconds = np.zeros(0)  # seconds of one layer without attention, by tokens
        self._per_layer: list[float] = []  # the same: reading one number from a list is faster
        self._hops: list[float] = []  # from one stage to the next, by tokens
        self._head: list[float] = []  # by sequences
        self._table = PrefillTable(chunking or Chunking(), self._lone_stage, self._lone_drain)

    # --- steps --------------------------------------------------------------------------------------

    def stage_seconds(self, works: Iterable[Work]) -> float:
        """Return how long the slowest stage is busy with a step over `works`."""
        return self._tallied(works).seconds()

    def latency_seconds(self, works: Iterable[Work]) -> float:
        """Return the seconds from the step's entry into stage 0 until the result of the last stage."""
        return self.explain(works, whole=True).total

    def coupled_seconds(self, works_by_lane: Sequence[Iterable[Work]], exchanged_queries: int) -> float:
        """Return how long the slowest stage is busy with a step of coupled lanes; one query is a decode.

        In each layer the lanes synchronise twice, when queries and when partials are exchanged. They wait for
        the slowest linear part and for the slowest attention, which may be on different lanes.
        """
        return self.coupled_tally_seconds(
            [self._tallied(works) for works in works_by_lane], exchanged_queries
        )

    def coupled_tally_seconds(self, lanes: Sequence[Tally], exchanged_queries: int) -> float:
        """Return `coupled_seconds` of tallies."""
        return self.correction.seconds(self.coupled_parted_seconds(lanes, exchanged_queries))

    def coupled_parted_seconds(
        self,
        lanes: Sequence[Tally],
        exchanged_queries: int,
        exchanged_decodes: int = 0,
        exchanged_guesses: int = 0,
    ) -> PartedSeconds:
        """Return `coupled_seconds` of tallies before correction, in its parts.

        `exchanged_decodes` of the exchanged queries are those of decodes; `exchanged_guesses` come on top of them.
        """
        if not any(lane._works for lane in lanes):
            return PartedSeconds()
        tokens = max(lane.tokens for lane in lanes)
        sequences = max(lane.sequences for lane in lanes)
        attention = max(lane._attention for lane in lanes)
        attention += self.profile.exchange.seconds_one(exchanged_queries)
        masked = max(lane._masked for lane in lanes)
        whole = self._stage(tokens, sequences, attention, masked)
        if not any(lane._decode_seconds for lane in lanes):
            return PartedSeconds(whole)
        decodes = max(lane._decodes for lane in lanes)
        attention = max(lane._decode_attention for lane in lanes)
        attention += self.profile.exchange.seconds_one(exchanged_decodes)
        of_decodes = self._stage(decodes, decodes, attention, masked)
        if not (exchanged_guesses or any(lane._guesses or lane._guess_attention for lane in lanes)):
            return PartedSeconds(whole, of_decodes)
        attention = max(lane._attention + lane._guess_attention for lane in lanes)
        attention += self.profile.exchange.seconds_one(exchanged_queries + exchanged_guesses)
        verifying = self._stage(
            max(lane.tokens + lane._guesses for lane in lanes),
            max(lane.sequences + lane._guesses for lane in lanes),
            attention,
            max(lane._masked + lane._masked_guesses for lane in lanes),
        )
        return PartedSeconds(verifying, of_decodes, max(verifying - whole, 0.0))

    def hop_seconds(self, tokens: int) -> float:
        """Return the seconds of a transfer from one stage to the next; 0 if there is one stage."""
        if self.topology.stream == 1:
            return 0.0
        self._layer_seconds(tokens)
        return self._hops[tokens] * self.correction.prefill

    def tally(self) -> Tally:
        """Return an empty step, to be filled."""
        return Tally(self)

    def explain(self, works: Iterable[Work], *, whole: bool = False) -> StepTerms:
        """Return the terms of `stage_seconds`, or of `latency_seconds` if `whole`."""
        return self.explain_coupled([works], 0, whole=whole)

    def explain_coupled(
        self, works_by_lane: Sequence[Iterable[Work]], exchanged_queries: int, *, whole: bool = False
    ) -> StepTerms:
        """Return the terms of `coupled_seconds`, each of the slowest lane in it; `whole`: of all stages and hops."""
        lanes = [self._tallied(works) for works in works_by_lane]
        if not any(lane._works for lane in lanes):
            return StepTerms()
        tokens = max(lane.tokens for lane in lanes)
        attention = max(lane._attention for lane in lanes)
        exchange = self.profile.exchange.seconds_one(exchanged_queries)
        profile, stages = self.profile, self.topology.stream
        parted = self.coupled_parted_seconds(lanes, exchanged_queries)
        factor = self.correction.seconds(parted) / parted.whole if parted.whole else 1.0
        head = self._head_seconds(max(lane.sequences for lane in lanes))
        in_layers = self._layer_seconds(tokens) + attention + exchange + self._attention_launch
        last_is_slowest = self._last_layers * in_layers + head >= self._most_layers * in_layers
        layers = self._last_layers if last_is_slowest else self._most_layers
        if whole:
            layers = profile.layers
        collectives = profile.all_reduce.seconds_one(tokens)
        return StepTerms(
            launch=((stages if whole else 1) * self._launch + layers * self._attention_launch) * factor,
            linear=layers * (self._layer_seconds(tokens) - collectives) * factor,
            attention=layers * attention * factor,
            collectives=layers * collectives * factor,
            head=(head if whole or last_is_slowest else 0.0) * factor,
            hops=(stages - 1) * profile.hop.seconds_one(tokens) * factor if whole else 0.0,
            exchange=layers * exchange * factor,
        )

    # --- prefills -----------------------------------------------------------------------------------

    def prefill_seconds(self, context: int, tokens: int) -> float:
        """Return the predicted time to bring a sequence from `context` to `tokens` tokens of KV, alone."""
        return self.uncorrected_prefill(context, tokens).seconds * self.correction.prefill

    def uncorrected_prefill(self, context: int, tokens: int) -> Alone:
        """Return the same before correction, in its parts."""
        return self._table.one(context, tokens, self._lone_stage_one, self._lone_drain_one)

    def prefill_seconds_many(self, contexts: Counts, tokens: Counts) -> Seconds:
        """Return `prefill_seconds` of many sequences at once."""
        return self.uncorrected_prefill_seconds_many(contexts, tokens) * self.correction.prefill

    def uncorrected_prefill_seconds_many(self, contexts: Counts, tokens: Counts) -> Seconds:
        """Return the same before correction: a column of these stays valid while the correction changes."""
        return self._table.seconds(np.asarray(contexts, np.int64), np.asarray(tokens, np.int64))

    # --- correction ---------------------------------------------------------------------------------

    def observe(self, predicted: PartedSeconds, observed_seconds: float) -> None:
        """Update the correction by the measured time of a step that was predicted so, before correction."""
        self.correction = self.correction.after(predicted, observed_seconds)

    # --- one step, from its sums --------------------------------------------------------------------

    def _tallied(self, works: Iterable[Work]) -> Tally:
        tally = Tally(self)
        for work in works:
            (tally.add_decode if work.count == 1 else tally.add)(work)
        return tally

    def _stage(self, tokens: int, sequences: int, attention: float, masked: int = 0) -> float:
        """Return the uncorrected stage seconds of a step.

        `attention`: seconds in one layer, without its launch. `masked`: sequences that follow a grammar.
        """
        try:
            in_layer = self._per_layer[tokens] + attention + self._attention_launch
            last = self._last_layers * in_layer + self._head[sequences] + masked * self._mask_seconds
        except IndexError:  # the lists end before these counts: extend them
            self._layer_seconds(tokens), self._head_seconds(sequences)
            return self._stage(tokens, sequences, attention, masked)
        return self._launch + max(self._most_layers * in_layer, last)

    def _layer_seconds(self, tokens: int) -> float:
        if tokens >= len(self._per_layer):
            upto = np.arange(max(2 * tokens, 4096) + 1)
            self._per_layer_array = self.profile.linear_seconds(upto) + self.profile.all_reduce.seconds(upto)
            self._per_layer = self._per_layer_array.tolist()
            self._hops = self.profile.hop.seconds(upto).tolist()
        return self._per_layer[tokens]

    def _head_seconds(self, sequences: int) -> float:
        if sequences >= len(self._head):
            upto = np.arange(max(2 * sequences, 512) + 1)
            self._head = np.maximum.accumulate(self.profile.head.seconds(upto)).tolist()
        return self._head[sequences]

    # --- a lone sequence's chunk ---------------------------------------------------------------------

    def _lone_layer_one(self, context: int, count: int) -> float:
        lanes = min(-(-(context + count) // self.tokens_per_lane), self.topology.kv)
        own = min(context, max(self.tokens_per_lane, -(-context // self.topology.kv)))
        seconds = self._attention.of(own, count, False) + self._attention_launch
        if lanes > 1:
            seconds += self.profile.exchange.seconds_one(count)
        return seconds + self._layer_seconds(count)

    def _lone_stage_one(self, context: int, count: int) -> float:
        in_layer = self._lone_layer_one(context, count)
        last = self._last_layers * in_layer + self._head_seconds(1)
        return self._launch + max(self._most_layers * in_layer, last)

    def _lone_drain_one(self, context: int, count: int) -> float:
        stages = self.topology.stream
        if stages == 1:
            return 0.0
        whole = stages * self._launch + self.profile.layers * self._lone_layer_one(context, count)
        whole += self._head_seconds(1) + (stages - 1) * self._hops[count]
        return whole - self._lone_stage_one(context, count)

    # --- a lone sequence's chunks, vectorised -------------------------------------------------------

    def _lone_layer(self, contexts: Counts, counts: Counts) -> Seconds:
        """Return the seconds of one layer of a lone chunk; if its KV exceeds a lane's share, several lanes share it."""
        profile = self.profile
        lanes = np.minimum(-(-(contexts + counts) // self.tokens_per_lane), self.topology.kv)
        shard = np.maximum(self.tokens_per_lane, -(-contexts // self.topology.kv))
        own = np.minimum(contexts, shard)
        seconds = profile.attention.seconds_many(own, counts) + profile.attention.launch_seconds
        seconds += np.where(lanes > 1, profile.exchange.seconds(counts), 0.0)
        self._layer_seconds(int(counts.max(initial=0)))
        return seconds + self._per_layer_array[counts]

    def _lone_stage(self, contexts: Counts, counts: Counts) -> Seconds:
        in_layer = self._lone_layer(contexts, counts)
        last = self._last_layers * in_layer + self._head_seconds(1)
        return np.where(counts > 0, self._launch + np.maximum(self._most_layers * in_layer, last), 0.0)

    def _lone_drain(self, contexts: Counts, counts: Counts) -> Seconds:
        """Return the seconds from the end of a chunk's slowest stage to its result: the other stages and the hops."""
        stages = self.topology.stream
        if stages == 1:
            return np.zeros(len(counts))
        whole = stages * self._launch + self.profile.layers * self._lone_layer(contexts, counts)
        whole += self._head_seconds(1) + (stages - 1) * self.profile.hop.seconds(counts)
        return np.where(counts > 0, whole - self._lone_stage(contexts, counts), 0.0)


__all__ = ["Chunking", "Predictor", "StepTerms", "Tally", "Work"]
