"""`medha plan` counts the memory of a prediction head as ranks find it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from medha.errors import ModelUnsupported
from medha_cli.main import main
from medha_sim.head_shape import mtp_shape, read_eagle3_shape
from medha_sim.plan import read_shape
from medha_worker.checkpoints.eagle3_preset import init_eagle3
from medha_worker.checkpoints.head_checkpoint import eagle3_config
from medha_worker.checkpoints.presets import init_checkpoint
from medha_worker.model.model_config import ModelConfig


def test_an_eagle3_head_counts_with_the_embedding_that_a_rank_of_a_grid_holds_for_it(tmp_path: Path) -> None:
    init_checkpoint(tmp_path / "tiny", preset="tiny", seed=0)
    init_eagle3(tmp_path / "head", tmp_path / "tiny", seed=0)
    config = ModelConfig.from_directory(tmp_path / "tiny")
    head = eagle3_config(tmp_path / "head", config)
    found = read_eagle3_shape(tmp_path / "head", read_shape(tmp_path / "tiny"))
    with_embedding = head.weights_bytes(4) + 4 * config.vocab_size * config.hidden_size
    assert found.weights_bytes == pytest.approx(with_embedding, rel=0.01)
    assert found.kv_bytes_per_token == 2 * 4 * head.layer.num_kv_heads * head.layer.head_dim


def test_an_mtp_layer_counts_with_its_embedding_and_output_head(tmp_path: Path) -> None:
    init_checkpoint(tmp_path / "mtp", preset="tiny", seed=0, architecture="deepseek_v3", mtp_layers=1)
    layer = mtp_shape(read_shape(tmp_path / "mtp"))
    config = ModelConfig.from_directory(tmp_path / "mtp")
    assert layer.weights_bytes == pytest.approx(config.head_weights_bytes(4), rel=0.01)
    assert layer.kv_bytes_per_token == 4 * config.head_dim


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
        {"index_topk": 8},
        {"use_qk_norm": True},
        {"architectures": ["FooForCausalLM"]},
        {"quantization_config": {"quant_method": "bitsandbytes"}},
    ],
)
def test_a_model_that_is_not_served_is_not_planned(tmp_path: Path, fields: dict[str, object]) -> None:
    init_checkpoint(tmp_path / "tiny", preset="tiny", seed=0)
    config = tmp_path / "tiny" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    with pytest.raises(ModelUnsupported) as refused:
        ModelConfig.from_directory(tmp_path / "tiny")
    for option in ("--model", "--draft-model"):
        for named in (config, config.parent):
            planned = CliRunner().invoke(main, ["plan", "--context", "4K", option, str(named)])
            assert planned.exit_code == 2
            assert str(refused.value) in planned.stderr


def test_the_command_counts_a_prediction_head(tmp_path: Path) -> None:
    init_checkpoint(tmp_path / "tiny", preset="tiny", seed=0)
    init_eagle3(tmp_path / "eagle", tmp_path / "tiny", seed=0)
    model = ["plan", "--context", "4K", "--model", str(tmp_path / "tiny")]
    plain = CliRunner().invoke(main, model)
    result = CliRunner().invoke(main, [*model, "--prediction-head", str(tmp_path / "eagle")])
    assert result.exit_code == plain.exit_code
    assert "hold those of eagle, too" in " ".join(result.output.split())
    for more, said in (
        (["mtp"], "--prediction-head mtp: tiny is no DeepSeek-V3"),
        ([str(tmp_path / "none")], "give mtp, or the folder of an EAGLE-3 head"),
        (["mtp", "--draft-model", "Llama-3-8B"], "exclude each other"),
    ):
        wrong = CliRunner().invoke(main, [*model, "--prediction-head", *more])
        assert wrong.exit_code == 2
        assert said in " ".join(wrong.output.split())
