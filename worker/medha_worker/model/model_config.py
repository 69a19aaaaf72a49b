"""The model described by a checkpoint's `config.json`, checked field by field.

A field that changes results is implemented or refused, never ignored: a model that answers slightly wrong is
worse than one that does not start. The architectures of `families` are supported; their defaults are those
of `transformers`. Reading the file needs no torch, so that `medha up` can refuse a model before it starts
anything.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from medha.errors import CheckpointInvalid, ConfigInvalid, ModelUnsupported
from medha.model.config_fields import TEXT_CONFIGS, same_model_type, text_fields
from medha.model.kv_dtype import KvDtype
from medha.model.latent_shape import LatentShape
from medha.model.linear_sizes import LinearSizes, SparseBlock
from medha.model.quantisation import Quantisation, WeightFormat, decode, shown
from medha_worker.model.expert_routing import ExpertRouting
from medha_worker.model.families.family import Activation, ExpertBlock, Family
from medha_worker.model.families.family_table import FAMILIES
from medha_worker.model.rope_config import RopeConfig
from medha_worker.readable import require_readable

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number, for each data type that can be served."""

MODELOPT_CONFIG = "hf_quant_config.json"
"""File in which ModelOpt describes a quantised checkpoint, which is refused."""

_log = logging.getLogger("medha.model")


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """The activation of gpt-oss' experts: (up + 1) * gate * sigmoid(alpha * gate).

    `limit` is the largest gate, and the largest size of an up, before that.
    """

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Shape and arithmetic of the experts of a model's sparse layers.

    Attributes:
        count: Experts of a layer.
        per_token: Experts that a token passes; `routing` has the way in which they are chosen.
        intermediate_size: Width of one expert.
        renormalises: Whether the probabilities of a token's experts are scaled to a sum of 1.
        layers: Indexes of the sparse layers; the others are dense.
        routing: The way in which the router chooses.
        shared_size: Width of the MLP that every token passes beside its experts; 0 if there is none.
        swiglu: The activation if it is clamped; None: silu(gate) * up.
    """

    count: int
    per_token: int
    intermediate_size: int
    renormalises: bool
    layers: frozenset[int]
    routing: ExpertRouting = field(default_factory=ExpertRouting)
    shared_size: int = 0
    swiglu: ClampedSwiglu | None = None


@dataclass(frozen=True)
class ModelConfig:
    """Shape and arithmetic of one model, and the longest sequence that it is served at.

    Attributes:
        intermediate_size: Width of the MLP of dense layers.
        head_dim: Width of one attention head; `num_query_heads * head_dim` need not equal `hidden_size`. With latents,
            that of a row of the KV pool.
        num_kv_heads: Heads of K and V; each serves `num_query_heads / num_kv_heads` query heads. With latents, 1.
        qkv_bias, output_bias, mlp_bias: Whether these linears add a bias.
        qk_norm: Whether queries and keys pass an RMSNorm over each head (Qwen3).
        tie_word_embeddings: Whether the output head is the embedding.
        dtype: Number format that the checkpoint asks for, one of `ELEMENT_BYTES`.
        rope: The rotary embedding of all layers but `local_layers`.
        local_rope: That of `local_layers`; None if there are none.
        local_layers: Indexes of the layers that could have a window in a family where these have a RoPE of their own.
        query_scale: Factor on queries, beside the 1 / sqrt(head_dim) of attention; queries have a norm if it is not 1.
        embedding_scale: Factor on embeddings, which is rounded to the number format that the model runs in.
        windows: Tokens that a row of each layer sees, its own among them; None: its whole context. A window that no
            sequence exceeds is None.
        max_position_tokens: The checkpoint's own limit.
        max_model_len: Longest sequence (prompt and output tokens) that is served.
        experts: The sparse layers; None if all layers are dense.
        latent: The sizes of latent attention; None if each head has K and V of its own.
        rope_is_interleaved: Whether RoPE pairs neighbouring values, and not a head's halves.
        further_layers: Layers after the last whose tensors are skipped: they predict further tokens.
        has_head: Whether the last layer is such a layer, with a part of its own before and after it (`with_head`).
        quantisation: The formats of quantised linears; None if none is quantised.
        kv_dtype: Data type of the KV pool.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    rope: RopeConfig
    windows: tuple[int | None, ...]
    dtype: str
    max_position_tokens: int
    max_model_len: int
    experts: ExpertsConfig | None = None
    latent: LatentShape | None = None
    rope_is_interleaved: bool = False
    further_layers: int = 0
    has_head: bool = False
    quantisation: Quantisation | None = None
    local_rope: RopeConfig | None = None
    local_layers: frozenset[int] = frozenset()
    query_scale: float = 1.0
    embedding_scale: float = 1.0
    kv_dtype: KvDtype = "auto"

    def rope_of(self, layer: int) -> RopeConfig:
        """Return the rotary embedding of the layer of this index."""
        return self.local_rope if self.local_rope is not None and layer in self.local_layers else self.rope

    @property
    def family(self) -> Family:
        """The declarations of the model's architecture."""
        return FAMILIES[self.architecture]

    @property
    def rope_dim(self) -> int:
        """Width of the part of a query or key that RoPE rotates."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def query_dim(self) -> int:
        """Width of a head's query as it enters attention."""
        return self.head_dim if self.latent is None else self.latent.query_dim

    @property
    def result_dim(self) -> int:
        """Width of a head's result as it leaves attention."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def kv_tensors(self) -> int:
        """Number of tensors of a layer's KV: K and V, or the latents alone."""
        return 2 if self.latent is None else 1

    def with_head(self) -> ModelConfig:
        """Return the model with the first of the layers that predict further tokens as its last one.

        It is a layer as the others are, with experts if the model has any.
        """
        assert self.further_layers > 0, "the model has no layer that predicts further tokens"
        experts, index = self.experts, self.num_layers
        return replace(
            self,
            num_layers=index + 1,
            further_layers=self.further_layers - 1,
            has_head=True,
            windows=(*self.windows, None),
            experts=None if experts is None else replace(experts, layers=experts.layers | {index}),
        )

    def head_weights_bytes(self, element_bytes: int) -> int:
        """Return the memory of the matrices of the layer that `with_head` adds, with its own embedding and output head."""
        around = 2 * (self.vocab_size + self.hidden_size) * self.hidden_size
        return (
            self.with_head().weights_bytes(element_bytes)
            - self.weights_bytes(element_bytes)
            + around * element_bytes
        )

    def is_sparse(self, layer: int) -> bool:
        """Return True if the layer of this index has experts."""
        return self.experts is not None and layer in self.experts.layers

    @property
    def mlp_widths(self) -> dict[str, int]:
        """Intermediate sizes of the MLPs that occur in the model, by the field of config.json that states them."""
        sparse = 0 if self.experts is None else len(self.experts.layers)
        widths = {"intermediate_size": self.intermediate_size} if sparse < self.num_layers else {}
        if self.experts is not None and sparse:
            assert self.family.experts is not None
            widths[self.family.experts.width_field] = self.experts.intermediate_size
        return widths

    @cached_property
    def linear_sizes(self) -> LinearSizes:
        """The sizes that the linears of layers follow from."""
        sparse = None
        if self.experts is not None and self.family.experts is not None:
            sparse = SparseBlock(
                self.experts.layers,
                self.experts.count,
                self.experts.intermediate_size,
                self.experts.shared_size,
                None if self.family.experts.is_interleaved else self.family.experts.names,
            )
        return LinearSizes(
            layers=self.num_layers,
            hidden=self.hidden_size,
            query_heads=self.num_query_heads,
            query_width=self.num_query_heads * self.head_dim,
            kv_width=self.num_kv_heads * self.head_dim,
            intermediate=self.intermediate_size,
            latent=self.latent,
            sparse=sparse,
        )

    @cached_property
    def linear_layers(self) -> Mapping[str, tuple[int, int]]:
        """The shapes, [rows, columns], of the linears that may be quantised, by name: those of layers, and the output head.

        Experts are among them, unless one tensor holds those of all.
        """
        found: dict[str, tuple[int, int]] = {}
        for index in range(self.num_layers):
            found |= self.linear_sizes.shared(index) | self.linear_sizes.of_experts(index)
        if not self.tie_word_embeddings:
            found["lm_head"] = self.vocab_size, self.hidden_size
        return found

    @cached_property
    def _formats(self) -> Mapping[str, WeightFormat]:
        """The formats of the linears that are quantised, by name."""
        if self.quantisation is None:
            return {}
        formats = {layer: self.quantisation.format_of(layer) for layer in self.linear_layers}
        return {layer: form for layer, form in formats.items() if form is not None}

    def format_of(self, layer: str) -> WeightFormat | None:
        """Return the format of a linear by name; None if it is not quantised."""
        return self._formats.get(layer)

    def weights_bytes(self, element_bytes: int) -> int:
        """Return the memory of all matrices; `element_bytes` are those of a value that is not quantised."""
        if self.quantisation is None:
            return self.parameters * element_bytes
        total = self.vocab_size * self.hidden_size * element_bytes
        for layer, shape in self.linear_layers.items():
            total += self.linear_sizes.held_bytes(layer, shape, self.format_of(layer), element_bytes)
        if self.experts is not None and self.family.experts is not None:
            total += len(self.experts.layers) * self.experts.count * self.hidden_size * element_bytes
            if self.family.experts.is_interleaved:
                each = self.expert_weight_bytes(element_bytes) or element_bytes
                total += round(self._parameters_of_experts(self.experts.count) * each)
        return total

    def expert_weight_bytes(self, element_bytes: int) -> float | None:
        """Return the mean bytes of a weight of the experts, scales included; None if the model, or their tensor, is not quantised."""
        return self.linear_sizes.mean_expert_bytes(self.quantisation, element_bytes)

    def shared_weight_bytes(self, element_bytes: int) -> float | None:
        """Return the mean bytes of a weight that every token passes, scales included; None if nothing is quantised."""
        return self.linear_sizes.mean_bytes(self.quantisation, element_bytes)

    def _parameters_of_experts(self, count: int) -> int:
        """Return the number of weights of so many experts in each sparse layer."""
        if self.experts is None:
            return 0
        return len(self.experts.layers) * count * 3 * self.hidden_size * self.experts.intermediate_size

    @property
    def parameters(self) -> int:
        """Number of parameters in all matrices, those of all experts included; the vectors are negligible."""
        embedding = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        idle = 0
        if self.experts is not None:
            idle = self._parameters_of_experts(self.experts.count - self.experts.per_token)
        return int(self.linear_flops_per_token / 2) + idle + embedding

    def require_tensor_size(self, tensor_size: int) -> None:
        """Check that the layers can be split over `tensor_size` ranks.

        Raises:
            ConfigInvalid: they cannot.
        """
        for name, value in {"num_attention_heads": self.num_query_heads, **self.mlp_widths}.items():
            if value % tensor_size:
                raise ConfigInvalid(
                    f"parallelism.tensor is {tensor_size}, which does not divide {name} ({value}); choose a divisor"
                )
        kv_heads = self.num_kv_heads
        if kv_heads % tensor_size and tensor_size % kv_heads:
            raise ConfigInvalid(
                f"parallelism.tensor is {tensor_size}; it must divide num_key_value_heads ({kv_heads}) or be a multiple"
            )
        self._require_whole_groups(tensor_size)

    def _require_whole_groups(self, tensor_size: int) -> None:
        """Check that no rank's part of a linear's input cuts a group of activations, whose scale it would not know."""
        split = self.linear_sizes.split_inputs
        for layer, (_, columns) in self.linear_layers.items() if tensor_size > 1 else ():
            form = self.format_of(layer)
            if form is None or form.activations is None or layer.rpartition(".")[2] not in split:
                continue
            size = form.activations.group_size
            if size is not None and columns // tensor_size % size:
                raise ConfigInvalid(
                    f"parallelism.tensor is {tensor_size}, which cuts the {columns} inputs of {layer} within groups of {size} "
                    f"activations that share a scale ({form.name}); choose a tensor whose parts are multiples of {size}"
                )

    @property
    def linear_flops_per_token(self) -> float:
        """2 x the parameters of the matrices that a token passes: all layers' linears and the output head.

        In a sparse layer, a token passes the router, its own experts, and the MLP beside them if there is one.
        """
        attention = self.hidden_size * self.head_dim * 2 * (self.num_query_heads + self.num_kv_heads)
        if self.latent is not None:
            attention = self.latent.parameters(self.hidden_size, self.num_query_heads)
        dense, mlps = self.num_layers, 0
        if self.experts is not None:
            dense -= len(self.experts.layers)
            widths = self.experts.per_token * self.experts.intermediate_size + self.experts.shared_size
            passed = self.experts.count + 3 * widths
            mlps = len(self.experts.layers) * self.hidden_size * passed
        mlps += dense * 3 * self.hidden_size * self.intermediate_size
        return 2.0 * (self.num_layers * attention + mlps + self.vocab_size * self.hidden_size)

    @property
    def attention_flops_per_pair(self) -> float:
        """FLOPs per (query, key) pair in all layers and heads: scores and values, 2 x head_dim each.

        Latents are read as values in their whole width, the key's part with position included.
        """
        return 4.0 * self.num_layers * self.num_query_heads * self.head_dim

    @classmethod
    def from_directory(
        cls,
        directory: Path | str,
        max_model_len: int | None = None,
        rope_scaling: Mapping[str, Any] | None = None,
        kv_dtype: KvDtype = "auto",
    ) -> ModelConfig:
        """Read `config.json` in `directory`.

        Args:
            directory: A Hugging Face model directory.
            max_model_len: Longest sequence to serve, in tokens; None serves the checkpoint's own limit.
            rope_scaling: Replaces the checkpoint's RoPE parameters; its `rope_theta` is kept unless given.
            kv_dtype: Data type of the KV pool.

        Raises:
            CheckpointInvalid: the file is missing, is not a JSON object, or its values contradict each other.
            ModelUnsupported: the model needs something that is not implemented.
            ConfigInvalid: `max_model_len` is beyond the checkpoint's limit, or `rope_scaling` is wrong.
        """
        values = read_json(Path(directory) / "config.json")
        _refuse_modelopt(Path(directory), values)
        return cls.from_values(values, max_model_len, rope_scaling, kv_dtype)

    @classmethod
    def from_values(
        cls,
        values: Mapping[str, Any],
        max_model_len: int | None = None,
        rope_scaling: Mapping[str, Any] | None = None,
        kv_dtype: KvDtype = "auto",
    ) -> ModelConfig:
        """Read the content of a `config.json`; arguments and errors are those of `from_directory`."""
        family = _family(_Fields(values))
        _require_text_config(_Fields(values), family)
        fields = _Fields(text_fields({**values, "model_type": family.model_type}))
        _refuse_foreign_features(fields, family)

        hidden_size = fields.positive_int("hidden_size")
        num_query_heads = fields.positive_int("num_attention_heads")
        latent = _latent(fields, num_query_heads) if family.has_latents else None
        if latent is None:
            num_kv_heads = _num_kv_heads(fields, family, num_query_heads)
            head_dim = _head_dim(fields, family, hidden_size, num_query_heads)
        else:
            num_kv_heads, head_dim = 1, latent.row_dim
        max_position_tokens = fields.positive_int("max_position_embeddings")
        rope, local_rope = _ropes(fields, family, max_position_tokens, rope_scaling)
        replaced = None if rope_scaling is None else _stored_ropes(fields, family)[0]
        limit = _length_limit(rope, max_position_tokens, replaced)
        num_layers = fields.positive_int("num_hidden_layers")
        served = _served_length(max_model_len, limit, rope, _dual_chunk_limit(fields))
        sliding_layers = _sliding_layers(fields, family, num_layers)
        config = cls(
            architecture=family.architecture,
            vocab_size=fields.positive_int("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.positive_int("intermediate_size"),
            num_layers=num_layers,
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.positive_number("rms_norm_eps", family.rms_norm_eps),
            qkv_bias=family.qkv_bias or _attention_bias(fields, family),
            output_bias=_attention_bias(fields, family),
            mlp_bias=family.reads_mlp_bias and fields.boolean("mlp_bias", False),
            qk_norm=family.qk_norm,
            tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
            rope=rope,
            windows=_windows(fields, family, sliding_layers, served),
            dtype=_dtype(fields, family),
            max_position_tokens=limit,
            max_model_len=served,
            experts=None if family.experts is None else _experts(fields, family.experts, num_layers),
            latent=latent,
            rope_is_interleaved=latent is not None and _rope_is_interleaved(fields, family),
            further_layers=_further_layers(fields, family),
            quantisation=_quantisation(fields, family),
            local_rope=local_rope,
            local_layers=frozenset() if local_rope is None else _indexes(sliding_layers),
            query_scale=_query_scale(fields, family, head_dim),
            embedding_scale=math.sqrt(fields.positive_int("hidden_size")) if family.scales_embedding else 1.0,
            kv_dtype=kv_dtype,
        )
        for layer, (rows, columns) in config.linear_layers.items():
            form = config.format_of(layer)
            if form is not None:
                form.require_divisible(f"config.json: {layer}", rows, columns)
        return config


# Fields of related architectures that change results, with the values that switch them off.
_FOREIGN_FIELDS: dict[str, tuple[object, ...]] = {
    "partial_rotary_factor": (None, 1, 1.0),
    "rotary_pct": (None, 1, 1.0),
    "rope_interleaved": (None, False),
    "attn_logit_softcapping": (None, 0, 0.0),
    "final_logit_softcapping": (None, 0, 0.0),
    "logits_soft_cap": (None, 0, 0.0),
    "query_pre_attn_scalar": (None,),
    "attention_multiplier": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
    "clip_qkv": (None,),
    "attention_sink": (None, False),
    "swiglu_alpha": (None,),
    "swiglu_limit": (None,),
    "attention_chunk_size": (None,),
    "no_rope_layers": (None,),
    "no_rope_layer_interval": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "is_causal": (None, True),
    "use_bidirectional_attention": (None, False),
    "index_topk": (None, 0),
    "use_logn_attn": (None, False),
    "llama_4_scaling": (None,),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "cross_attention_hidden_size": (None,),
}

# The field that names the function on gates, and the names that it may have.
_ACTIVATIONS: dict[Activation, tuple[str, tuple[str | None, ...]]] = {
    "silu": ("hidden_act", (None, "silu", "swish")),
    "gelu_tanh": ("hidden_activation", (None, "gelu_pytorch_tanh")),
}

# Fields that each RoPE kind reads besides `rope_type` and `rope_theta`: (required, optional).
_ROPE_FIELDS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "dynamic": (frozenset({"factor"}), frozenset()),
    "llama3": (frozenset({"factor", "low_freq_factor", "high_freq_factor"}), frozenset()),
    "yarn": (
        frozenset({"factor"}),
        frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
    ),
}
# Fields on which no kind's result depends, unless they are named above.
_ROPE_NEUTRAL_FIELDS = {"rope_type", "type", "rope_theta", "original_max_position_embeddings", "finetuned"}


