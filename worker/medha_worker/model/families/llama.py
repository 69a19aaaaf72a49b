"""Llama 2, 3 and their derivatives."""

from medha_worker.model.families.family import Family

LLAMA = Family(
    "LlamaForCausalLM",
    "llama",
    reads_attention_bias=True,
    reads_mlp_bias=True,
    kv_heads_may_be_missing=True,
    has_window=False,
    window_tokens=None,
)
