"""gpt-oss: attention sinks, a window in every second layer, and experts with biases and a clamped activation."""

from types import MappingProxyType

from medha_worker.model.families.family import ExpertBlock, Family

GPT_OSS = Family(
    "GptOssForCausalLM",
    "gpt_oss",
    reads_attention_bias=True,
    attention_bias=True,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=150_000.0,
    rope=MappingProxyType(
        {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        }
    ),
    dtype="bfloat16",
    window_tokens=128,
    full_layer_interval=2,
    has_sinks=True,
    experts=ExpertBlock(
        count_fields=("num_local_experts", "num_experts"),
        width_field="intermediate_size",
        renormalises=True,  # the softmax is over the chosen experts alone, which gives the same weights
        may_be_mixed=False,
        is_interleaved=True,
        quantised_as=("mxfp4",),
    ),
)
