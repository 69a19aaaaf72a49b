"""Quantised models give the logits and the text of `transformers` with the rounded weights and activations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from medha_worker.checkpoints.quantised_checkpoint import QUANTISATIONS
from medha_worker.model.model_config import ModelConfig

from ..models import kernels_of_a_rank, load_model
from ..quantised_models import FORMATS, activations_of, quantise_checkpoint, with_sizes
from .test_device_families import long_unless
from .test_model_transformer import Pair, largest_error, random_tokens, run_chunks, save_reference

WEIGHT_ONLY = 1e-4
# An activation that lies between two steps may be rounded to the other one, which the last bit of a sum decides.
TOLERANCES = {"int8": 0.1, "float8": 0.3}
"""Largest error of a logit where activations are rounded; docs/quantisation.md states them."""
DISTANCES = {"w8": 0.06, "fp8": 0.25, "w4": 0.55, "awq": 0.45, "gptq": 0.45}
"""Bounds of the root mean square of the errors of logits, by how the name of a format begins."""
LEAST_AGREEMENT = 0.97
EXPERTS = (
    "fp8-block deepseek_v3",
    "fp8-block-ue8m0 deepseek_v3",
    "fp8-block deepseek_v2",
    "fp8-block qwen3_moe",
    "fp8-block mixtral",
    "fp8 qwen3_moe",
    "fp8-tensor mixtral",
    "w8a8 deepseek_v3",
    "w4a16 qwen3_moe-mixed",
    "w4a16 deepseek_v2",
    "w4a16-asym mixtral",
    "awq deepseek_v3",
    "awq qwen3_moe",
    "awq mixtral",
    "gptq deepseek_v3",
    "gptq mixtral",
    "gptq-desc-act qwen3_moe",
)
"""Formats of mixtures of experts; `test_exactness` has others."""
SHORT_DENSE = ("awq qwen3", "w4a16 mistral", "fp8-block gemma3_text-window", "fp8-block qwen2")
DENSE = tuple(
    f"{scheme} {family}"
    for scheme in ("awq", "w4a16", "fp8-block")
    for family in ("llama", "qwen2", "qwen3", "mistral", "gemma3_text-window")
)
"""Formats of dense families. A format without a family is one of a Llama or, of integers, of a Qwen2."""
CASES = [
    *sorted(FORMATS),
    *EXPERTS,
    *(long_unless(name in SHORT_DENSE, name) for name in DENSE),
]
TEXT_CASES = [
    *(long_unless(name in QUANTISATIONS, name) for name in sorted(FORMATS)),
    *EXPERTS[::4],
    *(long_unless(name in SHORT_DENSE, name) for name in DENSE),
]


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def pair(name: str) -> Pair:
        if name not in made:
            directory: Path = tmp_path_factory.mktemp(name)
            scheme, _, architecture = name.partition(" ")
            reference = save_reference(
                directory, architecture or ("qwen2" if name.startswith("w") else "llama")
            )
            quantise_checkpoint(directory, reference, with_sizes(scheme, 16))
            config = ModelConfig.from_directory(directory)
            model = load_model(directory, config, kernels=kernels_of_a_rank(config))
            made[name] = Pair(directory, reference, config, model)
        return made[name]

    return pair


def tolerance_of(name: str) -> float:
    activations = activations_of(name.partition(" ")[0])
    return WEIGHT_ONLY if activations is None else TOLERANCES[activations.kind]


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_the_rounded_model(pair_of: Callable[[str], Pair], name: str) -> None:
    pair, tokens = pair_of(name), random_tokens(80)
    wanted = pair.reference_logits(tokens)
    assert float(wanted.std()) > 0.3
    for chunks in ([80], [30, 1, 1, 37, 1, 10]):
        found = run_chunks(pair.model, tokens, chunks)
        assert largest_error(found, wanted) <= tolerance_of(name)
        # Few rows meet such a step: most are as near as those of weights alone.
        assert float((found - wanted).abs().median()) <= WEIGHT_ONLY * (
            100 if tolerance_of(name) > WEIGHT_ONLY else 1
        )


@pytest.mark.parametrize("name", TEXT_CASES)
def test_greedy_text_of_64_tokens_is_that_of_the_rounded_model(
    pair_of: Callable[[str], Pair], name: str
) -> None:
    """Each token is the best one to within the tolerance, as two may be all but equal if activations are rounded."""
    pair, text = pair_of(name), random_tokens(30, seed=2)
    for _ in range(64):
        text = torch.cat([text, run_chunks(pair.model, text, [text.numel()])[-1:].argmax(-1)])
    wanted = pair.reference_logits(text[:-1])[29:]
    behind = wanted.amax(-1) - wanted.gather(1, text[30:, None])[:, 0]
    tolerance = tolerance_of(name)
    assert float(behind.max()) <= (0.0 if tolerance == WEIGHT_ONLY else tolerance)
    assert len(set(text[30:].tolist())) > 8


@pytest.mark.parametrize("name", sorted(QUANTISATIONS))
def test_logits_are_as_far_from_full_precision_as_documented_and_best_tokens_are_those_of_the_rounded_model(
    name: str, tmp_path: Path
) -> None:
    """The standard deviation of the logits is 1.3; docs/quantisation.md has the distances."""
    reference, tokens = save_reference(tmp_path, "llama"), random_tokens(300)
    with torch.inference_mode():
        full = reference(tokens[None]).logits[0]
    quantise_checkpoint(tmp_path, reference, with_sizes(name, 16))
    config = ModelConfig.from_directory(tmp_path)
    found = run_chunks(
        load_model(tmp_path, config, kernels=kernels_of_a_rank(config)), tokens, [tokens.numel()]
    )
    with torch.inference_mode():
        wanted = reference(tokens[None]).logits[0]
    (bound,) = [bound for start, bound in DISTANCES.items() if name.startswith(start)]
    assert bound / 10 < float((found - full).square().mean().sqrt()) <= bound
    agreement = float((found.argmax(-1) == wanted.argmax(-1)).float().mean())
    assert agreement >= (1.0 if tolerance_of(name) == WEIGHT_ONLY else LEAST_AGREEMENT)
