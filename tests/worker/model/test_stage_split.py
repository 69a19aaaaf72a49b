"""Each stage loads from the files that are fetched for it, and from no others, the weights that it has of the whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from medha.api.replica import MedhaReplicaSpec
from medha.errors import CheckpointInvalid
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.device import host_device
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.stage_split import split_layers
from medha_worker.model.weights import Shard, load_weights
from medha_worker.pod.fetch_model import INDEX, layers_read, needed_files

CHUNK_TOKENS = 512


def in_parts(directory: Path, target: Path, *, tied: bool) -> None:
    """Write a checkpoint again with one file for each layer, and one for each tensor beside them."""
    tensors = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    if tied:
        tensors.pop("lm_head.weight", None)
        config["tie_word_embeddings"] = True
    shutil.copytree(directory, target, ignore=shutil.ignore_patterns("*.safetensors"))
    (target / "config.json").write_text(json.dumps(config))
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        words = name.split(".")
        file = f"{'-'.join(words[1:3])}.safetensors" if words[1] == "layers" else f"{name}.safetensors"
        files.setdefault(file, {})[name] = tensor
    for file, content in files.items():
        save_file(content, target / file)
    weight_map = {name: file for file, content in files.items() for name in content}
    (target / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_stage_loads_from_its_files_alone(tmp_path: Path, stages: int, tied: bool) -> None:
    init_checkpoint(tmp_path / "single", preset="tiny", seed=0)
    whole = tmp_path / "whole"
    in_parts(tmp_path / "single", whole, tied=tied)
    config, device = ModelConfig.from_directory(whole), host_device(torch.float32)
    seen: set[str] = set()
    for stage, layers in enumerate(split_layers(config, stages, CHUNK_TOKENS)):
        needed = needed_files(whole, layers, config)
        seen |= set(needed)
        part = tmp_path / f"{stages}-{stage}"
        shutil.copytree(whole, part, ignore=shutil.ignore_patterns("*.safetensors"))
        for name in needed:
            shutil.copy(whole / name, part / name)
        shard = Shard(0, 1, layers.start, layers.stop, config.num_layers)
        found = load_weights(part, config, shard, device=device)
        wanted = load_weights(whole, config, shard, device=device)
        for ours, theirs in zip(found.layers, wanted.layers, strict=True):
            assert torch.equal(ours.qkv, theirs.qkv)
        for name in ("embedding", "final_norm", "head"):
            ours, theirs = getattr(found, name), getattr(wanted, name)
            assert (ours is None) is (theirs is None)
            assert ours is None or torch.equal(ours, theirs)
        for name in needed:  # no file is fetched in vain
            (part / name).unlink()
            with pytest.raises(CheckpointInvalid, match=name):
                load_weights(part, config, shard, device=device)
            shutil.copy(whole / name, part / name)
    assert seen == {path.name for path in whole.glob("*.safetensors")}


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_what_sees_images_is_not_fetched(prefix: str, tmp_path: Path) -> None:
    text = {"num_hidden_layers": 2, "sliding_window": 512}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    files = {
        f"{prefix}embed_tokens.weight": "embedding",
        f"{prefix}layers.0.mlp.up_proj.weight": "first",
        f"{prefix}layers.1.mlp.up_proj.weight": "second",
        f"{prefix}norm.weight": "second",
        "vision_tower.vision_model.post_layernorm.weight": "images",
        "model.multi_modal_projector.mm_soft_emb_norm.weight": "images",
    }
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
    found = ModelConfig.from_directory(tmp_path)
    assert needed_files(tmp_path, range(1), found) == ["embedding", "first"]
    assert needed_files(tmp_path, range(1, 2), found) == ["embedding", "second"]


def test_the_last_stage_fetches_the_prediction_head_where_it_is_asked_for(tmp_path: Path) -> None:
    init_checkpoint(tmp_path / "tiny", preset="tiny", seed=0, architecture="deepseek_v3", mtp_layers=1)
    names = load_file(tmp_path / "tiny" / "model.safetensors")
    file_of = {name: f"{name.split('.')[2] if '.layers.' in name else name}.safetensors" for name in names}
    (tmp_path / "tiny" / INDEX).write_text(json.dumps({"weight_map": file_of}))
    config = ModelConfig.from_directory(tmp_path / "tiny")

    def files(stage: int, **speculation: object) -> list[str]:
        spec = MedhaReplicaSpec.model_validate(
            {
                "model": {"name": "m", "source": {"path": "m"}},
                "parallelism": {"stream": 2},
                "scheduling": {"speculation": speculation},
            }
        )
        return needed_files(tmp_path / "tiny", *layers_read(tmp_path / "tiny", spec, stage, config))

    asks: dict[str, object] = {"method": "predictionHead", "predictionHead": {"kind": "mtp"}}
    assert files(0, **asks) == files(0)
    assert files(1) == ["1.safetensors", "lm_head.weight.safetensors", "model.norm.weight.safetensors"]
    assert sorted({*files(1, **asks)} - {*files(1)}) == ["2.safetensors"]


def test_an_eagle3_head_needs_the_embedding_on_the_last_stage(tmp_path: Path) -> None:
    init_checkpoint(tmp_path / "tiny", preset="tiny", seed=0)
    names = load_file(tmp_path / "tiny" / "model.safetensors")
    (tmp_path / "tiny" / INDEX).write_text(json.dumps({"weight_map": {name: f"{name}.st" for name in names}}))
    config = ModelConfig.from_directory(tmp_path / "tiny")
    plain, embeds = (
        needed_files(tmp_path / "tiny", range(1, 2), config, embeds=one) for one in (False, True)
    )
    assert set(embeds) - set(plain) == {"model.embed_tokens.weight.st"}


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (
            {"model.layers.x.mlp.up_proj.weight": "a"},
            r"tensor 'model\.layers\.x\.mlp\.up_proj\.weight', but a number must",
        ),
        ({"model.norm.weight": "a"}, rf"{INDEX}: weight_map names no model\.embed_tokens\.weight"),
        ([], f"{INDEX}: has no readable weight_map"),
        ("deep", f"{INDEX}: has no readable weight_map"),
    ],
)
def test_an_index_that_cannot_be_used_is_refused(index: object, said: str, tmp_path: Path) -> None:
    init_checkpoint(tmp_path / "tiny", preset="tiny", seed=0)
    content = "[" * 100_000 + "]" * 100_000 if index == "deep" else json.dumps({"weight_map": index})
    (tmp_path / "tiny" / INDEX).write_text(content)
    config = ModelConfig.from_directory(tmp_path / "tiny")
    with pytest.raises(CheckpointInvalid, match=f"{said}.*fetch it again"):
        needed_files(tmp_path / "tiny", range(1), config, embeds=True)
