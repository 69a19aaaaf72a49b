"""Mixtral: Mistral with experts in every layer, whose weights sum up to 1."""

from medha.model.linear_sizes import ExpertNames
from medha_worker.model.families.family import ExpertBlock, Family

MIXTRAL = Family(
    "MixtralForCausalLM",
    "mixtral",
    rms_norm_eps=1e-5,
    rope_theta=1_000_000.0,
    window_tokens=None,
    experts=ExpertBlock(
        count_fields=("num_local_experts",),
        width_field="intermediate_size",
        renormalises=True,
        may_be_mixed=False,
        names=ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2"),
    ),
)
