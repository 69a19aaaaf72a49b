"""The form of a family's declaration: what its checkpoints have, how their tensors are called, which defaults hold.

Shared blocks do the rest: a further family of the same blocks is one more file, and a line in `family_table`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ExpertBlock:
    """The MLP of a sparse layer: a router, and experts that are gated MLPs.

    Published checkpoints have three tensors for each expert, named here. The form in which `transformers` holds experts
    in memory, with one tensor for all of them, has the same names in every family (`FUSED_BLOCK`).

    Attributes:
        count_fields: Names that config.json may give the number of experts.
        width_field: Name of the field with the intermediate size of one expert.
        block: Name of the MLP within a layer; its router is `gate.weight`, and its experts are `experts.0` and so on.
        gate, up, down: Names of the three linears of an expert.
        renormalises: Whether the weights of the chosen experts are scaled to a sum of 1; None if the field
            `norm_topk_prob` says so.
        may_be_mixed: Whether `decoder_sparse_step` and `mlp_only_layers` can make some layers dense.
        is_interleaved: Whether experts are those of gpt-oss, which `interleaved_experts` reads: one tensor for all, whose
            columns are gates and ups in turn, with biases, as has the router, and a clamped activation. `gate`, `up` and
            `down` are not used then.
        quantised_as: Values of `quant_method` in which the experts may be quantised.
    """

    count_fields: tuple[str, ...]
    width_field: str
    block: str
    gate: str
    up: str
    down: str
    renormalises: bool | None
    may_be_mixed: bool
    is_interleaved: bool = False
    quantised_as: tuple[str, ...] = ()

    def router_name(self, layer: str) -> str:
        """Return the name of the router's tensor, [experts, hidden]; `layer` ends with a dot."""
        return f"{layer}{self.block}.gate.weight"

    def linear_name(self, layer: str, expert: int, linear: str) -> str:
        """Return the name of one expert's weight; `linear` is `gate`, `up` or `down` of this block."""
        return f"{layer}{self.block}.experts.{expert}.{linear}.weight"


@dataclass(frozen=True, slots=True)
class Family:
    """The declarations of one architecture. Defaults are those of `transformers`.

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
        window_pattern: Whether a layer has the window, of the first layers and then over again, if `layer_types` is
            missing; None: layers do not alternate.
        has_sinks: Whether each query head has an attention sink.
        experts: The sparse block; None if all layers are dense.
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
    window_pattern: tuple[bool, ...] | None = None
    has_sinks: bool = False
    experts: ExpertBlock | None = None


FUSED_BLOCK = "mlp"
"""Name of a sparse layer's MLP in checkpoints with one tensor for all experts, whatever the family."""
FUSED_GATE_UP, FUSED_DOWN = "experts.gate_up_proj", "experts.down_proj"
"""Their tensors: [experts, 2 * width, hidden], gates before ups, and [experts, hidden, width]."""
