"""A bundle that nothing needs any more leaves the router's threads, its tokenising processes and its disk."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import to_json

from medha.wire.bundle_digest import bundle_digest
from medha_process.router_settings import RouterSettings
from medha_router.api_error import ApiError
from medha_router.bodies import Bodies, BodyLimits
from medha_router.prepare import Catalog, ModelTerms
from medha_router.tokenizing import Tokenizing

from .conftest import MODEL

LARGE = 2000


def settings(folder: Path) -> RouterSettings:
    return RouterSettings(
        key_file=folder / "key",
        enrolment_file=folder / "enrolled",
        scratch_directory=str(folder),
        large_body_bytes=LARGE,
        tokenize_processes=1,
    )


async def prepared(tokenizing: Tokenizing, digest: str, user: str) -> int:
    """Return the number of tokens of a prompt."""
    body = Bodies(BodyLimits(10 * LARGE, LARGE, 30.0), 100 * LARGE).open("")
    body.content += to_json({"model": MODEL, "prompt": "Hello", "user": user})
    catalog = Catalog({MODEL: ModelTerms(digest, 100, 100, 400)})
    (prompt,) = (await tokenizing.prepare("completions", body, catalog)).prompts
    return len(prompt)


def on_disk(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("medha-bundles-*/*")]


def test_it_is_forgotten_everywhere_and_can_come_back(tmp_path: Path, bundle_files: dict[str, bytes]) -> None:
    async def run() -> None:
        tokenizing = Tokenizing(settings(tmp_path), lambda *_: None)
        try:
            other = await tokenizing.add_bundle({**bundle_files, "generation_config.json": b"{}"})
            digest = await tokenizing.add_bundle(bundle_files)
            kept = tokenizing.bundle(digest)
            await use(tokenizing, digest, other, kept)
        finally:
            tokenizing.close()

    async def use(tokenizing: Tokenizing, digest: str, other: str, kept: Any) -> None:
        sizes = ["x", "x" * LARGE]  # in a thread, in a process
        before = [await prepared(tokenizing, digest, user) for user in sizes]
        tokenizing.drop_bundle(digest)
        tokenizing.drop_bundle(digest)
        for user in sizes:
            with pytest.raises(ApiError) as caught:
                await prepared(tokenizing, digest, user)
            assert (caught.value.status, caught.value.retry_after_seconds) == (503, 1)
        assert on_disk(tmp_path) == [other]
        assert len(kept.encode("Hello", add_special_tokens=True)) == before[0], "a request in flight has it"
        assert await prepared(tokenizing, other, sizes[1]) == before[1]
        assert await tokenizing.add_bundle(bundle_files) == digest == bundle_digest(bundle_files)
        assert [await prepared(tokenizing, digest, user) for user in sizes] == before

    asyncio.run(run())
