"""Scales of K and V that are measured once for a checkpoint: exact for its largest numbers, and equal wherever they are read."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from medha.errors import CheckpointInvalid, ConfigInvalid, ModelUnsupported
from medha_worker.checkpoints.measured_kv_scales import (
    measure_scales,
    random_sequences,
    reach_of,
    require_measurable,
    sequences_of_text,
    write_scales,
)
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.kernels.sequence_span import SequenceSpan
from medha_worker.model.kv_cache import KVCache
from medha_worker.model.kv_scales import FP8_MAX, MARGIN, LayerScales, digest_of
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.stage_split import KV_SCALES

from ..model.test_fp8_kv import require_the_same_on_every_grid, scales_of
from ..model.test_model_transformer import BLOCK_TOKENS, save_reference
from ..models import load_model, run_step

TOKENS = 1500
"""Tokens that are measured: two sequences of a model that reads 1,024."""


def measured(directory: Path, *, tokens: int = TOKENS, seed: int = 0) -> list[LayerScales]:
    """Measure the scales of a checkpoint, and write them beside it."""
    scales = measure_scales(directory, random_sequences(directory, tokens, seed))
    write_scales(directory, scales)
    return scales


def pool_of(directory: Path, config: ModelConfig, ids: list[int]) -> KVCache:
    """Return the KV of a sequence as the whole model computes it at once, with plain torch."""
    model = load_model(directory, config)
    blocks = range(-(-len(ids) // BLOCK_TOKENS))
    pool = model.new_kv_cache(len(blocks), BLOCK_TOKENS)
    run_step(model, torch.tensor(ids), torch.arange(len(ids)), [SequenceSpan(0, len(ids), 0, blocks)], pool)
    return pool


@pytest.mark.parametrize(
    "architecture", ["llama-biased", "qwen3", "gemma3_text-window", "gpt_oss", "qwen3_moe-mixed"]
)
def test_the_largest_number_of_each_head_becomes_half_of_the_largest_of_fp8(
    tmp_path: Path, architecture: str
) -> None:
    """All layers at once find the numbers that one layer after another finds, and other texts stay within the margin."""
    save_reference(tmp_path, architecture)
    config = ModelConfig.from_directory(tmp_path)
    scales = measured(tmp_path)
    sequences = random_sequences(tmp_path, TOKENS, 0)
    assert len(sequences) == 2
    pools = [pool_of(tmp_path, config, ids) for ids in sequences]
    half = FP8_MAX / MARGIN
    for index, one in enumerate(scales):
        keys, values = (
            torch.stack([part[index].abs().amax((1, 2)) for part in parts]).amax(0)[:, None]
            for parts in ([pool.keys for pool in pools], [pool.values for pool in pools])
        )
        torch.testing.assert_close(values / one.values, torch.full_like(values, half), rtol=1e-4, atol=0)
        assert bool((keys / one.keys <= half * 1.0001).all())
        assert bool((keys / one.keys > half / 1.42).all()), (
            "a key is longer than its values by the root of 2 at most"
        )

    rounded = replace(config, kv_dtype="fp8")
    same, other = (
        pool_of(tmp_path, rounded, ids) for ids in (sequences[0], random_sequences(tmp_path, 300, 1)[0])
    )
    assert same.values[0].float().abs().amax() == half, "of the first layer, what was measured is exact"
    for part in (*other.keys, *other.values):
        assert float(part.float().abs().max()) < FP8_MAX


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_measured_scales_are_the_same_on_every_grid(tmp_path: Path, architecture: str) -> None:
    save_reference(tmp_path, architecture)
    scales = measured(tmp_path, tokens=100)
    config = ModelConfig.from_directory(tmp_path, kv_dtype="fp8")
    (whole,) = scales_of(tmp_path, 1, slice(0, config.num_layers))
    assert digest_of(whole) == digest_of(scales)
    require_the_same_on_every_grid(tmp_path, config, whole)
    exact = load_model(tmp_path, ModelConfig.from_directory(tmp_path))
    assert exact._weights.kv_scales is None, "with `auto` they are not used"


def test_the_log_says_where_scales_come_from(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    init_checkpoint(tmp_path / "own", preset="tiny", seed=0, quantisation="fp8-kv")
    shutil.copytree(tiny, tmp_path / "derived")
    shutil.copytree(tiny, tmp_path / "measured")
    measured(tmp_path / "measured", tokens=50)
    with caplog.at_level("INFO", "medha.model"):
        for name in ("own", "derived", "measured"):
            scales_of(tmp_path / name)
    assert [message.partition("with ")[2] for message in caplog.messages] == [
        "scales of the checkpoint",
        "scales that follow from the weights",
        f"scales that were measured ({KV_SCALES})",
    ]


def test_the_same_tokens_give_the_same_bytes(tmp_path: Path) -> None:
    save_reference(tmp_path, "llama")
    found = []
    for seed in (0, 0, 1):
        measured(tmp_path, tokens=100, seed=seed)
        found.append((tmp_path / KV_SCALES).read_bytes())
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(("architecture", "quantisation"), [("qwen2", "w8a8"), ("gpt_oss", "mxfp4")])
def test_scales_of_quantised_checkpoints_are_measured_too(
    tmp_path: Path, architecture: str, quantisation: str
) -> None:
    """Such files have no place for scales of K and V in their own format."""
    made = tmp_path / "model"
    init_checkpoint(made, preset="tiny", seed=0, architecture=architecture, quantisation=quantisation)
    scales = measured(made, tokens=100)
    assert digest_of(scales_of(made)[0]) == digest_of(scales[:2])


def test_a_check_shows_what_a_text_needs_of_the_scales(tmp_path: Path) -> None:
    save_reference(tmp_path, "llama")
    sequences = random_sequences(tmp_path, 200, 0)
    derived = reach_of(tmp_path, sequences)
    assert all(0 < one.share < 1 for one in derived), "no prompt exceeds scales that follow from the weights"
    measured(tmp_path, tokens=200)
    for one in reach_of(tmp_path, sequences):
        assert one.share == pytest.approx(1 / MARGIN, rel=1e-6)
    tensors = load_file(tmp_path / KV_SCALES)
    tensors["model.layers.1.self_attn.v_scale"][1] /= 5
    save_file(tensors, tmp_path / KV_SCALES)
    small = [one for one in reach_of(tmp_path, sequences) if one.share > 1]
    assert [(one.kind, one.layer, one.head) for one in small] == [("values", 1, 1)]
    assert small[0].share == pytest.approx(5 / MARGIN, rel=1e-6)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "model"
    init_checkpoint(directory, preset="tiny", seed=1)
    return directory


def test_a_text_is_cut_into_sequences_that_begin_like_texts_of_the_model(tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The river rose, and people went to higher ground. " * 500)
    sequences = sequences_of_text(tiny, text, 3000)
    assert [len(one) for one in sequences] == [2048, 3000 + 2 - 2048]
    assert {one[0] for one in sequences} == {0}
    assert sequences[0][:40] == sequences_of_text(tiny, text, 39)[0]
    assert sequences != random_sequences(tiny, 3000, 0)


@pytest.mark.parametrize(("content", "said"), [(b"", "has no token"), (b"\xff", "cannot be read.*UTF-8")])
def test_a_file_that_is_no_text_is_refused(tiny: Path, tmp_path: Path, content: bytes, said: str) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(content)
    with pytest.raises(ConfigInvalid, match=said):
        sequences_of_text(tiny, text, 100)


def test_a_text_needs_the_tokenizer(tmp_path: Path) -> None:
    save_reference(tmp_path, "llama")
    with pytest.raises(CheckpointInvalid, match=r"tokenizer\.json is missing"):
        sequences_of_text(tmp_path, tmp_path / "config.json", 100)


def test_latents_and_scales_of_the_checkpoints_own_are_left_alone(tiny: Path, tmp_path: Path) -> None:
    """A file that somebody puts there nevertheless is an error, not a setting that does nothing."""
    init_checkpoint(tmp_path / "latents", preset="tiny", seed=0, architecture="deepseek_v2")
    init_checkpoint(tmp_path / "own", preset="tiny", seed=0, quantisation="fp8-kv")
    with pytest.raises(ModelUnsupported, match="keeps latents"):
        require_measurable(tmp_path / "latents", force=True)
    with pytest.raises(ConfigInvalid, match="kv_cache_scheme"):
        require_measurable(tmp_path / "own", force=True)
    write_scales(tiny.parent, measure_scales(tiny, random_sequences(tiny, 50, 0)))
    for name, said in (("latents", "do not apply to latents"), ("own", "has scales of its own")):
        shutil.copy(tiny.parent / KV_SCALES, tmp_path / name)
        with pytest.raises(CheckpointInvalid, match=rf"{said}.*remove this file"):
            scales_of(tmp_path / name)
        assert load_model(tmp_path / name, ModelConfig.from_directory(tmp_path / name))


def test_a_file_that_does_not_belong_to_the_checkpoint_is_refused(tmp_path: Path) -> None:
    save_reference(tmp_path, "llama")
    measured(tmp_path, tokens=50)
    tensors = load_file(tmp_path / KV_SCALES)
    name = "model.layers.1.self_attn.v_scale"

    def said() -> str:
        with pytest.raises(CheckpointInvalid) as error:
            scales_of(tmp_path)
        return str(error.value)

    save_file({one: tensors[one] for one in tensors if one != name}, tmp_path / KV_SCALES)
    assert f"{name} of shape [2, 1, 1] is missing; measure {KV_SCALES} again" in said()
    save_file(tensors | {name: torch.ones(3, 1, 1)}, tmp_path / KV_SCALES)
    assert f"{name} has shape [3, 1, 1]" in said()
    save_file(tensors | {"model.layers.2.self_attn.v_scale": torch.ones(2, 1, 1)}, tmp_path / KV_SCALES)
    assert "model.layers.2.self_attn.v_scale is unexpected" in said()
    (tmp_path / KV_SCALES).write_bytes(b"no file of safetensors")
    assert "is no complete safetensors file" in said()
