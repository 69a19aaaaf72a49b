"""The proxy itself: without a fault it passes everything on as it is."""

from __future__ import annotations

import httpx

from campaign.proxy import FaultyProxy
from cluster.api import Api
from cluster.control_plane import ControlPlane

_COMPRESSED_FROM_BYTES = 128 * 1024
"""The API server compresses longer answers for clients that accept compression."""


def test_a_long_list_arrives_whole(controlled: ControlPlane) -> None:
    with Api(controlled) as api, FaultyProxy(controlled) as proxy:
        path = f"/api/v1/namespaces/{api.namespace('long-list')}/configmaps"
        for index in range(4):
            api.call("POST", path, {"metadata": {"name": f"c{index}"}, "data": {"text": "long " * 10_000}})
        answer = httpx.get(f"{proxy.url}{path}")
        assert len(answer.content) > _COMPRESSED_FROM_BYTES
        assert {item["metadata"]["name"] for item in answer.json()["items"]} >= {"c0", "c1", "c2", "c3"}