_MOST = 2**53
"""Largest number in a field. Floats hold whole numbers up to this one exactly, and products of a few of them do not overflow."""


class _Fields:
    """A JSON object with type-checked fields; errors give the field, its value and the remedy."""

    def __init__(self, values: Mapping[str, Any], source: str = "config.json") -> None:
        self.values = values
        self.source = source

    def invalid(self, name: str, wanted: str) -> CheckpointInvalid:
        found = f"is {shown(self.values[name])}" if name in self.values else "is missing"
        return CheckpointInvalid(
            f"{self.source}: {name} {found}, but must be {wanted}; fetch the checkpoint again or correct the field"
        )

    def unsupported(self, name: str, remedy: str) -> ModelUnsupported:
        return ModelUnsupported(
            f"{self.source}: {name} is {shown(self.values[name])}, which is not supported; {remedy}"
        )

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def positive_int(self, name: str) -> int:
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
            raise self.invalid(name, "a whole number of at least 1 (and at most 2^53)")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
            raise self.invalid(name, "a whole number of at least 0 (and at most 2^53)")
        return value

    def positive_number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MOST:
            raise self.invalid(name, "a positive number (of at most 2^53)")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """Return a positive number; absent, null and 0 all mean "not given", as in transformers."""
        value = self.values.get(name)
        return None if value is None or value == 0 else self.positive_number(name)

    def boolean(self, name: str, default: bool) -> bool:
        """Return a truth value; null is false, as in transformers, where that is the default."""
        value = self.values.get(name, default)
        if value is None and not default:
            return False
        if not isinstance(value, bool):
            raise self.invalid(name, "true or false")
        return value


