"""KV is exchanged by ranks that would compute the same KV, and by no others."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from medha.api.replica import MedhaReplicaSpec
from medha.wire.messages import PeerFigures, Rendezvous
from medha_process.part_settings import RankSettings
from medha_worker.checkpoints.eagle3_preset import init_eagle3
from medha_worker.checkpoints.measured_kv_scales import measure_scales, random_sequences, write_scales
from medha_worker.checkpoints.presets import PRESETS, init_checkpoint
from medha_worker.checkpoints.weights_identity import content_identity
from medha_worker.model.host_blocks import HostBlocks
from medha_worker.model.prediction_head import PredictionHead
from medha_worker.rank.engine import Loaded, load
from medha_worker.rank.step_recorder import StepRecorder


def loaded(
    folder: Path, *, rank: int = 0, stages: int = 1, kv_dtype: str = "auto", **speculation: object
) -> Loaded:
    tiers = {"host": {"size": "384Ki"}, "peers": {"bandwidth": "1Gi"}}
    document = {
        "model": {"name": "m", "source": {"path": "/models/tiny"}, "maxModelLen": 128},
        "kvCache": {"size": "384Ki", "tiers": tiers, "dtype": kv_dtype},
        "parallelism": {"stream": stages},
        "scheduling": {"maxChunkTokens": 32, "maxRunning": 4, "speculation": speculation},
        "threads": 1,
    }
    spec = MedhaReplicaSpec.model_validate(document)
    source = spec.scheduling.speculation.source
    settings = RankSettings(
        rank=rank,
        spec=spec,
        model_directory=folder,
        draft_directory=None if source is None or source.path is None else Path(source.path),
        peer_endpoint="tcp://127.0.0.1:*",
        control="",
        tokens="",
        key_file=folder,
        controller_key_file=folder,
    )
    return load(settings, StepRecorder(0), lambda *_: None)


def figures(rank: Loaded) -> PeerFigures | None:
    """Let a rank take part in an epoch; return where it says that it gives KV."""
    ready = rank.rendezvous(Rendezvous(epoch=0, address="")).ready
    rank.close()
    return ready.peer


def identity(rank: Loaded) -> str:
    found = figures(rank)
    assert found is not None
    return found.identity


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed, name in enumerate(("one", "other")):
        init_checkpoint(tmp_path / name, preset="tiny", seed=seed)
    return tmp_path


def replace_weights(folder: Path) -> None:
    shutil.copy(folder / "other" / "model.safetensors", folder / "one" / "model.safetensors")


def test_copies_of_a_checkpoint_exchange_kv_and_other_weights_do_not(folder: Path) -> None:
    shutil.copytree(folder / "one", folder / "copy")
    os.utime(folder / "copy" / "model.safetensors", (1, 1))
    one, copy, other = (identity(loaded(folder / name)) for name in ("one", "copy", "other"))
    assert one == copy != other


def test_kv_in_fp8_is_other_kv(folder: Path) -> None:
    rounded, again, full = (
        identity(loaded(folder / "one", kv_dtype=dtype)) for dtype in ("fp8", "fp8", "auto")
    )
    assert rounded == again != full


def test_kv_with_other_scales_is_other_kv(folder: Path) -> None:
    """The file with measured scales is copied with its checkpoint; measured again with other tokens, it is another one."""
    for name, seed in (("measured", 0), ("again", 1)):
        shutil.copytree(folder / "one", folder / name)
        scales = measure_scales(folder / name, random_sequences(folder / name, 50, seed))
        write_scales(folder / name, scales)
    shutil.copytree(folder / "measured", folder / "copy")
    derived, measured, copy, again = (
        identity(loaded(folder / name, kv_dtype="fp8")) for name in ("one", "measured", "copy", "again")
    )
    assert measured == copy
    assert len({derived, measured, again}) == 3


def test_replicas_with_and_without_a_prediction_head_exchange_no_kv(tmp_path: Path) -> None:
    """Blocks of the former have one more layer."""
    init_checkpoint(tmp_path / "mtp", preset="tiny", seed=0, architecture="deepseek_v3", mtp_layers=1)
    head: dict[str, object] = {"method": "predictionHead", "predictionHead": {"kind": "mtp"}}
    asked: list[dict[str, object]] = [{}, {"method": "promptLookup"}, head, head]
    plain, looking_up, headed, alike = (identity(loaded(tmp_path / "mtp", **one)) for one in asked)
    assert plain == looking_up
    assert plain != headed == alike


def test_equal_shapes_of_other_layers_are_other_kv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of two stages has four layers, or three and the head that moves a layer to the first one."""
    monkeypatch.setitem(PRESETS, "deeper", replace(PRESETS["tiny"], layers=8))
    init_checkpoint(tmp_path / "mtp", preset="deeper", seed=0, architecture="deepseek_v3", mtp_layers=1)

    def of(**speculation: object) -> tuple[str, list[tuple[int, ...]]]:
        rank = loaded(tmp_path / "mtp", rank=1, stages=2, **speculation)
        head = rank._draft if isinstance(rank._draft, PredictionHead) else None
        pools = rank._model.new_kv_cache(4, 4, head=head)
        return rank._kv_identity(rank._model, HostBlocks(pools, 4), ""), [one.shape for one in pools.pools()]

    plain, shapes = of()
    headed, equal_shapes = of(method="predictionHead", predictionHead={"kind": "mtp"})
    assert shapes == equal_shapes
    assert plain != headed


