"""The table of the families that are served, by the name of their architecture."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from medha_worker.model.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from medha_worker.model.families.family import Family
from medha_worker.model.families.gemma3 import GEMMA3, GEMMA3_TEXT
from medha_worker.model.families.gpt_oss import GPT_OSS
from medha_worker.model.families.llama import LLAMA
from medha_worker.model.families.mistral import MISTRAL
from medha_worker.model.families.mixtral import MIXTRAL
from medha_worker.model.families.qwen2 import QWEN2
from medha_worker.model.families.qwen3 import QWEN3
from medha_worker.model.families.qwen3_moe import QWEN3_MOE

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.architecture: family
        for family in (
            DEEPSEEK_V2,
            DEEPSEEK_V3,
            GEMMA3,
            GEMMA3_TEXT,
            GPT_OSS,
            LLAMA,
            MISTRAL,
            MIXTRAL,
            QWEN2,
            QWEN3,
            QWEN3_MOE,
        )
    }
)
"""Every family; `model_type` is unique among them too."""