def read_json(path: Path) -> dict[str, Any]:
    """Return the object that a file of a checkpoint holds.

    Raises:
        CheckpointInvalid: there is none.
    """
    require_readable(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointInvalid(
            f"{path}: cannot be read ({error.strerror}); name a Hugging Face model directory"
        ) from error
    except ValueError as error:
        raise CheckpointInvalid(f"{path}: is not JSON ({error}); fetch the checkpoint again") from error
    except RecursionError as error:
        raise CheckpointInvalid(
            f"{path}: lists or objects are nested too deeply to be read; fetch the checkpoint again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointInvalid(f"{path}: holds a {type(value).__name__}, not an object; fetch it again")
    return value


def _refuse_modelopt(directory: Path, values: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose quantisation is described beside `config.json` only, as ModelOpt once exported it."""
    path = directory / MODELOPT_CONFIG
    if values.get("quantization_config") is not None or not path.exists():
        return
    described = read_json(path).get("quantization")
    name = described.get("quant_algo") if isinstance(described, dict) else None
    raise ModelUnsupported(
        f"{path}: quant_algo is {shown(name)}, in ModelOpt's format, which is not supported; choose the unquantised "
        "checkpoint, or one in a format of docs/quantisation.md"
    )


def _family(fields: _Fields) -> Family:
    supported = ", ".join(FAMILIES)
    names = fields.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.invalid("architectures", f"a list of one name (supported: {supported})")
    name = names[0]
    if name not in FAMILIES:
        raise ModelUnsupported(
            f"config.json: architecture {name} is not supported; choose a model of one of {supported}"
        )
    family = FAMILIES[name]
    # transformers picks the model class by model_type, so on a contradiction it would serve another model
    # than we do.
    kind = fields.get("model_type")
    if kind is not None and same_model_type(kind) != family.model_type:
        raise fields.invalid("model_type", f"{family.model_type!r}, as architectures says {name}")
    return family


def _require_text_config(fields: _Fields, family: Family) -> None:
    """Check that a model that also sees images states the text model inside."""
    if family.model_type not in TEXT_CONFIGS:
        return
    name, kind = TEXT_CONFIGS[family.model_type]
    inner = fields.get(name)
    if not isinstance(inner, dict) or inner.get("model_type") not in (None, kind):
        raise fields.invalid(name, f"an object whose model_type is {kind!r}")


def _refuse_foreign_features(fields: _Fields, family: Family) -> None:
    own: tuple[str, ...] = ()
    if family.experts is not None:
        own = family.experts.count_fields
        if family.experts.is_interleaved:
            own += ("swiglu_alpha", "swiglu_limit")
    if family.query_scalar is not None:
        own += ("query_pre_attn_scalar",)
    of_family = {"use_qk_norm": (None, family.qk_norm)}
    for name, neutral in (*(_FOREIGN_FIELDS | of_family).items(), _ACTIVATIONS[family.activation]):
        if name not in own and fields.get(name) not in neutral:
            raise fields.unsupported(name, "choose a checkpoint without it")


def _quantisation(fields: _Fields, family: Family) -> Quantisation | None:
    """Return the formats of quantised linears; old files have them under `compression_config`."""
    name = "compression_config" if fields.get("quantization_config") is None else "quantization_config"
    value = fields.get(name)
    if value is not None and family.model_type in TEXT_CONFIGS:
        raise fields.unsupported(
            name, f"choose an unquantised {family.architecture}, or a quantised text model"
        )
    if value is None:
        return None
    expert_methods = None if family.experts is None else family.experts.quantised_as
    found = decode(value, f"{fields.source}: {name}", expert_methods=expert_methods)
    if found.kv_scales is not None and family.has_latents:
        raise fields.unsupported(
            name,
            "scales of keys and values do not apply to latents; choose a checkpoint without kv_cache_scheme",
        )
    return found


def _experts(fields: _Fields, block: ExpertBlock, num_layers: int) -> ExpertsConfig:
    if block.deepseek is not None:
        return _deepseek_experts(fields, block, block.deepseek, num_layers)
    count, per_token = _expert_counts(fields, block)
    renormalises = block.renormalises
    return ExpertsConfig(
        count,
        per_token,
        fields.positive_int(block.width_field),
        fields.boolean("norm_topk_prob", False) if renormalises is None else renormalises,
        _sparse_layers(fields, num_layers) if block.may_be_mixed else frozenset(range(num_layers)),
        swiglu=ClampedSwiglu(
            fields.positive_number("swiglu_alpha", 1.702), fields.positive_number("swiglu_limit", 7.0)
        )
        if block.is_interleaved
        else None,
    )


def _expert_counts(fields: _Fields, block: ExpertBlock) -> tuple[int, int]:
    """Return the number of experts, and of those that a token passes."""
    given = [name for name in block.count_fields if fields.get(name) is not None]
    name = given[0] if given else block.count_fields[0]
    count, per_token = fields.positive_int(name), fields.positive_int("num_experts_per_tok")
    for other in given[1:]:
        if fields.get(other) != count:
            raise fields.invalid(other, f"equal to {name} ({count}), or absent")
    if per_token > count:
        raise fields.invalid("num_experts_per_tok", f"at most {name} ({count})")
    return count, per_token


def _deepseek_experts(
    fields: _Fields, block: ExpertBlock, version: Literal[2, 3], num_layers: int
) -> ExpertsConfig:
    """Read the experts of DeepSeek-V2 or V3.

    `transformers` ignores some fields of the published files, and computes as if they had the values that are let
    through here.
    """
    method = fields.get("topk_method")
    ignored: dict[str, tuple[object, ...]] = {
        "moe_layer_freq": (None, 1),
        "scoring_func": (None, "softmax" if version == 2 else "sigmoid"),
        "topk_method": (None, "greedy", "group_limited_greedy") if version == 2 else (None, "noaux_tc"),
    }
    if version == 2:
        ignored |= {"norm_topk_prob": (None, False), "mlp_bias": (None, False)}
    for name, allowed in ignored.items():
        if fields.get(name) not in allowed:
            values = ", ".join(repr(value) for value in allowed if value is not None)
            raise fields.unsupported(name, f"choose a checkpoint with one of {values}")
    count, per_token = _expert_counts(fields, block)
    width = fields.positive_int(block.width_field)
    groups = kept = 1
    if version == 3 or method == "group_limited_greedy":
        groups, kept = _expert_groups(fields, count, per_token, least=2 if version == 3 else 1)
    return ExpertsConfig(
        count,
        per_token,
        width,
        version == 3 and fields.boolean("norm_topk_prob", True),
        frozenset(range(fields.count("first_k_dense_replace"), num_layers)),
        ExpertRouting(
            scores="softmax" if version == 2 else "sigmoid",
            is_corrected=version == 3,
            groups=groups,
            kept_groups=kept,
            scale=fields.positive_number("routed_scaling_factor"),
            is_float32=True,
        ),
        fields.positive_int("n_shared_experts") * width,
    )


def _expert_groups(fields: _Fields, count: int, per_token: int, least: int) -> tuple[int, int]:
    """Return the number of groups of experts and of those that a token keeps; a group has `least` experts at least."""
    groups, kept = fields.positive_int("n_group"), fields.positive_int("topk_group")
    if count % groups or count // groups < least:
        raise fields.invalid(
            "n_group", f"a divisor of the number of experts ({count}), with {least} or more in each group"
        )
    if kept > groups or kept * (count // groups) < per_token:
        raise fields.invalid(
            "topk_group",
            f"at most n_group ({groups}), and so many that their experts suffice for num_experts_per_tok ({per_token})",
        )
    return groups, kept


def _latent(fields: _Fields, num_query_heads: int) -> LatentShape:
    """Read the sizes of latent attention. `head_dim` is not read: files have the width of RoPE there, or nothing."""
    if fields.get("num_key_value_heads") not in (None, num_query_heads):
        raise fields.invalid("num_key_value_heads", f"equal to num_attention_heads ({num_query_heads})")
    if "q_lora_rank" not in fields.values:
        raise fields.invalid("q_lora_rank", "a whole number of at least 1, or null")
    latent = LatentShape(
        query_rank=0 if fields.get("q_lora_rank") is None else fields.positive_int("q_lora_rank"),
        kv_rank=fields.positive_int("kv_lora_rank"),
        plain_dim=fields.positive_int("qk_nope_head_dim"),
        rope_dim=fields.positive_int("qk_rope_head_dim"),
        value_dim=fields.positive_int("v_head_dim"),
    )
    if latent.rope_dim % 2:
        raise fields.invalid("qk_rope_head_dim", "even, as RoPE rotates pairs")
    return latent


def _rope_is_interleaved(fields: _Fields, family: Family) -> bool:
    """True if RoPE pairs neighbouring values; only V3 has a field for it."""
    if family.experts is not None and family.experts.deepseek == 3:
        return fields.boolean("rope_interleave", True)
    if fields.get("rope_interleave") not in (None, True):
        raise fields.unsupported("rope_interleave", f"{family.architecture} always interleaves")
    return True


def _further_layers(fields: _Fields, family: Family) -> int:
    """Return the number of layers that predict further tokens, which `transformers` skips in DeepSeek-V3 alone."""
    if family.experts is None or family.experts.deepseek != 3:
        return 0
    return fields.count("num_nextn_predict_layers", 0)


def _sparse_layers(fields: _Fields, num_layers: int) -> frozenset[int]:
    """Return every `decoder_sparse_step`-th layer, but those of `mlp_only_layers`."""
    step = 1 if "decoder_sparse_step" not in fields.values else fields.positive_int("decoder_sparse_step")
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise fields.invalid("mlp_only_layers", "a list of layer indexes, or null")
    return frozenset(range(step - 1, num_layers, step)) - frozenset(dense)


def _num_kv_heads(fields: _Fields, family: Family, num_query_heads: int) -> int:
    # Only Llama's configuration reads a missing field as "as many as query heads"; null means that
    # everywhere.
    may_be_missing = family.kv_heads_may_be_missing or "num_key_value_heads" in fields.values
    if fields.get("num_key_value_heads") is None and may_be_missing:
        return num_query_heads
    count = fields.positive_int("num_key_value_heads")
    if num_query_heads % count:
        raise fields.invalid("num_key_value_heads", f"a divisor of num_attention_heads ({num_query_heads})")
    return count


def _head_dim(fields: _Fields, family: Family, hidden_size: int, num_query_heads: int) -> int:
    if fields.get("head_dim") is None:
        if family.head_dim is not None and "head_dim" not in fields.values:
            return family.head_dim
        if hidden_size % num_query_heads:
            raise fields.invalid(
                "num_attention_heads", f"a divisor of hidden_size ({hidden_size}) where head_dim is not given"
            )
        head_dim = hidden_size // num_query_heads
    else:
        head_dim = fields.positive_int("head_dim")
    if head_dim % 2:
        raise CheckpointInvalid(
            f"config.json: the head dimension is {head_dim}, but RoPE needs an even one; correct head_dim"
        )
    return head_dim


def _attention_bias(fields: _Fields, family: Family) -> bool:
    """True if q, k, v and o all have a bias.

    Some families have no such field; the tensors are checked anyway.
    """
    return family.reads_attention_bias and fields.boolean("attention_bias", family.attention_bias)


def _dtype(fields: _Fields, family: Family) -> str:
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = fields.get(name)
    if value is None:
        return family.dtype
    if not isinstance(value, str) or value not in ELEMENT_BYTES:
        raise fields.unsupported(name, f"choose a checkpoint in one of {', '.join(ELEMENT_BYTES)}")
    return value


def _query_scale(fields: _Fields, family: Family, head_dim: int) -> float:
    if family.query_scalar is None:
        return 1.0
    return math.sqrt(head_dim / fields.positive_number("query_pre_attn_scalar", family.query_scalar))


def _ropes(
    fields: _Fields, family: Family, max_position_tokens: int, override: Mapping[str, Any] | None
) -> tuple[RopeConfig, RopeConfig | None]:
    """Read RoPE parameters in either spelling: `rope_parameters`, or `rope_scaling` beside `rope_theta`.

    The second are those of layers that could have a window, if the family has them.
    """
    full, local = _stored_ropes(fields, family)
    near: RopeConfig | None = None
    if local is not None:
        local.setdefault("rope_theta", fields.get("rope_local_base_freq") or family.local_rope_theta)
        near = _rope_config(_Fields(local, "config.json: RoPE parameters"), fields, max_position_tokens)
        if near.kind not in ("default", "linear"):
            raise fields.unsupported(
                "rope_parameters", "sliding_attention may have rope_type default or linear"
            )
    return _rope(fields, full, family.rope_theta, max_position_tokens, override), near


def _stored_ropes(fields: _Fields, family: Family) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the checkpoint's own parameters; the second are those of layers that could have a window, as in `_ropes`."""
    if family.local_rope_theta is not None:
        return _rope_by_layer_type(fields)
    old, new = _flat(fields, "rope_scaling"), _flat(fields, "rope_parameters")
    if old and new and old != new:
        raise fields.invalid("rope_scaling", f"equal to rope_parameters ({new!r}), or absent")
    return dict(old or new or family.rope or {}), None


def _rope_by_layer_type(fields: _Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameters of layers without and with a window; the older spelling states only the former."""
    new = fields.get("rope_parameters")
    if new is None:
        return dict(_flat(fields, "rope_scaling") or {}), {}
    kinds = ("full_attention", "sliding_attention")
    if not isinstance(new, dict) or not all(
        name in kinds and isinstance(inner, dict | None) for name, inner in new.items()
    ):
        raise fields.invalid(
            "rope_parameters", f"null or an object with an object for each of {', '.join(kinds)}"
        )
    if fields.get("rope_scaling") is not None:
        raise fields.invalid("rope_scaling", "null or absent beside rope_parameters")
    full, local = (dict(new.get(kind) or {}) for kind in kinds)
    return full, local


def _rope(
    fields: _Fields,
    stored: Mapping[str, Any],
    default_theta: float,
    max_position_tokens: int,
    override: Mapping[str, Any] | None,
) -> RopeConfig:
    parameters = dict(stored if override is None else override)
    is_yarn = "yarn" in (parameters.get("rope_type"), parameters.get("type"))
    if override is None and is_yarn and parameters.pop("attn_factor", None) is not None:
        _log.warning(
            "config.json: RoPE parameters: attn_factor is %s, and is ignored, as transformers does; to scale "
            "attention otherwise, set spec.model.ropeScaling with an attention_factor",
            shown(stored["attn_factor"]),
        )
    theta = stored.get("rope_theta", fields.get("rope_theta"))
    parameters.setdefault("rope_theta", default_theta if theta is None else theta)
    rope = _Fields(parameters, "config.json: RoPE parameters" if override is None else "model.ropeScaling")
    try:
        return _rope_config(rope, fields, max_position_tokens)
    except CheckpointInvalid as error:
        if override is None:
            raise
        raise ConfigInvalid(str(error)) from error


def _rope_config(rope: _Fields, fields: _Fields, max_position_tokens: int) -> RopeConfig:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("rope_type") and rope.get("type") and rope.get("rope_type") != rope.get("type"):
        raise rope.invalid("type", f"equal to rope_type ({rope.get('rope_type')!r}), or absent")
    if not isinstance(kind, str) or kind not in _ROPE_FIELDS:
        raise ModelUnsupported(
            f"{rope.source}: rope_type is {shown(kind)}, which is not supported; choose one of {', '.join(_ROPE_FIELDS)}"
        )
    required, optional = _ROPE_FIELDS[kind]
    for name in rope.values:
        if name == "partial_rotary_factor" and rope.get(name) in _FOREIGN_FIELDS[name]:
            continue
        if name not in required | optional | _ROPE_NEUTRAL_FIELDS and rope.get(name) is not None:
            raise rope.unsupported(name, f"rope_type {kind!r} knows only {sorted(required | optional)}")

    theta = rope.positive_number("rope_theta")
    # The top-level field, if a checkpoint has it, is the length before the extension.
    original = max_position_tokens
    if fields.get("original_max_position_embeddings") is not None:
        original = fields.positive_int("original_max_position_embeddings")
    elif rope.get("original_max_position_embeddings") is not None:
        original = rope.positive_int("original_max_position_embeddings")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "yarn" and rope.get("factor") is None and "factor" in rope.values:
        factor = max_position_tokens / original
    else:
        factor = rope.positive_number("factor")
    if kind == "llama3":
        low, high = rope.positive_number("low_freq_factor"), rope.positive_number("high_freq_factor")
        if high <= low:
            raise rope.invalid("high_freq_factor", f"greater than low_freq_factor ({low})")
        return RopeConfig(kind, theta, factor, original, low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn":
        return RopeConfig(
            kind,
            theta,
            factor,
            original,
            attention_factor=(
                None if rope.get("attention_factor") is None else rope.positive_number("attention_factor")
            ),
            beta_fast=rope.optional_number("beta_fast") or 32.0,
            beta_slow=rope.optional_number("beta_slow") or 1.0,
            mscale=rope.get("mscale") or None if rope.get("mscale") == 0 else rope.optional_number("mscale"),
            mscale_all_dim=None
            if rope.get("mscale_all_dim") == 0
            else rope.optional_number("mscale_all_dim"),
            truncate=rope.boolean("truncate", True),
        )
    return RopeConfig(kind, theta, factor, original)


def _flat(fields: _Fields, name: str) -> dict[str, Any] | None:
    """Return the RoPE parameters in field `name`.

    Parameters nested per layer type are accepted only if they are the same for all types.
    """
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise fields.invalid(name, "an object or null")
    nested = [inner for inner in value.values() if isinstance(inner, dict)]
    if not nested:
        return value
    if len(nested) < len(value) or any(inner != nested[0] for inner in nested):
        raise fields.unsupported(name, "only one set of RoPE parameters for all layers is implemented")
    return nested[0]


def _length_limit(
    rope: RopeConfig, max_position_tokens: int, replaced: Mapping[str, Any] | None = None
) -> int:
    """Return the longest sequence that the checkpoint, with its RoPE scaling, was made for.

    A yarn checkpoint may state its length before the extension (Qwen2.5) or after it. A checkpoint's own llama3 or
    linear scaling is already included in `max_position_embeddings`: Llama 3.2 states 131,072 tokens, half of 8,192 times
    its factor. If `rope` overrides the checkpoint's parameters, `replaced`, its linear scaling takes the place of that one.
    """
    if rope.kind == "yarn" or (rope.kind == "llama3" and replaced is not None):
        return max(max_position_tokens, int(rope.original_max_position_tokens * rope.factor))
    if rope.kind == "linear" and replaced is not None:
        own = _Fields(replaced, "config.json: RoPE parameters")
        is_linear = (own.get("rope_type") or own.get("type")) == "linear"
        own_factor = own.positive_number("factor") if is_linear else 1
        return int(min(max_position_tokens * rope.factor / own_factor, _MOST))
    return max_position_tokens


def _dual_chunk_limit(fields: _Fields) -> int | None:
    """Return the longest sequence that needs no dual-chunk attention (Qwen2.5-1M); None if the checkpoint names none."""
    name = "dual_chunk_attention_config"
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise fields.invalid(name, "an object or null")
    return _Fields(value, f"{fields.source}: {name}").positive_int("original_max_position_embeddings")


def _served_length(
    max_model_len: int | None, limit: int, rope: RopeConfig, dual_chunk_limit: int | None = None
) -> int:
    """Return the longest sequence to serve, in tokens: up to `limit`, and up to `dual_chunk_limit` if that is given."""
    if max_model_len is None:
        return limit if dual_chunk_limit is None else min(limit, dual_chunk_limit)
    if max_model_len < 1:
        raise ConfigInvalid(f"model.maxModelLen is {max_model_len}; it must be at least 1")
    if dual_chunk_limit is not None and dual_chunk_limit < max_model_len <= limit:
        raise ModelUnsupported(
            f"model.maxModelLen is {max_model_len}, but beyond {dual_chunk_limit} tokens this checkpoint needs dual-chunk "
            "attention (dual_chunk_attention_config in config.json), which is not supported; lower it"
        )
    if max_model_len > limit and rope.kind == "dynamic":
        raise ModelUnsupported(
            f"model.maxModelLen is {max_model_len}, but with rope_type 'dynamic' a sequence beyond {limit} tokens "
            "would depend on how it was cut into chunks; lower it, or set model.ropeScaling to 'yarn' or 'linear'"
        )
    if max_model_len > limit:
        raise ConfigInvalid(
            f"model.maxModelLen is {max_model_len}, but the checkpoint was made for {limit} tokens; "
            "lower it, or set model.ropeScaling"
        )
    return max_model_len


def _indexes(flags: Sequence[bool]) -> frozenset[int]:
    return frozenset(index for index, flag in enumerate(flags) if flag)


def _has_window_on(fields: _Fields, family: Family) -> bool:
    """Return True unless a switch turns the window off."""
    return not family.has_window_switch or fields.boolean("use_sliding_window", False)


def _sliding_layers(fields: _Fields, family: Family, num_layers: int) -> list[bool]:
    """Return True for each layer that has the window, if there is one."""
    layer_types = fields.get("layer_types")
    if layer_types is not None and (not isinstance(layer_types, list) or len(layer_types) != num_layers):
        raise fields.invalid("layer_types", f"null or a list of {num_layers} names, one for each layer")
    for name in layer_types or ():
        if name not in ("full_attention", "sliding_attention"):
            raise fields.unsupported("layer_types", "choose a model with full and sliding attention alone")
    if not _has_window_on(fields, family):
        if "sliding_attention" in (layer_types or ()):
            raise fields.invalid("use_sliding_window", "true, as layer_types names sliding_attention")
        return [False] * num_layers
    if family.full_layer_interval is None and family.max_window_layers is None:
        return [True] * num_layers
    if layer_types is not None:
        return [name == "sliding_attention" for name in layer_types]
    if family.max_window_layers is not None:
        first = fields.count("max_window_layers", family.max_window_layers)
        return [index >= first for index in range(num_layers)]
    interval = family.full_layer_interval
    if family.reads_layer_interval and "sliding_window_pattern" in fields.values:
        interval = fields.positive_int("sliding_window_pattern")
    assert interval is not None
    return [bool((index + 1) % interval) for index in range(num_layers)]


def _windows(
    fields: _Fields, family: Family, sliding_layers: Sequence[bool], max_model_len: int
) -> tuple[int | None, ...]:
    """Return the window of each layer; None where no sequence exceeds it, as attention is then full attention."""
    none = (None,) * len(sliding_layers)
    if not any(sliding_layers):
        return none
    # A checkpoint that sets a window expects it, also in a family without one.
    window = family.window_tokens
    if "sliding_window" in fields.values:
        may_be_null = family.full_layer_interval is None
        is_null = fields.get("sliding_window") is None
        window = None if is_null and may_be_null else fields.positive_int("sliding_window")
    is_off = not family.has_window and fields.get("use_sliding_window") is False
    if window is None or window >= max_model_len or is_off:
        return none
    remedy = (
        f"set model.maxModelLen (now {max_model_len}) to at most {window}, where the window does not bind"
    )
    if not family.has_window:
        raise fields.unsupported("sliding_window", f"{family.architecture} has no window; {remedy}")
    if all(sliding_layers) and "full_attention" in (fields.get("layer_types") or ()):
        raise fields.unsupported(
            "layer_types", f"all layers of {family.architecture} have the same window; {remedy}"
        )
    return tuple(window if sliding else None for sliding in sliding_layers)