def test_replicas_with_different_eagle3_heads_exchange_no_kv(folder: Path) -> None:
    """Their blocks have the same shape."""
    for name, seed in (("a", 1), ("b", 2), ("c", 1), ("d", 1), ("e", 2), ("f", 1)):
        init_eagle3(folder / name, folder / "one", seed=seed)
        if name in "def":
            weights = folder / name / "model.safetensors"
            torch.save(load_file(weights), folder / name / "pytorch_model.bin")
            weights.unlink()

    def of(name: str) -> str:
        head = {"kind": "eagle3", "source": {"path": str(folder / name)}}
        return identity(loaded(folder / "one", method="predictionHead", predictionHead=head))

    a, b, c, d, e, f = map(of, "abcdef")
    assert a == c != b
    assert d == f != e, "files of torch count, too"


def test_weights_that_are_replaced_behind_a_rank_are_not_those_of_its_kv(folder: Path) -> None:
    before = identity(loaded(folder / "one"))
    rank = loaded(folder / "one")
    replace_weights(folder)
    assert identity(rank) == before
    assert identity(loaded(folder / "one")) != before


def test_a_rank_hands_no_kv_over_if_its_checkpoint_changes_while_it_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter(["before", "behind"])
    monkeypatch.setattr("medha_worker.rank.engine.weights_identity", lambda _: next(found))
    assert figures(loaded(folder / "one")) is None


@pytest.mark.parametrize("damage", ["dangling", "no header"])
def test_a_rank_starts_and_hands_no_kv_over_if_its_checkpoint_cannot_be_told_from_others(
    folder: Path, damage: str
) -> None:
    if damage == "dangling":
        (folder / "one" / "dangling.json").symlink_to(folder / "nothing")
    else:
        (folder / "one" / "extra.safetensors").write_bytes(b"\xff" * 100)
    assert figures(loaded(folder / "one")) is None


@pytest.mark.parametrize("at", [0, 50_000, -1])
def test_the_identity_follows_both_ends_of_each_tensor_and_its_middle(tmp_path: Path, at: int) -> None:
    tensor = bytearray(100_000)
    header = json.dumps({"x": {"dtype": "U8", "shape": [len(tensor)], "data_offsets": [0, len(tensor)]}})

    def found() -> str:
        text = len(header).to_bytes(8, "little") + header.encode() + tensor
        (tmp_path / "model.safetensors").write_bytes(text)
        return content_identity(tmp_path)

    before = found()
    tensor[at] = 1
    assert found() != before
