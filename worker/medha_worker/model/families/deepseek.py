"""DeepSeek-V2 and DeepSeek-V3: latent attention, a few dense layers, then experts with shared ones beside them."""

from dataclasses import replace

from medha_worker.model.families.family import ExpertBlock, Family

_EXPERTS = ExpertBlock(
    count_fields=("n_routed_experts", "num_experts"),
    width_field="moe_intermediate_size",
    renormalises=False,
    may_be_mixed=False,
    deepseek=2,
)

DEEPSEEK_V2 = Family(
    "DeepseekV2ForCausalLM",
    "deepseek_v2",
    reads_attention_bias=True,
    has_window=False,
    window_tokens=None,
    experts=_EXPERTS,
    has_latents=True,
)

DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    experts=replace(
        _EXPERTS, count_fields=("n_routed_experts", "num_local_experts"), renormalises=None, deepseek=3
    ),
)
