"""Quantised models give the logits and the text of `transformers` with the rounded weights and activations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from medha_worker.checkpoints.quantised_checkpoint import QUANTISATIONS
from medha_worker.model.model_config import ModelConfig

from .models import kernels_of_a_rank, load_model
from .quantised_models import quantise_checkpoint, with_sizes
from .test_model_transformer import Pair, largest_error, random_tokens, run_chunks, save_reference

# An activation that lies between two steps may be rounded to the other one, which the last bit of a sum decides.
TOLERANCES = {"w8a8": 0.1, "fp8": 0.3, "fp8-tensor": 0.3, "fp8-block": 0.3, "fp8-kv": 0.3}
WEIGHT_ONLY = 1e-4


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def pair(name: str) -> Pair:
        if name not in made:
            directory: Path = tmp_path_factory.mktemp(name)
            architecture = "qwen2" if name.startswith("w") else "llama"
            reference = save_reference(directory, architecture)
            quantise_checkpoint(directory, reference, with_sizes(name, 16))
            config = ModelConfig.from_directory(directory)
            model = load_model(directory, config, kernels=kernels_of_a_rank(config))
            made[name] = Pair(directory, reference, config, model)
        return made[name]

    return pair


@pytest.mark.parametrize("name", sorted(QUANTISATIONS))
def test_logits_equal_those_of_the_rounded_model(pair_of: Callable[[str], Pair], name: str) -> None:
    pair, tokens = pair_of(name), random_tokens(80)
    wanted = pair.reference_logits(tokens)
    assert float(wanted.std()) > 0.3
    for chunks in ([80], [30, 1, 1, 37, 1, 10]):
        found = run_chunks(pair.model, tokens, chunks)
        assert largest_error(found, wanted) <= TOLERANCES.get(name, WEIGHT_ONLY)
        # Few rows meet such a step: most are as near as those of weights alone.
        assert float((found - wanted).abs().median()) <= WEIGHT_ONLY * (100 if name in TOLERANCES else 1)


@pytest.mark.parametrize("name", sorted(QUANTISATIONS))
def test_greedy_text_of_64_tokens_is_that_of_the_rounded_model(
    pair_of: Callable[[str], Pair], name: str
) -> None:
    """Each token is the best one to within the tolerance, as two may be all but equal if activations are rounded."""
    pair, text = pair_of(name), random_tokens(30, seed=2)
    for _ in range(64):
        text = torch.cat([text, run_chunks(pair.model, text, [text.numel()])[-1:].argmax(-1)])
    wanted = pair.reference_logits(text[:-1])[29:]
    behind = wanted.amax(-1) - wanted.gather(1, text[30:, None])[:, 0]
    assert float(behind.max()) <= TOLERANCES.get(name, 0.0)
    assert len(set(text[30:].tolist())) > 8
