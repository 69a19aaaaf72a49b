"""Qwen3-MoE: Qwen3 with experts in all layers or some."""

from medha_worker.model.families.family import ExpertBlock, Family

QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    reads_attention_bias=True,
    qk_norm=True,
    has_window_switch=True,
    experts=ExpertBlock(
        count_fields=("num_experts", "num_local_experts"),  # transformers 5 writes the second
        width_field="moe_intermediate_size",
        renormalises=None,
        may_be_mixed=True,
    ),
)
