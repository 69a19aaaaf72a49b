"""Checkpoints in the formats of compressed-tensors give the logits of that package's own forward pass.

`transformers` loads the same directory with the package, and computes with the package's linears.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
import transformers

from medha_worker.model.model_config import ModelConfig

from ..models import kernels_of_a_rank, load_model
from ..quantised_models import FORMATS, activations_of, quantise_checkpoint, with_sizes
from .test_device_families import long_unless
from .test_model_transformer import random_tokens, run_chunks, save_reference

WEIGHT_ONLY = 1e-4
TOLERANCES = {"int8": 0.2, "float8": 0.4}
"""Largest difference of a logit, whose standard deviation is 1.3, where activations are rounded; docs/quantisation.md states them."""
LEAST_AGREEMENT = 0.97
TOKENS = 300
SHORT = ("w8a8-static", "llama"), ("fp8-compressed-block", "qwen2")
REMOVED = "w4a16-actorder"
"""A format that the package has removed: it refuses such checkpoints."""
FORMS = [
    name
    for name, settings in FORMATS.items()
    if settings["quant_method"] == "compressed-tensors" and name not in (REMOVED, "fp8-kv")
]


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize(
    ("name", "architecture"),
    [long_unless(case in SHORT, *case) for case in product(FORMS, ("llama", "qwen2"))],
)
def test_logits_and_likeliest_tokens_are_those_of_the_package(
    tmp_path: Path, name: str, architecture: str
) -> None:
    reference = save_reference(tmp_path, architecture)
    quantise_checkpoint(tmp_path, reference, with_sizes(name, 16))
    # The package makes numbers of packed zero points only if it does so while it loads; activations are then not rounded.
    dequantized = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
    activations, has_packed_zeros = activations_of(name), name in ("w4a16-asym", "w8a16-packed-asym")
    assert activations is None or not has_packed_zeros
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, **(dequantized if has_packed_zeros else {})
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
    tolerance = WEIGHT_ONLY if activations is None else TOLERANCES[activations.kind]
    assert float((found - wanted).abs().max()) <= tolerance
    if activations is not None:  # few rows meet a step whose side the last bit of a sum decides
        assert float((found - wanted).abs().median()) <= 0.01
    agreement = float((found.argmax(-1) == wanted.argmax(-1)).float().mean())
    assert agreement >= (1.0 if activations is None else LEAST_AGREEMENT)


def test_the_package_refuses_the_order_of_activations(tmp_path: Path) -> None:
    """So its formulas alone stand for it: the test fails once it can be compared with the package again."""
    quantise_checkpoint(tmp_path, save_reference(tmp_path, "llama"), with_sizes(REMOVED, 16))
    with pytest.raises(ValueError, match="actorder='group' has been removed"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
