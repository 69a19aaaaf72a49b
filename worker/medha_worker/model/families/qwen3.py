"""Qwen3, with norms on queries and keys."""

from medha_worker.model.families.family import Family

QWEN3 = Family(
    "Qwen3ForCausalLM",
    "qwen3",
    reads_attention_bias=True,
    qk_norm=True,
    head_dim=128,
    has_window_switch=True,
    max_window_layers=28,
)
