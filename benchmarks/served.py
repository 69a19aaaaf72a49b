"""Run `medha up`, or another server, for as long as a block lasts; read its streams."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml
from harness import progress

from medha_process.host_resources import free_port

START_SECONDS = 300
# Engines spin for a while after their last step, vLLM's workers for about a second. The next engine needs these cores,
# and its decodes would take twice as long. So each engine is measured after the one before has gone to sleep.
SETTLE_SECONDS = 2.0
LOG_END_CHARACTERS = 8000
"""Characters of a log that an error quotes: vLLM names its first error some 5,000 before the end."""


def write_manifest(path: Path, name: str, spec: dict[str, Any]) -> str:
    """Write a MedhaReplica with a free port for its router; return the router's URL."""
    port = free_port("127.0.0.1")
    head = {"apiVersion": "medha.dev/v1alpha1", "kind": "MedhaReplica", "metadata": {"name": name}}
    path.write_text(yaml.safe_dump(head | {"spec": spec | {"router": {"port": port}}}), encoding="utf-8")
    return f"http://127.0.0.1:{port}"


def medha_up(manifest: Path, *options: str) -> list[str]:
    """Return the command that serves a manifest."""
    return [sys.executable, "-m", "medha_cli.main", "up", str(manifest), *options]


def vllm_serve(
    command: str, checkpoint: Path, *, name: str, threads: int, kv_gib: int, options: Sequence[str] = ()
) -> tuple[list[str], str, dict[str, str]]:
    """Return the command of a vLLM server for CPUs, the URL that it will have, and its environment."""
    port = free_port("127.0.0.1")
    arguments = [
        *shlex.split(command), "serve", str(checkpoint), "--served-model-name", name, "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "float32", "--max-model-len", "65536", "--no-enable-prefix-caching",
    ]  # fmt: skip
    bound = {
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | bound
    return [*arguments, *options], f"http://127.0.0.1:{port}", environment


@contextmanager
def served(
    command: list[str],
    url: str,
    ready_path: str = "/ready",
    env: dict[str, str] | None = None,
    *,
    stop_seconds: float = 60.0,
) -> Iterator[subprocess.Popen[str]]:
    """Run a server, and end it as Ctrl-C does; if the block fails, print the end of its output and note it in the error.

    After `stop_seconds`, all of its processes are killed.
    """
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=env, text=True, start_new_session=True
        )
        try:
            until = time.monotonic() + START_SECONDS
            while not _is_ready(url + ready_path):
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"{' '.join(command)} did not become ready")
                time.sleep(0.1)
            yield process
        except Exception as error:
            log.seek(0)
            end = log.read()[-LOG_END_CHARACTERS:]
            progress(end)
            error.add_note(end)
            raise
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=stop_seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


class StreamFailed(Exception):
    """A stream has an event with an error; says which."""


def events_of(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield each event of a streamed answer, as its lines come.

    Raises:
        StreamFailed: an event is an error.
        httpx.RemoteProtocolError: the lines end before `[DONE]`.
    """
    for line in lines:
        if line == "data: [DONE]":
            return
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise StreamFailed(str(event["error"]))
            yield event
    raise httpx.RemoteProtocolError("the answer ends before [DONE]")


def texts_of_events(lines: Iterable[str]) -> Iterator[str]:
    """Yield the text of each event of a streamed completion; raises what `events_of` raises."""
    return (str(event["choices"][0]["text"]) for event in events_of(lines))


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url, timeout=10).status_code == 200
    except httpx.TransportError:
        return False
