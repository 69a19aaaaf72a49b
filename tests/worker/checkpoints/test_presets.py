"""`medha model init` makes checkpoints that public tools load, the same bytes for the same seed."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from tokenizers import Tokenizer

from medha.errors import ConfigInvalid
from medha_worker.checkpoints.presets import ARCHITECTURES, PRESETS, init_checkpoint
from medha_worker.model.model_config import ModelConfig

MULTILINGUAL = "Hello wörld, मेधा 知识!\n  def f(x): return x + 12345 🙂"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints") / "tiny"
    init_checkpoint(directory, preset="tiny", seed=1)
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(
    tiny: Path, tmp_path: Path
) -> None:
    init_checkpoint(tmp_path / "again", preset="tiny", seed=1)
    init_checkpoint(tmp_path / "other", preset="tiny", seed=2)
    assert contents(tmp_path / "again") == contents(tiny)
    other = contents(tmp_path / "other")
    assert {name for name, data in contents(tiny).items() if other[name] != data} == {"model.safetensors"}


def test_transformers_loads_model_and_tokenizer_and_agrees_on_the_token_ids(tiny: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    assert isinstance(model, transformers.LlamaForCausalLM)
    assert sum(parameter.numel() for parameter in model.parameters()) == 500_352
    ids = tokenizer(MULTILINGUAL)["input_ids"]
    assert ids == Tokenizer.from_file(str(tiny / "tokenizer.json")).encode(MULTILINGUAL).ids
    assert ids[0] == tokenizer.bos_token_id == 0
    assert tokenizer.decode(ids, skip_special_tokens=True) == MULTILINGUAL


def test_a_gpt_oss_has_channels_whose_template_shows_functions_calls_and_results(tmp_path: Path) -> None:
    init_checkpoint(tmp_path / "model", preset="tiny", seed=0, architecture="gpt_oss")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    function = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": "x"},
    ]
    tools = [{"type": "function", "function": function}]
    options = {"tools": tools, "add_generation_prompt": True}
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    assert text == (
        f"<|start|>developer<|message|># Tools\n\nCall them in the channel commentary.\n{json.dumps(function)}\n<|end|>"
        "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": "é"}<|call|>'
        '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"x"<|end|><|start|>assistant'
    )
    marks = ["<|return|>", "<|call|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>"]
    assert tokenizer.convert_tokens_to_ids(marks) == [1, 3, 4, 5, 6, 7, 8]
    generation = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [1, 3]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_id_of_the_vocabulary_has_a_token(preset: str, tmp_path: Path) -> None:
    init_checkpoint(tmp_path / "model", preset=preset, seed=0)
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert sorted(tokenizer.get_vocab().values()) == list(range(config["vocab_size"]))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_tensors_are_exactly_those_of_the_architecture(architecture: str, tmp_path: Path) -> None:
    init_checkpoint(tmp_path / "model", preset="tiny", seed=0, architecture=architecture, dtype="bfloat16")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "again")
    with safe_open(tmp_path / "again" / "model.safetensors", framework="pt") as file:
        expected = {name: file.get_tensor(name).shape for name in file.keys()}  # noqa: SIM118 - not a mapping
    with safe_open(tmp_path / "model" / "model.safetensors", framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    assert {name: tensor.shape for name, tensor in found.items()} == expected
    corrections = {tensor.dtype for name, tensor in found.items() if name.endswith("e_score_correction_bias")}
    assert corrections == ({torch.float32} if architecture == "deepseek_v3" else set())
    others = {tensor.dtype for name, tensor in found.items() if not name.endswith("e_score_correction_bias")}
    assert others == {torch.bfloat16}


@pytest.mark.parametrize(
    ("architecture", "windows"),
    [
        ("mistral", (9, 9)),
        ("qwen2", (None, 9)),
        ("qwen3", (None, 9)),
        ("gemma3_text", (9, None)),
        ("gpt_oss", (9, None)),
    ],
)
def test_a_window_is_that_of_the_layers_to_which_the_architecture_gives_one(
    architecture: str, windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    init_checkpoint(tmp_path / "model", preset="tiny", seed=0, architecture=architecture, window_tokens=9)
    assert ModelConfig.from_directory(tmp_path / "model").windows == windows
    theirs = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    layers = getattr(theirs, "layer_types", ["sliding_attention"] * len(windows))
    assert tuple(theirs.sliding_window if one == "sliding_attention" else None for one in layers) == windows


def test_the_chat_template_writes_roles_and_accepts_content_parts(tiny: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|bos|><|system|>\nBe brief.<|end|>\n<|user|>\nHello<|end|>\n<|assistant|>\n"


def test_greedy_text_depends_on_the_prompt_and_does_not_repeat_one_token(tiny: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    prompts = torch.tensor([[0, 40, 300, 301, 302, 20], [0, 41, 300, 301, 302, 20]])
    first, second = model.generate(prompts, max_new_tokens=24, min_new_tokens=24, do_sample=False)[
        :, 6:
    ].tolist()
    assert first != second
    assert len(set(first)) > 6
    assert len(set(second)) > 6


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"preset": "huge"}, "preset"),
        ({"architecture": "gpt2"}, "architecture"),
        ({"dtype": "int8"}, "dtype"),
        ({"seed": -1}, "seed"),
        ({"window_tokens": 8}, "window is 8 for architecture llama"),
        ({"architecture": "mistral", "window_tokens": 0}, "window is 0"),
        (
            {"architecture": "mixtral", "quantisation": "mxfp4"},
            "mxfp4 for architecture mixtral.* one of gpt_oss",
        ),
        ({"architecture": "deepseek_v3", "quantisation": "fp8-kv"}, "fp8-kv for architecture deepseek_v3"),
        ({"architecture": "gpt_oss", "quantisation": "awq"}, "quantisation is awq for architecture gpt_oss"),
        ({"quantisation": "mxfp4"}, "quantisation is mxfp4 for architecture llama.* choose one of gpt_oss"),
    ],
)
def test_a_wrong_argument_is_named_and_nothing_is_written(
    arguments: dict[str, object], named: str, tmp_path: Path
) -> None:
    settings: dict[str, object] = {"preset": "tiny", "seed": 0} | arguments
    with pytest.raises(ConfigInvalid, match=named):
        init_checkpoint(tmp_path / "model", **settings)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_directory_in_use_is_refused_and_force_replaces_only_a_checkpoint(
    tiny: Path, tmp_path: Path
) -> None:
    target = tmp_path / "model"
    target.mkdir()
    init_checkpoint(target, preset="tiny", seed=2)  # empty: fine
    with pytest.raises(ConfigInvalid, match="not empty"):
        init_checkpoint(target, preset="tiny", seed=1)
    init_checkpoint(target, preset="tiny", seed=1, force=True)
    assert contents(target) == contents(tiny)

    (target / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigInvalid, match=r"thesis\.txt"):
        init_checkpoint(target, preset="tiny", seed=2, force=True)
    assert (target / "thesis.txt").read_text() == "years of work"
    with pytest.raises(ConfigInvalid, match="is a file"):
        init_checkpoint(target / "thesis.txt", preset="tiny", seed=2, force=True)


def test_a_failure_half_way_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("medha_worker.checkpoints.new_checkpoint.save_file", full)
    with pytest.raises(OSError, match="No space"):
        init_checkpoint(tmp_path / "model", preset="tiny", seed=0)
    assert list(tmp_path.iterdir()) == []
