"""Reads a rank's part of a checkpoint: the layers of its stage, and its slice of each tensor.

Column-parallel linears (q, k, v, gate, up) and the vocabulary are split by rows of the weight, row-parallel
ones (o, down) by columns. Q, K and V, and likewise gate and up, are read into one matrix, so that a layer
runs four products instead of seven. Weights are kept as [in, out], in which the compiled
products copy them without transposing.
"""

import json
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from medha.errors import CheckpointInvalid, ModelUnsupported
from medha.model.quantisation import StoredTensor
from medha_worker.device import Device
from medha_worker.kernels.packed_weight import MatrixWeight
from medha_worker.kernels.protocol import KernelSizes, PackRows
from medha_worker.model.expert_tensors import ExpertTensors, MlpWeights
from medha_worker.model.interleaved_experts import InterleavedExperts
from medha_worker.model.kv_scales import HeadWeights, LayerScales, scales_of_heads, scales_of_latents
from medha_worker.model.latent_tensors import LatentTensors, LatentWeights
from medha_worker.model.linear_reader import LinearReader, tensors_of_linear
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.quantised_experts import QuantisedExperts
from medha_worker.model.quantised_weights import Linear, QuantisedWeight
from medha_worker.model.rope import inverse_frequencies
from medha_worker.model.stage_split import KV_SCALES, tensors_of_stage, text_names
from medha_worker.model.stored_kv_scales import StoredKvScales
from medha_worker.readable import require_readable

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""torch's data types, by the names that a configuration may use."""

_MLP_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
"""Norms before and after the MLP, in families whose results pass norms."""

_log = logging.getLogger("medha.model")

# Called with the bytes of weights read so far, and the bytes to read in total, both as they are stored.
Progress = Callable[[int, int], None]

Pack = Callable[[torch.Tensor], MatrixWeight]
"""Returns a weight in another form of memory, or as it is."""


