"""Checkpoints in the formats of compressed-tensors give the logits of that package's own forward pass.

`transformers` loads the same directory with the package, and computes with the package's linears.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from medha_worker.model.model_config import ModelConfig

from .models import kernels_of_a_rank, load_model
from .quantised_models import quantise_checkpoint, with_sizes
from .test_model_transformer import random_tokens, run_chunks, save_reference

TOLERANCES = {"w8a8": 0.2, "fp8": 0.4, "fp8-tensor": 0.4, "w4a16": 1e-4, "w4a16-asym": 1e-4}
"""Largest difference of a logit, whose standard deviation is 1.3; docs/quantisation.md states them."""
LEAST_AGREEMENT = 0.98
TOKENS = 300


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("name", TOLERANCES)
def test_logits_and_likeliest_tokens_are_those_of_the_package(
    tmp_path: Path, name: str, architecture: str
) -> None:
    reference = save_reference(tmp_path, architecture)
    quantise_checkpoint(tmp_path, reference, with_sizes(name, 16))
    # The package makes numbers of packed zero points only if it does so while it loads; activations are then not rounded.
    options = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, **(options if name == "w4a16-asym" else {})
    ).eval()
    tokens = random_tokens(TOKENS)
    with torch.inference_mode():
        wanted = theirs(tokens[None]).logits[0]
        formulas = reference(tokens[None]).logits[0]
    assert float((formulas - wanted).abs().max()) <= 1e-5, (
        "tests/worker/quantised_models.py has other formulas"
    )
    config = ModelConfig.from_directory(tmp_path)
    model = load_model(tmp_path, config, kernels=kernels_of_a_rank(config))
    found = run_chunks(model, tokens, [TOKENS])
    assert float(wanted.std()) > 0.5
    assert float((found - wanted).abs().max()) <= TOLERANCES[name]
    is_rounded = TOLERANCES[name] > 1e-4
    if is_rounded:  # few rows meet a step whose side the last bit of a sum decides
        assert float((found - wanted).abs().median()) <= 0.01
    agreement = float((found.argmax(-1) == wanted.argmax(-1)).float().mean())
    assert agreement >= (LEAST_AGREEMENT if is_rounded else 1.0)
