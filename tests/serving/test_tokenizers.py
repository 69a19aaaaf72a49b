"""A checkpoint whose tokenizer stands in several files, through `medha up`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .conftest import MODEL, free_port, start, stop, write_manifest


def scattered(checkpoint: Path, directory: Path) -> Path:
    """A copy of `checkpoint` in which `special_tokens_map.json` alone says that the chat's markers are tokens."""
    shutil.copytree(checkpoint, directory)
    content = json.loads((directory / "tokenizer.json").read_text())
    markers = ["<|user|>", "<|assistant|>", "<|end|>"]
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in markers]
    (directory / "tokenizer.json").write_text(json.dumps(content))
    (directory / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": markers}))
    return directory


@pytest.mark.long
def test_a_chat_has_the_tokens_and_the_text_that_it_has_in_transformers(
    checkpoint: Path, tmp_path: Path
) -> None:
    directory = scattered(checkpoint, tmp_path / "scattered")
    port = free_port()
    served = start(write_manifest(tmp_path / "replica.yaml", directory, port), port, directory)
    try:
        with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Say something."}],
                max_tokens=24,
                temperature=0,
            )
    finally:
        stop(served)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Say something."}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    length = prompt.input_ids.shape[1]
    out = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == length
    assert answer.choices[0].message.content == tokenizer.decode(out[0, length:], skip_special_tokens=True)


def test_a_tokenizer_that_cannot_be_served_exactly_ends_medha_up_with_the_file_and_the_field(
    checkpoint: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "refused"
    shutil.copytree(checkpoint, directory)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "T5Tokenizer"}))
    manifest = write_manifest(tmp_path / "replica.yaml", directory, free_port())
    ended = subprocess.run(
        [sys.executable, "-m", "medha_cli.main", "up", str(manifest)], capture_output=True, text=True
    )
    assert ended.returncode == 1
    message = f"{directory / 'tokenizer_config.json'}: tokenizer_class is 'T5Tokenizer'"
    assert message in ended.stdout + ended.stderr
