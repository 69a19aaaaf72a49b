"""The decoder: embedding, layers and output head, over a flat batch of prefill chunks and decodes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by

from medha_worker.device import Device, InFlight
from medha_worker.kernels.protocol import Kernels
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.model.decode_graphs import DecodeGraphs
from medha_worker.model.experts_mlp import Choice, add_shared, choose, experts_mlp
from medha_worker.model.kv_cache import HeadLayer, KVCache
from medha_worker.model.kv_scales import digest_of
from medha_worker.model.latent_attention import LatentAttention
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.out_of_memory import ran_out
from medha_worker.model.prepared_step import (
    LayerStep,
    OwnStep,
    PreparedStep,
    Rotation,
    Rotations,
    StreamedStep,
    streams,
)
from medha_worker.model.quantised_experts import QuantisedExperts
from medha_worker.model.quantised_weights import Linear, LinearProducts, QuantisedWeight, tensors_of
from medha_worker.model.rope import inverse_frequencies, rotation_table
from medha_worker.model.spread import LaneLinks, SpreadPlan, SpreadStep
from medha_worker.model.tensor_group import Alone, TensorGroup
from medha_worker.model.weights import LayerWeights, Progress, Shard, Weights, load_weights

# Rows of the MLP that are computed together on a CPU.
_MLP_ROWS = 512
# Rows of a result that are normed together.
_NORM_ROWS = 1024

_log = logging.getLogger("medha.model")

OneStep = OwnStep | StreamedStep
"""A step of rows that no other lane shares, of which one sequence can run alone."""
_Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values, each [rows, own heads, head_dim]."""


