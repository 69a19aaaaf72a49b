"""More streams at the same time than Envoy allows by default."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import httpx
import pytest

from gateways.conftest import KEY, Site
from router.conftest import MODEL, Script

STREAMS = 1300
"""Requests that Envoy sends to a cluster at the same time by default; others wait."""


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_each_stream_gets_its_first_token_while_all_others_are_open(
    shared_site: Site, script: Script
) -> None:
    site = shared_site
    site.say(replace(script, hold=True))

    @asynccontextmanager
    async def opened(client: httpx.AsyncClient) -> AsyncIterator[None]:
        body = {"model": MODEL, "prompt": "x", "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            while not (await anext(lines)).startswith("data: "):
                pass
            yield

    async def open_all() -> None:
        limits = httpx.Limits(max_connections=None)
        headers = {"Authorization": f"Bearer {KEY}"}
        client = httpx.AsyncClient(
            base_url=site.url, verify=site.trust, headers=headers, limits=limits, timeout=300
        )
        async with client, AsyncExitStack() as stack:
            for _ in range(STREAMS):
                await stack.enter_async_context(opened(client))
            assert len(site.submitted()) == STREAMS

    asyncio.run(open_all())
