"""The form of a family's declaration: what its checkpoints have, how their tensors are called, which defaults hold.

Shared blocks do the rest: a further family of the same blocks is one more file, and a line in `family_table`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from medha.model.linear_sizes import ExpertNames
from medha.model.quantisation import LINEAR_METHODS

Activation = Literal["silu", "gelu_tanh"]
"""The function on the gates of an MLP; `gelu_tanh` is GELU by its tanh formula."""


@dataclass(frozen=True, slots=True)
class ExpertBlock:
    """The MLP of a sparse layer: a router, and experts that are gated MLPs.

    Published checkpoints have three linears for each expert, named here. The form in which `transformers` holds experts
    in memory, with one tensor for all of them, has the same names in every family (`FUSED_BLOCK`).

    Attributes:
        count_fields: Names that config.json may give the number of experts.
        width_field: Name of the field with the intermediate size of one expert.
        renormalises: Whether the weights of the chosen experts are scaled to a sum of 1; None if the field
            `norm_topk_prob` says so.
        may_be_mixed: Whether `decoder_sparse_step` and `mlp_only_layers` can make some layers dense.
        deepseek: The version of DeepSeek's block, whose routers choose by groups, which has shared experts, and whose
            first layers are dense (`first_k_dense_replace`); None for other blocks.
        is_interleaved: Whether experts are those of gpt-oss, which `interleaved_experts` reads: one tensor for all, whose
            columns are gates and ups in turn, with biases, as has the router, and a clamped activation.
        names: Names of the MLP within a layer, whose router is `gate.weight`, and of the three linears of an expert.
            They are not used if `is_interleaved`.
        quantised_as: Values of `quant_method` in which the model may be quantised.
    """

    count_fields: tuple[str, ...]
    width_field: str
    renormalises: bool | None
    may_be_mixed: bool
    deepseek: Literal[2, 3] | None = None
    is_interleaved: bool = False
    names: ExpertNames = field(default_factory=ExpertNames)
    quantised_as: tuple[str, ...] = LINEAR_METHODS

    def router_name(self, layer: str) -> str:
        """Return the name of the router's tensor, [experts, hidden]; `layer` ends with a dot."""
        return f"{layer}{self.names.block}.gate.weight"

    def correction_name(self, layer: str) -> str:
        """Return the name of the correction that the router's choice adds to scores, [experts]."""
        return f"{layer}{self.names.block}.gate.e_score_correction_bias"


@dataclass(frozen=True, slots=True)
class Family:
    """The declarations of one architecture. Defaults are those of `transformers`; further ones are in `medha.model.config_fields`.

    Attributes:
        architecture: Name in the field `architectures`.
        model_type: Value of the field `model_type`, and the name that `medha model init` takes.
        qkv_bias: Whether q, k and v always have a bias.
        reads_attention_bias: Whether the field `attention_bias` gives q, k, v and o a bias.
        attention_bias: Value if `attention_bias` is missing.
        reads_mlp_bias: Whether the field `mlp_bias` gives gate, up and down a bias.
        qk_norm: Whether queries and keys pass an RMSNorm over each head.
        kv_heads_may_be_missing: Whether a missing `num_key_value_heads` means as many as query heads.
        head_dim: Head dimension if `head_dim` is missing; None: `hidden_size / num_attention_heads`.
        rms_norm_eps: Value if `rms_norm_eps` is missing.
        rope_theta: Value if `rope_theta` is missing.
        rope: RoPE parameters if config.json has none; None: RoPE without scaling.
        dtype: Data type if neither `dtype` nor `torch_dtype` is given.
        has_window: Whether its layers can have a sliding window.
        window_tokens: Sliding window if `sliding_window` is missing; None: no window.
        has_window_switch: Whether the window holds only if `use_sliding_window` is true.
        max_window_layers: Layers without a window if the field `max_window_layers` is missing; None: that field is not
            read, and all layers have the window.
        full_layer_interval: Every so many layers, one has no window, unless `layer_types` names the layers; None: layers do
            not alternate.
        reads_layer_interval: Whether the field `sliding_window_pattern` gives another interval.
        local_rope_theta: Value if `rope_local_base_freq` is missing: the base of RoPE in layers that can have a window;
            None: all layers have one RoPE.
        query_scalar: Value if `query_pre_attn_scalar` is missing: scores are divided by its root; None: by that of the
            head dimension.
        norm_adds_one: Whether norms multiply by 1 + weight.
        has_result_norms: Whether the results of attention and of the MLP pass a norm of their own before they are added.
        scales_embedding: Whether embeddings are multiplied by the root of `hidden_size`.
        activation: The function on the gates of MLPs.
        has_sinks: Whether each query head has an attention sink.
        experts: The sparse block; None if all layers are dense.
        has_latents: Whether attention is over latents, which all heads share (`LatentShape`).
    """

    architecture: str
    model_type: str
    qkv_bias: bool = False
    reads_attention_bias: bool = False
    attention_bias: bool = False
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    kv_heads_may_be_missing: bool = False
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope: Mapping[str, Any] | None = None
    dtype: str = "float32"
    has_window: bool = True
    window_tokens: int | None = 4096
    has_window_switch: bool = False
    max_window_layers: int | None = None
    full_layer_interval: int | None = None
    reads_layer_interval: bool = False
    local_rope_theta: float | None = None
    query_scalar: float | None = None
    norm_adds_one: bool = False
    has_result_norms: bool = False
    scales_embedding: bool = False
    activation: Activation = "silu"
    has_sinks: bool = False
    experts: ExpertBlock | None = None
    has_latents: bool = False


FUSED_BLOCK = "mlp"
"""Name of a sparse layer's MLP in checkpoints with one tensor for all experts, whatever the family."""
FUSED_GATE_UP, FUSED_DOWN = "experts.gate_up_proj", "experts.down_proj"
"""Their tensors: [experts, 2 * width, hidden], gates before ups, and [experts, hidden, width]."""