class Transformer:
    """The layers of a model that one rank runs.

    With tensor parallelism, the ranks of `group` run in lock-step and sum up their results after attention,
    after the MLP, and after the lookup of embeddings (Megatron-LM's split).

    If memory runs out between two such sums, the other ranks do not know of it. Therefore the sequences that
    do not fit take part as NaN, which reaches every later rank: these sequences end, and the rest of the step
    does not. `ran_out` is called then, once per forward pass and before NaN leaves this rank, because NaN
    alone does not say why.
    """

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        weights: Weights,
        *,
        kernels: Kernels,
        group: TensorGroup | None = None,
        lanes: LaneLinks | None = None,
        ran_out: Callable[[], None] = lambda: None,
        collected: Sequence[int] = (),
    ) -> None:
        """`collected` are the layers, in ascending order, before which hidden states are collected for a prediction head.

        The number of layers stands for the place after the last one. In a row, the hidden state comes first, and then what
        was collected, side by side. Rows also have this form on their way between stages.
        """
        self._collected = tuple(collected)
        self._group = group or Alone()
        self._lanes = lanes
        self._ran_out = ran_out
        self._has_reported = False  # whether `ran_out` was called in this forward pass
        self.config = config
        self.shard = shard
        self._weights = weights
        self.kernels = kernels
        self._products = LinearProducts(kernels.products, self._group, shard.tensor_rank, shard.tensor_size)
        self.device, self.dtype = weights.device, weights.device.dtype
        self._ropes = [config.rope_of(layer) for layer in range(shard.first_layer, shard.last_layer)]
        self._frequencies = {
            rope: (self.device.place(frequencies), factor)
            for rope in dict.fromkeys(self._ropes)
            for frequencies, factor in [inverse_frequencies(rope, config.rope_dim)]
        }
        self._embedding_scale = (
            None
            if config.embedding_scale == 1.0
            else self.device.place(torch.tensor(config.embedding_scale, dtype=self.dtype))
        )
        self._latents = (
            None
            if config.latent is None
            else LatentAttention(config, shard, kernels, self._products, self.device)
        )
        self._windows = config.windows[shard.first_layer : shard.last_layer]
        self._forms = None if self._latents is None else self._latents.forms
        self._graphs: DecodeGraphs | None = None
        self._in_flight = InFlight(self.device.runtime)

    @classmethod
    def load(
        cls,
        directory: Path | str,
        config: ModelConfig,
        shard: Shard,
        *,
        device: Device,
        kernels: Kernels,
        group: TensorGroup | None = None,
        lanes: LaneLinks | None = None,
        progress: Progress | None = None,
        collected: Sequence[int] = (),
    ) -> Transformer:
        """Read a rank's weights and build the model from them."""
        weights = load_weights(
            directory,
            config,
            shard,
            device=device,
            progress=progress,
            pack=kernels.pack,
            pack_rows=kernels.pack_rows,
        )
        return cls(config, shard, weights, kernels=kernels, group=group, lanes=lanes, collected=collected)

    def with_kernels(self, kernels: Kernels) -> Transformer:
        """Return a model with the same weights and other kernels."""
        return Transformer(
            self.config,
            self.shard,
            self._weights,
            kernels=kernels,
            group=self._group,
            lanes=self._lanes,
            collected=self._collected,
        )

    def in_grid(
        self, group: TensorGroup, lanes: LaneLinks, ran_out: Callable[[], None] = lambda: None
    ) -> Transformer:
        """Return a model with the same weights that runs among other ranks.

        A model whose shard is a slice of its layers runs only like this.
        """
        return Transformer(
            self.config,
            self.shard,
            self._weights,
            kernels=self.kernels,
            group=group,
            lanes=lanes,
            ran_out=ran_out,
            collected=self._collected,
        )

    @property
    def takes_ids(self) -> bool:
        """True if steps take token ids, and not hidden states of the stage before."""
        return self.shard.is_first_stage

    @property
    def entering_size(self) -> int:
        """Values of a row that comes from the stage before: its hidden state, and what was collected so far."""
        received = sum(layer < self.shard.first_layer for layer in self._collected)
        return (1 + received) * self.config.hidden_size

    @property
    def leaving_size(self) -> int:
        """Values of a row of this rank's result: its hidden state, and what was collected so far."""
        last = self.shard.last_layer + self.shard.is_last_stage
        return (1 + sum(layer < last for layer in self._collected)) * self.config.hidden_size

    @property
    def whole_embedding(self) -> torch.Tensor | None:
        """The embedding, [vocab, hidden_size]; None on a rank that does not hold all of it."""
        return self._weights.embedding if self.shard.tensor_size == 1 else None

    @property
    def windows(self) -> Sequence[int | None]:
        """The windows of all layers of the model, in tokens: those of other stages, too, as lanes plan alike."""
        return self.config.windows

    @property
    def window_tokens(self) -> int:
        """Tokens of the widest window of this rank's layers; 1 if none has one."""
        return max((window for window in self._windows if window is not None), default=1)

    @property
    def window_layers(self) -> Sequence[int]:
        """Numbers of this rank's layers that have a window, counted from its first one."""
        return [layer for layer, window in enumerate(self._windows) if window is not None]

    @property
    def window_share(self) -> float:
        """Share of this rank's layers that have a window; stages may differ."""
        return len(self.window_layers) / len(self._windows)

    @property
    def weights_bytes(self) -> int:
        """Memory of this rank's weights; shared tensors (tied embeddings) count once."""
        weights = self._weights
        held = [weights.embedding, weights.final_norm, weights.head]
        for layer in weights.layers:
            held += [getattr(layer, field.name) for field in fields(layer)]
        tensors = [tensor for weight in held if weight is not None for tensor in tensors_of(weight)]
        tensors += [tensor for scales in weights.kv_scales or () for tensor in (scales.keys, scales.values)]
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())

    def new_kv_cache(
        self, num_blocks: int, block_tokens: int, window_blocks: int = 0, head: Transformer | None = None
    ) -> KVCache:
        """Allocate a KV pool for this rank's layers, and after them for that of a prediction head.

        With `window_blocks`, those with a window have so many blocks.
        """
        scales = self._weights.kv_scales
        if head is not None and scales is not None:
            scales = [*scales, *(head._weights.kv_scales or ())]
        return KVCache(
            num_layers=self.shard.last_layer - self.shard.first_layer,
            kv_heads=self.shard.kv_heads(self.config),
            head_dim=self.config.head_dim,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            device=self.device,
            tensors=self.config.kv_tensors,
            scales=scales,
            window_layers=self.window_layers,
            window_blocks=window_blocks,
            head=None if head is None else head.head_layer,
        )

    @property
    def head_layer(self) -> HeadLayer:
        """The shape of a layer's KV, for the pool of a model whose prediction head this is."""
        config = self.config
        return HeadLayer(self.shard.kv_heads(config), config.head_dim, config.kv_tensors)

    def made_heads_bytes(self, max_model_len: int) -> int:
        """Return the memory of keys and values that are made of latents at a time: a warm-up's chunk may need less."""
        return 0 if self._forms is None else self._forms.made_bytes(max_model_len)

    @property
    def kv_scales_digest(self) -> str:
        """Digest of the scales of this rank's K and V; empty if they have none."""
        return digest_of(self._weights.kv_scales)

    @torch.inference_mode()
    def capture_decodes(self, kv_cache: KVCache, sizes: Sequence[int], copies: int = 2) -> None:
        """Capture steps of `sizes` decodes each, if device, kernels and group can; no step may be running.

        Prepared steps of decodes alone over `kv_cache` then are replays; up to `copies` of one size may be prepared
        before the first of them runs.
        """
        if not self.can_capture:
            return
        is_first = self._weights.embedding is not None
        row = (
            torch.zeros(1, dtype=torch.int64)
            if is_first
            else torch.zeros(1, self.entering_size, dtype=self.dtype)
        )
        self._graphs = DecodeGraphs(
            self._run_layers,
            self._rotations,
            self.device.place(row),
            kv_cache,
            self.kernels,
            self.leaving_size,
            sizes,
            copies,
        )

    @property
    def can_capture(self) -> bool:
        """True if device, kernels and group can capture steps, and every layer sees the whole context."""
        return (
            not any(self._windows)
            and self.device.runtime.captures
            and self._group.captures
            and self.kernels.attention.for_graph(1, 1) is not None
        )

    @property
    def captures(self) -> bool:
        """True if steps of decodes alone are captured."""
        return self._graphs is not None

    def forget_captured(self) -> None:
        """Let go of the captured steps and their memory, also where steps have been prepared for them."""
        if self._graphs is not None:
            self._graphs.release()
        self._graphs = None

    @torch.inference_mode()
    def prepare(
        self,
        positions: torch.Tensor,
        spans: Sequence[SequenceSpan],
        kv_cache: KVCache,
        spread: SpreadPlan | None = None,
        window_spans: Sequence[SequenceSpan] | None = None,
    ) -> PreparedStep:
        """Return what all layers of a step share. Any thread may call this while another step runs.

        Args:
            positions: Positions of the rows, int64 [rows] in host memory.
            spans: The sequences that the rows belong to, in row order, together covering every row.
            kv_cache: The pool that the spans' block tables point into.
            spread: Replaces `spans` if requests of the step are shared with other lanes; there may then be no
                rows of our own.
            window_spans: Replace `spans` in layers with a window, if the pool frees the KV before it.
        """
        with self.device.runtime.ahead():
            is_streamed = streams(spans, kv_cache)
            if spread is None and self._graphs is not None and not is_streamed:
                captured = self._graphs.take(positions, spans, kv_cache)
                if captured is not None:
                    return PreparedStep(self.device.runtime.mark(), captured=captured)
            layers: LayerStep
            if spread is None and is_streamed:
                layers = StreamedStep(spans, kv_cache, self.kernels, self._windows, self._forms)
            elif spread is None:
                layers = OwnStep(spans, kv_cache, self.kernels, self._windows, window_spans, self._forms)
            else:
                assert self._lanes is not None, "requests are spread over lanes, and there are links to none"
                layers = SpreadStep(
                    spread, self._lanes, kv_cache, self.kernels, self._report_once, self._windows, self._forms
                )
            rotations = self._rotations(self.device.place(positions))
            return PreparedStep(self.device.runtime.mark(), layers, rotations)

    @torch.inference_mode()
    def forward(self, tokens_or_hidden: torch.Tensor, step: PreparedStep) -> torch.Tensor:
        """Run the rank's layers over a prepared step once, writing the new tokens' K and V.

        Args:
            tokens_or_hidden: Token ids, int64 [rows], on the first stage; the previous stage's result on
                others. In host memory or on the device.
            step: The step; it can be run once.

        Returns:
            Hidden states, [rows, leaving_size], before the final norm. They may be overwritten two steps later.
        """
        self._has_reported = False
        step.ready.wait()
        entering = self.device.place(tokens_or_hidden)
        try:
            if step.captured is not None:
                return step.captured.replay(entering)
            assert step.layers is not None
            assert step.rotations is not None
            return self._run_layers(entering, step.rotations, step.layers)
        finally:  # after an error, too: the layers before it may still run
            self._in_flight.keep(step)

    def _rotations(self, positions: torch.Tensor) -> Rotations:
        tables = {
            rope: rotation_table(frequencies, factor, positions)
            for rope, (frequencies, factor) in self._frequencies.items()
        }
        return {rope: (cos.to(self.dtype), sin.to(self.dtype)) for rope, (cos, sin) in tables.items()}

    def _run_layers(self, entering: torch.Tensor, rotations: Rotations, step: LayerStep) -> torch.Tensor:
        size, first = self.config.hidden_size, self.shard.first_layer
        if self._weights.embedding is not None:
            hidden = self._embed(entering, self._weights.embedding)
        else:
            hidden = entering[:, :size].clone(memory_format=torch.contiguous_format)
        leaving = self._leaving(entering, hidden)
        normed = None
        layers = self._weights.layers
        for index, layer in enumerate(layers):
            self._collect(leaving, first + index, hidden)
            following = layers[index + 1].input_norm if index + 1 < len(layers) else None
            rotation = rotations[self._ropes[index]]
            normed = self._layer(index, layer, hidden, normed, following, rotation, step)
        if leaving is None:
            return hidden
        if self.shard.is_last_stage:
            self._collect(leaving, self.shard.last_layer, hidden)
        leaving[:, :size] = hidden
        return leaving

    def _leaving(self, entering: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return the memory of a result with what earlier stages have collected; None if nothing is collected."""
        if self.leaving_size == self.config.hidden_size:
            return None
        leaving = hidden.new_empty(hidden.shape[0], self.leaving_size)
        if self._weights.embedding is None:
            leaving[:, : self.entering_size] = entering
        return leaving

    def _collect(self, leaving: torch.Tensor | None, layer: int, hidden: torch.Tensor) -> None:
        """Put hidden states before a layer of the model after those in `leaving`, if they are collected."""
        if leaving is not None and layer in self._collected:
            start = (1 + self._collected.index(layer)) * self.config.hidden_size
            leaving[:, start : start + self.config.hidden_size] = hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Return next-token logits of rows of the last stage's result.

        They are float32 [rows, vocab_size] on tensor rank 0, which samples; None on the other ranks of its
        group.
        """
        assert self._weights.head is not None
        normed = self.normed(hidden)
        own = self._products.product(normed, self._weights.head).float()
        widths = [rows.stop - rows.start for rows in self.shard.vocabulary(self.config)]
        return self._group.gather_last_dim(own, widths)

    @torch.inference_mode()
    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return rows of the last stage's result as the output head takes them, [rows, hidden_size]."""
        assert self._weights.final_norm is not None, "only the last stage has the output head"
        return self._norm(hidden[:, : self.config.hidden_size].contiguous(), self._weights.final_norm)

    def _embed(self, token_ids: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """Embed token ids as hidden states, [rows, hidden_size]; a rank holds a slice of the vocabulary."""
        hidden = self._looked_up(token_ids, embedding)
        return hidden if self._embedding_scale is None else hidden.mul_(self._embedding_scale)

    def _looked_up(self, token_ids: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        if self.shard.tensor_size == 1:
            return F.embedding(token_ids, embedding)
        local = token_ids - self._weights.vocab_start
        is_foreign = (local < 0) | (local >= embedding.shape[0])
        if embedding.shape[0] == 0:  # a small vocabulary leaves the last ranks nothing
            hidden = embedding.new_zeros((*token_ids.shape, embedding.shape[1]))
        else:
            hidden = F.embedding(local.masked_fill(is_foreign, 0), embedding)
            hidden.masked_fill_(is_foreign[:, None], 0)
        self._group.all_reduce(hidden)
        return hidden

    def _layer(
        self,
        index: int,
        layer: LayerWeights,
        hidden: torch.Tensor,
        normed: torch.Tensor | None,
        following: torch.Tensor | None,
        rotation: Rotation,
        step: LayerStep,
    ) -> torch.Tensor | None:
        """Run a layer on hidden states, in place.

        Args:
            index: The layer's index on this rank.
            layer: Its weights.
            hidden: [rows, hidden_size], to which the layer adds.
            normed: The normed hidden states if the layer before returned them; None if they are still to be computed.
            following: The weight of the next layer's norm; None for the last layer.
            rotation: The cosines and sines of the rows' positions.
            step: The attention of the rows, and their writes to the pool.

        Returns:
            The hidden states normed for the next layer if one kernel adds and norms, else None.
        """
        everything = slice(0, hidden.shape[0])
        if isinstance(step, SpreadStep):  # all rows at once: other lanes wait for what they need of it
            heads = self._heads_of_each(layer, hidden, normed, rotation, step.sequences)
            attended = step.attend(index, *heads, layer.sinks, layer.latent)

            def attend(rows: slice, alone: OneStep | None) -> torch.Tensor:  # noqa: ARG001
                return attended[rows].flatten(1)
        else:

            def attend(rows: slice, alone: OneStep | None) -> torch.Tensor:
                heads = self._heads(layer, hidden, normed, rotation, rows)
                return (alone or step).attend(index, *heads, layer.sinks, layer.latent).flatten(1)

        post_normed = self._add(
            hidden, everything, step, attend, layer.output, layer.output_bias, layer.post_norm,
            layer.attention_result_norm, shares=self._share_scales(layer.output),
        )  # fmt: skip

        # On a CPU, a few rows at a time, so that the widest activations stay in cache and in the same memory.
        rows = hidden.shape[0]
        together = _MLP_ROWS if self.device.is_host else max(rows, 1)  # a lane may have no rows of its own
        wide: torch.Tensor | None = None
        tile = everything
        choice: Choice | None = None

        def mlp(rows: slice, _: OneStep | None) -> torch.Tensor:
            nonlocal wide, choice
            normed = self._normed(hidden, post_normed, layer.post_norm, rows)
            if layer.router is None and not isinstance(layer.gate_up, QuantisedExperts):
                if wide is None:
                    wide = hidden.new_empty(rows.stop - rows.start, layer.gate_up.shape[1])
                return self._widened(layer.gate_up, layer.gate_up_bias, normed, wide)
            assert self.config.experts is not None
            if rows == tile:
                choice = choose(self.kernels, self.config.experts, layer, normed)
            own = self._choice_of(
                layer, normed, choice, slice(rows.start - tile.start, rows.stop - tile.start)
            )
            total = experts_mlp(self.kernels, self._products, self.config.experts, layer, normed, own)
            return add_shared(self.kernels, self._products, layer, normed, total)

        following_normed = None
        for first in range(0, rows, together):
            tile, choice = slice(first, min(first + together, rows)), None
            norm = following if tile == everything else None  # the next layer wants all rows normed, or none
            is_sparse = layer.router is not None
            down = None if is_sparse or isinstance(layer.down, QuantisedExperts) else layer.down
            following_normed = self._add(
                hidden, tile, step, mlp, down, layer.down_bias, norm, layer.mlp_result_norm,
                shares=self._share_scales(layer.down, layer.shared_down),
            )  # fmt: skip
        return following_normed

    def _share_scales(self, *weights: Linear | QuantisedExperts | None) -> bool:
        """Return True if tensor ranks exchange the scales of rows for a product with one of these weights."""
        return self.shard.tensor_size > 1 and any(
            isinstance(weight, QuantisedWeight | QuantisedExperts) and weight.has_row_scales
            for weight in weights
        )

    def _choice_of(
        self, layer: LayerWeights, normed: torch.Tensor, choice: Choice | None, rows: slice
    ) -> Choice:
        """Return the part of a choice of experts that is of some of its rows; `normed` are those rows.

        If memory ran out for the choice of all rows (None), a rank alone makes that of these rows. A tensor rank must not:
        the others have chosen for all rows at once (`experts_mlp`).

        Raises:
            MemoryError: there is no choice that the other tensor ranks have made, too.
        """
        if choice is not None:
            return choice[0][rows], choice[1][rows]
        if self.shard.tensor_size > 1:
            raise MemoryError("out of memory: the experts of all rows could not be chosen at once")
        assert self.config.experts is not None
        return choose(self.kernels, self.config.experts, layer, normed)

    def _heads(
        self,
        layer: LayerWeights,
        hidden: torch.Tensor,
        normed: torch.Tensor | None,
        rotation: Rotation,
        some: slice,
    ) -> _Heads:
        """Compute queries, keys and values of some rows of hidden states, in the form that attention takes."""
        config = self.config
        normed = self._normed(hidden, normed, layer.input_norm, some)
        rotation, rows = (rotation[0][some], rotation[1][some]), normed.shape[0]
        if self._latents is not None:
            return self._latents.heads(layer, normed, rotation)
        query_heads, kv_heads = self.shard.query_heads(config), self.shard.kv_heads(config)
        heads = self._products.product(normed, layer.qkv, layer.qkv_bias)
        heads = heads.view(rows, query_heads + 2 * kv_heads, config.head_dim)
        q, k, v = heads[:, :query_heads], heads[:, query_heads:-kv_heads], heads[:, -kv_heads:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
            self.kernels.rows.rotate(q, *rotation)
            self.kernels.rows.rotate(k, *rotation)
        else:
            self.kernels.rows.rotate(heads[:, :-kv_heads], *rotation)  # q and k at once
        return q, k, v

    def _heads_of_each(
        self,
        layer: LayerWeights,
        hidden: torch.Tensor,
        normed: torch.Tensor | None,
        rotation: Rotation,
        sequences: Sequence[slice],
    ) -> _Heads:
        """Compute what `_heads` does, sequence by sequence if memory runs out. Sequences that do not fit alone become NaN."""
        try:
            return self._heads(layer, hidden, normed, rotation, slice(0, hidden.shape[0]))
        except (MemoryError, RuntimeError) as error:
            if not ran_out(error):
                raise
            _log.warning(
                "memory ran out for %d rows, so each sequence runs alone: %s", hidden.shape[0], error
            )
        # Outside the handler: inside it, the traceback would keep the failed attempt's tensors alive.
        query_heads, kv_heads = self.shard.query_heads(self.config), self.shard.kv_heads(self.config)
        q, k, v = (
            hidden.new_full((hidden.shape[0], count, width), torch.nan)
            for count, width in (
                (query_heads, self.config.query_dim),
                (kv_heads, self.config.head_dim),
                (kv_heads, self.config.head_dim),
            )
        )
        for rows in sequences:
            try:
                own = self._heads(layer, hidden, normed, rotation, rows)
            except (MemoryError, RuntimeError) as error:
                if not ran_out(error):
                    raise
                self._take_part_as_nan(rows, error)
            else:
                q[rows], k[rows], v[rows] = own
        return q, k, v

    def _take_part_as_nan(self, rows: slice, error: Exception) -> None:
        _log.warning("memory ran out for one sequence of %d rows alone: %s", rows.stop - rows.start, error)
        self._report_once()

    def _report_once(self) -> None:
        if not self._has_reported:
            self._has_reported = True
            self._ran_out()

    def _widened(
        self, weight: Linear, bias: torch.Tensor | None, normed: torch.Tensor, wide: torch.Tensor
    ) -> torch.Tensor:
        """Return activation(gate(x)) * up(x) of normed rows; `wide` is scratch memory."""
        gate_up = self._products.product(normed, weight, bias, out=wide[: normed.shape[0]])
        if self.config.family.activation == "gelu_tanh":
            return self.kernels.rows.gelu_multiply(gate_up)
        return self.kernels.rows.silu_multiply(gate_up)

    def _add(
        self,
        hidden: torch.Tensor,
        rows: slice,
        step: LayerStep,
        compute: Callable[[slice, OneStep | None], torch.Tensor],
        weight: Linear | None,
        bias: torch.Tensor | None,
        norm: torch.Tensor | None,
        result_norm: torch.Tensor | None,
        *,
        shares: bool,
    ) -> torch.Tensor | None:
        """Compute hidden[rows] += compute(rows) @ weight + bias, summed over the ranks; without a weight, += compute(rows).

        If `result_norm` is given, the summand passes a norm by this weight first. If not, a rank that is alone needs
        one pass over memory. If rows are those of a single sequence, `compute` is given a step of their own. `shares`:
        tensor ranks exchange the scales of rows in these products.

        Returns:
            The rows normed by the weight `norm` if one kernel adds a sum over ranks and norms, else None.
        """

        is_apart = self.shard.tensor_size > 1 or result_norm is not None

        def run(rows: slice, alone: OneStep | None, out: torch.Tensor | None) -> torch.Tensor | None:
            x = compute(rows, alone)
            if weight is None:
                if is_apart:
                    return x if out is None else out.copy_(x)
                hidden[rows].add_(x)
                return None
            if is_apart:
                # Only rank 0 has the bias.
                return self._products.product(x, weight, bias, out, is_partial=True)
            self._products.add_product(hidden[rows], x, weight)
            if bias is not None:
                hidden[rows].add_(bias)
            return None

        try:
            part = run(rows, None, None)
        except (MemoryError, RuntimeError) as error:
            # Ranks that share the scales of rows would wait for each other in the products of one sequence alone.
            if self._lanes is None or shares or not ran_out(error):
                raise
            _log.warning(
                "memory ran out for %d rows, so each sequence runs alone: %s", hidden.shape[0], error
            )
        else:
            return self._sum(hidden, rows, part, norm, result_norm)
        # Outside the handler: inside it, the traceback would keep the failed attempt's tensors alive.
        part = torch.empty_like(hidden[rows]) if is_apart else None
        for index, sequence in enumerate(step.sequences):
            own = slice(max(sequence.start, rows.start), min(sequence.stop, rows.stop))
            if own.start >= own.stop:
                continue
            out = None if part is None else part[own.start - rows.start : own.stop - rows.start]
            try:
                run(own, step.alone(index) if isinstance(step, OneStep) else None, out)
            except (MemoryError, RuntimeError) as error:
                if not ran_out(error):
                    raise
                self._take_part_as_nan(sequence, error)
                (hidden[own] if out is None else out).fill_(torch.nan)
        return self._sum(hidden, rows, part, norm, result_norm)

    def _sum(
        self,
        hidden: torch.Tensor,
        rows: slice,
        part: torch.Tensor | None,
        norm: torch.Tensor | None,
        result_norm: torch.Tensor | None,
    ) -> torch.Tensor | None:
        if part is None:
            return None
        self._group.all_reduce(part)
        if result_norm is not None:
            part = self._result_normed(part, result_norm)
        if norm is not None:
            eps = self.config.rms_norm_eps
            normed = self.kernels.rows.add_rms_norm(hidden[rows], part, norm, eps)
            if normed is not None:
                return normed
        hidden[rows].add_(part)
        return None

    def _normed(
        self, hidden: torch.Tensor, normed: torch.Tensor | None, weight: torch.Tensor, rows: slice
    ) -> torch.Tensor:
        """Return some rows normed: of `normed` if all rows are there already."""
        return self._norm(hidden[rows], weight) if normed is None else normed[rows]

    def _result_normed(self, part: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return rows normed, [rows, size]: many of them in place and a few at a time, as memory may be short."""
        if part.shape[0] <= _NORM_ROWS:
            return self._norm(part, weight)
        for first in range(0, part.shape[0], _NORM_ROWS):
            tile = part[first : first + _NORM_ROWS]
            tile.copy_(self._norm(tile, weight))
        return part

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.kernels.rows.rms_norm(x, weight, self.config.rms_norm_eps)
