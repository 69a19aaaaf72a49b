"""Tests of the layers that a rank loads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from medha.api.replica import MedhaReplicaSpec
from medha.api.speculation_spec import SpeculationSpec
from medha.errors import CheckpointInvalid, ConfigInvalid
from medha.topology import Topology
from medha.wire.messages import RankReady, Rendezvous
from medha_process.part_settings import RankSettings
from medha_worker.checkpoints.eagle3_preset import init_eagle3
from medha_worker.checkpoints.head_checkpoint import eagle3_config
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.model.model_config import ModelConfig
from medha_worker.model.stage_split import guessing_layers
from medha_worker.rank.engine import _samples, _shard, load
from medha_worker.rank.step_recorder import StepRecorder

from ..eagle3_reference import change_head


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [pytest.param(24, 2, [12, 12], marks=pytest.mark.long), (9, 4, [3, 2, 2, 2])],
)
def test_stages_are_even_for_a_prefill_however_large_the_output_head_is(
    tmp_path: Path, layers: int, stages: int, expected: list[int]
) -> None:
    """In models of up to a billion parameters, the output head is as large as several layers."""
    init_checkpoint(tmp_path / "tiny", preset="tiny", seed=0)
    config = replace(ModelConfig.from_directory(tmp_path / "tiny"), num_layers=layers, vocab_size=150_000)
    shards = [_shard(config, Topology(stream=stages), rank, chunk_tokens=2048) for rank in range(stages)]
    assert [shard.last_layer - shard.first_layer for shard in shards] == expected
    assert config.vocab_size * config.hidden_size > config.linear_flops_per_token / 4, "mostly head"


def test_the_last_stage_has_fewer_layers_where_its_output_head_weighs_in_chunks_that_are_small(
    tmp_path: Path,
) -> None:
    init_checkpoint(tmp_path / "tiny", preset="tiny", seed=0)
    config = replace(ModelConfig.from_directory(tmp_path / "tiny"), num_layers=24, vocab_size=150_000)
    layer_weights = (config.linear_flops_per_token / 2 - config.vocab_size * config.hidden_size) / 24
    head_layers = (
        config.vocab_size * config.hidden_size / layer_weights / 32
    )  # one row of a chunk of 32 samples
    shards = [_shard(config, Topology(stream=2), rank, chunk_tokens=32) for rank in range(2)]
    first, last = (shard.last_layer - shard.first_layer for shard in shards)
    assert first + last == 24
    assert first > last
    assert abs(first - last - head_layers) <= 1


def test_the_last_stage_has_fewer_layers_beside_a_prediction_head(tmp_path: Path) -> None:
    """A single one of four tensor ranks computes the whole head, which takes as long as four layers of the others."""
    init_checkpoint(tmp_path / "tiny", preset="tiny", seed=0)
    config = replace(ModelConfig.from_directory(tmp_path / "tiny"), num_layers=24)
    grid = Topology(tensor=4, stream=2)
    shards = [
        _shard(config, grid, rank, 2048, guessing_layers(with_eagle3(tmp_path, tensor=4).spec))
        for rank in (0, 4)
    ]
    assert [shard.last_layer - shard.first_layer for shard in shards] == [14, 10]
    assert guessing_layers(settings_of(tmp_path, drafts=True, tensor=4).spec) == 0


def settings_of(folder: Path, *, drafts: bool, rank: int = 0, **parallelism: int) -> RankSettings:
    source = {"path": str(folder / "draft")}
    document = {
        "model": {"name": "m", "source": {"path": str(folder / "tiny")}, "maxModelLen": 128},
        "kvCache": {"size": "384Ki"},
        "scheduling": {
            "maxChunkTokens": 32,
            "maxRunning": 4,
            "speculation": {"method": "draftModel", "draftModel": source} if drafts else {},
        },
        "parallelism": parallelism,
        "threads": 1,
    }
    return RankSettings(
        rank=rank,
        spec=MedhaReplicaSpec.model_validate(document),
        model_directory=folder / "tiny",
        draft_directory=folder / "draft" if drafts else None,
        control="",
        tokens="",
        key_file=folder,
        controller_key_file=folder,
    )


def test_a_draft_model_takes_a_part_of_each_block_and_its_guesses_are_timed(tmp_path: Path) -> None:
    init_checkpoint(tmp_path / "tiny", preset="tiny", seed=0)
    init_checkpoint(tmp_path / "draft", preset="tiny", seed=1)

    def ready(drafts: bool) -> RankReady:
        loaded = load(settings_of(tmp_path, drafts=drafts), StepRecorder(0), lambda *_: None)
        return loaded.rendezvous(Rendezvous(epoch=0, address="")).ready

    plain, drafting = ready(False), ready(True)
    assert drafting.kv_blocks == plain.kv_blocks // 2
    assert drafting.kv_bytes == plain.kv_bytes == 384 * 2**10, (
        "the same memory for fewer blocks of twice the size"
    )
    assert drafting.weights_bytes == 2 * plain.weights_bytes
    assert plain.draft_costs is None
    assert drafting.draft_costs is not None
    assert drafting.draft_costs.round_seconds + drafting.draft_costs.row_seconds > 0


def test_an_unfit_draft_model_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    """To read those of a large model takes minutes, and the rank would do so again each time that it starts."""
    for name in ("tiny", "draft"):
        init_checkpoint(tmp_path / name, preset="tiny", seed=0)
    (tmp_path / "tiny" / "model.safetensors").unlink()
    (tmp_path / "draft" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointInvalid, match=r"speculation\.draftModel .*tokenizer\.json is missing"):
        load(settings_of(tmp_path, drafts=True), StepRecorder(0), lambda *_: None)


def test_only_the_ranks_that_sample_load_a_draft_model(tmp_path: Path) -> None:
    samples = [
        _samples(settings_of(tmp_path, drafts=True, rank=rank, tensor=2, stream=2)) for rank in range(4)
    ]
    assert samples == [False, False, True, False]
    samples = [_samples(settings_of(tmp_path, drafts=True, rank=rank, tensor=2, kv=2)) for rank in range(4)]
    assert samples == [True, False, True, False], "one of each lane"


@pytest.mark.long
@pytest.mark.parametrize(("kv_dtype", "size"), [("auto", "384Ki"), ("fp8", "96Ki")])
def test_a_head_takes_a_layer_of_each_block_and_its_guesses_are_timed(
    tmp_path: Path, kv_dtype: str, size: str
) -> None:
    init_checkpoint(tmp_path / "tiny", preset="tiny", seed=0, architecture="deepseek_v3", mtp_layers=1)

    def ready(speculation: dict[str, object]) -> RankReady:
        plain = settings_of(tmp_path, drafts=False)
        document = plain.spec.model_dump(by_alias=True, exclude_none=True)
        document["scheduling"]["speculation"] = speculation
        document["kvCache"] |= {"dtype": kv_dtype, "size": size}
        spec = MedhaReplicaSpec.model_validate(document)
        loaded = load(plain.model_copy(update={"spec": spec}), StepRecorder(0), lambda *_: None)
        return loaded.rendezvous(Rendezvous(epoch=0, address="")).ready

    plain = ready({})
    headed = ready({"method": "predictionHead", "predictionHead": {"kind": "mtp"}})
    assert headed.kv_blocks == plain.kv_blocks * 2 // 3, "three layers in the place of two"
    block_bytes = plain.kv_bytes / plain.kv_blocks
    assert headed.kv_bytes == headed.kv_blocks * block_bytes * 3 / 2
    head_bytes = ModelConfig.from_directory(tmp_path / "tiny").head_weights_bytes(4)
    assert headed.weights_bytes - plain.weights_bytes == pytest.approx(head_bytes, rel=0.02)
    assert headed.draft_costs is not None
    assert headed.draft_costs.round_seconds + headed.draft_costs.row_seconds > 0
    assert headed.draft_costs.token_seconds == 0.0, "its steps compute the tokens before its guesses"


def test_a_head_that_is_not_there_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    init_checkpoint(tmp_path / "tiny", preset="tiny", seed=0, architecture="deepseek_v3")
    (tmp_path / "tiny" / "model.safetensors").unlink()
    plain = settings_of(tmp_path, drafts=False, tensor=2, stream=2)
    speculation = SpeculationSpec.model_validate(
        {"method": "predictionHead", "predictionHead": {"kind": "mtp"}}
    )
    scheduling = plain.spec.scheduling.model_copy(update={"speculation": speculation})
    asks = plain.spec.model_copy(update={"scheduling": scheduling})
    for rank in range(4):
        with pytest.raises(ConfigInvalid, match=r"predictionHead.kind is mtp, but .* without MTP layers"):
            load(plain.model_copy(update={"spec": asks, "rank": rank}), StepRecorder(0), lambda *_: None)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_an_eagle3_head_has_a_share_of_each_block_and_shares_the_embedding(
    tmp_path: Path, kv_dtype: str
) -> None:
    init_checkpoint(tmp_path / "tiny", preset="tiny", seed=0)
    init_eagle3(tmp_path / "draft", tmp_path / "tiny", seed=0)

    def ready(*, guesses: bool) -> RankReady:
        settings = with_eagle3(tmp_path) if guesses else settings_of(tmp_path, drafts=False)
        cache = settings.spec.kv_cache.model_copy(update={"dtype": kv_dtype})
        settings = settings.model_copy(update={"spec": settings.spec.model_copy(update={"kv_cache": cache})})
        loaded = load(settings, StepRecorder(0), lambda *_: None)
        return loaded.rendezvous(Rendezvous(epoch=0, address="")).ready

    plain, guessing = ready(guesses=False), ready(guesses=True)
    block_bytes = plain.kv_bytes / plain.kv_blocks
    assert guessing.kv_bytes / guessing.kv_blocks == block_bytes * 3 / 2, "three layers in the place of two"
    config = ModelConfig.from_directory(tmp_path / "tiny")
    head_bytes = eagle3_config(tmp_path / "draft", config).weights_bytes(4)
    assert guessing.weights_bytes - plain.weights_bytes == pytest.approx(head_bytes, rel=0.03)
    assert guessing.draft_costs is not None
    assert guessing.draft_costs.round_seconds + guessing.draft_costs.row_seconds > 0
    assert guessing.draft_costs.token_seconds == 0.0, "its steps compute the tokens before its guesses"


def test_an_unfit_eagle3_head_is_refused_on_every_rank_before_weights_are_read(tmp_path: Path) -> None:
    """Ranks of earlier stages collect what it takes, so they would take the wrong layers."""
    init_checkpoint(tmp_path / "tiny", preset="tiny", seed=0)
    init_eagle3(tmp_path / "draft", tmp_path / "tiny", seed=0)
    (tmp_path / "tiny" / "model.safetensors").unlink()
    change_head(tmp_path / "draft", {"vocab_size": 1000})
    for rank in range(4):
        with pytest.raises(ConfigInvalid, match=r"predictionHead\.source .*vocab_size is 1000, not 512"):
            load(with_eagle3(tmp_path, rank=rank, tensor=2, stream=2), StepRecorder(0), lambda *_: None)


def with_eagle3(folder: Path, rank: int = 0, **parallelism: int) -> RankSettings:
    """Return the settings of a rank whose replica has the EAGLE-3 head in `draft`."""
    plain = settings_of(folder, drafts=False, rank=rank, **parallelism)
    head = {"kind": "eagle3", "source": {"path": str(folder / "draft")}}
    speculation = SpeculationSpec.model_validate({"method": "predictionHead", "predictionHead": head})
    scheduling = plain.spec.scheduling.model_copy(update={"speculation": speculation})
    spec = plain.spec.model_copy(update={"scheduling": scheduling})
    return plain.model_copy(update={"spec": spec, "draft_directory": folder / "draft"})
