"""Qwen2 and Qwen2.5, with biases on queries, keys and values."""

from medha_worker.model.families.family import Family

QWEN2 = Family("Qwen2ForCausalLM", "qwen2", qkv_bias=True, has_window_switch=True, max_window_layers=28)
