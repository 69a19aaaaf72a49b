"""Command lines and a proxy of other projects, in front of `medha up`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from benchmark import benchmark
from medha_process.host_resources import free_port

from .conftest import MODEL, Client
from .packages import clean_environment, installed

pytestmark = pytest.mark.long

KEY = "sk-proxy-of-a-test-0123456789abcdef0123456789abcdef"


def test_llm_prompts_chats_and_follows_a_schema(client: Callable[[str], Client], tmp_path: Path) -> None:
    llm = client("llm")
    model = {
        "model_id": "medha", "model_name": MODEL, "api_base": f"{llm.url}/v1", "supports_schema": True,
    }  # fmt: skip
    (tmp_path / "extra-openai-models.yaml").write_text(yaml.safe_dump([model]))

    def say(*options: str) -> str:
        return llm.run("llm", "-m", "medha", *options, LLM_USER_PATH=str(tmp_path))

    assert say("-o", "max_tokens", "16", "Hello").strip()
    assert say("-o", "max_tokens", "16", "-c", "And then?").strip()
    assert say("-o", "max_tokens", "16", "--no-stream", "-s", "Be brief", "Hello").strip()
    schema = {
        "type": "object", "properties": {"final": {"type": "boolean"}}, "required": ["final"],
        "additionalProperties": False,
    }  # fmt: skip
    found = say("-o", "max_tokens", "200", "--schema", json.dumps(schema), "Hello")
    assert isinstance(json.loads(found)["final"], bool)
    llm.exercised = ["A prompt, streamed and not, `-c` (goes on), `-s` (system), `--schema`"]


def test_litellms_proxy_in_front_serves_the_openai_client(
    client: Callable[[str], Client], tmp_path: Path
) -> None:
    proxy = client("litellm-proxy")
    config = {
        "model_list": [
            {
                "model_name": MODEL,
                "litellm_params": {
                    "model": f"hosted_vllm/{MODEL}", "api_base": f"{proxy.url}/v1", "api_key": "none",
                },
            }
        ]
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    port = free_port("127.0.0.1")
    command = [
        str(proxy.folder / "bin" / "litellm"), "--config", str(tmp_path / "config.yaml"), "--host", "127.0.0.1",
        "--port", str(port),
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with benchmark("served").served(
        command, url, "/health/readiness", env=clean_environment(LITELLM_MASTER_KEY=KEY)
    ):
        openai = Client("openai", installed("openai"), url, proxy.server)
        openai.run_program("proxied_program.py", OPENAI_API_KEY=KEY)
    proxy.exercised = [f"{one}, by `openai` through the proxy" for one in openai.exercised]


def test_curl_streams_and_reads_errors(client: Callable[[str], Client]) -> None:
    curl = client("curl")
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
    body = json.dumps(chat)
    url = f"{curl.url}/v1/chat/completions"
    header = ("-H", "Content-Type: application/json")
    whole = json.loads(curl.run("curl", "-sS", url, *header, "-d", body))
    assert whole["choices"][0]["message"]["content"]
    streamed = curl.run("curl", "-sSN", url, *header, "-d", json.dumps({**chat, "stream": True}))
    lines = [line for line in streamed.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    form = json.loads(curl.run("curl", "-sS", url, "-d", body))  # as curl sends it by itself: no JSON
    assert "application/json" in form["error"]["message"]
    assert json.loads(curl.run("curl", "-sS", f"{curl.url}/v1/models"))["data"][0]["id"] == MODEL
    assert curl.run("curl", "-sSi", f"{curl.url}/health").startswith("HTTP/1.1 200")
    assert json.loads(
        curl.run("curl", "-sS", "--http1.0", f"{curl.url}/tokenize", *header, "-d", json.dumps({"model": MODEL, "prompt": "a"}))
    )["tokens"]  # fmt: skip
    curl.exercised = ["A chat, a stream (`-N`), a missing `Content-Type`, `--http1.0`, `-i`, `/tokenize`"]
