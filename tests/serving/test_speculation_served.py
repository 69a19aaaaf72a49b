"""A replica that guesses tokens answers as one that does not, and its record replays to the same decisions."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import MODEL, Served, free_port, start, stop, write_manifest

REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 150},
    {"temperature": 0, "max_tokens": 150, "ignore_eos": True, "logprobs": 2},
    {"temperature": 0.7, "seed": 4, "max_tokens": 100, "n": 3, "frequency_penalty": 0.2},
    {"temperature": 0.3, "seed": 5, "max_tokens": 100, "repetition_penalty": 0.8, "min_tokens": 20},
    {"temperature": 0, "max_tokens": 100, "stop": ["a", "e"], "min_tokens": 5},
    {"temperature": 0.2, "seed": 6, "max_tokens": 120, "guided_regex": "(ab|ac){10,30}"},
    {"temperature": 0, "max_tokens": 60, "logit_bias": {"40": 30, "41": 30}},
]


def answers(served: Served) -> list[Any]:
    found = []
    for number, fields in enumerate(REQUESTS):
        body = {"model": MODEL, "prompt": "one two three " * (2 + number), **fields}
        response = httpx.post(served.url + "/v1/completions", json=body, timeout=120)
        response.raise_for_status()
        document = response.json()
        choices = [(one["text"], one["finish_reason"], one["logprobs"]) for one in document["choices"]]
        found.append((choices, document["usage"]))
    return found


def counted(served: Served, name: str) -> float:
    (value,) = re.findall(rf"^{name}_total (\S+)$", served.controller_page(), re.MULTILINE)
    return float(value)


def small(checkpoint: Path, folder: Path, *options: str, **spec: object) -> Served:
    """Start a replica that warms up quickly."""
    port = free_port()
    scheduling = {"maxChunkTokens": 256, "maxRunning": 16, **spec.pop("scheduling", {})}  # type: ignore[dict-item]
    manifest = write_manifest(
        folder / f"{port}.yaml", checkpoint, port,
        model={"name": MODEL, "source": {"path": str(checkpoint)}, "maxModelLen": 1024},
        kvCache={"size": "16Mi"}, scheduling=scheduling, serviceClasses=[{"name": "default", "tpotTargetSeconds": 5}], **spec,
    )  # fmt: skip
    return start(manifest, port, checkpoint, *options)


@pytest.mark.parametrize(
    "shape", [{}, pytest.param({"stream": 2, "kv": 2}, marks=pytest.mark.long)], ids=["one rank", "a grid"]
)
def test_answers_are_those_of_a_replica_that_does_not_guess(
    checkpoint: Path, tmp_path: Path, shape: dict[str, int]
) -> None:
    plain = small(checkpoint, tmp_path)
    try:
        expected = answers(plain)
    finally:
        stop(plain)
    record = tmp_path / "record.jsonl"
    speculation = {"speculation": {"method": "promptLookup", "maxDraftTokens": 6}}
    guessing = small(checkpoint, tmp_path, "--record", str(record), scheduling=speculation, parallelism=shape)
    try:
        found = answers(guessing)
        drafted, accepted = (
            counted(guessing, name) for name in ("medha_drafted_tokens", "medha_accepted_draft_tokens")
        )
        assert guessing.interrupt() == 0
    finally:
        stop(guessing)
    for (choices, usage), (as_choices, as_usage) in zip(found, expected, strict=True):
        assert usage["completion_tokens"] == as_usage["completion_tokens"]
        for (text, reason, logprobs), (as_text, as_reason, as_logprobs) in zip(
            choices, as_choices, strict=True
        ):
            assert (text, reason) == (as_text, as_reason)
            assert (logprobs is None) == (as_logprobs is None)
            if logprobs is not None:
                assert logprobs["tokens"] == as_logprobs["tokens"]
                near = pytest.approx(as_logprobs["token_logprobs"], abs=1e-3)
                assert logprobs["token_logprobs"] == near
    assert drafted > accepted > 0
    command = [sys.executable, "-m", "medha_cli.main", "replay", str(record)]
    replayed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
