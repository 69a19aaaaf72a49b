"""Gemma 3: layers with a window and a RoPE of their own, four norms in each, GELU, and scaled embeddings."""

from dataclasses import replace

from medha_worker.model.families.family import Family

GEMMA3_TEXT = Family(
    "Gemma3ForCausalLM",
    "gemma3_text",
    reads_attention_bias=True,
    qk_norm=True,
    rope_theta=1_000_000.0,
    full_layer_interval=6,
    reads_layer_interval=True,
    local_rope_theta=10_000.0,
    query_scalar=256.0,
    norm_adds_one=True,
    has_result_norms=True,
    scales_embedding=True,
    activation="gelu_tanh",
)

GEMMA3 = replace(GEMMA3_TEXT, architecture="Gemma3ForConditionalGeneration", model_type="gemma3")
"""The text model of a checkpoint that also sees images."""