@dataclass(frozen=True)
class Shard:
    """A rank's part of the model: a stage's layers, and one of `tensor_size` slices of each tensor."""

    tensor_rank: int
    tensor_size: int
    first_layer: int
    last_layer: int
    num_layers: int

    @classmethod
    def whole(cls, config: ModelConfig) -> "Shard":
        return cls(0, 1, 0, config.num_layers, config.num_layers)

    @property
    def is_first_stage(self) -> bool:
        return self.first_layer == 0

    @property
    def is_last_stage(self) -> bool:
        return self.last_layer == self.num_layers

    def query_heads(self, config: ModelConfig) -> int:
        return config.num_query_heads // self.tensor_size

    def kv_heads(self, config: ModelConfig) -> int:
        """Return the number of this rank's KV heads; if ranks outnumber heads, several hold the same one."""
        return max(1, config.num_kv_heads // self.tensor_size)

    def kernel_sizes(self, config: ModelConfig) -> KernelSizes:
        """Return the sizes for which this rank's kernels are made."""
        widths = [width // self.tensor_size for width in config.mlp_widths.values()]
        is_sparse, latent = config.experts is not None and bool(config.experts.layers), config.latent
        return KernelSizes(
            query_heads=self.query_heads(config),
            kv_heads=self.kv_heads(config),
            head_dim=config.head_dim,
            hidden_size=config.hidden_size,
            intermediate_size=widths[0],
            expert_intermediate_size=widths[-1] if is_sparse else 0,
            made_head_dim=0 if latent is None else latent.made_dim,
            has_fp8_kv=config.kv_dtype == "fp8",
            further_widths=()
            if latent is None
            else (latent.query_rank, latent.kv_rank, latent.rope_dim // 2),
        )

    def vocabulary(self, config: ModelConfig) -> list[slice]:
        """Return the vocabulary rows of each tensor rank: equal parts, the last ones shorter or empty."""
        rows = -(-config.vocab_size // self.tensor_size)
        edges = [min(rank * rows, config.vocab_size) for rank in range(self.tensor_size + 1)]
        return [slice(first, last) for first, last in pairwise(edges)]


@dataclass(frozen=True)
class LayerWeights:
    """A rank's slice of one layer. Linear weights are [in, out], quantised or not; a missing bias is None.

    The biases of row-parallel linears (`output_bias`, `down_bias`) are held by tensor rank 0 only, because
    the all-reduce sums up the ranks' results.

    `post_norm` is the norm before the MLP. Queries of a model with a `query_scale` have it in `q_norm`. `sinks` are those of
    this rank's query heads, [heads].

    A sparse layer has a router, [hidden, experts], and its `gate_up` and `down` are those of all experts, [experts, in, out],
    as are their biases, [experts, out]. Its router may add a correction, float32 [experts], to scores before it chooses, and
    it may have an MLP beside the experts (`shared_gate_up`, `shared_down`). With latent attention, `qkv` is the first product
    of `LatentAttention`.
    """

    input_norm: torch.Tensor
    qkv: Linear
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    output_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: Linear | QuantisedExperts
    gate_up_bias: torch.Tensor | None
    down: Linear | QuantisedExperts
    down_bias: torch.Tensor | None
    router: torch.Tensor | None = None
    attention_result_norm: torch.Tensor | None = None
    mlp_result_norm: torch.Tensor | None = None
    router_correction: torch.Tensor | None = None
    shared_gate_up: Linear | None = None
    shared_down: Linear | None = None
    latent: LatentWeights | None = None
    router_bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True)
class Weights:
    """A rank's weights. `embedding` is on the first stage, `final_norm` and `head` on the last, else None.

    `kv_scales` are those of each layer if the KV pool holds FP8.

    `embedding` is [vocab rows, hidden], `head` [hidden, vocab rows]; both hold the vocabulary from
    `vocab_start` on. Tied embeddings on one rank are one tensor.
    """

    device: Device
    layers: Sequence[LayerWeights]
    vocab_start: int
    embedding: torch.Tensor | None
    final_norm: torch.Tensor | None
    head: Linear | None
    kv_scales: Sequence[LayerScales] | None = None


@dataclass(frozen=True)
class PredictionWeights:
    """The part of a prediction head before its layer.

    Attributes:
        embedding: [vocab, hidden], of its own.
        token_norm, hidden_norm: The norms of a token's embedding, and of the hidden state before it, [hidden].
        projection: [2 * hidden, hidden], of both, the embedding first.
    """

    embedding: torch.Tensor
    token_norm: torch.Tensor
    hidden_norm: torch.Tensor
    projection: torch.Tensor


def load_weights(
    directory: Path | str,
    config: ModelConfig,
    shard: Shard,
    *,
    device: Device,
    progress: Progress | None = None,
    pack: Pack | None = None,
    pack_rows: PackRows | None = None,
) -> Weights:
    """Read what `shard` needs from the safetensors files in `directory`, in the device's memory and dtype.

    `pack` is applied to weights of products, and `pack_rows` to quantised ones, layer by layer, so that a single layer is held
    twice at a time.

    Raises:
        CheckpointInvalid: a file or tensor is missing, misshaped or unexpected; the text names it.
        ModelUnsupported: a tensor's number format is none that its place in this model may have; the text names it.
        ConfigInvalid: the model cannot be split over `tensor_size` ranks.
    """
    config.require_tensor_size(shard.tensor_size)
    with ExitStack() as stack:
        reader = _Reader(Path(directory), config, shard, device, progress, stack)
        layers: list[LayerWeights] = []
        scales: list[LayerScales] | None = [] if config.kv_dtype == "fp8" else None
        for index in range(shard.first_layer, shard.last_layer):
            layer = reader.layer(index)
            if scales is not None:
                scales.append(reader.kv_scales(index, layer))
            layers.append(_packed(layer, pack, pack_rows))
        if scales is not None:
            _log.info("keys and values are kept in FP8, with scales %s", reader.kv_scales_source)
        embedding = reader.vocabulary("model.embed_tokens.weight") if shard.is_first_stage else None
        final_norm: torch.Tensor | None = None
        head: Linear | None = None
        if shard.is_last_stage:
            final_norm = reader.norm("model.norm.weight")
            head = reader.head(embedding)
            head = _packed_linear(head, pack, pack_rows)
        return Weights(device, layers, reader.vocab_rows.start, embedding, final_norm, head, scales)


def _packed(layer: LayerWeights, pack: Pack | None, pack_rows: PackRows | None) -> LayerWeights:
    """Return a layer with packed weights.

    Latent attention's products after the first one are not packed, nor are experts on GPUs.
    """
    names = ("qkv", "output", "gate_up", "down", "shared_gate_up", "shared_down")
    weights: dict[str, Any] = {name: getattr(layer, name) for name in names}
    return replace(layer, **{name: _packed_linear(one, pack, pack_rows) for name, one in weights.items()})


def _packed_linear(weight: Any, pack: Pack | None, pack_rows: PackRows | None) -> Any:
    """Return a weight in the form that the kernels want, or None and other values as they are."""
    if pack is not None and isinstance(weight, torch.Tensor):
        return pack(weight)
    if pack_rows is not None and isinstance(weight, QuantisedWeight | QuantisedExperts):
        return weight.packed(pack_rows)
    return weight


def load_embedding(directory: Path | str, config: ModelConfig, *, device: Device) -> torch.Tensor:
    """Read the whole embedding of a model, [vocab, hidden], for a rank that does not hold it.

    Raises:
        CheckpointInvalid, ModelUnsupported: as in `load_weights`.
    """
    shard = Shard(0, 1, 0, 0, config.num_layers)
    with ExitStack() as stack:
        reader = _Reader(Path(directory), config, shard, device, None, stack)
        return reader.vocabulary("model.embed_tokens.weight")


def load_head(
    directory: Path | str,
    config: ModelConfig,
    *,
    device: Device,
    progress: Progress | None = None,
) -> tuple[Weights, PredictionWeights]:
    """Read the prediction head of the model of `config`, which is its last layer, and what is before and after it.

    Raises:
        CheckpointInvalid, ModelUnsupported: as in `load_weights`.
    """
    index = config.num_layers - 1
    shard = Shard(0, 1, index, index + 1, index + 1)
    with ExitStack() as stack:
        reader = _Reader(Path(directory), config, shard, device, progress, stack)
        names = {part: f"model.layers.{index}.{part}.weight" for part in _head_shapes(config)}
        layer = reader.layer(index)
        scales = [reader.kv_scales(index, layer)] if config.kv_dtype == "fp8" else None
        norm, head = reader.norm(names["shared_head.norm"]), reader.whole(names["shared_head.head"])
        return (
            Weights(device, [layer], 0, None, norm, head.t().contiguous(), scales),
            PredictionWeights(
                embedding=reader.whole(names["embed_tokens"]),
                token_norm=reader.norm(names["enorm"]),
                hidden_norm=reader.norm(names["hnorm"]),
                projection=reader.whole(names["eh_proj"]).t().contiguous(),
            ),
        )


def _head_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensors that a prediction head has beside those of a layer, by the names of DeepSeek-V3 within the layer."""
    hidden, vocabulary = config.hidden_size, (config.vocab_size, config.hidden_size)
    return {
        "embed_tokens": vocabulary,
        "enorm": (hidden,),
        "hnorm": (hidden,),
        "eh_proj": (hidden, 2 * hidden),
        "shared_head.norm": (hidden,),
        "shared_head.head": vocabulary,
    }


_Experts = ExpertTensors | InterleavedExperts


def _experts_of(config: ModelConfig, names: Iterable[str]) -> _Experts | None:
    """Return the form in which a checkpoint with tensors of these names holds its experts; None if it has none."""
    block = config.family.experts
    if config.experts is None or block is None:
        return None
    return InterleavedExperts(config) if block.is_interleaved else ExpertTensors(config, names)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return every tensor of a complete checkpoint of this model, with its shape, but for the MLPs of sparse layers."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    biases: set[str] = set()
    for has_bias, names in (
        (config.qkv_bias, {"q_proj", "k_proj", "v_proj"}),
        (config.output_bias, {"o_proj"}),
        (config.mlp_bias, {"gate_proj", "up_proj", "down_proj"}),
    ):
        biases |= names if has_bias else set()
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{norm}.weight"] = (hidden,)
        for norm in _MLP_NORMS if config.family.has_result_norms else ():
            shapes[f"{layer}{norm}.weight"] = (hidden,)
        biased = biases
        if config.latent is not None:
            shapes |= LatentTensors(config).shapes(f"{layer}self_attn.")
            biased = biases - {"q_proj"}
        for name, shape in config.linear_sizes.shared(index).items():
            if not config.is_sparse(index) or ".self_attn." in name:
                shapes[f"{name}.weight"] = shape
                if name.rpartition(".")[2] in biased:
                    shapes[f"{name}.bias"] = shape[:1]
        if config.qk_norm:
            shapes[f"{layer}self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{layer}self_attn.k_norm.weight"] = (config.head_dim,)
        if config.family.has_sinks:
            shapes[f"{layer}self_attn.sinks"] = (config.num_query_heads,)
    if config.has_head:
        shapes |= {f"{layer}{name}.weight": shape for name, shape in _head_shapes(config).items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _kv_scales_of(
    config: ModelConfig, names: Collection[str], *, are_measured: bool
) -> StoredKvScales | None:
    """Return the form in which a checkpoint with tensors of these names holds scales of K and V; None if it has none.

    `are_measured`: they are in a file of their own, one for each head.
    """
    stated = None if config.quantisation is None else config.quantisation.kv_scales
    if are_measured:
        stated = "attn_head"
    return (
        None if stated is None else StoredKvScales(names, config.num_kv_heads, per_head=stated == "attn_head")
    )


def stored_tensors(
    config: ModelConfig, experts: _Experts | None = None, kv_scales: StoredKvScales | None = None
) -> dict[str, StoredTensor]:
    """Return every tensor that the files of this model hold, with the forms that it may have.

    `experts` has those of sparse layers, `kv_scales` those of K and V.
    """
    found: dict[str, StoredTensor] = {}
    linears = config.linear_layers
    for name, shape in expected_shapes(config).items():
        layer = name.removesuffix(".weight")
        if layer in linears:
            found |= tensors_of_linear(config, layer, linears[layer])
        else:
            found[name] = StoredTensor((shape,))
    if experts is not None:
        for index in filter(config.is_sparse, range(config.num_layers)):
            found |= experts.tensors(f"model.layers.{index}.")
    if kv_scales is not None:
        for index in range(config.num_layers):
            found |= kv_scales.tensors(f"model.layers.{index}.self_attn.")
    return found


class _Reader:
    """Opens a checkpoint's files as their tensors are needed, and reads only the slices of one rank."""

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        shard: Shard,
        device: Device,
        progress: Progress | None,
        stack: ExitStack,
    ) -> None:
        self.config, self.shard, self.device = config, shard, device
        self._stack = stack
        self._files: dict[Path, Any] = {}
        file_of = self._locate(directory)
        self._stored_as = text_names(file_of, config)
        self._file_of = {name: file_of[stored] for name, stored in self._stored_as.items()}
        measured = self._measured_kv_scales(directory)
        self._has_measured_scales = measured is not None
        for name in measured or ():
            self._stored_as[name], self._file_of[name] = name, directory / KV_SCALES
        self._linears = LinearReader(config, device, self._slice)
        self._experts = _experts_of(config, self._file_of)
        self._stored_kv_scales = _kv_scales_of(config, self._file_of, are_measured=self._has_measured_scales)
        self._tensors = stored_tensors(config, self._experts, self._stored_kv_scales)
        self._check_names(directory)
        if config.tie_word_embeddings and "lm_head.weight" in self._file_of:
            self._tensors["lm_head.weight"] = StoredTensor(((config.vocab_size, config.hidden_size),))

        rank, size = shard.tensor_rank, shard.tensor_size
        self.vocab_rows = shard.vocabulary(config)[rank]
        heads = shard.query_heads(config)
        self._query_heads = slice(rank * heads, (rank + 1) * heads)
        self._latents = None if config.latent is None else LatentTensors(config)
        q_width = heads * (config.head_dim if config.latent is None else config.latent.value_dim)
        self._query_rows = slice(rank * q_width, (rank + 1) * q_width)  # of the output, with latents
        kv_heads = shard.kv_heads(config)
        first_kv_head = rank * config.num_kv_heads // size
        self._kv_rows = slice(first_kv_head * config.head_dim, (first_kv_head + kv_heads) * config.head_dim)
        mlp_width = config.intermediate_size // size
        self._mlp_rows = slice(rank * mlp_width, (rank + 1) * mlp_width)
        expert_width = 0 if config.experts is None else config.experts.intermediate_size // size
        self._expert_rows = slice(rank * expert_width, (rank + 1) * expert_width)
        shared_width = 0 if config.experts is None else config.experts.shared_size // size
        self._shared_rows = slice(rank * shared_width, (rank + 1) * shared_width)

        self._progress = progress
        self._read_bytes = 0
        self._total_bytes = self._checked_bytes()

    def layer(self, index: int) -> LayerWeights:
        layer = f"model.layers.{index}."
        attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
        qkv = {
            f"{attention}q_proj": self._query_rows,
            f"{attention}k_proj": self._kv_rows,
            f"{attention}v_proj": self._kv_rows,
        }
        adds_bias = self.shard.tensor_rank == 0
        config = self.config
        before_mlp, after_mlp = (f"{layer}{norm}.weight" for norm in _MLP_NORMS)
        after_attention = f"{layer}post_attention_layernorm.weight"
        has_result_norms = config.family.has_result_norms
        shared_gates: Linear | None = None
        shared_downs: Linear | None = None
        if self._experts is not None and config.is_sparse(index):
            rows = self._expert_rows
            weights = self._experts.read(self._linears, layer, rows, self.device, has_output_bias=adds_bias)
            shared = self._experts.shared_names(layer) if isinstance(self._experts, ExpertTensors) else None
            if shared is not None:
                gate, up, down = shared
                shared_gates = self._linears.column_parallel({gate: self._shared_rows, up: self._shared_rows})
                shared_downs = self._linears.row_parallel(down, self._shared_rows)
        else:
            gate_up = {f"{mlp}gate_proj": self._mlp_rows, f"{mlp}up_proj": self._mlp_rows}
            weights = MlpWeights(
                gate_up=self._linears.column_parallel(gate_up),
                gate_up_bias=self._biases(gate_up) if config.mlp_bias else None,
                down=self._linears.row_parallel(f"{mlp}down_proj", self._mlp_rows),
                down_bias=self.whole(f"{mlp}down_proj.bias") if config.mlp_bias and adds_bias else None,
            )
        latent: LatentWeights | None = None
        first: Linear
        if self._latents is not None:
            first, bias, latent = self._latents.read(self._linears, attention, self._query_heads, self.device)
        else:
            first, bias = self._linears.column_parallel(qkv), self._biases(qkv) if config.qkv_bias else None
        sinks: torch.Tensor | None = None
        if config.family.has_sinks:
            sinks = self._convert(self._slice(f"{attention}sinks", self._query_heads))
        return LayerWeights(
            input_norm=self.norm(f"{layer}input_layernorm.weight"),
            qkv=first,
            qkv_bias=bias,
            q_norm=self.norm(f"{attention}q_norm.weight", config.query_scale) if config.qk_norm else None,
            k_norm=self.norm(f"{attention}k_norm.weight") if config.qk_norm else None,
            output=self._linears.row_parallel(f"{attention}o_proj", self._query_rows),
            output_bias=self.whole(f"{attention}o_proj.bias") if config.output_bias and adds_bias else None,
            post_norm=self.norm(before_mlp if has_result_norms else after_attention),
            gate_up=weights.gate_up,
            gate_up_bias=weights.gate_up_bias,
            down=weights.down,
            down_bias=weights.down_bias,
            router=weights.router,
            router_bias=weights.router_bias,
            router_correction=weights.router_correction,
            attention_result_norm=self.norm(after_attention) if has_result_norms else None,
            mlp_result_norm=self.norm(after_mlp) if has_result_norms else None,
            shared_gate_up=shared_gates,
            shared_down=shared_downs,
            latent=latent,
            sinks=sinks,
        )

    def kv_scales(self, index: int, layer: LayerWeights) -> LayerScales:
        """Return the scales of a layer's K and V: those of the checkpoint or measured, or such as its weights cannot exceed."""
        config, head_dim = self.config, self.config.head_dim
        if self._stored_kv_scales is not None:
            heads = slice(self._kv_rows.start // head_dim, self._kv_rows.stop // head_dim)
            return self._stored_kv_scales.read(
                lambda name: self._place(self._slice(name, slice(None))),
                f"model.layers.{index}.self_attn.",
                heads,
            )
        own_norm = layer.k_norm if layer.latent is None else layer.latent.latent_norm
        _, factor = inverse_frequencies(config.rope_of(index), config.rope_dim)
        made_by = HeadWeights(layer.qkv, layer.qkv_bias, layer.input_norm, own_norm, factor)
        if config.latent is not None:
            return scales_of_latents(made_by, config.latent.rope_dim)
        return scales_of_heads(made_by, self.shard.kv_heads(config), head_dim)

    @property
    def kv_scales_source(self) -> str:
        """The origin of the scales of K and V, as the end of a sentence."""
        if self._stored_kv_scales is None:
            return "that follow from the weights"
        return f"that were measured ({KV_SCALES})" if self._has_measured_scales else "of the checkpoint"

    def whole(self, name: str) -> torch.Tensor:
        return self._convert(self._slice(name, slice(None)))

    def norm(self, name: str, factor: float = 1.0) -> torch.Tensor:
        """Return the weight of a norm, times `factor`. Some families store the weight less 1, which is added here."""
        weight = self._slice(name, slice(None))
        if self.config.family.norm_adds_one:
            weight = 1.0 + weight.float()
        return self._convert(weight if factor == 1.0 else weight.float() * factor)

    def vocabulary(self, name: str) -> torch.Tensor:
        return self._convert(self._slice(name, self.vocab_rows))

    def head(self, embedding: torch.Tensor | None) -> Linear:
        """Return the output head, [hidden, vocab rows]; a tied one shares memory with an embedding held here.

        A checkpoint that says "tied" but holds a different head is served with that head, as in transformers.
        """
        if not self.config.tie_word_embeddings:
            if self.config.format_of("lm_head") is not None:
                return self._linears.quantised({"lm_head": self.vocab_rows})
            return self.vocabulary("lm_head.weight").t().contiguous()
        tied = embedding if embedding is not None else self.vocabulary("model.embed_tokens.weight")
        if "lm_head.weight" in self._file_of:
            head = self.vocabulary("lm_head.weight")
            if not torch.equal(head, tied):
                return head.t().contiguous()
        return tied.t()

    def _biases(self, parts: Mapping[str, slice]) -> torch.Tensor:
        return torch.cat([self._convert(self._slice(f"{name}.bias", rows)) for name, rows in parts.items()])

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Put a tensor into the device's memory, as it is."""
        return tensor.to(self.device.torch_device)

    def _convert(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=self.device.torch_device, dtype=self.device.dtype).contiguous()

    def _slice(self, name: str, *index: slice) -> torch.Tensor:
        """Read a slice of the named tensor from its file, and nothing else of it."""
        whole = all(part == slice(None) for part in index)
        file = self._open(self._file_of[name])
        stored = self._stored_as[name]
        tensor: torch.Tensor = file.get_tensor(stored) if whole else file.get_slice(stored)[index]
        self._read_bytes += tensor.nbytes
        if self._progress is not None:
            self._progress(self._read_bytes, max(self._read_bytes, self._total_bytes))
        return tensor

    def _checked_bytes(self) -> int:
        """Return the bytes that this rank will read, having checked the headers of what it reads.

        Tensors held by every rank are counted in part, which is accurate enough for a progress bar.
        """
        layers = range(self.shard.first_layer, self.shard.last_layer)
        read_bytes = 0
        for name in sorted(tensors_of_stage(self._tensors, self.config, layers)):
            path, expected = self._file_of[name], self._tensors[name]
            try:
                stored = self._open(path).get_slice(self._stored_as[name])
            except SafetensorError as error:
                raise CheckpointInvalid(
                    f"{path}: tensor {name} cannot be read ({error}); fetch it again"
                ) from error
            shape, form = tuple(stored.get_shape()), stored.get_dtype()
            if shape not in expected.shapes:
                raise CheckpointInvalid(
                    f"{path}: tensor {name} has shape {list(shape)}, but config.json makes it "
                    f"{list(expected.shapes[0])}; fetch a checkpoint whose files belong together"
                )
            if form not in expected.formats:
                raise ModelUnsupported(
                    f"{path}: tensor {name} is stored as {form}, which is not supported; choose the checkpoint "
                    f"in {_formats(expected.formats)}"
                )
            if name.endswith(_SHAPE):
                self._check_shape(name, path)
            read_bytes += math.prod(shape) * _FORMAT_BYTES[form]
        return read_bytes // self.shard.tensor_size

    def _check_shape(self, name: str, path: Path) -> None:
        """Check the shape that a packed weight has beside it."""
        found, expected = (
            self._open(path).get_tensor(self._stored_as[name]).tolist(),
            self.config.linear_layers[name.removesuffix(_SHAPE)],
        )
        if tuple(found) != expected:
            raise CheckpointInvalid(
                f"{path}: tensor {name} is {found}, but config.json makes the weight {list(expected)}; "
                "fetch a checkpoint whose files belong together"
            )

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            require_readable(path)
            try:
                self._files[path] = self._stack.enter_context(safe_open(path, framework="pt"))
            except FileNotFoundError as error:
                raise CheckpointInvalid(f"{path} is missing; fetch the checkpoint again") from error
            except (SafetensorError, OSError) as error:
                raise CheckpointInvalid(
                    f"{path}: is no complete safetensors file ({error}); fetch it again"
                ) from error
        return self._files[path]

    def _locate(self, directory: Path) -> dict[str, Path]:
        """Return the file that holds each tensor."""
        index = directory / "model.safetensors.index.json"
        if not index.exists():
            single = directory / "model.safetensors"
            others = sorted(found.name for form in _OTHER_FORMS for found in directory.glob(form))
            if others and not single.exists():
                raise CheckpointInvalid(
                    f"{single} is missing, and {others[0]} is in another form; choose the checkpoint with model.safetensors"
                )
            return dict.fromkeys(self._open(single).keys(), single)
        require_readable(index)
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {str(name): str(file) for name, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointInvalid(
                f"{index}: has no readable weight_map ({error!r}); fetch it again"
            ) from error
        for name, file in files.items():
            if Path(file).name != file:
                raise CheckpointInvalid(
                    f"{index}: tensor {name} is said to be in {file!r}, not a plain file name"
                )
        return {name: directory / file for name, file in files.items()}

    def _measured_kv_scales(self, directory: Path) -> set[str] | None:
        """Return the names of the scales that were measured; None if there is no file of them, or the pool needs none."""
        path = directory / KV_SCALES
        if self.config.kv_dtype != "fp8" or not path.exists():
            return None
        other = "scales of keys and values do not apply to latents" if self.config.latent is not None else ""
        if self.config.quantisation is not None and self.config.quantisation.kv_scales is not None:
            other = "the checkpoint has scales of its own, by the kv_cache_scheme of config.json"
        if other:
            raise CheckpointInvalid(f"{path}: {other}; remove this file")
        return set(self._open(path).keys())

    def _check_names(self, directory: Path) -> None:
        missing = [name for name in self._tensors if name not in self._file_of]
        if missing:
            fix = "fetch the checkpoint again"
            if self._has_measured_scales and missing[0].endswith((".k_scale", ".v_scale")):
                fix = f"measure {KV_SCALES} again (medha model kv-scales --force)"
            of_head = f"model.layers.{self.config.num_layers - 1}."
            if self.config.has_head and all(name.startswith(of_head) for name in missing):
                fix += (
                    "; if it was saved without the layer that predicts further tokens, choose another one, or another "
                    "spec.scheduling.speculation.method than predictionHead"
                )
            raise CheckpointInvalid(
                f"{directory}: tensor {missing[0]} of shape {list(self._tensors[missing[0]].shapes[0])} is missing"
                f"{_and_more(missing)}; {fix}"
            )
        # Four leftovers are harmless: a head beside tied embeddings, the inverse frequencies in old Llamas, layers
        # that predict further tokens, and the zeros that AutoGPTQ wrote as biases of layers without one.
        further = range(self.config.num_layers, self.config.num_layers + self.config.further_layers)
        unexpected = [
            name
            for name in self._file_of
            if name not in self._tensors
            and not name.endswith(".rotary_emb.inv_freq")
            and not name.startswith(tuple(f"model.layers.{index}." for index in further))
            and not (name == "lm_head.weight" and self.config.tie_word_embeddings)
        ]
        unexpected = [name for name in unexpected if not self._is_zero_bias(name)]
        if unexpected:
            raise CheckpointInvalid(
                f"{directory}: tensor {unexpected[0]} is unexpected{_and_more(unexpected)}: a "
                f"{self.config.architecture} of this config.json has none; choose a matching checkpoint"
            )

    def _is_zero_bias(self, name: str) -> bool:
        """Return whether a tensor is the bias of a layer in GPTQ, and is all zeros.

        Raises:
            CheckpointInvalid: it is such a bias, and is not all zeros.
        """
        layer = name.removesuffix(".bias")
        is_gptq = self.config.quantisation is not None and self.config.quantisation.method == "gptq"
        if not is_gptq or layer == name or layer not in self.config.linear_layers:
            return False
        if self.config.format_of(layer) is None:
            return False
        path = self._file_of[name]
        if self._open(path).get_tensor(self._stored_as[name]).count_nonzero():
            raise CheckpointInvalid(
                f"{path}: tensor {name} is not zero, but a {self.config.architecture} of this config.json adds no bias "
                "there; choose a matching checkpoint"
            )
        return True


_FORMAT_BYTES = {
    "F32": 4,
    "BF16": 2,
    "F16": 2,
    "I64": 8,
    "I32": 4,
    "I8": 1,
    "U8": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
}
"""Bytes of a value, by safetensors' names of number formats."""

_OTHER_FORMS = ("consolidated*.safetensors", "consolidated*.pth", "pytorch_model*.bin", "*.gguf")
"""Names of files that hold weights as other programs read them."""
_FORMAT_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_SHAPE = ".weight_shape"


def _formats(names: Iterable[str]) -> str:
    return " or ".join(_FORMAT_NAMES.get(name, name) for name in sorted(names))


def _and_more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
