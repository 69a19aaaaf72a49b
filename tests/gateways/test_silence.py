"""Long silences behind Envoy. They last while the tests of other files run, so this file comes last."""

from __future__ import annotations

import time

from gateways.conftest import SAID, Silences, Site
from router.conftest import Script

SILENCE_SECONDS = 17.0
"""Longer than Envoy's default limit on a request, 15 s, and than the time between two comments in a stream, 15 s."""


def test_neither_a_silent_answer_nor_a_silent_stream_is_cut(
    site: Site, silences: Silences, script: Script
) -> None:
    time.sleep(max(0.0, silences.began_at + SILENCE_SECONDS - time.monotonic()))
    silences.end(script.tokens)
    assert silences.received[False] == [SAID]
    assert silences.received[True][0] == ": waiting"
    assert silences.received[True][-1] == "data: [DONE]"
    assert site.envoy.stat("cluster.routers.upstream_rq_timeout") == 0
