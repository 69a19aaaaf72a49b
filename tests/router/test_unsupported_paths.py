"""Paths of other servers are refused by name, as clients of OpenAI expect errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest

from medha_router.unsupported_paths import UNSUPPORTED_PATHS

from .conftest import MODEL, Router

CALLS: dict[str, Callable[[openai.OpenAI], Any]] = {
    "embeddings": lambda client: client.embeddings.create(model=MODEL, input="x"),
    "moderation": lambda client: client.moderations.create(model=MODEL, input="x"),
    "images": lambda client: client.images.generate(model=MODEL, prompt="x"),
    "speech": lambda client: client.audio.speech.create(model=MODEL, input="x", voice="alloy"),
    "transcription": lambda client: client.audio.transcriptions.create(model=MODEL, file=b"x"),
    "training": lambda client: client.fine_tuning.jobs.list(),
    "stores nothing": lambda client: client.files.list(),
}


@pytest.mark.parametrize("said", CALLS)
def test_a_client_reads_what_is_not_served_and_what_is(router: Router, said: str) -> None:
    client = openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError, match=said) as refused:
        CALLS[said](client)
    assert refused.value.code == "unsupported_endpoint"


def test_each_of_these_paths_is_refused_whatever_its_body(router: Router) -> None:
    for path in UNSUPPORTED_PATHS:
        error = router.http.post(f"{path}/below", content=b"\x00").json()["error"]
        assert error["code"] == "unsupported_endpoint", path
        assert UNSUPPORTED_PATHS[path] in error["message"]


def test_any_other_path_is_only_not_found(router: Router) -> None:
    assert router.http.get("/v1/embedding").json()["error"]["code"] == "not_found"
