"""Mistral, whose classes have a sliding window in all layers."""

from medha_worker.model.families.family import Family

MISTRAL = Family("MistralForCausalLM", "mistral")
